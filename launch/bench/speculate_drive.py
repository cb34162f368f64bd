"""Runs with drafts and without in one engine: drafters are opened beside it and put in by turns.

Without drafts the engine is what it is where `--speculate` is off: no drafter, no columns in the
vote, nothing grown ahead. Knows the engine's parts; nothing of flags or of what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep.group import gather_objects
from launch.bench.speculate_figures import Run, Tokens
from moeserve.request import Request, SamplingParams
from moeserve.speculate.setting import MAX_DEPTH

if TYPE_CHECKING:
    from moeserve.engine import Engine
    from moeserve.speculate.speculator import Speculator


@dataclass(eq=False)
class Arm:
    """A way to run the engine: with this speculator, or with none."""

    speculator: Speculator | None = None


@dataclass(frozen=True)
class Sampling:
    temperature: float
    seed: int
    output_length: int

    def of(self, number: int) -> SamplingParams:
        """Of prompt `number`: the same draws with drafts and without."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed + number,
            max_tokens=self.output_length,
            ignore_eos=True,
        )


class Driver:
    """Steps one engine through batches. Collective: every rank makes the same calls."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._number = 0

    def run(self, arm: Arm, prompts: Sequence[tuple[int, ...]]) -> Run:
        """One batch, dealt over the ranks."""
        engine, group = self._engine, self._engine.group
        engine.use_speculator(arm.speculator)
        engine.reset_prefix_cache()
        self._number += 1
        texts: Tokens = {}
        waiting: set[str] = set()
        for i in range(group.rank, len(prompts), group.size):
            name = f"speculate-{self._number}-{i}"
            request = Request(
                request_id=name, prompt_token_ids=prompts[i], sampling=self._sampling.of(i)
            )
            engine.add_request(request)
            waiting.add(name)
            texts[name] = ()
        before = _Totals.of(arm.speculator)
        steps = self._steps(arm, waiting, texts)
        after = _Totals.of(arm.speculator)
        mine = (
            [step.counts for step in steps],
            [step.tokens for step in steps],
            after.minus(before),
            {name.rpartition("-")[2]: tokens for name, tokens in texts.items()},  # by prompt
        )
        everyone = gather_objects(group, mine)
        chosen = [i for i in range(len(steps)) if all(counts[i] for counts, _, _, _ in everyone)]
        assert chosen, "every sequence decodes in the step behind the last prompt"
        totals = [totals for _, _, totals, _ in everyone]
        depths = [0] * (MAX_DEPTH + 1)
        for i in chosen:
            depths[steps[i].depth] += 1
        return Run(
            tokens=sum(tokens[i] for _, tokens, _, _ in everyone for i in chosen),
            seconds=sum(steps[i].seconds for i in chosen),
            steps=len(chosen),
            slots=len(chosen) * len(prompts),
            drafting=sum(steps[i].drafting for i in chosen),
            rounds=sum(steps[i].rounds for i in chosen),
            depths=tuple(depths),
            to_end=sum(step.seconds for step in steps[chosen[0] :]),
            drafted=_sum([t.drafted for t in totals]),
            accepted=_sum([t.accepted for t in totals]),
            runs=sum(t.runs for t in totals),
            texts={k: v for _, _, _, part in everyone for k, v in part.items()},
        )

    def _steps(self, arm: Arm, waiting: set[str], texts: Tokens) -> list[_Step]:
        """Until no rank has work."""
        engine, speculator = self._engine, arm.speculator
        found: list[_Step] = []
        ended = False
        clock = time.perf_counter()
        while True:
            counts = not waiting and not ended
            rounds = 0 if speculator is None else speculator.num_rounds
            outputs = engine.step()
            now = time.perf_counter()
            if engine.idle and not outputs:
                return found
            step = _Step(counts, now - clock, sum(len(o.token_ids) for o in outputs))
            if speculator is not None:
                step.drafting = speculator.last_seconds
                step.rounds = speculator.num_rounds - rounds
                step.depth = speculator.depth
            found.append(step)
            clock = now
            for output in outputs:
                texts[output.request_id] += output.token_ids
                waiting.discard(output.request_id)
                ended = ended or output.finish_reason is not None


@dataclass
class _Step:
    """counts: every sequence of this rank decodes in it. depth: of the drafts made at its end."""

    counts: bool
    seconds: float
    tokens: int
    drafting: float = 0.0
    rounds: int = 0
    depth: int = 0


@dataclass(frozen=True)
class _Totals:
    """Of a drafter on this rank since its start."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    runs: int

    @classmethod
    def of(cls, speculator: Speculator | None) -> _Totals:
        if speculator is None:
            return cls((), (), 0)
        told = speculator.acceptance
        return cls(tuple(told.drafted.tolist()), tuple(told.accepted.tolist()), told.num_runs)

    def minus(self, other: _Totals) -> _Totals:
        return _Totals(
            tuple(a - b for a, b in zip(self.drafted, other.drafted, strict=True)),
            tuple(a - b for a, b in zip(self.accepted, other.accepted, strict=True)),
            self.runs - other.runs,
        )


def _sum(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
