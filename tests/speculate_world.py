"""What tests of speculation share: requests that end in every way, a drafter that knows all."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moeserve.draw import draw
from moeserve.request import Request, SamplingParams
from moeserve.row_draws import RowDraws
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.late import Late, LateDrafts
from moeserve.speculate.tree import DraftTree, chain

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.1, "top_p": 0.9, "seed": 4, "logprobs": 1},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logprobs": 0},
    {"temperature": 0.9, "frequency_penalty": 0.7, "seed": 6},
    {"logit_bias": {7: 3.0, 9: -2.0}, "min_tokens": 4},
)


def requests(vocab: int, num: int, length: int, most: int = 16) -> list[Request]:
    """Prompts that share beginnings, every kind of sampling, outputs that end in every way. length:
    the most positions of a sequence."""
    rng = random.Random(5)
    base = [rng.randrange(3, vocab) for _ in range(60)]
    made = []
    for i in range(num):
        prompt = base[: rng.choice([0, 3, 17, 33, 48])]
        prompt = [*prompt, *(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 10)))]
        fields = dict(SAMPLINGS[i % len(SAMPLINGS)])
        max_tokens = rng.randrange(max(1, fields.get("min_tokens", 1)), most)
        if i % 5 == 4:
            max_tokens = length  # the context ends it
            prompt = [*prompt, *base][: length - rng.randrange(2, 14)]
        if i % 3 == 1:  # a third of all tokens ends it
            fields["stop_token_ids"] = tuple(range(i % 7, vocab, 9))
        if i % 11 == 6:
            fields["prompt_logprobs"] = 1
        sampling = SamplingParams(
            **{"temperature": 0.0, "ignore_eos": i % 2 == 0, "max_tokens": max_tokens} | fields
        )
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def pick_there(logits: Tensor, draws: RowDraws | None) -> tuple[Tensor, Tensor]:
    """The kernels' part, by what the CPU's sampler is made of."""
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    failed = ~torch.isfinite(torch.gather(logits, 1, tokens[:, None]).squeeze(1))
    hot = [] if draws is None else torch.nonzero(draws.temperature > 0).flatten().tolist()
    for j in hot:
        assert draws is not None
        probs = torch.softmax(logits[j : j + 1] / draws.temperature[j : j + 1, None], dim=-1)
        cut: Any = SimpleNamespace(
            top_k=int(draws.top_k[j]), top_p=float(draws.top_p[j]), min_p=float(draws.min_p[j])
        )
        seed, position = int(draws.seeds[j]) % 2**64, int(draws.positions[j])
        tokens[j] = draw(probs.numpy(), [cut], [seed], [position])[0]
    return tokens, failed


class Oracle:
    """Proposes what the plain run gave, wrong at a place that the request's state decides: always
    right, always wrong and everything between. tree: siblings before and behind the right one."""

    name = "oracle"
    collective = runs_ahead = False
    wants_hidden = True

    def __init__(
        self, tokens: dict[str, list[int]], depth: int, vocab: int, nodes: int | None = None
    ) -> None:
        """nodes: of its trees; None: chains."""
        self.max_depth, self.max_nodes = depth, nodes or depth
        self._tokens, self._vocab = tokens, vocab
        self.known: set[str] = set()
        self.hidden: dict[tuple[str, int], Tensor] = {}  # by request and position, all that it saw

    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        trees = []
        for ask in asks:
            sequence = ask.sequence
            self.known.add(sequence.request_id)
            assert ask.hidden is not None
            assert ask.first + len(ask.hidden) == sequence.num_computed_tokens
            for i, row in enumerate(ask.hidden):
                self.hidden[sequence.request_id, ask.first + i] = row.clone()
            done = sequence.num_output_tokens
            coming = self._tokens[sequence.request_id][done : done + min(ask.most, depth)]
            coming = [*coming, *[5] * (min(ask.most, depth) - len(coming))]
            key = done * 7 + sequence.arrival_index
            wrong = key % (depth + 2)
            if wrong < len(coming):
                coming[wrong] = (coming[wrong] + 1) % self._vocab
            if self.max_nodes == self.max_depth:
                trees.append(chain(coming))
            else:
                trees.append(self._tree(coming, key).keep(range(ask.most)))
        return trees

    def _tree(self, coming: Seq[int], key: int) -> DraftTree:
        """Each token among siblings, of which the first has a child; the parents' order differs."""
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for level, token in enumerate(coming):
            place = (key + level) % 3
            others = [(token + 1 + i) % self._vocab for i in range(2)]
            first = len(tokens)
            for sibling in [*others[:place], token, *others[place:]]:
                if sibling == token:
                    own = len(tokens)
                tokens.append(sibling)
                parents.append(above)
            tokens.append((token * 3) % self._vocab)
            parents.append(first if first != own else first + 1)
            above = own
        return DraftTree(tuple(tokens), tuple(parents))

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        assert sequence.num_computed_tokens == sequence.num_tokens - 1

    def forget(self, request_ids: Collection[str]) -> None:
        self.known -= set(request_ids)

    def memory_bytes(self) -> int:
        return 0


class LateOracle(Oracle):
    """Is asked before the host knows what was accepted."""

    num_late = num_walked = 0

    def drafts_late(self, sequences: Seq[Sequence]) -> bool:
        return True

    def ask_late(self, asks: Seq[DraftAsk], depth: int, late: Late) -> LateDrafts:
        self.num_late += 1
        self.num_walked += late.walked is not None
        given = [None if ask.hidden is None else ask.hidden.clone() for ask in asks]

        def told(host: Seq[Tensor], accepted: Seq[int]) -> list[DraftTree]:
            assert late.accepted.tolist() == list(accepted)
            after: list[DraftAsk] = []
            for ask, rows in zip(asks, given, strict=True):
                assert rows is not None
                if ask.late is not None:
                    rows = rows[: len(rows) - late.drafts[ask.late] + accepted[ask.late]]
                after.append(DraftAsk(ask.sequence, ask.most, ask.first, rows))
            alive = [ask for ask in after if ask.sequence.lease is not None]
            trees = iter(self.propose(alive, depth))
            return [DraftTree() if a.sequence.lease is None else next(trees) for a in after]

        return LateDrafts([], told)


def write_heads(folder: Path, kind: str, hidden: int, vocab: int) -> Path:
    """Random heads under their published names: "eagle" or "medusa"."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, *shape: int, one: bool = False) -> None:
        made = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        tensors[name] = made + 1 if one else made

    config: dict[str, int]
    if kind == "medusa":
        config = {"medusa_num_heads": 4, "medusa_num_layers": 1}
        for i in range(4):
            put(f"{i}.0.linear.weight", hidden, hidden)
            put(f"{i}.0.linear.bias", hidden)
            put(f"{i}.1.weight", vocab, hidden)
    else:
        config = {"num_attention_heads": 2, "head_dim": 16, "intermediate_size": 32}
        put("fc.weight", hidden, 2 * hidden)
        for name in "qkv":
            put(f"layers.0.self_attn.{name}_proj.weight", 32, hidden)
        put("layers.0.self_attn.o_proj.weight", hidden, 32)
        put("layers.0.post_attention_layernorm.weight", hidden, one=True)
        for name in ("gate", "up"):
            put(f"layers.0.mlp.{name}_proj.weight", 32, hidden)
        put("layers.0.mlp.down_proj.weight", hidden, 32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
