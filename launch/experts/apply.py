"""`moeserve experts apply`: rebalance a running job now, or say what that would do.

Knows the route /experts/rebalance, waiting, what a person sees meanwhile. The job makes plans.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep.planning.plan_loads import PlanError, check_robust
from ep.planning.policy import POLICIES
from launch.experts.cases import GROUP_POLICIES
from launch.experts.http import ExpertsHttp
from launch.experts.screen import console, emit
from launch.experts.source import load_placement
from launch.experts.units import show_bytes, show_seconds
from moeserve.errors import ConfigError, MoeserveError

LOOK_EVERY = 0.2
BEGIN_PATIENCE = 120.0  # seconds without any news of our wish


@dataclass(frozen=True)
class Apply:
    """The command's flags. wait: until it has ended; a dry run is always waited for."""

    url: str
    dry_run: bool = False
    placement: Path | None = None
    wait: bool = False
    group_policy: str | None = None
    robust: str | None = None
    policy: str | None = None
    max_moved: int | None = None
    gentle: bool = False
    as_json: bool = False
    key: str | None = None

    def run(self) -> None:
        """MoeserveError where the job refuses, or abandons what it had begun."""
        body = self._body()
        with ExpertsHttp(self.url, self.key) as http:
            before = http.get("/experts/placement")
            if self.placement is not None:
                body["placement"] = _fitting(self.placement, before)
            wish = http.post("/experts/rebalance", body)
            if self.dry_run or self.wait:
                wish = self._until_ended(http, int(wish["number"]))
            after = http.get("/experts/placement")
        report = {
            "command": "apply",
            "source": http.url,
            **wish,
            "generation_before": before["generation"],
            "generation_after": after["generation"],
        }
        if self.as_json:
            emit(report)
        else:
            console().print(apply_screen(report))
        if wish["result"] in ("refused", "abandoned", "unknown"):
            raise MoeserveError(f"{http.url}: {wish['result']}: {wish['reason']}")

    def _body(self) -> dict[str, Any]:
        options = {
            "group_policy": self.group_policy,
            "robust": None if self.robust is None else self.robust.replace(" ", ""),
            "policy": self.policy,
            "max_moved_slots": self.max_moved,
        }
        options = {name: value for name, value in options.items() if value is not None}
        problems = self._problems(options)
        if problems:
            raise ConfigError(problems)
        return {
            "dry_run": self.dry_run,
            "force": not self.gentle,
            "wait": False,
            "options": options,
        }

    def _problems(self, options: dict[str, Any]) -> list[str]:
        problems = []
        if self.placement is not None and options:
            flag = next(iter(options)).replace("_", "-").replace("-slots", "")
            problems.append(f"--placement: says all; leave --{flag} out")
        if self.placement is not None and self.gentle:
            problems.append("--placement: is taken as it is; leave --if-worth out")
        for flag, value, valid in (
            ("policy", self.policy, POLICIES),
            ("group-policy", self.group_policy, GROUP_POLICIES),
        ):
            if value is not None and value not in valid:
                problems.append(f"--{flag} {value!r}: valid are {', '.join(valid)}")
        if self.policy in POLICIES and self.policy != "ours" and self.max_moved is not None:
            problems.append(
                f"--max-moved {self.max_moved}: --policy {self.policy} does not know it"
            )
        try:
            check_robust(self.robust or "mean")
        except PlanError:
            problems.append(
                f"--robust {self.robust!r}: valid are mean, max and mean+Z*std, such as "
                "mean+0.67*std"
            )
        return problems

    def _until_ended(self, http: ExpertsHttp, number: int) -> dict[str, Any]:
        heard = time.monotonic()
        with _progress() as show:
            while True:
                state = http.get("/experts/rebalance")
                mine = [x for x in state["wishes"] if x["number"] == number]
                if mine and mine[0]["result"] != "running":
                    wish: dict[str, Any] = mine[0]
                    return wish
                if mine and state["state"] is not None and state["state"]["state"] != "idle":
                    heard = time.monotonic()
                elif not mine or time.monotonic() - heard > BEGIN_PATIENCE:
                    raise MoeserveError(f"{http.url}: no news of this rebalance; see /health")
                show(state["state"])
                time.sleep(LOOK_EVERY)


def _fitting(path: Path, now: dict[str, Any]) -> list[list[int]]:
    """The file's table. ConfigError unless it is of the job's shape."""
    made = load_placement(path)
    problems = []
    for name, has, needs in (
        ("layers", made.num_layers, len(now["layers"])),
        ("logical experts", made.num_logical_experts, now["num_logical_experts"]),
        ("ranks", made.num_ranks, now["num_ranks"]),
        ("slots", made.num_physical_experts, now["num_physical_experts"]),
    ):
        if has != needs:
            problems.append(f"--placement {path}: has {has} {name}; the job has {needs}")
    if problems:
        raise ConfigError(problems)
    table: list[list[int]] = made.physical_to_logical.tolist()
    return table


@contextmanager
def _progress() -> Iterator[Any]:
    """show(the part of /experts/rebalance about its state): a line on a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda state: None
        return
    from rich.status import Status

    with Status("asking", console=console(stderr=True)) as status:

        def show(state: dict[str, Any] | None) -> None:
            if state is None or state["state"] == "idle":
                status.update("waiting for the next step")
            elif state["state"] == "moving":
                status.update(f"moving batch {state['batch'] + 1} of {state['num_batches']}")
            else:
                status.update(state["state"])

        yield show


def apply_screen(report: dict[str, Any]) -> Any:
    """What came of it, in lines."""
    from rich.text import Text

    said, lines = report["explanation"], []
    result = report["result"]
    if result == "running":
        lines.append("asked; it goes on by itself (--wait waits; see also /health)")
    elif result == "done":
        after = f"generation {report['generation_before']} -> {report['generation_after']}"
        lines.append(f"done in {show_seconds(report['seconds'])}, {after}")
    else:
        lines.append(f"{'dry run' if report['dry_run'] else result}: {report['reason']}")
    if "balance_after" in said:
        before, after = said["balance_before"], said["balance_after"]
        lines.append(
            f"balance (busiest / mean rank): mean {before['mean']:.3f} -> {after['mean']:.3f}, "
            f"worst {before['worst']:.3f} -> {after['worst']:.3f}, on the last steps"
        )
    elif "balance_before" in said:
        lines.append(f"balance: mean {said['balance_before']['mean']:.3f} on the last steps")
    if "moved_slots" in said:
        at_rate = said.get("seconds_at_rate")
        lines.append(
            f"{'would move' if report['dry_run'] else 'moved'} {said['moved_slots']} slots of "
            f"{said['layers']} layers in {said['batches']} batch{'es' * (said['batches'] > 1)}, "
            f"{show_bytes(said['moved_bytes'])} between ranks, "
            f"{show_bytes(said['most_bytes_into_a_rank'])} into the rank that gets most"
            + (f" ({show_seconds(at_rate)} at its rate)" if at_rate else "")
        )
    text = Text(report["source"] + "  ", style="bold")
    text.append("\n".join(lines), style="")
    return text
