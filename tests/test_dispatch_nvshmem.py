"""The `nvshmem` backend without ranks: limits, sizes, versions, start; its device path walked with
tensors without values through torch's registered operators, where any look at one is an error."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispatch import nvshmem_library
from dispatch.base import (
    DispatchConfig,
    DispatchError,
    Fp8Tokens,
    ScaleFormat,
    WireFormat,
)
from dispatch.emulation.symmetric import SymmetricMemory
from dispatch.fp8 import quantise, row_scales
from dispatch.mib import mib
from dispatch.nvshmem import EmulatedSymmetricDispatcher, SymmetricDispatcher
from dispatch.nvshmem_sizes import SymmetricRow, buffer_shapes, row_of, rows_out, slots_of

V3 = DispatchConfig(7168, 8, 256, 128, torch.bfloat16, deterministic=True)


def group(size: int, per_node: int = 8) -> Any:
    per_node = min(size, per_node)
    return SimpleNamespace(
        rank=0,
        size=size,
        ranks_per_node=per_node,
        num_nodes=size // per_node,
        device_group=SimpleNamespace(group_name="experts"),
        cpu_group=None,
    )


# -- limits -------------------------------------------------------------------------------------


def test_what_fits_says_so() -> None:
    answer = EmulatedSymmetricDispatcher.probe(group(16), V3)
    held = EmulatedSymmetricDispatcher.plan(group(16), V3).held
    assert answer.ok and answer.reason == (
        f"symmetric memory, emulated, 16 ranks 2 nodes by ibrc, buffers of {mib(held)}"
    )


@pytest.mark.parametrize(
    ("ranks", "change", "said"),
    [
        (1, {}, "needs two ranks or more"),
        (32, {}, "32 ranks: combine takes at most 16, dispatch 32; so at most 16"),
        (8, {}, "num_physical_experts=256, 32 a rank: dispatch takes at most 16, combine 32; "
                "so at most 16 a rank, 128 in all"),
        (16, {"num_physical_experts": 250}, "250 does not divide by 16 ranks: nearest are 240 and "
                                            "256"),
        (16, {"hidden_size": 100}, "hidden_size=100: a row must be whole words of 16 bytes; "
                                   "nearest are 96 and 104"),
        (16, {"hidden_size": 4, "dtype": torch.float32}, None),
    ],
)  # fmt: skip
def test_limits_name_the_largest_valid_value(
    ranks: int, change: dict[str, Any], said: str | None
) -> None:
    answer = EmulatedSymmetricDispatcher.probe(group(ranks), replace(V3, **change))
    assert answer.ok is (said is None)
    assert said is None or said in answer.reason


def test_all_problems_are_named_at_once_and_without_the_library_too() -> None:
    config = replace(V3, num_physical_experts=250, hidden_size=100)
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    answer = SymmetricDispatcher.probe(group(32), config)
    said = answer.reason.split("; ")
    assert not answer.ok and len(answer.reason.splitlines()) == 1
    assert said[0] == f"torch {torch.__version__}: built without CUDA, hence without NVSHMEM"
    assert "32 ranks" in answer.reason and "hidden_size=100" in answer.reason
    with pytest.raises(DispatchError, match="dispatcher 'nvshmem': torch .* without NVSHMEM"):
        SymmetricDispatcher(group(16), V3)


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "nbytes", "form"),
    [
        (WireFormat.MODEL, 14336, ScaleFormat.NONE),
        (WireFormat.FP8, 7168 + 4 * 56, ScaleFormat.F32_ROW),
        (WireFormat.FP8_UE8M0, 7168 + 4 * 14 + 8, ScaleFormat.UE8M0_ROW),  # to whole words
    ],
)
def test_a_row(wire: WireFormat, nbytes: int, form: ScaleFormat) -> None:
    row = row_of(replace(V3, wire=wire))
    assert (row.nbytes, row.scale_format) == (nbytes, form)
    buffer = torch.zeros(3, nbytes, dtype=torch.uint8)
    values, scales = row.split(buffer)
    x = torch.randn(3, 7168).bfloat16()
    if wire is WireFormat.MODEL:
        values.copy_(x)
        assert scales is None and torch.equal(row.split(buffer)[0], x)
        return
    sent = quantise(x, wire)
    assert scales is not None and scales.shape == sent.scales.shape
    values.view(torch.uint8).copy_(sent.values.view(torch.uint8))
    scales.copy_(sent.scales)
    again = row.split(buffer)
    assert torch.equal(again[0].view(torch.uint8), sent.values.view(torch.uint8))
    assert again[1] is not None and torch.equal(again[1], sent.scales)


def test_a_row_whose_values_end_between_words() -> None:
    row = SymmetricRow(18, torch.bfloat16, WireFormat.FP8)
    assert row.nbytes == 32  # 18, two to reach the scale, 4, eight to a whole word
    values, scales = row.split(torch.zeros(2, 32, dtype=torch.uint8))
    assert values.shape == (2, 18) and scales is not None and scales.shape == (2, 1)


def test_plan_is_the_worst_case() -> None:
    assert rows_out(V3, 16, 128, 1) == 16 * 128 * 8 + 16
    assert rows_out(replace(V3, num_physical_experts=64), 16, 128, 128) == 16 * 128 * 4 + 4 * 128
    shapes = buffer_shapes(V3, 16, 128)
    assert shapes["rows_in"] == ((128 * 8, 14336), torch.uint8)
    assert shapes["y_out"] == ((128 * 8, 7168), torch.bfloat16)
    arrives = 16 * 128 * 8 + 16 * 128
    held = 2 * (2 * arrives * 14336 + 2 * 128 * 8 * 14336 + 5 * 256 * 8)
    plan = SymmetricDispatcher.plan(group(16), V3)
    assert (plan.held, plan.passing) == (held, 2 * 128 * 7168 * 4)
    fp8 = SymmetricDispatcher.plan(group(16), replace(V3, wire=WireFormat.FP8)).held
    assert fp8 == held - 2 * (arrives + 128 * 8) * (14336 - 7392)


def test_slots_of_padded_segments() -> None:
    slots = slots_of(14, torch.tensor([0, 4, 8]), torch.tensor([3, 0, 4]))
    assert slots.dtype == torch.int32
    assert slots[:, 0].tolist() == [0, 0, 0, -1, -1, -1, -1, -1, 2, 2, 2, 2, -1, -1]


# -- the device path ----------------------------------------------------------------------------


class _Registered:
    """torch's own operators; their Meta kernels take any tensor."""

    device = "meta"
    all_to_all_vdev_2d = staticmethod(torch.ops.symm_mem.all_to_all_vdev_2d)
    all_to_all_vdev_2d_offset = staticmethod(torch.ops.symm_mem.all_to_all_vdev_2d_offset)
    empty = staticmethod(torch.empty)

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> None:
        assert tensor.is_contiguous()


