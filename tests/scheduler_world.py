"""A scheduler and a fake memory that stands in for the model: shared by the scheduler's tests.

Each step's writes and reads can be followed block by block; tokens are a function of what was read.
"""

from __future__ import annotations

from moeserve.cache import BlockCache
from moeserve.plan import StepPlan, StepResult
from moeserve.request import Request, SamplingParams, TokenOutput
from moeserve.scheduler import ScheduleLimits, Scheduler

VOCAB = 7


def next_token(tokens: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % VOCAB


def expected(prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeMemory:
    """What a model would do with a plan: write tokens into slots, read the context back."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self.slots: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        size, matrix = self.cache.block_size, self.cache.tables.matrix
        written: set[int] = set()
        for s, start, count, row in zip(
            plan.sequences, plan.starts, plan.counts, plan.rows, strict=True
        ):
            for position in range(start, start + count):
                block = int(matrix[row, position // size])
                assert block >= 0
                slot = block * size + position % size
                assert slot not in written, "two tokens of a step are written to one slot"
                written.add(slot)
                self.slots[slot] = s.tokens[position]
        tokens = []
        for i in plan.sampled:
            s, row, end = plan.sequences[i], plan.rows[i], plan.starts[i] + plan.counts[i]
            seen = [self.slots[int(matrix[row, p // size]) * size + p % size] for p in range(end)]
            assert seen == s.tokens, "the context is not what was computed"
            tokens.append(next_token(seen))
        return StepResult(tokens)


def make(
    *,
    blocks: int = 32,
    size: int = 4,
    rows: int = 4,
    budget: int = 16,
    chunk: int | None = None,
    length: int = 64,
    prefix: bool = True,
    eos: tuple[int, ...] = (),
) -> tuple[Scheduler, FakeMemory]:
    cache = BlockCache(blocks, size, rows, prefix)
    limits = ScheduleLimits(rows, budget, chunk, length, VOCAB, frozenset(eos))
    return Scheduler(cache, limits), FakeMemory(cache)


def ask(name: str, prompt: list[int], num: int = 4, **fields: object) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=num, **fields)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def step(scheduler: Scheduler, memory: FakeMemory) -> list[TokenOutput]:
    plan = scheduler.schedule()
    return [*scheduler.commit(plan, memory.run(plan)), *scheduler.take_outbox()]


def finish(scheduler: Scheduler, memory: FakeMemory, limit: int = 2000) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    while scheduler.has_work:
        for output in step(scheduler, memory):
            got.setdefault(output.request_id, []).extend(output.token_ids)
        limit -= 1
        assert limit > 0, "no end in sight"
    return got
