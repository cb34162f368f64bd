"""Results that are kept as they come: whole at any time, whatever ends it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launch.bench import kept as module
from launch.bench.kept import Kept, is_plain, write_whole

linux = pytest.mark.skipif(sys.platform != "linux", reason="devices of Linux")


def test_each_document_replaces_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    kept = Kept(file)
    for number in range(3):
        kept.keep({"n": number}, last=False)
        assert json.loads(file.read_text()) == {"n": number}
    assert kept.problem == "" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    Kept(None).keep({})


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    kept = Kept(file)
    kept.keep({"n": 1}, last=False)

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "replace", full)
        kept.keep({"n": 2}, last=False)
    assert kept.problem == f"{file}: cannot be written: No space left on device"
    assert json.loads(file.read_text()) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    kept.keep({"n": 3})
    assert kept.problem == "" and json.loads(file.read_text()) == {"n": 3}


@linux
def test_what_cannot_be_replaced_is_written_once_at_the_end() -> None:
    reader, writer = os.pipe()
    kept = Kept(Path(f"/proc/self/fd/{writer}"))
    kept.keep({"n": 1}, last=False)
    kept.keep({"n": 2})
    os.close(writer)
    with os.fdopen(reader) as read:
        assert json.loads(read.read()) == {"n": 2}
    assert not is_plain(Path("/dev/stdout")) and not is_plain(Path("/dev/null"))
    kept = Kept(Path("/dev/full"))
    kept.keep({"n": 1}, last=False)
    assert kept.problem == ""
    kept.keep({"n": 2})
    assert kept.problem == "/dev/full: cannot be written: No space left on device"


def test_a_link_and_a_mode_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_takes_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    def refused(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.os, "replace", refused)
    write_whole(file, "new")
    assert file.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(PermissionError):
        write_whole(tmp_path / "b.json", "new")