@pytest.mark.parametrize("wire", list(WireFormat))
@pytest.mark.parametrize("tokens", [0, 1, 128])
def test_a_layer_never_waits_for_the_device(wire: WireFormat, tokens: int) -> None:
    config = replace(V3, wire=wire)
    assert SymmetricDispatcher.graph_safe
    d = SymmetricDispatcher(group(16), config, library=_Registered())
    x: Any = torch.empty(tokens, 7168, dtype=torch.bfloat16, device="meta")
    if wire is not WireFormat.MODEL:
        form, dtype, width = row_scales(7168, wire)
        values = torch.empty(tokens, 7168, dtype=torch.float8_e4m3fn, device="meta")
        x = Fp8Tokens(values, torch.empty(tokens, width, dtype=dtype, device="meta"), form)
    slots = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
    weights = torch.empty(tokens, 8, device="meta")
    for bound in (None, tokens):
        d.set_step_bound(bound)
        handle = d.dispatch_start(x, slots, weights)
        received = d.dispatch_finish(handle)
        rows = rows_out(config, 16, 128 if bound is None else bound, d.align)
        assert received.x.shape == (rows, 7168) and received.x.device.type == "meta"
        assert received.slots.shape == received.weights.shape == (rows, 1)
        assert received.counts.shape == (16,)
        d.combine_start(handle, torch.empty(rows, 7168, dtype=experts_dtype(wire), device="meta"))
        home = d.combine_finish(handle)
        assert home.shape == (tokens, 7168) and home.dtype == torch.float32
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        _ = d.stats  # the one place that looks: so the walk could have failed


