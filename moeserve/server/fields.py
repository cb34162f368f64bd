"""Bodies of the OpenAI-style routes: which fields there are and which values are valid.

Each field's description says what is valid; an error quotes it with the field and the value.
Unknown fields are refused, except the IGNORED ones: they ask for bookkeeping of a hosted service or
give hints that change no token. A field that is null counts as not given. Knows nothing of the
engine.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from moeserve.errors import InvalidRequest

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",  # how calls are parsed is up to the client here
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
MAX_STOPS = 16
MAX_LOGPROBS = 20
INT64 = 2**63

Body = TypeVar("Body", bound=BaseModel)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: Annotated[bool | None, Field(description="true or false")] = None
    continuous_usage_stats: Annotated[bool | None, Field(description="true or false")] = None
    include_obfuscation: Annotated[bool | None, Field(description="true or false")] = None


class GenerationFields(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

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
    stop: Annotated[
        str | list[str], Field(description=f"a string or a list of up to {MAX_STOPS} strings")
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
    response_format: Annotated[dict[str, Any] | None, Field(description='{"type": "text"}')] = None

    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS or not all(stops):
            raise InvalidRequest(
                "stop", self.stop, f"a string or a list of up to {MAX_STOPS} strings, none empty"
            )
        return tuple(stops)

    def check_common(self) -> None:
        """Rules over several fields, and what is known but not served."""
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise InvalidRequest(
                "response_format",
                self.response_format,
                'only {"type": "text"} is served; constrained output is not supported yet',
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "{...}", "only allowed with stream=true")


class CompletionBody(GenerationFields):
    """POST /v1/completions"""

    prompt: Annotated[
        Any, Field(description="a string, a list of strings, of token ids or of token-id lists")
    ]
    max_tokens: Annotated[int, Field(ge=0, description="an integer from 0")] = 16
    echo: Annotated[bool, Field(description="true or false")] = False
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"an integer, 0 to {MAX_LOGPROBS}")
    ] = None
    best_of: Annotated[int | None, Field(ge=1, description="the same as n")] = None
    suffix: Annotated[str | None, Field(description="null")] = None

    def check(self) -> None:
        self.check_common()
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of", self.best_of, f"the same as n, which is {self.n}")
        if self.suffix is not None:
            raise InvalidRequest("suffix", self.suffix, "inserting text is not supported; omit it")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", self.min_tokens, f"0 to max_tokens={self.max_tokens}"
            )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(x, str) for x in prompt):
                return list(prompt)
            if _are_ids(prompt):
                return [prompt]
            if all(isinstance(x, list) and _are_ids(x) for x in prompt):
                return list(prompt)
        shown = prompt if len(repr(prompt)) <= 80 else repr(prompt)[:80] + "..."
        valid = str(CompletionBody.model_fields["prompt"].description)
        raise InvalidRequest("prompt", shown, f"{valid}, not empty")


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
    tool_choice: Annotated[str | dict[str, Any] | None, Field(description="'auto' or 'none'")] = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="an object of variables for the chat template")
    ] = {}
    reasoning_effort: Annotated[
        str | None, Field(description="a string, handed to the chat template")
    ] = None
    add_generation_prompt: Annotated[bool, Field(description="true or false")] = True
    modalities: Annotated[list[Literal["text"]] | None, Field(description='["text"]')] = None

    def check(self) -> None:
        self.check_common()
        if self.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest(
                "tool_choice",
                self.tool_choice,
                "'auto' or 'none'; forcing a call needs constrained output, not supported yet",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "needs logprobs=true")
        limit = self.output_limit()
        if limit is not None and self.min_tokens > limit:
            raise InvalidRequest("min_tokens", self.min_tokens, f"0 to max_tokens={limit}")

    def output_limit(self) -> int | None:
        """max_tokens under either of its names; None: up to the context limit."""
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                "max_tokens",
                self.max_tokens,
                f"the same as max_completion_tokens={self.max_completion_tokens}, or absent",
            )
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(BaseModel):
    """POST /tokenize: of a prompt, or of messages as chat would render them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str | None, Field(description="a name listed by /v1/models")] = None
    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Field(min_length=1, description="a list of messages")
    ] = None
    add_special_tokens: Annotated[bool, Field(description="true or false")] = True
    add_generation_prompt: Annotated[bool, Field(description="true or false")] = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] = {}
    tools: Annotated[list[dict[str, Any]], Field(description="a list of tools")] = []


class DetokenizeBody(BaseModel):
    """POST /detokenize"""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str | None, Field(description="a name listed by /v1/models")] = None
    tokens: Annotated[list[int], Field(description="a list of token ids")]
    skip_special_tokens: Annotated[bool, Field(description="true or false")] = False


def parse(kind: type[Body], body: bytes) -> Body:
    """A checked body from JSON bytes; InvalidRequest naming field, value and what is valid."""
    try:
        raw = from_json(body)  # lets NaN pass: the field's own check names it
    except ValueError as error:
        raise InvalidRequest("body", _start(body), f"a JSON object ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("body", _start(body), "a JSON object")
    ignored = IGNORED if issubclass(kind, GenerationFields) else frozenset[str]()
    given = {k: v for k, v in raw.items() if v is not None and k not in ignored}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _invalid(kind, error) from None


def _invalid(kind: type[BaseModel], error: ValidationError) -> InvalidRequest:
    first = error.errors()[0]
    name = str(first["loc"][0])
    field = kind.model_fields.get(name)
    path = ".".join(str(x) for x in first["loc"] if not _is_union_label(x))
    value = _short(first["input"])
    if first["type"] == "extra_forbidden":
        owner = kind if len(first["loc"]) == 1 else StreamOptions
        names = list(owner.model_fields)
        close = difflib.get_close_matches(str(first["loc"][-1]), names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return InvalidRequest(path, value, f"unknown field{hint}; known: {', '.join(names)}")
    if first["type"] == "missing":
        return InvalidRequest(path, None, f"is required: {field.description if field else ''}")
    valid = field.description if field is not None and field.description else first["msg"]
    return InvalidRequest(path, value, f"must be {valid}")


def _is_union_label(part: object) -> bool:
    return isinstance(part, str) and (part in ("str", "int", "[key]") or "[" in part)


def _are_ids(values: list[Any]) -> bool:
    return bool(values) and all(type(x) is int for x in values)


def _short(value: object) -> object:
    return value if len(repr(value)) <= 80 else repr(value)[:80] + "..."


def _start(body: bytes) -> str:
    return body[:40].decode(errors="replace")
