"""One pool of GPUs as it is asked for: a model, its layout, what each GPU is to carry.

Knows: numbers, presets. Knows nothing of whether it fits (`memory`), is allowed (`rules`) or how
fast it is (`predict`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ep.nearest import nearest_hint
from ep.presets import PRESETS as LAYOUTS
from launch.capacity.hardware import Gpu, profile
from launch.capacity.known import load_shape
from launch.capacity.picks import Reach
from launch.capacity.shape import ModelShape
from launch.capacity.times import Pool
from moeserve.errors import ConfigError

Phase = Literal["prefill", "decode"]
Groups = Literal["free", "node"]  # of experts: anywhere, or each group on one node


@dataclass(frozen=True)
class Deployment:
    """gpus: of the pool, over all of which experts are sharded. redundant: copies, beside one slot
    an expert (and one a piece of the shared expert, where it is hosted). sequences: running on a
    GPU (decode); tokens: prompt tokens of a GPU in a step (prefill). tp: GPUs that share attention.
    drafts: tokens that MTP proposes a step, each kept with probability `acceptance`, given those
    before it. balance: busiest GPU over mean; reach: GPUs and nodes that a token visits in the same
    placement, whose policy for groups is `groups`; None: experts lie in order."""

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
    reach: Reach | None = None
    groups: Groups = "free"
    deterministic: bool = True  # as `serve` has it; only our kernels' counts know modes
    graph_batches: int = 12  # batch sizes that decode is captured at

    @property
    def hosted(self) -> int:
        """Pieces of the shared expert that lie in slots."""
        return self.shape.config.n_shared_experts if self.shared == "hosted" else 0

    @property
    def slots(self) -> int:
        """Of a layer, over all GPUs, that hold something."""
        return self.shape.config.n_routed_experts + self.hosted + self.redundant

    @property
    def slots_per_gpu(self) -> int:
        """The same on every GPU: some stay empty where they do not divide."""
        return -(-self.slots // self.gpus)

    @property
    def physical(self) -> int:
        """Slots with the empty ones."""
        return self.slots_per_gpu * self.gpus

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpu.per_node)

    @property
    def can_group(self) -> bool:
        """Whether each group of experts can lie on one node (NVLink domain), as many on each."""
        groups = self.shape.config.gate_spec().num_groups
        nodes, left = divmod(self.gpus, self.gpu.domain)
        return groups > 1 and nodes > 1 and not left and groups % nodes == 0

    @property
    def gpus_of_a_node(self) -> int:
        return min(self.gpus, self.gpu.per_node)

    @property
    def decode_tokens(self) -> int:
        """Positions that a GPU computes in a step of decode, and dispatches at most."""
        return self.sequences * (1 + self.drafts)

    @property
    def step_tokens(self) -> int:
        """M: what a GPU dispatches at most in a step of the phase."""
        return self.decode_tokens if self.phase == "decode" else self.tokens

    @property
    def mtp_layers(self) -> int:
        """That are loaded and have a cache: none where nothing is drafted."""
        return self.shape.config.num_mtp_layers if self.drafts else 0

    def kv_bytes(self, fp8: bool | None = None) -> int:
        """Of a token, in all layers that have a cache; fp8 None: in the format asked for."""
        return self.shape.kv_bytes(self.kv_fp8 if fp8 is None else fp8, self.mtp_layers)

    @property
    def picks(self) -> int:
        """Slots a token visits: top-k, and the shared expert where it is hosted."""
        return self.shape.config.num_experts_per_tok + self.hosted

    def pool(self) -> Pool:
        """As the model of times sees it."""
        return Pool(
            self.gpu,
            self.gpus,
            redundant=self.redundant,
            tp=self.tp,
            balance=self.balance,
            reach=self.reach,
            overlap=self.overlap,
            kv_fp8=self.kv_fp8,
            wire_fp8=self.wire_fp8,
            young=self.gpu.young,
            hosted=self.hosted,
            dispatch=self.dispatch,
        )


@dataclass(frozen=True)
class Preset:
    """A published deployment by name."""

    model: str
    gpu: str
    layout: str  # DeepSeek's, of ep/presets.py; or "" and `gpus`, `redundant` here
    phase: Phase
    sequences: int = 128
    gpus: int = 0
    redundant: int = 0
    input_tokens: int = 4096
    output_tokens: int = 1024
    source: str = ""


_V3 = "DeepSeek-V3 report (arXiv 2412.19437) 3.4"
_OVERVIEW = "DeepSeek inference overview, February 2025"
PRESETS = {
    "v3-prefill-32": Preset("deepseek-v3", "h800", "prefill-ep32", "prefill", source=_V3),
    "v3-decode-72": Preset(
        "deepseek-v3",
        "h100",
        "",
        "decode",
        128,
        72,
        32,
        input_tokens=4000,
        output_tokens=100,
        source="LMSYS, May 2025 (ablation)",
    ),
    "v3-decode-144": Preset(
        "deepseek-v3",
        "h800",
        "decode-ep144",
        "decode",
        88,  # 14.8 k tokens/s a node at 21 a user
        input_tokens=4489,
        output_tokens=1000,
        source=_OVERVIEW,
    ),
    "v3-decode-320": Preset(
        "deepseek-v3",
        "h800",
        "decode-ep320",
        "decode",
        128,
        input_tokens=4489,
        output_tokens=1000,
        source=_V3,
    ),
    "k2-decode-96": Preset(
        "kimi-k2",
        "h200",
        "",
        "decode",
        480,
        96,
        96,
        input_tokens=2000,
        output_tokens=100,
        source="LMSYS, July 2025",
    ),
}


def preset(name: str) -> Preset:
    """ConfigError, with the nearest name, where there is none."""
    if name not in PRESETS:
        valid = ", ".join(PRESETS)
        raise ConfigError([f"--preset={name}: must be one of {valid}{nearest_hint(name, PRESETS)}"])
    return PRESETS[name]


def from_preset(name: str) -> Deployment:
    """ConfigError, with the nearest name, where there is none."""
    chosen = preset(name)
    made = Deployment(
        load_shape(chosen.model),
        chosen.model,
        profile(chosen.gpu),
        chosen.gpus,
        chosen.phase,
        redundant=chosen.redundant,
        sequences=chosen.sequences,
        dispatch="deepep_ll" if chosen.phase == "decode" else "deepep_normal",
    )
    if not chosen.layout:
        return made
    layout = LAYOUTS[chosen.layout]
    return replace(
        made,
        gpus=layout.num_gpus,
        redundant=layout.num_redundant,
        shared=layout.shared,
    )
