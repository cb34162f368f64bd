"""What DeepEP is to us: where it is loaded, which limits it documents, how large its buffers are.

Knows: facts about the library's first API (`Buffer`), as plain numbers. Knows nothing of how the
adapters call it. This is the one file that imports `deep_ep`.

Shape letters: D hidden, K top-k, P physical slots, R ranks, M max tokens a rank.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import torch

from dispatch.base import CombineForm, DispatchConfig, DispatchError, PeerError
from dispatch.fp8 import num_blocks
from dispatch.mib import mib, round_up
from dispatch.words import counted, nearest, raised

# Low-latency kernels are compiled for these hidden sizes and for at most so many picks a token.
LL_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LL_MAX_TOP_K = 11
# A tag of 1024 marks a finished count; above it counts have been seen wrong.
LL_MAX_TOKENS = 1024
# Buffers are addressed as 16-byte words by a signed 32-bit number: just under 32 GiB.
MAX_BUFFER_BYTES = 16 * (2**31 - 2)
QP_DEPTH = "NVSHMEM_QP_DEPTH"
DEFAULT_QP_DEPTH = 1024  # where the environment does not say
LEAST_QP_DEPTH = 4  # for one token
RANKS_PER_NODE = 8
_NVSHMEM_HANGS_FROM = (3, 5, 19)

NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
NORMAL_MAX_TOP_K = 32
NORMAL_MAX_LOCAL_EXPERTS = 1024
NORMAL_MAX_SCALES = 128  # of a row, for which queues are sized


def load(emulate: bool = False) -> Any:
    """The module with `Buffer`: the library, or its emulation over CPU process groups.

    Raises whatever the library raises as it is imported (ImportError, OSError, ...); ImportError in
    place of what would end the process.
    """
    if emulate:
        return importlib.import_module("dispatch.emulation")
    try:
        import deep_ep
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ImportError(f"its import raised {raised(error)}") from error

    return deep_ep


def has_buffer(library: Any) -> bool:
    """Whether it has the first API at all, which was taken out in 2.5."""
    return getattr(library, "Buffer", None) is not None


def ranks_per_node(library: Any) -> int:
    """8 in the library; its emulation can have smaller nodes (`dispatch.emulation.nodes_of`)."""
    return int(getattr(library.Buffer, "ranks_per_node", RANKS_PER_NODE))


def queue_depth(environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """NVSHMEM_QP_DEPTH as the library reads it, by Python's `int` (so that " 1024 " is a number and
    "0x400" is none); and what is wrong with it. None, None: not set, so that it may be chosen."""
    text = environment.get(QP_DEPTH)
    if text is None:
        return None, None
    try:
        depth = int(text)
    except ValueError:
        depth = 0
    if LEAST_QP_DEPTH <= depth < 2**31:
        return depth, None
    return None, (
        f"{QP_DEPTH}={text!r}: must be a decimal number, 2 x (max_tokens_per_rank + 1) or more, "
        f"such as {DEFAULT_QP_DEPTH}; or unset, so that it is chosen"
    )


@contextmanager
def naming_peers(dispatcher: str) -> Iterator[None]:
    """What the library says of ranks that sent nothing becomes a PeerError. Its kernels trap after
    100 s, compiled in; what CUDA says of that names nobody and stays as it is."""
    try:
        yield
    except RuntimeError as error:
        # The second API says it in other words.
        if not any(said in str(error) for said in ("DeepEP error", "Dispatch CPU wait")):
            raise
        raise PeerError(f"dispatcher {dispatcher!r}: {error}") from error


def why_absent(error: Exception) -> str:
    """One line for what `load` raised: a broken wheel may raise anything."""
    if isinstance(error, ModuleNotFoundError) and error.name == "deep_ep":
        return "deep_ep is not installed"
    return f"deep_ep cannot be imported: {raised(error)}"


def check_form(combine_form: CombineForm | None) -> None:
    """DispatchError if rows are to come home apart."""
    if combine_form not in (None, CombineForm.SUMMED):
        raise DispatchError(
            f"combine_form={combine_form}: the library sums at home; must be SUMMED"
        )


def mode_problems(config: DispatchConfig, what_it_does: str) -> list[str]:
    """What speaks against either mode. what_it_does: "sums in bfloat16", say, by itself."""
    found = []
    if config.deterministic:
        found.append(
            f"deterministic mode: the library {what_it_does}; --no-deterministic allows it"
        )
    if config.dtype != torch.bfloat16:
        found.append(f"dtype={config.dtype}: must be torch.bfloat16")
    return found


def division_problems(num_experts: int, num_ranks: int, most: int | None = None) -> list[str]:
    """most: experts of all ranks together, where there is a limit."""
    if num_experts % num_ranks == 0:
        return []
    return [
        f"num_physical_experts={num_experts} does not divide by {counted(num_ranks, 'rank')}: "
        f"{nearest(num_experts, num_ranks, most)}"
    ]


def ll_buffer_bytes(max_tokens: int, hidden: int, num_experts: int) -> int:
    """Bytes of the low-latency buffer: two halves (they alternate), each a send and a receive area
    and a count for each expert. num_experts: all physical slots, redundant ones included."""
    dispatch_row = 16 + max(2 * hidden, hidden + hidden // 32)
    combine_row = 2 * hidden + hidden // 32
    send = max(max_tokens * dispatch_row, num_experts * max_tokens * combine_row)
    receive = num_experts * max_tokens * max(dispatch_row, combine_row)
    return round_up(2 * (send + receive + round_up(4 * num_experts, 128)), 128)


def ll_token_step(num_ranks: int) -> int:
    """M must be a multiple of this, so that R * M is one of 4."""
    return 1 if num_ranks % 4 == 0 else 2 if num_ranks % 2 == 0 else 4


def ll_tokens_of_depth(qp_depth: int) -> int:
    """The largest M for a queue depth: two entries for each token, and two more."""
    return qp_depth // 2 - 1


def ll_depth_of_tokens(max_tokens: int) -> int:
    """The smallest power of two that will do as queue depth, never below the default."""
    depth = DEFAULT_QP_DEPTH
    while ll_tokens_of_depth(depth) < max_tokens:
        depth *= 2
    return depth


def ll_largest_tokens(num_ranks: int, hidden: int, num_experts: int, qp_depth: int | None) -> int:
    """The largest M that every limit allows (0: none). qp_depth None: it can be raised."""
    most = LL_MAX_TOKENS if qp_depth is None else min(LL_MAX_TOKENS, ll_tokens_of_depth(qp_depth))
    step = ll_token_step(num_ranks)
    most -= most % step
    while most > 0 and ll_buffer_bytes(most, hidden, num_experts) > MAX_BUFFER_BYTES:
        most -= step
    return max(most, 0)


def ll_problems(
    *,
    num_ranks: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    max_tokens: int,
    qp_depth: int | None,
) -> list[str]:
    """What speaks against low-latency mode: each with the number and the largest valid value.

    qp_depth: NVSHMEM_QP_DEPTH where it is set; None where it may be chosen.
    """
    found = []
    if hidden not in LL_HIDDEN_SIZES:
        sizes = ", ".join(map(str, LL_HIDDEN_SIZES))
        found.append(f"hidden_size={hidden}: kernels exist for {sizes}")
    if not 1 <= top_k <= LL_MAX_TOP_K:
        found.append(f"top_k={top_k}: valid are 1..{LL_MAX_TOP_K}")
    if num_ranks > RANKS_PER_NODE and num_ranks % RANKS_PER_NODE:
        below = num_ranks - num_ranks % RANKS_PER_NODE
        found.append(
            f"{num_ranks} ranks: above {RANKS_PER_NODE} a multiple of it, such as {below} "
            f"or {below + RANKS_PER_NODE}"
        )
    found += division_problems(num_experts, num_ranks)
    largest = ll_largest_tokens(num_ranks, hidden, num_experts, qp_depth)
    here = f"max_tokens_per_rank={max_tokens}"
    step = ll_token_step(num_ranks)
    fits = f"at most {largest}" if largest else "no number of tokens fits"
    if max_tokens > LL_MAX_TOKENS:
        found.append(f"{here}: {fits} (counts are wrong above {LL_MAX_TOKENS})")
    if num_ranks * max_tokens % 4:
        below = min(max_tokens - max_tokens % step, largest)
        valid = f"the largest valid value below is {below}" if below else f"such as {step}"
        found.append(
            f"{here} with {counted(num_ranks, 'rank')}: ranks * tokens must be a multiple of 4; "
            f"{valid}"
        )
    if qp_depth is not None and max_tokens > ll_tokens_of_depth(qp_depth):
        most = ll_tokens_of_depth(qp_depth)
        most -= most % step
        takes = f"at most {most}" if most else "too small for any number of tokens"
        found.append(
            f"{here} with {QP_DEPTH}={qp_depth}: {takes}; "
            f"a depth of {ll_depth_of_tokens(max_tokens)} would do"
        )
    size = ll_buffer_bytes(max_tokens, hidden, num_experts)
    if size > MAX_BUFFER_BYTES:
        found.append(
            f"{here}: needs a buffer of {mib(size)}, the library addresses "
            f"{mib(MAX_BUFFER_BYTES)}; {fits}{' tokens' if largest else ''}"
        )
    if max_tokens > largest:
        found.append("decode needs max_tokens_per_rank = max_num_sequences x (1 + drafts)")
    return found


def wrong_normal_ranks(num_ranks: int) -> str:
    return f"{counted(num_ranks, 'rank')}: valid are {', '.join(map(str, NORMAL_RANKS))}"


def normal_problems(
    *,
    num_ranks: int,
    ranks_per_node: int,
    node: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    fp8: bool,
) -> list[str]:
    """What speaks against normal mode: each with the number and the valid values. node: ranks that
    the library takes for a node; ranks_per_node: what one has here."""
    if num_ranks not in NORMAL_RANKS:
        return [wrong_normal_ranks(num_ranks)]
    found = []
    if num_ranks > node and ranks_per_node != node:
        each = counted(ranks_per_node, "rank")
        found.append(f"{each} a node: must be {node} where there are several")
    if num_ranks <= node and ranks_per_node != num_ranks:
        found.append(f"{num_ranks} ranks on several nodes: up to {node} must share one")
    if not 1 <= top_k <= NORMAL_MAX_TOP_K:
        found.append(f"top_k={top_k}: valid are 1..{NORMAL_MAX_TOP_K}")
    local, most = num_experts // num_ranks, NORMAL_MAX_LOCAL_EXPERTS
    found += division_problems(num_experts, num_ranks, most * num_ranks)
    if local > most:
        found.append(
            f"num_physical_experts={num_experts}, {local} a rank: at most {most}, "
            f"{most * num_ranks} in all"
        )
    step = 16 if fp8 else 8  # 16-byte words of a row; between nodes, 32 of them of a result
    step = 256 if num_ranks > node else step
    longest = NORMAL_MAX_SCALES * 128 if fp8 else None
    if hidden % step:
        near = nearest(hidden, step, longest)
        found.append(f"hidden_size={hidden}: must be a multiple of {step}; {near}")
    if fp8 and num_blocks(hidden) > NORMAL_MAX_SCALES:
        found.append(f"hidden_size={hidden}: in FP8 at most {NORMAL_MAX_SCALES * 128}")
    return found


def wrong_api(library: Any, used: dict[str, set[str]]) -> list[str]:
    """Why a package of that name is not the API that `used` (parameters by method) describes."""
    if not has_buffer(library):
        return ["has no Buffer (the first API was taken out in 2.5)"]
    return wrong_parameters(library.Buffer, "Buffer", used)


def wrong_parameters(buffer: Any, name: str, used: dict[str, set[str]]) -> list[str]:
    """Methods of a buffer class of this name that do not take what we pass."""
    found = []
    for method, names in used.items():
        taken: set[str] = set()
        with suppress(AttributeError, TypeError, ValueError):  # absent, or no function
            taken = set(inspect.signature(getattr(buffer, method)).parameters)
        if names - taken:
            found.append(f"{name}.{method} takes no {', '.join(sorted(names - taken))}")
    return found


def device_problems(size: int) -> list[str]:
    """Device, its free memory against `size` bytes, NVSHMEM: nothing is allocated."""
    if not torch.cuda.is_available():
        return [f"no CUDA device; the buffer needs {mib(size)} of one"]
    found = []
    free, _ = torch.cuda.mem_get_info()
    if size > free:
        found.append(f"the buffer needs {mib(size)}, {mib(free)} are free on the device")
    version = _nvshmem_version()
    if version is not None and version >= _NVSHMEM_HANGS_FROM:
        here, first = (".".join(map(str, v)) for v in (version, _NVSHMEM_HANGS_FROM))
        found.append(f"NVSHMEM {here}: hangs from {first} on; 3.4.5 is known to work")
    return found


def _nvshmem_version() -> tuple[int, ...] | None:
    """Of the wheel beside torch; None where it came by another way."""
    for name in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"):
        try:
            parts = metadata.version(name).split(".")[:3]
        except metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in parts if part.isdigit())
    return None
