"""DeepEP's second API on a real device: its signatures are the emulation's; a GPU sends to itself,
in all four forms, and replays a captured layer. What can also runs on the emulation (`cpu`), so
that no line of it runs first on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.base import CombineForm, DispatchConfig, Layout, WireFormat
from dispatch.deepep_v2 import ElasticDispatcher, EmulatedElasticDispatcher
from dispatch.emulation.signatures import read_signatures
from dispatch.emulation.signatures_elastic import ELASTIC_SIGNATURES
from dispatch.fp8 import dequantise
from dispatch.selfcheck import CheckCase, expected, expert_output, make_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
DEVICES = pytest.mark.parametrize("device", ["cpu", ON_GPU], indirect=True)
EXPERTS, MOST = 16, 64

# Package -> its folder, then file and class of what the tables describe.
SOURCES: dict[str, tuple[str, str, dict[str, str]]] = {
    "sgl-deep-ep": (
        "deep_ep",
        "2.1.0",
        {"ElasticBuffer": "buffers/elastic.py", "EPHandle": "buffers/elastic.py"},
    ),
    "sgl-deep-ep-v25": (
        "deep_ep_v25",
        "2.5.0",
        {
            "EPBuffer": "buffers/ep.py",
            "EPHandle": "buffers/ep.py",
            "EventOverlap": "utils/event.py",
        },
    ),
}


def config_for(wire: WireFormat) -> DispatchConfig:
    return DispatchConfig(2048, 4, EXPERTS, MOST, torch.bfloat16, deterministic=False, wire=wire)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where rows are; with a group of one rank, which the library wants to be of NCCL."""
    device: str = request.param
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


def opened(device: str, config: DispatchConfig, **hooks: Any) -> ElasticDispatcher:
    group = EPGroup(0, 1, 1, dist.group.WORLD, dist.new_group(backend="gloo"))
    kind = ElasticDispatcher if device == "cuda" else EmulatedElasticDispatcher
    answer = kind.probe(group, config)
    if not answer.ok:
        pytest.skip(answer.reason)
    return kind(group, config, **hooks)


def case_of(config: DispatchConfig, tokens: int, seed: int) -> CheckCase:
    placement = ExpertPlacement.trivial(1, EXPERTS, 1)
    return make_case(config, placement, [tokens], seed, masked=0.2)


def one_layer(d: ElasticDispatcher, case: CheckCase, device: str) -> torch.Tensor:
    rows: Any = case.rows(0, d.config.wire)
    if d.config.wire is WireFormat.MODEL:
        rows = rows.to(device)
    else:
        rows = type(rows)(rows.values.to(device), rows.scales.to(device), rows.scale_format)
    handle = d.dispatch_start(rows, case.slots[0].to(device), case.weights[0].to(device))
    received = d.dispatch_finish(handle)
    assert received.layout is (Layout.EXPANDED if d.expand else Layout.ROUTED)
    x = received.x
    if received.scales is not None:
        x = dequantise(x, received.scales, received.scale_format, torch.bfloat16)
    y = torch.full(x.shape, torch.nan, device=device)
    valid = received.slots >= 0
    y[valid.any(1)] = 0
    for k in range(valid.shape[1]):
        at = valid[:, k]
        out = expert_output(x[at], received.slots[at, k].long())
        y[at] += out.float() * received.weights[at, k, None]
    d.combine_start(handle, y.to(torch.bfloat16))
    return d.combine_finish(handle).cpu()


@DEVICES
@pytest.mark.parametrize("wire", [WireFormat.MODEL, WireFormat.FP8])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("cpu_sync", [True, False])
def test_a_device_sends_to_itself(
    device: str, wire: WireFormat, expand: bool, cpu_sync: bool
) -> None:
    config = config_for(wire)
    d = opened(device, config, expand=expand, cpu_sync=cpu_sync)
    try:
        for seed, tokens in enumerate((48, 0, 1, MOST)):
            case = case_of(config, tokens, seed)
            want = expected(case, CombineForm.SUMMED, wire)[1][0]
            out = one_layer(d, case, device)
            assert out.shape == want.shape
            assert float((out - want).norm()) <= 0.01 * float(want.norm())
        assert d.stats.bytes_sent == 0 and d.stats.calls == 4
    finally:
        d.close()


@DEVICES
def test_a_layer_without_sync_is_replayed(device: str) -> None:
    """Captured once, replayed with other tokens: nothing of its shapes depends on them."""
    config = config_for(WireFormat.MODEL)
    d = opened(device, config, cpu_sync=False)
    cases = [case_of(config, MOST, seed) for seed in range(3)]
    x, slots, weights = (
        part[0].to(device) for part in (cases[0].xs, cases[0].slots, cases[0].weights)
    )

    def layer() -> torch.Tensor:
        """Each rank's share is the row itself."""
        handle = d.dispatch_start(x, slots, weights)
        received = d.dispatch_finish(handle)
        d.combine_start(handle, received.x)
        return d.combine_finish(handle)

    try:
        assert d.graph_safe
        out = layer()  # kernels are compiled as they are first used
        graph = None
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer()
        for case in cases:
            x.copy_(case.xs[0])
            slots.copy_(case.slots[0])
            weights.copy_(case.weights[0])
            if graph is None:
                out = layer()
            else:
                graph.replay()
            want = torch.where((case.slots[0] >= 0).any(1, keepdim=True), case.xs[0].float(), 0.0)
            assert torch.equal(out.cpu(), want)
    finally:
        d.close()


@pytest.mark.gpu
@pytest.mark.parametrize("package", list(SOURCES))
def test_signatures_are_those_of_the_installed_library(package: str) -> None:
    """Its source is read, nothing is imported."""
    try:
        files = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: it needs CUDA")
    folder, version, classes = SOURCES[package]
    for name, file in classes.items():
        source = (Path(str(files.locate_file(folder))) / file).read_text()
        assert read_signatures(source, name) == ELASTIC_SIGNATURES[version][name], name
