"""Log-probabilities worked out where the logits lie are those of the host's twin, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moeserve import logprobs_device
from moeserve.logprobs import token_logprobs
from moeserve.logprobs_device import ask_logprobs, told_logprobs

INF = float("inf")


def rows(vocab: int) -> torch.Tensor:
    raw = torch.randn(9, vocab, generator=torch.Generator().manual_seed(5))
    raw[1] = (raw[1] * 2).round()  # ties everywhere
    raw[2] = 0.0
    raw[3] = torch.where(torch.arange(vocab) % 3 == 0, -0.0, 0.0)  # one value, two signs
    raw[4, 1::2] = -INF
    raw[5, 1:] = -INF
    raw[6] = -(raw[6].abs())
    raw[7] = (raw[7] * 4).round() / 4 - 3
    return raw


@pytest.mark.parametrize("vocab", [1, 7, 300])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_as_on_the_host(monkeypatch: pytest.MonkeyPatch, vocab: int, top: int) -> None:
    raw = rows(vocab)
    tokens = [j * 31 % vocab for j in range(len(raw))]
    tokens[5] = 0
    tops = [top, 0, top, top, *[max(top - 1, 0)] * 5]
    want = token_logprobs(raw, tokens, tops)
    for at_once in (1 << 25, 4 * vocab, 1):  # rows at once: all, four, one
        monkeypatch.setattr(logprobs_device, "AT_ONCE", at_once)
        asked = ask_logprobs(raw, torch.tensor(tokens), top)
        assert told_logprobs(asked.tensors, tokens, tops) == want


def test_of_no_rows() -> None:
    asked = ask_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 2)
    assert told_logprobs(asked.tensors, [], []) == []
