"""What every dispatcher must do, whatever it is made of: one list of situations, one table of those
that are put to it. A new backend is one line in `CONTENDERS`.

Knows: the interface, the slow twin. Knows nothing of processes: the caller brings a group. Every
check returns what it found wrong, as text; nothing means that all is well. All are collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dispatch import create_dispatcher
from dispatch.base import (
    CombineForm,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    PeerError,
    Received,
)
from dispatch.route import RoutingTable, route, token_keys
from dispatch.selfcheck import (
    CheckCase,
    differences,
    expected,
    make_case,
    outputs,
    random_placement,
    run_case,
)
from ep.group import EPGroup
from ep.placement import ExpertPlacement

MOST = 12  # tokens of a rank
EXPERTS = 24
PATIENCE = 10.0  # seconds within which a step that fails has ended on every rank


@dataclass(frozen=True)
class Contender:
    """One backend and what it is able to. hidden: at which corners are tried. hidden_sizes, top_ks:
    those of the shapes that it takes. summed_error: of the largest result, in the SUMMED form in
    bfloat16; 0 is bit by bit. hooks: for its constructor."""

    name: str
    ranks: tuple[int, ...] = (2, 4, 8)
    forms: tuple[CombineForm, ...] = (CombineForm.PAIRS, CombineForm.SUMMED)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    hidden: int = 128
    hidden_sizes: tuple[int, ...] = (128, 256, 512, 1024, 1536, 2048, 4096, 5120, 7168)
    top_ks: tuple[int, ...] = tuple(range(1, 12))
    summed_error: float = 0.0
    hooks: dict[str, Any] = field(default_factory=dict)

    def make(self, group: EPGroup, config: DispatchConfig, form: CombineForm) -> Dispatcher:
        return create_dispatcher(
            self.name, group, config, combine_form=form, **self.hooks
        ).dispatcher

    def tolerance(self, trial: Trial, form: CombineForm) -> float:
        """Absolute, of what comes home."""
        if form is CombineForm.PAIRS or not self.summed_error:
            return 0.0
        homes = [home for home in trial.wanted[form][1] if home.numel()]
        largest = max((float(home.abs().max()) for home in homes), default=0.0)
        rounding = 1.0 if trial.config.dtype is torch.bfloat16 else 2**-16
        return self.summed_error * rounding * largest


CONTENDERS = (
    Contender("local", ranks=(1,)),
    Contender("torch"),
    # A sum in bfloat16 of up to 8 ranks' shares: an addition may round by 2**-8 of what it adds.
    Contender("allgather", summed_error=7 * 2**-8),
)


# -- situations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One layer of all ranks, and what must come of it. bound: agreed before, or None."""

    name: str
    config: DispatchConfig
    case: CheckCase
    bound: int | None
    wanted: dict[CombineForm, tuple[list[Received], list[Tensor]]]


# (generator, tokens, experts, top-k) -> ids [tokens, top-k] of logical experts, -1 masked
Choose = Callable[[torch.Generator, int, int, int], Tensor]


