"""Libraries that GPUs want: NCCL, NVSHMEM, DeepEP, DeepGEMM, FlashMLA, FlashInfer, Triton, nvcc.

`look` asks packages and compilers; `library_checks` judges what it found and is pure. `deep_ep` and
`nvshmem` are asked through the files of `dispatch` that load them; others are imported in a process
of their own, where a broken one may die.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from typing import Any

from launch.doctor.check import Check, missing, ok, warning

SECTION = "libraries"
NCCL_FOR_V2 = (2, 30, 4)  # DeepEP's second API, as dispatch.deepep_v2_limits has it
NVCC_FOR_V25 = (13, 1)  # DeepEP 2.5, likewise
NVSHMEM_HANGS_FROM = (3, 5, 19)  # DeepEP's first API, as dispatch.deepep has it
NVSHMEM_GOOD = "3.4.5"
IMPORT_SECONDS = 60
# What brings each module. The bare names are first-release source packages without an author.
BRINGS = {
    "deep_ep": "pip install sgl-deep-ep (not deep-ep, which is its first release)",
    "deep_gemm": "pip install sgl-deep-gemm (not deep-gemm, which is its first release)",
    "flash_mla": "pip install sgl-flash-mla (not flash-mla, which is its first release)",
    "flashinfer": "pip install flashinfer-python",
    "triton": "pip install triton (comes with torch for CUDA)",
}
LABELS = {
    "deep_ep": "DeepEP",
    "deep_gemm": "DeepGEMM",
    "flash_mla": "FlashMLA",
    "flashinfer": "FlashInfer",
    "triton": "Triton",
}
IMPORTED = {"flashinfer": "flashinfer.mla"}  # of a module, what the adapter takes
WHY = {
    "deep_ep": "all-to-alls between GPUs go by torch's collectives instead",
    "deep_gemm": "FP8 grouped GEMMs go by Triton kernels, or by torch",
    "flash_mla": "latent attention goes by moeserve's own kernels, or by torch",
    "flashinfer": "one choice less for latent attention (--kernel-table, with --graphs off)",
    "triton": "GPU kernels of moeserve itself are written in it",
}
FIRST_RELEASES = ("deep-ep", "deep-gemm", "flash-mla")

Version = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A Python module that may be here. package, version: of what brings it. error: why it cannot
    be imported; None: it can, or nobody tried."""

    name: str
    here: bool = False
    package: str = ""
    version: str = ""
    error: str | None = None

    @property
    def told(self) -> str:
        return f"{self.package} {self.version}".strip() or "of unknown version"


@dataclass(frozen=True)
class Libraries:
    """What was found. nccl, nvshmem_host: what is loaded; *_wheel: what is installed."""

    modules: dict[str, Module] = field(default_factory=dict)
    deep_ep_apis: tuple[str, ...] = ()
    nccl: Version | None = None
    nccl_wheel: str | None = None
    nvshmem_wheel: Version | None = None
    nvshmem_host: Version | None = None
    nvshmem4py: str | None = None
    nvcc: str | None = None  # release
    nvcc_path: str = ""


