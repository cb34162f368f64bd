"""LowLatencyDispatcher (`deepep_ll` in the registry): DeepEP's low-latency kernels, for decode.

Knows: the library's calls, limits and the order in which it bears them; where its results lie.
Knows nothing of what experts compute, nor of how rows travel.

Rows arrive MASKED: [e, R * M, D] with counts. The library weights and sums in `combine`, at home,
so that what the experts hand back is not weighted: `Received.weights` are ones. It rounds rows to
FP8 and results to bfloat16, hence never deterministic mode. Where expert kernels take no scales
rows are dequantised here, a fallback that is named in `notes`.

Nothing checks the arguments of other ranks: a rank that refuses leaves its peers waiting, until the
library's timeout.

Shape letters: T tokens, D hidden, K top-k, P physical slots, e local slots, R ranks, M max tokens.
"""

from __future__ import annotations

import os
import weakref
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
)
from dispatch.combine import CombinePairs
from dispatch.handles import (
    HandleState,
    TokenHandle,
    check_inputs,
    check_probe,
    check_slots,
)
from ep.group import EPGroup

_MAX_IN_FLIGHT = 2  # the library has two buffers
_BLOCK = 128

# What we pass by name; a package that takes other names is another API.
_USED = {
    "__init__": {"group", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "comm"},
    "low_latency_dispatch": {"x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts"},
    "low_latency_combine": {"x", "topk_idx", "topk_weights", "handle", "return_recv_hook"},
}


