"""Random weights in memory, shaped like a release's: for measuring where there is no checkpoint.

Made where they will lie, in FP8 blocks with a scale each or in the model's dtype; sizes of values
are such that activations neither vanish nor overflow. Routed experts are picked about evenly.

Knows which pieces a layer has (weights.py). Knows nothing of files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.deepseek.config import DeepSeekConfig
from models.deepseek.fp8 import BLOCK, Fp8Rows, scale_shape
from models.deepseek.kernels.base import Kernels, LinearWeight
from models.deepseek.weights import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)

# e4m3 codes without the highest bit of the exponent: below 2 in size, this much in the mean square
CODE_MASK, CODE_SIZE = 0xBF, 0.62


class RandomWeights:
    """Single use: `RandomWeights(...).make()`. fp8: linears and experts in e4m3. keep_kv_b: as
    in the loader. seed None: torch's own numbers. MTP layers are left out."""

    def __init__(
        self,
        config: DeepSeekConfig,
        kernels: Kernels,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = True,
        keep_kv_b: bool = True,
        seed: int | None = 0,
    ) -> None:
        self.config, self.kernels, self.device, self.dtype = config, kernels, device, dtype
        self.fp8, self.keep_kv_b = fp8, keep_kv_b
        self._random = None if seed is None else torch.Generator(device).manual_seed(seed)

    def make(self) -> ModelWeights:
        c = self.config
        embed = self._plain(c.vocab_size, c.hidden_size) * c.hidden_size**0.5
        return ModelWeights(
            embed=embed,
            layers=[self._layer(n) for n in range(c.num_hidden_layers)],
            final_norm=self._ones(c.hidden_size),
            head=self._linear_plain(c.vocab_size, c.hidden_size),
            mtp=[],
            keeps_fp8=self.fp8,
            notes=("weights: random, made in memory",),
        )

    # -- pieces --------------------------------------------------------------------------------

    def _layer(self, layer: int) -> LayerWeights:
        c = self.config
        is_dense = layer < c.first_k_dense_replace
        return LayerWeights(
            input_norm=self._ones(c.hidden_size),
            post_norm=self._ones(c.hidden_size),
            attention=self._attention(),
            ffn=self._mlp(c.intermediate_size) if is_dense else self._moe(layer),
        )

    def _attention(self) -> AttentionWeights:
        c, heads = self.config, self.config.num_attention_heads
        rank, queries = c.kv_lora_rank, heads * c.qk_head_dim
        first = queries if c.q_lora_rank is None else c.q_lora_rank
        n, v = c.qk_nope_head_dim, c.v_head_dim
        kv_b = self._plain(heads * (n + v), rank)
        up_k, up_v = kv_b.view(heads, n + v, rank).split((n, v), dim=1)
        linear = self.kernels.linear_weight
        return AttentionWeights(
            qkv_a=self._linear(first + c.cache_width, c.hidden_size),
            q_a_norm=None if c.q_lora_rank is None else self._ones(c.q_lora_rank),
            q_b=None if c.q_lora_rank is None else self._linear(queries, c.q_lora_rank),
            kv_a_norm=self._ones(rank),
            w_uk=linear(up_k.transpose(1, 2).reshape(heads * rank, n), self.dtype),
            w_uv=linear(up_v.reshape(heads * v, rank), self.dtype),
            kv_b=linear(kv_b, self.dtype) if self.keep_kv_b else None,
            o=self._linear(c.hidden_size, heads * v),
        )

    def _mlp(self, inter: int) -> MlpWeights:
        hidden = self.config.hidden_size
        return MlpWeights(self._linear(2 * inter, hidden), self._linear(hidden, inter))

    def _moe(self, layer: int) -> MoeWeights:
        c, hidden, inter = self.config, self.config.hidden_size, self.config.moe_intermediate_size
        shape = (c.n_routed_experts, hidden, inter, self.dtype)
        if self.fp8:
            experts = self.kernels.allocate_fp8_experts(*shape)
            for slot in range(c.n_routed_experts):
                experts.store_fp8(
                    slot, self._rows(inter, hidden), self._rows(inter, hidden),
                    self._rows(hidden, inter),
                )  # fmt: skip
        else:
            experts = self.kernels.allocate_experts(*shape)  # type: ignore[assignment]
            for slot in range(c.n_routed_experts):
                experts.store(
                    slot, self._plain(inter, hidden), self._plain(inter, hidden),
                    self._plain(hidden, inter),
                )  # fmt: skip
        bias = self._normal(c.n_routed_experts) / 100 if c.has_gate_bias else None
        return MoeWeights(
            row=layer - c.first_k_dense_replace,
            gate=self._normal(c.n_routed_experts, hidden) / math.sqrt(hidden),
            bias=bias,
            experts=experts,
            shared=tuple(self._mlp(inter) for _ in range(c.n_shared_experts)),
            bundle_layout="random",
        )

    # -- tensors -------------------------------------------------------------------------------

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random, device=self.device)

    def _ones(self, width: int) -> Tensor:
        return torch.ones(width, device=self.device)

    def _plain(self, rows: int, columns: int) -> Tensor:
        """In the model's dtype; a row's product with a vector of ones' size keeps that size."""
        made = torch.randn(
            rows, columns, generator=self._random, device=self.device, dtype=self.dtype
        )
        return made.mul_(columns**-0.5)

    def _linear_plain(self, rows: int, columns: int) -> LinearWeight:
        return self.kernels.linear_weight(self._plain(rows, columns), self.dtype)

    def _linear(self, rows: int, columns: int) -> LinearWeight:
        if self.fp8:
            made = self._rows(rows, columns)
            kept = self.kernels.fp8_linear_weight(made, self.dtype)
            return kept or self.kernels.linear_weight(made.dequantise(self.dtype), self.dtype)
        return self._linear_plain(rows, columns)

    def _rows(self, rows: int, columns: int) -> Fp8Rows:
        codes = torch.randint(
            0, 256, (rows, columns), generator=self._random, device=self.device, dtype=torch.uint8
        )
        grid = scale_shape((rows, columns))
        scales = torch.rand(grid, generator=self._random, device=self.device).add_(0.5)
        scales *= columns**-0.5 / CODE_SIZE
        spread = scales.repeat_interleave(BLOCK, dim=0)[:rows]
        return Fp8Rows(codes.bitwise_and_(CODE_MASK).view(torch.float8_e4m3fn), spread)
