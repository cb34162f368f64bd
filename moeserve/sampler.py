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
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.logprobs import token_logprobs
from moeserve.request import TokenLogprob
from moeserve.sequence import GREEDY_BELOW, SamplingNeeds, Sequence

# Candidates that are sorted: within so much of the best scaled logit; all, where that does not do.
DROPS = (4.0, 10.0)
# Logits drawn from at once on a CPU: what lies in its cache. More only pays for page faults.
CACHE_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class Sampled:
    """token_ids [O]; logprobs by row, of rows that ask; broken: rows whose logits are not finite
    (their token means nothing)."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    broken: tuple[int, ...] = ()


def sample(logits: Tensor, sequences: Seq[Sequence]) -> Sampled:
    """logits [O, V] fp32, row j of sequences[j]. The logits may be changed in place."""
    needs = 0
    for sequence in sequences:
        needs |= sequence.needs
    best_ids = _argmax(logits)
    broken = _broken(logits, best_ids)
    if not needs:
        return Sampled(best_ids.tolist(), {}, broken)
    if broken:
        logits[list(broken)] = 0.0
    raw: Tensor | None = None
    asking: list[int] = []
    if needs & SamplingNeeds.LOGPROBS:
        asking = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.LOGPROBS]
        raw = logits[asking]
    if needs & SamplingNeeds.EDITED:
        edit_logits(logits, sequences)
        best_ids = _argmax(logits)
    tokens = best_ids.tolist()
    if needs & SamplingNeeds.RANDOM:
        _draw(logits, sequences, tokens)
    if raw is None:
        return Sampled(tokens, {}, broken)
    tops = [sequences[j].sampling.logprobs or 0 for j in asking]
    entries = token_logprobs(raw, [tokens[j] for j in asking], tops)
    return Sampled(tokens, dict(zip(asking, entries, strict=True)), broken)


def _argmax(logits: Tensor) -> Tensor:
    """[O, V] -> [O], the lowest id of a tie; a NaN wins. On CPUs numpy's is ten times faster."""
    if logits.device.type == "cpu" and logits.shape[0]:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return torch.argmax(logits, dim=-1)


def _broken(logits: Tensor, best_ids: Tensor) -> tuple[int, ...]:
    """Rows with a NaN or +inf, or with nothing above -inf: the model failed there."""
    fine = torch.isfinite(torch.gather(logits, 1, best_ids.unsqueeze(1)).squeeze(1))
    return () if bool(fine.all()) else tuple(torch.nonzero(~fine).flatten().tolist())


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


