"""LLM: the offline API. Prompts in, finished texts out; on one rank in this process, on several as
processes of their own.

    with LLM("checkpoints/tiny", ep=2) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0)):
            print(output.text)

Knows: prompts, texts, stop strings, timing. What runs the requests is a backend (`llm_backends`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from ep.recording import ExpertRecording
from moeserve.admission import check_request, typed_sampling
from moeserve.chat import load_chat_template
from moeserve.config import ServeConfig, flat_name
from moeserve.detokenize import Detokenizer, token_bytes
from moeserve.errors import ConfigError, InvalidRequest
from moeserve.folder import folder_problems
from moeserve.llm_backends import Backend, LocalBackend, RanksBackend
from moeserve.load_desk import INTERVAL_STEPS
from moeserve.request import (
    FinishReason,
    Request,
    SamplingParams,
    ThinkingMarkers,
    TokenLogprob,
    TokenOutput,
)
from moeserve.thinking import model_markers
from moeserve.tokenizer import Tokenizer
from moeserve.tool_calls import tool_format

if TYPE_CHECKING:
    from moeserve.build import Progress

Prompt = str | Sequence[int]


@dataclass
class RequestOutput:
    """One finished continuation. Times are seconds: first_token_seconds and total_seconds since the
    request was handed in. stop_reason: the stop string or stop token id that ended it."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0  # of token_ids, those that were drafted (speculation)
    num_rejected: int = 0  # drafts that are none of them
    error: str | None = None
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0


class LLM:
    """settings: any field of ServeConfig's sections by its own name (block_size=4, dtype="float32",
    redundant_experts=3, ...). ConfigError lists what is wrong with them or with the checkpoint.

    progress(stage, done bytes, total bytes) hears how loading goes with ep=1; ranks show it
    themselves. ep > 1 starts that many processes by `python -m moeserve serve`; `close` (or
    leaving the with block) stops them. Not thread-safe.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        ep: int = 1,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        self.config = config_from(checkpoint, ep, settings)
        problems = folder_problems(self.config.model.checkpoint, needs_text=False)
        if problems:
            raise ConfigError(problems)
        self._names = itertools.count()
        self._no_tokenizer: ConfigError | None = None
        self.tokenizer: Tokenizer | None = None
        try:
            self.tokenizer = Tokenizer(self.config.model.checkpoint)
        except ConfigError as error:  # token ids can still be continued
            self._no_tokenizer = error
        self._table = None if self.tokenizer is None else token_bytes(self.tokenizer)
        self._backend: Backend
        if self.config.parallel.ep == 1:
            self._backend = LocalBackend(self.config, progress)
        else:
            self._backend = RanksBackend(self.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts (texts or token ids; one or many) -> outputs in the same order.

        sampling: for all, or one each. n continuations of each prompt stand next to each other;
        with a seed, continuation i has seed + i. InvalidRequest names what cannot be served, before
        anything runs. A single request that fails later has finish_reason "error".
        on_text(index of the output, new text) hears of text as it comes.
        """
        listed = _as_list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            each = [sampling or SamplingParams()] * len(listed)
        else:
            each = list(sampling)
            if len(each) != len(listed):
                raise InvalidRequest(
                    "sampling",
                    f"{len(each)} entries",
                    f"must be one, or one a prompt ({len(listed)})",
                )
        if not isinstance(n, int) or n < 1:
            raise InvalidRequest("n", n, "must be an integer, at least 1")
        each = [_typed(params) for params in each]
        runs: list[_Run] = []
        for number, (prompt, params) in enumerate(zip(listed, each, strict=True)):
            try:
                runs += [self._open(prompt, _numbered(params, i)) for i in range(n)]
            except InvalidRequest as error:
                if len(listed) > 1:
                    error.args = (f"prompts[{number}]: {error}",)
                raise
        by_id = {run.request.request_id: (i, run) for i, run in enumerate(runs)}

        def deliver(output: TokenOutput) -> bool:
            index, run = by_id[output.request_id]
            told = len(run.output.text)
            more = run.take(output)
            if on_text is not None and len(run.output.text) > told:
                on_text(index, run.output.text[told:])
            return more

        self._backend.run([run.request for run in runs], deliver)
        return [run.output for run in runs]

    def stats(self) -> list[Any]:
        """Latest RankStats of each rank (those heard from so far)."""
        return self._backend.stats()

    def info(self) -> list[dict[str, object]]:
        """What each rank says of itself: memory by kind, kernels, dispatcher, placement."""
        return self._backend.info()

    def start_recording(self, interval_steps: int = INTERVAL_STEPS, max_steps: int = 0) -> None:
        """Record expert load from the next step on: counts of each interval of so many steps.
        max_steps: end after so many; 0: at `stop_recording`. RecordingConflict: one runs."""
        self._backend.start_recording(interval_steps, max_steps)

    def stop_recording(self) -> ExpertRecording:
        """End the recording and take it, or take again the last one."""
        return self._backend.stop_recording()

    def close(self) -> None:
        """Stop the ranks and give memory back. Idempotent."""
        self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def _thinking(self) -> ThinkingMarkers | None:
        if self.tokenizer is None:
            return None
        model = self.config.model
        template = load_chat_template(model.checkpoint, self.tokenizer, model.chat_template)
        return model_markers(self.tokenizer, template, tool_format(self.tokenizer))

    def _open(self, prompt: Prompt, sampling: SamplingParams) -> _Run:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                assert self._no_tokenizer is not None
                raise self._no_tokenizer
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            ids = _ids(prompt)
        request = Request(
            request_id=f"llm-{next(self._names)}",
            prompt_token_ids=tuple(ids),
            sampling=sampling,
            arrival=time.time(),
            thinking=None if sampling.max_thinking_tokens is None else self._thinking,
        )
        check_request(
            request,
            max_model_len=self._backend.max_model_len,
            vocab_size=self._backend.vocab_size,
        )
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop", sampling.stop, "this checkpoint has no tokenizer")
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer, self._table, stop=sampling.stop, min_tokens=sampling.min_tokens
            )
        return _Run(request, RequestOutput(text, request.prompt_token_ids), detokenizer)


