"""`moeserve status`: a job's nodes, ranks, stage, address, requests and health, as a table or JSON.

Asks whoever knows: the files of its ranks, Slurm, and the server's own /health. Changes nothing.
"""

from __future__ import annotations

import json
import time
from typing import Any

from launch.cluster.jobs import SLURM, JobRecord
from launch.cluster.screen import describe, ranks_in_words
from launch.cluster.stages import STAGES
from launch.cluster.targets import Target, all_jobs, find
from launch.cluster.urls import ask_health
from launch.cluster.watch import NodeView, Progress
from moeserve.terminal import counted


def status(named: str | None, as_json: bool) -> int:
    """Print it. 0: the job takes requests, or none was named; 1: it does not (yet)."""
    jobs = all_jobs()
    if named is None and len(jobs) != 1:
        reports = [report_of(target) for target in jobs]
        if as_json:
            print(json.dumps({"jobs": reports}))
        else:
            _print_list(reports)
        return 0
    report = report_of(find(named, jobs))
    if as_json:
        print(json.dumps(report))
    else:
        _print_job(report)
    return 0 if report["ready"] else 1


def report_of(target: Target) -> dict[str, Any]:
    """Plain data; what is not known is None. `stage`: of the slowest node, or how it ended."""
    record, progress = target.record, target.progress
    health = ask_health(target.url) if target.url else "it has no address yet"
    told: dict[str, Any] = health if isinstance(health, dict) else {}
    # Of ranks that somebody else started (torchrun by hand) only the first writes its stages.
    few = len(progress.ranks) < len(told.get("ranks", []))
    nodes = nodes_of(told) if few else [_node(view) for view in progress.nodes()]
    return {
        "id": record.id if record is not None else None,
        "kind": record.kind if record is not None else None,
        "folder": record.folder if record is not None and record.folder else None,
        "command": list(record.command) if record is not None else None,
        "state": _state(target, told),
        "stage": _stage(target, told),
        "ready": bool(told.get("ready")),
        "reason": told.get("reason") or (health if isinstance(health, str) else None),
        "url": target.url or None,
        "uptime_seconds": _uptime(target, told),
        "num_nodes": len(nodes) or (record.nodes if record is not None else None),
        "num_ranks": (record.num_ranks if record is not None else 0) or len(told.get("ranks", [])),
        "requests_in_flight": told.get("requests_in_flight"),
        "model": told.get("model"),
        "dispatch": told.get("dispatch"),
        "speculation": told.get("speculation"),
        "slurm": None if target.state is None else vars(target.state),
        "trouble": target.trouble or None,
        "restarts": _restarts(target, told),
        "nodes": nodes,
        "ranks": told.get("ranks"),
        "failures": [{"rank": f.rank, "host": f.host, "reason": f.text} for f in progress.primary],
    }


def _state(target: Target, health: dict[str, Any]) -> str:
    """ready, draining, failed, ... by the server; else pending, starting, restarting or ended."""
    if "status" in health:
        return str(health["status"])
    if target.state is not None and not target.state.running:
        return target.state.state.lower()
    if target.record is not None and target.record.stale:
        return "ended"
    if target.record is not None and _starts_again(target.record, target.progress):
        return "restarting"
    if target.progress.failing:
        return "failed"
    return "starting" if target.record is not None else "unreachable"


def _starts_again(record: JobRecord, progress: Progress) -> bool:
    """Its ranks died, or cannot be reached any more, and may start as often as that."""
    if progress.ending or not record.restarts:
        return False
    lost = progress.failing or bool(progress.url)
    return progress.restarts > 0 or (lost and progress.restarts < record.restarts)


def _restarts(target: Target, health: dict[str, Any]) -> dict[str, Any] | None:
    """How often all ranks have started again, at most may, and why; None: they never will."""
    told = (health.get("launch") or {}).get("restarts")
    if told:
        return dict(told)
    record, progress = target.record, target.progress
    if record is None or not record.restarts:
        return None
    cause = progress.first_cause({}) if progress.failing else progress.last_cause
    who = f"rank {cause.rank}: " if cause is not None and cause.rank >= 0 else ""
    reasons = [] if cause is None else [f"{who}{cause.reason}"]
    return {"count": progress.restarts, "max": record.restarts, "reasons": reasons}


def _stage(target: Target, health: dict[str, Any]) -> str | None:
    progress = target.progress
    nodes = progress.nodes()
    if health.get("ready"):
        return "ready"
    if target.record is not None and target.record.stale:
        return "failed" if progress.failing else "stopped"
    if not nodes:
        return None
    return min(nodes, key=lambda n: STAGES.index(n.stage)).stage


def _uptime(target: Target, health: dict[str, Any]) -> float | None:
    if "uptime_seconds" in health:
        return float(health["uptime_seconds"])
    began, record = target.progress.started, target.record
    ended = target.progress.seen if record is not None and record.stale else time.time()
    return round(ended - began, 1) if began else None


