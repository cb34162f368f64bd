"""How far the model of times is from published measurements: point by point, and how it was fitted.

Knows: published.toml, which constants were fitted on which points. `fit` is how the defaults of
`Calibration` came about, kept so that anybody can repeat it; nothing runs it while serving.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np

from launch.capacity.balance import balance
from launch.capacity.constants import ABOUT, constant
from launch.capacity.deployment import Deployment, Groups, Phase
from launch.capacity.hardware import Gpu, profile
from launch.capacity.known import load_shape
from launch.capacity.picks import Reach
from launch.capacity.predict import MODELS, NO_KERNELS, By, Workload
from launch.capacity.shape import ModelShape
from launch.capacity.times import (
    Calibration,
    Pool,
    decode_step,
    dispatch_seconds,
    prefill_step,
)

# What they say is beside each in `Calibration`.
# Constant -> where it is believed to lie before any point is seen, and how freely it may move (as a
# share). Fitted together on all points marked `fitted`, by least squares of logarithms.
FITTED: dict[str, tuple[float, float]] = {
    "intensity": (895.0, 0.15),
    "prefill_core": (0.45, 0.2),
    "decode_core": (0.63, 0.1),
    "passes": (30.0, 0.3),
    "launch": (60e-6, 0.5),
    "skew": (1.3, 0.15),
    "hidden": (0.6, 0.2),
    "young": (1.4, 0.5),
    "lmsys_balance": (1.35, 0.1),
}
_ERROR = 0.05  # what a fitted point is believed to be known to, as a share


@dataclass(frozen=True)
class Point:
    """measured and predicted in `unit`; error is predicted / measured - 1, None where nothing is
    predicted, for the reason given. by_kernels: a throughput by our kernels' counts of bytes and
    FLOPs (`kernel_step`) in fast mode, with the same constants; None where these know no such
    layout."""

    id: str
    what: str
    unit: str
    measured: float
    predicted: float | None
    fitted: bool
    reason: str
    source: str
    by_kernels: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "held_out": self._held_out}

    @property
    def _held_out(self) -> bool:
        return self.predicted is not None and not self.fitted


@dataclass(frozen=True)
class Constant:
    """name, means, source: as of `constants`. points: ids of the points that it was fitted on:
    fitted ones whose prediction changes with it; or of those whose tables it was read off. start,
    freely: where a fitted one was believed to lie before, and by what share it might move; else
    None."""

    name: str
    value: float
    points: tuple[str, ...]
    start: float | None
    freely: float | None
    means: str
    source: str


@dataclass(frozen=True)
class Validation:
    """before: the same points with fitted constants as they were believed to be before any point
    was seen. There are more constants than points to fit them on, so what a point says moves them
    a little from there; what the model itself is worth is in the points held out, and in these.
    by: what points and before are predicted by. throughputs: of each model, those that both know:
    by kernels with constants that were fitted for the other one."""

    points: list[Point]
    constants: list[Constant]
    before: list[Point]
    by: By
    throughputs: dict[By, list[Point]]

    def median_error(self, *, fitted: bool | None = None, unit: str | None = None) -> float:
        """Of absolute errors, of all that are predicted, or of some of them."""
        return statistics.median(_errors(self.points, fitted, unit))

    def median_error_before(self, *, unit: str | None = None) -> float:
        return statistics.median(_errors(self.before, None, unit))

    def models(self) -> dict[By, dict[str, float]]:
        """Errors of each model's throughputs, in the median, held out, and the worst."""
        return {
            by: {
                "median_error": statistics.median(_errors(points, None, None)),
                "median_error_held_out": statistics.median(_errors(points, False, None)),
                "worst_error": max(_errors(points, None, None)),
            }
            for by, points in self.throughputs.items()
        }

    def worst_error(self, *, fitted: bool | None = None) -> float:
        return max(_errors(self.points, fitted, None))

    @property
    def held_out_share(self) -> float:
        predicted = [p for p in self.points if p.error is not None]
        return sum(not p.fitted for p in predicted) / len(predicted)

    @property
    def fitted_on(self) -> int:
        """Points that constants were fitted on."""
        return sum(map(_is_fitted, self.points))

    def told(self) -> str:
        """What was fitted on how much."""
        return (
            f"{len(FITTED)} constants were fitted on {self.fitted_on} throughputs, each drawn to "
            "where it was believed to lie before; believed values alone give a median error of "
            f"{self.median_error_before():.1%} (throughputs "
            f"{self.median_error_before(unit=_THROUGHPUT):.1%}, worst "
            f"{max(_errors(self.before, None, None)):.1%})"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "predict": self.by,
            "points": [p.as_json() for p in self.points],
            "median_error": self.median_error(),
            "median_error_fitted": self.median_error(fitted=True),
            "median_error_held_out": self.median_error(fitted=False),
            "median_error_throughput": self.median_error(unit=_THROUGHPUT),
            "worst_error_fitted": self.worst_error(fitted=True),
            "worst_error_held_out": self.worst_error(fitted=False),
            "fitted_on_points": self.fitted_on,
            "median_error_by_kernels": self.models()["kernels"]["median_error"],
            "throughputs_by": self.models(),
            "before_fitting": {
                "median_error": self.median_error_before(),
                "median_error_throughput": self.median_error_before(unit=_THROUGHPUT),
                "worst_error": max(_errors(self.before, None, None)),
            },
            "held_out_share": self.held_out_share,
            "fitted_constants": {c.name: c.value for c in self.constants if c.name in FITTED},
            "constants": [asdict(c) for c in self.constants],
        }


