"""The best layouts of a prefill and a decode pool under limits on what users wait, and their ratio.

Knows: which layouts are worth a try, limits, what dominates what. Knows nothing of pictures. Tries
are a few hundred to a few thousand evaluations of a formula: no randomness, the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.capacity.deployment import Deployment
from launch.capacity.memory import sequences_that_fit
from launch.capacity.predict import Prediction, Workload, predict
from launch.capacity.rules import violations
from launch.capacity.times import Calibration

SEQUENCES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STEP_TOKENS = (2048, 4096, 8192, 16384, 32768)
DRAFTS = (0, 1, 2, 3)
SPARE = (0.0, 0.125, 0.25, 0.5, 1.0)  # redundant slots as a share of the experts


@dataclass(frozen=True)
class Limits:
    """Seconds; None: no limit. gpus: most that a pool may have."""

    ttft: float | None
    tpot: float | None
    gpus: int


@dataclass(frozen=True)
class Candidate:
    deployment: Deployment
    prediction: Prediction

    @property
    def latency(self) -> float:
        """TPOT of decode, TTFT of prefill."""
        p = self.prediction
        return p.tpot if p.tpot is not None else p.ttft or 0.0

    def as_json(self) -> dict[str, Any]:
        d = self.deployment
        return {
            "phase": d.phase,
            "gpus": d.gpus,
            "redundant": d.redundant,
            "slots_per_gpu": d.slots_per_gpu,
            "dispatch": d.dispatch,
            "sequences": d.sequences if d.phase == "decode" else None,
            "tokens": d.tokens if d.phase == "prefill" else None,
            "drafts": d.drafts,
            "overlap": d.overlap,
            "kv_fp8": d.kv_fp8,
            "prediction": self.prediction.as_json(),
        }


@dataclass(frozen=True)
class Found:
    """tried: layouts that were looked at, allowed: that broke no rule. pareto: those that no other
    beats in both latency and tokens a second a GPU, fastest answer first. best: most tokens a
    second a GPU within the limit; None where none keeps it."""

    phase: str
    tried: int
    allowed: list[Candidate]
    pareto: list[Candidate]
    best: Candidate | None


@dataclass(frozen=True)
class Ratio:
    """Pools that keep up with each other: prefill and decode instances, whole ones, and GPUs."""

    prefill: int
    decode: int
    gpus: int
    requests_per_s: float


def search(
    base: Deployment, work: Workload, limits: Limits, price: float | None, c: Calibration
) -> Found:
    """Of the phase of base, whose model, GPU, cache format and acceptance are kept."""
    tries = list(_decodes(base, limits) if base.phase == "decode" else _prefills(base, limits))
    limit = limits.tpot if base.phase == "decode" else limits.ttft
    allowed = []
    for d in tries:
        if base.phase == "decode" and sequences_that_fit(d, work.context) < d.sequences:
            continue
        if not violations(d, work.context):
            allowed.append(Candidate(d, predict(d, work, price, c)))
    kept = [x for x in allowed if limit is None or x.latency <= limit]
    best = max(kept, key=lambda x: (x.prediction.per_gpu, -x.deployment.gpus), default=None)
    return Found(base.phase, len(tries), allowed, pareto(allowed), best)


def pareto(candidates: list[Candidate]) -> list[Candidate]:
    """By latency; each gives more tokens a second a GPU than all that answer sooner."""
    front: list[Candidate] = []
    for x in sorted(candidates, key=lambda x: (x.latency, -x.prediction.per_gpu)):
        if not front or x.prediction.per_gpu > front[-1].prediction.per_gpu:
            front.append(x)
    return front


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


def _pools(base: Deployment, limits: Limits) -> Iterator[Deployment]:
    """Numbers of GPUs and redundant slots that divide."""
    experts = base.shape.config.n_routed_experts
    node = base.gpu.per_node
    for gpus in range(node, min(limits.gpus, 2 * experts) + 1, node):
        seen = set()
        for share in SPARE:
            slots = math.ceil(experts * (1 + share) / gpus) * gpus
            if slots <= 2 * experts and slots not in seen:
                seen.add(slots)
                yield replace(base, gpus=gpus, redundant=slots - experts)


def _decodes(base: Deployment, limits: Limits) -> Iterator[Deployment]:
    for pool in _pools(base, limits):
        for sequences in SEQUENCES:
            for drafts in DRAFTS if base.shape.config.num_mtp_layers else (0,):
                for overlap in (False, True):
                    yield replace(
                        pool,
                        sequences=sequences,
                        drafts=drafts,
                        overlap=overlap,
                        dispatch="deepep_ll",
                    )


def _prefills(base: Deployment, limits: Limits) -> Iterator[Deployment]:
    for pool in _pools(base, limits):
        for tokens in STEP_TOKENS:
            for overlap in (False, True):
                yield replace(pool, tokens=tokens, overlap=overlap, dispatch="deepep_normal")
