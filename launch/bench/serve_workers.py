"""The load spread over several processes, where one cannot send or read as fast as it should.

Conversation k is worker k modulo N's; each warms itself up, then all begin at the same moment.
Knows processes and how their parts become one again; nothing of calls.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from launch.bench.serve_call import Target
from launch.bench.serve_drive import Driven, Share, Tally, drive, look
from launch.bench.serve_load import Load
from launch.bench.serve_prompts import PromptMaker
from moeserve.errors import MoeserveError

_START = 1.0  # seconds for processes to be there, beside what they take to import
_FIELDS = len(Tally().numbers())
Warm = tuple[Load, PromptMaker]


def drive_together(
    workers: int,
    load: Load,
    target: Target,
    maker: PromptMaker,
    tally: Tally,
    watch: Callable[[], None],
    keep_prompts: bool = False,
    warm: Warm | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Driven:
    """As `drive`, in so many processes; in this one where it is one. warm: what every other process
    does before, that does not count (this one has done it); None: only a look at the server. ready:
    called when all are warm, just before they start."""
    if workers == 1:
        if warm is None:
            look(target)
        ready()
        return drive(load, target, maker, tally, watch=watch, keep_prompts=keep_prompts)
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", workers * _FIELDS, lock=False)
    lines, processes = [], []
    for index in range(workers):
        ours, theirs = context.Pipe()
        share = Share(index, workers)
        arguments = (theirs, counts, share, load, target, maker, keep_prompts, warm)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        lines.append(ours)
        processes.append(process)
    try:
        for line in lines:
            _receive(line)  # it is there, and warm
        ready()
        with _ctrl_c_stops(processes):
            start = time.monotonic() + _START
            for line in lines:
                line.send(start)
            waiting = list(lines)
            parts: list[Driven] = []
            while waiting:
                there = connection.wait(waiting, 0.2)
                for line in [x for x in waiting if x in there]:
                    parts.append(_receive(line))
                    waiting.remove(line)
                sums = [sum(counts[field::_FIELDS]) for field in range(_FIELDS)]
                tally.sent, tally.ended, tally.failed, tally.tokens = sums
                watch()
    except BaseException:  # Ctrl-C before the start, or the second one: nothing is waited for
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return _joined(parts, workers)


@contextmanager
def _ctrl_c_stops(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """The first Ctrl-C has the workers bring what was done; the next one ends all."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(line: connection.Connection) -> Any:
    try:
        return line.recv()
    except EOFError:
        raise MoeserveError("a worker of the load generator ended without its results") from None


def _work(
    line: connection.Connection,
    counts: Any,
    share: Share,
    load: Load,
    target: Target,
    maker: PromptMaker,
    keep_prompts: bool,
    warm: Warm | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    tally = Tally()
    first = share.index * _FIELDS

    def tell() -> None:
        counts[first : first + _FIELDS] = tally.numbers()

    if warm is None:
        look(target)
    else:
        before, prompts = warm
        drive(before, target, prompts, Tally())
    line.send(None)
    start = line.recv()
    driven = drive(
        load,
        target,
        maker,
        tally,
        share=share,
        start=start,
        watch=tell,
        keep_prompts=keep_prompts,
        stop_signal=signal.SIGTERM,
    )
    tell()
    line.send(driven)


def _joined(parts: list[Driven], workers: int) -> Driven:
    whole = Driven(workers=workers)
    for part in parts:
        whole.calls += part.calls
        whole.prompts += part.prompts
        whole.lags += part.lags
        whole.left_out += part.left_out
    whole.seconds = max(x.seconds for x in parts)
    whole.cpu_share = max(x.cpu_share for x in parts)
    whole.interrupted = any(x.interrupted for x in parts)
    return whole
