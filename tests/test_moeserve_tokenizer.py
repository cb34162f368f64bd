"""bos rules, special tokens, and refusals of broken folders."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from moeserve.errors import ConfigError, InvalidRequest
from moeserve.server.rehearsal import write_tokenizer
from moeserve.tokenizer import Tokenizer


def change_config(folder: Path, **changes: object) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return Tokenizer(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def test_plain_prompts_get_bos_once_and_only_when_asked(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("hello", add_special_tokens=True) == [0, *plain]
    assert tokenizer.encode("<s>hello", add_special_tokens=True) == [0, *plain]
    assert tokenizer.encode("<s>hello", add_special_tokens=False) == [0, *plain]
    assert tokenizer.encode("", add_special_tokens=True) == [0]
    without = change_config(folder, add_bos_token=False)
    assert without.encode("hello", add_special_tokens=True) == plain
    silent = change_config(folder, add_bos_token=None)  # the post-processor decides: it adds none
    assert silent.encode("hello", add_special_tokens=True) == plain


def test_text_that_is_no_unicode_is_a_wrong_prompt(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    with pytest.raises(InvalidRequest, match="prompt=.*valid Unicode"):
        tokenizer.encode("caf\udcff", add_special_tokens=True)
    assert tokenizer.encode("caf\u00e9", add_special_tokens=False)


def test_special_tokens_as_strings_or_objects(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2}


def test_vocabulary_is_what_the_model_has_rows_for(folder: Path) -> None:
    assert Tokenizer(folder).vocab_size == 640
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    assert Tokenizer(folder).vocab_size == 300
    (folder / "config.json").unlink()
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == tokenizer.fast.get_vocab_size() > 300


def test_long_texts_give_the_same_ids_off_the_loop(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    text = "hello world 🎉 " * 2000
    got = asyncio.run(tokenizer.encode_async(text, add_special_tokens=True))
    assert got == tokenizer.encode(text, add_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", None), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[1]")],
)
def test_broken_files_are_refused_by_name(folder: Path, name: str, content: str | None) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        Tokenizer(folder)
