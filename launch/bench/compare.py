"""`moeserve bench compare A.json B.json`: ratios B / A of two runs of the same load.

Calls are paired: conversation k, turn t asked the same in both, so that the median of the pairs'
ratios sees neither the mix of lengths nor single slow calls. Rates of a sweep and rows of `bench
offline` are paired likewise. Knows the reports' shapes; nothing of servers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.bench import serve_run, sweep
from launch.bench.figures import Spread
from launch.bench.serve_caveats import SAME_KIND
from launch.bench.serve_show import number
from moeserve.errors import ConfigError

OFFLINE_FORMAT = "moeserve bench offline 1"
_KINDS = {serve_run.FORMAT: "serve", sweep.FORMAT: "sweep", OFFLINE_FORMAT: "offline"}
FORMATS = tuple(_KINDS)
_FASTER_IS_MORE = ("tokens_per_second", "requests_per_second", "share")
_HAS_TO_HOLD = {
    serve_run.FORMAT: ("settings", "samples", "throughput", "latency_ms"),
    sweep.FORMAT: ("settings", "points", "knee"),
    OFFLINE_FORMAT: ("settings", "rows"),
}
_BESIDE = ("model", "nodes", "gpus", "gpus_are", "tokens_are")  # differ: said, not refused
_SERVER = ("device", "dtype", "weights", "deterministic", "kernels", "placement", "dispatch")


@dataclass(frozen=True)
class Compare:
    these: Path
    those: Path
    force: bool
    as_json: bool

    def run(self) -> None:
        """ConfigError where they cannot be compared."""
        a, b = _read(self.these), _read(self.those)
        if a["format"] != b["format"]:
            kinds = [_KINDS[x["format"]] for x in (a, b)]
            raise ConfigError(
                [
                    f"{self.these} is a result of `bench {kinds[0]}`, {self.those} of `bench "
                    f"{kinds[1]}`: only two of one command can be compared"
                ]
            )
        try:
            self._compare(a, b)
        except (LookupError, TypeError, AttributeError) as error:  # a part of a part
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(
                [f"{self.these} or {self.those}: is no whole result ({what})"]
            ) from error

    def _compare(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        unlike = unlike_settings(a, b)
        if unlike and not self.force:
            words = [f"{name}: {x!r} in A, {y!r} in B" for name, x, y in unlike]
            raise ConfigError([*words, "other settings: no comparison (--force makes one)"])
        report = {
            "a": str(self.these),
            "b": str(self.those),
            "unlike": [list(x) for x in unlike],
            "differs": [list(x) for x in differences(a, b)],
            "warnings": warnings(a, b),
            "rows": ratios(a, b),
        }
        if self.as_json:
            print(json.dumps(report, default=str))
        else:
            _show(report)


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except ValueError:
        raise ConfigError([f"{path}: is no JSON"]) from None
    if not isinstance(held, dict) or held.get("format") not in FORMATS:
        what = "no result of bench serve, sweep or offline (--out FILE)"
        raise ConfigError([f"{path}: {what}"])
    missing = [x for x in _HAS_TO_HOLD[held["format"]] if x not in held]
    if missing:
        raise ConfigError([f"{path}: is no whole result: {', '.join(missing)} missing"])
    return held


def unlike_settings(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, A's, B's) of settings that make another measurement."""
    x, y = a["settings"], b["settings"]
    names = dict.fromkeys([*x, *y])
    return [(n, x.get(n), y.get(n)) for n in names if x.get(n) != y.get(n)]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """What else is not the same: the thing compared, or a reason to doubt it."""
    pairs = [(name, a.get(name), b.get(name)) for name in _BESIDE]
    for name in _SERVER:
        x, y = ((z.get("server") or {}).get(name) for z in (a, b))
        pairs.append((f"server: {name}", x, y))
    for name in ("host", "cpu", "cores", "torch", "commit"):
        x, y = ((z.get("client") or z.get("machine") or {}).get(name) for z in (a, b))
        pairs.append((f"measured from: {name}", x, y))
    return [pair for pair in pairs if pair[1] != pair[2]]


def warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Why one of the two is doubtful."""
    said = []
    for name, report in (("A", a), ("B", b)):
        said += [f"{name}: PROBLEM: {x}" for x in report.get("problems", ())]
        if (report.get("generator") or {}).get("was_limit"):
            said.append(f"{name}: the load generator was the limit")
        if report.get("interrupted"):
            said.append(f"{name}: was stopped before its end")
    return said


def ratios(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a figure: A, B, B / A; for paired ones the spread of the pairs' ratios too."""
    if a["format"] == OFFLINE_FORMAT:
        return _offline(a, b)
    if a["format"] == sweep.FORMAT:
        # results of before do not have all of them: theirs was asked for only
        rows = [
            _row(f"knee, {words}", a.get(name), b.get(name), "requests_per_second")
            for name, words in (
                ("knee", "calls/s asked for"),
                ("knee_delivered", "steady answers/s"),
                ("knee_whole_run", "answers/s of the whole run"),
            )
            if a.get(name) is not None or b.get(name) is not None
        ]
        others = {x["rate"]: x for x in b["points"]}
        for point in a["points"]:
            if (other := others.get(point["rate"])) is not None:
                words = f"at {point['rate']:.3g}/s: "
                rows += _figures(point, other, words, unit_of(a, b))
        return rows
    return _paired(a, b) + _figures(a, b, "", unit_of(a, b))


