"""Who decodes a step when several could: the first that takes it, and ours when a library fails.

`MlaGuard` asks candidates in order. One that refuses is passed over for this step; one that raises,
while its step is made or at its first call, is not asked for that problem again, and the next goes
on in its place. `choices` names all that was decided, each once. As gemm_choice.py does for
products; knows no library.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.deepseek.kernels.gpu.choice import chosen, nothing_fits, passed_over, why_failed
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaBackend,
    MlaProblem,
    MlaStep,
    StepDecoder,
    TritonMla,
)


class MlaGuard:
    """Of one TritonAttention, or of one table."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, MlaProblem]] = set()
        self._failed: dict[tuple[str, MlaProblem], str] = {}
        self._reasons: dict[str, None] = {}

    @property
    def choices(self) -> tuple[str, ...]:
        """A line for each kind of step so far: who decodes, and why no earlier candidate."""
        return tuple(self._reasons)

    def step(
        self,
        problem: MlaProblem,
        step: MlaStep,
        candidates: Sequence[MlaBackend],
        what: str = "mla decode",
    ) -> StepDecoder:
        """what: how lines begin. ShapeRefused with all reasons when every one refuses."""
        passed: list[str] = []
        for backend in candidates:
            key = backend.name, problem
            why = self._failed.get(key) or backend.refusal(problem)
            if why is None:
                try:
                    decode = backend.step(problem, step)
                except ShapeRefused as refused:  # this step only
                    why = str(refused)
                except Exception as error:
                    why = self._failed[key] = why_failed(error)
            if why is not None:
                passed.append(passed_over(backend.name, why))
                continue
            self._reasons[chosen(what, backend.name, passed)] = None
            if isinstance(backend, TritonMla) or key in self._proven:
                return decode
            return self._guarded(problem, step, candidates, what, backend.name, decode)
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
        key = name, problem
        now = first

        def decode(q: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal now
            if now is not first or key in self._proven:
                return now(q, layer)
            try:
                out = first(q, layer)
            except Exception as error:  # of whatever kind: the next goes on, and a line says so
                self._failed[key] = why_failed(error)
                now = self.step(problem, step, candidates, what)
                return now(q, layer)
            self._proven.add(key)
            return out

        return decode
