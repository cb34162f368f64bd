"""Words for people: a number with its noun. Knows English plurals in -s; nothing else."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 thread, 2 threads, 0 threads."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
