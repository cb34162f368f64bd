"""Drafts in the scheduler: they get what others leave, take nobody's place, leave no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scheduler_world import FakeMemory, ask, expected, make, next_token

from moeserve.plan import StepPlan, StepResult
from moeserve.request import FinishReason, TokenOutput
from moeserve.scheduler import Scheduler
from moeserve.sequence import Sequence
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Verdict


class DraftMemory(FakeMemory):
    """Rows of drafts are written to slots like all others; accepted nodes' slots are put in order,
    as the runner does. A later step that reads a wrong token stops the test."""

    def run(self, plan: StepPlan) -> StepResult:
        size, matrix = self.cache.block_size, self.cache.tables.matrix
        written: set[int] = set()
        tokens, verdicts = [], {}
        for i, (s, start, count, row) in enumerate(
            zip(plan.sequences, plan.starts, plan.counts, plan.rows, strict=True)
        ):
            tree = plan.trees.get(i, DraftTree())
            known = [*s.tokens[start : start + count - tree.num_nodes], *tree.tokens]
            assert len(known) == count
            for position, token in enumerate(known, start):
                slot = self.slot(matrix, row, position, size)
                assert slot not in written, "two tokens of a step are written to one slot"
                written.add(slot)
                self.slots[slot] = token
        for j, i in enumerate(plan.sampled):
            s, row = plan.sequences[i], plan.rows[i]
            n = s.num_tokens
            seen = [self.slots[self.slot(matrix, row, p, size)] for p in range(n)]
            assert seen == s.tokens, "the context is not what was computed"
            tree = plan.trees.get(i)
            if tree is None:
                tokens.append(next_token(seen))
                continue
            tokens.append(-1)
            at, run, nodes = 0, [], []
            while True:
                run.append(next_token([*seen, *run]))
                node = tree.child(at, run[-1])
                if node is None:
                    break
                nodes.append(node)
                at = node + 1
            lain = [self.slots[self.slot(matrix, row, n + node, size)] for node in nodes]
            for place, token in enumerate(lain):
                self.slots[self.slot(matrix, row, n + place, size)] = token
            verdicts[j] = Verdict(tuple(run), tuple(nodes), (0, *(x + 1 for x in nodes)))
        return StepResult(tokens, verdicts=verdicts)

    @staticmethod
    def slot(matrix: np.ndarray, row: int, position: int, size: int) -> int:
        block = int(matrix[row, position // size])
        assert block >= 0
        return block * size + position % size


def drafts_for(sequence: Sequence, most: int, rng: random.Random) -> DraftTree:
    """Right for a while; as a chain or among siblings. Not behind what the request may have."""
    room = sequence.max_output_tokens - sequence.num_output_tokens - 1
    depth = min(most, room)
    coming = expected(sequence.tokens, max(depth, 0))
    if coming and rng.random() < 0.6:
        wrong = rng.randrange(len(coming))
        coming[wrong] = (coming[wrong] + 1) % 7
    if rng.random() < 0.5:
        return chain(coming)
    tokens, parents, above = [], [], -1
    for token in coming:
        pair = [token, (token + 1) % 7]
        rng.shuffle(pair)
        own = len(tokens) + pair.index(token)
        tokens += pair
        parents += [above, above]
        above = own
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("seed", range(24))
def test_any_mix_with_drafts_gives_what_each_request_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    scheduler, _ = make(
        blocks=rng.choice([18, 24, 60]),
        size=rng.choice([4, 5]),
        rows=rng.choice([2, 6]),
        budget=rng.choice([6, 9, 40]),
        chunk=rng.choice([None, 1, 3]),
        prefix=seed % 3 > 0,
    )
    memory = DraftMemory(scheduler.cache)
    base = [rng.randrange(7) for _ in range(30)]
    want, got, gone = {}, {}, []
    scheduler.on_gone = gone.append
    for i in range(14):
        prompt = [*base[: rng.randrange(25)], rng.randrange(7)]
        num = rng.randrange(1, 20)
        want[str(i)] = expected(prompt, num)
        scheduler.add(ask(str(i), prompt, num, ignore_eos=True))
    told = accepted = 0
    for _ in range(3000):
        if not scheduler.has_work:
            break
        scheduler.ahead = rng.choice([0, 2, 5])
        plan = scheduler.schedule()
        assert sum(plan.counts) == plan.num_tokens <= scheduler.limits.token_budget
        assert plan.num_decode_tokens + plan.num_prefill_tokens == plan.num_tokens
        for i, tree in plan.trees.items():
            assert i in plan.decodes and plan.counts[i] == 1 + tree.num_nodes
        outputs: list[TokenOutput] = [*scheduler.commit(plan, memory.run(plan))]
        for output in [*outputs, *scheduler.take_outbox()]:
            got.setdefault(output.request_id, []).extend(output.token_ids)
            assert 0 <= output.num_accepted <= len(output.token_ids)
            told += output.num_accepted + output.num_rejected
            accepted += output.num_accepted
        scheduler.cache.check()
        for sequence in scheduler.running:
            assert sequence.drafts is None or sequence not in plan.sequences
            if sequence.num_remaining_tokens == 1 and sequence.num_output_tokens > 0:
                sequence.drafts = drafts_for(sequence, rng.randrange(7), rng)
    assert got == want
    assert scheduler.cache.num_available == scheduler.cache.pool.num_blocks
    counters = scheduler.counters
    assert counters.drafted_tokens == told > 0 and counters.accepted_tokens == accepted > 0
    assert sorted(set(gone)) == sorted(want)
    assert len(gone) == len(want) + counters.preemptions


def begin(scheduler: Scheduler, memory: DraftMemory, *prompts: list[int], num: int = 20) -> None:
    for i, prompt in enumerate(prompts):
        scheduler.add(ask("abc"[i], prompt, num, ignore_eos=True))
    while any(s.num_remaining_tokens > 1 for s in [*scheduler.running, *scheduler.waiting]):
        plan = scheduler.schedule()
        scheduler.commit(plan, memory.run(plan))


def test_drafts_take_blocks_that_are_at_hand_and_preempt_nobody() -> None:
    scheduler, _ = make(blocks=16, size=4, prefix=False)
    memory = DraftMemory(scheduler.cache)
    begin(scheduler, memory, list(range(7)) * 3, list(range(6)) * 4)
    first, second = scheduler.running
    while scheduler.cache.num_available:  # all blocks but those of the two are somebody's
        scheduler.cache.pool.allocate()
    for sequence in (first, second):
        sequence.drafts = chain([1] * 6)
    plan = scheduler.schedule()
    assert plan.preempted == []
    owned = [4 * len(s.lease.table.ids) for s in (first, second) if s.lease is not None]
    for i, s in enumerate(plan.sequences):
        nodes = plan.trees[i].num_nodes if i in plan.trees else 0
        assert s.num_computed_tokens + 1 + nodes == min(owned[i], s.num_computed_tokens + 7)


def test_blocks_held_for_drafts_go_back_before_anybody_is_preempted() -> None:
    scheduler, _ = make(blocks=16, size=4, prefix=False)
    memory = DraftMemory(scheduler.cache)
    begin(scheduler, memory, [1, 2, 3, 4, 5], [3, 2, 1], num=50)
    first, second = scheduler.running
    assert first.lease is not None and second.lease is not None
    scheduler.cache.grow(second.lease, second.num_computed_tokens + 30)  # for drafts, once
    held = len(second.lease.table.ids)
    assert scheduler.num_wasted_slots > 2 * 4
    while scheduler.cache.num_available:  # all others are somebody's
        scheduler.cache.pool.allocate()
    spare = len(first.lease.table.ids) * 4 - first.num_computed_tokens
    for _ in range(spare + 1):
        plan = scheduler.schedule()
        assert plan.preempted == [] and first in plan.sequences and second in plan.sequences
        scheduler.commit(plan, memory.run(plan))
    assert len(second.lease.table.ids) < held


def test_prompts_do_not_starve_for_drafts() -> None:
    scheduler, _ = make(budget=10, rows=4, blocks=60)
    memory = DraftMemory(scheduler.cache)
    begin(scheduler, memory, [1, 2, 3], [4, 5])
    for sequence in scheduler.running:
        sequence.drafts = chain([2] * 7)
    scheduler.add(ask("new", [3] * 12, 4))
    plan = scheduler.schedule()
    assert plan.num_draft_tokens == 4 and plan.num_prefill_tokens == 4  # halves of what is left
    scheduler.commit(plan, memory.run(plan))
    for sequence in scheduler.running:
        if sequence.num_remaining_tokens == 1:
            sequence.drafts = chain([2] * 3)
    plan = scheduler.schedule()
    assert plan.num_draft_tokens == 4 and plan.num_prefill_tokens == 4
    scheduler.commit(plan, memory.run(plan))


def test_a_run_ends_where_one_token_a_step_would_end_it() -> None:
    prompt = [1, 2, 3]
    coming = expected(prompt, 8)
    scheduler, _ = make()
    memory = DraftMemory(scheduler.cache)
    scheduler.add(ask("a", prompt, 9, stop_token_ids=(coming[4],), ignore_eos=True))
    plan = scheduler.schedule()
    scheduler.commit(plan, memory.run(plan))
    stop = coming.index(coming[4])
    (sequence,) = scheduler.running
    sequence.drafts = chain(coming[1:7])
    plan = scheduler.schedule()
    (output,) = scheduler.commit(plan, memory.run(plan))
    assert output.token_ids == tuple(coming[1 : stop + 1])
    assert output.finish_reason is FinishReason.STOP and output.stop_token_id == coming[4]
    assert (output.num_accepted, output.num_rejected) == (stop, 6 - stop)
    assert scheduler.counters.output_tokens == stop + 1
    assert not scheduler.has_work


def test_a_run_that_fails_behind_some_tokens_ends_with_them() -> None:
    scheduler, _ = make()
    memory = DraftMemory(scheduler.cache)
    begin(scheduler, memory, [1, 2, 3], [1, 2])
    for sequence in scheduler.running:
        sequence.drafts = chain([1, 2])
    plan = scheduler.schedule()
    verdicts = {
        0: Verdict((4, 5), (0, 1), (0, 1), failed="not finite"),
        1: Verdict((), (), (), failed="not finite"),
    }
    outputs = scheduler.commit(plan, StepResult([-1, -1], verdicts=verdicts))
    outputs += scheduler.take_outbox()
    assert [(o.token_ids, o.finish_reason, o.error) for o in outputs] == [
        ((4, 5), FinishReason.ERROR, "not finite"),
        ((), FinishReason.ERROR, "not finite"),
    ]
    assert scheduler.counters.finished == 2 and not scheduler.has_work
    assert scheduler.cache.num_available == scheduler.cache.pool.num_blocks


def test_a_preempted_sequence_forgets_its_drafts() -> None:
    scheduler, _ = make(blocks=16, size=4, prefix=False)
    memory = DraftMemory(scheduler.cache)
    gone: list[str] = []
    scheduler.on_gone = gone.append
    begin(scheduler, memory, [1] * 23, [2] * 23, num=30)
    while not scheduler.counters.preemptions:
        for sequence in scheduler.running:
            sequence.drafts = chain([1, 2, 3])
        plan = scheduler.schedule()
        scheduler.commit(plan, memory.run(plan))
    assert gone == ["b"] and [s.drafts for s in scheduler.waiting] == [None]
