"""Every kernel of every implementation against a float64 reference, over ragged shapes.

The native library is built four times: as this machine has it, and without BF16, AVX-512 and all
SIMD instructions, so that the paths of other machines are checked here too.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DTYPES, close, kernels, normal, spec  # noqa: F401
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, Kernels

# -- dense -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, n, k",
    [(0, 8, 8), (1, 1, 1), (7, 33, 17), (33, 200, 130), (5, 576, 64), (300, 70, 96), (13, 48, 513)],
)
def test_linear(kernels: Kernels, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + n + k)
    x, w = normal(rows, k, dtype=dtype), normal(n, k, dtype=dtype)
    weight = kernels.linear_weight(w, dtype)
    assert torch.equal(weight.unpack(), w)
    assert (weight.out_features, weight.in_features) == (n, k)
    want = x.double() @ w.double().t()
    close(kernels.linear(x, weight), want, dtype)
    for out_dtype in DTYPES:
        got = kernels.linear(x, weight, out_dtype)
        assert got.dtype == out_dtype
        close(got, want, out_dtype)
    wide = torch.cat((x, normal(rows, 3, dtype=dtype)), dim=1)
    assert torch.equal(kernels.linear(wide[:, :k], weight), kernels.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(0, 16), (1, 7), (7, 100), (33, 512)])
def test_rms_norm(kernels: Kernels, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + width)
    x, weight = normal(rows, width + 5, dtype=dtype)[:, :width], normal(width)
    other = normal(rows, width, dtype=dtype)

    def want(rows_: Tensor) -> Tensor:
        rows_ = rows_.double()
        inverse = (rows_.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return rows_ * inverse * weight.double()

    got = kernels.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype and got.is_contiguous()
    close(got, want(x), dtype)
    residual, total = x.clone(), (x.float() + other.float()).to(dtype)
    got = kernels.add_rms_norm(residual, other, weight, 1e-6)
    assert torch.equal(residual, total)
    close(got, want(total), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, hidden, inter", [(0, 8, 8), (1, 64, 128), (7, 33, 21), (50, 96, 80)]
)
def test_mlp(kernels: Kernels, rows: int, hidden: int, inter: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + inter)
    x = normal(rows, hidden, dtype=dtype)
    gate_up = normal(2 * inter, hidden, dtype=dtype, scale=hidden**-0.5)
    down = normal(hidden, inter, dtype=dtype, scale=inter**-0.5)
    got = kernels.mlp(x, kernels.linear_weight(gate_up, dtype), kernels.linear_weight(down, dtype))
    close(got, gated(x, gate_up[:inter], gate_up[inter:], down), dtype, 2)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    wide = x.double()
    left = wide @ gate.double().t()
    hidden = left * torch.sigmoid(left) * (wide @ up.double().t())
    return hidden.to(x.dtype).double() @ down.double().t()


# -- experts ---------------------------------------------------------------------------------


def gate_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, s: GateSpec
) -> tuple[list[list[int]], list[list[float]]]:
    """Row by row in Python, in the order the protocol states."""
    ids, weights = [], []
    for row in x.double() @ weight.double().t():
        score = torch.sigmoid(row) if s.scoring == "sigmoid" else torch.softmax(row, -1)
        choice = score if bias is None else score + bias.double()
        size = len(choice) // s.num_groups
        if s.num_groups > 1:
            counted = 2 if s.group_score == "top2" else 1
            groups = [
                sum(sorted(choice[g * size : (g + 1) * size].tolist())[::-1][:counted])
                for g in range(s.num_groups)
            ]
            order = sorted(range(s.num_groups), key=lambda g: (-groups[g], g))
            kept = set(order[: s.topk_groups])
            fill = -math.inf if s.scoring == "sigmoid" else 0.0
            choice = torch.tensor(
                [c if i // size in kept else fill for i, c in enumerate(choice.tolist())],
                dtype=torch.float64,
            )
        picked = sorted(range(len(choice)), key=lambda i: (-choice[i].item(), i))[: s.top_k]
        chosen = [score[i].item() for i in picked]
        total = sum(chosen) + 1e-20 if s.renormalise else 1.0
        ids.append(picked)
        weights.append([c / total * s.scale for c in chosen])
    return ids, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, experts, hidden, bias_at, s",
    [
        (0, 8, 16, 0.0, spec()),
        (1, 64, 70, 0.0, spec(6)),
        (33, 256, 128, 0.3, spec(8, 8, 4)),
        (7, 16, 33, -5.0, spec(4, 4, 2)),  # negative choice scores in every group
        (9, 40, 64, None, spec(6, 1, 1, "softmax", "max", False, 1.0)),
        (9, 160, 64, None, spec(6, 8, 3, "softmax", "max", False, 16.0)),
        (3, 6, 8, 0.1, spec(6, 6, 6)),  # groups of one
    ],
)
def test_gate(
    kernels: Kernels,
    rows: int,
    experts: int,
    hidden: int,
    bias_at: float | None,
    s: GateSpec,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows + experts)
    x, weight = normal(rows, hidden, dtype=dtype), normal(experts, hidden, scale=hidden**-0.5)
    bias = None if bias_at is None else bias_at + 0.2 * normal(experts)
    ids, weights = kernels.gate(x, weight, bias, s)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    want_ids, want_weights = gate_reference(x, weight, bias, s)
    assert ids.tolist() == want_ids
    close(
        weights, torch.tensor(want_weights, dtype=torch.float64).view(rows, s.top_k), weights.dtype
    )


def test_gate_gives_ties_to_the_lowest_id(kernels: Kernels) -> None:
    weight = torch.zeros(16, 8)
    x = torch.ones(2, 8)
    ids, _ = kernels.gate(x, weight, None, spec(4, 4, 2))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    bias = torch.zeros(16)
    bias[[5, 13]] = 1.0
    ids, _ = kernels.gate(x, weight, bias, spec(4, 4, 2))
    assert ids.tolist() == [[5, 13, 4, 6]] * 2
    ids, _ = kernels.gate(x, weight, None, spec(3, 1, 1, "softmax", "max", False, 1.0))
    assert ids.tolist() == [[0, 1, 2]] * 2


def route(rows: int, slots: int, top_k: int, used: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by slot over the first `used` slots: pair_rows, offsets, index [T, K]."""
    ids = torch.stack([torch.randperm(used)[:top_k] for _ in range(rows)]) if rows else None
    flat = ids.flatten() if ids is not None else torch.zeros(0, dtype=torch.int64)
    order = flat.argsort(stable=True)
    offsets = torch.zeros(slots + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(flat, minlength=slots).cumsum(0)
    return (order // top_k).int(), offsets, order.argsort().view(rows, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, slots, used, hidden, inter",
    [(0, 4, 4, 16, 16), (1, 8, 5, 64, 128), (7, 6, 3, 33, 21), (90, 5, 4, 80, 72)],
)
def test_experts(
    kernels: Kernels,
    rows: int,
    slots: int,
    used: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows + inter)
    x = normal(rows, hidden, dtype=dtype)
    stacked = kernels.allocate_experts(slots, hidden, inter, dtype)
    parts = []
    for slot in range(slots):
        gate = normal(inter, hidden, dtype=dtype, scale=hidden**-0.5)
        up = normal(inter, hidden, dtype=dtype, scale=hidden**-0.5)
        down = normal(hidden, inter, dtype=dtype, scale=inter**-0.5)
        stacked.store(slot, gate, up, down)
        parts.append((gate, up, down))
    for slot in range(slots):
        assert all(torch.equal(a, b) for a, b in zip(stacked.fetch(slot), parts[slot], strict=True))
    pair_rows, offsets, index = route(rows, slots, 3, used)
    got = kernels.experts(x, pair_rows, offsets, stacked)
    want = torch.zeros(got.shape, dtype=torch.float64)
    for slot in range(slots):
        pairs = slice(int(offsets[slot]), int(offsets[slot + 1]))
        want[pairs] = gated(x[pair_rows[pairs].long()], *parts[slot])
    close(got, want, dtype, 2)

    moved = kernels.allocate_experts(slots, hidden, inter, dtype)
    for slot in range(slots):
        moved.bundle(slot).copy_from(stacked.bundle(slot).cut())
    assert torch.equal(kernels.experts(x, pair_rows, offsets, moved), got)

    weights = torch.rand(rows, 3)
    index[::2, 1] = -1
    combined = kernels.combine_pairs(got, index, weights)
    total = torch.zeros(rows, hidden, dtype=torch.float64)
    for k in range(3):
        here = index[:, k] >= 0
        total[here] += got[index[here, k]].double() * weights[here, k].double().unsqueeze(1)
    assert combined.dtype == torch.float32
    close(combined, total, torch.float32)
