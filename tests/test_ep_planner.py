"""The planner from nothing: EPLB's contract, never less even than EPLB, near the bound, no
duplicates, the same answer always, refusals that help."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.placement import EMPTY
from ep.planner import Plan, PlanOptions, plan, rebalance_experts
from ep.planning.balance import table_balance
from ep.planning.duplicates import is_duplicate
from ep.planning.eplb import eplb_tables
from ep.planning.plan_loads import PlanError
from ep.planning.prices import Prices
from ep.planning.replicate import balance_bound

TRACES = Path(__file__).parent / "data/expert-load/dsv3_counts.npz"
PREFILL, DECODE = "prefill_in4096", "decode_in2000out100"


@pytest.fixture(scope="module")
def traces() -> dict[str, np.ndarray]:
    with np.load(TRACES) as archive:
        return {name: archive[name] for name in archive.files}


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    """(weight, replicas, groups, nodes, gpus) of any kind of load."""
    nodes = draw(st.integers(1, 4))
    gpus = nodes * draw(st.integers(1, 4))
    groups = draw(st.sampled_from([nodes, 2 * nodes, 1, 3]))
    experts = groups * draw(st.integers(1, 6))
    slots = gpus * (-(-experts // gpus) + draw(st.integers(0, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 4)), experts)
    kind = draw(st.sampled_from(["ties", "log-normal", "few", "counts"]))
    loads = {
        "ties": lambda: rng.integers(0, 4, shape).astype(float),
        "log-normal": lambda: rng.lognormal(0, 1.2, shape),
        "few": lambda: np.where(rng.random(shape) < 0.7, 0, rng.lognormal(0, 3, shape)),
        "counts": lambda: rng.integers(0, 10_000, shape).astype(float),
    }[kind]()
    return loads, slots, groups, nodes, gpus


def as_table(phy2log: torch.Tensor | np.ndarray, gpus: int) -> np.ndarray:
    table = np.asarray(phy2log)
    return table.reshape(len(table), gpus, -1)


@given(cases())
@settings(max_examples=120, deadline=None)
def test_contract_and_never_less_even_than_eplb(
    case: tuple[np.ndarray, int, int, int, int],
) -> None:
    loads, slots, groups, nodes, gpus = case
    phy2log, log2phy, logcnt = rebalance_experts(loads, slots, groups, nodes, gpus)
    layers, experts = loads.shape
    assert all(t.dtype == torch.int64 for t in (phy2log, log2phy, logcnt))
    assert phy2log.shape == (layers, slots) and logcnt.shape == (layers, experts)
    assert log2phy.shape == (layers, experts, int(logcnt.max()))
    for layer in range(layers):
        counts = torch.bincount(phy2log[layer], minlength=experts)
        assert torch.equal(counts, logcnt[layer]) and int(counts.min()) >= 1
        for expert in range(experts):
            own = log2phy[layer, expert]
            held = own[own >= 0]
            assert len(held) == counts[expert] == (own >= 0).sum()
            assert (phy2log[layer][held] == expert).all() and (own[len(held) :] == -1).all()
    # An idle layer counts as evenly loaded.
    seen = np.where(loads.any(axis=1, keepdims=True), loads, 1.0)
    ours = table_balance(seen, as_table(phy2log, gpus))
    theirs = table_balance(seen, as_table(eplb_tables(seen, slots, groups, nodes, gpus)[0], gpus))
    assert ours.mean() <= theirs.mean() + 0.001 + 1e-9
    if groups % nodes == 0:
        check_groups(as_table(phy2log, gpus), groups, nodes, experts)


def check_groups(table: np.ndarray, groups: int, nodes: int, experts: int) -> None:
    """Every group is on one node, and each node has as many."""
    layers, gpus, _ = table.shape
    group_of_slot = table // (experts // groups)
    for layer in range(layers):
        node_of = []
        for group in range(groups):
            on = {gpu // (gpus // nodes) for gpu in np.nonzero(group_of_slot[layer] == group)[0]}
            assert len(on) == 1
            node_of.append(on.pop())
        assert np.bincount(node_of, minlength=nodes).tolist() == [groups // nodes] * nodes


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(2, 5), st.floats(0.2, 1.2))
@settings(max_examples=40, deadline=None)
def test_no_expert_twice_on_a_gpu(seed: int, gpus: int, slots: int, sigma: float) -> None:
    """Where EPLB is not more even with duplicates, which many layers make all but certain."""
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(slots + 1, gpus * slots + 1))
    loads = rng.lognormal(0, sigma, (12, experts))
    made = plan(loads, num_gpus=gpus, num_slots_per_gpu=slots)
    kept = made.explanation.duplicates > 0
    table = as_table(made.placement.physical_to_logical, gpus)
    assert (is_duplicate(table).any(axis=(1, 2)) == kept).all()
    if kept.any():  # then it says so, and dropping EPLB's layers would have cost balance
        assert any("keep several copies" in note for note in made.explanation.notes)


@pytest.mark.parametrize(
    ("loads", "gpus", "slots", "best"),
    [
        ([1, 1, 0], 2, 2, 1.0),
        ([3, 2, 2, 2], 3, 2, 1.0),
        ([2, 2, 2, 0, 0, 3], 3, 4, 1.0),
        ([3, 0, 1, 0, 3, 3, 2, 0], 4, 5, 1.0),
        ([2, 1, 1, 0], 4, 3, 1.0),
        ([0, 0.5978, 0, 0, 0.7742], 4, 2, 1.1286),
        ([0.2918, 0.524, 2.6498, 5.3087], 3, 2, 1.0058),
        ([6.0041, 1.783, 0.8246, 0.0823, 3.2316], 4, 3, 1.0345),
        ([0.0381, 0.6424, 0, 0.319, 0], 3, 3, 1.0022),
        ([1.2376, 1.4857, 0.2415, 0.5365, 1.3997, 0.489], 4, 5, 1.0012),
        ([0.8674, 1.3333, 0.1932, 0.2183, 3.523, 0.0821, 6.0052], 3, 4, 1.0033),
        ([1.4373, 6.4429, 0.4388, 29.2639, 1.3746, 0.0499, 6.4296], 3, 4, 1.0125),
        ([0, 0, 0, 0.9036, 0.129, 0, 0, 0.4219, 0.913], 2, 6, 1.0040),
        ([0.4313, 0.1719, 0, 0.6938, 0, 0.9783, 0.834, 0, 0], 4, 5, 1.0003),
        ([0.6353, 0.2076, 2.9949, 7.9156, 1.1085, 1.1299, 1.2166, 1.6743, 0.1789], 2, 8, 1.0013),
        ([1.1977, 4.903, 0.1548, 3.4615, 0.3248, 1.0316, 0.4736, 0.6895, 0.2332], 3, 4, 1.0072),
    ],
)
def test_tiny_layers_are_as_even_as_can_be_without_duplicates(
    loads: list[float], gpus: int, slots: int, best: float
) -> None:
    """best: of all tables without duplicates, by integer programming; EPLB has some and is less
    even, or as even."""
    phy2log, _, _ = rebalance_experts([loads], gpus * slots, 1, 1, gpus)
    table = as_table(phy2log, gpus)
    assert not is_duplicate(table).any()
    assert table_balance(np.array([loads]), table)[0] == pytest.approx(best, abs=1e-4)
    made = plan([loads], num_gpus=gpus, num_slots_per_gpu=slots)
    assert not made.explanation.duplicates.any()


@pytest.mark.parametrize(
    ("name", "slots", "groups", "nodes", "gpus", "above_bound"),
    [
        (PREFILL, 288, 1, 1, 32, 0.005),
        (PREFILL, 288, 8, 4, 32, 0.005),
        (DECODE, 288, 1, 1, 72, 0.005),
        (DECODE, 432, 1, 1, 144, 0.005),
        (DECODE, 320, 1, 1, 320, 1e-9),
        (DECODE, 288, 1, 1, 144, 0.08),
    ],
)
def test_real_loads_come_near_the_bound(
    traces: dict[str, np.ndarray],
    name: str,
    slots: int,
    groups: int,
    nodes: int,
    gpus: int,
    above_bound: float,
) -> None:
    loads = traces[name]
    options = PlanOptions(group_policy="node" if groups > 1 else "free")
    made = plan(
        loads, num_slots=slots, num_groups=groups, num_nodes=nodes, num_gpus=gpus, options=options
    )
    why = made.explanation
    assert why.after.mean() <= why.bound.mean() + above_bound
    assert not why.duplicates.any()
    theirs, _ = eplb_tables(loads, slots, groups, nodes, gpus)
    eplb = table_balance(loads.astype(float), as_table(theirs, gpus)).mean()
    assert why.after.mean() <= eplb + 1e-12  # sums in another order
    assert (why.after >= why.bound - 1e-9).all()


def test_hosted_shared_expert_is_one_expert_more(traces: dict[str, np.ndarray]) -> None:
    loads = traces[DECODE].astype(float)
    loads = np.concatenate([loads, loads.sum(axis=1, keepdims=True) / 8], axis=1)
    made = plan(loads, num_slots=320, num_gpus=320)
    assert made.explanation.after.mean() == pytest.approx(1.830, abs=0.001)
    assert (made.placement.replica_count[:, 256] > 15).all()
    # The groups are those of the routed experts.
    grouped = PlanOptions(group_policy="node", num_ungrouped=1)
    made = plan(loads, num_slots=320, num_gpus=32, num_nodes=4, num_groups=8, options=grouped)
    table = as_table(made.placement.physical_to_logical, 32)
    for node in range(4):
        assert (table[:, node * 8 : node * 8 + 8] == 256).any(axis=(1, 2)).all()


def test_all_load_on_one_expert_with_more_copies_than_gpus() -> None:
    loads = np.zeros((2, 6))
    loads[:, 3] = 100.0
    made = plan(loads, num_gpus=4, num_slots_per_gpu=5)
    assert made.explanation.after.tolist() == [1.0, 1.0]
    assert made.placement.replica_count[:, 3].tolist() == [4, 4]


def test_more_slots_than_experts_are_empty_in_a_plan_and_filled_for_eplbs_callers() -> None:
    made = plan(np.ones((1, 3)), num_gpus=2, num_slots_per_gpu=5)
    assert made.placement.num_empty_slots == 4 and not made.explanation.duplicates.any()
    phy2log, _, logcnt = rebalance_experts(torch.ones(1, 3), 10, 1, 1, 2)
    assert int(phy2log.min()) >= 0 and int(logcnt.sum()) == 10


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_expert_numbers_do_not_matter(
    case: tuple[np.ndarray, int, int, int, int], seed: int
) -> None:
    loads, slots, _, _, gpus = case
    loads = loads + np.random.default_rng(seed).random(loads.shape) / 7  # no ties
    order = np.random.default_rng(seed).permutation(loads.shape[1])
    a = plan(loads, num_slots=slots, num_gpus=gpus).explanation
    b = plan(loads[:, order], num_slots=slots, num_gpus=gpus).explanation
    if not a.duplicates.any():
        # Small rows are searched in a pattern that knows numbers, and may do better by chance.
        assert np.abs(a.bound - b.bound).max() < 1e-9
        assert max(a.after.mean(), b.after.mean()) <= min(a.after.mean(), b.after.mean()) * 1.25


def test_same_plan_always_and_for_any_unit_of_load(traces: dict[str, np.ndarray]) -> None:
    def made(loads: object) -> Plan:
        return plan(loads, num_slots=40, num_gpus=8)

    loads = traces[DECODE][:3, :32]
    first = made(loads)
    assert made(loads.copy()).placement == first.placement
    assert made(torch.from_numpy(loads.astype(np.int64))).placement == first.placement
    assert made(loads.astype(np.float64).tolist()).placement == first.placement
    assert made(loads * 2.0**900).placement == first.placement
    assert made(np.asfortranarray(loads)).placement == first.placement
    # Known by its hash: another machine that finds another placement fails here.
    ties = np.arange(64).reshape(2, 32) % 5
    assert plan(ties, num_slots=40, num_gpus=8).placement.fingerprint[:16] == TIES


TIES = "f41fee56c2bb439a"  # changes with the search itself: then put the new one here


def test_loads_by_rule() -> None:
    def refused(loads: object) -> str:
        with pytest.raises(PlanError) as error:
            plan(loads, num_gpus=2, num_slots_per_gpu=2)
        return str(error.value)

    loads = np.ones((2, 4))
    for value, word in ((np.nan, "NaN"), (np.inf, "infinite"), (-1, "negative")):
        wrong = loads.copy()
        wrong[1, 2] = value
        text = refused(wrong)
        assert "layer 1" in text and "expert 2" in text and word in text
        with pytest.raises(PlanError, match=word):
            rebalance_experts(torch.from_numpy(wrong), 4, 1, 1, 2)
    steps = np.ones((3, 2, 4))
    steps[2, 0, 1] = np.nan
    assert "step 2, layer 0, expert 1" in refused(steps)
    assert "[layers, experts]" in refused(np.ones(4))
    assert "unequal length" in refused([[1, 2], [3]])
    assert "must be integers or floats" in refused(np.array([["a", "b"]]))
    idle = plan(np.zeros((1, 6)), num_gpus=3, num_slots_per_gpu=4)
    assert idle.placement.replica_count.tolist() == [[2] * 6]
    huge = plan(np.full((1, 4), 1e308), num_gpus=2, num_slots_per_gpu=2)
    assert huge.explanation.after[0] == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((256, 8, 2, 1), "num_nodes could be 1, or num_gpus 2"),
        ((288, 8, 3, 32), "num_nodes could be 2 or 4, or num_gpus 30 or 33"),
        ((257, 8, 4, 32), "nearest valid are 256 or 288"),
        ((224, 8, 4, 32), "fewer than 256 experts; on 32 GPUs valid are 256, 288"),
        ((256, 8, 1, 3), "nearest valid are 258"),
        ((288, 12, 4, 32), "num_groups could be 8 or 16"),
        ((288, 0, 4, 32), "num_groups=0"),
        ((288, 8, 4, 0), "num_gpus=0"),
        ((288, 8, 4, True), "num_gpus=True"),
        ((4 * 10**9, 1, 1, 4), "at most 1048576"),
    ],
)
def test_impossible_shapes_list_what_is_possible(arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError) as error:
        rebalance_experts(np.ones((1, 256)), *arguments)
    assert said in str(error.value)


def test_257_experts_in_groups_are_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match="num_ungrouped"):
        rebalance_experts(np.ones((1, 257)), 288, 8, 4, 32)


def test_groups_that_do_not_divide_by_nodes_are_ignored_in_the_five_argument_form() -> None:
    """As EPLB's rule is: then the experts need not divide into groups either."""
    loads = np.random.default_rng(0).lognormal(0, 1, (2, 257))
    groups_or_none = [rebalance_experts(loads, 33 * 9, g, n, 33) for g, n in ((8, 3), (1, 1))]
    for a, b in zip(*groups_or_none, strict=True):
        assert torch.equal(a, b)


