"""The kernels a DeepSeek layer is made of, as a protocol with several implementations.

`torch` is the slow, obvious twin; `native` is C++ for CPUs (AVX-512 / AVX2 / portable). Both obey
law 5: a row's result depends on that row alone, never on how many rows come with it, on their
order, on the number of threads or on how a sequence was cut into chunks.

Knows: shapes, dtypes, layouts. Knows nothing of checkpoints, ranks or requests.

Shape letters: T tokens, D hidden, N out features, C in features, e local expert slots,
I expert intermediate, M (row, expert) pairs, K top-k, E logical experts, H heads, c kv_lora_rank,
r rope dim, n nope dim, v value dim. Activations x are float32 or bfloat16 ("the model dtype");
accumulation is always fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ep.bundle import Bundle
from models.deepseek.fp8 import Fp8Rows
from models.interface import ForwardBatch


@dataclass(frozen=True)
class GateSpec:
    """How a router chooses (model-spec section 3.5). group_score: "top2" (V3), "max" (V2)."""

    top_k: int
    num_groups: int
    topk_groups: int
    scoring: str  # "sigmoid" | "softmax"
    group_score: str  # "top2" | "max"
    renormalise: bool
    scale: float  # routed_scaling_factor, applied here and nowhere else


class LinearWeight(Protocol):
    """A weight [N, C] in the implementation's own layout."""

    out_features: int
    in_features: int
    nbytes: int

    def unpack(self) -> Tensor:
        """[N, C] in the model dtype."""
        ...


