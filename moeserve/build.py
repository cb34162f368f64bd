"""build_engine: from settings and a process group to an Engine that is ready to step.

Every start-up problem that can be known without weights is found first, on all ranks, and said in
one ConfigError that is the same everywhere; only then are weights read. Choices made by "auto" are
collected as notes, printed once by rank 0.

Knows how the parts fit together. Knows nothing of sockets or of stepping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dispatch.base import DispatchConfig, Dispatcher
from dispatch.mib import held_and_passing
from ep.group import EPGroup, gather_objects
from ep.load import LoadWindow
from models.deepseek.load import load_model
from moeserve.cache import BlockCache
from moeserve.config import ServeConfig
from moeserve.device.ahead import AheadEngine, AheadScheduler
from moeserve.device.api import CudaApi
from moeserve.device.ledger import MemoryLedger
from moeserve.device.opening import (
    KV_SHARE,
    goes_ahead,
    open_graphs,
    open_ledger,
    plan_kv,
    warm_up_prefill,
)
from moeserve.engine import Engine
from moeserve.lockstep import agree_min, agree_on_problems, settings_hash
from moeserve.memory import AUTO_SHARE, CachePlan, CacheTooSmall
from moeserve.overlap import OverlapChoice, decide_overlap
from moeserve.placing import describe
from moeserve.plan import StepPlan
from moeserve.rebalancing.build import (
    open_rebalancer,
    our_planner,
    staging_bytes,
    staging_foreseen,
)
from moeserve.recorder import StepRecorder
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.speculate.build import open_speculator
from moeserve.speculate.speculator import Speculator
from moeserve.speculate.verify import Rule
from moeserve.startup import StartUp, fp8_cache, prepare, size_cache
from moeserve.terminal import say

LOAD_WINDOW_STEPS = 256
Progress = Callable[[str, int, int], None]  # (stage, done bytes, total bytes)


def build_engine(
    config: ServeConfig, group: EPGroup, progress: Progress = lambda stage, done, total: None
) -> Engine:
    """Load and connect everything. ConfigError: what is wrong with settings or checkpoint, all of
    it, on every rank alike. Collective on `group`."""
    progress("rendezvous", 0, 0)
    start = prepare(config, group)
    with_mtp = start.with_mtp
    nodes = 0 if start.speculate is None else start.speculate.nodes
    ledger = _memory_plan(config, group, start, nodes)
    opening = _Opening(group, start, ledger)
    model = load_model(
        config.model.checkpoint,
        dtype=start.dtype,
        weights=config.model.weights,
        kernels=start.kernels.kernels,
        group=group,
        dispatcher_factory=opening,
        placement=start.placement,
        deterministic=config.engine.deterministic,
        progress=lambda done, total, rate: progress("weights", done, total),
        with_mtp=with_mtp,
        config=start.model,
        max_tokens_per_rank=config.schedule.token_budget,
        wire=start.dispatch.wire,
        device=start.device.device,
        fp8_cache=fp8_cache(config),
    )
    start.notes.extend(model.weights.notes)

    progress("cache", 0, 0)
    beside = {
        "dispatch_buffers": start.dispatchers.plan(group).total,
        "rebalance_staging": staging_bytes(config, group, model, start.placement),
    }
    bytes_per_token = model.cache_spec.bytes_per_token()
    if start.speculate is not None:
        beside["drafter"] = start.speculate.memory_bytes(start.dtype.itemsize)
        bytes_per_token += start.speculate.cache_bytes(start.dtype.itemsize)
    if ledger is not None:
        beside |= {kind: ledger.planned[kind] for kind in ("graphs", "workspace")}
    there = opening.available, opening.sharers
    plan = _plan_cache(config, group, start, bytes_per_token, there, beside)
    start.notes.append(plan.describe())
    pages = model.cache_spec.allocate(plan.num_blocks, plan.block_size, model.device)
    if ledger is not None:
        own = plan.num_tokens * model.cache_spec.bytes_per_token()
        ledger.plan({"kv_cache": own, "drafter": beside.get("drafter", 0) + plan.num_bytes - own})
        ledger.took("kv_cache")
    cache = BlockCache(
        plan.num_blocks,
        plan.block_size,
        config.schedule.max_num_sequences,
        config.cache.prefix_cache,
    )
    experts = start.placement
    window = LoadWindow(experts.num_layers, experts.num_logical_experts, LOAD_WINDOW_STEPS)
    recorder = StepRecorder(window, group.rank)
    dispatcher = model.dispatcher
    overlap = decide_overlap(
        config.parallel.overlap,
        config.schedule.token_budget,
        group.size,
        model.device.type,
        dispatcher.name,
        dispatcher.max_in_flight,
    )
    start.notes.append(overlap.note)
    rule = Rule.SAME if start.speculate is None else start.speculate.rule
    runner = ModelRunner(model, pages, cache.tables, recorder, overlap.tokens, rule)
    limits = ScheduleLimits(
        max_num_sequences=config.schedule.max_num_sequences,
        token_budget=config.schedule.token_budget,
        chunk_size=config.schedule.chunk_size,
        max_model_len=plan.max_model_len,
        vocab_size=start.model.vocab_size,
        eos_ids=frozenset(start.model.eos_token_ids),
        seed=config.engine.seed,
    )
    ahead = goes_ahead(
        config.engine.ahead, start.device.on_cpu, start.speculate is not None, dispatcher,
        start.notes,
    )  # fmt: skip
    scheduler = AheadScheduler(cache, limits) if ahead else Scheduler(cache, limits)
    speculator: Speculator | None = None
    if start.speculate is not None:
        speculator = open_speculator(start.speculate, runner, scheduler, group.rank)
    if ledger is not None:
        ledger.took("drafter")
    engine = (AheadEngine if ahead else Engine)(
        runner,
        scheduler,
        group,
        recorder=recorder,
        placement=start.placement,
        settings=settings_hash(_collective_settings(config, start)),
        info=_info(config, group, start, plan, model, overlap),
        speculator=speculator,
    )
    if isinstance(engine, AheadEngine) and not start.device.on_cpu:
        engine.api = CudaApi(start.device.device)
    if group.size > 1:
        planner = our_planner(group, start.model.n_group, start.model.n_routed_experts)
        engine.rebalancer = open_rebalancer(
            config, group, model, start.placement, recorder, planner, say, start.notes
        )
    _tell_kernels(config, engine, start.kernels.kernels)
    progress("warmup", 0, 0)
    _warm_up(engine)
    if ledger is not None:
        recorder.wants_rows = False  # of some dispatchers, to know them is to wait for the device
        recorder.api = CudaApi(model.device)
        _measure_steps(ledger, runner, config.schedule.token_budget)
        runner.graphs = open_graphs(
            config, group, runner, plan.max_model_len, nodes, start.notes,
            lambda size, done, of: progress("graphs", done, of),
            trees=start.speculate is not None and start.speculate.nodes > start.speculate.depth,
        )  # fmt: skip
        if runner.graphs is not None and not config.engine.quiet:
            runner.graphs.say = say
        ledger.took("graphs")
        agree_on_problems(group, ledger.exceeded())
        engine.info["memory_plan"] = ledger.report()
    if config.model.kernel_table is not None:
        lines = getattr(start.kernels.kernels, "choices", ())
        start.notes += [f"kernels: {line}" for line in lines]
    if group.rank == 0 and not config.engine.quiet:
        for note in start.notes:
            say(note)
    return engine


def _tell_kernels(config: ServeConfig, engine: Engine, kernels: Any) -> None:
    """Kernels that choose among libraries say what they chose, whenever they are asked, and name a
    library that failed when it did, on whichever rank that was."""
    engine.kernel_choices = lambda: list(getattr(kernels, "choices", ()))
    if hasattr(kernels, "tell_failures") and not config.engine.quiet:
        rank = engine.group.rank
        kernels.tell_failures(lambda line: say(f"rank {rank}: kernels: {line}"))


# -- parts --------------------------------------------------------------------------------------


class _Opening:
    """Makes the dispatcher that was agreed on, once the weights lie in place. available: bytes of
    this machine just before, when all ranks have their weights and none its buffers."""

    def __init__(self, group: EPGroup, start: StartUp, ledger: MemoryLedger | None) -> None:
        self._group, self._start, self._ledger = group, start, ledger
        self.available, self.sharers = 0, 1

    def __call__(self, asked: DispatchConfig) -> Dispatcher:
        """asked: nothing new; each phase's sizes have been in the choice since `prepare`."""
        start = self._start
        gather_objects(self._group, None)
        self.available, self.sharers = start.device.free_bytes(self._group.ranks_per_node)
        if self._ledger is not None:
            self._ledger.took("weights")
        gather_objects(self._group, None)  # nobody opens before all have looked
        dispatcher = start.dispatchers.open(
            self._group, combine_pairs=start.kernels.kernels.combine_pairs
        )
        if self._ledger is not None:
            self._ledger.took("dispatch_buffers")
        lines = [start.dispatchers.describe(), *(f"  {note}" for note in dispatcher.notes)]
        buffers = start.dispatchers.plan(self._group)
        if buffers.total:
            shared = ", one for both phases" * start.dispatchers.shares(self._group)
            lines.append(f"  buffers{shared}: {held_and_passing(buffers.held, buffers.passing)}")
        start.notes.append("\n".join(lines))
        return dispatcher


