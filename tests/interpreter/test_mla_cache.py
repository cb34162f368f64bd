"""RoPE, latent normalisation and paged cache write in one, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dispatch.fp8 import dequantise_rows
from models.deepseek.config import Rope
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_cache import write_latents, write_latents_twin
from models.deepseek.kernels.gpu.mla_gather import gather_latents
from models.deepseek.kernels.gpu.mla_rows import pack_rows_twin, read_rows_twin, row_bytes
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.deepseek.rope import cos_sin_table

EPS = 1e-6


class Tokens:
    """Columns of a wider projection, NaN around them."""

    def __init__(self, tokens: int, rank: int = 128, rope: int = 32, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rank, self.rope = rank, rope
        wide = torch.full((tokens + 1, 16 + rank + rope + 8), torch.nan).bfloat16()
        wide[:tokens, 16 : 16 + rank + rope] = torch.randn(tokens, rank + rope, generator=g) * 3
        self.latent = wide[:tokens, 16 : 16 + rank]
        self.key = wide[:tokens, 16 + rank : 16 + rank + rope]
        self.weight = torch.randn(rank, generator=g)
        self.positions = torch.randint(0, 50, (tokens,), generator=g)
        self.cos_sin = cos_sin_table(Rope(theta=10000.0, yarn=None), rope, 50)

    def cache(self, fp8: bool, blocks: int = 4, block: int = 16) -> Tensor:
        if fp8:
            width = row_bytes(self.rank, self.rope, True)
            return torch.full((blocks, block, width), 0xFF, dtype=torch.uint8)
        return torch.full((blocks, block, self.rank + self.rope), torch.nan).bfloat16()

    def write(self, slots: Tensor, layer: Tensor, **more: bool) -> Tensor | None:
        return write_latents(
            self.latent, self.key, self.weight, EPS, self.positions, self.cos_sin, slots, layer,
            **more,
        )  # fmt: skip

    def twin(self) -> Tensor:
        args = (self.latent, self.key, self.weight, EPS, self.positions, self.cos_sin)
        return write_latents_twin(*args)


def untouched(layer: Tensor, before: Tensor, slots: Tensor) -> bool:
    others = torch.ones(layer.shape[0] * layer.shape[1], dtype=torch.bool)
    others[slots[slots >= 0]] = False
    now, then = (x.flatten(0, 1)[others].view(torch.uint8) for x in (layer, before))
    return torch.equal(now, then)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("widths", [(64, 16), (128, 32), (512, 64)])
def test_bf16(tokens: int, widths: tuple[int, int]) -> None:
    t = Tokens(tokens, *widths)
    layer = t.cache(False)
    before, slots = layer.clone(), torch.tensor([17, 0, 63, 5, 30])[:tokens]
    assert t.write(slots, layer) is None
    rows = layer.flatten(0, 1)[slots].double()
    want = t.twin()
    # One rounding to bf16; a rotated value is a difference, so half a unit of its inputs.
    assert ((rows - want).abs() <= 2**-8 * want.abs() + 2**-20 * 10).all()
    assert untouched(layer, before, slots)


def test_the_same_bits_as_the_torch_kernels_one_after_the_other() -> None:
    t, k = Tokens(6), TorchKernels()
    mine, theirs = t.cache(False), t.cache(False)
    slots = torch.tensor([3, 9, 33, 60, 1, 2])
    t.write(slots, mine)
    latent = k.rms_norm(t.latent, t.weight, EPS)
    key = k.rope(t.key.unsqueeze(1), t.positions, t.cos_sin).squeeze(1)
    k.write_cache(theirs, latent, key, slots)
    rows, wanted = (x.flatten(0, 1)[slots].float() for x in (mine, theirs))
    # The order of the norm's sum is another: now and then a last bit of bf16.
    assert ((rows - wanted).abs() <= 2**-7 * wanted.abs()).all()
    assert (rows == wanted).float().mean() > 0.99


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("widths", [(128, 16), (512, 64)])
def test_fp8(ue8m0: bool, widths: tuple[int, int]) -> None:
    t = Tokens(4, *widths)
    layer = t.cache(True)
    before, slots = layer.clone(), torch.tensor([2, 40, 41, 16])
    kept = t.write(slots, layer, ue8m0=ue8m0, keep=True)
    want = t.twin()
    rows = read_rows_twin(layer, slots, t.rank, t.rope)
    packed = layer.flatten(0, 1)[slots]
    expected = pack_rows_twin(want[:, : t.rank], want[:, t.rank :], ue8m0)
    # fp32 against float64 may fall on the other side of a middle; nearly all bytes are the same.
    assert (packed == expected).float().mean() > 0.98
    scales = expected[:, t.rank : t.rank + t.rank // 32].contiguous().view(torch.float32)
    step = dequantise_rows(torch.full((4, t.rank), 16.0).to(torch.float8_e4m3fn), scales)
    near = (rows - want)[:, : t.rank].abs() <= want[:, : t.rank].abs() / 16 + step / 16 * 2**-8
    assert near.all()
    assert ((rows - want)[:, t.rank :].abs() <= 2**-8 * want[:, t.rank :].abs() + 1e-5).all()
    assert untouched(layer, before, slots)
    assert kept is not None and kept.dtype == torch.bfloat16
    assert ((kept.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()


def test_rows_of_padding_are_written_nowhere() -> None:
    for fp8 in (False, True):
        t = Tokens(3)
        layer = t.cache(fp8)
        before, slots = layer.clone(), torch.tensor([-1, 7, 64])  # 64: one behind the last
        t.positions[0] = -1
        t.write(slots, layer)
        assert untouched(layer, before, torch.tensor([7]))
        assert not torch.equal(layer.flatten(0, 1)[7], before.flatten(0, 1)[7])


def test_a_block_with_a_nan_is_nan_throughout_in_fp8() -> None:
    t = Tokens(2, 256, 16)
    t.latent[1, 130] = torch.nan
    layer = t.cache(True)
    t.write(torch.tensor([0, 1]), layer)
    rows = read_rows_twin(layer, torch.tensor([0, 1]), 256, 16)
    assert rows[0].isfinite().all() and rows[1, :256].isnan().all()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_token_alone_is_the_token_in_company(fp8: bool) -> None:
    t = Tokens(5)
    whole, slots = t.cache(fp8), torch.arange(5)
    t.write(slots, whole)
    for row in range(5):
        one = Tokens(5)
        one.latent, one.key = one.latent[row : row + 1], one.key[row : row + 1]
        one.positions = one.positions[row : row + 1]
        layer = t.cache(fp8)
        one.write(torch.tensor([row]), layer)
        rows = (x.flatten(0, 1)[row].view(torch.uint8) for x in (layer, whole))
        assert torch.equal(*rows)


def test_wrong_shapes_are_refused() -> None:
    t = Tokens(2)
    with pytest.raises(ShapeRefused, match="contiguous"):
        t.write(torch.tensor([0, 1]), torch.zeros(2, 16, 100).bfloat16())
    with pytest.raises(ShapeRefused, match="int64"):
        t.write(torch.tensor([0, 1], dtype=torch.int32), t.cache(False))
    narrow = Tokens(2, rank=64)
    for layer in (narrow.cache(True), narrow.cache(True)[:0]):
        with pytest.raises(ShapeRefused, match="latent width 64: an FP8 cache has a multiple of"):
            narrow.write(torch.tensor([0, 1]), layer)
    latent, key = (torch.empty(16, n, dtype=torch.bfloat16) for n in (64, 32))
    none = torch.zeros(1, 6, dtype=torch.int32)
    with pytest.raises(ShapeRefused, match="an FP8 cache has a multiple of 128"):
        gather_latents(none, none, narrow.cache(True), latent, key)
    with pytest.raises(ShapeRefused, match="latent width 96"):
        gather_latents(none, none, Tokens(2, 96).cache(False), latent.new_empty(16, 96), key)
    t.weight = t.weight.bfloat16()
    with pytest.raises(ShapeRefused, match="float32"):
        t.write(torch.tensor([0, 1]), t.cache(False))
