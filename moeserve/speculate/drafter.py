"""Drafter: who proposes tokens after a sequence; and how a drafter with logits takes its tokens.

A drafter owns what it remembers (its KV, its index) by request id. It is asked once a step, after
the step's tokens are known, and of tokens that were not accepted it sees only its own drafts.

Law 1: where `collective`, `propose` runs collectives (an MTP layer is an MoE layer). Then every
rank calls it in every step whose agreed depth is above 0, with the same depth, whatever asks it
has, none included; it makes exactly as many collective rounds as the depth says, and raises nothing
that its peers would not raise. `settle` and `forget` are never collective.

Knows: sequences, hidden states, trees. Knows nothing of scheduling or verification.

Shape letters: m rows of a sequence, D hidden, A rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeserve import sampler
from moeserve.continuation import Continuation
from moeserve.draw import Doubles, Stream, kept, uniforms
from moeserve.sequence import SamplingNeeds, Sequence
from moeserve.speculate.rejection import pick, without
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Rule

_ASKS_MORE = ~int(SamplingNeeds.LOGPROBS)  # than the likeliest token


@dataclass(frozen=True)
class DraftAsk:
    """A sequence after a step. Its tokens are all certain; the last one's latents are not computed.

    hidden [m, D]: the target's hidden states (after the final norm) of the positions first,
    first + 1, ..., which the step computed and whose tokens were accepted: of a prefill's chunk, of
    the last token and the accepted drafts. The token after each is known. None where the drafter
    does not want them. most: drafts at most (`run_limits.draft_room`, blocks at hand), 0 where none
    is wanted: then the drafter only keeps up with the sequence.

    late: its number in the step's late verdicts (`late.Late`), where the host does not know yet
    what was accepted. Then hidden is of all rows that the step computed (of the paths alone where a
    tree branches), and the sequence is as it was before them; `most` is right for what may be
    accepted at least, blocks for all of it.
    """

    sequence: Sequence
    most: int
    first: int = 0
    hidden: Tensor | None = None
    late: int | None = None


class Drafter(Protocol):
    """name: as in `--speculate`. max_depth: tokens along a path that it can draft. collective,
    wants_hidden: see above. max_nodes: of a tree; as many as max_depth where it drafts chains.
    runs_ahead: it writes to the sequence's own blocks, behind its tokens (`mtp.most_within`)."""

    name: str
    max_depth: int
    max_nodes: int
    collective: bool
    wants_hidden: bool
    runs_ahead: bool

    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """One tree an ask, of at most `most` nodes and no deeper than `depth`; may be empty. depth
        and max_tokens (rows of any rank in the first round) are agreed by all ranks."""
        ...

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        """What became of the last drafts; the sequence has the new tokens. What the drafter holds
        of positions from len(tokens) - 1 on is void."""
        ...

    def forget(self, request_ids: Collection[str]) -> None:
        """These ended or were preempted: drop what is kept of them. Unknown ids are no error."""
        ...

    def memory_bytes(self) -> int:
        """Bytes of weights and of what it remembers, on this rank."""
        ...


def choose_drafts(
    logits: Tensor, rows: Seq[Continuation], rule: Rule
) -> tuple[list[int | None], list[Doubles | None]]:
    """A drafter's logits [A, V], changed in place -> a token a row, and what it was drawn from.

    The drafter edits its logits as the target would (penalties, bias, min_tokens, temperature,
    cut): it guesses what the sampler will do. SAME: it draws with the target's own random numbers,
    so no distribution is given. REJECTION: random rows are drawn with numbers of their own. None
    for a row that has no token: there the drafts end.
    """
    if logits.device.type == "cpu" and not any(row.needs & _ASKS_MORE for row in rows):
        return _best(logits.numpy()), [None] * len(rows)  # what the sampler does, without its ado
    random = {
        j
        for j, row in enumerate(rows)
        if rule is Rule.REJECTION and row.needs & SamplingNeeds.RANDOM
    }
    chosen = sampler.sample(logits, [_without_logprobs(row) for row in rows], random)
    tokens: list[int | None] = [
        None if j in chosen.failed else token for j, token in enumerate(chosen.token_ids)
    ]
    probs: list[Doubles | None] = [None] * len(rows)
    for j, softmax in chosen.softmax.items():
        if tokens[j] is not None:
            probs[j] = q = kept(softmax, rows[j].sampling)
            tokens[j] = draw_children(q, 1, rows[j].seed, rows[j].num_output_tokens)[0]
    return tokens, probs


def _best(logits: NDArray[np.float32]) -> list[int | None]:
    best = logits.argmax(axis=-1)
    fine = np.isfinite(logits[np.arange(len(best)), best])
    return [token if ok else None for token, ok in zip(best.tolist(), fine.tolist(), strict=True)]


def draw_children(q: Doubles, most: int, seed: int, position: int) -> list[int]:
    """Up to `most` different tokens drawn from q [V] without replacement, in order: siblings."""
    tokens: list[int] = []
    rest = q[None]
    while len(tokens) < most and rest.any():
        u = uniforms([seed], [position], Stream.DRAFT.round(len(tokens)))
        token = pick(rest, u)
        tokens.append(int(token[0]))
        rest = without(rest, np.asarray(token))
    return tokens


class _Quiet(Continuation):
    """Asks for no logprobs: a draft's are of no use."""

    @property
    def needs(self) -> int:
        return self.sequence.needs & ~SamplingNeeds.LOGPROBS


def _without_logprobs(row: Continuation) -> Continuation:
    if not row.needs & SamplingNeeds.LOGPROBS:
        return row
    return _Quiet(row.sequence, row.drafted)