_THROUGHPUT = "tok/s/node"


def _errors(points: list[Point], fitted: bool | None, unit: str | None) -> list[float]:
    return [
        abs(p.error)
        for p in points
        if p.error is not None
        and (fitted is None or p.fitted == fitted)
        and (unit is None or p.unit == unit)
    ]


def validate(calibration: Calibration | None = None, by: By = MODELS[0]) -> Validation:
    """Every published point against a model of times. by: as for `predict`; constants are those
    that were fitted for "fitted" in any case."""
    c = calibration or Calibration()
    found: dict[By, list[Point]] = {name: list(_points(c, name)) for name in MODELS}
    counted = [p.predicted if p.unit == _THROUGHPUT else None for p in found["kernels"]]
    points = [replace(p, by_kernels=x) for p, x in zip(found[by], counted, strict=True)]
    believed: dict[str, Any] = {name: start for name, (start, _) in FITTED.items()}
    both = {
        name: [p for p, x in zip(ps, counted, strict=True) if x is not None]
        for name, ps in found.items()
    }
    before = list(_points(replace(c, **believed), by))
    return Validation(points, _constants(c, found["fitted"]), before, by, both)


def _constants(c: Calibration, points: list[Point]) -> list[Constant]:
    """Every one, the fitted ones first."""
    told = []
    for name, x in ABOUT.items():
        if name in FITTED:
            told.append(
                Constant(
                    name, getattr(c, name), _moved(name, c, points), *FITTED[name], x.means, _FITTED
                )
            )
        else:
            value = constant(name, c)
            told.append(Constant(name, value, x.points, None, None, x.means, x.source))
    return told


_FITTED = "fitted on published throughputs"


def _moved(name: str, c: Calibration, points: list[Point]) -> tuple[str, ...]:
    """Fitted throughputs that are predicted otherwise with one constant 1 % larger."""
    change: dict[str, Any] = {name: 1.01 * getattr(c, name)}
    pairs = zip(points, _points(replace(c, **change)), strict=True)
    return tuple(p.id for p, q in pairs if _is_fitted(p) and p.predicted != q.predicted)


def _is_fitted(p: Point) -> bool:
    return p.fitted and p.unit == _THROUGHPUT


def _points(c: Calibration, by: By = "fitted") -> Iterator[Point]:
    published = _published()
    for entry in published["point"]:
        asked = entry.get("predict")
        reason, predicted = entry.get("not_predicted", ""), None
        if asked is not None and (by == "fitted" or asked.get("tp", 1) == 1):
            predicted = (_throughput if by == "fitted" else _throughput_by_kernels)(asked, c)
        elif asked is not None:
            reason = NO_KERNELS
        yield Point(
            id=entry["id"],
            what=entry["what"],
            unit=entry.get("unit", _THROUGHPUT),
            measured=float(entry["measured"]),
            predicted=predicted,
            fitted=entry.get("fitted", False),
            reason=reason,
            source=entry["source"],
        )
    for entry in published["kernels"]:
        yield from _kernels(entry, c)


def _throughput_by_kernels(asked: dict[str, Any], c: Calibration) -> float:
    """Tokens a second a node."""
    from launch.capacity.kernel_step import kernel_step  # the kernels: modules of their own

    d, work = _deployment(asked, c)
    step = kernel_step(d, work, c)
    assert step is not None
    return d.gpu.per_node * float(asked["tokens"]) / step.seconds