def _node(view: NodeView) -> dict[str, Any]:
    return {
        "host": view.host,
        "ranks": list(view.ranks),
        "stage": view.stage,
        "weight_bytes": view.done,
        "weight_total": view.total,
        "bytes_per_second": round(view.rate),
        "in_words": describe(view),
    }


def nodes_of(health: dict[str, Any]) -> list[dict[str, Any]]:
    """From /health, where no files are at hand."""
    named = {
        rank: str(node["name"])
        for node in (health.get("launch") or {}).get("nodes", [])
        for rank in node["ranks"]
    }  # several nodes may share a host name (containers, Slurm's virtual nodes)
    by_host: dict[str, list[dict[str, Any]]] = {}
    for rank in health.get("ranks", []):
        by_host.setdefault(named.get(rank.get("rank")) or rank.get("host", "?"), []).append(rank)
    return [
        {
            "host": host,
            "ranks": [x["rank"] for x in ranks],
            "stage": (stages := sorted({str(x.get("state")) for x in ranks}))[0],
            "weight_bytes": sum(x.get("done_bytes", 0) for x in ranks),
            "weight_total": sum(x.get("total_bytes", 0) for x in ranks),
            "bytes_per_second": None,
            "in_words": ", ".join(stages),
        }
        for host, ranks in by_host.items()
    ]


# -- for people ---------------------------------------------------------------------------------


def _print_list(reports: list[dict[str, Any]]) -> None:
    if not reports:
        print("no job of yours is known on this machine")
        return
    table = _table("job", "kind", "state", "ranks", "up", "url")
    for report in reports:
        up = report["uptime_seconds"]
        table.add_row(
            report["id"],
            report["kind"],
            report["state"],
            str(report["num_ranks"]),
            _ago(up),
            report["url"] or "",
        )
    _show(table)


def _print_job(report: dict[str, Any]) -> None:
    name = report["id"] or report["url"]
    where = f": {report['url']}" if report["url"] and report["id"] else ""
    kind = {None: "", SLURM: "Slurm job "}.get(report["kind"], "job ")
    print(f"{kind}{name}: {report['state']}{where}")
    facts = []
    if report["model"]:
        facts.append(f"model {report['model']}")
    if report["uptime_seconds"] is not None:
        facts.append(f"up {_ago(report['uptime_seconds'])}")
    if report["requests_in_flight"] is not None:
        facts.append(f"{counted(report['requests_in_flight'], 'request')} in flight")
    if report["num_ranks"]:
        facts.append(counted(report["num_ranks"], "rank"))
    if facts:
        print(", ".join(facts))
    if report["dispatch"]:
        print(f"dispatch: {_dispatch(report['dispatch'])}")
    if report["speculation"]:
        print(f"speculation: {_speculation(report['speculation'])}")
    slurm = report["slurm"]
    if slurm is not None:
        reason = f" ({slurm['reason']})" if slurm["reason"] else ""
        nodes = f" on {slurm['nodes']}" if slurm["nodes"] else ""
        print(f"Slurm: {slurm['state'].lower()}{reason}{nodes}")
    for line in (report["trouble"], None if report["ready"] else report["reason"]):
        if line:
            print(line)
    again = report["restarts"]
    if again and (again["count"] or report["state"] == "restarting"):
        why = f", last: {again['reasons'][-1]}" if again["reasons"] else ""
        print(f"restarts: {again['count']} of {again['max']}{why}")
    for failure in report["failures"]:
        print(f"rank {failure['rank']} on {failure['host']}: {failure['reason']}")
    if report["nodes"]:
        table = _table("node", "ranks", "stage")
        for node in report["nodes"]:
            table.add_row(node["host"], ranks_in_words(node["ranks"])[5:].strip(), node["in_words"])
        _show(table)
    if report["folder"]:
        print(f"folder: {report['folder']}")


def _dispatch(told: dict[str, Any]) -> str:
    names = {phase: told[phase] for phase in ("prefill", "decode") if phase in told}
    words = []
    for phase, value in names.items():
        words.append(f"{phase} {value.get('backend', value) if isinstance(value, dict) else value}")
    return ", ".join(words) or json.dumps(told)


def _speculation(told: dict[str, Any]) -> str:
    """Who drafts and what it came to since start."""
    words = [str(told.get("drafter", "on"))]
    if not told.get("drafted_tokens"):
        return f"{words[0]}, nothing drafted yet"
    share = told["accepted_tokens"] / told["drafted_tokens"]
    words.append(f"{share:.0%} of {counted(told['drafted_tokens'], 'draft')} accepted")
    words.append(f"{told['mean_accepted']:.2f} a run at temperature {told['temperature']:.2g}")
    if told.get("recent_steps"):
        words.append(f"depth {told['recent_depth']:.1f}")
        words.append(f"predicted {told['predicted_speedup']:.2f} x")
    if told.get("failures"):
        words.append(f"{counted(told['failures'], 'failure')}, last: {told['failure']}")
    return ", ".join(words)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _table(*titles: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