def unit_of(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What the figures of one rank are called: as in the reports, both where they differ."""
    names = dict.fromkeys(str(x.get("gpus_are", "GPUs")).removesuffix("s") for x in (a, b))
    return "a " + " / ".join(names)


def unlike_events(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Why ITL of the two is not the same thing, in words: it is the time between events, and those
    of one bring more tokens."""
    name = "tokens_an_event"
    if name not in a or name not in b:
        return "not compared: an older result, whose ITL may be another thing"
    x, y = a[name], b[name]
    if x is None and y is None:
        return None
    if x is not None and y is not None and abs(x - y) <= SAME_KIND * min(x, y):
        return None
    return f"not compared: tokens an event {number(x)} in A, {number(y)} in B"


def _paired(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    def key(call: dict[str, Any]) -> tuple[int, int]:
        return call["conversation"], call["turn"]

    others = {key(x): x for x in b["samples"] if x["fault"] is None}
    both = [(x, others[key(x)]) for x in a["samples"] if x["fault"] is None and key(x) in others]
    rows = []
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        pairs = [(x[name], y[name]) for x, y in both if x[name] and y[name]]
        if not pairs:
            continue
        row = _row(
            f"{name.removesuffix('_ms').upper()}, ms, by call",
            Spread.of([x for x, _ in pairs]).median,
            Spread.of([y for _, y in pairs]).median,
            name,
        )
        spread = Spread.of([y / x for x, y in pairs])
        rows.append(row | {"ratio": spread.median, "pairs": len(pairs), "of_pairs": _range(spread)})
    return rows


def _range(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "least": spread.least, "p90": spread.p90, "most": spread.most}


def _figures(a: dict[str, Any], b: dict[str, Any], where: str, unit: str) -> list[dict[str, Any]]:
    rows = []
    for kind, words in (("per_node", "a node"), ("per_gpu", unit)):
        for name, x in a["throughput"][kind].items():
            if name == "requests_per_second" and kind == "per_gpu":
                continue
            label = name.replace("_per_second", "/s").replace("_", " ")
            rows.append(_row(f"{where}{label} {words}", x, b["throughput"][kind][name], name))
    for name in ("ttft", "tpot", "itl", "e2e"):
        for part in ("p50", "p99"):
            x, y = ((z["latency_ms"][name] or {}).get(part) for z in (a, b))
            row = _row(f"{where}{name.upper()} {part}, ms", x, y, f"{name}_ms")
            if name == "itl" and (why := unlike_events(a, b)):
                row |= {"ratio": None, "why": why}
            rows.append(row)
    for name, label in (
        ("goodput_requests_per_second", "good answers/s"),
        ("cache_hit_share", "cache hit share"),
    ):
        rows.append(_row(f"{where}{label}", a[name], b[name], name))
    return [row for row in rows if row["a"] is not None or row["b"] is not None]


def _offline(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    others = {(y["what"], y["batch"]): y for y in b["rows"]}
    rows = []
    for x in a["rows"]:
        y = others.get((x["what"], x["batch"]))
        if y is None:
            continue
        row = _row(
            f"{x['what']} {x['batch']}, tokens/s",
            x["tokens_per_second"],
            y["tokens_per_second"],
            "tokens_per_second",
        )
        spread = Spread.of([q / p for p, q in zip(x["runs"], y["runs"], strict=False)])
        count = min(len(x["runs"]), len(y["runs"]))
        rows.append(row | {"ratio": spread.median, "pairs": count, "of_pairs": _range(spread)})
    return rows


def _row(what: str, a: float | None, b: float | None, name: str) -> dict[str, Any]:
    ratio = b / a if a and b is not None else None
    more = any(name.endswith(x) for x in _FASTER_IS_MORE)
    return {"what": what, "a": a, "b": b, "ratio": ratio, "better": "more" if more else "less"}


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from launch.bench.screen import wide_console

    console = wide_console()
    table = Table(title=f"A: {report['a']}   B: {report['b']}", title_justify="left")
    table.add_column("")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right")
    table.add_column("of pairs: least - p90 - most")
    for row in report["rows"]:
        ratio, pairs = row["ratio"], row.get("of_pairs")
        style = ""
        if ratio is not None and not 0.98 <= ratio <= 1.02:
            style = "green" if (ratio > 1) == (row["better"] == "more") else "red"
        told = row.get("why", "")
        if pairs:
            words = " - ".join(number(pairs[x]) for x in ("least", "p90", "most"))
            told = f"{words} ({row['pairs']})"
        cell = "-" if ratio is None else f"[{style}]{ratio:.3f}[/]" if style else f"{ratio:.3f}"
        table.add_row(row["what"], number(row["a"]), number(row["b"]), cell, told)
    console.print(table)
    if any(row.get("of_pairs") for row in report["rows"]):
        console.print(
            "Of rows with pairs, A and B are medians, and B / A is the median of the pairs' own "
            "ratios: not the ratio of the two medians.",
            highlight=False,
        )
    for title in ("unlike", "differs"):
        for name, x, y in report[title]:
            word = "SETTING DIFFERS" if title == "unlike" else "differs"
            console.print(f"{word}: {name}: {x} / {y}", highlight=False, markup=False)
    for line in report["warnings"]:
        console.print(line, highlight=False, markup=False, style="bold red")
