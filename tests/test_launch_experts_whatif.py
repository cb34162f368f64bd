"""`moeserve experts plan | diff | compare | fail | apply`: on files and on a job of ranks that
answer from a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from expert_world import (  # noqa: F401
    EXPERTS,
    LAYERS,
    RANKS,
    ExpertRank,
    as_json,
    better,
    counts,
    eighty_columns,
    expert_job,
    experts,
    placement,
)
from expert_world import recording as made_recording
from expert_world import shown as screen

from ep.load import balancedness
from ep.placement import ExpertPlacement
from ep.planning.compare import LAYOUTS, compare, drift
from launch.experts.diff import total_variation
from launch.experts.plan import moved_into
from launch.experts.units import parse_bytes, parse_numbers, show_bytes, show_seconds
from moeserve.errors import ConfigError, MoeserveError
from moeserve.server.rehearsal import Rehearsal, write_tokenizer
from moeserve.wire_rebalance import Rebalance


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("files")
    made_recording().save(folder / "load.npz")
    placement(3).save(folder / "now.json")
    better(4).save(folder / "better.npz")
    rng = np.random.default_rng(5)
    prefill, decode = (np.round(rng.lognormal(5, 1, (3, 256))) for _ in range(2))
    np.savez(folder / "big.npz", prefill=prefill, decode=decode, decode_later=decode[:, ::-1])
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def job(checkpoint: Path) -> Iterator[Rehearsal]:
    with expert_job(checkpoint) as running:
        yield running


def shown(capsys: Any, *arguments: object) -> str:
    """The words of a screen, wherever lines end."""
    return " ".join(screen(capsys, *arguments).split())


# -- plan ---------------------------------------------------------------------------------------

CASE_KEYS = {
    "name", "num_gpus", "num_nodes", "slots_per_gpu", "num_slots", "num_redundant",
    "shared_expert", "policy", "group_policy", "grouped_layers", "after", "bound", "duplicates",
    "extra_slots_per_gpu", "plan_seconds", "notes", "moved_slots", "moved_share", "moved_bytes",
    "most_bytes_into_a_gpu", "seconds", "bytes_per_gpu", "extra_bytes_per_gpu",
}  # fmt: skip


def test_plan_for_a_job(job: Rehearsal, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    report = as_json(capsys, "plan", job.url, "--bandwidth", "1kB/s", "-o", path)
    now, case = report["now"], report["cases"][0]
    assert case.keys() == CASE_KEYS and len(report["cases"]) == 1
    loads = counts().sum(axis=0)
    before = balancedness(loads, placement())[:2]
    assert now["mean"] == pytest.approx(before.mean(), abs=1e-6) and now["num_gpus"] == RANKS
    made = ExpertPlacement.load(path)
    after = balancedness(loads, made)[:2]
    assert case["after"]["mean"] == pytest.approx(after.mean(), abs=1e-6)
    assert case["after"]["mean"] < now["mean"]
    assert case["bound"] <= case["after"]["mean"] and made.generation == 1
    into = moved_into(placement(), made)
    sizes = np.array([1000, 1000, 500])[:, None]
    assert case["moved_slots"] == into.sum() == report["explanation"]["moved_slots"]
    assert case["moved_bytes"] == (into * sizes).sum()
    most = (into * sizes).sum(axis=0).max()
    assert case["most_bytes_into_a_gpu"] == most and case["seconds"] == most / 1000


def test_plan_for_several_sizes(files: Path, capsys: Any) -> None:
    flags = ("--gpus", "2,4-5", "--slots-per-gpu", 5, "--expert-bytes", "44MB")
    report = as_json(capsys, "plan", files / "load.npz", *flags)
    assert [x["num_gpus"] for x in report["cases"]] == [2, 4, 5]
    assert [x["num_redundant"] for x in report["cases"]] == [2, 12, 17]
    assert report["cases"][1]["bytes_per_gpu"] == 3 * 5 * 44e6
    assert report["cases"][1]["extra_bytes_per_gpu"] == 3 * (5 - 2) * 44e6
    assert "explanation" not in report
    text = shown(capsys, "plan", files / "load.npz", *flags)
    assert "What if: balance" in text and "What if: cost" in text and "50.0 GB/s" in text
    unknown = shown(capsys, "plan", files / "load.npz")
    assert "give --expert-bytes" in unknown


def test_plan_with_the_shared_expert_in_slots(files: Path, capsys: Any) -> None:
    flags = ("--gpus", 4, "--redundant", 3, "--shared-expert", "hosted", "--top-k", 2)
    case = as_json(capsys, "plan", files / "load.npz", *flags)["cases"][0]
    assert case["shared_expert"] == "hosted" and case["num_slots"] == EXPERTS + 1 + 3
    assert case["moved_slots"] is None, "another number of experts: nothing to compare with"
    layout = as_json(capsys, "plan", files / "big.npz", "--array", "decode", "--layout",
                     "decode-ep320")  # fmt: skip
    assert layout["cases"][0]["num_slots"] == 320 and layout["num_experts"] == 256
    assert layout["now"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", "4", "--redundant", "3"), "nearest valid: 0 or 4"),
        (("--gpus", "x"), "--gpus 'x'"),
        (("--gpus", "4", "--layout", "decode-ep144"), "--layout sets it"),
        (("--layout", "decode-ep144"), "made for 256 routed experts"),
        (("--layout", "ep7"), "prefill-ep32"),
        (("--group-policy", "any"), "free, node, priced"),
        (("--nodes", "3"), "do not divide"),
        (("--policy", "best"), "ours"),
        (("--robust", "median"), "mean"),
        (("--bandwidth", "fast"), "50GB/s"),
        (("--expert-bytes", "44MB/s"), "--expert-bytes"),
        (("--slots-per-gpu", "1"), "at least"),
        (("-o", "plan.txt"), ".json or .npz"),
        (("--gpus", "2,4", "-o", "plan.json"), "one plan is saved"),
        (("--redundant", "4", "--slots-per-gpu", "3"), "not both"),
    ],
)
def test_plans_that_cannot_be(files: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experts("plan", files / "load.npz", *flags)
    assert said in str(caught.value), caught.value


# -- diff ---------------------------------------------------------------------------------------


def test_total_variation() -> None:
    a = np.array([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]])
    b = np.array([[10.0, 10, 0], [0, 5, 5], [1, 1, 1]])
    assert total_variation(a, b)[:2].tolist() == [0, 1] and np.isnan(total_variation(a, b)[2])


def test_diff_of_placements(files: Path, capsys: Any) -> None:
    report = as_json(capsys, "diff", files / "now.json", files / "better.npz")
    churn = report["churn"]
    into = moved_into(placement(), better())
    assert churn["moved"] == into.sum() and churn["generations"] == [3, 4]
    changed = (placement().physical_to_logical != better().physical_to_logical).sum()
    assert churn["changed"] == changed and report["drift"] is None and not report["balance"]
    assert [x["moved"] for x in churn["layers"]] == into.sum(axis=1).tolist()
    same = shown(capsys, "diff", files / "now.json", files / "now.json")
    assert "Churn: none" in same


def test_diff_of_a_job_and_files(job: Rehearsal, files: Path, capsys: Any) -> None:
    report = as_json(capsys, "diff", job.url, files / "better.npz")
    assert [(x["loads"], x["placement"]) for x in report["balance"]] == [
        ("first", "first"), ("first", "second"),
    ]  # fmt: skip
    assert report["balance"][0]["mean"] > report["balance"][1]["mean"]
    assert [x["layer"] for x in report["churn"]["layers"]] == list(LAYERS), "the job knows them"
    both = as_json(capsys, "diff", job.url, files / "load.npz", "--since", "start")
    assert both["first"]["since"] == "start", "the job alone is meant"
    assert both["drift"]["total_variation"] == 0 and both["drift"]["correlation"] == 1
    assert len(both["balance"]) == 4 and len(both["drift"]["layers"]) == 2, "MTP idles"
    text = shown(capsys, "diff", job.url, files / "load.npz")
    assert "Drift: total variation 0.0000" in text and "Churn:" in text


def test_diff_of_dumps(files: Path, capsys: Any) -> None:
    flags = ("--array", "decode", "--second-array", "decode_later")
    report = as_json(capsys, "diff", files / "big.npz", files / "big.npz", *flags)
    with np.load(files / "big.npz") as held:
        wanted = total_variation(held["decode"], held["decode_later"])
    assert report["drift"]["total_variation"] == pytest.approx(wanted.mean(), abs=1e-6)
    assert report["drift"]["correlation"] < 0.5 and report["churn"] is None
    with pytest.raises(ConfigError, match="--since start"):
        experts("diff", files / "big.npz", files / "big.npz", *flags, "--since", "start")
    for other, said in ((files / "now.json", "do not compare"), ("none.npz", "no such file")):
        with pytest.raises(ConfigError, match=said):
            experts("diff", files / "big.npz", other, "--array", "decode")


# -- compare ------------------------------------------------------------------------------------


def test_compare_is_the_same_as_the_library(files: Path, capsys: Any) -> None:
    flags = ("--array", "prefill", "--array", "decode", "--layouts")
    later = ("--then", files / "big.npz", "--then-array", "decode", "--then-array", "decode_later")
    report = as_json(capsys, "compare", files / "big.npz", *flags, *later, "--drift", 0.05)
    with np.load(files / "big.npz") as held:
        prefill, decode, after = held["prefill"], held["decode"], held["decode_later"]
    wanted = compare(
        {"prefill": prefill}, LAYOUTS[:2], drifted={"prefill": drift(prefill, decode, 0.05)}
    ) + compare({"decode": decode}, LAYOUTS[2:], drifted={"decode": drift(decode, after, 0.05)})
    assert [x["layout"] for x in report["rows"]] == [x.layout for x in wanted]
    for mine, theirs in zip(report["rows"], wanted, strict=True):
        for name, value in theirs.to_dict().items():
            if name != "seconds":
                close = pytest.approx(value, abs=1e-6) if isinstance(value, float) else value
                assert mine[name] == close, (mine, name)


def test_compare_on_a_shape(files: Path, capsys: Any) -> None:
    flags = ("--gpus", "2,4", "--redundant", 4, "--policies", "eplb,ours")
    report = as_json(capsys, "compare", files / "load.npz", *flags)
    assert [(x["layout"], x["policy"]) for x in report["rows"]] == [
        ("2 GPUs x 6", "eplb"), ("2 GPUs x 6", "ours"),
        ("4 GPUs x 3", "eplb"), ("4 GPUs x 3", "ours"),
    ]  # fmt: skip
    assert all(x["moved"] is None for x in report["rows"])
    text = shown(capsys, "compare", files / "load.npz", *flags)
    assert "Policies on" in text and "drifted" not in text
    experts("compare", files / "load.npz", *flags, "--markdown")
    assert capsys.readouterr().out.startswith("| layout")
    later = ("--then", files / "big.npz", "--then-array", "decode_later")
    text = shown(capsys, "compare", files / "big.npz", "--array", "decode", "--layouts", *later)
    assert text.count(" contiguous ") == 7 and " EP72 ours " in text, "no name in two parts"
    only = as_json(capsys, "compare", files / "big.npz", "--array", "decode", "--only", "EP72")
    assert {x["layout"] for x in only["rows"]} == {"EP72"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--layouts",), "made for 256 routed experts"),
        (("--only", "EP7x"), "EP72"),
        (("--policies", "ours,best"), "contiguous"),
        (("--drift", "0.1"), "--then"),
        (("--then", "{files}/load.npz", "--drift", "2"), "--drift 2"),
        (("--then", "{files}/big.npz", "--then-array", "decode"), "layers and experts"),
        (("--gpus", "2", "--layouts"), "not both"),
        (("--redundant", "4", "--layouts"), "--layouts and --redundant"),
        (("--group-policy", "node", "--only", "EP72"), "--only and --group-policy"),
        (("--policies", ""), "--policies '': valid are"),
        (("--policies", " ,"), "valid are"),
        (("--markdown", "--json"), "not both"),
        (("--since", "start"), "no running job"),
        (("--then", "{files}/load.npz", "--since", "start"), "no running job"),
    ],
)
def test_comparisons_that_cannot_be(files: Path, flags: tuple[str, ...], said: str) -> None:
    flags = tuple(x.format(files=files) for x in flags)
    with pytest.raises(ConfigError) as caught:
        experts("compare", files / "load.npz", *flags)
    assert said in str(caught.value), caught.value


# -- fail ---------------------------------------------------------------------------------------


def test_a_lost_gpu(job: Rehearsal, capsys: Any) -> None:
    report = as_json(capsys, "fail", job.url, "--gpu", 1)  # experts 3, 4, 5
    assert report["failed_gpus"] == [1] and report["num_live_gpus"] == 3
    assert report["lost"]["experts"] == 9 and report["lost"]["layers"] == 3
    assert report["lost"]["by_layer"][0] == {"layer": 4, "experts": [3, 4, 5]}
    loads = counts().sum(axis=0).astype(float)
    share = loads[:, 3:6].sum() / loads.sum()
    assert report["lost"]["share_of_picks"] == pytest.approx(share, abs=1e-6)
    assert report["capacity"]["enough"] and report["capacity"]["slots"] == 9
    assert report["replanned"]["moved_slots"] > 0 and report["replanned"]["moved_bytes"] > 0
    assert report["replanned"]["mean"] >= report["replanned"]["bound"] - 1e-6
    text = shown(capsys, "fail", job.url, "--gpus", "1")
    assert "9 of 24 experts have no replica left" in text and "1 are left for copies" in text


def test_copies_save_experts(files: Path, capsys: Any) -> None:
    flags = ("--placement", files / "better.npz")
    report = as_json(capsys, "fail", files / "load.npz", "--gpu", 0, *flags)
    assert report["lost"]["by_layer"][0]["experts"] == [0], "the hot one lives elsewhere too"
    assert report["survivors"]["mean"] < report["before"]["mean"] * 4


def test_a_lost_node_may_be_too_much(job: Rehearsal, capsys: Any) -> None:
    report = as_json(capsys, "fail", job.url, "--node", 1)
    assert report["failed_gpus"] == [2, 3]
    capacity = report["capacity"]
    assert not capacity["enough"] and capacity["slots_per_gpu_needed"] == 4
    assert capacity["gpus_needed"] == 3 and report["replanned"]["slots_per_gpu"] == 4
    assert "cannot hold 8 experts" in shown(capsys, "fail", job.url, "--node", "1")


def test_each_alone(job: Rehearsal, files: Path, capsys: Any) -> None:
    report = as_json(capsys, "fail", job.url)
    assert sorted(x["number"] for x in report["gpus"]) == [0, 1, 2, 3]
    lost = [x["lost_experts"] for x in report["gpus"]]
    assert lost == sorted(lost, reverse=True) and len(report["nodes"]) == 2
    assert report["nodes"][0]["lost_experts"] > report["gpus"][0]["lost_experts"]
    text = shown(capsys, "fail", job.url, "--rows", 2)
    assert "If one GPU were lost" in text and "2 of 4" in text and "If one node" in text
    alone = as_json(capsys, "fail", files / "now.json")
    assert alone["before"] is None and alone["gpus"][0]["survivors"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--gpu", "4"), "0 to 3"), (("--node", "2"), "0 to 1"), (("--gpu", "0-3"), "all 4"),
     (("--gpu", "-1"), "--gpu"), (("--gpus-per-node", "3"), "4 GPUs do not divide"),
     (("--gpu", "1", "--gpus-per-node", "2"), "--gpus-per-node 2: says nothing"),
     (("--ranks", "1"), "live on 1 GPU")],
)  # fmt: skip
def test_losses_that_cannot_be(files: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        experts("fail", files / "load.npz", *flags)


# -- apply --------------------------------------------------------------------------------------

SAID = {
    "balance_before": {"mean": 2.0, "worst": 3.0},
    "balance_after": {"mean": 1.1, "worst": 1.2},
    "moved_slots": 5,
    "moved_bytes": 5000,
    "most_bytes_into_a_rank": 3000,
    "batches": 2,
    "layers": 2,
    "seconds_at_rate": None,
}


def rank0(job: Rehearsal) -> ExpertRank:
    first = job.ranks[0]
    assert isinstance(first, ExpertRank)
    return first


def test_apply_and_wait(job: Rehearsal, capsys: Any) -> None:
    rank0(job).wishes = [("done", "", better(7), SAID)]
    text = shown(capsys, "apply", job.url, "--wait", "--max-moved", 9)
    assert "generation 0 -> 7" in text and "mean 2.000 -> 1.100" in text
    assert "moved 5 slots of 2 layers in 2 batches" in text
    (wish,) = rank0(job).of_kind(Rebalance)
    assert wish.force and not wish.dry_run and wish.options == {"max_moved_slots": 9}


def test_a_dry_run(job: Rehearsal, capsys: Any) -> None:
    rank0(job).wishes = [("nothing", "a dry run", None, SAID)] * 2
    report = as_json(capsys, "apply", job.url, "--dry-run", "--if-worth")
    assert report["explanation"] == SAID and report["dry_run"]
    assert report["generation_before"] == report["generation_after"] == 0
    (wish,) = rank0(job).of_kind(Rebalance)
    assert wish.dry_run and not wish.force
    assert "would move 5 slots" in shown(capsys, "apply", job.url, "--dry-run")


def test_a_given_placement(job: Rehearsal, files: Path, tmp_path: Path, capsys: Any) -> None:
    rank0(job).wishes = [("done", "", better(1), {})]
    experts("apply", job.url, "--placement", files / "better.npz", "--wait")
    (wish,) = rank0(job).of_kind(Rebalance)
    table = np.frombuffer(wish.table, "<i4").reshape(better().physical_to_logical.shape)
    assert (table == better().physical_to_logical).all()
    ExpertPlacement.trivial(2, EXPERTS, 2).save(tmp_path / "other.json")
    with pytest.raises(ConfigError) as caught:
        experts("apply", job.url, "--placement", tmp_path / "other.json")
    assert len(caught.value.problems) == 3, "layers, ranks, slots"
    with pytest.raises(ConfigError, match="--robust"):
        experts("apply", job.url, "--placement", files / "better.npz", "--robust", "max")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--if-worth", "--placement", "{files}/better.npz"), "leave --if-worth out"),
        (("--robust", "median"), "--robust 'median': valid are mean, max"),
        (("--policy", "best"), "--policy 'best': valid are ours"),
        (("--group-policy", "any"), "--group-policy 'any': valid are free"),
        (("--policy", "eplb", "--max-moved", "3"), "--max-moved 3: --policy eplb"),
    ],
)
def test_wishes_that_cannot_be(
    job: Rehearsal, files: Path, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        experts("apply", job.url, *(x.format(files=files) for x in flags))
    assert said in str(caught.value), caught.value
    assert not rank0(job).of_kind(Rebalance)


def test_a_file_is_no_job(files: Path, tmp_path: Path) -> None:
    for command in (("apply",), ("record", "-o", tmp_path / "a.npz")):
        for text, said in ((files / "load.npz", "is a file"), ("load.npz", "is no URL")):
            with pytest.raises(ConfigError, match=said):
                experts(*command, text)


def test_a_refused_wish_is_an_error_without_waiting_too(job: Rehearsal) -> None:
    rank0(job).wishes = [("never", "", None, {})]
    experts("apply", job.url)
    with pytest.raises(MoeserveError, match="under way"):
        experts("apply", job.url)


def test_not_waiting(job: Rehearsal, capsys: Any) -> None:
    rank0(job).wishes = [("done", "", None, {})]
    report = as_json(capsys, "apply", job.url)
    assert report["result"] in ("running", "done") and report["number"] == 1


@pytest.mark.parametrize("result", ["refused", "abandoned"])
def test_what_did_not_happen_is_an_error(job: Rehearsal, capsys: Any, result: str) -> None:
    rank0(job).wishes = [(result, "for a reason", None, {})]
    with pytest.raises(MoeserveError, match=f"{result}: for a reason"):
        experts("apply", job.url, "--wait", "--json")
    assert json.loads(capsys.readouterr().out)["result"] == result
    assert httpx.get(f"{job.url}/health").status_code == 200


def test_keys(checkpoint: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with expert_job(checkpoint, server={"admin_key": "boss"}) as job:
        with pytest.raises(MoeserveError, match="--admin-key"):
            experts("top", job.url)
        experts("top", job.url, "--admin-key", "boss")
        monkeypatch.setenv("MOESERVE_ADMIN_KEY", "boss")
        experts("plan", job.url)
    with expert_job(checkpoint, server={"api_key": "user"}) as job:
        monkeypatch.delenv("MOESERVE_ADMIN_KEY")
        monkeypatch.setenv("MOESERVE_API_KEY", "user")
        experts("fail", job.url)


# -- units --------------------------------------------------------------------------------------


def test_units() -> None:
    assert parse_bytes("x", "44MB") == 44e6 and parse_bytes("x", "1KiB") == 1024
    assert parse_bytes("x", "1.5 GB/s", rate=True) == 1.5e9 and parse_bytes("x", "12") == 12
    assert parse_numbers("x", "3, 1-2,2") == [3, 1, 2]
    assert [show_bytes(x) for x in (None, 12, 1500, 2.5e12)] == ["-", "12 B", "1.5 kB", "2.5 TB"]
    assert [show_seconds(x) for x in (0.0123, 3, 600)] == ["12.3 ms", "3.0 s", "10.0 min"]
    for wrong in ("", "0MB", "MB", "-1", "1 2"):
        with pytest.raises(ConfigError, match="--size"):
            parse_bytes("--size", wrong)
    for wrong in ("", "1,", "2-1", "1.5", "0-99999999"):
        with pytest.raises(ConfigError, match="--n"):
            parse_numbers("--n", wrong)
