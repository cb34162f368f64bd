"""ElasticDispatcher (`deepep_v2` in the registry): DeepEP's second API, for prefill and decode.

Knows: the calls of `ElasticBuffer` (2.0, 2.1) and of `EPBuffer` (2.5), and where their results lie.
Knows nothing of what experts compute, nor of how rows travel. The limits are deepep_v2_limits.py's.

expand=False: a row once per rank, ROUTED. expand=True: a row for each (token, slot), EXPANDED, the
rows of a slot from a multiple of `alignment` on (`Received.starts`). Rows of one source come in no
particular order. cpu_sync=True: the host learns how many rows come and waits for it: no row too
many. cpu_sync=False: nothing waits, shapes are those of the worst case, how many rows are valid
stays on the device (graph_safe).

The library adds up what the experts hand back, without weights, in bfloat16 by where experts lie:
weights are applied before (SUMMED), and never deterministic mode. Rows in FP8 are quantised by the
caller. Nothing checks the arguments of other ranks: a rank that refuses leaves its peers waiting,
until the library's timeout.

Shape letters: T tokens, D hidden, K top-k, P physical slots, e local slots, R ranks, M max tokens a
rank, N received rows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch import deepep
from dispatch import deepep_v2_limits as limits
from dispatch.base import (
    BufferPlan,
    CombineForm,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    DispatchStats,
    Fp8Tokens,
    Handle,
    Probe,
    Received,
    ScaleFormat,
    WireFormat,
)
from dispatch.combine import CombinePairs
from dispatch.deepep_v2_machine import machine_problems
from dispatch.deepep_v2_rows import expanded, routed
from dispatch.fp8 import scale_bytes
from dispatch.handles import (
    HandleState,
    TokenHandle,
    answer_of,
    check_probe,
    check_rows,
    check_slots,
    check_values,
    pairs_if_many,
)
from dispatch.mib import mib
from dispatch.words import counted, raised, version_of
from ep.group import EPGroup

ALIGNMENT = 128  # rows; what grouped matrix products on GPUs want a slot's rows to begin at
NUM_SMS = 24  # multiprocessors: the library's own estimate is wrong for gates limited to groups

_COLUMNS = {
    ScaleFormat.F32_ROW: ScaleFormat.F32_COLUMN,
    ScaleFormat.UE8M0_ROW: ScaleFormat.UE8M0_COLUMN,
}


class _Alone:
    """A process group of one rank, where there is none."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@dataclass(eq=False)
class _Flight(TokenHandle):
    """A layer on its way. land: what must be called before the present results may be read."""

    scale_format: ScaleFormat = ScaleFormat.NONE  # of the rows sent
    picks: Tensor | None = None  # int64 [T, K]: held by the library, nobody writes to it
    arrived: tuple[Any, ...] = ()  # rows, picks, weights, the library's handle
    result: Tensor | None = None  # [T, D]
    land: Callable[[], None] | None = None

    def landed(self, dispatcher: str) -> None:
        """Wait for what is on its way, if that has not been done."""
        land, self.land = self.land, None
        if land is not None:
            with deepep.naming_peers(dispatcher):
                land()


