"""`moeserve doctor --device cuda`: what ranks on GPUs cannot do without, as checks that fail where
it is missing.

Knows the order in which one thing needs another. What is merely quicker with it (DeepEP, DeepGEMM)
is among the libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launch.doctor.check import Check, State, fails, ok

if TYPE_CHECKING:
    from moeserve.device.choose import Cuda

SECTION = "--device cuda"
_TORCH = "torch and GPUs"  # as among the GPUs
_ALSO = ("GPU", "libraries")  # sections that look at some of it
_BAD = (State.MISSING, State.OK, State.WARNING, State.FAILS)
DEVICES = ("auto", "cpu", "cuda")


def cuda_checks(ranks_here: int = 1) -> Iterator[Check]:
    """ranks_here: of a job on this machine, each of which has a device of its own."""
    from moeserve.device.choose import look

    cuda = look()
    yield device_check(cuda, ranks_here)
    yield triton_check()
    if cuda.count:
        yield _kernels()
    yield nccl_check()


def told_once(checks: Sequence[Check]) -> list[Check]:
    """What ranks on GPUs cannot do without is looked at for itself, too (GPUs, libraries): of two
    rows of a name the worse one stands, else the first section's, with what both found."""
    first = {check.name.casefold(): check for check in checks if check.section == SECTION}
    kept: dict[int, Check | None] = {}
    for at, check in enumerate(checks):
        ours = first.get(check.name.casefold())
        if ours is None or check.section not in _ALSO:
            continue
        if _BAD.index(check.state) > _BAD.index(ours.state):
            kept[_at(checks, ours)] = None
        else:
            kept[at] = None
            if check.state is ours.state is State.OK:
                kept[_at(checks, ours)] = replace(ours, found=check.found)
    told = [kept.get(at, check) for at, check in enumerate(checks)]
    return [check for check in told if check is not None]


def _at(checks: Sequence[Check], which: Check) -> int:
    return next(at for at, check in enumerate(checks) if check is which)


def device_check(cuda: Cuda, ranks_here: int) -> Check:
    """In the words in which `serve` refuses."""
    from moeserve.device.choose import no_cuda

    why = no_cuda(cuda, ranks_here)
    if why is None:
        return ok(SECTION, _TORCH, f"torch for CUDA {cuda.built} sees {cuda.count}")
    if cuda.built is None:
        found, remedy = "torch for the CPU", "install the build of this torch release for CUDA"
    else:
        found = f"torch for CUDA {cuda.built} sees {cuda.count or 'none'}"
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; update the driver"
        if cuda.count:
            remedy = f"at most {cuda.count} ranks on this machine"
        elif "system not yet initialized" in cuda.trouble:
            remedy = "start nvidia-fabricmanager, of the driver's version: NVSwitch needs it"
    return fails(SECTION, _TORCH, found, why, remedy)


def triton_check() -> Check:
    from models.deepseek.kernels.gpu.language import HAVE_TRITON, HOW_TO_GET_IT

    if HAVE_TRITON:
        return ok(SECTION, "triton", "installed", "GPU kernels are written in it")
    return fails(SECTION, "triton", "-", "GPU kernels are written in it", HOW_TO_GET_IT)


def nccl_check() -> Check:
    import torch.distributed as dist

    if dist.is_nccl_available():
        return ok(SECTION, "NCCL", "in torch", "ranks on GPUs exchange rows by it")
    return fails(
        SECTION,
        "NCCL",
        "-",
        "this torch is built without NCCL, by which ranks on GPUs exchange rows",
        "install torch for CUDA, which has it",
    )


def _kernels() -> Check:
    """As a rank chooses them on its device."""
    import torch

    from models.deepseek.kernels.select import create_kernels

    try:
        choice = create_kernels("triton", torch.device("cuda", 0))
    except Exception as error:  # a broken compiler may raise anything
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return fails(SECTION, "kernels", "-", said, "look at the message; --kernels torch is slow")
    return ok(SECTION, "kernels", choice.reason.removeprefix("kernels: "))