class ExpertWeights(Protocol):
    """Stacked experts, [e local slots, ...]; each slot moves as one bundle of bytes."""

    num_slots: int
    hidden: int
    intermediate: int
    nbytes: int

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """gate, up [I, D]; down [D, I]; converted to the stacked dtype and layout."""
        ...

    def fetch(self, slot: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def bundle(self, slot: int) -> Bundle:
        """All bytes of a slot, where they lie: what moves when an expert moves (law 3)."""
        ...


@dataclass(frozen=True)
class MlaShape:
    """Dims of a latent attention layer; scale multiplies scores, norm_eps is of both norms."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    rank: int  # kv_lora_rank
    value_dim: int
    scale: float
    norm_eps: float


class MlaWeights(Protocol):
    """qkv_a [q + c + r, D]: the query's rows (its latent, or all heads when q_b is None), then the
    latent's, then the rope key's. q_b [H * (n + r), q]; w_uk [H * c, n]; w_uv [H * v, c];
    o [D, H * v]. Norms fp32."""

    @property
    def qkv_a(self) -> LinearWeight: ...
    @property
    def q_a_norm(self) -> Tensor | None: ...
    @property
    def q_b(self) -> LinearWeight | None: ...
    @property
    def kv_a_norm(self) -> Tensor: ...
    @property
    def w_uk(self) -> LinearWeight: ...
    @property
    def w_uv(self) -> LinearWeight: ...
    @property
    def o(self) -> LinearWeight: ...


# x [T, D] normed, cache layer [blocks, block, c + r] (written at the batch's slots) -> [T, D]
AbsorbedMla = Callable[[Tensor, Tensor, ForwardBatch], Tensor]


class Fp8ExpertWeights(ExpertWeights, Protocol):
    """Experts kept in e4m3; a bundle holds their scales too, fetch() dequantises."""

    def store_fp8(self, slot: int, gate: Fp8Rows, up: Fp8Rows, down: Fp8Rows) -> None:
        """In place of store(), which refuses; scales must be of blocks that begin with row 0."""
        ...


class NormsFor(Protocol):
    """What some kernels have beside the protocol below; who lacks it is asked for add_rms_norm."""

    def add_rms_norm_for(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, reader: LinearWeight
    ) -> Any:
        """add_rms_norm whose rows one linear alone will read: in the form that `reader` wants them,
        which `linear`, `mlp` and `absorbed_mla` of the same kernels take for it and for no other
        weight. It has shape, dtype and device as the norm would."""
        ...


class Kernels(Protocol):
    name: str
    fp8_is_fast: bool  # weights kept in e4m3 are no slower here than dequantised ones

    def misfit(self, shape: MlaShape, dtype: torch.dtype, deterministic: bool) -> str | None:
        """Why attention of this shape cannot be computed, known before any weight is read; None:
        it can. Fast mode (not deterministic) attends by heads too (naive_attention)."""
        ...

    def fp8_cache_misfit(self, shape: MlaShape) -> str | None:
        """Why latents of this shape cannot lie in an FP8 cache (fp8_latents.py); None: they can."""
        ...

    # -- weights ---------------------------------------------------------------------------
    def linear_weight(self, weight: Tensor, dtype: torch.dtype) -> LinearWeight: ...

    def allocate_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> ExpertWeights: ...

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> LinearWeight | None:
        """Kept in e4m3 and dequantised to dtype (the model's) where it is used: bit for bit what
        linear_weight(rows.dequantise(dtype)) gives; triton quantises rows too (W8A8). None: the
        layout cannot hold these scales."""
        ...

    def allocate_fp8_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> Fp8ExpertWeights: ...

    # -- dense -----------------------------------------------------------------------------
    def linear(
        self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x [T, C] -> [T, N], fp32 accumulation over C in one fixed order. out_dtype None: x's."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, D] (rows may be strided) -> [T, D] contiguous, x's dtype. weight fp32; statistics,
        product in fp32, one rounding at the end."""
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (model dtype), then rms_norm(residual)."""
        ...

    def mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
        """down(silu(gate(x)) * up(x)); gate_up is [2I, D] with gate's rows first. silu and product
        in fp32, one rounding to the model dtype before down."""
        ...

    # -- experts ---------------------------------------------------------------------------
    def gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec
    ) -> tuple[Tensor, Tensor]:
        """x [T, D], weight [E, D] fp32, bias [E] fp32 or None -> ids [T, K] int32, weights [T, K]
        fp32 (unbiased scores, renormalised, scaled). Ordered by descending choice score; ties go
        to the lowest id. Masked groups are -inf for sigmoid, 0 for softmax (V2)."""
        ...

    def experts(
        self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: ExpertWeights
    ) -> Tensor:
        """Grouped GEMM over pairs sorted by slot: pair_rows [M] int32 (row of x [N, D]),
        offsets [e + 1] int32 -> [M, D] in x's dtype, unweighted, in the order given."""
        ...

    def sort_pairs(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """slots [T, K] int32, local slot or -1 -> pair_rows [M] int32 and offsets [e + 1] int32 for
        `experts` (within a slot by row, then k), index [T, K] int64 for `combine_pairs`."""
        ...

    def combine_pairs(self, y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """y [M, D]; index [T, K] int64 row of y or -1; weights [T, K] fp32 -> [T, D] fp32:
        sum over k = 0..K-1 in that order in fp32 (routing order: law 5)."""
        ...

    # -- attention -------------------------------------------------------------------------
    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """x [T, H, r], interleaved pairs (2i, 2i+1) rotated as complex numbers in fp32 by
        cos_sin [max_pos, r] (r/2 cosines, then r/2 sines); -> [T, H, r], x's dtype, contiguous."""
        ...

    def write_cache(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """latent [T, c], k_rope [T, r] into layer [blocks, block, c + r] at flat slots [T]. A layer
        in uint8 is an FP8 cache (fp8_latents.py), here and wherever a layer is read."""
        ...

    def write_latents(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, batch: ForwardBatch, norm: Tensor,
        eps: float, cos_sin: Tensor,
    ) -> None:  # fmt: skip
        """latent [T, c], k_rope [T, r] as the projection gave them: normalised, rotated, written at
        the batch's slots; the bits that absorbed_mla writes."""
        ...

    def per_head(self, x: Tensor, weight: LinearWeight, num_heads: int) -> Tensor:
        """Per-head linear, x [T, H, a] with weight packed from [H * b, a] -> [T, H, b]:
        absorbs W_UK (a = n, b = c) and applies W_UV (a = c, b = v)."""
        ...

    def latent_attention(
        self, q_latent: Tensor, q_rope: Tensor, layer: Tensor, batch: ForwardBatch, scale: float
    ) -> Tensor:
        """Absorbed MLA over the paged latent cache, causal by position, decode and prefill alike:
        q_latent [T, H, c], q_rope [T, H, r] -> [T, H, c] in x's dtype. Softmax in fp32 over fixed
        partitions of absolute positions, so chunking and block size do not change a bit."""
        ...

    def naive_attention(
        self,
        q: Tensor,
        layer: Tensor,
        kv_b: LinearWeight,
        batch: ForwardBatch,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        """Naive MLA for prefill (fast mode): q [T, H, n + r]; keys and values are expanded from
        the cached latents by kv_b [H * (n + v), c] -> [T, H, v]. Fewer FLOPs than absorbed for
        long queries; another rounding, so never used in deterministic mode."""
        ...

    def absorbed_mla(self, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor) -> AbsorbedMla:
        """One attention layer, from its normed input to what is added to the residual, as a
        callable that is made once: bitwise what the kernels above give one after the other
        (mla_parts.py), with less to do between them when rows are few."""
        ...
