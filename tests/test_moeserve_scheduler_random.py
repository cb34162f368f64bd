"""The scheduler under any sequence of requests, steps and aborts (hypothesis)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import expected, make

from moeserve.plan import StepPlan
from moeserve.request import FinishReason, Request, SamplingParams, TokenOutput

# -- at random ----------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and are aborted at any moment, also between schedule and commit; the pool is
    so small that sequences are preempted. In the end all have what they should."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Request] = {}
        self.got: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.plan: StepPlan | None = None

    @initialize(
        size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 12),
        chunk=st.sampled_from([None, 1, 3, 5]),
        rows=st.integers(1, 6),
        spare=st.integers(0, 4),
        prefix=st.booleans(),
    )
    def start(
        self, size: int, budget: int, chunk: int | None, rows: int, spare: int, prefix: bool
    ) -> None:
        blocks = -(-20 // size) + spare
        self.scheduler, self.memory = make(
            blocks=blocks,
            size=size,
            rows=rows,
            budget=budget,
            chunk=chunk,
            length=20,
            prefix=prefix,
        )

    @precondition(lambda self: len(self.asked) < 20)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        num=st.integers(1, 12),
        salt=st.sampled_from(["", "", "s"]),
    )
    def add(self, prompt: list[int], num: int, salt: str) -> None:
        name = str(len(self.asked))
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0, max_tokens=num),
            cache_salt=salt,
        )
        self.asked[name] = request
        self.scheduler.add(request)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        known = self.scheduler.abort(name)
        assert known is False or name not in self.ends
        self.collect(self.scheduler.take_outbox())

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        limits = self.scheduler.limits
        oldest = next(iter([*self.scheduler.running, *self.scheduler.waiting]), None)
        self.plan = self.scheduler.schedule()
        assert self.plan.num_tokens == sum(self.plan.counts) <= limits.token_budget
        assert len(set(self.plan.rows)) == len(self.plan.sequences) <= limits.max_num_sequences
        for count in self.plan.counts:
            assert 1 <= count <= (limits.chunk_size or limits.token_budget)
        if oldest is not None:
            assert oldest in self.plan.sequences, "the oldest did not advance"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        assert self.plan is not None
        outputs = self.scheduler.commit(self.plan, self.memory.run(self.plan))
        self.plan = None
        self.collect([*outputs, *self.scheduler.take_outbox()])

    @precondition(lambda self: self.plan is None)
    @rule(steps=st.integers(2, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.schedule()
            self.books_are_right()
            self.commit()

    def collect(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "an output after the end"
            self.got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.cache.check()
        held = [s.lease for s in scheduler.running if s.lease is not None]
        assert len(held) == len(scheduler.running)
        assert all(s.lease is None for s in scheduler.waiting)
        for queue in (scheduler.running, scheduler.waiting):
            order = [s.arrival_index for s in queue]
            assert order == sorted(order)
        if not scheduler.cache.prefix_cache:  # else who waits for a twin is overtaken
            order = [s.arrival_index for s in [*scheduler.running, *scheduler.waiting]]
            assert order == sorted(order)
        own = sum(lease.table.ids.count(b) for lease in held for b in set(lease.table.ids))
        assert own == sum(len(lease.table.ids) for lease in held)
        owners = sum(scheduler.cache.pool.owners)
        assert owners == own + len(scheduler.cache.tree)
        if self.plan is None:
            size = scheduler.cache.block_size
            for s in scheduler.running:
                assert s.lease is not None
                assert 0 <= len(s.lease.table.ids) * size - s.num_computed_tokens < size

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.commit()
        steps = 0
        while self.scheduler.has_work:
            self.schedule()
            self.commit()
            steps += 1
            assert steps < 3000, "not all of them finish"
        assert self.ends.keys() == self.asked.keys()
        for name, request in self.asked.items():
            prompt = list(request.prompt_token_ids)
            num = min(request.sampling.max_tokens, 20 - len(prompt))
            whole, got = expected(prompt, num), self.got[name]
            if self.ends[name] is FinishReason.ABORT:
                assert got == whole[: len(got)]
            else:
                assert got == whole
        assert self.scheduler.cache.num_available == self.scheduler.cache.pool.num_blocks
        assert self.scheduler.cache.tables.num_free_rows == self.scheduler.limits.max_num_sequences


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
