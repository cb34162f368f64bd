"""A job of fake ranks that know experts, and a recording: for tests of `moeserve experts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording, RecordingInfo
from moeserve import wire
from moeserve.server.rehearsal import FakeRank, Rehearsal
from moeserve.wire_experts import AskLoad, Counts, LoadReport, PlacementInUse
from moeserve.wire_rebalance import Rebalance, RebalanceReport, RebalanceStats

LAYERS, EXPERTS, RANKS, TOP = (4, 5, 6), 8, 4, 2  # layer 6 is an MTP layer
HOT = (3, 5)  # the hot expert of layers 4 and 5


def counts(tokens: int = 1600) -> np.ndarray:
    """[2, L, E] int64 by phase: one expert of each layer has half of all first picks; MTP idle."""
    out = np.zeros((2, len(LAYERS), EXPERTS), np.int64)
    for phase, share in ((0, 3), (1, 1)):
        for row, hot in enumerate(HOT):
            out[phase, row] = tokens * share // 16
            out[phase, row, hot] = tokens * share
    return out


def placement(generation: int = 0) -> ExpertPlacement:
    """Experts in order, two copies more (of 0 and 1) and two empty slots."""
    return ExpertPlacement.trivial(len(LAYERS), EXPERTS, RANKS, 2, generation)


def better(generation: int = 1) -> ExpertPlacement:
    """The copies are of the hot experts; experts lie elsewhere."""
    rows = []
    for hot in (*HOT, 0):
        cold = [e for e in range(EXPERTS) if e != hot]
        rows.append([hot, cold[0], -1, hot, cold[1], -1, hot, *cold[2:4], *cold[4:7]])
    return ExpertPlacement(np.array(rows), EXPERTS, RANKS, generation)


def recording(intervals: int = 4) -> ExpertRecording:
    """Of the same loads, which double in the second half, under both placements in turn."""
    each = [counts(1600 * (1 + (i >= intervals // 2))) for i in range(intervals)]
    tokens = [[int(x[0, 0].sum()) // TOP, int(x[1, 0].sum()) // TOP] for x in each]
    steps = [[100 + 10 * i, 109 + 10 * i] for i in range(intervals)]
    traffic = np.arange(RANKS * RANKS).reshape(RANKS, RANKS)
    return ExpertRecording.of(
        np.stack(each),
        RecordingInfo(
            num_ranks=RANKS,
            interval_steps=10,
            layers=LAYERS,
            num_mtp_layers=1,
            picks_per_token=TOP,
            ranks_per_node=2,
            checkpoint="made-up",
        ),
        steps=steps,
        num_steps=[10] * intervals,
        seconds=[0.5] * intervals,
        tokens=tokens,
        traffic=np.stack([traffic] * intervals),
        placements=[placement(0), better(1)],
        placement_index=[0] * (intervals // 2) + [1] * (intervals - intervals // 2),
    )


class ExpertRank(FakeRank):
    """Answers questions about load. Rank 0 tells its placement, and does as `wishes` say: a list of
    (result, reason, placement afterwards or None, explanation), one for each that comes."""

    def __init__(self, rank: int, size: int, address: str, **more: Any) -> None:
        self.placement = placement()
        self.load = counts() // size
        self.window_steps = 50
        self.wishes: list[tuple[str, str, ExpertPlacement | None, dict[str, Any]]] = []
        super().__init__(rank, size, address, **more)

    def become_ready(self) -> None:
        if self.rank == 0:
            self.send(PlacementInUse.of(0, self.placement))
        info: dict[str, object] = {
            "placement": {"num_layers": len(LAYERS), "num_routed_experts": EXPERTS,
                          "shared_expert": "replicated"},
            "first_moe_layer": LAYERS[0],
            "mtp_layers": 1,
            "picks_per_token": TOP,
            "ranks_per_node": 2,
            "expert_groups": 2,
            "expert_bytes": [1000, 1000, 500],
        }  # fmt: skip
        self.send(wire.Ready(self.rank, self.block_size, 64, self.max_model_len, 8, info))
        self.tell("idle")

    def tell(self, state: str, **changes: Any) -> None:
        """Statistics as rank 0 reports them; state: of the rebalance."""
        names = RebalanceStats.__struct_fields__
        values = dict.fromkeys(names[:16], 0) | {"enabled": False, "state": state} | changes
        zeros = dict.fromkeys(wire.RankStats.__struct_fields__[:18], 0) | {"rank": self.rank}
        totals = self.load.sum(axis=0)
        load = {"expert_shape": totals.shape, "expert_load": tuple(totals.ravel().tolist())}
        stats = wire.RankStats(**zeros, **load, rebalance=RebalanceStats(**values))
        self.send(stats)

    def _take(self, message: wire.ToRank) -> bool:
        match message:
            case AskLoad():
                self.send(self._report(message.ask))
            case Rebalance():
                result, reason, after, said = self.wishes.pop(0)
                if result == "never":  # it moves, for a long time
                    return False
                if after is not None:
                    self.placement = after
                    self.send(PlacementInUse.of(0, after))
                self.send(RebalanceReport(self.rank, message.ask, result, reason, said))
        return super()._take(message)

    def _report(self, ask: int) -> LoadReport:
        return LoadReport(
            rank=self.rank,
            ask=ask,
            step=90,
            generation=self.placement.generation,
            tokens=(3000 // self.size, 1000 // self.size),
            totals=Counts.pack(2 * self.load),
            window=Counts.pack(self.load),
            window_steps=self.window_steps,
            window_first=40,
            window_last=89,
            rows=Counts.pack(np.arange(self.size) + 10 * self.rank),
        )


def expert_job(folder: Path, **more: Any) -> Rehearsal:
    """The HTTP server with four such ranks. more: of Rehearsal, such as server={...}."""
    rehearsal = Rehearsal(folder, num_ranks=RANKS, **more)
    rehearsal._make_rank = lambda rank, address: ExpertRank(rank, RANKS, address)  # type: ignore
    return rehearsal


def experts(*arguments: object) -> None:
    """Run `moeserve experts ...` in this process; errors come as they are raised."""
    import typer

    from launch.cli import app

    command = typer.main.get_command(app)
    command.main(["experts", *map(str, arguments)], standalone_mode=False)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def as_json(capsys: Any, *arguments: object) -> dict[str, Any]:
    """What the command says with --json: one object, one line, nothing else."""
    experts(*arguments, "--json")
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and not said.err
    report: dict[str, Any] = json.loads(said.out)
    assert report["command"] == arguments[0]
    return report


def shown(capsys: Any, *arguments: object, columns: int = 80) -> str:
    experts(*arguments)
    text: str = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text, "cut"
    return text
