"""FlashMLA and FlashInfer behind the call of our decode kernel: choice, arguments, results.

The libraries are stand-ins with their real signatures (sgl-flash-mla 1.0.0, flashinfer-python
0.7.2 and 0.2), which check shapes as they document them and compute in float64.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.gpu.bench.winners import FastestMla, Winner, Winners
from models.deepseek.kernels.gpu.choice import at_most, first_that_fits
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaBackend,
    MlaProblem,
    MlaStep,
    TritonMla,
    check_against_ours,
)
from models.deepseek.kernels.gpu.mla_flash_mla import FlashMla
from models.deepseek.kernels.gpu.mla_flashinfer import FlashInferMla
from models.deepseek.kernels.gpu.mla_guard import MlaGuard
from models.deepseek.kernels.gpu.mla_plan import plan_decode
from models.interface import ForwardBatch

PROBLEM = MlaProblem(heads=4, rank=512, rope=64, block_size=64, arch=90)
SCALE = 0.07


def attend(q: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = q.double() @ keys.double().T * scale
    return torch.softmax(scores, 1) @ keys[:, :512].double(), torch.logsumexp(scores, 1)


class Meta:
    lengths: Tensor | None = None


def flash_mla(legacy: bool = True, split: bool = True) -> Any:
    def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Meta, None]:
        return Meta(), None

    def decode(
        q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
        tile_scheduler_metadata: Meta, num_splits: None = None,
        softmax_scale: float | None = None, causal: bool = False,
        is_fp8_kvcache: bool | None = None, indices: Tensor | None = None,
        attn_sink: Tensor | None = None, enable_batch_invariant: bool = False,
        use_legacy: bool = False, kv_format: str | None = None,
        descale_q: Tensor | None = None, descale_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows, each, heads, width = q.shape
        assert use_legacy or not split, "dense decoding is legacy"
        assert (each, width, head_dim_v) == (1, 576, 512) and q.dtype == torch.bfloat16
        assert k_cache.shape[1:] == (64, 1, 576) and k_cache.dtype == torch.bfloat16
        assert block_table.shape[0] == rows and block_table.dtype == torch.int32
        assert cache_seqlens.shape == (rows,) and cache_seqlens.dtype == torch.int32
        assert (block_table >= 0).all() and (cache_seqlens >= 1).all() and causal
        meta = tile_scheduler_metadata
        assert meta.lengths is None or torch.equal(meta.lengths, cache_seqlens)
        meta.lengths = cache_seqlens
        out = torch.empty(rows, 1, heads, 512, dtype=q.dtype)
        lse = torch.empty(rows, heads, 1)
        for row in range(rows):
            at = torch.arange(int(cache_seqlens[row]))
            keys = k_cache[block_table[row].long()[at // 64], at % 64, 0]
            out[row, 0], lse[row, :, 0] = attend(q[row, 0], keys, softmax_scale or 0.0)
        return out, lse

    if not split:
        whole = decode

        def decode(  # type: ignore[no-redef]
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
            num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False,
            indices=None, attn_sink=None,
        ):  # fmt: skip
            return whole(
                q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
                num_splits, softmax_scale, causal,
            )  # fmt: skip

    return SimpleNamespace(
        flash_mla_with_kvcache=decode,
        get_mla_metadata=get_mla_metadata,
        _loader=SimpleNamespace(has_legacy=lambda: legacy),
    )


class OldWrapper:
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ) -> None:  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, True)
        for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert x.dtype == torch.int32 and x.dim() == 1
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert len(kv_indices) == int(kv_indptr[-1])
        pages = kv_indptr[1:] - kv_indptr[:-1]
        assert torch.equal(pages, -(-kv_len_arr // page_size)) and (kv_indices >= 0).all()
        self.args = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, sm_scale, num_heads)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False,
    ):  # fmt: skip
        out, lse = self._run(torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1))
        return out, lse / math.log(2)

    def _run(self, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        _, starts, indices, lengths, page, scale, heads = self.args
        assert q.shape[1:] == (heads, 576) and cache.shape[1:] == (page, 576)
        out, lse = torch.empty(len(q), heads, 512, dtype=q.dtype), torch.empty(len(q), heads)
        for row in range(len(q)):
            at = torch.arange(int(lengths[row]))
            blocks = indices[int(starts[row]) : int(starts[row + 1])].long()
            out[row], lse[row] = attend(q[row], cache[blocks[at // page], at % page], scale)
        return out, lse


class NewWrapper(OldWrapper):
    def plan(  # type: ignore[override]
        self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None,
        head_dim_ckv=None, head_dim_kpe=None, page_size=None, causal=None, sm_scale=None,
        q_data_type=None, kv_data_type=None, use_profiler=False, *, metadata=None,
        query_layout=None, kv_cache_layout=None, lse_mode="none",
    ) -> None:  # fmt: skip
        assert (query_layout, kv_cache_layout, lse_mode) == ("packed", "packed", "basee")
        assert qo_indptr is None and metadata is not None
        super().plan(
            **metadata, num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe,
            page_size=page_size, causal=causal, sm_scale=sm_scale, q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(  # type: ignore[override]
        self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None,
        return_lse=False, profiler_buffer=None, kv_len=None, page_table=None,
        return_lse_base_on_e=False, o_scale=None, *, query=None, kv_cache=None,
    ):  # fmt: skip
        assert return_lse and return_lse_base_on_e
        return self._run(query, kv_cache)


NEW = SimpleNamespace(
    BatchMLAPagedAttentionWrapper=NewWrapper,
    MLAPlanMetadata=SimpleNamespace(
        csr=lambda qo_indptr, kv_indptr, kv_indices, kv_len_arr: {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
    ),
)
OLD = SimpleNamespace(BatchMLAPagedAttentionWrapper=OldWrapper)


def world(block: int = 64, padding: int = 1) -> tuple[MlaStep, Tensor, Tensor]:
    """Two sequences, of 70 and 3 positions, the last two of the first and one row of the other."""
    g = torch.Generator().manual_seed(3)
    layer = torch.randn(8, block, 576, generator=g).bfloat16()
    tables = torch.tensor([[5, 2, 6, 1, 3], [7, -1, -1, -1, -1]], dtype=torch.int32)
    positions = torch.tensor([68, 69, 2] + [-1] * padding)
    batch = ForwardBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=torch.zeros_like(positions),
        query_start=torch.tensor([0, 2, 3], dtype=torch.int32),
        context_len=torch.tensor([70, 3], dtype=torch.int32),
        block_tables=tables,
        logits_rows=positions[:0],
        max_query_len=2,
        max_context_len=70,
    )
    step = MlaStep(plan_decode(batch, 4), tables, SCALE, (positions + 1).tolist())
    return step, torch.randn(len(positions), 4, 576, generator=g).bfloat16(), layer


BACKENDS: list[tuple[MlaBackend, int]] = [
    (FlashMla(flash_mla()), 64),
    (FlashMla(flash_mla(split=False)), 64),
    (FlashInferMla(NEW), 64),
    (FlashInferMla(NEW), 16),
    (FlashInferMla(OLD), 32),
]


@pytest.mark.parametrize(("backend", "block"), BACKENDS)
def test_the_same_results_as_ours_in_every_layer(backend: MlaBackend, block: int) -> None:
    problem = replace(PROBLEM, block_size=block)
    assert backend.refusal(problem) is None
    step, q, layer = world(block)
    assert check_against_ours(backend, problem, step, q, layer) < 2**-6
    decode = backend.step(problem, step)
    for turn in range(2):
        out, lse = decode(q, layer + turn)
        want, want_lse = TritonMla().step(problem, step)(q, layer + turn)
        assert out.shape == want.shape and out.dtype == want.dtype
        torch.testing.assert_close(lse[:3], want_lse[:3], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("backend", "block"), BACKENDS)
def test_lengths_that_the_host_does_not_know_are_asked_of_nobody(
    backend: MlaBackend, block: int
) -> None:
    """Behind drafts that only the device has judged. Who plans on the host is passed over."""
    step, q, layer = world(block)
    problem = replace(PROBLEM, block_size=block)
    unknown = replace(step, lengths=None)
    if isinstance(backend, FlashInferMla):
        with pytest.raises(ShapeRefused, match="does not know these lengths"):
            backend.step(problem, unknown)
        return
    assert check_against_ours(backend, problem, unknown, q, layer) < 2**-6


@pytest.mark.parametrize(("backend", "block"), BACKENDS)
def test_a_step_without_rows(backend: MlaBackend, block: int) -> None:
    step, q, layer = world(block, padding=0)
    empty = MlaStep(step.plan.rows(0, 0), step.tables, SCALE, [])
    problem = replace(PROBLEM, block_size=block)
    out, lse = backend.step(problem, empty)(q[:0], layer)
    assert out.shape == (0, 4, 512) and lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rank": 256}, "512 \\+ 64"),
        ({"fp8": True}, "128 channels"),
        ({"deterministic": True}, "deterministic"),
        ({"trees": True}, "trees"),
        ({"arch": 75}, "sm_75"),
    ],
)
def test_refusals_in_words(change: dict[str, Any], word: str) -> None:
    problem = replace(PROBLEM, **change)
    for backend in (FlashMla(flash_mla()), FlashInferMla(NEW)):
        with pytest.raises(ShapeRefused, match=word):
            backend.step(problem, world()[0])
    choice = first_that_fits(
        "mla decode", problem, [FlashMla(flash_mla()), FlashInferMla(NEW), TritonMla()]
    )
    assert choice.backend.name == "triton"
    assert choice.reason.startswith("mla decode: triton (no flash_mla: ")


def test_each_has_refusals_of_its_own() -> None:
    flash, infer = FlashMla(flash_mla()), FlashInferMla(NEW)
    assert "sm_100" in str(flash.refusal(replace(PROBLEM, arch=100)))
    assert "blocks of 64" in str(flash.refusal(replace(PROBLEM, block_size=16)))
    assert "legacy" in str(FlashMla(flash_mla(legacy=False)).refusal(PROBLEM))
    assert "graphs" in str(infer.refusal(replace(PROBLEM, graphs=True)))
    assert infer.refusal(replace(PROBLEM, arch=100)) is None
    step, _, _ = world()
    with pytest.raises(ShapeRefused, match="lengths"):
        infer.step(PROBLEM, replace(step, lengths=[1]))
    older = SimpleNamespace(
        BatchMLAPagedAttentionWrapper=type("W", (), {"plan": lambda self: 0, "run": lambda s: 0})
    )
    assert "has no" in str(FlashInferMla(older).refusal(PROBLEM))


@pytest.mark.parametrize(
    ("backend", "word"),
    [
        (FlashMla(SimpleNamespace()), "no flash_mla_with_kvcache"),
        (
            FlashMla(SimpleNamespace(flash_mla_with_kvcache=lambda **all_: 0)),
            "no get_mla_metadata",
        ),
        (FlashInferMla(SimpleNamespace()), "no BatchMLAPagedAttentionWrapper"),
        (
            FlashInferMla(SimpleNamespace(BatchMLAPagedAttentionWrapper=object)),
            "no BatchMLAPagedAttentionWrapper.run",
        ),
    ],
)
def test_a_wheel_that_lacks_a_name_is_a_reason_too(backend: MlaBackend, word: str) -> None:
    assert f"this version has {word}" in str(backend.refusal(PROBLEM))
    assert first_that_fits("mla decode", PROBLEM, [backend, TritonMla()]).backend.name == "triton"


def test_what_is_not_installed_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    for backend in (FlashMla(), FlashInferMla()):
        assert "cannot be imported" in str(backend.refusal(PROBLEM))
    choice = first_that_fits("mla decode", PROBLEM, [FlashMla(), FlashInferMla(), TritonMla()])
    assert choice.backend.name == "triton" and choice.reason.count("cannot be imported") == 2
    with pytest.raises(ShapeRefused, match="nothing fits"):
        first_that_fits("mla decode", PROBLEM, [FlashMla(), FlashInferMla()])


def test_the_first_that_fits_is_taken() -> None:
    choice = first_that_fits("mla decode", PROBLEM, [FlashMla(flash_mla()), TritonMla()])
    assert choice.backend.name == "flash_mla" and choice.reason == "mla decode: flash_mla"


class Broken:
    """A library that raises: while a step is made, or at its first call."""

    name = "flash_mla"

    def __init__(self, early: bool) -> None:
        self.early, self.asked = early, 0

    def refusal(self, problem: MlaProblem) -> str | None:
        return None

    def step(self, problem: MlaProblem, step: MlaStep) -> Any:
        self.asked += 1

        def decode(q: Tensor, layer: Tensor) -> Any:
            raise RuntimeError("no kernel image is available\nand more")

        return decode(step.tables, step.tables) if self.early else decode


@pytest.mark.parametrize("early", [False, True])
def test_a_library_that_raises_is_left_for_the_next(early: bool) -> None:
    step, q, layer = world()
    broken, guard, said = Broken(early), MlaGuard(), list[str]()
    guard.failures.say = said.append
    want, _ = TritonMla().step(PROBLEM, step)(q, layer)
    for _ in range(2):  # steps
        decode = guard.step(PROBLEM, step, [broken, TritonMla()])
        for _ in range(2):  # layers
            assert torch.equal(decode(q, layer)[0], want)
    assert broken.asked == 1
    why = "no flash_mla: it raised RuntimeError: no kernel image is available"
    assert guard.choices == (f"mla decode: triton ({why})",)  # what is so now
    assert said == [*guard.choices]  # once


def test_what_raises_after_it_has_decoded_keeps_other_sizes() -> None:
    step, q, layer = world()
    module, said = flash_mla(), list[str]()
    working, rows = module.flash_mla_with_kvcache, step.plan.num_rows
    assert at_most(rows) == rows == 4
    candidates = [FlashMla(module), TritonMla()]
    guard = MlaGuard()
    guard.failures.say = said.append
    decode = guard.step(PROBLEM, step, candidates)
    other = guard.step(PROBLEM, step, candidates)  # the other half of a step
    decode(q, layer)
    assert guard.choices == ("mla decode: flash_mla",) and not said

    def broken(*args: Any, use_legacy: bool, **more: Any) -> Any:
        asked.append(1)
        raise AssertionError("these rows, no")

    asked = list[int]()
    module.flash_mla_with_kvcache = broken
    want, _ = TritonMla().step(PROBLEM, step)(q, layer)
    for again in (decode, decode, other, guard.step(PROBLEM, step, candidates)):
        assert torch.equal(again(q, layer)[0], want)
    why = "no flash_mla: it raised AssertionError: these rows, no at 3 to 4 rows"
    assert guard.choices == (f"mla decode: triton ({why})",) == tuple(said) and asked == [1]
    module.flash_mla_with_kvcache = working
    half, q2, layer2 = world(padding=2)  # five rows
    guard.step(PROBLEM, half, candidates)(q2, layer2)
    assert guard.choices == (f"mla decode: triton ({why})", "mla decode: flash_mla")


def test_a_probe_that_raises_is_a_refusal() -> None:
    def has_legacy() -> bool:
        raise OSError("libcuda.so.1: cannot open")

    module = flash_mla()
    module._loader = SimpleNamespace(has_legacy=has_legacy)
    why = "its probe raised OSError: libcuda.so.1: cannot open"
    assert FlashMla(module).refusal(PROBLEM) == why

    class Odd(Broken):
        def refusal(self, problem: MlaProblem) -> str | None:
            raise ZeroDivisionError

    step, q, layer = world()
    guard = MlaGuard()
    guard.step(PROBLEM, step, [Odd(early=False), TritonMla()])(q, layer)
    why = "no flash_mla: its probe raised ZeroDivisionError: no message"
    assert guard.choices == (f"mla decode: triton ({why})",)
    assert first_that_fits("mla decode", PROBLEM, [Odd(early=False), TritonMla()]).reason.endswith(
        f"triton ({why})"
    )


def test_the_table_goes_down_to_the_second_fastest() -> None:
    step, q, layer = world()
    seconds = {"triton": 3.0, "flashinfer": 2.0, "flash_mla": 1.0}
    key = {"rows": 4, "context": 64, "heads": 4, "fp8": 0}
    table = Winners("chip", {"mla_decode": [Winner(key, "flash_mla", seconds)]})
    fastest = FastestMla(table, [FlashInferMla(NEW), Broken(early=False)])
    out, _ = fastest.step(PROBLEM, step)(q, layer)
    want, _ = FlashInferMla(NEW).step(PROBLEM, step)(q, layer)
    assert torch.equal(out, want)
    assert fastest.choices[-1].endswith(
        ": flashinfer (no flash_mla: it raised RuntimeError: no kernel image is available)"
    )


def test_the_table_passes_over_who_must_know_lengths() -> None:
    step, q, layer = world()
    step = replace(step, lengths=None)
    key = {"rows": 4, "context": 64, "heads": 4, "fp8": 0}
    seconds = {"triton": 3.0, "flashinfer": 2.0}
    table = Winners("chip", {"mla_decode": [Winner(key, "flashinfer", seconds)]})
    fastest = FastestMla(table, [FlashInferMla(NEW)])
    out, _ = fastest.step(PROBLEM, step)(q, layer)
    want, _ = TritonMla().step(PROBLEM, step)(q, layer)
    assert torch.equal(out, want)
    assert "does not know these lengths" in fastest.choices[-1]
