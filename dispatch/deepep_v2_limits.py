"""What DeepEP's second API is to us: where it is loaded, its limits, the size of its buffer.

Knows: facts about `ElasticBuffer` (2.0, 2.1) and `EPBuffer` (2.5), as plain numbers read in their
sources. Knows nothing of machines (deepep_v2_machine.py), nor of how the adapter calls the library.
The first API and the import of `deep_ep` are deepep.py's.

Among several NVLink domains a row goes once to each domain and on from there ("relayed", the
library's hybrid mode); where these are too many, straight to each rank ("direct").

Shape letters: D hidden, K top-k, P physical slots, R ranks, M max tokens a rank, U ranks that share
NVLink, S such groups (R = U * S), e local slots.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dispatch import deepep
from dispatch.base import DispatchConfig, WireFormat
from dispatch.mib import round_up
from dispatch.words import counted, nearest, raised, version_of
from ep.group import EPGroup

MAX_RANKS = 1024
MAX_EXPERTS = 2048
MAX_TOP_K = 32
HIDDEN_STEP = 256  # combine moves rows in 32 lanes of 16 bytes
MAX_ROWS = 2**31 - 1  # rows are numbered by int32
ALIGNMENT = 2 * 2**20  # of the buffer, and what it is rounded up to
ROW_ALIGNMENT = 32  # bytes; of each part of a row in the buffer
CHANNELS = 1280  # between nodes: 160 multiprocessors of 8 channels
# Where rows are relayed: domains, ranks of one, and threads that wait for counts.
MAX_RELAYED_DOMAINS = 32
MAX_RELAYED_RANKS = 64
COUNTING_THREADS = 128
SHARED_MEMORY = 232448  # bytes of a block, on SM90 and SM100


@dataclass(frozen=True)
class Api:
    """One of the two versions. nccl, nvcc: the least that it runs with (nvcc None: any).
    row_step: bytes that a row in the buffer is rounded up to. workspace: bytes beside the buffer.
    defers: a receiver may leave results in the buffer until it asks for them."""

    buffer: str
    nccl: tuple[int, int, int]
    nvcc: tuple[int, int] | None
    max_local_experts: int
    row_step: int
    workspace: int
    defers: bool


ELASTIC = Api("ElasticBuffer", (2, 30, 4), None, 256, 32, 14 * 2**20, False)
EP = Api("EPBuffer", (2, 32, 3), (13, 1), 512, 64, 16 * 2**20, True)

# Parameters that we pass by name; a package that takes others is another API.
USED = {
    "__init__": {
        "group",
        "num_bytes",
        "num_max_tokens_per_rank",
        "allow_hybrid_mode",
        "explicitly_destroy",
    },
    "dispatch": {
        "x",
        "topk_idx",
        "topk_weights",
        "num_experts",
        "num_max_tokens_per_rank",
        "expert_alignment",
        "num_sms",
        "async_with_compute_stream",
        "do_handle_copy",
        "do_cpu_sync",
        "do_expand",
        "use_tma_aligned_col_major_sf",
    },
    "combine": {"x", "handle", "async_with_compute_stream"},
}


# -- the library --------------------------------------------------------------------------------


def load() -> tuple[Any, Api]:
    """The first installed package with either buffer. ImportError, of one line, if there is none.

    `deep_ep` holds one or the other by its version; `deep_ep_v25` is how a fork names 2.5, so that
    both can be installed.
    """
    packages: dict[str, Callable[[], Any]] = {
        "deep_ep": deepep.load,
        "deep_ep_v25": lambda: importlib.import_module("deep_ep_v25"),
    }
    reasons = []
    for name, importer in packages.items():
        try:
            library = importer()
            api, version = api_of(library), version_of(library)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken wheel may raise anything
            reasons.append(_why_absent(name, error))
            continue
        if api is not None:
            return library, api
        reasons.append(f"{name} {version} has neither ElasticBuffer (2.0) nor EPBuffer (2.5)")
    if reasons == [f"{name} is not installed" for name in packages]:
        reasons = [", nor ".join([reasons[0], *list(packages)[1:]])]
    raise ImportError("; ".join(reasons))


def api_of(library: Any) -> Api | None:
    """Which of the two it is; None: neither."""
    return next((api for api in (ELASTIC, EP) if hasattr(library, api.buffer)), None)


def wrong_api(library: Any, api: Api) -> list[str]:
    """Methods of its buffer that do not take what we pass."""
    used = {method: set(names) for method, names in USED.items()}
    if api.defers:
        used["dispatch"].add("defer_epilogue")
        used["combine"].add("defer_epilogue")
    return deepep.wrong_parameters(getattr(library, api.buffer), api.buffer, used)


def _why_absent(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return f"{name} is not installed"
    return f"{name} cannot be imported: {raised(error)}"


# -- sizes --------------------------------------------------------------------------------------


def row_bytes(api: Api, hidden_bytes: int, scale_bytes: int, top_k: int, dispatch: bool) -> int:
    """A row in the buffer, which is as it travels: values, scales, picks and weights; on the way
    there also where it comes from."""
    around = 8 * top_k + (4 * (1 + top_k) if dispatch else 0)
    parts = (hidden_bytes, scale_bytes, around)
    return round_up(sum(round_up(part, ROW_ALIGNMENT) for part in parts), api.row_step)


def buffer_bytes(
    api: Api,
    *,
    max_tokens: int,
    hidden: int,
    top_k: int,
    fp8: bool,
    ranks: int,
    domain: int,
    relayed: bool = True,
    multiple_reduction: bool = True,
) -> int:
    """What `get_buffer_size_hint` gives. domain: ranks that share NVLink; relayed makes a
    difference where these are not all. top_k 0 counts as 32."""
    top_k = top_k or MAX_TOP_K
    scales = 4 * -(-hidden // 32) if fp8 else 0  # room for a scale of 32 channels
    there = row_bytes(api, hidden if fp8 else 2 * hidden, scales, top_k, True)
    back = row_bytes(api, 2 * hidden, 0, top_k, False)
    groups = ranks // domain
    if groups == 1 or not relayed:
        rdma = 0 if groups == 1 else 1  # it reads from buffers to send
        dispatch = (ranks + rdma) * max_tokens * there
        held, each = (min(ranks, top_k), 1) if multiple_reduction else (top_k, top_k)
        combine = (held + rdma * ranks * each) * max_tokens * back
    else:
        queued = max_tokens + CHANNELS
        dispatch = (domain * groups * max_tokens + max_tokens + groups * queued) * there
        near, far = (min(n, top_k) if multiple_reduction else top_k for n in (domain, groups))
        sent = (1 if multiple_reduction else top_k) * groups * queued
        combine = (near * groups * max_tokens + sent + far * max_tokens) * back
    return round_up(max(dispatch, combine), ALIGNMENT)


def buffer_bytes_for(api: Api, group: EPGroup, config: DispatchConfig) -> int:
    """A node is taken for what shares NVLink; where that is more ranks, less would do."""
    return buffer_bytes(
        api,
        max_tokens=config.max_tokens_per_rank,
        hidden=config.hidden_size,
        top_k=config.top_k,
        fp8=config.wire is not WireFormat.MODEL,
        ranks=group.size,
        domain=group.ranks_per_node,
        relayed=is_relayed(group.num_nodes),
    )


def is_relayed(num_nodes: int) -> bool:
    return 1 < num_nodes <= MAX_RELAYED_DOMAINS


def direct_ranks(
    api: Api, hidden: int, top_k: int, num_ranks: int, num_experts: int, fp8: bool
) -> int:
    """The most ranks that rows can go straight to: a thread for each, and a row in shared memory
    for each 32 threads."""
    scales = 4 * -(-hidden // 128) if fp8 else 0
    there = row_bytes(api, hidden if fp8 else 2 * hidden, scales, top_k, True) + ROW_ALIGNMENT
    back = row_bytes(api, 2 * hidden, 0, top_k, False) + ROW_ALIGNMENT
    counting = COUNTING_THREADS // 32
    room = SHARED_MEMORY - 4 * round_up(num_ranks + num_experts, COUNTING_THREADS)
    warps = min(room // there, 32 - counting) + counting
    return 32 * min(warps, SHARED_MEMORY // back, 32)


def expanded_rows(ranks: int, max_tokens: int, top_k: int, local: int, alignment: int) -> int:
    """The most rows that a rank may get, one for each (token, slot), each slot's part aligned."""
    rows = ranks * max_tokens * min(top_k, local) + (alignment - 1) * local
    return round_up(rows, alignment)


