"""CollectiveDispatcher (`torch` in the registry): two all-to-alls a layer by torch.distributed.

Knows: process groups, split sizes, what is in flight. Knows nothing of what experts compute. Runs
over gloo on CPUs; with NCCL the same calls carry device tensors.

The collectives of a layer are the same on every rank whatever its work: counts (one for each rank),
payload, combine. Where all ranks agreed on a bound of tokens for the step and blocks padded to it
are small (`eager_bytes`: decode), the counts travel within the payload: two collectives, not three.
A rank that refuses its arguments says so in place of its counts (-1), so that all ranks stop at the
same layer instead of waiting for one another.

Bytes sent to other ranks in a layer, S rows leaving this rank, N rows that came from others, with
Q valid pairs among them, w bytes a value:

    dispatch: counts c * (R - 1) + payload S * row_bytes      (`CountFormat`; `RowFormat`)
    combine: N * D * w (SUMMED) or Q * D * w (PAIRS)

and with the bound B, counts and payload together are (R - 1) * (B + 1) * row_bytes: more bytes for
a message less. FP8 rows are never sent in blocks unless asked for, so that they keep within 2 % of
what no transport could leave out, from so many bytes on as dispatch/ideal.py says.

Shape letters: T tokens, D hidden, K top-k, R ranks, e local slots, S rows sent, N rows received,
Q valid pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    WireFormat,
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
from dispatch.wire import (
    REFUSED,
    CountFormat,
    PaddedBlocks,
    RowFormat,
    SendPlan,
    SentRows,
    stop_if_refused,
)
from ep.group import EPGroup

# About what a loopback or a fast network carries in the time of one more collective.
_EAGER_BYTES = 256 * 1024


@dataclass(eq=False)
class _Flight(TokenHandle):
    """A layer on its way. Buffers live here until the work that reads or writes them is waited."""

    plan: SendPlan | None = None
    sent: Tensor | None = None  # uint8 [S', row_bytes], own rows left out
    arriving: Tensor | None = None  # uint8 [N', row_bytes]
    blocks: PaddedBlocks | None = None  # set where sent and arriving are padded blocks
    work: dist.Work | None = None
    own: tuple[Tensor, ...] | None = None  # parts of the rows that stay here
    row_counts: list[int] = field(default_factory=list)  # [R] rows received from each rank
    home: Tensor | None = None  # [T, ...] int64 rows of `result`
    home_counts: list[int] = field(default_factory=list)  # [R] rows that come back from each rank
    result: Tensor | None = None


class CollectiveDispatcher(Dispatcher):
    """combine_pairs: `Kernels.combine_pairs`; None means plain torch. eager_bytes: the largest
    padded payload of a rank (the same number on every rank; 0: always exchange counts first).
    None: 256 KiB, and 0 for FP8 rows, which are chosen where bytes cost more than messages."""

    name = "torch"

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
        eager_bytes: int | None = None,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        self.group = group
        self.config = config
        self.combine_form = form_for(config, combine_form)
        self.num_local_experts = config.num_physical_experts // group.size
        self.row_format = RowFormat.choose(
            config.hidden_size, config.top_k, config.dtype, self.num_local_experts, config.wire
        )
        self._counts = CountFormat.choose(config.max_tokens_per_rank)
        self.stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        self._combine = combine_pairs or combine.combine_pairs
        if eager_bytes is None:
            eager_bytes = _EAGER_BYTES if config.wire is WireFormat.MODEL else 0
        self._eager_bytes = eager_bytes
        self._closed = False

    @staticmethod
    def probe(group: EPGroup, config: DispatchConfig) -> Probe:
        problem = group_problem(group, config)
        if problem is not None:
            return Probe(False, problem)
        backend = dist.get_backend(group.device_group)
        return Probe(True, f"all_to_all_single over {backend}, {group.size} ranks")

    @staticmethod
    def plan(group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """Nothing on CPUs: buffers are made for each layer and freed when it has come home. On
        GPUs, where memory is planned to the byte, those of one layer in the worst case, all tokens
        of all ranks to this one."""
        if "nccl" not in dist.get_backend_config(group.device_group):
            return BufferPlan()
        local = config.num_physical_experts // group.size
        row = RowFormat.choose(config.hidden_size, config.top_k, config.dtype, local, config.wire)
        picks = min(config.top_k, local) if form_for(config, None) is CombineForm.PAIRS else 1
        rows, value = group.size * config.max_tokens_per_rank, config.dtype.itemsize
        arriving = 2 * rows * row.row_bytes  # as they came, and with the own ones among them
        results = 2 * rows * picks * config.hidden_size * value  # as computed, and in their order
        sent = config.max_tokens_per_rank * min(config.top_k, group.size)
        home = sent * row.row_bytes + config.max_tokens_per_rank * config.hidden_size * (
            config.top_k * value + 4
        )
        return BufferPlan(passing=arriving + results + home)

    # -- there -----------------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError("dispatcher 'torch' is closed")
        blocks = self._padded_blocks()
        try:
            values, scales = check_rows(self.config, x, slots, weights, self._bound)
            check_slots(self.config, slots)
        except DispatchError:
            self._refuse(blocks, device_of(x, slots, weights))
            raise
        plan = SendPlan.make(slots, self.group.size, self.num_local_experts)
        flight = _Flight(self, values, slots, weights, scales, plan=plan, blocks=blocks)
        if blocks is None:
            flight.row_counts = self._exchange_counts(plan.row_counts, x.device)
            stop_if_refused(flight.row_counts)
            self._send_exact(flight, plan)
        else:
            self._send_padded(flight, plan, blocks)
        # While the payload travels: where its results will come home.
        if self.combine_form is CombineForm.PAIRS:
            flight.home, flight.home_counts = plan.home_pairs()
        else:
            flight.home, flight.home_counts = plan.home_rows(self.config.top_k), plan.row_counts
        self.stats.calls += 1
        self.stats.rows_sent_to_rank = list(plan.row_counts)
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        assert flight.work is not None and flight.arriving is not None
        flight.work.wait()
        if flight.blocks is not None:
            flight.row_counts = flight.blocks.counts(flight.arriving)
            stop_if_refused(flight.row_counts)
            parts = flight.blocks.unpack(flight.arriving, flight.row_counts)
        else:
            assert flight.own is not None
            # Rows from lower ranks, this rank's own, rows from higher ranks.
            first = sum(flight.row_counts[: self.group.rank])
            arrived = self.row_format.split(flight.arriving)
            parts = tuple(
                torch.cat([part[:first], own, part[first:]])
                for part, own in zip(arrived, flight.own, strict=True)
            )
        x, weights, slots, *scales = parts
        slots = slots.to(torch.int32)
        counts = count_picks(slots, self.num_local_experts)
        flight.slots = slots
        flight.sent = flight.arriving = flight.own = flight.work = None
        flight.state = HandleState.RECEIVED
        return Received(
            Layout.ROUTED,
            self.row_format.off_wire(x),
            slots,
            weights,
            counts,
            scales[0] if scales else None,
            self.row_format.scale_format,
            num_pairs=pairs_if_many(self.config, counts, slots.shape[0]),
        )

    # -- and back --------------------------------------------------------------------------

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        slots, home = flight.slots, flight.home
        check_outputs(self.combine_form, slots, self.config.hidden_size, y, index)
        assert home is not None
        if self.combine_form is CombineForm.PAIRS:
            send_counts = _pairs_by_source(slots, flight.row_counts)
            if index is not None:
                y = pairs_as_received(y, index, sum(send_counts))
        else:
            send_counts = flight.row_counts
        flight.y = y.to(self.config.dtype).contiguous()
        rows = sum(flight.home_counts)
        flight.result = torch.empty(
            rows, self.config.hidden_size, dtype=self.config.dtype, device=y.device
        )
        flight.work = dist.all_to_all_single(
            flight.result,
            flight.y,
            flight.home_counts,
            send_counts,
            group=self.group.device_group,
            async_op=True,
        )
        flight.state = HandleState.RETURNED
        leaving = flight.y.shape[0] - send_counts[self.group.rank]
        self.stats.sent(combine=leaving * self.config.hidden_size * self.config.dtype.itemsize)

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        assert flight.work is not None and flight.result is not None and flight.home is not None
        flight.work.wait()
        weights = flight.weights
        if self.combine_form is CombineForm.SUMMED:
            weights = torch.ones(flight.home.shape, dtype=torch.float32, device=weights.device)
        total = self._combine(flight.result, flight.home, weights)
        flight.work = flight.y = flight.result = None
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        self._closed = True

    # -- parts -----------------------------------------------------------------------------

    def _exchange_counts(self, counts: list[int], device: torch.device) -> list[int]:
        send = self._counts.pack(counts, device)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group.device_group)
        return self._counts.unpack(receive)

    def _padded_blocks(self) -> PaddedBlocks | None:
        """Decided by what all ranks know alike: bound, sizes, configuration."""
        if self._bound is None:
            return None
        blocks = PaddedBlocks(self.row_format, self.group.size, self._bound)
        return blocks if blocks.nbytes <= self._eager_bytes else None

    def _refuse(self, blocks: PaddedBlocks | None, device: torch.device) -> None:
        """Take part in the layer's first collective, to tell every rank that this one stops."""
        if blocks is None:
            self._exchange_counts([REFUSED] * self.group.size, device)
            return
        buffer = blocks.refuse(device)
        dist.all_to_all_single(torch.empty_like(buffer), buffer, group=self.group.device_group)

    def _rows_to_send(self, flight: _Flight, plan: SendPlan) -> SentRows:
        local = plan.local_slots(flight.slots, self.num_local_experts)
        weights = torch.where(local >= 0, flight.weights.index_select(0, plan.tokens), 0.0)
        return SentRows(self.row_format, plan.tokens, flight.x, flight.scales, weights, local)

    def _send_padded(self, flight: _Flight, plan: SendPlan, blocks: PaddedBlocks) -> None:
        flight.sent = blocks.pack(plan, self._rows_to_send(flight, plan))
        flight.arriving = torch.empty_like(flight.sent)
        flight.work = dist.all_to_all_single(
            flight.arriving, flight.sent, group=self.group.device_group, async_op=True
        )
        self.stats.sent(dispatch=blocks.nbytes // self.group.size * (self.group.size - 1))

    def _send_exact(self, flight: _Flight, plan: SendPlan) -> None:
        """Pack the rows that leave, start their all-to-all, keep this rank's own aside."""
        me, form = self.group.rank, self.row_format
        rows = self._rows_to_send(flight, plan)
        first = sum(plan.row_counts[:me])
        last = first + plan.row_counts[me]
        flight.own = rows.take(slice(first, last))
        send_counts = _without(plan.row_counts, me)
        receive_counts = _without(flight.row_counts, me)
        shape = (sum(send_counts), form.row_bytes)
        sent = torch.empty(shape, dtype=torch.uint8, device=flight.x.device)
        rows.write(sent[:first], slice(0, first))
        rows.write(sent[first:], slice(last, None))
        shape = (sum(receive_counts), form.row_bytes)
        flight.sent = sent
        flight.arriving = torch.empty(shape, dtype=torch.uint8, device=flight.x.device)
        flight.work = dist.all_to_all_single(
            flight.arriving,
            sent,
            receive_counts,
            send_counts,
            group=self.group.device_group,
            async_op=True,
        )
        size = self.group.size
        counts = self._counts.nbytes * (size - 1)
        self.stats.sent(dispatch=counts + sum(send_counts) * form.row_bytes)


def _pairs_by_source(slots: Tensor, row_counts: list[int]) -> list[int]:
    """slots [N, K], rows in order of source rank -> [R] valid pairs from each rank."""
    before = torch.zeros(slots.shape[0] + 1, dtype=torch.int64, device=slots.device)
    torch.cumsum((slots >= 0).sum(1), 0, out=before[1:])
    ends = torch.tensor([0, *row_counts], device=slots.device).cumsum(0)
    pairs: list[int] = before[ends].diff().tolist()
    return pairs


def _without(counts: list[int], rank: int) -> list[int]:
    """counts with 0 for one rank."""
    return [0 if i == rank else count for i, count in enumerate(counts)]
