"""What goes row by row: norms, quantisation, gate, pairs, permutation, rope, sampling.

Beside: plain torch where it has the same in a few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.kernels.base import GateSpec
from models.deepseek.kernels.gpu import norm_quant, quant
from models.deepseek.kernels.gpu.bench.case import Case, Prepared, largest_difference
from models.deepseek.kernels.gpu.bench.sizes import Sizes
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.gate import gate, gate_cost
from models.deepseek.kernels.gpu.norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_cost,
    silu_mul,
    silu_mul_cost,
)
from models.deepseek.kernels.gpu.permute import (
    permute,
    permute_cost,
    unpermute,
    unpermute_cost,
)
from models.deepseek.kernels.gpu.rope import rope, rope_cost
from models.deepseek.kernels.gpu.row_owners import cost as row_owners_cost
from models.deepseek.kernels.gpu.row_owners import row_owners
from models.deepseek.kernels.gpu.row_peaks import argmax, argmax_cost
from models.deepseek.kernels.gpu.sampling import Cuts, sample, sample_cost
from models.deepseek.kernels.gpu.sort_pairs import sort_pairs, sort_pairs_cost

BF16 = torch.bfloat16
COLUMN = ScaleFormat.F32_COLUMN
Make = Callable[[], Prepared]


def row_cases(s: Sizes, device: torch.device) -> Iterator[Case]:
    for rows in (s.decode[-2], s.prefill):
        yield from _norms(s, rows, device)
        slots = s.experts[-1]
        yield _case(
            "gate", rows, gate_cost(rows, s.hidden, s.routed, s.top_k), "bf16",
            _make_gate(s, rows, device),
        )  # fmt: skip
        yield _case(
            "sort_pairs", rows, sort_pairs_cost(rows, s.top_k, slots), "none",
            _make_pairs(s, rows, slots, device),
        )  # fmt: skip
        yield _case(
            "row_owners", rows * s.top_k, row_owners_cost(rows * s.top_k, slots), "none",
            _make_owners(rows * s.top_k, slots, device),
        )  # fmt: skip
        pairs, groups = rows * s.top_k, -(-s.hidden // 128)
        yield _case(
            "permute", rows, permute_cost(pairs, s.hidden, 1, groups), "none",
            _make_permute(s, rows, slots, device),
        )  # fmt: skip
        yield _case(
            "unpermute", rows, unpermute_cost(rows, pairs, s.hidden), "none",
            _make_unpermute(s, rows, slots, device),
        )  # fmt: skip
        yield _case(
            "rope", rows, rope_cost(rows, s.heads, s.rope), "none", _make_rope(s, rows, device)
        )
    for rows in s.decode:
        yield _case(
            "argmax", rows, argmax_cost(rows, s.vocab), "none", _make_argmax(s, rows, device)
        )
        yield _case(
            "sample", rows, sample_cost(rows, s.vocab), "none", _make_sample(s, rows, device)
        )


def _case(kernel: str, rows: int, cost: KernelCost, unit: str, make: Make) -> Case:
    return Case(kernel, f"{rows} rows", {"rows": rows}, cost, unit, make)


def _norms(s: Sizes, rows: int, device: torch.device) -> Iterator[Case]:
    hidden = s.hidden
    yield _case(
        "add_rms_norm", rows, rms_norm_cost(rows, hidden, residual=True), "none",
        _make_norm(rows, hidden, device),
    )  # fmt: skip
    yield _case(
        "rms_norm", rows, rms_norm_cost(rows, s.q_rank), "none",
        _make_plain_norm(s, rows, device),
    )  # fmt: skip
    yield _case(
        "quantise", rows, quant.cost(rows, hidden), "none", _make_quant(rows, hidden, device)
    )
    yield _case(
        "norm_quant", rows, norm_quant.cost(rows, hidden), "none",
        _make_norm_quant(rows, hidden, device),
    )  # fmt: skip
    yield _case(
        "silu_mul", rows, silu_mul_cost(rows, s.inter), "none", _make_silu(rows, s.inter, device)
    )
    yield _case(
        "silu_quantise", rows, quant.cost(rows, s.inter, silu=True), "none",
        _make_silu_quant(rows, s.inter, device),
    )  # fmt: skip


def _normal(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def _make_norm(rows: int, hidden: int, device: torch.device) -> Make:
    def make() -> Prepared:
        x, residual = _normal(rows, hidden, device=device), _normal(rows, hidden, device=device)
        weight = torch.ones(hidden, device=device)
        narrow, sums = weight.to(BF16), residual.clone()

        def theirs() -> Tensor:
            sums.add_(x)
            return F.rms_norm(sums, (hidden,), narrow, 1e-6)

        return Prepared(lambda: add_rms_norm(residual, x, weight, 1e-6), {"torch": theirs})

    return make


def _make_plain_norm(s: Sizes, rows: int, device: torch.device) -> Make:
    """Of queries, which lie beside latents and keys."""

    def make() -> Prepared:
        x = _normal(rows, s.q_rank + s.width, device=device)[:, : s.q_rank]
        weight = torch.ones(s.q_rank, device=device)
        narrow = weight.to(BF16)
        return Prepared(
            lambda: rms_norm(x, weight, 1e-6),
            {"torch": lambda: F.rms_norm(x, (s.q_rank,), narrow, 1e-6)},
            compare=largest_difference,
        )

    return make


def _make_quant(rows: int, hidden: int, device: torch.device) -> Make:
    def make() -> Prepared:
        x = _normal(rows, hidden, device=device)
        return Prepared(lambda: quant.quantise(x, COLUMN))

    return make


def _make_norm_quant(rows: int, hidden: int, device: torch.device) -> Make:
    def make() -> Prepared:
        x, residual = _normal(rows, hidden, device=device), _normal(rows, hidden, device=device)
        weight = torch.ones(hidden, device=device)
        return Prepared(
            lambda: norm_quant.rms_norm_quantise(x, weight, 1e-6, COLUMN, residual=residual)
        )

    return make


def _make_silu(rows: int, inter: int, device: torch.device) -> Make:
    def make() -> Prepared:
        both = _normal(rows, 2 * inter, device=device)

        def theirs() -> Tensor:
            first, second = both.chunk(2, 1)
            return F.silu(first) * second

        return Prepared(lambda: silu_mul(both), {"torch": theirs}, compare=largest_difference)

    return make


def _make_silu_quant(rows: int, inter: int, device: torch.device) -> Make:
    def make() -> Prepared:
        both = _normal(rows, 2 * inter, device=device)
        return Prepared(lambda: quant.quantise_silu_mul(both, COLUMN))

    return make


def _make_gate(s: Sizes, rows: int, device: torch.device) -> Make:
    def make() -> Prepared:
        x = _normal(rows, s.hidden, device=device)
        weight = torch.randn(s.routed, s.hidden, device=device) / s.hidden**0.5
        bias = torch.randn(s.routed, device=device) / 10
        spec = GateSpec(s.top_k, s.groups, s.kept_groups, "sigmoid", "top2", True, 2.5)

        def theirs() -> Tensor:
            scores = torch.sigmoid(F.linear(x.float(), weight))
            wanted = (scores + bias).view(rows, s.groups, -1)
            kept = wanted.topk(2, -1).values.sum(-1).topk(s.kept_groups, -1).indices
            hidden = torch.ones(rows, s.groups, dtype=torch.bool, device=device)
            hidden.scatter_(1, kept, False)
            wanted = wanted.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
            chosen = scores.gather(1, wanted.topk(s.top_k, -1).indices)
            return chosen / chosen.sum(-1, keepdim=True) * 2.5

        return Prepared(lambda: gate(x, weight, bias, spec), {"torch": theirs})

    return make


def _slots(s: Sizes, rows: int, slots: int, device: torch.device) -> Tensor:
    """Distinct slots of each row where there are enough: as a rank of that many slots gets them."""
    order = torch.rand(rows, max(slots, s.top_k), device=device).argsort(dim=1)
    picks = order[:, : s.top_k]
    return torch.where(picks < slots, picks, -1).to(torch.int32)


def _make_pairs(s: Sizes, rows: int, slots: int, device: torch.device) -> Make:
    def make() -> Prepared:
        picks = _slots(s, rows, slots, device)
        return Prepared(
            lambda: sort_pairs(picks, slots),
            {"torch": lambda: picks.flatten().sort(stable=True)},
        )

    return make


def _make_owners(rows: int, experts: int, device: torch.device) -> Make:
    """Rows evenly over experts, as in a step of prefill."""

    def make() -> Prepared:
        ends = (torch.arange(1, experts + 1, device=device) * rows // experts).to(torch.int32)
        at = torch.arange(rows, dtype=torch.int32, device=device)
        return Prepared(
            lambda: row_owners(rows, ends, 1),
            {"torch": lambda: torch.searchsorted(ends, at, right=True)},
            compare=largest_difference,
        )

    return make


def _make_permute(s: Sizes, rows: int, slots: int, device: torch.device) -> Make:
    def make() -> Prepared:
        layout = sort_pairs(_slots(s, rows, slots, device), slots)
        x = torch.randint(0, 100, (rows, s.hidden), dtype=torch.uint8, device=device)
        scales = torch.rand(rows, -(-s.hidden // 128), device=device)
        at = layout.pair_rows.long().clamp(min=0)
        return Prepared(
            lambda: permute(x, layout.pair_rows, scales),
            {"torch": lambda: (x[at], scales[at])},
        )

    return make


def _make_unpermute(s: Sizes, rows: int, slots: int, device: torch.device) -> Make:
    def make() -> Prepared:
        layout = sort_pairs(_slots(s, rows, slots, device), slots)
        y = _normal(layout.pair_rows.shape[0], s.hidden, device=device)
        weights = torch.rand(rows, s.top_k, device=device)
        at = layout.index.clamp(min=0)
        real = weights * (layout.index >= 0)
        return Prepared(
            lambda: unpermute(y, layout.index, weights),
            {"torch": lambda: torch.bmm(real[:, None].to(BF16), y[at])},
        )

    return make


def _make_rope(s: Sizes, rows: int, device: torch.device) -> Make:
    def make() -> Prepared:
        x = _normal(rows, s.heads, s.rope, device=device)
        table = torch.rand(4096, s.rope, device=device)
        positions = torch.randint(0, 4096, (rows,), device=device)
        return Prepared(lambda: rope(x, positions, table))

    return make


def _make_argmax(s: Sizes, rows: int, device: torch.device) -> Make:
    def make() -> Prepared:
        logits = _normal(rows, s.vocab, device=device, dtype=torch.float32)
        return Prepared(lambda: argmax(logits), {"torch": lambda: logits.argmax(dim=1)})

    return make


def _make_sample(s: Sizes, rows: int, device: torch.device) -> Make:
    """At temperature 1 with nucleus 0.95, as people ask most often."""

    def make() -> Prepared:
        logits = _normal(rows, s.vocab, device=device, dtype=torch.float32) * 3
        ones = torch.ones(rows, device=device)
        cuts = Cuts(
            ones,
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.full((rows,), 0.95, dtype=torch.float64, device=device),
            torch.zeros(rows, device=device),
            torch.arange(rows, dtype=torch.int64, device=device),
            torch.arange(rows, dtype=torch.int64, device=device),
        )

        def theirs() -> Tensor:
            chances, ids = torch.softmax(logits, 1).sort(dim=1, descending=True)
            chances = chances.masked_fill(chances.cumsum(1) - chances > 0.95, 0.0)
            return ids.gather(1, torch.multinomial(chances, 1))

        return Prepared(lambda: sample(logits, cuts), {"torch": theirs})

    return make
