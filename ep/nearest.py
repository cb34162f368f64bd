"""The nearest of several names to one that is none of them, for errors.

Pure. Knows text alone; nothing of what the names stand for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one that differs in case only or else the most similar; None where none is similar."""
    by_case = {known.casefold(): known for known in names}
    given = name.strip().casefold()
    close = [given] if given in by_case else difflib.get_close_matches(given, by_case, n=1)
    return by_case[close[0]] if close else None


def nearest_hint(name: str, names: Iterable[str]) -> str:
    """`; nearest: NAME` for the end of an error; nothing where none is similar."""
    close = nearest(name, names)
    return f"; nearest: {close}" if close else ""
