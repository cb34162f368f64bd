"""How long a step takes by our own kernels' counts of bytes and FLOPs, kernel by kernel.

The same step as `times` predicts from the model's shape; there small kernels are one fitted number,
here each is counted. Shares of peaks and floors are those of `times.Calibration`, with their
sources; all-to-alls and what overlap hides of them are taken from there as well.

Which kernels there are: models/deepseek/kernels/gpu/step_kernels.py. Knows: a GPU's peaks. Knows
nothing of requests or prices. moeserve's own layout only: attention is data-parallel. It is that of
the deployment's mode: deterministic, which attends over latents in prefill as well and cuts rows at
fixed positions, or fast, which expands keys in prefill and cuts by load. Why it is another time
than the fitted model's, and by which factors: `kernel_why`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from launch.capacity.deployment import Deployment
from launch.capacity.hardware import Gpu
from launch.capacity.predict import Workload
from launch.capacity.times import Calibration, Step, decode_exposed, prefill_exposed, share
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.gpu.mla_decode_config import choose_config, fill
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, ByLoad, Cuts
from models.deepseek.kernels.gpu.step_kernels import (
    Experts,
    Use,
    attention_absorbed,
    attention_fast,
    dense_layer,
    ends,
    gate_and_shared,
    routed_experts,
    spread_rows,
)

# Launches of a MoE layer of DeepSeek-V3 in decode: `Calibration.launch`, which was fitted on whole
# layers, is what their gaps and small kernels' own floors come to.
LAUNCHES = 22
# `Calibration.expert_launch` is of both grouped products and what lies between them.
OF_EXPERTS = 3


@dataclass(frozen=True)
class KernelTime:
    """Of one kernel in one part of a step, over all layers. bytes, flops: of all its launches;
    seconds: with the gaps before them. bound: "memory" or "compute", whichever is the longer, or
    "gaps" where these are longer than both. peak: what that is reckoned by, bytes or FLOPs a
    second; of_peak: the share of it that the kernel is believed to reach; None for gaps. factor:
    by which it takes longer: all-to-alls beside it, a chip whose kernels were new."""

    kernel: str
    part: str
    launches: int
    bytes: int
    flops: int
    seconds: float
    bound: str
    peak: float | None
    of_peak: float | None
    factor: float

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class _Group:
    """Kernels that run one after another, and how long each takes on a GPU with its gap."""

    uses: tuple[Use, ...]
    seconds: tuple[float, ...]

    @cached_property
    def parts(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for use, seconds in zip(self.uses, self.seconds, strict=True):
            found[use.part] += seconds
        return dict(found)

    @cached_property
    def whole(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True)
class KernelStep:
    """groups: of kernels, how often a step has each, by what factor it takes longer there. exposed:
    seconds of all-to-alls that nothing hides; drafts: of MTP; seconds: the whole step. slower: by
    what factor kernels of layers with experts take longer for all-to-alls beside them."""

    gpu: Gpu
    calibration: Calibration
    groups: tuple[tuple[_Group, int, float], ...]
    comm: float
    exposed: float
    drafts: float
    seconds: float
    slower: float

    @cached_property
    def kernels(self) -> list[KernelTime]:
        """About in the order of a step."""
        found: dict[tuple[str, str], list[tuple[Use, float, int, float]]] = defaultdict(list)
        for group, times, factor in self.groups:
            for use, seconds in zip(group.uses, group.seconds, strict=True):
                found[use.kernel, use.part].append((use, seconds, times, factor))
        return [
            _time(kernel, part, same, self.gpu, self.calibration)
            for (kernel, part), same in found.items()
        ]

    def part(self, name: str) -> float:
        return sum(n * factor * group.parts.get(name, 0.0) for group, n, factor in self.groups)

    @property
    def step(self) -> Step:
        """As the fitted model tells one."""
        return Step(
            projections=self.part("projections"),
            core=self.part("core"),
            experts=self.part("experts"),
            shared=self.part("shared"),
            dense=self.part("dense"),
            rest=self.part("rest"),
            head=self.part("head"),
            comm=self.comm,
            exposed=self.exposed,
            seconds=self.seconds,
        )

    @property
    def launches(self) -> int:
        return sum(k.launches for k in self.kernels)

    def as_json(self) -> dict[str, Any]:
        return {
            "step_s": self.seconds,
            "exposed_s": self.exposed,
            "comm_s": self.comm,
            "drafts_s": self.drafts,
            "launches": self.launches,
            "of": [k.as_json() for k in self.kernels],
        }


def kernel_step(
    d: Deployment,
    work: Workload,
    c: Calibration | None = None,
    partitions: Cuts | None = None,
) -> KernelStep | None:
    """Of a deployment that is placed. partitions: of attention over latents; None: those of the
    deployment's mode. None where attention is shared (tp), for which there are no kernels here."""
    c = c or Calibration()
    if d.tp > 1:
        return None
    if partitions is None:
        partitions = DETERMINISTIC if d.deterministic else fast_cuts(d)
    if d.phase == "prefill":
        return _prefill(d, work, c, partitions)
    step = _decode(d, work, d.drafts, c, partitions)
    if not d.drafts:
        return step
    one = _decode(d, work, 0, c, partitions)
    head = one.part("head")
    drafts = d.drafts * ((one.seconds - head - one.part("dense")) / d.shape.layers + head)
    return replace(step, drafts=drafts, seconds=step.seconds + drafts)


