"""The handle that joins the four calls of a layer, and the checks that dispatchers share.

Knows: the order of the calls, the shapes of their arguments. Knows nothing of transports.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dispatch.base import (
    CombineForm,
    DispatchConfig,
    DispatchError,
    Fp8Tokens,
    HandleError,
    Probe,
    WireFormat,
)
from dispatch.fp8 import row_scales
from dispatch.permute import to_row_major
from dispatch.words import counted, nearest, raised
from ep.group import EPGroup

_FEW_PICKS = 96


class HandleState(enum.Enum):
    """How far a handle has come; the value says which call comes next."""

    SENT = "dispatch_finish"
    RECEIVED = "combine_start"
    RETURNED = "combine_finish"
    SPENT = "none: it is spent"


@dataclass(eq=False)
class TokenHandle:
    """Single use, made by dispatch_start. x [T, D], slots [T, K] int32, weights [T, K] fp32;
    scales of x where it is e4m3."""

    owner: object
    x: Tensor
    slots: Tensor
    weights: Tensor
    scales: Tensor | None = None
    state: HandleState = HandleState.SENT
    y: Tensor | None = None
    index: Tensor | None = None

    @classmethod
    def expect(cls, handle: Any, owner: object, state: HandleState) -> Self:
        """The handle, if it is one of `owner` in this state; else HandleError. The caller moves it
        on once nothing can be refused any more."""
        if not isinstance(handle, cls) or handle.owner is not owner:
            raise HandleError(f"{state.value}: the handle is not one that this dispatcher made")
        if handle.state is not state:
            raise HandleError(f"{state.value}: the handle's next call is {handle.state.value}")
        return handle


def check_probe(name: str, answer: Probe) -> None:
    """DispatchError if the backend of this name cannot run here."""
    if not answer.ok:
        raise DispatchError(f"dispatcher {name!r}: {answer.reason}")


def answer_of(package: str, ask: Callable[[], Probe]) -> Probe:
    """What `ask` says. A library that raises as it is asked, even what would end the process, is
    one that cannot run here: that is its reason."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Probe(False, f"{package}: {raised(error)}")


def group_problem(group: EPGroup, config: DispatchConfig) -> str | None:
    """Why collectives among ranks cannot carry this; None: they can."""
    if group.size == 1 or group.device_group is None:
        return "needs two ranks or more; one rank has no process group"
    if config.num_physical_experts % group.size:
        return (
            f"num_physical_experts={config.num_physical_experts} does not divide by "
            f"{counted(group.size, 'rank')}: {nearest(config.num_physical_experts, group.size)}"
        )
    return None


def form_for(config: DispatchConfig, asked: CombineForm | None) -> CombineForm:
    """asked, or what the mode wants of a backend that can do both."""
    if asked is not None:
        return asked
    return CombineForm.PAIRS if config.deterministic else CombineForm.SUMMED


def check_inputs(
    config: DispatchConfig,
    x: Tensor | Fp8Tokens,
    slots: Tensor,
    weights: Tensor,
    bound: int | None = None,
) -> Tensor:
    """x in the model dtype, if the arguments of dispatch_start have the shapes of the interface and
    no more tokens than the step's bound; else DispatchError. For backends that take such rows
    whatever `config.wire` is.

    What slots say is not looked at here: see `check_slots`.
    """
    if isinstance(x, Fp8Tokens):
        raise DispatchError(f"x: FP8 rows; must be {config.dtype}: this backend takes no others")
    _check_matrix("x", x, config.dtype, config.hidden_size)
    _check_picks(config, x.shape[0], slots, weights, bound)
    return x


