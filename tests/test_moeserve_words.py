"""Numbers with their nouns."""

from __future__ import annotations

from moeserve.words import counted


def test_one_is_singular():
    assert [counted(n, "thread") for n in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
