"""A problem names what the user gave: the flag, the file and its key, the argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.settings import SERVING, Given
from moeserve.errors import ConfigError

TOML = """
[parallel]
ep = 0
redundant_experts = -1
[cache]
kv_tokens = 10
blok = 3
[server]
port = 1
[nonsense]
x = 1
"""


@pytest.fixture
def given(tmp_path: Path) -> Given:
    file = tmp_path / "settings.toml"
    file.write_text(TOML)
    flags = {"parallel": {"ep": "two"}, "model": {"mtp": False}, "server": {"host": "nowhere"}}
    return Given(tmp_path / "gone", file, flags, SERVING)


@pytest.mark.parametrize(
    "inner, outer",
    [
        ("parallel.ep='two': must be a whole number", "--ep 'two': must be a whole number"),
        ("rank 3: parallel.ep=2: no", "rank 3: --ep 2: no"),
        ("model.mtp: no such layer", "--no-mtp: no such layer"),
        ("parallel.redundant_experts=-1: low", "FILE: parallel.redundant_experts=-1: low"),
        ("rank 1: cache.kv_tokens=10: few", "rank 1: FILE: cache.kv_tokens=10: few"),
        ("cache: kv_tokens=10: gives 0 blocks", "FILE: cache.kv_tokens=10: gives 0 blocks"),
        ("cache.blok=3: unknown setting", "FILE: cache.blok=3: unknown setting"),
        ("nonsense={'x': 1}: unknown", "FILE: nonsense={'x': 1}: unknown"),
        ("[server] is not used by this command", "FILE: [server] is not used by this command"),
        ("server.host=x, server.port=1: taken", "--host x, server.port=1: taken"),
        ("model.checkpoint='/gone': no such folder", "CHECKPOINT '/gone': no such folder"),
        ("parallel.dispatch='auto': none runs", "parallel.dispatch='auto': none runs"),
        ("config=x.toml: cannot be read", "--config x.toml: cannot be read"),
        ("see model.layers.0.mlp.weight", "see model.layers.0.mlp.weight"),
    ],
)
def test_names(given: Given, inner: str, outer: str) -> None:
    assert given.in_users_words(inner) == outer.replace("FILE", str(given.config))


def test_without_a_file_and_without_an_argument() -> None:
    given = Given(None, None, {"cache": {"kv_tokens": "10", "kv_memory": "1"}}, SERVING)
    said = given.in_users_words("cache.kv_memory and cache.kv_tokens: give one of them, not both")
    assert said == "--kv-memory and --kv-tokens: give one of them, not both"
    assert given.in_users_words("model.checkpoint: not given").startswith("CHECKPOINT: ")
    assert given.in_users_words("cache: kv_tokens=10: few") == "--kv-tokens 10: few"


def test_checkpoint_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[model]\ncheckpoint = '/gone'\n")
    said = Given(None, file, {}, SERVING).in_users_words("model.checkpoint='/gone': no such folder")
    assert said == f"{file}: model.checkpoint='/gone': no such folder"


def test_a_file_that_cannot_be_read_is_no_second_problem(tmp_path: Path) -> None:
    given = Given(None, tmp_path / "gone.toml", {}, SERVING)
    with pytest.raises(ConfigError) as caught:
        given.resolve()
    assert given.in_users_words(caught.value.problems[0]).startswith("--config ")
