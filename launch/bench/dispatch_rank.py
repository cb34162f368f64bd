"""`bench dispatch` on one rank: opens what was asked for, has it checked, then timed; a row each.

Knows the order of things and what becomes of a refusal. Knows nothing of how rows are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from dispatch import choose_dispatcher, parse_dispatch, probe_phases
from dispatch.base import CombineForm, DispatchConfig, Dispatcher, DispatchError, WireFormat
from dispatch.choice import PHASES, CannotRun, Choice
from dispatch.deepep import ll_token_step
from ep.group import EPGroup, gather_objects
from ep.peer_loss import is_lost_peer
from launch.bench.dispatch_check import SMALL, run_layer, seen, wanted, wrong_home, wrong_in_small
from launch.bench.dispatch_flags import Asked, Cell, Contender
from launch.bench.dispatch_refused import FAILED
from launch.bench.dispatch_time import LayerRunner, PlainExchange, Sent, time_steps
from launch.bench.dispatch_work import DTYPE, LeastBytes, Work, read_loads
from launch.bench.figures import Spread, paired_ratio
from launch.bench.ranks import Place
from moeserve.errors import MoeserveError, one_line
from moeserve.terminal import counted

_MEMORY_SHARE = 0.5  # of what is free on the machine, for all ranks' results in flight


class WrongResult(MoeserveError):
    """A backend's results are not those of the slow twin: its times are worth nothing."""


@dataclass(frozen=True)
class Measured:
    """All that came of it, on rank 0. rows: as JSON, one for each cell and contender."""

    rows: list[dict[str, Any]]
    loads: str  # what was drawn, in words

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["ok"]]

    @property
    def refused(self) -> list[dict[str, Any]]:
        """Rows without times, each with a reason."""
        return [row for row in self.rows if not row["ok"]]


def measure(asked: Asked, place: Place, tell: Callable[[str, int, int], None]) -> Measured:
    """Every cell that this rank takes part in; WrongResult on every rank of it alike. tell: what is
    done where, steps done, steps in all."""
    loads, told = read_loads(asked.skew, asked.experts, asked.seed)
    rows: list[dict[str, Any]] = []
    steps = asked.warmup + asked.steps
    for number, cell in enumerate(asked.cells):
        group = place.groups.get(cell.ranks)
        if group is not None:
            work = Work.draw(asked, cell, group.rank, loads)

            def told_of(what: str, done: int, before: int = number * steps) -> None:
                tell(what, before + done, len(asked.cells) * steps)

            rows += _CellRun(asked, cell, group, work, place.device).run(told_of)
        _wait_for_all(place.group)
    return Measured(rows, told)


