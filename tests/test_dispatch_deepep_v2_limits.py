"""DeepEP's second API before there is a buffer: limits, what a probe says, sizes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dispatch.emulation as library_21
import dispatch.emulation.elastic_25 as library_25
from dispatch import deepep_v2_limits as limits
from dispatch import deepep_v2_machine as machine
from dispatch import dispatcher_names
from dispatch.base import DispatchConfig, DispatchError, WireFormat
from dispatch.deepep_v2 import ElasticDispatcher, EmulatedElasticDispatcher
from dispatch.mib import mib
from ep.group import EPGroup

V3 = DispatchConfig(7168, 8, 288, 4096, torch.bfloat16, False, WireFormat.FP8)
NODE = EPGroup(0, 8, 8, SimpleNamespace(), SimpleNamespace())
NODES = EPGroup(0, 32, 8, SimpleNamespace(), SimpleNamespace())


# -- limits --------------------------------------------------------------------------------------


def problems(api: limits.Api = limits.ELASTIC, **changes: int) -> list[str]:
    fits = {
        "num_ranks": 32,
        "num_nodes": 4,
        "fp8": True,
        "hidden": 7168,
        "top_k": 8,
        "num_experts": 288,
        "max_tokens": 4096,
        "alignment": 128,
    }
    return limits.problems(api, **{**fits, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        (
            {"hidden": 7040},
            ["hidden_size=7040: must be a multiple of 256; nearest are 6912 and 7168"],
        ),
        ({"hidden": 64}, ["hidden_size=64: must be a multiple of 256; nearest is 256"]),
        ({"top_k": 0}, ["top_k=0: valid are 1..32"]),
        ({"top_k": 33}, ["top_k=33: valid are 1..32"]),
        ({"top_k": 32}, []),
        (
            {"num_experts": 257},
            ["num_physical_experts=257 does not divide by 32 ranks: nearest are 256 and 288"],
        ),
        ({"num_ranks": 256, "num_nodes": 32, "num_experts": 256}, []),
        ({"num_ranks": 320, "num_nodes": 40, "num_experts": 320}, []),
        (
            {"num_ranks": 1025, "num_nodes": 25, "num_experts": 1025},
            ["1025 ranks: at most 1024"],
        ),
        (
            {"num_ranks": 1024, "num_nodes": 128, "num_experts": 1024},
            [
                "1024 ranks on 128 nodes: at most 512, a thread for each; rows are relayed among "
                "32 nodes at most"
            ],
        ),
        (
            {"num_ranks": 144, "num_nodes": 2, "num_experts": 288},
            ["72 ranks a node: at most 64 where there are several"],
        ),
        (
            {"num_ranks": 16, "num_nodes": 2, "num_experts": 1936},
            ["121 experts a rank: at most 120 with 8 ranks a node of several"],
        ),
        ({"num_experts": 2080}, ["num_physical_experts=2080: at most 2048"]),
    ],
)
def test_limits_say_what_would_be_valid(changes: dict[str, int], said: list[str]) -> None:
    assert problems(**changes) == said


def test_experts_of_a_rank_differ_by_version() -> None:
    assert problems(num_ranks=2, num_nodes=1, num_experts=512) == []
    (said,) = problems(num_ranks=2, num_nodes=1, num_experts=514)
    assert said == "257 experts a rank: at most 256, so num_physical_experts <= 512"
    assert problems(limits.EP, num_ranks=2, num_nodes=1, num_experts=1024) == []
    (said,) = problems(limits.EP, num_ranks=2, num_nodes=1, num_experts=1026)
    assert said == "513 experts a rank: at most 512, so num_physical_experts <= 1024"


def test_the_largest_number_of_tokens_is_the_largest() -> None:
    (said,) = problems(max_tokens=10**8)
    most = int(said.rsplit(" ", 1)[1])
    assert problems(max_tokens=most) == [] and problems(max_tokens=most + 1) != []
    free = 2**30
    most = limits.largest_tokens(limits.ELASTIC, NODES, V3, free)
    size = [
        limits.buffer_bytes_for(limits.ELASTIC, NODES, replace(V3, max_tokens_per_rank=n))
        for n in (most, most + 64)  # buffers grow in steps of 2 MiB
    ]
    assert size[0] + limits.ELASTIC.workspace <= free < size[1] + limits.ELASTIC.workspace
    assert limits.largest_tokens(limits.ELASTIC, NODES, V3, 0) == 0


def test_versions_of_nccl_and_the_compiler(tmp_path: Path) -> None:
    assert machine.nccl_problems(limits.ELASTIC, (2, 30, 4)) == []
    (said,) = machine.nccl_problems(limits.ELASTIC, (2, 29, 7))
    assert said == "NCCL 2.29.7 is loaded: ElasticBuffer needs 2.30.4 or newer"
    (said,) = machine.nccl_problems(limits.EP, (2, 30, 7))
    assert said == "NCCL 2.30.7 is loaded: EPBuffer needs 2.32.3 or newer"
    nvcc = tmp_path / "bin" / "nvcc"
    environment = {"CUDA_HOME": str(tmp_path)}
    (said,) = machine.compiler_problems(limits.ELASTIC, environment)
    assert "compiled at run time" in said and "cannot be run (FileNotFoundError)" in said
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    assert machine.compiler_problems(limits.ELASTIC, environment) == []
    (said,) = machine.compiler_problems(limits.EP, environment)
    assert said == f"{nvcc} is of CUDA 13.0: EPBuffer needs 13.1 or newer"
    assert machine.find_nvcc({"EP_JIT_NVCC_COMPILER": "mine", **environment}) == "mine"


def test_between_nodes_gpus_must_reach_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.network_problems(1, {"EP_DISABLE_GIN": "1"}) == []
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    assert machine.network_problems(4, {"NCCL_GIN_TYPE": "3", "EP_DISABLE_GIN": "0"}) == []
    for environment, said in (
        ({"EP_DISABLE_GIN": "1"}, "EP_DISABLE_GIN is set: 4 nodes cannot do without GIN"),
        ({"NCCL_GIN_ENABLE": "0"}, "NCCL_GIN_ENABLE=0"),
        ({"NCCL_GIN_TYPE": "2"}, "proxy"),
    ):
        (found,) = machine.network_problems(4, environment)
        assert said in found
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    (found,) = machine.network_problems(4, {})
    assert "no RDMA device" in found


# -- what a probe says ---------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put modules in the places of the packages; None: not installed."""

    def put(deep_ep: Any = None, deep_ep_v25: Any = None) -> None:
        for name, module in (("deep_ep", deep_ep), ("deep_ep_v25", deep_ep_v25)):
            if module is None:
                monkeypatch.delitem(sys.modules, name, raising=False)
            else:
                monkeypatch.setitem(sys.modules, name, module)

    return put


