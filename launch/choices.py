"""What is said of a name that is none of those a flag takes: all of them, and the nearest.

Knows words. Knows nothing of what they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ep.nearest import nearest

# What people call the model's own dtype on the wire, and torch's collectives.
MEANT = {
    "bf16": "model",
    "bfloat16": "model",
    "fp16": "model",
    "fp32": "model",
    "e4m3": "fp8",
    "ue8m0": "fp8_ue8m0",
    "gloo": "torch",
    "nccl": "torch",
    "low_latency": "deepep_ll",
    "deepep_low_latency": "deepep_ll",
    "deepep_high_throughput": "deepep_normal",
    "gpu": "cuda",
    "deterministic": "pairs",
}


def not_one_of(
    flag: str, value: str, valid: Iterable[str], others: Mapping[str, str] | None = None
) -> str:
    """A problem's line: `--wire bf16: must be one of model, fp8; nearest: model`. others: more
    names, each with the valid one that it stands for."""
    names = list(valid)
    meant = {said: name for said, name in {**MEANT, **(others or {})}.items() if name in names}
    close = nearest(value, [*names, *meant])
    hint = "" if close is None else f"; nearest: {meant.get(close, close)}"
    return f"{flag} {value or repr(value)}: must be one of {', '.join(names)}{hint}"


def whole_number(
    flag: str, text: str | int, least: int, most: int, problems: list[str], default: int = 1
) -> int:
    """The number; what is wrong with it joins the problems, and it reads as the default."""
    said = str(text).strip()
    if not re.fullmatch(r"[+-]?\d{1,18}", said):
        problems.append(f"{flag} {text or repr(text)}: must be a whole number")
        return default
    value = int(said)
    if value < least:
        problems.append(f"{flag} {value}: must be at least {least}; nearest valid: {least}")
    elif value > most:
        problems.append(f"{flag} {value}: must be at most {most}; nearest valid: {most}")
    else:
        return value
    return default
