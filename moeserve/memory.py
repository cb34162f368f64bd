"""How many KV blocks a rank gets, decided from numbers alone and explained in one line.

Knows: bytes, tokens, limits. Asks the machine nothing: the caller says what is available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AUTO_SHARE = 0.5  # of the memory that is available when the weights lie in place


@dataclass(frozen=True)
class CachePlan:
    """num_blocks of block_size tokens; max_model_len: longest sequence, prompt and output. beside:
    bytes of this rank that are left to others, by their names."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int
    reason: str  # how the size came about
    beside: Mapping[str, int] = field(default_factory=dict)
    form: str = ""  # how values lie in it, where that is not as the model computes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    def describe(self) -> str:
        form = f" in {self.form}" if self.form else ""
        return (
            f"KV cache: {self.num_blocks} blocks of {self.block_size} = {self.num_tokens} tokens, "
            f"{self.num_bytes / 2**20:.1f} MiB ({self.bytes_per_token} bytes a token{form}; "
            f"{self.reason}); max_model_len={self.max_model_len}{self._others()}"
        )

    def _others(self) -> str:
        told = _in_words(self.beside)
        return f"; left to others: {told}" if told else ""


def _in_words(parts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {size / 2**20:.1f} MiB" for name, size in parts.items() if size
    )


class CacheTooSmall(ValueError):
    """The cache cannot hold one sequence: names the setting, what it gives, what is needed."""


def plan_cache(
    *,
    bytes_per_token: int,
    block_size: int,
    model_max_len: int,
    max_model_len: int | None,
    max_num_sequences: int,
    kv_tokens: int | None = None,
    kv_memory: int | None = None,
    available_bytes: int = 0,
    ranks_here: int = 1,
    beside: Mapping[str, int] | None = None,
    share: float = AUTO_SHARE,
    form: str = "",
) -> CachePlan:
    """kv_tokens or kv_memory as given (both: the smaller), else a share of `available_bytes`, of
    which `beside` is left to others first: bytes a rank that will be wanted and are not taken yet.

    Never more than max_num_sequences of max_model_len can use. max_model_len None: the model's,
    or what the pool holds if that is less. Raises CacheTooSmall.
    """
    beside = beside or {}
    wanted = max_model_len if max_model_len is not None else model_max_len
    most = max_num_sequences * -(-wanted // block_size)
    given: list[tuple[int, str]] = []
    if kv_tokens is not None:
        given.append((kv_tokens // block_size, f"kv_tokens={kv_tokens}"))
    if kv_memory is not None:
        blocks = kv_memory // (bytes_per_token * block_size)
        given.append((blocks, f"kv_memory={kv_memory}"))
    if not given:
        ranks = max(ranks_here, 1)
        left = max(available_bytes - ranks * sum(beside.values()), 0)
        blocks = int(left * share) // ranks // (bytes_per_token * block_size)
        less = f", less {taken} a rank," if (taken := _in_words(beside)) else ""
        given.append(
            (
                blocks,
                f"auto: {share:.0%} of {available_bytes / 2**20:.0f} MiB available{less} over "
                f"{ranks_here} ranks here",
            )
        )
        given.append((most, f"auto: all that {max_num_sequences} sequences of {wanted} can use"))
    num_blocks, reason = min(given)
    length = wanted
    if max_model_len is None and num_blocks * block_size < wanted:
        length = num_blocks * block_size
        reason += f"; the model's {model_max_len} positions do not fit"
    if length < 2:
        least = max(1, -(-2 // block_size))
        raise CacheTooSmall(
            f"{reason}: gives {num_blocks} blocks of {block_size}, but at least {least} "
            f"({least * block_size} tokens, {least * block_size * bytes_per_token} bytes) must "
            "hold a sequence: give more --kv-tokens or --kv-memory"
        )
    if num_blocks < -(-length // block_size):
        raise CacheTooSmall(
            f"{reason}: gives {num_blocks} blocks of {block_size} = {num_blocks * block_size} "
            f"tokens, but one sequence of max_model_len={length} needs {length} tokens "
            f"({-(-length // block_size) * block_size * bytes_per_token} bytes): give more "
            f"--kv-tokens or --kv-memory, or a smaller --max-model-len"
        )
    return CachePlan(num_blocks, block_size, length, bytes_per_token, reason, dict(beside), form)


def shortage(parts: Mapping[str, int], available_bytes: int, ranks_here: int) -> str | None:
    """Why ranks of one machine that want `parts` each (bytes by name) cannot all have them; None
    where they can. kv_cache is what the settings give, so that the largest that fits is named."""
    need = sum(parts.values()) * ranks_here
    if need <= available_bytes:
        return None
    ranks = f"{ranks_here} ranks here need" if ranks_here > 1 else "the rank here needs"
    room = available_bytes // ranks_here - sum(parts.values()) + parts.get("kv_cache", 0)
    valid = (
        f"at most --kv-memory {room} fits beside the others"
        if room > 0 and parts.get("kv_cache")
        else "fewer ranks on this machine, or a smaller --token-budget, would need less"
    )
    return (
        f"memory: {ranks} {need} bytes ({need / 2**30:.2f} GiB) and {available_bytes} are "
        f"available; each: {_in_words(parts)}; {valid}"
    )