def _random(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    return torch.rand(rows, experts, generator=g).argsort(dim=1)[:, :top_k]


def _one_expert(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    ids = torch.full((rows, top_k), -1)
    ids[:, top_k // 2] = experts // 3
    return ids


def _few_experts(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    return _random(g, rows, experts // 3, top_k) * 3


def _skewed(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    """Drawn without return, the i-th expert 1 / i as often as the first."""
    share = 1.0 / torch.arange(1, experts + 1)
    return torch.multinomial(share.expand(max(rows, 1), -1), top_k, generator=g)[:rows]


def _case(
    config: DispatchConfig,
    placement: ExpertPlacement,
    tokens: list[int],
    seed: int,
    choose: Choose,
) -> CheckCase:
    g = torch.Generator().manual_seed(seed)
    table = RoutingTable.build(placement, 0)
    xs, slots, weights = [], [], []
    for rank, rows in enumerate(tokens):
        xs.append(torch.randn(rows, config.hidden_size, generator=g).to(config.dtype))
        ids = choose(g, rows, placement.num_logical_experts, config.top_k)
        slots.append(route(ids.to(torch.int32), table, token_keys(rows, rank)))
        weights.append(torch.rand(rows, config.top_k, generator=g))
    return CheckCase(xs, slots, weights, placement)


def _config(
    placement: ExpertPlacement, hidden: int, top_k: int, dtype: torch.dtype
) -> DispatchConfig:
    return DispatchConfig(hidden, top_k, placement.num_physical_experts, MOST, dtype, True)


def _trial(name: str, config: DispatchConfig, case: CheckCase, bound: int | None = None) -> Trial:
    return Trial(name, config, case, bound, {form: expected(case, form) for form in CombineForm})


def corners(num_ranks: int, hidden: int, dtype: torch.dtype) -> Iterator[Trial]:
    """Every kind of work that a layer may meet, with and without copies and empty slots."""
    some = [(5 * rank + 3) % 7 if rank % 3 != 2 else 0 for rank in range(num_ranks)]
    one = [MOST if rank == num_ranks - 1 else 0 for rank in range(num_ranks)]
    full, none = [MOST] * num_ranks, [0] * num_ranks
    works: list[tuple[str, list[int], Choose | dict[str, Any]]] = [
        ("idle ranks", some, _random),
        ("no tokens at all", none, _random),
        ("as many tokens as may be", full, _random),
        ("one rank has them all", one, _random),
        ("masked picks", some, {"masked": 0.4}),
        ("every pick masked", some, {"masked": 1.1}),
        ("one expert", full, _one_expert),
        ("experts without tokens", some, _few_experts),
        ("skewed", full, _skewed),
        ("every pick on the first rank", some, {"to_rank": 0}),
        ("every pick on the last rank", one, {"to_rank": num_ranks - 1}),
    ]
    for seed, (name, tokens, how) in enumerate(works):
        # Copies: none, some (a slot or two stay empty), as many as experts.
        redundant = (0, 1 + num_ranks // 2, EXPERTS)[seed % 3]
        placement = random_placement(EXPERTS, num_ranks, redundant, seed, generation=seed)
        config = _config(placement, hidden, 4, dtype)
        if isinstance(how, dict):
            case = make_case(config, placement, tokens, seed, **how)
        else:
            case = _case(config, placement, tokens, seed, how)
        for bound in (None, max(tokens), MOST):
            yield _trial(f"{name}, bound {bound}, {dtype}", config, case, bound)


def shapes(
    num_ranks: int, hidden_sizes: tuple[int, ...], top_ks: tuple[int, ...]
) -> Iterator[Trial]:
    """Each hidden size and each top-k at least once, not each with each."""
    for i in range(max(len(hidden_sizes), len(top_ks))):
        hidden, top_k = hidden_sizes[i % len(hidden_sizes)], top_ks[i % len(top_ks)]
        placement = random_placement(EXPERTS, num_ranks, (i % 3) * num_ranks, i)
        tokens = [(3 * rank + i) % 4 for rank in range(num_ranks)]
        config = _config(placement, hidden, top_k, torch.bfloat16)
        case = _case(config, placement, tokens, i, _skewed if i % 2 else _random)
        bound = None if i % 2 else max(tokens)
        yield _trial(f"hidden {hidden}, top-k {top_k}", config, case, bound)


def row_of(contender: Contender, num_ranks: int) -> list[Trial]:
    """Layers of one configuration, for one dispatcher, back to back."""
    row = []
    for seed in range(7):
        placement = random_placement(EXPERTS, num_ranks, num_ranks, seed, generation=seed)
        tokens = [(seed * (rank + 2) + rank) % 5 * (seed != 3) for rank in range(num_ranks)]
        config = _config(placement, contender.hidden, 4, contender.dtypes[0])
        case = _case(config, placement, tokens, seed, _skewed)
        row.append(_trial(f"step {seed}", config, case, (None, max(tokens), MOST)[seed % 3]))
    assert len({trial.config for trial in row}) == 1
    return row


@dataclass(frozen=True)
class Trials:
    """All that one contender is put to, for one number of ranks. Made once, before ranks start."""

    single: list[Trial]
    row: list[Trial]  # of one configuration: back to back through one dispatcher

    @classmethod
    def of(cls, contender: Contender, num_ranks: int) -> Trials:
        single = [
            trial
            for dtype in contender.dtypes
            for trial in corners(num_ranks, contender.hidden, dtype)
        ]
        single += shapes(num_ranks, contender.hidden_sizes, contender.top_ks)
        return cls(single, row_of(contender, num_ranks))


# -- checks -------------------------------------------------------------------------------------


def check_single(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """Each situation through a dispatcher of its own, in each form."""
    found = []
    for trial in trials.single:
        for form in contender.forms:
            d = contender.make(group, trial.config, form)
            d.set_step_bound(trial.bound)
            wrong = differences(
                d, trial.case, group.rank, contender.tolerance(trial, form), trial.wanted[form]
            )
            found += [f"{trial.name}, {form.value}: {what}" for what in wrong]
            sent = d.stats.rows_sent_to_rank
            if len(sent) != group.size or d.stats.calls != 1 or d.stats.bytes_sent < 0:
                found.append(f"{trial.name}, {form.value}: {d.stats}")
            d.close()
    return found


def check_steps(contender: Contender, group: EPGroup, trials: Trials, steps: int) -> list[str]:
    """Layer after layer through one dispatcher, bounds and placements changing; what came home
    stays as it was while the next layers are on their way."""
    form, found = contender.forms[0], []
    d = contender.make(group, trials.row[0].config, form)
    kept: list[tuple[str, Tensor, Tensor, float]] = []
    for step in range(steps):
        trial = trials.row[step % len(trials.row)]
        d.set_step_bound(trial.bound)
        _, home = run_case(d, trial.case, group.rank)
        wanted = trial.wanted[form][1][group.rank]
        kept = [*kept[-2:], (f"step {step}", home, wanted, contender.tolerance(trial, form))]
        for name, mine, right, tolerance in kept:
            if mine.numel() and float((mine - right).abs().max()) > tolerance:
                found.append(f"{name}, seen at {step}")
    if d.stats.calls != steps:
        found.append(f"{d.stats.calls} calls in {steps} steps")
    return found


def check_in_flight(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """A second batch starts, under another placement, before the first has come home."""
    form, rank, found = contender.forms[0], group.rank, []
    d = contender.make(group, trials.row[0].config, form)
    for first, second in zip(trials.row, trials.row[1:], strict=False):
        pair = (first, second)
        d.set_step_bound(MOST)
        handles = [
            d.dispatch_start(t.case.xs[rank], t.case.slots[rank], t.case.weights[rank])
            for t in pair
        ]
        for handle, trial in zip(handles, pair, strict=True):
            received = d.dispatch_finish(handle)
            d.combine_start(handle, outputs(received, trial.case, rank, form))
        for handle, trial in reversed([*zip(handles, pair, strict=True)]):
            home, wanted = d.combine_finish(handle), trial.wanted[form][1][rank]
            tolerance = contender.tolerance(trial, form)
            if home.numel() and float((home - wanted).abs().max()) > tolerance:
                found.append(f"{first.name} and {second.name} in flight")
    return found


def check_refusal(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """One rank's arguments are wrong: all ranks end at that layer, soon; the next one works."""
    trial, found, form = trials.row[1], [], contender.forms[0]
    d, rank, case = contender.make(group, trial.config, form), group.rank, trial.case
    culprit = min(1, group.size - 1)
    for bound in (None, MOST):
        slots = case.slots[rank]
        if rank == culprit:
            slots = torch.full((1, trial.config.top_k), 10**6, dtype=torch.int32)
        x = torch.zeros(slots.shape[0], trial.config.hidden_size, dtype=trial.config.dtype)
        d.set_step_bound(bound)
        began, said = time.monotonic(), "nothing"
        try:
            d.dispatch_finish(d.dispatch_start(x, slots, torch.ones(slots.shape)))
        except DispatchError as error:
            said = f"{'Peer' if isinstance(error, PeerError) else 'mine'}: {error}"
        took = time.monotonic() - began
        named = f"ranks [{culprit}]" if rank != culprit else "slots: 1000000..1000000; valid are"
        if not said.startswith("mine" if rank == culprit else "Peer") or named not in said:
            found.append(f"bound {bound}: {said}")
        if took > PATIENCE:
            found.append(f"bound {bound}: it took {took:.0f} s")
        d.set_step_bound(trial.bound)
        tolerance = contender.tolerance(trial, form)
        found += differences(d, case, rank, tolerance, trial.wanted[form])
    return found


def conform(contender: Contender, group: EPGroup, trials: Trials, steps: int) -> dict[str, Any]:
    """All checks -> what was found wrong by each, and how many situations there were."""
    return {
        "situations": len(trials.single) * len(contender.forms),
        "found": {
            "single": check_single(contender, group, trials),
            "steps": check_steps(contender, group, trials, steps),
            "in flight": check_in_flight(contender, group, trials),
            "refusal": check_refusal(contender, group, trials),
        },
    }
