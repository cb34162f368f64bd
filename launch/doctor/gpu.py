"""GPUs: what the driver, nvidia-smi and torch say of them, and how they are joined.

Parsers of nvidia-smi's texts are pure. Knows nothing of networks or libraries.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.doctor.check import Check, fails, missing, ok, warning

SECTION = "GPU"
QUERY = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "compute_cap",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)
LEAST_CAPABILITY = (9, 0)  # FP8 tensor cores and TMA, on which DeepEP and DeepGEMM are built
# The oldest driver branch that runs the libraries of a CUDA release (NVIDIA's compatibility table).
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
SECONDS = 30
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
NEAR = ("PIX", "PXB")  # GPU and network card under one PCIe switch


@dataclass(frozen=True)
class Gpu:
    """memory in MiB; capability (9, 0); None or "" where it was not told."""

    index: int
    name: str
    driver: str
    memory: int
    capability: tuple[int, int] | None
    pcie_gen: str = ""
    pcie_width: str = ""
    ecc_errors: int = 0
    mig: bool = False


@dataclass(frozen=True)
class Topology:
    """Of one machine. gpus, nics: names as the table has them (GPU0, NIC0); links: by pair of
    names, both ways; devices: NIC0 -> mlx5_0."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...] = ()
    links: dict[tuple[str, str], str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)

    def near(self, gpu: str) -> list[str]:
        """Network cards of the same PCIe switch."""
        return [self.devices.get(n, n) for n in self.nics if self.links.get((gpu, n)) in NEAR]


