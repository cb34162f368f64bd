"""What is put to dispatchers: one list of situations, each a layer of all ranks with the answer.

Knows: routing, placements, the slow twin. Knows nothing of dispatchers or processes: all of it is
made once, before ranks start, and is the same whoever makes it.

Shape letters: T tokens, D hidden, K top-k, R ranks, E routed experts, n pieces of the shared one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dispatch.base import CombineForm, DispatchConfig, Received, WireFormat
from dispatch.route import RoutingTable, route, token_keys
from dispatch.selfcheck import CheckCase, expected, random_placement
from ep.placement import EMPTY, ExpertPlacement

MOST = 12  # tokens of a rank
FEW = 4  # the same in the layers that are run a thousand times
EXPERTS = 24
_TRACE = Path(__file__).parent / "data" / "expert-load" / "dsv3_counts.npz"
_PHASE = "decode_in2000out100"


@dataclass(frozen=True)
class Shapes:
    """What a contender's layers are made of; equal ones share their trials. hidden: at which
    corners are tried; hidden_sizes and top_ks: all that it takes. experts: routed ones; there are
    up to that many copies besides."""

    dtypes: tuple[torch.dtype, ...]
    hidden: int
    hidden_sizes: tuple[int, ...]
    top_ks: tuple[int, ...]
    deterministic: bool
    wire: WireFormat = WireFormat.MODEL
    experts: int = EXPERTS

    def config(
        self,
        placement: ExpertPlacement,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        most: int = MOST,
    ) -> DispatchConfig:
        slots = placement.num_physical_experts
        return DispatchConfig(hidden, top_k, slots, most, dtype, self.deterministic, self.wire)


@dataclass(frozen=True)
class Trial:
    """One layer of all ranks. bound: agreed before, or None. wanted: what each rank receives, and
    what comes home, where rows are rounded as the wire says."""

    name: str
    config: DispatchConfig
    case: CheckCase
    bound: int | None
    wanted: dict[CombineForm, tuple[list[Received], list[Tensor]]]

    @classmethod
    def of(
        cls, name: str, config: DispatchConfig, case: CheckCase, bound: int | None = None
    ) -> Trial:
        wanted = {form: expected(case, form, config.wire) for form in CombineForm}
        return cls(name, config, case, bound, wanted)


# (generator, tokens, experts, top-k) -> ids [tokens, top-k] of logical experts, -1 masked
Choose = Callable[[torch.Generator, int, int, int], Tensor]


def _random(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    return torch.rand(rows, experts, generator=g).argsort(dim=1)[:, :top_k]


def _masked(share: float) -> Choose:
    def choose(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
        ids = _random(g, rows, experts, top_k)
        return torch.where(torch.rand(ids.shape, generator=g) < share, -1, ids)

    return choose


def _one_expert(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    ids = torch.full((rows, top_k), -1)
    ids[:, top_k // 2] = experts // 3
    return ids


def _few_experts(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    return _random(g, rows, experts // 3, top_k) * 3


def _skewed(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
    """Drawn without return, the i-th expert 1 / i as often as the first."""
    return _drawn(g, rows, top_k, 1.0 / torch.arange(1, experts + 1))


def _traced(layer: int) -> Choose:
    """As experts of a recorded layer were picked."""

    def choose(g: torch.Generator, rows: int, experts: int, top_k: int) -> Tensor:
        return _drawn(g, rows, top_k, torch.from_numpy(_trace()[layer, :experts]))

    return choose


def _drawn(g: torch.Generator, rows: int, top_k: int, share: Tensor) -> Tensor:
    return torch.multinomial(share.expand(max(rows, 1), -1), top_k, generator=g)[:rows]


@cache
def _trace() -> np.ndarray:
    """[58 layers, 256 experts] counts, of decode."""
    with np.load(_TRACE) as file:
        return file[_PHASE].astype(np.float64)


def case_of(
    config: DispatchConfig,
    placement: ExpertPlacement,
    tokens: list[int],
    seed: int,
    choose: Choose,
    pieces: int = 0,
    to_rank: int | None = None,
) -> CheckCase:
    """tokens: T of each rank. pieces: how many of the experts, the last ones, are of the shared
    expert: every token picks them, last, with weight 1. to_rank: every pick to slots of this rank,
    in turn, each once a token."""
    g = torch.Generator().manual_seed(seed)
    table = RoutingTable.build(placement, 0)
    routed, top_k = placement.num_logical_experts - pieces, config.top_k - pieces
    xs, slots, weights = [], [], []
    for rank, rows in enumerate(tokens):
        xs.append(torch.randn(rows, config.hidden_size, generator=g).to(config.dtype))
        shared = torch.arange(routed, routed + pieces).expand(rows, -1)
        ids = torch.cat((choose(g, rows, routed, top_k), shared), 1)
        picks = route(ids.to(torch.int32), table, token_keys(rows, rank))
        if to_rank is not None:
            picks = _all_to(placement, to_rank, rows, config.top_k)
        slots.append(picks)
        weights.append(
            torch.cat((torch.rand(rows, top_k, generator=g), torch.ones(shared.shape)), 1)
        )
    return CheckCase(xs, slots, weights, placement)


def _all_to(placement: ExpertPlacement, rank: int, rows: int, top_k: int) -> Tensor:
    held = placement.physical_to_logical[0]
    hosting = [slot for slot in placement.slots_of(rank) if held[slot] != EMPTY]
    hosted = torch.tensor(hosting, dtype=torch.int32)
    picks = torch.full((rows, top_k), -1, dtype=torch.int32)
    width = min(top_k, len(hosted))
    if width:
        turn = torch.arange(rows)[:, None] + torch.arange(width)
        picks[:, :width] = hosted[turn % len(hosted)]
    return picks


# -- the list -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One kind of work, whatever the shapes."""

    name: str
    tokens: list[int]  # of each rank
    choose: Choose = _random
    pieces: int = 0
    to_rank: int | None = None


