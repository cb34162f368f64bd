"""Rehearsals: a published layout at its full number of ranks, on tiny tensors, in one process.

True are the placement (named layout and planner, replanned once while running), the gate, the
routing to replicas, the dispatcher, lockstep and the order of collectives; ranks are threads, and
experts are so small that their output can be worked out densely, in fp32, for every token.

A step is what a rank does in a job: vote, agree, set the bound, then every layer, with tokens or
without. Idle ranks are many; in one step a single rank has work.

Knows: layouts, placement, dispatchers, lockstep. Knows nothing of checkpoints or requests.

Shape letters: T tokens, D hidden, K top-k, E logical experts, R ranks, L layers, I intermediate.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispatch.base import DispatchConfig, Dispatcher, DispatchStats, Received, WireFormat
from dispatch.fp8 import dequantise, quantise
from dispatch.ideal import ideal_bytes
from dispatch.permute import permute
from dispatch.route import RoutingTable, route, token_keys
from dispatch.thread_group import ThreadBoard, ThreadedAllGather, ThreadedCollective
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from ep.planner import plan
from ep.presets import PRESETS, Layout
from ep.trace import Trace, read_trace
from launch.experts.source import files_problems_told
from launch.rehearse_flags import REHEARSALS, Asked, rehearsal_of
from launch.rehearse_model import HIDDEN, NUM_LAYERS, TOP_K, Experts, Router
from launch.rehearse_report import RehearsalFailed, Report
from moeserve.errors import ConfigError
from moeserve.lockstep import Lockstep, Phase, Vote

THREADED = {"torch": ThreadedCollective, "allgather": ThreadedAllGather}
NUM_STEPS = 4
IDLE_SHARE = 0.25
_STACK_BYTES = 1 << 20  # of a rank's thread


Tell = Callable[[str, int, int], None]


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Rehearsal:
    """Everything is checked when made; ConfigError. trace: a file of loads (`ep.trace`), by which
    experts are drawn and placed; goes with routing "trace". wire: how rows travel; the reference's
    experts see rows of that format too, so that the error is none of rounding for the wire. array:
    which of several in the file."""

    name: str
    routing: str = "random"
    trace: Path | None = None
    seed: int = 0
    dispatch: str = "torch"
    wire: str = "model"
    array: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", rehearsal_of(self.name))
        asked = Asked(
            self.name, self.routing, self.trace, self.seed, self.dispatch, self.wire, self.array
        )
        if problems := asked.problems():
            raise ConfigError(problems)

    def _routing_told(self) -> str:
        if self.trace is None:
            return self.routing
        return f"trace {self.trace}" + ("" if self.array is None else f":{self.array}")

    def run(self, tell: Tell = _silent) -> Report:
        """Outputs are judged by `Report.check`. ConfigError for the trace; what a rank raises.
        tell: gets what is done, how much of it, of how much; one rank's thread calls it too."""
        began = time.monotonic()
        with one_thread_a_rank():
            play, took = _Play.prepare(self, tell)
            board = ThreadBoard(play.layout.num_gpus)
            ranks = [_Rank(play, board, rank) for rank in range(board.size)]
            what = f"{board.size} ranks, {NUM_STEPS} steps of {NUM_LAYERS} layers each"
            tell(what, 0, NUM_STEPS * NUM_LAYERS)
            ranks[0].tell = lambda done: tell(what, done, NUM_STEPS * NUM_LAYERS)
            started = time.monotonic()
            board.run(lambda rank: ranks[rank].run(), _STACK_BYTES)
            took["ranks_seconds"] = time.monotonic() - started
        there, back = (sum(rank.ideal[i] for rank in ranks) for i in range(2))
        report = Report(
            rehearsal=self.name,
            layout=play.layout.name,
            routing=self._routing_told(),
            dispatch=self.dispatch,
            wire=self.wire,
            seed=self.seed,
            ranks=board.size,
            nodes=play.layout.num_nodes,
            experts=play.layout.num_logical_experts,
            slots=play.layout.num_slots,
            layers=NUM_LAYERS,
            steps=NUM_STEPS,
            generations=len({placement.generation for placement in play.placements}),
            tokens=int(play.tokens.sum()),
            idle_rank_steps=int((play.tokens == 0).sum()),
            collectives=board.num_collectives,
            bytes_sent=sum(rank.stats.bytes_sent for rank in ranks),
            dispatch_bytes=sum(rank.stats.dispatch_bytes for rank in ranks),
            combine_bytes=sum(rank.stats.combine_bytes for rank in ranks),
            ideal_bytes=there + back,
            ideal_dispatch_bytes=there,
            ideal_combine_bytes=back,
            max_error=max(rank.max_error for rank in ranks),
            seconds=round(time.monotonic() - began, 3),
            **{name: round(seconds, 3) for name, seconds in took.items()},
            peak_memory_bytes=_peak_memory(),
        )
        if sum(rank.num_checked for rank in ranks) != report.tokens:
            raise RehearsalFailed(f"{self.name}: not every token came out of the last layer")
        return report


