"""Whether a result could be written is known before it is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.output import unwritable, unwritable_folder


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    new, old, pipe = tmp_path / "new.json", tmp_path / "old.json", tmp_path / "pipe"
    old.write_text("kept")
    os.mkfifo(pipe)  # nobody reads it yet
    for file in (None, new, old, pipe, Path("/dev/null")):
        assert unwritable("--out", file) == []
    assert not new.exists() and old.read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none/a.json", "no such folder"),
        ("file/a.json", "no such folder"),
        ("folder", "is a folder"),
        ("n" * 300 + ".json", "cannot be written: File name too long"),
        ("loop/a.json", "no such folder"),
        ("dangling", "cannot be written: "),
    ],
)
def test_what_cannot_be_written_is_named_with_its_flag(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "none" / "a")
    (problem,) = unwritable("--plot", tmp_path / name)
    assert problem.startswith("--plot ") and said in problem


def test_names_that_are_none() -> None:
    assert unwritable("--out", Path("")) == ["--out '.': names no file"]
    assert "null" in unwritable("--out", Path("a\0b"))[0]


def test_a_folder_is_made_later_or_there_already(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path)
    for folder in (None, tmp_path, tmp_path / "a" / "b" / "c", tmp_path / "linked" / "d"):
        assert unwritable_folder("--output", folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["linked"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "file': is no folder"),
        ("file/a/b", "file' is no folder"),
        ("dangling/a", "dangling' is no folder"),
        ("loop", "is no folder"),
        ("n" * 300, "cannot be written: File name too long"),
        ("a\0b", "null"),
    ],
)
def test_folders_that_cannot_be_made_are_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (problem,) = unwritable_folder("--output", tmp_path / name)
    assert problem.startswith("--output ") and said in problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_another_user_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    (problem,) = unwritable_folder("--output", tmp_path / "a")
    tmp_path.chmod(0o700)
    assert "cannot be written: Permission denied" in problem
