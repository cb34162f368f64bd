"""`moeserve doctor`: what machines that we do not have would say, read from texts and folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dispatch import deepep
from dispatch.deepep_v2_limits import ELASTIC, EP
from launch.doctor import libraries
from launch.doctor.check import Check, State, counts, exit_code, fails, missing, ok, warning
from launch.doctor.gpu import (
    Gpu,
    card_check,
    device_checks,
    driver_problem,
    link_check,
    parse_query,
    parse_topology,
    presence_checks,
)
from launch.doctor.libraries import Libraries, Module, library_checks
from launch.doctor.machine import (
    UNLIMITED,
    clock_check,
    limit_checks,
    memory_check,
    parse_cpuinfo,
    parse_meminfo,
    processor_check,
    shared_memory_check,
)
from launch.doctor.network import choice_check, interfaces_check, name_check, variable_checks
from launch.doctor.rdma import ibgda_absent, rdma_checks, read_ports
from launch.doctor.screen import as_json
from launch.doctor.software import torch_check

ROOT = Path(__file__).parents[1]
TINY = ROOT / "checkpoints" / "tiny"


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# -- what a table means ---------------------------------------------------------------------------


def test_only_what_fails_ends_with_1() -> None:
    good = [ok("a", "b", "c"), missing("a", "d", "why"), warning("a", "e", "f", "g", "h")]
    assert exit_code(good) == 0 and exit_code([*good, fails("a", "x", "y", "z", "w")]) == 1
    assert counts(good) == {"ok": 1, "missing": 1, "warning": 1, "fails": 0}
    report = as_json(good, ranks=4)
    assert report["ok"] and report["checks"][2]["remedy"] == "h" and report["ranks"] == 4
    assert report["checks"][1]["state"] == "missing"


# -- GPUs -----------------------------------------------------------------------------------------

HGX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_3\n"
)
PCIE = (
    "        GPU0    GPU1    mlx5_0  CPU Affinity\n"
    "GPU0     X      PHB     PIX     0-15\n"
    "GPU1    PHB      X      PHB     0-15\n"
    "mlx5_0  PIX     PHB      X\n"
)


def test_topology_of_a_machine_with_nvlink_and_cards() -> None:
    found = parse_topology(HGX)
    assert found.gpus == ("GPU0", "GPU1", "GPU2", "GPU3") and found.nics == ("NIC0", "NIC1")
    assert found.devices == {"NIC0": "mlx5_0", "NIC1": "mlx5_3"}
    assert found.links["GPU0", "GPU3"] == "NV18" and found.links["NIC1", "GPU2"] == "PIX"
    assert found.near("GPU1") == ["mlx5_0"] and found.near("GPU3") == []
    assert link_check(found).found == "NV18 between all 4 GPUs"
    card = card_check(found)
    assert card is not None and card.state is State.WARNING and "GPU3" in card.found


def test_topology_without_nvlink_or_with_a_broken_one() -> None:
    found = parse_topology(PCIE)
    assert found.nics == ("mlx5_0",) and found.links["GPU0", "GPU1"] == "PHB"
    check = link_check(found)
    assert check.state is State.WARNING and "GPU0-GPU1" in check.reason
    assert "1 of 1 pairs" in check.reason
    uneven = link_check(parse_topology(HGX.replace("GPU0\t X \tNV18", "GPU0\t X \tNV12")))
    assert uneven.state is State.WARNING and "NV12 between 1 pairs" in uneven.found
    for text in ("", "nvidia-smi has failed", "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"):
        assert link_check(parse_topology(text)).state is State.OK  # one or none
        assert card_check(parse_topology(text)) is None


def test_what_nvidia_smi_says_of_devices() -> None:
    text = (
        "0, NVIDIA H200, 580.95.05, 143771, 9.0, 5, 16, 0, Disabled\n"
        "1, NVIDIA H200, 580.95.05, 143771, 9.0, 5, 16, 3, Enabled\n"
        "junk\n2, X, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]\n"
    )
    gpus = parse_query(text)
    assert [g.index for g in gpus] == [0, 1, 2] and gpus[0].capability == (9, 0)
    assert gpus[2].capability is None and gpus[2].memory == 0
    checks = by_name(device_checks(gpus[:2], "13.0"))
    assert checks["driver"].state is State.OK and checks["compute capability"].state is State.OK
    assert "GPU 1" in checks["MIG"].found and "3 uncorrected" in checks["ECC"].found
    assert by_name(device_checks(gpus, "13.0"))["same kind"].state is State.WARNING
    old = Gpu(0, "A100", "535.1", 81920, (8, 0))
    checks = by_name(device_checks([old], "13.0"))
    assert checks["driver"].state is State.FAILS and "580" in checks["driver"].reason
    assert checks["compute capability"].state is State.WARNING
    assert driver_problem("535.104", "12.4") is None and driver_problem("?", "12.4") is None


@pytest.mark.parametrize(
    ("devices", "smi", "cuda", "count", "name", "state"),
    [
        (0, False, None, 0, "devices", State.MISSING),
        (8, True, None, 0, "torch and GPUs", State.FAILS),
        (8, True, "13.0", 0, "torch and GPUs", State.FAILS),
        (8, False, "13.0", 8, "nvidia-smi", State.WARNING),
        (8, True, "13.0", 1, "torch and GPUs", State.WARNING),
        (8, True, "13.0", 8, "torch and GPUs", State.OK),
    ],
)
def test_presence(
    devices: int, smi: bool, cuda: str | None, count: int, name: str, state: State
) -> None:
    gpus = [Gpu(i, "H100", "580.1", 81559, (9, 0)) for i in range(devices)] if smi else []
    checks = by_name(presence_checks(gpus, devices, smi, cuda, count, ""))
    assert checks[name].state is state
    assert state is State.OK or checks[name].remedy
    # without any GPU nothing fails: the machine is for the CPU
    assert devices or exit_code([*checks.values()]) == 0


def test_nvswitch_without_its_manager() -> None:
    said = "Error 802: system not yet initialized"
    checks = by_name(presence_checks([], 8, True, "13.0", 0, said))
    assert checks["torch and GPUs"].reason == said
    assert "nvidia-fabricmanager" in checks["torch and GPUs"].remedy


# -- network cards --------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def card(
    root: Path,
    name: str,
    state: str = "4: ACTIVE",
    rate: str = "400 Gb/sec (4X NDR)",
    layer: str = "Ethernet",
    gids: dict[int, tuple[str, str]] | None = None,
) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    write(port / "state", state)
    write(port / "phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
    write(port / "rate", rate)
    write(port / "link_layer", layer)
    write(port / "../../fw_ver", "28.39.1002")
    (port / "gids").mkdir(exist_ok=True)
    for index, (gid, kind) in (gids or {}).items():
        write(port / "gids" / str(index), gid)
        write(port / "gid_attrs/types" / str(index), kind)


LINK_LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"
ROUTED = "0000:0000:0000:0000:0000:ffff:0a00:0005"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
GIDS = {
    0: (LINK_LOCAL, "IB/RoCE v1"),
    1: (LINK_LOCAL, "RoCE v2"),
    2: (ROUTED, "IB/RoCE v1"),
    3: (ROUTED, "RoCE v2"),
    4: (EMPTY, ""),
}


def whole_machine(root: Path) -> None:
    """Two RoCE cards, all that GPUs want."""
    for name in ("mlx5_0", "mlx5_1"):
        card(root, name, gids=GIDS)
    for name in ("uverbs0", "uverbs1", "rdma_cm"):
        write(root / "dev/infiniband" / name, "")
    write(root / "dev/gdrdrv", "")
    write(root / "proc/modules", "nvidia_peermem 16384 0 - Live\nnvidia 1 2 - Live")
    write(
        root / "proc/driver/nvidia/params",
        'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"',
    )


def test_a_whole_roce_machine(tmp_path: Path) -> None:
    whole_machine(tmp_path)
    ports = read_ports(tmp_path)
    assert [p.name for p in ports] == ["mlx5_0:1", "mlx5_1:1"] and ports[0].rate == 400
    assert ports[0].is_up and ports[0].is_roce and ports[0].gid_index == 3
    assert ports[0].gids is not None and 4 not in ports[0].gids and ports[0].gids[3] == "RoCE v2"
    checks = by_name(rdma_checks(tmp_path, has_gpu=True))
    assert {c.state for c in checks.values()} == {State.OK}
    assert checks.keys() == {
        "links", "firmware", "RoCE v2 GID", "/dev/infiniband", "peer memory", "IBGDA driver keys",
        "GDRCopy",
    }  # fmt: skip
    assert "index 3" in checks["RoCE v2 GID"].found


def test_what_a_machine_with_cards_may_lack(tmp_path: Path) -> None:
    whole_machine(tmp_path)
    (tmp_path / "dev/infiniband/rdma_cm").unlink()
    (tmp_path / "dev/gdrdrv").unlink()
    write(tmp_path / "proc/modules", "nvidia 1 2 - Live")
    write(tmp_path / "proc/driver/nvidia/params", 'EnableStreamMemOPs: 0\nRegistryDwords: ""')
    card(tmp_path, "mlx5_2", state="1: DOWN", gids=GIDS)
    checks = by_name(rdma_checks(tmp_path, has_gpu=True))
    warned = {name for name, c in checks.items() if c.state is State.WARNING}
    assert warned == {"links", "/dev/infiniband", "peer memory", "IBGDA driver keys"}
    assert "mlx5_2:1" in checks["links"].found and "rdma_cm" in checks["/dev/infiniband"].reason
    assert "PeerMappingOverride" in checks["IBGDA driver keys"].found
    assert checks["GDRCopy"].state is State.MISSING
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module")
    assert by_name(rdma_checks(tmp_path, True))["peer memory"].state is State.OK
    assert by_name(rdma_checks(tmp_path))["links"].state is State.WARNING  # of no GPU's concern
    assert "peer memory" not in by_name(rdma_checks(tmp_path))


def test_gids_that_do_not_fit(tmp_path: Path) -> None:
    whole_machine(tmp_path)
    wrong = by_name(rdma_checks(tmp_path, environ={"NCCL_IB_GID_INDEX": "2"}))["RoCE v2 GID"]
    assert wrong.state is State.WARNING and "NCCL_IB_GID_INDEX=2" in wrong.found
    right = by_name(rdma_checks(tmp_path, environ={"NCCL_IB_GID_INDEX": "3"}))["RoCE v2 GID"]
    assert right.state is State.OK
    card(tmp_path, "mlx5_3", gids={0: (LINK_LOCAL, "IB/RoCE v1"), 1: (ROUTED, "RoCE v2")})
    assert "differ" in by_name(rdma_checks(tmp_path))["RoCE v2 GID"].reason
    card(tmp_path, "mlx5_4", gids={0: (LINK_LOCAL, "IB/RoCE v1")})
    assert "mlx5_4:1" in by_name(rdma_checks(tmp_path))["RoCE v2 GID"].found
    card(tmp_path, "mlx5_5", rate="100 Gb/sec (4X EDR)", layer="InfiniBand")
    assert "rates differ" in by_name(rdma_checks(tmp_path))["links"].reason


def test_no_card_and_no_link(tmp_path: Path) -> None:
    (check,) = rdma_checks(tmp_path)
    assert check.state is State.MISSING and "TCP" in check.reason
    card(tmp_path, "mlx5_0", state="1: DOWN", layer="InfiniBand")
    assert "no link is up" in by_name(rdma_checks(tmp_path))["links"].reason
    assert ibgda_absent("") == ["EnableStreamMemOPs=1", "PeerMappingOverride=1"]


# -- libraries ------------------------------------------------------------------------------------

GOOD = Libraries(
    modules={
        "deep_ep": Module("deep_ep", True, "sgl-deep-ep", "0.1.2.post1"),
        "deep_gemm": Module("deep_gemm", True, "sgl-deep-gemm", "0.2.3"),
        "flash_mla": Module("flash_mla", True, "sgl-flash-mla", "1.0.0"),
        "flashinfer": Module("flashinfer", True, "flashinfer-python", "0.7.2"),
        "triton": Module("triton", True, "triton", "3.8.0"),
    },
    deep_ep_apis=("Buffer", "ElasticBuffer"),
    nccl=(2, 30, 7),
    nvshmem_wheel=(3, 4, 5),
    nvshmem_host=(3, 4, 5),
    nvshmem4py="0.4.1",
    nvcc="13.0",
    nvcc_path="nvcc",
)


def changed(**values: object) -> dict[str, Check]:
    fields = {name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__} | values
    return by_name(library_checks(Libraries(**fields), has_gpu=True))


def test_libraries_that_go_together() -> None:
    assert {c.state for c in changed().values()} == {State.OK}
    assert "Buffer, ElasticBuffer" in changed()["DeepEP"].found


def test_libraries_that_do_not() -> None:
    hangs = changed(nvshmem_wheel=(3, 7, 2), nvshmem_host=(3, 7, 2))["NVSHMEM"]
    assert hangs.state is State.WARNING and "3.5.19" in hangs.reason and "3.4.5" in hangs.remedy
    second_only = changed(nvshmem_wheel=(3, 7, 2), nvshmem_host=None, deep_ep_apis=("EPBuffer",))
    assert second_only["NVSHMEM"].state is State.OK
    assert "two releases" in changed(nvshmem_host=(3, 6, 5))["NVSHMEM"].reason
    assert changed(nccl=(2, 27, 3))["NCCL"].state is State.WARNING
    assert changed(nvcc=None)["nvcc"].state is State.MISSING
    assert "13.1" in changed(deep_ep_apis=("EPBuffer",))["nvcc"].reason
    assert changed(deep_ep_apis=())["DeepEP"].state is State.WARNING

    def module(name: str, **more: object) -> dict[str, Check]:
        return changed(modules=GOOD.modules | {name: Module(name, **more)})  # type: ignore[arg-type]

    old = module("deep_ep", here=True, package="deep-ep", version="1.0.0")["DeepEP"]
    assert old.state is State.WARNING and "first release" in old.reason
    broken = module("deep_gemm", here=True, package="x", error="ImportError: libcuda.so.1")
    assert "libcuda" in broken["DeepGEMM"].reason
    gone = module("flash_mla")["FlashMLA"]
    assert gone.state is State.MISSING and "sgl-flash-mla" in gone.remedy
    gone = module("flashinfer")["FlashInfer"]
    assert gone.state is State.MISSING and "flashinfer-python" in gone.remedy
    assert "--kernel-table" in gone.reason
    assert "libcuda" in module("flashinfer", here=True, error="libcuda")["FlashInfer"].reason


def test_without_a_gpu_no_library_is_needed() -> None:
    checks = [*library_checks(Libraries(), has_gpu=False)]
    assert {c.state for c in checks} == {State.MISSING}
    assert all(c.reason == "not needed without a GPU" and not c.remedy for c in checks)
    assert {c.state for c in library_checks(GOOD, has_gpu=False)} == {State.OK}


def test_the_numbers_are_those_of_the_adapters() -> None:
    assert libraries.NVSHMEM_HANGS_FROM == deepep._NVSHMEM_HANGS_FROM
    assert ELASTIC.nccl == libraries.NCCL_FOR_V2 and EP.nvcc == libraries.NVCC_FOR_V25
    assert libraries.import_error("json") is None
    said = libraries.import_error("no_such_module_at_all")
    assert said is not None and "ModuleNotFoundError" in said


# -- host and network -----------------------------------------------------------------------------


def test_processors() -> None:
    intel = parse_cpuinfo(
        "processor : 0\nmodel name : Xeon\nflags : fma avx2 avx512f avx512_bf16 amx_bf16\n"
    )
    check = processor_check(intel)
    assert check.found == "Xeon, AVX-512" and "amx_bf16, avx512_bf16" in check.reason
    arm = parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert "NEON" in processor_check(arm).found and "bf16" in processor_check(arm).reason
    old = parse_cpuinfo("model name : QEMU Virtual CPU\nflags : sse2\n")
    assert processor_check(old).state is State.WARNING
    assert parse_meminfo("MemTotal: 1000 kB\nHugePages_Total: 3\nx\n") == {
        "MemTotal": 1024000,
        "HugePages_Total": 3,
    }


def test_limits_clocks_and_shared_memory() -> None:
    poor = by_name(limit_checks(1024, 1 << 20, 8 << 20, has_rdma=True))
    assert {c.state for c in poor.values()} == {State.WARNING}
    assert poor["open files"].remedy.startswith("ulimit -n 65536")
    assert "limits.conf" in by_name(limit_checks(1024, 1024, UNLIMITED, True))["open files"].remedy
    rich = by_name(limit_checks(UNLIMITED, UNLIMITED, 8 << 20, False))
    assert {c.state for c in rich.values()} == {State.OK}
    assert clock_check("tsc", []).state is State.OK
    assert "echo tsc" in clock_check("hpet", ["tsc", "hpet"]).remedy
    assert clock_check("acpi_pm", ["acpi_pm"]).state is State.WARNING
    assert clock_check("", []).state is State.MISSING
    half = {"MemTotal": 64 * 10**9, "MemAvailable": 32 * 10**9}
    assert memory_check(half).state is State.OK and "container" not in memory_check(half).found
    assert memory_check(half, 10**9).state is State.WARNING
    assert memory_check(half, 1 << 62).state is State.OK and memory_check({}).found == "-"
    small = shared_memory_check(60 << 20, 64 << 20)
    assert small.state is State.WARNING and "--shm-size" in small.remedy
    assert torch_check("2.9.1+cu128", "12.8").state is State.WARNING
    assert "for CUDA 13.0" in torch_check("2.14.1", "13.0").found


def test_names_and_interfaces() -> None:
    here = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"], "down0": []}
    debian = name_check("node1", "127.0.1.1")
    assert debian.state is State.WARNING and "127.0.1.1" in debian.found
    assert name_check("node1", None).state is State.WARNING
    assert name_check("node1", "10.0.0.5").state is State.OK
    assert choice_check(here, "10.1.0.5", {}).found == "ib0 (10.1.0.5)"
    assert choice_check(here, None, {}).state is State.WARNING
    assert choice_check(here, "127.0.0.1", {}).state is State.WARNING
    assert choice_check(here, None, {"GLOO_SOCKET_IFNAME": "eth0"}).state is State.OK
    assert "eth0 10.0.0.5 (25000 Mbit/s)" in interfaces_check(here, {"eth0": 25000}).found
    assert interfaces_check({"lo": ["127.0.0.1"]}, {"lo": 0}).state is State.WARNING
    told = by_name(
        variable_checks(
            here, {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "ib", "OTHER": "x"}
        )
    )
    assert told["GLOO_SOCKET_IFNAME"].state is State.WARNING
    assert "eth9" in told["GLOO_SOCKET_IFNAME"].reason
    assert told["NCCL_SOCKET_IFNAME"].state is State.OK and len(told) == 2
    for text, state in (("=ib", State.WARNING), ("^docker", State.OK), ("=ib0:1", State.OK)):
        assert (
            by_name(variable_checks(here, {"NCCL_SOCKET_IFNAME": text}))["NCCL_SOCKET_IFNAME"].state
            is state
        )


# -- dispatchers, checkpoint, the command ---------------------------------------------------------
