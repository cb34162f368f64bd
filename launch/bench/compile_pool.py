"""Kernels compiled in a few processes, each answer as it comes; whatever ends it ends them too.

Knows processes and signals. What comes of a kernel: models/deepseek/kernels/gpu/aot.py; what is
made of the answers: kernels_compiled.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from launch.env import usable_cores
from launch.signals import die_with_parent

if TYPE_CHECKING:
    from models.deepseek.kernels.gpu.aot import CompileCase, CompileReport
    from models.deepseek.kernels.gpu.errors import CompileFailed

PROCESSES = 2  # a compiler keeps one core busy and holds some hundred MB
Task = tuple[int, int]  # index of a case in the registry, architecture
_DIED = "a process that compiled died before this was done (the compiler broke, or memory ran out)"


@dataclass(frozen=True)
class Failed:
    """A kernel that does not compile. error: all that the compiler said."""

    kernel: str
    config: str
    arch: str
    error: str

    @classmethod
    def of(cls, case: CompileCase, arch: int, error: CompileFailed) -> Failed:
        from models.deepseek.kernels.gpu.aot import ARCHS

        return cls(case.name, case.config, ARCHS[arch], str(error))

    @property
    def line(self) -> str:
        """Which, and the ends of what the compiler said: where it was, and what it was."""
        name = f"{self.kernel} ({self.config}) for {self.arch}: "
        told = self.error.removeprefix(name).splitlines()
        told = [line.strip() for line in told if line.strip()]
        return name + " ... ".join(told if len(told) < 2 else (told[0], told[-1]))


def need_compiler() -> None:
    """TritonMissing where kernels cannot be compiled here."""
    from models.deepseek.kernels.gpu.errors import TritonMissing
    from models.deepseek.kernels.gpu.language import INTERPRETED, need_triton

    need_triton()
    if INTERPRETED:
        raise TritonMissing("TRITON_INTERPRET is set: kernels are interpreted, none is compiled")


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds, as Ctrl-C does: processes are ended and files removed in order."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end this wait: a process that is half started would complain of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def compile_all(
    tasks: Sequence[Task], processes: int = PROCESSES
) -> Generator[tuple[Task, CompileReport | CompileFailed], None, None]:
    """Each as it is done, or why it does not compile, in as many processes as there are cores,
    `processes` at most. Closed before the end (close it), its processes are killed."""
    from models.deepseek.kernels.gpu.errors import CompileFailed

    if not tasks:
        return
    workers = max(1, min(processes, usable_cores(), len(tasks)))
    others = set(multiprocessing.active_children())
    with (
        tempfile.TemporaryDirectory(prefix="moeserve-compile-") as folder,
        ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),  # torch's threads survive no fork
            initializer=_begin,
            initargs=(os.getpid(), folder),
        ) as pool,
    ):
        waiting: dict[Future[CompileReport], Task] = {}
        unsent = []
        try:
            with _undisturbed():  # the first submit starts the processes
                for task in tasks:
                    try:
                        waiting[pool.submit(_compile, task)] = task
                    except BrokenProcessPool:
                        unsent.append(task)
            for task in unsent:
                yield task, CompileFailed(_DIED)
            for future in as_completed(waiting):
                try:
                    found: CompileReport | CompileFailed = future.result()
                except CompileFailed as error:
                    found = error
                except BrokenProcessPool:
                    found = CompileFailed(_DIED)
                yield waiting[future], found
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            pool.shutdown(cancel_futures=True)
            raise


def _begin(parent: int, folder: str) -> None:
    """In a process of the pool. Files of a compiler that is killed lie in the parent's folder."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent too
    tempfile.tempdir = folder


def _compile(task: Task) -> CompileReport:
    """In a process of the pool: the case is looked up there, as kernels cannot be sent."""
    from models.deepseek.kernels.gpu.aot import compile_case
    from models.deepseek.kernels.gpu.registry import all_cases

    index, arch = task
    return compile_case(all_cases()[index], arch)
