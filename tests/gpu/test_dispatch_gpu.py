"""Dispatch on a GPU: what surrounds a transport, bit for bit as on the CPU; transports that one GPU
allows; the benchmark. DeepEP to itself: test_dispatch_deepep_gpu.py.

Each body also runs with `cpu` for device, so that no line of it runs first on a GPU. As a script
this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import fork_ranks, run_ranks
from torch import Tensor

from dispatch.base import CombineForm, DispatchConfig, Fp8Tokens, WireFormat
from dispatch.collective import CollectiveDispatcher
from dispatch.combine import combine_pairs
from dispatch.fp8 import dequantise, quantise
from dispatch.local import LocalDispatcher
from dispatch.permute import permute, permute_slow, to_row_major
from dispatch.route import RoutingTable, count_picks, route, token_keys
from dispatch.selfcheck import make_case, random_placement
from dispatch.wire import SendPlan
from ep.group import EPGroup
from launch.bench.dispatch_check import run_layer, seen, wanted, wrong_home, wrong_in_small
from launch.bench.dispatch_flags import DispatchFlags
from launch.bench.dispatch_rank import measure
from launch.bench.ranks import open_place
from launch.env import RankEnv

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
devices = pytest.mark.parametrize("device", ["cpu", ON_GPU])
wires = pytest.mark.parametrize("wire", list(WireFormat), ids=lambda wire: wire.value)

# (generator, device) -> tensors that must be the same bits wherever they are made
Part = Callable[[torch.Generator, str], list[Tensor]]


def _received(g: torch.Generator) -> Tensor:
    """slots [N, K] int32 of 16 experts, a third of them -1."""
    slots = torch.rand(200, 16, generator=g).argsort(dim=1)[:, :6].to(torch.int32)
    return torch.where(torch.rand(slots.shape, generator=g) < 0.3, -1, slots)


def _permute(g: torch.Generator, device: str) -> list[Tensor]:
    slots = _received(g).to(device)
    order = permute(slots, count_picks(slots, 16))
    y = torch.randn(int(order.offsets[-1]), 64, generator=g).to(torch.bfloat16).to(device)
    return [order.pair_rows, order.offsets, order.index, to_row_major(y, order.index)]


def _combine(g: torch.Generator, device: str) -> list[Tensor]:
    slots = _received(g)
    valid = slots.reshape(-1) >= 0
    index = torch.where(valid, valid.cumsum(0) - 1, -1).view(slots.shape)
    y = torch.randn(int(valid.sum()), 512, generator=g).to(torch.bfloat16)
    weights = torch.rand(slots.shape, generator=g)
    return [combine_pairs(y.to(device), index.to(device), weights.to(device))]


def _route(g: torch.Generator, device: str) -> list[Tensor]:
    placement = random_placement(24, 4, 9, seed=3)
    ids = torch.rand(300, 24, generator=g).argsort(dim=1)[:, :8].to(torch.int32)
    table = RoutingTable.build(placement, 0, device)
    slots = route(ids.to(device), table, token_keys(300, 2, device))
    local = placement.num_local_experts
    plan = SendPlan.make(slots, 4, local)
    pairs, _ = plan.home_pairs()
    rows = [plan.tokens, plan.ranks, plan.local_slots(slots, local)]
    return [slots, *rows, plan.home_rows(8), pairs, torch.tensor(plan.row_counts)]


def _fp8(g: torch.Generator, device: str, wire: WireFormat) -> list[Tensor]:
    """Ordinary rows, rows of zeros, of tiny and of huge values, a last block that is not full."""
    x = torch.randn(130, 7168 - 64, generator=g)
    x[:3], x[3:6], x[6:9] = 0.0, x[3:6] * 1e-6, x[6:9] * 1e4
    rows = quantise(x.to(torch.bfloat16).to(device), wire)
    back = dequantise(rows.values, rows.scales, rows.scale_format, torch.bfloat16)
    return [rows.values.view(torch.uint8), rows.scales, back]


PARTS: dict[str, Part] = {
    "permute": _permute,
    "combine": _combine,
    "route": _route,
    "fp8": lambda g, device: _fp8(g, device, WireFormat.FP8),
    "fp8_ue8m0": lambda g, device: _fp8(g, device, WireFormat.FP8_UE8M0),
}


@devices
@pytest.mark.parametrize("name", PARTS)
def test_parts_are_the_bits_of_the_cpu(name: str, device: str) -> None:
    here, there = (PARTS[name](torch.Generator().manual_seed(7), d) for d in ("cpu", device))
    for number, (a, b) in enumerate(zip(here, there, strict=True)):
        assert b.device.type == device or b.numel() == 4, "it ran elsewhere"
        assert a.dtype == b.dtype and torch.equal(a, b.cpu()), f"{name}: result {number}"


@devices
def test_permute_is_its_slow_twin(device: str) -> None:
    slots = _received(torch.Generator().manual_seed(1))
    counts = count_picks(slots, 16)
    slow, fast = permute_slow(slots, counts), permute(slots.to(device), counts.to(device))
    for part in ("pair_rows", "offsets", "index"):
        assert torch.equal(getattr(slow, part), getattr(fast, part).cpu()), part


def config_for(wire: WireFormat, form: CombineForm, slots: int = 16) -> DispatchConfig:
    deterministic = form is CombineForm.PAIRS
    return DispatchConfig(512, 4, slots, 16, torch.bfloat16, deterministic, wire)


@devices
@wires
@pytest.mark.parametrize("form", list(CombineForm), ids=lambda form: form.value)
def test_one_rank(wire: WireFormat, form: CombineForm, device: str) -> None:
    """`local`, then a layer against what must come home."""
    d = LocalDispatcher(EPGroup.single(), config_for(wire, form))
    assert wrong_on(d, 0, 1, device) == []
    d.close()


def wrong_on(d: Any, rank: int, size: int, device: str) -> list[str]:
    """A few layers on the device, against the twin and against what must come home; T = 0 too."""
    found = []
    for seed, tokens in enumerate((5, 0, 16)):
        placement = random_placement(14, size, 2, seed)
        case = make_case(d.config, placement, [tokens] * size, seed, masked=0.2)
        d.set_step_bound(16 if seed else None)
        found += wrong_in_small(d, case, rank, torch.device(device))
        x = case.xs[rank].to(device)
        slots, weights = case.slots[rank].to(device), case.weights[rank].to(device)
        _, y, home = run_layer(d, x, slots, weights, placement, rank)
        if y.device.type != device or home.device.type != device:
            found.append(f"results on {home.device}, experts on {y.device}")
        want = wanted(seen(d.config, x), slots, weights, placement, d.combine_form)
        found += wrong_home(d, home, want, size)
    return found


# -- ranks ----------------------------------------------------------------------------------------


@pytest.mark.dist
@devices
def test_two_ranks_over_gloo(device: str, tmp_path: Path) -> None:
    """`torch` with tensors of one GPU that two ranks share: NCCL would refuse that."""
    (tmp_path / "device").write_text(f"{device} gloo")
    reports = run_ranks(__file__, 2, tmp_path, timeout=150)
    if any(report["cannot"] for report in reports):
        pytest.skip(f"gloo does not carry tensors on {device}: {reports[0]['cannot']}")
    assert [report["wrong"] for report in reports] == [[], []]


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: one a rank")
def test_two_ranks_over_nccl(tmp_path: Path) -> None:
    (tmp_path / "device").write_text("cuda nccl")
    reports = run_ranks(__file__, 2, tmp_path, timeout=150)
    assert [report["wrong"] for report in reports] == [[], []]


def rank_body(group: EPGroup, folder: Path) -> dict[str, Any]:
    device, backend = (folder / "device").read_text().split()
    if device == "cuda":
        torch.cuda.set_device(group.rank % torch.cuda.device_count())
    if backend != "gloo":
        carrier: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=60))
        group = EPGroup(group.rank, 2, 2, carrier, group.cpu_group)
    try:
        dist.all_to_all_single(
            torch.empty(2, device=device), torch.ones(2, device=device), group=group.device_group
        )
    except RuntimeError as error:
        return {"cannot": str(error).splitlines()[0], "wrong": []}
    wrong = []
    for wire in WireFormat:
        for form in CombineForm:
            d = CollectiveDispatcher(group, config_for(wire, form), combine_form=form)
            wrong += [
                f"{wire.value}, {form.value}: {w}" for w in wrong_on(d, group.rank, 2, device)
            ]
            d.close()
    return {"cannot": "", "wrong": wrong}


# -- the benchmark -------------------------------------------------------------------------------


@devices
def test_bench_dispatch_measures_on_the_device(device: str) -> None:
    flags = DispatchFlags(
        backends="local", ep=1, tokens="1,32", hidden="1024", top_k=4, experts=16,
        form="pairs,summed", steps=3, warmup=1, device=device,
    )  # fmt: skip
    asked = flags.check()
    place = open_place(RankEnv.alone(), EPGroup.single(), asked.device, asked.ranks)
    assert place.device.type == device
    rows = measure(asked, place, lambda where, done, total: None).rows
    assert len(rows) == 8 and [row["reason"] for row in rows] == [""] * 8
    assert all(row["both_ms"]["median"] > 0 for row in rows)
    assert place.transport.startswith("one ")


def test_fp8_tokens_stay_on_their_device() -> None:
    rows = quantise(torch.ones(2, 256, dtype=torch.bfloat16), WireFormat.FP8)
    assert isinstance(rows, Fp8Tokens) and rows.device.type == "cpu"


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_body))
