"""Presets and the comparison of policies: the numbers of published layouts, the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ep.planner import plan
from ep.planning.compare import LAYOUTS, compare, drift, format_table, with_shared
from ep.planning.plan_loads import PlanError
from ep.presets import PRESETS, Layout, preset

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "tests/data/expert-load/dsv3_counts.npz"


def test_presets_are_the_published_layouts() -> None:
    decode, prefill, online = (
        preset(name) for name in ("decode-ep320", "prefill-ep32", "decode-ep144")
    )
    # DeepSeek-V3 report 3.4: one expert a GPU, 64 GPUs for redundant and shared experts.
    assert (decode.num_gpus, decode.num_nodes, decode.slots_per_gpu) == (320, 40, 1)
    assert decode.num_slots - decode.routed_experts == 64 and decode.shared == "hosted"
    assert decode.num_logical_experts == 257 and decode.num_redundant == 63
    assert (prefill.num_gpus, prefill.num_nodes, prefill.slots_per_gpu) == (32, 4, 9)
    assert prefill.num_redundant == 32 and prefill.shared == "replicated"
    assert (online.num_gpus, online.num_nodes, online.slots_per_gpu) == (144, 18, 2)
    assert online.num_redundant == 32 and online.shared == "replicated"
    with pytest.raises(PlanError) as error:
        preset("decode-ep64")
    assert all(name in str(error.value) for name in PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_can_be_planned(name: str) -> None:
    layout = preset(name)
    loads = with_shared(np.random.default_rng(0).lognormal(0, 0.7, (2, 256)), layout, 8)
    made = plan(
        loads, num_slots=layout.num_slots, num_gpus=layout.num_gpus, num_nodes=layout.num_nodes,
        num_groups=layout.num_groups, options=layout.options(),
    )  # fmt: skip
    assert made.placement.num_physical_experts == layout.num_slots
    assert made.placement.num_local_experts == layout.slots_per_gpu


def test_compare_ranks_policies_as_measured() -> None:
    with np.load(TRACES) as archive:
        loads, later = (archive[n][:6] for n in ("decode_in2000out100", "decode_in1000out1000"))
    layouts = [one for one in LAYOUTS if one.name in ("EP72", "EP320, shared hosted")]
    rows = compare({"d": loads}, layouts, drifted={"d": drift(loads, later, 0.02)})
    found = {(row.layout, row.policy): row for row in rows}
    assert len(rows) == 6
    ours, eplb, plain = (found["EP72", p] for p in ("ours", "eplb", "contiguous"))
    assert ours.bound <= ours.mean < eplb.mean - 0.01 < plain.mean - 0.5
    assert ours.duplicates == 0 and ours.moved is not None and eplb.moved is not None
    assert ours.moved < eplb.moved / 2 and plain.moved == 0
    hosted = found["EP320, shared hosted", "ours"]
    assert hosted.mean == pytest.approx(hosted.bound)
    table = format_table(rows)
    assert len(table.splitlines()) == 8 and len({len(line) for line in table.splitlines()}) == 1
    assert ours.to_dict()["policy"] == "ours"


def test_drift_is_as_far_as_it_says() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(0, 1, (2, 3, 16))
    made = drift(a, b, 0.05)
    shares = a / a.sum(axis=1, keepdims=True)
    assert np.abs(made - shares).sum() / 2 / 3 == pytest.approx(0.05)
    assert np.allclose(drift(a, b, 5.0), b / b.sum(axis=1, keepdims=True))
    with pytest.raises(PlanError, match="one shape"):
        drift(a, b[:, :3], 0.1)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="256 experts"):
        compare({"x": np.ones((1, 256))}, [Layout("small", 8, 4, "replicated", "free")])


def test_the_script_prints_the_table() -> None:
    command = [
        sys.executable, "scripts/bench_placement.py", str(TRACES), "--repeat", "1",
        "--prefill-toward", "decode_in2000out100",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2 + 3 * len(LAYOUTS) and lines[0].startswith("| layout")
