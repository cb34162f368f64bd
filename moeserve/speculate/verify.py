"""Verification: which drafts the target accepts, and the token it adds. Exact, in either way.

SAME (the default). At each row the sampler chooses as it would without speculation: with its own
random number of (seed, output position) and the penalties of the row's path. A draft is accepted
when it is that token. So every token that comes out is the one that would have come out without
speculation, for greedy and for every sampling setting: not only the distribution is the target's,
the tokens are, whatever was drafted, and however many. A drafter that draws with the target's
number (`drafter.choose_drafts`) is accepted always where it equals the target.

REJECTION. Leviathan's rule (`rejection`): a draft of q is accepted as often as any exact rule can,
sum(min(p, q)); the distribution is the target's, but the tokens of a seed depend on what was
drafted. Rows whose children no chance chose fall under SAME, where both rules accept with p(draft).

Random numbers are functions of (seed, output position, stream) in both: neither batch company nor
preemption changes them, and REJECTION takes the target's own stream where nothing is drafted.

Knows: the sampler, trees. Knows nothing of caches, of limits (`run_limits`) or of who drafted.

Shape letters: O rows (those of all sequences, one after the other), V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from torch import Tensor

from moeserve import sampler
from moeserve.continuation import Continuation
from moeserve.draw import Doubles, Stream, kept, uniforms
from moeserve.logprobs import token_logprobs
from moeserve.request import TokenLogprob
from moeserve.sequence import SamplingNeeds, Sequence
from moeserve.speculate.rejection import accepts, pick, residual, without
from moeserve.speculate.tree import DraftTree


class Rule(enum.StrEnum):
    SAME = "same"
    REJECTION = "rejection"


@dataclass(frozen=True)
class Verdict:
    """tokens: the accepted drafts' and one more, by the target. nodes: the accepted ones, in order
    of depth: their latents are those of the sequence now. rows[i]: the sequence's row that
    tokens[i] was chosen at. logprobs: one a token, where asked. failed: why tokens end before the
    target's own (then nothing may follow)."""

    tokens: tuple[int, ...]
    nodes: tuple[int, ...]
    rows: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    failed: str | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.nodes)


def rows_of(sequence: Sequence, tree: DraftTree) -> list[Continuation]:
    """[n + 1] what the sampler is asked about, in the order of the tree's rows."""
    return [Continuation(sequence, path) for path in tree.paths]


class Sample(Protocol):
    """`sampler.sample`."""

    def __call__(
        self,
        logits: Tensor,
        sequences: Seq[sampler.Row],
        softmax_of: Collection[int],
        raw_of: Collection[int],
        /,
    ) -> sampler.Sampled: ...


def verify(
    logits: Tensor,
    sequences: Seq[Sequence],
    trees: Seq[DraftTree],
    rule: Rule = Rule.SAME,
    sample: Sample = sampler.sample,
) -> list[Verdict]:
    """logits [O, V] fp32: the rows of trees[0], then those of trees[1], ...; changed in place. A
    sequence without drafts has one row: then this is `sampler.sample`."""
    rows = rows_of_all(logits, sequences, trees)
    by_chance: set[int] = set()
    if rule is Rule.REJECTION:
        for start, sequence, tree in zip(_starts(trees), sequences, trees, strict=True):
            if sequence.needs & SamplingNeeds.RANDOM:
                by_chance |= {start + row for row in tree.probs if tree.children[row]}
    raw_of = {j for j in by_chance if rows[j].needs & SamplingNeeds.LOGPROBS}
    return verdicts_of(trees, rows, sample(logits, rows, by_chance, raw_of))


def rows_of_all(
    logits: Tensor, sequences: Seq[Sequence], trees: Seq[DraftTree]
) -> list[Continuation]:
    """`rows_of` each, one behind another: those of logits [O, V]."""
    members = zip(sequences, trees, strict=True)
    rows = [row for sequence, tree in members for row in rows_of(sequence, tree)]
    assert len(rows) == logits.shape[0], "logits of other rows than the trees have"
    return rows


def verdicts_of(
    trees: Seq[DraftTree], rows: Seq[Continuation], chosen: sampler.Sampled
) -> list[Verdict]:
    """chosen: at the rows of trees[0], then those of trees[1], ..."""
    return [
        _walk(tree, rows[start : start + tree.num_rows], chosen, start)
        for start, tree in zip(_starts(trees), trees, strict=True)
    ]


def _starts(trees: Seq[DraftTree]) -> list[int]:
    return list(accumulate((tree.num_rows for tree in trees), initial=0))[:-1]


def _walk(
    tree: DraftTree,
    rows: Seq[Continuation],
    chosen: sampler.Sampled,
    start: int,
) -> Verdict:
    """From the root as deep as drafts are accepted. Rows with raw logits may take another token
    than the sampler's."""
    tokens: list[int] = []
    nodes: list[int] = []
    at: list[int] = []
    logprobs: list[TokenLogprob] = []
    failed: str | None = None
    row: int | None = 0
    while row is not None:
        failed = chosen.failed.get(start + row)
        if failed is not None:
            break
        node: int | None
        token = chosen.token_ids[start + row]
        softmax = chosen.softmax.get(start + row)
        if softmax is None:
            node = tree.child(row, token)
        else:
            p = kept(softmax, rows[row].sampling)
            node, token = reject(tree, row, p, rows[row].seed, rows[row].num_output_tokens)
        if start + row in chosen.raw:
            top = rows[row].sampling.logprobs or 0
            logprobs += token_logprobs(chosen.raw[start + row][None], [token], [top])
        elif start + row in chosen.logprobs:
            logprobs.append(chosen.logprobs[start + row])
        tokens.append(token)
        at.append(row)
        row = None if node is None else node + 1
        if node is not None:
            nodes.append(node)
    return Verdict(tuple(tokens), tuple(nodes), tuple(at), tuple(logprobs), failed)


def reject(
    tree: DraftTree, row: int, p: Doubles, seed: int, position: int
) -> tuple[int | None, int]:
    """The rejection rule at one row with p [V] -> (accepted node or None, token)."""
    p, q = p[None], tree.probs[row][None]
    for number, node in enumerate(tree.children[row]):
        token = np.array([tree.tokens[node]])
        u = uniforms([seed], [position], Stream.ACCEPT.round(number))
        if accepts(p, q, token, u)[0]:
            return node, int(token[0])
        p, q = residual(p, q), without(q, token)
    u = uniforms([seed], [position], Stream.RESIDUAL.round())
    return None, int(pick(p, u)[0])
