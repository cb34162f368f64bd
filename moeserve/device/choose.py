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
        if not torch.cuda.is_available():
            return Cuda(built, 0, "torch finds no CUDA device (driver, CUDA_VISIBLE_DEVICES?)")
        return Cuda(built, torch.cuda.device_count())
    except Exception as error:  # whatever a broken driver raises
        return Cuda(built, 0, str(error).splitlines()[0] if str(error) else type(error).__name__)


def choose_device(asked: str, cuda: Cuda, rank: int, ranks_here: int) -> DeviceChoice:
    """asked: `engine.device`. rank: of the job; each of the ranks_here of a machine has a device of
    its own. DeviceUnavailable."""
    if asked == "cpu":
        return DeviceChoice(torch.device("cpu"), "device: cpu (asked for)")
    why = _why_not(cuda, ranks_here)
    if why is None:
        number = rank % ranks_here
        how = "asked for" if asked == "cuda" else "auto"
        return DeviceChoice(torch.device("cuda", number), f"device: cuda, one a rank ({how})")
    if asked == "cuda":
        raise DeviceUnavailable(why)
    return DeviceChoice(torch.device("cpu"), f"device: cpu (auto: {why})")


def _why_not(cuda: Cuda, ranks_here: int) -> str | None:
    if cuda.built is None:
        return (
            "torch is built without CUDA; install torch for CUDA (moeserve doctor says which the "
            "driver can run), or use --device cpu"
        )
    if cuda.count == 0:
        return f"{cuda.trouble or 'no CUDA device is seen'}; use --device cpu where there is none"
    if cuda.count < ranks_here:
        devices = "device is" if cuda.count == 1 else "devices are"
        return (
            f"{ranks_here} ranks here and {cuda.count} CUDA {devices} seen, each rank has one; at "
            f"most {cuda.count} a machine, or use --device cpu"
        )
    return None
