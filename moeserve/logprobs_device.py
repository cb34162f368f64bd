"""Log-probabilities where the logits are on a device: worked out there and brought over with the
tokens. The twin is `logprobs.token_logprobs`, whose values and order these are.

Of a tie the lowest id comes first: what is ranked are whole numbers, of which no two are the same
(a logit's bits in the order of its value, then its id), so that nothing is to be looked at twice.

Knows logits. Knows nothing of requests or of what editing follows.

Shape letters: n rows, V vocabulary, W alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.request import TokenLogprob

AT_ONCE = 1 << 25  # logits that are worked on at once: bounds what is held beside them


@dataclass(frozen=True)
class AskedLogprobs:
    """On the device: logprobs [n] fp32 and ranks [n] int64 of the tokens; ids [n, W] int64 and
    values [n, W] fp32 of the likeliest."""

    logprobs: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.logprobs, self.ranks, self.ids, self.values]


def ask_logprobs(raw: Tensor, token_ids: Tensor, top: int) -> AskedLogprobs:
    """raw [n, V] fp32 before any editing, token_ids [n] int64, both on one device; top: the most
    alternatives of a row. Nothing is waited for."""
    rows = max(1, AT_ONCE // raw.shape[1])
    parts = [
        _ask(x, at, min(top, raw.shape[1]))
        for x, at in zip(torch.split(raw, rows), torch.split(token_ids, rows), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return AskedLogprobs(
        *(torch.cat(same) for same in zip(*(p.tensors for p in parts), strict=True))
    )


def _ask(raw: Tensor, token_ids: Tensor, width: int) -> AskedLogprobs:
    at = token_ids.unsqueeze(1)
    ids_of = torch.arange(raw.shape[1], device=raw.device)
    logp = torch.log_softmax(raw, dim=-1)
    value = torch.gather(raw, 1, at)
    rank = 1 + (raw > value).sum(dim=-1) + ((raw == value) & (ids_of < at)).sum(dim=-1)
    if width:
        bits = (raw + 0.0).view(torch.int32)  # of two zeros one
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        ids = torch.topk((order << 32) - ids_of, width, dim=-1).indices
    else:
        ids = token_ids.new_zeros(len(raw), 0)
    return AskedLogprobs(
        torch.gather(logp, 1, at).squeeze(1), rank, ids, torch.gather(logp, 1, ids)
    )


def told_logprobs(host: Seq[Tensor], token_ids: Seq[int], tops: Seq[int]) -> list[TokenLogprob]:
    """host: `AskedLogprobs.tensors`, brought over; tops[j]: what row j reports."""
    logprobs, ranks, ids, values = (x.tolist() for x in host)
    return [
        TokenLogprob(
            token, logprobs[j], ranks[j], tuple(zip(ids[j][:top], values[j][:top], strict=True))
        )
        for j, (token, top) in enumerate(zip(token_ids, tops, strict=True))
    ]
