"""What every dispatcher must do, whatever it is made of: checks of one contender
(dispatch_contenders.py) in a list of situations (dispatch_trials.py).

Knows: the interface, the slow twin. Knows nothing of processes: the caller brings a group. Every
check returns what it found wrong, as text; nothing means that all is well. All are collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from dispatch_contenders import Contender
from dispatch_trials import FEW, Trial, Trials
from torch import Tensor

from dispatch import create_dispatcher
from dispatch.base import (
    CombineForm,
    Dispatcher,
    DispatchError,
    Handle,
    Layout,
    PeerError,
    Received,
    WireFormat,
)
from dispatch.fp8 import dequantise, quantise
from dispatch.selfcheck import CheckCase, differences, expert_output, outputs
from ep.group import EPGroup

PATIENCE = 10.0  # seconds within which a step that fails has ended on every rank


# -- one layer, whatever the layout -------------------------------------------------------------


def start(d: Dispatcher, trial: Trial, rank: int) -> Handle:
    wire = WireFormat.MODEL if d.quantises else trial.config.wire
    case = trial.case
    return d.dispatch_start(case.rows(rank, wire), case.slots[rank], case.weights[rank])


def hand_back(
    d: Dispatcher, handle: Handle, received: Received, case: CheckCase, rank: int
) -> None:
    """The stand-in experts' part. What is not valid stays unread, and comes back as NaN, which
    nobody may read either."""
    if received.layout is Layout.ROUTED:
        d.combine_start(handle, outputs(received, case, rank, d.combine_form))
        return
    x, dtype = received.x, d.config.dtype
    if received.scales is not None:
        x = dequantise(x, received.scales, received.scale_format, dtype)
    held = torch.from_numpy(case.placement.physical_to_logical[0].copy())
    mine = held[list(case.placement.slots_of(rank))]
    y = torch.full(x.shape, torch.nan, dtype=dtype)
    if received.layout is Layout.EXPANDED:
        valid = received.slots[:, 0] >= 0
        rows = expert_output(x[valid], mine[received.slots[valid, 0].to(torch.int64)])
        if d.combine_form is CombineForm.SUMMED:
            rows = (rows.to(torch.float32) * received.weights[valid]).to(dtype)
        y[valid] = rows
    else:
        for slot, rows in enumerate(received.counts.tolist()):
            y[slot, :rows] = expert_output(x[slot, :rows], mine[slot].expand(rows))
    d.combine_start(handle, y)


def layer(d: Dispatcher, trial: Trial, rank: int) -> tuple[Received, Tensor]:
    handle = start(d, trial, rank)
    received = d.dispatch_finish(handle)
    hand_back(d, handle, received, trial.case, rank)
    return received, d.combine_finish(handle)


def wrong_in(
    contender: Contender, d: Dispatcher, trial: Trial, form: CombineForm, rank: int
) -> list[str]:
    """One layer against the twin: rows, slots, weights, counts and what comes home where rows come
    ROUTED, and in the order of the grouped experts; else counts and what comes home, where rows are
    ROUTED in any order also which they are."""
    tolerance, wanted = contender.tolerance(trial, form), trial.wanted[form]
    if contender.layout is Layout.ROUTED and contender.ordered:
        return differences(d, trial.case, rank, tolerance, wanted)
    received, home = layer(d, trial, rank)
    found = [] if received.layout is contender.layout else [f"layout: {received.layout.value}"]
    if not torch.equal(received.counts, wanted[0][rank].counts):
        found.append("received.counts")
    if contender.layout is Layout.ROUTED and rows_of(received) != rows_of(wanted[0][rank]):
        found.append("received: other rows")
    return found + differs(home, wanted[1][rank], tolerance)


def rows_of(received: Received) -> list[list[float]]:
    """x, slots and weights of each row that somebody wants, in an order of their own."""
    keep = (received.slots >= 0).any(1)
    parts = [part[keep].float() for part in (received.slots, received.weights, received.x)]
    return sorted(torch.cat(parts, 1).tolist())


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


def check_by_name(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """The registry makes it, and no other."""
    name, trial = contender.kind.name, trials.row[0]
    if not contender.registered:
        return []
    try:
        choice = create_dispatcher(name, group, trial.config, **contender.hooks)
    except DispatchError as error:
        return [str(error)]
    choice.dispatcher.close()
    return [] if type(choice.dispatcher) is contender.kind else [f"{name}: {choice.describe()}"]


def check_steps(contender: Contender, group: EPGroup, trials: Trials, steps: int) -> list[str]:
    """Layer after layer through one dispatcher, bounds and placements changing; what came home
    stays as it was while the next layers are on their way."""
    form, found = contender.forms[0], []
    d = contender.make(group, trials.row[0].config, form)
    tolerances = [contender.tolerance(trial, form) for trial in trials.row]
    kept: list[tuple[str, Tensor, Tensor, float]] = []
    for step in range(steps):
        at = step % len(trials.row)
        trial = trials.row[at]
        d.set_step_bound(trial.bound)
        _, home = layer(d, trial, group.rank)
        wanted = trial.wanted[form][1][group.rank]
        kept = [*kept[-2:], (f"step {step}", home, wanted, tolerances[at])]
        for name, mine, right, tolerance in kept:
            found += [f"{name}, seen at {step}: {w}" for w in differs(mine, right, tolerance)]
    if d.stats.calls != steps:
        found.append(f"{d.stats.calls} calls in {steps} steps")
    d.close()
    return found


def check_in_flight(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """A second batch starts, under another placement, before the first has come home; one more than
    the dispatcher says it can bear is refused, and harms nothing."""
    form, rank, found = contender.forms[0], group.rank, []
    d = contender.make(group, trials.row[0].config, form)
    if d.max_in_flight == 1:
        return ["max_in_flight=1: two batches cannot overlap"]
    for first, second in zip(trials.row, trials.row[1:], strict=False):
        pair = (first, second)
        d.set_step_bound(FEW)
        handles = [start(d, trial, rank) for trial in pair]
        if d.max_in_flight == 2:
            try:
                start(d, first, rank)
                found.append(f"{first.name}: a third batch was taken")
            except DispatchError as error:
                if "2" not in str(error):
                    found.append(f"{first.name}: {error}")
        for handle, trial in zip(handles, pair, strict=True):
            hand_back(d, handle, d.dispatch_finish(handle), trial.case, rank)
        for handle, trial in reversed([*zip(handles, pair, strict=True)]):
            home, wanted = d.combine_finish(handle), trial.wanted[form][1][rank]
            wrong = differs(home, wanted, contender.tolerance(trial, form))
            found += [f"{first.name} and {second.name} in flight: {what}" for what in wrong]
    d.close()
    return found


def check_refusal(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """One rank's arguments are wrong: all ranks end at that layer, soon; the next one works."""
    if not contender.together:
        return []
    trial, found, form = trials.row[1], [], contender.forms[0]
    d, rank, case = contender.make(group, trial.config, form), group.rank, trial.case
    culprit = min(1, group.size - 1)
    for bound in (None, FEW):
        slots = case.slots[rank]
        if rank == culprit:
            slots = torch.full((1, trial.config.top_k), 10**6, dtype=torch.int32)
        x: Any = torch.zeros(slots.shape[0], trial.config.hidden_size, dtype=trial.config.dtype)
        if trial.config.wire is not WireFormat.MODEL and not d.quantises:
            x = quantise(x, trial.config.wire)
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
    d.close()
    return found


