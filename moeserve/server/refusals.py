"""Typed errors of the routes alone: a model that is not served, a context that is too long."""

from __future__ import annotations

from moeserve.errors import InvalidRequest, MoeserveError


class UnknownModel(MoeserveError):
    """HTTP 404: a model that is not served here."""


class ContextTooLong(InvalidRequest):
    """HTTP 400, code context_length_exceeded: names the length asked for and the limit."""

    def __init__(
        self, field: str, num_prompt_tokens: int, limit: int, asked: tuple[str, int] | None = None
    ) -> None:
        """field: the prompt's. asked: the field that wants too many tokens, and how many; None:
        no number was asked for, and not even one token has room."""
        if asked is None:
            more = "and leaves no room for an answer"
        else:
            more = f"and {asked[0]}={asked[1]} asks for more: {num_prompt_tokens + asked[1]} in all"
        text = (
            f"this model's context is max_model_len={limit} tokens, but {field} has "
            f"{num_prompt_tokens} tokens {more}"
        )
        # The prompt is to blame if nothing could follow it, else the length asked for.
        self.field = field if asked is None or num_prompt_tokens >= limit else asked[0]
        self.value, self.valid = num_prompt_tokens, f"at most {limit}"
        Exception.__init__(self, text)
