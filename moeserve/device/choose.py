"""Which device a rank computes on: asked for or found, said before any weight is read.

Knows what torch says of CUDA here. Deciding is pure; what is where else is `launch/doctor`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

NAMES = ("auto", "cpu", "cuda")


class DeviceUnavailable(ValueError):
    """The device that was asked for cannot be had: why, and what would be valid."""


@dataclass(frozen=True)
class Cuda:
    """built: the CUDA release that torch was built for, None: none. count: of devices that this
    process sees. trouble: why there are none, where torch is built for them."""

    built: str | None
    count: int
    trouble: str = ""


@dataclass(frozen=True)
class DeviceChoice:
    """note: what was chosen and why, to be printed once."""

    device: torch.device
    note: str

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def free_bytes(self, ranks_here: int) -> tuple[int, int]:
        """Where its memory is: what is available now, and how many ranks share it."""
        if self.on_cpu:
            return psutil.virtual_memory().available, ranks_here
        return torch.cuda.mem_get_info(self.device)[0], 1


def look() -> Cuda:
    """What there is; a driver that raises is no device, with its reason."""
    built = torch.version.cuda
    if built is None:
        return Cuda(None, 0)
    try:
        if torch.cuda.is_available():
            return Cuda(built, torch.cuda.device_count())
        torch.cuda.init()  # type: ignore[no-untyped-call]  # says why, which is_available does not
    except Exception as error:  # whatever torch or a broken driver raises
        return Cuda(built, 0, str(error).splitlines()[0] if str(error) else type(error).__name__)
    return Cuda(built, 0)


def choose_device(asked: str, cuda: Cuda, rank: int, ranks_here: int) -> DeviceChoice:
    """asked: `engine.device`. rank: of the job; each of the ranks_here of a machine has a device of
    its own. DeviceUnavailable."""
    if asked == "cpu":
        return DeviceChoice(torch.device("cpu"), "device: cpu (asked for)")
    why = no_cuda(cuda, ranks_here)
    if why is None:
        number = rank % ranks_here
        how = "asked for" if asked == "cuda" else "auto"
        return DeviceChoice(torch.device("cuda", number), f"device: cuda, one a rank ({how})")
    if asked == "cuda":
        raise DeviceUnavailable(refused(why))
    return DeviceChoice(torch.device("cpu"), f"device: cpu (auto: {why})")


def no_cuda(cuda: Cuda, ranks_here: int = 1) -> str | None:
    """Why so many ranks of a machine cannot have a CUDA device each; None: they can."""
    if cuda.built is None:
        return "torch is built without CUDA"
    if cuda.count == 0:
        return "torch finds no CUDA device" + (f" ({cuda.trouble})" if cuda.trouble else "")
    if cuda.count < ranks_here:
        devices = "device is" if cuda.count == 1 else "devices are"
        return (
            f"{ranks_here} ranks here and {cuda.count} CUDA {devices} seen, each rank has one; at "
            f"most {cuda.count} a machine"
        )
    return None


def refused(why: str, instead: str = "or use --device cpu") -> str:
    """The words in which every command refuses `--device cuda`, for a reason of `no_cuda`."""
    return f"{why}; moeserve doctor --device cuda says what is missing, {instead}"
