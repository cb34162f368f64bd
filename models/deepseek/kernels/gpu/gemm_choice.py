"""Whose turn a product of e4m3 is: the first backend that fits, or who won in a table.

`Gemms` has the three calls of our kernels; TritonDense makes all its FP8 products through it. What
is decided is a pure function of shapes, so that a captured step holds what an eager one runs; how
rows had better lie for who will read them (`alignment`, `scale_format`) is asked before. With
a table the nearest shape that was measured decides, among backends that fit; ours where the table
knows nothing like it. A backend that raises (no compiler for its own kernels, say) makes way for
ours, now and from then on, and a line says so: choice.py's `Failures`. `choices` names all that is
decided now, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.kernels.gpu.choice import Failures, at_most, nobody_goes_on, refusal_of
from models.deepseek.kernels.gpu.gemm_adapters import (
    GemmBackend,
    GemmProblem,
    TritonGemm,
    choose_gemm,
    problem_of,
)
from models.deepseek.kernels.gpu.grouped_gemm import ALIGNMENT

# How bench/gemms.py calls what is measured.
FAMILIES = {"dense": "fp8_gemm", "contiguous": "grouped_contiguous", "masked": "grouped_masked"}
OURS = TritonGemm.name
Run = Callable[[GemmBackend], Tensor]


class Table(Protocol):
    """bench.winners.Winners, as far as it is read here."""

    def pick(self, kernel: str, among: Sequence[str], **shape: int) -> str | None: ...
    def measured_at(self, kernel: str, **shape: int) -> str: ...


class Gemms:
    """backends: libraries in place of our kernels, none in deterministic mode. table: who won at
    which shape (None: the first that fits). arch: as GemmProblem's."""

    def __init__(
        self, arch: int = 0, backends: Sequence[GemmBackend] = (), table: Table | None = None
    ) -> None:
        self._arch = arch
        self._backends = tuple(backends)
        self._ours: GemmBackend = TritonGemm()
        self._table = table
        self._chosen: dict[tuple[GemmProblem, int], tuple[GemmBackend, str]] = {}  # with a line
        self.failures = Failures()
        self._alignments: dict[str, int] = {}  # of backends

    @property
    def choices(self) -> tuple[str, ...]:
        """A line for each kind of product so far: which backend has it now, and why no other."""
        return tuple(dict.fromkeys(line for _, line in self._chosen.values()))

    def dense(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        *,
        ue8m0: bool = False,
        b_words: Tensor | None = None,
    ) -> Tensor:
        """As fp8_gemm. Here and below: ue8m0: all scales are powers of two; b_words: those of b
        once more, as libraries read them (`packs_weights`)."""

        def run(backend: GemmBackend) -> Tensor:
            return backend.dense(a, a_scales, b, self._for(backend, b_scales, b_words), dtype)

        if not self._backends:
            return run(self._ours)
        problem = problem_of("dense", a_scales, b, self._arch, dtype, ue8m0=ue8m0)
        return self._run(problem, a, a.shape[0], run)

    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        ends: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        *,
        alignment: int = ALIGNMENT,
        starts: Tensor | None = None,
        expected_rows: int | None = None,
        ue8m0: bool = False,
        b_words: Tensor | None = None,
    ) -> Tensor:
        """As grouped_gemm_contiguous; starts are multiples of the alignment."""

        def run(backend: GemmBackend) -> Tensor:
            return backend.contiguous(
                a, a_scales, b, self._for(backend, b_scales, b_words), ends, dtype,
                alignment=alignment, starts=starts, expected_rows=expected_rows,
            )  # fmt: skip

        if not self._backends:
            return run(self._ours)
        problem = problem_of(
            "contiguous", a_scales, b, self._arch, dtype, alignment=alignment, ue8m0=ue8m0
        )
        each = -(-a.shape[0] // max(1, b.shape[0])) if expected_rows is None else expected_rows
        return self._run(problem, a, each, run)

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        *,
        expected_rows: int | None = None,
        ue8m0: bool = False,
        b_words: Tensor | None = None,
    ) -> Tensor:
        """As grouped_gemm_masked."""

        def run(backend: GemmBackend) -> Tensor:
            return backend.masked(
                a, a_scales, b, self._for(backend, b_scales, b_words), counts, dtype,
                expected_rows=expected_rows,
            )  # fmt: skip

        if not self._backends:
            return run(self._ours)
        problem = problem_of("masked", a_scales, b, self._arch, dtype, ue8m0=ue8m0, room=a.shape[1])
        each = a.shape[1] if expected_rows is None else expected_rows
        return self._run(problem, a, each, run)

    def alignment(
        self,
        a_scales: Tensor,
        b: Tensor,
        dtype: torch.dtype,
        expected_rows: int,
        *,
        ue8m0: bool = False,
    ) -> int:
        """At multiples of what segments of about so many rows should begin for `contiguous` with b
        [e, N, K]: what a backend wants that would then be taken, else 1."""
        for backend in self._backends:
            if backend.name not in self._alignments:
                self._alignments[backend.name] = _alignment(backend)
            wanted = self._alignments[backend.name]
            if wanted > 1:
                problem = problem_of(
                    "contiguous", a_scales, b, self._arch, dtype, alignment=wanted, ue8m0=ue8m0
                )
                if self._taken(problem, expected_rows) is not self._ours:
                    return wanted
        return 1

    def scale_format(self, ue8m0: bool) -> ScaleFormat:
        """How the scales of rows should lie that are quantised for a grouped product: as libraries
        load them, where there are any."""
        if not self._backends:
            return ScaleFormat.F32_ROW
        packed = ue8m0 and self._arch == 100
        return ScaleFormat.UE8M0_COLUMN if packed else ScaleFormat.F32_COLUMN

    @property
    def packs_weights(self) -> bool:
        """Whether a library had better find weights' scales packed (weights.py's words)."""
        return bool(self._backends) and self._arch == 100

    def _for(self, backend: GemmBackend, b_scales: Tensor, b_words: Tensor | None) -> Tensor:
        return b_scales if b_words is None or backend is self._ours else b_words

    def _taken(self, problem: GemmProblem, rows: int) -> GemmBackend:
        bucket = at_most(rows)
        held = self._chosen.get((problem, bucket))
        if held is None:
            held = self._chosen[problem, bucket] = self._choose(problem, bucket)
        return held[0]

    def _run(self, problem: GemmProblem, a: Tensor, rows: int, run: Run) -> Tensor:
        backend = self._taken(problem, rows)
        if backend is self._ours:
            return run(backend)
        bucket = at_most(rows)
        try:
            out = run(backend)
        except Exception as error:  # of whatever kind that leaves the device as it was
            if self.failures.take(error, backend.name, problem, bucket, a.device):
                del self._chosen[problem, bucket]
            else:
                self._chosen = {k: v for k, v in self._chosen.items() if k[0] != problem}
            if nobody_goes_on(a.device):
                raise
            self._taken(problem, rows)
            self.failures.say(self._chosen[problem, bucket][1])
            return self._run(problem, a, rows, run)
        self.failures.did(backend.name, problem)
        return out

    def _choose(self, problem: GemmProblem, rows: int) -> tuple[GemmBackend, str]:
        backends: list[GemmBackend] = [
            _Failed(b.name, why) if (why := self.failures.why(b.name, problem, rows)) else b
            for b in self._backends
        ]
        choice = choose_gemm(problem, [*backends, self._ours])
        if self._table is None or choice.backend is self._ours:
            return choice.backend, choice.reason
        able = {b.name: b for b in backends if refusal_of(b, problem) is None}
        size = {"rows": rows, "columns": problem.columns, "width": problem.width}
        if problem.form != "dense":
            size["experts"] = problem.experts
        family = FAMILIES[problem.form]
        name = self._table.pick(family, tuple(able), **size)
        at = self._table.measured_at(family, **size)
        who = f"{name} won at {at}" if name else f"{OURS}; nothing like it was measured"
        what = choice.reason.partition(":")[0]
        return able.get(name or OURS, self._ours), f"{what}, {rows} rows or fewer: {who}"


def _alignment(backend: GemmBackend) -> int:
    """1 for one that raises against its word: the product's choice says why it is not taken."""
    try:
        return backend.alignment()
    except Exception:
        return 1


class _Failed(TritonGemm):
    """In the place of a backend that raised."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    def refusal(self, problem: GemmProblem) -> str | None:
        return self._why
