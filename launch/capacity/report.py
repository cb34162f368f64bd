"""Everything `moeserve plan MODEL` says of a pool, or of two on the same GPUs, as plain data.

Knows: which parts a report has. Knows nothing of flags or screens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from launch.capacity.balance import Balance, balance
from launch.capacity.deployment import Deployment
from launch.capacity.groups import Placed
from launch.capacity.memory import Concurrency, Memory, concurrency, memory
from launch.capacity.node import NEEDED_HOST, NEEDED_SHARED, Node
from launch.capacity.predict import (
    MODELS,
    NO_KERNELS,
    By,
    Prediction,
    Workload,
    has_kernels,
    predict,
)
from launch.capacity.remedies import WARNING, Violation, errors
from launch.capacity.rules import violations
from launch.capacity.times import Calibration, Step
from launch.capacity.verdict import NOT_PREDICTED, Verdict, unfit, verdict
from moeserve.terminal import counted

if TYPE_CHECKING:
    from launch.capacity.kernel_why import Compared

LENGTHS = (1024, 4096, 16384, 32768, 131072)
ASSUMED = (
    "Times are predicted with the mean balance of layers; that batches differ from step to step is "
    "within the fitted constant `skew`. Attention is data-parallel. Each phase is predicted as if "
    "its GPUs did nothing else."
)


MEASURED = {"prefill": ("deepep_normal", "local"), "decode": ("deepep_ll", "local")}


@dataclass(frozen=True)
class Limits:
    """Seconds that users wait at most; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Report:
    """Of one pool. prediction: with the balance of the layout on its loads, even where memory does
    not hold it (`predicted`: None there). kv_bytes: of a token,
    BF16 and FP8, in the main model's layers; mtp_kv_bytes: beside them, where tokens are drafted.
    longest: positions that a static reservation holds. others: the same by other policies for
    groups of experts, which give less. by: what was asked for, as for `predict`."""

    deployment: Deployment
    work: Workload
    memory: Memory
    kv_bytes: tuple[int, int]
    mtp_kv_bytes: tuple[int, int]
    concurrency: list[Concurrency]
    longest: int
    balance: Balance
    others: list[Placed]
    prediction: Prediction
    violations: list[Violation]
    price: float
    by: By

    @property
    def caches_of_a_node(self) -> int:
        """GPUs, or groups of tp that hold the same sequences."""
        return max(self.deployment.gpus_of_a_node // self.deployment.tp, 1)

    @property
    def predicted(self) -> Prediction | None:
        """None where it does not fit: then there is nothing that runs so fast, or costs so much."""
        return self.prediction if unfit(self.violations) is None else None

    @cached_property
    def kernels(self) -> Compared | None:
        """The same step by our kernels' counts. None where it does not fit, and with tp."""
        from launch.capacity.kernel_why import compared  # the kernels: modules of their own

        if self.predicted is None:
            return None
        return compared(self.deployment, self.work, self._step_by("fitted"))

    @cached_property
    def steps(self) -> dict[By, float]:
        """Seconds of the same step by each model that knows it; none where it does not fit."""
        if self.predicted is None:
            return {}
        known = [by for by in MODELS if by == "fitted" or has_kernels(self.deployment)]
        return {by: self._step_by(by).seconds for by in known}

    def _step_by(self, by: By) -> Step:
        if by == self.prediction.by:
            return self.prediction.step
        return predict(self.deployment, self.work, self.price, by=by).step

    @property
    def notes(self) -> list[str]:
        """What is assumed, and what of the prediction rests on less than the rest does."""
        d, found = self.deployment, []
        if self.by != self.prediction.by:
            found.append(f"{d.phase}: {NO_KERNELS}: predicted by the fitted model instead")
        if d.redundant:
            found.append(means_told(d))
        found += unquantised(d)
        if d.tp > 1:
            found.append("moeserve runs attention data-parallel: tp is for other engines")
        if self.predicted is None:
            return found
        if d.dispatch not in MEASURED[d.phase]:
            found.append(
                f"{d.phase} by {d.dispatch}: no times are published; predicted by analogy with "
                f"{MEASURED[d.phase][0]}"
            )
        if d.gpu.young:
            found.append(
                f"{d.gpu.title}: times are those of 2025, when its kernels were new (x 1.6)"
            )
        return found + self._cached_waits()

    def _cached_waits(self) -> list[str]:
        """Why a busy pool answers no sooner for a cache, where that is so."""
        ttft, share = self.prediction.ttft, self.work.cached_share
        if ttft is None or not share:
            return []
        nothing = replace(self.work, cached_share=0.0)
        plain = predict(self.deployment, nothing, self.price, by=self.by).ttft
        if plain is None or ttft <= plain:
            return []
        return [
            f"prefill: TTFT of a busy pool is {1e3 * (ttft - plain):,.0f} ms longer than with "
            "nothing cached: its steps are as full, of more prompts, whose tokens attend to cached "
            "ones too, and cached latents are fetched first; more requests a second are served, "
            "and an idle GPU answers sooner"
        ]

    def as_json(self) -> dict[str, Any]:
        d = self.deployment
        decode = d.phase == "decode"
        return {
            "layout": {
                "slots": d.slots,
                "slots_per_gpu": d.slots_per_gpu,
                "empty_slots": d.physical - d.slots,
                "redundant": d.redundant,
                "shared_expert": d.shared,
                "tp": d.tp,
                "dispatch": d.dispatch,
                "wire": "fp8" if d.wire_fp8 else "model",
                "overlap": d.overlap,
                "balance": self.balance.as_json(),
                "placement": self.balance.placement_json()
                | {"others": [x.as_json() for x in self.others]},
            },
            "load": {
                "sequences_per_gpu": d.sequences if decode else None,
                "tokens_per_step_per_gpu": d.step_tokens,
                "drafts": d.drafts,
                "acceptance": d.acceptance if d.drafts else None,
                "kv_fp8": d.kv_fp8,
            },
            "memory_per_gpu": self.memory.as_json(),
            "needed_per_node": {
                "host_memory_bytes": d.gpus_of_a_node * NEEDED_HOST,
                "shared_memory_bytes": d.gpus_of_a_node * NEEDED_SHARED,
            },
            "kv_bytes_per_token": dict(zip(("bf16", "fp8"), self.kv_bytes, strict=True)),
            "kv_bytes_per_token_mtp": dict(zip(("bf16", "fp8"), self.mtp_kv_bytes, strict=True)),
            "longest": self.longest,
            "concurrent_sequences": [
                {
                    "length": c.length,
                    "per_gpu": _ways(c),
                    "per_node": _ways(c.times(self.caches_of_a_node)),
                }
                for c in self.concurrency
            ],
            "prediction": self._prediction_json(),
            "step_s_by": {by: self.steps.get(by) for by in MODELS},
            "kernels": self.kernels and self.kernels.as_json(),
            "notes": self.notes,
            "violations": [v.as_json() for v in self.violations],
        }

    def _prediction_json(self) -> dict[str, Any]:
        """The same keys where it does not fit: null but for traffic, and why."""
        said = self.prediction.as_json()
        if self.predicted is not None:
            return said | {"not_predicted": None}
        nothing = {
            key: dict.fromkeys(x) if isinstance(x, dict) else None
            for key, x in said.items()
            if not key.startswith("traffic")
        }
        return said | nothing | {"not_predicted": NOT_PREDICTED}


@dataclass(frozen=True)
class Plan:
    """reports: of prefill, of decode, or both, of the same model, GPUs and price."""

    reports: list[Report]
    preset: str | None = None

    def of(self, phase: str) -> Report | None:
        return next((r for r in self.reports if r.deployment.phase == phase), None)

    @property
    def errors(self) -> list[Violation]:
        return [v for r in self.reports for v in errors(r.violations)]

    @property
    def verdict(self) -> Verdict:
        return verdict(
            {r.deployment.phase: r.violations for r in self.reports},
            {r.deployment.phase: r.memory.missing for r in self.reports},
        )

    def as_json(self) -> dict[str, Any]:
        d, work = self.reports[0].deployment, self.reports[0].work
        m = d.shape.config
        prefill, decode = (r and r.predicted for r in map(self.of, ("prefill", "decode")))
        fits, said = self.verdict.fits, self.verdict.text
        return {
            "fits": fits,
            "verdict": said,
            "model": d.model,
            "preset": self.preset,
            "gpu": d.gpu.name,
            "gpus": d.gpus,
            "nodes": d.nodes,
            "parameters": {
                "total": d.shape.total,
                "active": d.shape.active,
                "layers": m.num_hidden_layers,
                "routed_experts": m.n_routed_experts,
                "mtp_layers": m.num_mtp_layers,
                "weights": d.shape.weights_in,
            },
            "workload": asdict(work),
            "price_per_gpu_hour": self.reports[0].price,
            "predict": self.reports[0].prediction.by,
            "predict_asked": self.reports[0].by,
            "deterministic": d.deterministic,
            "prediction": {
                "prefill_tokens_per_s_per_node": prefill and prefill.per_node,
                "decode_tokens_per_s_per_node": decode and decode.per_node,
                "ttft_s": prefill and prefill.ttft,
                "tpot_s": decode and decode.tpot,
                "mtp_gain": decode and decode.mtp_gain,
                "cost_per_million": self.cost(),
                "not_predicted": None if fits else NOT_PREDICTED,
            },
            "phases": {r.deployment.phase: r.as_json() for r in self.reports},
            "violations": [
                {"phase": r.deployment.phase} | v.as_json()
                for r in self.reports
                for v in r.violations
            ],
            "assumed": ASSUMED,
        }

    def cost(self) -> dict[str, float | None]:
        """Dollars of a million input, cached and output tokens; None where the phase is not
        planned, or does not fit."""
        held = [r.predicted for r in self.reports if r.predicted is not None]
        found = {kind: cost for p in held for kind, cost in p.cost.items()}
        return {kind: found.get(kind) for kind in ("input", "cached", "output")}


def report(
    d: Deployment,
    work: Workload,
    *,
    spread: Balance | None = None,
    others: Sequence[Placed] = (),
    price: float | None = None,
    by: By = MODELS[0],
    longest: int | None = None,
    node: Node | None = None,
    limits: Limits | None = None,
    calibration: Calibration | None = None,
    follow: Callable[[Deployment], Deployment] = lambda other: other,
) -> Report:
    """spread: of the layout on the operator's loads; None: on typical ones. others: the same layout
    placed otherwise. longest: None: as many
    positions as the model has. follow: as for `violations`."""
    spread = spread or balance(d)
    d = spread.of(d)
    plain, small = d.shape.kv_bytes(False), d.shape.kv_bytes(True)
    longest = longest or d.shape.config.max_position_embeddings
    lengths = sorted({*(x for x in LENGTHS if x <= longest), longest})
    prediction = predict(d, work, price, calibration, by)
    found = violations(d, _held(d, work), node, follow)
    return Report(
        deployment=d,
        work=work,
        memory=memory(d),
        kv_bytes=(plain, small),
        mtp_kv_bytes=(d.kv_bytes(False) - plain, d.kv_bytes(True) - small),
        concurrency=[concurrency(d, length, longest) for length in lengths],
        longest=longest,
        balance=spread,
        others=list(others),
        prediction=prediction,
        violations=[
            *found,
            *named_otherwise(d),
            *(_waits(prediction, limits or Limits()) if unfit(found) is None else ()),
            *_lengths(d, work, longest),
        ],
        price=d.gpu.price if price is None else price,
        by=by,
    )


def _held(d: Deployment, work: Workload) -> float:
    """Mean positions that a sequence keeps in the cache."""
    return work.context if d.phase == "decode" else float(work.input_tokens)


def _waits(p: Prediction, limits: Limits) -> list[Violation]:
    found = []
    for name, has, limit in (("TTFT", p.ttft, limits.ttft), ("TPOT", p.tpot, limits.tpot)):
        if has is not None and limit is not None and has > limit:
            text = f"{name} of {1e3 * has:.1f} ms: at most {1e3 * limit:g} ms were asked for"
            found.append(Violation(f"{name} limit", text))
    return found


# What names of files and folders call quantised weights; the second is what is served here.
_KINDS = re.compile(
    r"(?<![a-z])(?:((?:nv|mx)?fp4|nf4|w4a\w*|w8a8|int[48]|mxfp8|awq|gptq|gguf|exl[23]|bnb"
    r"|(?<!\d)[48]-?bit|q[2-8]_\w+)|(fp8))(?![a-z0-9])"
)


def means_told(d: Deployment) -> str:
    """Of which slots the weights of experts are, kind by kind."""
    return (
        f"experts, redundant experts{', empty slots' * (d.physical > d.slots)}: means over GPUs, "
        f"each of which holds {counted(d.slots_per_gpu, 'slot')} a layer"
    )


def unquantised(d: Deployment) -> list[str]:
    """That 2 bytes a weight are an assumption, where they are one."""
    if d.shape.config.quantization is not None:
        return []
    return ["config.json names no quantisation: BF16 assumed (2 bytes a weight)"]


def named_otherwise(d: Deployment) -> list[Violation]:
    """A name that speaks of a quantisation of which the config says nothing, or another one."""
    kind = _KINDS.search(d.model.lower())
    quantised = d.shape.config.quantization is not None
    if kind is None or (quantised and kind[2]):
        return []
    has, planned = ("FP8", "FP8 is") if quantised else ("no quantisation", "BF16 is")
    text = (
        f"{d.model} is named after {kind[0].upper()}, but its config names {has}: {planned} "
        "planned, and what it really needs may be far less"
    )
    text += "" if quantised else "; put its hf_quant_config.json, or quantization_config, there"
    return [Violation("quantisation", text, severity=WARNING)]


def _lengths(d: Deployment, work: Workload, longest: int) -> list[Violation]:
    most = d.shape.config.max_position_embeddings
    found = []
    if work.input_tokens + work.output_tokens > most:
        found.append(
            Violation(
                "positions of the model",
                f"{work.input_tokens} + {work.output_tokens} tokens: it has {most} positions",
            )
        )
    if longest > most:
        text = f"--longest={longest}: no sequence is longer than the model's {most} positions"
        found.append(Violation("positions of the model", text, severity=WARNING))
    return found


def _ways(c: Concurrency) -> dict[str, int]:
    return {"reserved": c.reserved, "paged": c.paged, "paged_fp8": c.paged_fp8}
