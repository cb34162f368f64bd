"""The parts of `scripts/gpu_check.py` that measure: kernels, and an engine of V3's dimensions.

Each runs in a process of its own, shows its tables and says in lines and as JSON what came of it.
What is measured: models/deepseek/kernels/gpu/bench and launch/bench/engine_gpu.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Lines for a table, figures for a file. `not_measured` of these names what is missing.
Held = tuple[list[str], dict[str, Any]]
Keep = Callable[[Held], None]  # what there is so far


def run_kernels(device: torch.device, walk: bool, budget: float, keep: Keep) -> bool:
    """-> whether nothing raised. walk: tiny shapes, on a CPU, one of each kernel at least. budget:
    seconds. keep: all that was measured so far, behind each shape."""
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
            progress=progress, each_kernel=walk,
            keep=lambda so_far: keep((summary(so_far), so_far.as_json())),
        )  # fmt: skip
    finally:
        progress.close()
    keep((summary(report), report.as_json()))
    show(report)
    return not report.measured.failed


def run_engine(
    device: torch.device, walk: bool, budget: float, limits_file: Path | None, keep: Keep
) -> bool:
    """-> whether nothing raised. limits_file: what run_kernels left of the device's limits; None:
    measured now. keep: all that was measured so far, behind each phase."""
    from launch.bench.engine_gpu import EngineReport, cut_config, measure_engine, tiny_config
    from launch.bench.engine_gpu_show import V3_MODEL, lines, show_engine
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
        model = (
            f"a walk, a tiny model ({config.hidden_size} wide, {config.n_routed_experts} experts)"
        )
        kernels, fast = create_kernels("torch").kernels, None
    else:
        config, sizes, graphs = cut_config(layers_that_fit(device)), EngineSizes(), None
        model = V3_MODEL
        kernels = create_kernels("triton", device).kernels
        fast = create_kernels("triton", device, fast=True).kernels

    def kept(report: EngineReport) -> None:
        held = {
            "rows": [row.as_json() for row in report.rows],
            "model": model,
            "layers": config.num_hidden_layers,
            "notes": report.notes,
            "not_measured": report.left,
        }
        keep((lines(report), held))

    progress = StepProgress(True, stages=True)
    try:
        report = measure_engine(
            config, kernels, device, limits, sizes, 60.0 if walk else budget,
            fast_kernels=fast, graphs=graphs, progress=progress, keep=kept,
        )  # fmt: skip
    finally:
        progress.close()
    kept(report)  # with what is told last
    show_engine(report, device_name(device), config.num_hidden_layers, model)
    return not report.failed


def layers_that_fit(device: torch.device, layer: int = 12 << 30, beside: int = 20 << 30) -> int:
    """One dense layer and up to four with experts, by the memory that is free; one at least."""
    import torch

    free = torch.cuda.mem_get_info(device)[0]
    return 1 + max(1, min(4, (free - beside) // layer))
