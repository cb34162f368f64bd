"""One self-contained page about a run of `bench serve`: figures, plots, settings, caveats. It loads
nothing. Knows HTML and the report's shape."""

from __future__ import annotations

import html
from typing import Any

from launch.bench.report_plots import as_svg, plots
from launch.bench.serve_show import LATENCY_NAMES, RATES, facts, number

_STYLE = """
:root { color: #1b1f24; background: #f6f7f9; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 0 0 8px; }
.sub { color: #6b7280; margin: 0 0 20px; } .sub b { color: #1b1f24; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: 12px; }
@media (max-width: 980px) { .tiles { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 480px) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.tile, .card { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 24px; line-height: 1.2; }
.tile span { color: #6b7280; font-size: 13px; }
.card { padding: 14px 16px; margin-top: 14px; overflow-x: auto; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
@media (max-width: 820px) { .two { grid-template-columns: 1fr; gap: 0; } }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #eef0f3; }
th { color: #6b7280; font-weight: 500; font-size: 13px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: pre; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0; }
dt { color: #6b7280; } dd { margin: 0; overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 18px; }
.card + .tiles { margin-top: 14px; }
.bad { background: #fef2f2; border-color: #fca5a5; color: #991b1b; }
footer { color: #9ca3af; font-size: 12px; margin-top: 20px; }
"""


def page(report: dict[str, Any]) -> str:
    """The whole page as text."""
    body = [
        f"<h1>{_text(report['model'])}</h1>",
        f'<p class="sub">{_subtitle(report)}</p>',
        _problems(report),
        _tiles(report),
        _figures(report),
        _pictures(report),
        '<div class="two">',
        _card("Settings", _list(_settings(report))),
        _card("What it ran on", _list(_machines(report))),
        "</div>",
        _card("What to know of these figures", _bullets([*facts(report), *report["caveats"]])),
    ]
    return _around(report, "bench serve", body)


def whole_page(report: dict[str, Any], subtitle: str, cards: list[tuple[str, str]]) -> str:
    """A page of other cards (title, HTML) about runs on one server, with settings and caveats."""
    body = [
        f"<h1>{_text(report['model'])}</h1>",
        f'<p class="sub"><b>{_text(subtitle)}</b>; {_text(report["url"])}</p>',
        _problems(report),
        *(_card(title, content) for title, content in cards),
        '<div class="two">',
        _card("Settings", _list(_settings(report))),
        _card("What it ran on", _list(_machines(report))),
        "</div>",
        _card("What to know of these figures", _bullets(report["caveats"])),
    ]
    return _around(report, "bench sweep", body)


def _around(report: dict[str, Any], name: str, body: list[str]) -> str:
    body = [*body, f"<footer>{_text(report['format'])}; {_text(report['at'])}</footer>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(report['model'])}: {name}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(x for x in body if x)}\n</body></html>\n"
    )


def _subtitle(report: dict[str, Any]) -> str:
    settings, calls = report["settings"], report["calls"]
    lengths = "recorded lengths"
    if settings["input_tokens"] is not None:
        lengths = f"{settings['input_tokens']} tokens in, {settings['output_tokens']} out"
    done = f"{calls['good']} of {calls['sent']} calls good in {report['seconds']:.1f} s"
    return f"<b>{_text(settings['when'])}</b>, {_text(lengths)}; {done}; {_text(report['url'])}"


def _problems(report: dict[str, Any]) -> str:
    if not report["problems"]:
        return ""
    return f'<div class="card bad"><h2>Problems</h2>{_bullets(report["problems"])}</div>'


def _tiles(report: dict[str, Any]) -> str:
    node, latency = report["throughput"]["per_node"], report["latency_ms"]
    tiles = [
        (number(node["output_tokens_per_second"]), "output tokens/s a node"),
        (number(node["input_tokens_per_second"]), "input tokens/s a node"),
        (_of(latency["ttft"], "p50"), "ms to the first token, p50"),
        (_of(latency["tpot"], "p50"), "ms a token after it, p50"),
        (number(report["goodput_requests_per_second"]), "good answers/s"),
        (str(report["calls"]["failed"]), "failed calls"),
    ]
    made = (
        f'<div class="tile"><b>{_text(value)}</b><span>{name}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{"".join(made)}</div>'


def _of(latency: dict[str, float] | None, name: str) -> str:
    return number(None if latency is None else latency[name])


def _figures(report: dict[str, Any]) -> str:
    rank = report["gpus_are"].removesuffix("s")
    throughput = report["throughput"]
    rates = [
        [words, *(number(throughput[x][name]) for x in ("all", "per_node", "per_gpu"))]
        for name, words in RATES.items()
    ]
    heads = ["", "all", f"a node (of {report['nodes']})", f"a {rank} (of {report['gpus']})"]
    names = ("mean", "p50", "p90", "p99")
    latencies = [
        [words, *(_of(report["latency_ms"][key], name) for name in names)]
        for key, words in LATENCY_NAMES.items()
    ]
    return (
        '<div class="two">'
        + _card("Throughput", _table(heads, rates))
        + _card("Latency, ms", _table(["", *names], latencies))
        + "</div>"
    )


def _pictures(report: dict[str, Any]) -> str:
    made = [(title, _card(title, as_svg(figure))) for title, figure in plots(report)]
    narrow = [card for title, card in made if title.startswith("Time ")]
    wide = [card for title, card in made if not title.startswith("Time ")]
    beside = f'<div class="two">{"".join(narrow)}</div>' if len(narrow) > 1 else "".join(narrow)
    return beside + "".join(wide)


def _settings(report: dict[str, Any]) -> list[tuple[str, Any]]:
    told = [(name.replace("_", " "), value) for name, value in report["settings"].items()]
    limits = [
        (f"limit of {k[:4].upper()}, ms", None if v is None else number(v))
        for k, v in report["limits"].items()
    ]
    return [*told, *limits]


def _machines(report: dict[str, Any]) -> list[tuple[str, Any]]:
    server, client = report["server"], report["client"]
    told: list[tuple[str, Any]] = [("nodes", report["nodes"]), (report["gpus_are"], report["gpus"])]
    if server["ours"]:
        dispatch = server["dispatch"] or {}
        for phase in ("prefill", "decode"):
            part = dispatch.get(phase) or {}
            how = " (emulated)" if part.get("emulated") else ""
            told.append((f"dispatch, {phase}", f"{part.get('backend')}{how}"))
        for name in ("device", "dtype", "weights", "deterministic", "kv_tokens", "rebalancing"):
            told.append((name.replace("_", " "), server.get(name)))
        placement = server.get("placement") or {}
        told.append(("redundant experts a layer", placement.get("num_redundant_experts")))
    else:
        told.append(("server", "none of ours"))
    load = client["load"]
    told += [
        ("load generator", f"{client['host']}, {client['cores']} cores of {client['cpu']}"),
        ("load there", None if load is None else f"{load:.1f} processes wanted a core"),
        ("commit of the generator", client["commit"]),
    ]
    return told


def _card(title: str, content: str) -> str:
    return f'<div class="card"><h2>{_text(title)}</h2>{content}</div>'


def _list(pairs: list[tuple[str, Any]]) -> str:
    shown = ((name, value) for name, value in pairs if value not in (None, {}, ""))
    made = (f"<dt>{_text(name)}</dt><dd>{_text(_plain(value))}</dd>" for name, value in shown)
    return f"<dl>{''.join(made)}</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bullets(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(x)}</li>' for x in lines)}</ul>"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{_text(x)}</th>" for x in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))
