"""The shadowing guard: the five packages must resolve beside each other.

`models` and `launch` are common names; a folder or file of that name earlier on the path would be
imported in place of ours and fail far away from the cause. Knows import machinery only; must not
import anything of ours (that is what it protects).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("launch", "moeserve", "models", "dispatch", "ep")


class ShadowedPackage(ImportError):
    """One of our top-level names resolves to somebody else's file, or to none."""


def check_layout() -> None:
    """Raise ShadowedPackage, naming every file in the way, unless all five are ours."""
    home = Path(__file__).resolve().parent.parent
    problems = []
    for name in PACKAGES:
        found = _origin(name)
        if found is None:
            problems.append(f"{name}: not found; expected at {home / name}")
        elif found != home / name / "__init__.py":
            problems.append(f"{name}: {found} shadows {home / name / '__init__.py'}")
    if problems:
        raise ShadowedPackage(
            "moeserve's packages do not lie beside each other (is there a file or folder of the "
            "same name in the working directory or on PYTHONPATH?):\n  " + "\n  ".join(problems)
        )


def _origin(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # sys.modules holds something without a spec under this name
        return None
    if spec is None:
        return None
    if spec.origin:
        return Path(spec.origin).resolve()
    for folder in spec.submodule_search_locations or ():
        return Path(folder).resolve()
    return None
