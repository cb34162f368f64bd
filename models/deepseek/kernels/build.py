"""Compiles the native kernels once for this machine and keeps the result in the user's cache.

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
    """A compiled library and the compiler's own name for itself."""

    path: Path
    compiler: str


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
    machine_flag = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [*FLAGS, machine_flag, *(f"-D{name}" for name in defines)]
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise KernelsUnavailable(f"no sources in {SOURCES.name}/: the installation is incomplete")
    path = _cache_folder() / f"kernels-{_key(version, flags)}.so"
    with _lock(path.with_suffix(".lock")):
        if not _is_whole(path):
            _compile(compiler, sources, flags, path)
    return Library(path, version)


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


def _key(version: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (version, *flags, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: a cache in a shared home serves several kinds of machine."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("flags", "Features", "model name", "CPU part")
        return "\n".join(sorted({x for x in lines if x.split("\t")[0].strip() in wanted}))
    return platform.processor()


def _cache_folder() -> Path:
    """$XDG_CACHE_HOME or ~/.cache; where neither can be written, a private temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    wanted = Path(base).absolute() / "moeserve"
    # By number: a container's user may have no name.
    for folder in (wanted, Path(tempfile.gettempdir()) / f"moeserve-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # A folder that someone else made could hold a library that someone else wrote.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise KernelsUnavailable(f"cannot write to {wanted}; set XDG_CACHE_HOME to a folder of yours")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time, where the file system knows locks; elsewhere both compile."""
    import fcntl

    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(path: Path) -> bool:
    """Whether the cached library is what was written: to load a torn one may end the process."""
    try:
        return path.with_suffix(".sha256").read_text() == _digest(path)
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: list[str], sources: list[Path], flags: list[str], path: Path) -> None:
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
        path.with_suffix(".sha256").write_text(_digest(made))
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
