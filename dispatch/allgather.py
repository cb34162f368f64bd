"""AllGatherDispatcher (`allgather`): every token goes to every rank; results come home summed up.

The simplest way over many nodes, and one of fixed shapes: no rank needs to know who wants which
token. It sends more than `torch` wherever a token's experts lie on fewer ranks than there are, so
"auto" never takes it.

The collectives of a layer are the same on every rank whatever its work: a count (only where
no bound of tokens was agreed for the step), tokens with their slots and weights in blocks
padded to the bound, combine. A rank that refuses its arguments says so in place of its count (-1),
so that all ranks stop at the same layer.

Combine is a reduce-scatter of a buffer with a place for everything that could come home, zero but
where this rank computed. PAIRS has a place for each (token, k): one rank alone writes it (law 2),
the rest add zeros, which changes no number, so results are bitwise those of `torch`. SUMMED has one
for each token: ranks add up in the dtype of the wire, each addition rounded once.

Bytes that leave this rank in a layer, by a ring, B the bound (or the largest T), w bytes a value:

    dispatch: counts c * (R - 1) + tokens (R - 1) * (B + 1) * row_bytes
    combine: (R - 1) * B * n * D * w      n = K (PAIRS) or 1 (SUMMED); row_bytes as in `RowFormat`

c as in `CountFormat`. Everything goes to every rank, so that dispatch keeps near the bytes that no
transport could leave out (dispatch/ideal.py) only where each token has picks on every rank.

Knows: process groups, blocks, what is in flight. Knows nothing of what experts compute.

Shape letters: T tokens, D hidden, K top-k, R ranks, e local slots, B bound, N received rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch import combine
from dispatch.base import (
    BufferPlan,
    CombineForm,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    DispatchStats,
    Fp8Tokens,
    Handle,
    Layout,
    Probe,
    Received,
)
from dispatch.combine import CombinePairs
from dispatch.handles import (
    HandleState,
    TokenHandle,
    check_outputs,
    check_probe,
    check_rows,
    check_slots,
    device_of,
    form_for,
    group_problem,
    pairs_as_received,
    pairs_if_many,
)
from dispatch.route import count_picks
from dispatch.wire import REFUSED, CountFormat, PaddedBlocks, RowFormat, stop_if_refused
from ep.group import EPGroup


@dataclass(eq=False)
class _Flight(TokenHandle):
    """A layer on its way. Buffers live here until the work that reads or writes them is waited."""

    bound: int = 0
    block: Tensor | None = None  # uint8 [B + 1, row_bytes], this rank's
    blocks: Tensor | None = None  # uint8 [R * (B + 1), row_bytes], everybody's
    work: dist.Work | None = None
    picks: Tensor | None = None  # [T, K] physical slots, as given
    places: Tensor = field(default_factory=lambda: torch.empty(0))  # [N] int64 in 0..R * B - 1
    result: Tensor | None = None  # [B * n, D]


class AllGatherDispatcher(Dispatcher):
    """combine_pairs: `Kernels.combine_pairs`; None means plain torch."""

    name = "allgather"

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        self.group = group
        self.config = config
        self.combine_form = form_for(config, combine_form)
        self.num_local_experts = config.num_physical_experts // group.size
        self.row_format = _row_format(config)
        self._counts = CountFormat.choose(config.max_tokens_per_rank)
        self.stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        self._combine = combine_pairs or combine.combine_pairs
        self._closed = False

    @staticmethod
    def probe(group: EPGroup, config: DispatchConfig) -> Probe:
        problem = group_problem(group, config)
        if problem is not None:
            return Probe(False, problem)
        backend = dist.get_backend(group.device_group)
        return Probe(True, f"all-gather and reduce-scatter over {backend}, {group.size} ranks")

    @staticmethod
    def plan(group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """Buffers of one layer in flight, at max_tokens_per_rank on every rank: they are made for
        each layer and freed when it has come home, but grow with ranks and top-k."""
        blocks = PaddedBlocks(_row_format(config), group.size, config.max_tokens_per_rank)
        width = config.top_k if config.deterministic else 1
        results = group.size * config.max_tokens_per_rank * width * config.hidden_size
        return BufferPlan(passing=blocks.nbytes + results * config.dtype.itemsize)

    # -- there -----------------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError("dispatcher 'allgather' is closed")
        bound = self._bound
        try:
            values, scales = check_rows(self.config, x, slots, weights, bound)
            check_slots(self.config, slots)
        except DispatchError:
            self._refuse(bound, device_of(x, slots, weights))
            raise
        if bound is None:
            counts = self._exchange_counts(x.shape[0], x.device)
            stop_if_refused(counts)
            bound = max(counts)
        flight = _Flight(self, values, slots, weights, scales, bound=bound, picks=slots)
        flight.block = self._pack(flight)
        self._gather(flight)
        self.stats.calls += 1
        self.stats.rows_sent_to_rank = [x.shape[0]] * self.group.size
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        assert flight.work is not None and flight.blocks is not None
        flight.work.wait()
        layout = PaddedBlocks(self.row_format, self.group.size, flight.bound)
        counts = layout.counts(flight.blocks)
        stop_if_refused(counts)
        x_part, weight_part, slot_part, *scale_part = self.row_format.split(flight.blocks)
        # [R, B, K] without the headers; what lies beyond a rank's count is not looked at.
        blocked = slot_part.view(self.group.size, layout.block_rows, self.config.top_k)[:, 1:]
        local = blocked.to(torch.int32) - self.group.rank * self.num_local_experts
        numbers = torch.arange(flight.bound, device=local.device)
        there = numbers < torch.tensor(counts, device=local.device)[:, None]
        here = (local >= 0) & (local < self.num_local_experts) & there[:, :, None]
        ranks, rows = here.any(2).nonzero(as_tuple=True)
        at = ranks * layout.block_rows + 1 + rows
        valid = here[ranks, rows]
        slots = torch.where(valid, local[ranks, rows], -1)
        weights = torch.where(valid, weight_part.index_select(0, at), 0.0)
        x = self.row_format.off_wire(x_part.index_select(0, at))
        scales = scale_part[0].index_select(0, at) if scale_part else None
        flight.slots, flight.places = slots, ranks * flight.bound + rows
        flight.block = flight.blocks = flight.work = None
        flight.state = HandleState.RECEIVED
        picks = count_picks(slots, self.num_local_experts)
        form = self.row_format.scale_format
        known = pairs_if_many(self.config, picks, slots.shape[0])
        return Received(Layout.ROUTED, x, slots, weights, picks, scales, form, num_pairs=known)

    # -- and back --------------------------------------------------------------------------

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        slots, places, width = flight.slots, flight.places, self._width
        check_outputs(self.combine_form, slots, self.config.hidden_size, y, index)
        if self.combine_form is CombineForm.PAIRS:
            rows, picks = (slots >= 0).nonzero(as_tuple=True)
            places = places[rows] * width + picks
            if index is not None:
                y = pairs_as_received(y, index, places.shape[0])
        hidden, size = self.config.hidden_size, self.group.size
        shape = (size * flight.bound * width, hidden)
        flight.y = torch.zeros(shape, dtype=self.config.dtype, device=y.device)
        flight.y[places] = y.to(self.config.dtype)
        shape = (flight.bound * width, hidden)
        flight.result = torch.empty(shape, dtype=self.config.dtype, device=y.device)
        flight.work = _reduce_scatter(
            flight.result, flight.y, group=self.group.device_group, async_op=True
        )
        flight.state = HandleState.RETURNED
        self.stats.sent(combine=(size - 1) * flight.result.nbytes)

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        assert flight.work is not None and flight.result is not None
        flight.work.wait()
        tokens, width = flight.x.shape[0], self._width
        home = torch.arange(tokens * width, device=flight.x.device).view(tokens, width)
        weights = flight.weights
        if self.combine_form is CombineForm.PAIRS:
            assert flight.picks is not None
            home = torch.where(flight.picks >= 0, home, -1)
        else:
            weights = torch.ones(home.shape, dtype=torch.float32, device=home.device)
        total = self._combine(flight.result, home, weights)
        flight.work = flight.y = flight.result = None
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        self._closed = True

    # -- parts -----------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        """Places a token has in what comes home."""
        return self.config.top_k if self.combine_form is CombineForm.PAIRS else 1

    def _exchange_counts(self, count: int, device: torch.device) -> list[int]:
        send = self._counts.pack([count], device)
        receive = torch.empty(self.group.size * send.shape[0], dtype=torch.uint8, device=device)
        _all_gather(receive, send, group=self.group.device_group)
        self.stats.sent(dispatch=self._counts.nbytes * (self.group.size - 1))
        return self._counts.unpack(receive)

    def _empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty((rows, self.row_format.row_bytes), dtype=torch.uint8, device=device)

    def _pack(self, flight: _Flight) -> Tensor:
        """A header row with the count, then T rows, then room up to the bound."""
        x = self.row_format.on_wire(flight.x)
        block, tokens = self._empty(flight.bound + 1, x.device), x.shape[0]
        block.view(torch.int32)[0, 0] = tokens
        values = [x, flight.weights, flight.slots]
        if flight.scales is not None:
            values.append(flight.scales)
        for part, value in zip(self.row_format.split(block[1 : tokens + 1]), values, strict=True):
            part.copy_(value)
        return block

    def _gather(self, flight: _Flight) -> None:
        assert flight.block is not None
        size = self.group.size
        flight.blocks = self._empty(size * flight.block.shape[0], flight.block.device)
        flight.work = _all_gather(
            flight.blocks, flight.block, group=self.group.device_group, async_op=True
        )
        self.stats.sent(dispatch=(size - 1) * flight.block.nbytes)

    def _refuse(self, bound: int | None, device: torch.device) -> None:
        """Take part in the layer's first collective, to tell every rank that this one stops."""
        if bound is None:
            self._exchange_counts(REFUSED, device)
            return
        block = self._empty(bound + 1, device)
        block.view(torch.int32)[0, 0] = REFUSED
        everybody = self._empty(self.group.size * (bound + 1), device)
        _all_gather(everybody, block, group=self.group.device_group)


def _all_gather(out: Tensor, x: Tensor, **options: Any) -> Any:
    # torch 2.13 renamed both, and warns at the old names.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, x, **options)


def _reduce_scatter(out: Tensor, x: Tensor, **options: Any) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, x, **options)


def _row_format(config: DispatchConfig) -> RowFormat:
    """Rows carry physical slots: all ranks see the same row."""
    return RowFormat.choose(
        config.hidden_size,
        config.top_k,
        config.dtype,
        config.num_physical_experts,
        config.wire,
    )
