"""The attention half of TritonKernels: one layer as a chain of launches over the paged cache.

Absorbed form: projections, latents written (one launch), queries into latent space beside their
rotated part (no copy joins them), decode kernel, back through W_UV. Naive form: keys and values
expanded chunk by chunk. What a step's attention is cut into is planned once and kept for its other
layers: the plan belongs to the batch object.

Knows the kernels of MLA. Shape letters as in kernels/base.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from dispatch.fp8 import BLOCK
from models.deepseek.kernels.base import AbsorbedMla, LinearWeight, MlaShape, MlaWeights
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.gpu.choice import Failures
from models.deepseek.kernels.gpu.dense import dense_per_head
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaBackend,
    MlaProblem,
    MlaStep,
    StepDecoder,
    TritonMla,
)
from models.deepseek.kernels.gpu.mla_cache import write_latents
from models.deepseek.kernels.gpu.mla_decode import cuts_by_load
from models.deepseek.kernels.gpu.mla_guard import MlaGuard
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, known_lengths, plan_decode
from models.deepseek.kernels.gpu.mla_prefill import mla_prefill
from models.deepseek.kernels.gpu.mla_prefill_plan import PrefillPlan, plan_prefill
from models.deepseek.kernels.gpu.mla_rows import check_widths
from models.deepseek.kernels.gpu.norm_quant import rms_norm_quantise
from models.deepseek.kernels.gpu.rope import rope
from models.deepseek.kernels.gpu.scatter_rows import scatter_rows
from models.deepseek.kernels.gpu.triton_dense import TritonDense, heads_of
from models.deepseek.kernels.gpu.weights import TritonFp8LinearWeight
from models.interface import ForwardBatch

Plan = TypeVar("Plan")
PLANS_KEPT = 4  # of each kind


class PlansOfBatch:
    """The last few plans of each kind, each for its batch: halves of a step take turns.

    A batch is complete when made; one whose tensors are written to later counts as another, as far
    as torch tells (inference tensors do not). While a graph is captured a plan made before does not
    count: its kernels must be in the graph. A batch object is captured once."""

    def __init__(self) -> None:
        self._held: dict[object, list[tuple[Any, tuple[object, ...], Any]]] = {}

    def get(self, kind: object, batch: ForwardBatch, make: Callable[[], Plan]) -> Plan:
        state, held = _state(batch), self._held.setdefault(kind, [])
        for of_batch, then, plan in held:
            if of_batch() is batch and then == state:
                found: Plan = plan
                return found
        made = make()
        alive = [kept for kept in held if kept[0]() is not None and kept[0]() is not batch]
        self._held[kind] = [(weakref.ref(batch), state, made), *alive][:PLANS_KEPT]
        return made


def _state(batch: ForwardBatch) -> tuple[object, ...]:
    """What tells a batch from itself later."""
    tensors = batch.positions, batch.query_start, batch.context_len, batch.ancestors
    versions = [-1 if t is None or t.is_inference() else t._version for t in tensors]
    on_gpu = batch.positions.device.type == "cuda"
    return (*versions, on_gpu and torch.cuda.is_current_stream_capturing())


class TritonAttention(TritonDense):
    """decode_backends: libraries that may decode in place of our kernel, the first that fits; none
    in deterministic mode, where bits may not depend on the batch. graphs: steps are captured.
    gemms: as TritonDense's. fast: rows are cut by a step's load, not at fixed positions; not in
    deterministic mode. `choices` says which was taken, once there is one."""

    def __init__(
        self,
        device: torch.device,
        decode_backends: Sequence[MlaBackend] = (),
        graphs: bool = False,
        gemms: Gemms | None = None,
        fast: bool = False,
    ) -> None:
        super().__init__(device, gemms)
        self._fast = fast
        self._backends = (*decode_backends, TritonMla())
        self._graphs = graphs
        self._guard = MlaGuard()
        self._plans = PlansOfBatch()

    @property
    def choices(self) -> tuple[str, ...]:
        """A line for each kind of attention and of product so far: which backend has it now, and
        why no earlier one."""
        inner = [line for b in self._backends for line in getattr(b, "choices", ())]
        return tuple(dict.fromkeys((*self._guard.choices, *inner, *self.gemms.choices)))

    def tell_failures(self, say: Callable[[str], None]) -> None:
        """say is told a line whenever a library raises and another goes on in its place."""
        for one in (self._guard, self.gemms, *self._backends):
            if isinstance(failures := getattr(one, "failures", None), Failures):
                failures.say = say

    def misfit(self, shape: MlaShape, dtype: torch.dtype, deterministic: bool) -> str | None:
        try:
            check_widths(shape.rank, shape.rope_dim, dtype, "attention with")
        except ShapeRefused as refused:
            return str(refused)
        sizes = shape.nope_dim, shape.value_dim
        if not deterministic and any(n < 16 or n & (n - 1) for n in sizes):
            return (
                f"nope dim {sizes[0]}, value dim {sizes[1]}: attention in fast mode takes powers "
                "of two of 16 or more"
            )
        return None

    def fp8_cache_misfit(self, shape: MlaShape) -> str | None:
        if shape.rank % BLOCK:
            return f"kv_lora_rank={shape.rank}: triton kernels want a multiple of {BLOCK}"
        return None

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        return rope(x, positions, cos_sin)

    def write_cache(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """Slots of -1 are written nowhere. Not into an FP8 cache, which is quantised from fp32:
        write_latents."""
        scatter_rows(layer, latent, k_rope, slot_mapping)

    def write_latents(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, batch: ForwardBatch, norm: Tensor,
        eps: float, cos_sin: Tensor,
    ) -> None:  # fmt: skip
        write_latents(
            latent, k_rope, norm, eps, batch.positions, cos_sin, batch.slot_mapping, layer
        )

    def latent_attention(
        self, q_latent: Tensor, q_rope: Tensor, layer: Tensor, batch: ForwardBatch, scale: float
    ) -> Tensor:
        queries = torch.cat((q_latent, q_rope), dim=-1)
        return self._attend(queries, q_rope.shape[-1], layer, batch, scale)

    def naive_attention(
        self,
        q: Tensor,
        layer: Tensor,
        kv_b: LinearWeight,
        batch: ForwardBatch,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        """Lengths that the host does not know are asked of the device once a step. Sequences
        without trees of drafts only: those have too few new tokens to be here."""
        heads, rank = q.shape[1], kv_b.in_features
        nope = kv_b.out_features // heads - value_dim
        plan = self._plans.get("prefill", batch, lambda: _plan_prefill(batch))

        def expand(latents: Tensor) -> Tensor:
            return self.linear(latents, kv_b).view(-1, heads, nope + value_dim)

        return mla_prefill(
            q, layer, batch.block_tables, plan, expand, scale,
            rank=rank, nope=nope, value=value_dim,
        )[0]  # fmt: skip

    def absorbed_mla(self, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor) -> AbsorbedMla:
        w, s = weights, shape
        to_latent, from_latent = heads_of(w.w_uk, s.num_heads), heads_of(w.w_uv, s.num_heads)

        def run(x: Tensor, layer: Tensor, batch: ForwardBatch) -> Tensor:
            rows = x.shape[0]
            joined = self.linear(x, w.qkv_a)
            split = joined.shape[1] - s.rank - s.rope_dim
            q, latent, key = joined.tensor_split((split, split + s.rank), dim=1)
            self.write_latents(layer, latent, key, batch, w.kv_a_norm, s.norm_eps, cos_sin)
            if w.q_b is not None:
                assert w.q_a_norm is not None
                q = self._norm_linear(q, w.q_a_norm, s.norm_eps, w.q_b)
            q = q.view(rows, s.num_heads, s.nope_dim + s.rope_dim)
            queries = torch.empty(
                rows, s.num_heads, s.rank + s.rope_dim, dtype=x.dtype, device=x.device
            )
            dense_per_head(q[..., : s.nope_dim], to_latent, out=queries[..., : s.rank])
            rope(q[..., s.nope_dim :], batch.positions, cos_sin, out=queries[..., s.rank :])
            attended = self._attend(queries, s.rope_dim, layer, batch, s.scale)
            out = dense_per_head(attended, from_latent)
            return self.linear(out.view(rows, s.num_heads * s.value_dim), w.o)

        return run

    def _norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: LinearWeight) -> Tensor:
        """linear(rms_norm(x)); in e4m3 the norm is quantised as it is computed."""
        if not isinstance(weight, TritonFp8LinearWeight):
            return self.linear(self.rms_norm(x, norm, eps), weight)
        rows = rms_norm_quantise(x, norm, eps, ScaleFormat.F32_COLUMN, ue8m0=weight.ue8m0)
        return self.linear_of_codes(rows.values, rows.scales, weight, x.dtype)

    def _attend(
        self, queries: Tensor, rope_dim: int, layer: Tensor, batch: ForwardBatch, scale: float
    ) -> Tensor:
        """queries [T, H, c + r] -> [T, H, c]."""
        heads, rank = queries.shape[1], queries.shape[2] - rope_dim
        if queries.shape[0] != batch.num_tokens:
            raise KernelArgumentError(
                f"{queries.shape[0]} rows of queries: the batch has {batch.num_tokens}"
            )

        def make() -> StepDecoder:
            problem = MlaProblem(
                heads, rank, rope_dim, layer.shape[1], self._arch(),
                fp8=layer.dtype == torch.uint8, deterministic=len(self._backends) == 1,
                graphs=self._graphs, trees=batch.ancestors is not None,
            )  # fmt: skip
            lengths = known_lengths(batch) if len(self._backends) > 1 else None  # ours needs none
            fp8 = layer.dtype == torch.uint8
            cuts = cuts_by_load(heads, self.device, fp8) if self._fast else DETERMINISTIC
            step = MlaStep(
                plan_decode(batch, heads, rank, partitions=cuts), batch.block_tables, scale,
                None if lengths is None else lengths.tolist(),
            )  # fmt: skip
            return self._guard.step(problem, step, self._backends)

        kind = ("decode", heads, rank, rope_dim, scale)  # of the models that share these kernels
        return self._plans.get(kind, batch, make)(queries, layer)[0]

    def _arch(self) -> int:
        if self.device.type != "cuda":
            return 0
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor


def _plan_prefill(batch: ForwardBatch) -> PrefillPlan:
    known = batch if batch.host is None else batch.host
    starts, context = known.query_start.tolist(), known.context_len.tolist()
    new = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    return plan_prefill(context, new, batch.positions.device)
