"""The smallest driver of a CausalLM: sequences in, logits of every row out. No scheduler.

Knows: how to fill a ForwardBatch and hand out cache blocks, in a scattered order so that nothing
can rely on neighbouring blocks. For checks, evaluations and tests; serving has its own engine.

Shape letters: T tokens of a step, S sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.interface import CausalLM, ForwardBatch, StepObserver, ancestor_slots, copy_latents


@dataclass
class _Sequence:
    blocks: list[int] = field(default_factory=list)
    length: int = 0  # without the nodes of a tree
    nodes: list[int] = field(default_factory=list)  # of the last step's tree: their slots

    def slot(self, position: int, block_size: int) -> int:
        return self.blocks[position // block_size] * block_size + position % block_size


@dataclass(frozen=True)
class OfflineOutput:
    """By sequence, in the order given: logits [t, V] fp32 and hidden [t, D] of its new rows."""

    logits: dict[int, Tensor]
    hidden: dict[int, Tensor]


class OfflineRunner:
    """Feed `step` any mixture of chunks; each sequence id continues where it stopped.

    Collective when the model is: every rank of the group must call `step` (an empty one will do).
    """

    def __init__(
        self, model: CausalLM, num_blocks: int = 64, block_size: int = 16, seed: int = 0
    ) -> None:
        self.model, self.block_size = model, block_size
        self.device = torch.device(getattr(model, "device", "cpu"))
        self.cache = model.cache_spec.allocate(num_blocks, block_size, self.device)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._sequences: dict[int, _Sequence] = {}
        self._drafted: dict[int, _Sequence] = {}

    def step(
        self,
        chunks: dict[int, list[int]],
        observer: StepObserver | None = None,
        halves: bool = False,
        trees: dict[int, Seq[int]] | None = None,
    ) -> OfflineOutput:
        """chunks: new tokens by sequence id; {} runs an empty batch. halves: see CausalLM.
        trees: by sequence, the parents (`ancestor_slots`) of the nodes of a tree of drafts, which
        its chunk ends in, behind one known token at least. The next step overwrites the nodes,
        except those of a path that `accept` names."""
        batch = self._batch(chunks, self._sequences, trees or {})
        out = self.model.forward(batch, self.cache, observer, halves)
        return OfflineOutput(_split(chunks, out.logits), _split(chunks, out.hidden))

    def accept(self, sequence: int, nodes: list[int]) -> None:
        """The path of these nodes of the last step's tree becomes part of the sequence; its latents
        in the MTP layers too, where `draft` went over the same tree."""
        for state in (self._sequences, self._drafted):
            found = state.get(sequence)
            if found is None or not found.nodes:
                continue
            own, source = self._sequences[sequence], [found.nodes[i] for i in nodes]
            target = [own.slot(found.length + i, self.block_size) for i in range(len(nodes))]
            if state is self._sequences:
                copy_latents(self.cache, self._ids(source), self._ids(target))
            found.length, found.nodes = found.length + len(nodes), []

    def draft(
        self,
        hidden: dict[int, Tensor],
        next_tokens: dict[int, list[int]],
        depth: int = 0,
        trees: dict[int, Seq[int]] | None = None,
    ) -> OfflineOutput:
        """MTP layer `depth` over the next rows of each sequence (rows must have been through
        `step`): hidden [t, D] from there, the token that follows each row. trees: as in `step`."""
        batch = self._batch(next_tokens, self._drafted, trees or {})
        empty = torch.zeros(0, self.model.config.hidden_size, dtype=self.cache.dtype)
        rows = torch.cat([hidden[s] for s in next_tokens] or [empty.to(self.device)])
        out = self.model.draft(batch, rows, batch.token_ids, self.cache, depth)
        return OfflineOutput(_split(next_tokens, out.logits), _split(next_tokens, out.hidden))

    def rewind_drafts(self, sequence: int) -> None:
        """The next `draft` of this sequence starts at its first row again (another depth, say)."""
        self._drafted.pop(sequence, None)

    def generate(self, sequence: int, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation of one new sequence."""
        logits = self.step({sequence: prompt}).logits[sequence]
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < num_tokens:
            logits = self.step({sequence: tokens[-1:]}).logits[sequence]
            tokens.append(int(logits[-1].argmax()))
        return tokens

    def free(self, sequence: int) -> None:
        self._free += self._sequences.pop(sequence).blocks
        self._drafted.pop(sequence, None)

    # -- parts -----------------------------------------------------------------------------

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _batch(
        self,
        chunks: dict[int, list[int]],
        state: dict[int, _Sequence],
        trees: dict[int, Seq[int]],
    ) -> ForwardBatch:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts = [0], []
        tables: list[list[int]] = []
        paths: list[list[int]] = []
        for name, chunk in chunks.items():
            blocks = self._sequences.setdefault(name, _Sequence())
            sequence = state.setdefault(name, _Sequence())
            begin, end = sequence.length, sequence.length + len(chunk)
            while len(blocks.blocks) * self.block_size < end:
                blocks.blocks.append(self._free.pop())
            own = [blocks.slot(position, self.block_size) for position in range(begin, end)]
            parents = trees.get(name, ())
            root = end - 1 - len(parents)
            found = ancestor_slots(parents, own[root - begin :]) if parents else [[]]
            tokens += chunk
            slots += own
            positions += [*range(begin, root), *(root + len(path) for path in found)][: len(chunk)]
            paths += [[] for _ in range(begin, root)] + found[: len(chunk)]
            sequence.length, sequence.nodes = root + 1, own[root + 1 - begin :]
            starts.append(len(tokens))
            contexts.append(end)
            tables.append(blocks.blocks)
        width = max((len(t) for t in tables), default=0)
        padded = [t + [-1] * (width - len(t)) for t in tables]

        depth = max(map(len, paths), default=0)
        ancestors = [path + [-1] * (depth - len(path)) for path in paths]
        table = torch.tensor(padded, dtype=torch.int32, device=self.device)
        return ForwardBatch(
            token_ids=self._ids(tokens),
            positions=self._ids(positions),
            slot_mapping=self._ids(slots),
            query_start=self._ids(starts).to(torch.int32),
            context_len=self._ids(contexts).to(torch.int32),
            block_tables=table.view(len(chunks), width),
            logits_rows=torch.arange(len(tokens), device=self.device),
            max_query_len=max((len(c) for c in chunks.values()), default=0),
            max_context_len=max(contexts, default=0),
            ancestors=torch.tensor(ancestors, dtype=torch.int32, device=self.device)
            if trees
            else None,
        )


def _split(chunks: dict[int, list[int]], rows: Tensor) -> dict[int, Tensor]:
    parts = torch.split(rows, [len(c) for c in chunks.values()]) if chunks else ()
    return dict(zip(chunks, parts, strict=True))