class _Alone:
    """A communicator of one rank, for a process that has no process group."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]


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
    """use_fp8: FP8 on the way to the experts (the library quantises). ue8m0: its scales are powers
    of two. dequantise: hand rows on in bfloat16 (expert kernels take no scales); False: FP8 with
    scales. enable_shrink: a rank that does not answer is masked instead of ending the job.
    combine_pairs is not used: weights are applied within the library."""

    name = "deepep_ll"
    emulate = False
    combine_form = CombineForm.SUMMED
    max_in_flight = _MAX_IN_FLIGHT

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
        use_fp8: bool = True,
        ue8m0: bool = False,
        dequantise: bool = True,
        enable_shrink: bool = False,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        deepep.check_form(combine_form)
        if ue8m0 and not use_fp8:
            raise DispatchError("ue8m0=True: a format of FP8 scales; needs use_fp8=True")
        self.group, self.config = group, config
        self.num_local_experts = config.num_physical_experts // group.size
        self.use_fp8, self.ue8m0, self.dequantise = use_fp8, ue8m0, dequantise and use_fp8
        self.enable_shrink = enable_shrink
        self._library = deepep.load(self.emulate)
        depth = deepep.ll_depth_of_tokens(config.max_tokens_per_rank)
        if depth > deepep.DEFAULT_QP_DEPTH:
            os.environ.setdefault("NVSHMEM_QP_DEPTH", str(depth))
        self._buffer = self._library.Buffer(
            group=group.cpu_group,
            num_rdma_bytes=self.plan(group, config).held,
            low_latency_mode=True,
            num_qps_per_rank=self.num_local_experts,
            explicitly_destroy=True,
            enable_shrink=enable_shrink,
            comm=_Alone() if group.cpu_group is None else None,
        )
        self._flights: weakref.WeakSet[_Flight] = weakref.WeakSet()
        self._closed = False
        self._stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        # Kept where the tokens are, so that counting waits for no device.
        self._sent: Tensor | None = None  # [R] rows, last dispatch
        self._rows_out: Tensor | int = 0  # dispatched to other ranks, all calls
        self._rows_back: Tensor | int = 0  # returned to other ranks, all calls

    @classmethod
    def probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        size = deepep.ll_buffer_bytes(
            config.max_tokens_per_rank, config.hidden_size, config.num_physical_experts
        )
        try:
            library = deepep.load(cls.emulate)
        except Exception as error:
            return Probe(False, deepep.why_absent(error))
        problems = [*deepep.wrong_api(library, _USED), *_problems(group, config)]
        version = getattr(library, "__version__", "of unknown version")
        if not cls.emulate:
            problems += deepep.device_problems(size)
        if problems:
            return Probe(False, f"deep_ep {version}: " + "; ".join(problems))
        return Probe(
            True,
            f"deep_ep {version} low latency, {group.size} ranks, "
            f"max_tokens_per_rank={config.max_tokens_per_rank}, buffer of {size} bytes",
        )

    @staticmethod
    def plan(group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """Bytes of the library's buffer; results of a layer come on top while it lasts."""
        return BufferPlan(
            deepep.ll_buffer_bytes(
                config.max_tokens_per_rank, config.hidden_size, config.num_physical_experts
            )
        )

    @property
    def notes(self) -> list[str]:
        """Fallbacks that are in force, to be printed once."""
        if not self.dequantise:
            return []
        return [
            "rows come as FP8 and are dequantised to bfloat16 on receipt (expert kernels take no "
            "scales)"
        ]

    @property
    def stats(self) -> DispatchStats:  # type: ignore[override]  # read-only here: made on demand
        """Read from the device as it is asked for."""
        if self._sent is not None:
            self._stats.rows_sent_to_rank = self._sent.tolist()
        hidden = self.config.hidden_size
        row = 16 + (hidden + hidden // _BLOCK * (1 if self.ue8m0 else 4))
        row = row if self.use_fp8 else 16 + 2 * hidden
        self._stats.bytes_sent = int(self._rows_out) * row + int(self._rows_back) * 2 * hidden
        return self._stats

    # -- there and back --------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError(f"dispatcher {self.name!r} is closed")
        x = check_inputs(self.config, x, slots, weights)
        if slots.device.type == "cpu":  # elsewhere the look would stop the device
            check_slots(self.config, slots)
        held = [f for f in self._flights if f.state is not HandleState.SPENT]
        if len(held) >= _MAX_IN_FLIGHT:
            raise DispatchError(
                f"dispatch_start: {len(held)} layers are in flight; at most {_MAX_IN_FLIGHT}"
            )
        self._land_all()
        flight = _Flight(self, x, slots, weights.contiguous())
        flight.topk_idx = slots.to(getattr(self._library, "topk_idx_t", torch.int64)).contiguous()
        flight.rows, flight.counts, flight.ticket, _, flight.hook = (
            self._buffer.low_latency_dispatch(
                x=x.contiguous(),
                topk_idx=flight.topk_idx,
                num_max_dispatch_tokens_per_rank=self.config.max_tokens_per_rank,
                num_experts=self.config.num_physical_experts,
                use_fp8=self.use_fp8,
                round_scale=self.ue8m0,
                use_ue8m0=self.ue8m0,
                async_finish=False,
                return_recv_hook=True,
            )
        )
        self._flights.add(flight)
        self._stats.calls += 1
        owner = slots.div(self.num_local_experts, rounding_mode="floor").reshape(-1, 1)
        ranks = torch.arange(self.group.size, device=slots.device)
        self._sent = ((owner == ranks) & (slots.reshape(-1, 1) >= 0)).sum(0)
        self._rows_out = self._rows_out + self._to_others(self._sent)
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        flight.land()
        counts = flight.counts
        assert counts is not None
        flight.state = HandleState.RECEIVED
        rows, scales = flight.rows if self.use_fp8 else (flight.rows, None)
        if scales is not None and self.dequantise:
            rows, scales = dequantise_masked(rows, scales), None
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
        )

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        if index is not None:
            raise DispatchError("index: only the PAIRS form takes one; must be None")
        width = self.group.size * self.config.max_tokens_per_rank
        shape = (self.num_local_experts, width, self.config.hidden_size)
        if y.shape != shape or y.dtype != torch.bfloat16:
            raise DispatchError(f"y: {y.dtype} {list(y.shape)}; must be bfloat16 {list(shape)}")
        self._land_all()
        flight.y = y.contiguous()
        flight.result, _, flight.hook = self._buffer.low_latency_combine(
            x=flight.y,
            topk_idx=flight.topk_idx,
            topk_weights=flight.weights,
            handle=flight.ticket,
            async_finish=False,
            return_recv_hook=True,
        )
        flight.state = HandleState.RETURNED
        arrived = flight.ticket[1].bitwise_and(0xFFFFFFFF).sum(0)  # [e, R]: start << 32 | rows
        self._rows_back = self._rows_back + self._to_others(arrived)

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        flight.land()
        assert flight.result is not None
        total = flight.result.to(torch.float32)
        flight.rows = flight.counts = flight.y = flight.result = flight.topk_idx = None
        flight.ticket = ()
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        if not self._closed:
            self._buffer.destroy()
        self._closed = True

    # -- ranks that do not answer ----------------------------------------------------------

    def active_mask(self) -> list[int]:
        """[R]: 1 for a rank that takes part, 0 for one that is masked."""
        status = torch.zeros(self.group.size, dtype=torch.int32, device=self._device())
        if self.enable_shrink:
            self._buffer.low_latency_query_mask_buffer(status)
        return [1 - masked for masked in status.tolist()]

    def set_mask(self, rank: int, active: bool) -> None:
        """Leave a rank out, or take it in again. Its experts' part is missing meanwhile."""
        if not self.enable_shrink:
            raise DispatchError("set_mask: the dispatcher was made with enable_shrink=False")
        if not 0 <= rank < self.group.size or rank == self.group.rank:
            raise DispatchError(f"set_mask: rank {rank}; valid are the others of {self.group.size}")
        self._buffer.low_latency_update_mask_buffer(rank, not active)

    def check_peers(self) -> None:
        """PeerError if a rank is masked: results since then lack its experts. Once a step."""
        masked = [rank for rank, active in enumerate(self.active_mask()) if not active]
        if masked:
            raise PeerError(f"dispatcher {self.name!r}: ranks {masked} did not answer, are masked")

    # -- parts -----------------------------------------------------------------------------

    def _land_all(self) -> None:
        """A send clears what the other buffer counts by: nothing may be on its way meanwhile."""
        for flight in list(self._flights):
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


def dequantise_masked(rows: Tensor, scales: Tensor) -> Tensor:
    """rows e4m3 [e, N, D]; scales fp32 [e, N, D/128], or int32 [e, N, D/512] of four exponents each
    -> bf16 [e, N, D]. A local slot at a time: the fp32 of all would be four times the rows."""
    out = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
    for slot in range(rows.shape[0]):
        factors = scales[slot]
        if factors.dtype == torch.int32:
            shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=rows.device)
            exponents = (factors[..., None] >> shifts) & 0xFF
            factors = (exponents << 23).view(torch.float32).flatten(1)
        blocks = rows[slot].to(torch.float32).view(rows.shape[1], -1, _BLOCK)
        out[slot] = (blocks * factors[..., None]).view(rows.shape[1:]).to(torch.bfloat16)
    return out


def _problems(group: EPGroup, config: DispatchConfig) -> list[str]:
    """What speaks against it, whatever is installed."""
    found = deepep.mode_problems(config, "rounds rows and results")
    depth = os.environ.get("NVSHMEM_QP_DEPTH")
    return found + deepep.ll_problems(
        num_ranks=group.size,
        hidden=config.hidden_size,
        top_k=config.top_k,
        num_experts=config.num_physical_experts,
        max_tokens=config.max_tokens_per_rank,
        qp_depth=int(depth) if depth and depth.isdigit() else None,
    )
