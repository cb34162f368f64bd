"""`moeserve bench dispatch` without processes: flags, drawn work, least bytes, checks that can
fail, what is shown."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import launch.bench.dispatch_rank as dispatch_rank
from dispatch import _load, dispatcher_names
from dispatch.base import CombineForm, DispatchConfig, WireFormat
from dispatch.choice import form_of
from dispatch.ideal import ideal_bytes
from dispatch.local import LocalDispatcher
from dispatch.selfcheck import expected
from ep.group import EPGroup
from launch.bench.dispatch import DispatchBench, NothingMeasured
from launch.bench.dispatch_check import SMALL, seen, wanted, wrong_in_small
from launch.bench.dispatch_flags import (
    ONLY_FORM,
    Cell,
    Contender,
    DispatchFlags,
)
from launch.bench.dispatch_picture import draw
from launch.bench.dispatch_rank import Measured
from launch.bench.dispatch_refused import lines, missing, not_measured
from launch.bench.dispatch_show import Result, as_json, show
from launch.bench.dispatch_tables import spread_names
from launch.bench.dispatch_work import DTYPE, LeastBytes, Work, draw_picks, read_loads
from launch.bench.ranks import open_place
from launch.env import RankEnv
from moeserve.device.choose import look, no_cuda, refused
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
    assert {c.form for c in asked.contenders if c.backend not in ONLY_FORM} == {"pairs"}
    assert {c.form for c in asked.contenders if c.backend == "deepep_v2"} == {"summed"}
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
        "--dispatch nccl: must be one of all, local, torch, allgather",
        "--tokens 1,x",
        "--wire fp4: must be one of model, fp8, fp8_ue8m0; nearest: fp8",
        "--form sums: must be one of auto, pairs, summed; nearest: summed",
        "--skew zipf:hot",
        "--device tpu: must be one of auto, cpu, cuda; nearest: cuda",
        "--sweep time",
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
        Contender("deepep_ll", "model", "summed", emulated=True),
    )
    with pytest.raises(ConfigError, match="of torch there is no emulation; name one of deepep_ll"):
        DispatchFlags(backends="torch", emulate=True).check()


def test_forms_written_down_are_those_of_the_backends() -> None:
    for name in dispatcher_names():
        kind = _load(name)
        form = form_of(kind)
        assert ONLY_FORM.get(name) == (None if form is None else form.value), name


def test_emulation_has_sizes_that_all_emulations_take() -> None:
    asked = DispatchFlags(emulate=True).check()
    assert asked.experts == 32 and {c.hidden for c in asked.cells} == {2048}
    assert max(c.tokens for c in asked.cells) == 64
    assert DispatchFlags(emulate=True, experts=64, hidden="4096").check().experts == 64


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"ep": "0"}, "--ep 0: must be at least 1; nearest valid: 1"),
        ({"ep": "x"}, "--ep x: must be a whole number"),
        ({"ep": 5000}, "--ep 5000: must be at most 1024; nearest valid: 1024"),
        ({"steps": "0"}, "--steps 0: must be at least 1"),
        ({"wire": "FP8"}, "--wire FP8: must be one of .*; nearest: fp8$"),
        ({"wire": "bf16"}, "--wire bf16: must be one of .*; nearest: model$"),
        ({"backends": "torhc"}, "--dispatch torhc: must be one of all, .*; nearest: torch$"),
        ({"backends": "Torch"}, "--dispatch Torch: .*; nearest: torch$"),
        ({"sweep": "token"}, "--sweep token: .*; nearest: tokens$"),
        ({"skew": "zip"}, "--skew zip: .*; nearest: zipf:S$"),
        ({"sweep": "tokens", "tokens": "1"}, "--sweep tokens: --tokens 1 is one value"),
        ({"sweep": "hidden", "hidden": "512"}, "--sweep hidden: --hidden 512 is one value"),
        ({"sweep": "ranks", "ep": 2}, "--sweep ranks: up to 2 there is no growth"),
        ({"skew": "trace", "trace": Path("none.npz")}, "--skew trace none.npz: no such file"),
    ],
)
def test_a_wrong_flag_says_what_is_valid(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DispatchFlags(**flags).check()
    assert any(re.search(said, problem) for problem in caught.value.problems), caught.value


def test_wrong_flags_are_found_before_torch_is_loaded() -> None:
    said = (
        "import sys\n"
        "from launch.cli import app\n"
        "for words in (['bench', 'dispatch', '--wire', 'bf16', '--ep', '0'],\n"
        "              ['plan', '--rehearse', 'v3-decode-32', '--wire', 'bf16']):\n"
        "    try:\n"
        "        app(words, standalone_mode=False)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["ConfigError", "False"] * 2, done.stderr


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


def test_loads_of_a_trace(tmp_path: Path) -> None:
    file = sorted(TRACES.glob("*.npz"))[0]
    flags = DispatchFlags(skew="trace", trace=file, array="decode_in2000out100")
    skew = flags.check().skew
    loads, told = read_loads(skew, 256, 0)
    assert loads.shape == (256,) and (loads > 0).all() and file.name in told
    assert flags.check().experts == 256
    with pytest.raises(ConfigError, match="--experts 64: .* has 256 experts a layer"):
        dataclasses.replace(flags, experts=64).check()
    few = tmp_path / "few.npy"
    np.save(few, np.ones((2, 32)))
    asked = DispatchFlags(skew="trace", trace=few).check()
    assert asked.experts == 32 and read_loads(asked.skew, 32, 0)[0].shape == (32,)
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


MACHINE = {"cpu": "some", "cores": 2, "torch": "2", "commit": "abcdef123456", "changed": True}


def result_of(asked: Any, found: Measured, transport: str = "some wire") -> Result:
    entries = not_measured(asked, found.refused)
    return Result(asked, found.measured, entries, found.loads, transport, MACHINE)


def test_rows_and_tables_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    asked, place, found = measured(backends="local,torch", tokens="2,3", form="pairs,summed")
    assert len(found.measured) == 8 and {row["backend"] for row in found.measured} == {"local"}
    for row in found.measured:
        assert row["bytes"]["both"] == {"sent": 0, "ideal": 0, "ratio": None}
        assert row["times_plain"] is None
        for part in ("dispatch_ms", "combine_ms", "both_ms"):
            assert 0 < row[part]["median"] <= row[part]["p90"] <= row[part]["p99"]
    result = result_of(asked, found, place.transport)
    assert lines(result.entries, found.measured) == [
        "torch: needs two ranks or more; one rank has no process group"
    ]
    # Named, and measured nowhere: that is an error, not only a line.
    assert [entry["backend"] for entry in missing(asked, result.entries, found.measured)] == [
        "torch"
    ]
    show(result, result.entries)
    said = capsys.readouterr().out
    assert "one process on the CPU, nothing travels" in said and "against the slow twin" in said
    assert "not measured: torch: needs two ranks" in said and "summed" in said
    assert "torch 2, moeserve commit abcdef123456, with changes." in said
    told = as_json(result)
    assert all(row["ok"] for row in told["rows"])
    assert [entry["backend"] for entry in told["not_measured"]] == ["torch"]


def many_rows(**fields: Any) -> list[dict[str, Any]]:
    """Rows as of two ranks and two libraries, with numbers of many widths."""
    times = {"median": 123.4, "p90": 1234.5, "p99": 12345.6}
    whole = {"sent": 123456789, "ideal": 98765432, "ratio": 1.25}
    return [
        {
            "ok": True, "ranks": 2, "tokens": tokens, "hidden": 7168, "backend": backend,
            "wire": wire, "form": form, "emulated": backend != "torch", "busiest": 1.0,
            "notes": [], "bytes": {"both": whole}, "gb_per_s": 123.4, "plain_gb_per_s": 0.012,
            "plain_ms": times, "times_plain": 23.4,
        } | {f"{part}_ms": times for part in ("dispatch", "combine", "both")} | fields
        for tokens in (1, 65536)
        for wire in ("model", "fp8_ue8m0")
        for backend, form in (("torch", "pairs"), ("deepep_normal", "summed"))
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 132, 170])
def test_no_number_is_cut(width: int) -> None:
    from rich.console import Console

    flags = DispatchFlags(steps=100).check()
    console = Console(width=width, record=True, file=io.StringIO())
    show(Result(flags, many_rows(), [], "uniform", "some wire", MACHINE), [], console)
    said = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
    rows = [line for line in said.splitlines() if "deepep_normal*" in line]
    for cell in (
        "123 1234 12346",
        "12346",
        "98.8",
        "1.25",
        "23.4",
        *(["0.012"] if width != 80 else []),
    ):
        assert any(cell in line or cell.replace(" 12", "  12") in line for line in rows), cell
    assert "p50  p90   p99" in said or "p50 p90 p99" in said
    assert width < 80 or max(map(len, said.splitlines())) <= width


def test_few_steps_have_no_p99() -> None:
    assert [spread_names(steps) for steps in (9, 10, 99, 100)] == [
        ("p50",), ("p50", "p90"), ("p50", "p90"), ("p50", "p90", "p99"),
    ]  # fmt: skip


def test_one_backend_that_refuses_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = DispatchFlags(**(TINY | {"ep": 1, "backends": "torch", "device": "cpu"}))
    with pytest.raises(NothingMeasured, match="not measured: torch: needs two ranks"):
        DispatchBench(flags, as_json=True).run()
    last = json.loads(capsys.readouterr().out)
    assert last["rows"] == [] and last["not_measured"][0]["backend"] == "torch"
    assert re.fullmatch("[0-9a-f]*", last["machine"]["commit"])
    with pytest.raises(NothingMeasured):
        DispatchBench(flags).run()
    assert "not measured" not in capsys.readouterr().out  # the error says it


def test_one_of_two_named_that_refuses_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = DispatchFlags(
        **(TINY | {"ep": 1, "backends": "local,deepep_ll", "device": "cpu", "wire": "model"})
    )
    with pytest.raises(NothingMeasured, match="not measured: deepep_ll: .*; --emulate measures"):
        DispatchBench(flags).run()
    assert "1 rank, hidden 256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            "symmetric memory: num_physical_experts=256, 128 a rank: dispatch takes at most 16",
            "--experts 256, 128 a rank: dispatch takes at most 16; --experts 32 would do",
        ),
        ("hidden_size=100: kernels exist for 2048", "--hidden 100: .*; --hidden 2048 would do"),
        (
            "deterministic mode: the library rounds rows; use `torch`, or turn it off; dtype=x",
            "come home as pairs: the library rounds rows; dtype=x; --form summed, or auto",
        ),
    ],
)
def test_a_refusal_names_the_flag_that_helps(reason: str, said: str) -> None:
    asked = DispatchFlags(backends="nvshmem", emulate=True, experts=256).check()
    row = many_rows(backend="nvshmem", emulated=True, reason=reason, ok=False)[0]
    (entry,) = not_measured(asked, [row])
    assert re.search(said, entry["reason"])


def test_a_backend_that_breaks_is_told_and_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *_: Any) -> Any:
        raise TypeError("no such thing")

    monkeypatch.setattr(LocalDispatcher, "dispatch_finish", broken)
    asked, _, found = measured(backends="local", wire="model")
    (entry,) = not_measured(asked, found.refused)
    assert entry["failed"] and entry["reason"] == "failed: TypeError: no such thing"
    assert missing(asked, [entry], many_rows()) == [entry]


def test_more_memory_than_there_is_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_rank, "_MEMORY_SHARE", -1.0)
    _, _, found = measured(backends="local")
    assert all("GB may be used" in row["reason"] for row in found.rows)


def test_too_few_gpus_are_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    said = no_cuda(look())
    assert said is not None
    with pytest.raises(ConfigError) as caught:
        measured(device="cuda")
    assert caught.value.problems == [f"--device cuda: {refused(said)}"]


@pytest.mark.parametrize(
    ("ending", "changed"),
    [
        (".png", [{"tokens": 1}]),
        (".svg", [{"tokens": n} for n in (1, 8, 64)]),
        (".svg", [{"ranks": n} for n in (2, 4)]),
    ],
)
def test_a_picture(tmp_path: Path, ending: str, changed: list[dict[str, int]]) -> None:
    """Says on what, and that emulated times mean nothing; axes are what grew."""
    rows = [row for each in changed for row in many_rows(**({"tokens": 8} | each))[:4]]
    path = tmp_path / f"a{ending}"
    flags = DispatchFlags().check()
    draw(Result(flags, rows, [], "uniform", "some wire", MACHINE), path)
    assert path.stat().st_size > 5000
    if ending == ".svg":
        drawn = path.read_text()
        for text in ("TIMES say", "hidden 7168", "256 experts", "top-8", "p50 of 20 steps"):
            assert text in drawn
        for text in ("commit abcdef123456", "deepep_normal (emulated), summed", "torch, pairs"):
            assert text in drawn
        grown = next(iter(changed[0]))
        assert f"<!-- {grown}" in drawn and f"<!-- {changed[-1][grown]} -->" in drawn
