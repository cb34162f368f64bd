"""`moeserve generate`: continue prompts without a server, as streamed text or one JSON object.

Knows where prompts come from and how answers are printed. What answers is `moeserve.llm`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.env import RankEnv, use_threads
from launch.experts.file import output_problems
from launch.progress import open_progress
from launch.settings import OFFLINE, Given
from moeserve.errors import ConfigError, InvalidFields, InvalidRequest
from moeserve.terminal import counted, say

if TYPE_CHECKING:
    from moeserve.config import ServeConfig
    from moeserve.llm import LLM, RequestOutput
    from moeserve.request import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Ask:
    """What to continue and how; fields are the command's flags."""

    prompts: tuple[str, ...]
    prompt_file: Path | None
    chat: bool
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    ignore_eos: bool
    as_json: bool
    token_ids: tuple[str, ...] = ()  # prompts as token ids, "1,2,3"; they need no tokenizer
    logprobs: int | None = None
    record_experts: Path | None = None  # a file for the expert load of all that is computed


def generate(given: Given, ask: Ask) -> None:
    """Run the command. ConfigError: all that cannot be asked, before anything runs."""
    if RankEnv.read(os.environ) is not None:
        raise ConfigError(["generate starts its own ranks (--ep): run it without torchrun"])
    problems: list[str] = []
    sampling = _sampling(ask, problems)
    ids = [read_ids(text, problems) for text in ask.token_ids]
    prompts = [*ask.prompts, *_from_file(ask.prompt_file, problems)]
    if ask.record_experts is not None:
        problems += output_problems("--record-experts", ask.record_experts)
    if "" in ask.prompts:
        problems.append("--prompt is empty: there is nothing to continue")
    from_stdin = str(ask.prompt_file) == "-" or not (prompts or ids or problems)
    needs_text = bool(prompts or from_stdin or ask.stop)
    config = given.resolve(needs_text=needs_text, own=problems)
    if config.model.chat_template is not None and not ask.chat:
        raise ConfigError(["model.chat_template is used with --chat only"])
    if from_stdin:
        prompts.append(_from_stdin())
    asked = _encoded(config, prompts, ask.chat) + ids  # as long as nothing has been loaded
    _check_prompts(config, asked, sampling)
    if config.parallel.ep == 1:
        use_threads(config.engine.threads, RankEnv.alone())
    prompts += [" ".join(map(str, x)) for x in ids]  # as they are shown
    with _open(config) as llm:
        began = time.perf_counter()
        streams = not ask.as_json and len(asked) == 1  # several would mix
        show = _show if streams else None
        with _recorded(llm, ask.record_experts):
            try:
                outputs = llm.generate(asked, sampling, on_text=show)
            finally:
                if streams:  # what is said next begins a line
                    print(flush=True)
        seconds = time.perf_counter() - began
    if ask.as_json:
        print(json.dumps(report(config, prompts, outputs, seconds), ensure_ascii=False))
    else:
        if not streams:
            for prompt, output in zip(prompts, outputs, strict=True):
                print(f"--- {prompt.strip()[:70]!r}\n{output.text}")
            print(flush=True)
        tokens = sum(len(o.token_ids) for o in outputs)
        if not config.engine.quiet:
            end = f"{counted(tokens, 'token')}, {tokens / seconds:.1f} tokens/s"
            print(end + drafts_in_words(outputs), file=sys.stderr)
    for output in outputs:
        if output.error is not None:
            say(output.error)
    if any(output.error is not None for output in outputs):
        raise SystemExit(1)


def _open(config: ServeConfig) -> LLM:
    """The LLM, its loading shown."""
    from moeserve.llm import LLM

    checkpoint, ep = config.model.checkpoint, config.parallel.ep
    progress = open_progress(ep == 1 and not config.engine.quiet)
    try:
        return LLM(checkpoint, ep=ep, progress=progress.update, **flat_settings(config))
    finally:
        progress.close()


@contextmanager
def _recorded(llm: LLM, path: Path | None) -> Iterator[None]:
    """Expert load of the block, saved whatever ends it."""
    if path is None:
        yield
        return
    llm.start_recording()
    try:
        yield
    finally:
        llm.stop_recording().save(path)
        say(f"expert load: {path}")


def _show(index: int, text: str) -> None:
    print(text, end="", flush=True)


def _sampling(ask: Ask, problems: list[str]) -> SamplingParams:
    from moeserve.admission import check_sampling
    from moeserve.request import SamplingParams

    sampling = SamplingParams(
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        max_tokens=ask.max_tokens,
        stop=ask.stop,
        ignore_eos=ask.ignore_eos,
        logprobs=ask.logprobs,
    )
    try:
        check_sampling(sampling)
    except InvalidFields as error:
        problems += map(_flagged, error.problems)
    except InvalidRequest as error:
        problems.append(_flagged(error))
    if ask.logprobs is not None and not ask.as_json:
        problems.append("--logprobs is shown with --json only")
    if ask.chat and ask.token_ids:
        problems.append("--chat is for texts: --prompt-ids go to the model as they are")
    return sampling


