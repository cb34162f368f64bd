"""Continuation: a sequence as it would be with some more tokens, which it may never get.

Speculation asks the sampler about positions whose prefix is only drafted. A Continuation answers
what the sampler asks of a `Sequence` (position, penalties' counts, limits) without changing it, so
drafts that are rejected leave no trace.

Knows: one sequence and the tokens after it. Knows nothing of logits.
"""

from __future__ import annotations

from moeserve.request import SamplingParams
from moeserve.sequence import Sequence
from moeserve.thinking import Thought


class Continuation:
    """sequence, as if `drafted` had been appended."""

    __slots__ = ("drafted", "sequence")

    def __init__(self, sequence: Sequence, drafted: tuple[int, ...] = ()) -> None:
        self.sequence, self.drafted = sequence, drafted

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens, *self.drafted]

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.sequence.num_output_tokens + len(self.drafted)

    @property
    def needs(self) -> int:
        return self.sequence.needs

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    @property
    def temperature(self) -> float:
        return self.sequence.temperature

    @property
    def seed(self) -> int:
        return self.sequence.seed

    @property
    def thought(self) -> Thought | None:
        thought = self.sequence.thought
        return None if thought is None else thought.after_all(self.drafted)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.sequence.stop_ids
