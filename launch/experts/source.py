"""From what was typed to a View: a running job's URL, a recording, a placement file, a dump.

Knows which is which, and how each is read. Knows nothing of what is shown.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ep.load import PHASES
from ep.placement import ExpertPlacement, PlacementError
from ep.recording import ExpertRecording, RecordingError
from launch.experts.http import ExpertsHttp, is_url
from launch.experts.view import FloatArray, IntArray, View
from moeserve.errors import ConfigError, MoeserveError

ALL = "all"
SINCE = ("window", "start")


@dataclass(frozen=True)
class Source:
    """What was typed. phase: prefill, decode or all. array: of several in a dump. placement, ranks,
    redundant: where experts are to live instead. since: of a job, the last steps or all."""

    text: str
    phase: str = ALL
    array: str | None = None
    placement: Path | None = None
    ranks: int | None = None
    redundant: int = 0
    since: str = "window"
    key: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.phase not in (*PHASES, ALL):
            problems.append(f"--phase {self.phase!r}: valid are {', '.join(PHASES)}, {ALL}")
        if self.since not in SINCE:
            problems.append(f"--since {self.since!r}: valid are {', '.join(SINCE)}")
        if self.placement is not None and self.ranks is not None:
            problems.append("--placement and --ranks: give one of them, not both")
        if self.redundant and self.ranks is None:
            problems.append(f"--redundant {self.redundant}: goes with --ranks")
        if problems:
            raise ConfigError(problems)

    @property
    def is_url(self) -> bool:
        return is_url(self.text)

    def read(self) -> View:
        """ConfigError: the file or the flags. MoeserveError: the server."""
        if self.is_url:
            self._refuse("a running job", array=True)
            with ExpertsHttp(self.text, self.key) as http:
                view = job_view(http, self.phase, self.since)
        else:
            with files_problems_told(self.text):
                view = self._file()
        if self.placement is not None:
            return view.placed_as(load_placement(self.placement))
        if self.ranks is not None:
            if self.ranks < 1:
                raise ConfigError([f"--ranks {self.ranks}: must be at least 1"])
            args = (len(view.layers), view.num_experts, self.ranks, self.redundant)
            return view.placed_as(ExpertPlacement.trivial(*args))
        return view

    def _file(self) -> View:
        path = Path(self.text)
        if path.is_dir():
            raise ConfigError([f"{self.text}: is a folder; give a file, or a server's URL"])
        if not path.exists():
            raise ConfigError([f"{self.text}: no such file, and no URL (http://host:port)"])
        if self.since != SINCE[0]:
            raise ConfigError(
                [f"--since {self.since}: {self.text} is no running job; leave it out"]
            )
        match _kind(path):
            case "placement":
                self._refuse("a placement", phase=True, array=True)
                return _of_placement(path)
            case "recording":
                self._refuse("a recording", array=True)
                return recording_view(self.text, ExpertRecording.load(path), self.phase)
        self._refuse("a dump that does not tell phases apart", phase=True)
        return self._dump(path)

    def _refuse(self, what: str, phase: bool = False, array: bool = False) -> None:
        if phase and self.phase != ALL:
            raise ConfigError([f"--phase {self.phase}: {self.text} is {what}; leave it out"])
        if array and self.array is not None:
            raise ConfigError([f"--array {self.array}: {self.text} is {what}; leave it out"])

    def _dump(self, path: Path) -> View:
        from ep.trace import read_trace

        trace = read_trace(path, self.array)
        experts = trace.loads.shape[2]
        return View(
            name=self.text if self.array is None else f"{self.text}:{self.array}",
            kind="trace",
            phase=ALL,
            layers=tuple(int(x) for x in trace.layers),
            num_mtp_layers=0,
            num_experts=experts,
            num_routed=experts,
            history=trace.loads,
            about={"form": trace.source, "steps": len(trace.loads)},
        )


def since_of_jobs(first: Source, second: Source) -> tuple[Source, Source]:
    """Two sources of one command: --since is meant for those that are jobs, if any is."""
    if first.is_url == second.is_url:
        return first, second
    if first.is_url:
        return first, replace(second, since=SINCE[0])
    return replace(first, since=SINCE[0]), second


@contextmanager
def files_problems_told(name: str) -> Iterator[None]:
    """Whatever is wrong with a file becomes a ConfigError of one line."""
    from ep.trace import TraceError

    try:
        yield
    except (TraceError, RecordingError, PlacementError) as error:
        raise ConfigError([" ".join(str(error).split())]) from None
    except OSError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror}"]) from None


def load_placement(path: Path) -> ExpertPlacement:
    """ConfigError if it cannot be had."""
    with files_problems_told(str(path)):
        return ExpertPlacement.load(path)


def job_view(http: ExpertsHttp, phase: str = ALL, since: str = "window") -> View:
    """since window: the last steps, or all where there are none yet."""
    load, placed = http.get("/experts/load"), http.get("/experts/placement")
    try:
        return _job_view(http.url, load, placed, phase, since)
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, MoeserveError):
            raise
        raise MoeserveError(f"{http.url}: what came is no load or placement ({error!r})") from None


def _job_view(
    url: str, load: dict[str, Any], placed: dict[str, Any], phase: str, since: str
) -> View:
    window = load["window"]
    steps = int(window["steps"])
    chosen = window["totals"] if since == "window" and steps else load["totals"]
    table = np.array(placed["physical_to_logical"], np.int64)
    placement = ExpertPlacement(
        table, placed["num_logical_experts"], placed["num_ranks"], placed["generation"]
    )
    shape = (placement.num_layers, placement.num_logical_experts)
    by_phase = [np.array(chosen[name], np.float64).reshape(shape) for name in PHASES]
    traffic = np.array(load["traffic"], np.int64)
    return View(
        name=url,
        kind="job",
        phase=phase,
        layers=tuple(placed["layers"]),
        num_mtp_layers=placed["num_mtp_layers"],
        num_experts=placement.num_logical_experts,
        num_routed=placed["num_routed_experts"],
        history=_of_phase(by_phase, phase)[None],
        placement=placement,
        traffic=traffic if traffic.any() else None,
        expert_bytes=tuple(placed["expert_bytes"]),
        num_groups=placed["num_expert_groups"],
        ranks_per_node=placed["ranks_per_node"],
        picks_per_token=placed["picks_per_token"],
        about={
            "since": "window" if since == "window" and steps else "start",
            "steps": steps if since == "window" else None,
            "tokens": load["tokens"],
        },
    )


def recording_view(name: str, recording: ExpertRecording, phase: str = ALL) -> View:
    info = recording.info
    history = recording.history(None if phase == ALL else phase).astype(np.float64)
    tokens = recording.tokens.sum(axis=0).tolist()
    if not len(history):
        raise ConfigError([f"{name}: an empty recording: no step had tokens"])
    traffic: IntArray = recording.traffic.sum(axis=0)
    return View(
        name=name,
        kind="recording",
        phase=phase,
        layers=info.layers,
        num_mtp_layers=info.num_mtp_layers,
        num_experts=recording.num_experts,
        num_routed=_num_routed(recording),
        history=history,
        placement=recording.placement_of(-1),
        traffic=traffic if traffic.any() else None,
        ranks_per_node=info.ranks_per_node,
        picks_per_token=info.picks_per_token,
        about={
            "steps": int(recording.num_steps.sum()),
            "intervals": recording.num_intervals,
            "seconds": round(float(recording.seconds.sum()), 3),
            "tokens": dict(zip(PHASES, tokens, strict=True)),
        },
        recording=recording,
    )


def _num_routed(recording: ExpertRecording) -> int:
    """Trailing experts that every token chose, in every layer, are pieces of a hosted shared one.
    (MTP layers run for other tokens.)"""
    layers = recording.num_layers - recording.info.num_mtp_layers
    tokens = recording.tokens.sum(axis=1)[:, None]
    experts = recording.num_experts
    if not recording.info.picks_per_token or not tokens.any():
        return experts
    while experts > recording.info.picks_per_token:
        counts = recording.counts[:, :, :layers, experts - 1].sum(axis=1)
        if not (counts == tokens).all():
            break
        experts -= 1
    return experts


def _of_phase(by_phase: list[FloatArray], phase: str) -> FloatArray:
    if phase == ALL:
        return by_phase[0] + by_phase[1]
    return by_phase[PHASES.index(phase)]


def _of_placement(path: Path) -> View:
    placement = ExpertPlacement.load(path)
    experts = placement.num_logical_experts
    return View(
        name=str(path),
        kind="placement",
        phase=ALL,
        layers=tuple(range(placement.num_layers)),
        num_mtp_layers=0,
        num_experts=experts,
        num_routed=experts,
        placement=placement,
    )


def _kind(path: Path) -> str:
    """placement, recording, or dump for everything else: that reader knows what to say."""
    try:
        if path.suffix == ".json":
            held = json.loads(path.read_bytes())
            return "placement" if isinstance(held, dict) and "format" in held else "dump"
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                names = set(archive.namelist())
            if "meta.npy" in names and "physical_to_logical.npy" in names:
                return "placement"
            return "recording" if {"info.npy", "counts.npy"} <= names else "dump"
    except OSError:
        raise
    except Exception:  # a damaged file raises what its bytes look like
        return "dump"
    return "dump"