def test_options_are_checked_and_never_ignored() -> None:
    for wrong, said in (
        ({"policy": "best"}, "'ours', 'eplb', 'contiguous'"),
        ({"group_policy": "rack"}, "'free', 'node', 'priced'"),
        ({"robust": "median"}, "mean+<z>"),
        ({"max_moved_slots": -1}, "at least 0"),
        ({"policy": "eplb", "max_moved_slots": 4}, "valid with them is 'ours'"),
        ({"robust": None}, "mean+<z>"),
        ({"robust": "mean+" + "9" * 400 + "*std"}, "mean+<z>"),
        ({"extra_slots_per_gpu": 1.5}, "must be an integer of at least 0"),
        ({"extra_slots_per_gpu": None}, "must be an integer of at least 0"),
        ({"max_moved_slots": "3"}, "must be an integer of at least 0"),
        ({"max_moved_slots": 1.5}, "must be an integer of at least 0"),
        ({"expert_bytes": 0}, "must be an integer of at least 1"),
        ({"num_ungrouped": "1"}, "must be an integer of at least 0"),
        ({"slack": np.inf}, "must be a finite number"),
        ({"slack": np.nan}, "must be a finite number"),
        ({"slack": "0.1"}, "must be a finite number"),
        ({"prices": None}, "must be a Prices"),
    ):
        with pytest.raises(PlanError) as error:
            PlanOptions(**wrong)  # type: ignore[arg-type]
        assert said in str(error.value)
    for wrong, said in (({"options": {}}, "PlanOptions"), ({"previous": "x"}, "Placement")):
        with pytest.raises(PlanError, match=f"must be a .*{said}"):
            plan(np.ones((1, 4)), num_gpus=2, num_slots_per_gpu=2, **wrong)  # type: ignore[arg-type]
    for wrong in ({"top_k": "8"}, {"top_k": 1.5}, {"pick_us": None}, {"link_gb_s": np.inf}):
        with pytest.raises(PlanError, match=f"prices.{next(iter(wrong))}="):
            Prices(**wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="8 groups do not divide over 3 nodes"):
        plan(
            np.ones((1, 16)), num_gpus=3, num_nodes=3, num_groups=8, num_slots_per_gpu=6,
            options=PlanOptions(group_policy="node"),
        )  # fmt: skip
    with pytest.raises(PlanError, match="give one of the two"):
        plan(np.ones((1, 4)), num_gpus=2)


