"""NVSHMEM as torch uses it: is it there, which version, how it starts, what reaches other nodes.

The one file that imports `nvshmem` and torch's symmetric memory. Knows the libraries' names and
versions. Knows nothing of tokens.

Starting: torch bootstraps NVSHMEM over its own store at the first symmetric tensor. Where
nvshmem4py is installed it is done here first, by a unique id sent over the CPU group, with the
versions compared on all ranks; torch then finds it started. It is never ended before the process
is: torch remembers that it once started, and would not start it again.

DeepEP's first API starts NVSHMEM by itself, with other settings, and hangs with 3.5.19 and later;
that is its own affair (`dispatch.deepep`): the kernels used here have no such limit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dispatch.base import DispatchError
from dispatch.mib import mib
from dispatch.words import raised
from ep.group import EPGroup, gather_objects

_OPERATORS = {  # and what tells today's parameters from those of earlier releases
    "all_to_all_vdev_2d": "out_splits_offsets",
    "all_to_all_vdev_2d_offset": "in_splits_offsets",
}
_HOST_LIBRARY = "libnvshmem_host.so.3"
# Only torch after pull request 192300 has a kernel of this name (`race_problems`).
_FIXED_KERNEL = b"writeOutputOffsets_2d"

Version = tuple[int, ...]


class TorchSymmetricMemory:
    """torch's calls under the names that the emulation has too. device: where tensors are."""

    device = "cuda"

    def __init__(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.set_backend = symm_mem.set_backend
        self.get_backend = symm_mem.get_backend
        self.empty = symm_mem.empty
        self.rendezvous = symm_mem.rendezvous
        self.all_to_all_vdev_2d = torch.ops.symm_mem.all_to_all_vdev_2d
        self.all_to_all_vdev_2d_offset = torch.ops.symm_mem.all_to_all_vdev_2d_offset


def why_absent() -> str | None:
    """Why torch cannot do it here, in one line; None: it can. Starts nothing."""
    here = f"torch {torch.__version__}"
    try:
        import torch.distributed._symmetric_memory as symm_mem

        missing = [name for name, parameter in _OPERATORS.items() if not _takes(name, parameter)]
        if missing:
            return f"{here}: has no symm_mem.{', '.join(missing)} as of torch 2.13"
        if torch.version.cuda is None:
            return f"{here}: built without CUDA, hence without NVSHMEM"
        if not symm_mem.is_nvshmem_available():
            return f"{here}: cannot load {_HOST_LIBRARY} (package nvidia-nvshmem-cu13)"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken build may raise anything
        return f"{here}: symmetric memory cannot be imported: {raised(error)}"
    return None


def _takes(operator: str, parameter: str) -> bool:
    found = getattr(torch.ops.symm_mem, operator, None)
    return found is not None and parameter in {a.name for a in found.default._schema.arguments}


def select_backend(library: Any) -> None:
    """Symmetric tensors come from NVSHMEM: a choice of the process, made before the first of them.
    DispatchError if they come from elsewhere already."""
    chosen = library.get_backend("cuda")
    if chosen == "NVSHMEM":
        return
    try:
        library.set_backend("NVSHMEM")
    except RuntimeError as error:
        raise DispatchError(
            f"dispatcher 'nvshmem': symmetric memory is {chosen}'s in this process, must be "
            f"NVSHMEM's: {raised(error)}"
        ) from None


# -- versions -----------------------------------------------------------------------------------


def wheel_version() -> Version | None:
    """Of the package beside torch; None where it came by another way."""
    for name in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"):
        try:
            return parse_version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def loaded_version() -> Version | None:
    """Of the host library that this process has loaded; None: none, or it does not say."""
    try:
        library = ctypes.CDLL(_HOST_LIBRARY, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
        parts = [ctypes.c_int() for _ in range(3)]
        library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, parts))
    except (OSError, AttributeError):
        return None
    return tuple(part.value for part in parts)


def parse_version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def version_problems(wheel: Version | None, loaded: Version | None) -> list[str]:
    """Host and device code are of one release, or calls between them go wrong."""
    if wheel is None or loaded is None or wheel == loaded[: len(wheel)]:
        return []
    return [
        f"NVSHMEM {_dotted(loaded)} is loaded, the package is {_dotted(wheel)}: both must be one "
        "release (is another copy on LD_LIBRARY_PATH?)"
    ]


def race_problems(race: bool | None) -> list[str]:
    """A block of the operators writes output offsets where slower blocks have yet to read input
    offsets, which then fetch other rows than they should."""
    if not race:
        return []
    return [
        f"the all-to-alls of torch {torch.__version__} may fetch wrong rows (a race that torch's "
        "pull request 192300 of August 2026 removed): needs a later release"
    ]


def offsets_race(folder: Path | None = None) -> bool | None:
    """Whether this torch has that race; None: cannot be told."""
    path = (folder or Path(torch.__file__).parent / "lib") / "libtorch_nvshmem.so"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(_FIXED_KERNEL) < 0
    except (OSError, ValueError):
        return None


# -- machine ------------------------------------------------------------------------------------


