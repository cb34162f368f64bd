"""What the scheduler is given and what it tells: limits, counters, a step's plan.

Plain data and pure functions. Knows nothing of queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from moeserve.plan import StepPlan
from moeserve.sequence import Sequence
from moeserve.speculate.tree import DraftTree


@dataclass(frozen=True)
class ScheduleLimits:
    """max_model_len positions of a sequence, prompt and output; the pool must hold one such."""

    max_num_sequences: int
    token_budget: int
    chunk_size: int | None
    max_model_len: int
    vocab_size: int | None = None  # None: token ids are not checked
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0


@dataclass
class ScheduleCounters:
    """Totals since start. prompt_tokens: of sequences begun, cached_tokens: those of them found in
    the prefix cache at the beginning. accepted_tokens: drafts that became output tokens."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0  # prompt positions computed, those of recomputing included
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def make_plan(
    taken: Mapping[Sequence, int],
    trees: Mapping[Sequence, DraftTree],
    preempted: Seq[Sequence],
) -> StepPlan:
    """taken: tokens that each sequence computes, in order, those of its drafts included."""
    plan = StepPlan(
        sequences=list(taken),
        counts=list(taken.values()),
        preempted=[s.request_id for s in preempted],
    )
    for i, (sequence, count) in enumerate(taken.items()):
        start = sequence.num_computed_tokens
        assert sequence.lease is not None
        plan.starts.append(start)
        plan.rows.append(sequence.lease.table.row)
        plan.num_tokens += count
        if sequence in trees:
            tree = plan.trees[i] = trees[sequence]
            plan.num_draft_tokens += tree.num_nodes
            count -= tree.num_nodes
        if start + count == len(sequence.tokens):
            plan.sampled.append(i)
            if count == 1 and start >= sequence.num_prompt_tokens:
                plan.decodes.append(i)
    return plan


def completes(taken: Mapping[Sequence, int], sequence: Sequence, end: int) -> bool:
    """Whether another sequence of the step computes the last of the first `end` tokens that this
    one begins with as well."""
    wanted = sequence.tokens[:end]
    return any(
        other.num_computed_tokens < end <= other.num_computed_tokens + count
        and other.tokens[:end] == wanted
        and other.request.cache_salt == sequence.request.cache_salt
        for other, count in taken.items()
    )