def experts_dtype(wire: WireFormat) -> torch.dtype:
    """Experts give what they like; it comes home in the model dtype."""
    return torch.bfloat16 if wire is WireFormat.MODEL else torch.float32


@pytest.mark.parametrize("name", ["all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"])
def test_the_emulation_takes_what_torch_registered(name: str) -> None:
    registered = getattr(torch.ops.symm_mem, name).default._schema
    mine = inspect.signature(getattr(SymmetricMemory(), name)).parameters
    theirs = [(a.name, a.has_default_value(), a.default_value) for a in registered.arguments]
    empty = inspect.Parameter.empty
    assert theirs == [
        (p.name, p.default is not empty, None if p.default is empty else p.default)
        for p in mine.values()
    ]
    assert not registered.returns


def test_torchs_operators_are_known_by_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert "built without CUDA" in str(nvshmem_library.why_absent())
    wanted = {**nvshmem_library._OPERATORS, "all_to_all_vdev_2d": "in_out_splits", "new": "x"}
    monkeypatch.setattr(nvshmem_library, "_OPERATORS", wanted)
    said = nvshmem_library.why_absent()
    assert said is not None and "has no symm_mem.all_to_all_vdev_2d, new as of" in said


def test_the_emulation_has_torchs_other_calls() -> None:
    real, mine = nvshmem_library.TorchSymmetricMemory(), SymmetricMemory()
    for name in vars(real):
        assert callable(getattr(mine, name))
    for name in ("rendezvous", "set_backend", "get_backend", "empty"):
        theirs = list(inspect.signature(getattr(real, name)).parameters)
        assert list(inspect.signature(getattr(mine, name)).parameters) == theirs, name


# -- the library --------------------------------------------------------------------------------


def test_versions_must_be_one() -> None:
    parse = nvshmem_library.parse_version
    assert parse("3.4.5") == (3, 4, 5) and parse("3.4.5.post1") == (3, 4, 5)
    problems = nvshmem_library.version_problems
    assert problems((3, 4, 5), (3, 4, 5)) == problems(None, (3, 4, 5)) == problems((3,), None) == []
    (said,) = problems((3, 4, 5), (3, 6, 5))
    assert said.startswith("NVSHMEM 3.6.5 is loaded, the package is 3.4.5: both must be one")


def test_what_reaches_other_nodes(tmp_path: Path) -> None:
    problems = nvshmem_library.node_problems
    assert problems(1, {"NVSHMEM_REMOTE_TRANSPORT": "none"}, tmp_path) == []
    assert "=none; must be ibrc" in problems(2, {"NVSHMEM_REMOTE_TRANSPORT": "none"}, tmp_path)[0]
    assert "no RDMA adapter" in problems(2, {}, tmp_path)[0]
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "pass it into the container" in problems(2, {}, tmp_path)[0]
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert problems(2, {}, tmp_path) == []
    told = nvshmem_library.transport
    assert told(1, {}) == "on one node" and told(2, {}) == "2 nodes by ibrc"
    assert told(2, {"NVSHMEM_IB_ENABLE_IBGDA": "1"}) == "2 nodes by IBGDA"
    assert told(2, {"NVSHMEM_REMOTE_TRANSPORT": "ucx"}) == "2 nodes by ucx"


def test_a_heap_that_cannot_grow_must_be_large_enough() -> None:
    problems, fixed = nvshmem_library.heap_problems, {"NVSHMEM_DISABLE_CUDA_VMM": "1"}
    assert problems(2**40, {}) == problems(2**30, fixed) == []
    assert "NVSHMEM_SYMMETRIC_SIZE=1G with" in problems(2**30 + 1, fixed)[0]
    for text, ok in (("1.5G", True), ("1600m", True), ("1073741824", False), ("what", True)):
        size = {**fixed, "NVSHMEM_SYMMETRIC_SIZE": text}
        assert (problems(2**30 + 2**28, size) == []) is ok, text


