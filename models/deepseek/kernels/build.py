"""Compiles the native kernels once for this machine and keeps the result in the user's cache.

A library's name is kernels-MACHINE-COMPILER.so: what it computes and on which processor, then who
compiled it. Where nothing can be compiled (an image without a compiler), `kept` lists the libraries
that other compilers made of the same sources for the same processor.

Knows compilers, flags and files; knows nothing of tensors. Several processes may ask at the same
moment: one compiles, the others wait, and a finished library appears under its name in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from models.deepseek.kernels.errors import KernelsUnavailable

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w")


@dataclass(frozen=True)
class Library:
    """A compiled library, the compiler's own name for itself, and what else there is to say."""

    path: Path
    compiler: str
    remark: str = ""


def build(defines: tuple[str, ...] = ()) -> Library:
    """The library for this machine, compiled if the cache has none. `defines` as in native/simd.h.

    Raises KernelsUnavailable with the compiler's message, or the system's.
    """
    try:
        return _build(defines)
    except OSError as error:  # no room, no temporary folder, a compiler that is no program
        raise KernelsUnavailable(f"cannot compile: {error}") from error


def _build(defines: tuple[str, ...]) -> Library:
    compiler = _find_compiler()
    version = next(iter(_run([*compiler, "--version"]).splitlines()), "unnamed compiler")
    flags = _flags(defines)
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise KernelsUnavailable(f"no sources in {SOURCES.name}/: the installation is incomplete")
    path = _cache_folder() / f"kernels-{_machine_key(flags)}-{_key(version)}.so"
    with _lock(path.with_suffix(".lock")):
        if _made_by(path) is None:
            _compile(compiler, version, sources, flags, path)
    return Library(path, version)


def kept(defines: tuple[str, ...], why: str) -> list[Library]:
    """Libraries of these sources for this processor that are in the cache already, newest first;
    `why` nothing was compiled goes into their remark."""
    found = []
    with contextlib.suppress(OSError):
        pattern = f"kernels-{_machine_key(_flags(defines))}-*.so"
        for folder in filter(_is_ours, _folders()):
            for path in folder.glob(pattern):
                version = _made_by(path)
                if version is not None:
                    remark = f"; compiled earlier, now: {why}"
                    found.append((path.stat().st_mtime, Library(path, version, remark)))
    return [library for _, library in sorted(found, key=lambda x: x[0], reverse=True)]


def _flags(defines: tuple[str, ...]) -> list[str]:
    machine_flag = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return [*FLAGS, machine_flag, *(f"-D{name}" for name in defines)]


def _find_compiler() -> list[str]:
    """The compiler and the arguments that CXX gives it (`ccache g++`)."""
    asked = os.environ.get("CXX", "").strip()
    with contextlib.suppress(ValueError):  # quotes that do not close
        for name, *arguments in [shlex.split(asked)] if asked else [[x] for x in COMPILERS]:
            found = shutil.which(name)
            if found:
                return [found, *arguments]
    tried = f"CXX={asked}" if asked else ", ".join(COMPILERS)
    raise KernelsUnavailable(f"no C++ compiler found (tried {tried}); install g++ or set CXX")


def _machine_key(flags: list[str]) -> str:
    sources = [
        x for path in sorted(SOURCES.iterdir()) for x in (path.name, path.read_text("utf-8"))
    ]
    return _key(*flags, platform.machine(), _processor(), *sources)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: a cache in a shared home serves several kinds of machine."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("flags", "Features", "model name", "CPU part")
        return "\n".join(sorted({x for x in lines if x.split("\t")[0].strip() in wanted}))
    return platform.processor()


def _cache_folder() -> Path:
    """The first that can be written."""
    folders = _folders()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and _is_ours(folder):
            return folder
    raise KernelsUnavailable(
        f"cannot write to {folders[0]}; set XDG_CACHE_HOME to a folder of yours"
    )


def _folders() -> tuple[Path, Path]:
    """$XDG_CACHE_HOME or ~/.cache; where neither can be written, a private temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # By number: a container's user may have no name.
    private = Path(tempfile.gettempdir()) / f"moeserve-{os.getuid()}"
    return Path(base).absolute() / "moeserve", private


def _is_ours(folder: Path) -> bool:
    """A folder that someone else made could hold a library that someone else wrote."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time, where the file system knows locks; elsewhere both compile."""
    import fcntl

    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _made_by(path: Path) -> str | None:
    """Who compiled the cached library; None: it is not what was written, and to load a torn one may
    end the process."""
    try:
        digest, version = path.with_suffix(".stamp").read_text().splitlines()
        return version if digest == _digest(path) else None
    except (OSError, ValueError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(
    compiler: list[str], version: str, sources: list[Path], flags: list[str], path: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        running = [
            subprocess.Popen(
                [*compiler, *flags, "-c", str(source), "-o", str(target)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, target in zip(sources, objects, strict=True)
        ]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            if process.returncode != 0:
                raise KernelsUnavailable(f"{Path(compiler[0]).name} failed: {_gist(output)}")
        made = Path(folder) / "kernels.so"
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)])
        path.with_suffix(".stamp").write_text(f"{_digest(made)}\n{version}\n")
        os.replace(made, path)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        name = Path(command[0]).name
        raise KernelsUnavailable(f"{name} failed: {_gist(done.stderr or done.stdout)}")
    return done.stdout


def _gist(output: str) -> str:
    """The first error line first, then the head of the rest."""
    lines = output.strip().splitlines()
    error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
    return "\n".join([error.strip(), *lines[:20]])