def test_the_library_is_the_first_that_is_there(packages: Any) -> None:
    packages()
    answer = ElasticDispatcher.probe(NODE, V3)
    assert not answer.ok
    assert answer.reason == "deep_ep is not installed, nor deep_ep_v25"
    packages(SimpleNamespace(__version__="1.2.1", Buffer=object))
    answer = ElasticDispatcher.probe(NODE, V3)
    assert answer.reason.startswith("deep_ep 1.2.1 has neither ElasticBuffer (2.0) nor EPBuffer")
    packages(None, library_25)
    assert limits.load() == (library_25, limits.EP)
    packages(library_25, None)  # upstream keeps the name
    assert limits.load() == (library_25, limits.EP)
    packages(library_21, library_25)
    assert limits.load() == (library_21, limits.ELASTIC)


def test_a_probe_is_one_line_with_every_reason(packages: Any) -> None:
    class Old:
        def __init__(self, group: Any, num_bytes: int) -> None: ...
        def dispatch(self, x: Any) -> None: ...

    packages(SimpleNamespace(__version__="2.0.0", ElasticBuffer=Old))
    bad = replace(V3, hidden_size=7040, deterministic=True, dtype=torch.float32)
    reason = ElasticDispatcher.probe(NODE, bad).reason
    assert reason.startswith("deep_ep 2.0.0 ElasticBuffer: ") and "\n" not in reason
    for part in (
        "ElasticBuffer.__init__ takes no allow_hybrid_mode, explicitly_destroy, num_max_tokens_per",
        "ElasticBuffer.combine takes no async_with_compute_stream",
        "deterministic mode: the library sums in bfloat16 by where experts lie",
        "dtype=torch.float32: must be torch.bfloat16",
        "hidden_size=7040",
    ):
        assert part in reason
    with pytest.raises(DispatchError, match="dispatcher 'deepep_v2': deep_ep 2.0.0"):
        ElasticDispatcher(NODE, bad)


