"""Sampler: from logits to the next token of each row, and log-probabilities.

Order of operations for a row, each step on the result of the one before:

1. logprobs (chosen and prompt tokens) are of the raw logits: log_softmax, fp32.
2. repetition penalty r over tokens of prompt and output: l > 0 becomes l / r, else l * r.
3. frequency penalty: l -= f * (times in the output); presence penalty: l -= p if in the output.
4. logit bias: l += bias.
5. min_tokens: while fewer tokens are out, eos and stop ids are -inf (eos with ignore_eos never
   stops and is not masked). Where the limit on thinking forces a token (`thinking`), every
   other one is -inf instead, whatever 2 to 5 made of it.
6. temperature below GREEDY_BELOW, or so low that the largest l / temperature overflows, or top-k 1:
   argmax, ties to the lowest id. Done.
7. l / temperature, softmax in fp32 -> p.
8. top-k, top-p, min-p and the draw: the rule of `draw`.

A row whose raw logits are not finite, or in which 4 and 5 leave no token, fails alone.

Law 5: each operation works on a row alone and in a fixed order (no torch.sum over a row: its order
of addition depends on the number of rows), so company does not change a bit, and since a draw
depends on nothing but (seed, position), neither do preemption and layout. `sample_slowly` is the
twin.

Shape letters: O rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.crossing import sent
from moeserve.continuation import Continuation
from moeserve.draw import BLOCK, Floats, Race, arrivals, draw
from moeserve.logprobs import token_logprobs
from moeserve.penalties import Bias, SeenTokens
from moeserve.request import TokenLogprob
from moeserve.sequence import GREEDY_BELOW, SamplingNeeds, Sequence

# Logits drawn from at once on a CPU: what lies in its cache. More only pays for page faults.
CACHE_ELEMENTS = 1 << 18
Row = Sequence | Continuation  # whose next token is chosen
MOST = 1e30  # of an edited logit: what penalties make larger would overflow over a temperature


@dataclass(frozen=True)
class Sampled:
    """token_ids [O]; logprobs by row, of rows that ask; failed: why a row has no token (that in
    token_ids means nothing); softmax [V] after step 7, of the random rows that were wanted:
    `draw.kept` of it is the distribution that the row was drawn from; raw [V], on the host, of rows
    whose logits before any editing were wanted."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    softmax: dict[int, Floats] = field(default_factory=dict)
    raw: dict[int, Tensor] = field(default_factory=dict)


def sample(
    logits: Tensor,
    sequences: Seq[Row],
    softmax_of: Collection[int] = frozenset(),
    raw_of: Collection[int] = frozenset(),
) -> Sampled:
    """logits [O, V] fp32, row j of sequences[j]. The logits may be changed in place. softmax_of,
    raw_of: rows whose probabilities, whose logits are wanted beside their token. On CUDA:
    sampler_device.py."""
    if logits.device.type == "cuda":
        from moeserve.sampler_device import sample_on_device  # has kernels, and imports this

        return sample_on_device(logits, sequences, softmax_of, raw_of)
    if raw_of:
        kept = {j: logits[j].clone() for j in raw_of}
        return replace(sample(logits, sequences, softmax_of), raw=kept)
    needs = 0
    for sequence in sequences:
        needs |= sequence.needs
    best_ids = _argmax(logits)
    failed = dict.fromkeys(_without_best(logits, best_ids), "the model's logits are not finite")
    if not needs:
        return Sampled(best_ids.tolist(), {}, failed)
    if failed:
        logits[list(failed)] = 0.0
    raw: Tensor | None = None
    asking: list[int] = []
    if needs & SamplingNeeds.LOGPROBS:
        asking = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.LOGPROBS]
        raw = logits[asking]
    if needs & SamplingNeeds.EDITED:
        edit_logits(logits, sequences)
        best_ids = _argmax(logits)
        barred = _without_best(logits, best_ids)
        failed = dict.fromkeys(barred, "logit_bias and min_tokens leave no token") | failed
        if barred:
            logits[barred] = 0.0
    tokens = best_ids.tolist()
    softmax: dict[int, Floats] = {}
    if needs & SamplingNeeds.RANDOM:
        _draw(logits, sequences, tokens, softmax_of, softmax)
    if raw is None:
        return Sampled(tokens, {}, failed, softmax)
    tops = [sequences[j].sampling.logprobs or 0 for j in asking]
    entries = token_logprobs(raw, [tokens[j] for j in asking], tops)
    return Sampled(tokens, dict(zip(asking, entries, strict=True)), failed, softmax)


def _argmax(logits: Tensor) -> Tensor:
    """[O, V] -> [O], the lowest id of a tie; a NaN wins. On CPUs numpy's is ten times faster."""
    if logits.device.type == "cpu" and logits.shape[0]:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return torch.argmax(logits, dim=-1)


