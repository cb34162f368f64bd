"""Who decodes a step when several could: the first that takes it, and ours when a library fails.

`MlaGuard` asks candidates in order. One that refuses is passed over for this step; one that raises,
while its step is made or at any call, makes way for the next, now and from then on, and a line says
so: choice.py's `Failures`. `choices` names all that is decided now, each once. As gemm_choice.py
does for products; knows no library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.choice import (
    Failures,
    at_most,
    chosen,
    nobody_goes_on,
    nothing_fits,
    passed_over,
    refusal_of,
)
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaBackend,
    MlaProblem,
    MlaStep,
    StepDecoder,
    TritonMla,
)


class MlaGuard:
    """Of one TritonAttention, or of one table. Steps are told apart by their rows, as `at_most`
    files them."""

    def __init__(self) -> None:
        self.failures = Failures()
        # Lines, with the backend, problem and sizes of steps that each is of.
        self._lines: dict[str, tuple[str, MlaProblem, set[int]]] = {}

    @property
    def choices(self) -> tuple[str, ...]:
        """A line for each kind of step so far: who decodes now, and why no earlier candidate."""
        return tuple(self._lines)

    def step(
        self,
        problem: MlaProblem,
        step: MlaStep,
        candidates: Sequence[MlaBackend],
        what: str = "mla decode",
    ) -> StepDecoder:
        """what: how lines begin. ShapeRefused with all reasons when every one refuses."""
        return self._step(problem, step, candidates, what, False)

    def _step(
        self,
        problem: MlaProblem,
        step: MlaStep,
        candidates: Sequence[MlaBackend],
        what: str,
        failed: bool,
    ) -> StepDecoder:
        """failed: whether one has just been left: then it is said who is taken."""
        size, device = at_most(step.plan.num_rows), step.tables.device
        passed: list[str] = []
        for backend in candidates:
            name = backend.name
            why = self.failures.why(name, problem, size) or refusal_of(backend, problem)
            if why is None:
                try:
                    decode = backend.step(problem, step)
                except ShapeRefused as refused:  # this step only
                    why = str(refused)
                except Exception as error:
                    self._left(error, name, problem, size, device)
                    if nobody_goes_on(device):
                        raise
                    why, failed = self.failures.why(name, problem, size), True
            if why is not None:
                passed.append(passed_over(name, why))
                continue
            line = chosen(what, name, passed)
            self._lines.setdefault(line, (name, problem, set()))[2].add(size)
            if failed:
                self.failures.say(line)
            if isinstance(backend, TritonMla):
                return decode
            return self._guarded(problem, step, candidates, what, name, decode)
        raise nothing_fits(what, passed)

    def _guarded(
        self,
        problem: MlaProblem,
        step: MlaStep,
        candidates: Sequence[MlaBackend],
        what: str,
        name: str,
        first: StepDecoder,
    ) -> StepDecoder:
        size = at_most(step.plan.num_rows)
        now = first

        def decode(q: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal now
            if now is first and self.failures.why(name, problem, size) is not None:
                now = self.step(problem, step, candidates, what)  # it raised in another step
            if now is not first:
                return now(q, layer)
            try:
                out = first(q, layer)
            except Exception as error:  # of whatever kind that leaves the device as it was
                self._left(error, name, problem, size, q.device)
                if nobody_goes_on(q.device):
                    raise
                now = self._step(problem, step, candidates, what, True)
                return now(q, layer)
            self.failures.did(name, problem)
            return out

        return decode

    def _left(
        self, error: Exception, name: str, problem: MlaProblem, size: int, device: torch.device
    ) -> None:
        """Note that it raised, and drop the lines that say it decodes."""
        kept = self.failures.take(error, name, problem, size, device)
        for line, (of_name, of_problem, sizes) in list(self._lines.items()):
            if (of_name, of_problem) == (name, problem):
                sizes.intersection_update(sizes - {size} if kept else ())
                if not sizes:
                    del self._lines[line]