def test_robust_weights_look_at_steps() -> None:
    quiet, busy = np.array([[1.0, 0, 0, 0]]), np.array([[0, 30.0, 30, 40]])
    steps = np.stack([quiet, busy])

    def copies(robust: str) -> list[int]:
        options = PlanOptions(robust=robust)
        made = plan(steps, num_gpus=3, num_slots_per_gpu=2, options=options)
        counts: list[int] = made.placement.replica_count[0].tolist()
        return counts

    # By sum, expert 0 is nothing; by the largest share of a step it is all of one.
    assert copies("mean")[0] == 1 and copies("max")[0] > 1 and copies("mean+1*std")[0] > 1
    assert plan(steps[:1], num_gpus=2, num_slots_per_gpu=2, options=PlanOptions(robust="max"))


def test_priced_groups_say_why(traces: dict[str, np.ndarray]) -> None:
    shape = {"num_slots": 288, "num_gpus": 32, "num_nodes": 4, "num_groups": 8}
    made = plan(traces[PREFILL], **shape, options=PlanOptions(group_policy="priced"))
    why = made.explanation
    assert why.prices is not None and 0 < why.grouped.sum() < 58
    assert why.prices["grouped_nodes"] == pytest.approx(3.143, abs=0.001)
    assert why.prices["free_nodes"] == pytest.approx(3.600, abs=0.001)
    table = as_table(made.placement.physical_to_logical, 32)
    check_groups(table[why.grouped], 8, 4, 256)
    assert "us a token and layer" in str(why)
    assert why.to_dict()["prices"] == why.prices
    # Where groups cannot stay, it says so.
    odd = {**shape, "num_slots": 270, "num_gpus": 30, "num_nodes": 3}
    why = plan(traces[PREFILL][:2], **odd, options=PlanOptions(group_policy="priced")).explanation
    assert not why.grouped.any() and "8 groups do not divide over 3 nodes" in why.notes[0]


