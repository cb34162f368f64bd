"""NormalDispatcher (`deepep_normal` in the registry): DeepEP for prefill, high throughput.

Knows: the library's calls and limits in normal mode. Knows nothing of what experts compute, nor of
how rows travel. A row goes once to each rank that wants it and arrives ROUTED; results are sums
over a rank's experts, which the library adds up at home without weights, rounded to bfloat16: never
deterministic mode. How many rows arrive is learnt by the host in `dispatch_start`.

Shape letters: T tokens, D hidden, K top-k, P physical slots, e local slots, R ranks, N received.
"""

from __future__ import annotations

from dataclasses import dataclass
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
)
from dispatch.combine import CombinePairs
from dispatch.handles import (
    HandleState,
    TokenHandle,
    check_inputs,
    check_outputs,
    check_probe,
    check_slots,
)
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
    result: Tensor | None = None  # [T, D]


class NormalDispatcher(Dispatcher):
    """combine_pairs is not used: rows come home summed."""

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
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        deepep.check_form(combine_form)
        self.group, self.config = group, config
        self.num_local_experts = config.num_physical_experts // group.size
        library = deepep.load(self.emulate)
        nvl, rdma = _buffer_bytes(library, group, config)
        self._picks_dtype = getattr(library, "topk_idx_t", torch.int64)
        self._buffer = library.Buffer(
            group=group.cpu_group, num_nvl_bytes=nvl, num_rdma_bytes=rdma, explicitly_destroy=True
        )
        self.stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        self._closed = False

    @classmethod
    def probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        try:
            library = deepep.load(cls.emulate)
        except Exception as error:
            return Probe(False, deepep.why_absent(error))
        version = getattr(library, "__version__", "of unknown version")
        problems = [*deepep.wrong_api(library, _USED), *_problems(group, config)]
        if problems:
            return Probe(False, f"deep_ep {version}: " + "; ".join(problems))
        size = sum(_buffer_bytes(library, group, config))
        if not cls.emulate and (problems := deepep.device_problems(size)):
            return Probe(False, f"deep_ep {version}: " + "; ".join(problems))
        return Probe(True, f"deep_ep {version} normal, {group.size} ranks, buffers of {size} bytes")

    @classmethod
    def plan(cls, group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """Bytes of the library's queues. Whatever its import raises, where it is not there."""
        return BufferPlan(sum(_buffer_bytes(deepep.load(cls.emulate), group, config)))

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError(f"dispatcher {self.name!r} is closed")
        x = check_inputs(self.config, x, slots, weights)
        check_slots(self.config, slots)
        flight = _Flight(self, x, slots, weights)
        picks = slots.to(self._picks_dtype).contiguous()
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            topk_idx=picks, num_experts=self.config.num_physical_experts
        )
        rows, local, shares, counts, flight.ticket, flight.event = self._buffer.dispatch(
            x=x.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=picks,
            topk_weights=weights.contiguous(),
            async_finish=True,
        )
        flight.received = Received(
            Layout.ROUTED, rows, local, shares, torch.tensor(counts, device=x.device)
        )
        sent: list[int] = per_rank.tolist()
        flight.own_rows = sent[self.group.rank]
        self.stats.calls += 1
        self.stats.rows_sent_to_rank = sent
        row = x.shape[1] * x.dtype.itemsize + self.config.top_k * (picks.dtype.itemsize + 4)
        self.stats.bytes_sent += (sum(sent) - flight.own_rows) * row
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        flight.event.current_stream_wait()
        got = flight.received
        assert got is not None
        flight.state = HandleState.RECEIVED
        flight.received = Received(
            got.layout, got.x, got.slots.to(torch.int32), got.weights, got.counts
        )
        return flight.received

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        received = flight.received
        assert received is not None
        check_outputs(self.combine_form, received.slots, self.config.hidden_size, y, index)
        flight.y = y.to(torch.bfloat16).contiguous()
        flight.result, _, flight.event = self._buffer.combine(
            x=flight.y, handle=flight.ticket, async_finish=True
        )
        flight.state = HandleState.RETURNED
        self.stats.bytes_sent += (y.shape[0] - flight.own_rows) * y.shape[1] * 2

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        flight.event.current_stream_wait()
        assert flight.result is not None
        total = flight.result.to(torch.float32)
        flight.received = flight.event = flight.y = flight.result = None
        flight.ticket = ()
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        if not self._closed:
            self._buffer.destroy()
        self._closed = True


class EmulatedNormalDispatcher(NormalDispatcher):
    """The same adapter on the emulation: one node, no GPU, no package."""

    name = "deepep_normal_emulated"
    emulate = True


def _buffer_bytes(library: Any, group: EPGroup, config: DispatchConfig) -> tuple[int, int]:
    """NVLink, RDMA: enough for both directions, by the library's own hints."""
    both = [library.Buffer.get_dispatch_config(group.size)]
    both.append(library.Buffer.get_combine_config(group.size))
    row = config.hidden_size * 2
    nvl = max(c.get_nvl_buffer_size_hint(row, group.size) for c in both)
    rdma = 0
    if group.size > deepep.RANKS_PER_NODE:
        rdma = max(c.get_rdma_buffer_size_hint(row, group.size) for c in both)
    return nvl, rdma


def _problems(group: EPGroup, config: DispatchConfig) -> list[str]:
    found = deepep.mode_problems(config, "sums in bfloat16")
    size, node = group.size, deepep.RANKS_PER_NODE
    if size not in deepep.NORMAL_RANKS:
        found.append(f"{size} ranks: valid are {', '.join(map(str, deepep.NORMAL_RANKS))}")
        return found
    if size > node and group.ranks_per_node != node:
        found.append(f"{group.ranks_per_node} ranks a node: must be {node} where there are several")
    if size <= node and group.ranks_per_node != size:
        found.append(f"{size} ranks on several nodes: up to {node} must share one")
    if not 1 <= config.top_k <= deepep.NORMAL_MAX_TOP_K:
        found.append(f"top_k={config.top_k}: valid are 1..{deepep.NORMAL_MAX_TOP_K}")
    found += deepep.division_problems(config.num_physical_experts, size)
    local, most = config.num_physical_experts // size, deepep.NORMAL_MAX_LOCAL_EXPERTS
    if local > most:
        found.append(f"{local} experts a rank: at most {most}")
    step = 256 if size > node else 8  # 16-byte words of a row; between nodes, 32 of them
    if config.hidden_size % step:
        below = config.hidden_size // step * step
        found.append(f"hidden_size={config.hidden_size}: a multiple of {step}, such as {below}")
    return found
