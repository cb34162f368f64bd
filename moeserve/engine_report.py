"""What a rank's engine tells the front end of itself: numbers of the moment, and its expert load.

Knows an engine's parts by reading them. Changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep.load import balancedness
from moeserve.recorder import StepRecorder
from moeserve.wire import RankStats
from moeserve.wire_experts import Counts, LoadReport

if TYPE_CHECKING:
    from moeserve.engine import Engine


def rank_stats(engine: Engine, with_load: bool = True) -> RankStats:
    scheduler, counters = engine.scheduler, engine.scheduler.counters
    cache = scheduler.cache
    load: tuple[int, ...] = ()
    shape, balance = (0, 0), 0.0
    if engine.recorder is not None and (window := engine.recorder.window) is not None:
        shape = (window.num_layers, window.num_experts)
        if engine.placement is not None:
            balance = float(balancedness(window.totals(), engine.placement).mean())
        if with_load:
            load = tuple(engine.recorder.totals.sum(axis=0).ravel().tolist())
    dispatcher = getattr(engine.runner.model, "dispatcher", None)
    return RankStats(
        rank=engine.group.rank,
        step=engine.num_steps,
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_used_blocks=cache.pool.num_used - cache.tree.num_idle,
        num_cached_blocks=cache.tree.num_idle,
        num_free_blocks=cache.num_available,
        num_wasted_slots=scheduler.num_wasted_slots,
        prompt_tokens=counters.prompt_tokens,
        computed_prompt_tokens=counters.computed_prompt_tokens,
        cached_tokens=counters.cached_tokens,
        output_tokens=counters.output_tokens,
        preemptions=counters.preemptions,
        finished=counters.finished,
        aborted=counters.aborted,
        step_seconds_total=engine.step_seconds_total,
        step_seconds_last=engine.step_seconds_last,
        lockstep_age=engine.lockstep.age,
        placement_generation=0 if engine.placement is None else engine.placement.generation,
        expert_shape=shape,
        expert_load=load,
        rank_balance=balance,
        dispatch_bytes=0 if dispatcher is None else dispatcher.stats.bytes_sent,
        rss_bytes=engine.process.memory_info().rss,
        masked_ranks=engine.runner.masked_ranks,
        part_seconds={} if engine.recorder is None else dict(engine.recorder.seconds),
        rebalance=None if engine.rebalancer is None else engine.rebalancer.stats(),
        speculation=None if engine.speculator is None else engine.speculator.stats(),
        kernel_choices=tuple(() if engine.kernel_choices is None else engine.kernel_choices()),
        graphs=None if engine.runner.graphs is None else engine.runner.graphs.report(),
    )


def load_report(engine: Engine, ask: int = 0) -> LoadReport:
    """Expert load of this rank's tokens up to now; of no layers where none is counted."""
    recorder = engine.recorder or StepRecorder()
    window = recorder.window
    first, last = (window and window.step_range) or (0, 0)
    return LoadReport(
        rank=engine.group.rank,
        ask=ask,
        step=engine.num_steps,
        generation=0 if engine.placement is None else engine.placement.generation,
        tokens=(recorder.tokens[0], recorder.tokens[1]),
        totals=Counts.pack(recorder.totals),
        window=Counts.pack(window.totals_by_phase() if window else recorder.totals),
        window_steps=window.steps if window else 0,
        window_first=first,
        window_last=last,
        rows=Counts.pack(recorder.rows_total),
    )
