"""LLM over ranks, started as `moeserve serve` starts them: the same tokens as in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch

from moeserve.errors import MoeserveError
from moeserve.llm import LLM
from moeserve.request import FinishReason, SamplingParams

SETTINGS = {"kv_tokens": 1024, "max_model_len": 128, "block_size": 4, "threads": 1}


@pytest.mark.dist
def test_two_ranks_give_what_one_process_gives(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "empty"))
    (tmp_path / "ep.py").write_text("raise RuntimeError('somebody else')")
    monkeypatch.chdir(tmp_path)  # a module of ours by name, where the ranks are started
    prompts = [[5 + i % 3, 6, 7, 8, 9, 10 + i] for i in range(10)]
    sampling = [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            seed=i,
            max_tokens=8 + i,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=0 if i == 3 else None,
        )
        for i in range(10)
    ]
    threads = torch.get_num_threads()
    with LLM(random_checkpoint, **SETTINGS) as alone:
        wanted = alone.generate(prompts, sampling)
        text = alone.generate("one text", SamplingParams(temperature=0, max_tokens=8))[0].text
    torch.set_num_threads(threads)
    made: list[LLM] = []
    # Its ranks outlive the thread that started them.
    thread = threading.Thread(
        target=lambda: made.append(LLM(random_checkpoint, ep=2, redundant_experts=4, **SETTINGS))
    )
    thread.start()
    thread.join()
    with made[0] as llm:
        assert list((tmp_path / "empty").iterdir()) == []  # what a kill would leave behind
        for _ in range(2):  # the second time with a warm prefix cache
            found = llm.generate(prompts, sampling)
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == theirs.logprobs
                assert ours.prompt_logprobs == theirs.prompt_logprobs
                assert ours.finish_reason is FinishReason.LENGTH
        assert llm.generate("one text", SamplingParams(temperature=0, max_tokens=8))[0].text == text
        assert [info["ranks"] for info in llm.info()] == [2, 2]
        stats = llm.stats()
        assert len(stats) == 2 and all(s.output_tokens > 0 for s in stats)
        before = sum(s.finished for s in stats)
        assert before == 21  # all of them, and nothing is held
        for count in (1, 3, 2):  # few or many, stopped by us or by themselves
            more = llm.generate([[5, 6, 7]] * count, SamplingParams(max_tokens=9, stop=text[:1]))
            before += len(more)
            stats = llm.stats()
            assert sum(s.finished for s in stats) == before
            assert not any(s.num_running or s.num_waiting or s.num_used_blocks for s in stats)
            assert len({s.step for s in stats}) == 1
        children = psutil.Process().children(recursive=True)
        assert len(children) >= 3  # launcher and ranks
    gone, alive = psutil.wait_procs(children, 10)
    assert not alive
    llm.close()


@pytest.mark.dist
def test_ranks_that_cannot_start_say_why(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(random_checkpoint, folder)
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(MoeserveError, match=shard.name):
        LLM(folder, ep=2, **SETTINGS)
    assert not psutil.Process().children(recursive=True)
