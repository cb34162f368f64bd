"""Bodies of the OpenAI-style routes: which fields there are and which values are valid.

Each field's description says what is valid; an error quotes it with the field and the value.
Unknown fields are refused, except the IGNORED ones: they ask for bookkeeping of a hosted service or
give hints that change no token. `rules` are those over several fields. Reading a body, and naming
all that is wrong with it, is in `parse`. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moeserve.errors import InvalidRequest, MissingField
from moeserve.server.messages import message_problems, tool_problems

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
Value = TypeVar("Value")
MAX_STOPS = 16
MAX_LOGPROBS = 20
INT64 = 2**63

Rules = Iterator[tuple[tuple[str, ...], InvalidRequest]]  # the fields involved, the problem


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: Annotated[bool | None, Field(description="true or false")] = None
    continuous_usage_stats: Annotated[bool | None, Field(description="true or false")] = None
    include_obfuscation: Annotated[bool | None, Field(description="true or false")] = None


class AnyBody(BaseModel):
    """A body of any route."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def rules(self) -> Rules:
        """What is wrong with fields that are each valid alone."""
        yield from ()


class GenerationFields(AnyBody):
    """What completions and chat have in common."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models")] = None
    n: Annotated[int, Field(ge=1, le=128, description="an integer from 1 to 128")] = 1
    stream: Annotated[bool, Field(description="true or false")] = False
    stream_options: Annotated[
        StreamOptions | None, Field(description="an object with include_usage")
    ] = None
    temperature: Annotated[float, Field(ge=0, le=2, description="a number from 0 to 2")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="an integer; -1 or 0: off")] = 0
    min_p: Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")] = 0.0
    repetition_penalty: Annotated[
        float, Field(gt=0, le=10, description="a number above 0, at most 10; 1: off")
    ] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")] = 0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")] = 0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(description="an object of token id: number from -100 to 100"),
    ] = {}
    seed: Annotated[int | None, Field(ge=-INT64, lt=INT64, description="an integer of 64 bits")] = (
        None
    )
    min_tokens: Annotated[int, Field(ge=0, description="an integer, 0 up to max_tokens")] = 0
    max_thinking_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            lt=INT64,
            description="an integer from 0: tokens of thinking after which </think> is forced; "
            "absent: no limit",
        ),
    ] = None
    stop: Annotated[
        str | list[str],
        Field(description=f"a string or a list of up to {MAX_STOPS} strings, none empty"),
    ] = []
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(max_length=256, description="a list of up to 256 token ids"),
    ] = []
    ignore_eos: Annotated[bool, Field(description="true or false")] = False
    skip_special_tokens: Annotated[bool, Field(description="true or false")] = True
    include_stop_str_in_output: Annotated[bool, Field(description="true or false")] = False
    return_token_ids: Annotated[bool, Field(description="true or false")] = False
    cache_salt: Annotated[
        str, Field(max_length=1024, description="a string of up to 1024 characters")
    ] = ""
    response_format: Annotated[
        dict[str, Any] | None,
        Field(description='{"type": "text"}; constrained output is not supported yet'),
    ] = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str]) -> str | list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        return _valid(stop, len(stops) <= MAX_STOPS and all(stops))

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return _valid(value, value is None or value.get("type") == "text")

    def asked_limit(self) -> tuple[str, int] | None:
        """The most tokens that the caller wants, and the field that says so; None: nothing said."""
        raise NotImplementedError

    def _min_rule(self) -> Rules:
        asked = self.asked_limit()
        if asked is not None and self.min_tokens > asked[1]:
            valid = f"must be 0 to {asked[0]}={asked[1]}"
            yield ("min_tokens", asked[0]), InvalidRequest("min_tokens", self.min_tokens, valid)

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def rules(self) -> Rules:
        if self.stream_options is not None and not self.stream:
            yield (
                ("stream_options", "stream"),
                InvalidRequest("stream_options", "{...}", "must be absent unless stream=true"),
            )


class CompletionBody(GenerationFields):
    """POST /v1/completions"""

    prompt: Annotated[
        Any,
        Field(
            description="a string, a list of strings, of token ids or of token-id lists, not empty"
        ),
    ]
    max_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="an integer from 0; absent: 16 or min_tokens, as far as there is room",
        ),
    ] = 16
    echo: Annotated[bool, Field(description="true or false")] = False
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"an integer, 0 to {MAX_LOGPROBS}")
    ] = None
    best_of: Annotated[int | None, Field(ge=1, description="the same as n")] = None
    suffix: Annotated[str | None, Field(description="absent; inserting text is not supported")] = (
        None
    )

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str | None) -> str | None:
        return _valid(suffix, suffix is None)

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, prompt: Any) -> Any:
        return _valid(prompt, bool(_prompts(prompt)))

    def rules(self) -> Rules:
        yield from super().rules()
        if self.best_of is not None and self.best_of != self.n:
            yield (
                ("best_of", "n"),
                InvalidRequest(
                    "best_of", self.best_of, f"must be the same as n, which is {self.n}"
                ),
            )
        yield from self._min_rule()

    def asked_limit(self) -> tuple[str, int] | None:
        return ("max_tokens", self.max_tokens) if "max_tokens" in self.model_fields_set else None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        return _prompts(self.prompt)


class ChatBody(GenerationFields):
    """POST /v1/chat/completions"""

    messages: Annotated[
        list[dict[str, Any]], Field(min_length=1, description="a list of at least one message")
    ]
    max_tokens: Annotated[int | None, Field(ge=1, description="an integer from 1")] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="an integer from 1")] = (
        None
    )
    logprobs: Annotated[bool, Field(description="true or false")] = False
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"an integer, 0 to {MAX_LOGPROBS}")
    ] = None
    tools: Annotated[list[dict[str, Any]], Field(description="a list of tools")] = []
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Field(
            description="'auto' or 'none'; 'required' and named tools need constrained output, "
            "which is not supported yet"
        ),
    ] = None
    parallel_tool_calls: Annotated[bool, Field(description="true or false")] = True
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="an object of variables for the chat template")
    ] = {}
    reasoning_effort: Annotated[
        str | None, Field(description="a string, handed to the chat template")
    ] = None
    add_generation_prompt: Annotated[bool, Field(description="true or false")] = True
    allow_special_tokens_in_content: Annotated[
        bool,
        Field(description="true or false; true: users' and tools' words may spell control tokens"),
    ] = False
    modalities: Annotated[list[Literal["text"]] | None, Field(description='["text"]')] = None

    @field_validator("tool_choice")
    @classmethod
    def _known_choice(cls, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        return _valid(choice, choice in (None, "auto", "none"))

    def rules(self) -> Rules:
        yield from super().rules()
        yield from ((("messages",), x) for x in message_problems(self.messages))
        yield from ((("tools",), x) for x in tool_problems(self.tools))
        if self.top_logprobs is not None and not self.logprobs:
            yield (
                ("top_logprobs", "logprobs"),
                InvalidRequest(
                    "top_logprobs", self.top_logprobs, "must be absent unless logprobs=true"
                ),
            )
        limits = ("max_tokens", "max_completion_tokens")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            valid = f"must be max_completion_tokens={self.max_completion_tokens} too, or absent"
            yield limits, InvalidRequest("max_tokens", self.max_tokens, valid)
        yield from self._min_rule()

    def asked_limit(self) -> tuple[str, int] | None:
        for name in ("max_completion_tokens", "max_tokens"):
            if (value := getattr(self, name)) is not None:
                return name, value
        return None


class TokenizeBody(AnyBody):
    """POST /tokenize: of a prompt, or of messages as chat would render them."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models")] = None
    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Field(min_length=1, description="a list of messages")
    ] = None
    add_special_tokens: Annotated[bool, Field(description="true or false")] = True
    add_generation_prompt: Annotated[bool, Field(description="true or false")] = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] = {}
    tools: Annotated[list[dict[str, Any]], Field(description="a list of tools")] = []
    allow_special_tokens_in_content: Annotated[
        bool,
        Field(description="true or false; true: users' and tools' words may spell control tokens"),
    ] = False

    def rules(self) -> Rules:
        yield from ((("messages",), x) for x in message_problems(self.messages or []))
        yield from ((("tools",), x) for x in tool_problems(self.tools))
        if self.prompt is None and self.messages is None:
            valid = "a string, or give messages instead"
            yield ("prompt", "messages"), MissingField("prompt", valid)
        elif self.prompt is not None and self.messages is not None:
            valid = "must be absent where messages are given: only one of the two can be tokenized"
            yield ("prompt", "messages"), InvalidRequest("prompt", short(self.prompt), valid)


class DetokenizeBody(AnyBody):
    """POST /detokenize"""

    model: Annotated[str | None, Field(description="a name listed by /v1/models")] = None
    tokens: Annotated[list[int], Field(description="a list of token ids")]
    skip_special_tokens: Annotated[bool, Field(description="true or false")] = False


def short(value: object) -> object:
    """A value as an error shows it."""
    return value if len(repr(value)) <= 80 else repr(value)[:80] + "..."


def _valid(value: Value, fine: bool) -> Value:
    if not fine:
        raise ValueError  # the field's description says what is valid
    return value


def _prompts(prompt: object) -> list[str | list[int]]:
    """Each a text or token ids; none where the shape is unknown."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(x, str) for x in prompt):
            return list(prompt)
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(x, list) and _are_ids(x) for x in prompt):
            return list(prompt)
    return []


def _are_ids(values: list[Any]) -> bool:
    return bool(values) and all(type(x) is int for x in values)
