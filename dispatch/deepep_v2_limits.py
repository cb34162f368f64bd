"""What DeepEP's second API is to us: where it is loaded, its limits, the size of its buffer.

Knows: facts about `ElasticBuffer` (2.0, 2.1) and `EPBuffer` (2.5), as plain numbers read in their
sources; what can be known of a machine before anything is made. Knows nothing of how the adapter
calls them. The first API and the import of `deep_ep` are deepep.py's.

Shape letters: D hidden, K top-k, P physical slots, R ranks, M max tokens a rank, U ranks that share
NVLink, S such groups (R = U * S), e local slots.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dispatch import deepep
from dispatch.base import DispatchConfig, WireFormat
from ep.group import EPGroup

MAX_RANKS = 1024
MAX_EXPERTS = 2048
MAX_TOP_K = 32
HIDDEN_STEP = 256  # combine moves rows in 32 lanes of 16 bytes
MAX_ROWS = 2**31 - 1  # rows are numbered by int32
ALIGNMENT = 2 * 2**20  # of the buffer, and what it is rounded up to
ROW_ALIGNMENT = 32  # bytes; of each part of a row in the buffer
CHANNELS = 1280  # between nodes: 160 multiprocessors of 8 channels
GIN_PROXY = "2"  # NCCL_GIN_TYPE of network access through the host


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
    "__init__": {"group", "num_bytes", "num_max_tokens_per_rank", "explicitly_destroy"},
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
        except Exception as error:  # a broken wheel may raise anything
            reasons.append(_why_absent(name, error))
            continue
        api = api_of(library)
        if api is not None:
            return library, api
        version = getattr(library, "__version__", "of unknown version")
        reasons.append(f"{name} {version} has neither ElasticBuffer (2.0) nor EPBuffer (2.5)")
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
    found, buffer = [], getattr(library, api.buffer)
    for method, names in used.items():
        taken = set(inspect.signature(getattr(buffer, method, None) or (lambda: None)).parameters)
        if names - taken:
            missing = ", ".join(sorted(names - taken))
            found.append(f"{api.buffer}.{method} takes no {missing}")
    return found


def _why_absent(name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return f"{name} is not installed"
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{name} cannot be imported: {said}"


# -- sizes --------------------------------------------------------------------------------------


def row_bytes(api: Api, hidden_bytes: int, scale_bytes: int, top_k: int, dispatch: bool) -> int:
    """A row in the buffer, which is as it travels: values, scales, picks and weights; on the way
    there also where it comes from."""
    around = 8 * top_k + (4 * (1 + top_k) if dispatch else 0)
    parts = (hidden_bytes, scale_bytes, around)
    return _round_up(sum(_round_up(part, ROW_ALIGNMENT) for part in parts), api.row_step)


def buffer_bytes(
    api: Api,
    *,
    max_tokens: int,
    hidden: int,
    top_k: int,
    fp8: bool,
    ranks: int,
    domain: int,
    multiple_reduction: bool = True,
) -> int:
    """What `get_buffer_size_hint` gives. domain: ranks that share NVLink; as many as `ranks`:
    direct, else by way of a rank of the own domain (hybrid). top_k 0 counts as 32."""
    top_k = top_k or MAX_TOP_K
    scales = 4 * -(-hidden // 32) if fp8 else 0  # room for a scale of 32 channels
    there = row_bytes(api, hidden if fp8 else 2 * hidden, scales, top_k, True)
    back = row_bytes(api, 2 * hidden, 0, top_k, False)
    groups = ranks // domain
    if groups == 1:
        dispatch = ranks * max_tokens * there
        combine = (min(ranks, top_k) if multiple_reduction else top_k) * max_tokens * back
    else:
        relayed = max_tokens + CHANNELS
        dispatch = (domain * groups * max_tokens + max_tokens + groups * relayed) * there
        near, far = (min(n, top_k) if multiple_reduction else top_k for n in (domain, groups))
        sent = (1 if multiple_reduction else top_k) * groups * relayed
        combine = (near * groups * max_tokens + sent + far * max_tokens) * back
    return _round_up(max(dispatch, combine), ALIGNMENT)


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
    )


def expanded_rows(ranks: int, max_tokens: int, top_k: int, local: int, alignment: int) -> int:
    """The most rows that a rank may get, one for each (token, slot), each slot's part aligned."""
    rows = ranks * max_tokens * min(top_k, local) + (alignment - 1) * local
    return _round_up(rows, alignment)


# -- what speaks against it ---------------------------------------------------------------------


