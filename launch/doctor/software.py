"""What computes: Python, torch, moeserve itself and where its packages lie, the native kernels."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from launch.doctor.check import Check, fails, ok, warning

SECTION = "software"
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 13)
_LIBRARIES = ("safetensors", "tokenizers", "pyzmq", "uvicorn")


def software_checks() -> Iterator[Check]:
    """The kernels last: the first time they may have to be compiled."""
    yield from _moeserve()
    yield _python(platform.python_version())
    yield from _torch()
    absent = [name for name in _LIBRARIES if version_of(name) is None]
    if absent:
        yield fails(
            SECTION,
            "libraries",
            f"without {', '.join(absent)}",
            "moeserve does not start without them",
            "install moeserve again: pip install -e .",
        )
    yield _kernels()


def _moeserve() -> Iterator[Check]:
    from launch.version import HOME, commit_of
    from moeserve.layout import PACKAGES, ShadowedPackage, check_layout

    yield ok(SECTION, "moeserve", f"{version_of('moeserve') or 'not installed'}{commit_of(HOME)}")
    try:
        check_layout()
    except ShadowedPackage as error:
        text = " ".join(str(error).split())
        remedy = "rename what shadows them, or start from another folder"
        yield fails(SECTION, "packages", "shadowed", text, remedy)
    else:
        yield ok(SECTION, "packages", f"{', '.join(PACKAGES)} lie beside each other in {HOME}")


def _python(version: str) -> Check:
    found = tuple(int(x) for x in version.split(".")[:2])
    if found < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return fails(SECTION, "python", version, f"needs {least}", f"use Python {least} or newer")
    return ok(SECTION, "python", f"{version} on {platform.machine()}")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken build may raise anything
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        yield fails(SECTION, "torch", "-", f"cannot be imported: {said}", "install torch again")
        return
    yield torch_check(torch.__version__, torch.version.cuda)
    import torch.distributed as dist

    have = [
        name
        for name, here in (
            ("gloo", dist.is_gloo_available()),
            ("NCCL", dist.is_nccl_available()),
            ("MPI", dist.is_mpi_available()),
        )
        if here
    ]
    if "gloo" not in have:
        yield fails(
            SECTION,
            "collectives",
            ", ".join(have) or "none",
            "ranks agree on each step over gloo",
            "install a torch that has it",
        )
    else:
        yield ok(SECTION, "collectives", ", ".join(have))


def torch_check(version: str, cuda: str | None) -> Check:
    found = tuple(int(x) for x in version.split("+")[0].split(".")[:2] if x.isdigit())
    told = f"{version}, {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if found < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return warning(
            SECTION, "torch", told, f"moeserve is tested with {least} and newer", "update torch"
        )
    return ok(SECTION, "torch", told)


def _kernels() -> Check:
    try:
        from models.deepseek.kernels.select import create_kernels

        choice = create_kernels()
    except Exception as error:  # a broken compiler or library: the others still stand
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return fails(SECTION, "kernels", "none", said, "look at the message; --kernels torch")
    found = choice.reason.removeprefix("kernels: ")
    if choice.kernels.name == "torch":
        return warning(
            SECTION,
            "kernels",
            found,
            "CPU kernels could not be compiled: several times slower",
            "install g++ (or clang++)",
        )
    return ok(SECTION, "kernels", found)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