def fast_cuts(d: Deployment) -> ByLoad:
    """How our kernel cuts rows in fast mode on this GPU: by the step's load."""
    heads = d.shape.config.num_attention_heads
    return fill(heads, d.gpu.sms, choose_config(heads, 100 if d.gpu.young else 90, d.kv_fp8))


def _decode(
    d: Deployment, work: Workload, drafts: int, c: Calibration, partitions: Cuts
) -> KernelStep:
    m, gpu, pool = d.shape.config, d.gpu, d.pool()
    halves = 2 if pool.overlap and pool.ep > 1 else 1
    rows_each = 1 + drafts
    sequences = max(1, round(d.sequences / halves))
    rows, whole = sequences * rows_each, d.sequences * rows_each
    attention = _decode_attention(
        m, round(work.context), sequences, rows_each, d.kv_fp8, partitions, gpu, c
    )
    own, experts = _own(m, rows, d.hosted, gpu, c), _experts(d, rows, c)
    seconds = attention.whole + own.whole + experts.whole
    comm, exposed = decode_exposed(d.shape, pool, whole, seconds, c)
    once = _ends(m, whole, whole, gpu, c)
    return _join(d, c, halves, (attention, own, experts, once), whole, comm, exposed, 1.0)


def _prefill(d: Deployment, work: Workload, c: Calibration, partitions: Cuts) -> KernelStep:
    m, gpu, pool, rows = d.shape.config, d.gpu, d.pool(), d.tokens
    attention = _prefill_attention(m, rows, work, d.kv_fp8, d.deterministic, partitions, gpu, c)
    own, experts = _own(m, rows, d.hosted, gpu, c), _experts(d, rows, c)
    seconds = attention.whole + own.whole + experts.whole
    comm, exposed, slower = prefill_exposed(d.shape, pool, rows, seconds, c)
    once = _ends(m, rows, max(1, round(rows / work.input_tokens)), gpu, c)
    return _join(d, c, 1, (attention, own, experts, once), rows, comm, exposed, slower)


# Groups come again in other layouts of the same pool, and in other pools: a search asks for some
# thousand steps.


@lru_cache(maxsize=1024)
def _decode_attention(
    m: DeepSeekConfig,
    context: int,
    sequences: int,
    rows_each: int,
    kv_fp8: bool,
    partitions: Cuts,
    gpu: Gpu,
    c: Calibration,
) -> _Group:
    contexts, new = [context] * sequences, [rows_each] * sequences
    return _timed(attention_absorbed(m, contexts, new, kv_fp8, partitions), gpu, c)


@lru_cache(maxsize=1024)
def _prefill_attention(
    m: DeepSeekConfig,
    tokens: int,
    work: Workload,
    kv_fp8: bool,
    latents: bool,
    partitions: Cuts,
    gpu: Gpu,
    c: Calibration,
) -> _Group:
    kernels = attention_absorbed if latents else attention_fast
    return _timed(kernels(m, *chunks(tokens, work), kv_fp8, partitions), gpu, c)


@lru_cache(maxsize=1024)
def _own(m: DeepSeekConfig, rows: int, hosted: int, gpu: Gpu, c: Calibration) -> _Group:
    return _timed(gate_and_shared(m, rows, hosted), gpu, c)


@lru_cache(maxsize=1024)
def _ends(m: DeepSeekConfig, rows: int, sampled: int, gpu: Gpu, c: Calibration) -> _Group:
    return _timed(ends(m, rows, sampled), gpu, c)


@lru_cache(maxsize=1024)
def _dense(m: DeepSeekConfig, rows: int, gpu: Gpu, c: Calibration) -> _Group:
    return _timed(dense_layer(m, rows), gpu, c)


