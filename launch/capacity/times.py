"""How long a step takes on one GPU of a pool, term by term: a roofline with measured shares.

Knows: FLOPs and bytes of each part, a GPU's peaks, what share of a peak kernels reach
(`Calibration`), how all-to-alls grow with tokens and nodes, what two-batch overlap hides. Knows
nothing of requests, prices or memory that must fit.

A part takes the longer of its arithmetic and its bytes. Matrix products reach a share of the peak
that falls as the chip has more FLOPs for a byte (`intensity`). All-to-alls take a floor and then
bytes over what a NIC, or NVLink, carries. With overlap two half batches run in turn: parts that
read weights read them twice, and a share of the all-to-alls is hidden behind the other half.

Shape letters: T tokens in a step of a GPU (of `tp` GPUs, where they share attention), S context
(positions a token attends to), n nodes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from dispatch.deepep_v2_limits import is_relayed
from launch.capacity import traffic
from launch.capacity.hardware import Gpu
from launch.capacity.picks import Reach
from launch.capacity.shape import ModelShape


@dataclass(frozen=True)
class Calibration:
    """Shares and floors. Those that `validate.FITTED` names were fitted on published points there;
    the others come from measured tables, each with its source."""

    # Fitted on end-to-end points (`moeserve plan --validate`)
    intensity: float = 904.0  # FLOPs a byte at which products reach half of `ceiling`
    prefill_core: float = 0.493  # of BF16 peak, attention over expanded keys
    decode_core: float = 0.659  # of BF16 peak, attention over the latent
    passes: float = 28.6  # times hidden values cross memory in a layer (norms, casts, copies)
    launch: float = 40.5e-6  # seconds of small kernels and gaps in a layer
    skew: float = 1.36  # waiting for the slowest rank, times the all-to-alls of decode
    hidden: float = 0.546  # share of decode's all-to-alls that overlap hides
    young: float = 1.62  # times a whole step on chips whose kernels were new when measured
    lmsys_balance: float = 1.41  # busiest GPU over mean in SGLang's prefill of May and July 2025
    # From tables
    ceiling: float = 0.9  # of FP8 or BF16 peak, large products
    memory: float = 0.82  # of HBM bandwidth: experts in decode, H200 (AIConfigurator tables)
    grouped: float = 0.65  # as `ceiling`, for grouped products: half of the peak on H200 (tables)
    expert_launch: float = 22e-6  # grouped product of decode (same tables)
    nic: float = 0.93  # of a NIC (DeepEP low latency on H100: 45-49 of 50 GB/s)
    nvlink: float = 0.54  # of NVLink (DeepEP low latency on H100, one node: 241 of 450 GB/s)
    floor_within: float = 12e-6  # an all-to-all in one NVLink domain (same table)
    floor_across: float = 28e-6  # and over a network
    normal_floor: float = 80e-6  # normal kernels: counts travel first
    normal_hidden: float = 0.9  # of the shorter of work and all-to-alls, with overlap
    comm_sms: int = 24  # SMs that normal kernels take from the rest while they overlap


@dataclass(frozen=True)
class Pool:
    """GPUs that run one phase of one model. ep: GPUs over which experts are sharded; tp: GPUs that
    share the attention of one group of sequences, whose latents each of them holds. balance:
    busiest GPU over mean, of expert tokens. hosted: pieces of the shared expert that lie in slots,
    as picks of every token; 0: each GPU computes it for its own. reach: of tokens; None: experts
    are picked evenly and lie in order. dispatch: the way rows take; None: deepep_ll in decode,
    deepep_normal in prefill. young: kernels of that chip were new."""

    gpu: Gpu
    ep: int
    redundant: int = 0
    tp: int = 1
    balance: float = 1.0
    reach: Reach | None = None
    overlap: bool = True
    kv_fp8: bool = False
    wire_fp8: bool = True
    young: bool = False
    hosted: int = 0
    dispatch: str | None = None

    @property
    def nodes(self) -> int:
        """NVLink domains that its GPUs lie in."""
        return max(1, -(-self.ep // self.gpu.domain))


@dataclass(frozen=True)
class Step:
    """Seconds of one step on the busiest GPU, by part, over all layers. exposed: what of the
    all-to-alls is not hidden; comm: all of them; seconds: the whole."""

    projections: float
    core: float
    experts: float
    shared: float
    dense: float
    rest: float
    head: float
    comm: float
    exposed: float
    seconds: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class _Parts:
    projections: float
    core: float
    experts: float
    shared: float
    rest: float

    @property
    def work(self) -> float:
        return self.projections + self.core + self.experts + self.shared + self.rest


def decode_step(
    shape: ModelShape, pool: Pool, tokens: float, context: float, c: Calibration
) -> Step:
    """tokens: sequences of a GPU times the positions each computes (1, or 1 + drafts)."""
    halves = 2 if pool.overlap and pool.ep > 1 else 1
    part = _decode_parts(shape, pool, tokens / halves, context, c)
    comm, exposed = decode_exposed(shape, pool, tokens, part.work, c)
    return _join(shape, pool, part, halves, comm, exposed, tokens, tokens, c)


def decode_exposed(
    shape: ModelShape, pool: Pool, tokens: float, work: float, c: Calibration
) -> tuple[float, float]:
    """Seconds of a MoE layer's all-to-alls in decode, and what of them is not hidden. work: of the
    layer's kernels, of one half batch where two overlap."""
    if pool.ep == 1:
        return 0.0, 0.0
    halves = 2 if pool.overlap else 1
    way, mine = pool.dispatch or "deepep_ll", tokens / pool.tp / halves
    comm = halves * c.skew * sum(dispatch_seconds(way, shape, pool, mine, c))
    return comm, max(comm * (1 - c.hidden), comm - 2 * work) if halves == 2 else comm