def _without_best(logits: Tensor, best_ids: Tensor) -> list[int]:
    """Rows with a NaN or +inf, or with nothing above -inf."""
    fine = torch.isfinite(torch.gather(logits, 1, best_ids.unsqueeze(1)).squeeze(1))
    return [] if bool(fine.all()) else torch.nonzero(~fine).flatten().tolist()


# -- editing ------------------------------------------------------------------------------------


def edit_logits(logits: Tensor, sequences: Seq[Row]) -> None:
    """Steps 2 to 5, in place, by gather and scatter over the touched ids of all rows at once."""
    _penalise(logits, sequences)
    biased = [j for j, s in enumerate(sequences) if s.sampling.logit_bias]
    if biased:
        parts = [_bias_of(sequences[j]) for j in biased]
        at = _places(logits, biased, [x.ids for x in parts])
        values = torch.from_numpy(np.concatenate([x.values for x in parts]))
        logits[at] += sent(values, logits.device)
    rows: list[int] = []
    ids: list[int] = []
    for j, sequence in enumerate(sequences):
        if sequence.num_output_tokens < sequence.sampling.min_tokens:
            inside = [i for i in sequence.stop_ids if 0 <= i < logits.shape[-1]]
            rows += [j] * len(inside)
            ids += inside
    if ids:
        logits[_index(rows, logits), _index(ids, logits)] = _number(-np.inf, logits)
    forced = {j: t for j, s in enumerate(sequences) if (t := _forced(s)) is not None}
    if forced:
        there = _index(list(forced), logits)
        logits[there] = _number(-np.inf, logits)
        logits[there, _index(list(forced.values()), logits)] = _number(0.0, logits)


def _index(numbers: list[int], logits: Tensor) -> Tensor:
    return sent(torch.tensor(numbers, dtype=torch.int64), logits.device)


def _number(value: float, logits: Tensor) -> Tensor:
    """Made where the logits are. One of python's, put where tensors say, is sent there by a copy
    that waits."""
    return logits.new_full((), value)


def _forced(sequence: Row) -> int | None:
    thought = sequence.thought
    return None if thought is None else thought.forced


def _penalise(logits: Tensor, sequences: Seq[Row]) -> None:
    """Steps 2 and 3."""
    rows = [j for j, s in enumerate(sequences) if _is_penalised(s)]
    if not rows:
        return
    seen = [_seen_of(sequences[j], logits.shape[-1]) for j in rows]
    at = _places(logits, rows, [x.ids for x in seen])
    lengths = [x.num for x in seen]

    def column(values: list[float]) -> Tensor:
        array = np.repeat(np.array(values, np.float32), lengths)
        return sent(torch.from_numpy(array), logits.device)

    sampling = [sequences[j].sampling for j in rows]
    r = column([s.repetition_penalty for s in sampling])
    f = column([s.frequency_penalty for s in sampling])
    p = column([s.presence_penalty for s in sampling])
    n = sent(torch.from_numpy(np.concatenate([x.counts for x in seen])), logits.device)
    values = logits[at]
    values = torch.where(values > 0, values / r, values * r)
    logits[at] = ((values - f * n) - p * (n > 0)).clamp_(max=MOST)


