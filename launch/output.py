"""Whether a file or folder that a flag names can be written: found before the work whose result it
is to hold; and why one that is to be read is none. Knows files; nothing of what is in them. Only
Python's own library is used here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def no_file(path: Path) -> str | None:
    """What is there in place of a file to be read, for the end of an error; None: one is."""
    try:
        if path.is_file():
            return None
        if path.is_dir():
            return "is a folder, not a file"
        return "is no file" if path.exists() else "no such file"
    except (OSError, ValueError) as error:  # a folder that may not be looked into, a zero byte
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def unwritable(flag: str, file: Path | None) -> list[str]:
    """Why nothing could be written there; empty: it can. What lies there is left as it is."""
    if file is None:
        return []
    if not file.name:
        return [f"{flag} {str(file)!r}: names no file"]
    folder = file.parent
    try:
        if not folder.is_dir():
            return [f"{flag} {str(file)!r}: no such folder: {str(folder)!r}"]
        if file.is_dir():
            return [f"{flag} {str(file)!r}: is a folder"]
        if not os.access(folder, os.W_OK) and not file.exists():
            return [f"{flag} {str(file)!r}: the folder cannot be written to"]
        _open(file)
    except OSError as error:  # a name that is too long, a file of another user, a full disk
        return [f"{flag} {str(file)!r}: cannot be written: {error.strerror or error}"]
    except ValueError as error:  # a zero byte in the name
        return [f"{flag} {str(file)!r}: {error}"]
    return []


def unwritable_folder(flag: str, folder: Path | None) -> list[str]:
    """The same of a folder, made with all above it where it is not there yet. Nothing is made."""
    if folder is None:
        return []
    told = f"{flag} {str(folder)!r}"
    try:
        here = folder.absolute()
        while not _lies(here):
            here = here.parent
        if not here.is_dir():
            return [
                f"{told}: is no folder"
                if here == folder.absolute()
                else f"{told}: {str(here)!r} is no folder"
            ]
        _open(here / f".moeserve-{os.getpid()}")
    except OSError as error:
        return [f"{told}: cannot be written: {error.strerror or error}"]
    except ValueError as error:
        return [f"{told}: {error}"]
    return []


def _lies(path: Path) -> bool:
    """Whether anything is there. OSError for what cannot be, such as a name that is too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _open(file: Path) -> None:
    """OSError where it cannot be opened for writing. A file that was not there is gone again."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            # Nobody reads that pipe yet: whoever writes will wait for one.
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(file.stat().st_mode):
                raise
    else:
        file.unlink(missing_ok=True)
