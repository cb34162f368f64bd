"""Which implementation won at which shape: a table made by measuring, kept in a file, chosen by.

`FastestMla` decodes each step with whoever won at the nearest shape that was measured, among those
that fit; ours where nothing near was. In deterministic mode nobody may choose by the batch: there
the adapters refuse, and so does this. A table tells with which versions it was measured.

Knows rows of a measurement and the adapters' protocol. Shapes are near when the logarithms of
their numbers of rows and positions are, and all else is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models.deepseek.kernels.errors import KernelTableError
from models.deepseek.kernels.gpu.bench.case import BY_LOAD
from models.deepseek.kernels.gpu.bench.run import OURS, Row, all_cases
from models.deepseek.kernels.gpu.bench.sizes import V3
from models.deepseek.kernels.gpu.bench.versions import versions_here
from models.deepseek.kernels.gpu.choice import Failures, at_most
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaBackend,
    MlaProblem,
    MlaStep,
    StepDecoder,
    TritonMla,
)
from models.deepseek.kernels.gpu.mla_guard import MlaGuard

FORMAT = "moeserve kernel winners 2"
# What may differ, and its word; all else is another problem. Rows of grouped products are those of
# an expert, so a layout's 4 or 9 experts a GPU go by what was measured with 8 as busy ones.
SIZES = {"rows": "rows", "context": "positions", "experts": "experts"}
FARTHEST = 4  # times as many, or as few: what was measured farther off says nothing
MOST_SECONDS = 3600.0  # of one run: what is more is no measurement


class WinnersUnreadable(KernelTableError):
    """A file that holds no table of winners, and why."""


@dataclass(frozen=True)
class Winner:
    key: Mapping[str, int]
    name: str
    seconds: Mapping[str, float]  # of all that were measured


@dataclass(frozen=True)
class Winners:
    """device: on which it was measured. of: by kernel family. versions: of all that took part."""

    device: str
    of: Mapping[str, Sequence[Winner]]
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, device: str, rows: Iterable[Row]) -> Winners:
        """Measured by this process."""
        of: dict[str, list[Winner]] = {}
        for row in rows:
            if not row.error and row.differences.keys() - {BY_LOAD}:  # others did the same
                seconds = {
                    n: t
                    for n, t in row.rivals.items()
                    if n in row.differences and n not in row.wrong
                }
                ours = seconds.pop(BY_LOAD, row.ours)  # a table is for fast mode
                times = {OURS: ours} | seconds
                won = min(times, key=lambda name: times[name])
                of.setdefault(row.kernel, []).append(Winner(row.key, won, times))
        return cls(device, of, versions_here())

    def pick(self, kernel: str, among: Iterable[str], **shape: int) -> str | None:
        """Of these (and ours) the fastest at the nearest shape that was measured; None: none was
        within FARTHEST of it."""
        nearest = self._nearest(kernel, shape)
        if nearest is None:
            return None
        seconds = nearest.seconds
        return min((n for n in {OURS, *among} if n in seconds), key=lambda n: seconds[n])

    def measured_at(self, kernel: str, **shape: int) -> str:
        """Which measured shape `pick` goes by, in words: "256 rows, 4096 positions"; none: ""."""
        nearest = self._nearest(kernel, shape)
        key = {} if nearest is None else nearest.key
        return ", ".join(f"{key[name]} {word}" for name, word in SIZES.items() if name in key)

    def _nearest(self, kernel: str, shape: Mapping[str, int]) -> Winner | None:
        best: tuple[float, Winner] | None = None
        for winner in self.of.get(kernel, ()):
            far = _distance(winner.key, shape)
            if far is not None and (best is None or far < best[0]):
                best = far, winner
        return None if best is None else best[1]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "device": self.device,
            "versions": dict(self.versions),
            "winners": {
                kernel: [
                    {"key": dict(w.key), "name": w.name, "seconds": dict(w.seconds)} for w in all_
                ]
                for kernel, all_ in self.of.items()
            },
        }

    @classmethod
    def load(cls, path: Path) -> Winners:
        """WinnersUnreadable, which names the file and what in it is wrong. It needs no device: a
        file can be looked at where there is none."""
        try:
            text = path.read_text(encoding="utf-8")
            held = json.loads(text)
        except OSError as error:
            raise WinnersUnreadable(f"{path}: {error.strerror or error}") from None
        except RecursionError:
            raise WinnersUnreadable(f"{path}: brackets within brackets without end") from None
        except ValueError as error:
            why = error if path.stat().st_size else "is empty"
            raise WinnersUnreadable(f"{path}: {why}") from None
        held = held.get("winners_table", held) if isinstance(held, dict) else {}
        held = held if isinstance(held, dict) else {}
        if held.get("format") != FORMAT:
            raise WinnersUnreadable(
                f"{path}: format={held.get('format')!r:.60}: must be {FORMAT!r}, as `moeserve "
                "bench kernels --device cuda --winners FILE` writes it"
            )
        try:
            return cls(*_checked(held))
        except KeyError as error:
            raise WinnersUnreadable(
                f"{path}: not whole: {error} is missing; each of `winners` has key, name and "
                "seconds"
            ) from None
        except (TypeError, ValueError) as error:
            raise WinnersUnreadable(f"{path}: not whole: {error}") from None


def _checked(held: Mapping[str, Any]) -> tuple[str, dict[str, list[Winner]], dict[str, str]]:
    """Device, winners by kernel, versions. KeyError for what is missing; TypeError, ValueError name
    what is wrong and where."""
    device, tables = held["device"], _kind(held["winners"], dict, "winners")
    if not isinstance(device, str) or not device.strip():
        raise TypeError(f"device={device!r:.60}: must be the name of a GPU")
    versions = _kind(held["versions"], dict, "versions")
    for name, told in versions.items():
        if not isinstance(told, str):
            raise TypeError(f"versions.{name:.60}={told!r:.60}: must be text")
    shapes = _shape_names()
    of: dict[str, list[Winner]] = {}
    for kernel, rows in tables.items():
        if kernel not in shapes:
            raise ValueError(f"winners.{kernel:.60}: must be one of {', '.join(shapes)}")
        for number, row in enumerate(_kind(rows, list, f"winners.{kernel}")):
            where = f"winners.{kernel}[{number}]"
            of.setdefault(kernel, []).append(_winner(row, shapes[kernel], where))
    return device, of, versions


def _winner(row: Any, shape: Sequence[str], where: str) -> Winner:
    row = _kind(row, dict, where)
    key = _kind(row["key"], dict, f"{where}.key")
    seconds = _kind(row["seconds"], dict, f"{where}.seconds")
    if set(key) != set(shape):
        raise ValueError(f"{where}.key has {', '.join(key) or 'nothing'}: must be of {shape}")
    for size, value in key.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}.key.{size}={value!r:.60}: must be a whole number")
    for who, value in seconds.items():
        # A whole number may be larger than any float.
        if type(value) not in (int, float) or not 0 < value <= MOST_SECONDS:
            raise ValueError(f"{where}.seconds.{who}={value!r:.60}: must be seconds, above 0")
    name = row["name"]
    for needed in (OURS, name):
        if not isinstance(needed, str) or needed not in seconds:
            raise ValueError(f"{where}.seconds has no time of {needed!r:.60}")
    return Winner(dict(key), name, {who: float(value) for who, value in seconds.items()})


def _kind(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        what = "an object" if kind is dict else "a list"
        raise TypeError(f"{where}={value!r:.60}: must be {what}")
    return value


def _shape_names() -> dict[str, list[str]]:
    """Of each kernel that is measured, what its shapes are told by. (No case is made for that.)"""
    return {case.kernel: list(case.key) for case in all_cases(V3, torch.device("cpu"))}


def _distance(key: Mapping[str, int], shape: Mapping[str, int]) -> float | None:
    """None where they are different problems, or too far apart in one of their sizes."""
    far = 0.0
    for name, value in shape.items():
        if name not in key or (name not in SIZES and key[name] != value):
            return None
        if name in SIZES:
            few, many = sorted((max(1, key[name]), max(1, value)))
            if many > FARTHEST * few:
                return None
            far += math.log(many) - math.log(few)
    return far


class FastestMla:
    """Of `backends`, per step, who won in the table: one of TritonKernels' `decode_backends`. A
    winner that refuses the step, or has raised, makes way for the next fastest, down to ours."""

    name = "fastest"

    def __init__(self, winners: Winners, backends: Sequence[MlaBackend]) -> None:
        self._winners = winners
        self._by_name: dict[str, MlaBackend] = {backend.name: backend for backend in backends}
        self._ours = TritonMla()
        self._guard = MlaGuard()

    @property
    def choices(self) -> tuple[str, ...]:
        """A line for each size of step so far: who decodes, and why no faster one."""
        return self._guard.choices

    @property
    def failures(self) -> Failures:
        return self._guard.failures

    def refusal(self, problem: MlaProblem) -> str | None:
        if problem.deterministic:
            return "the fastest is chosen by the batch: bits would depend on company"
        if not self._winners.of.get("mla_decode"):
            return f"nobody was measured beside ours on {self._winners.device}"
        return self._ours.refusal(problem)

    def step(self, problem: MlaProblem, step: MlaStep) -> StepDecoder:
        rows, context = step.plan.num_rows, self._context(step)
        heads, fp8 = problem.heads, int(problem.fp8)
        order: list[MlaBackend] = []
        left = dict(self._by_name)
        while (
            name := self._winners.pick(
                "mla_decode", tuple(left), heads=heads, fp8=fp8, rows=rows, context=context
            )
        ) in left:  # fmt: skip
            order.append(left.pop(name))
        size = f"{at_most(rows)} rows, {at_most(context)} positions or fewer"
        at = self._winners.measured_at(
            "mla_decode", heads=heads, fp8=fp8, rows=rows, context=context
        )
        size += f", measured at {at}" if name else ", nothing like it measured"
        what = f"mla decode by table, {size}"
        return self._guard.step(problem, step, [*order, self._ours], what)

    @staticmethod
    def _context(step: MlaStep) -> int:
        """The longest, or where the host does not know it, what the plan was made for at most."""
        if step.lengths:
            return max(step.lengths)
        return step.plan.longest