def problems(
    api: Api,
    *,
    num_ranks: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    max_tokens: int,
    alignment: int,
) -> list[str]:
    """Limits of the library: each with the number and the largest (or nearest) valid value."""
    found = []
    if num_ranks > MAX_RANKS:
        found.append(f"{num_ranks} ranks: at most {MAX_RANKS}")
    if not 1 <= top_k <= MAX_TOP_K:
        found.append(f"top_k={top_k}: valid are 1..{MAX_TOP_K}")
    if hidden % HIDDEN_STEP:
        below = hidden // HIDDEN_STEP * HIDDEN_STEP
        near = f"{below} or {below + HIDDEN_STEP}" if below else f"{HIDDEN_STEP}"
        found.append(f"hidden_size={hidden}: a multiple of {HIDDEN_STEP}, such as {near}")
    found += deepep.division_problems(num_experts, num_ranks)
    local, most = -(-num_experts // num_ranks), api.max_local_experts
    if num_experts > MAX_EXPERTS:
        found.append(f"num_physical_experts={num_experts}: at most {MAX_EXPERTS}")
    if local > most:
        found.append(
            f"{local} experts a rank: at most {most}, so num_physical_experts <= {num_ranks * most}"
        )
    if max_tokens < 1:
        found.append(f"max_tokens_per_rank={max_tokens}: must be at least 1")
    elif expanded_rows(num_ranks, max_tokens, top_k, local, alignment) > MAX_ROWS:
        room = MAX_ROWS // alignment * alignment - (alignment - 1) * local
        fits = room // (num_ranks * min(top_k, local))
        found.append(
            f"max_tokens_per_rank={max_tokens}: rows are numbered by int32; at most {fits}"
        )
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


def machine_problems(api: Api, group: EPGroup, config: DispatchConfig) -> list[str]:
    """Device, its memory, NCCL, the network, the compiler: nothing is allocated or connected."""
    size = buffer_bytes_for(api, group, config) + api.workspace
    if not torch.cuda.is_available():
        return [f"no CUDA device; the buffer needs {size} bytes of one"]
    found = group_problems(group)
    free, _ = torch.cuda.mem_get_info()
    if size > free:
        most = largest_tokens(api, group, config, free)
        found.append(
            f"max_tokens_per_rank={config.max_tokens_per_rank}: the buffer needs {size} bytes, "
            f"{free} are free on the device; at most {most} tokens"
        )
    loaded: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    found += nccl_problems(api, loaded)
    found += network_problems(group.num_nodes, os.environ)
    return found + compiler_problems(api, os.environ)


def group_problems(group: EPGroup) -> list[str]:
    if group.device_group is None:
        return ["needs an NCCL process group; one rank by itself has none"]
    backend = dist.get_backend(group.device_group)
    if "nccl" not in backend:
        return [f"the ranks' group is of {backend}: must be of NCCL, whose communicator it uses"]
    return []


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
        )
        fits = size + api.workspace <= free
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def nccl_problems(api: Api, loaded: tuple[int, ...]) -> list[str]:
    if tuple(loaded[:3]) >= api.nccl:
        return []
    have, need = (".".join(map(str, version)) for version in (loaded, api.nccl))
    return [f"NCCL {have} is loaded: {api.buffer} needs {need} or newer"]


def network_problems(num_nodes: int, environment: Any) -> list[str]:
    """Between nodes the GPUs themselves must reach the network (GIN). Which kind NCCL takes is
    known only once it is connected; what the environment rules out is known before."""
    if num_nodes == 1:
        return []
    found = []
    if environment.get("EP_DISABLE_GIN", "0") not in ("", "0"):
        found.append(f"EP_DISABLE_GIN is set: {num_nodes} nodes cannot do without GIN")
    if environment.get("NCCL_GIN_ENABLE", "1") == "0":
        found.append("NCCL_GIN_ENABLE=0: rows travel between nodes by GIN")
    if environment.get("NCCL_GIN_TYPE") == GIN_PROXY:
        found.append(
            f"NCCL_GIN_TYPE={GIN_PROXY} (proxy): refuses the library's queue depth of 1024; "
            "unset it, the GPU must reach the network by itself"
        )
    if not Path("/dev/infiniband").is_dir():
        found.append("/dev/infiniband is missing: no RDMA device between the nodes")
    return found


def compiler_problems(api: Api, environment: Any) -> list[str]:
    """Kernels are compiled as they are first used."""
    nvcc = find_nvcc(environment)
    try:
        said = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        kind = type(error).__name__
        return [f"kernels are compiled at run time: {nvcc} cannot be run ({kind}); set CUDA_HOME"]
    found = re.search(r"release (\d+)\.(\d+)", said)
    if api.nvcc is None or found is None:
        return []
    version = (int(found[1]), int(found[2]))
    if version >= api.nvcc:
        return []
    have, need = (".".join(map(str, v)) for v in (version, api.nvcc))
    return [f"{nvcc} is of CUDA {have}: {api.buffer} needs {need} or newer"]


def find_nvcc(environment: Any) -> str:
    """Where the library looks for it: the compiler asked for, CUDA_HOME, CUDA_PATH, the path."""
    asked = environment.get("EP_JIT_NVCC_COMPILER")
    if asked:
        return str(asked)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            return str(Path(environment[name]) / "bin" / "nvcc")
    return shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