def check_arguments(contender: Contender, group: EPGroup, trials: Trials) -> list[str]:
    """What no backend takes, given by all ranks alike: each refuses by itself, all in the same
    words, and the next layer works."""
    trial, found, form = trials.row[1], [], contender.forms[0]
    d, rank, config = contender.make(group, trial.config, form), group.rank, trial.config
    wire = WireFormat.MODEL if d.quantises else config.wire
    plain = torch.zeros(FEW, config.hidden_size, dtype=config.dtype)
    rows: Any = plain if wire is WireFormat.MODEL else quantise(plain, wire)
    weights = torch.ones(FEW, config.top_k)
    slots = torch.full((FEW, config.top_k), -1, dtype=torch.int32)
    slots[:, 0] = 0
    twice = slots.clone()
    twice[-1, -1] = 0
    bad: list[tuple[str, tuple[Any, ...]]] = [
        ("x: NoneType; must be", (None, slots, weights)),
        ("slots: NoneType; must be a tensor", (rows, None, weights)),
        ("weights: list; must be a tensor", (rows, slots, [1.0])),
        (f"x: {FEW} tokens; the agreed bound is {FEW - 1}", (rows, slots, weights)),
    ]
    if config.top_k > 1:
        bad.append((f"slots: token {FEW - 1} has slot 0 twice", (rows, twice, weights)))
    for said, arguments in bad:
        d.set_step_bound(FEW - 1 if "bound" in said else FEW)
        found += _refuses(said, lambda a=arguments: d.dispatch_start(*a))  # type: ignore[misc]
    for bound in (-1, 1.5, True):
        asked = f"set_step_bound: max_tokens={bound}"
        found += _refuses(asked, lambda b=bound: d.set_step_bound(b))  # type: ignore[misc]
    d.set_step_bound(trial.bound)
    handle = start(d, trial, rank)
    received = d.dispatch_finish(handle)
    whole = torch.zeros(received.x.shape, dtype=torch.int64)
    found += _refuses("y: torch.int64; must be a floating", lambda: d.combine_start(handle, whole))
    hand_back(d, handle, received, trial.case, rank)
    wanted = trial.wanted[form][1][rank]
    found += differs(d.combine_finish(handle), wanted, contender.tolerance(trial, form))
    d.close()
    return found


def _refuses(said: str, call: Callable[[], Any]) -> list[str]:
    """What is wrong with how it refuses."""
    try:
        call()
    except DispatchError as error:
        good = str(error).startswith(said) and not isinstance(error, PeerError)
        return [] if good else [f"{said!r}, not {error}"]
    return [f"{said!r}: was taken"]


def conform(
    contender: Contender, group: EPGroup, trials: Trials, steps: int, all_checks: bool = True
) -> tuple[int, dict[str, list[str]]]:
    """How many situations there were, and what was found wrong by each check; all of them, or the
    one of many steps back to back."""
    found = {"steps": check_steps(contender, group, trials, steps)}
    if not all_checks:
        return len(trials.row), found
    for check in (check_by_name, check_single, check_in_flight, check_refusal, check_arguments):
        found[check.__name__] = check(contender, group, trials)
    return len(trials.single) * len(contender.forms), found
