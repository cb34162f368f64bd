"""In which format hidden rows travel to experts: decided once at start, the same on every rank.

Pure. What the formats are: dispatch/base.py; how rows are rounded: dispatch/fp8.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.base import WireFormat
from models.deepseek.config import BlockFP8


@dataclass(frozen=True)
class WireChoice:
    """note: what was chosen and why, to be printed once."""

    wire: WireFormat
    note: str

    def report(self) -> dict[str, str]:
        """For `/health`."""
        return {"format": self.wire.value, "reason": self.note.removeprefix("wire: ")}


def decide_wire(asked: str, quantization: BlockFP8 | None, device_type: str) -> WireChoice:
    """asked: `parallel.wire`. quantization: of the checkpoint, which says what scales its experts
    were trained with: activations must have the same."""
    fp8 = WireFormat.FP8_UE8M0 if quantization and quantization.ue8m0 else WireFormat.FP8
    kind = "powers of two" if fp8 is WireFormat.FP8_UE8M0 else "fp32"
    rows = f"wire: rows travel in FP8, scales {kind}"
    if asked == "fp8":
        if quantization is None:
            return WireChoice(fp8, f"{rows} (asked for; this checkpoint was not trained with it)")
        return WireChoice(fp8, f"{rows} as the checkpoint's (asked for)")
    plain = "wire: rows travel in the model dtype"
    if asked == "model":
        return WireChoice(WireFormat.MODEL, f"{plain} (asked for)")
    if quantization is None:
        return WireChoice(WireFormat.MODEL, f"{plain} (auto: the checkpoint's experts are not FP8)")
    if device_type == "cpu":
        return WireChoice(WireFormat.MODEL, f"{plain} (auto: FP8 rows are for GPUs)")
    return WireChoice(fp8, f"{rows} as the checkpoint's (auto)")
