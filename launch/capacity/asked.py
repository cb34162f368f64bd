"""From flags of `moeserve plan MODEL` to deployments: defaults, presets, what `auto` means.

Knows: which flag is which field, and that all that is wrong is told at once. Knows nothing of
screens, nor of what a deployment gives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from dispatch import parse_dispatch
from dispatch.base import DispatchError
from launch.capacity.balance import FloatArray, balance
from launch.capacity.deployment import (
    PRESETS,
    Deployment,
    Groups,
    Phase,
    Preset,
    from_preset,
    preset,
)
from launch.capacity.groups import WISHES, Placed, policies, quickest, why_not
from launch.capacity.hardware import Gpu, profile, profiles
from launch.capacity.known import load_shape
from launch.capacity.memory import memory
from launch.capacity.node import Node
from launch.capacity.predict import MODELS, By, Prediction, Workload, predict
from launch.capacity.remedies import errors
from launch.capacity.report import Limits, Plan, report
from launch.capacity.rules import broken, choose_dispatch, largest_batch
from launch.capacity.shape import ModelShape
from launch.capacity.trace_loads import trace_loads
from launch.capacity.values import Values

AUTO = "auto"
PHASES: tuple[Phase, ...] = ("prefill", "decode")
WIRES = ("fp8", "model")
CACHES = ("model", "fp8")
MOST_GPUS = 1 << 14
MOST_TOKENS = 1 << 24
STEP_TOKENS = 16384  # what `--tokens auto` takes at most
SEARCH_GPUS = 320  # what `--search` gives a pool at most


@dataclass(frozen=True)
class Typed:
    """Flags as they were typed; None: not given."""

    model: str | None = None
    preset: str | None = None
    gpus: str | None = None
    gpu: str | None = None
    phase: str | None = None
    redundant: str | None = None
    shared: str | None = None
    tp: str | None = None
    dispatch: str | None = None
    groups: str | None = None
    wire: str | None = None
    sequences: str | None = None
    tokens: str | None = None
    drafts: str | None = None
    acceptance: str | None = None
    kv_cache_dtype: str | None = None
    kv_fp8: bool = False  # the same in short
    no_overlap: bool = False
    no_deterministic: bool = False
    input_tokens: str | None = None
    output_tokens: str | None = None
    cached_share: str | None = None
    trace: Path | None = None
    array: str | None = None
    price: str | None = None
    longest: str | None = None
    host_memory: str | None = None
    shared_memory: str | None = None
    ttft: str | None = None
    tpot: str | None = None
    max_gpus: str | None = None
    predict: str | None = None


@dataclass(frozen=True)
class Asked:
    """bases: a deployment a phase that is asked for. groups: of `groups.WISHES`. auto_redundant,
    auto_batch, auto_tokens: to be chosen for them, as a dispatch of "auto" is. loads [L, E]: of
    each phase, and their source; None: typical. by: as for `predict`."""

    bases: list[Deployment]
    work: Workload
    limits: Limits
    node: Node
    loads: dict[str, FloatArray] | None
    source: str | None
    price: float | None
    longest: int | None
    most_gpus: int
    preset: str | None
    groups: str
    auto_redundant: bool
    auto_batch: bool
    auto_tokens: bool
    by: By

    def loads_of(self, d: Deployment) -> FloatArray | None:
        return None if self.loads is None else self.loads[d.phase]

    def plan(self) -> Plan:
        reports = []
        for base in self.bases:
            chosen, *others = self._chosen(base)
            reports.append(
                report(
                    chosen.deployment,
                    self.work,
                    spread=chosen.balance,
                    others=others,
                    price=self.price,
                    by=self.by,
                    longest=self.longest,
                    node=self.node,
                    limits=self.limits,
                    follow=partial(self._followed, base, chosen.deployment),
                )
            )
        return Plan(reports, self.preset)

    def _chosen(self, base: Deployment) -> list[Placed]:
        """With all that `auto` leaves to us, by every policy for groups; the one to take first."""
        free = self._placed(base, "free")
        tried = [
            free if groups == "free" else self._placed(base, groups)
            for groups in policies(free.deployment, self.groups)
        ]
        best = quickest(tried)
        return [best, *(x for x in tried if x is not best)]

    def _placed(self, base: Deployment, groups: Groups) -> Placed:
        d = replace(self._spare(base), groups=groups)
        spread = balance(d, self.loads_of(d), self.source)
        d = self._filled(spread.of(d))
        return Placed(d, spread, self._predicted(d))

    def _followed(self, base: Deployment, d: Deployment, other: Deployment) -> Deployment:
        """What would be planned with the fields of other that are not those of d typed; its balance
        is that of d, and its reach where it has as many GPUs."""
        typed = {f.name: getattr(other, f.name) for f in fields(other)}
        typed = {name: x for name, x in typed.items() if x != getattr(d, name)}
        again = replace(
            self,
            auto_redundant=self.auto_redundant and "redundant" not in typed,
            auto_batch=self.auto_batch and "sequences" not in typed,
            auto_tokens=self.auto_tokens and "tokens" not in typed,
        )
        kept: dict[str, Any] = {"balance": d.balance, "groups": d.groups}
        if other.gpus == d.gpus:
            kept["reach"] = d.reach
        made = replace(base, **(kept | typed))
        return again._filled(again._spare(made))

    def _spare(self, d: Deployment) -> Deployment:
        if not self.auto_redundant:
            return d
        d = replace(d, redundant=0)
        return replace(d, redundant=min(d.physical, 2 * d.slots) - d.slots)

    def _filled(self, d: Deployment) -> Deployment:
        if d.dispatch == AUTO:
            least: dict[str, Any] = {"sequences": 4} if self.auto_batch else {}
            least |= {"tokens": 256} if self.auto_tokens else {}
            dispatch = choose_dispatch(replace(d, **least)).dispatch
            d = replace(d, dispatch=dispatch)
        if d.phase == "decode" and self.auto_batch:
            d = replace(d, sequences=self._batch(d))
        if d.phase == "prefill" and self.auto_tokens:
            d = replace(d, tokens=self._step(d))
        return d

    def _predicted(self, d: Deployment) -> Prediction:
        return predict(d, self.work, self.price, by=self.by)

    def _batch(self, d: Deployment) -> int:
        """The largest that memory, the way to dispatch and the limit of TPOT allow; 1 if none."""
        most = max(largest_batch(d, self.work.context), 1)
        limit = self.limits.tpot
        if limit is None:
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            tpot = self._predicted(replace(d, sequences=middle)).tpot
            low, high = (middle, high) if tpot is not None and tpot <= limit else (low, middle - 1)
        return max(largest_batch(d, self.work.context, low), 1)

    def _step(self, d: Deployment) -> int:
        """Halved from `STEP_TOKENS` until memory holds it and a prompt beside it, the way to
        dispatch takes it, and TTFT is kept."""
        length, ttft = self.work.input_tokens, self.limits.ttft
        tokens = STEP_TOKENS
        while tokens > 256:
            asked = replace(d, tokens=tokens)
            waits = self._predicted(asked).ttft or 0.0
            found = errors(broken(asked, float(length)))
            refused = any(v.by == ("tokens",) for v in found)
            fits = memory(asked).kv > d.kv_bytes() * length
            if fits and not refused and (ttft is None or waits <= ttft):
                return tokens
            tokens //= 2
        return tokens


def read(typed: Typed, search: bool = False) -> Asked:
    """ConfigError with everything that is wrong. search: numbers of GPUs, slots and steps are not
    asked for."""
    v = Values()
    chosen = None if typed.preset is None else v.attempt(lambda: preset(typed.preset or ""), None)
    unknown = typed.preset is not None and chosen is None  # what it would say is not missed as well
    shape = _shape(v, typed.model, chosen, unknown)
    gpu = _gpu(v, typed.gpu, chosen, unknown)
    work = _workload(v, typed, chosen, shape)
    loads = None
    if typed.trace is not None and shape is not None:
        loads = trace_loads(v, typed.trace, typed.array, shape, PHASES)
    if typed.array is not None and typed.trace is None:
        v.problems.append(f"--array={typed.array}: goes with --trace FILE")
    only = typed.phase or (chosen.phase if chosen is not None else "both")
    only = v.choice("--phase", only, "both", (*PHASES, "both"))
    phases = [p for p in PHASES if only in (p, "both")]
    if len(phases) == 1:
        unused = (name for name in _ONLY[phases[0]] if getattr(typed, name) is not None)
        v.problems += [
            f"--{name.replace('_', '-')}: has no meaning where only {phases[0]} is planned"
            for name in unused
        ]
    ways = _dispatch(v, typed.dispatch, typed.preset)
    start = from_preset(typed.preset or "") if chosen is not None else None
    first = {} if start is None else vars(start)  # what the preset says
    given: dict[str, Any] = {
        "gpus": v.whole("--gpus", typed.gpus, first.get("gpus", 0), 1, MOST_GPUS),
        "redundant": _auto(v, "--redundant", typed.redundant, first.get("redundant"), 0),
        "shared": v.choice("--shared", typed.shared, first.get("shared", "replicated"), _HOMES),
        "tp": v.whole("--tp", typed.tp, 1, 1, 1024),
        "drafts": v.whole("--drafts", typed.drafts, 0, 0, 16),
        "acceptance": v.number("--acceptance", typed.acceptance, 0.85, 0, 1),
        "kv_fp8": _fp8_cache(v, typed),
        "wire_fp8": v.choice("--wire", typed.wire, "fp8", WIRES) == "fp8",
        "overlap": not typed.no_overlap,
        "deterministic": not typed.no_deterministic,
        "sequences": _auto(v, "--sequences", typed.sequences, first.get("sequences"), 1),
        "tokens": _auto(v, "--tokens", typed.tokens, first.get("tokens"), 1),
    }
    groups = v.choice("--groups", typed.groups, AUTO, WISHES)
    by = predicted_by(v, typed.predict)
    most = v.whole("--max-gpus", typed.max_gpus, given["gpus"] or SEARCH_GPUS, 1, MOST_GPUS)
    if typed.gpus is None and start is None and not search and not unknown:
        v.problems.append("--gpus: must be given: GPUs over which experts are sharded, such as 32")
    if typed.acceptance is not None and typed.drafts in (None, "0"):
        v.problems.append(f"--acceptance={typed.acceptance}: nothing to accept; give --drafts too")
    asked: dict[str, Any] = {
        "limits": Limits(v.seconds("--ttft", typed.ttft), v.seconds("--tpot", typed.tpot)),
        "node": Node(
            v.size("--host-memory", typed.host_memory),
            v.size("--shared-memory", typed.shared_memory),
        ),
        "price": v.number("--price", typed.price, None, 0, 1e6),
        "longest": v.whole("--longest", typed.longest, 0, 1, MOST_TOKENS) or None,
    }
    v.check()
    assert shape is not None and gpu is not None
    bases = []
    for phase in phases:
        made: dict[str, Any] = {k: 1 if x is None else x for k, x in given.items()}
        made["redundant"] = given["redundant"] or 0
        made["gpus"] = given["gpus"] or most
        bases.append(
            Deployment(shape, _name(typed, chosen), gpu, phase=phase, dispatch=ways[phase], **made)
        )
    if groups == "node" and not search and (reason := why_not(bases[0])) is not None:
        v.problems.append(reason)
        v.check()
    return Asked(
        bases,
        work,
        loads=loads,
        source=None if typed.trace is None else typed.trace.name,
        most_gpus=most,
        preset=typed.preset,
        groups=groups,
        auto_redundant=given["redundant"] is None,
        auto_batch=given["sequences"] is None,
        auto_tokens=given["tokens"] is None,
        by=by,
        **asked,
    )


def predicted_by(v: Values, text: str | None) -> By:
    """Of `--predict`."""
    chosen = v.choice("--predict", text, MODELS[0], MODELS)
    return next(by for by in MODELS if by == chosen)


_HOMES = ("replicated", "hosted")
# Flags that say nothing where only that phase is planned.
_ONLY = {
    "decode": ("tokens", "ttft", "cached_share"),
    "prefill": ("sequences", "drafts", "acceptance", "tpot"),
}


def _auto(v: Values, flag: str, text: str | None, start: int | None, least: int) -> int | None:
    """None: `auto`, the default where no preset says a number."""
    if text == AUTO or (text is None and start is None):
        return None
    return v.whole(flag, text, start or 0, least, MOST_GPUS if flag == "--redundant" else 1 << 20)


def _name(typed: Typed, chosen: Preset | None) -> str:
    if typed.model is not None:
        return typed.model
    return chosen.model if chosen is not None else ""


def _shape(v: Values, model: str | None, chosen: Preset | None, unknown: bool) -> ModelShape | None:
    name = model or (chosen.model if chosen is not None else None)
    if name is None and unknown:
        return None  # the preset is what is wrong
    if name is None:
        v.problems.append(
            "MODEL: must be given: a config.json, a checkpoint folder, deepseek-v3 or kimi-k2 "
            f"(or --preset {', '.join(PRESETS)})"
        )
        return None
    return v.attempt(lambda: load_shape(name), None)


def _gpu(v: Values, name: str | None, chosen: Preset | None, unknown: bool) -> Gpu | None:
    wanted = name or (chosen.gpu if chosen is not None else None)
    if wanted is None and unknown:
        return None
    if wanted is None:
        v.problems.append(f"--gpu: must be given: one of {', '.join(profiles())}")
        return None
    return v.attempt(lambda: profile(wanted), None)


def _workload(v: Values, typed: Typed, chosen: Preset | None, shape: ModelShape | None) -> Workload:
    """Without a word of it: a prompt of 4096 and an answer of 1024, or as much as the model has."""
    default = Workload()
    if chosen is not None:
        default = Workload(chosen.input_tokens, chosen.output_tokens)
    if shape is not None:
        most = shape.config.max_position_embeddings
        if default.input_tokens + default.output_tokens > most:
            default = Workload(max(most * 3 // 4, 1), max(most // 4, 1))
    return Workload(
        v.whole("--input-tokens", typed.input_tokens, default.input_tokens, 1, MOST_TOKENS),
        v.whole("--output-tokens", typed.output_tokens, default.output_tokens, 1, MOST_TOKENS),
        v.number("--cached-share", typed.cached_share, 0.0, 0, 1),
    )


def _fp8_cache(v: Values, typed: Typed) -> bool:
    """Of --kv-cache-dtype, as `moeserve serve` has it, or of --kv-fp8, which is short for it."""
    asked = v.choice("--kv-cache-dtype", typed.kv_cache_dtype, CACHES[typed.kv_fp8], CACHES)
    if typed.kv_fp8 and asked != "fp8":
        v.problems.append(f"--kv-fp8: means --kv-cache-dtype fp8, and {asked} is given; leave one")
    return asked == "fp8"


def _dispatch(v: Values, text: str | None, chosen: str | None) -> dict[str, str]:
    """A name a phase."""
    if text is None:
        if chosen is None or chosen not in PRESETS:
            return dict.fromkeys(PHASES, AUTO)
        return {"prefill": "deepep_normal", "decode": "deepep_ll"}
    try:
        wish = parse_dispatch(text)
    except DispatchError as error:
        v.problems.append(f"--dispatch={text}: {error}")
        return dict.fromkeys(PHASES, AUTO)
    return {phase: wish.of(phase) for phase in PHASES}