def _experts(d: Deployment, rows: int, c: Calibration) -> _Group:
    """Of the busiest GPU."""
    pairs = rows * d.picks * d.balance
    routed = d.dispatch not in ("deepep_ll", "nvshmem")
    experts = Experts(spread_rows(pairs, d.slots_per_gpu), routed)
    return _timed(routed_experts(d.shape.config, rows, experts, d.wire_fp8), d.gpu, c)


def _timed(uses: Iterable[Use], gpu: Gpu, c: Calibration) -> _Group:
    uses = tuple(uses)
    return _Group(uses, tuple(_seconds(u, gpu, c) for u in uses))


def chunks(tokens: int, work: Workload) -> tuple[list[int], list[int]]:
    """Contexts and new tokens of a step's sequences: whole prompts, and a piece of one in the
    middle of its own."""
    cached = int(work.input_tokens * work.cached_share)
    each = max(work.input_tokens - cached, 1)
    whole, left = divmod(tokens, each)
    contexts, new = [cached + each] * whole, [each] * whole
    if left:
        contexts.append((work.input_tokens + cached + left) // 2)
        new.append(left)
    return contexts, new


def _join(
    d: Deployment,
    c: Calibration,
    halves: int,
    groups: tuple[_Group, _Group, _Group, _Group],
    rows: int,
    comm: float,
    exposed: float,
    slower: float,
) -> KernelStep:
    """groups: attention, of a MoE layer its own and its experts, once in a step. rows: of the
    step. comm, exposed: of a MoE layer. slower: what work loses to all-to-alls beside it."""
    shape, gpu = d.shape, d.gpu
    moe_layers, plain = shape.moe_layers, shape.layers - shape.moe_layers
    factor = c.young if gpu.young else 1.0
    attention, own, experts, once = groups
    counted = [
        (attention, halves * shape.layers, factor * slower),
        (own, halves * moe_layers, factor * slower),
        (experts, halves * moe_layers, factor * slower),
    ]
    if plain:
        counted.append((_dense(shape.config, rows, gpu, c), plain, factor))
    counted.append((once, 1, factor))
    exposed, comm = factor * moe_layers * exposed, factor * moe_layers * comm
    seconds = sum(n * more * group.whole for group, n, more in counted) + exposed
    groups_ = tuple(x for x in counted if x[1])
    return KernelStep(gpu, c, groups_, comm, exposed, 0.0, seconds, slower)


def _time(
    kernel: str, part: str, same: list[tuple[Use, float, int, float]], gpu: Gpu, c: Calibration
) -> KernelTime:
    limits = {
        "memory": sum(n * _by_memory(u, gpu, c) for u, _, n, _ in same),
        "compute": sum(n * _by_compute(u, gpu, c) for u, _, n, _ in same),
        "gaps": sum(n * _gap(u, c) for u, _, n, _ in same),
    }
    bound = max(limits, key=lambda name: limits[name])
    use = same[0][0]
    seconds = sum(n * factor * alone for _, alone, n, factor in same)
    peak, of_peak = {
        "memory": (gpu.hbm, c.memory),
        "compute": (gpu.fp8 if use.fp8 else gpu.bf16, reached(gpu, c).get(use.kind)),
        "gaps": (None, None),
    }[bound]
    return KernelTime(
        kernel,
        part,
        launches=sum(n * u.launches for u, _, n, _ in same),
        bytes=sum(n * u.cost.bytes for u, _, n, _ in same),
        flops=sum(n * u.cost.flops for u, _, n, _ in same if u.kind != "memory"),
        seconds=seconds,
        bound=bound,
        peak=peak,
        of_peak=of_peak,
        factor=seconds / sum(n * alone for _, alone, n, _ in same),
    )


def _seconds(u: Use, gpu: Gpu, c: Calibration) -> float:
    return _gap(u, c) + max(_by_memory(u, gpu, c), _by_compute(u, gpu, c))


def _gap(u: Use, c: Calibration) -> float:
    if u.part == "experts":
        return c.expert_launch / OF_EXPERTS
    return u.launches * c.launch / LAUNCHES


def _by_memory(u: Use, gpu: Gpu, c: Calibration) -> float:
    return u.cost.bytes / (gpu.hbm * c.memory)


def _by_compute(u: Use, gpu: Gpu, c: Calibration) -> float:
    if u.kind == "memory":
        return 0.0
    return u.cost.flops / ((gpu.fp8 if u.fp8 else gpu.bf16) * reached(gpu, c)[u.kind])


@lru_cache(maxsize=64)
def reached(gpu: Gpu, c: Calibration) -> dict[str, float]:
    """Shares of peaks, by `Use.kind`."""
    return {
        "product": share(gpu, c, c.ceiling),
        "grouped": share(gpu, c, c.grouped),
        "decode_core": c.decode_core,
        "prefill_core": c.prefill_core,
    }
