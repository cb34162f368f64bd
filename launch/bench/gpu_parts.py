"""The parts of `scripts/gpu_check.py` that measure: kernels, and an engine of V3's dimensions.

Each runs in a process of its own, shows its tables and says in lines and as JSON what came of it.
What is measured: models/deepseek/kernels/gpu/bench and launch/bench/engine_gpu.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Outcome = tuple[list[str], dict[str, Any], bool]  # lines, figures, whether something raised


def run_kernels(device: torch.device, walk: bool, budget: float) -> Outcome:
    """walk: tiny shapes, on a CPU. budget: seconds."""
    from launch.bench.kernels_gpu import measure_kernels, show, summary
    from launch.bench.steps import StepProgress
    from models.deepseek.kernels.gpu.bench.clock import make_clock
    from models.deepseek.kernels.gpu.bench.limits import measure_limits
    from models.deepseek.kernels.gpu.bench.sizes import TINY, V3

    clock = make_clock(device)
    sizes = {"copy_bytes": 1 << 20, "side": 64} if walk else {}
    limits = measure_limits(clock, device, **sizes)
    progress = StepProgress(True, unit=" shapes")
    try:
        report = measure_kernels(
            device, TINY if walk else V3, budget, clock=clock, limits=limits,
            progress=progress,
        )  # fmt: skip
    finally:
        progress.close()
    show(report)
    return summary(report), report.as_json(), bool(report.measured.failed)


def run_engine(
    device: torch.device, walk: bool, budget: float, limits_file: Path | None
) -> Outcome:
    """limits_file: what run_kernels left of the device's limits; None: measured now."""
    from launch.bench.engine_gpu import cut_config, measure_engine, tiny_config
    from launch.bench.engine_gpu_show import lines, show_engine
    from launch.bench.engine_gpu_steps import EngineSizes
    from launch.bench.kernels_gpu import device_name
    from launch.bench.steps import StepProgress
    from models.deepseek.kernels.gpu.bench.clock import make_clock
    from models.deepseek.kernels.gpu.bench.limits import Limits, measure_limits
    from models.deepseek.kernels.select import create_kernels

    if limits_file is not None:
        limits = Limits(**json.loads(limits_file.read_text())["limits"])
    elif walk:
        limits = Limits(1e10, 1e10, 1e10, "none", 1e-6)
    else:
        limits = measure_limits(make_clock(device), device)
    if walk:
        from moeserve.device.api import ReplayedApi

        config, sizes, graphs = tiny_config(), EngineSizes.tiny(), ReplayedApi
        kernels, fast = create_kernels("torch").kernels, None
    else:
        config, sizes, graphs = cut_config(layers_that_fit(device)), EngineSizes(), None
        kernels = create_kernels("triton", device).kernels
        fast = create_kernels("triton", device, fast=True).kernels
    progress = StepProgress(True, stages=True)
    try:
        report = measure_engine(
            config, kernels, device, limits, sizes, 60.0 if walk else budget,
            fast_kernels=fast, graphs=graphs, progress=progress,
        )  # fmt: skip
    finally:
        progress.close()
    show_engine(report, device_name(device), config.num_hidden_layers)
    held = {
        "rows": [row.as_json() for row in report.rows],
        "layers": config.num_hidden_layers,
        "notes": report.notes,
        "not_measured": report.left,
    }
    return lines(report), held, bool(report.failed)


def layers_that_fit(device: torch.device, layer: int = 12 << 30, beside: int = 20 << 30) -> int:
    """One dense layer and up to four with experts, by the memory that is free; one at least."""
    import torch

    free = torch.cuda.mem_get_info(device)[0]
    return 1 + max(1, min(4, (free - beside) // layer))