def _places(logits: Tensor, rows: Seq[int], ids: Seq[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Index of logits: ids[i] of row rows[i]."""
    lengths = [len(x) for x in ids]
    row = torch.from_numpy(np.repeat(np.array(rows, np.int64), lengths))
    places = torch.from_numpy(np.concatenate(ids))
    return sent(row, logits.device), sent(places, logits.device)


def _is_penalised(sequence: Row) -> bool:
    s = sequence.sampling
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _seen_of(sequence: Row, vocab: int) -> SeenTokens:
    if isinstance(sequence, Continuation):
        seen = _seen_of(sequence.sequence, vocab)
        return seen.followed_by([t for t in sequence.drafted if t < vocab])
    if sequence.seen is None:
        tokens, start = sequence.tokens, sequence.num_prompt_tokens
        repeats = sequence.sampling.repetition_penalty != 1
        prompt = [t for t in tokens[:start] if t < vocab] if repeats else []
        sequence.seen = SeenTokens(prompt, tokens[start:])
    return sequence.seen


def _bias_of(sequence: Row) -> Bias:
    if isinstance(sequence, Continuation):
        sequence = sequence.sequence
    if sequence.bias is None:
        sequence.bias = Bias(sequence.sampling.logit_bias)
    return sequence.bias


# -- choosing -----------------------------------------------------------------------------------


def _draw(
    logits: Tensor,
    sequences: Seq[Row],
    tokens: list[int],
    softmax_of: Collection[int],
    softmax: dict[int, Floats],
) -> None:
    """Steps 7 and 8: replace the tokens of random rows, and keep the softmax of those wanted."""
    random = [j for j, s in enumerate(sequences) if s.needs & SamplingNeeds.RANDOM]
    random = _drawn_from(logits, sequences, tokens, random)
    positions = [sequences[j].num_output_tokens for j in random]
    on_cpu = logits.device.type == "cpu"
    at_once = max(1, CACHE_ELEMENTS // logits.shape[1]) if on_cpu else len(random)
    for start in range(0, len(random), at_once):
        part = random[start : start + at_once]
        temperature = torch.tensor([sequences[j].temperature for j in part], device=logits.device)
        probs = torch.softmax(logits[part] / temperature.unsqueeze(1), dim=-1).cpu().numpy()
        ids = draw(
            probs,
            [sequences[j].sampling for j in part],
            [sequences[j].seed for j in part],
            positions[start : start + len(part)],
        )
        for row, j in enumerate(part):
            tokens[j] = ids[row]
            if j in softmax_of:
                softmax[j] = probs[row]


def _drawn_from(
    logits: Tensor, sequences: Seq[Row], best_ids: Seq[int], random: list[int]
) -> list[int]:
    """Those of the random rows whose largest logit over the temperature is a number."""
    best = logits[random, [best_ids[j] for j in random]].cpu().numpy()
    with np.errstate(over="ignore"):
        scaled = best / np.array([sequences[j].temperature for j in random], np.float32)
    return [j for j, fine in zip(random, np.isfinite(scaled).tolist(), strict=True) if fine]


# -- the twin -----------------------------------------------------------------------------------


def sample_slowly(logits: Tensor, sequence: Row) -> tuple[int, TokenLogprob | None]:
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
    if sequence.thought is not None and sequence.thought.forced is not None:
        row = torch.where(torch.arange(vocab) == sequence.thought.forced, 0.0, -torch.inf)

    if sampling.temperature < GREEDY_BELOW or sampling.top_k == 1:
        chosen = min(range(vocab), key=lambda i: (-float(row[i]), i))
    else:
        scaled = row / torch.tensor(sampling.temperature)
        if math.isfinite(float(scaled.max())):
            chosen = _draw_slowly(torch.softmax(scaled, dim=-1).tolist(), sequence, len(output))
        else:
            chosen = min(range(vocab), key=lambda i: (-float(row[i]), i))
    if sampling.logprobs is None:
        return chosen, None
    logp = torch.log_softmax(torch.tensor(raw), dim=-1).tolist()
    ranking = sorted(range(vocab), key=lambda i: (-raw[i], i))
    top = tuple((i, logp[i]) for i in ranking[: sampling.logprobs])
    return chosen, TokenLogprob(chosen, logp[chosen], ranking.index(chosen) + 1, top)


def _draw_slowly(p: list[float], sequence: Row, position: int) -> int:
    """The rule of `draw`, with everything sorted."""
    sampling, vocab = sequence.sampling, len(p)
    order = sorted(range(vocab), key=lambda i: (-p[i], i))
    base = 1.0
    if 0 < sampling.top_k < vocab:
        order = order[: sampling.top_k]
        base = sum(p[i] for i in order)
    floor = float(torch.tensor(sampling.min_p) * torch.tensor(p[order[0]]))
    left = [i for i in order if p[i] >= floor]
    kept: list[int] = []
    mass = 0.0
    for i in left:
        if kept and mass >= sampling.top_p * base and sampling.top_p < 1:
            break
        kept.append(i)
        mass += p[i]
    if not 0 < sampling.top_k < vocab and sampling.min_p <= 0:
        blocks = range(-(-vocab // BLOCK))
        sums = [math.fsum(p[b * BLOCK : (b + 1) * BLOCK]) for b in blocks]
        won = _winner(blocks, sums, sequence, position, Race.BLOCKS)
        inside = range(won * BLOCK, min((won + 1) * BLOCK, vocab))
        chosen = _winner(inside, p, sequence, position, Race.WITHIN)
        if chosen in kept:
            return chosen
    return _winner(kept, p, sequence, position, Race.ALONE)


def _winner(runners: Seq[int], p: Seq[float], sequence: Row, position: int, race: Race) -> int:
    bits = arrivals([sequence.seed], [position], race, np.array(runners))[0].tolist()
    times = {i: -math.log1p(-(bit + 0.5) / 2**32) for i, bit in zip(runners, bits, strict=True)}
    return min(runners, key=lambda i: (times[i] / p[i] if p[i] > 0 else math.inf, i))
