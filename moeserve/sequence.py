"""Sequence: the running state of one request on one rank.

Knows: tokens so far, how many of them lie computed in the cache, what its sampling needs. Knows
nothing of other sequences, of budgets or of tensors.
"""

from __future__ import annotations

import enum
from hashlib import blake2b

from moeserve.cache import Lease
from moeserve.penalties import Bias, SeenTokens
from moeserve.request import FinishReason, Request, SamplingParams, TokenLogprob
from moeserve.speculate.tree import DraftTree
from moeserve.thinking import Thought

GREEDY_BELOW = 1e-5  # a temperature under it is greedy: dividing by less overflows fp32 logits


class SamplingNeeds(enum.IntFlag):
    """What a row asks of the sampler beyond argmax; a batch does the union, row by row."""

    NONE = 0
    RANDOM = 1  # temperature > 0 and more than one token to choose from
    TRUNCATED = 2  # top-k, top-p or min-p
    EDITED = 4  # penalties, bias, a token mask or a limit on thinking
    LOGPROBS = 8


class Sequence:
    """num_computed_tokens tokens lie in the cache; it catches up with num_tokens, whatever the
    difference is called (prefill, a chunk of it, decode, recomputing after preemption)."""

    __slots__ = (
        "aborted",
        "arrival_index",
        "bias",
        "drafts",
        "eos_ids",
        "finish_reason",
        "lease",
        "max_output_tokens",
        "needs",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request",
        "request_id",
        "sampling",
        "seed",
        "seen",
        "stop_ids",
        "temperature",
        "thought",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        arrival_index: int,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        engine_seed: int = 0,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.sampling = sampling
        self.arrival_index = arrival_index
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.max_output_tokens = min(
            sampling.max_tokens, max(max_model_len - self.num_prompt_tokens, 0)
        )
        stop_ids = frozenset(sampling.stop_token_ids)
        self.eos_ids = eos_ids
        self.stop_ids = stop_ids if sampling.ignore_eos else stop_ids | eos_ids
        self.lease: Lease | None = None  # of cache blocks, while running
        self.aborted: FinishReason | None = None  # from outside; dropped at the next commit
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if sampling.prompt_logprobs is None else [None]
        )
        self.drafts: DraftTree | None = None  # what may follow; for the next step alone
        self.temperature = sampling.temperature
        self.needs = _needs(sampling)
        self.seed = _seed(request, engine_seed)
        self.thought = Thought.of(request)  # None: no limit on thinking
        # Built when the sampler first asks for them.
        self.seen: SeenTokens | None = None
        self.bias: Bias | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens known and not computed: 1 in decode, more in a prefill."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt positions still have no logprob: each of them must be computed."""
        return (
            self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens
        )

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.seen is not None:
            self.seen.add(token_id)
        if self.thought is not None:
            self.thought = self.thought.after(token_id)

    def preempted(self) -> None:
        """Its blocks are gone: everything is to be computed again (less what is still cached)."""
        self.lease = self.drafts = None
        self.num_computed_tokens = 0
        self.num_preemptions += 1
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]


def _needs(sampling: SamplingParams) -> int:
    needs = SamplingNeeds.NONE
    if sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1:
        needs |= SamplingNeeds.RANDOM
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            needs |= SamplingNeeds.TRUNCATED
    if (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.logit_bias
        or sampling.min_tokens > 0
        or sampling.max_thinking_tokens is not None
    ):
        needs |= SamplingNeeds.EDITED
    if sampling.logprobs is not None:
        needs |= SamplingNeeds.LOGPROBS
    return int(needs)


def _seed(request: Request, engine_seed: int) -> int:
    """64 bits. Without a seed of its own a request draws from the engine's seed and its id."""
    if request.sampling.seed is not None:
        return request.sampling.seed & 0xFFFFFFFFFFFFFFFF
    digest = blake2b(f"{engine_seed}/{request.request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
