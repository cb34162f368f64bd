"""The best layouts of a prefill and a decode pool under limits on what users wait, and their ratio.

Knows: which layouts are worth a try, limits, what dominates what. Knows nothing of pictures. Tries
are a few hundred to a few thousand evaluations of a formula: no randomness, the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dispatch.deepep import LL_HIDDEN_SIZES, LL_MAX_TOP_K
from launch.capacity.balance import FloatArray, balance, hoped
from launch.capacity.candidates import Candidate, Pools, leaders, pareto
from launch.capacity.deployment import Deployment
from launch.capacity.groups import policies
from launch.capacity.memory import sequences_that_fit
from launch.capacity.predict import MODELS, By, Workload, predict
from launch.capacity.remedies import errors
from launch.capacity.report import Limits
from launch.capacity.rules import ORDER, broken
from launch.capacity.times import Calibration

POOLS = 40  # numbers of nodes that are tried at most: every one, or in equal steps
SEQUENCES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STEP_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
DRAFTS = (0, 1, 2, 3)
SPARE = (0.0, 0.125, 0.5, 1.0)  # redundant slots as a share of the experts, at least


_Home = tuple[Literal["replicated", "hosted"], int]  # of the shared expert; pieces in slots
_REPLICATED: _Home = ("replicated", 0)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Found:
    """tried: layouts that were looked at; num_allowed: that broke no rule; allowed: those of them
    that were priced. gpus_step: between pools of several nodes; more than a node where that leaves
    some untried. pareto: those that no other beats in both latency and tokens a second a GPU,
    fastest answer first. best: most tokens a second a GPU within the limit; None where none keeps
    it. limit: seconds of TTFT or TPOT."""

    phase: str
    tried: int
    gpus_step: int
    num_allowed: int
    allowed: list[Candidate]
    pareto: list[Candidate]
    best: Candidate | None
    limit: float | None


@dataclass(frozen=True)
class Ratio:
    """Pools that keep up with each other: prefill and decode instances, whole ones, and GPUs."""

    prefill: int
    decode: int
    gpus: int
    requests_per_s: float


def search(
    base: Deployment,
    work: Workload,
    limits: Limits,
    most_gpus: int,
    price: float | None = None,
    loads: FloatArray | None = None,
    calibration: Calibration | None = None,
    by: By = MODELS[0],
    every: bool = True,
    progress: Progress = lambda done, total: None,
) -> Found:
    """Of the phase of base, whose model, GPU, formats and acceptance are kept. most_gpus: of a
    pool. loads: as for `balance`, which prices redundancy. by: as for `predict`. every: price every
    layout, as a picture of them needs; else leave out pools that can neither be in the front nor
    near the best, however even their experts: the answer is the same, and placing experts takes
    most of the time. progress: told pools that are done, and all."""
    c = calibration or Calibration()

    def priced_as(d: Deployment) -> Candidate:
        return Candidate(d, predict(d, work, price, c, by))

    limit = limits.tpot if base.phase == "decode" else limits.ttft
    length = work.context if base.phase == "decode" else float(work.input_tokens)
    tried, possible = 0, []
    for pool in _pools(base, most_gpus, loads):
        steps = list(_decodes(pool) if base.phase == "decode" else _prefills(pool))
        tried += len(steps)
        ways = [_way(d, length) for d in steps]
        possible.append([priced_as(d) for d in ways if d is not None])

    def priced(layouts: list[Candidate]) -> list[Candidate]:
        """Of one pool, whose experts are placed once for each policy for groups that is worth it;
        each layout by the quicker one."""
        found: list[Candidate] = []
        for x in layouts:
            made = []
            for groups in policies(x.deployment):
                d = balance(replace(x.deployment, groups=groups), loads).of(x.deployment)
                way = _way(d, length) if d.dispatch == "torch" else d
                made += [] if way is None else [priced_as(way)]
            found += [min(made, key=lambda y: y.prediction.step.seconds)] if made else []
        return found

    pools = Pools(possible, priced, progress)
    # How even experts are decides what `torch` holds in memory, and so what is allowed at all.
    every = every or any(x.deployment.dispatch == "torch" for pool in possible for x in pool)
    if every:
        pools.price_all()
    else:
        pools.price_leaders(limit)
    best_few = leaders([x for x in pools.priced() if x.keeps(limit)])
    if base.phase == "decode":
        closer = [_refined(x, length, limit, priced_as) for x in best_few]
    else:
        closer = [_refined_step(x, length, limit, priced_as, work) for x in best_few]
    if not every:
        pools.price_front(closer)
    allowed = pools.priced() + closer
    kept = [x for x in allowed if x.keeps(limit)]
    best = max(kept, key=lambda x: (x.prediction.per_gpu, -x.deployment.gpus), default=None)
    number = len(allowed) if every else sum(map(len, possible)) + len(closer)
    step = _step_of(base, most_gpus)
    return Found(base.phase, tried, step, number, allowed, pareto(allowed), best, limit)


def _refined(
    x: Candidate,
    length: float,
    limit: float | None,
    priced_as: Callable[[Deployment], Candidate],
) -> Candidate:
    """With the largest batch that memory and the limit allow, up to the next one that is tried."""
    low = x.deployment.sequences // 4
    high = next((n for n in SEQUENCES if n > x.deployment.sequences), x.deployment.sequences) // 4
    while low < high:
        middle = (low + high + 1) // 2
        way = _way(replace(x.deployment, sequences=4 * middle), length)
        tried = None if way is None else priced_as(way)
        if tried is not None and tried.keeps(limit):
            low, x = middle, tried
        else:
            high = middle - 1
    return x


def _refined_step(
    x: Candidate,
    length: float,
    limit: float | None,
    priced_as: Callable[[Deployment], Candidate],
    work: Workload,
) -> Candidate:
    """With the best step between the two that are tried beside it: sixteenths, and those that a
    prompt fills whole."""
    now = x.deployment.tokens
    computed = max(work.input_tokens * (1 - work.cached_share), 1.0)
    whole = (-(-math.ceil(computed / n) // 16) * 16 for n in range(1, 9))
    sizes = {*range(now // 2, 2 * now, now // 16), *whole}
    for tokens in sorted(n for n in sizes if now / 2 <= n <= min(2 * now, STEP_TOKENS[-1])):
        d = replace(x.deployment, tokens=tokens)
        found = priced_as(d)
        better = found.prediction.per_gpu > x.prediction.per_gpu
        if found.keeps(limit) and better and (way := _way(d, length)) is not None:
            x = priced_as(way)
    return x


def _way(d: Deployment, length: float) -> Deployment | None:
    """By the first way to dispatch that breaks no rule; None: there is none."""
    for name in _ways(d):
        way = replace(d, dispatch=name)
        fits = d.phase == "prefill" or sequences_that_fit(way, length) >= d.sequences
        if fits and not errors(broken(way, length)):  # the first is quicker to ask
            return way
    return None


def _ways(d: Deployment) -> tuple[str, ...]:
    """Those of `auto`; in decode only low-latency kernels, whose times are published, where they
    are built for the model."""
    if d.gpus == 1:
        return ("local",)
    measured = d.shape.config.hidden_size in LL_HIDDEN_SIZES and d.picks <= LL_MAX_TOP_K
    if not measured:
        return ORDER[d.phase]
    return ("deepep_ll",) if d.phase == "decode" else ORDER[d.phase][:2]


def ratio(prefill: Candidate, decode: Candidate, work: Workload, most: int = 64) -> Ratio:
    """The smallest whole numbers of instances that leave less than a tenth of either idle, or the
    best of up to `most` each."""
    computed = max(work.input_tokens * (1 - work.cached_share), 1.0)
    ready = prefill.prediction.tokens_per_s / computed  # requests a second of one instance
    done = decode.prediction.tokens_per_s / work.output_tokens
    best: tuple[float, int, int] | None = None
    for p in range(1, most + 1):
        for d in {max(1, math.floor(p * ready / done)), max(1, math.ceil(p * ready / done))}:
            rate = min(p * ready, d * done)
            idle = 1 - rate / max(p * ready, d * done)
            if d <= most and (best is None or idle < best[0] - 1e-9):
                best = (idle, p, d)
        if best is not None and best[0] < 0.1:
            break
    if best is None:  # one side is so fast that `most` of the other do not keep up
        best = (1.0, 1, most) if ready > done else (1.0, most, 1)
    _, p, d = best
    gpus = p * prefill.deployment.gpus + d * decode.deployment.gpus
    return Ratio(p, d, gpus, min(p * ready, d * done))


def _pools(base: Deployment, most: int, loads: FloatArray | None) -> Iterator[Deployment]:
    """Numbers of GPUs, redundant slots that leave none empty, both homes of the shared expert; each
    with a balance and a reach that no placement is below."""
    m = base.shape.config
    hosting: tuple[_Home, ...] = (("hosted", m.n_shared_experts),) if m.n_shared_experts else ()
    node = base.gpu.per_node
    step = _step_of(base, most)
    counts = {1, 2, 4, node, *range(step, most + 1, step)}
    counts = {n for n in counts if n <= min(node, most) or n % node == 0} & {*range(most + 1)}
    counts |= {most}
    for gpus in sorted(n for n in counts if n <= 2 * m.n_routed_experts):
        seen = set()
        # Slots take the shared expert's work from every GPU: that pays over many nodes only.
        for home, hosted in (_REPLICATED, *(hosting if gpus > node else ())):
            experts = m.n_routed_experts + hosted
            for share in SPARE:
                slots = math.ceil(m.n_routed_experts * (1 + share) / gpus) * gpus
                slots = max(slots, -(-experts // gpus) * gpus)
                if (slots, home) not in seen and (slots <= 2 * experts or share == 0):
                    seen.add((slots, home))
                    pool = replace(base, gpus=gpus, redundant=slots - experts, shared=home)
                    yield hoped(pool, loads)


def _step_of(base: Deployment, most: int) -> int:
    """GPUs between two pools: a node, or as many as leave `POOLS` of them."""
    nodes = min(most, 2 * base.shape.config.n_routed_experts) // base.gpu.per_node
    return max(-(-nodes // POOLS), 1) * base.gpu.per_node


def _decodes(pool: Deployment) -> Iterator[Deployment]:
    drafts = DRAFTS if pool.shape.config.num_mtp_layers else (0,)
    for sequences in SEQUENCES:
        for n in drafts:
            for overlap in (False, True):
                yield replace(pool, sequences=sequences, drafts=n, overlap=overlap)


def _prefills(pool: Deployment) -> Iterator[Deployment]:
    for tokens in STEP_TOKENS:
        for overlap in (False, True):
            yield replace(pool, tokens=tokens, overlap=overlap)
