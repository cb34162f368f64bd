"""A CUDA device that is not there: torch's fake tensors on it, kernels written down, not launched.

Shared by the tests that walk the GPU path, which import it by name. Whatever would make the host
wait for the device is counted or refused: asking for values (`item`, `tolist`, `bool`, `cpu`, `in`,
a tensor that is printed, or that is a number to python), for sizes (`nonzero`, a mask as an index:
refused), and sending some in a way that waits for what was launched before (not from pinned memory,
or not told that nobody waits; an index or a number put there that lies on the host). As torch 2.13
does it on CUDA; where its versions differ, that which waits.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

from models.deepseek.kernels.gpu.launches import Launch, recorded_launches
from models.deepseek.kernels.gpu.triton_attention import TritonAttention
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels

CUDA = torch.device("cuda:0")
SMS = 132  # of an H200


class UnlaunchedKernels(TritonKernels):
    """TritonKernels that do not look whether they can run here: weights on any device."""

    def __init__(self, device: torch.device, fast: bool = False) -> None:
        TritonAttention.__init__(self, device, fast=fast)
        self.description = self.build = "triton, not launched"


@dataclasses.dataclass
class FakeCuda:
    """launches: of kernels, in order. waits: where the host waited for the device, as "function
    file:line"; it is given zeros."""

    launches: list[Launch]
    mode: FakeTensorMode
    waits: list[str] = dataclasses.field(default_factory=list)
    pinned: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # by address, kept alive

    def pin(self, x: Tensor) -> Tensor:
        return self.note_pinned(x.clone() if x.numel() else x)

    def note_pinned(self, made: Tensor) -> Tensor:
        self.pinned[made.untyped_storage().data_ptr()] = made
        return made

    def is_pinned(self, x: Tensor) -> bool:
        return not x.numel() or x.untyped_storage().data_ptr() in self.pinned


