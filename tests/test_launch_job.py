"""The launcher of a machine's ranks: what a stop does before there are any."""

from __future__ import annotations

import signal

import pytest

from launch import job


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_stop_before_the_first_rank_waits_for_it(monkeypatch, ends_first):
    ranks, told = job._Ranks(2, ["serve"], None), []
    looks = iter([[], [], [object()]])

    def children() -> list[object]:
        found = next(looks)
        if ends_first:
            ranks._ended.set()
        return found

    monkeypatch.setattr(job, "_children", children)
    monkeypatch.setattr(job, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(job, "_to_children", told.append)
    ranks.drain()
    assert told == [signal.SIGTERM]
    assert len(list(looks)) == (2 if ends_first else 0)
