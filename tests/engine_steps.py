"""An engine stepped to its end: of a group of ranks, as every test over ranks does it, or alone."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from moeserve.engine import Engine
from moeserve.request import Request, TokenOutput


def steps_until_all_stop(
    engine: Engine, requests: Seq[Request], together: bool = True
) -> Iterator[list[TokenOutput]]:
    """What each step put out on this rank; every rank goes through it, with requests or without.
    together: all requests are asked for at once, else one after the other."""
    waiting = list(requests)
    while not engine.stopped:
        while waiting and (together or not engine.has_work):
            engine.add_request(waiting.pop(0))
        if not waiting and not engine._stop_asked:
            engine.request_stop()
        yield engine.step()


def steps_until_idle(
    engine: Engine, requests: Seq[Request], together: bool = True
) -> Iterator[list[TokenOutput]]:
    """The same of one rank, which is not asked to stop: it may be asked for more."""
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and (together or not engine.has_work):
            engine.add_request(waiting.pop(0))
        yield engine.step()
