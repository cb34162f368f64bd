"""Compiles a kernel for a GPU that is not there, and reads what came out.

Knows triton's compiler and the assembler it brings along (triton 3.6 to 3.8). Which kernels and
configurations exist is registry.py's. Nothing here touches a device.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from models.deepseek.kernels.gpu.errors import CompileFailed, TritonMissing
from models.deepseek.kernels.gpu.language import INTERPRETED, need_triton

ARCHS = {90: "sm_90a", 100: "sm_100a"}
SHARED_LIMIT = 232448  # bytes of shared memory a program can have, on both
TENSOR_COLUMNS = 512  # of tensor memory (sm_100a), 512 bytes each
# What is counted in the PTX of every kernel: the matrix units, then wide access to memory.
WORDS = (
    "wgmma.mma_async",
    "tcgen05.mma",
    "mma.sync",
    "cp.async.bulk.tensor",
    "cp.async.cg",
    "ld.global.v8",
    "ld.global.v4",
    "st.global.v8",
    "st.global.v4",
    "ld.global.v2.b64",
    "st.global.v2.b64",
    "loads of 8 bytes",
    "loads of less",
    "stores of 8 bytes",
    "stores of less",
)
# An answer to "wide loads": 16 bytes or more at once, by whichever way.
WIDE_LOADS = (
    "ld.global.v4", "ld.global.v8", "ld.global.v2.b64", "cp.async.cg", "cp.async.bulk.tensor",
)  # fmt: skip
_OPCODE = re.compile(r"(?:^|[\s;{}])([a-z]\w*(?:\.[\w:]+)+)", re.MULTILINE)


@dataclass(frozen=True)
class CompileCase:
    """One kernel with one choice of its constants.

    kernel: the `@triton.jit` function. signature: types of its other parameters by name ("*bf16",
    "*fp8e4nv", "*fp32", "i32", "i64"). divisible: parameters that are always multiples of 16, as
    all pointers are taken to be. wants: architecture -> words that its PTX must hold: an opcode
    with or without what stands between its parts ("ld.global.v4" is also found in
    ld.global.L1::evict_last.v4.b32), or "wide loads" for any load of 16 bytes or more. archs: those
    it is for, where one configuration does not suit all.
    """

    kernel: Any
    name: str
    config: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    wants: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    archs: tuple[int, ...] = tuple(ARCHS)


@dataclass(frozen=True)
class CompileReport:
    """What one case became. registers: of a thread. spills: bytes stored to and loaded from local
    memory for want of registers. shared_bytes: of a program. instructions: how often each of WORDS
    and of what the case wants stands in the PTX (those that do not are left out)."""

    kernel: str
    config: str
    arch: str
    registers: int
    spills: int
    shared_bytes: int
    instructions: dict[str, int]


def compile_case(case: CompileCase, arch: int) -> CompileReport:
    """Compile for arch (90 or 100). TritonMissing; CompileFailed with kernel, config and why."""
    need_triton()
    assert arch in ARCHS, arch
    if INTERPRETED:
        raise TritonMissing("TRITON_INTERPRET is set: kernels are interpreted, none is compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.kernel.arg_names)
    signature = {
        name: "constexpr" if name in case.constexprs else case.signature[name] for name in names
    }
    aligned = [n for n, t in signature.items() if t.startswith("*") or n in case.divisible]
    source = ASTSource(
        case.kernel,
        signature,
        dict(case.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    log = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(triton.knobs.cache.scope())
        stack.enter_context(triton.knobs.nvidia.scope())
        triton.knobs.nvidia.dump_ptxas_log = True  # printed, so it is caught here
        triton.knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(redirect_stdout(log))
        try:
            done = triton.compile(source, GPUTarget("cuda", arch, 32), options)
        except Exception as error:  # the compiler's own classes differ from version to version
            raise CompileFailed(
                f"{case.name} ({case.config}) for {ARCHS[arch]}: {type(error).__name__}: {error}"
            ) from error
        ptx = done.asm["ptx"]
    _must_fit(case, arch, done.metadata)
    registers, spills = read_assembler_log(log.getvalue())
    words = dict.fromkeys((*WORDS, *case.wants.get(arch, ())))
    return CompileReport(
        kernel=case.name,
        config=case.config,
        arch=ARCHS[arch],
        registers=registers,
        spills=spills,
        shared_bytes=done.metadata.shared,
        instructions={word: n for word, n in count_words(ptx, words).items() if n},
    )


def _must_fit(case: CompileCase, arch: int, metadata: Any) -> None:
    """CompileFailed where a launch would be refused, which the compiler does not look at."""
    limits = {"shared": SHARED_LIMIT, "tmem_size": TENSOR_COLUMNS}
    for name, limit in limits.items():
        needed = getattr(metadata, name, 0) or 0
        if needed > limit:
            raise CompileFailed(
                f"{case.name} ({case.config}) for {ARCHS[arch]}: {name}={needed}: a program has at "
                f"most {limit}"
            )


def missing_words(case: CompileCase, arch: int, report: CompileReport) -> list[str]:
    """What the case wants for arch and its PTX does not hold."""
    return [word for word in case.wants.get(arch, ()) if not report.instructions.get(word)]


def read_assembler_log(log: str) -> tuple[int, int]:
    """ptxas -v -> registers (of the function that needs most), bytes spilled and filled."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    if not registers:
        raise CompileFailed(f"the assembler said nothing of registers: {log.strip()[:200]!r}")
    return max(registers), sum(spills)


def count_words(ptx: str, words: Iterable[str]) -> dict[str, int]:
    """How many instructions answer to each word: its parts in order, the first one first."""
    opcodes = Counter(_OPCODE.findall(ptx))
    return {word: _count(opcodes, word) for word in words}


def _count(opcodes: Counter[str], word: str) -> int:
    if word == "wide loads":
        return sum(_count(opcodes, wide) for wide in WIDE_LOADS)
    if " of " in word:
        return sum(n for opcode, n in opcodes.items() if _narrow(opcode.split(".")) == word)
    return sum(n for opcode, n in opcodes.items() if _answers(opcode.split("."), word.split(".")))


def _narrow(opcode: list[str]) -> str:
    """Which word counts it: a load from global memory, or a store, of less than 16 bytes; "": none.
    cp.async.ca copies 8 bytes or 4, which its opcode does not say."""
    if opcode[:3] == ["cp", "async", "ca"]:
        return "loads of less"
    if opcode[0] not in ("ld", "st") or "global" not in opcode:
        return ""
    lanes = next((int(part[1:]) for part in opcode if re.fullmatch(r"v\d", part)), 1)
    size = lanes * int(re.sub(r"\D", "", opcode[-1]) or 0) // 8
    kind = "loads" if opcode[0] == "ld" else "stores"
    return "" if size >= 16 else f"{kind} of 8 bytes" if size == 8 else f"{kind} of less"


def _answers(opcode: list[str], word: list[str]) -> bool:
    if opcode[0] != word[0]:
        return False
    rest = iter(opcode)
    return all(part in rest for part in word)  # `in` moves on: the parts must follow one another