def prefill_step(
    shape: ModelShape, pool: Pool, tokens: float, length: float, c: Calibration, cached: float = 0.0
) -> Step:
    """tokens: prompt tokens of a GPU in a step, of prompts of `length`, of which `cached` positions
    came from the cache and are attended to without being computed."""
    part = _prefill_parts(shape, pool, tokens, (length + cached) / 2, c)
    comm, exposed, slower = prefill_exposed(shape, pool, tokens, part.work, c)
    part = _Parts(*(x * slower for x in asdict(part).values()))
    return _join(shape, pool, part, 1, comm, exposed, tokens, tokens / max(length, 1.0), c)


def prefill_exposed(
    shape: ModelShape, pool: Pool, tokens: float, work: float, c: Calibration
) -> tuple[float, float, float]:
    """Seconds of a MoE layer's all-to-alls in prefill, what of them is not hidden, and by what
    factor work takes longer beside them. work: seconds of the layer's kernels, alone."""
    if pool.ep == 1:
        return 0.0, 0.0, 1.0
    way = pool.dispatch or "deepep_normal"
    comm = sum(dispatch_seconds(way, shape, pool, tokens / pool.tp, c))
    if not pool.overlap:
        return comm, comm, 1.0
    slower = pool.gpu.sms / (pool.gpu.sms - (c.comm_sms if pool.nodes > 1 else 0))
    longer, shorter = max(slower * work, comm), min(slower * work, comm)
    return comm, longer + (1 - c.normal_hidden) * shorter - slower * work, slower


def _join(
    shape: ModelShape,
    pool: Pool,
    part: _Parts,
    halves: int,
    comm: float,
    exposed: float,
    tokens: float,
    sampled: float,
    c: Calibration,
) -> Step:
    """All layers of a step. Dense layers have no all-to-all; the head is computed for `sampled`."""
    moe, dense_layers = shape.moe_layers, shape.layers - shape.moe_layers
    attention = halves * (part.projections + part.core + part.rest)
    dense = dense_layers * _product(
        pool.gpu, tokens / pool.tp, shape.dense, shape.weight_bytes, True, c
    )
    head = _product(pool.gpu, sampled, shape.embedding, 2.0, False, c)
    factor = c.young if pool.young else 1.0
    layers = shape.layers
    seconds = layers * attention + moe * halves * (part.experts + part.shared) + dense + head
    return Step(
        projections=factor * layers * halves * part.projections,
        core=factor * layers * halves * part.core,
        experts=factor * moe * halves * part.experts,
        shared=factor * moe * halves * part.shared,
        dense=factor * dense,
        rest=factor * layers * halves * part.rest,
        head=factor * head,
        comm=factor * moe * comm,
        exposed=factor * moe * exposed,
        seconds=factor * (seconds + moe * exposed),
    )


def _decode_parts(
    shape: ModelShape, pool: Pool, tokens: float, context: float, c: Calibration
) -> _Parts:
    gpu, model = pool.gpu, shape.config
    kv = shape.kv_bytes(pool.kv_fp8) / shape.layers
    core = max(
        tokens / pool.tp * shape.core_flops(context, True) / (gpu.bf16 * c.decode_core),
        tokens * context * kv / (gpu.hbm * c.memory),
    )
    slots = (model.n_routed_experts + pool.hosted + pool.redundant) / pool.ep
    pairs = tokens / pool.tp * (model.num_experts_per_tok + pool.hosted) * pool.balance
    touched = slots * (1 - (1 - 1 / slots) ** pairs) if slots > 1 else min(slots, 1.0)
    experts = c.expert_launch + max(
        touched * shape.expert * shape.weight_bytes / (gpu.hbm * c.memory),
        2 * pairs * shape.expert / (gpu.fp8 * share(gpu, c, c.grouped) * _fp8(shape)),
    )
    plain = shape.attention - shape.up
    projections = _product(gpu, tokens, plain / pool.tp, shape.weight_bytes, True, c)
    projections += _product(gpu, tokens, shape.up / pool.tp, 2.0, False, c)
    shared = _shared(shape, pool, tokens, c)
    return _Parts(projections, core, experts, shared, _rest(shape, pool, tokens, c))


