"""The scheduler on its own: a fake memory stands in for the model, so that each step's writes and
reads can be followed block by block."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_world import VOCAB, ask, expected, finish, make, step

from moeserve.errors import InvalidRequest
from moeserve.plan import StepResult
from moeserve.request import FinishReason, Request, TokenLogprob, TokenOutput

# -- one rule -----------------------------------------------------------------------------------


def test_decodes_go_first_then_prefill_fills_the_budget() -> None:
    scheduler, memory = make(budget=10)
    scheduler.add(ask("a", [1] * 6, 9))
    step(scheduler, memory)
    scheduler.add(ask("b", [2] * 20, 9))
    plan = scheduler.schedule()
    assert [(s.request_id, c) for s, c in zip(plan.sequences, plan.counts, strict=True)] == [
        ("a", 1),
        ("b", 9),
    ]
    assert (plan.num_tokens, plan.num_decodes, plan.num_prefill_tokens) == (10, 1, 9)
    assert plan.sampled == [0]
    scheduler.commit(plan, memory.run(plan))
    assert finish(scheduler, memory)["b"] == expected([2] * 20, 9)


@pytest.mark.parametrize("chunk", [1, 3, 5, 64, None])
def test_chunks_are_capped_and_change_no_token(chunk: int | None) -> None:
    scheduler, memory = make(budget=12, chunk=chunk)
    prompt = [(7 * i) % VOCAB for i in range(40)]
    scheduler.add(ask("a", prompt, 6))
    largest = 0
    got: list[int] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        largest = max([largest, *plan.counts])
        for output in scheduler.commit(plan, memory.run(plan)):
            got += output.token_ids
    assert largest == min(chunk or 12, 12)
    assert got == expected(prompt, 6)


def test_the_oldest_prefill_is_not_starved_by_decodes_of_later_ones() -> None:
    scheduler, memory = make(budget=3, chunk=1, rows=4, blocks=64)
    scheduler.add(ask("old", [1] * 30, 1))
    for name in "bcd":
        scheduler.add(ask(name, [2], 60))
    steps = 0
    while any(s.request_id == "old" for s in [*scheduler.running, *scheduler.waiting]):
        before = scheduler.running[0].num_computed_tokens if scheduler.running else 0
        step(scheduler, memory)
        if scheduler.running and scheduler.running[0].request_id == "old":
            assert scheduler.running[0].num_computed_tokens > before
        steps += 1
    assert steps == 30


def test_only_the_last_block_is_partly_empty() -> None:
    scheduler, memory = make(rows=3, budget=5, size=4, prefix=False)
    for i in range(3):
        scheduler.add(ask(str(i), [i] * (5 + i), 9))
    while scheduler.has_work:
        step(scheduler, memory)
        for s in scheduler.running:
            assert s.lease is not None
            assert len(s.lease.table.ids) == -(-s.num_computed_tokens // 4)
        assert scheduler.num_wasted_slots <= 3 * len(scheduler.running)


def test_an_empty_plan_needs_no_commit() -> None:
    scheduler, memory = make()
    for _ in range(3):
        assert scheduler.schedule().num_tokens == 0
    scheduler.add(ask("a", [1, 2], 2))
    assert finish(scheduler, memory) == {"a": expected([1, 2], 2)}


# -- pressure -----------------------------------------------------------------------------------


def test_the_last_arrived_is_preempted_and_still_right() -> None:
    scheduler, memory = make(blocks=8, size=2, rows=4, length=16, prefix=False)
    for i in range(3):
        scheduler.add(ask(str(i), [i, i + 1, i + 2], 10))
    order: list[str] = []
    got: dict[str, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        order += plan.preempted
        for output in scheduler.commit(plan, memory.run(plan)):
            got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.num_preemptions == order.count(output.request_id)
    assert order and "0" not in order and scheduler.counters.preemptions == len(order)
    assert got == {str(i): expected([i, i + 1, i + 2], 10) for i in range(3)}
    assert scheduler.cache.pool.num_free == 8


def test_a_preempted_sequence_comes_back_through_the_prefix_cache() -> None:
    computed = {}
    for prefix in (True, False):
        scheduler, memory = make(blocks=10, size=2, rows=4, length=20, prefix=prefix)
        for i in range(2):
            scheduler.add(ask(str(i), [i] * 4, 14))
        finish(scheduler, memory)
        assert scheduler.counters.preemptions
        computed[prefix] = scheduler.counters.computed_prompt_tokens
    assert computed[True] < computed[False]


def test_a_full_pool_admits_nobody_before_the_running_ones() -> None:
    """Head of line: a short later request does not overtake a long earlier one for ever."""
    scheduler, memory = make(blocks=8, size=2, rows=4, length=16, prefix=False)
    scheduler.add(ask("a", [1] * 8, 7))
    step(scheduler, memory)
    scheduler.add(ask("long", [2] * 12, 1))
    scheduler.add(ask("short", [3], 1))
    ended: list[str] = []
    while scheduler.has_work:
        ended += [o.request_id for o in step(scheduler, memory) if o.finish_reason]
    assert ended == ["a", "long", "short"]


# -- refusing and ending ------------------------------------------------------------------------


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    scheduler, _ = make(length=16)
    with pytest.raises(InvalidRequest, match=r"16 tokens.*share 16 tokens.*at most 15"):
        scheduler.add(ask("a", [1] * 16))
    scheduler.add(ask("b", [1] * 15))
    scheduler.add(ask("c", [1] * 16, 0))  # asks for no output
    for request, field in (
        (ask("b", [1]), "request_id"),
        (ask("d", []), "prompt"),
        (ask("d", [1, VOCAB]), "prompt"),
        (ask("d", [-1]), "prompt"),
        (ask("d", [1], logit_bias={VOCAB: 1.0}), "logit_bias"),
        (ask("d", [1], logit_bias={1: float("nan")}), "logit_bias"),
        (ask("d", [1], top_p=0.0), "top_p"),
        (ask("d", [1], top_p=float("nan")), "top_p"),
        (ask("d", [1], min_p=1.5), "min_p"),
        (ask("d", [1], top_k=-1), "top_k"),
        (ask("d", [1], repetition_penalty=0.0), "repetition_penalty"),
        (ask("d", [1], 4, min_tokens=5), "min_tokens"),
        (ask("d", [1], -1), "max_tokens"),
        (ask("d", [1], logprobs=-1), "logprobs"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            scheduler.add(request)
        assert caught.value.field == field
    assert len(scheduler.waiting) == 2


def test_finish_reasons() -> None:
    prompt = [1, 2, 3]
    out = expected(prompt, 8)
    eos = out[3]
    first = out.index(eos)
    other = next(t for t in out if t != eos)

    def last(request: Request, **fields: object) -> TokenOutput:
        scheduler, memory = make(**fields)  # type: ignore[arg-type]
        scheduler.add(request)
        outputs = []
        while scheduler.has_work:
            outputs += step(scheduler, memory)
        assert [t for o in outputs for t in o.token_ids] == out[: len(outputs)]
        assert all(o.finish_reason is None for o in outputs[:-1])
        return outputs[-1]

    end = last(ask("a", prompt, 8), eos=(eos,))
    assert (end.finish_reason, end.stop_token_id, end.token_ids) == (FinishReason.STOP, eos, (eos,))
    end = last(ask("a", prompt, 8, ignore_eos=True), eos=(eos,))
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.LENGTH, None)
    end = last(ask("a", prompt, 8, stop_token_ids=(other,)))
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, other)
    end = last(ask("a", prompt, 8, ignore_eos=True, stop_token_ids=(eos,)), eos=(eos,))
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, eos)
    assert last(ask("a", prompt, first + 1), eos=(eos,)).finish_reason is FinishReason.STOP
    assert last(ask("a", prompt, 50), length=7).finish_reason is FinishReason.LENGTH


def test_no_output_wanted_still_runs_the_prompt() -> None:
    scheduler, memory = make()
    scheduler.add(ask("a", [1, 2, 3], 0))
    (output,) = step(scheduler, memory)
    assert output.token_ids == () and output.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work and scheduler.counters.output_tokens == 0


def test_abort_while_waiting_running_and_in_flight() -> None:
    scheduler, memory = make(rows=2)
    for name in ("run", "flight", "wait"):
        scheduler.add(ask(name, [1, 2, 3, 4, 5], 9))
    step(scheduler, memory)
    assert scheduler.abort("wait") and not scheduler.abort("wait") and not scheduler.abort("none")
    plan = scheduler.schedule()
    assert scheduler.abort("flight") and not scheduler.abort("flight")
    assert scheduler.take_outbox()[0].request_id == "wait"
    assert len(scheduler.running) == 2  # its blocks are being written: they stay until the commit
    outputs = scheduler.commit(plan, memory.run(plan))
    assert [o.request_id for o in outputs] == ["run"]
    (aborted,) = scheduler.take_outbox()
    assert (aborted.request_id, aborted.finish_reason) == ("flight", FinishReason.ABORT)
    scheduler.abort("run")
    assert not scheduler.has_work and scheduler.counters.aborted == 3
    assert scheduler.cache.num_available == 32
    scheduler.add(ask("run", [1], 1))  # the id is free again
    assert finish(scheduler, memory)["run"] == expected([1], 1)


def test_a_lost_step_ends_its_sequences_only() -> None:
    scheduler, memory = make(rows=2)
    for i, name in enumerate("abc"):
        scheduler.add(ask(name, [i, 2, 3, 4, 5], 3))
    plan = scheduler.schedule()
    scheduler.abort("a")
    scheduler.fail_plan(plan, "it burnt")
    ends = {o.request_id: (o.finish_reason, o.error) for o in scheduler.take_outbox()}
    assert ends == {"a": (FinishReason.ABORT, None), "b": (FinishReason.ERROR, "it burnt")}
    assert finish(scheduler, memory) == {"c": expected([2, 2, 3, 4, 5], 3)}
    assert scheduler.cache.num_available == 32 and len(scheduler.cache.tree) == 1


def test_one_row_that_fails_does_not_take_the_others_with_it() -> None:
    scheduler, memory = make()
    scheduler.add(ask("a", [1, 2], 2))
    scheduler.add(ask("b", [3, 4], 2))
    plan = scheduler.schedule()
    result = memory.run(plan)
    outputs = scheduler.commit(plan, StepResult(result.token_ids, failed={0: "not finite"}))
    assert [o.request_id for o in outputs] == ["b"]
    (bad,) = scheduler.take_outbox()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "not finite")


def test_cached_tokens_are_told_and_prompt_logprobs_take_no_hit() -> None:
    scheduler, memory = make()
    prompt = [1, 2, 3, 4, 5, 6]
    scheduler.add(ask("a", prompt, 1))
    step(scheduler, memory)
    scheduler.add(ask("b", prompt, 1))
    (output,) = step(scheduler, memory)
    assert output.num_cached_tokens == 4 and scheduler.counters.cached_tokens == 4
    scheduler.add(ask("c", prompt, 1, prompt_logprobs=0))
    plan = scheduler.schedule()
    assert plan.starts == [0] and plan.counts == [6]
    known = [TokenLogprob(t, -1.0, 1) for t in prompt[1:]]
    result = memory.run(plan)
    (output,) = scheduler.commit(plan, StepResult(result.token_ids, prompt_logprobs={"c": known}))
    assert output.prompt_logprobs == (None, *known) and output.num_cached_tokens == 0


@pytest.mark.parametrize(("budget", "chunk"), [(64, None), (10, None), (30, 7)])
def test_equal_prompts_that_come_together_are_computed_once(budget: int, chunk: int | None) -> None:
    """n > 1 of one prompt: the others wait until its blocks are there, step by step."""
    scheduler, memory = make(rows=8, size=4, budget=budget, chunk=chunk, blocks=99)
    prompt = [i % VOCAB for i in range(30)]
    for i in range(5):
        scheduler.add(ask(str(i), prompt, 3))
    scheduler.add(ask("other", [6, 6, 6, 6, 6], 3))
    got = finish(scheduler, memory)
    assert got.pop("other") == expected([6] * 5, 3)
    assert got == {str(i): expected(prompt, 3) for i in range(5)}
    computed = scheduler.counters.computed_prompt_tokens - 5
    if chunk is None:
        assert computed == 30 + 4 * 2  # 28 of 30 tokens are hit by each of the four
    else:  # a later one starts as soon as it would not repeat this very step's work
        assert computed < 5 * 30 / 2


def test_who_waits_for_a_twin_holds_up_nobody_else() -> None:
    """A long prompt comes in small chunks: its twin waits for it, a short one behind does not."""
    scheduler, memory = make(rows=8, size=4, budget=64, chunk=4, blocks=99)
    long = [i % VOCAB for i in range(40)]
    for name in ("a", "b"):
        scheduler.add(ask(name, long, 3))
    scheduler.add(ask("c", [6, 5, 4], 3))
    plan = scheduler.schedule()
    assert [s.request_id for s in plan.sequences] == ["a", "c"]
    scheduler.commit(plan, memory.run(plan))
    assert [s.request_id for s in scheduler.waiting] == ["b"]
    got: dict[str, list[int]] = finish(scheduler, memory)
    assert got["a"] == got["b"] == expected(long, 3)
    assert scheduler.counters.computed_prompt_tokens < 40 + 3 + 8


def test_the_order_of_arrival_survives_overtaking_and_preemption() -> None:
    scheduler, memory = make(rows=8, size=4, budget=64, chunk=4, blocks=13, length=48)
    long = [i % VOCAB for i in range(24)]
    for name in ("a", "b"):
        scheduler.add(ask(name, long, 12))
    for name in ("c", "d"):
        scheduler.add(ask(name, [ord(name) % VOCAB] * 5, 20))
    got: dict[str, list[int]] = {}
    while scheduler.has_work:
        for output in step(scheduler, memory):
            got.setdefault(output.request_id, []).extend(output.token_ids)
        for queue in (scheduler.running, scheduler.waiting):
            arrivals = [s.arrival_index for s in queue]
            assert arrivals == sorted(arrivals)
    assert scheduler.counters.preemptions > 0
    assert got["a"] == got["b"] == expected(long, 12)
    assert got["c"] == expected([ord("c") % VOCAB] * 5, 20)


def test_other_salts_do_not_wait_for_each_other() -> None:
    scheduler, _ = make(rows=8, budget=64)
    for salt in ("a", "b"):
        scheduler.add(msgspec.structs.replace(ask(salt, [1] * 20), cache_salt=salt))
    assert scheduler.schedule().counts == [20, 20]


def test_preempted_in_the_middle_of_prompt_logprobs() -> None:
    """They begin anew with the prompt; what had been collected is not told twice."""
    scheduler, memory = make(blocks=24, size=1, rows=2, budget=8, chunk=2, length=24)
    scheduler.add(ask("a", [1] * 4, 18))
    step(scheduler, memory)
    prompt = [i % VOCAB for i in range(16)]
    scheduler.add(ask("x", prompt, 2, prompt_logprobs=0))
    found: list[TokenOutput] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        known = {}
        for s, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            if s.wants_prompt_logprobs:
                following = s.tokens[start + 1 : min(start + count, 15) + 1]
                known[s.request_id] = [TokenLogprob(t, 0.0, 1) for t in following]
        result = StepResult(memory.run(plan).token_ids, prompt_logprobs=known)
        found += [o for o in scheduler.commit(plan, result) if o.request_id == "x"]
    assert found[-1].num_preemptions == 1
    told = found[0].prompt_logprobs
    assert told is not None and told[0] is None
    assert [e.token_id for e in told[1:] if e is not None] == prompt[1:]
    assert all(o.prompt_logprobs is None for o in found[1:])


def test_output_blocks_are_cached_for_the_next_turn() -> None:
    scheduler, memory = make(size=2)
    first = [1, 2, 3]
    scheduler.add(ask("a", first, 6))
    answer = finish(scheduler, memory)["a"]
    scheduler.add(ask("b", [*first, *answer, 5], 1))
    plan = scheduler.schedule()
    # 3 + 6 tokens, of which the last was never computed: 8 positions, 4 blocks.
    assert plan.starts == [8]
    scheduler.commit(plan, memory.run(plan))
