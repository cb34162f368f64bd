"""The sampler's choice where the logits are on a GPU: the same order of operations as sampler.py,
the same numbers for the same seed and position. The host waits once, for all that it asks: tokens,
log-probabilities, probabilities; or later (`Choice`).

What rows draw with goes over in one copy. Temperature, top-k, top-p, min-p and the draw are one
chain of kernels (models/deepseek/kernels/gpu/sampling.py); editing is sampler.py's own. Tokens are
those of a CPU where the probabilities agree: softmax rounds otherwise in its last bits.

Shape letters: O rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from models.crossing import brought, sent
from models.deepseek.kernels.gpu.row_peaks import argmax
from models.deepseek.kernels.gpu.sampling import Cuts, Tokens
from models.deepseek.kernels.gpu.sampling import sample as sample_rows
from moeserve.draw import Floats
from moeserve.logprobs_device import AskedLogprobs, ask_logprobs, told_logprobs
from moeserve.request import TokenLogprob
from moeserve.row_draws import RowDraws, draws_of
from moeserve.sampler import Row, Sampled, edit_logits
from moeserve.sequence import SamplingNeeds


@dataclass
class Choice:
    """What rows chose, on the device: `tensors`, once they are on the host, are what `sampled`
    tells. tokens [O] int64; failed [O] bool: rows without one."""

    tokens: Tensor
    failed: Tensor
    _sequences: Seq[Row]
    _marks: Tensor  # [3, O] int64: tokens, whether a row has none, whether it is the model's fault
    _asking: Seq[int]  # rows with log-probabilities
    _asked: AskedLogprobs | None
    _softmax_of: Seq[int]
    _softmax: Tensor | None  # [its rows, V]
    _raw_of: Seq[int]
    _raw: Tensor | None  # [its rows, V]

    @property
    def tensors(self) -> list[Tensor]:
        found = [self._marks]
        if self._asked is not None:
            found += self._asked.tensors
        return found + [x for x in (self._softmax, self._raw) if x is not None]

    def sampled(self, host: Seq[Tensor]) -> Sampled:
        """host: the tensors, brought over."""
        rest = list(host[1:])
        tokens, barred, broken = host[0].tolist()
        failed = {}
        for j, (no_token, not_finite) in enumerate(zip(barred, broken, strict=True)):
            if not_finite:
                failed[j] = "the model's logits are not finite"
            elif no_token:
                failed[j] = "logit_bias and min_tokens leave no token"
        logprobs: dict[int, TokenLogprob] = {}
        if self._asked is not None:
            of, rest = rest[:4], rest[4:]
            chosen = [tokens[j] for j in self._asking]
            tops = [self._sequences[j].sampling.logprobs or 0 for j in self._asking]
            logprobs = dict(zip(self._asking, told_logprobs(of, chosen, tops), strict=True))
        softmax: dict[int, Floats] = {}
        if self._softmax is not None:
            softmax = dict(zip(self._softmax_of, rest.pop(0).numpy(), strict=True))
        raw = dict(zip(self._raw_of, rest.pop(0), strict=True)) if self._raw is not None else {}
        return Sampled(tokens, logprobs, failed, softmax, raw)


def choose(
    logits: Tensor,
    sequences: Seq[Row],
    softmax_of: Collection[int] = frozenset(),
    raw_of: Collection[int] = frozenset(),
) -> Choice:
    """sampler.sample for logits [O, V] fp32 on a GPU, which may be changed in place; the host waits
    for nothing."""
    device = logits.device
    needs = 0
    for sequence in sequences:
        needs |= sequence.needs
    edited = bool(needs & SamplingNeeds.EDITED)
    asking = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.LOGPROBS]
    asked_rows = _rows_of(asking, len(sequences), device)
    before: Tensor | None = None
    if asking:
        before = logits if asked_rows is None else logits.index_select(0, asked_rows)
        before = before.clone() if edited and asked_rows is None else before
    raw_rows = sorted(raw_of)
    raw = logits.index_select(0, _places(raw_rows, device)) if raw_rows else None
    unsound: Tensor | None = None
    if edited:
        unsound = argmax(logits)[1]  # before: what the edits would hide is the model's fault
        edit_logits(logits, sequences)
    draws = draws_of(sequences, device) if needs & SamplingNeeds.RANDOM else None
    chosen = draw_tokens(logits, draws)
    failed = lost = chosen.failed if unsound is None else unsound | chosen.failed
    marks = chosen.failed if unsound is None else unsound
    asked: AskedLogprobs | None = None
    if before is not None:
        tokens = chosen.tokens
        if asked_rows is not None:
            tokens, lost = tokens[asked_rows], lost[asked_rows]
        before = torch.where(lost[:, None], 0.0, before)
        asked = ask_logprobs(before, tokens, max(s.sampling.logprobs or 0 for s in sequences))
    softmax: Tensor | None = None
    wanted = [j for j in sorted(softmax_of) if sequences[j].needs & SamplingNeeds.RANDOM]
    if chosen.probs is not None and wanted:
        softmax = chosen.probs.index_select(0, _places(wanted, device))
    return Choice(
        chosen.tokens, failed, sequences,
        torch.stack((chosen.tokens, chosen.failed.long(), marks.long())),
        asking, asked, wanted, softmax, raw_rows, raw,
    )  # fmt: skip


def _rows_of(rows: list[int], count: int, device: torch.device) -> Tensor | None:
    """On the device; None: all of them."""
    return None if not rows or len(rows) == count else _places(rows, device)


def _places(rows: list[int], device: torch.device) -> Tensor:
    return sent(torch.tensor(rows, dtype=torch.int64), device)


def sample_on_device(
    logits: Tensor,
    sequences: Seq[Row],
    softmax_of: Collection[int] = frozenset(),
    raw_of: Collection[int] = frozenset(),
) -> Sampled:
    """sampler.sample, waited for."""
    return sample_beside(logits, sequences, softmax_of, raw_of)[0]


def sample_beside(
    logits: Tensor,
    sequences: Seq[Row],
    softmax_of: Collection[int] = frozenset(),
    raw_of: Collection[int] = frozenset(),
    beside: Seq[Tensor] = (),
) -> tuple[Sampled, list[Tensor]]:
    """The same; and tensors that are brought over in the same copy."""
    choice = choose(logits, sequences, softmax_of, raw_of)
    host = brought([*choice.tensors, *beside])
    num = len(host) - len(beside)
    return choice.sampled(host[:num]), host[num:]


def draw_tokens(logits: Tensor, draws: RowDraws | None) -> Tokens:
    """logits [O, V] fp32, edited already. draws None: all rows are greedy."""
    return sample_rows(logits, None if draws is None else Cuts(**vars(draws)))
