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
    Handle,
    Layout,
    PeerError,
    Received,
)
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.route import RoutingTable, route, token_keys
from dispatch.selfcheck import (
    CheckCase,
    differences,
    expected,
    expert_output,
    make_case,
    outputs,
    random_placement,
)
from ep.group import EPGroup
from ep.placement import ExpertPlacement

MOST = 12  # tokens of a rank
EXPERTS = 24
PATIENCE = 10.0  # seconds within which a step that fails has ended on every rank


@dataclass(frozen=True)
class Contender:
    """One backend and what it is able to. The first of forms serves where one will do.

    hidden: at which corners are tried. hidden_sizes, top_ks: of the shapes that it takes.
    summed_error: of the largest result, in the SUMMED form in bfloat16; 0 is bit by bit. together:
    when one rank refuses, all end at that layer (else peers wait for the backend's own timeout,
    which is not tried). kind: its class, where its name alone would not make it. hooks: for its
    constructor.
    """

    name: str
    ranks: tuple[int, ...] = (2, 4, 8)
    forms: tuple[CombineForm, ...] = (CombineForm.PAIRS, CombineForm.SUMMED)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    hidden: int = 128
    hidden_sizes: tuple[int, ...] = (128, 256, 512, 1024, 1536, 2048, 4096, 5120, 7168)
    top_ks: tuple[int, ...] = tuple(range(1, 12))
    summed_error: float = 0.0
    layout: Layout = Layout.ROUTED
    deterministic: bool = True
    together: bool = True
    kind: Callable[..., Dispatcher] | None = None  # where its name alone would not make it
    hooks: dict[str, Any] = field(default_factory=dict)

    def make(self, group: EPGroup, config: DispatchConfig, form: CombineForm) -> Dispatcher:
        if self.kind is not None:
            return self.kind(group, config, combine_form=form, **self.hooks)
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
    # FP8 within: 2**-4 of a value, and a bfloat16 sum.
    Contender(
        "deepep_ll (emulated)",
        (2, 4, 8),
        (CombineForm.SUMMED,),
        (torch.bfloat16,),
        hidden=2048,
        hidden_sizes=(2048, 2560, 3072, 4096, 5120, 6144, 7168),
        summed_error=2**-4 + 2**-8,
        layout=Layout.MASKED,
        deterministic=False,
        together=False,
        kind=EmulatedLowLatencyDispatcher,
    ),
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
    contender: Contender, placement: ExpertPlacement, hidden: int, top_k: int, dtype: torch.dtype
) -> DispatchConfig:
    slots = placement.num_physical_experts
    return DispatchConfig(hidden, top_k, slots, MOST, dtype, contender.deterministic)


def _trial(name: str, config: DispatchConfig, case: CheckCase, bound: int | None = None) -> Trial:
    return Trial(name, config, case, bound, {form: expected(case, form) for form in CombineForm})


def corners(contender: Contender, num_ranks: int, dtype: torch.dtype) -> Iterator[Trial]:
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
        config = _config(contender, placement, contender.hidden, 4, dtype)
        if isinstance(how, dict):
            case = make_case(config, placement, tokens, seed, **how)
        else:
            case = _case(config, placement, tokens, seed, how)
        for bound in (None, max(tokens), MOST):
            yield _trial(f"{name}, bound {bound}, {dtype}", config, case, bound)


def shapes(contender: Contender, num_ranks: int) -> Iterator[Trial]:
    """Each hidden size and each top-k at least once, not each with each."""
    hidden_sizes, top_ks = contender.hidden_sizes, contender.top_ks
    for i in range(max(len(hidden_sizes), len(top_ks))):
        hidden, top_k = hidden_sizes[i % len(hidden_sizes)], top_ks[i % len(top_ks)]
        placement = random_placement(EXPERTS, num_ranks, (i % 3) * num_ranks, i)
        tokens = [(3 * rank + i) % 4 for rank in range(num_ranks)]
        config = _config(contender, placement, hidden, top_k, torch.bfloat16)
        case = _case(config, placement, tokens, i, _skewed if i % 2 else _random)
        bound = None if i % 2 else max(tokens)
        yield _trial(f"hidden {hidden}, top-k {top_k}", config, case, bound)


