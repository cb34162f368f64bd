"""StepPlan and StepResult: what a step computes, and what came of it. Plain data.

The scheduler makes a plan, runner and sampler fill a result, the scheduler commits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from moeserve.request import TokenLogprob
from moeserve.sequence import Sequence
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Verdict


@dataclass
class StepPlan:
    """What a step computes. Sequence i owns positions start[i] : start[i] + count[i]; its blocks
    are row rows[i] of `BlockTables.matrix`. sampled: indices whose next token is to be chosen;
    decodes: indices of those with one token to go that is no part of the prompt.
    trees: by index, drafts behind the known tokens; a row of count each, after the known ones'."""

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    num_tokens: int = 0
    preempted: list[str] = field(default_factory=list)
    trees: dict[int, DraftTree] = field(default_factory=dict)
    num_draft_tokens: int = 0

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_decode_tokens(self) -> int:
        """Rows of decodes, drafts included."""
        return len(self.decodes) + self.num_draft_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens


@dataclass(frozen=True)
class StepResult:
    """token_ids[j] is the token chosen for plan.sampled[j]; failed maps such a j to a reason.
    logprobs[j] where asked. prompt_logprobs: by request id, of the positions just computed.
    verdicts[j], of a sequence with drafts, stands for these; there they mean nothing."""

    token_ids: Seq[int]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Seq[TokenLogprob]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
