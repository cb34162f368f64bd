"""Reading recorded loads of every accepted form; refusals name what is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording, RecordingInfo
from ep.trace import TraceError, names_of, read_trace

LOADS = np.arange(24).reshape(2, 3, 4)
TRACES = Path(__file__).parent / "data/expert-load/dsv3_counts.npz"


def test_plain_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", LOADS)
    np.savez(tmp_path / "b.npz", whatever=LOADS, names=np.array(["x"]))
    np.savez(tmp_path / "c.npz", loads=LOADS, other=LOADS * 2)
    (tmp_path / "d.json").write_text(json.dumps(LOADS.tolist()))
    torch.save(torch.from_numpy(LOADS), tmp_path / "e.pt")
    for name in ("a.npy", "b.npz", "c.npz", "d.json", "e.pt"):
        trace = read_trace(tmp_path / name)
        assert trace.loads.dtype == np.float64 and (trace.loads == LOADS).all(), name
        assert (trace.totals == LOADS.sum(axis=0)).all()
    (tmp_path / "f.csv").write_text("e0,e1,e2,e3\n" + "\n".join("1,2,3,4" for _ in range(3)))
    assert read_trace(tmp_path / "f.csv").loads.tolist() == [[[1, 2, 3, 4]] * 3]
    assert read_trace(tmp_path / "c.npz", "other").loads.max() == 46


def test_an_archive_of_several_wants_a_name() -> None:
    assert names_of(TRACES) == ["decode_in1000out1000", "decode_in2000out100", "prefill_in4096"]
    with pytest.raises(TraceError, match="choose one by name of decode_in1000out1000"):
        read_trace(TRACES)
    with pytest.raises(TraceError, match="valid are .*prefill_in4096"):
        read_trace(TRACES, "prefill")
    assert read_trace(TRACES, "prefill_in4096").loads.shape == (1, 58, 256)


def test_sglang_dumps(tmp_path: Path) -> None:
    torch.save({"rank": 0, "logical_count": torch.from_numpy(LOADS)}, tmp_path / "stat.pt")
    assert (read_trace(tmp_path / "stat.pt").loads == LOADS).all()
    # The first layers are dense there, and counted as zeros.
    dense = np.concatenate([np.zeros((2, 1, 4), dtype=int), LOADS + 1], axis=1)
    (tmp_path / "stat.json").write_text(json.dumps({"logical_count": dense.tolist()}))
    trace = read_trace(tmp_path / "stat.json")
    assert trace.layers.tolist() == [1, 2, 3] and (trace.loads == LOADS + 1).all()
    assert read_trace(tmp_path / "stat.json", drop_dense=False).loads.shape == (2, 4, 4)
    slots = torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, 3, 3]])
    records = [
        {"forward_pass_id": i, "rank": 0, "global_physical_count": torch.full((2, 5), i + 1)}
        for i in range(3)
    ]
    torch.save({"records": records, "last_physical_to_logical_map": slots}, tmp_path / "pass.pt")
    trace = read_trace(tmp_path / "pass.pt")
    assert trace.loads[2].tolist() == [[6, 3, 3, 3], [3, 3, 3, 6]]
    (tmp_path / "nested.json").write_text(json.dumps({"0": {"0": 5, "2": 1}, "1": {"1": 2}}))
    assert read_trace(tmp_path / "nested.json").loads.tolist() == [[[5, 0, 1], [0, 2, 0]]]


def test_vllm_dumps(tmp_path: Path) -> None:
    window = np.ones((4, 2, 3), dtype=int)
    state = {
        "expert_load_window": window.tolist(),
        "physical_to_logical_map": [[0, 1, 1], [1, 0, -1]],
    }
    (tmp_path / "v.json").write_text(json.dumps(state))
    trace = read_trace(tmp_path / "v.json")
    assert trace.loads.shape == (4, 2, 2) and trace.loads[0].tolist() == [[1, 2], [1, 1]]
    torch.save({"logical_expert_load": torch.ones(2, 6)}, tmp_path / "v.pt")
    assert read_trace(tmp_path / "v.pt").loads.shape == (1, 2, 6)
    state["physical_to_logical_map"] = [[0, 1]]
    (tmp_path / "v.json").write_text(json.dumps(state))
    with pytest.raises(TraceError, match="do not go together"):
        read_trace(tmp_path / "v.json")


def test_our_recordings(tmp_path: Path) -> None:
    counts = np.arange(48).reshape(2, 2, 3, 4)
    info = RecordingInfo(num_ranks=2, interval_steps=1, layers=(1, 2, 3))
    recording = ExpertRecording.of(counts, info, placements=[ExpertPlacement.trivial(3, 4, 2)])
    recording.save(tmp_path / "r.npz")
    trace = read_trace(tmp_path / "r.npz")
    assert (trace.loads == counts.sum(axis=1)).all() and trace.layers.tolist() == [1, 2, 3]
    assert (read_trace(tmp_path / "r.npz", "decode").loads == counts[:, 1]).all()
    with pytest.raises(TraceError, match="valid are prefill, decode"):
        read_trace(tmp_path / "r.npz", "both")


SLOTS = [[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]]  # of 4 experts, 2 layers


def test_an_array_on_slots_that_is_asked_for_by_name_goes_through_the_map(tmp_path: Path) -> None:
    counts = np.arange(20).reshape(2, 2, 5)
    np.savez(tmp_path / "a.npz", expert_load_window=counts, mine=counts, physical_to_logical=SLOTS)
    wanted = np.zeros((2, 2, 4))
    for layer in range(2):
        for slot in range(5):
            wanted[:, layer, SLOTS[layer][slot]] += counts[:, layer, slot]
    for name in ("expert_load_window", "mine", None):
        assert (read_trace(tmp_path / "a.npz", name).loads == wanted).all(), name
    with pytest.raises(TraceError, match="physical_to_logical.*says where experts are"):
        read_trace(tmp_path / "a.npz", "physical_to_logical")
    assert names_of(tmp_path / "a.npz") == ["expert_load_window", "mine"]
    np.savez(tmp_path / "b.npz", expert_load_window=counts)
    assert "no map of slots" in read_trace(tmp_path / "b.npz").source


def test_a_map_of_each_step(tmp_path: Path) -> None:
    maps = [[[0, 1, 1]], [[1, 0, 0]]]
    state = {"expert_load_window": [[[1, 2, 3]], [[1, 2, 3]]], "physical_to_logical_map": maps}
    (tmp_path / "v.json").write_text(json.dumps(state))
    assert read_trace(tmp_path / "v.json").loads.tolist() == [[[1, 5]], [[5, 1]]]
    state["expert_load_window"].append([[1, 2, 3]])
    (tmp_path / "v.json").write_text(json.dumps(state))
    with pytest.raises(TraceError, match="do not go together"):
        read_trace(tmp_path / "v.json")


def test_tensors_of_any_type(tmp_path: Path) -> None:
    counts = torch.arange(10).reshape(2, 5).bfloat16()
    records = [{"global_physical_count": counts}, {"global_physical_count": counts}]
    held = {"records": records, "last_physical_to_logical_map": torch.tensor(SLOTS)}
    torch.save(held, tmp_path / "r.pt")
    assert read_trace(tmp_path / "r.pt").loads[1].tolist() == [[4, 1, 2, 3], [8, 7, 6, 14]]
    torch.save({"logical_count": counts.to_sparse()}, tmp_path / "s.pt")
    assert read_trace(tmp_path / "s.pt").loads.sum() == 45


def test_tables_with_a_head_a_mark_and_numbers_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeff1,2,3\r\n4,5,6\r\n".encode())
    assert read_trace(path).loads.tolist() == [[[1, 2, 3], [4, 5, 6]]]
    path.write_text("layer,e0,e1\n3,5,6\n4,7,8\n")
    trace = read_trace(path)
    assert trace.loads.tolist() == [[[5, 6], [7, 8]]] and trace.layers.tolist() == [3, 4]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('ran code of a file')",))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.bin", b"", "accepted are .npz, .npy, .json, .csv, .pt"),
        ("a.npz", b"nothing", "not readable as .npz"),
        ("a.npy", b"", "not readable as .npy"),
        ("a.json", b"{", "not readable as .json"),
        ("a.json", b'{"hello": 1}', "none of them loads; accepted are an array"),
        ("a.json", b"[[1, 2], [3]]", "unequal length"),
        ("a.json", b"[[1, -2]]", "expert 1: -2.0 is negative"),
        ("a.json", b"null", "accepted are an array"),
        ("a.json", b'{"records": [1]}', "records are not all mappings"),
        ("a.json", b'{"0": 5}', "layer 0: must be counts of its experts"),
        ("a.json", b'{"0": null}', "layer 0: object; must be numbers"),
        ("a.json", b'{"0": {"x": 1}}', "layer 0: key 'x'"),
        ("a.json", '{"²": {"0": 1}}'.encode(), "none of them loads"),
        ("a.json", b'{"logical_count": {"a": 1}}', "logical_count: key 'a'"),
        ("a.json", b'{"logical_count": {"-1": [1, 2]}}', "logical_count: key '-1'"),
        ("a.json", b'{"logical_count": {"0": [1], "00": [2]}}', "layer 0 occurs twice"),
        ("a.json", b'{"logical_count": {"0": {"1": 1, "01": 2}}}', "expert 1 occurs twice"),
        ("a.json", b'{"0": [1, 2], "0": [3, 4]}', "'0': occurs twice"),
        ("a.json", b'{"logical_count": {"40000000": {"0": 1}}}', "number 40000000; valid are"),
        ("a.json", b'{"logical_count": {"4000": {"60000": 1}}}', "far too many"),
        ("a.json", b'{"records": [{"logical_count": ["a", "b"]}]}', "records[0]: <U1"),
        (
            "a.json",
            b'{"physical_to_logical_map": [[0], [1, 2]], "expert_load_pass": [[1], [1, 2]]}',
            "rows of unequal length",
        ),
        (
            "a.json",
            b'{"physical_to_logical_map": [[0, 1]], "expert_load_pass": [["x", 1]]}',
            "expert_load_pass: <U21; must be numbers",
        ),
        (
            "a.json",
            b'{"physical_to_logical_map": [[0, 999999999]], "expert_load_pass": [[1, 2]]}',
            "names expert 999999999; valid are 0..1",
        ),
        ("a.json", b"[" * 100000, "not readable as .json"),
        ("a.csv", b"1,2\n3", "row 2 has 1 cells, the first 2"),
        ("a.csv", b"1OO,2\n3,4", "row 1, cell 1: '1OO' is no number"),
        ("a.csv", b"layer,e0\n0,1\n0,2", "layer 0 occurs twice"),
        ("a.csv", b"layer,e0\n0.5,1", "row 2: layer='0.5'"),
        ("a.csv", b"layer,expert,count\n0,0,7", "column 'expert': must be one row a layer"),
        ("a.pt", b"nothing", "not readable as .pt"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path / name)
    assert said in str(error.value) and name in str(error.value)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(TraceError, match="not readable as .pt"):
        read_trace(tmp_path / "evil.pt")
