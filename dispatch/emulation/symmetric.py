"""torch's symmetric memory on CPUs: `empty`, `rendezvous` and the two all-to-alls of expert layers.

Names, parameters, shapes, limits and what they refuse are those of `torch.ops.symm_mem` behind
NVSHMEM; rows travel over gloo. What the operators leave undefined is poisoned (all bits set, which
is NaN in every format), and rules that they do not check are errors here:

- a tensor that no `empty` made, or that did not meet its peers by `rendezvous`;
- ranks that call different operators, or with tensors of different shapes;
- rows beyond the end of `out`;
- an input written to between its operator and the next one: peers read it where it lies, and only
  the barrier of the next operator tells that they have done so.

Knows process groups. Knows nothing of who calls it.

Shape letters: R ranks, e local slots; splits rank-major are [R, e], expert-major [e, R].
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.emulation.errors import BufferRuleError, HostAssertion, host_assert
from dispatch.nvshmem_sizes import (
    COMBINE_MAX_LOCAL,
    COMBINE_MAX_RANKS,
    DISPATCH_MAX_LOCAL,
    DISPATCH_MAX_RANKS,
)

_POISON = 255


@dataclass(frozen=True)
class Rendezvous:
    """What `rendezvous` gives: who takes part."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class _Read:
    """The rows that peers may be reading, and what they were."""

    rows: Tensor
    copy: Tensor


