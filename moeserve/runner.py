"""ModelRunner: a StepPlan's tensors through the model and the sampler -> StepResult.

Also `StepRecorder`, the StepObserver that keeps expert load and times of parts.

Knows: model, latent cache, sampler. Knows nothing of queues, peers or the wire. `forward` is
collective on a group of ranks, `choose` is not: a failure in the latter touches only this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dispatch.base import Dispatcher
from ep.load import LoadWindow
from models.interface import CausalLM, PagedKVCache
from moeserve import sampler
from moeserve.batch import StepBatch, build_batch
from moeserve.cache import BlockTables
from moeserve.logprobs import token_logprobs
from moeserve.plan import StepPlan, StepResult


@dataclass
class StepRecorder:
    """Expert picks of real tokens (an empty batch has none) and seconds by part of a step.

    window: of the last steps, for balance; totals [L, E]: since start. enabled False: warm-up.
    """

    window: LoadWindow | None = None
    enabled: bool = True
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.window.num_layers, self.window.num_experts) if self.window else (0, 0)
        self.totals = np.zeros(shape, np.int64)

    def expert_picks(self, layer: int, counts: Tensor) -> None:
        if self.enabled and self.window is not None:
            picks = counts.cpu().numpy()
            self.window.add(layer, picks)
            self.totals[layer] += picks

    def part(self, name: str, seconds: float) -> None:
        if self.enabled:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def end_step(self) -> None:
        if self.enabled and self.window is not None:
            self.window.roll()


class ModelRunner:
    def __init__(
        self,
        model: CausalLM,
        cache: PagedKVCache,
        tables: BlockTables,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.model, self.cache, self.tables = model, cache, tables
        self.recorder = recorder
        self._dispatcher: Dispatcher | None = getattr(model, "dispatcher", None)
        device = cache.layers[0].device
        self._device = None if device.type == "cpu" else device

    def build(self, plan: StepPlan) -> StepBatch:
        return build_batch(plan, self.tables.matrix, self.cache.block_size, self._device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, max_tokens: int | None = None) -> Tensor:
        """-> logits [O, V] fp32. Every rank of the group calls it in the same step, T = 0 too.
        max_tokens: the most tokens of any rank in this step, agreed in lockstep."""
        if self._dispatcher is not None:
            self._dispatcher.set_step_bound(max_tokens)
        return self.model.forward(batch.forward, self.cache, self.recorder).logits

    @torch.inference_mode()
    def choose(self, plan: StepPlan, batch: StepBatch, logits: Tensor) -> StepResult:
        """Next tokens of the sampled sequences and log-probabilities of prompt tokens."""
        if not batch.forward.logits_rows.shape[0]:
            return StepResult(token_ids=[])
        prompt = {}
        for rows in batch.prompt_rows:
            part = logits[rows.first : rows.first + len(rows.next_ids)]
            tops = [rows.top] * len(rows.next_ids)
            prompt[rows.request_id] = token_logprobs(part, rows.next_ids, tops)
        members = [plan.sequences[i] for i in plan.sampled]
        sampled = sampler.sample(logits[: batch.num_sampled], members)
        return StepResult(sampled.token_ids, sampled.logprobs, prompt, sampled.failed)