def row_of(contender: Contender, num_ranks: int) -> list[Trial]:
    """Layers of one configuration, for one dispatcher, back to back."""
    row = []
    for seed in range(7):
        placement = random_placement(EXPERTS, num_ranks, num_ranks, seed, generation=seed)
        tokens = [(seed * (rank + 2) + rank) % 5 * (seed != 3) for rank in range(num_ranks)]
        config = _config(contender, placement, contender.hidden, 4, contender.dtypes[0])
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
            trial for dtype in contender.dtypes for trial in corners(contender, num_ranks, dtype)
        ]
        single += shapes(contender, num_ranks)
        return cls(single, row_of(contender, num_ranks))


# -- one layer, whatever the layout -------------------------------------------------------------


def hand_back(
    d: Dispatcher, handle: Handle, received: Received, case: CheckCase, rank: int
) -> None:
    """The stand-in experts' part. In MASKED results what is not valid stays unread, and comes back
    as NaN, which nobody may read either."""
    if received.layout is not Layout.MASKED:
        d.combine_start(handle, outputs(received, case, rank, d.combine_form))
        return
    held = case.placement.physical_to_logical[0][case.placement.slots_of(rank)].tolist()
    y = torch.full(received.x.shape, torch.nan, dtype=received.x.dtype)
    for slot, (expert, rows) in enumerate(zip(held, received.counts.tolist(), strict=True)):
        ids = torch.full((rows,), expert)
        y[slot, :rows] = expert_output(received.x[slot, :rows], ids)
    d.combine_start(handle, y)


def layer(d: Dispatcher, case: CheckCase, rank: int) -> tuple[Received, Tensor]:
    handle = d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
    received = d.dispatch_finish(handle)
    hand_back(d, handle, received, case, rank)
    return received, d.combine_finish(handle)


def wrong_in(
    contender: Contender, d: Dispatcher, trial: Trial, form: CombineForm, rank: int
) -> list[str]:
    """One layer against the twin: rows, slots, weights, counts and what comes home where rows come
    ROUTED, and in the order of the grouped experts; else counts and what comes home."""
    tolerance, wanted = contender.tolerance(trial, form), trial.wanted[form]
    if contender.layout is Layout.ROUTED:
        return differences(d, trial.case, rank, tolerance, wanted)
    received, home = layer(d, trial.case, rank)
    found = [] if torch.equal(received.counts, wanted[0][rank].counts) else ["received.counts"]
    return found + differs(home, wanted[1][rank], tolerance)


def differs(home: Tensor, wanted: Tensor, tolerance: float) -> list[str]:
    if home.shape != wanted.shape or home.dtype != torch.float32:
        return [f"home: {home.dtype} {list(home.shape)}, not float32 {list(wanted.shape)}"]
    error = float((home - wanted).abs().max()) if home.numel() else 0.0
    return [] if error <= tolerance else [f"home: differs by {error:.3g}, not {tolerance:.3g}"]


# -- checks -------------------------------------------------------------------------------------


def check_single(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """Each situation through a dispatcher of its own, in each form."""
    found = []
    for trial in trials.single:
        for form in contender.forms:
            d = contender.make(group, trial.config, form)
            d.set_step_bound(trial.bound)
            wrong = wrong_in(contender, d, trial, form, group.rank)
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
        _, home = layer(d, trial.case, group.rank)
        wanted = trial.wanted[form][1][group.rank]
        kept = [*kept[-2:], (f"step {step}", home, wanted, contender.tolerance(trial, form))]
        for name, mine, right, tolerance in kept:
            found += [f"{name}, seen at {step}: {w}" for w in differs(mine, right, tolerance)]
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
            hand_back(d, handle, d.dispatch_finish(handle), trial.case, rank)
        for handle, trial in reversed([*zip(handles, pair, strict=True)]):
            home, wanted = d.combine_finish(handle), trial.wanted[form][1][rank]
            wrong = differs(home, wanted, contender.tolerance(trial, form))
            found += [f"{first.name} and {second.name} in flight: {what}" for what in wrong]
    return found


def check_refusal(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """One rank's arguments are wrong: all ranks end at that layer, soon; the next one works."""
    if not contender.together:
        return []
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
        found += wrong_in(contender, d, trial, form, rank)
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