@contextmanager
def fake_cuda(capturing: bool = False) -> Iterator[FakeCuda]:
    """Within it tensors on CUDA are fake and those on CPUs are real; launches are recorded."""
    properties = types.SimpleNamespace(multi_processor_count=SMS, major=9, minor=0)
    with ExitStack() as stack:
        for name, value in {
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (9, 0),
            "is_current_stream_capturing": lambda: capturing,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", Tensor.tolist))  # its own asks
        launches = stack.enter_context(recorded_launches())
        fake = FakeCuda(launches, FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_OnDevice(fake))
        yield fake


_ASKS = {  # for values; `len`, `shape` and iterating ask for none
    "cpu", "tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__",
    "__complex__", "__index__", "__contains__", "__format__", "__repr__", "equal", "allclose",
    "is_nonzero",
}  # fmt: skip
_SHAPES = {  # what comes out has a size to ask for
    "nonzero", "argwhere", "bincount", "masked_select", "unique", "unique_consecutive",
}  # fmt: skip
_LOOKS = {"multinomial", "histc"}  # at values, before it begins
_TO_OTHER = {"to", "type", "type_as"}
_FROM_HOST = {"to", "tensor", "as_tensor", "asarray", "new_tensor", "type_as"}
_FILLS = {"masked_fill", "masked_fill_", "index_fill", "index_fill_"}


class _OnDevice(TorchFunctionMode):
    """Whatever touches CUDA is done by fake tensors. Indexing is spelt out: python's own way asks
    for a guard of the device, and so for a driver."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = list(_flat([*args, *kwargs.values()]))
        owner = next((x for x in flat if isinstance(x, FakeTensor)), None)
        to_cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in flat)
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self.fake.pin(args[0])
        if kwargs.get("pin_memory"):
            return self.fake.note_pinned(func(*args, **kwargs | {"pin_memory": False}))
        if owner is None and not to_cuda:
            return func(*args, **kwargs)
        if name in _ASKS and owner is not None and owner.device.type == "cuda":
            return self._ask(func, args, kwargs)
        if name == "copy_":
            return self._copy(args[0], args[1], kwargs.get("non_blocking", any(args[2:])))
        if name in _FROM_HOST and (to_cuda or (owner is not None and owner is not args[0])):
            return self._send(name, owner, args, kwargs)
        if name == "new_tensor" and owner is not None and not kwargs.get("device"):
            return self._send(name, owner, args[1:], kwargs)
        self._count_sent(name, args, kwargs, flat)
        try:
            with self.fake.mode:
                out = self._make(func, name, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise AssertionError(f"{name}: the host would wait: {_caller()}: {error}") from None
        if name in _TO_OTHER and isinstance(out, FakeTensor) and out.device.type == "cpu":
            return self._ask(func, args, kwargs)
        return out

    def _make(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__get__":  # attributes
            return func(*args, **kwargs)
        if name in _SHAPES:
            raise AssertionError(f"{name}: the host would wait for its size: {_caller()}")
        if func is Tensor.__getitem__:
            return _pick(*args)
        if func is Tensor.__setitem__:
            return _put(*args)
        return func(*args, **kwargs)

    def _count_sent(self, name: str, args: Any, kwargs: Any, flat: list[Any]) -> None:
        """What torch sends to the device, or asks it for, before the function itself begins."""
        waits = int(name in _LOOKS)
        if name == "__getitem__":
            waits = _moved_index(args[1])
        elif name == "__setitem__":
            waits = _moved_index(args[1]) + _moved_value(*args)
        elif name == "where":  # numbers are made there; a tensor of one is sent
            waits = sum(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in flat)
        elif name in _FILLS:  # by a number: asked for
            values = [x for x in flat[1:] if isinstance(x, FakeTensor)]
            waits = sum(x.dim() == 0 for x in values[-1:])
        if waits:
            self.fake.waits += [f"{name} {_caller()}"] * waits

    def _send(self, name: str, owner: Tensor | None, args: Any, kwargs: Any) -> Tensor:
        """To the device, from wherever: the same, said of shapes and dtypes. owner: a tensor there
        whose device, and dtype, is meant."""
        dtype = next((x for x in [*args, *kwargs.values()] if isinstance(x, torch.dtype)), None)
        if dtype is None and owner is not None and owner is not args[0]:
            dtype = owner.dtype
        x = args[0] if isinstance(args[0], Tensor) else torch.tensor(args[0], dtype=dtype)
        if isinstance(x, FakeTensor) and dtype in (None, x.dtype):
            return x
        shape, kind = tuple(x.shape), dtype or x.dtype
        lets_go = kwargs.get("non_blocking", False) and self.fake.is_pinned(x)
        if not isinstance(x, FakeTensor) and not lets_go:
            self.fake.waits.append(f"{name} {_caller()}")
        with self.fake.mode:
            return torch.empty(shape, dtype=kind, device=CUDA)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        """Between devices: a guard of CUDA would be asked for."""
        assert torch.broadcast_shapes(target.shape, source.shape) == target.shape
        sides = [x for x in (target, source) if not isinstance(x, FakeTensor)]
        if len(sides) == 1 and not (non_blocking and self.fake.is_pinned(sides[0])):
            self.fake.waits.append(f"copy_ {_caller()}")
        return target

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same of zeros on the host."""
        self.fake.waits.append(f"{func.__name__} {_caller()}")
        parts = [*args, *kwargs.values()]
        told = [
            torch.zeros(tuple(x.shape), dtype=x.dtype) if isinstance(x, FakeTensor) else x
            for x in parts
        ]
        return func(*told[: len(args)], **dict(zip(kwargs, told[len(args) :], strict=True)))


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _moved_index(index: Any) -> int:
    """How many parts of an index lie on the host and must be sent, or are one number on the
    device, which python asks for."""
    return sum(
        isinstance(x, list)
        or (isinstance(x, Tensor) and isinstance(x, FakeTensor) is (not x.dim()))
        for x in _parts(index)
    )


def _moved_value(x: Tensor, index: Any, value: Any) -> int:
    """Whether what is put there lies on the host and must be sent: tensors, and a number that is
    put at one element or where tensors say (a slice, or what a mask shows, is filled with it)."""
    if isinstance(value, FakeTensor):
        return 0
    if isinstance(value, Tensor) and value.dim():
        return 1
    parts = _parts(index)
    if any(isinstance(part, (list, Tensor)) for part in parts):
        return int(not any(map(_is_mask, parts)))
    return int(len(parts) == x.dim() and all(isinstance(part, int) for part in parts))


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _caller() -> str:
    """The innermost line of ours."""
    skipped = ("site-packages", "fake_cuda")
    frame = inspect.currentframe()
    while frame is not None and any(word in frame.f_code.co_filename for word in skipped):
        frame = frame.f_back
    assert frame is not None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _put(x: Tensor, index: Any, value: Any) -> None:
    viewed, tensors = _view(x, index)
    if any(map(_is_mask, tensors)) and isinstance(value, Tensor) and not _is_number(value):
        raise AssertionError(f"a mask as an index: the host would wait for its size: {_caller()}")
    if not isinstance(value, FakeTensor):
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        value = torch.empty(shape, dtype=x.dtype, device=x.device)
    if not any(t is not None for t in tensors):
        assert torch.broadcast_shapes(viewed.shape, value.shape) == viewed.shape
    else:
        torch.ops.aten.index_put_(viewed, tensors, value)


def _is_number(value: Tensor) -> bool:
    """On the host: a mask has it filled in."""
    return value.numel() == 1 and not isinstance(value, FakeTensor)


def _pick(x: Tensor, index: Any) -> Tensor:
    viewed, tensors = _view(x, index)
    if not any(t is not None for t in tensors):
        return viewed
    if any(map(_is_mask, tensors)):
        raise AssertionError(f"a mask as an index: the host would wait for its size: {_caller()}")
    return torch.ops.aten.index.Tensor(viewed, tensors)


def _view(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What slices, numbers and None make of x, and the tensors that index what is left."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [p for p in parts if not isinstance(p, Tensor)]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        taken = sum(p is not None and p is not Ellipsis for p in parts)
        parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    tensors: list[Tensor | None] = []
    dim = 0
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            if any(isinstance(end, Tensor) for end in (part.start, part.stop, part.step)):
                raise AssertionError(f"a slice's ends: the host would wait for them: {_caller()}")
            size = x.shape[dim]
            start, stop, step = part.indices(size)
            x = torch.ops.aten.slice.Tensor(x, dim, start, max(stop, start), step)
        elif isinstance(part, int):
            x = x.select(dim, part)
            continue
        else:
            if not isinstance(part, FakeTensor):  # lists and indices on the host are sent
                shape = tuple(part.shape) if isinstance(part, Tensor) else (len(part),)
                part = torch.empty(shape, dtype=torch.int64, device=x.device)
            tensors.append(part)
            dim += 1
            continue
        tensors.append(None)
        dim += 1
    return x, tensors


def move(root: Any) -> None:
    """All tensors that are reachable from an object become fake ones on CUDA, in place: views stay
    views of one memory, kernels think they run there. Call it within `fake_cuda`."""
    memories: dict[int, Tensor] = {}
    seen: set[int] = set()

    def fake(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in memories:
            memories[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=CUDA)
        memory = memories[key].view(tensor.dtype) if storage.nbytes() else memories[key]
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def change(value: Any) -> Any:
        if isinstance(value, Tensor):
            return fake(value)
        if isinstance(value, torch.device):
            return CUDA
        if isinstance(value, list):
            value[:] = [change(x) for x in value]
        elif isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(change(x) for x in value)
        elif isinstance(value, dict):
            for key in list(value):
                value[key] = change(value[key])
        elif _is_ours(value) and id(value) not in seen:
            seen.add(id(value))
            for name, inner in list(vars(value).items()):
                changed = change(inner)
                if changed is not inner:
                    object.__setattr__(value, name, changed)
        return value

    change(root)


def _is_ours(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__.split(".")[0]
    return module in ("models", "dispatch", "fake_cuda") or (
        dataclasses.is_dataclass(value) and module == "moeserve"
    )
