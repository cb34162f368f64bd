"""GPUs as profiles: memory, bandwidths, FLOP/s, from hardware.toml, with where each number is from.

Knows: published peaks. Knows nothing of what share of them is reached (`times`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

from ep.nearest import nearest_hint
from moeserve.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One GPU in its node. Bytes, bytes a second in one direction, dense FLOP/s."""

    name: str
    title: str
    memory: float
    hbm: float
    fp8: float
    bf16: float
    nvlink: float
    nic: float
    domain: int  # GPUs that reach one another by NVLink
    sms: int
    host_memory: float  # of its node
    price: float  # dollars an hour
    young: bool  # kernels were new when its points were measured (`Calibration.young`)
    source: str

    @property
    def per_node(self) -> int:
        """GPUs that count as a node in "tokens a second a node": eight, whatever the domain."""
        return 8


def profiles() -> dict[str, Gpu]:
    """By name, as in the file."""
    text = resources.files("launch.capacity").joinpath("hardware.toml").read_text("utf-8")
    return {name: _gpu(name, fields) for name, fields in tomllib.loads(text).items()}


def profile(name: str) -> Gpu:
    """ConfigError, with the nearest name, where there is none."""
    known = profiles()
    if name.lower() not in known:
        hint = nearest_hint(name, known)
        raise ConfigError([f"--gpu={name}: must be one of {', '.join(known)}{hint}"])
    return known[name.lower()]


def _gpu(name: str, fields: dict[str, object]) -> Gpu:
    def number(key: str, unit: float) -> float:
        return float(str(fields[key])) * unit

    return Gpu(
        name=name,
        title=str(fields["title"]),
        memory=number("memory_gb", 1e9),
        hbm=number("hbm_tb_s", 1e12),
        fp8=number("fp8_tflops", 1e12),
        bf16=number("bf16_tflops", 1e12),
        nvlink=number("nvlink_gb_s", 1e9),
        nic=number("nic_gb_s", 1e9),
        domain=int(str(fields["domain"])),
        sms=int(str(fields["sms"])),
        host_memory=number("host_memory_gb", 1e9),
        price=number("price", 1.0),
        young=bool(fields.get("young", False)),
        source=str(fields["source"]),
    )
