"""ExpertRecording: sums, slices, merging, its file, and what damaged files are called."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording, RecordingError, RecordingInfo

INFO = RecordingInfo(
    num_ranks=2,
    interval_steps=4,
    layers=(1, 2, 5),
    num_mtp_layers=1,
    picks_per_token=2,
    model_type="deepseek_v3",
    checkpoint="tiny",
    dtype="bfloat16",
)


def make(size: int = 5, seed: int = 0, generations: tuple[int, ...] = (0, 3)) -> ExpertRecording:
    rng = np.random.default_rng(seed)
    first = np.arange(size) * 10 + 1
    return ExpertRecording.of(
        rng.integers(0, 1000, (size, 2, 3, 6)),
        INFO,
        steps=np.stack([first, first + 8], axis=1),
        num_steps=np.full(size, 4),
        seconds=rng.random(size),
        tokens=rng.integers(0, 99, (size, 2)),
        traffic=rng.integers(0, 70000, (size, 2, 2)),
        placements=[ExpertPlacement.trivial(3, 6, 2, 1 + g, generation=g) for g in generations],
        placement_index=np.arange(size) * len(generations) // size,
    )


def same(a: ExpertRecording, b: ExpertRecording) -> None:
    for name in ("counts", "steps", "num_steps", "seconds", "tokens", "traffic"):
        assert (getattr(a, name) == getattr(b, name)).all(), name
    assert a.info == b.info and a.generations == b.generations
    for i in range(a.num_intervals):
        assert a.placement_of(i) == b.placement_of(i)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    recording = make()
    recording.save(tmp_path / "a.npz")
    same(ExpertRecording.load(tmp_path / "a.npz"), recording)
    assert [x.name for x in tmp_path.iterdir()] == ["a.npz"], "a draft was left"
    empty = make().slice(0, 0)
    same(ExpertRecording.from_bytes(empty.to_bytes()), empty)
    assert empty.totals().shape == (3, 6) and empty.totals().sum() == 0
    plain = ExpertRecording.of(np.ones((1, 2, 3, 6), int), INFO)
    same(ExpertRecording.from_bytes(plain.to_bytes()), plain)
    assert plain.generations == [] and plain.placement_of(0) is None
    with pytest.raises(RecordingError, match="valid ending is .npz"):
        recording.save(tmp_path / "a.json")


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.npz"
    make().save(path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("ep.archive.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        make(seed=1).save(path)
    assert path.read_bytes() == before and [x.name for x in tmp_path.iterdir()] == ["a.npz"]


def test_totals_slices_and_merging() -> None:
    whole = make()
    assert (whole.totals() == whole.totals("prefill") + whole.totals("decode")).all()
    assert (whole.totals("decode") == whole.counts[:, 1].sum(axis=0)).all()
    head, tail = whole.slice(None, 2), whole.slice(2)
    assert (head.totals() + tail.totals() == whole.totals()).all()
    assert head.generations == [0, 0] and len(head.placements) == 1
    assert tail.generations == whole.generations[2:]
    same(ExpertRecording.merge([head, tail]), whole)
    assert len(ExpertRecording.merge([whole, whole]).placements) == 2
    assert whole.placement_of(-1) == whole.placements[1]
    with pytest.raises(ValueError, match="read-only"):
        whole.counts[0] = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (1, 2, 6)}, "layers"),
        ({"picks_per_token": 3}, "picks_per_token=3"),
        ({"fingerprint": "x"}, "fingerprint='x'"),
    ],
)
def test_what_does_not_merge(change: dict[str, Any], message: str) -> None:
    other = replace(make(), info=replace(INFO, **change))
    with pytest.raises(RecordingError, match=message):
        ExpertRecording.merge([make(), other])


def test_missing_picks_shows_what_was_lost() -> None:
    counts = np.zeros((2, 2, 3, 6), int)
    tokens = np.array([[3, 1], [0, 2]])
    counts[:, :, 0, 0] = counts[:, :, 1, 5] = tokens * 2
    recording = ExpertRecording.of(counts, INFO, tokens=tokens)
    assert not recording.missing_picks.any(), "an MTP layer that did not run is no loss"
    counts[1, 1, 1, 5] -= 1
    lost = ExpertRecording.of(counts, INFO, tokens=tokens).missing_picks
    assert lost.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.zeros((2, 2, 4, 6), int)}, "counts: int64 .2, 2, 4, 6.; must be integers"),
        ({"counts": np.zeros((5, 2, 3, 6))}, "counts: float64"),
        ({"counts": np.full((5, 2, 3, 6), -1)}, "counts: holds -1"),
        ({"steps": np.full((5, 2), [7, 3])}, "steps.0.=.7, 3.: the last is before the first"),
        ({"seconds": np.full(5, np.nan)}, "seconds: must be 5 finite"),
        ({"tokens": np.zeros((4, 2), int)}, "tokens"),
        ({"traffic": np.zeros((5, 3, 3), int)}, "traffic"),
        ({"placement_index": np.full(5, 2)}, "placement_index: 2; valid are 0..1"),
        ({"placements": (ExpertPlacement.trivial(3, 7, 2),) * 2}, "placements.0."),
        ({"info": replace(INFO, num_ranks=0)}, "info.num_ranks=0"),
        ({"info": replace(INFO, layers=())}, "info.layers"),
        ({"info": replace(INFO, dtype=3)}, "info.dtype=3: must be a text"),  # type: ignore[arg-type]
        ({"info": replace(INFO, num_mtp_layers=4)}, "num_mtp_layers=4: at most 3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        replace(make(), **change)


def rewritten(content: bytes, name: str, value: Any) -> bytes:
    """The archive with one member changed, or left out (None)."""
    with np.load(io.BytesIO(content)) as archive:
        members = {x: archive[x] for x in archive.files}
    if value is None:
        del members[name]
    else:
        members[name] = value
    buffer = io.BytesIO()
    np.savez(buffer, **members)
    return buffer.getvalue()


def with_head(content: bytes, **change: Any) -> bytes:
    with np.load(io.BytesIO(content)) as archive:
        head = json.loads(str(archive["info"]))
    for key, value in change.items():
        if value is None:
            del head[key]
        else:
            head[key] = value
    return rewritten(content, "info", np.array(json.dumps(head)))


@pytest.mark.parametrize(
    "name",
    ["info", "counts", "steps", "num_steps", "seconds", "tokens", "traffic", "placement_index"]
    + ["placement_1"],
)
def test_a_missing_or_wrong_member_is_named(name: str) -> None:
    good = make().to_bytes()
    with pytest.raises(RecordingError, match=f"{name}: missing|info is missing"):
        ExpertRecording.from_bytes(rewritten(good, name, None))
    with pytest.raises(RecordingError, match=f"{name}|counts are"):
        ExpertRecording.from_bytes(rewritten(good, name, np.zeros((3, 1), np.complex64)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "info.format='other', version=1: valid is"),
        ({"version": 2}, "version=2"),
        ({"layers": None}, "info.layers: missing"),
        ({"layers": 3}, "info.layers=3"),
        ({"num_ranks": 2.5}, "info.num_ranks=2.5"),
        ({"num_logical_experts": 7}, "num_logical_experts=7: counts are"),
        ({"generations": [0]}, "placement_index|placement_1"),
        ({"generations": "x"}, "info.generations='x'"),
        ({"colour": "red"}, "info.colour: unknown; known are checkpoint"),
        ({"started_at": 5}, "info.started_at=5"),
    ],
)
def test_a_damaged_head_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        ExpertRecording.from_bytes(with_head(make().to_bytes(), **change))


def test_damaged_bytes_never_read_as_something_else(tmp_path: Path) -> None:
    """Bit flips and cuts: the same recording (padding was hit) or a RecordingError."""
    recording = make()
    good = recording.to_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for i in range(300):
        if i % 3:
            bad = bytearray(good)
            bad[rng.integers(len(good))] ^= 1 << int(rng.integers(8))
        else:
            bad = bytearray(good[: rng.integers(len(good))])
        try:
            same(ExpertRecording.from_bytes(bytes(bad)), recording)
        except RecordingError:
            refused += 1
    assert refused > 200
    for text in (b"", b"PK", b"hello", json.dumps({"a": 1}).encode()):
        with pytest.raises(RecordingError, match="archive"):
            ExpertRecording.from_bytes(text)
    path = tmp_path / "x.npz"
    path.write_bytes(b"hello")
    with pytest.raises(RecordingError, match="x.npz: "):
        ExpertRecording.load(path)
    with pytest.raises(FileNotFoundError):
        ExpertRecording.load(tmp_path / "none.npz")


def test_a_member_that_unpickles_or_claims_much_is_refused() -> None:
    good = make().to_bytes()
    with pytest.raises(RecordingError, match="tokens: damaged"):
        ExpertRecording.from_bytes(_with_raw(good, "tokens", _npy(np.array([{}], dtype=object))))
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1 << 50,)}"
    claim = header.replace(b"1 << 50", b"%d" % (1 << 50)).ljust(127) + b"\n"
    with pytest.raises(RecordingError, match="tokens: damaged"):
        ExpertRecording.from_bytes(_with_raw(good, "tokens", claim))


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _with_raw(content: bytes, name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(buffer, "w") as new,
    ):
        for entry in old.infolist():
            changed = entry.filename == f"{name}.npy"
            new.writestr(entry.filename, data if changed else old.read(entry))
    return buffer.getvalue()
