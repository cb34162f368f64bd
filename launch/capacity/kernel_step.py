"""How long a step takes by our own kernels' counts of bytes and FLOPs, kernel by kernel.

The same step as `times` predicts from the model's shape; there small kernels are one fitted number,
here each is counted. Shares of peaks and floors are those of `times.Calibration`, with their
sources; all-to-alls and what overlap hides of them are taken from there as well.

Knows: which kernels there are (`kernels`), a GPU's peaks. Knows nothing of requests or prices.
moeserve's own layout only: attention is data-parallel. Attention of prefill is that of fast mode
(keys expanded), of decode that of deterministic mode unless told otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.capacity.deployment import Deployment
from launch.capacity.hardware import Gpu
from launch.capacity.kernels import (
    Experts,
    Use,
    attention_decode,
    attention_prefill,
    dense_layer,
    ends,
    moe,
    spread_rows,
)
from launch.capacity.predict import Workload
from launch.capacity.times import Calibration, decode_exposed, prefill_exposed, share
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, Partitions

# Launches of a MoE layer of DeepSeek-V3 in decode: `Calibration.launch`, which was fitted on whole
# layers, is what their gaps and small kernels' own floors come to.
LAUNCHES = 22
# `Calibration.expert_launch` is of both grouped products and what lies between them.
_OF_EXPERTS = 3


@dataclass(frozen=True)
class KernelTime:
    """Of one kernel in one part of a step, over all layers. bytes, flops: of all its launches;
    seconds: with the gaps before them. bound: "memory" or "compute", whichever is the longer, or
    "gaps" where these are longer than both."""

    kernel: str
    part: str
    launches: int
    bytes: int
    flops: int
    seconds: float
    bound: str

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class KernelStep:
    """kernels: in the order of a step. exposed: seconds of all-to-alls that nothing hides; drafts:
    of MTP; seconds: the whole step."""

    kernels: list[KernelTime]
    comm: float
    exposed: float
    drafts: float
    seconds: float

    def part(self, name: str) -> float:
        return sum(k.seconds for k in self.kernels if k.part == name)

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
    partitions: Partitions = DETERMINISTIC,
) -> KernelStep | None:
    """Of a deployment that is placed. partitions: of attention in decode. None where attention is
    shared (tp), for which there are no kernels here."""
    c = c or Calibration()
    if d.tp > 1:
        return None
    if d.phase == "prefill":
        return _prefill(d, work, c)
    step = _decode(d, work, d.drafts, c, partitions)
    if not d.drafts:
        return step
    one = _decode(d, work, 0, c, partitions)
    head = one.part("head")
    drafts = d.drafts * ((one.seconds - head - one.part("dense")) / d.shape.layers + head)
    return KernelStep(step.kernels, step.comm, step.exposed, drafts, step.seconds + drafts)


def _decode(
    d: Deployment, work: Workload, drafts: int, c: Calibration, partitions: Partitions
) -> KernelStep:
    shape, pool = d.shape, d.pool()
    halves = 2 if pool.overlap and pool.ep > 1 else 1
    rows_each = 1 + drafts
    sequences = max(1, round(d.sequences / halves))
    rows = sequences * rows_each
    attention = attention_decode(
        shape, [round(work.context)] * sequences, rows_each, d.kv_fp8, partitions
    )
    layer = moe(shape, rows, _busiest(d, rows), d.hosted, d.wire_fp8)
    once = ends(shape, d.sequences * rows_each, d.sequences * rows_each)
    dense = dense_layer(shape, d.sequences * rows_each)
    seconds = sum(_seconds(u, pool.gpu, c) for u in attention + layer)
    comm, exposed = decode_exposed(shape, pool, d.sequences * rows_each, seconds, c)
    return _join(d, c, halves, attention, layer, dense, once, comm, exposed, 1.0)


def _prefill(d: Deployment, work: Workload, c: Calibration) -> KernelStep:
    shape, pool = d.shape, d.pool()
    contexts, new = chunks(d.tokens, work)
    attention = attention_prefill(shape, contexts, new, d.kv_fp8)
    layer = moe(shape, d.tokens, _busiest(d, d.tokens), d.hosted, d.wire_fp8)
    dense = dense_layer(shape, d.tokens)
    once = ends(shape, d.tokens, max(1, round(d.tokens / work.input_tokens)))
    seconds = sum(_seconds(u, pool.gpu, c) for u in attention + layer)
    comm, exposed, slower = prefill_exposed(shape, pool, d.tokens, seconds, c)
    return _join(d, c, 1, attention, layer, dense, once, comm, exposed, slower)


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


def _busiest(d: Deployment, rows: int) -> Experts:
    pairs = rows * d.picks * d.balance
    routed = d.dispatch not in ("deepep_ll", "nvshmem")
    return Experts(spread_rows(pairs, d.slots_per_gpu), routed)


def _join(
    d: Deployment,
    c: Calibration,
    halves: int,
    attention: Sequence[Use],
    layer: Sequence[Use],
    dense: Sequence[Use],
    once: Sequence[Use],
    comm: float,
    exposed: float,
    slower: float,
) -> KernelStep:
    """comm, exposed: of a MoE layer. slower: what work loses to all-to-alls beside it."""
    shape, gpu = d.shape, d.gpu
    moe_layers, plain = shape.moe_layers, shape.layers - shape.moe_layers
    factor = c.young if d.gpu.young else 1.0
    counted = [
        *((u, halves * shape.layers, slower) for u in attention),
        *((u, halves * moe_layers, slower) for u in layer),
        *((u, plain, 1.0) for u in dense),
        *((u, 1, 1.0) for u in once),
    ]
    kernels = _summed(((u, n, factor * more) for u, n, more in counted if n), gpu, c)
    exposed, comm = factor * moe_layers * exposed, factor * moe_layers * comm
    return KernelStep(kernels, comm, exposed, 0.0, sum(k.seconds for k in kernels) + exposed)


def _summed(uses: Iterable[tuple[Use, int, float]], gpu: Gpu, c: Calibration) -> list[KernelTime]:
    found: dict[tuple[str, str], list[tuple[Use, int, float]]] = defaultdict(list)
    for use, times, factor in uses:
        found[use.kernel, use.part].append((use, times, factor))
    return [_time(kernel, part, same, gpu, c) for (kernel, part), same in found.items()]


def _time(
    kernel: str, part: str, same: list[tuple[Use, int, float]], gpu: Gpu, c: Calibration
) -> KernelTime:
    limits = {
        "memory": sum(n * _by_memory(u, gpu, c) for u, n, _ in same),
        "compute": sum(n * _by_compute(u, gpu, c) for u, n, _ in same),
        "gaps": sum(n * _gap(u, c) for u, n, _ in same),
    }
    return KernelTime(
        kernel,
        part,
        launches=sum(n * u.launches for u, n, _ in same),
        bytes=sum(n * u.cost.bytes for u, n, _ in same),
        flops=sum(n * u.cost.flops for u, n, _ in same if u.kind != "memory"),
        seconds=sum(n * factor * _seconds(u, gpu, c) for u, n, factor in same),
        bound=max(limits, key=lambda name: limits[name]),
    )


def _seconds(u: Use, gpu: Gpu, c: Calibration) -> float:
    return _gap(u, c) + max(_by_memory(u, gpu, c), _by_compute(u, gpu, c))


def _gap(u: Use, c: Calibration) -> float:
    if u.part == "experts":
        return c.expert_launch / _OF_EXPERTS
    return u.launches * c.launch / LAUNCHES


def _by_memory(u: Use, gpu: Gpu, c: Calibration) -> float:
    return u.cost.bytes / (gpu.hbm * c.memory)


def _by_compute(u: Use, gpu: Gpu, c: Calibration) -> float:
    if u.kind == "memory":
        return 0.0
    reached = {
        "product": share(gpu, c, c.ceiling),
        "grouped": share(gpu, c, c.grouped),
        "decode_core": c.decode_core,
        "prefill_core": c.prefill_core,
    }[u.kind]
    return u.cost.flops / ((gpu.fp8 if u.fp8 else gpu.bf16) * reached)