class ElasticDispatcher(Dispatcher):
    """column_scales: scales of FP8 rows come in COLUMN format. num_sms: multiprocessors that move
    rows. combine_pairs is not used: rows come home summed."""

    name = "deepep_v2"
    emulated: str | None = None  # the module in place of an installed package
    combine_form = CombineForm.SUMMED

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
        expand: bool = False,
        cpu_sync: bool = True,
        alignment: int = ALIGNMENT,
        column_scales: bool = True,
        num_sms: int = NUM_SMS,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        deepep.check_form(combine_form)
        if alignment < 1:
            raise DispatchError(f"alignment={alignment}: must be at least 1")
        self.group, self.config = group, config
        self.expand, self.cpu_sync, self.alignment = expand, cpu_sync, alignment
        self.graph_safe = not cpu_sync
        self.num_local_experts = config.num_physical_experts // group.size
        self._fp8 = config.wire is not WireFormat.MODEL
        self._columns, self._num_sms = column_scales and self._fp8, num_sms
        library, self._api = self._load()
        self._notes: list[str] = []
        # The emulation knows one domain: rows go straight there, whatever the nodes.
        self._relayed = self.emulated is None and limits.is_relayed(group.num_nodes)
        self._picks_dtype = getattr(library, "topk_idx_t", torch.int64)
        self._buffer = self._make(library)
        # Those on whose results the library still works, whoever else holds them.
        self._flying: list[_Flight] = []
        self._closed = False
        self._stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        # Kept where the tokens are and written in place: counting waits for no device, and is
        # captured with the rest.
        device = self._device()
        self._sent = torch.zeros(group.size, dtype=torch.int64, device=device)  # last dispatch
        self._sent_nodes = torch.zeros(group.num_nodes, dtype=torch.int64, device=device)
        self._rows_out = torch.zeros((), dtype=torch.int64, device=device)  # to others, all calls
        self._rows_back = torch.zeros((), dtype=torch.int64, device=device)

    @classmethod
    def probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        return answer_of("deep_ep", lambda: cls._probe(group, config))

    @classmethod
    def _probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        try:
            library, api = cls._load()
        except ImportError as error:
            return Probe(False, str(error))
        which = f"deep_ep {version_of(library)} {api.buffer}"
        found = [*limits.wrong_api(library, api), *limits.mode_problems(config)]
        found += limits.problems(
            api,
            num_ranks=group.size,
            num_nodes=group.num_nodes,
            hidden=config.hidden_size,
            top_k=config.top_k,
            num_experts=config.num_physical_experts,
            max_tokens=config.max_tokens_per_rank,
            alignment=ALIGNMENT,
            fp8=config.wire is not WireFormat.MODEL,
        )
        if not found and cls.emulated is None:
            found = machine_problems(api, group, config)
        if found:
            return Probe(False, f"{which}: " + "; ".join(found))
        size = limits.buffer_bytes_for(api, group, config)
        return Probe(
            True,
            f"{which}, {counted(group.size, 'rank')}, "
            f"max_tokens_per_rank={config.max_tokens_per_rank}, "
            f"buffer of {mib(size + api.workspace)} with what the library keeps beside it",
        )

    @classmethod
    def plan(cls, group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """held: the buffer and what the library keeps beside it. passing: the largest layer with
        expand=False; expand=True takes up to min(K, e) times that, and the alignment."""
        try:
            _, api = cls._load()
        except Exception:  # not here; what it would take there is known all the same
            api = limits.ELASTIC
        rows = group.size * config.max_tokens_per_rank
        fp8 = config.wire is not WireFormat.MODEL
        values = config.hidden_size * (1 if fp8 else 2)
        picks = config.top_k * (8 + 4) + 4 * (config.top_k + 2)
        row = values + scale_bytes(config.hidden_size, config.wire) + picks
        experts = 2 * config.hidden_size
        home = config.max_tokens_per_rank * config.hidden_size * (2 + 4)
        held = limits.buffer_bytes_for(api, group, config) + api.workspace
        return BufferPlan(held, rows * (row + experts) + home)

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def stats(self) -> DispatchStats:  # type: ignore[override]  # read-only here: made on demand
        """Read from the device as it is asked for. Where rows are relayed: what this rank sends of
        its own, not what it passes on; results as if they went straight home."""
        hidden, top_k = self.config.hidden_size, self.config.top_k
        values = hidden * (1 if self._fp8 else 2)
        scales = scale_bytes(hidden, self.config.wire)
        there = limits.row_bytes(self._api, values, scales, top_k, True)
        back = limits.row_bytes(self._api, 2 * hidden, 0, top_k, False)
        counts = 8 * (self.group.size - 1) * (1 + self.num_local_experts)
        stats = self._stats
        stats.rows_sent_to_rank = self._sent.tolist()
        if self._relayed:
            stats.rows_sent_to_node = self._sent_nodes.tolist()
        stats.dispatch_bytes = int(self._rows_out) * there + stats.calls * counts
        stats.combine_bytes = int(self._rows_back) * back
        stats.bytes_sent = stats.dispatch_bytes + stats.combine_bytes
        return stats

    # -- there and back --------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError(f"dispatcher {self.name!r} is closed")
        rows, scales = check_rows(self.config, x, slots, weights, self._bound)
        if slots.device.type == "cpu":  # elsewhere the look would stop the device
            check_slots(self.config, slots)
        self._land_all()
        flight = _Flight(self, rows.contiguous(), slots, weights.contiguous())
        if isinstance(x, Fp8Tokens):
            flight.scale_format = x.scale_format
        # A copy of our own: the library holds it until combine has ended.
        flight.picks = slots.to(self._picks_dtype, copy=True).contiguous()
        self._launch(
            flight,
            self._buffer.dispatch,
            "arrived",
            x=flight.x if scales is None else (flight.x, scales),
            topk_idx=flight.picks,
            topk_weights=flight.weights,
            num_experts=self.config.num_physical_experts,
            num_max_tokens_per_rank=self.config.max_tokens_per_rank,
            expert_alignment=self.alignment if self.expand else 1,
            num_sms=self._num_sms,
            do_handle_copy=False,
            do_cpu_sync=self.cpu_sync,
            do_expand=self.expand,
            use_tma_aligned_col_major_sf=self._columns,
        )
        self._stats.calls += 1
        self._count(slots)
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        flight.landed(self.name)
        rows, picks, weights, ticket = flight.arrived
        x, scales = rows if isinstance(rows, tuple) else (rows, None)
        form = flight.scale_format
        form = _COLUMNS.get(form, form) if self._columns else form
        if self.expand:
            received = expanded(x, scales, form, weights, ticket, self.alignment)
        else:
            total = None if self.cpu_sync else ticket.psum_num_recv_tokens_per_scaleup_rank[-1]
            received = routed(x, scales, form, picks, weights, total, self.num_local_experts)
            if self.cpu_sync:
                known = pairs_if_many(self.config, received.counts, x.shape[0])
                received = replace(received, num_pairs=known)
        flight.arrived = (ticket, x.shape[0])
        flight.state = HandleState.RECEIVED
        return received

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        check_values(y)
        ticket, rows = flight.arrived
        if index is not None:
            raise DispatchError("index: only the PAIRS form takes one; must be None")
        # As many as were received: padding comes along, and stays unread.
        if y.shape != (rows, self.config.hidden_size):
            raise DispatchError(f"y: {list(y.shape)}; must be [{rows}, {self.config.hidden_size}]")
        self._land_all()
        flight.y = y.to(torch.bfloat16).contiguous()
        self._launch(flight, self._buffer.combine, "result", x=flight.y, handle=ticket)
        flight.state = HandleState.RETURNED
        ends = ticket.psum_num_recv_tokens_per_scaleup_rank
        self._rows_back.add_(ends[-1] - self._own_rows(flight))

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        flight.landed(self.name)
        assert flight.result is not None
        total = flight.result.to(torch.float32)
        flight.arrived = ()
        flight.y = flight.result = flight.picks = None
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        if not self._closed:
            self._land_all()
            self._buffer.destroy()
        self._closed = True

    # -- parts -----------------------------------------------------------------------------

    @classmethod
    def _load(cls) -> tuple[Any, limits.Api]:
        if cls.emulated is None:
            return limits.load()
        library = importlib.import_module(cls.emulated)
        api = limits.api_of(library)
        assert api is not None
        return library, api

    def _make(self, library: Any) -> Any:
        """Collective: the buffer. DispatchError with the library's reason."""
        group: Any = self.group.cpu_group if self.emulated else self.group.device_group
        if self.emulated is None:
            # NCCL connects with the first collective, and the buffer takes its communicator.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            if self.group.num_nodes == 1 and "EP_DISABLE_GIN" not in os.environ:
                os.environ["EP_DISABLE_GIN"] = "1"
                self._notes.append("one node: EP_DISABLE_GIN=1, rows travel by NVLink alone")
        nodes = self.group.num_nodes
        relayed = limits.is_relayed(nodes)
        if nodes > 1 and not relayed:
            most = limits.MAX_RELAYED_DOMAINS
            self._notes.append(f"{nodes} nodes, above {most}: rows go straight to each rank")
        try:
            buffer = getattr(library, self._api.buffer)(
                group=_Alone() if group is None else group,
                num_bytes=None,
                num_max_tokens_per_rank=self.config.max_tokens_per_rank,
                hidden=self.config.hidden_size,
                num_topk=self.config.top_k,
                use_fp8_dispatch=self._fp8,
                allow_hybrid_mode=relayed or nodes == 1,
                explicitly_destroy=True,
            )
        except (RuntimeError, AssertionError) as error:
            raise DispatchError(f"dispatcher {self.name!r}: {raised(error)}") from error
        apart, together = buffer.get_physical_domain_size()
        if apart > nodes:
            buffer.destroy()
            raise DispatchError(
                f"dispatcher {self.name!r}: the {self.group.size} ranks are {apart} NVLink domains "
                f"of {together}; must be one a node, of which there are {nodes}"
            )
        return buffer

    def _launch(
        self, flight: _Flight, call: Callable[..., Any], target: str, **arguments: Any
    ) -> None:
        """Begin a call; once landed, its results are in `target` of the flight."""

        def keep(results: Any) -> None:
            setattr(flight, target, results[0] if target == "result" else tuple(results))

        arguments["async_with_compute_stream"] = True
        with deepep.naming_peers(self.name):
            if self._api.defers:
                event = call(**arguments, defer_epilogue=True)
                flight.land = lambda: keep(event.current_stream_wait())
            else:
                *results, event = call(**arguments)
                keep(results)
                flight.land = lambda: event.current_stream_wait()
        self._flying.append(flight)

    def _land_all(self) -> None:
        """What was deferred lies in the buffer still: it must be out before the next call."""
        flying, self._flying = self._flying, []
        for flight in flying:
            flight.landed(self.name)

    def _count(self, slots: Tensor) -> None:
        """Rows of this dispatch, and those of them that leave this rank."""
        group = self.group
        owner = slots.div(self.num_local_experts, rounding_mode="floor")[..., None]  # below 0: none
        ranks = torch.arange(group.size, device=slots.device)
        self._sent.copy_((owner == ranks).any(1).sum(0))
        away = self._sent.sum() - self._sent[group.rank]
        if self._relayed:
            node = owner.div(group.ranks_per_node, rounding_mode="floor")
            self._sent_nodes.copy_((node == ranks[: group.num_nodes]).any(1).sum(0))
            first = group.node * group.ranks_per_node
            beside = self._sent[first : first + group.ranks_per_node].sum()
            away = beside - self._sent[group.rank]
            away = away + self._sent_nodes.sum() - self._sent_nodes[group.node]
        self._rows_out.add_(away)

    def _own_rows(self, flight: _Flight) -> Tensor:
        """Scalar: tokens that stayed on this rank."""
        owner = flight.slots.div(self.num_local_experts, rounding_mode="floor")
        return (owner == self.group.rank).any(1).sum()

    def _device(self) -> str:
        return "cpu" if self.emulated else "cuda"


class EmulatedElasticDispatcher(ElasticDispatcher):
    """The same adapter on the emulation of 2.1: no GPU, no package, the same limits."""

    name = "deepep_v2_emulated"
    emulated = "dispatch.emulation"


class EmulatedEPDispatcher(ElasticDispatcher):
    """The same adapter on the emulation of 2.5."""

    name = "deepep_v25_emulated"
    emulated = "dispatch.emulation.elastic_25"
