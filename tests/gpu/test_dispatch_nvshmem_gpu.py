"""torch's symmetric memory on real devices: versions agree, and two GPUs exchange what the twin
says, eagerly, two layers in flight, and replayed from a captured graph.

What can also runs with `cpu` for device, on the emulation, so that no line of it runs first on a
GPU. Run as a script this file is the ranks (gloo_ranks.py), one for each of two devices.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import fork_ranks, run_ranks
from torch import Tensor

from dispatch import nvshmem_library
from dispatch.base import CombineForm, DispatchConfig, Fp8Tokens, Received, WireFormat
from dispatch.fp8 import dequantise, quantise
from dispatch.nvshmem import EmulatedSymmetricDispatcher, SymmetricDispatcher
from dispatch.selfcheck import CheckCase, expected, expert_output, make_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
ON_CPU = pytest.param("cpu", marks=pytest.mark.dist)
RANKS, EXPERTS = 2, 16
TOKENS = [48, 17]  # of each rank


def config_for(wire: WireFormat) -> DispatchConfig:
    return DispatchConfig(2048, 4, EXPERTS, 64, torch.bfloat16, deterministic=True, wire=wire)


@pytest.mark.gpu
@no_gpu
def test_one_device_is_refused_with_a_reason() -> None:
    answer = SymmetricDispatcher.probe(EPGroup.single(), config_for(WireFormat.MODEL))
    assert not answer.ok and "needs two ranks or more" in answer.reason


@pytest.mark.gpu
@no_gpu
def test_host_library_and_package_are_of_one_release() -> None:
    if nvshmem_library.why_absent() is not None:
        pytest.skip(str(nvshmem_library.why_absent()))
    wheel, loaded = nvshmem_library.wheel_version(), nvshmem_library.loaded_version()
    print(f"NVSHMEM package {wheel}, loaded {loaded}, race {nvshmem_library.offsets_race()}")
    assert nvshmem_library.version_problems(wheel, loaded) == []


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
def test_two_devices_exchange_what_the_twin_says(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices: torch makes no NVSHMEM team of one")
    (tmp_path / "device").write_text(device)
    for rank, report in enumerate(run_ranks(__file__, RANKS, tmp_path, timeout=240)):
        if report["refused"]:
            pytest.skip(report["refused"])
        print(rank, report["notes"])
        assert report["found"] == [], rank


# -- as a script: the ranks ----------------------------------------------------------------------


def body(group: EPGroup, folder: Path) -> dict[str, Any]:
    kind: type[SymmetricDispatcher] = EmulatedSymmetricDispatcher
    if (folder / "device").read_text() == "cuda":
        kind = SymmetricDispatcher
        torch.cuda.set_device(group.rank)
        torch.empty(1, device="cuda")  # NVSHMEM wants a device context
    report: dict[str, Any] = {"refused": "", "notes": [], "found": []}
    for wire in WireFormat:
        config = config_for(wire)
        answer = kind.probe(group, config)
        if not answer.ok:
            return {**report, "refused": answer.reason}
        d = kind.open(group, config)
        report["notes"] = [answer.reason, *d.notes]
        found = [*eager(d, group.rank), *in_flight(d, group.rank)]
        found += [] if kind.emulate else captured(d, group.rank)
        report["found"] += [f"{wire.value}: {what}" for what in found]
        d.close()
    return report


def work(d: SymmetricDispatcher, seed: int) -> CheckCase:
    placement = ExpertPlacement.trivial(1, EXPERTS, RANKS)
    tokens = TOKENS if seed % 2 else [0, 64]
    return make_case(d.config, placement, tokens, seed, masked=0.2)


def device_of(d: SymmetricDispatcher) -> str:
    return "cpu" if d.emulate else "cuda"


def picks(d: SymmetricDispatcher, case: CheckCase, rank: int) -> tuple[Tensor, Tensor]:
    """slots, weights on the device."""
    return case.slots[rank].to(device_of(d)), case.weights[rank].to(device_of(d))


def rows_of(d: SymmetricDispatcher, case: CheckCase, rank: int) -> tuple[Tensor | Fp8Tokens, Any]:
    """What is sent, on the device; what must come home, where rows are rounded as sent."""
    x, wire = case.xs[rank].to(device_of(d)), d.config.wire
    if wire is WireFormat.MODEL:
        return x, expected(case, CombineForm.PAIRS)[1][rank]
    return quantise(x, wire), expected(case, CombineForm.PAIRS, wire)[1][rank]


def experts(d: SymmetricDispatcher, received: Received, rank: int) -> Tensor:
    """No look at any value: this is captured too."""
    x = received.x
    if received.scales is not None:
        x = dequantise(x, received.scales, received.scale_format, d.config.dtype)
    expert = received.slots[:, 0].clamp(min=0).to(torch.int64) + rank * EXPERTS // RANKS
    return expert_output(x, expert)


def layer(d: SymmetricDispatcher, x: Any, slots: Tensor, weights: Tensor, rank: int) -> Tensor:
    handle = d.dispatch_start(x, slots, weights)
    d.combine_start(handle, experts(d, d.dispatch_finish(handle), rank))
    return d.combine_finish(handle)


def eager(d: SymmetricDispatcher, rank: int) -> list[str]:
    found = []
    for seed in range(4 if d.emulate else 50):
        case = work(d, seed)
        x, want = rows_of(d, case, rank)
        home = layer(d, x, *picks(d, case, rank), rank)
        if not torch.equal(home.cpu(), want):
            found.append(f"step {seed}: {float((home.cpu() - want).abs().max())}")
    return found


def in_flight(d: SymmetricDispatcher, rank: int) -> list[str]:
    cases = [work(d, seed) for seed in (1, 2)]
    sent = [rows_of(d, case, rank) for case in cases]
    handles = [
        d.dispatch_start(x, *picks(d, case, rank)) for case, (x, _) in zip(cases, sent, strict=True)
    ]
    for handle in handles:
        d.combine_start(handle, experts(d, d.dispatch_finish(handle), rank))
    homes = [d.combine_finish(handle).cpu() for handle in handles]
    wrong = [i for i, (_, want) in enumerate(sent) if not torch.equal(homes[i], want)]
    return [f"in flight: layer {i}" for i in wrong]


def captured(d: SymmetricDispatcher, rank: int) -> list[str]:
    """A graph of one layer, replayed with other tokens in the same places."""
    case = work(d, 1)
    (x, _), (slots, weights) = rows_of(d, case, rank), picks(d, case, rank)
    layer(d, x, slots, weights, rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        home = layer(d, x, slots, weights, rank)
    found = []
    for seed in (1, 3, 5):
        case = work(d, seed)
        new, want = rows_of(d, case, rank)
        for mine, given in zip(_parts(x), _parts(new), strict=True):
            mine.copy_(given)
        slots.copy_(case.slots[rank])
        weights.copy_(case.weights[rank])
        graph.replay()
        if not torch.equal(home.cpu(), want):
            found.append(f"replay {seed}")
    return found


def _parts(x: Tensor | Fp8Tokens) -> list[Tensor]:
    return [x.values.view(torch.uint8), x.scales] if isinstance(x, Fp8Tokens) else [x]


if __name__ == "__main__":
    sys.exit(fork_ranks(body))
