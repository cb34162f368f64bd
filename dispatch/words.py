"""How refusals are worded: a number and its noun, valid values nearby, what a library raised.

Knows English. Knows nothing of what is refused, nor of any library.
"""

from __future__ import annotations

from typing import Any


def counted(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest(value: int, step: int, most: int | None = None) -> str:
    """Multiples that are valid: "nearest are 96 and 104" for 100 and 8; where nothing above 0 lies
    below, "nearest is 8". step: at least 1. most: what no valid value exceeds; at least a step."""
    below = max(value - value % step, 0)
    valid = [n for n in (below, below + step) if n and (most is None or n <= most)]
    if not valid and most is not None:
        valid = [most - most % step]
    return f"nearest {'are' if len(valid) > 1 else 'is'} {' and '.join(map(str, valid))}"


def raised(error: BaseException) -> str:
    """One line: the type and the first line that says something. An error of somebody else's
    library may not even tell its text."""
    kind = type(error).__name__
    try:
        lines = str(error).split("\n")
    except Exception:
        return f"{kind}: without a text"
    first = next((line.strip() for line in lines if line.strip()), "")
    return f"{kind}: {first}" if first else f"{kind}: no message"


def version_of(library: Any) -> str:
    """One line, whatever a package has there."""
    version = getattr(library, "__version__", None)
    text = "" if version is None else " ".join(str(version).split())
    return text or "of unknown version"