class _Run:
    """One request on its way: its text grows token by token, so that a stop string ends it."""

    def __init__(
        self, request: Request, output: RequestOutput, detokenizer: Detokenizer | None
    ) -> None:
        self.request, self.output, self._detokenizer = request, output, detokenizer
        self._start = time.perf_counter()

    def take(self, new: TokenOutput) -> bool:
        """False: no more is wanted (a stop string was found); later outputs are ignored."""
        out, now = self.output, time.perf_counter() - self._start
        if out.finish_reason is not None:
            return False
        if new.prompt_logprobs is not None:
            out.prompt_logprobs = new.prompt_logprobs
        out.num_cached_tokens, out.num_preemptions = new.num_cached_tokens, new.num_preemptions
        before = len(out.token_ids)
        more = self._take_tokens(new, now)
        accepted = min(new.num_accepted, len(out.token_ids) - before)
        out.num_accepted += accepted
        out.num_rejected += new.num_rejected + new.num_accepted - accepted
        return more

    def _take_tokens(self, new: TokenOutput, now: float) -> bool:
        out = self.output
        for i, token in enumerate(new.token_ids):
            if not out.token_ids:
                out.first_token_seconds = now
            out.token_ids.append(token)
            out.logprobs.extend(new.logprobs[i : i + 1])
            if self._detokenizer is None:
                continue
            if token != new.stop_token_id:
                out.text += self._detokenizer.push(token)
            if self._detokenizer.stopped is not None:
                return self._end(FinishReason.STOP, self._detokenizer.stopped, now)
        if new.finish_reason is None:
            return True
        out.error = new.error
        if self._detokenizer is not None:
            out.text += self._detokenizer.flush()
            if self._detokenizer.stopped is not None:
                return self._end(FinishReason.STOP, self._detokenizer.stopped, now)
        return self._end(new.finish_reason, new.stop_token_id, now)

    def _end(self, reason: FinishReason, stop: str | int | None, now: float) -> bool:
        self.output.finish_reason = reason
        self.output.stop_reason = stop
        self.output.total_seconds = now
        return False


def config_from(checkpoint: str | Path, ep: int, settings: dict[str, Any]) -> ServeConfig:
    """ServeConfig from flat settings; a field's section is found by its name."""
    homes: dict[str, tuple[str, str]] = {}
    for section, info in ServeConfig.model_fields.items():
        if section == "server" or info.annotation is None:
            continue
        for name in info.annotation.model_fields:
            homes[flat_name(section, name)] = section, name
    del homes["lockstep_timeout"]  # what /health makes of silence
    unknown = sorted(settings.keys() - homes.keys())
    if unknown:
        known = ", ".join(sorted(homes.keys() - {"checkpoint", "ep"}))
        raise ConfigError(
            [f"{n}={settings[n]!r}: unknown setting; known: {known}" for n in unknown]
        )
    sections: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": Path(checkpoint)},
        "parallel": {} if ep == 1 and settings.get("layout") else {"ep": ep},
    }
    for name, value in settings.items():
        section, field = homes[name]
        sections.setdefault(section, {})[field] = value
    return ServeConfig.load(None, sections)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts", prompts, "must be a text, token ids, or a list of such")
    items: list[Any] = [_plain(x) for x in prompts]
    if items and all(isinstance(x, int) for x in items):
        return [items]
    return items


def _plain(value: Any) -> Any:
    """Arrays and their numbers as Python has them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _ids(prompt: Any) -> list[int]:
    ids = [_plain(x) for x in prompt] if isinstance(prompt, Iterable) else [prompt]
    if not all(type(x) is int for x in ids):
        raise InvalidRequest("prompts", prompt, "must be a text or integer token ids")
    return ids


def _typed(sampling: Any) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest("sampling", sampling, "must be SamplingParams")
    return typed_sampling(sampling)


def _numbered(sampling: SamplingParams, i: int) -> SamplingParams:
    if i == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + i)