def parse_query(text: str) -> list[Gpu]:
    """`nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < len(QUERY) or not cells[0].isdecimal():
            continue
        capability = re.fullmatch(r"(\d+)\.(\d+)", cells[4])
        found.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                driver=cells[2],
                memory=int(cells[3]) if cells[3].isdecimal() else 0,
                capability=(int(capability[1]), int(capability[2])) if capability else None,
                pcie_gen=cells[5] if cells[5].isdecimal() else "",
                pcie_width=cells[6] if cells[6].isdecimal() else "",
                ecc_errors=int(cells[7]) if cells[7].isdecimal() else 0,
                mig=cells[8].lower() == "enabled",
            )
        )
    return found


def parse_topology(text: str) -> Topology:
    """`nvidia-smi topo -m`: a matrix with one column for each GPU and card, further columns (CPU
    and NUMA affinity) behind them, a legend of cards below. Underlining and tabs are seen through.
    """
    lines = [_ESCAPES.sub("", line).rstrip() for line in text.splitlines()]
    columns: list[str] = []
    links: dict[tuple[str, str], str] = {}
    rows: list[str] = []
    devices: dict[str, str] = {}
    for line in lines:
        legend = re.fullmatch(r"\s*(NIC\d+)\s*:\s*(\S+)", line)
        if legend:
            devices[legend[1]] = legend[2]
            continue
        cells = line.split()
        if not cells:
            continue
        if not columns:
            names = [c for c in cells if re.fullmatch(r"GPU\d+|NIC\d+|mlx5_\w+", c)]
            if names and names[0].startswith("GPU"):
                columns = names
            continue
        if cells[0] in columns and len(cells) > len(columns):
            rows.append(cells[0])
            for other, kind in zip(columns, cells[1:], strict=False):
                if kind != "X":
                    links[cells[0], other] = kind
                    links.setdefault((other, cells[0]), kind)
    gpus = tuple(c for c in columns if c.startswith("GPU"))
    return Topology(gpus, tuple(c for c in columns if c not in gpus), links, devices)


def link_check(topology: Topology) -> Check:
    """How the GPUs of a machine reach each other."""
    gpus = topology.gpus
    pairs = [(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    if not pairs:
        return ok(SECTION, "NVLink", f"{len(gpus)} GPU", "nothing to be joined")
    kinds: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        kinds.setdefault(topology.links.get(pair, "?"), []).append(pair)
    told = ", ".join(f"{kind} between {len(of)} pairs" for kind, of in sorted(kinds.items()))
    slow = [pair for kind, of in kinds.items() if not kind.startswith("NV") for pair in of]
    if not slow:
        widest = max(kinds, key=lambda kind: int(kind[2:] or 0))
        if len(kinds) == 1:
            return ok(SECTION, "NVLink", f"{widest} between all {len(gpus)} GPUs")
        return warning(
            SECTION,
            "NVLink",
            told,
            "links differ: the narrowest one sets the pace of an all-to-all",
            "look at nvidia-smi nvlink --status for links that are down",
        )
    shown = ", ".join(f"{a}-{b}" for a, b in slow[:4]) + (" ..." if len(slow) > 4 else "")
    return warning(
        SECTION,
        "NVLink",
        told,
        f"{len(slow)} of {len(pairs)} pairs go over PCIe ({shown}): DeepEP wants NVLink within a "
        "machine",
        "keep expert parallelism to GPUs that are joined, or use --dispatch torch",
    )


def card_check(topology: Topology) -> Check | None:
    """Which GPUs have a network card near by; None where there is no card."""
    if not topology.nics:
        return None
    far = [gpu for gpu in topology.gpus if not topology.near(gpu)]
    if not far:
        told = ", ".join(f"{g}: {'/'.join(topology.near(g))}" for g in topology.gpus)
        return ok(SECTION, "GPU to NIC", told, "under one PCIe switch each")
    return warning(
        SECTION,
        "GPU to NIC",
        f"{len(far)} of {len(topology.gpus)} GPUs have no card near by ({', '.join(far[:8])})",
        "their rows to other machines cross the processor's bus",
        "place the cards as the machine's manual says, or expect less between machines",
    )


def gpu_checks(root: Path = Path("/"), needed: bool = False) -> Iterator[Check]:
    """With nvidia-smi and torch. The first check says whether there is a GPU at all; needed: and
    fails where there is none."""
    devices = sorted((root / "dev").glob("nvidia[0-9]*"))
    said = run_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    gpus = [] if said is None else parse_query(said)
    yield from presence_checks(gpus, len(devices), said is not None, *torch_sees(), needed)
    if not gpus:
        return
    yield from device_checks(gpus, torch_sees()[0])
    table = run_smi("topo", "-m")
    if table is not None:
        topology = parse_topology(table)
        yield link_check(topology)
        if (card := card_check(topology)) is not None:
            yield card


def presence_checks(
    gpus: Sequence[Gpu],
    num_devices: int,
    has_smi: bool,
    torch_cuda: str | None,
    torch_count: int,
    torch_reason: str,
    needed: bool = False,
) -> Iterator[Check]:
    """torch_cuda: the CUDA release that torch was built for, None: none. torch_count: devices that
    it can use. needed: as for `gpu_checks`."""
    if not gpus and not num_devices and not torch_count:
        if needed:
            yield fails(
                SECTION,
                "devices",
                "-",
                "no NVIDIA GPU here",
                "run it where there is one; in a container: --gpus all",
            )
            return
        yield missing(
            SECTION,
            "devices",
            "no NVIDIA GPU here: moeserve computes on the CPU, over gloo",
            "none is needed for that; in a container: --gpus all",
        )
        return
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus)) or "of unknown kind"
    yield ok(SECTION, "devices", f"{len(gpus) or num_devices or torch_count} x {names}")
    if not has_smi:
        yield warning(
            SECTION,
            "nvidia-smi",
            "-",
            "it cannot be run here: topology and drivers are not looked at",
            "install the driver's utilities; in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if torch_cuda is None:
        yield fails(
            SECTION,
            "torch and GPUs",
            "torch is built without CUDA",
            "it cannot use the GPUs that are here",
            "install the CUDA build of the same torch release",
        )
    elif not torch_count:
        yield fails(
            SECTION,
            "torch and GPUs",
            f"torch for CUDA {torch_cuda} sees none",
            torch_reason or "the driver may be too old for it, or CUDA_VISIBLE_DEVICES is empty",
            "start nvidia-fabricmanager, of the driver's version: NVSwitch needs it"
            if "system not yet initialized" in torch_reason
            else "look at nvidia-smi and CUDA_VISIBLE_DEVICES; update the driver",
        )
    elif gpus and torch_count != len(gpus):
        yield warning(
            SECTION,
            "torch and GPUs",
            f"torch sees {torch_count} of {len(gpus)}",
            "the others cannot be used by this process",
            "look at CUDA_VISIBLE_DEVICES",
        )
    else:
        yield ok(SECTION, "torch and GPUs", f"torch for CUDA {torch_cuda} sees {torch_count}")


def device_checks(gpus: Sequence[Gpu], cuda: str | None) -> Iterator[Check]:
    """cuda: the release that torch was built for."""
    driver = gpus[0].driver
    if (problem := driver_problem(driver, cuda)) is not None:
        remedy = "update the driver, or install torch for an older CUDA release"
        yield fails(SECTION, "driver", driver, problem, remedy)
    else:
        yield ok(SECTION, "driver", driver)
    memories = sorted({gpu.memory for gpu in gpus})
    if len({gpu.name for gpu in gpus}) > 1 or len(memories) > 1:
        yield warning(
            SECTION,
            "same kind",
            ", ".join(f"GPU{g.index}: {g.name}, {g.memory} MiB" for g in gpus),
            "ranks go at the pace of the slowest, and the smallest one sets the memory plan",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    else:
        yield ok(SECTION, "memory", f"{memories[0] / 1024:.0f} GiB each")
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    if known:
        least = min(known)
        text = f"{least[0]}.{least[1]}"
        if least < LEAST_CAPABILITY:
            yield warning(
                SECTION,
                "compute capability",
                text,
                "below 9.0: no FP8 tensor cores; DeepEP and DeepGEMM do not run",
                "use --dispatch torch and bfloat16, or Hopper and newer",
            )
        else:
            yield ok(SECTION, "compute capability", text, "FP8, DeepEP and DeepGEMM can run")
    if slices := [g.index for g in gpus if g.mig]:
        yield warning(
            SECTION,
            "MIG",
            f"enabled on GPU {', '.join(map(str, slices))}",
            "NCCL and NVSHMEM do not join slices of GPUs",
            "give whole GPUs to moeserve",
        )
    if broken := [g for g in gpus if g.ecc_errors]:
        yield warning(
            SECTION,
            "ECC",
            ", ".join(f"GPU{g.index}: {g.ecc_errors} uncorrected errors" for g in broken),
            "memory of these GPUs has failed since the driver was loaded",
            "drain the machine and reset these GPUs",
        )


def driver_problem(driver: str, cuda: str | None) -> str | None:
    """Why this driver cannot run libraries of that CUDA release."""
    if cuda is None or not driver.split(".")[0].isdecimal():
        return None
    need = LEAST_DRIVER.get(int(cuda.split(".")[0]))
    if need is None or int(driver.split(".")[0]) >= need:
        return None
    return f"driver {driver} is too old for CUDA {cuda}: needs {need} or newer"


def torch_sees() -> tuple[str | None, int, str]:
    """(CUDA release it was built for, devices that it can use, why none)."""
    try:
        from moeserve.device.choose import look

        cuda = look()
    except Exception as error:  # a broken installation may raise anything
        return None, 0, f"{type(error).__name__}: {error}".splitlines()[0]
    return cuda.built, cuda.count, cuda.trouble


def run_smi(*arguments: str) -> str | None:
    """None where it cannot be run, or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
