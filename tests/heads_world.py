"""Heads on whole numbers: many of their logits are equal, sums of products exact in any order; on
the host, and choosing where their logits are."""

from __future__ import annotations

from typing import Any

import torch
from speculate_world import pick_there
from torch import Tensor

from moeserve.request import Request, SamplingParams
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.eagle import EagleHead, EagleLayer
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead

D, V = 12, 40
GREEDY: dict[str, Any] = {}
RANDOM: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 12, "seed": 5}
KINDS = (GREEDY, RANDOM, {"logprobs": 2}, {"temperature": 1.3, "min_p": 0.05, "seed": 9})
MOST = (3, 1, 0, 4, 2, 3, 7)


def whole(*shape: int, seed: int, most: int = 2) -> Tensor:
    """Small whole numbers: sums of products are exact in any order, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def sequence(number: int, num_tokens: int = 5, **sampling: Any) -> Sequence:
    params = SamplingParams(**({"max_tokens": 50, "temperature": 0.0} | sampling))
    tokens = tuple((7 * i + number) % V for i in range(num_tokens))
    return Sequence(
        Request(request_id=f"{number}", prompt_token_ids=tokens, sampling=params), number, 100
    )


def asks(seed: int, kinds: Any = KINDS) -> list[DraftAsk]:
    """Of all kinds; one without hidden states, some without room."""
    made = []
    for i, most in enumerate(MOST):
        hidden = None if i == 5 else whole(1 + i % 3, D, seed=10 * seed + i)
        made.append(DraftAsk(sequence(i, **kinds[i % len(kinds)]), most, 2, hidden))
    return made


def medusas(seed: int, **settings: Any) -> tuple[MedusaDrafter, MedusaDrafter]:
    """On the host, there. Four heads without blocks: their logits are whole numbers."""
    heads = [MedusaHead((), whole(V, D, seed=100 * seed + i, most=1)) for i in range(4)]
    return MedusaDrafter(heads, **settings), MedusaDrafter(heads, **settings, pick=pick_there)


def eagle_head(layers: int = 1) -> EagleHead:
    def made(*shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) + 100 * seed)
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    parts = [
        EagleLayer(
            None, made(16, D, seed=i), made(8, D, seed=i + 1), made(8, D, seed=i + 2),
            made(D, 16, seed=i + 3), 1 + made(D, seed=i), made(20, D, seed=i + 4),
            made(20, D, seed=i + 5), made(D, 20, seed=i + 6),
        )
        for i in range(layers)
    ]  # fmt: skip
    return EagleHead(made(D, 2 * D, seed=9), None, None, tuple(parts), 4, 4, 500.0, 1e-5)


def coarse(features: Tensor) -> Tensor:
    """Logits of a few values: equal ones in each row, some far above the rest."""
    out = whole(V, D, seed=77)
    return (features.float() @ out.T / 3).round() * 2


def eagles(**settings: Any) -> tuple[EagleDrafter, EagleDrafter]:
    """On the host, there."""
    head, embed = eagle_head(), whole(V, D, seed=3)
    return (
        EagleDrafter(head, embed, coarse, **settings),
        EagleDrafter(head, embed, coarse, **settings, pick=pick_there),
    )


def eagle_asks(seed: int, kinds: Any = KINDS, more: int = 1) -> list[DraftAsk]:
    """Prompts of unlike lengths, some behind a prefix that is not known. more: times as many."""
    made = []
    for i, most in enumerate(more * most for most in MOST):
        one = sequence(i, 3 + 2 * i, **kinds[i % len(kinds)])
        first = i % 3
        generator = torch.Generator().manual_seed(10 * seed + i)
        hidden = torch.randn(one.num_tokens - 1 - first, D, generator=generator)
        made.append(DraftAsk(one, most, first, None if i == 5 else hidden))
    return made
