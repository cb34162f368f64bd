"""The first placement with the shared expert in slots, and the named layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep.host_shared import place_with_shared
from ep.load import load_of_ranks
from ep.placement import EMPTY
from ep.presets import PRESETS


@given(
    routed=st.integers(1, 24),
    shared=st.integers(1, 3),
    top_k=st.integers(1, 4),
    ranks=st.integers(1, 12),
    redundant=st.integers(0, 40),
)
def test_every_slot_is_as_asked(
    routed: int, shared: int, top_k: int, ranks: int, redundant: int
) -> None:
    placement = place_with_shared(2, routed, shared, min(top_k, routed), ranks, redundant)
    hosted = routed + shared + redundant
    assert placement.num_logical_experts == routed + shared
    assert placement.num_redundant_experts == redundant
    assert placement.num_local_experts == -(-hosted // ranks)
    assert placement.num_empty_slots == placement.num_physical_experts - hosted
    local = [placement.experts_of(rank, 1) for rank in range(ranks)]
    for mine in local:
        here = [e for e in mine if e != EMPTY]
        assert here == sorted(here)
        for expert in {e for e in here if here.count(e) > 1}:
            # Two copies on one rank only where every rank has it or is full.
            assert all(expert in other or EMPTY not in other for other in local)
    counts = placement.replica_count[0]
    if redundant == 0:
        assert counts.tolist() == [1] * (routed + shared)
    # The shared expert's replicas have never more to do than a routed one's, unless one could not
    # be given more copies.
    load = np.array([top_k / routed] * routed + [1.0] * shared) / counts
    if counts[:routed].max() > 1:
        assert load[routed:].max() <= (min(top_k, routed) / routed) * (1 + 1e-12)


def test_few_copies_go_to_the_shared_expert() -> None:
    placement = place_with_shared(3, 16, 1, 4, 4, 3)
    assert placement.replica_count[:, 16].tolist() == [4, 4, 4]
    assert all(16 in placement.experts_of(rank, 2) for rank in range(4))
    # One copy alone: its rank has little else to do.
    alone = place_with_shared(1, 16, 1, 4, 4, 0)
    loads = load_of_ranks([[4.0] * 16 + [16.0]], alone)[0]
    assert loads.max() / loads.mean() < 1.01
    # Two pieces take turns.
    assert place_with_shared(1, 16, 2, 4, 4, 2).replica_count[0, 16:].tolist() == [2, 2]
    assert place_with_shared(1, 16, 2, 4, 4, 3).replica_count[0, 16:].tolist() == [3, 2]


def test_more_ranks_than_experts_leave_some_empty() -> None:
    placement = place_with_shared(1, 4, 1, 2, 8, 0)
    assert placement.num_empty_slots == 3 and placement.num_local_experts == 1


def test_presets_are_those_of_the_sources() -> None:
    decode, prefill, wide = (
        PRESETS[name] for name in ("decode-ep320", "prefill-ep32", "decode-ep144")
    )
    assert (decode.num_slots, decode.num_logical_experts, decode.shared) == (320, 257, "hosted")
    assert (prefill.num_slots, prefill.slots_per_gpu, prefill.num_redundant) == (288, 9, 32)
    assert (wide.num_slots, wide.slots_per_gpu, wide.num_gpus) == (288, 2, 144)
    for name, preset in PRESETS.items():
        assert preset.name == name and preset.num_gpus % preset.gpus_per_node == 0
        assert preset.num_logical_experts == 256 + (preset.shared == "hosted")


@pytest.mark.parametrize(("ranks", "redundant"), [(320, 63), (144, 31)])
def test_wide_layouts_are_even_under_uniform_routing(ranks: int, redundant: int) -> None:
    placement = place_with_shared(1, 256, 1, 8, ranks, redundant)
    loads = load_of_ranks([[8.0] * 256 + [256.0]], placement)[0]
    assert loads.max() / loads.mean() < 1.15
    assert placement.replica_count[0, 256] >= 32 or redundant < 31
