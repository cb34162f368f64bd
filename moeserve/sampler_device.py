"""The sampler's choice where the logits are on a GPU: the same order of operations as sampler.py,
the same numbers for the same seed and position, and the host waits once, for the tokens.

What rows draw with goes over in one copy. Temperature, top-k, top-p, min-p and the draw are one
chain of kernels (models/deepseek/kernels/gpu/sampling.py); editing and log-probabilities are
sampler.py's own. Tokens are those of a CPU where the probabilities agree: softmax rounds otherwise
in its last bits.

Shape letters: O rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from models.deepseek.kernels.gpu.row_peaks import argmax
from models.deepseek.kernels.gpu.sampling import Cuts
from models.deepseek.kernels.gpu.sampling import sample as sample_rows
from moeserve.logprobs import token_logprobs
from moeserve.sampler import Row, Sampled, edit_logits
from moeserve.sequence import SamplingNeeds


def sample_on_device(
    logits: Tensor, sequences: Seq[Row], softmax_of: Collection[int] = frozenset()
) -> Sampled:
    """sampler.sample for logits [O, V] fp32 on a GPU, which may be changed in place."""
    needs = 0
    for sequence in sequences:
        needs |= sequence.needs
    raw: Tensor | None = None
    asking: list[int] = []
    if needs & SamplingNeeds.LOGPROBS:
        asking = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.LOGPROBS]
        raw = logits[asking]
    unsound: Tensor | None = None
    if needs & SamplingNeeds.EDITED:
        unsound = argmax(logits)[1]  # before: what the edits would hide is the model's fault
        edit_logits(logits, sequences)
    cuts = cuts_of(sequences, logits.device) if needs & SamplingNeeds.RANDOM else None
    chosen = sample_rows(logits, cuts)
    marks = chosen.failed if unsound is None else unsound
    told = torch.stack((chosen.tokens, chosen.failed.long(), marks.long())).cpu()
    tokens, barred, broken = told.tolist()
    failed = {}
    for j, (no_token, not_finite) in enumerate(zip(barred, broken, strict=True)):
        if not_finite:
            failed[j] = "the model's logits are not finite"
        elif no_token:
            failed[j] = "logit_bias and min_tokens leave no token"
    softmax = {}
    if chosen.probs is not None:
        wanted = [j for j in softmax_of if sequences[j].needs & SamplingNeeds.RANDOM]
        if wanted:
            rows = chosen.probs[wanted].cpu().numpy()
            softmax = dict(zip(wanted, rows, strict=True))
    if raw is None:
        return Sampled(tokens, {}, failed, softmax)
    lost = [row for row, j in enumerate(asking) if j in failed]
    if lost:
        raw[lost] = 0.0
    tops = [sequences[j].sampling.logprobs or 0 for j in asking]
    entries = token_logprobs(raw, [tokens[j] for j in asking], tops)
    return Sampled(tokens, dict(zip(asking, entries, strict=True)), failed, softmax)


def cuts_of(sequences: Seq[Row], device: torch.device) -> Cuts:
    """What rows draw with, on the device, by one copy from pinned memory. Greedy rows have a
    temperature of 0 there."""
    n = len(sequences)
    room = np.empty(36 * n, np.uint8)
    eight, four = room[: 24 * n].view(np.int64), room[24 * n :].view(np.int32)
    random = [bool(s.needs & SamplingNeeds.RANDOM) for s in sequences]
    eight[:n].view(np.uint64)[:] = [s.seed for s in sequences]
    eight[n : 2 * n] = [s.num_output_tokens for s in sequences]
    eight[2 * n :].view(np.float64)[:] = [s.sampling.top_p for s in sequences]
    heats = [s.temperature if hot else 0.0 for s, hot in zip(sequences, random, strict=True)]
    four[:n].view(np.float32)[:] = heats
    four[n : 2 * n].view(np.float32)[:] = [s.sampling.min_p for s in sequences]
    four[2 * n :] = [s.sampling.top_k for s in sequences]
    host = torch.from_numpy(room)
    there = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    long, short = there[: 24 * n].view(torch.int64), there[24 * n :].view(torch.int32)
    return Cuts(
        temperature=short[:n].view(torch.float32),
        top_k=short[2 * n :],
        top_p=long[2 * n :].view(torch.float64),
        min_p=short[n : 2 * n].view(torch.float32),
        seeds=long[:n],
        positions=long[n : 2 * n],
    )
