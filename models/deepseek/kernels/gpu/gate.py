"""Gate: logits -> scores, bias, group limits, top-k, renormalisation, scale, fused in one kernel.

base.Kernels.gate says what is computed, step for step; ties go to the lowest id. One warp holds a
row as [groups, experts a group], both padded to powers of two in registers only, so any number of
experts will do. A row knows nothing of others (law 5).

The gate is two kernels: router.py's GEMM, then this one. A row needs the logits of all experts,
which one program would have to compute alone: with few tokens the 7 MB weight (V3) asks for
programs on all SMs, split over experts and channels, and their parts meet in memory anyway.

Shape letters: T tokens, D hidden, E experts, K top-k, G groups, P experts a group, S parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec
from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.router import router_cost, router_logits

MAX_EXPERTS = 1024  # 32 registers a thread for each of some rows of values
RENORM_FLOOR = 1e-20


@triton.jit(do_not_specialize=["tokens"])
def choose_kernel(
    parts, bias, ids, weights, tokens, experts, scale,
    num_parts: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
    block_g: tl.constexpr, block_p: tl.constexpr, top_k: tl.constexpr, block_k: tl.constexpr,
    topk_groups: tl.constexpr, sigmoid: tl.constexpr, top2: tl.constexpr,
    renormalise: tl.constexpr, has_bias: tl.constexpr, floor: tl.constexpr,
):  # fmt: skip
    """parts [S, T, E] fp32 (their sum over S is the logits), bias [E] fp32 -> ids [T, K] int32,
    weights [T, K] fp32. Bytes: 4STE + 8TK. FLOPs none on matrix units: bound by bytes, about
    T E (S + 5 + 3K) operations. One program, of one warp, a token."""
    row = tl.program_id(0).to(tl.int64)
    of_group, in_group = tl.arange(0, block_g), tl.arange(0, block_p)
    number = of_group[:, None] * group + in_group[None, :]  # [G, P]: an expert's id
    real = (of_group < groups)[:, None] & (in_group < group)[None, :]
    logits = tl.zeros((block_g, block_p), tl.float32)
    for part in range(num_parts):
        at = (part * tokens + row) * experts + number
        logits += tl.load(parts + at, mask=real, other=0.0)
    low = float("-inf")
    if sigmoid:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        peak = tl.max(tl.max(tl.where(real, logits, low), axis=1), axis=0)
        raised = tl.where(real, tl.exp(logits - peak), 0.0)
        scores = tl.div_rn(raised, tl.sum(tl.sum(raised, axis=1), axis=0))
    choice = scores
    if has_bias:
        choice += tl.load(bias + number, mask=real, other=0.0)
    # A NaN stands before all others, as in a sort; so no round below is without a winner.
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(real, choice, low)
    if groups > 1:
        of_groups = tl.max(choice, axis=1)  # [G]
        if top2 and group > 1:
            is_best = choice == of_groups[:, None]
            first = tl.min(tl.where(is_best, in_group[None, :], block_p), axis=1)
            second = tl.where(in_group[None, :] == first[:, None], low, choice)
            of_groups += tl.max(second, axis=1)
        # How many groups stand before each: better ones, and equal ones of a lower number. Groups
        # that are padding have the highest numbers.
        better = of_groups[None, :] > of_groups[:, None]
        level = (of_groups[None, :] == of_groups[:, None]) & (of_group[None, :] < of_group[:, None])
        before = tl.sum((better | level).to(tl.int32), axis=1)
        fill = low if sigmoid else 0.0
        choice = tl.where((before < topk_groups)[:, None], choice, fill)
    free = real
    slot = tl.arange(0, block_k)
    chosen = tl.zeros((block_k,), tl.int32)
    values = tl.zeros((block_k,), tl.float32)
    total = 0.0
    for k in tl.static_range(top_k):
        best = tl.max(tl.max(tl.where(free, choice, low), axis=1), axis=0)
        winner = tl.where(free & (choice == best), number, groups * group)
        winner = tl.min(tl.min(winner, axis=1), axis=0)
        mine = number == winner
        value = tl.sum(tl.sum(tl.where(mine & real, scores, 0.0), axis=1), axis=0)
        free = free & (number != winner)
        chosen = tl.where(slot == k, winner, chosen)
        values = tl.where(slot == k, value, values)
        total += value
    if renormalise:
        values = tl.div_rn(values, total + floor)
    at = row * top_k + slot
    tl.store(ids + at, chosen, mask=slot < top_k)
    tl.store(weights + at, values * scale, mask=slot < top_k)


def choose(parts: Tensor, bias: Tensor | None, spec: GateSpec) -> tuple[Tensor, Tensor]:
    """parts [S, T, E] fp32 (their sum over S is the logits) -> ids [T, K] int32, weights [T, K]."""
    num_parts, tokens, experts = parts.shape
    check_spec(spec, experts)
    group = experts // spec.num_groups
    ids = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=parts.device)
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=parts.device)
    if tokens:
        choose_kernel[(tokens,)](
            parts.contiguous(), parts if bias is None else bias, ids, weights, tokens, experts,
            spec.scale, num_parts=num_parts, **_constants(spec, group, bias is not None),
            num_warps=1,
        )  # fmt: skip
    return ids, weights


def _constants(spec: GateSpec, group: int, has_bias: bool) -> dict[str, object]:
    return {
        "groups": spec.num_groups,
        "group": group,
        "block_g": triton.next_power_of_2(spec.num_groups),
        "block_p": triton.next_power_of_2(group),
        "top_k": spec.top_k,
        "block_k": triton.next_power_of_2(spec.top_k),
        "topk_groups": spec.topk_groups,
        "sigmoid": spec.scoring == "sigmoid",
        "top2": spec.group_score == "top2",
        "renormalise": spec.renormalise,
        "has_bias": has_bias,
        "floor": RENORM_FLOOR,
    }


def check_spec(spec: GateSpec, experts: int) -> None:
    """ShapeRefused unless spec is for that many experts and the kernel can hold them."""
    if spec.scoring not in ("sigmoid", "softmax"):
        raise ShapeRefused(f"scoring={spec.scoring!r}: must be 'sigmoid' or 'softmax'")
    if spec.group_score not in ("top2", "max"):
        raise ShapeRefused(f"group_score={spec.group_score!r}: must be 'top2' or 'max'")
    if not 0 < experts <= MAX_EXPERTS or experts % spec.num_groups:
        raise ShapeRefused(
            f"{experts} experts in {spec.num_groups} groups: must be at most {MAX_EXPERTS}, in "
            "groups of equal size"
        )
    if not 0 < spec.top_k <= experts:
        raise ShapeRefused(f"top_k={spec.top_k}: must be between 1 and {experts}")


def gate(x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec) -> tuple[Tensor, Tensor]:
    """base.Kernels.gate: x [T, D], weight [E, D] fp32, bias [E] fp32 or None."""
    return choose(router_logits(x, weight), bias, spec)


def choose_twin(logits: Tensor, bias: Tensor | None, spec: GateSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> ids [T, K] int32, weights [T, K] float64; scores are rounded to fp32, since
    which of two is larger depends on it, and everything is sorted."""
    num_rows, experts = logits.shape
    wide = logits.double()
    scores = torch.sigmoid(wide) if spec.scoring == "sigmoid" else torch.softmax(wide, dim=1)
    scores = scores.float()
    choice = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        grouped = choice.view(num_rows, spec.num_groups, -1)
        best = grouped.sort(dim=-1, descending=True).values
        of_groups = best[..., : 2 if spec.group_score == "top2" else 1].sum(dim=-1)
        order = of_groups.sort(dim=-1, descending=True, stable=True).indices
        lost = torch.ones_like(of_groups, dtype=torch.bool)
        lost.scatter_(1, order[:, : spec.topk_groups], False)
        fill = float("-inf") if spec.scoring == "sigmoid" else 0.0
        choice = grouped.masked_fill(lost.unsqueeze(-1), fill).view(num_rows, experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.double().gather(1, ids)
    if spec.renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + RENORM_FLOOR)
    return ids.int(), weights * spec.scale


