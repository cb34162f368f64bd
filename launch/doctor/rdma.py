"""RDMA: network cards, their links, GIDs, devices, and the kernel's and driver's part in it.

Everything is read below `root` (another folder in tests). Knows nothing of GPUs but whether there
are any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.doctor.check import Check, missing, ok, warning
from launch.doctor.machine import read

SECTION = "network cards"
_ZERO = re.compile(r"[0:]*")
_MAPPED = "0000:0000:0000:0000:0000:ffff:"  # of an IPv4 address


@dataclass(frozen=True)
class Port:
    """One port of a card. rate in Gbit/s, 0 where unknown; layer InfiniBand or Ethernet (RoCE).
    gid_index: to be taken for RoCE v2, None where there is none."""

    device: str
    port: int
    state: str
    physical: str
    rate: float
    layer: str
    firmware: str = ""
    netdev: str = ""
    gid_index: int | None = None
    gids: dict[int, str] | None = None  # index -> type, of those that are in use

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"

    @property
    def is_up(self) -> bool:
        return self.state.upper().endswith("ACTIVE")

    @property
    def is_roce(self) -> bool:
        return self.layer.lower() == "ethernet"


def read_ports(root: Path = Path("/")) -> list[Port]:
    """Of every card that the kernel knows."""
    base = root / "sys/class/infiniband"
    if not base.is_dir():
        return []
    found = []
    for device in sorted(base.iterdir()):
        ports = device / "ports"
        numbers = sorted(int(p.name) for p in ports.iterdir()) if ports.is_dir() else []
        for number in numbers:
            found.append(_read_port(device, number))
    return found


def _read_port(device: Path, number: int) -> Port:
    port = device / "ports" / str(number)
    gids, best = _read_gids(port)
    rate = re.match(r"([\d.]+)", read(port / "rate"))
    netdevs = device / "device/net"
    names = sorted(p.name for p in netdevs.iterdir()) if netdevs.is_dir() else []
    return Port(
        device=device.name,
        port=number,
        state=read(port / "state").partition(":")[2].strip() or read(port / "state"),
        physical=read(port / "phys_state").partition(":")[2].strip(),
        rate=float(rate[1]) if rate else 0.0,
        layer=read(port / "link_layer"),
        firmware=read(device / "fw_ver"),
        netdev=", ".join(names),
        gid_index=best,
        gids=gids,
    )


def _read_gids(port: Path) -> tuple[dict[int, str], int | None]:
    """Those in use by index, and the one for RoCE v2: of an IPv4 address, else the first."""
    folder = port / "gids"
    if not folder.is_dir():
        return {}, None
    used: dict[int, str] = {}
    v2: list[tuple[bool, int]] = []
    for index in sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()):
        gid = read(folder / str(index)).lower()
        if not gid or _ZERO.fullmatch(gid):
            continue
        kind = read(port / "gid_attrs/types" / str(index))
        used[index] = kind
        if kind.lower().replace(" ", "") == "rocev2":
            v2.append((not gid.startswith(_MAPPED), index))
    return used, min(v2)[1] if v2 else None


def rdma_checks(
    root: Path = Path("/"), has_gpu: bool = False, environ: Mapping[str, str] | None = None
) -> Iterator[Check]:
    ports = read_ports(root)
    if not ports:
        yield missing(
            SECTION,
            "RDMA",
            "no card (/sys/class/infiniband is empty): ranks of several machines talk over TCP",
            "for many machines: InfiniBand or RoCE cards, rdma-core, and the host's /sys" * has_gpu,
        )
        return
    yield from _link_checks(ports)
    yield from _gid_checks(ports, environ or {})
    yield _device_check(root)
    if has_gpu:
        yield from gpu_direct_checks(root)


def _link_checks(ports: list[Port]) -> Iterator[Check]:
    up = [p for p in ports if p.is_up]
    down = [p for p in ports if not p.is_up]
    told = ", ".join(f"{p.name} {p.rate:g} Gbit/s {p.layer}" for p in up)
    if not up:
        yield warning(
            SECTION,
            "links",
            ", ".join(f"{p.name} {p.state or 'unknown'}" for p in down),
            "no link is up: rows cannot leave this machine by RDMA",
            "look at cables, switch ports and (InfiniBand) the subnet manager; ibstat, rdma link",
        )
        return
    rates = {p.rate for p in up}
    if down:
        yield warning(
            SECTION,
            "links",
            f"{told}; down: {', '.join(p.name for p in down)}",
            f"{len(down)} of {len(ports)} links are down ({down[0].physical or down[0].state})",
            "if they are to be used: cable, switch port, subnet manager; else leave them out with "
            "NCCL_IB_HCA",
        )
    elif len(rates) > 1:
        yield warning(
            SECTION,
            "links",
            told,
            "rates differ: a link may have fallen back to a lower one",
            "compare with the other machines; leave slow ones out with NCCL_IB_HCA",
        )
    else:
        yield ok(SECTION, "links", told)
    if firmwares := sorted({p.firmware for p in ports if p.firmware}):
        if len(firmwares) > 1:
            yield warning(
                SECTION,
                "firmware",
                ", ".join(firmwares),
                "cards differ",
                "bring them to one release",
            )
        else:
            yield ok(SECTION, "firmware", firmwares[0])


def _gid_checks(ports: list[Port], environ: Mapping[str, str]) -> Iterator[Check]:
    """RoCE goes by a GID, and by the wrong one (RoCE v1, link-local) it does not cross routers."""
    roce = [p for p in ports if p.is_roce and p.is_up]
    if not roce:
        return
    without = [p.name for p in roce if p.gid_index is None]
    if without:
        yield warning(
            SECTION,
            "RoCE v2 GID",
            f"none on {', '.join(without)}",
            "only RoCE v2 is routed",
            "give the interface an IPv4 address; cma_roce_mode -m 2",
        )
        return
    indices = {p.gid_index for p in roce}
    told = ", ".join(f"{p.name} index {p.gid_index}" for p in roce)
    for variable in ("NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX"):
        text = environ.get(variable, "")
        if text.isdecimal():
            wrong = [p.name for p in roce if "v2" not in (p.gids or {}).get(int(text), "")]
            if wrong:
                yield warning(
                    SECTION,
                    "RoCE v2 GID",
                    f"{variable}={text}",
                    f"is no RoCE v2 GID on {', '.join(wrong)}",
                    f"set {roce[0].gid_index}, or leave it out",
                )
                return
    if len(indices) > 1:
        yield warning(
            SECTION,
            "RoCE v2 GID",
            told,
            "indices differ: one NCCL_IB_GID_INDEX does not fit all cards",
            "leave NCCL_IB_GID_INDEX unset, so that NCCL finds them",
        )
    else:
        yield ok(SECTION, "RoCE v2 GID", told)


def _device_check(root: Path) -> Check:
    folder = root / "dev/infiniband"
    verbs = sorted(p.name for p in folder.glob("uverbs*")) if folder.is_dir() else []
    if verbs and (folder / "rdma_cm").exists():
        return ok(SECTION, "/dev/infiniband", f"{len(verbs)} uverbs, rdma_cm")
    lacks = "rdma_cm" if verbs else "uverbs"
    return warning(
        SECTION,
        "/dev/infiniband",
        ", ".join(verbs) or "-",
        f"the kernel has cards, but no {lacks} device is here: libraries cannot open them",
        "in a container: --device /dev/infiniband (and --cap-add IPC_LOCK); else load ib_uverbs, "
        "rdma_cm",
    )


def gpu_direct_checks(root: Path) -> Iterator[Check]:
    """What lets cards reach GPU memory, and GPUs post to cards by themselves."""
    modules = {line.split()[0] for line in read(root / "proc/modules").splitlines() if line.split()}
    if modules & {"nvidia_peermem", "nv_peer_mem"} or (root / "sys/module/nvidia_peermem").is_dir():
        yield ok(SECTION, "peer memory", "nvidia_peermem is loaded")
    elif "Open Kernel Module" in read(root / "proc/driver/nvidia/version"):
        yield ok(
            SECTION, "peer memory", "DMA-BUF", "the open kernel modules need no nvidia_peermem"
        )
    else:
        yield warning(
            SECTION,
            "peer memory",
            "nvidia_peermem is not loaded",
            "cards cannot read GPU memory: NCCL copies through the host, NVSHMEM does not start",
            "modprobe nvidia_peermem on the host (or the driver's open kernel modules)",
        )
    parameters = read(root / "proc/driver/nvidia/params")
    if not parameters:
        yield missing(
            SECTION, "IBGDA driver keys", "the driver's parameters cannot be read in this place"
        )
    elif absent := ibgda_absent(parameters):
        yield warning(
            SECTION,
            "IBGDA driver keys",
            f"without {', '.join(absent)}",
            "GPUs cannot post to cards by themselves, as DeepEP's low-latency mode wants",
            "options nvidia NVreg_EnableStreamMemOPs=1 "
            'NVreg_RegistryDwords="PeerMappingOverride=1;" in /etc/modprobe.d, then reboot',
        )
    else:
        yield ok(SECTION, "IBGDA driver keys", "EnableStreamMemOPs, PeerMappingOverride")
    if not (root / "dev/gdrdrv").exists():
        yield missing(
            SECTION,
            "GDRCopy",
            "no /dev/gdrdrv: small host copies go the slow way",
            "install gdrcopy",
        )
    else:
        yield ok(SECTION, "GDRCopy", "/dev/gdrdrv")


def ibgda_absent(parameters: str) -> list[str]:
    """Of /proc/driver/nvidia/params: the keys that IBGDA wants and that are not set."""
    absent = []
    if not re.search(r"^EnableStreamMemOPs:\s*1\b", parameters, re.M):
        absent.append("EnableStreamMemOPs=1")
    if not re.search(r"^RegistryDwords:.*PeerMappingOverride=1", parameters, re.M):
        absent.append("PeerMappingOverride=1")
    return absent
