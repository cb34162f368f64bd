"""Routed experts through DeepGEMM where it is allowed: each layout of rows reaches its grouped form
and gives what our kernels give; an expert that has moved computes there what it computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deep_gemm_double import Library
from gloo_threads import gloo_threads
from torch import Tensor

from dispatch.base import CombineForm, DispatchConfig, Layout, Received, ScaleFormat, WireFormat
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.fp8 import quantise
from dispatch.local import LocalDispatcher
from dispatch.selfcheck import make_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.experts import run_experts
from models.deepseek.fp8 import Fp8Rows, quantise_weight
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.gemm_deep_gemm import DeepGemm
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.load import load_model
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.offline import OfflineRunner

SLOTS, HIDDEN, WIDE = 3, 256, 72  # an expert is filled up to 128
ALIGNMENT = 8
BF16 = torch.bfloat16
# Of a row's picks: nobody, one here, two here; slot 1 has none.
ROUTES = torch.tensor([[2, 0], [-1, 2], [-1, -1], [0, 2]], dtype=torch.int32)
GAINS = torch.tensor([[0.5, 2.0], [0.0, 3.0], [0.0, 0.0], [1.5, 0.25]])
ORDER = [(0, 0), (0, 3), (2, 0), (2, 1), (2, 3)]  # (slot, row) by slot
COUNTS = torch.tensor([2, 0, 3])
OURS = TritonKernels()
OURS_BYTES = 3 * 128 * HIDDEN + 4 * (2 * 2 + 2)  # of a bundle: codes and scales
# Both round gate and up to bf16 and then to e4m3: a last bit of bf16 may move a code of three bits
# of mantissa, one of the 72 that a result is the sum of.
BOUND = 2.0**-5


def kernels(arch: int) -> tuple[TritonKernels, Library]:
    double = Library(arch, ALIGNMENT)
    return TritonKernels(gemms=Gemms(arch, [DeepGemm(double, arch)])), double


def stored(ue8m0: bool, by: TritonKernels = OURS) -> Any:
    weights = by.allocate_fp8_experts(SLOTS, HIDDEN, WIDE, BF16)
    g = torch.Generator().manual_seed(7)
    for slot in range(SLOTS):
        shapes = (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)
        parts = [quantise_weight(torch.randn(*s, generator=g) / 8, ue8m0=ue8m0) for s in shapes]
        weights.store_fp8(slot, *(Fp8Rows.of(*part) for part in parts))
    weights.ue8m0 = ue8m0  # as the loader finds all scales of a layer to be
    return weights


def received(layout: Layout, wire: WireFormat, room: int) -> Received:
    """The same pairs; NaN where nobody's rows are."""
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1)).to(BF16)
    scales, form = None, ScaleFormat.NONE
    if wire is not WireFormat.MODEL:
        sent = quantise(x, wire)
        x, scales, form = sent.values, sent.scales, sent.scale_format
    if layout is Layout.ROUTED:
        return Received(layout, x, ROUTES, GAINS, COUNTS, scales, form)
    starts = [0, 0, room] if layout is Layout.MASKED else [0, ALIGNMENT, ALIGNMENT]
    starts = [0, room, 2 * room] if layout is Layout.MASKED else starts
    places = [starts[slot] + i for slot, i in ((0, 0), (0, 1), (2, 0), (2, 1), (2, 2))]
    size = SLOTS * room if layout is Layout.MASKED else 2 * ALIGNMENT

    def placed(source: Tensor) -> Tensor:
        out = torch.zeros(size, source.shape[1], dtype=source.dtype)
        out.view(torch.uint8).fill_(0x7F)
        out[places] = source[[row for _, row in ORDER]]
        return out

    x, scales = placed(x), None if scales is None else placed(scales)
    slots = torch.full((size, 1), -1, dtype=torch.int32)
    slots[places, 0] = torch.tensor([slot for slot, _ in ORDER], dtype=torch.int32)
    if layout is Layout.MASKED:
        x = x.view(SLOTS, room, -1)
        scales = None if scales is None else scales.view(SLOTS, room, -1)
        return Received(layout, x, slots, torch.ones(SLOTS, room), COUNTS, scales, form)
    begins = torch.tensor(starts)
    ones = torch.ones(size, 1)
    return Received(layout, x, slots, ones, COUNTS, scales, form, begins, ALIGNMENT)


def pairs(layout: Layout, y: Tensor, index: Tensor | None, room: int) -> Tensor:
    """[5, D] in ORDER."""
    if index is not None:
        return torch.stack([y[index[row][ROUTES[row] == slot]][0] for slot, row in ORDER])
    if layout is Layout.MASKED:
        return torch.cat((y[0, :2], y[2, :3]))
    return y[[0, 1, ALIGNMENT, ALIGNMENT + 1, ALIGNMENT + 2]]


@pytest.mark.parametrize(
    ("arch", "wire", "ue8m0"),
    [
        (90, WireFormat.MODEL, False),
        (90, WireFormat.FP8, True),
        (100, WireFormat.MODEL, True),
        (100, WireFormat.FP8_UE8M0, True),
    ],
)
@pytest.mark.parametrize(
    ("layout", "calls"),
    [
        (Layout.ROUTED, {90: ["owners"] * 2, 100: ["psum"] * 2}),
        (Layout.EXPANDED, {90: ["owners"] * 2, 100: ["owners"] * 2}),
        (Layout.MASKED, {90: ["masked 2"] * 2, 100: ["masked 2"] * 2}),
    ],
)
def test_each_layout_reaches_its_form(
    layout: Layout, calls: dict[int, list[str]], arch: int, wire: WireFormat, ue8m0: bool
) -> None:
    theirs, double = kernels(arch)
    weights = stored(ue8m0, theirs)
    room = 128 if arch == 90 else 2 * ALIGNMENT
    rows = received(layout, wire, room)
    got, want = (
        pairs(layout, *run_experts(k, rows, weights, CombineForm.PAIRS, BF16, 6), room)
        for k in (theirs, OURS)
    )
    assert double.calls == calls[arch], theirs.gemms.choices
    assert double.words == (2 if arch == 100 else 0)
    assert got.dtype == BF16 and got.isfinite().all()
    assert float((got.float() - want.float()).abs().max()) < BOUND * float(want.float().abs().max())