def _prefill_parts(
    shape: ModelShape, pool: Pool, tokens: float, attended: float, c: Calibration
) -> _Parts:
    gpu, model = pool.gpu, shape.config
    core = tokens * shape.core_flops(attended, False) / (gpu.bf16 * c.prefill_core)
    pairs = tokens / pool.tp * (model.num_experts_per_tok + pool.hosted) * pool.balance
    slots = (model.n_routed_experts + pool.hosted + pool.redundant) / pool.ep
    experts = c.expert_launch + max(
        slots * shape.expert * shape.weight_bytes / (gpu.hbm * c.memory),
        2 * pairs * shape.expert / (gpu.fp8 * share(gpu, c, c.grouped) * _fp8(shape)),
    )
    projections = _product(gpu, tokens, shape.attention / pool.tp, shape.weight_bytes, True, c)
    shared = _shared(shape, pool, tokens, c)
    return _Parts(projections, core / pool.tp, experts, shared, _rest(shape, pool, tokens, c))


def dispatch_seconds(
    way: str, shape: ModelShape, pool: Pool, tokens: float, c: Calibration
) -> tuple[float, float]:
    """Dispatch, combine of one layer. The busiest GPU receives, and sends back, `balance` times the
    mean. Floors and shares of deepep_ll and deepep_normal are measured; the rest is by analogy:
    deepep_v2 as deepep_normal, nvshmem and torch with the shares of normal kernels and two floors
    (they exchange counts through the host first), allgather with one (there are none)."""
    sent = traffic_of(way, shape, pool)
    if way == "deepep_ll":
        floor = c.floor_across if pool.nodes > 1 else c.floor_within
    else:
        floor = c.normal_floor * (2 if way in ("nvshmem", "torch") else 1)
    balance = 1.0 if way == "allgather" else pool.balance
    pairs = (
        (sent.dispatch_within, sent.dispatch_across),
        (sent.combine_within, sent.combine_across),
    )
    there, back = (floor + tokens * balance * _wire(pool.gpu, *pair, c) for pair in pairs)
    return there, back


def traffic_of(way: str, shape: ModelShape, pool: Pool) -> traffic.Traffic:
    """Bytes of one token in one MoE layer by that way to dispatch."""
    return _traffic(way, shape, pool.ep, pool.nodes, pool.wire_fp8, pool.hosted, pool.reach)


@lru_cache(maxsize=512)
def _traffic(
    way: str,
    shape: ModelShape,
    ranks: int,
    nodes: int,
    fp8: bool,
    hosted: int,
    seen: Reach | None,
) -> traffic.Traffic:
    if way == "allgather":
        return traffic.to_everybody(shape, ranks, nodes, fp8)
    if way in ("deepep_ll", "nvshmem"):
        return traffic.low_latency(shape, ranks, nodes, fp8, hosted)
    seen = seen or traffic.reach(shape.config, ranks, nodes)
    if way == "torch" or (way == "deepep_v2" and nodes > 1 and not is_relayed(nodes)):
        return traffic.once_a_rank(shape, ranks, nodes, seen, fp8)
    return traffic.node_aware(shape, ranks, nodes, seen, fp8)


def _wire(gpu: Gpu, within: float, across: float, c: Calibration) -> float:
    """Seconds of a token's bytes: NVLink and NIC work at the same time."""
    return max(within / (gpu.nvlink * c.nvlink), across / (gpu.nic * c.nic))


def _product(
    gpu: Gpu, tokens: float, parameters: float, weight_bytes: float, fp8: bool, c: Calibration
) -> float:
    """T rows times so many weights: arithmetic, or the weights' bytes."""
    peak = gpu.fp8 if fp8 and weight_bytes < 2 else gpu.bf16
    flops = 2 * tokens * parameters
    return max(
        flops / (peak * share(gpu, c, c.ceiling)), parameters * weight_bytes / (gpu.hbm * c.memory)
    )


def share(gpu: Gpu, c: Calibration, ceiling: float) -> float:
    """Of the peak: a chip with many FLOPs for each byte waits for operands."""
    return 1 / (1 / ceiling + gpu.fp8 / gpu.hbm / c.intensity)


def _shared(shape: ModelShape, pool: Pool, tokens: float, c: Calibration) -> float:
    """The shared expert of a GPU's own tokens; nothing where it lies in slots or there is none."""
    if pool.hosted or not shape.shared:
        return 0.0
    return _product(pool.gpu, tokens / pool.tp, shape.shared, shape.weight_bytes, True, c)


def _rest(shape: ModelShape, pool: Pool, tokens: float, c: Calibration) -> float:
    """Small kernels; and, where attention is shared, its reduce-scatter and all-gather."""
    hidden = 2 * shape.config.hidden_size
    mine = tokens / pool.tp
    shared = 2 * mine * hidden * (pool.tp - 1) / (pool.gpu.nvlink * c.nvlink)
    return c.launch + mine * c.passes * hidden / (pool.gpu.hbm * c.memory) + shared


def _fp8(shape: ModelShape) -> float:
    """Of the FP8 peak that weights in BF16 can have."""
    return 1.0 if shape.config.quantization else 0.5
