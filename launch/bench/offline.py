"""`moeserve bench offline`: decode and prefill speed of a checkpoint, and where a step's time goes.

Drives the engine itself, without HTTP. With --ep N, N ranks do the same in lockstep and rank 0
reports. Knows the engine's step and its parts; what is measured is in each row.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.bench.machine import cpu_name
from launch.bench.room import with_room
from launch.bench.screen import only_json, wide_console
from launch.env import RankEnv, usable_cores
from launch.experts.file import output_problems, save_recording, start_recording
from launch.output import unwritable
from launch.settings import Given
from launch.trace import file_problems, save_trace, start_trace
from moeserve.errors import ConfigError
from moeserve.terminal import counted, say

if TYPE_CHECKING:
    from ep.group import EPGroup
    from moeserve.config import ServeConfig
    from moeserve.engine import Engine

FORMAT = "moeserve bench offline 1"
PARTS = (
    "attention",
    "gate",
    "dispatch",
    "experts",
    "combine",
    "other",
    "sampling",
    "lockstep",
    "drafting",
    "host",
)
BESIDE_MODEL = (
    "sampling",
    "lockstep",
    "drafting",
    "host",
)  # what the engine does before and after a forward


@dataclass(frozen=True)
class Row:
    """One measurement, over all ranks. parts: milliseconds of a step on rank 0; lockstep: waiting
    for the other ranks' votes."""

    what: str  # decode | prefill
    batch: int
    prompt_length: int
    output_length: int
    tokens_per_second: float
    step_ms: float
    steps: int
    parts: dict[str, float]
    runs: list[float]  # tokens/s of each; what is shown is the median run


