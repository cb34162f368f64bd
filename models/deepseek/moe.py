"""One mixture-of-experts layer: gate, route, dispatch, experts, combine, shared expert.

Knows: the order of these steps, and where something else could be done while rows travel
(`stages`). The collectives in it run whatever the number of tokens (law 1).
The gate applies routed_scaling_factor, combine (or `run_experts`) the top-k weights, this file the
shared expert: each once (law 2).

The shared expert comes in n pieces (shared.py). Where they lie in slots they are logical experts
E .. E + n - 1, which every token picks last, with weight 1: combine then adds them in the order in
which they are added here where each rank computes them for its own tokens. The bits are the same.

Shape letters: T tokens, D hidden, K top-k, E routed experts, n pieces of the shared expert.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dispatch.base import Dispatcher, Fp8Tokens, WireFormat
from dispatch.fp8 import dequantise, quantise
from dispatch.route import RoutingTable, route, token_keys
from models.deepseek.experts import run_experts
from models.deepseek.kernels.base import GateSpec, Kernels
from models.deepseek.overlap import Stages, drain
from models.deepseek.weights import MoeWeights
from models.interface import StepObserver


class Clock:
    """Times named parts for an observer; free when there is none."""

    def __init__(self, observer: StepObserver | None) -> None:
        self.observer = observer
        # An observer that does not: of some backends, to know them is to wait for the device.
        self.wants_rows = getattr(observer, "wants_rows", observer is not None)
        self.seconds = 0.0  # sum of all parts so far

    def part(self, name: str) -> AbstractContextManager[object]:
        return _UNTIMED if self.observer is None else _Part(self, self.observer, name)


class _Part:
    """A class, not a generator: there are some in each layer, and these cost a third."""

    __slots__ = ("_clock", "_name", "_observer", "_start")

    def __init__(self, clock: Clock, observer: StepObserver, name: str) -> None:
        self._clock, self._observer, self._name = clock, observer, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            seconds = time.perf_counter() - self._start
            self._clock.seconds += seconds
            self._observer.part(self._name, seconds)


_UNTIMED = nullcontext()


class MoE:
    """The MoE of all layers: weights and routing table come with each call. rank: the home rank."""

    def __init__(self, kernels: Kernels, dispatcher: Dispatcher, spec: GateSpec, rank: int) -> None:
        self.kernels, self.dispatcher, self.spec, self.rank = kernels, dispatcher, spec, rank

    def __call__(self, x: Tensor, weights: MoeWeights, table: RoutingTable, clock: Clock) -> Tensor:
        """x [T, D] normed -> [T, D] in the model dtype, to be added to the residual."""
        return drain(self.stages(x, weights, table, clock))

    def stages(
        self, x: Tensor, weights: MoeWeights, table: RoutingTable, clock: Clock, first_row: int = 0,
        padding: Tensor | None = None,
    ) -> Stages:  # fmt: skip
        """The same in stages: it stops where rows have left, and again where results have. No part
        of the clock runs meanwhile. first_row: of x in this rank's batch of the step, by which
        replicas are chosen: halves choose what the whole does. padding [T]: `ForwardBatch`."""
        with clock.part("gate"):
            ids, scores = self.kernels.gate(x, weights.gate, weights.bias, self.spec)
            ids, scores = with_shared(ids, scores, weights.gate.shape[0], table.num_logical_experts)
            if padding is not None:
                ids = ids.masked_fill(padding[:, None], -1)
            if clock.observer is not None:
                clock.observer.expert_picks(weights.row, ids)
            slots = route(ids, table, token_keys(x.shape[0], self.rank + first_row, x.device))
        return (yield from self.exchange(x, slots, scores, weights, clock))

    def exchange(
        self, x: Tensor, slots: Tensor, scores: Tensor, weights: MoeWeights, clock: Clock
    ) -> Stages:
        """`stages` behind the gate: x [T, D] to the physical slots [T, K] int32 (-1: none) with
        scores [T, K] fp32, and home."""
        with clock.part("dispatch"):
            rows = self._for_wire(x)
            handle = self.dispatcher.dispatch_start(rows, slots, scores)
            if clock.wants_rows and clock.observer is not None:
                clock.observer.rows_sent(weights.row, self.dispatcher.stats.rows_sent_to_rank)
        yield
        with clock.part("experts"):  # here the shared expert needs no dispatch: it fills the wait
            seen = x if isinstance(rows, Tensor) else self._off_wire(rows)
            shared = [self.kernels.mlp(seen, w.gate_up, w.down) for w in weights.shared]
        with clock.part("dispatch"):
            received = self.dispatcher.dispatch_finish(handle)
        with clock.part("experts"):
            form = self.dispatcher.combine_form
            # As many picks arrive at a rank as it sends, in the mean; and for as many as it may
            # send at most there is room.
            config = self.dispatcher.config
            y, index = run_experts(
                self.kernels, received, weights.experts, form, x.dtype,
                expected_pairs=slots.numel(),
                most_pairs=config.max_tokens_per_rank * config.top_k,
            )  # fmt: skip
        with clock.part("combine"):
            self.dispatcher.combine_start(handle, y, index)
        yield
        with clock.part("combine"):
            out = self.dispatcher.combine_finish(handle)  # [T, D] fp32
            for piece in shared:
                out = out + piece  # in fp32
            return out.to(x.dtype)

    def _for_wire(self, x: Tensor) -> Tensor | Fp8Tokens:
        """x [T, D] as `dispatch_start` wants it."""
        wire = self.dispatcher.config.wire
        if wire is WireFormat.MODEL or self.dispatcher.quantises:
            return x
        return quantise(x, wire)

    def _off_wire(self, rows: Fp8Tokens) -> Tensor:
        """What an expert sees of them, wherever it lies: so hosting the shared expert, or having
        one rank, changes no bit."""
        dtype = self.dispatcher.config.dtype
        return dequantise(rows.values, rows.scales, rows.scale_format, dtype)


def with_shared(ids: Tensor, scores: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """ids [T, K] int32, scores [T, K] fp32 -> [T, K + n]: experts first .. end - 1 picked by every
    token, last in routing order, with weight 1."""
    if end == first:
        return ids, scores
    shape = (ids.shape[0], end - first)
    shared = torch.arange(first, end, dtype=ids.dtype, device=ids.device).expand(shape)
    return torch.cat((ids, shared), 1), torch.cat((scores, scores.new_ones(shape)), 1)