def _memory_plan(
    config: ServeConfig, group: EPGroup, start: StartUp, nodes: int
) -> MemoryLedger | None:
    """What memory is for, before anything is taken; ConfigError where it does not reach, for the
    cache of one sequence as well. On a GPU (else None) the plan is printed. Collective."""
    buffers, itemsize = start.dispatchers.plan(group), start.dtype.itemsize
    ledger = open_ledger(
        config, start.device, start.model, start.weight_bytes, start.keeps_fp8, buffers.held, nodes,
        itemsize, buffers.passing, start.dispatchers.expert_rows(group),
    )  # fmt: skip
    layers = start.model.num_hidden_layers
    layers += start.model.num_mtp_layers if start.with_mtp else 0
    a_token = layers * start.model.cache_bytes(itemsize, fp8_cache(config))
    drafter = 0
    if start.speculate is not None:
        a_token += start.speculate.cache_bytes(itemsize)
        drafter = start.speculate.memory_bytes(itemsize)
    if ledger is None:
        here, sharers = start.device.free_bytes(group.ranks_per_node)
        left = max(here - sharers * start.known_bytes["weights"], 0)
        beside = {"dispatch_buffers": buffers.total, "drafter": drafter}
        _plan_cache(config, group, start, a_token, (left, sharers), beside)
        return None
    experts = ledger.planned.get("weights: experts", 0)
    staging = staging_foreseen(config, group, start.placement, experts)
    ledger.plan({"rebalance_staging": staging, "drafter": drafter})
    length = config.schedule.max_model_len or start.model.max_position_embeddings
    blocks = config.schedule.max_num_sequences * -(-length // config.cache.block_size)
    most = blocks * config.cache.block_size * a_token
    plan_kv(ledger, start.known_bytes["kv_cache"], most)
    if group.rank == 0 and not config.engine.quiet:
        say(ledger.describe())
    short = ledger.shortage()
    agree_on_problems(group, [short] if short else [])
    weights = {kind for kind in ledger.planned if kind.startswith("weights: ")}
    left = ledger.at_start - sum(ledger.planned[kind] for kind in weights)
    kinds = ("rebalance_staging", "drafter", "graphs", "workspace")
    beside = {"dispatch_buffers": buffers.total} | {kind: ledger.planned[kind] for kind in kinds}
    _plan_cache(config, group, start, a_token, (left, 1), beside)
    return ledger


def _measure_steps(ledger: MemoryLedger, runner: ModelRunner, token_budget: int) -> None:
    """What the largest steps take beside what is kept. Collective."""
    api = CudaApi(runner.cache.layers[0].device)

    def measured() -> None:
        ledger.peak("workspace")
        api.give_back()  # blocks of one step's sizes fit no other's: together they are no need

    warm_up_prefill(runner, token_budget, measured)
    ledger.took("workspace")


def _plan_cache(
    config: ServeConfig,
    group: EPGroup,
    start: StartUp,
    bytes_per_token: int,
    there: tuple[int, int],
    beside: dict[str, int],
) -> CachePlan:
    """Each rank sizes its pool by its own machine; the longest sequence is agreed. there: bytes
    that are available beside the weights, and how many ranks share them."""
    problems: list[str] = []
    plan: CachePlan | None = None
    try:
        plan = size_cache(
            config,
            bytes_per_token,
            start.model.max_position_embeddings,
            *there,
            beside,
            AUTO_SHARE if start.device.on_cpu else KV_SHARE,
        )
    except CacheTooSmall as error:
        problems.append(f"cache: {error}")
    agree_on_problems(group, problems)
    assert plan is not None
    length = agree_min(group, plan.max_model_len)
    return replace(plan, max_model_len=length)


def _warm_up(engine: Engine) -> None:
    """One forward of no tokens through every layer and collective, and one in halves where steps
    may be: what does not fit together shows here and not at the first request."""
    assert engine.recorder is not None
    engine.recorder.enabled = False
    runner = engine.runner
    for max_tokens in sorted({0, runner.overlap_from or 0}):
        runner.forward(runner.build(StepPlan()), max_tokens)
    if engine.speculator is not None:
        engine.speculator.warm_up()
    engine.recorder.enabled = True


def _collective_settings(config: ServeConfig, start: StartUp) -> dict[str, Any]:
    return {
        "ep": config.parallel.ep,
        "deterministic": config.engine.deterministic,
        "dispatch": [(x.backend, x.config.max_tokens_per_rank) for x in start.dispatchers.parts],
        "wire": start.dispatch.wire.value,
        "overlap": config.parallel.overlap,
        "dtype": str(start.dtype),
        "checkpoint": start.fingerprint,
        "layers": start.placement.num_layers,
        "speculate": None if start.speculate is None else start.speculate.shared,
    }


def _info(
    config: ServeConfig,
    group: EPGroup,
    start: StartUp,
    plan: CachePlan,
    model: Any,
    overlap: OverlapChoice,
) -> dict[str, object]:
    memory = dict(model.memory_bytes()) | {"kv_cache": plan.num_bytes} | dict(plan.beside)
    chosen = start.dispatchers
    buffers = chosen.plan(group)
    dispatch = chosen.report() | {
        "wire": start.wire.report(),
        "overlap": overlap.report(),
        "buffers_bytes": buffers.total,
        "buffers": {"held_bytes": buffers.held, "passing_bytes": buffers.passing},
    }
    return {
        "model_type": start.model.model_type,
        "vocab_size": start.model.vocab_size,
        "device": model.device.type,
        "dtype": str(start.dtype).removeprefix("torch."),
        "deterministic": config.engine.deterministic,
        "kernels": start.kernels.reason.removeprefix("kernels: "),
        "weights": "FP8" if model.weights.keeps_fp8 else str(start.dtype).removeprefix("torch."),
        "dispatcher": model.dispatcher.name,
        "dispatch": dispatch,
        "ranks": group.size,
        "memory_bytes": memory,
        "kv_tokens": plan.num_tokens,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "kv_bytes_per_token": plan.bytes_per_token,
        "kv_plan": plan.describe(),
        "placement": describe(start.placement, start.model),
        "mtp_layers": start.model.num_mtp_layers if start.with_mtp else 0,
        "speculate": None if start.speculate is None else start.speculate.report(),
        "first_moe_layer": start.model.first_k_dense_replace,
        "picks_per_token": start.dispatch.top_k,
        "ranks_per_node": group.ranks_per_node,
        "expert_groups": start.model.n_group,
        "expert_bytes": [x.nbytes // max(x.num_slots, 1) for x in model.expert_weights()],
        "checkpoint": config.model.checkpoint.resolve().name,
        "fingerprint": start.fingerprint,
        "notes": list(start.notes),
    }
