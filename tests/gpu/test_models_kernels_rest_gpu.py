"""What the other files reach only through larger kernels, on a device by itself: rows into a cache,
latents out of it, parts of a softmax; every tile of grouped products; libraries beside ours.

In triton's interpreter (TRITON_INTERPRET=1) each body runs on a CPU at small sizes, so that no line
runs first on a GPU; libraries need a device.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.deepseek.fp8 import quantise_weight
from models.deepseek.kernels.gpu import grouped_gemm as grouped
from models.deepseek.kernels.gpu.bench.attention import paged_batch, random_layer
from models.deepseek.kernels.gpu.bench.gemms import (
    random_codes,
    scales_of_rows,
    scales_of_weight,
)
from models.deepseek.kernels.gpu.bench.rivals import ROW_ALIGNMENT, DeepGemm, arch_of
from models.deepseek.kernels.gpu.bench.sizes import V3
from models.deepseek.kernels.gpu.fp8_gemm import CONFIGS, fp8_gemm
from models.deepseek.kernels.gpu.language import INTERPRETED
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaBackend,
    MlaProblem,
    MlaStep,
    check_against_ours,
)
from models.deepseek.kernels.gpu.mla_flash_mla import FlashMla
from models.deepseek.kernels.gpu.mla_flashinfer import FlashInferMla
from models.deepseek.kernels.gpu.mla_gather import gather_latents, room
from models.deepseek.kernels.gpu.mla_merge import merge_twin, merge_units
from models.deepseek.kernels.gpu.mla_plan import plan_decode
from models.deepseek.kernels.gpu.mla_prefill_plan import plan_prefill
from models.deepseek.kernels.gpu.mla_rows import pack_rows_twin, read_rows_twin
from models.deepseek.kernels.gpu.quant import quantise
from models.deepseek.kernels.gpu.row_owners import row_owners, row_owners_twin
from models.deepseek.kernels.gpu.scatter_rows import scatter_rows, scatter_rows_twin

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LARGE = ON_GPU and not INTERPRETED
BF16 = torch.bfloat16
RANK, ROPE, BLOCK = (512, 64, 64) if LARGE else (128, 16, 16)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="needs a CUDA device"),
]


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_rows_into_a_cache() -> None:
    tokens, blocks = (3000, 60) if LARGE else (5, 2)
    joined = normal(tokens, 32 + RANK + ROPE)
    latent, key = joined[:, 32 : 32 + RANK], joined[:, 32 + RANK :]
    slots = torch.randperm(blocks * BLOCK, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[::5] = -1
    layer = normal(blocks, BLOCK, RANK + ROPE, seed=2)
    want = layer.cpu()
    scatter_rows(layer, latent, key, slots.to(DEVICE))
    scatter_rows_twin(want, latent.cpu(), key.cpu(), slots)
    assert torch.equal(layer.cpu(), want)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fresh"])
def test_latents_out_of_a_cache(kind: str) -> None:
    contexts, new = ([5000, 70, 4097], [10, 70, 1]) if LARGE else ([37, 9], [5, 9])
    batch = paged_batch(contexts, new, BLOCK, DEVICE)
    blocks = sum(-(-n // BLOCK) for n in contexts)
    plain = normal(blocks * BLOCK, RANK + ROPE, seed=3)
    layer = plain.view(blocks, BLOCK, -1)
    if kind != "bf16":
        layer = pack_rows_twin(plain[:, :RANK], plain[:, RANK:]).view(blocks, BLOCK, -1)
    rows = normal(sum(new), RANK + ROPE, seed=4) if kind == "fresh" else None
    plan = plan_prefill(contexts, new, DEVICE)
    for turn in plan.rounds:
        tiles = plan.gather[slice(*turn.gather)]
        latent, key = room(turn.positions, RANK, ROPE, DEVICE)
        gather_latents(tiles, batch.block_tables, layer, latent, key, rows)
        for sequence, start, count, buffer, prefix, first in tiles.tolist():
            at = torch.arange(start, start + count)
            owners = batch.block_tables[sequence].cpu()[at // BLOCK].long()
            slots = (owners * BLOCK + at % BLOCK).to(DEVICE)
            want = read_rows_twin(layer, slots, RANK, ROPE).to(BF16)
            if rows is not None:
                own = at >= prefix
                want[own] = rows[first + at[own] - prefix]
            part = slice(buffer, buffer + count)
            assert torch.equal(torch.cat((latent[part], key[part]), 1), want)


def test_parts_of_a_softmax() -> None:
    counts = [1, 72, 5, 2] if LARGE else [1, 3, 2]
    heads = 128 if LARGE else 2
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    part_out = normal(sum(counts), heads, RANK, dtype=torch.float32)
    part_lse = normal(sum(counts), heads, dtype=torch.float32, seed=1) * 20
    part_lse[2], part_out[2] = -math.inf, math.nan
    out = torch.zeros(len(counts), heads, RANK, dtype=BF16, device=DEVICE)
    lse = torch.zeros(len(counts), heads, device=DEVICE)
    merge_units(part_out, part_lse, start.to(DEVICE), out, lse)
    bounds = start.tolist()
    for row in range(1, len(counts)):  # one part is not this kernel's
        part = slice(bounds[row], bounds[row + 1])
        want, want_lse = merge_twin(part_out[part], part_lse[part])
        # One rounding to bf16, fp32 sums and the device's exp, within units of the last place.
        assert ((out[row].double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()
        torch.testing.assert_close(lse[row].double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_of_a_grouped_product_has_the_same_bits(
    config: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: a row's bits are those of the dense product of it alone, by whichever tile."""
    experts, most, columns, width = (4, 300, 1000, 2048) if LARGE else (2, 5, 140, 128)
    weights = [quantise_weight(normal(columns, width, dtype=torch.float32)) for _ in range(experts)]
    b = torch.stack([w.view(torch.uint8) for w, _ in weights]).view(torch.float8_e4m3fn)
    b_scales = torch.stack([scale for _, scale in weights])
    counts = torch.tensor([most, 0, 17, 130][:experts] if LARGE else [most, 3]).int().to(DEVICE)
    a, a_scales = quantise(normal(experts, most, width))
    monkeypatch.setattr(grouped, "config_for", lambda *_: config)
    masked = grouped.grouped_gemm_masked(a, a_scales, b, b_scales, counts, torch.float32)
    for expert, row in ((0, 0), (0, most - 1), (experts - 1, 2)):
        alone = fp8_gemm(
            a[expert, row : row + 1], a_scales[expert, row : row + 1], b[expert], b_scales[expert],
            torch.float32,
        )  # fmt: skip
        if INTERPRETED:  # its products are numpy's, whose order follows the shape
            torch.testing.assert_close(alone[0], masked[expert, row], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(alone[0], masked[expert, row])


@pytest.mark.parametrize("backend", [FlashMla(), FlashInferMla()], ids=lambda b: b.name)
def test_a_library_decodes_as_ours_does(backend: MlaBackend) -> None:
    contexts, rows = [1, 1000, 4096, 20000, 70], 2
    problem = MlaProblem(V3.heads, V3.rank, V3.rope, V3.block, arch_of(DEVICE))
    why = backend.refusal(problem)
    if why is not None:
        pytest.skip(why)
    contexts = [max(n, rows) for n in contexts]
    batch = paged_batch(contexts, [rows] * len(contexts), V3.block, DEVICE)
    layer = random_layer(V3, sum(-(-n // V3.block) for n in contexts), False, DEVICE)
    q = normal(rows * len(contexts), V3.heads, V3.width)
    lengths = [n - rows + 1 + i for n in contexts for i in range(rows)]
    plan = plan_decode(batch, V3.heads, V3.rank)
    step = MlaStep(plan, batch.block_tables, V3.scale, lengths)
    assert check_against_ours(backend, problem, step, q, layer) <= 2**-6


def test_deep_gemm_multiplies_as_ours_does() -> None:
    library = DeepGemm()
    why = library.refusal(arch_of(DEVICE))
    if why is not None:
        pytest.skip(why)
    experts, each, columns, width = 4, 2 * ROW_ALIGNMENT, V3.hidden, V3.inter
    a = random_codes((experts, each, width), DEVICE)
    b = random_codes((experts, columns, width), DEVICE)
    a_scales = scales_of_rows(each, width, DEVICE, experts)
    b_scales = scales_of_weight(columns, width, DEVICE, experts)
    ours = fp8_gemm(a[0], a_scales[0], b[0], b_scales[0])
    theirs = library.dense(a[0], a_scales[0], b[0], b_scales[0])
    assert (ours.float() - theirs.float()).abs().max() <= 2**-6 * ours.float().abs().max()
    counts = torch.tensor([each, 1, 0, 130], dtype=torch.int32, device=DEVICE)
    mine = grouped.grouped_gemm_masked(a, a_scales, b, b_scales, counts)
    other = library.masked(a, a_scales, b, b_scales, counts, each)
    for expert, count in enumerate(counts.tolist()):
        near, far = mine[expert, :count].float(), other[expert, :count].float()
        assert ((near - far).abs() <= 2**-6 * ours.float().abs().max()).all()


@pytest.mark.parametrize("alignment", [1, 128])
def test_owners_of_rows(alignment: int) -> None:
    ends = torch.tensor([3, 3, 300, 641], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 128, 256, 600], dtype=torch.int32, device=DEVICE)
    for begins in (None, starts):
        found = row_owners(1300, ends, alignment, begins)
        cpu = None if begins is None else begins.cpu()
        assert found.tolist() == row_owners_twin(1300, ends.cpu(), alignment, cpu).tolist()
