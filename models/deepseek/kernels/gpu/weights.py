"""Weights as the Triton kernels, and libraries in their place, read them: rows as they are.

e4m3 keeps its codes and a scale for each 128x128. Experts in it lie stacked matrix by matrix, back
to back: slots of a matrix are rows of one table with one pitch, as TMA wants them, and DeepGEMM's
grouped products take the stacks as they are. A slot's pieces of the stacks make its bundle (law 3).

Knows layouts. Knows nothing of checkpoints or kernels. Shape letters as in kernels/base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.fp8 import pack_exponents
from ep.bundle import Bundle
from models.deepseek.fp8 import BLOCK, Fp8Rows, dequantise_weight, powers_of_two, scale_shape
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.gpu.scales import COLUMN_ALIGNMENT


def words_of(scales: Tensor, rows: int) -> Tensor:
    """Scales fp32 [.., ceil(N / 128), G], powers of two -> int32 [.., N, ceil(G / 4)] in columns: a
    row's exponents, as DeepGEMM takes them on sm_100. N in fours, as TMA wants columns."""
    packed = pack_exponents(scales).repeat_interleave(BLOCK, -2)[..., :rows, :]
    columns = packed.new_empty((*packed.shape[:-2], packed.shape[-1], rows))
    return columns.transpose(-1, -2).copy_(packed)


class TritonLinearWeight:
    """A weight [N, C] as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes

    def unpack(self) -> Tensor:
        return self.weight


class TritonFp8LinearWeight:
    """codes [N, C] e4m3, scales [ceil(N/128), ceil(C/128)] fp32. A product with it is W8A8: rows
    are quantised too, with a scale for each 128 channels, a power of two where the weight's are.
    words: the scales once more, for libraries (words_of), where they are asked for."""

    def __init__(
        self, codes: Tensor, scales: Tensor, dtype: torch.dtype, packed: bool = False
    ) -> None:
        self.codes, self.scales, self.dtype = codes, scales, dtype
        self.out_features, self.in_features = codes.shape
        self.ue8m0 = powers_of_two(scales)
        packed = packed and self.ue8m0 and self.out_features % COLUMN_ALIGNMENT == 0
        self.words = words_of(scales, self.out_features) if packed else None
        self.nbytes = codes.nbytes + scales.nbytes
        self.nbytes += 0 if self.words is None else self.words.nbytes

    @classmethod
    def of(
        cls, rows: Fp8Rows, dtype: torch.dtype, packed: bool = False
    ) -> TritonFp8LinearWeight | None:
        """None where rows of one block have different scales."""
        scales = rows.scales_of_groups(BLOCK)
        if scales is None:
            return None
        codes = rows.values.view(torch.uint8).clone(memory_format=torch.contiguous_format)
        return cls(codes.view(torch.float8_e4m3fn), scales.clone(), dtype, packed)

    def unpack(self) -> Tensor:
        return dequantise_weight(self.codes, self.scales, self.dtype)


class TritonExpertWeights:
    """[e, 3 * I * D] of the model dtype: gate [I, D], up [I, D], down [D, I]."""

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots, self.hidden, self.intermediate = num_slots, hidden, intermediate
        self.data = torch.zeros(num_slots, 3 * intermediate * hidden, dtype=dtype, device=device)
        self.nbytes = self.data.nbytes
        cut = 2 * intermediate * hidden
        self.gate_up = self.data[:, :cut].unflatten(1, (2 * intermediate, hidden))
        self.down = self.data[:, cut:].unflatten(1, (hidden, intermediate))

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        for target, source in zip(self.fetch(slot), (gate, up, down), strict=True):
            target.copy_(source)

    def fetch(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views, so that store() can write through them."""
        gate, up = self.gate_up[slot].chunk(2)
        return gate, up, self.down[slot]

    def bundle(self, slot: int) -> Bundle:
        return Bundle(self.data[slot].view(torch.uint8))


class TritonFp8ExpertWeights:
    """Stacked matrix by matrix, as grouped GEMMs of any maker take them: codes of gate and up
    [e, 2J, D], of down [e, D, J], their scales [e, ceil(N / 128), ceil(K / 128)] fp32. J is I up to
    a multiple of 128, where gate, up and down are 0: so up begins with a block. words: the scales
    of both once more (words_of), a slot's made again as often as it is stored; no part of a bundle.

    ue8m0: rows for these slots get scales that are powers of two, as the weights' are. Who loads
    says so, where it holds for every expert that may ever lie here (law 5: what an expert gives may
    not depend on which others share its rank); until then any scales, which is never wrong."""

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool = False,
    ) -> None:
        self.num_slots, self.hidden, self.intermediate = num_slots, hidden, intermediate
        self.dtype = dtype
        self.padded = -(-intermediate // BLOCK) * BLOCK
        wide, tall = (2 * self.padded, hidden), (hidden, self.padded)

        def zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self.gate_up = zeros(wide, torch.uint8).view(torch.float8_e4m3fn)
        self.down = zeros(tall, torch.uint8).view(torch.float8_e4m3fn)
        self.gate_up_scales = zeros(scale_shape(wide), torch.float32)
        self.down_scales = zeros(scale_shape(tall), torch.float32)
        self.gate_up_words: Tensor | None = None
        self.down_words: Tensor | None = None
        if packed and hidden % COLUMN_ALIGNMENT == 0:
            self.gate_up_words = words_of(self.gate_up_scales, wide[0])
            self.down_words = words_of(self.down_scales, tall[0])
        of_words = [w.nbytes for w in (self.gate_up_words, self.down_words) if w is not None]
        self.nbytes = sum(stack.nbytes for stack in self._stacks()) + sum(of_words)
        self.ue8m0 = False

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        raise KernelArgumentError("these experts are kept in e4m3: use store_fp8")

    def store_fp8(self, slot: int, gate: Fp8Rows, up: Fp8Rows, down: Fp8Rows) -> None:
        for (codes, scales), rows in zip(self._parts(slot), (gate, up, down), strict=True):
            of_blocks = rows.scales_of_groups(BLOCK)
            if of_blocks is None:
                raise KernelArgumentError(f"scales differ among rows of one {BLOCK}")
            codes.view(torch.uint8).copy_(rows.values.view(torch.uint8))
            scales.copy_(of_blocks)
        self._pack(slot)

    def fetch(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (
            dequantise_weight(codes, scales, self.dtype) for codes, scales in self._parts(slot)
        )
        return gate, up, down

    def bundle(self, slot: int) -> Bundle:
        parts = (stack[slot].view(torch.uint8).flatten() for stack in self._stacks())
        return Bundle(*parts, stored=lambda: self._pack(slot))

    def _pack(self, slot: int) -> None:
        for words, scales in (
            (self.gate_up_words, self.gate_up_scales),
            (self.down_words, self.down_scales),
        ):
            if words is not None:
                words[slot].copy_(words_of(scales[slot], words.shape[1]))

    def _stacks(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.down, self.gate_up_scales, self.down_scales

    def _parts(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Views of codes [N, C] and scales of gate, up and down, without what pads them."""
        blocks, rows = self.padded // BLOCK, self.intermediate
        codes, scales = self.gate_up[slot], self.gate_up_scales[slot]
        gate = codes[:rows], scales[:blocks]
        up = codes[self.padded : self.padded + rows], scales[blocks:]
        return [gate, up, (self.down[slot][:, :rows], self.down_scales[slot])]
