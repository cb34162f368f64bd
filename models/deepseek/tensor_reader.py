"""Single tensors of a checkpoint: read, checked for NaN, dequantised or kept in FP8, packed.

Knows: how FP8 blocks are undone, which bytes are counted, progress, what went wrong or was decided
on the way. Knows nothing of layers. Called from many threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from threading import Lock

import torch
from torch import Tensor

from models.deepseek.checkpoint import LoadPlan
from models.deepseek.fp8 import BLOCK, Fp8Rows, dequantise_weight, powers_of_two, scale_to_float
from models.deepseek.kernels.base import Kernels, LinearWeight
from models.deepseek.layout import SCALE_SUFFIX
from models.deepseek.shared import cut, dequantise_piece, piece_region

# (bytes done, bytes in all, MB/s so far); called from loader threads, one at a time.
Progress = Callable[[int, int, float], None]


class _Progress:
    """Serialises the callback and keeps it to ten calls a second."""

    def __init__(self, total: int, callback: Progress | None) -> None:
        self._total, self._callback = total, callback
        self._start, self._last = time.perf_counter(), 0.0
        self._done = 0
        self._lock = Lock()

    def update(self, done: int, last: bool = False) -> None:
        if self._callback is None:
            return
        now = time.perf_counter()
        with self._lock:
            done = self._done = max(done, self._done)
            if last or now - self._last >= 0.1:
                self._last = now
                seconds = max(now - self._start, 1e-9)
                self._callback(done, self._total, done / seconds / 1e6)


class TensorReader:
    """problems: faults that only the payload shows. notes(): what was decided for some tensors."""

    def __init__(
        self,
        plan: LoadPlan,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        keep_fp8: bool,
        progress: Progress | None,
    ) -> None:
        self.plan, self.config, self.index = plan, plan.config, plan.index
        self.kernels, self.dtype, self.device, self.keep_fp8 = kernels, dtype, device, keep_fp8
        self.problems: list[str] = []
        self._progress = _Progress(plan.total_bytes, progress)
        self._coarse_biases: list[str] = []
        self._unaligned: list[str] = []

    def finish(self) -> None:
        self._progress.update(self.index.bytes_read, last=True)
        self.index.close()

    def notes(self) -> list[str]:
        notes = []
        if self._coarse_biases:
            notes.append(
                f"{len(self._coarse_biases)} gate biases are stored in less than F32, which may "
                f"change choices of experts: {min(self._coarse_biases)}, ..."
            )
        if self._unaligned:
            notes.append(
                f"{len(self._unaligned)} FP8 weights are dequantised while loading: rows that the "
                f"kernels read together have different scales in them ({min(self._unaligned)}, ...)"
            )
        return notes

    def matrix(self, name: str) -> Tensor:
        """[out, in] in the model dtype (a view of the file when it is stored so)."""
        assert name in self.plan.hosted
        weight = self.index.read(name)
        if weight.dtype != torch.float8_e4m3fn:
            return self.finite(f"tensor {name}", weight.to(self.dtype))
        value = dequantise_weight(weight, self.scale(name), self.dtype)
        return self.finite(f"tensor {name}", value)

    def rows(self, name: str) -> Tensor | Fp8Rows:
        """As matrix, but rows of FP8 as they are where they may stay so."""
        if not self.stays_fp8(name):
            return self.matrix(name)
        assert name in self.plan.hosted
        return self._finite_rows(f"tensor {name}", self.index.read(name), self.scale(name))

    def piece(self, name: str, piece: int, stay: bool) -> Tensor | Fp8Rows:
        """A piece of the shared expert's tensor `name`, of which no other byte is read. stay: rows
        of FP8 as they are, where the piece begins with a block."""
        assert name in self.plan.hosted
        what, region = f"tensor {name}", piece_region(self.config, name, piece)
        values = self.index.read_part(name, region.rows, region.columns)
        if values.dtype != torch.float8_e4m3fn:
            return self.finite(what, values.to(self.dtype))
        blocks = region.blocks()
        stored = self.index.read_part(name + SCALE_SUFFIX, blocks.rows, blocks.columns)
        scale = self._checked_scale(name + SCALE_SUFFIX, stored)
        if stay:
            return self._finite_rows(what, values, scale)
        return self.finite(what, dequantise_piece(values, scale, region, self.dtype))

    def pieces_of(self, name: str) -> list[Tensor | Fp8Rows]:
        """All pieces of the shared expert's tensor `name`, read once."""
        whole = self.rows(name)
        regions = [piece_region(self.config, name, j) for j in range(self.config.n_shared_experts)]
        if isinstance(whole, Fp8Rows) and any(region.columns[0] % BLOCK for region in regions):
            self._unaligned.append(name)
            whole = whole.dequantise(self.dtype)
        return [cut(whole, region) for region in regions]

    def stays_fp8(self, name: str) -> bool:
        return self.keep_fp8 and self.index.tensors[name].dtype == "F8_E4M3"

    def scale(self, name: str) -> Tensor:
        """fp32 scales of the FP8 weight `name`."""
        return self._checked_scale(name + SCALE_SUFFIX, self.index.read(name + SCALE_SUFFIX))

    def scales_are_powers(self, names: Iterable[str]) -> bool:
        """Whether all scales of these FP8 weights, of whichever rank, are powers of two. Headers
        tell it of E8M0; the others are looked at until one is none: 1/16384 of the weights."""
        stored = [self.index.tensors[name + SCALE_SUFFIX] for name in names]
        told = self.index.peek(scale.name for scale in stored if scale.dtype != "F8_E8M0")
        return all(powers_of_two(scale_to_float(scale)) for scale in told)

    def vector(self, name: str) -> Tensor:
        value = self.index.read(name).to(torch.float32, copy=True).to(self.device)
        return self.finite(f"tensor {name}", value)

    def finite(self, what: str, value: Tensor) -> Tensor:
        """value: one NaN in it would poison the tokens that meet it, and then their neighbours."""
        # The extremes propagate NaN, and finding them is ten times quicker than isfinite.
        low, high = value.aminmax()
        if not math.isfinite(low) or not math.isfinite(high):
            self.problems.append(f"{what} holds NaN or infinity")
        return value

    def _checked_scale(self, name: str, stored: Tensor) -> Tensor:
        scale = scale_to_float(stored)
        if bool((scale < 0).any()):
            self.problems.append(f"scale {name} holds negative values")
        return self.finite(f"scale {name}", scale)

    def _finite_rows(self, what: str, values: Tensor, scale: Tensor) -> Fp8Rows:
        rows = Fp8Rows.of(values, scale)
        if not rows.is_finite(self.dtype):
            self.problems.append(f"{what} holds NaN or infinity")
        return rows

    def linear(self, name: str, *pieces: Tensor | Fp8Rows) -> LinearWeight:
        """Rows of the pieces joined: a copy in any case, so that no weight lives in the file."""
        quantised = tuple(p for p in pieces if isinstance(p, Fp8Rows))
        if quantised and len(quantised) == len(pieces):
            rows = Fp8Rows.join(quantised)
            moved = Fp8Rows(rows.values.to(self.device), rows.scales.to(self.device))
            kept = self.kernels.fp8_linear_weight(moved, self.dtype)
            if kept is not None:
                return kept
        if quantised:
            self._unaligned.append(name)
        plain = [p.dequantise(self.dtype) if isinstance(p, Fp8Rows) else p for p in pieces]
        joined = torch.cat(plain) if len(plain) > 1 else plain[0].clone()
        return self.kernels.linear_weight(joined.to(self.device), self.dtype)

    def done(self, names: Iterable[str]) -> None:
        for name in names:
            for stored in (name, name + SCALE_SUFFIX):
                if stored in self.plan.hosted:
                    self.index.release(stored)
        self._progress.update(self.index.bytes_read)

    def gate(self, p: str) -> tuple[Tensor, Tensor | None]:
        name = p + "weight"
        weight = self.index.read(name)
        if weight.dtype == torch.float8_e4m3fn:
            weight = dequantise_weight(weight, self.scale(name))
        gate = self.finite(f"gate {name}", weight.to(torch.float32, copy=True).to(self.device))
        if not self.config.has_gate_bias:
            return gate, None
        name = p + "e_score_correction_bias"
        bias = self.vector(name)
        stored = self.index.tensors[name].dtype
        if stored != "F32":
            self._coarse_biases.append(f"{name} ({stored})")
        return gate, bias

    def matrix_of(self, name: str, raw: Tensor) -> Tensor:
        """An own copy in the model dtype of a tensor that has been read already."""
        if raw.dtype == torch.float8_e4m3fn:
            value = dequantise_weight(raw, self.scale(name), self.dtype)
        else:
            value = raw.to(self.dtype, copy=True)
        return self.finite(f"tensor {name}", value).to(self.device)