def _deployment(asked: dict[str, Any], c: Calibration) -> tuple[Deployment, Workload]:
    """A point as a deployment, its experts placed, and requests of its length."""
    pool = _pool(asked, c)
    decode = asked["kind"] == "decode"
    load = {"sequences" if decode else "tokens": asked["tokens"]}
    d = Deployment(
        _shape(asked.get("model", "deepseek-v3")),
        "",
        pool.gpu,
        pool.ep,
        asked["kind"],
        redundant=pool.redundant,
        tp=pool.tp,
        dispatch="deepep_ll" if decode else "deepep_normal",
        overlap=pool.overlap,
        balance=pool.balance,
        reach=pool.reach,
        deterministic=False,  # as the published engines, which have no such mode
        **load,
    )
    return d, Workload(asked["length"], 0)


def _throughput(predict: dict[str, Any], c: Calibration) -> float:
    """Tokens a second a node."""
    pool = _pool(predict, c)
    run = decode_step if predict["kind"] == "decode" else prefill_step
    tokens, length = predict["tokens"], predict["length"]
    step = run(_shape(predict.get("model", "deepseek-v3")), pool, tokens, length, c)
    return pool.gpu.per_node * tokens / step.seconds / pool.tp


def _pool(predict: dict[str, Any], c: Calibration) -> Pool:
    gpu = profile(predict["gpu"])
    uneven = predict.get("balance") == "lmsys"
    shape = _shape(predict.get("model", "deepseek-v3"))
    groups, redundant = predict.get("groups", "free"), predict.get("redundant", 0)
    return Pool(
        gpu,
        predict["ep"],
        redundant=redundant,
        tp=predict.get("tp", 1),
        balance=c.lmsys_balance if uneven else 1.0,
        reach=_reach(shape, gpu, predict["ep"], predict["kind"], redundant, groups, uneven),
        overlap=predict.get("overlap", True),
        young=predict.get("young", False),
    )


@lru_cache(maxsize=64)
def _reach(
    shape: ModelShape,
    gpu: Gpu,
    gpus: int,
    phase: Phase,
    redundant: int,
    groups: Groups,
    uneven: bool,
) -> Reach:
    """Of tokens, as our planner places these experts on typical loads, or on even ones."""
    d = Deployment(shape, "", gpu, gpus, phase, redundant=redundant, groups=groups)
    return balance(d, None if uneven else np.ones((1, shape.config.n_routed_experts))).reach


def _kernels(entry: dict[str, Any], c: Calibration) -> Iterator[Point]:
    shape = _shape("deepseek-v3")
    if not entry.get("grouped", True):
        shape = ModelShape(replace(shape.config, n_group=1, topk_group=1))
    way = "deepep_ll" if entry["kind"] == "low_latency" else "deepep_normal"
    for i, ranks in enumerate(entry["ranks"]):
        there, back = dispatch_seconds(
            way, shape, Pool(profile(entry["gpu"]), ranks), entry["tokens"], c
        )
        for name, seconds in (("dispatch", there), ("combine", back)):
            yield Point(
                id=entry["id"],
                what=f"{entry['what']}, EP{ranks} {name}",
                unit="us",
                measured=float(entry[f"{name}_us"][i]),
                predicted=seconds * 1e6,
                fitted=entry.get("fitted", False),
                reason="",
                source=entry["source"],
            )


def fit(start: Calibration | None = None, by: By = MODELS[0]) -> Calibration:
    """The constants of `FITTED` anew, by least squares from their priors."""
    from scipy.optimize import least_squares

    base = start or Calibration()
    names = list(FITTED)

    def made(logs: Any) -> Calibration:
        values: dict[str, Any] = {n: math.exp(x) for n, x in zip(names, logs, strict=True)}
        return replace(base, **values)

    def residuals(logs: Any) -> list[float]:
        points = [p for p in _points(made(logs), by) if _is_fitted(p)]
        found = [math.log(1 + (p.error or 0.0)) / _ERROR for p in points]
        return found + [
            (x - math.log(FITTED[n][0])) / FITTED[n][1] for n, x in zip(names, logs, strict=True)
        ]

    start_at = [math.log(FITTED[n][0]) for n in names]
    return made(least_squares(residuals, start_at).x)


@lru_cache(maxsize=1)
def _published() -> dict[str, Any]:
    text = resources.files("launch.capacity").joinpath("published.toml").read_text("utf-8")
    return tomllib.loads(text)


@lru_cache(maxsize=8)
def _shape(model: str) -> ModelShape:
    return load_shape(model)
