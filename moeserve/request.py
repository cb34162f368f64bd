"""The immutable ask and what goes back: Request, SamplingParams, TokenOutput, FinishReason.

Knows token ids only; text belongs to the front end. These are also the wire types (msgspec), so
they hold plain data.
"""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    STOP = "stop"  # eos, a stop token id, or a stop string (found by the front end)
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client left or asked to stop
    ERROR = "error"  # the step failed; the text so far is right, the rest never came


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Off-values: top_k=0, top_p=1, min_p=0, penalties 1/0/0.

    temperature 0 is greedy (ties to the lowest id), and so is top_k=1. seed: same seed, same
    tokens, whatever else runs; None draws one. logprobs: number of alternatives to report per token
    (None: none, 0: the chosen token only). prompt_logprobs: the same for prompt tokens. stop
    strings are matched on text by the front end; stop_token_ids here. max_thinking_tokens: after so
    many tokens of an open thinking part the end marker is forced (`thinking`); None: no limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_thinking_tokens: int | None = None


class ThinkingMarkers(msgspec.Struct, frozen=True, array_like=True):
    """Token ids of the markers between which a model thinks, none of them empty. also_ends: others
    that end a thinking part, such as those that begin tool calls; they are never forced."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    also_ends: tuple[tuple[int, ...], ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. n > 1 is made of n requests by the front end (they share blocks
    through the prefix cache). arrival is time.time() at the front end. thinking: the model's
    markers, wanted with sampling.max_thinking_tokens; whoever knows the tokenizer fills them in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float = 0.0
    cache_salt: str = ""  # sequences with another salt never share cached blocks
    thinking: ThinkingMarkers | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token and of the best alternatives, best first.

    Values are of the model's distribution before temperature, penalties and truncation.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request since the last output; the last one carries finish_reason.

    num_accepted: of the tokens, the first so many were drafted (speculation); num_rejected: drafts
    that did not become tokens."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # first is None: no context
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop id that ended it (it is in token_ids)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    num_accepted: int = 0
    num_rejected: int = 0