@dataclass(frozen=True)
class Bench:
    """The command's flags. batch: sequences at once over all ranks, comma-separated."""

    batch: str
    prompt_length: int
    output_length: int
    prefill_length: int
    repeat: int
    record_experts: Path | None = None  # a file for the expert load of all runs
    json: bool = False  # the result on stdout, and nothing else there
    out: Path | None = None  # a file for the result
    trace: Path | None = None  # a file for the spans of one more run, of the largest batch

    def run(self, given: Given) -> None:
        env = RankEnv.read(os.environ)
        problems: list[str] = []
        batches = self._batches(problems)
        if self.record_experts is not None:
            problems += output_problems("--record-experts", self.record_experts)
        if self.trace is not None:
            problems += file_problems("--trace", self.trace)
        problems += unwritable("--out", self.out)
        here = None if env is None else env.local_size
        config = given.resolve(own=problems, on_rank=env is not None, ranks_here=here)
        self._check_lengths(config)
        if env is None and config.parallel.ep > 1:
            from launch.job import run_job
            from launch.serve import end_job

            failure = run_job(config.parallel.ep, sys.argv[1:], endless=False)
            end_job(failure, config.parallel.ep)
        from launch.rank import RankProcess, check_size, run_alone

        config = check_size(config, env or RankEnv.alone())
        config = self._with_room(config, max(batches))
        if env is None:
            run_alone(config, lambda group: self._measure(config, group, batches))
        else:
            rank = RankProcess(config, env, given.in_users_words)
            rank.run(lambda job: self._measure(config, job.group, batches))

    def _batches(self, problems: list[str]) -> list[int]:
        sizes = [int(x) if x.strip().isdecimal() else 0 for x in self.batch.split(",")]
        if min(sizes) < 1:
            problems.append(f"--batch {self.batch!r}: must be numbers >= 1, such as 1,8,32")
        return sizes

    def _check_lengths(self, config: ServeConfig) -> None:
        """What the model cannot hold is refused before its weights are read."""
        from moeserve.folder import read_model

        model, _ = read_model(config.model.checkpoint)
        assert model is not None, "resolve refuses such folders"
        for flags, tokens in (
            ("--prompt-length + --output-length", self.prompt_length + self.output_length),
            ("--prefill-length + 1", self.prefill_length + 1),
        ):
            most = model.max_position_embeddings
            if tokens > most:
                raise ConfigError([f"{flags} = {tokens}: this model has {most} positions"])

    def _with_room(self, config: ServeConfig, batch: int) -> ServeConfig:
        """Grow what was not set, so that the largest batch runs at once; refuse what is small."""
        here = -(-batch // config.parallel.ep)
        tokens = self.prompt_length + self.output_length
        block = config.cache.block_size
        room = here * (tokens + block) + self.prefill_length + block
        needs = {
            ("schedule", "max_num_sequences"): here,
            ("schedule", "token_budget"): here,
            ("schedule", "max_model_len"): max(tokens, self.prefill_length + 1),
            ("cache", "kv_tokens"): room,
        }
        return with_room(config, needs)

    @property
    def settings(self) -> dict[str, object]:
        """What two results must have in common to be compared."""
        return {
            "batch": self.batch,
            "prompt_length": self.prompt_length,
            "output_length": self.output_length,
            "prefill_length": self.prefill_length,
        }

    # ---- on a rank ----------------------------------------------------------------------------

    def _measure(self, config: ServeConfig, group: EPGroup, batches: Sequence[int]) -> None:
        import torch

        from launch.rank import build_and_show
        from moeserve.wire_trace import MAX_TRACE_STEPS

        engine = build_and_show(config, group)
        limit = engine.scheduler.limits.max_model_len
        if max(self.prompt_length + self.output_length, self.prefill_length + 1) > limit:
            raise ConfigError(
                [f"the longest sequence here is {limit} tokens: choose shorter lengths"]
            )
        timed = _TimedEngine(engine)
        timed.run(2 * group.size, min(self.prompt_length, 16), 4)  # first touches are not counted
        if self.record_experts is not None:
            start_recording(engine)
        rows = []
        for batch in batches:
            runs = [
                timed.run(batch, self.prompt_length, self.output_length) for _ in range(self.repeat)
            ]
            rows.append(_median("decode", batch, self.prompt_length, self.output_length, runs))
        if self.prefill_length:
            runs = [timed.run(group.size, self.prefill_length, 1) for _ in range(self.repeat)]
            rows.append(_median("prefill", group.size, self.prefill_length, 1, runs))
        if self.record_experts is not None:
            save_recording(engine, self.record_experts)
        if self.trace is not None:  # its steps are in no figure
            start_trace(engine, MAX_TRACE_STEPS)
            timed.run(max(batches), self.prompt_length, self.output_length)
            save_trace(engine, self.trace, "bench offline")
        engine.close()
        if group.rank == 0:
            threads = torch.get_num_threads()
            show(rows, config, engine.info, threads, self.out, self.settings, self.json)


@dataclass(frozen=True)
class _Run:
    tokens_per_second: float
    step_seconds: float
    steps: int
    parts: dict[str, float]  # seconds, all steps


class _TimedEngine:
    """Steps an engine through a batch and keeps the times of its parts."""

    def __init__(self, engine: Engine) -> None:
        assert engine.recorder is not None
        self._engine, self._seconds = engine, engine.recorder.seconds
        self._random = random.Random(engine.group.rank)
        self._number = 0
        engine.runner.forward = _timed(engine.runner.forward, self._seconds, "forward")  # type: ignore[method-assign]

    def run(self, batch: int, prompt_length: int, output_length: int) -> _Run:
        """One batch from prompts to the last token, dealt over the ranks; collective.

        output_length 1 counts prompt tokens of all steps (prefill); else output tokens of the steps
        in which every sequence of rank 0 decodes.
        """
        from ep.group import gather_objects

        engine, group = self._engine, self._engine.group
        engine.reset_prefix_cache()
        mine = range(group.rank, batch, group.size)
        waiting = {self._submit(prompt_length, output_length) for _ in mine}
        ended = False
        clock = time.perf_counter()
        times, tokens, parts = [], [], []
        counted = []  # whether every sequence of this rank decodes in the step
        while True:
            before = dict(self._seconds)
            counted.append(not waiting and not ended)
            outputs = engine.step()
            now = time.perf_counter()
            if engine.idle and not outputs:
                counted.pop()
                break
            times.append(now - clock)
            clock = now
            tokens.append(sum(len(o.token_ids) for o in outputs))
            parts.append({k: v - before.get(k, 0.0) for k, v in self._seconds.items()})
            waiting -= {o.request_id for o in outputs}
            ended = ended or any(o.finish_reason is not None for o in outputs)
        everywhere = gather_objects(group, tokens)
        prefill = output_length == 1
        first = gather_objects(group, counted)[0]  # rank 0 holds as many sequences as any
        chosen = [i for i in range(len(times)) if prefill or first[i]]
        seconds = sum(times[i] for i in chosen)
        made = sum(t[i] for t in everywhere for i in chosen)
        if prefill:
            made = batch * prompt_length
        whole = {k: sum(parts[i].get(k, 0.0) for i in chosen) for k in self._seconds}
        forward = whole.pop("forward", 0.0)
        inside = sum(spent for part, spent in whole.items() if part not in BESIDE_MODEL)
        whole["other"] = whole.get("other", 0.0) + max(forward - inside, 0.0)  # calling the model
        beside = sum(whole.get(part, 0.0) for part in ("sampling", "lockstep", "drafting"))
        whole["host"] = max(seconds - forward - beside, 0.0)
        return _Run(made / seconds, seconds / len(chosen), len(chosen), whole)

    def _submit(self, prompt_length: int, output_length: int) -> str:
        from moeserve.request import Request, SamplingParams

        self._number += 1
        name = f"bench-{self._engine.group.rank}-{self._number}"
        top = self._engine.scheduler.limits.vocab_size
        assert top is not None, "build_engine knows the vocabulary"
        sampling = SamplingParams(temperature=0.0, max_tokens=output_length, ignore_eos=True)
        prompt = tuple(self._random.randrange(top) for _ in range(prompt_length))
        self._engine.add_request(
            Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
        )
        return name


def _timed(call: Any, seconds: dict[str, float], name: str) -> Any:
    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return timed


def _median(what: str, batch: int, prompt_length: int, output_length: int, runs: list[_Run]) -> Row:
    middle = sorted(runs, key=lambda r: r.tokens_per_second)[len(runs) // 2]
    parts = {p: middle.parts.get(p, 0.0) / middle.steps * 1e3 for p in PARTS}
    return Row(
        what,
        batch,
        prompt_length,
        output_length,
        middle.tokens_per_second,
        middle.step_seconds * 1e3,
        middle.steps,
        parts,
        [run.tokens_per_second for run in runs],
    )


def show(
    rows: list[Row],
    config: ServeConfig,
    info: dict[str, object],
    threads: int,
    file: Path | None = None,
    settings: Mapping[str, object] | None = None,
    as_json: bool = False,
) -> None:
    """On stdout: with as_json one JSON object and nothing else; without, the tables, and where
    stdout is no terminal one line of JSON. The same object goes into the file, if there is one."""
    gpus = config.parallel.ep
    nodes = max(1, gpus // int(str(info.get("ranks_per_node", gpus))))
    gpu = "CPU rank" if info.get("device", "cpu") == "cpu" else "GPU"
    name = config.model.checkpoint.resolve().name
    result = {
        "format": FORMAT,
        "checkpoint": name,
        "settings": dict(settings or {}) | {"checkpoint": name},
        "nodes": nodes,
        "gpus": gpus,
        "gpus_are": f"{gpu}s",
        "ep": config.parallel.ep,
        "threads": threads,
        "cores": usable_cores(),
        "cpu": cpu_name(),
        "info": {k: v for k, v in info.items() if k not in ("notes", "kv_plan")},
        "rows": [
            asdict(row)
            | {
                "tokens_per_second_per_node": row.tokens_per_second / nodes,
                "tokens_per_second_per_gpu": row.tokens_per_second / gpus,
            }
            for row in rows
        ],
    }
    if not as_json:
        threaded = counted(threads, "thread")
        title = f"{name}: {info['dtype']}, ep {gpus}, {threaded} a rank"
        _show_tables(rows, title, nodes, gpus, gpu)
    if file is not None:
        file.write_text(json.dumps(result, indent=1, default=str) + "\n")
        say(f"written: {file}")
    if as_json or not sys.stdout.isatty():  # nobody reads it on a terminal: --out FILE keeps it
        only_json(result)


def _show_tables(rows: list[Row], title: str, nodes: int, gpus: int, gpu: str) -> None:
    from rich.table import Table

    table = Table(title=title)
    for column in (
        *("what", "batch", "tokens", "tokens/s"),
        *(f"a node (of {nodes})", f"a {gpu} (of {gpus})", "ms a step"),
    ):
        table.add_column(column, justify="left" if column == "what" else "right")
    parts = Table(title="ms of a step on rank 0, by part")
    parts.add_column("part")
    for row in rows:
        lengths = f"{row.prompt_length}+{row.output_length}"
        speeds = (f"{row.tokens_per_second / n:.1f}" for n in (1, nodes, gpus))
        table.add_row(row.what, str(row.batch), lengths, *speeds, f"{row.step_ms:.2f}")
        parts.add_column(f"{row.what} {row.batch}", justify="right")
    for part in PARTS:
        parts.add_row(part, *(f"{row.parts[part]:.2f}" for row in rows))
    console = wide_console()
    console.print(table)
    console.print(parts)
