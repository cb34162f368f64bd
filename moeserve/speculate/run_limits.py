"""Where a run of accepted tokens ends: stop ids, the output's limits, a limit on thinking.

A pure function of what the sequence was before the run and of the run's tokens; it ends the run at
the very token at which one token a step would have ended it.

Knows: token ids and counts. Knows nothing of text: stop strings are the front end's, which cuts
what it was sent after the one it finds.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from moeserve.request import FinishReason
from moeserve.sequence import Sequence


@dataclass(frozen=True)
class ThinkingLimit:
    """At most `most` tokens after start_id and before end_id; then the sampler forces end_id. A run
    ends where the limit is reached, so that the next token is chosen by that rule and no other."""

    start_id: int
    end_id: int
    most: int


class Run(NamedTuple):
    """What of the run counts. num_tokens: of the run's tokens. reason: None while it goes on."""

    num_tokens: int
    reason: FinishReason | None = None
    stop_id: int | None = None


def cut_run(sequence: Sequence, tokens: Seq[int], thinking: ThinkingLimit | None = None) -> Run:
    """tokens: accepted drafts and the target's own last one, not yet appended."""
    room = sequence.max_output_tokens - sequence.num_output_tokens
    if room <= 0:
        return Run(0, FinishReason.LENGTH)
    thought = None if thinking is None else _thought(sequence, thinking)
    for i, token in enumerate(tokens):
        if token in sequence.stop_ids:
            return Run(i + 1, FinishReason.STOP, token)
        if i + 1 >= room:
            return Run(i + 1, FinishReason.LENGTH)
        if thinking is not None:
            if token == thinking.start_id:
                thought = 0
            elif token == thinking.end_id:
                thought = None
            elif thought is not None:
                thought += 1
            if thought is not None and thought >= thinking.most:
                return Run(i + 1)
    return Run(len(tokens))


def _thought(sequence: Sequence, thinking: ThinkingLimit) -> int | None:
    """Tokens since the last start of thinking; None outside of it."""
    for back, token in enumerate(reversed(sequence.tokens)):
        if token == thinking.end_id:
            return None
        if token == thinking.start_id:
            return back
    return None


def draft_room(sequence: Sequence, k: int) -> int:
    """Drafts that may be of use: the target adds one token to those that it accepts, and no
    position lies behind the context limit. 0 where the prompt is not computed yet."""
    room = sequence.max_output_tokens - sequence.num_output_tokens - 1
    if sequence.aborted or sequence.num_remaining_tokens > 1:
        return 0
    return max(min(k, room), 0)
