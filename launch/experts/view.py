"""View: what one source says of experts, whatever it was: loads, where they live, who sends whom.

Plain data and what follows from it at once. Knows nothing of files, servers or screens.

Shape letters: S steps or intervals, L layers that have experts (MTP layers last), E logical
experts, G ranks, P slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep.load import load_of_ranks
from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording
from moeserve.errors import ConfigError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


MOST_PIECES = 8  # of a shared expert
TOP_K = 8  # where nothing says how many routed experts a token picks


@dataclass(frozen=True, eq=False)
class View:
    """kind: job, recording, trace (another tool's dump) or placement. layers [L]: the model's
    numbers. num_routed: experts beyond are pieces of a hosted shared expert. history [S, L, E]:
    loads of the chosen phase, None for a placement alone. traffic [G, G]: rows sent, from rank to
    rank. expert_bytes [L], empty where not known. about: steps, tokens and the like, as plain data.
    assumed: the placement is not the source's own, but as a flag says."""

    name: str
    kind: str
    phase: str
    layers: tuple[int, ...]
    num_mtp_layers: int
    num_experts: int
    num_routed: int
    history: FloatArray | None = None
    placement: ExpertPlacement | None = None
    traffic: IntArray | None = None
    expert_bytes: tuple[int, ...] = ()
    num_groups: int = 1
    ranks_per_node: int = 1
    picks_per_token: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    assumed: bool = False
    recording: ExpertRecording | None = None

    @cached_property
    def loads(self) -> FloatArray:
        """[L, E]. ConfigError for a placement alone."""
        if self.history is None:
            raise ConfigError([f"{self.name}: a placement says nothing of loads; give a recording"])
        total: FloatArray = np.add.reduce(self.history, axis=0)
        return total

    @property
    def has_load(self) -> bool:
        return self.history is not None and bool(self.loads.any())

    @cached_property
    def times_mean(self) -> FloatArray:
        """[L, E]: load of each expert over the mean of the routed ones; 0 in idle layers."""
        mean = self.loads[:, : self.num_routed].mean(axis=1, keepdims=True)
        out = np.zeros_like(self.loads)
        np.divide(self.loads, mean, out=out, where=mean > 0)
        return out

    @cached_property
    def placed(self) -> ExpertPlacement:
        """ConfigError where nobody knows it."""
        if self.placement is None:
            raise ConfigError(
                [
                    f"{self.name}: does not say where experts live; give --placement FILE, or "
                    "--ranks N for experts in order over N ranks"
                ]
            )
        return self.placement

    @cached_property
    def rank_loads(self) -> FloatArray:
        """[L, G]."""
        return load_of_ranks(self.loads, self.placed)

    @cached_property
    def rank_times_mean(self) -> FloatArray:
        """[L, G]: load of each rank over the mean; 0 in idle layers."""
        mean = self.rank_loads.mean(axis=1, keepdims=True)
        out = np.zeros_like(self.rank_loads)
        np.divide(self.rank_loads, mean, out=out, where=mean > 0)
        return out

    @cached_property
    def busy(self) -> NDArray[np.bool_]:
        """[L]: layers that have load."""
        busy: NDArray[np.bool_] = self.loads.sum(axis=1) > 0
        return busy

    @cached_property
    def balance(self) -> FloatArray:
        """[L]: busiest rank / mean rank; 1 for idle layers."""
        return np.where(self.busy, self.rank_times_mean.max(axis=1), 1.0)

    @cached_property
    def is_trivial(self) -> bool:
        """Experts in order, then copies in order: loads were not looked at."""
        placed = self.placed
        trivial = ExpertPlacement.trivial(
            placed.num_layers,
            placed.num_logical_experts,
            placed.num_ranks,
            placed.num_redundant_experts,
            placed.generation,
        )
        return trivial == placed

    def node_of(self, rank: int) -> int | None:
        """None where nodes are not known, or are ranks."""
        return rank // self.ranks_per_node if self.ranks_per_node > 1 else None

    # -- names ---------------------------------------------------------------------------------

    def is_mtp(self, row: int) -> bool:
        return row >= len(self.layers) - self.num_mtp_layers

    def row_name(self, row: int) -> str:
        return f"{self.layers[row]}{' MTP' if self.is_mtp(row) else ''}"

    def expert_name(self, expert: int) -> str:
        if expert < self.num_routed:
            return str(expert)
        pieces = self.num_experts - self.num_routed
        return "shared" if pieces == 1 else f"shared {expert - self.num_routed}"

    def row_of(self, layer: int) -> int:
        """ConfigError names the valid ones."""
        if layer not in self.layers:
            raise ConfigError([f"--layer {layer}: layers that have experts: {ranges(self.layers)}"])
        return self.layers.index(layer)

    def summary(self) -> dict[str, Any]:
        """The head of every report."""
        generation = None if self.placement is None or self.assumed else self.placement.generation
        return {
            "source": self.name,
            "kind": self.kind,
            "phase": self.phase,
            "num_layers": len(self.layers),
            "num_experts": self.num_experts,
            "num_ranks": None if self.placement is None else self.placement.num_ranks,
            "generation": generation,
            "placement_assumed": self.assumed,
            **self.about,
        }

    def placed_as(self, placement: ExpertPlacement, assumed: bool = True) -> View:
        """The same loads with experts elsewhere. Where the placement has a few experts more, they
        are pieces of a hosted shared expert, which every token picks. ConfigError unless layers and
        experts fit."""
        mine = (len(self.layers), self.num_experts)
        theirs = (placement.num_layers, placement.num_logical_experts)
        more = theirs[1] - mine[1]
        if mine[0] == theirs[0] and 0 < more <= MOST_PIECES and self.num_routed == mine[1]:
            return self.with_shared(more).placed_as(placement, assumed)
        if mine != theirs:
            raise ConfigError(
                [
                    f"placement: {theirs[0]} layers of {theirs[1]} experts; {self.name} has "
                    f"{mine[0]} of {mine[1]}"
                ]
            )
        traffic = self.traffic
        if traffic is not None and len(traffic) != placement.num_ranks:
            traffic = None
        return replace(self, placement=placement, assumed=assumed, traffic=traffic)

    def with_shared(self, pieces: int, top_k: int | None = None) -> View:
        """As if the shared expert were hosted in slots: one expert more for each of its pieces.
        top_k: routed experts that a token picks; TOP_K where nobody says."""
        top_k = top_k or self.picks_per_token or TOP_K
        history = self.history
        if history is not None:
            tokens = history.sum(axis=2, keepdims=True) / top_k
            history = np.concatenate([history, *[tokens] * pieces], axis=2)
        return replace(
            self,
            history=history,
            num_experts=self.num_experts + pieces,
            placement=None,
            about={
                **self.about,
                "shared_expert": f"hosted; its load is one for each {top_k} picks",
            },
        )


def ranges(numbers: tuple[int, ...] | list[int]) -> str:
    """1,2,3,7 -> '1-3, 7'."""
    parts: list[str] = []
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            first = numbers[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = i + 1
    return ", ".join(parts)
