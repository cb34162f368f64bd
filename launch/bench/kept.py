"""Results kept in a file as they come, so that what ends a benchmark early takes none along.

Knows files; nothing of what is kept in them. Only Python's own library is used here.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

# Why a folder takes no new file although one that lies in it may be written.
_NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


class Kept:
    """One JSON document that grows. What cannot be written is told in `problem`, never raised: the
    figures are shown all the same. None: no file was asked for."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.problem = ""

    def keep(self, document: dict[str, Any], last: bool = True) -> None:
        """last: nothing comes after it. What cannot be replaced (a pipe, a device) is written then,
        once; a plain file is whole each time, whoever reads it when."""
        if self.file is None or not (last or is_plain(self.file)):
            return
        try:
            write_whole(self.file, json.dumps(document, indent=1, default=str) + "\n")
        except OSError as error:
            self.problem = f"{self.file}: cannot be written: {error.strerror or error}"
        else:
            self.problem = ""


def is_plain(file: Path) -> bool:
    """Whether what lies there can be replaced: no pipe, no device, no descriptor of a process."""
    if str(file.absolute()).startswith(("/dev/", "/proc/")):
        return False
    return not file.exists() or file.is_file()


def write_whole(file: Path, text: str) -> None:
    """OSError where it cannot be. Readers find what was there before or all of `text`, however this
    ends: it is written beside and renamed. What is not plain is written as it is."""
    if not is_plain(file):
        file.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(file))  # a link goes on to be one
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:
        if error.errno not in _NO_NEW_FILE or not target.exists():
            raise
        target.write_text(text, encoding="utf-8")
    finally:
        beside.unlink(missing_ok=True)
