"""What is said of a path that is no checkpoint, and of a checkpoint that is none of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.errors import ConfigError
from moeserve.folder import folder_problems
from moeserve.llm import LLM

ROOT = Path(__file__).parents[1]
TINY = ROOT / "checkpoints" / "tiny"


def only(folder: Path, needs_text: bool = True) -> str:
    (problem,) = folder_problems(folder, needs_text=needs_text)
    assert problem.startswith("model.checkpoint=")
    return problem


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The bundled checkpoint as links that a test may remove."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in TINY.glob("*.*"):
        (folder / file.name).symlink_to(file)
    return folder


def test_a_whole_checkpoint_has_no_problem(tiny: Path) -> None:
    assert folder_problems(tiny, needs_text=True) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_of_a_checkpoint_names_its_folder(tiny: Path, name: str) -> None:
    assert f"is a file; give its folder: {tiny}" in only(tiny / name)


def test_other_files(tmp_path: Path) -> None:
    for name, said in (("model.gguf", "GGUF"), ("notes.txt", "is a file; give a folder with")):
        (tmp_path / name).write_text("")
        assert said in only(tmp_path / name)


def test_a_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = only(Path("deepseek-ai/DeepSeek-V2-Lite"))
    assert "no such folder here" in said and "download it first" in said
    assert "hf download deepseek-ai/DeepSeek-V2-Lite --local-dir DeepSeek-V2-Lite" in said
    for other in ("gone", "a/b/c", "/a/b", "./a", "../a"):
        assert "download" not in only(Path(other)), other


def test_what_is_not_there(tiny: Path) -> None:
    assert f"did you mean {tiny}?" in only(tiny.parent / "tinny")
    assert "~ is the shell's" in only(Path("~/no/such"))
    assert "nothing is downloaded" in only(Path("https://some.where/model"))
    link = tiny.parent / "link"
    link.symlink_to("nowhere")
    assert "a link to nowhere" in only(link)


def test_folders_without_a_config(tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "the folder is empty" in only(empty)
    (tiny / "config.json").unlink()
    assert "beside its *.safetensors" in only(tiny)
    for file in tiny.glob("*.safetensors"):
        file.unlink()
    assert "holds no config.json (only " in only(tiny)


def test_a_folder_of_folders(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--some--one"
    (cache / "blobs").mkdir(parents=True)
    snapshots = cache / "snapshots"
    snapshots.mkdir()
    (snapshots / "0123abc").symlink_to(tiny)
    for folder in (cache, snapshots):
        assert only(folder).endswith(f"did you mean {snapshots / '0123abc'}?")
    (snapshots / "4567def").symlink_to(tiny)
    said = only(cache)
    assert "give one of them" in said and "0123abc" in said and "4567def" in said


def test_all_problems_at_once_and_the_architecture_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_text("")
    first, second, third = folder_problems(tmp_path, needs_text=True)
    assert "'llama' cannot be served" in first and "Supported" in first
    assert "has no tokenizer.json" in second
    assert "holds no *.safetensors" in third and "pytorch_model.bin" in third
    assert len(folder_problems(tmp_path, needs_text=False)) == 2


def test_missing_shards_are_counted(tiny: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    shard = sorted(tiny.glob("*.safetensors"))[0]
    shard.unlink()
    tokenizer, weights = folder_problems(tiny, needs_text=True)
    assert "tokenizer.json" in tokenizer
    assert "1 of 2 files" in weights and shard.name in weights


def test_a_broken_config(tiny: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    (tiny / "config.json").unlink()
    (tiny / "config.json").write_text(json.dumps(config | {"hidden_size": -1, "vocab_size": "x"}))
    found = folder_problems(tiny, needs_text=True)
    assert any("hidden_size" in p for p in found) and any("vocab_size" in p for p in found)
    (tiny / "config.json").write_text("{")
    assert "not readable as JSON" in only(tiny)


@pytest.mark.parametrize("ep", [1, 2])
def test_llm_says_the_same_before_it_starts_anything(tmp_path: Path, ep: int) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="'llama' cannot be served"):
        LLM(tmp_path, ep=ep)


def test_looking_at_a_folder_needs_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from moeserve.folder import folder_problems;"
        f"folder_problems(Path({str(TINY)!r}), needs_text=True); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
