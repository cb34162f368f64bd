"""Products: dense and grouped in e4m3, those of heads and logits in bf16.

Beside: torch's bf16 product of the same shape (its weights are twice as large), torch._scaled_mm
where it takes blocks, DeepGEMM. Shape letters: M rows, N columns, K width, e experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch.base import ScaleFormat
from dispatch.fp8 import num_blocks
from models.deepseek.kernels.gpu import fp8_gemm as fp8
from models.deepseek.kernels.gpu import grouped_gemm as grouped
from models.deepseek.kernels.gpu.bench.case import Case, Prepared, largest_difference
from models.deepseek.kernels.gpu.bench.rivals import ROW_ALIGNMENT, DeepGemm, arch_of
from models.deepseek.kernels.gpu.bench.sizes import Sizes
from models.deepseek.kernels.gpu.dense import dense, dense_cost, dense_per_head
from models.deepseek.kernels.gpu.scales import empty_scales

BF16 = torch.bfloat16
COLUMN = ScaleFormat.F32_COLUMN


def random_codes(shape: Sequence[int], device: torch.device) -> Tensor:
    """Any e4m3 below 2 in size: no NaN among them."""
    raw = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, device=device)
    return raw.bitwise_and_(0xBF).view(torch.float8_e4m3fn)


def scales_of_rows(
    rows: int, width: int, device: torch.device, experts: int | None = None
) -> Tensor:
    scales = empty_scales(rows, width, COLUMN, device, experts)
    return scales.copy_(torch.rand(scales.shape, device=device) + 0.5)


def scales_of_weight(columns: int, width: int, device: torch.device, experts: int = 1) -> Tensor:
    grid = (experts, num_blocks(columns), num_blocks(width))
    return torch.rand(grid, device=device) / width**0.5


def linears(s: Sizes) -> dict[str, tuple[int, int]]:
    """N, K of a layer's projections."""
    queries = s.heads * (s.nope + s.rope)
    return {
        "qkv_a": (s.q_rank + s.width, s.hidden),
        "q_b": (queries, s.q_rank),
        "o": (s.hidden, s.heads * s.value),
        "shared gate_up": (2 * s.inter, s.hidden),
        "shared down": (s.hidden, s.inter),
        "dense gate_up": (2 * s.dense_inter, s.hidden),
        "dense down": (s.hidden, s.dense_inter),
    }


def gemm_cases(s: Sizes, device: torch.device) -> Iterator[Case]:
    yield from _dense(s, device)
    yield from _masked(s, device)
    yield from _contiguous(s, device)
    yield from _bf16(s, device)


def _beside(
    device: torch.device,
    ours: Callable[[], object],
    torch_bf16: Callable[[], object],
    theirs: Callable[[DeepGemm], object],
    compare: Callable[[object, object], float] = largest_difference,
) -> Prepared:
    """Ours beside torch's product in bf16 and, where it fits this chip, DeepGEMM's."""
    rivals, library = {"torch bf16": torch_bf16}, DeepGemm()
    why = library.refusal(arch_of(device))
    if why is None:
        rivals[library.name] = lambda: theirs(library)
    return Prepared(ours, rivals, {library.name: why} if why else {}, compare)


def _dense(s: Sizes, device: torch.device) -> Iterator[Case]:
    for name, (columns, width) in linears(s).items():
        is_dense = name.startswith("dense")
        for rows in (s.decode[-1], s.prefill) if is_dense else (*s.decode, s.prefill):
            yield Case(
                "fp8_gemm",
                f"{name} {rows}x{width}x{columns}",
                {"rows": rows, "columns": columns, "width": width},
                fp8.cost(rows, columns, width),
                "fp8",
                _make_dense(rows, columns, width, device),
                first=name in ("o", "qkv_a"),
            )


def _make_dense(
    rows: int, columns: int, width: int, device: torch.device
) -> Callable[[], Prepared]:
    def make() -> Prepared:
        a, b = random_codes((rows, width), device), random_codes((columns, width), device)
        a_scales = scales_of_rows(rows, width, device)
        b_scales = scales_of_weight(columns, width, device)[0]
        x, weight = a.to(BF16), b.to(BF16)
        return _beside(
            device,
            lambda: fp8.fp8_gemm(a, a_scales, b, b_scales),
            lambda: F.linear(x, weight),
            lambda library: library.dense(a, a_scales, b, b_scales),
        )

    return make