# -- what speaks against it ---------------------------------------------------------------------


def problems(
    api: Api,
    *,
    num_ranks: int,
    num_nodes: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    max_tokens: int,
    alignment: int,
    fp8: bool,
) -> list[str]:
    """Limits of the library: each with the number and the largest (or nearest) valid value."""
    found = []
    if num_ranks > MAX_RANKS:
        found.append(f"{num_ranks} ranks: at most {MAX_RANKS}")
    if not 1 <= top_k <= MAX_TOP_K:
        found.append(f"top_k={top_k}: valid are 1..{MAX_TOP_K}")
    if hidden % HIDDEN_STEP:
        near = nearest(hidden, HIDDEN_STEP)
        found.append(f"hidden_size={hidden}: must be a multiple of {HIDDEN_STEP}; {near}")
    local, most = -(-num_experts // num_ranks), api.max_local_experts
    in_all = min(MAX_EXPERTS, num_ranks * most)
    found += deepep.division_problems(num_experts, num_ranks, in_all)
    if num_experts > MAX_EXPERTS:
        found.append(f"num_physical_experts={num_experts}: at most {MAX_EXPERTS}")
    if local > most:
        found.append(
            f"{local} experts a rank: at most {most}, so num_physical_experts <= {num_ranks * most}"
        )
    found += _node_problems(api, num_ranks, num_nodes, hidden, top_k, num_experts, fp8)
    if expanded_rows(num_ranks, max_tokens, top_k, local, alignment) > MAX_ROWS:
        room = MAX_ROWS // alignment * alignment - (alignment - 1) * local
        fits = room // (num_ranks * min(top_k, local))
        takes = f"at most {fits}" if fits > 0 else "no number of tokens fits"
        found.append(f"max_tokens_per_rank={max_tokens}: rows are numbered by int32; {takes}")
    return found


def _node_problems(
    api: Api, num_ranks: int, num_nodes: int, hidden: int, top_k: int, num_experts: int, fp8: bool
) -> list[str]:
    each, local = num_ranks // num_nodes, -(-num_experts // num_ranks)
    if not is_relayed(num_nodes):
        most = direct_ranks(api, hidden, top_k, num_ranks, num_experts, fp8)
        if num_ranks <= most:
            return []
        where = f"{counted(num_ranks, 'rank')} on {counted(num_nodes, 'node')}"
        fits = f"at most {most}" if most > 0 else "rows are too long for any"
        why = f"{where}: {fits}, a thread for each"
        if num_nodes > 1:
            why += f"; rows are relayed among {MAX_RELAYED_DOMAINS} nodes at most"
        return [why]
    found = []
    if each > MAX_RELAYED_RANKS:
        found.append(f"{each} ranks a node: at most {MAX_RELAYED_RANKS} where there are several")
    elif each + local > COUNTING_THREADS:
        most = COUNTING_THREADS - each
        found.append(f"{local} experts a rank: at most {most} with {each} ranks a node of several")
    return found


def mode_problems(config: DispatchConfig) -> list[str]:
    found = deepep.mode_problems(
        config, "sums in bfloat16 by where experts lie (its own deterministic=True only sorts rows)"
    )
    fills = getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    if torch.are_deterministic_algorithms_enabled() and fills:
        found.append(
            "torch.use_deterministic_algorithms with torch.utils.deterministic."
            "fill_uninitialized_memory: the library refuses both together; turn the latter off"
        )
    return found


def largest_tokens(api: Api, group: EPGroup, config: DispatchConfig, free: int) -> int:
    """The largest M whose buffer fits into `free` bytes (0: none)."""
    low, high = 0, config.max_tokens_per_rank
    while low < high:
        middle = (low + high + 1) // 2
        size = buffer_bytes(
            api,
            max_tokens=middle,
            hidden=config.hidden_size,
            top_k=config.top_k,
            fp8=config.wire is not WireFormat.MODEL,
            ranks=group.size,
            domain=group.ranks_per_node,
            relayed=is_relayed(group.num_nodes),
        )
        fits = size + api.workspace <= free
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