def gate_cost(tokens: int, hidden: int, experts: int, top_k: int) -> KernelCost:
    """Both kernels; the partial logits go out and come back."""
    router = router_cost(tokens, hidden, experts)
    logits = router.bytes - 4 * experts * hidden - 2 * tokens * hidden
    return router + KernelCost(logits + 8 * tokens * top_k, 0)


def compile_cases() -> list[CompileCase]:
    v3 = GateSpec(8, 8, 4, "sigmoid", "top2", True, 2.5)
    k2 = GateSpec(8, 1, 1, "sigmoid", "top2", True, 2.827)
    lite = GateSpec(6, 1, 1, "softmax", "max", False, 1.0)
    v2 = GateSpec(6, 8, 3, "softmax", "max", False, 16.0)
    cases = []
    for name, spec, experts, parts, bias in (
        ("v3 256", v3, 256, 14, True),
        ("v3 256", v3, 256, 1, True),
        ("k2 384", k2, 384, 14, True),
        ("v2 160", v2, 160, 10, False),
        ("v2-lite 64", lite, 64, 4, False),
        ("v2-lite 64", lite, 64, 1, False),
    ):
        cases.append(
            CompileCase(
                choose_kernel,
                "gate",
                f"{name} parts{parts} w1",
                {"parts": "*fp32", "bias": "*fp32", "ids": "*i32", "weights": "*fp32",
                 "tokens": "i32", "experts": "i32", "scale": "fp32"},
                {"num_parts": parts, **_constants(spec, experts // spec.num_groups, bias)},
                num_warps=1,
                divisible=("experts",),
            )
        )  # fmt: skip
    return cases
