"""Sizes: rounded up to what libraries align to; as people read them, in one unit everywhere, so
that they can be added up.

Pure. Imports nothing.
"""

from __future__ import annotations


def round_up(value: int, step: int) -> int:
    """The least multiple of step that is no less than value."""
    return -(-value // step) * step


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def held_and_passing(held: int, passing: int) -> str:
    """Of a `BufferPlan`; the two add up to the first, as shown."""
    tenths = round(held / 2**20 * 10) + round(passing / 2**20 * 10)
    return (
        f"{tenths / 10:.1f} MiB: {mib(held)} held and {mib(passing)} passing, while layers are in "
        "flight"
    )