def _draw(logits: Tensor, sequences: Seq[Sequence], tokens: list[int]) -> None:
    """Steps 7 to 9: replace the tokens of random rows."""
    random = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.RANDOM]
    whole = [j for j in random if not sequences[j].needs & SamplingNeeds.TRUNCATED]
    truncated = [j for j in random if sequences[j].needs & SamplingNeeds.TRUNCATED]
    on_cpu = logits.device.type == "cpu"
    at_once = max(1, CACHE_ELEMENTS // logits.shape[1]) if on_cpu else len(random)
    for start in range(0, len(whole), at_once):
        part = whole[start : start + at_once]
        drawn = _draw_whole(logits[part], [sequences[j] for j in part])
        for j, token in zip(part, drawn, strict=True):
            tokens[j] = token
    if truncated:
        drawn = _draw_truncated(logits[truncated], [sequences[j] for j in truncated])
        for j, token in zip(truncated, drawn, strict=True):
            tokens[j] = token


def _scaled(rows: Tensor, members: Seq[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """-> (rows / temperature [n, V], their softmax [n, V], u [n] fp64)."""
    u = uniforms([s.seed for s in members], [s.num_output_tokens for s in members])
    temperature = torch.tensor([s.temperature for s in members], device=rows.device)
    scaled = rows / temperature.unsqueeze(1)
    return scaled, torch.softmax(scaled, dim=-1), torch.from_numpy(u).to(rows.device)


def _draw_whole(rows: Tensor, members: Seq[Sequence]) -> list[int]:
    """Untruncated rows [n, V] -> n tokens: no sorting."""
    _, probs, u = _scaled(rows, members)
    mass = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    return _passed(mass, u * mass[:, -1]).tolist()


def _draw_truncated(rows: Tensor, members: Seq[Sequence]) -> list[int]:
    """Rows with top-k, top-p or min-p -> n tokens. Sorts a few candidates first; rows of which they
    may not hold all that is kept are tried with more: the same result, as the order is the same."""
    n, vocab = rows.shape
    device = rows.device
    params = [s.sampling for s in members]
    k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
    out = torch.empty(n, dtype=torch.int64, device=device)
    rest = torch.arange(n, device=device)
    columns = [*_scaled(rows, members), k, top_p, min_p]
    for drop in (*DROPS, None):
        tokens, exact = _draw_among(drop, *columns)
        out[rest[exact]] = tokens[exact]
        if bool(exact.all()):
            break
        rest = rest[~exact]
        columns = [x[~exact] for x in columns]
    return out.tolist()


def _draw_among(
    drop: float | None,
    scaled: Tensor,
    probs: Tensor,
    u: Tensor,
    k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Steps 8 and 9 within the candidates of `drop` -> (tokens [n], exact [n]: nothing beyond them
    could have been kept)."""
    vocab = scaled.shape[1]
    ids, num = _candidates(scaled, drop)
    place = torch.arange(ids.shape[1], device=scaled.device)
    there = place < num.unsqueeze(1)
    p = torch.gather(probs, 1, ids).masked_fill_(~there, 0.0)
    mass = torch.cumsum(p, dim=-1, dtype=torch.float64)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    of_k = torch.gather(mass, 1, (torch.minimum(k, num) - 1).unsqueeze(1))
    base = torch.where(k.unsqueeze(1) < vocab, of_k, torch.ones_like(of_k))
    kept = there & (place < k.unsqueeze(1))
    kept &= before < top_p.unsqueeze(1) * base
    kept &= p >= min_p.unsqueeze(1) * p[:, :1]
    count = kept.sum(dim=-1).clamp(min=1)  # of a prefix: each condition is monotone
    exact = (num >= vocab) | (k <= num) | ((k >= vocab) & (count < num))
    total = torch.gather(mass, 1, (count - 1).unsqueeze(1)).squeeze(1)
    index = torch.minimum(_passed(mass, u * total), count - 1)
    return torch.gather(ids, 1, index.unsqueeze(1)).squeeze(1), exact


def _candidates(scaled: Tensor, drop: float | None) -> tuple[Tensor, Tensor]:
    """Ids within `drop` of each row's best, best first, ties to the lowest id: (ids [n, width],
    how many of them count [n]). The width is that of the row with most; None: all ids."""
    n, vocab = scaled.shape
    if drop is None:
        ids = torch.sort(scaled, dim=-1, descending=True, stable=True).indices
        return ids, torch.full((n,), vocab, device=scaled.device)
    near = scaled >= scaled.amax(dim=-1, keepdim=True) - drop
    rows, ids = torch.nonzero(near, as_tuple=True)  # by row, then by ascending id
    num = torch.bincount(rows, minlength=n)
    place = torch.arange(len(rows), device=scaled.device)
    place -= torch.repeat_interleave(torch.cumsum(num, 0) - num, num)
    width = int(num.max())
    values = torch.full((n, width), -torch.inf, device=scaled.device)
    values[rows, place] = scaled[rows, ids]
    table = torch.zeros((n, width), dtype=torch.int64, device=scaled.device)
    table[rows, place] = ids
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    return torch.gather(table, 1, order), num


def _passed(mass: Tensor, target: Tensor) -> Tensor:
    """First index of each row at which the cumulative mass passes target; never of zero mass."""
    index = torch.searchsorted(mass, target.unsqueeze(1), right=True).squeeze(1)
    return index.clamp(max=mass.shape[1] - 1)


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
