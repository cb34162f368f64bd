"""ToyModel: a CausalLM of a few lines whose next token is a hash of what lies in the cache.

It reads every position of a sequence back through the block tables, so a wrong block, slot,
position or context length gives other tokens at once: the engine's tests run on it, and a load test
of the front end needs no checkpoint. With a group it does one collective a forward, as a layer
would, so that a rank which stays away is noticed.

Knows: ForwardBatch and the cache layout. Has no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ep.group import EPGroup
from models.interface import CacheSpec, ForwardBatch, ForwardOutput, PagedKVCache, StepObserver


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = 97
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int = 4096


class ToyModel:
    def __init__(self, config: ToyConfig | None = None, group: EPGroup | None = None) -> None:
        self.config = config or ToyConfig()
        self.cache_spec = CacheSpec(num_layers=1, width=2, dtype=torch.float32)
        self.group = group
        self.num_forwards = 0
        mixer = np.random.default_rng(7)
        self._vocab = mixer.integers(1, 2**63, self.config.vocab_size, dtype=np.uint64)

    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        observer: StepObserver | None = None,
        halves: bool = False,
    ) -> ForwardOutput:
        """halves change nothing: no rows travel."""
        self.num_forwards += 1
        if self.group is not None and self.group.size > 1:
            dist.all_reduce(torch.tensor([batch.num_tokens]), group=self.group.device_group)
        layer = cache.layers[0]
        flat = layer.view(-1, layer.shape[-1])
        flat[batch.slot_mapping, 0] = batch.token_ids.to(torch.float32)
        flat[batch.slot_mapping, 1] = batch.positions.to(torch.float32)
        wanted = batch.logits_rows.tolist()
        logits = torch.empty(len(wanted), self.config.vocab_size)
        owner = np.searchsorted(batch.query_start.numpy(), wanted, side="right") - 1
        for o, (row, s) in enumerate(zip(wanted, owner.tolist(), strict=True)):
            context = int(batch.positions[row]) + 1
            assert context <= int(batch.context_len[s])
            blocks = batch.block_tables[s, : -(-context // cache.block_size)].long()
            assert bool((blocks >= 0).all()), "a position without a block"
            seen = layer[blocks].reshape(-1, 2)[:context]
            logits[o] = self.logits_of(seen[:, 0].tolist(), seen[:, 1].tolist())
        hidden = torch.zeros(batch.num_tokens, 1)
        return ForwardOutput(hidden=hidden, logits=logits)

    def logits_of(self, tokens: list[float], positions: list[float]) -> Tensor:
        """[V] fp32 in [0, 8): a hash of all (token, position) pairs."""
        state = hash(tuple(zip(map(int, tokens), map(int, positions), strict=True)))
        with np.errstate(over="ignore"):
            mixed = (self._vocab ^ np.uint64(state & (2**64 - 1))) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) * 2.0**-21)

    def draft(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        next_token_ids: Tensor,
        cache: PagedKVCache,
        depth: int = 0,
        observer: StepObserver | None = None,
    ) -> ForwardOutput:
        raise NotImplementedError("the toy has no MTP layer")

    def continue_prompt(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What an engine must answer, greedily: computed without any cache."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            logits = self.logits_of(
                [float(t) for t in tokens], [float(i) for i in range(len(tokens))]
            )
            tokens.append(int(logits.argmax()))
            if tokens[-1] in self.config.eos_token_ids:
                break
        return tokens[len(prompt) :]
