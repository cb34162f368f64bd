"""`moeserve experts compare`: policies side by side on the same loads (`ep.planning.compare`).

Knows flags, which arrays of a file are meant, how the table is shown. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ep.planning.compare import LAYOUTS, Comparison, compare, drift, format_table
from ep.planning.plan_loads import PlanError
from ep.planning.policy import POLICIES
from ep.presets import Layout
from launch.experts.cases import Wanted
from launch.experts.screen import console, emit, heat, table
from launch.experts.source import Source, since_of_jobs
from launch.experts.view import FloatArray, View
from moeserve.errors import ConfigError


@dataclass(frozen=True)
class Compare:
    """The command's flags. arrays: of the source, one trace each. then: what the loads become,
    with as many arrays (or one); distance: go only so far toward it. layouts: the published ones,
    all or those whose names begin so; else `wanted`'s. policies: a comma between them."""

    source: Source
    arrays: tuple[str, ...]
    wanted: Wanted
    published: bool = False
    chosen: tuple[str, ...] = ()
    policies: str = ",".join(POLICIES)
    then: str | None = None
    then_arrays: tuple[str, ...] = ()
    distance: float | None = None
    repeat: int = 1
    markdown: bool = False
    as_json: bool = False

    def run(self) -> None:
        self._check()
        source, then = self.source, replace(self.source, text=self.then or self.source.text)
        source, then = since_of_jobs(source, then)
        views = self._views(source, self.arrays)
        later = self._later(views, then)
        drifted = {}
        for name, toward in later.items():
            loads = views[name].loads
            drifted[name] = toward if self.distance is None else drift(loads, toward, self.distance)
        rows: list[Comparison] = []
        for layouts, names in self._plan(views):
            traces = {name: _routed(views[name]) for name in names}
            try:
                rows += compare(
                    traces,
                    layouts,
                    self._policies(),
                    drifted={name: drifted[name] for name in names if name in drifted},
                    top_k=self._top_k(views[names[0]]),
                    repeat=self.repeat,
                )
            except PlanError as error:
                raise ConfigError([str(error)]) from None
        report = {
            "command": "compare",
            "source": self.source.text,
            "phase": self.source.phase,
            "traces": list(views),
            "then": self.then,
            "drift": self.distance,
            "rows": [row.to_dict() for row in rows],
        }
        if self.as_json:
            emit(report)
        elif self.markdown:
            print(format_table(rows))
        else:
            screen = console()
            screen.print(compare_screen(report, screen.width))

    def _check(self) -> None:
        problems = []
        if self.markdown and self.as_json:
            problems.append("--markdown and --json: give one of them, not both")
        if self.published or self.chosen:
            flag = "--layouts" if self.published else "--only"
            problems += [
                f"{flag} and --{name}: give one of them, not both" for name in self.wanted.shaping
            ]
        if self.then is None and (self.then_arrays or self.distance is not None):
            problems.append("--then-array and --drift: go with --then")
        if self.distance is not None and not 0 < self.distance <= 1:
            problems.append(f"--drift {self.distance:g}: must be above 0, at most 1")
        most = max(len(self.arrays), 1)
        if self.then_arrays and len(self.then_arrays) != most:
            problems.append(
                f"--then-array: {len(self.then_arrays)} given; needs one for each of {most} traces"
            )
        wrong = [x for x in self._policies() if x not in POLICIES]
        if wrong or not self._policies():
            given = wrong[0] if wrong else self.policies
            problems.append(f"--policies {given!r}: valid are {', '.join(POLICIES)}")
        if problems:
            raise ConfigError(problems)

    def _policies(self) -> list[str]:
        return [x.strip() for x in self.policies.split(",") if x.strip()]

    def _views(self, source: Source, arrays: Sequence[str]) -> dict[str, View]:
        views = {}
        for array in arrays or (None,):
            view = replace(source, array=array).read()
            if not view.has_load:
                raise ConfigError([f"{view.name}: no expert had any load"])
            views[array or source.text.rstrip("/").rsplit("/", 1)[-1]] = view
        return views

    def _later(self, views: dict[str, View], then: Source) -> dict[str, FloatArray]:
        """By name of trace, what its loads become."""
        if self.then is None:
            return {}
        arrays = self.then_arrays
        if not arrays and self.then.endswith(".npz") and self.arrays:
            arrays = self.arrays
        toward = list(self._views(then, arrays).values())
        out = {}
        for number, (name, view) in enumerate(views.items()):
            other = toward[number if len(toward) > 1 else 0]
            mine, theirs = _routed(view), _routed(other)
            if mine.shape != theirs.shape:
                raise ConfigError(
                    [
                        f"--then {self.then}: {theirs.shape} layers and experts; {name} has "
                        f"{mine.shape}"
                    ]
                )
            out[name] = theirs
        return out

    def _plan(self, views: dict[str, View]) -> list[tuple[list[Layout], list[str]]]:
        """Which layouts are tried on which traces. Published layouts of prefill meet traces of
        prefill, where names say so."""
        names = list(views)
        if not self.published and not self.chosen:
            return [(self.wanted.cases(views[names[0]]), names)]
        layouts = _published(self.chosen)
        experts = {view.num_routed for view in views.values()}
        if experts - {layout.routed_experts for layout in layouts}:
            raise ConfigError(
                [
                    f"--layouts: made for {layouts[0].routed_experts} routed experts; the loads "
                    f"have {', '.join(map(str, sorted(experts)))}: give --gpus instead"
                ]
            )
        prefill = [name for name in names if "prefill" in name]
        decode = [name for name in names if "decode" in name]
        if not prefill or not decode:
            return [(layouts, names)]
        return [
            (part, chosen)
            for part, chosen in (
                ([x for x in layouts if x.name.startswith("EP32 ")], prefill),
                ([x for x in layouts if not x.name.startswith("EP32 ")], decode),
            )
            if part
        ]

    def _top_k(self, view: View) -> int:
        """Routed experts of a token."""
        hosted = view.num_experts - view.num_routed
        known = view.picks_per_token - hosted if view.picks_per_token else 8
        return self.wanted.top_k or known