def test_bound_holds_for_every_placement_there_is() -> None:
    """A tiny row, all ways to fill its slots."""
    from itertools import product

    rng = np.random.default_rng(5)
    for _ in range(4):
        loads = rng.lognormal(0, 1, (1, 3))
        best = min(
            float(table_balance(loads, np.array([filled]).reshape(1, 2, 2))[0])
            for filled in product(range(3), repeat=4)
            if set(filled) == {0, 1, 2}
        )
        assert balance_bound(loads, 4, 2)[0] <= best + 1e-9
        made = plan(loads, num_gpus=2, num_slots_per_gpu=2)
        assert made.explanation.after[0] == pytest.approx(best)


def test_contiguous_and_eplb_are_policies_too() -> None:
    loads = np.arange(1, 9)[None]
    made = plan(loads, num_gpus=4, num_slots_per_gpu=3, options=PlanOptions(policy="contiguous"))
    assert made.placement.physical_to_logical[0].tolist() == [*range(8), *range(4)]
    made = plan(loads, num_gpus=4, num_slots_per_gpu=3, options=PlanOptions(policy="eplb"))
    theirs, _ = eplb_tables(loads, 12, 1, 1, 4)
    assert made.placement.physical_to_logical.tolist() == theirs.tolist()
    assert EMPTY not in made.placement.physical_to_logical
