"""Two halves in turn: the order, what a slow network still costs, and the same bits as the whole.

Over one rank and ranks as threads; over real ranks: tests/dist/test_same_tokens_dist.py.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_threads import gloo_threads

from dispatch.base import DispatchConfig, Dispatcher, DispatchError, PeerError, WireFormat
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.delayed import DelayedDispatcher
from dispatch.local import LocalDispatcher
from dispatch.thread_group import ThreadBoard, ThreadedAllGather, ThreadedCollective
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.overlap import HalvesObserver, Stages, drain, interleave
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import largest_half
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
SMALL = {"num_hidden_layers": 4, "vocab_size": 128, "n_routed_experts": 8, "n_group": 4}
# Of each step: new tokens by sequence. All shapes of a cut: between sequences, within one that is
# long, within one that has a cache already; decodes; one row; none.
STEPS: tuple[dict[int, int], ...] = (
    {0: 37, 1: 3},
    {0: 1, 1: 1, 2: 20},
    {0: 1, 1: 1, 2: 1, 3: 9},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {2: 1},
    {},
    {1: 19},
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("overlap")
    write_random_checkpoint(made, family_config("v3", **SMALL), tokenizer=False)
    return made


def kernels(name: str = "native") -> Kernels:
    try:
        return create_kernels(name).kernels
    except KernelsUnavailable:
        return create_kernels("torch").kernels


def tokens_of(step: dict[int, int], seed: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {s: torch.randint(3, 128, (n,), generator=generator).tolist() for s, n in step.items()}


class Seen:
    """What an observer was told: picks and rows by layer, each once a step."""

    def __init__(self) -> None:
        self.picks: list[tuple[int, torch.Tensor]] = []
        self.rows: list[tuple[int, list[int]]] = []
        self.parts: set[str] = set()

    def expert_picks(self, layer: int, ids: torch.Tensor) -> None:
        self.picks.append((layer, ids))

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        self.rows.append((layer, rows))

    def part(self, name: str, seconds: float) -> None:
        assert seconds >= 0
        self.parts.add(name)

    def must_match(self, other: Seen) -> None:
        assert [layer for layer, _ in self.picks] == [layer for layer, _ in other.picks]
        for (_, mine), (_, its) in zip(self.picks, other.picks, strict=True):
            assert torch.equal(mine, its)
        assert self.rows == other.rows and self.parts == other.parts


# -- the order ----------------------------------------------------------------------------------


def stages(name: str, count: int, said: list[str]) -> Stages:
    for i in range(count):
        said.append(f"{name}{i}")
        yield
    said.append(f"{name}.")
    return torch.tensor([count])


def test_halves_take_turns_and_the_first_is_ahead() -> None:
    said: list[str] = []
    results = interleave(stages("a", 3, said), stages("b", 3, said))
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2", "a.", "b."]
    assert [int(x) for x in results] == [3, 3]
    assert int(drain(stages("c", 2, said))) == 2 and said[-3:] == ["c0", "c1", "c."]


def test_an_error_ends_both() -> None:
    ended: list[str] = []

    def half(name: str, fails: bool) -> Stages:
        try:
            yield
            if fails:
                raise RuntimeError("as asked")
            yield
        finally:
            ended.append(name)
        return torch.zeros(0)

    for fails in ((True, False), (False, True)):
        ended.clear()
        with pytest.raises(RuntimeError, match="as asked"):
            interleave(half("a", fails[0]), half("b", fails[1]))
        assert sorted(ended) == ["a", "b"]


def test_an_observer_is_told_of_the_whole() -> None:
    seen = Seen()
    halves = HalvesObserver(seen)
    for layer in (0, 1):
        for ids in ([[1, 2], [3, 4]], [[5, 6]]):
            halves.expert_picks(layer, torch.tensor(ids))
            halves.rows_sent(layer, [len(ids), layer])
    assert [ids.tolist() for _, ids in seen.picks] == [[[1, 2], [3, 4], [5, 6]]] * 2
    assert seen.rows == [(0, [3, 0]), (1, [3, 2])]


# -- what a slow network still costs ------------------------------------------------------------

ATTENTION, MLP, EXPERTS = 5, 2, 9  # ticks a row


class Ticks:
    """A clock that moves only where something is computed or waited for."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def sleep(self, ticks: float) -> None:
        self.now += int(ticks)


