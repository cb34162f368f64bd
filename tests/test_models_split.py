"""A batch cut in two: each row stays what it was, as even as can be, whatever the sequences are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.deepseek.split import split_batch
from models.interface import ForwardBatch, largest_half

BLOCK, WIDTH = 4, 12


def batch_of(lengths: list[int], befores: list[int]) -> ForwardBatch:
    """lengths: new tokens of each sequence; befores: tokens that its cache holds already."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = [b + i for n, b in zip(lengths, befores, strict=True) for i in range(n)]
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    tables = torch.arange(len(lengths) * WIDTH, dtype=torch.int32).view(len(lengths), WIDTH)
    at = torch.tensor(positions, dtype=torch.int64)
    total = len(positions)
    return ForwardBatch(
        token_ids=torch.arange(total) + 100,
        positions=at,
        slot_mapping=tables[owners, at // BLOCK].long() * BLOCK + at % BLOCK,
        query_start=starts.to(torch.int32),
        context_len=torch.tensor(befores, dtype=torch.int32) + torch.tensor(lengths).int(),
        block_tables=tables,
        logits_rows=torch.arange(total),
        max_query_len=max(lengths, default=0),
        max_context_len=max((a + b for a, b in zip(lengths, befores, strict=True)), default=0),
    )


def rows_of(batch: ForwardBatch) -> list[tuple[object, ...]]:
    """Each row: token, position, slot, the blocks of its sequence; with the batch checked."""
    starts = batch.query_start.tolist()
    assert starts[0] == 0 and starts[-1] == batch.num_tokens and starts == sorted(starts)
    assert batch.query_start.dtype == batch.context_len.dtype == torch.int32
    assert len(starts) == batch.num_sequences + 1 == batch.block_tables.shape[0] + 1
    lengths = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert batch.max_query_len == max(lengths, default=0)
    rows: list[tuple[object, ...]] = []
    for s, (start, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        positions = batch.positions[start : start + length].tolist()
        context = int(batch.context_len[s])
        assert context <= batch.max_context_len
        if length:  # once this part has been written, that is how much there is
            assert positions == list(range(context - length, context))
        blocks = tuple(batch.block_tables[s].tolist())
        for row, position in zip(range(start, start + length), positions, strict=True):
            token, slot = int(batch.token_ids[row]), int(batch.slot_mapping[row])
            rows.append((token, position, slot, blocks))
    return rows


one_token = st.lists(st.just(1), max_size=9)
any_lengths = st.lists(st.integers(0, 14), max_size=7)


@settings(max_examples=300, deadline=None)
@given(st.one_of(one_token, any_lengths), st.data())
def test_halves_have_the_rows_of_the_whole(lengths: list[int], data: st.DataObject) -> None:
    befores = data.draw(st.lists(st.integers(0, 30), min_size=len(lengths), max_size=len(lengths)))
    whole = batch_of(lengths, befores)
    contexts = whole.context_len.clone()
    first, second = split_batch(whole)
    assert rows_of(first) + rows_of(second) == rows_of(whole)
    sizes = first.num_tokens, second.num_tokens
    assert 0 <= sizes[0] - sizes[1] <= 1
    # What ranks agreed on bounds the halves of each of them.
    for agreed in range(whole.num_tokens, whole.num_tokens + 3):
        assert max(sizes) <= largest_half(agreed)
    assert not len(first.logits_rows) and not len(second.logits_rows)
    assert first.host is second.host is None
    with_host = split_batch(replace(whole, host=whole, total_context=7))
    for half, again in zip((first, second), with_host, strict=True):
        assert again.host is not None and again.total_context == 7
        assert rows_of(again) == rows_of(again.host) == rows_of(half)
    assert whole.context_len.equal(contexts), "the whole is as it was"


def test_decodes_are_cut_between_sequences_without_a_look_at_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_of([1] * 5, [3, 9, 1, 0, 7])

    def look(self: torch.Tensor) -> None:
        raise AssertionError("a look stops a device")

    monkeypatch.setattr(torch.Tensor, "tolist", look)
    first, second = split_batch(batch)
    assert (first.num_sequences, second.num_sequences) == (3, 2)


def test_a_long_prompt_is_cut_within() -> None:
    first, second = split_batch(batch_of([9, 2], [5, 0]))
    assert first.query_start.tolist() == [0, 6] and first.context_len.tolist() == [11]
    assert second.query_start.tolist() == [0, 3, 5] and second.context_len.tolist() == [14, 2]
    assert first.block_tables[0].equal(second.block_tables[0])
