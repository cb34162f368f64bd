"""`moeserve plan --rehearse`: the published layouts at full size, and that a wrong one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import launch.rehearse
from dispatch.base import WireFormat
from dispatch.route import RoutingTable
from ep.presets import PRESETS
from launch.plan import show
from launch.rehearse import Rehearsal
from launch.rehearse_flags import DISPATCHERS, REHEARSALS, WIRES
from launch.rehearse_model import Experts
from launch.rehearse_report import RehearsalFailed
from moeserve.errors import ConfigError

ROOT = Path(__file__).parents[1]
NUMBERS = ("ranks", "tokens", "max_error", "seconds", "peak_memory_bytes")


def test_320_ranks_say_what_the_dense_reference_says() -> None:
    # A process of its own: the peak of its memory is the whole process's.
    command = [sys.executable, "-m", "moeserve", "plan", "--rehearse", "v3-decode-320", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert all(name in report for name in NUMBERS)
    assert (report["ranks"], report["nodes"], report["slots"]) == (320, 40, 320)
    assert report["experts"] == 257 and report["generations"] == 2
    assert report["idle_rank_steps"] > 320  # one step has work on a single rank
    assert report["tokens"] > 1000 and report["max_error"] == 0
    assert report["peak_memory_bytes"] < 2 << 30
    parts = [report[f"{part}_seconds"] for part in ("reference", "planning", "ranks")]
    assert all(seconds > 0 for seconds in parts) and sum(parts) <= report["seconds"] + 0.01
    assert 0 < report["ideal_dispatch_bytes"] < report["dispatch_bytes"]
    assert report["ideal_combine_bytes"] == report["combine_bytes"]
    assert "moeserve: v3-decode-320: dense reference of" in done.stderr
    assert "320 ranks, 4 steps of 4 layers each" in done.stderr


@pytest.mark.parametrize("dispatch", ["torch", "allgather"])
def test_prefill_of_a_skewed_trace(
    dispatch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = np.random.default_rng(0).zipf(1.5, (3, 256)).clip(max=10**5)
    loads[1] = 0  # a layer of which nothing is known
    np.savez(tmp_path / "loads.npz", morning=loads, evening=loads[:, ::-1])
    report = Rehearsal(
        "v3-prefill-32",
        "trace",
        tmp_path / "loads.npz",
        seed=5,
        dispatch=dispatch,
        array="evening",
    ).run()
    assert report.routing.endswith("loads.npz:evening")
    report.check()
    assert (report.ranks, report.slots, report.dispatch) == (32, 288, dispatch)
    assert report.max_error == 0 and report.tokens > 1000
    assert report.bytes_sent == report.dispatch_bytes + report.combine_bytes > 0
    show(report)
    assert "32 ranks on 4 nodes" in capsys.readouterr().out


def test_the_same_seed_is_the_same_rehearsal() -> None:
    first, again, other = (Rehearsal("v3-prefill-32", seed=seed).run() for seed in (1, 1, 2))
    same = ("tokens", "bytes_sent", "max_error", "idle_rank_steps", "collectives")
    values = [[getattr(report, name) for name in same] for report in (first, again, other)]
    assert values[0] == values[1] != values[2]


def test_decode_144() -> None:
    report = Rehearsal("v3-decode-144").run()
    report.check()
    assert (report.ranks, report.slots, report.nodes) == (144, 288, 18)


@pytest.mark.parametrize(("wire", "dispatch"), [("fp8", "torch"), ("fp8_ue8m0", "allgather")])
def test_rows_in_fp8(wire: str, dispatch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference's experts see them rounded too: nothing is left of the error."""
    report = Rehearsal("v3-prefill-32", wire=wire, dispatch=dispatch).run()
    report.check()
    assert report.max_error == 0 and report.wire == wire
    show(report)
    said = capsys.readouterr().out
    assert "(FP8 rows" in said and "ideal" in said
    if dispatch == "torch":  # never padded: rows and counts
        assert (
            report.ideal_dispatch_bytes < report.dispatch_bytes < 1.1 * report.ideal_dispatch_bytes
        )


