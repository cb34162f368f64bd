"""FP8 products by DeepGEMM: dense, grouped contiguous, grouped masked, on sm_90 and sm_100.

The only file that imports `deep_gemm`. What it wants: K in whole blocks of 128, results in bf16,
stacked experts back to back with scales of weights packed as densely; fp32 scales on sm_90, powers
of two on sm_100 (it packs the exponent's bits there and drops the rest; scales of weights at each
call, unless they come as weights.py's words). Scales of rows may lie in
any of our formats: those of columns it loads as they are, others are transposed first, a launch
more. Segments begin at multiples of an alignment that it tells (128 unless set otherwise). In the
masked form whole tiles are stored, so room for an expert is a multiple of a tile.

Its functions come from C++ and may have no Python signature: names are read from their docstrings
then. What every version has, by place; what some have, by name. Knows nothing of timing. Shape
letters as in gemm_adapters.py.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.fp8 import BLOCK, num_blocks
from dispatch.words import raised
from models.deepseek.kernels.gpu.choice import in_words, load_library
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.fp8_gemm import check_codes, check_operands
from models.deepseek.kernels.gpu.gemm_adapters import GemmProblem, problem_of
from models.deepseek.kernels.gpu.grouped_gemm import ALIGNMENT
from models.deepseek.kernels.gpu.row_owners import row_owners
from models.deepseek.kernels.gpu.scales import COLUMN_ALIGNMENT, view_scales

ARCHS = (90, 100)
COLUMNS = 64  # N is a multiple of
TMA_BYTES = 16
MASKED_TILE = 128  # rows of the tallest that it takes on sm_90
DENSE = "fp8_gemm_nt"
CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
MASKED = "m_grouped_fp8_gemm_nt_masked"
FUNCTIONS = {"dense": DENSE, "contiguous": CONTIGUOUS, "masked": MASKED}
# Of each, the names behind the three operands, of which one of a tuple must be there.
WANTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "dense": (),
    "contiguous": (("grouped_layout", "m_indices"),),
    "masked": (("masked_m",), ("expected_m",)),
}
MOST_ALIGNMENT = 4096  # rows: more would be mostly padding
ALIGNMENTS = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")


class DeepGemm:
    """module: in place of the installed `deep_gemm`, for tests. arch: of the tensors it is handed
    (None: asked of their device)."""

    name = "deep_gemm"

    def __init__(self, module: Any = None, arch: int | None = None) -> None:
        self._module = module
        self._arch = arch

    @in_words
    def refusal(self, problem: GemmProblem) -> str | None:
        why = _shape_refusal(problem)
        if why is not None:
            return why
        module, why = self._load()
        if why is not None:
            return why
        function = getattr(module, FUNCTIONS[problem.form], None)
        if function is None:
            return f"this deep_gemm has no {FUNCTIONS[problem.form]}"
        names = parameters(function)
        for either in WANTED[problem.form] if names else ():
            if not any(name in names for name in either):
                return f"{FUNCTIONS[problem.form]} of this version has no {' or '.join(either)}"
        if problem.form == "contiguous":
            return self._misaligned(module, problem.alignment)
        return _overfull(module, problem) if problem.form == "masked" else None

    def alignment(self) -> int:
        module, why = self._load()
        return 1 if why is not None else _alignment_of(module)[0] or 1

    def dense(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        module, _ = self._checked("dense", a, a_scales, b, b_scales, dtype)
        out = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
        if a.shape[0]:
            module.fp8_gemm_nt((a, scales_of_rows(a_scales)), (b, b_scales), out)
        return out

    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        ends: Tensor,
        dtype: torch.dtype,
        *,
        alignment: int = ALIGNMENT,
        starts: Tensor | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        module, arch = self._checked("contiguous", a, a_scales, b, b_scales, dtype, alignment)
        out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
        if not out.numel() or not b.shape[0]:
            return out
        function = module.m_grouped_fp8_gemm_nt_contiguous
        stacked = back_to_back(b), _blocks_or_words(b_scales)
        names, a_scales = parameters(function), scales_of_rows(a_scales)
        # Not all versions have kernels for it on sm_90; its segments begin at its own alignment;
        # and scales that it has to pack itself it then wants by rows.
        if (
            arch != 90
            and starts is None
            and "use_psum_layout" in names
            and alignment == _alignment_of(module)[0]
            and (a_scales.dtype == torch.int32 or a_scales.is_contiguous())
        ):
            more: dict[str, Any] = {"use_psum_layout": True}
            if expected_rows and "expected_m_for_psum_layout" in names:
                more["expected_m_for_psum_layout"] = expected_rows
            function((a, a_scales), stacked, out, ends, **more)
            return out
        owners = row_owners(a.shape[0], ends, alignment, starts)
        function((a, a_scales), stacked, out, owners)
        return out

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        dtype: torch.dtype,
        *,
        expected_rows: int | None = None,
    ) -> Tensor:
        module, _ = self._checked("masked", a, a_scales, b, b_scales, dtype)
        experts, room, _ = a.shape
        out = torch.empty((experts, room, b.shape[1]), dtype=dtype, device=a.device)
        if out.numel():
            expected = max(1, min(room, room if expected_rows is None else expected_rows))
            module.m_grouped_fp8_gemm_nt_masked(
                (back_to_back(a), scales_of_rows(a_scales)),
                (back_to_back(b), _blocks_or_words(b_scales)),
                out,
                counts,
                expected,
            )
        return out

    def _checked(
        self,
        form: str,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        dtype: torch.dtype,
        alignment: int = 1,
    ) -> tuple[Any, int]:
        """The module and the chip. ShapeRefused. Whether scales are powers of two is the choice's
        to know: it cannot be read here without waiting for the device."""
        arch = arch_of(a.device) if self._arch is None else self._arch
        dense = form == "dense"
        stacked = (b[None], b_scales[None]) if dense else (b, b_scales)
        if b_scales.dtype == torch.int32:
            check_codes(a, stacked[0], dtype)
            _check_words(*stacked, arch)
            view_scales(a_scales, a.shape[-2], a.shape[-1])
        else:
            check_operands(a, a_scales, *stacked, dtype)
        room = a.shape[1] if form == "masked" else 0
        problem = problem_of(
            form, a_scales, b, arch, dtype, alignment=alignment, ue8m0=True, room=room
        )
        why = self.refusal(problem) or _layout_refusal(a, stacked[1])
        if why is not None:
            raise ShapeRefused(why)
        return self._load()[0], arch

    def _misaligned(self, module: Any, alignment: int) -> str | None:
        wanted, why = _alignment_of(module)
        if wanted is None:
            return why
        if alignment % wanted:
            return (
                f"DeepGEMM's segments begin at multiples of {wanted}, these at multiples of "
                f"{alignment}"
            )
        return None

    def _load(self) -> tuple[Any, str | None]:
        return load_library("deep_gemm", lambda: importlib.import_module("deep_gemm"), self._module)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters: by its signature, or by the first line of what a binding to
    C++ says of itself; nothing where neither tells."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
        return tuple(re.findall(r"[(,]\s*(\w+)\s*:", lines[0])) if lines else ()


def back_to_back(x: Tensor) -> Tensor:
    """[1, ..] with the stride that it would have among others: of one expert nobody reads it, but
    libraries ask for it."""
    return x[0].unsqueeze(0) if x.shape[0] == 1 else x


def scales_of_rows(scales: Tensor) -> Tensor:
    """[.., T, G] fp32 or [.., T, P] int32 as DeepGEMM takes them: packed ones, which it does not
    transpose, in columns from a multiple of 16 bytes on; columns of one expert with the stride that
    they would have among others (it asks for that)."""
    rows, words = scales.shape[-2:]
    padded = -(-rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    apart = (words * padded,) if scales.dim() == 3 else ()
    if scales.stride()[-2:] == (1, padded) and (not apart or scales.shape[0] == 1):
        return scales.as_strided(scales.shape, (*apart, 1, padded))
    if scales.dtype != torch.int32 or scales.stride() == (*apart, 1, padded):
        return scales
    columns = scales.new_zeros((*scales.shape[:-2], words, padded))
    return columns.transpose(-1, -2)[..., :rows, :].copy_(scales)


def arch_of(device: torch.device) -> int:
    """90 for sm_90, 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _shape_refusal(problem: GemmProblem) -> str | None:
    if problem.deterministic:
        return "DeepGEMM's tiles follow the rows: no promise that bits do not (deterministic mode)"
    if problem.arch not in ARCHS:
        return f"DeepGEMM is for sm_90 and sm_100, this is sm_{problem.arch}"
    if problem.width % BLOCK or problem.columns % COLUMNS:
        return (
            f"DeepGEMM wants K in multiples of {BLOCK}, N of {COLUMNS}: these are "
            f"{problem.width} and {problem.columns}"
        )
    if problem.dtype != torch.bfloat16:
        return f"DeepGEMM's results are bf16 here, {problem.dtype} is asked for"
    if problem.arch == 90 and problem.packed:
        return "DeepGEMM reads fp32 scales on sm_90, these are packed exponents"
    if problem.arch == 100 and not problem.ue8m0:
        return "DeepGEMM reads powers of two on sm_100, these scales are any fp32"
    if problem.experts > 1 and problem.apart != problem.columns:
        return (
            f"DeepGEMM wants experts back to back, these are {problem.apart} rows apart for "
            f"{problem.columns} (a bundle a slot)"
        )
    return None


