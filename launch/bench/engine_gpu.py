"""The whole engine on a model of DeepSeek-V3's dimensions, few layers, random weights, one rank.

Decode at some batches and contexts, prefill: tokens a second, what a step spends by kernel, how
long the device has nothing to do (host gaps), and what the kernels' bytes and FLOPs predict at the
rates that were measured here. Knows engine, model, traces. Reads no checkpoint.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dispatch.base import DispatchConfig
from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from launch.bench.device_trace import device_spans
from launch.bench.engine_gpu_steps import EngineRow, EngineSizes, TimedSteps, Tracer
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.gpu.mla_decode import cuts_by_load
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, Cuts
from models.deepseek.kernels.gpu.step_limit import (
    StepLoad,
    even_experts,
    least_seconds,
    num_launches,
    step_uses,
)
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_weights import RandomWeights
from models.deepseek.weights import ModelWeights
from moeserve.cache import BlockCache
from moeserve.device.ahead import AheadEngine, AheadScheduler
from moeserve.device.api import CudaApi, DeviceApi
from moeserve.device.graphs import Budget, StepGraphs
from moeserve.device.staging import Staging
from moeserve.engine import Engine
from moeserve.errors import one_line
from moeserve.recorder import StepRecorder
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler

if TYPE_CHECKING:
    from models.deepseek.kernels.gpu.bench.limits import Limits

# fast: attention by heads in prefill; ahead: that, and steps planned while the one before runs;
# fp8 cache: fast, the largest batch's decode over a cache in FP8. By what share of the budget each
# begins no more.
FP8_CACHE = "fp8 cache"
MODES = {"fast": 0.55, "ahead": 0.7, "deterministic": 0.85, FP8_CACHE: 1.0}

Job = tuple[str, int, int]  # what, sequences, positions


@dataclass(frozen=True)
class EngineReport:
    rows: list[EngineRow]
    notes: list[str]
    left: list[str]  # what time did not suffice for
    seconds: float

    @property
    def failed(self) -> list[EngineRow]:
        return [row for row in self.rows if row.error]


def cut_config(layers: int = 5, dense: int = 1) -> DeepSeekConfig:
    """DeepSeek-V3 with so many layers, of which the first `dense` have no experts; no MTP."""
    from launch.capacity.known import load_shape

    whole = load_shape("deepseek-v3").config
    return replace(whole, num_hidden_layers=layers, first_k_dense_replace=dense, num_mtp_layers=0)


def tiny_config() -> DeepSeekConfig:
    """For a walk on CPUs."""
    from models.deepseek.random_families import family_config

    return replace(DeepSeekConfig.from_hf(family_config("v3")), num_mtp_layers=0)


def open_engine(
    config: DeepSeekConfig,
    weights: ModelWeights,
    kernels: Kernels,
    sizes: EngineSizes,
    mode: str,
    notes: list[str],
    api: DeviceApi | None = None,
) -> Engine:
    """An engine of one rank as `moeserve.build` would put it together, without a checkpoint. mode:
    one of MODES. api: that captures decode steps; None: they go as they are."""
    deterministic, ahead = mode == "deterministic", mode == "ahead"
    group = EPGroup.single()
    placement = ExpertPlacement.trivial(config.num_moe_layers, config.n_routed_experts, 1)
    dtype = weights.embed.dtype
    dispatch = DispatchConfig(
        config.hidden_size, config.num_experts_per_tok, config.n_routed_experts,
        sizes.token_budget, dtype, deterministic,
    )  # fmt: skip
    model = DeepSeekModel(
        config, weights, kernels,
        LocalDispatcher(group, dispatch, combine_pairs=kernels.combine_pairs), placement,
        rank=0, dtype=dtype, deterministic=deterministic, max_positions=sizes.longest,
        fp8_cache=mode == FP8_CACHE,
    )  # fmt: skip
    cache = BlockCache(sizes.num_blocks, sizes.block, sizes.most_sequences, prefix_cache=False)
    pages = model.cache_spec.allocate(sizes.num_blocks, sizes.block, model.device)
    recorder = StepRecorder()
    recorder.wants_rows = False
    runner = ModelRunner(model, pages, cache.tables, recorder)
    limits = ScheduleLimits(
        max_num_sequences=sizes.most_sequences,
        token_budget=sizes.token_budget,
        chunk_size=None,
        max_model_len=sizes.longest,
        vocab_size=config.vocab_size,
    )
    engine = (AheadEngine if ahead else Engine)(
        runner,
        (AheadScheduler if ahead else Scheduler)(cache, limits),
        group,
        recorder=recorder,
        placement=placement,
    )
    if api is not None:
        capture_steps(engine, sizes, api, notes)
    return engine


def capture_steps(engine: Engine, sizes: EngineSizes, api: DeviceApi, notes: list[str]) -> None:
    """Decode steps of the batches' sizes, as `moeserve.device.opening` does for a ladder."""
    runner = engine.runner
    model, dispatcher = runner.model, getattr(runner.model, "dispatcher", None)
    if isinstance(engine, AheadEngine):
        engine.api = api
    if runner.staging is None:
        runner.staging = Staging(api)

    def set_bound(rows: int) -> None:
        if dispatcher is not None:
            dispatcher.set_step_bound(rows, True)

    rungs = sorted({n for n, _ in sizes.batches})
    graphs = StepGraphs(model, runner.cache, api, rungs, sizes.longest, set_bound)
    graphs.capture_all(Budget(sizes.graph_memory, sizes.graph_seconds))
    told = ", ".join(map(str, graphs.rungs)) or "none"
    notes.append(f"captured decode steps, rows: {told}, in {graphs.seconds:.1f} s")
    notes += graphs.notes
    runner.graphs = graphs if graphs.rungs else None