class _CellRun:
    """One size, all contenders."""

    def __init__(
        self, asked: Asked, cell: Cell, group: EPGroup, work: Work, device: torch.device
    ) -> None:
        self.asked, self.cell, self.group = asked, cell, group
        self.work, self.device = work, device
        self._least: dict[tuple[str, str], LeastBytes] = {}

    def run(self, tell: Callable[[str, int], None]) -> list[dict[str, Any]]:
        opened: dict[Contender, Dispatcher] = {}
        refused: dict[Contender, str] = {}
        where = _name(self.cell)
        for contender in self.asked.contenders:
            tell(f"checking {contender.backend}, {counted(self.cell.tokens, 'token')}", 0)
            answer = self._open(contender)
            if isinstance(answer, str):
                refused[contender] = answer
            else:
                opened[contender] = answer
        runners = {c: LayerRunner(d, self.group, self.work, self.device) for c, d in opened.items()}
        plain = {}
        if self.group.size > 1:
            plain = {
                kind: PlainExchange(self.group, self._least_of(*kind), self.device)
                for kind in dict.fromkeys((c.wire, c.form) for c in opened)
            }
        sent = time_steps(
            runners, plain, self.asked.steps, self.asked.warmup, lambda n: tell(where, n)
        )
        slowest = {kind: exchange.times.slowest(self.group) for kind, exchange in plain.items()}
        rows = []
        for contender in self.asked.contenders:
            row = self._row(contender)
            if contender in refused:
                rows.append(row | {"ok": False, "reason": refused[contender]})
                continue
            least = self._least_of(contender.wire, contender.form)
            times = runners[contender].times.slowest(self.group)
            row |= {"ok": True, "reason": "", "notes": list(opened[contender].notes)}
            row |= _spreads(times)
            row["bytes"] = _bytes(gather_objects(self.group, sent[contender]), least)
            beside = slowest.get((contender.wire, contender.form))
            row |= _against(times.both, row["bytes"], None if beside is None else beside.both)
            rows.append(row)
            opened[contender].close()
        return rows

    def _row(self, contender: Contender) -> dict[str, Any]:
        return {
            "ranks": self.cell.ranks,
            "tokens": self.cell.tokens,
            "hidden": self.cell.hidden,
            "backend": contender.backend,
            "wire": contender.wire,
            "form": contender.form,
            "emulated": contender.emulated,
            "slots": self.work.placement.num_physical_experts,
            "busiest": self.work.busiest,
        }

    def _least_of(self, wire: str, form: str) -> LeastBytes:
        kind = (wire, form)
        if kind not in self._least:
            self._least[kind] = LeastBytes.of(self.work, WireFormat(wire), CombineForm(form))
        return self._least[kind]

    def _open(self, contender: Contender) -> Dispatcher | str:
        """A dispatcher whose results were found right, or why there is none; the same answer on
        every rank. WrongResult if they are not."""
        form = CombineForm(contender.form)
        step = ll_token_step(self.group.size)  # buffers are made as a job makes them
        config = DispatchConfig(
            hidden_size=self.cell.hidden,
            top_k=self.asked.top_k,
            num_physical_experts=self.work.placement.num_physical_experts,
            max_tokens_per_rank=-(-self.cell.tokens // step) * step,
            dtype=DTYPE,
            deterministic=form is CombineForm.PAIRS,
            wire=WireFormat(contender.wire),
        )
        d, found = None, []
        try:
            choice = self._choose(contender, config)
            problem = self._memory_problem(choice)
            if problem is None:
                d = choice.open(self.group, combine_form=form)
                if d.combine_form is form:
                    d.set_step_bound(self.cell.tokens)
                    found = self._wrong(d)
                else:
                    problem = f"results come home {d.combine_form.value} only"
        except CannotRun as error:
            problem = "; ".join(
                dict.fromkeys(w for r in error.refusals.values() for w in r.values())
            )
        except DispatchError as error:  # of what all ranks have alike
            problem = str(error)
        except Exception as error:  # a library may raise anything where it is not at home
            if is_lost_peer(error):
                raise
            problem = f"{FAILED}{one_line(error)}"
        everyone = gather_objects(self.group, (problem, found))
        wrong = [f"rank {rank}: {what}" for rank, (_, said) in enumerate(everyone) for what in said]
        if wrong:
            c = contender
            raise WrongResult(
                f"bench dispatch: {c.backend}, wire {c.wire}, form {c.form}, {_name(self.cell)}: "
                f"not what the slow twin gives; {'; '.join(wrong[:4])}"
            )
        problems = list(dict.fromkeys(said for said, _ in everyone if said is not None))
        if problems or d is None:
            if d is not None:
                d.close()
            return "; ".join(problems)
        return d

    def _wrong(self, d: Dispatcher) -> list[str]:
        """A small layer row by row, then the whole one by what comes home."""
        work, rank = self.work, self.group.rank
        found = wrong_in_small(d, work.small_case(SMALL), rank, self.device)
        x, slots = work.x.to(self.device), work.slots[rank].to(self.device)
        weights = work.weights.to(self.device)
        _, _, home = run_layer(d, x, slots, weights, work.placement, rank)
        want = wanted(seen(d.config, x), slots, weights, work.placement, d.combine_form)
        return found + wrong_home(d, home, want, self.group.size)

    def _choose(self, contender: Contender, config: DispatchConfig) -> Choice:
        """As a job does: all ranks say first what they can run. CannotRun on all alike."""
        configs = dict.fromkeys(PHASES, config)
        everyone = gather_objects(self.group, probe_phases(self.group, configs))
        wish = parse_dispatch(contender.backend, contender.emulated)
        return choose_dispatcher(wish, everyone, configs)

    def _memory_problem(self, choice: Choice) -> str | None:
        """Ranks share a machine's memory: what cannot fit is not tried. The same on every rank."""
        if self.device.type != "cpu":
            return None
        need = choice.plan(self.group).total * self.group.ranks_per_node
        free = psutil.virtual_memory().available * _MEMORY_SHARE
        said = f"needs {need / 1e9:.1f} GB of this machine; {free / 1e9:.1f} GB may be used"
        problems = gather_objects(self.group, said if need > free else None)
        return next((problem for problem in problems if problem is not None), None)


def _spreads(times: Any) -> dict[str, Any]:
    parts = {"dispatch": times.there, "combine": times.back, "both": times.both}
    return {
        f"{name}_ms": Spread.of([1e3 * s for s in seconds]).as_json()
        for name, seconds in parts.items()
    }


def _bytes(sent: Sequence[Sent], least: LeastBytes) -> dict[str, Any]:
    """Of all ranks together in one layer: sent, ideal, their ratio; there, back, both."""
    out: dict[str, Any] = {}
    really = {"dispatch": sum(s.there for s in sent), "combine": sum(s.back for s in sent)}
    ideal = {"dispatch": sum(map(sum, least.there)), "combine": sum(map(sum, least.back))}
    for name in ("dispatch", "combine"):
        out[name] = {"sent": really[name], "ideal": ideal[name]}
    out["both"] = {"sent": sum(really.values()), "ideal": sum(ideal.values())}
    for part in out.values():
        part["ratio"] = part["sent"] / part["ideal"] if part["ideal"] else None
    return out


def _against(
    both: list[float], counted: dict[str, Any], plain: list[float] | None
) -> dict[str, Any]:
    """Beside the plain exchange: how many times its time; all ranks' bytes a second."""
    seconds, whole = Spread.of(both).median, counted["both"]
    out: dict[str, Any] = {"gb_per_s": whole["sent"] / seconds / 1e9}
    if plain is None:
        return out | {"plain_ms": None, "times_plain": None, "plain_gb_per_s": None}
    usual = Spread.of([1e3 * s for s in plain])
    return out | {
        "plain_ms": usual.as_json(),
        "plain_gb_per_s": whole["ideal"] / usual.median / 1e6,
        "times_plain": paired_ratio(both, plain),
    }


def _name(cell: Cell) -> str:
    ranks, tokens = counted(cell.ranks, "rank"), counted(cell.tokens, "token")
    return f"{ranks}, {tokens} a rank, hidden {cell.hidden}"


def _wait_for_all(group: EPGroup) -> None:
    if group.size > 1:
        torch.distributed.barrier(group=group.cpu_group)
