"""Where prompts come from, and what goes to `LLM` and into the JSON object."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.generate import Ask, drafts_in_words, flat_settings, generate, read_ids, report
from launch.settings import OFFLINE, Given
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, InvalidRequest
from moeserve.llm import config_from


def ask(*prompts: str, file: Path | None = None) -> Ask:
    return Ask(prompts, file, False, 8, 0.0, 1.0, 0, (), False, True)


def prompts_of(checkpoint: Path, asked: Ask, capsys) -> list[str]:
    generate(given(checkpoint), replace(asked, max_tokens=1))
    return [o["prompt"] for o in json.loads(capsys.readouterr().out)["outputs"]]


def test_prompts_from_flags_files_and_stdin(random_checkpoint, tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    assert prompts_of(random_checkpoint, ask("a", file=file), capsys) == ["a", "from a file\n"]
    assert prompts_of(random_checkpoint, ask("a", file=Path("-")), capsys) == ["a", "from stdin"]
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    assert prompts_of(random_checkpoint, ask(), capsys) == ["from stdin"]


def refused(asked: Ask, checkpoint: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        generate(given(checkpoint), asked)
    return caught.value.problems


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa", b"", b" \n\n"])
def test_a_file_without_a_prompt_is_named(random_checkpoint, tmp_path, content):
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    (problem,) = refused(ask(file=file), random_checkpoint)
    assert problem.startswith(f"--prompt-file {file}: ")


@pytest.mark.parametrize("stdin", ["", "\n", "  \n \n", None, b"\xff"])
def test_standard_input_without_a_prompt(random_checkpoint, monkeypatch, stdin):
    texts = io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else None
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin) if isinstance(stdin, str) else texts)
    (problem,) = refused(ask(), random_checkpoint)
    assert "standard input" in problem


def test_all_that_is_wrong_with_an_ask_comes_at_once(random_checkpoint):
    asked = replace(ask("", "fine"), token_ids=("5,x",), temperature=-1.0, chat=True, logprobs=1)
    asked = replace(asked, top_k=-2)
    found = refused(replace(asked, as_json=False), random_checkpoint)
    for part in (
        "--temperature -1.0: ",
        "--top-k -2: ",
        "--logprobs",
        "--chat",
        "--prompt-ids '5,x'",
        "--prompt is e",
    ):
        assert any(part in line for line in found), (part, found)


def test_settings_reach_the_engine_unchanged(tmp_path):
    flags = {
        "model": {"checkpoint": tmp_path, "dtype": "float32"},
        "parallel": {"ep": 2, "redundant_experts": 3},
        "cache": {"block_size": 4},
        "engine": {"threads": 1},
    }
    config = ServeConfig.load(None, flags)
    assert config_from(tmp_path, 2, flat_settings(config)) == config


def output(tokens: int, first: float = 0.5, total: float = 1.5) -> SimpleNamespace:
    return SimpleNamespace(
        logprobs=[],
        prompt_token_ids=(1, 2), token_ids=list(range(tokens)), text="x" * tokens,
        finish_reason="length", error=None, num_cached_tokens=0,
        num_accepted=tokens // 2, num_rejected=2 * (tokens > 2),
        first_token_seconds=first, total_seconds=total,
    )  # fmt: skip


def test_report():
    config = ServeConfig.load(None, {"model": {"checkpoint": Path("/some/tiny")}})
    one = report(config, ["a"], [output(3)], 2.0)
    assert (one["model"], one["text"], one["token_ids"]) == ("tiny", "xxx", [0, 1, 2])
    assert one["timing"] == {
        "ttft": 0.5, "total": 1.5, "tokens_per_second": 2.0, "decode_tokens_per_second": 2.0
    }  # fmt: skip
    assert one["outputs"][0]["prompt"] == "a"
    two = report(config, ["a", "b"], [output(3), output(1)], 2.0)
    assert "text" not in two and [o["text"] for o in two["outputs"]] == ["xxx", "x"]
    assert two["overall"]["tokens_per_second"] == 2.0
    assert two["outputs"][1]["timing"]["decode_tokens_per_second"] is None
    assert (one["num_accepted"], one["outputs"][0]["num_rejected"]) == (1, 2)


def test_the_end_line_tells_drafts_where_there_were_any():
    assert drafts_in_words([output(5), output(2)]) == ", 3 of 5 drafts accepted"
    assert drafts_in_words([output(1)]) == ""


def given(checkpoint: Path) -> Given:
    return Given(checkpoint, None, {"cache": {"kv_tokens": 256}}, OFFLINE)


def test_loading_is_shown(random_checkpoint, capsys):
    generate(given(random_checkpoint), ask("some text"))
    out, err = capsys.readouterr()
    assert "MB/s" in err and len(json.loads(out)["token_ids"]) == 8


def test_quiet_leaves_the_answer_alone(random_checkpoint, capsys):
    quiet = {"cache": {"kv_tokens": 256}, "engine": {"quiet": True}}
    asked = replace(ask("some text"), as_json=False)
    generate(Given(random_checkpoint, None, quiet, OFFLINE), asked)
    out, err = capsys.readouterr()
    assert out.strip() and not err


def test_a_missing_tokenizer_is_found_before_weights_are_read(random_checkpoint, tmp_path, capsys):
    folder = tmp_path / "bare"
    shutil.copytree(random_checkpoint, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        generate(given(folder), ask("some text"))
    assert "weights" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked, error, said",
    [
        (replace(ask(), token_ids=("5,99999",)), InvalidRequest, "must be a token id from 0"),
        (ask("fine", "long " * 3000), InvalidRequest, "so a prompt may have at most 2047"),
        (replace(ask("x"), chat=True), ConfigError, "no chat template"),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_loading(
    random_checkpoint, tmp_path, capsys, asked, error, said
):
    folder = tmp_path / "no-template"
    shutil.copytree(random_checkpoint, folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(error, match=said):
        generate(given(folder), asked)
    assert "weights" not in capsys.readouterr().err


def test_token_ids_need_no_tokenizer(random_checkpoint, tmp_path, capsys):
    folder = tmp_path / "bare"
    shutil.copytree(random_checkpoint, folder)
    (folder / "tokenizer.json").unlink()
    asked = replace(ask(), token_ids=("5,6, 7", "8 9"), logprobs=2)
    generate(given(folder), asked)
    found = json.loads(capsys.readouterr().out)["outputs"]
    assert [o["prompt_token_ids"] for o in found] == [[5, 6, 7], [8, 9]]
    best = found[0]["logprobs"][0]
    assert best["token_id"] == found[0]["token_ids"][0] == best["top"][0][0]
    assert best["rank"] == 1 and best["top"][0][1] == best["logprob"] >= best["top"][1][1]


@pytest.mark.parametrize("text", ["5,x", "", ",", "1.5"])
def test_wrong_token_ids_are_refused(text):
    problems: list[str] = []
    read_ids(text, problems)
    assert [f"--prompt-ids {text!r}" in line for line in problems] == [True]


def test_what_is_said_after_a_stream_begins_a_line(
    random_checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stderr", sys.stdout)  # both on a terminal
    path = tmp_path / "load.npz"
    asked = replace(ask("a"), as_json=False, record_experts=path, max_tokens=2)
    generate(given(random_checkpoint), asked)
    assert f"\nmoeserve: expert load: {path}\n" in capsys.readouterr().out
