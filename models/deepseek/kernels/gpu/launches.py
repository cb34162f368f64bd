"""Launches written down instead of done: what a walk without a GPU sees of the kernels.

`kernel[grid](...)` is how every kernel here is launched; within `recorded_launches` triton's own
launcher is replaced, so that tensors may be fake (torch's FakeTensorMode) and no driver is asked
for. `uncovered` says of which launches no compile case has the types: those that nobody has
compiled.

Knows how triton binds arguments. Knows no kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.language import INTERPRETED, need_triton

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.bool: "i1",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_cooperative_grid")
GRID_LIMITS = (2**31 - 1, 65535, 65535)  # of CUDA


@dataclass(frozen=True)
class Launch:
    """signature: of the parameters that are no constants, as `CompileCase.signature`. shared:
    parameters that got the tensor of another one too: a kernel that does not need some pointer is
    given any. devices: of its tensors."""

    kernel: Any
    grid: tuple[int, ...]
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    options: Mapping[str, object]
    devices: frozenset[str]
    shared: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launches within, in order; outputs keep what they held. ValueError for a grid that CUDA would
    refuse, a missing argument or one of no known type."""
    need_triton()
    assert not INTERPRETED, "kernels are interpreted here: nothing is launched"
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(self, args, kwargs, grid))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Launch:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    names = list(kernel.arg_names)
    if len(args) > len(names):
        raise ValueError(f"{kernel.__name__}: {len(args)} arguments; it has {len(names)}")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in given:
            raise ValueError(f"{kernel.__name__}: {name}={value!r}: no parameter, or given twice")
        given[name] = value
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    for parameter in kernel.params:
        if parameter.name not in given and not parameter.has_default:
            raise ValueError(f"{kernel.__name__}: nothing is given for {parameter.name}")
        value = given.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            constexprs[parameter.name] = value
        else:
            signature[parameter.name] = type_of(f"{kernel.__name__}: {parameter.name}", value)
    counts = tuple(grid(given) if callable(grid) else grid)
    if any(not 1 <= n <= most for n, most in zip(counts, GRID_LIMITS, strict=False)):
        raise ValueError(f"{kernel.__name__}: grid {counts}: must be 1 to {GRID_LIMITS}")
    tensors = {n: tensor for n, x in given.items() if (tensor := _tensor(x)) is not None}
    devices = frozenset(str(tensor.device) for tensor in tensors.values())
    owners = Counter(id(tensor) for tensor in tensors.values())
    shared = frozenset(n for n, tensor in tensors.items() if owners[id(tensor)] > 1)
    return Launch(kernel, counts, signature, constexprs, options, devices, shared)


def _tensor(value: Any) -> Tensor | None:
    value = getattr(value, "base", value)  # a descriptor's
    return value if isinstance(value, Tensor) else None


def type_of(where: str, value: Any) -> str:
    """As triton names it."""
    if isinstance(value, Tensor):
        if value.dtype not in _TYPES:
            raise ValueError(f"{where}: {value.dtype} has no name in triton")
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    raise ValueError(f"{where}: {value!r} is no argument of a kernel")


def uncovered(launches: Iterable[Launch], cases: Iterable[CompileCase]) -> list[str]:
    """A line for each kind of launch whose types of pointers and descriptors no case has. Sizes in
    constexprs belong to a model: they need not be a case's; nor the width of integers. A pointer
    that is not given (None) is none that the kernel reads."""
    known: dict[Any, list[Mapping[str, str]]] = {}
    for case in cases:
        # A case may name more parameters than its kernel has left once constants are taken out.
        types = {n: t for n, t in case.signature.items() if n in case.kernel.arg_names}
        known.setdefault(case.kernel, []).append(
            {n: t for n, t in types.items() if n not in case.constexprs}
        )
    lines: dict[str, None] = {}
    for launch in launches:
        of_kernel = known.get(launch.kernel, [])
        if not any(_covers(types, launch) for types in of_kernel):
            told = ", ".join(f"{n} {t}" for n, t in launch.signature.items() if _is_data(t))
            lines[f"{launch.name}: no compile case has {told}"] = None
    return list(lines)


def _covers(case: Mapping[str, str], launch: Launch) -> bool:
    mine = {n: t for n, t in launch.signature.items() if _is_data(t)}
    absent = {n for n, value in launch.constexprs.items() if value is None}
    theirs = {n: t for n, t in case.items() if _is_data(t) and n not in absent}
    return mine.keys() == theirs.keys() and all(
        n in launch.shared or _plain(theirs[n]) == _plain(t) for n, t in mine.items()
    )


def _is_data(kind: str) -> bool:
    return kind.startswith(("*", "tensordesc"))


def _plain(kind: str) -> str:
    """Without the tile of a descriptor."""
    return kind.split("[")[0]
