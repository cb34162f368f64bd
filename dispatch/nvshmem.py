"""SymmetricDispatcher (`nvshmem` in the registry): torch's symmetric-memory all-to-alls.

Two operators a layer, `all_to_all_vdev_2d` and `all_to_all_vdev_2d_offset`: splits stay on the
device, shapes are those of the worst case, the host waits for nothing, so that a layer may be
captured in a graph. Knows the operators' calls and their rules for buffers. Knows nothing of what
experts compute; limits and sizes are in `nvshmem_sizes`, the library in `nvshmem_library`.

Rows arrive EXPANDED, in segments that begin at multiples of `align`. The operators know no tokens:
a row travels once for each (token, expert), also where one rank has several of a token's experts,
so that more bytes are sent than by `torch`; `stats` count them. In return the rows of a (token,
expert) come home one by one, in the order in which they left: weights stay at home, the sum is in
routing order (the PAIRS form, whatever the mode), and nothing depends on the placement.

Buffers: peers read a rank's rows where they lie, and what an operator's barrier says is only that
everybody has finished the operator before. A layer's operators alternate, so that each buffer is
written again only after the other operator of its layer: rows_in after combine, y_in after the
dispatch that follows. Two layers may be in flight, each with its own buffers; all ranks must start
operators in the same order. They run on a stream of their own, beside what the caller computes.

Nothing checks the arguments of other ranks: a rank that refuses leaves its peers waiting.

Bytes that leave this rank in a layer, S rows sent to other ranks, Q returned to them, w bytes a
value of the model dtype:

    2 * 16 * e * (R - 1)  +  S * row_bytes  +  Q * D * w      row_bytes = pad16(D * w), or for FP8
                                                              pad16(D + 4 * G), G = ceil(D / 128)

Shape letters: T tokens, D hidden, K top-k, P physical slots, e local slots, R ranks, M max tokens
a rank, N rows at most received.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch import combine, nvshmem_library
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
    answer_of,
    check_probe,
    check_rows,
    check_slots,
    check_values,
)
from dispatch.mib import mib
from dispatch.nvshmem_sizes import (
    IN_FLIGHT,
    buffer_shapes,
    held_bytes,
    limit_problems,
    row_of,
    rows_out,
    slots_of,
)
from ep.group import EPGroup


@dataclass(eq=False)
class _Buffers:
    """Symmetric tensors of one layer in flight (`buffer_shapes`), and the flight that has them."""

    rows_in: Tensor
    rows_out: Tensor
    y_in: Tensor
    y_out: Tensor
    in_splits: Tensor
    splits: Tensor
    back: Tensor
    flight: weakref.ref[_Flight] | None = None

    @property
    def free(self) -> bool:
        flight = None if self.flight is None else self.flight()
        return flight is None or flight.state is HandleState.SPENT


@dataclass(eq=False)
class _Flight(TokenHandle):
    """A layer on its way. index [T, K] int64: where each pick's row lies in rows_in and y_out, -1
    where masked."""

    buffers: _Buffers | None = None
    index: Tensor | None = None
    rows: int = 0  # N
    done: Any = None  # event of the operator that was started last


class SymmetricDispatcher(Dispatcher):
    """combine_pairs: `Kernels.combine_pairs`; None means plain torch. library: what stands in for
    torch's calls, and is not asked whether it can run; None: those themselves."""

    name = "nvshmem"
    emulate = False
    align = 128  # rows at whose multiples segments begin: what grouped GEMMs take at once
    combine_form = CombineForm.PAIRS
    graph_safe = True
    max_in_flight = IN_FLIGHT

    def __init__(
        self,
        group: EPGroup,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
        library: Any = None,
    ) -> None:
        if library is None:
            check_probe(self.name, self.probe(group, config))
        if combine_form not in (None, CombineForm.PAIRS):
            raise DispatchError(
                f"combine_form={combine_form.value}: rows come home one by one; must be pairs"
            )
        self.group, self.config = group, config
        self.num_local_experts = config.num_physical_experts // group.size
        self._notes: list[str] = []
        self._library = self._start() if library is None else library
        assert group.device_group is not None
        self._group_name = group.device_group.group_name
        self._combine = combine_pairs or combine.combine_pairs
        self._row = row_of(config)
        self._device = torch.device(self._library.device)
        self._stream: Any = _stream() if self._device.type == "cuda" else None
        self._buffers = [self._make_buffers() for _ in range(IN_FLIGHT)]
        self._closed = False
        self._stats = DispatchStats(rows_sent_to_rank=[0] * group.size)
        # Kept where the tokens are, so that counting waits for no device; written in place, so that
        # a captured graph counts too.
        self._sent = torch.zeros(group.size, dtype=torch.int64, device=self._device)
        self._rows_out = torch.zeros(2, dtype=torch.int64, device=self._device)  # there, and back

    @classmethod
    def probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        return answer_of(f"torch {torch.__version__}", lambda: cls._probe(group, config))

    @classmethod
    def _probe(cls, group: EPGroup, config: DispatchConfig) -> Probe:
        if group.size == 1:
            return Probe(False, "needs two ranks or more: torch makes no team of one")
        found = limit_problems(config, group.size)
        env = dict(os.environ)
        how = nvshmem_library.transport(group.num_nodes, env)
        size = 0 if found else cls.plan(group, config).held
        if cls.emulate:
            what = "symmetric memory, emulated"
        else:
            absent = nvshmem_library.why_absent()
            if absent is not None:
                return Probe(False, "; ".join([absent, *found]))
            wheel, loaded = nvshmem_library.wheel_version(), nvshmem_library.loaded_version()
            version = loaded or wheel
            told = "of unknown version" if version is None else ".".join(map(str, version))
            what = f"NVSHMEM {told} by torch {torch.__version__}"
            found += nvshmem_library.version_problems(wheel, loaded)
            found += nvshmem_library.race_problems(nvshmem_library.offsets_race())
            found += nvshmem_library.device_problems(size, group.ranks_per_node)
            found += nvshmem_library.heap_problems(size, env)
            found += nvshmem_library.node_problems(group.num_nodes, env)
        if found:
            return Probe(False, f"{what}: " + "; ".join(found))
        return Probe(True, f"{what}, {group.size} ranks {how}, buffers of {mib(size)}")

    @classmethod
    def plan(cls, group: EPGroup, config: DispatchConfig) -> BufferPlan:
        """Symmetric buffers, for the worst case of every rank sending everything here; and the sums
        of layers that come home, in fp32."""
        held = held_bytes(config, group.size, cls.align)
        home = 4 * config.max_tokens_per_rank * config.hidden_size
        return BufferPlan(held=held, passing=IN_FLIGHT * home)

    @classmethod
    def expert_rows(cls, group: EPGroup, config: DispatchConfig) -> int:
        return rows_out(config, group.size, config.max_tokens_per_rank, cls.align)

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def stats(self) -> DispatchStats:  # type: ignore[override]  # read-only here: made on demand
        """Read from the device as it is asked for."""
        stats, calls = self._stats, self._stats.calls
        stats.rows_sent_to_rank = self._sent.tolist()
        there, back = self._rows_out.tolist()
        splits = 16 * self.num_local_experts * (self.group.size - 1) * calls
        width = self.config.hidden_size * self.config.dtype.itemsize
        stats.dispatch_bytes = splits + there * self._row.nbytes
        stats.combine_bytes = splits + back * width
        stats.bytes_sent = stats.dispatch_bytes + stats.combine_bytes
        return stats

    # -- there -----------------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError(f"dispatcher {self.name!r} is closed")
        values, scales = check_rows(self.config, x, slots, weights, self._bound)
        if slots.device.type == "cpu":  # elsewhere the look would stop the device
            check_slots(self.config, slots)
        buffers = self._take_buffers()
        flight = _Flight(self, values, slots, weights, buffers=buffers)
        # No more rows than the bound allows are handed on: a smaller N.
        most = self.config.max_tokens_per_rank if self._bound is None else self._bound
        flight.rows = rows_out(self.config, self.group.size, most, self.align)
        buffers.flight = weakref.ref(flight)
        self._pack(flight, buffers, values, scales)
        with self._beside(flight):
            self._library.all_to_all_vdev_2d(
                input=buffers.rows_in,
                out=buffers.rows_out,
                in_splits=buffers.in_splits,
                out_splits_offsets=buffers.splits,
                group_name=self._group_name,
                major_align=self.align,
            )
        self._stats.calls += 1
        torch.sum(buffers.in_splits.view(self.group.size, -1), 1, out=self._sent)
        self._rows_out[0] += self._to_others(self._sent)
        return flight

    def dispatch_finish(self, handle: Handle) -> Received:
        flight = _Flight.expect(handle, self, HandleState.SENT)
        self._wait(flight)
        assert flight.buffers is not None
        # Copies: the next layer in these buffers writes to splits.
        sizes, offsets = flight.buffers.splits.view(2, self.num_local_experts, -1)
        counts, starts = sizes.sum(1), offsets[:, 0].clone()
        self._rows_out[1] += self._to_others(sizes.sum(0))
        values, scales = self._row.split(flight.buffers.rows_out[: flight.rows])
        slots = slots_of(flight.rows, starts, counts)
        ones = torch.ones((1, 1), dtype=torch.float32, device=slots.device)
        flight.state = HandleState.RECEIVED
        return Received(
            Layout.EXPANDED,
            values,
            slots,
            ones.expand(flight.rows, 1),  # weights are applied at home
            counts,
            scales,
            self._row.scale_format,
            starts,
            self.align,
        )

    # -- and back --------------------------------------------------------------------------

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        flight = _Flight.expect(handle, self, HandleState.RECEIVED)
        if index is not None:
            raise DispatchError("index: rows go back from where they came; must be None")
        check_values(y)
        shape = (flight.rows, self.config.hidden_size)
        if y.shape != shape:
            raise DispatchError(f"y: {list(y.shape)}; must be {list(shape)}")
        buffers = flight.buffers
        assert buffers is not None
        buffers.y_in[: flight.rows].copy_(y)
        with self._beside(flight):
            self._library.all_to_all_vdev_2d_offset(
                input=buffers.y_in,
                out=buffers.y_out,
                in_splits_offsets=buffers.splits,
                out_splits_offsets=buffers.back,
                group_name=self._group_name,
            )
        flight.state = HandleState.RETURNED

    def combine_finish(self, handle: Handle) -> Tensor:
        flight = _Flight.expect(handle, self, HandleState.RETURNED)
        self._wait(flight)
        assert flight.buffers is not None and flight.index is not None
        total = self._combine(flight.buffers.y_out, flight.index, flight.weights)
        flight.state = HandleState.SPENT
        return total

    def close(self) -> None:
        """Buffers go; NVSHMEM itself stays until the process ends."""
        self._buffers.clear()
        self._closed = True

    # -- parts -----------------------------------------------------------------------------

    def _start(self) -> Any:
        """Collective: the library, started."""
        if self.emulate:
            from dispatch.emulation.symmetric import SymmetricMemory

            library: Any = SymmetricMemory()
            library.set_backend("NVSHMEM")
            return library
        library = nvshmem_library.TorchSymmetricMemory()
        nvshmem_library.select_backend(library)
        self._notes.append(nvshmem_library.start(self.group, nvshmem_library.load_core()))
        return library

    def _make_buffers(self) -> _Buffers:
        """Collective. in_splits says that nothing is sent, until it is filled in."""
        made = {}
        for name, (shape, dtype) in buffer_shapes(self.config, self.group.size, self.align).items():
            made[name] = self._library.empty(shape, dtype=dtype, device=self._device)
            self._library.rendezvous(made[name], self.group.device_group)
        return _Buffers(**made)

    def _take_buffers(self) -> _Buffers:
        """The free ones that were used longest ago: rows of a flight that was given up may still be
        read by peers."""
        for number, buffers in enumerate(self._buffers):
            if buffers.free:
                self._buffers.append(self._buffers.pop(number))
                return buffers
        raise DispatchError(
            f"dispatch_start: {IN_FLIGHT} layers are in flight; at most {IN_FLIGHT}"
        )

    def _pack(
        self, flight: _Flight, buffers: _Buffers, values: Tensor, scales: Tensor | None
    ) -> None:
        """Rows in order of physical slot, then token, then k. Masked picks lie behind all others
        and are not sent."""
        top_k, num_slots = self.config.top_k, self.config.num_physical_experts
        picks = flight.slots.reshape(-1).to(torch.int64)
        valid = picks >= 0
        key = torch.where(valid, picks, num_slots)
        order = key.argsort(stable=True)
        sizes = torch.zeros(num_slots + 1, dtype=torch.int64, device=key.device)
        sizes.scatter_add_(0, key, torch.ones_like(key))
        buffers.in_splits.copy_(sizes[:num_slots])
        tokens = order.div(top_k, rounding_mode="floor")
        to_values, to_scales = self._row.split(buffers.rows_in[: order.shape[0]])
        if scales is not None:
            assert to_scales is not None
            to_scales.copy_(scales.index_select(0, tokens))
            # As bytes: not all of torch's indexing knows float8.
            values, to_values = values.view(torch.uint8), to_values.view(torch.uint8)
        to_values.copy_(values.index_select(0, tokens))
        place = torch.empty_like(order)
        place.scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        flight.index = torch.where(valid, place, -1).view(flight.slots.shape)

    @contextmanager
    def _beside(self, flight: _Flight) -> Iterator[None]:
        """Run an operator after what the caller's stream has done, on a stream of its own."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            flight.done = self._stream.record_event()

    def _wait(self, flight: _Flight) -> None:
        """What the caller's stream does next comes after the flight's last operator."""
        if flight.done is not None:
            torch.cuda.current_stream().wait_event(flight.done)

    def _to_others(self, rows: Tensor) -> Tensor:
        """[R] -> scalar, on the same device."""
        return rows.sum() - rows[self.group.rank]


class EmulatedSymmetricDispatcher(SymmetricDispatcher):
    """The same adapter on the emulation: no GPU, the same limits; small segments, small tests."""

    name = "nvshmem_emulated"
    emulate = True
    align = 8


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