def device_problems(size: int, ranks_per_node: int) -> list[str]:
    """Device, its free memory against `size` bytes, what reaches its neighbours. Allocates
    nothing."""
    if not torch.cuda.is_available():
        return [f"no CUDA device; symmetric buffers need {mib(size)} of one"]
    found = []
    free, _ = torch.cuda.mem_get_info()
    if size > free:
        found.append(f"symmetric buffers need {mib(size)}, {mib(free)} are free on the device")
    me, visible = torch.cuda.current_device(), torch.cuda.device_count()
    if visible >= ranks_per_node:  # else each rank sees its own only, and nothing can be asked
        far = [
            i
            for i in range(ranks_per_node)
            if i != me and not torch.cuda.can_device_access_peer(me, i)
        ]
        if far:
            found.append(f"device {me} cannot reach memory of devices {far} of its node")
    return found


def heap_problems(size: int, environment: dict[str, str]) -> list[str]:
    """Where the heap cannot grow (NVSHMEM_DISABLE_CUDA_VMM=1) it has the size that is set."""
    if environment.get("NVSHMEM_DISABLE_CUDA_VMM", "0") in ("", "0", "false"):
        return []
    text = environment.get("NVSHMEM_SYMMETRIC_SIZE", "1G")
    heap = _bytes(text)
    if heap is None or heap >= size:
        return []
    return [
        f"NVSHMEM_SYMMETRIC_SIZE={text} with NVSHMEM_DISABLE_CUDA_VMM=1: symmetric buffers need "
        f"{mib(size)}; set {size + 2**26} or more"
    ]


def node_problems(num_nodes: int, environment: dict[str, str], root: Path = Path("/")) -> list[str]:
    """More than one node: rows travel by RDMA, posted by the GPU (IBGDA) or for it by the host
    (ibrc). What can be known without starting either."""
    if num_nodes == 1:
        return []
    if environment.get("NVSHMEM_REMOTE_TRANSPORT", "ibrc").lower() == "none":
        return [f"{num_nodes} nodes: NVSHMEM_REMOTE_TRANSPORT=none; must be ibrc or ibgda"]
    adapters = root / "sys/class/infiniband"
    if not adapters.is_dir() or not any(adapters.iterdir()):
        return [f"{num_nodes} nodes: no RDMA adapter ({adapters} is empty)"]
    if not (root / "dev/infiniband").is_dir():
        return [f"{num_nodes} nodes: no {root / 'dev/infiniband'}; pass it into the container"]
    return []


def transport(num_nodes: int, environment: dict[str, str]) -> str:
    """How rows travel, in words."""
    if num_nodes == 1:
        return "on one node"
    wanted = environment.get("NVSHMEM_REMOTE_TRANSPORT", "").lower()
    ibgda = wanted == "ibgda" or environment.get("NVSHMEM_IB_ENABLE_IBGDA", "0") == "1"
    return f"{num_nodes} nodes by {'IBGDA' if ibgda else wanted or 'ibrc'}"


# -- start --------------------------------------------------------------------------------------


def load_core() -> Any | None:
    """nvshmem4py, or None where it is not installed or cannot be loaded."""
    try:
        import nvshmem.core as core
    except KeyboardInterrupt:
        raise
    except BaseException:  # a missing driver raises errors of its own
        return None
    return core


def start(group: EPGroup, core: Any | None, device: Any = None) -> str:
    """Collective over the CPU group -> a line that says by whom NVSHMEM is started.

    core: nvshmem4py. device: for its `init`; None: the current one. DispatchError, on every rank
    alike, where ranks have different versions.
    """
    mine = None if core is None else str(core.get_version().libnvshmem_version)
    everyone = gather_objects(group, mine)
    if len(set(everyone)) > 1:
        told = ", ".join(f"rank {rank}: {said or 'none'}" for rank, said in enumerate(everyone))
        raise DispatchError(f"dispatcher 'nvshmem': nvshmem4py must be the same everywhere; {told}")
    if core is None:
        return "NVSHMEM is started by torch (nvshmem4py is not installed)"
    if group.size != dist.get_world_size():
        # torch counts processing elements by the ranks of the whole job.
        return "NVSHMEM is started by torch (experts are on some of the job's ranks only)"
    if _running(core):
        return f"NVSHMEM {mine} was running"
    said: list[Any] = [core.get_unique_id(empty=group.rank != 0)]
    if group.cpu_group is not None:
        first = dist.get_global_rank(group.cpu_group, 0)
        dist.broadcast_object_list(said, src=first, group=group.cpu_group)
    try:
        core.init(
            device=_cuda_device() if device is None else device,
            uid=said[0],
            rank=group.rank,
            nranks=group.size,
            initializer_method="uid",
        )
    except Exception as error:  # nvshmem4py has errors of its own
        raise DispatchError(
            f"dispatcher 'nvshmem': NVSHMEM {mine} does not start: {raised(error)}"
        ) from error
    return f"NVSHMEM {mine} started by nvshmem4py, unique id over the CPU group"


def _running(core: Any) -> bool:
    status = getattr(core, "init_status", None)
    states = getattr(core, "InitStatus", None)
    if status is None or states is None:
        return False
    return bool(status() == states.STATUS_IS_INITIALIZED)


def _cuda_device() -> Any:
    try:
        from cuda.core import Device
    except ImportError:
        from cuda.core.experimental import Device
    device = Device(torch.cuda.current_device())
    device.set_current()
    return device


def _bytes(text: str) -> int | None:
    """ "512", "1.5G" -> bytes; None: cannot be read."""
    unit = {"k": 10, "m": 20, "g": 30, "t": 40}.get(text[-1:].lower())
    try:
        return int(float(text[:-1]) * 2**unit) if unit else int(text)
    except ValueError:
        return None


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
