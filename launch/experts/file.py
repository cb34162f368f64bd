"""The file of a recording: whether it can be written, and filling it from an engine in hand.

Knows paths and the engine's step. Knows nothing of servers or of what a person sees.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch.output import unwritable
from moeserve.terminal import say

if TYPE_CHECKING:
    from moeserve.engine import Engine

_NUMBER = 1  # of the one recording that an engine makes here


def output_problems(option: str, path: Path) -> list[str]:
    """Why a recording could not be saved there, before anything is recorded."""
    problems = []
    if path.suffix != ".npz":
        problems.append(f"{option} {str(path)!r}: must end in .npz")
    problems += unwritable(option, path)
    return problems


def start_recording(engine: Engine) -> None:
    """On every rank, between two steps."""
    from moeserve.load_desk import INTERVAL_STEPS

    engine.start_recording(_NUMBER, INTERVAL_STEPS)


def save_recording(engine: Engine, path: Path) -> None:
    """End it and have rank 0 write the file. Collective: every rank calls it, idle."""
    from ep.group import gather_objects
    from moeserve.collector import RecordingCollector, experts_of, recording_info
    from moeserve.load_desk import INTERVAL_STEPS

    engine.stop_recording(_NUMBER)
    engine.step()  # in which the ranks agree to end it
    everywhere = gather_objects(engine.group, engine.take_load_reports())
    if engine.group.rank:
        return
    info = recording_info(engine.info, engine.group.size, INTERVAL_STEPS, time.time())
    collector = RecordingCollector(_NUMBER, info, experts_of(engine.info))
    for reports in everywhere:
        for report in reports:
            collector.heard(report)
    assert collector.ended
    collector.result().save(path)
    say(f"expert load: {path}")