def check_rows(
    config: DispatchConfig,
    x: Tensor | Fp8Tokens,
    slots: Tensor,
    weights: Tensor,
    bound: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x, scales (None for wire=model), if the arguments of dispatch_start are what `config.wire`
    and the step's bound say; else DispatchError. Slots: as `check_inputs`."""
    wire, hidden = config.wire, config.hidden_size
    if wire is WireFormat.MODEL:
        if isinstance(x, Fp8Tokens):
            raise DispatchError(f"x: FP8 rows; must be {config.dtype}, as wire=model")
        return check_inputs(config, x, slots, weights, bound), None
    if not isinstance(x, Fp8Tokens):
        given = f"{x.dtype} rows" if isinstance(x, Tensor) else type(x).__name__
        raise DispatchError(f"x: {given}; must be Fp8Tokens, as wire={wire.value}")
    form, dtype, width = row_scales(hidden, wire)
    if x.scale_format is not form:
        raise DispatchError(
            f"x.scale_format={x.scale_format.value}: must be {form.value}, as wire={wire.value}"
        )
    _check_matrix("x.values", x.values, torch.float8_e4m3fn, hidden)
    tokens = x.values.shape[0]
    _check_tensor("x.scales", x.scales)
    if x.scales.shape != (tokens, width) or x.scales.dtype != dtype:
        raise DispatchError(
            f"x.scales: {x.scales.dtype} {list(x.scales.shape)}; must be {dtype} "
            f"{[tokens, width]}, as wire={wire.value} at hidden_size={hidden}"
        )
    _check_picks(config, tokens, slots, weights, bound)
    return x.values, x.scales


def device_of(*arguments: Any) -> torch.device:
    """Where arguments are that may be anything: the first that says so; else the CPU."""
    for value in arguments:
        if isinstance(value, Tensor | Fp8Tokens):
            return value.device
    return torch.device("cpu")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise DispatchError(f"{name}: {type(value).__name__}; must be a tensor")
    if value.requires_grad and torch.is_grad_enabled():
        raise DispatchError(f"{name}: requires grad; must not: nothing here is differentiated")


def _check_matrix(name: str, x: Tensor, dtype: torch.dtype, width: int) -> None:
    _check_tensor(name, x)
    if x.dim() != 2 or x.shape[1] != width or x.dtype != dtype:
        raise DispatchError(f"{name}: {x.dtype} {list(x.shape)}; must be {dtype} [T, {width}]")


def _check_picks(
    config: DispatchConfig, tokens: int, slots: Tensor, weights: Tensor, bound: int | None
) -> None:
    shape = (tokens, config.top_k)
    _check_tensor("slots", slots)
    if slots.shape != shape or slots.dtype != torch.int32:
        raise DispatchError(
            f"slots: {slots.dtype} {list(slots.shape)}; must be int32 {list(shape)}"
        )
    _check_tensor("weights", weights)
    if weights.shape != shape or weights.dtype != torch.float32:
        raise DispatchError(
            f"weights: {weights.dtype} {list(weights.shape)}; must be float32 {list(shape)}"
        )
    if tokens > config.max_tokens_per_rank:
        raise DispatchError(
            f"x: {tokens} tokens; at most max_tokens_per_rank={config.max_tokens_per_rank}"
        )
    if bound is not None and tokens > bound:
        raise DispatchError(f"x: {tokens} tokens; the agreed bound is {bound}")


def check_slots(config: DispatchConfig, slots: Tensor) -> None:
    """DispatchError if a physical slot is not in -1..P-1 or, on CPUs, a token picks one twice: a
    sort of what lies on a device is not worth its time there."""
    if slots.numel() == 0:
        return
    if slots.device.type != "cpu":
        _check_range(config, *(int(end) for end in slots.aminmax()))
    elif slots.numel() <= _FEW_PICKS:  # a decode step's: plain Python is several times quicker
        rows = slots.tolist()
        _check_range(config, min(map(min, rows)), max(map(max, rows)))
        for token, row in enumerate(rows):
            picks = [slot for slot in row if slot >= 0]
            if len(set(picks)) < len(picks):
                raise _twice(token, next(slot for slot in picks if picks.count(slot) > 1))
    else:
        ordered = slots.sort(dim=1).values
        _check_range(config, int(ordered[:, 0].min()), int(ordered[:, -1].max()))
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if bool(twice.any()):
            token, k = twice.nonzero()[0].tolist()
            raise _twice(token, int(ordered[token, k]))


def _check_range(config: DispatchConfig, low: int, high: int) -> None:
    if low < -1 or high >= config.num_physical_experts:
        raise DispatchError(
            f"slots: {low}..{high}; valid are -1 (masked) and 0..{config.num_physical_experts - 1}"
        )


def _twice(token: int, slot: int) -> DispatchError:
    return DispatchError(f"slots: token {token} has slot {slot} twice; must be distinct")


def check_values(y: Tensor) -> None:
    """DispatchError unless y holds what experts can hand back, whatever its shape."""
    _check_tensor("y", y)
    if not y.dtype.is_floating_point:
        raise DispatchError(f"y: {y.dtype}; must be a floating-point dtype")


def check_outputs(
    form: CombineForm, slots: Tensor, hidden: int, y: Tensor, index: Tensor | None
) -> None:
    """DispatchError unless y (and index) fit the received slots [N, K]."""
    check_values(y)
    if form is CombineForm.SUMMED:
        if index is not None:
            raise DispatchError("index: only the PAIRS form takes one; must be None")
        if y.shape != (slots.shape[0], hidden):
            raise DispatchError(f"y: {list(y.shape)}; must be [{slots.shape[0]}, {hidden}]")
        return
    if y.dim() != 2 or y.shape[1] != hidden:
        raise DispatchError(f"y: {list(y.shape)}; must be [pairs, {hidden}]")
    if index is not None:
        _check_tensor("index", index)
        if index.shape != slots.shape or index.dtype != torch.int64:
            raise DispatchError(
                f"index: {index.dtype} {list(index.shape)}; must be int64 {list(slots.shape)}"
            )
        return
    pairs = int((slots >= 0).sum())
    if y.shape[0] != pairs:
        raise DispatchError(f"y: {y.shape[0]} rows; must be {pairs}, one for each valid pair")


def pairs_as_received(y: Tensor, index: Tensor, received: int) -> Tensor:
    """y [Q, D] in the order of index [N, K] -> row-major. DispatchError unless Q == received."""
    y = to_row_major(y, index)
    if y.shape[0] != received:
        raise DispatchError(f"index: {y.shape[0]} valid pairs; must be {received}, as received")
    return y


def pairs_if_many(config: DispatchConfig, counts: Tensor, rows: int) -> int | None:
    """`Received.num_pairs` of a backend that lets the host wait anyway, from counts [e]: it waits
    once more where more rows came than this rank may send, so that room is made for what is there,
    not for what could be."""
    return int(counts.sum()) if rows > config.max_tokens_per_rank else None


def pair_index(slots: Tensor) -> Tensor:
    """slots [N, K] -> [N, K] int64: number of each valid pair in row-major order, -1 elsewhere."""
    valid = (slots >= 0).reshape(-1)
    numbers = valid.cumsum(0) - 1
    return torch.where(valid, numbers, -1).view(slots.shape)
