"""Where a run of accepted tokens ends: stop ids, the output's limits.

A pure function of what the sequence was before the run and of the run's tokens; it ends the run at
the very token at which one token a step would have ended it.

Knows: token ids and counts. Knows nothing of text: stop strings are the front end's, which cuts
what it was sent after the one it finds. A limit on thinking ends no run: it forces its tokens at
the very row (`thinking`, step 5 of the sampler), so what is accepted behind them is right.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from moeserve.request import FinishReason
from moeserve.sequence import Sequence


class Run(NamedTuple):
    """What of the run counts. num_tokens: of the run's tokens. reason: None while it goes on."""

    num_tokens: int
    reason: FinishReason | None = None
    stop_id: int | None = None


def cut_run(sequence: Sequence, tokens: Seq[int]) -> Run:
    """tokens: accepted drafts and the target's own last one, not yet appended."""
    room = sequence.max_output_tokens - sequence.num_output_tokens
    if room <= 0:
        return Run(0, FinishReason.LENGTH)
    for i, token in enumerate(tokens):
        if token in sequence.stop_ids:
            return Run(i + 1, FinishReason.STOP, token)
        if i + 1 >= room:
            return Run(i + 1, FinishReason.LENGTH)
    return Run(len(tokens))


def draft_room(sequence: Sequence, k: int, late: bool = False) -> int:
    """Drafts that may be of use: the target adds one token to those that it accepts, and no
    position lies behind the context limit. 0 where the prompt is not computed yet. late: of a
    sequence that gets a token in this step, one more at least than the host knows of."""
    room = sequence.max_output_tokens - sequence.num_output_tokens - 1 - late
    if sequence.aborted or (sequence.num_remaining_tokens > 1 and not late):
        return 0
    return max(min(k, room), 0)
