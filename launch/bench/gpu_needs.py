"""What `scripts/gpu_check.py` needs beside Python, and what to carry to a machine that lacks it.

Knows packages and how they are brought along. It is read where nothing is installed: only Python's
own library is used here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

FOLDER = "carried"  # in the root of the repository
# With these versions what is carried was tried; each with all that it imports.
PINS = {
    "numpy": "2.4.6",
    "msgspec": "0.23.0",
    "psutil": "7.2.2",
    "pyzmq": "27.3.0",
    "rich": "15.0.0",
    "markdown-it-py": "4.3.0",
    "mdurl": "0.1.2",
    "pygments": "2.21.0",
    "pytest": "9.2.0",
    "pluggy": "1.7.0",
    "iniconfig": "2.3.1",
    "packaging": "26.4",
    "pytest-timeout": "2.4.0",
    "pydantic": "2.14.4",
    "pydantic-core": "2.50.5",
    "annotated-types": "0.8.0",
    "typing-inspection": "0.4.5",
    "typing-extensions": "4.16.0",
    "typer": "0.29.2",
    "shellingham": "1.5.4",
    "annotated-doc": "0.0.7",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "scipy": "1.17.1",
}
# What they say they need and do not, as it is used here: a hub to download from.
NOT_WANTED = {"huggingface-hub"}
# Of the machine itself: nothing brings them along.
GIVEN = {"torch": "torch (2.11 or later, for CUDA)", "triton": "triton (3.6 or later, with torch)"}
# Module: the packages that bring it. Without the first ones nothing runs, without the others the
# checks that want them fail.
_PYDANTIC = "pydantic pydantic-core annotated-types typing-inspection typing-extensions"
_RICH = "rich markdown-it-py mdurl pygments"
NEEDED = {
    "numpy": "numpy",
    "msgspec": "msgspec",
    "psutil": "psutil",
    "zmq": "pyzmq",
    "rich.markdown": _RICH,
    "pytest": "pytest pluggy iniconfig packaging pygments",
}
WANTED = {
    "pytest_timeout": "pytest-timeout",
    "pydantic": _PYDANTIC,
    "typer": f"typer shellingham annotated-doc {_RICH} {_PYDANTIC}",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "scipy.optimize": "scipy",
}
_PIP = """pip install --target {folder} --python-version 3.12 --only-binary=:all: --no-deps \\
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\
        {packages}"""


def pinned(packages: Iterable[str] = PINS) -> str:
    """For pip: each package once, with its version."""
    return " ".join(f"{name}=={PINS[name]}" for name in dict.fromkeys(packages))


def how_to_carry(packages: str) -> str:
    """A command for a machine with a network."""
    return _PIP.format(folder=FOLDER, packages=packages)


def broken(modules: Iterable[str]) -> dict[str, str]:
    """Those that cannot be imported here, and why: a module that is there may lack what it needs
    itself, so each is imported for real."""
    found = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # of another Python, without its library, broken by another
            text = str(error).strip().splitlines()
            found[name] = text[0] if text else type(error).__name__
    return found


def lines(found: Mapping[str, str]) -> list[str]:
    """What is missing, why, and what to do about it."""
    said = [f"missing: {', '.join(found)}"]
    said += [f"  {name}: {why}" for name, why in found.items()]
    own = [text for name, text in GIVEN.items() if name in found]
    if own:
        said.append(f"the machine itself must have {' and '.join(own)}, for this Python")
    carried = {**NEEDED, **WANTED}
    packages = [p for name in found if name in carried for p in carried[name].split()]
    if packages:
        said.append(f"bring along, in a folder {FOLDER} in the root: {pinned(packages)}")
    return said