def look(has_gpu: bool, environ: Mapping[str, str] | None = None) -> Libraries:
    """Ask this machine. has_gpu: else nothing is imported that would want one."""
    environ = os.environ if environ is None else environ
    owners = metadata.packages_distributions()
    modules = {name: _module(name, owners, has_gpu) for name in BRINGS}
    apis: tuple[str, ...] = ()
    if modules["deep_ep"].here:
        apis, error = _deep_ep()
        found = modules["deep_ep"]
        modules["deep_ep"] = Module(found.name, True, found.package, found.version, error)
    from dispatch import nvshmem_library
    from dispatch.deepep_v2_machine import find_nvcc

    path = find_nvcc(environ)
    return Libraries(
        modules=modules,
        deep_ep_apis=apis,
        nccl=_loaded_nccl() if has_gpu else None,
        nccl_wheel=_first(("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
        nvshmem_wheel=nvshmem_library.wheel_version(),
        nvshmem_host=nvshmem_library.loaded_version(),
        nvshmem4py=_first(("nvshmem4py-cu13", "nvshmem4py-cu12")),
        nvcc=nvcc_release(path),
        nvcc_path=path,
    )


def _module(name: str, owners: Mapping[str, list[str]], has_gpu: bool) -> Module:
    try:
        here = util.find_spec(name) is not None
    except (ImportError, ValueError):
        here = False
    if not here:
        return Module(name)
    package = next(iter(owners.get(name, [])), "")
    version = metadata.version(package) if package else ""
    error = import_error(IMPORTED.get(name, name)) if has_gpu and name != "deep_ep" else None
    return Module(name, True, package, version, error)


def import_error(name: str) -> str | None:
    """Why a module cannot be imported, asked of another process; None: it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with {done.returncode}"


def _deep_ep() -> tuple[tuple[str, ...], str | None]:
    """(the APIs that this DeepEP has, why it cannot be imported)."""
    from dispatch import deepep, deepep_v2_limits

    try:
        library: Any = deepep.load()
    except Exception as error:  # a broken wheel may raise anything
        return (), deepep.why_absent(error)
    apis = ["Buffer"] if hasattr(library, "Buffer") else []
    second = deepep_v2_limits.api_of(library)
    return (*apis, *(() if second is None else (second.buffer,))), None


def _loaded_nccl() -> Version | None:
    try:
        import torch

        found: Version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return tuple(found)
    except Exception:  # a build without it
        return None


def _first(packages: tuple[str, ...]) -> str | None:
    for name in packages:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def nvcc_release(path: str) -> str | None:
    """ "12.9"; None where it cannot be run."""
    import re

    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else None


# -- judged ---------------------------------------------------------------------------------------


def library_checks(found: Libraries, has_gpu: bool) -> Iterator[Check]:
    """One each. Without a GPU nothing is needed, and nothing that is here can be tried."""
    yield _nccl(found, has_gpu)
    yield from _nvshmem(found, has_gpu)
    for name in BRINGS:
        yield _judge(found.modules.get(name, Module(name)), found, has_gpu)
    yield _nvcc(found, has_gpu)


def _nccl(found: Libraries, has_gpu: bool) -> Check:
    told = _dotted(found.nccl) if found.nccl else found.nccl_wheel
    if told is None:
        return missing(SECTION, "NCCL", _without(has_gpu, "ranks on GPUs cannot talk"))
    if not has_gpu:
        return ok(SECTION, "NCCL", told, "not used: no GPU here")
    if _numbers(told) < NCCL_FOR_V2:
        least = _dotted(NCCL_FOR_V2)
        return warning(
            SECTION,
            "NCCL",
            told,
            f"DeepEP's second API needs {least}",
            f"pip install 'nvidia-nccl-cu13>={least}'",
        )
    return ok(SECTION, "NCCL", told)


def _nvshmem(found: Libraries, has_gpu: bool) -> Iterator[Check]:
    wheel, host = found.nvshmem_wheel, found.nvshmem_host
    version = host or wheel
    if version is None:
        reason = _without(has_gpu, "no `nvshmem` dispatcher, no first API of DeepEP")
        yield missing(
            SECTION,
            "NVSHMEM",
            reason,
            f"pip install nvidia-nvshmem-cu13=={NVSHMEM_GOOD}" * has_gpu,
        )
        return
    told = f"wheel {_dotted(wheel) if wheel else '-'}, loaded {_dotted(host) if host else '-'}"
    if wheel and host and wheel != host[: len(wheel)]:
        yield warning(
            SECTION,
            "NVSHMEM",
            told,
            "host and device code are of two releases: calls between them go wrong",
            "look for another copy on LD_LIBRARY_PATH",
        )
    elif version >= NVSHMEM_HANGS_FROM and "Buffer" in found.deep_ep_apis:
        yield warning(
            SECTION,
            "NVSHMEM",
            told,
            f"DeepEP's first API hangs from {_dotted(NVSHMEM_HANGS_FROM)} on",
            f"pip install nvidia-nvshmem-cu13=={NVSHMEM_GOOD}, or --dispatch deepep_v2",
        )
    else:
        yield ok(SECTION, "NVSHMEM", told, "" if has_gpu else "not used: no GPU here")
    if found.nvshmem4py is None:
        reason = "torch starts NVSHMEM by itself; versions are not compared over ranks before"
        yield missing(SECTION, "nvshmem4py", reason)
    else:
        yield ok(SECTION, "nvshmem4py", found.nvshmem4py)


def _judge(module: Module, found: Libraries, has_gpu: bool) -> Check:
    label = LABELS[module.name]
    if not module.here:
        reason = _without(has_gpu, WHY[module.name])
        return missing(SECTION, label, reason, BRINGS[module.name] * has_gpu)
    if module.package in FIRST_RELEASES:
        return warning(
            SECTION,
            label,
            module.told,
            "this package is the library's first release, under a name that nobody keeps",
            BRINGS[module.name],
        )
    if module.error is not None and has_gpu:
        return warning(
            SECTION,
            label,
            module.told,
            f"is installed but cannot be imported: {module.error}",
            "install the build for this torch and CUDA release",
        )
    if not has_gpu:
        return ok(SECTION, label, module.told, "not used: no GPU here")
    if module.name == "deep_ep":
        return _deep_ep_check(module, found)
    return ok(SECTION, label, module.told)


def _deep_ep_check(module: Module, found: Libraries) -> Check:
    told = f"{module.told}: {', '.join(found.deep_ep_apis) or 'no API that is known'}"
    if not found.deep_ep_apis:
        return warning(
            SECTION, "DeepEP", told, "none of its buffers can be used", BRINGS["deep_ep"]
        )
    if "Buffer" not in found.deep_ep_apis:
        return ok(SECTION, "DeepEP", told, "the first API (low latency, masks) is not in it")
    return ok(SECTION, "DeepEP", told)


def _nvcc(found: Libraries, has_gpu: bool) -> Check:
    if found.nvcc is None:
        reason = _without(has_gpu, "DeepEP's second API and DeepGEMM compile kernels at run time")
        return missing(
            SECTION, "nvcc", reason, "install the CUDA toolkit and set CUDA_HOME" * has_gpu
        )
    told = f"CUDA {found.nvcc} ({found.nvcc_path})"
    if "EPBuffer" in found.deep_ep_apis and _numbers(found.nvcc) < NVCC_FOR_V25:
        least = _dotted(NVCC_FOR_V25)
        return warning(
            SECTION,
            "nvcc",
            told,
            f"DeepEP 2.5 compiles its kernels with {least} or newer",
            f"install CUDA {least} and set CUDA_HOME",
        )
    return ok(SECTION, "nvcc", told)


def _without(has_gpu: bool, reason: str) -> str:
    return reason if has_gpu else "not needed without a GPU"


def _numbers(text: str) -> Version:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _dotted(version: Version | None) -> str:
    return "-" if version is None else ".".join(map(str, version))
