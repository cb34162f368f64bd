"""TritonKernels: base.Kernels on a CUDA device, or on CPU tensors in Triton's interpreter.

Made of the kernels in this package: triton_dense.py chooses among GEMMs, triton_attention.py joins
MLA's. But for naive attention (fast mode, long prefill) nothing waits for the device, so a step can
be captured into a graph. Knows when these kernels can run and when not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.language import HAVE_TRITON, HOW_TO_GET_IT, INTERPRETED, triton
from models.deepseek.kernels.gpu.mla_adapters import MlaBackend
from models.deepseek.kernels.gpu.mla_rows import BLOCK_SIZES
from models.deepseek.kernels.gpu.triton_attention import TritonAttention

LEAST_CAPABILITY = (8, 9)  # the first with e4m3 in its matrix units


class TritonKernels(TritonAttention):
    name = "triton"
    fp8_is_fast = True
    block_sizes = BLOCK_SIZES  # of the paged cache

    def __init__(
        self,
        device: torch.device | str | None = None,
        decode_backends: Sequence[MlaBackend] = (),
        graphs: bool = False,
        gemms: Gemms | None = None,
        fast: bool = False,
    ) -> None:
        """device None: the current CUDA device (in the interpreter: cpu). The rest: see
        TritonAttention. KernelsUnavailable, with what is missing in words."""
        super().__init__(_usable(device), decode_backends, graphs, gemms, fast)
        self.description, self.build = _describe(self.device)


def _usable(device: torch.device | str | None) -> torch.device:
    """The device that kernels can run on here; KernelsUnavailable."""
    if not HAVE_TRITON:
        raise KernelsUnavailable(HOW_TO_GET_IT)
    if INTERPRETED:
        chosen = torch.device("cpu" if device is None else device)
        if chosen.type != "cpu":
            raise KernelsUnavailable(
                f"TRITON_INTERPRET is set: kernels are interpreted on cpu, not on {chosen}"
            )
        return chosen
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise KernelsUnavailable(
            f"triton kernels run on CUDA devices, not on {chosen} (TRITON_INTERPRET=1 interprets "
            "them there, very slowly)"
        )
    if not torch.cuda.is_available():
        raise KernelsUnavailable("triton kernels need CUDA: torch finds no CUDA device here")
    capability = torch.cuda.get_device_capability(chosen)
    if capability < LEAST_CAPABILITY:
        raise KernelsUnavailable(
            f"{torch.cuda.get_device_name(chosen)} has compute capability "
            f"{'.'.join(map(str, capability))}: triton kernels in e4m3 need "
            f"{'.'.join(map(str, LEAST_CAPABILITY))}"
        )
    return chosen


def _describe(device: torch.device) -> tuple[str, str]:
    """For people, and what decides the bits of results."""
    if device.type != "cuda":
        words = f"triton {triton.__version__}, interpreted"
        return words, words
    name = torch.cuda.get_device_name(device)
    words = f"triton {triton.__version__}, {name}"
    return words, words
