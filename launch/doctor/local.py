"""All checks of one machine, in the order in which they are shown."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launch.doctor.check import Check, fails
from launch.doctor.compare import NodeReport
from launch.doctor.device import SECTION as CUDA
from launch.doctor.device import cuda_checks, told_once
from launch.doctor.gpu import gpu_checks, run_smi, torch_sees

if TYPE_CHECKING:
    from ep.group import EPGroup

DEFAULT_RANKS = 8  # for which dispatchers are asked
_OF_GPUS = ("GPU", "network cards", "libraries")


def local_checks(
    checkpoint: Path | None,
    num_ranks: int,
    tell: Callable[[str], None] = lambda what: None,
    job: EPGroup | None = None,
    device: str = "auto",
) -> list[Check]:
    """A part that breaks is itself a check that fails: the others still stand. job: the ranks that
    this process is one of. device: "cuda": what that needs fails where it is missing; "cpu": what
    is for GPUs alone is not looked at."""
    has_gpu = device != "cpu" and (bool(torch_sees()[1]) or any(Path("/dev").glob("nvidia[0-9]*")))
    wants_gpu = has_gpu or device == "cuda"
    parts: dict[str, Callable[[], Iterable[Check]]] = {
        "software": lambda: _software(),
        "host": lambda: _machine(),
        "GPU": lambda: gpu_checks(needed=device == "cuda"),
        CUDA: lambda: cuda_checks(1 if job is None else job.ranks_per_node),
        "network": lambda: _network(),
        "network cards": lambda: _rdma(has_gpu),
        "libraries": lambda: _libraries(has_gpu, wants_gpu),
        "dispatchers": lambda: _backends(num_ranks, checkpoint, has_gpu, job, wants_gpu),
    }
    if device == "cpu":
        parts = {name: part for name, part in parts.items() if name not in _OF_GPUS}
    if device != "cuda":
        del parts[CUDA]
    if checkpoint is not None:
        folder = checkpoint
        parts["checkpoint"] = lambda: _checkpoint(folder)
    found: list[Check] = []
    for section, part in parts.items():
        tell(section)
        try:
            found += part()
        except Exception as error:  # of the doctor itself: nothing may hide the other checks
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(fails(section, "doctor", "-", f"could not look: {said}", "report this"))
    return told_once(found)


def node_report(checkpoint: Path | None, job: EPGroup, device: str = "auto") -> NodeReport:
    """What this node says, and what it is compared by."""
    checks = local_checks(checkpoint, job.size, job=job, device=device)
    return NodeReport(socket.gethostname(), checks, values(checkpoint))


def values(checkpoint: Path | None) -> dict[str, str]:
    """By the names in `compare.MUST_MATCH`."""
    import torch

    from launch.doctor.libraries import look
    from launch.doctor.software import version_of
    from launch.version import HOME, commit_of

    libraries = look(False, os.environ)
    found = {
        "moeserve": f"{version_of('moeserve')}{commit_of(HOME)}",
        "python": ".".join(platform.python_version().split(".")[:2]),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "-",
        "NCCL": libraries.nccl_wheel or "-",
        "NVSHMEM": ".".join(map(str, libraries.nvshmem_wheel or ())) or "-",
    }
    said = run_smi("--query-gpu=driver_version,name", "--format=csv,noheader")
    if said:
        rows = [line.partition(",") for line in said.splitlines()]
        found["driver"] = rows[0][0].strip()
        found["GPU"] = ", ".join(sorted({f"{name.strip()}" for _, _, name in rows}))
        found["GPU"] = f"{len(rows)} x {found['GPU']}"
    if checkpoint is not None:
        from launch.doctor.checkpoint import fingerprint

        found["checkpoint"] = fingerprint(checkpoint) if checkpoint.is_dir() else "not there"
    return found


def _software() -> Iterator[Check]:
    from launch.doctor.software import software_checks

    return software_checks()


def _machine() -> Iterator[Check]:
    from launch.doctor.machine import machine_checks

    return machine_checks()


def _network() -> Iterator[Check]:
    from launch.doctor.network import network_checks

    return network_checks()


def _rdma(has_gpu: bool) -> Iterator[Check]:
    from launch.doctor.rdma import rdma_checks

    return rdma_checks(has_gpu=has_gpu, environ=os.environ)


def _libraries(has_gpu: bool, wants_gpu: bool) -> Iterator[Check]:
    from launch.doctor.libraries import library_checks, look

    return library_checks(look(has_gpu), wants_gpu)


def _backends(
    num_ranks: int, checkpoint: Path | None, has_gpu: bool, job: EPGroup | None, on_gpus: bool
) -> Iterator[Check]:
    from launch.doctor.backends import backend_checks

    return backend_checks(num_ranks, checkpoint, has_gpu, job, on_gpus)


def _checkpoint(folder: Path) -> Iterator[Check]:
    from launch.doctor.checkpoint import checkpoint_checks

    return checkpoint_checks(folder)
