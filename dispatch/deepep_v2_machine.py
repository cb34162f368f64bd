"""Can DeepEP's second API run on this machine: device, memory, NCCL, network, compiler.

Knows: what can be known before anything is allocated or connected. The library's own limits are
deepep_v2_limits.py's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dispatch.base import DispatchConfig
from dispatch.deepep_v2_limits import Api, buffer_bytes_for, largest_tokens
from dispatch.mib import mib
from dispatch.words import counted
from ep.group import EPGroup

GIN_PROXY = "2"  # NCCL_GIN_TYPE of network access through the host


def machine_problems(api: Api, group: EPGroup, config: DispatchConfig) -> list[str]:
    """Device, its memory, NCCL, the network, the compiler: nothing is allocated or connected."""
    size = buffer_bytes_for(api, group, config) + api.workspace
    if not torch.cuda.is_available():
        return [f"no CUDA device; the buffer needs {mib(size)} of one"]
    found = group_problems(group)
    free, _ = torch.cuda.mem_get_info()
    if size > free:
        most = largest_tokens(api, group, config, free)
        takes = f"at most {counted(most, 'token')}" if most else "none of even one token fits"
        found.append(
            f"max_tokens_per_rank={config.max_tokens_per_rank}: the buffer needs {mib(size)}, "
            f"{mib(free)} are free on the device; {takes}"
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
