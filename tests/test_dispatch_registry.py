"""The registry of dispatchers, and the local one's own refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from thread_ranks import World, thread_world  # noqa: F401

import dispatch
from dispatch import create_dispatcher, dispatcher_names, join_probes, probe_all
from dispatch.base import CombineForm, DispatchConfig, DispatchError, HandleError, Probe
from dispatch.collective import CollectiveDispatcher
from dispatch.combine import combine_pairs
from dispatch.handles import pair_index
from dispatch.local import LocalDispatcher
from dispatch.wire import RowFormat
from ep.group import EPGroup

CONFIG = DispatchConfig(4, 2, 6, 8, torch.float32, deterministic=True)
FAST = DispatchConfig(4, 2, 6, 8, torch.float32, deterministic=False)


def test_auto_is_local_on_one_rank_and_says_why_not_the_others() -> None:
    choice = create_dispatcher("auto", EPGroup.single(), CONFIG)
    assert choice.dispatcher.name == "local" and choice.asked == "auto"
    assert choice.describe().startswith("dispatcher local: one rank holds every expert")
    assert "not torch, allgather: needs two ranks or more" in choice.describe()


def test_a_name_is_taken_at_its_word() -> None:
    with pytest.raises(DispatchError, match="'torch' refuses: needs two ranks or more"):
        create_dispatcher("torch", EPGroup.single(), CONFIG)
    with pytest.raises(DispatchError, match="'nope': unknown; valid are auto, local, torch"):
        create_dispatcher("nope", EPGroup.single(), CONFIG)
    with pytest.raises(DispatchError, match="dispatcher 'local': it sends nothing"):
        LocalDispatcher(SimpleNamespace(size=2), CONFIG)


def test_a_backend_that_cannot_be_imported_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {**dispatch._BACKENDS, "gone": ("dispatch.no_such_file", "X")}
    monkeypatch.setattr(dispatch, "_BACKENDS", table)
    probes = probe_all(EPGroup.single(), CONFIG)
    assert list(probes) == [*table]
    assert dispatcher_names() == [name for name in table if not name.endswith("_emulated")]
    assert not probes["gone"].ok and "ModuleNotFoundError: No module" in probes["gone"].reason


def test_what_every_rank_can_run_is_chosen_and_refusals_name_their_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = CollectiveDispatcher.probe

    def by_rank(group: EPGroup, config: DispatchConfig) -> Probe:
        return probe(group, config) if group.rank % 2 else Probe(False, "no such network")

    def body(group: EPGroup) -> list[str]:
        said = []
        for name in ("auto", "torch", "allgather"):
            try:
                said.append(create_dispatcher(name, group, CONFIG).describe())
            except DispatchError as error:
                said.append(str(error))
        return said

    monkeypatch.setattr(CollectiveDispatcher, "probe", staticmethod(by_rank))
    first, *others = world(3, body)
    assert all(said == first for said in others)
    assert first[0].startswith("dispatcher allgather: ")
    assert "\n  not torch: rank 0 and 1 more: no such network" in first[0]
    assert first[1] == "dispatcher 'torch' refuses: rank 0 and 1 more: no such network"
    assert first[2].startswith("dispatcher allgather: ") and "not torch" not in first[2]
    here, there = (dict.fromkeys("x", Probe(False, reason)) for reason in ("a", "b"))
    assert join_probes([here, there, here])["x"].reason == "rank 0 and 1 more: a; rank 1: b"
    assert join_probes([here, here])["x"] == here["x"]


def test_the_form_follows_the_mode_unless_given() -> None:
    def form(config: DispatchConfig, **hooks: CombineForm) -> CombineForm:
        choice = create_dispatcher("local", EPGroup.single(), config, **hooks)
        return choice.dispatcher.combine_form

    assert form(CONFIG) is CombineForm.PAIRS
    assert form(FAST) is CombineForm.SUMMED
    assert form(FAST, combine_form=CombineForm.PAIRS) is CombineForm.PAIRS


def test_local_refuses_what_does_not_fit() -> None:
    d = LocalDispatcher(EPGroup.single(), CONFIG)
    x, weights = torch.zeros(3, 4), torch.ones(3, 2)
    slots = torch.tensor([[0, 1], [2, -1], [-1, -1]], dtype=torch.int32)
    with pytest.raises(DispatchError, match="x: torch.float64"):
        d.dispatch_start(x.double(), slots, weights)
    with pytest.raises(DispatchError, match=r"slots: -1..6; valid are -1 \(masked\) and 0..5"):
        d.dispatch_finish(d.dispatch_start(x, torch.where(slots == 2, 6, slots), weights))
    handle = d.dispatch_start(x, slots, weights)
    with pytest.raises(HandleError):
        d.combine_finish(handle)
    received = d.dispatch_finish(handle)
    assert received.x is x and received.counts.tolist() == [1, 1, 1, 0, 0, 0]
    assert received.weights.tolist() == [[1, 1], [1, 0], [0, 0]]
    with pytest.raises(DispatchError, match=r"y: 2 rows; must be 3, one for each valid pair"):
        d.combine_start(handle, x[:2])
    # A refused call leaves the handle where it was.
    index = torch.tensor([[2, 0], [1, -1], [-1, -1]])
    with pytest.raises(DispatchError, match="index: torch.int32"):
        d.combine_start(handle, x, index.int())
    d.combine_start(handle, torch.eye(3, 4), index)
    assert d.combine_finish(handle).tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(HandleError, match="it is spent"):
        d.combine_finish(handle)
    summed = LocalDispatcher(EPGroup.single(), FAST)
    handle = summed.dispatch_start(x, slots, weights)
    summed.dispatch_finish(handle)
    with pytest.raises(DispatchError, match="only the PAIRS form"):
        summed.combine_start(handle, x, index)
    with pytest.raises(DispatchError, match=r"y: \[2, 4\]; must be \[3, 4\]"):
        summed.combine_start(handle, x[:2])
    summed.combine_start(handle, x + 1)
    assert torch.equal(summed.combine_finish(handle), x + 1)


def test_combine_pairs_rounds_each_step_and_ignores_what_is_masked() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randn(20, 37, generator=g).bfloat16()
    y[5] = float("inf")  # a row nobody points at but masked picks of weight 0 might touch
    index = torch.randint(6, 20, (9, 4), generator=g)
    index[torch.rand(9, 4, generator=g) < 0.3] = -1
    y[0] = float("nan")
    weights = torch.rand(9, 4, generator=g)
    total = combine_pairs(y, index, weights)
    for t in range(9):
        row = torch.zeros(37)
        for k in range(4):
            if index[t, k] >= 0:
                row = row + y[index[t, k]].float() * weights[t, k]
        assert torch.equal(total[t], row)
        assert torch.equal(combine_pairs(y, index[t : t + 1], weights[t : t + 1])[0], row)
    nothing = combine_pairs(y[:0], torch.full((2, 4), -1), weights[:2])
    assert torch.equal(nothing, torch.zeros(2, 37))


def test_pair_index_numbers_the_valid_in_row_major_order() -> None:
    slots = torch.tensor([[3, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    assert pair_index(slots).tolist() == [[0, -1], [-1, -1], [1, 2]]


@pytest.mark.parametrize(
    ("hidden", "top_k", "dtype", "local", "row_bytes"),
    [
        (7168, 8, torch.bfloat16, 9, 14336 + 32 + 16),
        (7, 3, torch.bfloat16, 1, 16 + 12 + 8),
        (5, 1, torch.float32, 40000, 20 + 4 + 4),
    ],
)
def test_rows_on_the_wire(
    hidden: int, top_k: int, dtype: torch.dtype, local: int, row_bytes: int
) -> None:
    form = RowFormat.choose(hidden, top_k, dtype, local)
    assert form.row_bytes == row_bytes
    buffer = torch.zeros(3, form.row_bytes, dtype=torch.uint8)
    x, weights, slots = form.split(buffer)
    written = torch.randn(3, hidden).to(dtype), torch.rand(3, top_k), torch.arange(3 * top_k)
    for part, value in zip((x, weights, slots), written, strict=True):
        part.copy_(value.reshape(part.shape))
    for part, value in zip(form.split(buffer), written, strict=True):
        assert torch.equal(part, value.reshape(part.shape).to(part.dtype))
