"""A checkpoint folder, looked at before anything starts: its path, config and tokenizer file.

Says what is wrong in the words of somebody who has just typed the path. Knows names of files and
what a config says of itself; reads no weights, needs no torch. What lies in the shards is checked
by `startup`.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import ConfigError, UnsupportedModel

WANTED = "a folder with config.json and *.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMES_SHOWN = 4
_DEPTH = 4  # as deep as the snapshots of a download cache lie
_FOLDERS_LOOKED_AT = 2000


def folder_problems(folder: Path, *, needs_text: bool) -> list[str]:
    """Everything that can be said at once, the most fundamental first; [] when nothing is wrong.

    needs_text: whether prompts are texts, which want a tokenizer (token ids do not).
    """
    where = f"model.checkpoint={str(folder)!r}"
    problem = _path_problem(folder)
    if problem is not None:
        return [f"{where}: {problem}"]
    _, problems = read_model(folder)
    if needs_text and not (folder / "tokenizer.json").is_file():
        problems.append(
            f"{where}: has no tokenizer.json; needed is the fast form "
            "(other forms, such as tiktoken.model, must be converted first)"
        )
    problem = _weights_problem(folder)
    return problems if problem is None else [*problems, f"{where}: {problem}"]


def read_model(folder: Path) -> tuple[DeepSeekConfig | None, list[str]]:
    """The folder's config, or None and why not: an architecture that is not built, odd values."""
    try:
        return DeepSeekConfig.from_hf(folder), []
    except ConfigError as error:
        return None, [f"model.checkpoint={error.source!r}: {p}" for p in error.problems]
    except (UnsupportedModel, OSError, ValueError) as error:
        return None, [f"model.checkpoint={str(folder)!r}: {error}"]


# -- the path -----------------------------------------------------------------------------------


def _path_problem(folder: Path) -> str | None:
    try:
        if folder.is_dir():
            return _folder_problem(folder)
        if folder.exists():
            return _file_problem(folder)
    except OSError as error:  # a folder that may not be listed, a name too long
        return f"cannot be read: {error.strerror}"
    return _absent(folder)


def _file_problem(file: Path) -> str:
    if file.suffix == ".gguf":
        return f"GGUF files are not read; wanted is {WANTED}"
    here = (file.parent / "config.json").is_file()
    return f"is a file; give its folder: {file.parent}" if here else f"is a file; give {WANTED}"


def _absent(path: Path) -> str:
    text = str(path)
    if path.is_symlink():
        return f"no such folder: a link to {path.readlink()}, which is not there"
    if text.startswith("~"):
        return f"no such folder: ~ is the shell's; write {Path.home()}{text[1:]}"
    close = _similar(path)
    if close is not None:
        return f"no such folder; did you mean {close}?"
    if text.startswith(("http:", "https:")):
        return "no such folder: nothing is downloaded; download the checkpoint, then give its path"
    if _HUB_NAME.fullmatch(text):
        return (
            "no such folder here; if it is a name on a model hub, download it first (hf download "
            f"{text} --local-dir {path.name}) and give that folder ({path.name})"
        )
    return "no such folder"


def _similar(path: Path) -> Path | None:
    """A neighbour with almost the same name."""
    if not path.parent.is_dir():
        return None
    names = [p.name for p in path.parent.iterdir() if p.is_dir()]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return path.parent / close[0] if close else None


def _folder_problem(folder: Path) -> str | None:
    if (folder / "config.json").is_file():
        return None
    names = sorted(p.name for p in folder.iterdir())
    if not names:
        return f"holds no config.json: the folder is empty; wanted is {WANTED}"
    found = _checkpoints_below(folder)
    if len(found) == 1:
        return f"holds no config.json; did you mean {found[0]}?"
    if found:
        return f"holds no config.json, but folders that do; give one of them: {_listed(found)}"
    if any(name.endswith(".gguf") for name in names):
        return f"holds no config.json: GGUF files are not read; wanted is {WANTED}"
    if any(name.endswith(".safetensors") for name in names):
        return "holds no config.json beside its *.safetensors: download that file as well"
    return f"holds no config.json (only {_listed(names)}); wanted is {WANTED}"


def _checkpoints_below(folder: Path) -> list[Path]:
    """Folders with a config.json somewhere below, nearest first; not every corner is looked at."""
    found: list[Path] = []
    level, looked_at = [folder], 0
    for _ in range(_DEPTH):
        below: list[Path] = []
        for parent in level:
            try:
                children = sorted(p for p in parent.iterdir() if p.is_dir())
            except OSError:
                continue  # not ours to read: nothing to propose there
            below += [p for p in children if not p.name.startswith(".")]
        looked_at += len(below)
        if found or looked_at > _FOLDERS_LOOKED_AT:
            break
        found = [p for p in below if (p / "config.json").is_file()]
        level = below
    return found


# -- the weights --------------------------------------------------------------------------------


def _weights_problem(folder: Path) -> str | None:
    """Files that are not there at all; what they hold is `startup`'s."""
    index = folder / INDEX_NAME
    if not index.exists() and not index.is_symlink():
        if any(folder.glob("*.safetensors")):
            return None
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".gguf"))
        return "holds no *.safetensors" + (
            f"; other forms are not read: {_listed(others)}" if others else ""
        )
    try:
        named = sorted({str(x) for x in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # told with the shards' own problems
    lost = [name for name in named if not (folder / name).is_file()]
    if not lost:
        return None
    return f"{len(lost)} of {len(named)} files that {INDEX_NAME} names are missing: {_listed(lost)}"


def _listed(names: list[str] | list[Path]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(str, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
