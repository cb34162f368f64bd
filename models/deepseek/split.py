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

from torch import Tensor

from models.interface import ForwardBatch, largest_half


def split_batch(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """The first ceil(T / 2) rows and the rest; either may be empty. Views where possible. Neither
    has logits_rows: hidden states are joined before logits are made of them. max_context_len
    and total_context stay those of the whole, as bounds: to know better is to stop a device, or
    to look at the host's own batch, which is cut as well."""
    halves = _split(batch)
    if batch.host is None:
        return halves
    first, second = _split(batch.host)
    return replace(halves[0], host=first), replace(halves[1], host=second)


def _split(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    cut = largest_half(batch.num_tokens)
    if batch.max_query_len <= 1 and batch.num_sequences == batch.num_tokens:
        head, tail, begins = slice(0, cut), slice(cut, None), batch.query_start
        some = min(1, cut), min(1, batch.num_tokens - cut)
        return (
            _part(batch, head, head, begins[: cut + 1], None, some[0]),
            _part(batch, tail, tail, begins[cut:] - cut, None, some[1]),
        )
    known = batch if batch.host is None else batch.host  # or one look at the device a step
    starts: list[int] = known.query_start.tolist()
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
            batch.query_start.new_tensor(first),
            context,
            _longest(first),
        ),
        _part(
            batch,
            slice(cut, None),
            slice(skipped, None),
            batch.query_start.new_tensor(second),
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


def _longest(starts: list[int]) -> int:
    return max((end - start for start, end in zip(starts, starts[1:], strict=False)), default=0)
