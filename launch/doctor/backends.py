"""What each dispatcher says of this machine, for a job of so many ranks. No rank is started.

Knows the registry of `dispatch` and a group that stands in for a real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.doctor.check import Check, missing, ok

if TYPE_CHECKING:
    from dispatch.base import DispatchConfig, Probe
    from ep.group import EPGroup

SECTION = "dispatchers"
COLLECTIVES = ("torch", "allgather")  # that go by torch's
PER_NODE = 8
TOKENS = {"prefill": 4096, "decode": 128}  # a rank, in a step
_DEEPSEEK_V3 = {"hidden": 7168, "top_k": 8, "experts": 256}


def backend_checks(
    num_ranks: int,
    checkpoint: Path | None,
    has_gpu: bool,
    job: EPGroup | None = None,
    on_gpus: bool = False,
) -> Iterator[Check]:
    """Outside of deterministic mode, in bfloat16, for the checkpoint's sizes or DeepSeek-V3's. job:
    its ranks, where there is one. on_gpus: it is asked for ranks on GPUs, whether there are any
    here or not."""
    import dispatch

    with nullcontext(job) if job is not None else stand_in(num_ranks, has_gpu) as group:
        answers = {
            phase: dispatch.probe_all(group, _config(num_ranks, tokens, _sizes(checkpoint)))
            for phase, tokens in TOKENS.items()
        }
        over = None if group.device_group is None else _backend_of(group)
    if on_gpus:
        answers = {phase: _for_gpus(probes, over) for phase, probes in answers.items()}
    for name in answers["decode"]:
        said = {phase: probes[name] for phase, probes in answers.items()}
        able = [phase for phase, probe in said.items() if probe.ok]
        if len(able) == len(said):
            yield ok(SECTION, name, said["decode"].reason)
        elif able:
            other = next(phase for phase in said if phase not in able)
            yield ok(
                SECTION, name, f"{able[0]}: {said[able[0]].reason}",
                f"not for {other}: {said[other].reason}",
            )  # fmt: skip
        else:
            yield missing(
                SECTION, name, said["decode"].reason, _remedy(name, num_ranks, has_gpu, on_gpus)
            )


def _backend_of(group: EPGroup) -> str:
    """By what device tensors of the ranks travel."""
    import torch.distributed as dist

    return str(dist.get_backend(group.device_group))


def _for_gpus(probes: dict[str, Probe], over: str | None) -> dict[str, Probe]:
    """Of ranks on GPUs: torch's collectives carry their rows by NCCL alone, and emulations live on
    CPUs. over: what the collectives here go over; None: one rank."""
    from dispatch.base import Probe
    from dispatch.names import EMULATED

    refused = {}
    for name, probe in probes.items():
        if probe.ok and name.endswith(EMULATED):
            refused[name] = Probe(False, "an emulation on CPUs, for ranks on CPUs")
        elif probe.ok and name in COLLECTIVES and over != "nccl":
            why = "no GPU here" if _have_nccl() else "this torch is built without it"
            refused[name] = Probe(False, f"rows of GPUs go by NCCL: {why}")
    return probes | refused


def _have_nccl() -> bool:
    import torch.distributed as dist

    return bool(dist.is_nccl_available())


def _remedy(name: str, num_ranks: int, has_gpu: bool, on_gpus: bool) -> str:
    if name == "local" and num_ranks > 1:
        return "for one rank: --ranks 1"
    if on_gpus:  # what is missing has its remedy among the libraries
        return ""
    if not has_gpu and not name.endswith("_emulated"):
        return "wants GPUs; --dispatch torch does here" if num_ranks > 1 else ""
    return ""


def _sizes(checkpoint: Path | None) -> dict[str, int]:
    if checkpoint is None:
        return _DEEPSEEK_V3
    try:
        told = json.loads((checkpoint / "config.json").read_text())
        told = told.get("text_config", told)
        return {
            "hidden": int(told["hidden_size"]),
            "top_k": int(told["num_experts_per_tok"]),
            "experts": int(told["n_routed_experts"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _DEEPSEEK_V3  # what is wrong with it is said of the checkpoint


def _config(num_ranks: int, tokens: int, sizes: dict[str, int]) -> DispatchConfig:
    import torch

    from dispatch.base import DispatchConfig

    return DispatchConfig(
        hidden_size=sizes["hidden"],
        top_k=sizes["top_k"],
        num_physical_experts=-(-sizes["experts"] // num_ranks) * num_ranks,
        max_tokens_per_rank=tokens,
        dtype=torch.bfloat16,
        deterministic=False,
    )


@contextmanager
def stand_in(num_ranks: int, has_gpu: bool) -> Iterator[EPGroup]:
    """A group that says that it is rank 0 of so many. What it is made of has one rank; nobody may
    send anything over it. Not within a job."""
    import torch.distributed as dist

    from ep.group import EPGroup

    if num_ranks == 1:
        yield EPGroup.single()
        return
    backend = "nccl" if has_gpu and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    per_node = min(PER_NODE, num_ranks)
    if num_ranks % per_node:
        per_node = num_ranks
    world: Any = dist.group.WORLD
    try:
        yield EPGroup(0, num_ranks, per_node, world, world)
    finally:
        dist.destroy_process_group()
