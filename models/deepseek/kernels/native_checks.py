"""What the C side relies on, checked in Python before each call: dtype, layout, sizes.

Each check is cheap beside a call and raises KernelArgumentError naming the tensor, what it is and
what it must be. Indices are checked in C, where they are read anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, LinearWeight, MlaShape
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.fp8_latents import is_fp8, row_bytes
from models.deepseek.kernels.native_weights import FP8_FORMAT, NativeLinearWeight
from models.interface import ForwardBatch

MAX_ROPE_DIM = 512


def foreign_weight(weight: object, name: str) -> KernelArgumentError:
    return KernelArgumentError(
        f"{name} is a {type(weight).__name__}: must come from NativeKernels itself"
    )


def packed(weight: LinearWeight, name: str) -> NativeLinearWeight:
    if not isinstance(weight, NativeLinearWeight):
        raise foreign_weight(weight, name)
    return weight


def dequantised(weight: LinearWeight, name: str) -> NativeLinearWeight:
    """Where heads are taken apart, panels of e4m3 are not known to the C side."""
    weight = packed(weight, name)
    if weight.format & FP8_FORMAT:
        raise KernelArgumentError(f"{name} is in e4m3: must be dequantised")
    return weight


def contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rows(x: Tensor, name: str, width: int, dtype: torch.dtype) -> Tensor:
    """x as [T, width] of this dtype with unit stride along the row, else KernelArgumentError."""
    if x.dim() != 2 or x.shape[1] != width or x.dtype != dtype:
        raise KernelArgumentError(
            f"{name} is {tuple(x.shape)} {x.dtype}: must be [T, {width}] {dtype}"
        )
    return unit_stride(x)


def typed(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if x.dtype != dtype:
        raise KernelArgumentError(f"{name} is {x.dtype}: must be {dtype}")
    return contiguous(x)


def float32(x: Tensor, name: str) -> Tensor:
    return typed(x, name, torch.float32)


def positions_of(positions: Tensor, num_rows: int) -> Tensor:
    if positions.shape[0] != num_rows:
        raise KernelArgumentError(f"positions has {positions.shape[0]} rows: must be {num_rows}")
    return typed(positions, "positions", torch.int64)


def check_even(name: str, size: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and size % 2:
        raise KernelArgumentError(f"{name}={size}: must be even in bfloat16")


def rope_table(cos_sin: Tensor, dim: int) -> Tensor:
    """cos_sin [positions, dim] for a rotation of `dim` values."""
    if dim % 2 or dim > MAX_ROPE_DIM or cos_sin.shape[1] != dim:
        raise KernelArgumentError(
            f"rope dim is {dim}, cos_sin has {cos_sin.shape[1]} columns: must be equal, even, at "
            f"most {MAX_ROPE_DIM}"
        )
    return float32(cos_sin, "cos_sin")


def check_cache(layer: Tensor, width: int, dtype: torch.dtype) -> None:
    if layer.shape[2] != width or layer.dtype != dtype or not layer.is_contiguous():
        raise KernelArgumentError(
            f"layer is {tuple(layer.shape)} {layer.dtype}: must be contiguous "
            f"[blocks, block, {width}] {dtype}"
        )


def check_latents(layer: Tensor, rank: int, rope: int, dtype: torch.dtype) -> int:
    """Of a layer that is read, in the model dtype or in FP8 -> bytes a row in FP8, 0 where not."""
    if not is_fp8(layer):
        check_cache(layer, rank + rope, dtype)
        return 0
    check_cache(layer, row_bytes(rank, rope, dtype), layer.dtype)
    return layer.shape[2]


def attention_misfit(shape: MlaShape, dtype: torch.dtype, deterministic: bool) -> str | None:
    """What the attention calls would refuse of this model, in the words of its config."""
    if shape.rope_dim > MAX_ROPE_DIM:
        return f"qk_rope_head_dim={shape.rope_dim}: at most {MAX_ROPE_DIM}"
    sizes = [("kv_lora_rank + qk_rope_head_dim", shape.rank + shape.rope_dim)]
    if not deterministic:
        sizes += [("qk_nope_head_dim", shape.nope_dim), ("v_head_dim", shape.value_dim)]
    try:
        for name, size in sizes:
            check_even(name, size, dtype)
    except KernelArgumentError as error:
        return str(error)
    return None


def check_gate(spec: GateSpec, num_experts: int) -> None:
    if spec.scoring not in ("sigmoid", "softmax"):
        raise KernelArgumentError(f"scoring={spec.scoring!r}: must be 'sigmoid' or 'softmax'")
    if spec.group_score not in ("top2", "max"):
        raise KernelArgumentError(f"group_score={spec.group_score!r}: must be 'top2' or 'max'")
    if not 0 < spec.top_k <= num_experts:
        raise KernelArgumentError(f"top_k={spec.top_k}: must be 1..{num_experts}")
    if num_experts % spec.num_groups or not 0 < spec.topk_groups <= spec.num_groups:
        raise KernelArgumentError(
            f"num_groups={spec.num_groups}, topk_groups={spec.topk_groups}: groups must divide "
            f"{num_experts} experts, topk_groups at most the groups"
        )


def step_pointers(batch: ForwardBatch, num_rows: int) -> tuple[int | None, ...]:
    """slot_mapping, positions, query_start, tables, sequences, table width, ancestors, their
    width."""
    rows = [("positions", batch.positions), ("slot_mapping", batch.slot_mapping)]
    tables = [("query_start", batch.query_start), ("block_tables", batch.block_tables)]
    paths = batch.ancestors
    if paths is not None:
        tables.append(("ancestors", paths))
    for pairs, dtype in ((rows, torch.int64), (tables, torch.int32)):
        for name, tensor in pairs:
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise KernelArgumentError(f"{name} is {tensor.dtype}: must be contiguous {dtype}")
    for name, tensor in rows if paths is None else [*rows, ("ancestors", paths)]:
        if tensor.shape[0] != num_rows:
            raise KernelArgumentError(f"{name} has {tensor.shape[0]} rows: must be {num_rows}")
    return (
        batch.slot_mapping.data_ptr(),
        batch.positions.data_ptr(),
        batch.query_start.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.num_sequences,
        batch.block_tables.shape[1],
        None if paths is None else paths.data_ptr(),
        0 if paths is None else paths.shape[1],
    )
