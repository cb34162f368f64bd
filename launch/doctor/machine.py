"""The host: processor, cores, memory, shared memory, limits, clock.

Knows Linux's files under `root` (another folder in tests). Knows nothing of GPUs or networks.
"""

from __future__ import annotations

import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.doctor.check import Check, missing, ok, warning

SECTION = "host"
LEAST_SHM = 1 << 30  # what NCCL and torch want of /dev/shm for eight ranks, with room
LEAST_FILES = 4096  # a rank holds a descriptor for each peer, and sockets for each client
GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page", "xen")
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Processor:
    """name as the system has it; flags in lower case."""

    name: str
    flags: frozenset[str]


def parse_cpuinfo(text: str) -> Processor:
    """/proc/cpuinfo of x86 or Arm; what it does not say stays empty."""
    name, flags = "", frozenset[str]()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key, value = key.strip().lower(), value.strip()
        if key in ("model name", "cpu model") and not name:
            name = value
        elif key in ("flags", "features") and not flags:
            flags = frozenset(value.lower().split())
    return Processor(name or platform.machine(), flags)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo -> bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdecimal():
            found[name.strip()] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return found


def read(path: Path) -> str:
    """A file's text without the last newline; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def machine_checks(root: Path = Path("/")) -> Iterator[Check]:
    yield from _processor(parse_cpuinfo(read(root / "proc/cpuinfo")))
    limit = read(root / "sys/fs/cgroup/memory.max")
    found = parse_meminfo(read(root / "proc/meminfo"))
    yield memory_check(found, int(limit) if limit.isdecimal() else None)
    yield _shared_memory(root / "dev/shm")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = (root / "sys/class/infiniband").is_dir()
    yield from limit_checks(files[0], files[1], locked[0], has_rdma)
    sources = root / "sys/devices/system/clocksource/clocksource0"
    yield clock_check(
        read(sources / "current_clocksource"), read(sources / "available_clocksource").split()
    )


def _processor(cpu: Processor) -> Iterator[Check]:
    from launch.env import usable_cores

    yield processor_check(cpu)
    cores = usable_cores()
    if cores == 1:
        yield warning(
            SECTION, "cores", "1", "the front end and the rank share it", "give it two or more"
        )
    else:
        yield ok(SECTION, "cores", str(cores), "usable by this process (affinity, cgroup)")


def processor_check(cpu: Processor) -> Check:
    """What native kernels compute with."""
    has = cpu.flags.__contains__
    if has("avx512f"):
        vector = "AVX-512"
    elif has("avx2") and has("fma"):
        vector = "AVX2"
    elif has("asimd") or has("neon"):
        vector = "NEON"
    else:
        return warning(
            SECTION,
            "processor",
            cpu.name,
            "neither AVX2 nor AVX-512 nor NEON: CPU kernels will be slow",
            "use a newer processor, or start the virtual machine with the host's CPU type",
        )
    bf16 = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if has(name)]
    told = f"bfloat16 in hardware ({', '.join(bf16)})" if bf16 else "no bfloat16 in hardware"
    return ok(SECTION, "processor", f"{cpu.name}, {vector}", told)


def memory_check(found: dict[str, int], limit: int | None = None) -> Check:
    """limit: of this process's cgroup, in bytes."""
    total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    if not total:
        return missing(SECTION, "memory", "the system does not say how much it has")
    text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if limit is not None and limit < total:
        text += f", of which this container may use {limit / 1e9:.1f} GB"
        free = min(free, limit)
    if free < 2e9:
        return warning(
            SECTION,
            "memory",
            text,
            "a rank of the smallest model takes 0.3 GB",
            "end what else runs, or raise the container's limit",
        )
    return ok(SECTION, "memory", text)


def _shared_memory(path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return missing(SECTION, "/dev/shm", "no shared memory: NCCL and data loaders want it")
    return shared_memory_check(usage.free, usage.total)


def shared_memory_check(free: int, total: int) -> Check:
    text = f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free"
    if free >= LEAST_SHM:
        return ok(SECTION, "/dev/shm", text)
    return warning(
        SECTION,
        "/dev/shm",
        text,
        "NCCL keeps its queues between ranks of a machine there",
        "in a container: --shm-size 16g (or --ipc host)",
    )


def limit_checks(files: int, files_hard: int, locked: int, has_rdma: bool) -> Iterator[Check]:
    """Of this process: open files (soft, hard), bytes of locked memory."""
    if files != UNLIMITED and files < LEAST_FILES:
        yield warning(
            SECTION,
            "open files",
            str(files),
            "a rank holds one for each peer and client",
            f"ulimit -n {65536 if files_hard == UNLIMITED else min(files_hard, 65536)} before"
            " the start"
            if files_hard == UNLIMITED or files_hard >= LEAST_FILES
            else "raise nofile in limits.conf or the unit's LimitNOFILE",
        )
    else:
        yield ok(SECTION, "open files", "unlimited" if files == UNLIMITED else str(files))
    text = "unlimited" if locked == UNLIMITED else f"{locked / 2**20:.0f} MiB"
    if has_rdma and locked != UNLIMITED:
        yield warning(
            SECTION,
            "locked memory",
            text,
            "RDMA registers memory, which must be locked",
            "ulimit -l unlimited (LimitMEMLOCK=infinity; in a container --ulimit memlock=-1)",
        )
    else:
        yield ok(SECTION, "locked memory", text, "" if has_rdma else "RDMA would want it unlimited")


def clock_check(source: str, available: list[str]) -> Check:
    if not source:
        return missing(SECTION, "clock source", "the system does not say")
    if source in GOOD_CLOCKS:
        return ok(SECTION, "clock source", source)
    can = "tsc" in available
    return warning(
        SECTION,
        "clock source",
        source,
        "reading it leaves the processor: each time stamp costs a microsecond",
        "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"
        if can
        else "boot with tsc=reliable where the processor has an invariant TSC",
    )
