"""Every constant that seconds are reckoned with: what it is, where it is from.

Knows: fields of `Calibration`, and numbers of `predict` and `kernel_step` that are no fields.
Which are fitted, on what: `validate.FITTED`. A GPU's peaks: hardware.toml.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.capacity.predict import CACHE_READ
from launch.capacity.times import Calibration


@dataclass(frozen=True)
class About:
    """means: in a few words. points: ids of published points whose tables it was read off. source:
    of what was not fitted."""

    means: str
    source: str = ""
    points: tuple[str, ...] = ()


_LOW_LATENCY = "DeepEP low latency on H100, AIConfigurator's table: point 20"
_EXPERTS = "AIConfigurator's table of DeepSeek-V3's experts on H200, decode"
ABOUT = {
    "intensity": About("FLOPs a byte at which products reach half"),
    "prefill_core": About("of BF16 peak, attention over keys"),
    "decode_core": About("of BF16 peak, attention over latents"),
    "passes": About("times hidden values cross memory in a layer (fitted model only)"),
    "launch": About("seconds of small kernels in a layer"),
    "skew": About("x all-to-alls of decode: waiting for the slowest"),
    "hidden": About("of decode's all-to-alls, by overlap"),
    "young": About("x a step on chips with new kernels"),
    "lmsys_balance": About("busiest GPU over mean, prefill of 5a to 5c, 9, 10a"),
    "ceiling": About(
        "of FP8 or BF16 peak, large products, before `intensity`",
        "assumed: no table; `intensity` makes up for it",
    ),
    "memory": About("of HBM bandwidth", _EXPERTS),
    "grouped": About(
        "as ceiling, for grouped products",
        "AIConfigurator's table of DeepSeek-V3's experts on H200, prefill: half of the peak there",
    ),
    "expert_launch": About("seconds before a layer's experts", _EXPERTS),
    "nic": About("of a NIC's bandwidth", _LOW_LATENCY, ("20",)),
    "nvlink": About("of NVLink's bandwidth", _LOW_LATENCY, ("20",)),
    "floor_within": About("seconds of an all-to-all in one domain", _LOW_LATENCY, ("20",)),
    "floor_across": About("seconds of one over a network", _LOW_LATENCY, ("20",)),
    "normal_floor": About(
        "seconds of an all-to-all by normal kernels, whose counts travel first",
        "assumed: no table of few tokens; point 21 is held out against it",
    ),
    "normal_hidden": About(
        "of the shorter of work and all-to-alls of prefill, by overlap",
        "assumed: no table; `hidden` is decode's",
    ),
    "comm_sms": About(
        "SMs that normal all-to-alls take from work beside them",
        "as in DeepEP's normal kernels on H100, AIConfigurator's table: point 21",
    ),
    "cache_read": About("bytes/s of a GPU, cached latents from afar", "assumed: no table"),
    "launches": About(
        "launches of a layer that share `launch` (kernels only)",
        "counted: DeepSeek-V3's decode, step_kernels.py",
    ),
    "of_experts": About(
        "launches that share `expert_launch` (kernels only)",
        "counted: two grouped products and what lies between",
    ),
}


def constant(name: str, c: Calibration) -> float:
    """Its value."""
    # The kernels: modules of their own.
    from launch.capacity.kernel_step import LAUNCHES, OF_EXPERTS

    others = {"cache_read": CACHE_READ, "launches": LAUNCHES, "of_experts": OF_EXPERTS}
    return float(others[name] if name in others else getattr(c, name))
