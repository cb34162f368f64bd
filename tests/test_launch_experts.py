"""`moeserve experts top | show | heatmap`: on a recording, a dump, a placement and a job of ranks
that answer from a script; and what sources are refused how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from expert_world import (  # noqa: F401
    EXPERTS,
    HOT,
    LAYERS,
    RANKS,
    as_json,
    better,
    counts,
    eighty_columns,
    expert_job,
    experts,
    placement,
    shown,
)
from expert_world import recording as made_recording

from ep.load import balancedness
from ep.recording import ExpertRecording
from launch.cli import app
from launch.experts.source import Source
from launch.failure import exit_code_of, is_typed
from launch.heat import grid
from moeserve.errors import ConfigError, MoeserveError
from moeserve.server.rehearsal import Rehearsal, write_tokenizer

ROOT = Path(__file__).parents[1]
COMMANDS = ("top", "show", "heatmap", "plan", "diff", "compare", "fail", "apply", "record")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("files")
    made_recording().save(folder / "load.npz")
    placement(3).save(folder / "now.json")
    better(4).save(folder / "better.npz")
    loads = counts().sum(axis=0)[:2]
    np.save(folder / "plain.npy", loads)
    np.savez(folder / "many.npz", first=loads, second=2 * loads)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder)
    with expert_job(folder) as running:
        yield running


# -- sources ------------------------------------------------------------------------------------


def test_a_recording_is_read_by_phase(files: Path) -> None:
    path = str(files / "load.npz")
    whole, prefill = Source(path).read(), Source(path, phase="prefill").read()
    decode = Source(path, phase="decode").read()
    assert whole.kind == "recording" and whole.layers == LAYERS and whole.is_mtp(2)
    assert whole.history is not None and len(whole.history) == 4
    assert (whole.loads == prefill.loads + decode.loads).all() and decode.loads.any()
    assert (prefill.loads == 3 * decode.loads).all()
    assert whole.placement == better(1), "the last one that was in force"
    assert whole.num_routed == EXPERTS and whole.row_name(2) == "6 MTP"


def test_experts_that_every_token_picks_are_the_shared_one(tmp_path: Path) -> None:
    old = made_recording()
    shared = np.zeros((4, 2, 3, 1), np.int64)
    shared[:, :, :, 0] = old.tokens[:, :, None]
    with_shared = np.concatenate([old.counts, shared], axis=3)
    info = replace(old.info, picks_per_token=3)
    made = ExpertRecording.of(with_shared, info, tokens=old.tokens)
    made.save(tmp_path / "shared.npz")
    view = Source(str(tmp_path / "shared.npz")).read()
    assert view.num_experts == EXPERTS + 1 and view.num_routed == EXPERTS
    assert view.expert_name(EXPERTS) == "shared" and view.expert_name(3) == "3"


def test_dumps_and_placements(files: Path) -> None:
    plain = Source(str(files / "plain.npy"), ranks=2).read()
    assert plain.kind == "trace" and plain.assumed and plain.placed.num_ranks == 2
    second = Source(str(files / "many.npz"), array="second").read()
    assert (second.loads == 2 * plain.loads).all() and second.name.endswith("many.npz:second")
    alone = Source(str(files / "now.json")).read()
    assert alone.kind == "placement" and alone.placed == placement(3) and not alone.has_load
    both = Source(str(files / "load.npz"), placement=files / "better.npz").read()
    assert both.assumed and both.placed == better(4)


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        (Source("nowhere.npz"), ConfigError, "no such file, and no URL"),
        (Source("{files}"), ConfigError, "is a folder"),
        (Source("{files}/many.npz"), ConfigError, "first, second"),
        (Source("{files}/many.npz", array="third"), ConfigError, "first, second"),
        (Source("{files}/load.npz", array="x"), ConfigError, "--array x"),
        (Source("{files}/plain.npy", phase="decode"), ConfigError, "--phase decode"),
        (Source("{files}/now.json", phase="decode"), ConfigError, "--phase decode"),
        (Source("{files}/plain.npy", placement=Path("{files}/now.json")), ConfigError, "has 2 of"),
        (Source("{files}/bad.npz"), ConfigError, "not readable"),
        (Source("{files}/half.npz"), ConfigError, "info.format=None"),
        (Source("{files}/bad.json"), ConfigError, "format"),
        (Source("{files}/plain.npy", placement=Path("{files}/none.json")), ConfigError, "No such"),
        (Source("http://127.0.0.1:9"), MoeserveError, "no answer"),
        (Source("127.0.0.1:9"), MoeserveError, "no answer"),
        (Source("ftp://here"), ConfigError, "must be like http"),
    ],
)
def test_sources_that_are_refused(
    files: Path, source: Source, kind: type[Exception], said: str
) -> None:
    (files / "bad.npz").write_bytes(b"PK\x03\x04 not really")
    (files / "bad.json").write_text('{"format": "something else"}')
    np.savez(files / "half.npz", info=np.array("{}"), counts=np.zeros((1, 2, 3, 4), int))
    placed = source.placement
    if placed is not None:
        placed = Path(str(placed).format(files=files))
    real = replace(source, text=source.text.format(files=files), placement=placed)
    with pytest.raises(kind) as caught:
        real.read()
    error = caught.value
    assert said in str(error) and len(str(error).splitlines()) == 1
    assert is_typed(error) and exit_code_of(error) == (2 if kind is ConfigError else 1)


@pytest.mark.parametrize("name", ["load.npz", "better.npz", "many.npz"])
def test_an_archive_of_a_version_that_nobody_reads(files: Path, tmp_path: Path, name: str) -> None:
    content = bytearray((files / name).read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = 255  # "version needed" of its first member
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Source(str(tmp_path / name)).read()
    assert "zip file version" in str(error.value) and "\n" not in str(error.value)


def test_flags_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Source("x", phase="both", since="now", placement=Path("y"), ranks=2)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="goes with --ranks"):
        Source("x", redundant=3)


# -- top ----------------------------------------------------------------------------------------

TOP_KEYS = {
    "command", "source", "kind", "phase", "num_layers", "num_experts", "num_ranks", "generation",
    "placement_assumed", "tokens", "picks", "balance", "layers", "hottest", "ranks", "links",
}  # fmt: skip


def test_top_of_a_recording(files: Path, capsys: Any) -> None:
    path = files / "load.npz"
    report = as_json(capsys, "top", path, "--rows", 3)
    assert report.keys() == TOP_KEYS | {"steps", "intervals", "seconds"}
    totals = made_recording().totals()
    wanted = balancedness(totals, better(1))[:2]
    assert report["balance"]["mean"] == pytest.approx(wanted.mean(), abs=1e-6)
    assert [x["layer"] for x in report["layers"]] == list(LAYERS)
    assert [x["mtp"] for x in report["layers"]] == [False, False, True]
    assert [(x["layer"], x["expert"]) for x in report["hottest"][:2]] == [(4, 3), (5, 5)]
    first = report["hottest"][0]
    assert first["times_mean"] == pytest.approx(8 * 16 / 23, abs=1e-6)
    assert [s["slot"] for s in first["split"]] == [0, 3, 6]
    assert sum(s["share"] for s in first["split"]) == pytest.approx(1, abs=1e-5)
    mean = sum(x["times_mean"] for x in report["ranks"]) / RANKS
    assert mean == pytest.approx(1, abs=1e-6)
    links = report["links"]
    assert links["rows"] == 4 * 120 and links["busiest"][0]["from"] == 3
    parts = links["same_rank"] + links["same_node"] + links["between_nodes"]
    assert parts == pytest.approx(1, abs=1e-5)
    assert links["same_rank"] == pytest.approx(30 / 120)


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_top_fits_the_screen(
    files: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(capsys, "top", files / "load.npz", columns=columns)
    for words in ("Balance: mean", "Hottest experts", "Ranks", "Links:", "(33% each)"):
        assert words in text, words
    beside = "Hottest" in next(x for x in text.splitlines() if "Balance: mean" in x)
    assert beside == (columns >= 132)


def test_top_over_time(files: Path, capsys: Any) -> None:
    report = as_json(capsys, "top", files / "load.npz", "--intervals")
    over = report["over_time"]
    assert [x["generation"] for x in over] == [0, 0, 1, 1]
    assert [x["first_step"] for x in over] == [100, 110, 120, 130]
    assert over[0]["balance"]["mean"] > over[3]["balance"]["mean"], "the better placement"
    assert sum(over[2]["tokens"].values()) == 2 * sum(over[1]["tokens"].values())
    assert "130-139" in shown(capsys, "top", files / "load.npz", "--intervals")
    with pytest.raises(ConfigError, match="no recording"):
        experts("top", files / "plain.npy", "--intervals")


def test_top_of_what_says_less(files: Path, capsys: Any) -> None:
    report = as_json(capsys, "top", files / "plain.npy")
    assert report["balance"] is None and report["ranks"] is None and report["links"] is None
    assert "split" not in report["hottest"][0]
    assert "the most skewed first" in shown(capsys, "top", files / "plain.npy")
    assert as_json(capsys, "top", files / "plain.npy", "--ranks", 4)["balance"]["mean"] > 1
    with pytest.raises(ConfigError, match="says nothing of loads"):
        experts("top", files / "now.json")
    for name in ("plain.npy", "load.npz", "now.json"):
        with pytest.raises(ConfigError, match="--since start: .* no running job"):
            experts("top", files / name, "--since", "start")


def test_top_of_a_job(job: Rehearsal, capsys: Any) -> None:
    report = as_json(capsys, "top", job.url)
    assert report["kind"] == "job" and report["since"] == "window" and report["steps"] == 50
    assert report["tokens"] == {"prefill": 3000, "decode": 1000} and report["generation"] == 0
    all_time = as_json(capsys, "top", job.url + "/v1/", "--since", "start")
    assert all_time["picks"] == 2 * report["picks"]
    decode = as_json(capsys, "top", job.url.removeprefix("http://"), "--phase", "decode")
    assert decode["picks"] == report["picks"] // 4
    assert "last 50 steps" in shown(capsys, "top", job.url), "once, where no terminal is"
    with pytest.raises(ConfigError, match="--array x: .* is a running job"):
        experts("top", job.url, "--array", "x")


def test_top_is_renewed_on_a_terminal(
    job: Rehearsal, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt  # how one leaves

    monkeypatch.setattr("launch.experts.top.time.sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    experts("top", job.url, "--every", 0.5)
    assert looks == [0.5] * 3 and "Ctrl-C leaves" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--every"):
        experts("top", job.url, "--every", 0)


# -- show ---------------------------------------------------------------------------------------


def test_show_a_layer(files: Path, capsys: Any) -> None:
    report = as_json(capsys, "show", files / "load.npz", "--layer", 4)
    assert report["layer"] == 4 and not report["mtp"] and len(report["experts"]) == EXPERTS
    hot = report["experts"][HOT[0]]
    assert hot["copies"] == 3 and hot["ranks"] == [0, 1, 2] and hot["reason"] == "hot"
    assert sum(x["share"] for x in report["experts"]) == pytest.approx(1, abs=1e-5)
    assert {x["reason"] for x in report["experts"] if x["copies"] == 1} == {"single"}
    assert [x["rank"] for x in report["ranks"]] == list(range(RANKS))
    text = shown(capsys, "show", files / "load.npz", "--layer", 4, "--rows", 2)
    assert "2 of 8" in text and "hot" in text
    assert "6 (MTP)" in shown(capsys, "show", files / "load.npz", "--layer", 6)


def test_show_an_expert(files: Path, job: Rehearsal, capsys: Any) -> None:
    report = as_json(capsys, "show", files / "load.npz", "--layer", 5, "--expert", 5)
    assert [x["slot"] for x in report["replicas"]] == [0, 3, 6]
    assert all(x["share"] == pytest.approx(1 / 3, abs=1e-5) for x in report["replicas"])
    assert "one copy would overload any rank" in report["expert"]["because"]
    text = shown(capsys, "show", job.url, "--layer", 4, "--expert", 0)
    text = " ".join(text.split())
    assert "2 copies" in text and "trivial" in text and "1.0 kB an expert" in text
    alone = as_json(capsys, "show", files / "now.json", "--layer", 0, "--expert", 2)
    assert alone["expert"]["load"] is None and alone["replicas"][0]["rank_times_mean"] is None
    plain = as_json(capsys, "show", files / "plain.npy", "--layer", 1, "--expert", 2)
    assert plain["replicas"] is None and plain["expert"]["load"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--layer", 3), "4-6"),
        (("--layer", 4, "--expert", 8), "0 to 7"),
        (("--layer", 4, "--expert", -1), "0 to 7"),
    ],
)
def test_show_what_is_not_there(files: Path, flags: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        experts("show", files / "load.npz", *flags)


# -- heatmap ------------------------------------------------------------------------------------


def test_heatmap(files: Path, tmp_path: Path, capsys: Any) -> None:
    report = as_json(capsys, "heatmap", files / "load.npz")
    assert report["layers"] == ["4", "5", "6 MTP"]
    assert np.array(report["experts"]).shape == (3, EXPERTS)
    assert np.array(report["ranks"]).shape == (3, RANKS)
    assert np.array(report["experts"])[:2].mean(axis=1) == pytest.approx(1, abs=1e-5)
    assert not np.array(report["experts"])[2].any()
    ordered = as_json(capsys, "heatmap", files / "load.npz", "--ordered", "--by", "expert")
    assert ordered["ranks"] is None
    assert (np.diff(np.array(ordered["experts"])) <= 0).all()
    text = shown(capsys, "heatmap", files / "load.npz")
    assert "6 MTP" in text and "by layer and rank" in text and "3 times the mean" in text
    assert as_json(capsys, "heatmap", files / "plain.npy")["ranks"] is None
    for flags in (("--by", "x"), ("-o", "x.jpg"), ("-o", tmp_path / "no" / "x.png")):
        with pytest.raises(ConfigError):
            experts("heatmap", files / "load.npz", *flags)
    with pytest.raises(ConfigError, match="--placement FILE"):
        experts("heatmap", files / "plain.npy", "--by", "rank")


def test_heatmap_as_a_picture(files: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "heat.png"
    report = as_json(capsys, "heatmap", files / "load.npz", "-o", path)
    assert report["file"] == str(path) and path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="install moeserve") as caught:
        experts("heatmap", files / "load.npz", "-o", tmp_path / "x.png")
    assert len(str(caught.value).splitlines()) == 1


def test_flags_that_would_do_nothing(files: Path) -> None:
    with pytest.raises(ConfigError, match="--ordered"):
        experts("heatmap", files / "load.npz", "--by", "rank", "--ordered")
    with pytest.raises(ConfigError, match="--rows 3"):
        experts("show", files / "load.npz", "--layer", 4, "--expert", 1, "--rows", 3)


def test_cells_keep_what_is_hot() -> None:
    values = np.zeros((2, 1000))
    values[0, 777] = 9.0
    text, each = grid(["1", "2"], values, 60)
    lines = text.plain.splitlines()
    assert each > 1 and max(map(len, lines)) <= 60
    assert lines[0].count("█") == 1 and "█" not in lines[1] and lines[0].endswith("9.0x")
    wide, one = grid(["1"], np.ones((1, 4)), 80)
    assert one == 1 and len(wide.plain) <= 80


# -- the command line ---------------------------------------------------------------------------


def moeserve(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moeserve", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns)},
        timeout=60,
    )


def test_help_fits_and_names_all(capsys: Any) -> None:
    group = typer.main.get_command(app)
    group.main(["experts", "--help"], standalone_mode=False)
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"│ {command} " in text
        group.main(["experts", command, "--help"], standalone_mode=False)
        own = capsys.readouterr().out
        assert "--json" in own and "--admin-key" in own and "--api-key" in own
        for odd in ("<bool>", "<str>", "<int>", "list[", "no-json", "None", "[dim]", "…"):
            assert odd not in re.sub(r"(SOURCE|URL) +<str>", "", own), (command, odd)


def test_errors_are_one_line(files: Path) -> None:
    done = moeserve("experts", "top", str(files / "many.npz"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert done.stderr.startswith("moeserve: ") and "first, second" in done.stderr
