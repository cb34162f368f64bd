"""Is what a backend does what the slow twin says? Asked before anything is timed.

Two looks: a small layer row by row against `ReferenceWorld`, and the whole layer by what comes home
for each of this rank's tokens, worked out from its own tokens alone.

Knows: the dispatchers' interface, the stand-in experts of `dispatch.selfcheck`. Knows nothing of
time.

Shape letters: T tokens, D hidden, K top-k, N received rows, e local slots, M rows a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.base import (
    CombineForm,
    DispatchConfig,
    Dispatcher,
    Fp8Tokens,
    Layout,
    Received,
    WireFormat,
)
from dispatch.fp8 import dequantise, quantise
from dispatch.selfcheck import CheckCase, expected, expert_output
from ep.placement import ExpertPlacement

SMALL = 4  # tokens of a rank in the twin's layer
# Relative, of a token's result: each of R bfloat16 additions may round by 2**-8; a backend that
# makes FP8 of rows by itself rounds each value by 2**-4.
_ADDITION, _OWN_FP8 = 2**-8, 2**-4


def for_wire(d: Dispatcher, x: Tensor) -> Tensor | Fp8Tokens:
    """x as `dispatch_start` wants it."""
    wire = d.config.wire
    return x if wire is WireFormat.MODEL or d.quantises else quantise(x, wire)


def seen(config: DispatchConfig, x: Tensor) -> Tensor:
    """x as experts see it: what FP8 leaves of it."""
    if config.wire is WireFormat.MODEL:
        return x
    rows = quantise(x, config.wire)
    return dequantise(rows.values, rows.scales, rows.scale_format, config.dtype)


def stand_in(received: Received, placement: ExpertPlacement, rank: int, d: Dispatcher) -> Tensor:
    """What the stand-in experts of this rank hand back, for any layout, as `combine_form` says."""
    x, form = received.x, d.combine_form
    if received.scales is not None:
        x = dequantise(x, received.scales, received.scale_format, d.config.dtype)
    held = torch.from_numpy(placement.physical_to_logical[0][placement.slots_of(rank)].copy())
    held = held.to(x.device)
    if received.layout is Layout.MASKED:
        return _masked(x, received, held, form)
    slots = received.slots
    if received.layout is Layout.EXPANDED:
        y = torch.zeros_like(x)
        rows = (slots[:, 0] >= 0).nonzero()[:, 0]
        out = expert_output(x[rows], held[slots[rows, 0].to(torch.int64)])
        if form is CombineForm.SUMMED:
            out = (out.to(torch.float32) * received.weights[rows, :1]).to(x.dtype)
        y[rows] = out
        return y
    if form is CombineForm.PAIRS:
        valid = slots >= 0
        rows = valid.nonzero()[:, 0]
        return expert_output(x[rows], held[slots[valid].to(torch.int64)])
    return _sum_picks(x, slots, received.weights, held).to(x.dtype)


def wanted(
    x: Tensor, slots: Tensor, weights: Tensor, placement: ExpertPlacement, form: CombineForm
) -> Tensor:
    """What must come home for tokens x [T, D], as experts see them -> [T, D] fp32: summed in
    routing order, or rank by rank."""
    held = torch.from_numpy(placement.physical_to_logical[0].copy()).to(x.device)
    if form is CombineForm.PAIRS:
        return _sum_picks(x, slots, weights, held)
    owner = slots.div(placement.num_local_experts, rounding_mode="floor")
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(placement.num_ranks):
        part = _sum_picks(x, torch.where(owner == rank, slots, -1), weights, held)
        total += part.to(x.dtype).to(torch.float32)
    return total


def run_layer(
    d: Dispatcher, x: Tensor, slots: Tensor, weights: Tensor, placement: ExpertPlacement, rank: int
) -> tuple[Received, Tensor, Tensor]:
    """received, what the stand-in experts handed back, home [T, D] fp32. Collective."""
    handle = d.dispatch_start(for_wire(d, x), slots, weights)
    received = d.dispatch_finish(handle)
    y = stand_in(received, placement, rank, d)
    d.combine_start(handle, y)
    return received, y, d.combine_finish(handle)


def wrong_in_small(d: Dispatcher, case: CheckCase, rank: int, device: torch.device) -> list[str]:
    """One small layer against the twin (nothing: all is well). Collective."""
    twins = CheckCase(
        [seen(d.config, x) for x in case.xs], case.slots, case.weights, case.placement
    )
    want_received, want_home = expected(twins, d.combine_form)
    x, slots = case.xs[rank].to(device), case.slots[rank].to(device)
    weights = case.weights[rank].to(device)
    received, _, home = run_layer(d, x, slots, weights, case.placement, rank)
    return _wrong_rows(d, received, want_received[rank]) + wrong_home(
        d, home, want_home[rank], case.placement.num_ranks
    )


def wrong_home(d: Dispatcher, home: Tensor, want: Tensor, num_ranks: int) -> list[str]:
    """home against want, [T, D] fp32: bit by bit in the PAIRS form, else within rounding."""
    if home.shape != want.shape or home.dtype != torch.float32:
        return [f"home: {home.dtype} {list(home.shape)}, not float32 {list(want.shape)}"]
    if not want.numel():
        return []
    want = want.to(home.device)
    if d.combine_form is CombineForm.PAIRS and not rounds_by_itself(d):
        return [] if torch.equal(home, want) else [f"home: differs by {_largest(home, want):.3g}"]
    allowed = num_ranks * _ADDITION + (_OWN_FP8 if rounds_by_itself(d) else 0.0)
    error = float(((home - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)).max())
    return [] if error <= allowed else [f"home: a token is off by {error:.2%}, not {allowed:.2%}"]


def rounds_by_itself(d: Dispatcher) -> bool:
    """Rows are rounded within the backend, whatever the wire says."""
    return d.quantises or bool(getattr(d, "use_fp8", False))


def _wrong_rows(d: Dispatcher, received: Received, want: Received) -> list[str]:
    if received.layout is not Layout.ROUTED:
        same = torch.equal(received.counts.cpu(), want.counts)
        return [] if same else [f"received.counts: {received.counts.tolist()}"]
    x = received.x
    if received.scales is not None:
        x = dequantise(x, received.scales, received.scale_format, d.config.dtype)
    # `local` passes rows through that no expert wants; no other backend sends them.
    keep = (received.slots >= 0).any(1)
    found = [] if torch.equal(received.counts.cpu(), want.counts) else ["received.counts"]
    got = [x[keep], received.slots[keep], received.weights[keep]]
    right = [want.x, want.slots, want.weights]
    for name, mine, theirs in zip(("x", "slots", "weights"), got, right, strict=True):
        if mine.dtype != theirs.dtype:
            found.append(f"received.{name}: {mine.dtype}, not {theirs.dtype}")
    if _in_any_order(d, got) != _in_any_order(d, right):
        found.append("received: x, slots or weights of rows are not the twin's")
    return found


def _in_any_order(d: Dispatcher, parts: list[Tensor]) -> list[list[float]]:
    """Rows as numbers, sorted: not every backend keeps the order in which tokens left."""
    _, slots, weights = parts
    counted = [slots, weights] if rounds_by_itself(d) else [slots, weights, parts[0]]
    rows: list[list[float]] = torch.cat([p.to(torch.float64).cpu() for p in counted], 1).tolist()
    return sorted(rows)


def _masked(x: Tensor, received: Received, held: Tensor, form: CombineForm) -> Tensor:
    y = torch.zeros_like(x)
    for slot, rows in enumerate(received.counts.tolist()):
        expert = held[slot].expand(rows)
        out = expert_output(x[slot, :rows], expert)
        if form is CombineForm.SUMMED:
            out = (out.to(torch.float32) * received.weights[slot, :rows, None]).to(x.dtype)
        y[slot, :rows] = out
    return y


def _sum_picks(x: Tensor, slots: Tensor, weights: Tensor, held: Tensor) -> Tensor:
    """[T, D] fp32: over k in order, weight * expert output, masked picks left out."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for k in range(slots.shape[1]):
        rows = (slots[:, k] >= 0).nonzero()[:, 0]
        out = expert_output(x[rows], held[slots[rows, k].to(torch.int64)])
        total[rows] += out.to(torch.float32) * weights[rows, k, None]
    return total


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
