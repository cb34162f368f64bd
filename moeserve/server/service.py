"""What the routes share: settings, tokenizer, template, client, and bodies made into Requests.

Here the checks live that need the model: known name, vocabulary, context length. Knows nothing of
how an answer is written.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moeserve.admission import check_request, thinking_problem
from moeserve.chat import ChatTemplate, load_chat_template
from moeserve.client import EngineClient
from moeserve.config import ServeConfig
from moeserve.detokenize import TokenBytes, token_bytes
from moeserve.errors import InvalidRequest
from moeserve.metrics import Metrics
from moeserve.reasoning import ReasoningSplitter, prompt_opens_reasoning
from moeserve.request import Request, SamplingParams
from moeserve.server.answer import Choice
from moeserve.server.content import ContentGuard
from moeserve.server.fields import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationFields,
    TokenizeBody,
)
from moeserve.server.refusals import ContextTooLong, UnknownModel
from moeserve.thinking import model_markers
from moeserve.tokenizer import Tokenizer
from moeserve.tool_calls import ToolCallParser, ToolFormat, tool_format

log = logging.getLogger("moeserve.server")


@dataclass
class Job:
    """A call made ready: its engine requests, the choices they fill, and the prompts' lengths.

    Choices of prompt p are p * n ... p * n + n - 1.
    """

    id: str
    created: int
    requests: list[Request]
    choices: list[Choice]
    prompt_ids: list[list[int]]
    prompt_texts: list[str | None]
    n: int
    may_call: bool = False  # tools were given: whether a choice ends in a call, its text tells
    # Told the reason of each choice when the answer has ended, or None where it was left before.
    on_end: Callable[[str, str | None], None] = lambda request_id, reason: None
    by_request: dict[str, Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.by_request = {x.request_id: x for x in self.choices}

    def usage(self) -> dict[str, object]:
        """OpenAI's usage of the call so far: each prompt counts once, all choices' tokens count."""
        prompt = sum(map(len, self.prompt_ids))
        completion = sum(x.num_tokens for x in self.choices)
        cached = sum(x.num_cached_tokens for x in self.choices[:: self.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(x.num_reasoning_tokens for x in self.choices),
                "accepted_prediction_tokens": sum(x.num_accepted for x in self.choices),
                "rejected_prediction_tokens": sum(x.num_rejected for x in self.choices),
            },
        }


class Service:
    """One served model. ConfigError when the checkpoint's tokenizer files cannot be used."""

    def __init__(self, config: ServeConfig, client: EngineClient, metrics: Metrics) -> None:
        folder: Path = config.model.checkpoint
        self.config, self.client, self.metrics = config, client, metrics
        self.tokenizer = Tokenizer(folder)
        self.table: TokenBytes | None = token_bytes(self.tokenizer)
        self.template: ChatTemplate | None = load_chat_template(
            folder, self.tokenizer, config.model.chat_template
        )
        self.tool_format: ToolFormat | None = tool_format(self.tokenizer)
        if self.template is not None and self.template.uses_tools and self.tool_format is None:
            log.warning(
                "tool calls are returned as text: the tokenizer has no markers of a known format"
            )
        self.thinking = model_markers(self.tokenizer, self.template, self.tool_format)
        self._guard = ContentGuard(self.tokenizer)
        if self.template is not None and not self._guard.works:
            log.warning(
                "special tokens that users spell out become tokens: this tokenizer cannot encode "
                "pieces of a prompt apart"
            )
        self._told_strict = False
        self.stopped = False  # the server ends: answers that are still being sent are cut
        self.model_name = config.model.served_name or folder.resolve().name
        self.started = time.time()

    # ---- checks ----------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise UnknownModel(f"model {name!r} does not exist; served here: {self.model_name!r}")

    def check_room(self, count: int) -> None:
        """Refuse before work is spent on tokenizing; `EngineClient.open` has the last say."""
        self.client.check_ready()
        if count <= self.client.max_queue < self.client.num_in_flight + count:
            raise self.client.queue_full(count)

    def problems(self, body: AnyBody, bad: frozenset[str]) -> list[InvalidRequest]:
        """What the model makes wrong of a body's fields, save those that are bad already."""
        found: list[InvalidRequest | None] = []
        if isinstance(body, GenerationFields):
            if "logit_bias" not in bad:
                found += self._bias_problems(body.logit_bias)
            if "stop_token_ids" not in bad:
                found.append(self._ids_problem("stop_token_ids", body.stop_token_ids))
            if "max_thinking_tokens" not in bad:
                size = self.tokenizer.vocab_size
                found.append(thinking_problem(body.max_thinking_tokens, self.thinking, size))
        if isinstance(body, CompletionBody) and "prompt" not in bad:
            nested = isinstance(body.prompt[0], list)
            for place, ids in enumerate(body.prompts()):
                if not isinstance(ids, str):
                    found.append(self._ids_problem(f"prompt.{place}" if nested else "prompt", ids))
        if isinstance(body, DetokenizeBody) and "tokens" not in bad:
            found.append(self._ids_problem("tokens", body.tokens))
        if isinstance(body, ChatBody | TokenizeBody):
            found += self._template_problems(body, bad)
        return [x for x in found if x is not None]

    def _ids_problem(
        self, field: str, ids: list[int], *, of_text: bool = False
    ) -> InvalidRequest | None:
        """Token ids must name rows of the embedding. of_text: whoever asked gave none, so that a
        place in their list tells nothing."""
        for value in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= value < self.tokenizer.vocab_size:
                place = field if of_text else f"{field}.{ids.index(value)}"
                return InvalidRequest(place, value, self._valid_ids)
        return None

    def _bias_problems(self, bias: dict[str, float]) -> Iterator[InvalidRequest]:
        seen: dict[int, str] = {}
        for key in bias:
            plain = key.isascii() and key.isdigit() and len(key) < 10
            if not plain or int(key) >= self.tokenizer.vocab_size:
                yield InvalidRequest("logit_bias", key, self._valid_ids)
            elif (first := seen.setdefault(int(key), key)) != key:
                valid = f"must name each token id once, and {first!r} is the same id"
                yield InvalidRequest("logit_bias", key, valid)

    @property
    def _valid_ids(self) -> str:
        return f"must be a token id from 0 to {self.tokenizer.vocab_size - 1}"

    def _template_problems(
        self, body: ChatBody | TokenizeBody, bad: frozenset[str]
    ) -> list[InvalidRequest]:
        if self.template is None:
            if body.messages is None:
                return []
            valid = (
                "this checkpoint has no chat template (see --chat-template); use /v1/completions"
            )
            return [InvalidRequest("messages", f"[{len(body.messages)} messages]", valid)]
        variables = {} if "chat_template_kwargs" in bad else body.chat_template_kwargs
        tools = [] if "tools" in bad else body.tools
        if isinstance(body, ChatBody) and body.tool_choice == "none":
            tools = []
        found = self.template.problems(tools=tools, variables=variables)
        if isinstance(body, ChatBody) and not {"reasoning_effort"} & bad:
            effort = body.reasoning_effort
            if effort is not None and "reasoning_effort" not in self.template.variables:
                valid = "the chat template of this model does not read it; omit it"
                found.append(InvalidRequest("reasoning_effort", effort, valid))
        return found

    def _check_prompt(self, field: str, ids: list[int]) -> None:
        """For ids that came of text: none, or more than the model has rows for."""
        if not ids:
            raise InvalidRequest(field, ids, "must hold at least one token")
        problem = self._ids_problem(field, ids, of_text=True)
        if problem is not None:
            raise problem

    # ---- jobs ------------------------------------------------------------------------------

    async def completion_job(self, body: CompletionBody) -> Job:
        arrival = time.time()
        prompts = body.prompts()
        self.check_room(len(prompts) * body.n)
        prompt_ids: list[list[int]] = []
        texts: list[str | None] = []
        samplings: list[SamplingParams] = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                ids = await self.tokenizer.encode_async(prompt, add_special_tokens=True)
                texts.append(prompt)
            else:
                ids = prompt
                texts.append(None)
            field = "prompt" if len(prompts) == 1 else f"prompt.{number}"
            self._check_prompt(field, ids)
            prompt_ids.append(ids)
            samplings.append(
                self.sampling(
                    body,
                    # 0: the prompt is scored and nothing generated
                    max_tokens=self._max_tokens(body, field, len(ids), default=body.max_tokens),
                    logprobs=body.logprobs,
                    prompt_logprobs=body.logprobs if body.echo else None,
                )
            )
        return self._job("cmpl-", body, arrival, prompt_ids, texts, samplings, None)

    async def chat_job(self, body: ChatBody) -> Job:
        arrival = time.time()
        self.check_room(body.n)
        variables = dict(body.chat_template_kwargs)
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        tools = None if body.tool_choice == "none" else body.tools or None
        pieces, ids = await self.encode_chat(body, tools, variables)
        self._check_prompt("messages", ids)
        max_tokens = self._max_tokens(body, "messages", len(ids), default=None)
        top = (body.top_logprobs or 0) if body.logprobs else None
        sampling = self.sampling(body, max_tokens=max_tokens, logprobs=top, prompt_logprobs=None)
        make_tools = self._tool_parser(body, tools)
        opened: bool | None = None
        if self.template is not None and self.template.uses_reasoning:
            opened = prompt_opens_reasoning(pieces[-1])  # what a user spells out is cut in two
        texts: list[str | None] = ["".join(pieces)]
        return self._job("chatcmpl-", body, arrival, [ids], texts, [sampling], opened, make_tools)

    def _max_tokens(
        self, body: GenerationFields, field: str, num_prompt_tokens: int, *, default: int | None
    ) -> int:
        """How many tokens may follow a prompt: as many as asked for, or ContextTooLong; else the
        default (None: no bound) or min_tokens, as far as there is room for them."""
        limit = self.client.fleet.max_model_len()
        room, asked = limit - num_prompt_tokens, body.asked_limit()
        if asked is not None:
            if asked[1] > room:
                raise ContextTooLong(field, num_prompt_tokens, limit, asked)
            return asked[1]
        if max(1, body.min_tokens) > room:
            least = ("min_tokens", body.min_tokens) if body.min_tokens else None
            raise ContextTooLong(field, num_prompt_tokens, limit, least)
        return room if default is None else min(max(default, body.min_tokens), room)

    def _tool_parser(
        self, body: ChatBody, tools: list[dict[str, Any]] | None
    ) -> Callable[[], ToolCallParser] | None:
        """Makes a parser for each choice; None where calls are not to be looked for."""
        form = self.tool_format
        if tools is None or form is None:
            return None
        if not self._told_strict and any(x["function"].get("strict") for x in tools):
            self._told_strict = True
            log.warning(
                "a tool has strict=true: arguments are not held to its schema yet (told once)"
            )
        special = self.tokenizer.special_ids if body.skip_special_tokens else frozenset()
        return partial(
            ToolCallParser,
            form,
            [x["function"]["name"] for x in tools],
            hidden=[x for x in form.markers if self.tokenizer.fast.token_to_id(x) in special],
            most=None if body.parallel_tool_calls else 1,
        )

    async def encode_chat(
        self,
        body: ChatBody | TokenizeBody,
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
    ) -> tuple[list[str], list[int]]:
        """The prompt of a conversation, in pieces (see `content`), and its ids. InvalidRequest
        where the template refuses it."""
        assert self.template is not None and body.messages is not None  # see `problems`
        messages, mark = body.messages, None
        if not body.allow_special_tokens_in_content:
            beside = self.template.source + repr((tools, variables))
            messages, mark = self._guard.marked(messages, beside)
        text = self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=variables,
        )
        pieces = [text] if mark is None else text.split(mark)
        ids: list[int] = []
        for piece in pieces:
            ids += await self.tokenizer.encode_async(piece, add_special_tokens=False)
        return pieces, ids

    def sampling(
        self,
        body: GenerationFields,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        return SamplingParams(
            temperature=float(body.temperature),
            top_k=max(0, body.top_k),
            top_p=float(body.top_p),
            min_p=float(body.min_p),
            repetition_penalty=float(body.repetition_penalty),
            presence_penalty=float(body.presence_penalty),
            frequency_penalty=float(body.frequency_penalty),
            logit_bias={int(key): float(value) for key, value in body.logit_bias.items()},
            seed=body.seed,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=body.stops(),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_thinking_tokens=body.max_thinking_tokens,
        )

    def _job(
        self,
        prefix: str,
        body: GenerationFields,
        arrival: float,
        prompt_ids: list[list[int]],
        texts: list[str | None],
        samplings: list[SamplingParams],
        opened: bool | None,
        make_tools: Callable[[], ToolCallParser] | None = None,
    ) -> Job:
        """samplings: one a prompt. opened: whether the prompt opens a reasoning part; None:
        reasoning is not split off. make_tools: makes the parser of a choice's tool calls; None:
        they stay text."""
        job_id = prefix + uuid.uuid4().hex
        requests: list[Request] = []
        choices: list[Choice] = []
        for ids, sampling in zip(prompt_ids, samplings, strict=True):
            for number in range(body.n):
                own = sampling
                if number and sampling.seed is not None:  # else n equal choices would come
                    own = replace(sampling, seed=sampling.seed + number)
                request = Request(
                    request_id=f"{job_id}-{len(requests)}",
                    prompt_token_ids=tuple(ids),
                    sampling=own,
                    arrival=arrival,
                    cache_salt=body.cache_salt,
                    thinking=None if own.max_thinking_tokens is None else self.thinking,
                )
                check_request(
                    request,
                    max_model_len=self.client.fleet.max_model_len(),
                    vocab_size=self.tokenizer.vocab_size,
                )
                tools = make_tools() if make_tools is not None else None
                ends = tools.ends_reasoning if tools is not None else ()
                choice = Choice(
                    len(choices),
                    request.request_id,
                    own,
                    self.tokenizer,
                    self.table,
                    skip_special_tokens=body.skip_special_tokens,
                    include_stop=body.include_stop_str_in_output,
                    reasoning=(
                        None if opened is None else ReasoningSplitter(opened=opened, ends=ends)
                    ),
                    tools=tools,
                )
                requests.append(request)
                choices.append(choice)
        may_call = make_tools is not None
        return Job(job_id, int(arrival), requests, choices, prompt_ids, texts, body.n, may_call)
