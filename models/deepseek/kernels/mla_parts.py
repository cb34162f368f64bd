"""The absorbed attention layer as a chain of kernels: the slow twin of a fused one.

Knows: the order of the steps. Shape letters as in base.py.
"""

from __future__ import annotations

from torch import Tensor

from models.deepseek.kernels.base import AbsorbedMla, Kernels, MlaShape, MlaWeights
from models.interface import ForwardBatch


def mla_by_parts(
    kernels: Kernels, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor
) -> AbsorbedMla:
    """See Kernels.absorbed_mla."""
    k, w, s = kernels, weights, shape

    def run(x: Tensor, layer: Tensor, batch: ForwardBatch) -> Tensor:
        joined = k.linear(x, w.qkv_a)
        split = joined.shape[1] - s.rank - s.rope_dim
        q, latent, k_rope = joined.tensor_split((split, split + s.rank), dim=1)
        if w.q_b is not None:
            assert w.q_a_norm is not None
            q = k.linear(k.rms_norm(q, w.q_a_norm, s.norm_eps), w.q_b)
        k.write_latents(layer, latent, k_rope, batch, w.kv_a_norm, s.norm_eps, cos_sin)
        q = q.reshape(-1, s.num_heads, s.nope_dim + s.rope_dim)
        q_rope = k.rope(q[..., s.nope_dim :], batch.positions, cos_sin)
        q_latent = k.per_head(q[..., : s.nope_dim], w.w_uk, s.num_heads)
        attended = k.latent_attention(q_latent, q_rope, layer, batch, s.scale)
        out = k.per_head(attended, w.w_uv, s.num_heads)
        return k.linear(out.reshape(-1, s.num_heads * s.value_dim), w.o)

    return run


def latents_by_parts(
    kernels: Kernels, layer: Tensor, latent: Tensor, k_rope: Tensor, batch: ForwardBatch,
    norm: Tensor, eps: float, cos_sin: Tensor,
) -> None:  # fmt: skip
    """See Kernels.write_latents."""
    latent = kernels.rms_norm(latent, norm, eps)
    k_rope = kernels.rope(k_rope.unsqueeze(1), batch.positions, cos_sin).squeeze(1)
    kernels.write_cache(layer, latent, k_rope, batch.slot_mapping)
