"""Run a dispatcher against its slow twin on the ranks at hand.

Every rank draws the inputs of all ranks from the same seed, so that each can work out by itself
what it must receive and what must come home. Serves the tests, and checks on a real cluster.
Knows the dispatchers' interface; knows nothing of models.

Shape letters: T tokens, D hidden, K top-k, R ranks, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
from dispatch.permute import permute
from dispatch.reference import ReferenceWorld
from dispatch.route import RoutingTable, route, token_keys
from ep.placement import EMPTY, ExpertPlacement


@dataclass(frozen=True)
class CheckCase:
    """Inputs of all ranks for one layer. Lists hold one entry a rank."""

    xs: list[Tensor]  # [T, D]
    slots: list[Tensor]  # [T, K] int32
    weights: list[Tensor]  # [T, K] fp32
    placement: ExpertPlacement  # one layer

    def rows(self, rank: int, wire: WireFormat) -> Tensor | Fp8Tokens:
        """What this rank hands to `dispatch_start`."""
        x = self.xs[rank]
        return x if wire is WireFormat.MODEL else quantise(x, wire)


def random_placement(
    num_experts: int, num_ranks: int, num_redundant: int, seed: int, generation: int = 0
) -> ExpertPlacement:
    """One layer, slots in random order (the empty ones among them), random experts replicated."""
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, num_experts, num_redundant)
    empty = np.full(-(num_experts + num_redundant) % num_ranks, EMPTY)
    row = rng.permutation(np.concatenate([np.arange(num_experts), extra, empty]))
    return ExpertPlacement(row[None], num_experts, num_ranks, generation)


def make_case(
    config: DispatchConfig,
    placement: ExpertPlacement,
    tokens: list[int],
    seed: int,
    *,
    masked: float = 0.0,
    to_rank: int | None = None,
) -> CheckCase:
    """tokens: T of each rank. masked: share of picks that are -1. to_rank: send every pick to slots
    of this rank (repeats of a slot within a token become masked)."""
    g = torch.Generator().manual_seed(seed)
    experts, top_k = placement.num_logical_experts, config.top_k
    table = RoutingTable.build(placement, 0)
    xs, slots, weights = [], [], []
    for rank, rows in enumerate(tokens):
        xs.append(torch.randn(rows, config.hidden_size, generator=g).to(config.dtype))
        ids = torch.rand(rows, experts, generator=g).argsort(dim=1)[:, :top_k].to(torch.int32)
        if masked:
            ids[torch.rand(ids.shape, generator=g) < masked] = -1
        routed = route(ids, table, token_keys(rows, rank))
        if to_rank is not None:
            held = placement.physical_to_logical[0]
            hosting = [s for s in placement.slots_of(to_rank) if held[s] != EMPTY]
            hosted = torch.tensor(hosting, dtype=torch.int32)
            routed = torch.full((rows, top_k), -1, dtype=torch.int32)
            width = min(top_k, len(hosted))
            start = torch.randint(0, max(len(hosted), 1), (rows, 1), generator=g)
            if width:
                routed[:, :width] = hosted[(torch.arange(width)[None] + start) % len(hosted)]
        slots.append(routed)
        weights.append(torch.rand(rows, top_k, generator=g))
    return CheckCase(xs, slots, weights, placement)


def expert_output(x: Tensor, expert: Tensor) -> Tensor:
    """A stand-in for experts: x [Q, D], expert [Q] logical -> [Q, D] in x's dtype; another result
    for each expert, of each row alone."""
    scale = (expert.to(torch.float32) * 0.37 + 0.5)[:, None]
    return (x.to(torch.float32) * scale + expert[:, None]).to(x.dtype)


def experts_of_received(received: Received, placement: ExpertPlacement, rank: int) -> Tensor:
    """[Q] logical expert of each valid pair in row-major order."""
    first = rank * placement.num_local_experts
    table = torch.from_numpy(placement.physical_to_logical[0].copy())
    valid = received.slots >= 0
    return table[received.slots[valid].to(torch.int64) + first]


def outputs(received: Received, case: CheckCase, rank: int, form: CombineForm) -> Tensor:
    """What the stand-in experts of a rank hand back, as `form` says, by the obvious way: in the
    dtype of the case, rows in FP8 dequantised to it."""
    x, dtype = received.x, case.xs[rank].dtype
    if received.scales is not None:
        x = dequantise(x, received.scales, received.scale_format, dtype)
    rows, ks = (received.slots >= 0).nonzero(as_tuple=True)
    pairs = expert_output(x[rows], experts_of_received(received, case.placement, rank))
    if form is CombineForm.PAIRS:
        return pairs
    total = torch.zeros(x.shape, dtype=torch.float32)
    for pair, (row, k) in enumerate(zip(rows.tolist(), ks.tolist(), strict=True)):
        total[row] += pairs[pair].to(torch.float32) * received.weights[row, k]
    return total.to(dtype)


def run_case(dispatcher: Dispatcher, case: CheckCase, rank: int) -> tuple[Received, Tensor]:
    """One layer through the dispatcher, by the path that a model takes."""
    wire = WireFormat.MODEL if dispatcher.quantises else dispatcher.config.wire
    rows = case.rows(rank, wire)
    handle = dispatcher.dispatch_start(rows, case.slots[rank], case.weights[rank])
    received = dispatcher.dispatch_finish(handle)
    y = outputs(received, case, rank, dispatcher.combine_form)
    if dispatcher.combine_form is CombineForm.PAIRS:
        # Hand the pairs over in the order of the grouped experts, with the way back.
        order = permute(received.slots, received.counts)
        grouped = torch.empty_like(y)
        grouped[order.index[received.slots >= 0]] = y
        dispatcher.combine_start(handle, grouped, order.index)
    else:
        dispatcher.combine_start(handle, y)
    return received, dispatcher.combine_finish(handle)


def expected(
    case: CheckCase, form: CombineForm, wire: WireFormat = WireFormat.MODEL
) -> tuple[list[Received], list[Tensor]]:
    """What each rank must receive, and what must come home, by the slow twin."""
    placement = case.placement
    world = ReferenceWorld(placement.num_ranks, placement.num_local_experts)
    xs = [case.rows(rank, wire) for rank in range(len(case.xs))]
    received, origins = world.dispatch(xs, case.slots, case.weights)
    ys = [outputs(got, case, rank, form) for rank, got in enumerate(received)]
    return received, world.combine(form, ys, received, origins, case.slots, case.weights)


def differences(
    dispatcher: Dispatcher,
    case: CheckCase,
    rank: int,
    tolerance: float = 0.0,
    wanted: tuple[list[Received], list[Tensor]] | None = None,
) -> list[str]:
    """Run one layer and say what differs from the twin (nothing: all is well). Collective.

    tolerance: allowed absolute difference of what comes home; 0 means bit by bit. wanted: what
    `expected` gave, where it is known already.
    """
    wire = dispatcher.config.wire
    want_received, want_home = wanted or expected(case, dispatcher.combine_form, wire)
    received, home = run_case(dispatcher, case, rank)
    found = []
    want = want_received[rank]
    if received.layout is Layout.ROUTED:
        # `local` passes rows through that no expert wants; no other backend sends them.
        keep = (received.slots >= 0).any(1)
        pairs = int((received.slots >= 0).sum())
        if received.num_pairs not in (None, pairs):  # room for pairs is made by it
            found.append(f"received.num_pairs: {received.num_pairs}, not {pairs}")
        if received.scale_format is not want.scale_format:
            found.append(f"received.scale_format: {received.scale_format.value}")
        for name in ("x", "scales", "slots", "weights", "counts"):
            mine, theirs = getattr(received, name), getattr(want, name)
            if mine is None or theirs is None:
                if mine is not theirs:
                    found.append(f"received.{name}: {type(mine).__name__} is not the twin's")
                continue
            if name != "counts":
                mine = mine[keep]
            if mine.dtype != theirs.dtype or not torch.equal(_bytes(mine), _bytes(theirs)):
                found.append(f"received.{name}: {mine.dtype} {list(mine.shape)} is not the twin's")
    target = want_home[rank]
    if home.shape != target.shape or home.dtype != torch.float32:
        found.append(f"home: {home.dtype} {list(home.shape)}, not float32 {list(target.shape)}")
    elif home.numel() and float((home - target).abs().max()) > tolerance:
        found.append(f"home: differs by {float((home - target).abs().max()):.3g}")
    return found


def _bytes(x: Tensor) -> Tensor:
    """x, where it can be compared; float8 as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