class SymmetricMemory:
    """The calls of one rank. Groups are those whose tensors met in `rendezvous`."""

    device = "cpu"

    def __init__(self) -> None:
        self._backend: str | None = None
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._met: dict[int, str] = {}  # address -> group name
        self._groups: dict[str, Any] = {}
        self._reading: _Read | None = None

    def set_backend(self, name: str) -> None:
        """Once, before the first tensor."""
        if self._made and name != self._backend:
            raise HostAssertion("the backend cannot change once a tensor has been allocated")
        self._backend = name

    def get_backend(self, device: Any) -> str | None:
        return self._backend

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """size: numbers, or one list of them."""
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        tensor.view(torch.uint8).fill_(_POISON)
        self._made[tensor.data_ptr()] = weakref.ref(tensor)
        return tensor

    def rendezvous(self, tensor: Tensor, group: Any) -> Rendezvous:
        """group: a process group. Collective there; here peers tell one another in each operator
        what tensors they have, so that many of them cost nothing."""
        made = self._made.get(tensor.data_ptr())
        if made is None or made() is None:
            raise BufferRuleError("rendezvous: the tensor was not made by symm_mem.empty")
        self._groups[group.group_name] = group
        self._met[tensor.data_ptr()] = group.group_name
        return Rendezvous(group.rank(), group.size())

    # -- the operators ---------------------------------------------------------------------

    def all_to_all_vdev_2d(
        self,
        input: Tensor,
        out: Tensor,
        in_splits: Tensor,
        out_splits_offsets: Tensor,
        group_name: str,
        major_align: int | None = None,
    ) -> None:
        """Rows of input, by rank, then its slot (in_splits [R * e]) -> out, by local slot, then
        source rank; the rows of a slot begin at a multiple of major_align (1 if None), and an empty
        slot takes that many. out_splits_offsets [2, e * R]: rows and where they begin."""
        tensors = (input, out, in_splits, out_splits_offsets)
        size = self._enter(group_name, *tensors)
        _at_most("world_size", size, DISPATCH_MAX_RANKS)
        align = 1 if major_align is None else major_align
        host_assert(align > 0, f"major_align is positive, not {align}")
        _check_contiguous(*tensors)
        shape = in_splits.shape
        host_assert(
            len(shape) == 1 and out_splits_offsets.shape == (2, *shape) and shape[0] % size == 0,
            f"in_splits is [R * e], out_splits_offsets [2, R * e]: {list(shape)}, "
            f"{list(out_splits_offsets.shape)}",
        )
        _check_kinds(*tensors)
        local = shape[0] // size
        _at_most("experts of a rank", local, DISPATCH_MAX_LOCAL)
        splits = in_splits.view(size, local)
        host_assert(int(splits.min()) >= 0, "splits are not negative")
        host_assert(
            int(splits.sum()) <= input.shape[0],
            f"in_splits add up to {int(splits.sum())}, input has {input.shape[0]} rows",
        )
        sizes, sources = splits, _before(splits.reshape(-1)).view(size, local)
        got = self._exchange(group_name, sizes, tensors).t()  # [e, R]
        lengths = ((got.sum(1) + align - 1) // align * align).clamp_min(align)
        offsets = _before(lengths)[:, None] + got.cumsum(1) - got
        self._move(group_name, input, out, sizes, sources, got.t(), offsets.t())
        out_splits_offsets.copy_(torch.stack((got.reshape(-1), offsets.reshape(-1))))

    def all_to_all_vdev_2d_offset(
        self,
        input: Tensor,
        out: Tensor,
        in_splits_offsets: Tensor,
        out_splits_offsets: Tensor,
        group_name: str,
    ) -> None:
        """Rows of input, by local slot, then rank (in_splits_offsets [2, e * R]: rows and where
        they begin) -> out, by source rank, then its slot, one behind the other;
        out_splits_offsets [2, R * e]."""
        tensors = (input, out, in_splits_offsets, out_splits_offsets)
        size = self._enter(group_name, *tensors)
        _at_most("world_size", size, COMBINE_MAX_RANKS)
        _check_contiguous(*tensors)
        shape = in_splits_offsets.shape
        host_assert(
            len(shape) == 2 and shape[0] == 2 and shape[1] % size == 0,
            f"in_splits_offsets is [2, e * R], not {list(shape)}",
        )
        _check_kinds(*tensors)
        local = shape[1] // size
        _at_most("experts of a rank", local, COMBINE_MAX_LOCAL)
        if out_splits_offsets.shape != shape:
            raise BufferRuleError(f"out_splits_offsets: must be {list(shape)}")
        splits, sources = (part.view(local, size).t() for part in in_splits_offsets)
        host_assert(int(splits.min()) >= 0, "splits are not negative")
        if int(((sources + splits) * (splits > 0)).max()) > input.shape[0]:
            raise BufferRuleError(f"in_splits_offsets: beyond the {input.shape[0]} rows of input")
        got = self._exchange(group_name, splits, tensors)  # [R, e]
        offsets = _before(got.reshape(-1)).view(size, local)
        self._move(group_name, input, out, splits, sources, got, offsets)
        out_splits_offsets.copy_(torch.stack((got.reshape(-1), offsets.reshape(-1))))

    # -- parts -----------------------------------------------------------------------------

    def _enter(self, group_name: str, *tensors: Tensor) -> int:
        """The barrier at which an operator begins -> the number of ranks."""
        if group_name not in self._groups:
            raise BufferRuleError(f"group_name={group_name!r}: no tensor met its peers in it")
        for tensor in tensors:
            if self._met.get(tensor.data_ptr()) != group_name:
                raise BufferRuleError(
                    f"a tensor {list(tensor.shape)} did not meet its peers in group {group_name!r}"
                )
        if self._reading is not None and not torch.equal(self._reading.rows, self._reading.copy):
            raise BufferRuleError(
                "the input of the operator before was written to while peers may read it"
            )
        self._reading = None
        return int(self._groups[group_name].size())

    def _exchange(self, group_name: str, splits: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        """splits [R, e] for each peer -> [R, e] from each."""
        # Whole numbers only: their hash is the same in every process. Offsets make two operators.
        shapes = hash(tuple((*t.shape, t.element_size()) for t in tensors))
        sent = torch.cat((torch.full((len(splits), 1), shapes), splits), 1)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self._groups[group_name])
        others = [rank for rank, theirs in enumerate(got[:, 0].tolist()) if theirs != shapes]
        if others:
            raise BufferRuleError(
                f"ranks {others} call another operator, or one with tensors of other shapes"
            )
        return got[:, 1:]

    def _move(
        self,
        group_name: str,
        input: Tensor,
        out: Tensor,
        sizes: Tensor,
        sources: Tensor,
        got: Tensor,
        offsets: Tensor,
    ) -> None:
        """All [R, e]: rows for each peer's slot and where they lie in input, rows from each peer
        and where they shall lie in out."""
        last = int((offsets + got).max())
        if last > out.shape[0]:
            raise BufferRuleError(f"out: {out.shape[0]} rows, {last} arrive")
        sent = _bytes(input).index_select(0, _places(sizes, sources))
        arrived = torch.empty((int(got.sum()), sent.shape[1]), dtype=torch.uint8)
        dist.all_to_all_single(
            arrived,
            sent,
            got.sum(1).tolist(),
            sizes.sum(1).tolist(),
            group=self._groups[group_name],
        )
        rows = _bytes(out)
        rows.fill_(_POISON)
        rows.index_copy_(0, _places(got, offsets), arrived)
        used = _bytes(input)[: int((sources + sizes).max())]
        self._reading = _Read(used, used.clone())


def _places(sizes: Tensor, starts: Tensor) -> Tensor:
    """sizes, starts [R, e] -> [sum]: the numbers of all rows, in order of (rank, slot)."""
    sizes, starts = sizes.reshape(-1), starts.reshape(-1)
    shifts = (starts - _before(sizes)).repeat_interleave(sizes)
    return shifts + torch.arange(shifts.shape[0])


def _before(sizes: Tensor) -> Tensor:
    """[n] -> [n]: the sum of those before each."""
    return sizes.cumsum(0) - sizes


def _bytes(tensor: Tensor) -> Tensor:
    """View uint8 [rows, bytes of a row]."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _at_most(name: str, value: int, most: int) -> None:
    host_assert(value <= most, f"{name}={value}, at most {most}")


def _check_contiguous(*tensors: Tensor) -> None:
    host_assert(all(t.is_contiguous() for t in tensors), "all tensors are contiguous")


def _check_kinds(input: Tensor, out: Tensor, given: Tensor, got: Tensor) -> None:
    host_assert(
        input.dtype == out.dtype and input.stride(0) == out.stride(0),
        "input and out have one dtype and one stride of rows",
    )
    host_assert(given.dtype == got.dtype == torch.int64, "splits and offsets are int64")
