"""NormalDispatcher (`deepep_normal` in the registry): DeepEP for prefill, high throughput.

Knows: the library's calls and limits in normal mode. Knows nothing of what experts compute, nor of
how rows travel. A row goes once to each rank that wants it and arrives ROUTED; with several nodes
it goes once to each node, and from there on to its ranks. In FP8 the caller quantises: fp32 scales,
or four exponents to an int32. Results are sums over a rank's experts, which the library adds up at
home without weights, rounded to bfloat16: never deterministic mode. How many rows arrive is learnt
by the host in `dispatch_start`. Nothing is kept from layer to layer but the buffer, so placements
may change between steps.

Bytes of a row on its way, w as the wire has it: D * w + scales + 12 * K (int64 picks, fp32
weights). Against rows whose picks have 2 bytes (dispatch/ideal.py) that is 6 * K more: 1.0065 times
as many bytes in FP8 at D = 7168, K = 8, and within 2 % where D is 320 * K or more; smaller rows
exceed it. `stats` counts a row once for each other rank of this node and once for each
other node; what this rank passes on for ranks of other nodes is not counted: the host never learns
of it.

Shape letters: T tokens, D hidden, K top-k, P physical slots, e local slots, R ranks, N received.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dispatch import deepep
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
from dispatch.deepep_buffer import Mode, SharedBuffer
from dispatch.deepep_plan import BufferNeed, normal_need, normal_passing, row_bytes
from dispatch.fp8 import row_scales
from dispatch.handles import (
    HandleState,
    TokenHandle,
    answer_of,
    check_outputs,
    check_probe,
    check_rows,
    check_slots,
)
from dispatch.mib import mib
from dispatch.words import version_of
from ep.group import EPGroup

_USED = {
    "__init__": {"group", "num_nvl_bytes", "num_rdma_bytes"},
    "get_dispatch_layout": {"topk_idx", "num_experts"},
    "dispatch": {"x", "topk_idx", "topk_weights", "is_token_in_rank", "async_finish"},
    "combine": {"x", "handle", "async_finish"},
}


@dataclass(eq=False)
class _Flight(TokenHandle):
    """A layer on its way. event: what must be waited for before the present result is read."""

    received: Received | None = None
    ticket: tuple[Any, ...] = ()  # the library's handle
    event: Any = None
    own_rows: int = 0  # rows that did not leave this rank
    back_rows: int = 0  # received rows whose results leave it
    result: Tensor | None = None  # [T, D]


class NormalDispatcher(Dispatcher):
    """buffer: one that other dispatchers use too; None: its own. combine_pairs is not used: rows
    come home summed."""

    name = "deepep_normal"
    emulate = False
    combine_form = CombineForm.SUMMED

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
        buffer: SharedBuffer | None = None,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        deepep.check_form(combine_form)
        self.group, self.config = group, config
        self.num_local_experts = config.num_physical_experts // group.size
        library = self.library()
        self._node = deepep.ranks_per_node(library)
        self._picks_dtype = getattr(library, "topk_idx_t", torch.int64)
        need = self.buffer_need(group, config)
        if buffer is None:
            with deepep.naming_peers(self.name):
                buffer = SharedBuffer(group, need, library=library)
        layout = (config.max_tokens_per_rank, config.hidden_size, config.num_physical_experts)
        self._lease = buffer.lease(Mode.NORMAL, need, layout)
        self.stats = DispatchStats(rows_sent_to_rank=[0] * group.size)

    @classmethod
    def library(cls) -> Any:
        """The module with `Buffer`. Raises whatever its import raises."""
        return deepep.load(cls.emulate)

    @classmethod
    def probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        return answer_of("deep_ep", lambda: cls._probe(group, config))

    @classmethod
    def _probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        try:
            library = cls.library()
        except Exception as error:
            return Probe(False, deepep.why_absent(error))
        version = version_of(library)
        problems = deepep.wrong_api(library, _USED)
        if deepep.has_buffer(library):
            problems += _problems(library, group, config)
        if problems:
            return Probe(False, f"deep_ep {version}: " + "; ".join(problems))
        size = cls.buffer_need(group, config).size
        if not cls.emulate and (problems := deepep.device_problems(size)):
            return Probe(False, f"deep_ep {version}: " + "; ".join(problems))
        return Probe(True, f"deep_ep {version} normal, {group.size} ranks, buffer of {mib(size)}")

    @classmethod
    def buffer_need(cls, group: EPGroup, config: DispatchConfig) -> BufferNeed:
        """For who opens a `SharedBuffer`; where the library is not, or has no such buffer, by the
        emulation's hints, which are the same. DispatchError for a number of ranks that has none."""
        if group.size not in deepep.NORMAL_RANKS:
            raise DispatchError(f"dispatcher {cls.name!r}: {deepep.wrong_normal_ranks(group.size)}")
        try:
            library = cls.library()
            there = deepep.has_buffer(library)
        except Exception:
            there = False
        return normal_need(library if there else deepep.load(emulate=True), group, config)

    @classmethod
    def plan(cls, group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """held: the library's queues; passing: rows of one layer in the worst case."""
        size = cls.buffer_need(group, config).size
        return BufferPlan(size, normal_passing(group, config))

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._lease.closed:
            raise DispatchError(f"dispatcher {self.name!r} is closed")
        values, scales = check_rows(self.config, x, slots, weights, self._bound)
        check_slots(self.config, slots)
        flight = _Flight(self, values, slots, weights, scales)
        picks = slots.to(self._picks_dtype).contiguous()
        rows = values.contiguous()
        with deepep.naming_peers(self.name):
            self._lease.take_turn()
            per_rank, per_node, per_expert, in_rank, _ = self._lease.buffer.get_dispatch_layout(
                topk_idx=picks, num_experts=self.config.num_physical_experts
            )
            got, local, shares, counts, flight.ticket, flight.event = self._lease.buffer.dispatch(
                x=rows if scales is None else (rows, scales.contiguous()),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=picks,
                topk_weights=weights.contiguous(),
                async_finish=True,
            )
        self._lease.flights.add(flight)
        got, got_scales = got if isinstance(got, tuple) else (got, None)
        flight.received = Received(
            Layout.ROUTED,
            got,
            local,
            shares,
            torch.tensor(counts, device=values.device),
            got_scales,
            row_scales(self.config.hidden_size, self.config.wire)[0],
            num_pairs=sum(counts),
        )
        sent: list[int] = per_rank.tolist()
        flight.own_rows = sent[self.group.rank]
        flight.back_rows = got.shape[0] - flight.own_rows
        self.stats.calls += 1
        self.stats.rows_sent_to_rank = sent
        away = self._rows_away(sent, None if per_node is None else per_node.tolist())
        row = row_bytes(self.config) + self.config.top_k * (picks.dtype.itemsize + 4)
        self.stats.sent(dispatch=away * row)
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        with deepep.naming_peers(self.name):
            flight.event.current_stream_wait()
        got = flight.received
        assert got is not None
        flight.state = HandleState.RECEIVED
        flight.received = replace(got, slots=got.slots.to(torch.int32))
        return flight.received

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        received = flight.received
        assert received is not None
        check_outputs(self.combine_form, received.slots, self.config.hidden_size, y, index)
        flight.y = y.to(torch.bfloat16).contiguous()
        with deepep.naming_peers(self.name):
            flight.result, _, flight.event = self._lease.buffer.combine(
                x=flight.y, handle=flight.ticket, async_finish=True
            )
        flight.state = HandleState.RETURNED
        self.stats.sent(combine=flight.back_rows * y.shape[1] * 2)

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        with deepep.naming_peers(self.name):
            flight.event.current_stream_wait()
        assert flight.result is not None
        total = flight.result.to(torch.float32)
        flight.received = flight.event = flight.y = flight.result = None
        flight.ticket = ()
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        self._lease.close()

    def _rows_away(self, per_rank: list[int], per_node: list[int] | None) -> int:
        """Rows that leave this rank: for each other rank of its node, for each other node."""
        me, node = self.group.rank, self.group.rank // self._node
        if per_node is None:
            return sum(per_rank) - per_rank[me]
        self.stats.rows_sent_to_node = per_node
        beside = per_rank[node * self._node : (node + 1) * self._node]
        return sum(beside) - per_rank[me] + sum(per_node) - per_node[node]


class EmulatedNormalDispatcher(NormalDispatcher):
    """The same adapter on the emulation: no GPU, no package, the same limits."""

    name = "deepep_normal_emulated"
    emulate = True


def _problems(library: Any, group: EPGroup, config: DispatchConfig) -> list[str]:
    return deepep.mode_problems(config, "sums in bfloat16") + deepep.normal_problems(
        num_ranks=group.size,
        ranks_per_node=group.ranks_per_node,
        node=deepep.ranks_per_node(library),
        hidden=config.hidden_size,
        top_k=config.top_k,
        num_experts=config.num_physical_experts,
        fp8=config.wire is not WireFormat.MODEL,
    )