def test_fp32_rows_are_ours_where_powers_of_two_are_asked_for() -> None:
    """sm_100, and a wire whose scales are any number: then rows lie close, for ours."""
    theirs, double = kernels(100)
    rows = received(Layout.ROUTED, WireFormat.FP8, 0)
    weights = stored(True)
    got, want = (
        pairs(rows.layout, *run_experts(k, rows, weights, CombineForm.PAIRS, BF16), 0)
        for k in (theirs, OURS)
    )
    assert double.calls == [] and torch.equal(got, want)
    assert any("powers of two" in line for line in theirs.gemms.choices)


@pytest.mark.parametrize("arch", [90, 100])
def test_an_expert_that_moved(arch: int) -> None:
    """By its bundle, as migration moves it, into a slot of another rank's weights."""
    theirs, double = kernels(arch)
    here, there = stored(True, theirs), theirs.allocate_fp8_experts(SLOTS, HIDDEN, WIDE, BF16)
    there.store_fp8(
        1, *(Fp8Rows.of(*quantise_weight(p.float(), ue8m0=True)) for p in here.fetch(0))
    )
    there.ue8m0 = True
    rows = received(Layout.ROUTED, WireFormat.MODEL, 0)
    for slot in (0, 2):
        assert there.bundle(slot).nbytes == OURS_BYTES == here.bundle(slot).nbytes
        there.bundle(slot).copy_from(here.bundle(slot).cut())
    (got, _), (want, index) = (
        run_experts(theirs, rows, weights, CombineForm.PAIRS, BF16) for weights in (there, here)
    )
    assert torch.equal(pairs(rows.layout, got, index, 0), pairs(rows.layout, want, index, 0))
    assert len(double.calls) == 4 and double.words == (4 if arch == 100 else 0)
    # What is no part of a bundle is made of it, where it is needed.
    assert here.nbytes == SLOTS * (OURS_BYTES + (4 * (256 + 256) if arch == 100 else 0))


@pytest.mark.parametrize(("arch", "wire"), [(90, WireFormat.FP8), (100, WireFormat.FP8_UE8M0)])
def test_low_latency_rows_as_they_arrive(arch: int, wire: WireFormat) -> None:
    """DeepEP's room for an expert is ranks x tokens: here whole tiles."""
    hidden, experts = 2048, 2  # the least that it takes
    theirs, double = kernels(arch)
    config = DispatchConfig(hidden, 2, experts, 128, BF16, False, wire)
    case = make_case(config, ExpertPlacement.trivial(1, experts, 1), [5], 0, masked=0.1)
    weights = theirs.allocate_fp8_experts(experts, hidden, WIDE, BF16)
    g = torch.Generator().manual_seed(3)
    for slot in range(experts):
        shapes = (WIDE, hidden), (WIDE, hidden), (hidden, WIDE)
        parts = [quantise_weight(torch.randn(*s, generator=g) / 45, ue8m0=True) for s in shapes]
        weights.store_fp8(slot, *(Fp8Rows.of(*part) for part in parts))
    weights.ue8m0 = True

    def body(group: EPGroup) -> list[Tensor]:
        d = EmulatedLowLatencyDispatcher(group, config)
        results = []
        for one in (theirs, OURS):
            handle = d.dispatch_start(case.xs[0], case.slots[0], case.weights[0])
            d.combine_start(handle, *run_experts(one, d.dispatch_finish(handle), weights,
                                                 d.combine_form, BF16))  # fmt: skip
            results.append(d.combine_finish(handle))
        return results

    ((got, want),) = gloo_threads(1, body)
    assert double.calls == ["masked 128"] * 2, theirs.gemms.choices
    assert float((got - want).abs().max()) < BOUND * float(want.abs().max())


def test_a_model(tmp_path: Path) -> None:
    """Dense products and those of experts; see test_triton_kernels.py on how far logits may be."""
    config = family_config(
        "v3", num_hidden_layers=2, vocab_size=128, hidden_size=128, intermediate_size=128,
        n_routed_experts=8, num_nextn_predict_layers=0,
    )  # fmt: skip
    folder = write_random_checkpoint(tmp_path / "v3", config, tokenizer=False, fp8="fp32")
    theirs, double = kernels(90)
    found = []
    for one in (theirs, OURS):
        model = load_model(
            folder, dtype=BF16, kernels=one, group=EPGroup.single(), weights="fp8",
            dispatcher_factory=lambda config: LocalDispatcher(EPGroup.single(), config),
            deterministic=False,
        )  # fmt: skip
        found.append(OfflineRunner(model, num_blocks=4).step({0: [3, 120, 17, 99, 4]}).logits[0])
    got, want = found
    assert double.calls.count("owners") == 2 * 1 and double.calls.count("dense") > 4
    assert got.isfinite().all() and 0.5 < float(want.std()) < 2
    assert float((got - want).square().mean(dim=1).sqrt().max()) < 0.1
