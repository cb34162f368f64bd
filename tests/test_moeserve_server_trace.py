"""/debug/trace and `moeserve trace`: what is saved, refused, and left of a job that ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gated_toy import real_job
from server_world import checkpoint_folder  # noqa: F401  (a fixture)

from launch.trace import TraceCommand
from moeserve.errors import ConfigError, MoeserveError
from moeserve.server.rehearsal import FakeRank, Rehearsal
from moeserve.tracing_job import JobTrace
from moeserve.wire_trace import NAMES, SPAN, STEP, StartTrace, StopTrace, TraceEnded, TraceSteps


@pytest.fixture
def job(folder: Path) -> Iterator[Rehearsal]:
    with Rehearsal(folder, num_ranks=2) as running:
        yield running


def steps_of(rank: int, trace: int, numbers: list[int]) -> TraceSteps:
    rows = np.array([(n, 1, 2, 2) for n in numbers], STEP)
    spans = []
    for n in numbers:
        spans += [(NAMES.index("lockstep"), 0, -1, n * 1000, 10), (0, 0, -1, n * 1000, 500)]
    return TraceSteps(rank, trace, "h", "c", rows.tobytes(), np.array(spans, SPAN).tobytes())


class Taking:
    """POST /debug/trace on a thread of its own."""

    def __init__(self, job: Rehearsal, **body: Any) -> None:
        self.answer: httpx.Response | None = None
        self._arguments = (f"{job.url}/debug/trace", body)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.answer = httpx.post(self._arguments[0], json=self._arguments[1], timeout=20)

    def end(self) -> httpx.Response:
        self._thread.join(20)
        assert self.answer is not None
        return self.answer


def asked(job: Rehearsal, kind: type[Any] = StartTrace, count: int = 1) -> None:
    """Until every rank has been told; each look is a request, so the loop goes on."""
    with httpx.Client(base_url=job.url, timeout=20) as http:
        for _ in range(2000):
            if all(len(rank.of_kind(kind)) >= count for rank in job.ranks):
                return
            http.get("/version")
    raise AssertionError(f"no {kind.__name__}")


def tell(job: Rehearsal, trace: int, numbers: list[list[int]], end: bool = True) -> None:
    for rank, mine in zip(job.ranks, numbers, strict=True):
        rank.send(steps_of(rank.rank, trace, mine))
        if end:
            rank.send(TraceEnded(rank.rank, trace, len(mine)))


def test_one_at_a_time_in_either_form(job: Rehearsal) -> None:
    with httpx.Client(base_url=job.url, timeout=20) as http:
        assert http.get("/debug/trace").json() == {"status": "none", "traces": 0}
        taking = Taking(job, steps=2)
        asked(job)
        second = http.post("/debug/trace", json={"steps": 3})
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "trace_conflict"
        assert "trace 1 is being taken (0 of 2 steps" in second.json()["error"]["message"]
        tell(job, 9, [[1], [1]])  # of another trace: nobody asked
        tell(job, 1, [[5, 6], [5, 6]])
        answer = taking.end()
        assert answer.status_code == 200 and "x-trace-cut-short" not in answer.headers
        names = [e["name"] for e in answer.json()["traceEvents"] if e["ph"] == "X"]
        assert sorted(names) == ["lockstep"] * 4 + ["step"] * 4
        taking = Taking(job, steps=1, format="raw")
        asked(job, count=2)
        assert http.get("/debug/trace").json()["status"] == "tracing"
        tell(job, 2, [[7], [7]])
        assert JobTrace.from_bytes(taking.end().content).num_steps == 1
        asked_for = [(m.trace, m.steps) for m in job.ranks[1].of_kind(StartTrace)]
        assert asked_for == [(1, 2), (2, 1)]


def test_what_is_refused(job: Rehearsal, folder: Path) -> None:
    with httpx.Client(base_url=job.url, timeout=20) as http:
        for field, value in (("steps", 0), ("steps", 1001), ("seconds", 0), ("format", "x")):
            answer = http.post("/debug/trace", json={field: value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field
        assert http.post("/debug/trace/stop").status_code == 409
    keyed = Rehearsal(folder, server={"admin_key": "k"})
    with keyed, httpx.Client(base_url=keyed.url) as http:
        assert http.post("/debug/trace").status_code == 401
        assert http.get("/debug/trace").status_code == 401
    loading = Rehearsal(folder, ready=False)
    with loading, httpx.Client(base_url=loading.url) as http:
        assert http.post("/debug/trace").status_code == 503


def test_it_ends_by_time_or_when_told_with_the_steps_that_all_have(job: Rehearsal) -> None:
    taking = Taking(job, steps=100, seconds=0.2)
    asked(job, StopTrace)
    tell(job, 1, [[1, 2, 3], [1, 2]])
    answer = taking.end()
    assert answer.headers["x-trace-cut-short"] == "no step had tokens in 0.2 s"
    assert answer.json()["otherData"]["steps"] == 2
    taking = Taking(job, steps=100)
    asked(job, count=2)
    assert httpx.post(f"{job.url}/debug/trace/stop").json()["status"] == "tracing"
    asked(job, StopTrace, 2)
    tell(job, 2, [[4], [4]])
    assert taking.end().headers["x-trace-cut-short"] == "it was told to stop"


@pytest.mark.parametrize("told", [[[], []], [[1, 2], [1]]])
def test_a_rank_dies(job: Rehearsal, told: list[list[int]], tmp_path: Path) -> None:
    """Told with its name; what all ranks had said by then is kept."""
    failed: list[Exception] = []

    def command() -> None:
        try:
            TraceCommand(job.url, tmp_path / "t.json", 10, 20).run()
        except MoeserveError as error:
            failed.append(error)

    thread = threading.Thread(target=command)
    thread.start()
    asked(job)
    if any(told):
        tell(job, 1, told, end=False)
        with httpx.Client(base_url=job.url) as http:
            while http.get("/debug/trace").json()["num_steps"] < 1:
                pass
    dying = job.ranks[1]
    assert isinstance(dying, FakeRank)
    dying.die()
    thread.join(20)
    assert len(failed) == 1 and "rank 1 died" in str(failed[0])
    assert (tmp_path / "t.json").exists() == any(told)
    if any(told):
        assert "1 of 10 steps are saved" in str(failed[0])


def test_whoever_asked_leaves(job: Rehearsal) -> None:
    with httpx.Client(base_url=job.url, timeout=0.3) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/debug/trace", json={"steps": 5})
    asked(job, StopTrace)
    with httpx.Client(base_url=job.url) as http:
        assert http.get("/debug/trace").json()["status"] == "none"


# -- the command, with ranks that compute ---------------------------------------------------------


def test_the_command_traces_a_job_that_computes(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t.json"
    with real_job(folder) as job:
        over = threading.Event()

        def traffic() -> None:
            with httpx.Client(base_url=job.url, timeout=20) as http:
                while not over.is_set():
                    body = {"prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
                    http.post("/v1/completions", json=body)

        thread = threading.Thread(target=traffic)
        thread.start()
        try:
            TraceCommand(job.url, out, 9, 20, as_json=True).run()
        finally:
            over.set()
            thread.join(20)
        report = json.loads(capsys.readouterr().out)
        assert report["steps"] == 9 and report["ranks"] == 1 and report["cut_short"] is None
        written = json.loads(out.read_text())
        steps = [e["args"]["step"] for e in written["traceEvents"] if e["name"] == "step"]
        assert len(steps) == 9 and steps == sorted(set(steps))
        assert steps[0] == report["first_step"] and written["otherData"]["steps"] == 9
        with pytest.raises(MoeserveError, match="no step had tokens in 0.2 s"):
            TraceCommand(job.url, out, 9, 0.2).run()
        job.ranks[0].die()


def test_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        TraceCommand("http://127.0.0.1:1", tmp_path / "no" / "t.txt", 0, -1).run()
    told = "\n".join(caught.value.problems)
    for word in ("--steps 0", "--seconds -1", ".json", "no such folder"):
        assert word in told
    with pytest.raises(ConfigError, match="URL"):
        TraceCommand("nonsense", tmp_path / "t.json").run()
    with pytest.raises(MoeserveError, match="no answer"):
        TraceCommand("http://127.0.0.1:9", tmp_path / "t.json").run()
    assert not list(tmp_path.iterdir())