def test_the_machine_is_looked_at_last(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(library_21)
    reason = ElasticDispatcher.probe(NODE, V3).reason
    held = ElasticDispatcher.plan(NODE, V3).held
    assert reason.endswith(f"no CUDA device; the buffer needs {mib(held)} of one")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**28, 2**37))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(machine.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(machine, "find_nvcc", lambda environment: "no-such-compiler")
    reason = ElasticDispatcher.probe(NODE, V3).reason
    for part in (
        "the ranks' group is of gloo: must be of NCCL",
        f"the buffer needs {mib(held)}, 256.0 MiB are free on the device; at most ",
        "NCCL 2.28.3 is loaded",
        "no-such-compiler cannot be run",
    ):
        assert part in reason
    one = replace(V3, num_physical_experts=256)
    reason = ElasticDispatcher.probe(EPGroup.single(), one).reason
    assert "needs an NCCL process group; one rank by itself has none" in reason


def test_deterministic_torch_that_fills_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "fill_uninitialized_memory" in EmulatedElasticDispatcher.probe(NODE, V3).reason


def test_plans_are_the_library_s_formula() -> None:
    plan = EmulatedElasticDispatcher.plan(NODES, V3)
    size = limits.buffer_bytes(
        limits.ELASTIC, max_tokens=4096, hidden=7168, top_k=8, fp8=True, ranks=32, domain=8
    )
    assert plan.held == size + limits.ELASTIC.workspace
    rows = 32 * 4096
    assert plan.passing >= rows * (7168 + 4 * 56 + 2 * 7168)
    wide = EmulatedElasticDispatcher.plan(NODES, replace(V3, wire=WireFormat.MODEL))
    assert wide.passing - plan.passing == rows * (7168 - 4 * 56) and wide.held >= plan.held
    assert ElasticDispatcher.plan(NODES, V3) == plan  # also where it is not installed
    assert "deepep_v2" in dispatcher_names()


def test_above_32_nodes_rows_go_straight_to_each_rank() -> None:
    """320 ranks on 40 nodes: buffers to send from, and a place for each rank's rows."""
    many = EPGroup(0, 320, 8, SimpleNamespace(), SimpleNamespace())
    config = replace(V3, max_tokens_per_rank=128, num_physical_experts=320)
    assert limits.is_relayed(32) and not limits.is_relayed(40) and not limits.is_relayed(1)
    there = limits.row_bytes(limits.ELASTIC, 7168, 4 * 224, 8, True)
    back = limits.row_bytes(limits.ELASTIC, 2 * 7168, 0, 8, False)
    size = max(321 * 128 * there, (8 + 320) * 128 * back)
    assert limits.buffer_bytes_for(limits.ELASTIC, many, config) == -(-size // 2**21) * 2**21
    assert EmulatedElasticDispatcher.probe(many, config).ok