def test_the_device_is_asked_for_memory() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert nvshmem_library.device_problems(5 << 20, 8) == [
        "no CUDA device; symmetric buffers need 5.0 MiB of one"
    ]


def test_a_race_in_torchs_operators_is_known_by_its_kernels(tmp_path: Path) -> None:
    race, library = nvshmem_library.offsets_race, tmp_path / "libtorch_nvshmem.so"
    assert race(tmp_path) is None
    library.write_bytes(b"..._Z12allToAllV_2dPv...")
    assert race(tmp_path) is True
    library.write_bytes(b"..._Z20writeOutputOffsets_2dPl...")
    assert race(tmp_path) is False
    problems = nvshmem_library.race_problems
    assert problems(None) == problems(False) == []
    assert f"torch {torch.__version__} may fetch wrong rows" in problems(True)[0]


def test_the_backend_is_chosen_once() -> None:
    library = SymmetricMemory()
    nvshmem_library.select_backend(library)
    assert library.get_backend("cuda") == "NVSHMEM"
    nvshmem_library.select_backend(library)  # again: nothing happens
    other = SymmetricMemory()
    other.set_backend("CUDA")
    kept = other.empty(3, dtype=torch.int64)
    assert kept.tolist() == [-1, -1, -1]  # poisoned
    with pytest.raises(DispatchError, match="is CUDA's in this process, must be NVSHMEM's"):
        nvshmem_library.select_backend(other)


class _Core:
    """nvshmem4py, as far as it is used."""

    InitStatus = SimpleNamespace(STATUS_IS_INITIALIZED=2)

    def __init__(self, version: str = "3.4.5", running: bool = False) -> None:
        self.version, self.running, self.calls = version, running, []  # type: ignore[var-annotated]

    def get_version(self) -> Any:
        return SimpleNamespace(libnvshmem_version=self.version)

    def init_status(self) -> int:
        return 2 if self.running else 0

    def get_unique_id(self, empty: bool = False) -> str:
        return "" if empty else "the id"

    broken = False

    def init(self, **how: Any) -> None:
        if self.broken:
            raise OSError("no driver\nand more")
        self.calls.append(how)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 1 of two, whose rank 0 says what `theirs` holds."""
    theirs = SimpleNamespace(version="3.4.5", uid="the id", world=2)

    def gather(everyone: list[Any], mine: Any, group: Any) -> None:
        everyone[:] = [theirs.version, mine]

    def broadcast(said: list[Any], src: int, group: Any) -> None:
        said[:] = [theirs.uid]

    dist = nvshmem_library.dist
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(dist, "get_world_size", lambda: theirs.world)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    return SimpleNamespace(rank=1, size=2, cpu_group="cpu", theirs=theirs)


def test_start_by_a_unique_id_over_the_cpu_group(two: Any) -> None:
    core = _Core()
    said = nvshmem_library.start(two, core, device="device")
    assert said == "NVSHMEM 3.4.5 started by nvshmem4py, unique id over the CPU group"
    assert core.calls == [
        {"device": "device", "uid": "the id", "rank": 1, "nranks": 2, "initializer_method": "uid"}
    ]
    running = _Core(running=True)
    assert nvshmem_library.start(two, running) == "NVSHMEM 3.4.5 was running"
    core.broken = True
    with pytest.raises(DispatchError, match="NVSHMEM 3.4.5 does not start: OSError: no driver"):
        nvshmem_library.start(two, core, device="device")
    two.theirs.world = 4
    assert "some of the job's ranks only" in nvshmem_library.start(two, running)
    two.theirs.version = None
    assert "not installed" in nvshmem_library.start(two, None)
    assert running.calls == []


def test_ranks_with_other_versions_do_not_start(two: Any) -> None:
    for core, here in ((_Core("3.6.5"), "3.6.5"), (None, "none")):
        with pytest.raises(DispatchError, match=f"rank 0: 3.4.5, rank 1: {here}"):
            nvshmem_library.start(two, core)
