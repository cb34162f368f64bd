"""The offline API in this process, on a random checkpoint.

Over ranks: tests/dist/test_llm_dist.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, EngineFailed, InvalidRequest
from moeserve.llm import LLM, config_from
from moeserve.llm_backends import to_toml
from moeserve.request import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(random_checkpoint: Path) -> Iterator[LLM]:
    before = torch.get_num_threads()
    with LLM(random_checkpoint, kv_tokens=2048, max_model_len=256, threads=1) as made:
        yield made
    torch.set_num_threads(before)


def test_texts_and_token_ids_in_the_same_order(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompts = ["first", "second one", "third"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert len(output.token_ids) == 12 and output.finish_reason is FinishReason.LENGTH
        assert 0 < output.first_token_seconds <= output.total_seconds
    ids = [list(o.prompt_token_ids) for o in outputs]
    again = llm.generate(ids, GREEDY)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert again[0].prompt is None and again[0].num_cached_tokens >= 0
    (one,) = llm.generate(ids[1], GREEDY)
    assert one.token_ids == outputs[1].token_ids
    assert llm.generate("first", GREEDY)[0].token_ids == outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate("first", GREEDY)
    start = len(free.text) // 2
    stop = next(free.text[start : start + n] for n in (1, 2, 3) if free.text[start : start + n])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    (output,) = llm.generate("first", params)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert output.text == free.text[: free.text.index(stop)]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    (stats,) = llm.stats()
    assert stats.num_used_blocks == 0 and stats.num_running == 0


def test_one_sampling_each_and_stop_ids(llm: LLM) -> None:
    (free,) = llm.generate("first", GREEDY)
    stop_id = free.token_ids[4]
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop_id,)),
    ]
    short, stopped = llm.generate(["first"] * 2, params)
    assert short.token_ids == free.token_ids[:3]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop_id)
    with pytest.raises(InvalidRequest, match="sampling"):
        llm.generate(["first"], params)


def test_n_and_seeds(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=5)
    outputs = llm.generate(["a b", "c"], seeded, n=3)
    assert [o.prompt for o in outputs] == ["a b"] * 3 + ["c"] * 3
    assert len({tuple(o.token_ids) for o in outputs[:3]}) == 3
    alone = llm.generate("a b", SamplingParams(**_fields(seeded) | {"seed": 7}))
    assert alone[0].token_ids == outputs[2].token_ids
    free = llm.generate("a b", SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True), n=4)
    assert len({tuple(o.token_ids) for o in free}) == 4
    with pytest.raises(InvalidRequest, match="n=0"):
        llm.generate("a", n=0)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def test_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(**_fields(GREEDY) | {"logprobs": 2, "prompt_logprobs": 1})
    (output,) = llm.generate([[5, 6, 7, 8, 9]], params)
    assert [e.token_id for e in output.logprobs] == output.token_ids
    assert all(e.rank == 1 and e.top[0] == (e.token_id, e.logprob) for e in output.logprobs)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    told = [e.token_id for e in output.prompt_logprobs[1:] if e is not None]
    assert told == [6, 7, 8, 9]
    # Continuing by hand gives the logprob of the same token at the same place.
    longer = [5, 6, 7, 8, 9, *output.token_ids]
    (again,) = llm.generate([longer], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert again.prompt_logprobs is not None and again.token_ids == []
    for given, scored in zip(output.logprobs, again.prompt_logprobs[5:], strict=True):
        assert scored is not None and scored.logprob == given.logprob


def test_what_cannot_be_served_is_said_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats()[0].step
    for prompts, params, field in (
        ([["x"] * 0], GREEDY, "prompt"),
        ([list(range(3, 259))], GREEDY, "prompt"),
        ([[10**6]], GREEDY, "prompt"),
        (["fine", "fine"], SamplingParams(temperature=-1.0), "temperature"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(prompts, params)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match=r"prompts\[1\].*256 tokens"):
        llm.generate([[5], list(range(3, 259)), [5]], GREEDY)
    assert llm.stats()[0].step == steps
    assert len(llm.generate("fine", GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"stop": (5,)}, "stop"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop_token_ids": ("x",)}, "stop_token_ids"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {1: 1e300}}, "logit_bias"),
        ({"presence_penalty": 1e300}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
    ],
)
def test_sampling_that_python_lets_through_is_refused_by_name(
    llm: LLM, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("first", SamplingParams(**params))
    assert caught.value.field == field


def test_prompts_of_the_wrong_kind(llm: LLM) -> None:
    for prompts in (5, None, [["a"]], [[1.5]], [None], [[True]], [3, True]):
        with pytest.raises(InvalidRequest, match="prompts"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="sampling"):
        llm.generate("first", {"temperature": 0})  # type: ignore[arg-type]


def test_other_integers_lists_and_one_stop_string_are_fine(llm: LLM) -> None:
    ids = [5, 6, 7]
    (plain,) = llm.generate(ids, GREEDY)
    assert llm.generate(np.array(ids), GREEDY)[0].token_ids == plain.token_ids
    assert llm.generate(torch.tensor([ids]), GREEDY)[0].token_ids == plain.token_ids
    stop = plain.text[len(plain.text) // 2 :]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
    assert llm.generate(ids, params)[0].text == plain.text.removesuffix(stop)


def test_an_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (wanted,) = llm.generate("first", GREEDY)
    runner = llm._backend.engine.runner  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["first", "second"], GREEDY)
    (stats,) = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert llm.generate("first", GREEDY)[0].token_ids == wanted.token_ids


def test_without_a_tokenizer_ids_still_work(random_checkpoint: Path, tmp_path: Path) -> None:
    for file in random_checkpoint.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with LLM(tmp_path, kv_tokens=256, max_model_len=64) as bare:
        assert len(bare.generate([[3, 4]], GREEDY)[0].token_ids) == 12
        with pytest.raises(ConfigError, match="tokenizer"):
            bare.generate("text", GREEDY)
        with pytest.raises(InvalidRequest, match="stop"):
            bare.generate([[3]], SamplingParams(stop=("x",)))
    with pytest.raises(EngineFailed, match="closed"):
        bare.generate([[3, 4]], GREEDY)
    bare.close()


def test_settings_by_name(random_checkpoint: Path) -> None:
    config = config_from(random_checkpoint, 2, {"block_size": 4, "dtype": "float32"})
    assert (config.cache.block_size, config.model.dtype, config.parallel.ep) == (4, "float32", 2)
    with pytest.raises(ConfigError, match="blok_size=4: unknown setting; known: .*block_size"):
        config_from(random_checkpoint, 1, {"blok_size": 4})
    with pytest.raises(ConfigError, match="block_size"):
        config_from(random_checkpoint, 1, {"block_size": 0})


def test_settings_travel_as_toml(tmp_path: Path) -> None:
    config = config_from(
        tmp_path / 'a "quoted" \\ name', 2, {"block_size": 4, "deterministic": False, "mtp": True}
    )
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(config))
    assert ServeConfig.load(file, {}) == config
