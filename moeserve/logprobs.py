"""Log-probabilities of chosen and of prompt tokens, with rank and best alternatives.

Of the raw logits, before penalties and temperature. Each row on its own, in a fixed order: company
does not change a bit (log_softmax works row by row; torch.sum would not).

Shape letters: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from moeserve.request import TokenLogprob


def token_logprobs(raw: Tensor, token_ids: Seq[int], tops: Seq[int]) -> list[TokenLogprob]:
    """raw [n, V] logits before any editing; tops[j]: how many alternatives row j reports."""
    n, vocab = raw.shape
    if n == 0:
        return []
    logp = torch.log_softmax(raw, dim=-1)
    at = torch.tensor(list(token_ids), device=raw.device).unsqueeze(1)
    value = torch.gather(raw, 1, at)
    lower = torch.arange(vocab, device=raw.device) < at
    rank = 1 + (raw > value).sum(dim=-1) + ((raw == value) & lower).sum(dim=-1)
    chosen = torch.gather(logp, 1, at).squeeze(1).tolist()
    width = min(max(tops), vocab)
    top_ids: list[list[int]] = [[]] * n
    top_values: list[list[float]] = [[]] * n
    if width > 0:
        ids, exact = _best(raw, width)
        if not bool(exact.all()):
            ids = _best(raw, vocab)[0][:, :width]
        top_ids = ids.tolist()
        top_values = torch.gather(logp, 1, ids).tolist()
    return [
        TokenLogprob(
            token,
            chosen[j],
            ranked,
            tuple(zip(top_ids[j][: tops[j]], top_values[j][: tops[j]], strict=True)),
        )
        for j, (token, ranked) in enumerate(zip(token_ids, rank.tolist(), strict=True))
    ]


def _best(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ids [n, width] of the largest values, ties to the lowest id; exact [n] is False where a
    tie crosses the width, so that another id may have belonged there."""
    n, vocab = x.shape
    if width >= vocab:
        order = torch.sort(x, dim=-1, descending=True, stable=True).indices
        return order, torch.ones(n, dtype=torch.bool, device=x.device)
    values, ids = torch.topk(x, width, dim=-1)
    exact = (x >= values[:, -1:]).sum(dim=-1) == width
    ids, by_id = torch.sort(ids, dim=-1)
    values = torch.gather(values, 1, by_id)
    by_value = torch.sort(values, dim=-1, descending=True, stable=True).indices
    return torch.gather(ids, 1, by_value), exact