def test_the_reference_without_rounding_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.rehearse, "_as_seen", lambda x, wire: x)
    assert Rehearsal("v3-prefill-32", wire="fp8").run().max_error > 1e-3


def test_the_reference_is_a_dense_mixture() -> None:
    g = torch.Generator().manual_seed(0)
    experts = Experts.draw(g, PRESETS["prefill-ep32"])
    x, layer = torch.randn(6, 16, generator=g), 3
    ids = torch.randint(0, 256, (6, 8), generator=g, dtype=torch.int32)
    weights = torch.rand(6, 8, generator=g)
    share = torch.zeros(6, 257).scatter_add_(1, ids.long(), weights)
    share[:, 256] = 1  # the shared expert, which each rank computes beside
    inner = torch.einsum("td,eid->tei", x, experts.up[layer]).relu()
    wanted = torch.einsum("tei,edi,te->td", inner, experts.down[layer], share)
    assert torch.allclose(experts.dense(x, layer, ids, weights), wanted, atol=1e-5)


def test_a_wrong_expert_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    build = RoutingTable.build

    def crossed(placement, layer, device="cpu"):
        table = build(placement, layer, device)
        if layer == 2:
            for field in (table.slots, table.count):
                field[[7, 8]] = field[[8, 7]]
        return table

    monkeypatch.setattr(RoutingTable, "build", crossed)
    report = Rehearsal("v3-prefill-32").run()
    assert report.max_error > 1e-2
    with pytest.raises(RehearsalFailed, match="v3-prefill-32: max_error=.*at most 1e-05"):
        report.check()


def test_a_rank_that_fails_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self, step: int) -> None:
        if self._group.rank == 9 and step == 1:
            raise ArithmeticError("rank 9")

    monkeypatch.setattr(launch.rehearse._Rank, "_step", fails)
    with pytest.raises(ArithmeticError, match="rank 9"):
        Rehearsal("v3-prefill-32").run()


def test_what_was_typed_is_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Rehearsal("v3", routing="trace", seed=-1, dispatch="pigeon", wire="fp4")
    said = str(caught.value).splitlines()
    assert any("--wire fp4: must be one of model, fp8, fp8_ue8m0; nearest" in x for x in said)
    assert len(said) == 5 and all(any(name in line for line in said) for name in REHEARSALS)
    with pytest.raises(ConfigError, match="--rehearse v3-decode-32: .*; nearest: v3-decode-320"):
        Rehearsal("v3-decode-32")
    assert Rehearsal("decode-ep320").name == "v3-decode-320"
    with pytest.raises(ConfigError, match="goes with --routing trace"):
        Rehearsal("v3-prefill-32", trace=tmp_path / "x.npz")
    np.savez(tmp_path / "few.npz", loads=np.ones((2, 64)))
    with pytest.raises(ConfigError, match="64 experts a layer; prefill-ep32 has 256"):
        Rehearsal("v3-prefill-32", "trace", tmp_path / "few.npz").run()
    with pytest.raises(ConfigError, match="none.npz: no such file"):
        Rehearsal("v3-prefill-32", "trace", tmp_path / "none.npz")
    with pytest.raises(ConfigError, match="none: no such file$"):
        Rehearsal("v3-prefill-32", "trace", tmp_path / "none")
    with pytest.raises(ConfigError, match="must end in one of .npz"):
        Rehearsal("v3-prefill-32", "trace", Path(__file__).parent / "conftest.py")


def test_names_written_down_are_those_that_there_are() -> None:
    assert tuple(launch.rehearse.THREADED) == DISPATCHERS
    assert tuple(wire.value for wire in WireFormat) == WIRES
    assert all(layout in PRESETS for layout, _, _ in REHEARSALS.values())
