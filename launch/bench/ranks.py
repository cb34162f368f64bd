"""Ranks of a benchmark without a model: started here or by torchrun, grouped by size and device.

Knows launch's processes and torch's groups; nothing of what is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launch.env import RankEnv
from moeserve.errors import ConfigError
from moeserve.terminal import say

if TYPE_CHECKING:
    import torch

    from ep.group import EPGroup


@dataclass(frozen=True)
class Place:
    """Where this rank computes and by what its ranks are joined. groups: for each asked number of
    ranks the group of the first so many; missing where this rank is not among them."""

    group: EPGroup
    device: torch.device
    groups: dict[int, EPGroup] = field(default_factory=dict)

    @property
    def transport(self) -> str:
        """In words, for whoever reads the figures."""
        machines = self.group.num_nodes
        if self.device.type == "cuda":
            import torch

            where = torch.cuda.get_device_name(self.device)
            if self.group.size == 1:
                return f"one {where}, nothing travels"
            links = "between GPUs of one machine" if machines == 1 else f"over {machines} machines"
            return f"NCCL, {where}, {links}; times are the device's own"
        if self.group.size == 1:
            return "one process on the CPU, nothing travels"
        if machines == 1:
            return "gloo over this machine's loopback, tensors on the CPU"
        return f"gloo over {machines} machines, tensors on the CPU"


def run_ranks(num_ranks: int, body: Callable[[RankEnv, EPGroup], None]) -> None:
    """Do `body` on each rank: here if there is one, as a rank if this process is one, else in
    processes of this very command. Does not return unless there is one rank only."""
    env = RankEnv.read(os.environ)
    if env is None and num_ranks > 1:
        from launch.job import run_job
        from launch.processes import leave
        from launch.serve import end_job

        try:
            failure = run_job(num_ranks, sys.argv[1:], endless=False)
        except ConfigError as error:
            raise ConfigError([_words(problem) for problem in error.problems]) from None
        if failure is not None and failure.told:  # what came of the measurement, no rank's death
            say(failure.reason)
            leave(failure.exit_code)
        end_job(failure, num_ranks)
    from launch.rank import RankProcess, run_alone
    from moeserve.config import ServeConfig

    config = ServeConfig.load(None, {})
    if env is None:
        run_alone(config, lambda group: body(RankEnv.alone(), group))
        return
    here = env
    RankProcess(config, env, _words).run(lambda job: body(here, job.group))


def open_place(env: RankEnv, group: EPGroup, device: str, sizes: Sequence[int]) -> Place:
    """device: cpu, cuda or auto. sizes: ascending numbers of ranks, the last may be all. Collective
    over all ranks. ConfigError where there are too few GPUs."""
    import torch

    chosen = _choose_device(env, group, device)
    place = torch.device("cpu")
    if chosen == "cuda":
        place = torch.device("cuda", env.local_rank)
        torch.cuda.set_device(place)
    made: dict[int, EPGroup] = {}
    for size in sizes:
        joined = _first(group, size, "nccl" if chosen == "cuda" else "gloo")
        if joined is not None:
            made[size] = joined
    return Place(group, place, made)


def _choose_device(env: RankEnv, group: EPGroup, asked: str) -> str:
    """The same on every rank."""
    from ep.group import gather_objects
    from moeserve.device.choose import look, no_cuda, refused

    found: list[str | None] = gather_objects(group, no_cuda(look(), env.local_size))
    short = [(rank, why) for rank, why in enumerate(found) if why is not None]
    if asked == "auto":
        return "cpu" if short else "cuda"
    if asked == "cuda" and short:
        rank, why = short[0]
        where = f"rank {rank}'s machine: " if group.size > 1 else ""
        raise ConfigError([f"--device cuda: {where}{refused(why)}"])
    return asked


def _first(group: EPGroup, size: int, backend: str) -> EPGroup | None:
    """The group of the first `size` ranks, None on the others. Collective over all."""
    from ep.group import EPGroup

    if size == 1:
        return EPGroup.single() if group.rank == 0 else None
    import torch.distributed as dist

    from launch.groups import GROUP_TIMEOUT

    members = list(range(size))
    device_group: Any = dist.new_group(members, timeout=GROUP_TIMEOUT, backend=backend)
    cpu_group: Any = dist.new_group(members, timeout=GROUP_TIMEOUT, backend="gloo")
    if group.rank >= size:
        return None
    node = group.ranks_per_node
    node = node if size % node == 0 else size
    return EPGroup(group.rank, size, node, device_group, cpu_group, group.host)


def _words(problem: str) -> str:
    """The command's flag instead of the setting that `launch.job` knows."""
    return problem.replace("parallel.ep=", "--ep ")