def measure_engine(
    config: DeepSeekConfig,
    kernels: Kernels,
    device: torch.device,
    limits: Limits,
    sizes: EngineSizes,
    budget: float,
    *,
    fast_kernels: Kernels | None = None,
    graphs: Callable[[], DeviceApi] | None = None,
    trace: Tracer = device_spans,
    progress: Callable[[str, int, int], None] = lambda where, done, total: None,
    keep: Callable[[EngineReport], None] = lambda so_far: None,
) -> EngineReport:
    """All phases in fast mode, then one of each in the other modes, within about `budget` seconds;
    what is left out is named. fast_kernels: for modes that are not deterministic, triton's; None:
    the same, which cut attention at fixed positions. graphs: makes what captures decode steps;
    None: on CUDA the device's own, elsewhere they go as they are. keep: told behind each phase what
    there is so far (what is still to come is `left` there)."""
    began = time.monotonic()
    progress("weights", 0, 0)
    weights = RandomWeights(config, kernels, device).make()
    notes = [f"weights: {sum(weights.memory_bytes().values()) / 2**30:.1f} GiB, random"]
    if graphs is None and device.type == "cuda":
        graphs = lambda: CudaApi(device)  # noqa: E731
    rows: list[EngineRow] = []
    left: list[str] = []
    of_mode = {mode: _sizes_of(sizes, mode) for mode in MODES}
    waiting = {_name(mode, job): mode for mode in MODES for job in _jobs(of_mode[mode], mode)}

    def so_far() -> EngineReport:
        to_come = [*left, *waiting]
        return EngineReport(list(rows), list(notes), to_come, time.monotonic() - began)

    for mode, share in MODES.items():
        deadline = began + share * budget
        own = of_mode[mode]
        jobs = list(_jobs(own, mode))
        fast = None if mode == "deterministic" else fast_kernels

        def opened(
            mode: str = mode, sizes: EngineSizes = own, chosen: Kernels = fast or kernels
        ) -> Engine:
            api = None if graphs is None else graphs()
            return open_engine(config, weights, chosen, sizes, mode, notes, api)

        cuts: Cuts = DETERMINISTIC
        if fast is not None:
            cuts = cuts_by_load(config.num_attention_heads, device, mode == FP8_CACHE)
        phases = _measure_mode(mode, opened, jobs, device, own, deadline, trace, progress)
        for name, row in phases:
            waiting.pop(name, None)
            if row is None:
                left.append(name)
            else:
                rows.append(row if row.error else with_prediction(row, config, limits, cuts))
            keep(so_far())
        for name in [name for name, of in waiting.items() if of == mode]:
            del waiting[name]  # of an engine that could not be opened
        gc.collect()  # what a mode had, its graphs too, is given back before the next one
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return so_far()


def _measure_mode(
    mode: str,
    opened: Callable[[], Engine],
    jobs: list[Job],
    device: torch.device,
    sizes: EngineSizes,
    deadline: float,
    trace: Tracer,
    progress: Callable[[str, int, int], None],
) -> Iterator[tuple[str, EngineRow | None]]:
    """Each phase by name as it is done, without a prediction; None: there was no time for it."""
    if time.monotonic() > deadline:
        yield from ((_name(mode, job), None) for job in jobs)
        return
    try:
        engine = opened()
    except Exception as error:  # told as a failure; another mode may still be measured
        yield mode, _failed(mode, "open", 0, 0, error)
        return
    timed = TimedSteps(engine, device, trace)
    for number, (what, count, length) in enumerate(jobs):
        name = _name(mode, (what, count, length))
        if time.monotonic() > deadline:
            yield name, None
            continue
        progress(name, number, len(jobs))
        try:
            made = timed.decode if what == "decode" else timed.prefill
            row = replace(made(count, length, sizes), mode=mode)
        except Exception as error:  # a step that fails must not hide the others
            row = _failed(mode, what, count, length, error)
            engine.scheduler.fail_all("a step of the benchmark failed")
        yield name, row
    engine.close()


def _name(mode: str, job: Job) -> str:
    what, count, length = job
    return f"{mode} {what} {count} x {length}"


def _sizes_of(sizes: EngineSizes, mode: str) -> EngineSizes:
    return replace(sizes, batches=sizes.batches[-1:], prompts=()) if mode == FP8_CACHE else sizes


def _jobs(sizes: EngineSizes, mode: str) -> Iterator[Job]:
    batches, prompts = sizes.batches, sizes.prompts
    if mode != "fast":
        batches, prompts = batches[-1:], prompts[:1]
    yield from (("decode", n, length) for n, length in batches)
    yield from (("prefill", n, length) for n, length in prompts)


def _failed(mode: str, what: str, count: int, length: int, error: Exception) -> EngineRow:
    return EngineRow(
        mode, what, count, length, 0.0, 0.0, 0.0, 0, False, error=one_line(error)[:200]
    )


def with_prediction(
    row: EngineRow, config: DeepSeekConfig, limits: Limits, cuts: Cuts = DETERMINISTIC
) -> EngineRow:
    """Beside what was measured: the step's launches at these rates, one after the other. cuts: of
    attention over latents."""
    decode = row.what == "decode"
    new = 1 if decode else row.context
    absorbed = decode or row.mode == "deterministic"
    experts = even_experts(config, row.sequences * new, 1, config.n_routed_experts, routed=True)
    load = StepLoad(
        row.sequences, new, row.context, absorbed, experts,
        kv_fp8=row.mode == FP8_CACHE, partitions=cuts,
    )  # fmt: skip
    uses = list(step_uses(config, load))
    return replace(row, predicted=least_seconds(uses, limits), launches=num_launches(uses))
