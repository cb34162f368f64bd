"""ModelRunner: a StepPlan's tensors through the model and the sampler -> StepResult.

Knows: model, latent cache, sampler. Knows nothing of queues, peers or the wire. `forward` and a
round of `drafting` are collective on a group of ranks, `choose` is not: a failure in the latter
touches only this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispatch.base import Dispatcher
from models.crossing import sent_all
from models.interface import (
    CausalLM,
    ForwardBatch,
    ForwardOutput,
    PagedKVCache,
    copy_latents,
    largest_half,
)
from moeserve import sampler
from moeserve.batch import StepBatch, build_batch
from moeserve.cache import BlockTables
from moeserve.device.api import CudaApi
from moeserve.device.graphs import StepGraphs
from moeserve.device.staging import Staging
from moeserve.overlap import goes_in_halves
from moeserve.plan import StepPlan, StepResult
from moeserve.prompt_logprobs import Prompts
from moeserve.recorder import StepRecorder
from moeserve.speculate.late import Choosing, ChosenHere, Late, judge
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Rule, Verdict, rows_of_all, verdicts_of, verify
from moeserve.tracing import StepTracer

_NO_DRAFTS = DraftTree()


@dataclass(frozen=True)
class AskedStep:
    """What a step chooses and accepts, on the device. told(tensors, on the host) -> its result."""

    late: Late
    tensors: list[Tensor]
    told: Callable[[Seq[Tensor]], StepResult]


class ModelRunner:
    def __init__(
        self,
        model: CausalLM,
        cache: PagedKVCache,
        tables: BlockTables,
        recorder: StepRecorder | None = None,
        overlap_from: int | None = None,
        rule: Rule = Rule.SAME,
    ) -> None:
        """overlap_from: the agreed tokens of a step from which it goes through the model in two
        halves (`overlap`), the same on every rank; None: never. rule: by which drafts are judged.
        """
        self.model, self.cache, self.tables = model, cache, tables
        self.recorder = recorder
        self.tracer = StepTracer()  # the engine's, where there is one
        self.overlap_from = overlap_from
        self.rule = rule
        self._dispatcher: Dispatcher | None = getattr(model, "dispatcher", None)
        device = cache.layers[0].device
        # How steps get to a device; None on CPUs, where they are.
        self.staging = None if device.type == "cpu" else Staging(CudaApi(device))
        self.graphs: StepGraphs | None = None  # captured decode steps, where there are (`build`)

    def build(self, plan: StepPlan) -> StepBatch:
        made = build_batch(plan, self.tables.matrix, self.cache.block_size)
        if self.staging is None:
            return made
        return replace(made, forward=self.staging.send(made.forward))

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        max_tokens: int | None = None,
        decode_only: bool = False,
        context: int = 0,
    ) -> ForwardOutput:
        """Every rank of the group calls it in the same step, T = 0 too.
        Agreed in lockstep: max_tokens, the most tokens of any rank in this step; decode_only, that
        no rank computes prompt tokens; context, `StepAgreement.context`."""
        in_halves = goes_in_halves(max_tokens, self.overlap_from)
        rows: int | None = None  # of the captured step; from what was agreed alone
        if self.graphs is not None and batch.host is not None and not in_halves:
            rows = self.graphs.ready(max_tokens, decode_only, context, batch.host.total_context)
        if self._dispatcher is not None:
            bound = largest_half(max_tokens) if in_halves and max_tokens else max_tokens
            self._dispatcher.set_step_bound(bound, decode_only)
        observer = self.tracer.observe(self.recorder)
        if rows is not None:  # no rank has trees where there are captured steps (`no_graphs`)
            assert self.graphs is not None and batch.host is not None
            return self.graphs.run(rows, batch.host, batch.forward, observer)
        if not in_halves:
            return self.model.forward(batch.forward, self.cache, observer)
        out = self.model.forward(batch.forward, self.cache, observer, halves=True)
        if self._dispatcher is not None:  # what follows in this step is no half: drafts
            self._dispatcher.set_step_bound(max_tokens, decode_only)
        return out

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, next_token_ids: Tensor, cache: PagedKVCache
    ) -> ForwardOutput:
        """A round of the MTP layer. Collective like `forward`."""
        observer = None if self.recorder is None else self.recorder.round_observer
        return self.model.draft(batch, hidden, next_token_ids, cache, 0, observer)

    def begin_round(
        self, max_tokens: int | None, decode_only: bool, num_rows: int, num_decodes: int
    ) -> None:
        """Before each `draft`. Agreed, as in `forward`: max_tokens, decode_only. Of this rank:
        num_rows, of which those of decodes, which stand first."""
        if self._dispatcher is not None:
            self._dispatcher.set_step_bound(max_tokens, decode_only)
        if self.recorder is not None:
            self.recorder.begin_round(num_rows, num_decodes)

    def check_peers(self) -> None:
        """PeerError where ranks were left out of a step: what it gave lacks their experts."""
        if self._dispatcher is not None:
            self._dispatcher.check_peers()

    @property
    def masked_ranks(self) -> tuple[int, ...]:
        """Those that the dispatcher leaves out."""
        mask = None if self._dispatcher is None else self._dispatcher.active_mask()
        return tuple(rank for rank, active in enumerate(mask or ()) if not active)

    @torch.inference_mode()
    def choose(self, plan: StepPlan, batch: StepBatch, logits: Tensor) -> StepResult:
        """Next tokens of the sampled sequences and log-probabilities of prompt tokens. What is on
        a device is waited for once."""
        if not batch.forward.logits_rows.shape[0]:
            return StepResult(token_ids=[])
        prompts = Prompts(batch.prompt_rows, logits)
        chosen = logits[: batch.num_chosen]
        if not plan.trees:
            sampled = prompts.sample(chosen, [plan.sequences[i] for i in plan.sampled])
            return StepResult(sampled.token_ids, sampled.logprobs, prompts.told, sampled.failed)
        trees, members = _trees_of(plan), [plan.sequences[i] for i in plan.sampled]
        verdicts = verify(chosen, members, trees, self.rule, prompts.sample)
        return self._judged(plan, batch, trees, verdicts, prompts)

    @torch.inference_mode()
    def ask(self, plan: StepPlan, batch: StepBatch, logits: Tensor) -> AskedStep:
        """`choose` of a step whose drafts were chosen by no chance of their own: nothing is waited
        for, `told` gives its result once its `tensors` were brought over."""
        trees = _trees_of(plan)
        chosen = logits[: batch.num_chosen]
        prompts = Prompts(batch.prompt_rows, logits)
        rows = rows_of_all(chosen, [plan.sequences[i] for i in plan.sampled], trees)
        choice: Choosing
        if chosen.device.type == "cuda" and rows:
            from moeserve.sampler_device import choose  # has kernels

            choice = choose(chosen, rows)
        else:
            choice = ChosenHere(sampler.sample(chosen, rows) if rows else sampler.Sampled([]))

        def told(host: Seq[Tensor]) -> StepResult:
            num = len(choice.tensors)
            verdicts = verdicts_of(trees, rows, choice.sampled(host[:num]))
            prompts.hear(host[num:])
            return self._judged(plan, batch, trees, verdicts, prompts)

        late = judge(choice.tokens, choice.failed, trees)
        return AskedStep(late, [*choice.tensors, *prompts.tensors], told)

    def _judged(
        self,
        plan: StepPlan,
        batch: StepBatch,
        trees: Seq[DraftTree],
        verdicts: Seq[Verdict],
        prompts: Prompts,
    ) -> StepResult:
        """trees, verdicts: of the sampled sequences."""
        if batch.forward.ancestors is not None:
            self._straighten(plan, batch.forward, trees, verdicts, batch.host)
        return StepResult(
            token_ids=[v.tokens[0] if v.tokens else -1 for v in verdicts],
            logprobs={j: v.logprobs[0] for j, v in enumerate(verdicts) if v.logprobs},
            prompt_logprobs=prompts.told,
            failed={j: v.failed for j, v in enumerate(verdicts) if v.failed is not None},
            verdicts={
                j: v for j, (v, t) in enumerate(zip(verdicts, trees, strict=True)) if t.tokens
            },
        )

    def _straighten(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        trees: Seq[DraftTree],
        verdicts: Seq[Verdict],
        host: ForwardBatch | None,
    ) -> None:
        """Accepted nodes' latents go to the places where a chain's would lie: the next step reads
        the sequence by position. What lay there belonged to nodes of other paths."""
        old: list[int] = []
        new: list[int] = []
        host = batch if host is None else host
        slots, ends = host.slot_mapping.tolist(), host.query_start.tolist()
        for i, tree, verdict in zip(plan.sampled, trees, verdicts, strict=True):
            first = ends[i + 1] - tree.num_nodes  # of the nodes' rows
            for place, node in enumerate(verdict.nodes):
                if node != place:
                    old.append(slots[first + node])
                    new.append(slots[first + place])
        if old:
            device = batch.slot_mapping.device
            copy_latents(self.cache, *sent_all([torch.tensor(old), torch.tensor(new)], device))


def _trees_of(plan: StepPlan) -> list[DraftTree]:
    """Of the sampled sequences."""
    return [plan.trees.get(i, _NO_DRAFTS) for i in plan.sampled]
