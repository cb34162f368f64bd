"""From a StepPlan to a ForwardBatch: index arithmetic in numpy over all rows at once.

Knows: block tables, positions. Knows nothing of why a token was scheduled.

Shape letters: T tokens, S sequences, B blocks a table row, O rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.interface import ForwardBatch, ancestor_slots
from moeserve.plan import StepPlan


@dataclass(frozen=True)
class PromptRows:
    """Rows of the logits whose next token is known: for prompt_logprobs of one sequence.

    first: index among the logits rows; the tokens that come next at rows first, first + 1, ...
    """

    request_id: str
    first: int
    next_ids: list[int]
    top: int


@dataclass(frozen=True)
class StepBatch:
    """forward.logits_rows: num_chosen rows that tokens are chosen at, those of the sampled
    sequences in plan order (one each, and one more for each draft), then those of `prompt_rows`."""

    forward: ForwardBatch
    num_chosen: int
    prompt_rows: tuple[PromptRows, ...]

    @property
    def host(self) -> ForwardBatch | None:
        """What forward was before it went to a device; None: it did not."""
        return self.forward.host


def build_batch(
    plan: StepPlan,
    tables: NDArray[np.int32],
    block_size: int,
) -> StepBatch:
    """tables: `BlockTables.matrix`. An empty plan makes a batch of T = S = O = 0."""
    token_ids: list[int] = []
    trees = plan.trees
    for i, (sequence, start) in enumerate(zip(plan.sequences, plan.starts, strict=True)):
        count = plan.counts[i]
        if count == 1:
            token_ids.append(sequence.tokens[start])
        else:
            token_ids += sequence.tokens[start : start + count]
            if i in trees:
                token_ids += trees[i].tokens
    total, num = plan.num_tokens, len(plan.sequences)
    counts = np.array(plan.counts, np.int64)
    starts = np.array(plan.starts, np.int64)
    context = starts + counts
    query_start = np.zeros(num + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    max_query = int(counts.max()) if num else 0
    max_context = int(context.max()) if num else 0
    rows = np.array(plan.rows, np.int64)
    if max_query <= 1:  # decode only: row i is sequence i
        positions, row_of = starts, rows
    else:
        shift = starts - query_start[:-1]
        positions = np.arange(total) + np.repeat(shift, counts)
        row_of = np.repeat(rows, counts)
    blocks, offsets = np.divmod(positions, block_size)
    slots = tables[row_of, blocks].astype(np.int64) * block_size + offsets
    ancestors: NDArray[np.int32] | None = None
    if any(not tree.is_chain for tree in trees.values()):
        positions, ancestors = _branches(plan, query_start, positions, slots)
    width = -(-max_context // block_size)
    block_tables = tables[rows, :width]  # [S, B], a copy

    last = query_start[1:].astype(np.int64) - 1
    if trees:
        logits_rows = _chosen_rows(plan, last)
    else:
        logits_rows = last[plan.sampled] if len(plan.sampled) < num else last
    num_chosen = len(logits_rows)
    prompt_rows = _prompt_rows(plan, query_start, num_chosen)
    if prompt_rows:
        extra = [np.arange(first, first + len(p.next_ids)) for p, first in prompt_rows]
        logits_rows = np.concatenate([logits_rows, *extra])

    tensor = torch.from_numpy
    forward = ForwardBatch(
        token_ids=tensor(np.array(token_ids, np.int64)),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        query_start=tensor(query_start),
        context_len=tensor(context.astype(np.int32)),
        block_tables=tensor(block_tables),
        logits_rows=tensor(logits_rows),
        max_query_len=max_query,
        max_context_len=max_context,
        ancestors=None if ancestors is None else tensor(ancestors),
        total_context=int(positions.sum()) + total,
    )
    return StepBatch(forward, num_chosen, tuple(p for p, _ in prompt_rows))


def _chosen_rows(plan: StepPlan, last: NDArray[np.int64]) -> NDArray[np.int64]:
    """last [S]: each sequence's last row. Of one with drafts, those before it too."""
    parts = []
    for i in plan.sampled:
        drafts = plan.trees[i].num_nodes if i in plan.trees else 0
        parts.append(np.arange(last[i] - drafts, last[i] + 1))
    return np.concatenate(parts)


def _branches(
    plan: StepPlan,
    query_start: NDArray[np.int32],
    places: NDArray[np.int64],
    slots: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Nodes of trees lie one behind the other (places [T], slots [T]); their positions are those of
    their depths -> positions [T], ancestors [T, W] (`ForwardBatch`)."""
    positions = places.copy()
    branching = {i: tree for i, tree in plan.trees.items() if not tree.is_chain}
    width = max(tree.depth for tree in branching.values())
    ancestors = np.full((len(places), width), -1, np.int32)
    for i, tree in branching.items():
        end = int(query_start[i + 1])
        rows = slice(end - tree.num_rows, end)
        positions[rows] = tree.positions(int(places[rows.start]))
        for row, path in enumerate(ancestor_slots(tree.parents, slots[rows].tolist()), rows.start):
            ancestors[row, : len(path)] = path
    return positions, ancestors


def _prompt_rows(
    plan: StepPlan, query_start: NDArray[np.int32], offset: int
) -> list[tuple[PromptRows, int]]:
    """With each, the first row of T. The rows of one sequence lie together."""
    found: list[tuple[PromptRows, int]] = []
    for i, sequence in enumerate(plan.sequences):
        if not sequence.wants_prompt_logprobs:
            continue
        start, end = plan.starts[i], plan.starts[i] + plan.counts[i]
        assert sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) == start + 1
        next_ids = sequence.tokens[start + 1 : min(end, sequence.num_prompt_tokens - 1) + 1]
        if next_ids:
            top = sequence.sampling.prompt_logprobs or 0
            rows = PromptRows(sequence.request_id, offset, next_ids, top)
            found.append((rows, int(query_start[i])))
            offset += len(next_ids)
    return found