def _peak_memory() -> int:
    """Of this process's own memory. `ru_maxrss` would do, but starts at that of the process which
    forked this one."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):  # not a Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def one_thread_a_rank() -> Iterator[None]:
    """Else torch keeps a team of compute threads for each of hundreds of callers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- what all ranks know --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Play:
    """Drawn from the seed before ranks start; read only. The hosted shared expert is the last of E.

    tokens [steps, R]; inputs and outputs[step, rank] [T, D]; placements, tables: one a step.
    """

    layout: Layout
    phase: Phase
    dispatch: str
    wire: WireFormat
    router: Router
    experts: Experts
    tokens: NDArray[np.int64]
    inputs: dict[tuple[int, int], Tensor]
    outputs: dict[tuple[int, int], Tensor]
    placements: list[ExpertPlacement]
    tables: list[list[RoutingTable]]

    @classmethod
    def prepare(cls, asked: Rehearsal, tell: Tell) -> tuple[_Play, dict[str, float]]:
        """And the seconds that its parts took, by `Report`'s names."""
        began = time.monotonic()
        preset, only_decodes, most = REHEARSALS[asked.name]
        phase = Phase.DECODE if only_decodes else Phase.PREFILL
        layout = PRESETS[preset]
        loads = None if asked.trace is None else _loads_of(asked.trace, asked.array, layout)
        g = torch.Generator().manual_seed(asked.seed)
        router, experts = Router.draw(g, asked.seed, layout, loads), Experts.draw(g, layout)
        tokens = _draw_tokens(asked.seed, layout.num_gpus, most)
        wire = WireFormat(asked.wire)
        inputs, outputs = {}, {}
        counts = np.zeros((NUM_LAYERS, layout.num_logical_experts))
        busy = np.argwhere(tokens).tolist()
        what = f"dense reference of {tokens.sum()} tokens"
        for number, (step, rank) in enumerate(busy):
            tell(what, number, len(busy))
            x = torch.randn(int(tokens[step, rank]), HIDDEN, generator=g)
            inputs[step, rank] = x
            for layer in range(NUM_LAYERS):
                ids, weights = router.choose(x, step, layer, rank)
                counts[layer] += np.bincount(ids.flatten(), minlength=counts.shape[1])
                x = x + experts.dense(_as_seen(x, wire), layer, ids, weights)
            outputs[step, rank] = x
        planned = time.monotonic()
        tell(f"placement of {layout.num_slots} slots, then again by what was counted", 0, 1)
        placements = _plan(layout, loads, counts)
        tables = [[RoutingTable.build(p, i) for i in range(NUM_LAYERS)] for p in placements]
        # The second half of the steps runs under what the loads of all of them ask for.
        by_step = [step * len(placements) // NUM_STEPS for step in range(NUM_STEPS)]
        took = {
            "reference_seconds": planned - began,
            "planning_seconds": time.monotonic() - planned,
        }
        play = cls(
            layout,
            phase,
            asked.dispatch,
            wire,
            router,
            experts,
            tokens,
            inputs,
            outputs,
            [placements[i] for i in by_step],
            [tables[i] for i in by_step],
        )
        return play, took


def _as_seen(x: Tensor, wire: WireFormat) -> Tensor:
    """x [T, D] fp32 as experts get it."""
    if wire is WireFormat.MODEL:
        return x
    rows = quantise(x, wire)
    return dequantise(rows.values, rows.scales, rows.scale_format, x.dtype)


def _loads_of(path: Path, array: str | None, layout: Layout) -> NDArray[np.float64]:
    """[L, 256]; layers repeat where the file has fewer. A hosted shared expert's column is left
    out: every token picks it."""
    with files_problems_told(str(path)):
        trace: Trace = read_trace(path, array)
    totals, routed = trace.totals, layout.routed_experts
    if totals.shape[1] not in (routed, routed + 1):
        raise ConfigError(
            [f"{path}: {totals.shape[1]} experts a layer; {layout.name} has {routed}"]
        )
    return np.asarray(totals[np.arange(NUM_LAYERS) % len(totals), :routed], np.float64)


def _draw_tokens(seed: int, ranks: int, most: int) -> NDArray[np.int64]:
    """[steps, R]: a full step, then idle ranks, then work on a single rank, then few tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, most + 1, (NUM_STEPS, ranks))
    tokens[0, rng.integers(ranks)] = most
    tokens[1, rng.random(ranks) < IDLE_SHARE] = 0
    alone = rng.integers(ranks)
    tokens[2, np.arange(ranks) != alone] = 0
    tokens[3] = np.where(rng.random(ranks) < IDLE_SHARE, 0, 1)
    return tokens


def _plan(
    layout: Layout, loads: NDArray[np.float64] | None, counts: NDArray[np.float64]
) -> list[ExpertPlacement]:
    """Before and after: by what is known at the start (the trace, or nothing), then by what was
    counted, moving from the first."""
    first = np.full((NUM_LAYERS, layout.routed_experts), 1.0) if loads is None else loads + 1e-9
    if layout.shared == "hosted":
        every_token = first.sum(axis=1, keepdims=True) / TOP_K
        first = np.concatenate([first, every_token], axis=1)

    def planned(loads: NDArray[np.float64], previous: ExpertPlacement | None) -> ExpertPlacement:
        return plan(
            loads,
            num_gpus=layout.num_gpus,
            num_slots_per_gpu=layout.slots_per_gpu,
            num_nodes=layout.num_nodes,
            num_groups=layout.num_groups,
            previous=previous,
            options=layout.options(),
        ).placement

    before = planned(first, None)
    return [before, planned(counts, before)]


# -- what each rank does --------------------------------------------------------------------------


class _Rank:
    """One thread's part; the tokens of one rank through all steps and layers."""

    def __init__(self, play: _Play, board: ThreadBoard, rank: int) -> None:
        self._play = play
        self._group: EPGroup = board.group(rank, play.layout.gpus_per_node)
        config = DispatchConfig(
            hidden_size=HIDDEN,
            top_k=TOP_K + (play.layout.shared == "hosted"),
            num_physical_experts=play.layout.num_slots,
            max_tokens_per_rank=int(play.tokens.max()),
            dtype=torch.float32,
            deterministic=True,
            wire=play.wire,
        )
        self._dispatcher: Dispatcher = THREADED[play.dispatch](self._group, config)
        self._config = config
        self.tell: Callable[[int], None] = lambda done: None  # layers done
        self.ideal = [0, 0]  # bytes there and back that could not be left out
        self.max_error = 0.0
        self.num_checked = 0

    @property
    def stats(self) -> DispatchStats:
        return self._dispatcher.stats

    def run(self) -> None:
        lockstep, play, rank = Lockstep(self._group), self._play, self._group.rank
        vote = Vote(has_work=False, wants_stop=True, placement_generation=0)
        for step, tokens in enumerate(play.tokens[:, rank].tolist()):
            generation = play.placements[step].generation
            vote = replace(vote, placement_generation=generation)
            busy = replace(vote, has_work=True, num_tokens=tokens, phase=play.phase)
            agreed = lockstep.agree(busy if tokens else vote)
            if not agreed.run or agreed.num_tokens != tuple(play.tokens[step].tolist()):
                raise RehearsalFailed(f"step {step}: rank {rank} learnt another step in lockstep")
            self._dispatcher.set_step_bound(agreed.max_tokens, agreed.phase is Phase.DECODE)
            self._step(step)
        if not lockstep.agree(vote).stop:
            raise RehearsalFailed(f"rank {rank}: lockstep goes on though no rank has work")

    def _step(self, step: int) -> None:
        play, key = self._play, (step, self._group.rank)
        x = play.inputs[key] if key in play.inputs else torch.zeros(0, HIDDEN)
        for layer in range(NUM_LAYERS):
            ids, weights = play.router.choose(x, step, layer, self._group.rank)
            keys = token_keys(x.shape[0], self._group.rank)
            slots = route(ids, play.tables[step][layer], keys)
            rows = x if play.wire is WireFormat.MODEL else quantise(x, play.wire)
            handle = self._dispatcher.dispatch_start(rows, slots, weights)
            shared = play.experts.shared(_as_seen(x, play.wire), layer)  # while tokens travel
            received = self._dispatcher.dispatch_finish(handle)
            y, index = self._experts(received, play.placements[step], layer)
            self._dispatcher.combine_start(handle, y, index)
            x = x + (self._dispatcher.combine_finish(handle) + shared)
            if x.shape[0]:
                form = self._dispatcher.combine_form
                ideal = ideal_bytes(self._config, slots, self._group.rank, self._group.size, form)
                self.ideal[0] += ideal.dispatch
                self.ideal[1] += ideal.combine
            self.tell(step * NUM_LAYERS + layer + 1)
        if x.shape[0]:
            error = float((x - play.outputs[key]).abs().max())
            self.max_error = error if not error <= self.max_error else self.max_error
            self.num_checked += x.shape[0]

    def _experts(
        self, received: Received, placement: ExpertPlacement, layer: int
    ) -> tuple[Tensor, Tensor]:
        """The grouped experts' order: rows of one slot together -> y [Q, D], index [N, K]."""
        order = permute(received.slots, received.counts)
        hosted = placement.physical_to_logical[layer][placement.slots_of(self._group.rank)]
        experts = torch.from_numpy(hosted.copy()).repeat_interleave(received.counts)
        x = received.x
        if received.scales is not None:
            x = dequantise(x, received.scales, received.scale_format, torch.float32)
        x = x.index_select(0, order.pair_rows)
        return self._play.experts.rows(x, layer, experts), order.index
