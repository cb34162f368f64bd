"""The whole engine on a model of DeepSeek-V3's dimensions, few layers, random weights, one rank.

Decode at some batches and contexts, prefill: tokens a second, what a step spends by kernel, how
long the device has nothing to do (host gaps), and what the kernels' bytes and FLOPs predict at the
rates that were measured here. Knows engine, model, traces. Reads no checkpoint.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from dispatch.base import DispatchConfig
from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from launch.bench.device_trace import Span, busy_seconds, by_kernel, device_spans
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.gpu.step_cost import (
    Rates,
    decode_load,
    num_launches,
    prefill_load,
    step_parts,
    step_seconds,
)
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_weights import RandomWeights
from models.deepseek.weights import ModelWeights
from moeserve.cache import BlockCache
from moeserve.device.api import CudaApi, DeviceApi
from moeserve.device.graphs import Budget, StepGraphs
from moeserve.device.staging import Staging
from moeserve.engine import Engine
from moeserve.errors import one_line
from moeserve.recorder import StepRecorder
from moeserve.request import Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler

if TYPE_CHECKING:
    from models.deepseek.kernels.gpu.bench.limits import Limits

Tracer = Callable[[torch.device, Callable[[], object]], tuple[list[Span], str]]


@dataclass(frozen=True)
class EngineSizes:
    """batches: (sequences, prompt) of decode; prompts: (how many, tokens each) of prefill, each a
    step. steps: that are timed, traced: whose kernels are looked at."""

    batches: tuple[tuple[int, int], ...] = ((1, 1024), (32, 1024), (256, 1024), (128, 4096))
    prompts: tuple[tuple[int, int], ...] = ((4, 4096), (1, 16384))
    token_budget: int = 16384
    block: int = 64
    steps: int = 24
    traced: int = 4
    graph_memory: int = 4 << 30
    graph_seconds: float = 40.0

    @classmethod
    def tiny(cls) -> EngineSizes:
        """For a walk on CPUs."""
        return cls(((1, 8), (3, 10)), ((2, 12),), token_budget=24, block=16, steps=3, traced=2)

    def outputs(self, count: int, length: int) -> int:
        """Tokens that each of `count` sequences gets: those whose prompts come first decode while
        the others' are computed."""
        prompts = -(-count * length // max(1, self.token_budget - count))
        return self.steps + self.traced + prompts + 8

    def _most(self, count: int, length: int) -> int:
        return length + self.outputs(count, length)

    @property
    def longest(self) -> int:
        return max(self._most(*each) for each in (*self.batches, *self.prompts))

    @property
    def most_sequences(self) -> int:
        return max(n for n, _ in (*self.batches, *self.prompts))

    @property
    def num_blocks(self) -> int:
        """One more than are needed: padding of a captured step may point there."""
        every = (*self.batches, *self.prompts)
        needed = [n * -(-self._most(n, length) // self.block) for n, length in every]
        return max(*needed, -(-self.longest // self.block)) + 1


@dataclass(frozen=True)
class EngineRow:
    """A phase measured. predicted: seconds of a step by the kernels' counts. idle: share of the
    time in which no kernel ran; None: nothing was traced (see note). parts: seconds of a step by
    kernel; engine: by what the host does (a device's time shows where the host waits for it)."""

    mode: str  # fast | deterministic
    what: str  # decode | prefill
    sequences: int
    context: int
    tokens_per_second: float
    step_seconds: float
    predicted: float
    launches: int
    replayed: bool
    idle: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    note: str = ""
    error: str = ""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


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
    deterministic: bool,
    notes: list[str],
    api: DeviceApi | None = None,
) -> Engine:
    """An engine of one rank as `moeserve.build` would put it together, without a checkpoint. api:
    that captures decode steps; None: they go as they are."""
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
    engine = Engine(runner, Scheduler(cache, limits), group, recorder=recorder, placement=placement)
    if api is not None:
        if runner.staging is None:
            runner.staging = Staging(api)
        rungs = sorted({n for n, _ in sizes.batches})
        graphs = StepGraphs(
            model, pages, api, rungs, sizes.longest,
            lambda rows: model.dispatcher.set_step_bound(rows, True),
        )  # fmt: skip
        graphs.capture_all(Budget(sizes.graph_memory, sizes.graph_seconds))
        told = ", ".join(map(str, graphs.rungs)) or "none"
        notes.append(f"captured decode steps, rows: {told}, in {graphs.seconds:.1f} s")
        notes += graphs.notes
        runner.graphs = graphs if graphs.rungs else None
    return engine


def measure_engine(
    config: DeepSeekConfig,
    kernels: Kernels,
    device: torch.device,
    limits: Limits,
    sizes: EngineSizes,
    budget: float,
    *,
    graphs: Callable[[], DeviceApi] | None = None,
    trace: Tracer = device_spans,
    progress: Callable[[str, int, int], None] = lambda where, done, total: None,
) -> EngineReport:
    """All phases in fast mode, then the smallest and the largest in deterministic mode, within
    about `budget` seconds; what is left out is named. graphs: makes what captures decode steps;
    None: on CUDA the device's own, elsewhere they go as they are."""
    began = time.monotonic()
    progress("weights", 0, 0)
    weights = RandomWeights(config, kernels, device).make()
    notes = [f"weights: {sum(weights.memory_bytes().values()) / 2**30:.1f} GiB, random"]
    if graphs is None and device.type == "cuda":
        graphs = lambda: CudaApi(device)  # noqa: E731
    rates = Rates(limits.memory, limits.fp8, limits.bf16)
    rows: list[EngineRow] = []
    left: list[str] = []
    for deterministic in (False, True):
        mode = "deterministic" if deterministic else "fast"
        jobs = list(_jobs(sizes, deterministic))
        if time.monotonic() - began > budget:
            left += [f"{mode} {what} {n} x {length}" for what, n, length in jobs]
            continue
        try:
            api = None if graphs is None else graphs()
            engine = open_engine(config, weights, kernels, sizes, deterministic, notes, api)
        except Exception as error:  # told as a failure; the other mode may still be measured
            rows.append(_failed(mode, "open", 0, 0, error))
            continue
        timed = TimedSteps(engine, device, trace)
        for number, (what, count, length) in enumerate(jobs):
            name = f"{mode} {what} {count} x {length}"
            if time.monotonic() - began > budget:
                left.append(name)
                continue
            progress(name, number, len(jobs))
            try:
                made = timed.decode if what == "decode" else timed.prefill
                row = made(count, length, sizes)
            except Exception as error:  # a step that fails must not hide the others
                rows.append(_failed(mode, what, count, length, error))
                engine.scheduler.fail_all("a step of the benchmark failed")
                continue
            rows.append(with_prediction(replace(row, mode=mode), config, rates))
        engine.close()
        del engine, timed
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return EngineReport(rows, notes, left, time.monotonic() - began)


def _jobs(sizes: EngineSizes, deterministic: bool) -> Iterator[tuple[str, int, int]]:
    batches, prompts = sizes.batches, sizes.prompts
    if deterministic:
        batches, prompts = batches[-1:], prompts[:1]
    yield from (("decode", n, length) for n, length in batches)
    yield from (("prefill", n, length) for n, length in prompts)


def _failed(mode: str, what: str, count: int, length: int, error: Exception) -> EngineRow:
    return EngineRow(
        mode, what, count, length, 0.0, 0.0, 0.0, 0, False, error=one_line(error)[:200]
    )


def with_prediction(row: EngineRow, config: DeepSeekConfig, rates: Rates) -> EngineRow:
    """Beside what was measured: the step's launches at these rates, one after the other."""
    make = decode_load if row.what == "decode" else prefill_load
    load = make(config, row.sequences, row.context, 1, config.n_routed_experts)
    if row.what == "prefill" and row.mode == "deterministic":  # absorbed, each row to its own end
        load = replace(load, decode=True, contexts=[max(1, row.context // 2)] * row.sequences)
    parts = step_parts(config, load)
    return replace(row, predicted=step_seconds(parts, rates), launches=num_launches(parts))


class TimedSteps:
    """Drives an engine through a batch and looks at its steps."""

    def __init__(self, engine: Engine, device: torch.device, trace: Tracer) -> None:
        self._engine, self._device, self._trace = engine, device, trace
        self._random = random.Random(0)
        self._number = 0

    def decode(self, count: int, length: int, sizes: EngineSizes) -> EngineRow:
        """Steps in which all `count` sequences decode, behind prompts of `length`."""
        waiting = self._submit(count, length, sizes.outputs(count, length))
        while waiting:
            waiting -= {output.request_id for output in self._step()}
        for _ in range(2):
            self._step()
        graphs = self._engine.runner.graphs
        replays = graphs.num_replays if graphs is not None else 0
        before = self._parts()
        times = [self._timed_step() for _ in range(sizes.steps)]
        engine = {k: v / sizes.steps for k, v in self._since(before).items()}
        replayed = graphs is not None and graphs.num_replays > replays

        def some() -> None:
            for _ in range(sizes.traced):
                self._step()

        spans, seconds, note = self._traced(some)
        self._drop()
        middle = statistics.median(times)
        context = length + sizes.steps // 2
        return EngineRow(
            "", "decode", count, context, count / middle, middle, 0.0, 0, replayed,
            *_looked_at(spans, seconds, sizes.traced), engine, note,
        )  # fmt: skip

    def prefill(self, count: int, length: int, sizes: EngineSizes) -> EngineRow:
        """Prompts from the first token to the last; the second time counts, a third is traced."""
        times, steps, engine = [], 1, {}
        for _ in range(2):
            before = self._parts()
            began = time.perf_counter()
            steps = self._run_prompts(count, length)
            times.append(time.perf_counter() - began)
            engine = {k: v / steps for k, v in self._since(before).items()}
        spans, seconds, note = self._traced(lambda: self._run_prompts(count, length))
        whole = times[-1]
        return EngineRow(
            "", "prefill", count, length, count * length / whole, whole / steps, 0.0, 0, False,
            *_looked_at(spans, seconds, steps), engine,
            note if steps == 1 else f"{note} {steps} steps".strip(),
        )  # fmt: skip

    # -- parts ---------------------------------------------------------------------------------

    def _run_prompts(self, count: int, length: int) -> int:
        """-> how many steps it took."""
        waiting, steps = self._submit(count, length, 1), 0
        while waiting or self._engine.has_work:
            waiting -= {output.request_id for output in self._step()}
            steps += 1
        return steps

    def _submit(self, count: int, length: int, outputs: int) -> set[str]:
        vocab = self._engine.scheduler.limits.vocab_size
        assert vocab is not None
        names = set()
        for _ in range(count):
            self._number += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
            prompt = tuple(self._random.randrange(vocab) for _ in range(length))
            name = f"bench-{self._number}"
            self._engine.add_request(
                Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
            )
            names.add(name)
        return names

    def _drop(self) -> None:
        scheduler = self._engine.scheduler
        self._engine.abort([s.request_id for s in (*scheduler.running, *scheduler.waiting)])
        while self._engine.has_work or scheduler.running:
            self._step()

    def _step(self) -> Sequence[Any]:
        outputs = self._engine.step()
        failed = [o for o in outputs if getattr(o, "error", None)]
        if failed:
            raise RuntimeError(str(failed[0].error))
        return outputs

    def _timed_step(self) -> float:
        began = time.perf_counter()
        self._step()
        return time.perf_counter() - began

    def _parts(self) -> dict[str, float]:
        assert self._engine.recorder is not None
        return dict(self._engine.recorder.seconds)

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        return {k: v - before.get(k, 0.0) for k, v in self._parts().items()}

    def _traced(self, call: Callable[[], object]) -> tuple[list[Span], float, str]:
        """Spans, seconds of what was traced by the spans' own clock, and why there are none."""
        spans, note = self._trace(self._device, call)
        if not spans:
            return [], 0.0, note
        seconds = max(s.end for s in spans) - min(s.start for s in spans)
        return spans, seconds, note


def _looked_at(
    spans: Sequence[Span], seconds: float, steps: int
) -> tuple[float | None, dict[str, float]]:
    """Share of `seconds` in which nothing ran, and seconds of a step by kernel."""
    if not spans or not seconds:
        return None, {}
    idle = max(0.0, 1 - busy_seconds(spans) / seconds)
    return idle, {name: spent / steps for name, spent in by_kernel(spans).items()}