def _masked(s: Sizes, device: torch.device) -> Iterator[Case]:
    """Decode: each of `batch` tokens a GPU has top_k picks, evenly over the experts of all GPUs."""
    parts = {"gate_up": (2 * s.inter, s.hidden), "down": (s.hidden, s.inter)}
    for experts in s.experts:
        for batch in s.decode[1:]:
            each = max(1, -(-batch * s.top_k // experts))
            for name, (columns, width) in parts.items():
                yield Case(
                    "grouped_masked",
                    f"{name} {experts} experts x {each}",
                    {"experts": experts, "rows": each, "columns": columns, "width": width},
                    grouped.cost([each] * experts, columns, width),
                    "fp8",
                    _make_masked(experts, each, columns, width, device),
                    first=experts == s.experts[-1],
                )


def _make_masked(
    experts: int, each: int, columns: int, width: int, device: torch.device
) -> Callable[[], Prepared]:
    def make() -> Prepared:
        # DeepGEMM wants columns of scales in fours, and stores whole tiles within an expert's room.
        unit = 4 if experts == 1 else ROW_ALIGNMENT
        room = -(-max(each, 2) // unit) * unit
        a = random_codes((experts, room, width), device)
        b = random_codes((experts, columns, width), device)
        a_scales = scales_of_rows(room, width, device, experts)
        b_scales = scales_of_weight(columns, width, device, experts)
        counts = torch.full((experts,), each, dtype=torch.int32, device=device)
        x, weight = a[:, :each].to(BF16), b.to(BF16).transpose(1, 2)

        def compare(ours: object, theirs: object) -> float:
            assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
            return largest_difference(ours[:, :each], theirs[:, :each])

        return _beside(
            device,
            lambda: grouped.grouped_gemm_masked(
                a, a_scales, b, b_scales, counts, expected_rows=each
            ),
            lambda: torch.bmm(x, weight),
            lambda library: library.masked(a, a_scales, b, b_scales, counts, each),
            compare,
        )

    return make


def _contiguous(s: Sizes, device: torch.device) -> Iterator[Case]:
    """Prefill: a step's tokens, top_k picks each, on the experts of this GPU (balanced)."""
    parts = {"gate_up": (2 * s.inter, s.hidden), "down": (s.hidden, s.inter)}
    for experts in s.experts:
        each = -(-s.prefill * s.top_k // experts)
        each = -(-each // ROW_ALIGNMENT) * ROW_ALIGNMENT if s.prefill >= ROW_ALIGNMENT else each
        for name, (columns, width) in parts.items():
            yield Case(
                "grouped_contiguous",
                f"{name} {experts} experts x {each}",
                {"experts": experts, "rows": each, "columns": columns, "width": width},
                grouped.cost([each] * experts, columns, width),
                "fp8",
                _make_contiguous(experts, each, columns, width, device),
                first=experts == s.experts[-1],
            )


def _make_contiguous(
    experts: int, each: int, columns: int, width: int, device: torch.device
) -> Callable[[], Prepared]:
    def make() -> Prepared:
        rows = experts * each
        a = random_codes((rows, width), device)
        b = random_codes((experts, columns, width), device)
        a_scales = scales_of_rows(rows, width, device)
        b_scales = scales_of_weight(columns, width, device, experts)
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * each
        weight = b.to(BF16).transpose(1, 2)
        x = a.to(BF16).view(experts, each, width)
        return _beside(
            device,
            lambda: grouped.grouped_gemm_contiguous(a, a_scales, b, b_scales, ends, alignment=1),
            lambda: torch.bmm(x, weight),
            lambda library: library.contiguous(a, a_scales, b, b_scales, ends),
        )

    return make


def _bf16(s: Sizes, device: torch.device) -> Iterator[Case]:
    heads = {"W_UK": (s.rank, s.nope), "W_UV": (s.value, s.rank)}
    for name, (columns, width) in heads.items():
        for rows in s.decode:
            yield Case(
                "dense_per_head",
                f"{name} {rows}x{s.heads}x{width}x{columns}",
                {"rows": rows, "heads": s.heads, "columns": columns, "width": width},
                dense_cost(rows, columns, width, s.heads),
                "bf16",
                _make_heads(rows, s.heads, columns, width, device),
            )
    for rows in s.decode:
        yield Case(
            "dense",
            f"logits {rows}x{s.hidden}x{s.vocab}",
            {"rows": rows, "columns": s.vocab, "width": s.hidden},
            dense_cost(rows, s.vocab, s.hidden, out_itemsize=4),
            "bf16",
            _make_logits(rows, s.vocab, s.hidden, device),
        )


def _make_heads(
    rows: int, heads: int, columns: int, width: int, device: torch.device
) -> Callable[[], Prepared]:
    def make() -> Prepared:
        x = torch.randn(rows, heads, width, dtype=BF16, device=device)
        weight = torch.randn(heads, columns, width, dtype=BF16, device=device)

        def theirs() -> Tensor:
            return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

        return Prepared(
            lambda: dense_per_head(x, weight), {"torch": theirs}, compare=largest_difference
        )

    return make


def _make_logits(rows: int, vocab: int, width: int, device: torch.device) -> Callable[[], Prepared]:
    def make() -> Prepared:
        x = torch.randn(rows, width, dtype=BF16, device=device)
        weight = torch.randn(vocab, width, dtype=BF16, device=device)
        return Prepared(
            lambda: dense(x, weight, torch.float32),
            {"torch": lambda: F.linear(x, weight).float()},
            compare=largest_difference,
        )

    return make
