"""The ports between an engine and a model: what a runner must fill, what a model gives back.

Knows: token ids, positions, paged caches. Knows nothing of requests, scheduling or processes.

Shape letters: T tokens on this rank, S sequences in the step, B blocks a table row, D hidden,
V vocabulary, O rows whose logits are wanted, W largest depth of a tree of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Device tensors of one step on one rank, complete when constructed. T and S may be 0.

    The tokens of a sequence lie together, in order of position; sequence s owns the rows
    query_start[s] : query_start[s+1]. A row at position p attends to the positions 0..p of its
    sequence, found through block_tables[s]; its own latent is written to slot_mapping[row] first.

    Trees of drafts: the last rows of a sequence may be the nodes of a tree, parents before their
    children, each in a slot of its own behind the sequence's. Siblings share a position (the
    root's plus the depth), so a node's path is told apart: with n the number of entries of
    ancestors[row] that are not -1, they are the slots of the positions p - n + 1 .. p of a row at
    position p (its nodes in order of depth, itself last); what lies before them is found through
    block_tables[s] as ever. Rows outside of trees have none. The bits are those of a chain along
    the path. `ancestor_slots` makes such rows, `copy_latents` makes an accepted path a chain.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position in the sequence
    slot_mapping: Tensor  # [T] int64, block id * block_size + offset
    query_start: Tensor  # [S + 1] int32, prefix sums of scheduled tokens
    context_len: Tensor  # [S] int32, slots in use once this step has been written
    block_tables: Tensor  # [S, B] int32, padded with -1
    logits_rows: Tensor  # [O] int64, rows of T
    max_query_len: int  # largest number of scheduled tokens of a sequence (0 when empty)
    max_context_len: int
    ancestors: Tensor | None = None  # [T, W] int32, -1 behind the entries; None: no trees
    # [T] bool: rows that fill a captured step up, at position -1 and slot -1. They write nothing,
    # attend to nothing and are sent to nobody; what comes out of them means nothing. None: no such.
    padding: Tensor | None = None
    # No less than the sum of positions + 1 over all rows (what sequences share counts each time);
    # None: nothing tighter is known than that no row has more than max_context_len.
    total_context: int | None = None
    # The same batch where the host made it, its tensors there: whoever wants lengths reads them in
    # it, and need not wait for the device. None: only the device has them, or there is none.
    host: ForwardBatch | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_len.shape[0]


def largest_half(num_tokens: int) -> int:
    """The most rows in a half of any batch of at most num_tokens (`CausalLM.forward`)."""
    return -(-num_tokens // 2)


def ancestor_slots(parents: Seq[int], slots: Seq[int]) -> list[list[int]]:
    """Of a tree, by row: what `ForwardBatch.ancestors` holds, without the -1. Row 0 is the last
    known token and has none; row i + 1 is node i, whose parent is node parents[i] < i, -1 for a
    child of row 0. slots [n + 1]: the rows' own."""
    paths: list[list[int]] = [[]]
    for parent, slot in zip(parents, slots[1:], strict=True):
        paths.append([*paths[parent + 1], slot])
    return paths


@dataclass(frozen=True)
class PagedKVCache:
    """The latent cache: layers[i] is [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim].

    One entry a layer, MTP layers last. The rope part follows the normalised latent. In FP8 layers
    are bytes, [num_blocks, block_size, bytes a token] uint8: what they mean, kernels know.
    """

    layers: list[Tensor]
    block_size: int
    computed: torch.dtype | None = None  # what the model computes in; None: what layers are

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden rows, whatever the cache keeps of them."""
        return self.layers[0].dtype if self.computed is None else self.computed

    @property
    def bytes_per_token(self) -> int:
        return sum(x.shape[-1] * x.element_size() for x in self.layers)


def copy_latents(cache: PagedKVCache, from_slots: Tensor, to_slots: Tensor) -> None:
    """Row from_slots[i] of the cache is written to to_slots[i], in all layers, MTP layers too: what
    an accepted path of a tree needs, whose nodes then lie where its positions do. Both [n] int64,
    flat slots as in slot_mapping, no slot twice in to_slots. All are read before any is written."""
    for layer in cache.layers:
        rows = layer.view(-1, layer.shape[-1])
        rows.index_copy_(0, to_slots, rows.index_select(0, from_slots))


@dataclass(frozen=True)
class CacheSpec:
    """What a model needs of the cache: layers (with MTP), values a token a layer, dtype.
    packed: bytes a token a layer that hold these values otherwise (in FP8); None: as they are."""

    num_layers: int
    width: int
    dtype: torch.dtype
    packed: int | None = None

    def bytes_per_token(self) -> int:
        each = self.width * self.dtype.itemsize if self.packed is None else self.packed
        return self.num_layers * each

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> PagedKVCache:
        width, dtype = self.width, self.dtype
        if self.packed is not None:
            width, dtype = self.packed, torch.uint8
        shape = (num_blocks, block_size, width)
        layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        return PagedKVCache(layers=layers, block_size=block_size, computed=self.dtype)


@dataclass(frozen=True)
class ForwardOutput:
    """hidden [T, D] after the final norm (what an MTP head wants), logits [O, V] fp32."""

    hidden: Tensor
    logits: Tensor


class StepObserver(Protocol):
    """Receives what a step shows: picks of experts and where rows go (load), times of parts
    (bench). May be None. layer: row of the placement. One that has wants_rows = False hears nothing
    of rows that are sent: on some devices to know them is to wait."""

    def expert_picks(self, layer: int, ids: Tensor) -> None:
        """ids [T, K]: the logical experts of each row of the batch, -1 where masked. Lent to be
        kept: nothing may write to it later."""
        ...

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        """rows [R]: rows that this rank sends to each rank, itself included. Lent as well."""
        ...

    def part(self, name: str, seconds: float) -> None: ...


class CausalLM(Protocol):
    """A model on one device. Every rank of an expert-parallel group calls `forward` each step."""

    config: Any
    cache_spec: CacheSpec

    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        observer: StepObserver | None = None,
        halves: bool = False,
    ) -> ForwardOutput:
        """halves, agreed by all ranks: two halves of the batch go through the layers in turn, so
        that one computes while rows of the other travel. The same results; the observer is told
        of the batch as a whole."""
        ...

    def draft(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        next_token_ids: Tensor,
        cache: PagedKVCache,
        depth: int = 0,
        observer: StepObserver | None = None,
    ) -> ForwardOutput:
        """MTP layer `depth` over the same rows: hidden [T, D] of the main model (post-norm) and
        the known next token of each row [T]; logits predict the token after next. The hidden that
        comes back is post shared_head.norm, ready to be fed in again. Collective like forward."""
        ...
