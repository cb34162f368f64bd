"""LowLatencyDispatcher (`deepep_ll` in the registry): DeepEP's low-latency kernels, for decode.

Knows: the library's calls, limits and the order in which it bears them; where its results lie.
Knows nothing of what experts compute, nor of how rows travel.

Rows arrive MASKED: [e, R * M, D] with counts. The library quantises by itself, as `config.wire`
says, and weights and sums in `combine`, at home, so that what the experts hand back is not
weighted: `Received.weights` are ones. It rounds results to bfloat16, which no
other backend does, hence never deterministic mode.

Nothing is kept from layer to layer but the buffer, so placements may change between steps. The
library could count rows for each local slot (`cumulative_local_expert_recv_stats`); it is not
asked to: load is counted at home, by logical expert and layer, where padding and dummy tokens are
still told apart (`ep.load`), and a local slot is another expert after each rebalance.

Nothing checks the arguments of other ranks: what this file can refuse it refuses before the
library is called. A rank that refuses has to end its process (`dispatch.step_guard`), or to close
its dispatcher in the middle of a layer: the emulation's peers raise PeerError at once, the
library's kernels trap after 100 s or, with enable_shrink, mask it, which `check_peers` shows.

Shape letters: T tokens, D hidden, K top-k, P physical slots, e local slots, R ranks, M max tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
    PeerError,
    Probe,
    Received,
    ScaleFormat,
    WireFormat,
)
from dispatch.combine import CombinePairs
from dispatch.deepep_buffer import Mode, SharedBuffer
from dispatch.deepep_plan import LL_IN_FLIGHT, BufferNeed, ll_need, ll_passing, row_bytes
from dispatch.handles import (
    HandleState,
    TokenHandle,
    answer_of,
    check_inputs,
    check_probe,
    check_slots,
    check_values,
)
from dispatch.mib import mib
from dispatch.words import counted, version_of
from ep.group import EPGroup

_SCALES = {
    WireFormat.MODEL: ScaleFormat.NONE,
    WireFormat.FP8: ScaleFormat.F32_COLUMN,
    WireFormat.FP8_UE8M0: ScaleFormat.UE8M0_COLUMN,
}

# What we pass by name; a package that takes other names is another API.
_USED = {
    "__init__": {"group", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "comm"},
    "low_latency_dispatch": {"x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts"},
    "low_latency_combine": {"x", "topk_idx", "topk_weights", "handle", "return_recv_hook"},
}


@dataclass(eq=False)
class _Flight(TokenHandle):
    """A layer on its way. hook: what must be called before the present result may be read."""

    topk_idx: Tensor | None = None  # int64 [T, K]
    rows: Any = None  # [e, R*M, D], or with its scales
    counts: Tensor | None = None  # int32 [e]
    ticket: tuple[Any, ...] = ()  # the library's handle
    hook: Callable[[], None] | None = None
    result: Tensor | None = None  # [T, D]

    def land(self) -> None:
        """Receive what is on its way, if that has not been done."""
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()


class LowLatencyDispatcher(Dispatcher):
    """buffer: one that other dispatchers use too; None: its own. enable_shrink: a rank that does
    not answer is masked instead of ending the job (of a buffer that is given: as it was opened).
    combine_pairs is not used: weights are applied within the library."""

    name = "deepep_ll"
    emulate = False
    combine_form = CombineForm.SUMMED
    quantises = True
    graph_safe = True
    max_in_flight = LL_IN_FLIGHT

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
        enable_shrink: bool = False,
        buffer: SharedBuffer | None = None,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        deepep.check_form(combine_form)
        self.group, self.config = group, config
        self.num_local_experts = config.num_physical_experts // group.size
        library = self.library()
        self._picks_dtype = getattr(library, "topk_idx_t", torch.int64)
        need = self.buffer_need(group, config)
        if buffer is None:
            with deepep.naming_peers(self.name):
                buffer = SharedBuffer(group, need, library=library, enable_shrink=enable_shrink)
        elif enable_shrink and not buffer.enable_shrink:
            raise DispatchError("enable_shrink=True: the buffer was opened with False")
        self.enable_shrink = buffer.enable_shrink
        layout = (
            config.max_tokens_per_rank,
            config.hidden_size,
            config.num_physical_experts,
        )
        self._lease = buffer.lease(Mode.LOW_LATENCY, need, layout)
        # What is on its way has to be received, also where nobody holds its handle any more.
        self._aloft: list[_Flight] = []
        self._stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        # Kept where the tokens are, and in place: counting waits for no device, and a captured
        # graph counts each time it is played.
        device = self._device()
        self._sent = torch.zeros(group.size, dtype=torch.int64, device=device)  # last dispatch
        self._rows_out = torch.zeros((), dtype=torch.int64, device=device)  # to others, all calls
        self._rows_back = torch.zeros((), dtype=torch.int64, device=device)

    @classmethod
    def library(cls) -> Any:
        """The module with `Buffer`. Raises whatever its import raises."""
        return deepep.load(cls.emulate)

    @classmethod
    def probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        return answer_of("deep_ep", lambda: cls._probe(group, config))

    @classmethod
    def _probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        size = deepep.ll_buffer_bytes(
            config.max_tokens_per_rank, config.hidden_size, config.num_physical_experts
        )
        try:
            library = cls.library()
        except Exception as error:
            return Probe(False, deepep.why_absent(error))
        problems = [*deepep.wrong_api(library, _USED), *_problems(group, config)]
        version = version_of(library)
        if not cls.emulate:
            problems += deepep.device_problems(size)
        if problems:
            return Probe(False, f"deep_ep {version}: " + "; ".join(problems))
        return Probe(
            True,
            f"deep_ep {version} low latency, {counted(group.size, 'rank')}, "
            f"max_tokens_per_rank={config.max_tokens_per_rank}, buffer of {mib(size)}",
        )

    @staticmethod
    def buffer_need(group: EPGroup, config: DispatchConfig) -> BufferNeed:
        """For who opens a `SharedBuffer`."""
        return ll_need(group, config)

    @staticmethod
    def plan(group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """held: the library's buffer. passing: what two layers in flight allocate."""
        return BufferPlan(ll_need(group, config).size, ll_passing(group, config))

    @classmethod
    def expert_rows(cls, group: EPGroup, config: DispatchConfig) -> int:
        return config.num_physical_experts * config.max_tokens_per_rank  # e * R * M

    @property
    def stats(self) -> DispatchStats:  # type: ignore[override]  # read-only here: made on demand
        """Read from the device as it is asked for."""
        self._stats.rows_sent_to_rank = self._sent.tolist()
        row = 16 + row_bytes(self.config)  # the library's message begins with the token's number
        back = 2 * self.config.hidden_size
        there, home = int(self._rows_out) * row, int(self._rows_back) * back
        self._stats.dispatch_bytes, self._stats.combine_bytes = there, home
        self._stats.bytes_sent = there + home
        return self._stats

    # -- there and back --------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._lease.closed:
            raise DispatchError(f"dispatcher {self.name!r} is closed")
        x = check_inputs(self.config, x, slots, weights, self._bound)
        if slots.device.type == "cpu":  # elsewhere the look would stop the device
            check_slots(self.config, slots)
        held = self._lease.in_flight
        if len(held) >= LL_IN_FLIGHT:
            waits = " and ".join(flight.state.value for flight in held)
            raise DispatchError(
                f"dispatch_start: {len(held)} layers are in flight; at most {LL_IN_FLIGHT} (they "
                f"wait for {waits})"
            )
        flight = _Flight(self, x, slots, weights.contiguous())
        flight.topk_idx = slots.to(self._picks_dtype).contiguous()
        wire = self.config.wire
        with deepep.naming_peers(self.name):
            self._land_all()
            self._lease.take_turn()
            flight.rows, flight.counts, flight.ticket, _, flight.hook = (
                self._lease.buffer.low_latency_dispatch(
                    x=x.contiguous(),
                    topk_idx=flight.topk_idx,
                    num_max_dispatch_tokens_per_rank=self.config.max_tokens_per_rank,
                    num_experts=self.config.num_physical_experts,
                    use_fp8=wire is not WireFormat.MODEL,
                    round_scale=wire is WireFormat.FP8_UE8M0,
                    use_ue8m0=wire is WireFormat.FP8_UE8M0,
                    async_finish=False,
                    return_recv_hook=True,
                )
            )
        self._lease.flights.add(flight)
        self._aloft.append(flight)
        self._stats.calls += 1
        owner = slots.div(self.num_local_experts, rounding_mode="floor").reshape(-1, 1)
        ranks = torch.arange(self.group.size, device=slots.device)
        self._sent.copy_(((owner == ranks) & (slots.reshape(-1, 1) >= 0)).sum(0))
        self._rows_out += self._to_others(self._sent)
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        self._land(flight)
        counts = flight.counts
        assert counts is not None
        flight.state = HandleState.RECEIVED
        wire = self.config.wire
        rows, scales = (flight.rows, None) if wire is WireFormat.MODEL else flight.rows
        local, width = rows.shape[:2]
        slots = torch.arange(local, dtype=torch.int32, device=rows.device)[:, None]
        weights = torch.ones(1, 1, device=rows.device)
        return Received(
            Layout.MASKED,
            rows,
            slots.expand(local, width),
            weights.expand(local, width),
            counts.to(torch.int64),
            scales,
            _SCALES[wire],
        )

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        if index is not None:
            raise DispatchError("index: only the PAIRS form takes one; must be None")
        check_values(y)
        width = self.group.size * self.config.max_tokens_per_rank
        shape = (self.num_local_experts, width, self.config.hidden_size)
        if y.shape != shape or y.dtype != torch.bfloat16:
            raise DispatchError(f"y: {y.dtype} {list(y.shape)}; must be bfloat16 {list(shape)}")
        with deepep.naming_peers(self.name):
            self._land_all()
            flight.y = y.contiguous()
            flight.result, _, flight.hook = self._lease.buffer.low_latency_combine(
                x=flight.y,
                topk_idx=flight.topk_idx,
                topk_weights=flight.weights,
                handle=flight.ticket,
                async_finish=False,
                return_recv_hook=True,
            )
        self._aloft.append(flight)
        flight.state = HandleState.RETURNED
        arrived = flight.ticket[1].bitwise_and(0xFFFFFFFF).sum(0)  # [e, R]: start << 32 | rows
        self._rows_back += self._to_others(arrived)

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        self._land(flight)
        assert flight.result is not None
        total = flight.result.to(torch.float32)
        flight.rows = flight.counts = flight.y = flight.result = flight.topk_idx = None
        flight.ticket = ()
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        self._aloft.clear()
        self._lease.close()

    # -- ranks that do not answer ----------------------------------------------------------

    def active_mask(self) -> list[int]:
        """[R]: 1 for a rank that takes part, 0 for one that is masked."""
        if not self.enable_shrink:  # asked at each step: no look at the device for nothing
            return [1] * self.group.size
        status = torch.zeros(self.group.size, dtype=torch.int32, device=self._device())
        self._lease.buffer.low_latency_query_mask_buffer(status)
        return [1 - masked for masked in status.tolist()]

    def set_mask(self, rank: int, active: bool) -> None:
        """Leave a rank out, or take it in again. Its experts' part is missing meanwhile."""
        if not self.enable_shrink:
            raise DispatchError("set_mask: the dispatcher was made with enable_shrink=False")
        if not 0 <= rank < self.group.size or rank == self.group.rank:
            raise DispatchError(f"set_mask: rank {rank}; valid are the others of {self.group.size}")
        self._lease.buffer.low_latency_update_mask_buffer(rank, not active)

    def check_peers(self) -> None:
        """PeerError if a rank is masked: results since then lack its experts. Once a step."""
        masked = [rank for rank, active in enumerate(self.active_mask()) if not active]
        if masked:
            raise PeerError(f"dispatcher {self.name!r}: ranks {masked} did not answer, are masked")

    # -- parts -----------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> None:
        with deepep.naming_peers(self.name):
            flight.land()
        if flight in self._aloft:
            self._aloft.remove(flight)

    def _land_all(self) -> None:
        """A send clears what the other buffer counts by: nothing may be on its way meanwhile."""
        aloft, self._aloft = self._aloft, []
        for flight in aloft:
            flight.land()

    def _to_others(self, rows: Tensor) -> Tensor:
        """[R] -> scalar, on the same device."""
        return rows.sum() - rows[self.group.rank]

    def _device(self) -> str:
        return "cpu" if self.emulate else "cuda"


class EmulatedLowLatencyDispatcher(LowLatencyDispatcher):
    """The same adapter on the emulation: no GPU, no package, the same limits."""

    name = "deepep_ll_emulated"
    emulate = True


def _problems(group: EPGroup, config: DispatchConfig) -> list[str]:
    """What speaks against it, whatever is installed."""
    found = deepep.mode_problems(config, "rounds rows and results")
    depth, wrong = deepep.queue_depth(os.environ)
    found += [] if wrong is None else [wrong]
    return found + deepep.ll_problems(
        num_ranks=group.size,
        hidden=config.hidden_size,
        top_k=config.top_k,
        num_experts=config.num_physical_experts,
        max_tokens=config.max_tokens_per_rank,
        qp_depth=depth,
    )