def _overfull(module: Any, problem: GemmProblem) -> str | None:
    """Whole tiles are stored: the last one of an expert must end before the next expert's room."""
    tile = MASKED_TILE
    if problem.arch != 90 and any(hasattr(module, name) for name in ALIGNMENTS):
        told, why = _alignment_of(module)
        if told is None:
            return why
        tile = told
    if problem.experts > 1 and problem.room % tile:
        return f"DeepGEMM wants room for {tile} rows or a multiple an expert, not {problem.room}"
    return None


def _check_words(b: Tensor, words: Tensor, arch: int) -> None:
    """Words [e, N, P] of weights in columns, back to back."""
    experts, columns, width = b.shape
    padded = -(-columns // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    shape = (experts, columns, -(-num_blocks(width) // 4))
    strides = (shape[2] * padded, 1, padded)
    alike = words.stride()[1:] == strides[1:] and (experts == 1 or words.stride(0) == strides[0])
    if arch != 100 or words.shape != shape or not alike:
        raise ShapeRefused(
            f"b_scales={words.dtype} {list(words.shape)}, strides {words.stride()}: on sm_100 "
            f"int32 {list(shape)}, strides {strides}"
        )


def _layout_refusal(a: Tensor, b_scales: Tensor) -> str | None:
    """b_scales [e, ..]."""
    if a.dim() == 3 and not back_to_back(a).is_contiguous():
        return f"DeepGEMM wants rows of experts back to back, these have strides {a.stride()}"
    if a.stride(-2) % TMA_BYTES and a.shape[-2] > 1:
        return f"DeepGEMM's rows are multiples of {TMA_BYTES} bytes apart, not {a.stride(-2)}"
    if b_scales.dtype != torch.int32 and not back_to_back(b_scales).is_contiguous():
        return f"DeepGEMM wants scales of weights packed, these have strides {b_scales.stride()}"
    return None


def _blocks_or_words(b_scales: Tensor) -> Tensor:
    return (scales_of_rows if b_scales.dtype == torch.int32 else back_to_back)(b_scales)


def _alignment_of(module: Any) -> tuple[int, None] | tuple[None, str]:
    """What the library says; or why it says nothing that can be used."""
    for name in ALIGNMENTS:
        try:
            if not hasattr(module, name):
                continue
            told = getattr(module, name)()
        except Exception as error:  # it may ask the driver
            return None, f"{name} raised {raised(error)}"
        try:
            rows = operator.index(told)
        except Exception:
            rows = 0
        if not 1 <= rows <= MOST_ALIGNMENT:
            return None, f"{name} says {told!r:.40}: must be 1 to {MOST_ALIGNMENT} rows"
        return rows, None
    return None, f"this deep_gemm has no {' or '.join(ALIGNMENTS)}"
