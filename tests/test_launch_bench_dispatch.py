"""`moeserve bench dispatch` without processes: flags, drawn work, least bytes, checks that can
fail, what is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import launch.bench.dispatch_rank as dispatch_rank
from dispatch.base import CombineForm, DispatchConfig, WireFormat
from dispatch.ideal import ideal_bytes
from dispatch.local import LocalDispatcher
from dispatch.selfcheck import expected
from ep.group import EPGroup
from launch.bench.dispatch import DispatchBench, NothingMeasured
from launch.bench.dispatch_check import SMALL, seen, wanted, wrong_in_small
from launch.bench.dispatch_flags import Cell, Contender, DispatchFlags
from launch.bench.dispatch_picture import draw
from launch.bench.dispatch_show import refusals, show
from launch.bench.dispatch_work import DTYPE, LeastBytes, Work, draw_picks, read_loads
from launch.bench.ranks import open_place
from launch.env import RankEnv
from moeserve.errors import ConfigError

TRACES = Path(__file__).parent / "data" / "expert-load"
TINY: dict[str, Any] = {"tokens": "3", "hidden": "256", "top_k": 3, "experts": 12, "steps": 2}


def work_of(ranks: int, rank: int = 0, redundant: int = 0, **flags: Any) -> Work:
    asked = DispatchFlags(**(TINY | flags), ep=ranks, redundant=redundant).check()
    loads, _ = read_loads(asked.skew, asked.experts, asked.seed)
    return Work.draw(asked, asked.cells[0], rank, loads)


# -- flags ----------------------------------------------------------------------------------------


def test_flags_by_default() -> None:
    asked = DispatchFlags().check()
    assert asked.cells == tuple(Cell(2, 7168, t) for t in (1, 8, 64, 512))
    assert {c.wire for c in asked.contenders} == {"model", "fp8"}
    assert {c.form for c in asked.contenders} == {"pairs"}
    assert not any(c.emulated for c in asked.contenders)
    assert {"local", "torch", "allgather", "deepep_ll"} <= {c.backend for c in asked.contenders}


def test_all_problems_are_told_at_once_with_what_is_valid(tmp_path: Path) -> None:
    flags = DispatchFlags(
        backends="torch,nccl",
        tokens="1,x",
        wire="fp4",
        form="sums",
        skew="zipf:hot",
        device="tpu",
        sweep="time",
        top_k=9,
        experts=8,
        plot=tmp_path / "a.gif",
    )
    with pytest.raises(ConfigError) as caught:
        flags.check()
    said = "\n".join(caught.value.problems)
    for part in (
        "--dispatch 'nccl': unknown; valid are all, local, torch, allgather",
        "--tokens '1,x'",
        "--wire 'fp4': unknown; valid are model, fp8, fp8_ue8m0",
        "--form 'sums'",
        "--skew 'zipf:hot'",
        "--device 'tpu'",
        "--sweep 'time'",
        "--top-k 9: of 8 experts",
        "must end in .png or .svg",
    ):
        assert part in said, part
    assert len(caught.value.problems) == 9


def test_sweeps_grow_one_thing() -> None:
    ranks = DispatchFlags(sweep="ranks", ep=6).check()
    assert ranks.ranks == [2, 4, 6] and {c.tokens for c in ranks.cells} == {8, 512}
    assert DispatchFlags(sweep="ranks").check().ranks == [2, 4, 8]
    tokens = DispatchFlags(sweep="tokens").check()
    assert [c.tokens for c in tokens.cells] == [2**n for n in range(10)]
    hidden = DispatchFlags(sweep="hidden", tokens="4").check()
    assert [(c.hidden, c.tokens) for c in hidden.cells] == [
        (1024, 4), (2048, 4), (4096, 4), (7168, 4),
    ]  # fmt: skip


def test_emulation_stands_in_for_what_has_one() -> None:
    asked = DispatchFlags(backends="torch,deepep_ll", emulate=True, wire="model").check()
    assert asked.contenders == (
        Contender("torch", "model", "pairs"),
        Contender("deepep_ll", "model", "pairs", emulated=True),
    )
    with pytest.raises(ConfigError, match="of torch there is no emulation; name one of deepep_ll"):
        DispatchFlags(backends="torch", emulate=True).check()


def test_a_job_has_as_many_ranks_as_it_has() -> None:
    assert DispatchFlags().check(of_job=4).ranks == [4]
    with pytest.raises(ConfigError, match="--ep 2: this job was started with WORLD_SIZE=4"):
        DispatchFlags(ep=2).check(of_job=4)


# -- work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", list(WireFormat))
@pytest.mark.parametrize("form", list(CombineForm))
@pytest.mark.parametrize("redundant", [0, 4])
def test_the_plain_exchange_carries_the_ideal_bytes(
    wire: WireFormat, form: CombineForm, redundant: int
) -> None:
    work = work_of(4, redundant=redundant, tokens="9", skew="zipf:1")
    config = DispatchConfig(
        256, 3, work.placement.num_physical_experts, 12, DTYPE, form is CombineForm.PAIRS, wire
    )
    least = LeastBytes.of(work, wire, form)
    for rank, slots in enumerate(work.slots):
        ideal = ideal_bytes(config, slots, rank, 4, form)
        assert sum(least.there[rank]) == ideal.dispatch
        # What comes home to a rank is what the others send back to it.
        assert sum(row[rank] for row in least.back) == ideal.combine
        assert least.there[rank][rank] == least.back[rank][rank] == 0
    assert sum(map(sum, least.there)) > 0


def test_picks_follow_the_loads() -> None:
    loads, told = read_loads(DispatchFlags(skew="zipf:1.5").check().skew, 256, seed=1)
    assert told == "zipf:1.5"
    g = torch.Generator().manual_seed(0)
    ids = draw_picks(g, 2000, 8, loads)
    assert all(len(set(row)) == 8 for row in ids[:50].tolist())
    counts = np.bincount(ids.reshape(-1).numpy(), minlength=256)
    assert counts.argmax() in np.argsort(-loads)[:3]
    assert counts[np.argsort(loads)[:128]].sum() < counts.sum() / 10
    even, _ = read_loads(DispatchFlags().check().skew, 256, seed=1)
    assert set(even) == {1.0}


def test_loads_of_a_trace() -> None:
    file = sorted(TRACES.glob("*.npz"))[0]
    flags = DispatchFlags(skew="trace", trace=file, array="decode_in2000out100")
    skew = flags.check().skew
    loads, told = read_loads(skew, 256, 0)
    assert loads.shape == (256,) and (loads > 0).all() and file.name in told
    with pytest.raises(ConfigError, match="has 256 experts a layer"):
        read_loads(skew, 64, 0)
    with pytest.raises(ConfigError, match="give the file too"):
        DispatchFlags(skew="trace").check()


def test_every_rank_draws_the_same_picks_and_tokens_of_its_own() -> None:
    first, second = work_of(2, 0), work_of(2, 1)
    for a, b in zip(first.slots, second.slots, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.x, second.x)


# -- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(CombineForm))
@pytest.mark.parametrize("wire", list(WireFormat))
def test_what_must_come_home_is_the_twins(wire: WireFormat, form: CombineForm) -> None:
    work = work_of(3, tokens="5", redundant=3)
    case = work.small_case(SMALL)
    _, homes = expected(case, form, wire)
    config = DispatchConfig(256, 3, 15, 8, DTYPE, form is CombineForm.PAIRS, wire)
    for rank in range(3):
        rows = seen(config, case.xs[rank])
        mine = wanted(rows, case.slots[rank], case.weights[rank], case.placement, form)
        assert torch.equal(mine, homes[rank])


class _Late(LocalDispatcher):
    """Loses the last pick of each token on the way home."""

    def combine_finish(self, handle: Any) -> torch.Tensor:
        handle.weights = torch.cat([handle.weights[:, :-1], 0 * handle.weights[:, -1:]], dim=1)
        return super().combine_finish(handle)


@pytest.mark.parametrize("kind, wrong", [(LocalDispatcher, False), (_Late, True)])
def test_a_wrong_backend_is_found(kind: type[LocalDispatcher], wrong: bool) -> None:
    work = work_of(1)
    config = DispatchConfig(256, 3, 12, 4, DTYPE, True)
    d = kind(EPGroup.single(), config)
    assert bool(wrong_in_small(d, work.small_case(SMALL), 0, torch.device("cpu"))) == wrong


def test_a_wrong_result_is_an_error_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalDispatcher.dispatch_finish

    def other_rows(self: Any, handle: Any) -> Any:
        received = real(self, handle)
        received.x[:1] += 1
        return received

    monkeypatch.setattr(LocalDispatcher, "dispatch_finish", other_rows)
    with pytest.raises(dispatch_rank.WrongResult, match=r"local, wire model.*received: x"):
        measured(backends="local", wire="model")


# -- one rank, all of it --------------------------------------------------------------------------


def measured(**flags: Any) -> Any:
    asked = DispatchFlags(**(TINY | {"ep": 1, "warmup": 0, "device": "cpu"} | flags)).check()
    place = open_place(RankEnv.alone(), EPGroup.single(), asked.device, asked.ranks)
    return asked, place, dispatch_rank.measure(asked, place, lambda where, done, total: None)


def test_rows_and_tables_of_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked, place, found = measured(backends="local,torch", tokens="2,3", form="pairs,summed")
    ran = [row for row in found.rows if row["ok"]]
    assert len(ran) == 8 and {row["backend"] for row in ran} == {"local"}
    for row in ran:
        assert row["bytes"]["both"] == {"sent": 0, "ideal": 0, "ratio": None}
        assert row["times_plain"] is None
        for part in ("dispatch_ms", "combine_ms", "both_ms"):
            assert 0 < row[part]["median"] <= row[part]["p90"] <= row[part]["p99"]
    assert refusals(found.rows) == [
        ("torch", "needs two ranks or more; one rank has no process group")
    ]
    machine = {"cpu": "some", "cores": 2, "torch": "2", "commit": ""}
    show(asked, found.rows, found.loads, place.transport, machine)
    said = capsys.readouterr().out
    assert "one process on the CPU, nothing travels" in said and "against the slow twin" in said
    assert "not measured: torch: needs two ranks" in said and "summed" in said


def test_one_backend_that_refuses_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = DispatchFlags(**(TINY | {"ep": 1, "backends": "torch", "device": "cpu"}))
    with pytest.raises(NothingMeasured, match="dispatcher 'torch': needs two ranks"):
        DispatchBench(flags, as_json=True).run()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["ok"] for row in last["rows"]] == [False, False]


def test_a_backend_that_breaks_is_told_and_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *_: Any) -> Any:
        raise TypeError("no such thing")

    monkeypatch.setattr(LocalDispatcher, "dispatch_finish", broken)
    _, _, found = measured(backends="local", wire="model")
    assert found.failures() == ["dispatcher 'local': failed: TypeError: no such thing"]


def test_more_memory_than_there_is_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_rank, "_MEMORY_SHARE", -1.0)
    _, _, found = measured(backends="local")
    assert all("GB may be used" in row["reason"] for row in found.rows)


def test_too_few_gpus_are_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ConfigError, match="--device cuda: rank 0's machine has 0 GPUs for 1 rank"):
        measured(device="cuda")


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_picture(tmp_path: Path, ending: str) -> None:
    _, _, found = measured(backends="local")
    rows = [
        row | {"ranks": ranks, "plain_ms": {"median": 0.1}, "bytes": {"both": {"ideal": size}}}
        for ranks in (2, 4)
        for size in (1000, 2000)
        for row in found.rows
    ]
    path = tmp_path / f"a{ending}"
    draw(rows, "some transport", path)
    assert path.stat().st_size > 5000
