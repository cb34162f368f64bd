"""A step's batch in two halves, as even as rows allow. Pure.

The cut is by rows, not by sequences: a step of decodes is cut between two of them, and a long
prompt within itself. Then its second part attends to latents that the first part writes in the same
step; `overlap` keeps them in order, and law 5 says that a cut changes no bit. (Outside of
deterministic mode the form of attention is chosen by the length of each part.) So may a tree of
drafts be cut: parents stand before their children, a row carries its whole path with it.

Knows: ForwardBatch. Knows nothing of layers, ranks or why a batch is cut.

Shape letters: T tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.crossing import sent, sent_all
from models.interface import ForwardBatch, largest_half


def split_batch(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """The first ceil(T / 2) rows and the rest; either may be empty. Views where possible. Neither
    has logits_rows: hidden states are joined before logits are made of them. max_context_len
    and total_context stay those of the whole, as bounds: to know better is to stop a device, or
    to look at the host's own batch, which is cut as well."""
    if batch.host is None:
        return _split(batch)
    first, second = _split(batch.host)
    if _is_decode(batch):
        halves = _split(batch)
        return replace(halves[0], host=first), replace(halves[1], host=second)
    cut, skipped = first.num_tokens, batch.num_sequences - second.num_sequences
    parts = [first.query_start, first.context_len, second.query_start, second.context_len]
    starts, context, later_starts, later_context = sent_all(parts, batch.positions.device)
    one = _part(
        batch, slice(0, cut), slice(0, first.num_sequences), starts, context, first.max_query_len
    )
    other = _part(
        batch, slice(cut, None), slice(skipped, None), later_starts, later_context,
        second.max_query_len,
    )  # fmt: skip
    return replace(one, host=first), replace(other, host=second)


def _is_decode(batch: ForwardBatch) -> bool:
    """A row a sequence: halves are views."""
    return batch.max_query_len <= 1 and batch.num_sequences == batch.num_tokens


def _split(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    cut = largest_half(batch.num_tokens)
    if _is_decode(batch):
        head, tail, begins = slice(0, cut), slice(cut, None), batch.query_start
        some = min(1, cut), min(1, batch.num_tokens - cut)
        return (
            _part(batch, head, head, begins[: cut + 1], None, some[0]),
            _part(batch, tail, tail, begins[cut:] - cut, None, some[1]),
        )
    starts: list[int] = batch.query_start.tolist()  # on a device that knows alone: a wait
    ends = starts[1:]
    num_first = sum(start < cut for start in starts[:-1])
    skipped = sum(end <= cut for end in ends)
    first = [min(start, cut) for start in starts[: num_first + 1]]
    second = [max(start - cut, 0) for start in starts[skipped:]]
    missing = starts[num_first] - first[num_first]  # rows of a sequence that is cut
    context = batch.context_len[:num_first]
    if missing:
        context = context.clone()
        context[-1] -= missing
    return (
        _part(
            batch,
            slice(0, cut),
            slice(0, num_first),
            _starts(first, batch),
            context,
            _longest(first),
        ),
        _part(
            batch,
            slice(cut, None),
            slice(skipped, None),
            _starts(second, batch),
            None,
            _longest(second),
        ),
    )


def _part(
    batch: ForwardBatch,
    rows: slice,
    sequences: slice,
    query_start: Tensor,
    context_len: Tensor | None,
    max_query_len: int,
) -> ForwardBatch:
    return ForwardBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        query_start=query_start,
        context_len=batch.context_len[sequences] if context_len is None else context_len,
        block_tables=batch.block_tables[sequences],
        logits_rows=batch.logits_rows[:0],
        max_query_len=max_query_len,
        max_context_len=batch.max_context_len if max_query_len else 0,
        ancestors=None if batch.ancestors is None else batch.ancestors[rows],
        total_context=batch.total_context,
    )


def _starts(starts: list[int], batch: ForwardBatch) -> Tensor:
    return sent(torch.tensor(starts, dtype=batch.query_start.dtype), batch.query_start.device)


def _longest(starts: list[int]) -> int:
    return max((end - start for start, end in zip(starts, starts[1:], strict=False)), default=0)