class TimedKernels:
    """Kernels of which each takes its ticks."""

    def __init__(self, inner: Kernels, clock: Ticks) -> None:
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def absorbed_mla(self, *args: Any) -> Any:
        layer = self._inner.absorbed_mla(*args)

        def timed(x: torch.Tensor, *more: Any) -> torch.Tensor:
            self._clock.now += ATTENTION * x.shape[0]
            return layer(x, *more)

        return timed

    def mlp(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        self._clock.now += MLP * x.shape[0]
        return self._inner.mlp(x, *more)

    def experts(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        self._clock.now += EXPERTS * x.shape[0]
        return self._inner.experts(x, *more)


def whole_ticks(rows: int, dense: int, moe: int, latency: int, per_token: int) -> int:
    """By hand: the shared expert covers some of a dispatch, nothing covers a combine."""
    travel = latency + per_token * rows
    layer = max(MLP * rows, travel) + EXPERTS * rows + travel
    return dense * (ATTENTION + MLP) * rows + moe * (ATTENTION * rows + layer)


def halves_ticks(rows: int, dense: int, moe: int, latency: int, per_token: int) -> int:
    """By hand: what each half does while the other's rows travel, event by event."""
    a, b = rows - rows // 2, rows // 2
    travel_a, travel_b = latency + per_token * a, latency + per_token * b
    now = dense * (ATTENTION + MLP) * a + ATTENTION * a
    sent_a = now
    now += dense * (ATTENTION + MLP) * b
    for layer in range(moe):
        now += ATTENTION * b
        sent_b = now
        back_a = now = max(now + MLP * a, sent_a + travel_a) + EXPERTS * a
        back_b = now = max(now + MLP * b, sent_b + travel_b) + EXPERTS * b
        now = max(now, back_a + travel_a)
        if layer < moe - 1:
            now += ATTENTION * a
            sent_a = now
        now = max(now, back_b + travel_b)
    return now


@pytest.mark.parametrize("rows", [1, 8, 13])
@pytest.mark.parametrize(("latency", "per_token"), [(0, 0), (20, 0), (16, 3), (300, 0)])
def test_the_schedule_is_the_predicted_one(
    folder: Path, rows: int, latency: int, per_token: int
) -> None:
    clock = Ticks()
    slow: list[DelayedDispatcher] = []

    def make(config: DispatchConfig) -> Dispatcher:
        inner = LocalDispatcher(SINGLE, config)
        slow.append(DelayedDispatcher(inner, latency, per_token, clock=clock, sleep=clock.sleep))
        return slow[0]

    timed: Any = TimedKernels(kernels("torch"), clock)
    model = load_model(
        folder, dtype=torch.float32, kernels=timed, group=SINGLE, dispatcher_factory=make
    )
    dense = model.config.first_k_dense_replace
    moe = model.config.num_hidden_layers - dense
    assert dense and moe > 1 and model.config.n_shared_experts == 1
    ticks, waits = [], []
    for halves in (False, True):
        runner = OfflineRunner(model)
        before, waited = clock.now, slow[0].waited
        runner.step({s: [5 + s] for s in range(rows)}, halves=halves)
        ticks.append(clock.now - before)
        waits.append(slow[0].waited - waited)
    assert ticks[0] == whole_ticks(rows, dense, moe, latency, per_token)
    assert ticks[1] == halves_ticks(rows, dense, moe, latency, per_token)
    compute = rows * (dense * (ATTENTION + MLP) + moe * (ATTENTION + MLP + EXPERTS))
    assert [t - w for t, w in zip(ticks, waits, strict=True)] == [compute, compute]
    if rows == 8 and latency == 20:
        # Each half's attention (4 rows) is as long as a way: only the last way home is waited for.
        assert ticks[1] == compute + 20 and ticks[0] == compute + moe * (20 - 2 * 8 + 20)
    if latency and rows > 1:
        assert waits[1] < waits[0]


def test_two_layers_are_in_flight_and_never_three(folder: Path) -> None:
    class Watched(DelayedDispatcher):
        in_flight = most = 0

        def dispatch_start(self, *args: Any) -> Any:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            return super().dispatch_start(*args)

        def combine_finish(self, handle: Any) -> torch.Tensor:
            self.in_flight -= 1
            return super().combine_finish(handle)

    model = load_model(
        folder,
        dtype=torch.float32,
        kernels=kernels(),
        group=SINGLE,
        dispatcher_factory=lambda config: Watched(LocalDispatcher(SINGLE, config), 0.0),
    )
    for halves, most in ((False, 1), (True, 2)):
        OfflineRunner(model).step({0: [3, 4, 5]}, halves=halves)
        assert model.dispatcher.most == most and model.dispatcher.in_flight == 0  # type: ignore


# -- the same bits ------------------------------------------------------------------------------


def must_match(plain: OfflineRunner, cut: OfflineRunner, chunks: dict[int, list[int]]) -> None:
    """A step of both: logits, hidden states, what is told of it. Bounds are agreed on before."""
    seen, told = Seen(), Seen()
    wanted, found = plain.step(chunks, seen), cut.step(chunks, told, halves=True)
    for s in chunks:
        assert torch.equal(found.logits[s], wanted.logits[s])
        assert torch.equal(found.hidden[s], wanted.hidden[s])
    told.must_match(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["native", "torch"])
def test_one_rank_says_the_same(folder: Path, name: str, dtype: torch.dtype) -> None:
    model = load_model(
        folder,
        dtype=dtype,
        kernels=kernels(name),
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
    )
    plain, cut = OfflineRunner(model), OfflineRunner(model, block_size=4, num_blocks=200, seed=1)
    for number, step in enumerate(STEPS):
        must_match(plain, cut, tokens_of(step, number))
    for layer, other in zip(plain.cache.layers[:4], cut.cache.layers[:4], strict=True):
        assert layer.isfinite().all() and other.any()


def test_the_comparison_can_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half ahead of the first: it attends to latents that are not there yet."""
    model = load_model(
        folder,
        dtype=torch.float32,
        kernels=kernels(),
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
    )
    monkeypatch.setattr("models.deepseek.model.interleave", lambda a, b: interleave(b, a)[::-1])
    with pytest.raises(AssertionError):
        must_match(OfflineRunner(model), OfflineRunner(model), tokens_of(STEPS[0], 0))


HOSTED = ExpertPlacement.trivial(4, 9, 4, 3)  # 8 routed, the shared one, 3 copies
CASES = {
    "2-agreed": (2, ThreadedCollective, ExpertPlacement.trivial(4, 8, 2), True),
    "2-fp8": (2, ThreadedCollective, ExpertPlacement.trivial(4, 8, 2), True),
    "2-not-agreed": (2, ThreadedCollective, ExpertPlacement.trivial(4, 8, 2, 2), False),
    "2-gathered": (2, ThreadedAllGather, ExpertPlacement.trivial(4, 8, 2), True),
    "4-hosted": (4, ThreadedCollective, HOSTED, True),
    "4-hosted-gathered": (4, ThreadedAllGather, HOSTED, False),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_say_the_same_through_a_change_of_placement(folder: Path, name: str) -> None:
    """Ranks have steps of their own; experts move on by a rank between two of them. The board
    checks that all make the same collectives."""
    size, kind, placement, agreed = CASES[name]
    board, chosen = ThreadBoard(size), kernels()
    wire = WireFormat.FP8 if name.endswith("fp8") else WireFormat.MODEL
    bundles: dict[int, list[list[torch.Tensor]]] = {}
    barrier = threading.Barrier(size)

    def rank_main(rank: int) -> None:
        group = board.group(rank)
        model = load_model(
            folder,
            dtype=torch.bfloat16,
            kernels=chosen,
            group=group,
            dispatcher_factory=lambda config: kind(
                group, replace(config, wire=wire), combine_pairs=chosen.combine_pairs
            ),
            placement=placement,
            max_tokens_per_rank=64,
            num_threads=1,
        )
        plain, cut = OfflineRunner(model), OfflineRunner(model, seed=1)
        for number in range(len(STEPS)):
            # Others are at other steps: prefill meets decode and ranks without any tokens.
            step = STEPS[(number + 3 * rank) % len(STEPS)]
            most = max(sum(STEPS[(number + 3 * r) % len(STEPS)].values()) for r in range(size))
            compare(model, plain, cut, tokens_of(step, 10 * rank + number), most)
            if number == 3:
                move_on(model, rank)
        assert model.placement.generation == placement.generation + 1

    def compare(model: DeepSeekModel, plain: Any, cut: Any, chunks: Any, most: int) -> None:
        seen, told = Seen(), Seen()
        model.dispatcher.set_step_bound(most if agreed else None)
        wanted = plain.step(chunks, seen)
        model.dispatcher.set_step_bound(largest_half(most) if agreed else None)
        found = cut.step(chunks, told, halves=True)
        for s in chunks:
            assert torch.equal(found.logits[s], wanted.logits[s])
            assert torch.equal(found.hidden[s], wanted.hidden[s])
        told.must_match(seen)

    def move_on(model: DeepSeekModel, rank: int) -> None:
        """What a rank hosted, the next one hosts."""
        experts = model.expert_weights()
        bundles[rank] = [[w.bundle(s).cut().clone() for s in range(w.num_slots)] for w in experts]
        barrier.wait(60)
        for weights, moved in zip(experts, bundles[(rank - 1) % size], strict=True):
            for slot, bundle in enumerate(moved):
                weights.bundle(slot).copy_from(bundle)
        old = model.placement
        table = np.roll(old.physical_to_logical, old.num_local_experts, axis=1)
        model.adopt_placement(
            ExpertPlacement(table, old.num_logical_experts, size, old.generation + 1)
        )

    board.run(rank_main)


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("call", [3, 4])
def test_a_refusal_within_a_half_ends_the_step_on_all_ranks(
    folder: Path, call: int, agreed: bool
) -> None:
    """Of the second layer: the first half's dispatch, the second's. The other rank has a half in
    flight, and may have sent the next one already."""

    class Refusing(ThreadedCollective):
        count = 0

        def dispatch_start(self, x: Any, slots: torch.Tensor, weights: torch.Tensor) -> Any:
            self.count += 1
            if self.group.rank == 1 and self.count == call:
                slots = torch.full_like(slots, 1000)
            return super().dispatch_start(x, slots, weights)

    board = ThreadBoard(2, patience=10)
    errors: dict[int, DispatchError] = {}

    def rank_main(rank: int) -> None:
        group = board.group(rank)
        model = load_model(
            folder,
            dtype=torch.bfloat16,
            kernels=kernels(),
            group=group,
            dispatcher_factory=lambda config: Refusing(group, config),
            num_threads=1,
        )
        model.dispatcher.set_step_bound(2 if agreed else None)
        with pytest.raises(DispatchError) as caught:
            OfflineRunner(model).step({0: [3, 4, 5]}, halves=True)
        errors[rank] = caught.value

    board.run(rank_main)
    first, second = errors[0], errors[1]
    assert isinstance(first, PeerError) and "rank" in str(first), first
    assert not isinstance(second, PeerError) and "1000" in str(second), second


def test_deepep_low_latency_takes_two_halves(tmp_path: Path) -> None:
    """Two buffers, one message on its way: the adapter lands what is before it sends. A token's
    rows and results are rounded alike in either half, so results stay as close as they are."""
    config = family_config(
        "v3", **SMALL | {"hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 2},
        num_key_value_heads=2, moe_intermediate_size=32, intermediate_size=64,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    write_random_checkpoint(tmp_path, config, tokenizer=False)
    chosen = kernels()

    def rank_main(group: EPGroup) -> float:
        def make(config: DispatchConfig) -> Dispatcher:
            return EmulatedLowLatencyDispatcher(group, config)

        model = load_model(
            tmp_path,
            dtype=torch.bfloat16,
            kernels=chosen,
            group=group,
            dispatcher_factory=make,
            deterministic=False,
            max_tokens_per_rank=8,
            num_threads=1,
        )
        assert model.dispatcher.max_in_flight == 2
        plain, cut = OfflineRunner(model), OfflineRunner(model, seed=1)
        worst = 0.0
        for number, step in enumerate(({0: 7}, {0: 1, 1: 1, 2: 1}, {0: 1, 3: 4}, {0: 1})):
            mine = {} if group.rank == 1 and number == 1 else step
            chunks = tokens_of(mine, 10 * group.rank + number)
            seen, told = Seen(), Seen()
            wanted, found = plain.step(chunks, seen), cut.step(chunks, told, halves=True)
            for s in chunks:
                off = (found.logits[s] - wanted.logits[s]).norm() / wanted.logits[s].norm()
                worst = max(worst, float(off))
            if number == 0:  # later ones follow hidden states that may differ in some bit
                told.must_match(seen)
        return worst

    assert max(gloo_threads(2, rank_main, timeout=60)) < 0.02
