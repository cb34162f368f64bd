"""DeepSeekModel: one rank's forward pass, from token ids to logits, and its MTP drafts.

Knows: the order of layers, residuals and norms; which cache layer and placement row each layer has.
A batch goes through them whole, or as two halves in turn (`overlap`): the same bits either way.
Knows nothing of files (see `load`), requests or how collectives travel.

Shape letters: T tokens, D hidden, V vocabulary, O rows whose logits are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dispatch.base import Dispatcher
from dispatch.route import RoutingTable
from ep.placement import ExpertPlacement, PlacementError
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import ExpertWeights, Kernels, LinearWeight
from models.deepseek.mla import Attention, AttentionPlan, naive_from, plan_attention
from models.deepseek.moe import Clock, MoE
from models.deepseek.overlap import HalvesObserver, Stages, drain, interleave
from models.deepseek.rope import cos_sin_table
from models.deepseek.split import split_batch
from models.deepseek.weights import LayerWeights, MlpWeights, ModelWeights, MtpWeights
from models.interface import CacheSpec, ForwardBatch, ForwardOutput, PagedKVCache, StepObserver


class DeepSeekModel:
    """Implements models.interface.CausalLM.

    deterministic: absorbed attention for every row, so that chunking changes no bit; the dispatcher
    must then use CombineForm.PAIRS. rank: this rank's number, as the placement counts.
    max_positions: rows of the rotary table (default: what the config allows). fp8_cache: latents
    lie in e4m3 (kernels/fp8_latents.py).
    """

    def __init__(
        self,
        config: DeepSeekConfig,
        weights: ModelWeights,
        kernels: Kernels,
        dispatcher: Dispatcher,
        placement: ExpertPlacement,
        *,
        rank: int,
        dtype: torch.dtype,
        deterministic: bool,
        max_positions: int | None = None,
        fp8_cache: bool = False,
    ) -> None:
        self.config, self.weights, self.kernels = config, weights, kernels
        self.dispatcher, self.dtype, self.rank = dispatcher, dtype, rank
        self.deterministic = deterministic
        self.device = weights.embed.device
        self.max_positions = min(max_positions or 1 << 62, config.max_position_embeddings)
        table = cos_sin_table(config.rope, config.qk_rope_head_dim, self.max_positions)
        self.cache_spec = CacheSpec(
            num_layers=config.num_hidden_layers + len(weights.mtp),
            width=config.cache_width,
            dtype=dtype,
            packed=config.cache_bytes(dtype.itemsize, fp8=True) if fp8_cache else None,
        )
        self.num_mtp_layers = len(weights.mtp)
        self._naive_from = None if deterministic else naive_from(config)
        self._attention = Attention(config, kernels, table.to(self.device))
        self._moe = MoE(kernels, dispatcher, config.gate_spec(), rank)
        self._routing: dict[int, RoutingTable] = {}  # by placement row
        self.adopt_placement(placement)

    # -- placement -------------------------------------------------------------------------

    def routing_tables(
        self, placement: ExpertPlacement, rows: Iterable[int]
    ) -> dict[int, RoutingTable]:
        """What `adopt_placement` wants for these rows. Changes nothing: callable on any thread."""
        return {row: RoutingTable.build(placement, row, self.device) for row in rows}

    def adopt_placement(
        self, placement: ExpertPlacement, tables: Mapping[int, RoutingTable] | None = None
    ) -> None:
        """Route by this placement from the next step on; the experts must have moved already.
        tables: of the rows that differ from the placement in use; None: all rows are made anew."""
        rows = len(self.weights.moe_layers())
        if placement.num_layers != rows:
            raise PlacementError(f"placement has {placement.num_layers} layers, this model {rows}")
        experts = self.config.n_routed_experts
        if not self.weights.moe_layers()[0].shared:
            experts += self.config.n_shared_experts
        if placement.num_logical_experts != experts:
            raise PlacementError(
                f"placement has {placement.num_logical_experts} logical experts, "
                f"this model {experts}"
            )
        self.placement = placement
        if tables is None:
            tables = self.routing_tables(placement, range(rows))
        self._routing |= tables

    def expert_weights(self) -> list[ExpertWeights]:
        """This rank's slots, one entry a placement row: what migration moves (`bundle`)."""
        return [moe.experts for moe in self.weights.moe_layers()]

    def bundle_layouts(self) -> list[str]:
        """What the bytes of each row's bundles mean: experts move only between ranks that have the
        same (`MoeWeights.bundle_layout`)."""
        return [moe.bundle_layout for moe in self.weights.moe_layers()]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights on this rank by kind."""
        return self.weights.memory_bytes()

    # -- forward ---------------------------------------------------------------------------

    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        observer: StepObserver | None = None,
        halves: bool = False,
    ) -> ForwardOutput:
        """T may be 0: every layer and every collective runs all the same (law 1). So they do for
        each half, where all ranks agreed on halves; neither half has more than
        `largest_half(T)` rows."""
        start = time.perf_counter()
        clock = Clock(HalvesObserver(observer) if halves and observer is not None else observer)
        residual = self.weights.embed[batch.token_ids]  # [T, D], the residual stream
        if halves:
            first, second = split_batch(batch)
            cut = first.num_tokens
            outs = interleave(
                self._layers(residual[:cut], first, cache, clock),
                self._layers(residual[cut:], second, cache, clock, cut),
            )
            out = torch.cat(outs)
        else:
            out = drain(self._layers(residual, batch, cache, clock))
        eps = self.config.rms_norm_eps
        hidden = self.kernels.add_rms_norm(residual, out, self.weights.final_norm, eps)
        logits = self.kernels.linear(
            hidden[batch.logits_rows], self.weights.head, out_dtype=torch.float32
        )
        _report_other(clock, start)
        return ForwardOutput(hidden=hidden, logits=logits)

    def draft(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        next_token_ids: Tensor,
        cache: PagedKVCache,
        depth: int = 0,
        observer: StepObserver | None = None,
    ) -> ForwardOutput:
        """See CausalLM.draft. batch: the rows whose latents MTP layer `depth` writes and attends.

        hidden [T, D] after the final norm (or after the shared head's norm, when fed back);
        next_token_ids [T]: the token that follows each row. Always one batch: of a single layer
        halves would hide little.
        """
        if not 0 <= depth < self.num_mtp_layers:
            raise ValueError(f"depth={depth}: this model has {self.num_mtp_layers} MTP layers")
        start = time.perf_counter()
        clock = Clock(observer)
        w, k, eps = self.weights.mtp[depth], self.kernels, self.config.rms_norm_eps
        plan = plan_attention(batch, self._naive_from)
        residual = self._mtp_input(w, hidden, next_token_ids)
        number = self.config.num_hidden_layers + depth
        layer = self._layer(residual, None, w.layer, cache.layers[number], batch, plan, clock)
        out = drain(layer)
        hidden = k.add_rms_norm(residual, out, w.head_norm, eps)
        logits = k.linear(hidden[batch.logits_rows], w.head, out_dtype=torch.float32)
        _report_other(clock, start)
        return ForwardOutput(hidden=hidden, logits=logits)

    def exchange(self, slots: Tensor) -> None:
        """Rows of zeros to the physical slots [T, K] int32 (-1: none) of the first layer with
        experts, and home: what is measured so needs no gate to pick it. Collective."""
        moe = self.weights.moe_layers()[0]
        width, device = self.config.hidden_size, slots.device
        x = torch.zeros(slots.shape[0], width, dtype=self.dtype, device=device)
        scores = torch.ones(slots.shape, dtype=torch.float32, device=device)
        drain(self._moe.exchange(x, slots, scores, moe, Clock(None)))

    def close(self) -> None:
        self.dispatcher.close()

    # -- parts -----------------------------------------------------------------------------

    def _mtp_input(self, w: MtpWeights, hidden: Tensor, next_token_ids: Tensor) -> Tensor:
        """eh_proj of [normed embedding of the next token, normed hidden]: [T, 2D] -> [T, D]."""
        k, eps = self.kernels, self.config.rms_norm_eps
        embedded = k.rms_norm(w.embed[next_token_ids], w.enorm, eps)
        return k.linear(torch.cat((embedded, k.rms_norm(hidden, w.hnorm, eps)), -1), w.eh_proj)

    def _layers(
        self,
        residual: Tensor,
        batch: ForwardBatch,
        cache: PagedKVCache,
        clock: Clock,
        first_row: int = 0,
    ) -> Stages:
        """All layers over residual [T, D], in place -> the last one's output [T, D], to be added.
        first_row: where these rows begin in this rank's batch."""
        plan = plan_attention(batch, self._naive_from)
        out: Tensor | None = None
        for number, layer in enumerate(self.weights.layers):
            out = yield from self._layer(
                residual, out, layer, cache.layers[number], batch, plan, clock, first_row
            )
        assert out is not None
        return out

    def _layer(
        self,
        residual: Tensor,
        pending: Tensor | None,
        weights: LayerWeights,
        cache_layer: Tensor,
        batch: ForwardBatch,
        plan: AttentionPlan,
        clock: Clock,
        first_row: int = 0,
    ) -> Stages:
        """Adds `pending` (the last layer's output) to residual [T, D] in place, attends, adds, and
        gives back the feed-forward output [T, D], which the caller's next norm adds. It stops where
        its rows travel (`MoE.stages`)."""
        k, eps = self.kernels, self.config.rms_norm_eps
        if pending is None:
            x = k.rms_norm(residual, weights.input_norm, eps)
        else:
            reader = weights.attention.qkv_a
            x = _normed_for(reader, k, residual, pending, weights.input_norm, eps)
        with clock.part("attention"):
            x = self._attention(x, weights.attention, cache_layer, batch, plan)
        if isinstance(weights.ffn, MlpWeights):
            reader = weights.ffn.gate_up
            x = _normed_for(reader, k, residual, x, weights.post_norm, eps)
            return k.mlp(x, reader, weights.ffn.down)
        x = k.add_rms_norm(residual, x, weights.post_norm, eps)
        table = self._routing[weights.ffn.row]
        return (yield from self._moe.stages(x, weights.ffn, table, clock, first_row, batch.padding))


def _normed_for(
    reader: LinearWeight, k: Kernels, residual: Tensor, x: Tensor, norm: Tensor, eps: float
) -> Any:
    """add_rms_norm, handed on as `reader`, which alone sees it, wants it (base.NormsFor)."""
    fused = getattr(k, "add_rms_norm_for", None)
    if fused is None:
        return k.add_rms_norm(residual, x, norm, eps)
    return fused(residual, x, norm, eps, reader)


def _report_other(clock: Clock, start: float) -> None:
    if clock.observer is not None:
        whole = time.perf_counter() - start
        clock.observer.part("other", max(whole - clock.seconds, 0.0))
