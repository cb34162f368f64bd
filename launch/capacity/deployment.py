"""One pool of GPUs as it is asked for: a model, its layout, what each GPU is to carry.

Knows: numbers, presets. Knows nothing of whether it fits (`memory`), is allowed (`rules`) or how
fast it is (`predict`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from ep.presets import PRESETS as LAYOUTS
from launch.capacity.hardware import Gpu, profile
from launch.capacity.known import load_shape
from launch.capacity.shape import ModelShape
from launch.capacity.times import Pool
from moeserve.errors import ConfigError

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Deployment:
    """gpus: of the pool, over all of which experts are sharded. sequences: running on a GPU
    (decode); tokens: prompt tokens of a GPU in a step (prefill). tp: GPUs that share attention.
    drafts: tokens that MTP proposes a step, each kept with probability `acceptance`, given those
    before it."""

    shape: ModelShape
    model: str
    gpu: Gpu
    gpus: int
    phase: Phase
    redundant: int = 0
    shared: Literal["replicated", "hosted"] = "replicated"
    tp: int = 1
    dispatch: str = "deepep_ll"
    sequences: int = 128
    tokens: int = 16384
    kv_fp8: bool = False
    wire_fp8: bool = True
    overlap: bool = True
    drafts: int = 0
    acceptance: float = 0.85
    balance: float = 1.0
    graph_batches: int = 12  # batch sizes that decode is captured at

    @property
    def slots(self) -> int:
        """Of a layer, over all GPUs: what hosts the shared expert included."""
        return self.shape.config.n_routed_experts + self.redundant

    @property
    def slots_per_gpu(self) -> float:
        return self.slots / self.gpus

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpu.per_node)

    @property
    def decode_tokens(self) -> int:
        """Positions that a GPU computes in a step of decode, and dispatches at most: M."""
        return self.sequences * (1 + self.drafts)

    @property
    def picks(self) -> int:
        """Slots a token visits: top-k, and the shared expert where it is hosted."""
        hosted = self.shape.config.n_shared_experts if self.shared == "hosted" else 0
        return self.shape.config.num_experts_per_tok + hosted

    def pool(self) -> Pool:
        """As the model of times sees it."""
        young = self.gpu.name in ("b200", "gb200")
        return Pool(
            self.gpu,
            self.gpus,
            redundant=self.redundant,
            tp=self.tp,
            balance=self.balance,
            overlap=self.overlap,
            kv_fp8=self.kv_fp8,
            wire_fp8=self.wire_fp8,
            young=young,
        )


@dataclass(frozen=True)
class Preset:
    """A published deployment by name."""

    model: str
    gpu: str
    layout: str  # of ep/presets.py, or "" and `gpus`, `redundant` here
    phase: Phase
    sequences: int = 128
    gpus: int = 0
    redundant: int = 0
    note: str = ""


PRESETS = {
    "v3-prefill-32": Preset("deepseek-v3", "h800", "prefill-ep32", "prefill"),
    "v3-decode-144": Preset("deepseek-v3", "h800", "decode-ep144", "decode", 88),
    "v3-decode-320": Preset("deepseek-v3", "h800", "decode-ep320", "decode", 128),
    "k2-decode-96": Preset("kimi-k2", "h200", "", "decode", 480, 96, 96),
}


def from_preset(name: str) -> Deployment:
    """ConfigError, with the nearest name, where there is none."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        nearest = f"; nearest: {close[0]}" if close else ""
        raise ConfigError([f"--preset={name}: must be one of {', '.join(PRESETS)}{nearest}"])
    preset = PRESETS[name]
    made = Deployment(
        load_shape(preset.model),
        preset.model,
        profile(preset.gpu),
        preset.gpus,
        preset.phase,
        redundant=preset.redundant,
        sequences=preset.sequences,
        dispatch="deepep_ll" if preset.phase == "decode" else "deepep_normal",
    )
    if not preset.layout:
        return made
    layout = LAYOUTS[preset.layout]
    return replace(
        made,
        gpus=layout.num_gpus,
        redundant=layout.num_slots - layout.routed_experts,
        shared=layout.shared,
    )
