"""An EAGLE head over pasts that were padded once gives what it gives sequence by sequence, in as
many launches whatever the number of sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from heads_world import GREEDY, D, coarse, eagle_head, sequence, whole
from speculate_world import pick_there
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeserve.speculate import eagle_padded
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.eagle import EagleHead, Past, eagle_forward
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.eagle_padded import FEW, SHORT, PaddedPasts
from moeserve.speculate.late import judge
from moeserve.speculate.tree import DraftTree, chain

CPU = torch.device("cpu")


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal(past: int, m: int) -> Tensor:
    return torch.arange(past + m) <= past + torch.arange(m)[:, None]


def known_of(head: EagleHead, length: int, seed: int) -> list[Past]:
    if not length:
        return head.no_past()
    hidden, embedded = some(length, D, seed=seed), some(length, D, seed=seed + 1)
    where = torch.arange(length)
    return eagle_forward(head, embedded, hidden, where, head.no_past(), causal(0, length))[1]


@pytest.mark.parametrize(("layers", "most", "buffers"), [(1, 1 << 26, 4), (2, 3000, 6)])
def test_what_it_gives_is_what_each_sequence_gives(
    layers: int, most: int, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all lengths, prompts among them; of some, drafts were rejected; some draft nothing; levels
    of trees, ever fewer sequences. most: of a buffer."""
    monkeypatch.setattr(eagle_padded, "MOST", most)
    head = eagle_head(layers)
    lengths = [0, 5, 3 * SHORT, 17, 0, 2 * SHORT, 9, 40]
    counts = [3, 1, 4, 2 * FEW, 5 * FEW, 2, FEW, 1]
    rejected = [2, 0, 3, 0, 1, 1, 7, 0]
    pasts = [known_of(head, length, seed=s) for s, length in enumerate(lengths)]
    embedded, hidden = (some(sum(counts), D, seed=seed) for seed in (50, 51))
    where = [torch.arange(n, n + m) for n, m in zip(lengths, counts, strict=True)]
    given = [list(past) for past in pasts]
    padded = PaddedPasts(head, given, counts, 6, CPU)
    assert len(padded._buffers) == buffers
    features = padded.first(embedded, hidden, torch.cat(where))
    parts = zip(embedded.split(counts), hidden.split(counts), strict=True)
    want, grown = zip(
        *(
            eagle_forward(head, e, h, where[s], pasts[s], causal(lengths[s], counts[s]))
            for s, (e, h) in enumerate(parts)
        ),
        strict=True,
    )
    torch.testing.assert_close(features, torch.cat(want))
    assert not any(given)
    mine = padded.grown()
    torch.testing.assert_close(mine, list(grown))
    before = [[(k.clone(), v.clone()) for k, v in past] for past in mine]

    order, w, rng = [6, 0, 2, 7, 3], 3, random.Random(layers)
    known = [lengths[s] + counts[s] - rejected[s] for s in order]
    levels = padded.levels(order, torch.tensor(known))
    theirs = [grown[s] for s in order]
    ancestors = torch.zeros(len(order), w, 0, dtype=torch.bool)
    for number, k in enumerate((5, 2)):
        above = torch.tensor([[rng.randrange(w) for _ in range(w)] for _ in range(k)])
        inherited = ancestors[torch.arange(k)[:, None], above]
        own = torch.eye(w, dtype=torch.bool).expand(k, -1, -1)
        ancestors = torch.cat([inherited, own], dim=-1)
        embedded, hidden = (some(k * w, D, seed=60 + 2 * number + i) for i in range(2))
        positions = torch.tensor(known[:k]).repeat_interleave(w) + number
        found = levels.run(embedded, hidden, positions, ancestors).split(w)
        for row in range(k):
            own_rows = slice(row * w, row * w + w)
            columns = lengths[order[row]] + counts[order[row]]
            seen = (torch.arange(columns) < known[row]).expand(w, -1)
            want_row, theirs[row] = eagle_forward(
                head, embedded[own_rows], hidden[own_rows], positions[own_rows], theirs[row],
                torch.cat([seen, ancestors[row]], dim=1),
            )  # fmt: skip
            torch.testing.assert_close(found[row], want_row)
    torch.testing.assert_close(mine, before, rtol=0, atol=0)  # drafts lie behind all of it


def test_what_one_sequence_has_spoils_no_other() -> None:
    head = eagle_head()
    counts = [2, 4, 1]
    pasts = [known_of(head, length, seed=length) for length in (7, 1, 9)]
    embedded, hidden = some(7, D, seed=1), some(7, D, seed=2)
    where = torch.tensor([7, 8, 1, 2, 3, 4, 9])
    found = []
    for bad in (0.0, float("nan")):
        hidden[2:6] += bad
        pasts[1][0][1][:] += bad
        padded = PaddedPasts(head, [list(past) for past in pasts], counts, 1, CPU)
        features = padded.first(embedded, hidden, where)
        ones = torch.ones(3, 1, 1, dtype=torch.bool)
        levels = padded.levels([0, 1, 2], torch.tensor([8, 2, 10]))
        rows = levels.run(embedded[:3], features[[1, 5, 6]], torch.tensor([8, 2, 10]), ones)
        found.append((features[[0, 1, 6]], rows[[0, 2]]))
        assert features[2:6].isnan().all() == bool(bad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class _Launches(TorchDispatchMode):
    """Operations but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.num += not is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nodes", [None, 12])
def test_launches_are_as_many_whatever_the_number_of_sequences(nodes: int | None) -> None:
    def launches(num: int) -> int:
        drafter = EagleDrafter(
            eagle_head(), whole(40, D, seed=3), coarse, 4, nodes, width=3, pick=pick_there
        )
        members = [sequence(i, 9 + i % 5, **GREEDY) for i in range(num)]
        made = [DraftAsk(s, 0, 0, some(s.num_tokens - 1, D, seed=1)) for s in members]
        drafter.propose([ask for ask in made if ask.hidden is not None], 4)
        drafts = DraftTree((1, 2, 2), (-1, -1, 0)) if nodes else chain((1, 2))
        trees = [drafts if i % 2 else DraftTree() for i in range(num)]
        asked = _Launches()
        with torch.inference_mode(), asked:
            tokens = torch.arange(sum(tree.num_rows for tree in trees)) % 3
            late = judge(tokens, tokens > 5, trees)
            hidden = torch.zeros(sum(late.drafts) + num, D)
            parts = hidden.split([n + 1 for n in late.drafts])
            drafter.ask_late(
                [DraftAsk(s, 9, s.num_tokens - 1, parts[i], i) for i, s in enumerate(members)],
                4, late,
            )  # fmt: skip
        return asked.num

    assert launches(4) == launches(48) < 500, launches(48)
