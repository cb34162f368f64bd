"""The slow, obvious twin of sampling.py: one row after the other, everything sorted, fp64.

Knows the rule as sampling.py states it; nothing of kernels. Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.race import ALONE, BLOCKS, RACE_BLOCK, WITHIN, waiting_times_twin
from models.deepseek.kernels.gpu.sampling import Cuts


def sample_twin(logits: Tensor, cuts: Cuts) -> tuple[list[int], Tensor]:
    """logits [B, V] fp32 -> tokens [B], probs [B, V] fp64 (of random rows; others 0)."""
    probs = torch.zeros(logits.shape, dtype=torch.float64)
    tokens = []
    for row in range(logits.shape[0]):
        heat = float(cuts.temperature[row])
        if heat > 0:
            probs[row] = torch.softmax(logits[row].double() / heat, dim=0)
        if heat > 0 and torch.isfinite(logits[row].max() / cuts.temperature[row]):
            tokens.append(draw_twin(probs[row].float(), cuts, row))
        else:
            tokens.append(int(logits[row].argmax()))
    return tokens, probs


def draw_twin(probs: Tensor, cuts: Cuts, row: int) -> int:
    """probs [V] fp32 (of a greedy row: logits), row: of cuts."""
    p, vocab = probs.tolist(), probs.shape[0]
    order = sorted(range(vocab), key=lambda i: (-p[i], i))
    top_k, top_p = int(cuts.top_k[row]), float(cuts.top_p[row])
    if float(cuts.temperature[row]) <= 0 or top_k == 1:
        return order[0]
    seed, position = int(cuts.seeds[row]) & ((1 << 64) - 1), int(cuts.positions[row])

    def winner(runners: list[int], race: int, chances: list[float]) -> int:
        times = waiting_times_twin(seed, position, race, runners).tolist()
        keys = {
            i: time / chances[i] if chances[i] > 0 else math.inf
            for i, time in zip(runners, times, strict=True)
        }
        return min(runners, key=lambda i: (keys[i], i))

    cut_k = 0 < top_k < vocab
    kept, base = (order[:top_k], math.fsum(p[i] for i in order[:top_k])) if cut_k else (order, 1.0)
    if float(cuts.min_p[row]) > 0:
        floor = float(cuts.min_p[row] * probs[order[0]])
        kept = [i for i in kept if p[i] >= floor]
    elif not cut_k:
        blocks = list(range(-(-vocab // RACE_BLOCK)))
        sums = [math.fsum(p[b * RACE_BLOCK : (b + 1) * RACE_BLOCK]) for b in blocks]
        first = winner(blocks, BLOCKS, sums) * RACE_BLOCK
        chosen = winner(list(range(first, min(first + RACE_BLOCK, vocab))), WITHIN, p)
        before = order[: order.index(chosen)]
        if top_p >= 1 or not before or math.fsum(p[i] for i in before) < top_p * base:
            return chosen
        kept = before
    while True:
        chosen = winner(sorted(kept), ALONE, p)
        before = kept[: kept.index(chosen)]
        if top_p >= 1 or not before or math.fsum(p[i] for i in before) < top_p * base:
            return chosen
        kept = before
