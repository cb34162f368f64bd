"""What a request may ask of an engine: a refusal names each bad field, its value, what is valid.

Pure: the same check runs in the front end (as HTTP 400) and on the rank (the last line of defence,
since one bad id would break a step for everybody).
"""

from __future__ import annotations

import math

import msgspec

from moeserve.errors import InvalidRequest, raise_problems
from moeserve.request import Request, SamplingParams, ThinkingMarkers


def check_request(request: Request, *, max_model_len: int, vocab_size: int | None = None) -> None:
    """Raise InvalidRequest if the request could never be served, whatever else runs."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequest("prompt", (), "must hold at least one token")
    if len(prompt) + min(sampling.max_tokens, 1) > max_model_len:
        raise InvalidRequest(
            "prompt",
            f"{len(prompt)} tokens",
            f"prompt and output share {max_model_len} tokens (max_model_len), so a prompt may have "
            f"at most {max_model_len - 1}",
        )
    if vocab_size is not None:
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest("prompt", bad, f"must be a token id from 0 to {vocab_size - 1}")
        for token in sampling.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    "logit_bias", token, f"must be a token id from 0 to {vocab_size - 1}"
                )
    check_sampling(sampling)
    problem = thinking_problem(sampling.max_thinking_tokens, request.thinking, vocab_size)
    if problem is not None:
        raise problem


def thinking_problem(
    most: int | None, markers: ThinkingMarkers | None, vocab_size: int | None = None
) -> InvalidRequest | None:
    """Why a limit on thinking can mean nothing: the model has no markers, or no rows for them in
    its embedding. None: it can, or there is none."""
    if most is None:
        return None
    if markers is None or not (markers.start and markers.end and all(markers.also_ends)):
        valid = "this model has no thinking markers (<think>, </think>) to limit it by; omit it"
        return InvalidRequest("max_thinking_tokens", most, valid)
    ids = (*markers.start, *markers.end)
    if vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
        valid = f"the thinking markers {ids} are not within the model's {vocab_size} tokens"
        return InvalidRequest("max_thinking_tokens", most, valid)
    return None


INT64 = 2**63
BIAS = 100.0


def typed_sampling(sampling: SamplingParams) -> SamplingParams:
    """The same with every field of its declared type (lists become tuples); InvalidRequest names
    one that is not. Python callers may have put anything in; the wire would refuse it later."""
    given = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
    for name in ("stop", "stop_token_ids"):
        if isinstance(given[name], str | int):  # one alone; else each letter would be a stop string
            given[name] = (given[name],)
    try:
        return msgspec.convert(given, SamplingParams, strict=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        raise InvalidRequest(name or "sampling", given.get(name), text) from None


def check_sampling(sampling: SamplingParams) -> None:
    """InvalidRequest, or InvalidFields where several fields are wrong."""
    s = sampling
    problems: list[InvalidRequest] = []
    checks: tuple[tuple[str, float | int | None, bool, str], ...] = (
        ("temperature", s.temperature, s.temperature >= 0, "must be at least 0"),
        ("top_k", s.top_k, s.top_k >= 0, "must be at least 0 (0: off)"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "must lie in (0, 1]"),
        ("min_p", s.min_p, 0 <= s.min_p <= 1, "must lie in [0, 1]"),
        ("repetition_penalty", s.repetition_penalty, s.repetition_penalty > 0, "must be above 0"),
        (
            "presence_penalty",
            s.presence_penalty,
            abs(s.presence_penalty) <= 2,
            "must lie in [-2, 2]",
        ),
        (
            "frequency_penalty",
            s.frequency_penalty,
            abs(s.frequency_penalty) <= 2,
            "must lie in [-2, 2]",
        ),
        ("max_tokens", s.max_tokens, 0 <= s.max_tokens < INT64, "must be at least 0, below 2**63"),
        ("seed", s.seed, s.seed is None or -INT64 <= s.seed < 2 * INT64, "must have 64 bits"),
        ("min_tokens", s.min_tokens, s.min_tokens >= 0, "must be at least 0"),
        ("logprobs", s.logprobs, s.logprobs is None or s.logprobs >= 0, "must be at least 0"),
        (
            "max_thinking_tokens",
            s.max_thinking_tokens,
            s.max_thinking_tokens is None or 0 <= s.max_thinking_tokens < INT64,
            "must be at least 0, below 2**63 (None: no limit)",
        ),
        (
            "prompt_logprobs",
            s.prompt_logprobs,
            s.prompt_logprobs is None or s.prompt_logprobs >= 0,
            "must be at least 0",
        ),
    )
    for name, value, fine, valid in checks:
        if value is not None and not math.isfinite(value):
            problems.append(InvalidRequest(name, value, "must be a finite number"))
        elif not fine:
            problems.append(InvalidRequest(name, value, valid))
    if s.min_tokens > s.max_tokens >= 0:
        valid = f"must not exceed max_tokens={s.max_tokens} (16 where nobody set it)"
        problems.append(InvalidRequest("min_tokens", s.min_tokens, valid))
    wrong = [x for x in s.logit_bias.values() if not (-BIAS <= x <= BIAS or x == -math.inf)]
    if wrong:
        problems.append(
            InvalidRequest("logit_bias", wrong[0], "must lie in [-100, 100] or be -inf")
        )
    if not all(s.stop):
        problems.append(InvalidRequest("stop", s.stop, "must hold no empty string"))
    raise_problems(problems)