def _routed(view: View) -> FloatArray:
    """Loads of the routed experts: a layout adds the shared one itself."""
    loads: FloatArray = view.loads[:, : view.num_routed]
    return loads


def _published(names: Sequence[str]) -> list[Layout]:
    chosen = [x for x in LAYOUTS if not names or any(x.name.startswith(n) for n in names)]
    unknown = [n for n in names if not any(x.name.startswith(n) for x in LAYOUTS)]
    if unknown:
        known = "; ".join(x.name for x in LAYOUTS)
        raise ConfigError([f"--only {unknown[0]!r}: no layout begins so; there are {known}"])
    return chosen


def compare_screen(report: dict[str, Any], width: int) -> Any:
    several = len(report["traces"]) > 1
    drifting = any(x["moved"] is not None for x in report["rows"])
    names, numbers, last = [], [], None
    for x in report["rows"]:
        where = (x["layout"], x["trace"]) if several else (x["layout"],)
        names.append([*(where if where != last else [""] * len(where)), x["policy"]])
        last = where
        row = [heat(x["mean"], digits=4), heat(x["worst"], digits=3)]
        row += [f"{x['bound']:.4f}", f"{1000 * x['seconds']:.0f}"]
        if drifting:
            row += [heat(x["drifted_before"], digits=4), heat(x["drifted_after"], digits=4)]
            row.append(f"{x['moved']:.1%}")
        numbers.append(row)
    heads = ["<layout", *(["<trace"] if several else []), "<policy"]
    columns = ["mean", "worst", "bound", "ms"]
    columns += ["drifted", "replanned", "moved"] if drifting else []
    if _width([*heads, *columns], [[*a, *b] for a, b in zip(names, numbers, strict=True)]) > width:
        heads, names, numbers = _stacked(names, numbers)
    rows = [[*a, *b] for a, b in zip(names, numbers, strict=True)]
    notes = "mean, worst: busiest GPU / mean over the layers; bound: no placement can be below; ms "
    notes += "of CPU for one plan"
    if drifting:
        toward = report["then"] if report["drift"] is None else f"{report['drift']:g} toward it"
        notes += f"; drifted: serving what the loads become ({toward}), then planned again"
    return table(f"Policies on {report['source']}", [*heads, *columns], rows, notes)


def _width(columns: list[str], rows: list[list[Any]]) -> int:
    """Of a table in which no cell is folded."""
    cells = [columns, *rows]
    return sum(max(len(str(row[i])) for row in cells) + 3 for i in range(len(columns)))


def _stacked(
    names: list[list[str]], numbers: list[list[Any]]
) -> tuple[list[str], list[list[str]], list[list[Any]]]:
    """The same in one column of names: a line for each layout, policies below it."""
    stacked, under = [], []
    for (*where, policy), row in zip(names, numbers, strict=True):
        if where[0]:
            stacked.append([": ".join(where)])
            under.append([""] * len(row))
        stacked.append([f" {policy}"])
        under.append(row)
    return ["<layout, policy"], stacked, under
