"""`moeserve bench speculate`: decode speed with drafts against none, in pairs, and as predicted.

Each row is a drafter at a depth and a batch size: the same prompts go through the same engine
without drafts and with them, one right after the other, in turns of which is first. Both give the
same tokens, or the command fails. Knows the way from flags to results; what is measured:
`speculate_drive`, `speculate_figures`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.bench.room import with_room
from launch.bench.speculate_flags import Asked, Cell, SpeculateFlags
from launch.env import RankEnv
from launch.settings import Given
from moeserve.errors import ConfigError, MoeserveError
from moeserve.speculate.setting import AUTO, MAX_DEPTH

if TYPE_CHECKING:
    from ep.group import EPGroup
    from launch.bench.speculate_drive import Arm
    from moeserve.config import ServeConfig
    from moeserve.engine import Engine


class OtherTokens(MoeserveError):
    """Drafts changed what the model says."""


@dataclass(frozen=True)
class SpeculateBench:
    """The command. as_json: one object on stdout, and nothing else there, instead of the table."""

    flags: SpeculateFlags
    as_json: bool = False

    def run(self, given: Given) -> None:
        """ConfigError for flags; on ranks OtherTokens."""
        env = RankEnv.read(os.environ)
        problems: list[str] = []
        asked = self.flags.check(problems)
        try:
            config = _with_method(given, asked).resolve(
                needs_text=True,
                own=problems,
                on_rank=env is not None,
                ranks_here=None if env is None else env.local_size,
            )
            assert asked is not None, "resolve raises where there are problems"
            _check(config, asked)
        except ConfigError as error:
            raise ConfigError([_in_users_words(problem) for problem in error.problems]) from None
        if env is None and config.parallel.ep > 1:
            from launch.job import run_job
            from launch.serve import end_job

            failure = run_job(config.parallel.ep, sys.argv[1:], endless=False)
            end_job(failure, config.parallel.ep)
        from launch.rank import RankProcess, check_size, run_alone

        config = _with_room(check_size(config, env or RankEnv.alone()), asked)
        if env is None:
            run_alone(config, lambda group: self._on_rank(config, group, asked))
        else:
            rank = RankProcess(config, env, given.in_users_words)
            rank.run(lambda job: self._on_rank(config, job.group, asked))

    def _on_rank(self, config: ServeConfig, group: EPGroup, asked: Asked) -> None:
        import torch

        from launch.bench.machine import describe_machine
        from launch.bench.speculate_prompts import read_prompts
        from launch.bench.speculate_show import Result, as_json, show
        from launch.rank import build_and_show

        prompts = read_prompts(
            config.model.checkpoint, asked.prompts, asked.prompt_length, asked.seed
        )
        own = {"quiet": config.engine.quiet or self.as_json, "ahead": "off"}  # drafters come later
        engine = build_and_show(
            config.model_copy(update={"engine": config.engine.model_copy(update=own)}), group
        )
        limit = engine.scheduler.limits.max_model_len
        if asked.prompt_length + asked.output_length > limit:
            raise ConfigError(
                [
                    f"--prompt-length + --output-length = "
                    f"{asked.prompt_length + asked.output_length}: the longest sequence here is "
                    f"{limit} tokens"
                ]
            )
        rows = _measure(engine, config, asked, prompts)
        engine.close()
        if group.rank:
            return
        result = Result(
            asked,
            rows,
            config.model.checkpoint.resolve().name,
            config.parallel.ep,
            config.speculate.rule,
            prompts.source,
            engine.info,
            describe_machine(),
            torch.get_num_threads(),
        )
        if self.as_json:
            from launch.bench.screen import only_json

            only_json(as_json(result))
        else:
            show(result)
        if asked.plot is not None:
            from launch.bench.speculate_picture import draw

            draw(result, asked.plot)
            if not self.as_json:
                print(f"picture: {asked.plot}", flush=True)
        if other := [row for row in rows if row["same_tokens"] is False]:
            told = ", ".join(f"{r['drafter']} k={r['depth']} batch {r['batch']}" for r in other)
            raise OtherTokens(f"tokens with drafts differ from those without: {told}")


def _measure(
    engine: Engine, config: ServeConfig, asked: Asked, prompts: Any
) -> list[dict[str, Any]]:
    """A row of figures a cell. Collective."""
    from launch.bench.speculate_drive import Arm, Driver, Sampling
    from launch.bench.speculate_figures import Pair, row
    from launch.bench.steps import StepProgress

    driver = Driver(engine, Sampling(asked.temperature, asked.seed, asked.output_length))
    off = Arm()
    cells = asked.cells()
    total = len(cells) * (asked.warmup + asked.repeat)
    progress = StepProgress(
        shown=engine.group.rank == 0 and not config.engine.quiet, stages=True, unit=" pairs"
    )
    rows, done = [], 0
    try:
        for cell in cells:
            where = f"{cell.drafter}, k {cell.depth}, batch {cell.batch}"
            on = _arm(engine, config, cell, cells)
            pairs = []
            for number in range(-asked.warmup, asked.repeat):
                progress(where, done, total)
                texts = prompts.take(number, cell.batch)
                runs = {arm: driver.run(arm, texts) for arm in ((off, on), (on, off))[number % 2]}
                if number >= 0:
                    pairs.append(Pair(runs[off], runs[on]))
                done += 1
            assert on.speculator is not None
            drafter = on.speculator.drafter
            nodes = drafter.max_nodes if drafter.max_nodes > drafter.max_depth else 0
            found = row(cell, pairs, config.speculate.rule == "same", nodes)
            if cell.wish.name == AUTO:
                found["drafter"] = drafter.name  # what it became
            rows.append({"asked": cell.text, **found})
            progress(where, done, total)
    finally:
        progress.close()
    engine.use_speculator(None)
    return rows


def _arm(engine: Engine, config: ServeConfig, cell: Cell, cells: Sequence[Cell]) -> Arm:
    """A drafter of its own for each cell: what it has learned of another batch is not its own."""
    from launch.bench.speculate_drive import Arm
    from moeserve.speculate.build import open_speculator, plan_speculation

    problems: list[str] = []
    model = engine.runner.model.config
    plan = plan_speculation(_of(config, cell, cells), model, problems)
    if plan is None:
        raise ConfigError(problems)
    scheduler = engine.scheduler
    return Arm(open_speculator(plan, engine.runner, scheduler, engine.group.rank))


def _of(config: ServeConfig, cell: Cell, cells: Sequence[Cell]) -> ServeConfig:
    """The settings of a cell. nodes: of drafters that make trees, where there is one."""
    change: dict[str, object] = {"method": cell.text}
    if not cell.has_trees and any(other.has_trees for other in cells):
        change["nodes"] = None
    section = config.speculate.model_copy(update=change)
    return config.model_copy(update={"speculate": section})


def _with_method(given: Given, asked: Asked | None) -> Given:
    """The engine is built with the drafter that drafts most: what depends on that (limits of
    dispatching, rows of a step) then fits all."""
    if asked is None:
        return given
    section = given.flags.get("speculate", {})
    trees = "nodes" in section

    def drafts(cell: Cell) -> tuple[bool, int, bool]:
        # Medusa has as many as it has heads, which is not known yet.
        depth = cell.wish.depth or MAX_DEPTH
        return trees and cell.has_trees, depth, cell.wish.name != "medusa"

    section = section | {"method": max(asked.cells(), key=drafts).text}
    flags = {**given.flags, "speculate": section}
    return replace(
        given, flags=flags, without=tuple(x for x in given.without if x != "speculate.method")
    )


def _check(config: ServeConfig, asked: Asked) -> None:
    """Every drafter, before weights are read and ranks are started."""
    from moeserve.folder import read_model
    from moeserve.speculate.build import plan_speculation

    model, _ = read_model(config.model.checkpoint)
    assert model is not None, "resolve refuses such folders"
    problems: list[str] = []
    if config.engine.ahead == "on":
        problems.append("engine.ahead='on': drafts are not made ahead; leave it out")
    cells = asked.cells()
    for cell in {cell.text: cell for cell in cells}.values():
        plan_speculation(_of(config, cell, cells), model, problems)
    tokens, most = asked.prompt_length + asked.output_length, model.max_position_embeddings
    if tokens > most:
        problems.append(
            f"--prompt-length + --output-length = {tokens}: this model has {most} positions"
        )
    if problems:
        raise ConfigError(problems)


def _in_users_words(problem: str) -> str:
    """The method is not given as a setting here."""
    return problem.replace("speculate.method=", "--speculate ")


def _with_room(config: ServeConfig, asked: Asked) -> ServeConfig:
    """Grow what was not set, so that the largest batch runs at once with all its drafts."""
    here = -(-max(asked.batches) // config.parallel.ep)
    tokens = asked.prompt_length + asked.output_length
    drafts = max(MAX_DEPTH, config.speculate.nodes or 0)
    room = here * (tokens + drafts + config.cache.block_size)
    return with_room(
        config,
        {
            ("schedule", "max_num_sequences"): here,
            ("schedule", "token_budget"): here * (1 + drafts),
            ("schedule", "max_model_len"): tokens,
            ("cache", "kv_tokens"): room,
        },
    )
