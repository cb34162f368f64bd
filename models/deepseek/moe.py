"""One mixture-of-experts layer: gate, route, dispatch, experts, combine, shared expert.

Knows: the order of these steps. The collectives in it run whatever the number of tokens (law 1).
The gate applies routed_scaling_factor, combine (or `run_experts`) the top-k weights, this file the
shared expert: each once (law 2).

Shape letters: T tokens, D hidden, K top-k, E logical experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dispatch.base import Dispatcher
from dispatch.route import RoutingTable, count_picks, route, token_keys
from models.deepseek.experts import run_experts
from models.deepseek.kernels.base import GateSpec, Kernels
from models.deepseek.weights import MoeWeights
from models.interface import StepObserver


class Clock:
    """Times named parts for an observer; free when there is none."""

    def __init__(self, observer: StepObserver | None) -> None:
        self.observer = observer
        self.seconds = 0.0  # sum of all parts so far

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self.observer is None:
            yield
            return
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.observer.part(name, seconds)


class MoE:
    """The MoE of all layers: weights and routing table come with each call. rank: the home rank."""

    def __init__(
        self, kernels: Kernels, dispatcher: Dispatcher, spec: GateSpec, num_experts: int, rank: int
    ) -> None:
        self.kernels, self.dispatcher, self.spec = kernels, dispatcher, spec
        self.num_experts, self.rank = num_experts, rank

    def __call__(self, x: Tensor, weights: MoeWeights, table: RoutingTable, clock: Clock) -> Tensor:
        """x [T, D] normed -> [T, D] in the model dtype, to be added to the residual."""
        with clock.part("gate"):
            ids, scores = self.kernels.gate(x, weights.gate, weights.bias, self.spec)
            if clock.observer is not None:
                clock.observer.expert_picks(weights.row, count_picks(ids, self.num_experts))
            slots = route(ids, table, token_keys(x.shape[0], self.rank, x.device))
        with clock.part("dispatch"):
            handle = self.dispatcher.dispatch_start(x, slots, scores)
        shared: Tensor | None = None
        with clock.part("experts"):  # the shared expert needs no dispatch: it fills the wait
            if weights.shared is not None:
                shared = self.kernels.mlp(x, weights.shared.gate_up, weights.shared.down)
        with clock.part("dispatch"):
            received = self.dispatcher.dispatch_finish(handle)
        with clock.part("experts"):
            form = self.dispatcher.combine_form
            y, index = run_experts(self.kernels, received, weights.experts, form)
        with clock.part("combine"):
            self.dispatcher.combine_start(handle, y, index)
            out = self.dispatcher.combine_finish(handle)  # [T, D] fp32
            if shared is not None:
                out = out + shared.to(torch.float32)
            return out.to(x.dtype)
