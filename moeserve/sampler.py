"""Sampler: from logits to the next token of each row, and log-probabilities.

Order of operations for a row, each step on the result of the one before:

1. logprobs (chosen and prompt tokens) are of the raw logits: log_softmax, fp32.
2. repetition penalty r over tokens of prompt and output: l > 0 becomes l / r, else l * r.
3. frequency penalty: l -= f * (times in the output); presence penalty: l -= p if in the output.
4. logit bias: l += bias.
5. min_tokens: while fewer tokens are out, eos and stop ids are -inf (eos with ignore_eos never
   stops and is not masked).
6. temperature below GREEDY_BELOW: argmax, ties to the lowest id. Done.
7. l / temperature, softmax in fp32 -> p.
8. sorted by descending l, ties to the lowest id; kept is a prefix of that order:
   top-k: the first k. top-p: token i while the mass before it is below top_p times the mass of the
   first k (1 where top-k is off). min-p: p_i >= min_p * p_0. The first token is always kept.
9. one number u in [0, 1) from (seed, output position): the token at which the cumulative mass of
   what was kept (fp64) passes u times its sum. Order of the sum: the sorted one where 8 applies,
   else ascending ids.

Law 5: each operation works on a row alone and in a fixed order (no torch.sum over a row: its order
of addition depends on the number of rows), so company does not change a bit, and since u depends
on nothing but (seed, position), neither do preemption and layout. `sample_slowly` is the twin.

Shape letters: O rows, V vocabulary, n rows of a group.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.request import TokenLogprob
from moeserve.sequence import GREEDY_BELOW, SamplingNeeds, Sequence

FIRST_CANDIDATES = 256  # sorted first; the whole vocabulary only where that did not suffice


def sample(logits: Tensor, sequences: Seq[Sequence]) -> tuple[list[int], dict[int, TokenLogprob]]:
    """logits [O, V] fp32, row j of sequences[j] -> (token ids [O], logprobs of rows that ask).

    The logits may be changed in place. Rows must be finite where not masked: see `broken_rows`.
    """
    needs = 0
    for sequence in sequences:
        needs |= sequence.needs
    if not needs:
        return torch.argmax(logits, dim=-1).tolist(), {}
    raw: Tensor | None = None
    asking: list[int] = []
    if needs & SamplingNeeds.LOGPROBS:
        asking = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.LOGPROBS]
        raw = logits[asking]
    if needs & SamplingNeeds.EDITED:
        edit_logits(logits, sequences)
    if needs & SamplingNeeds.RANDOM:
        tokens = _choose(logits, sequences)
    else:
        tokens = torch.argmax(logits, dim=-1).tolist()
    if raw is None:
        return tokens, {}
    tops = [sequences[j].sampling.logprobs or 0 for j in asking]
    entries = token_logprobs(raw, [tokens[j] for j in asking], tops)
    return tokens, dict(zip(asking, entries, strict=True))


def broken_rows(logits: Tensor) -> list[int]:
    """Rows with a NaN or +inf, or with nothing above -inf: the model failed there."""
    best = logits.amax(dim=-1)  # a NaN wins
    fine = torch.isfinite(best)
    return [] if bool(fine.all()) else torch.nonzero(~fine).flatten().tolist()


# -- editing ------------------------------------------------------------------------------------


def edit_logits(logits: Tensor, sequences: Seq[Sequence]) -> None:
    """Steps 2 to 5, in place, by gather and scatter over the touched ids of all rows at once."""
    rows, ids, repetition, frequency, presence, counts = _penalised(sequences, logits.shape[-1])
    if len(ids):
        at = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device))
        values = logits[at]
        r, f, p, n = (
            torch.from_numpy(x).to(logits.device) for x in (repetition, frequency, presence, counts)
        )
        values = torch.where(values > 0, values / r, values * r)
        logits[at] = (values - f * n) - p * (n > 0)
    bias_rows: list[int] = []
    bias_ids: list[int] = []
    bias: list[float] = []
    masked_rows: list[int] = []
    masked_ids: list[int] = []
    for j, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.logit_bias:
            bias_rows += [j] * len(sampling.logit_bias)
            bias_ids += sampling.logit_bias.keys()
            bias += sampling.logit_bias.values()
        if sequence.num_output_tokens < sampling.min_tokens:
            inside = [i for i in sequence.stop_ids if 0 <= i < logits.shape[-1]]
            masked_rows += [j] * len(inside)
            masked_ids += inside
    if bias_ids:
        logits[bias_rows, bias_ids] += torch.tensor(bias, device=logits.device)
    if masked_ids:
        logits[masked_rows, masked_ids] = float("-inf")


def _penalised(sequences: Seq[Sequence], vocab: int) -> tuple[NDArray[np.generic], ...]:
    """(rows, ids, repetition, frequency, presence, output counts), one entry per touched logit."""
    parts: list[tuple[NDArray[np.generic], ...]] = []
    for j, sequence in enumerate(sequences):
        sampling = sequence.sampling
        repetition = sampling.repetition_penalty
        if repetition == 1 and not (sampling.presence_penalty or sampling.frequency_penalty):
            continue
        counts = sequence.output_counts
        if counts is None:
            counts = sequence.output_counts = {}
            for token in sequence.tokens[sequence.num_prompt_tokens :]:
                counts[token] = counts.get(token, 0) + 1
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        if repetition != 1:
            if sequence.prompt_unique is None:
                prompt = sequence.tokens[: sequence.num_prompt_tokens]
                sequence.prompt_unique = np.unique(np.asarray(prompt, np.int64))
            only_prompt = np.setdiff1d(sequence.prompt_unique, ids, assume_unique=True)
            ids = np.concatenate([ids, only_prompt])
            times = np.concatenate([times, np.zeros(len(only_prompt), np.float32)])
        inside = ids < vocab
        ids, times = ids[inside], times[inside]
        parts.append(
            (
                np.full(len(ids), j, np.int64),
                ids,
                np.full(len(ids), repetition, np.float32),
                np.full(len(ids), sampling.frequency_penalty, np.float32),
                np.full(len(ids), sampling.presence_penalty, np.float32),
                times,
            )
        )
    if not parts:
        return (np.empty(0, np.int64),) * 6
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


# -- choosing -----------------------------------------------------------------------------------


def uniforms(seeds: Seq[int], positions: Seq[int]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1 - 2**-40], each a function of its own (seed, output position) only: two
    rounds of a 64-bit mixer, the counter added between them."""
    with np.errstate(over="ignore"):
        state = _mix(np.array(seeds, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state ^ (np.array(positions, np.uint64) * np.uint64(0xD1342543DE82EF95)))
    return (state >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _choose(logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
    """Steps 6 to 9 for rows of which some are random."""
    random = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.RANDOM]
    whole = [j for j in random if not sequences[j].needs & SamplingNeeds.TRUNCATED]
    truncated = [j for j in random if sequences[j].needs & SamplingNeeds.TRUNCATED]
    if len(random) == len(sequences):
        tokens = [0] * len(sequences)
    else:
        tokens = torch.argmax(logits, dim=-1).tolist()
    for group, draw in ((whole, _draw_whole), (truncated, _draw_truncated)):
        if not group:
            continue
        members = [sequences[j] for j in group]
        u = uniforms([s.seed for s in members], [s.num_output_tokens for s in members])
        temperature = torch.tensor([s.temperature for s in members], device=logits.device)
        rows = logits if len(group) == len(sequences) else logits[group]
        scaled = rows / temperature.unsqueeze(1)
        probs = torch.softmax(scaled, dim=-1)
        for j, token in zip(
            group, draw(scaled, probs, torch.from_numpy(u), members).tolist(), strict=True
        ):
            tokens[j] = token
    return tokens


def _draw_whole(scaled: Tensor, probs: Tensor, u: Tensor, members: Seq[Sequence]) -> Tensor:
    """Untruncated rows: no sorting. probs [n, V], u [n] -> [n]."""
    mass = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    return _passed(mass, u.to(mass.device) * mass[:, -1])


def _draw_truncated(scaled: Tensor, probs: Tensor, u: Tensor, members: Seq[Sequence]) -> Tensor:
    """Rows with top-k, top-p or min-p -> [n]. Sorts a few candidates first; rows of which they may
    not hold all that is kept are sorted whole: the same result, as the order is the same."""
    n, vocab = scaled.shape
    device = scaled.device
    params = [s.sampling for s in members]
    k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
    u = u.to(device)
    out = torch.empty(n, dtype=torch.int64, device=device)
    width = min(FIRST_CANDIDATES, vocab)
    tokens, exact = _draw_among(scaled, probs, u, k, top_p, min_p, width)
    out[exact] = tokens[exact]
    rest = torch.nonzero(~exact).flatten()
    if len(rest):
        args = (scaled[rest], probs[rest], u[rest], k[rest], top_p[rest], min_p[rest])
        out[rest], _ = _draw_among(*args, vocab)
    return out


def _draw_among(
    scaled: Tensor,
    probs: Tensor,
    u: Tensor,
    k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Steps 8 and 9 within the best `width` tokens -> (tokens [n], exact [n]: nothing beyond the
    candidates could have been kept)."""
    vocab = scaled.shape[1]
    ids, exact = best(scaled, width)
    p = torch.gather(probs, 1, ids)
    mass = torch.cumsum(p, dim=-1, dtype=torch.float64)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    of_k = torch.gather(mass, 1, (torch.clamp(k, max=width) - 1).unsqueeze(1))
    base = torch.where(k.unsqueeze(1) < vocab, of_k, torch.ones_like(of_k))
    kept = torch.arange(width, device=scaled.device) < k.unsqueeze(1)
    kept &= before < top_p.unsqueeze(1) * base
    kept &= p >= min_p.unsqueeze(1) * p[:, :1]
    count = kept.sum(dim=-1).clamp(min=1)  # of a prefix: each condition is monotone
    if width < vocab:
        exact &= (k <= width) | ((k >= vocab) & (count < width))
    total = torch.gather(mass, 1, (count - 1).unsqueeze(1)).squeeze(1)
    index = torch.minimum(_passed(mass, u * total), count - 1)
    return torch.gather(ids, 1, index.unsqueeze(1)).squeeze(1), exact


def _passed(mass: Tensor, target: Tensor) -> Tensor:
    """First index of each row at which the cumulative mass passes target; never of zero mass."""
    index = torch.searchsorted(mass, target.unsqueeze(1), right=True).squeeze(1)
    return index.clamp(max=mass.shape[1] - 1)


def best(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
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


# -- log-probabilities --------------------------------------------------------------------------


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
        ids, exact = best(raw, width)
        if not bool(exact.all()):
            ids = best(raw, vocab)[0][:, :width]
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


# -- the twin -----------------------------------------------------------------------------------


def sample_slowly(logits: Tensor, sequence: Sequence) -> tuple[int, TokenLogprob | None]:
    """One row [V], one step after the other, in plain Python but for softmax and log_softmax."""
    sampling = sequence.sampling
    raw = [float(x) for x in logits]
    vocab = len(raw)
    output = sequence.tokens[sequence.num_prompt_tokens :]
    row = torch.tensor(raw)
    for token in sorted(set(sequence.tokens)):
        if token >= vocab:
            continue
        if sampling.repetition_penalty != 1:
            scale = torch.tensor(sampling.repetition_penalty)
            row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
        times = output.count(token)
        if times and (sampling.frequency_penalty or sampling.presence_penalty):
            row[token] = row[token] - torch.tensor(sampling.frequency_penalty) * times
            row[token] = row[token] - torch.tensor(sampling.presence_penalty)
    for token, bias in sampling.logit_bias.items():
        row[token] = row[token] + torch.tensor(bias)
    if len(output) < sampling.min_tokens:
        for token in sequence.stop_ids & set(range(vocab)):
            row[token] = float("-inf")

    if sampling.temperature < GREEDY_BELOW:
        chosen = min(range(vocab), key=lambda i: (-float(row[i]), i))
    else:
        scaled = row / torch.tensor(sampling.temperature)
        p = torch.softmax(scaled, dim=-1).tolist()
        order = list(range(vocab))
        if sequence.needs & SamplingNeeds.TRUNCATED:
            order.sort(key=lambda i: (-float(scaled[i]), i))
            k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
            first_k = 0.0
            for i in order[:k]:
                first_k += p[i]
            base = first_k if k < vocab else 1.0
            floor = float(torch.tensor(sampling.min_p) * torch.tensor(p[order[0]]))
            kept: list[int] = []
            mass = 0.0
            for i in order[:k]:
                if kept and (mass >= sampling.top_p * base or p[i] < floor):
                    break
                kept.append(i)
                mass += p[i]
            order = kept
        u = float(uniforms([sequence.seed], [len(output)])[0])
        total = 0.0
        for i in order:
            total += p[i]
        mass, chosen = 0.0, order[-1]
        for i in order:
            mass += p[i]
            if mass > u * total:
                chosen = i
                break
    if sampling.logprobs is None:
        return chosen, None
    logp = torch.log_softmax(torch.tensor(raw), dim=-1).tolist()
    ranking = sorted(range(vocab), key=lambda i: (-raw[i], i))
    top = tuple((i, logp[i]) for i in ranking[: sampling.logprobs])
    return chosen, TokenLogprob(chosen, logp[chosen], ranking.index(chosen) + 1, top)
