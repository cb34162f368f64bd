"""Log-probabilities of prompt tokens, worked out before the step's tokens are chosen: that may
change the logits. On a device they come over in the same copy as the tokens.

Knows rows of logits. Knows nothing of plans.

Shape letters: O rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from models.crossing import sent
from moeserve import sampler
from moeserve.batch import PromptRows
from moeserve.logprobs import token_logprobs
from moeserve.logprobs_device import ask_logprobs, told_logprobs
from moeserve.request import TokenLogprob


class Prompts:
    """told: by request; on a device, only after `sample` or `hear`."""

    def __init__(self, asked: Seq[PromptRows], logits: Tensor) -> None:
        """logits [O, V] of the step: those of the prompts' rows among them."""
        self.told: dict[str, list[TokenLogprob]] = {}
        self._asked = asked
        self.tensors: list[Tensor] = []  # to be brought over for `hear`; none on CPUs
        on_device = logits.device.type == "cuda"
        for rows in asked:
            part = logits[rows.first : rows.first + len(rows.next_ids)]
            if on_device:
                following = sent(torch.tensor(rows.next_ids), logits.device)
                self.tensors += ask_logprobs(part, following, rows.top).tensors
            else:
                tops = [rows.top] * len(rows.next_ids)
                self.told[rows.request_id] = token_logprobs(part, rows.next_ids, tops)

    def sample(
        self,
        logits: Tensor,
        sequences: Seq[sampler.Row],
        softmax_of: Collection[int] = frozenset(),
        raw_of: Collection[int] = frozenset(),
    ) -> sampler.Sampled:
        """`sampler.sample`, and what was asked of prompts."""
        if not self.tensors:
            return sampler.sample(logits, sequences, softmax_of, raw_of)
        from moeserve.sampler_device import sample_beside  # has kernels

        found, host = sample_beside(logits, sequences, softmax_of, raw_of, self.tensors)
        self.hear(host)
        return found

    def hear(self, host: Seq[Tensor]) -> None:
        """host: the tensors, brought over."""
        if not host:
            return
        for number, rows in enumerate(self._asked):
            of = host[4 * number : 4 * number + 4]
            tops = [rows.top] * len(rows.next_ids)
            self.told[rows.request_id] = told_logprobs(of, rows.next_ids, tops)
