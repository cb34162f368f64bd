"""The real library: its signatures are the emulation's; a GPU sends to itself, as the twin does."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dispatch.base import CombineForm, DispatchConfig, Layout, WireFormat
from dispatch.deepep_ll import LowLatencyDispatcher
from dispatch.emulation.signatures import SIGNATURES, fork_signatures, read_signatures
from dispatch.fp8 import dequantise
from dispatch.selfcheck import expected, expert_output, make_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = DispatchConfig(2048, 4, 16, 64, torch.bfloat16, deterministic=False)


@pytest.mark.parametrize(("wire", "tolerance"), [(WireFormat.MODEL, 0.005), (WireFormat.FP8, 0.05)])
def test_a_gpu_sends_to_itself(wire: WireFormat, tolerance: float) -> None:
    group = EPGroup.single()
    answer = LowLatencyDispatcher.probe(group, CONFIG)
    if not answer.ok:
        pytest.skip(answer.reason)
    d = LowLatencyDispatcher(group, replace(CONFIG, wire=wire))
    try:
        for seed, tokens in enumerate((48, 0, 1, 64)):
            placement = ExpertPlacement.trivial(1, 16, 1)
            case = make_case(CONFIG, placement, [tokens], seed, masked=0.2)
            want = expected(case, CombineForm.PAIRS)[1][0]
            handle = d.dispatch_start(
                case.xs[0].cuda(), case.slots[0].cuda(), case.weights[0].cuda()
            )
            received = d.dispatch_finish(handle)
            assert received.layout is Layout.MASKED
            y = torch.zeros(received.x.shape, dtype=torch.bfloat16, device="cuda")
            for slot, n in enumerate(received.counts.tolist()):
                expert, x = torch.full((n,), slot, device="cuda"), received.x[slot, :n]
                if received.scales is not None:
                    scales, form = received.scales[slot, :n], received.scale_format
                    x = dequantise(x, scales, form, torch.bfloat16)
                y[slot, :n] = expert_output(x, expert)
            d.combine_start(handle, y)
            out = d.combine_finish(handle).cpu()
            assert out.shape == want.shape
            assert float((out - want).norm()) <= tolerance * float(want.norm())
    finally:
        d.close()


def test_signatures_are_those_of_the_installed_library() -> None:
    """Its source is read, nothing is imported."""
    try:
        files = metadata.distribution("sgl-deep-ep")
    except metadata.PackageNotFoundError:
        pytest.skip("sgl-deep-ep is not installed: it needs CUDA")
    folder = Path(str(files.locate_file("deep_ep")))
    buffer = (folder / "buffers" / "legacy.py").read_text()
    assert read_signatures(buffer, "Buffer") == fork_signatures()
    event = read_signatures((folder / "utils" / "event.py").read_text(), "EventOverlap")
    assert event == SIGNATURES["2.1.0"]["EventOverlap"]