def _flagged(error: InvalidRequest) -> str:
    """What is wrong with a field, in the words of the command line."""
    value = "" if isinstance(error.value, tuple) else f" {error.value}"
    return f"--{error.field.replace('_', '-')}{value}: {error.valid}"


def _from_file(file: Path | None, problems: list[str]) -> list[str]:
    """The prompt in a file; none for no file and for -, which is standard input."""
    if file is None or str(file) == "-":
        return []
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        problems.append(f"--prompt-file {file}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        problems.append(f"--prompt-file {file}: not UTF-8 text ({error.reason})")
    else:
        if text.strip():
            return [text]
        problems.append(f"--prompt-file {file}: holds no text, so there is nothing to continue")
    return []


def _from_stdin() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    try:
        text = sys.stdin.read().removesuffix("\n") if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise ConfigError([f"standard input: not UTF-8 text ({error.reason})"]) from None
    if not text.strip():
        raise ConfigError(
            ["standard input holds no text: give --prompt, --prompt-file or --prompt-ids"]
        )
    return text


def read_ids(text: str, problems: list[str]) -> list[int]:
    """Token ids from "1,2,3" or "1 2 3"."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        problems.append(
            f"--prompt-ids {text!r}: must be whole numbers with commas or spaces between"
        )
    return ids


def flat_settings(config: ServeConfig) -> dict[str, Any]:
    """The settings that were given, by their own names, as `LLM` takes them."""
    from moeserve.config import flat_name

    settings: dict[str, Any] = {}
    for section in OFFLINE:
        given = getattr(config, section).model_dump(exclude_unset=True)
        settings |= {flat_name(section, field): value for field, value in given.items()}
    return {k: v for k, v in settings.items() if k not in ("checkpoint", "ep")}


def drafts_in_words(outputs: Sequence[RequestOutput]) -> str:
    """For the end line; "" where nothing was drafted."""
    accepted = sum(o.num_accepted for o in outputs)
    rejected = sum(o.num_rejected for o in outputs)
    if not accepted + rejected:
        return ""
    return f", {accepted} of {counted(accepted + rejected, 'draft')} accepted"


def report(
    config: ServeConfig, prompts: list[str], outputs: list[RequestOutput], seconds: float
) -> dict[str, Any]:
    """The JSON object: `outputs` in order; with one prompt its fields stand on top as well."""
    entries = [_entry(p, o) for p, o in zip(prompts, outputs, strict=True)]
    tokens = sum(len(o.token_ids) for o in outputs)
    whole = {
        "total_seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }
    first = entries[0] if len(entries) == 1 else {"timing": whole}
    name = config.model.served_name or config.model.checkpoint.resolve().name
    return {"model": name, "ep": config.parallel.ep, **first, "outputs": entries, "overall": whole}


def _entry(prompt: str, output: RequestOutput) -> dict[str, Any]:
    later = len(output.token_ids) - 1
    decode_seconds = output.total_seconds - output.first_token_seconds
    return {
        "prompt": prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "text": output.text,
        **({"logprobs": [_logprob(x) for x in output.logprobs]} if output.logprobs else {}),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "num_cached_tokens": output.num_cached_tokens,
        "num_accepted": output.num_accepted,
        "num_rejected": output.num_rejected,
        "timing": {
            "ttft": output.first_token_seconds,
            "total": output.total_seconds,
            "tokens_per_second": len(output.token_ids) / max(output.total_seconds, 1e-9),
            "decode_tokens_per_second": later / decode_seconds if later > 0 else None,
        },
    }


def _logprob(x: TokenLogprob) -> dict[str, Any]:
    return {"token_id": x.token_id, "logprob": x.logprob, "rank": x.rank, "top": list(x.top)}


def _encoded(config: ServeConfig, prompts: list[str], chat: bool) -> list[list[int]]:
    """Texts as token ids, through the chat template or as plain prompts. ConfigError for a broken
    tokenizer, a missing template."""
    if not prompts:
        return []
    from moeserve.chat import load_chat_template
    from moeserve.tokenizer import Tokenizer

    checkpoint = config.model.checkpoint
    tokenizer = Tokenizer(checkpoint)
    if not chat:
        return [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    template = load_chat_template(checkpoint, tokenizer, config.model.chat_template)
    if template is None:
        raise ConfigError(["--chat: this checkpoint has no chat template; give --chat-template"])
    texts = [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _check_prompts(config: ServeConfig, asked: list[list[int]], sampling: SamplingParams) -> None:
    """InvalidRequest for what the model cannot take, before its weights are read."""
    from moeserve.admission import check_request
    from moeserve.folder import read_model
    from moeserve.request import Request

    model, _ = read_model(config.model.checkpoint)
    assert model is not None, "resolve refuses such folders"
    most = config.schedule.max_model_len or model.max_position_embeddings
    for ids in asked:
        request = Request(request_id="", prompt_token_ids=tuple(ids), sampling=sampling)
        check_request(request, max_model_len=most, vocab_size=model.vocab_size)