def works(num_ranks: int) -> list[Work]:
    some = [(5 * rank + 3) % 7 if rank % 3 != 2 else 0 for rank in range(num_ranks)]
    one = [MOST if rank == num_ranks - 1 else 0 for rank in range(num_ranks)]
    full, none = [MOST] * num_ranks, [0] * num_ranks
    return [
        Work("idle ranks", some),
        Work("no tokens at all", none),
        Work("as many tokens as may be", full),
        Work("one rank has them all", one),
        Work("masked picks", some, _masked(0.4)),
        Work("every pick masked", some, _masked(1.1)),
        Work("one expert", full, _one_expert),
        Work("experts without tokens", some, _few_experts),
        Work("skewed", full, _skewed),
        Work("as recorded", full, _traced(30)),
        Work("a hosted shared expert", some, _traced(7), pieces=1),
        Work("a hosted shared expert of pieces", full, _masked(0.3), pieces=3),
        Work("every pick on the first rank", some, to_rank=0),
        Work("every pick on the last rank", one, to_rank=num_ranks - 1),
    ]


def corners(shapes: Shapes, num_ranks: int, dtype: torch.dtype) -> Iterator[Trial]:
    """Every kind of work that a layer may meet, with and without copies and empty slots."""
    for seed, work in enumerate(works(num_ranks)):
        # Copies: none, some (a slot or two stay empty), as many as experts.
        redundant = (0, 1 + num_ranks // 2, shapes.experts)[seed % 3]
        placement = random_placement(
            shapes.experts + work.pieces, num_ranks, redundant, seed, generation=seed
        )
        config = shapes.config(placement, shapes.hidden, 4 + work.pieces, dtype)
        case = case_of(config, placement, work.tokens, seed, work.choose, work.pieces, work.to_rank)
        trial = Trial.of(f"{work.name}, {dtype}", config, case)
        # With many ranks each collective takes long: there each work has one of the bounds.
        bounds = (None, max(work.tokens), MOST)
        for bound in bounds if num_ranks <= 2 else bounds[seed % 3 :][:1]:
            yield replace(trial, name=f"{trial.name}, bound {bound}", bound=bound)


def sizes(shapes: Shapes, num_ranks: int) -> Iterator[Trial]:
    """Each hidden size and each top-k at least once, not each with each."""
    hidden_sizes, top_ks = shapes.hidden_sizes, shapes.top_ks
    for i in range(max(len(hidden_sizes), len(top_ks))):
        hidden, top_k = hidden_sizes[i % len(hidden_sizes)], top_ks[i % len(top_ks)]
        placement = random_placement(shapes.experts, num_ranks, (i % 3) * num_ranks, i)
        tokens = [(3 * rank + i) % 4 for rank in range(num_ranks)]
        config = shapes.config(placement, hidden, top_k, shapes.dtypes[0])
        case = case_of(config, placement, tokens, i, (_random, _skewed, _traced(i))[i % 3])
        bound = None if i % 2 else max(tokens)
        yield Trial.of(f"hidden {hidden}, top-k {top_k}", config, case, bound)


def row_of(shapes: Shapes, num_ranks: int) -> list[Trial]:
    """Layers of one configuration, for one dispatcher, back to back: another placement, another
    layer of the trace and another bound each time."""
    row = []
    for seed in range(7):
        placement = random_placement(8, num_ranks, num_ranks, seed, generation=seed)
        tokens = [(seed * (rank + 2) + rank) % (FEW + 1) * (seed != 3) for rank in range(num_ranks)]
        config = shapes.config(placement, shapes.hidden, 4, shapes.dtypes[0], FEW)
        case = case_of(config, placement, tokens, seed, _traced(8 * seed))
        bound = (None, max(tokens), FEW)[seed % 3]
        row.append(Trial.of(f"step {seed}", config, case, bound))
    assert len({trial.config for trial in row}) == 1
    return row


@dataclass(frozen=True)
class Trials:
    """All that one contender is put to, for one number of ranks. row: of one configuration."""

    single: list[Trial]
    row: list[Trial]

    @classmethod
    def of(cls, shapes: Shapes, num_ranks: int) -> Trials:
        single = [t for dtype in shapes.dtypes for t in corners(shapes, num_ranks, dtype)]
        single += sizes(shapes, num_ranks)
        return cls(single, row_of(shapes, num_ranks))
