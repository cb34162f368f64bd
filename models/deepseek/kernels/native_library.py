"""The C functions of the compiled library with their argument types, each looked up once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from models.deepseek.kernels.build import Library
from models.deepseek.kernels.errors import KernelArgumentError, KernelsUnavailable

# What a nonzero result of a checked function means; the numbers are the C side's.
FAILURES = {
    1: "offsets: must start at 0, not decrease and end at the number of pairs",
    2: "pair_rows: an entry lies outside of x's rows",
    3: "index: an entry lies outside of y's rows",
    4: "positions: an entry is negative or outside of cos_sin's rows",
    5: "slot_mapping: an entry lies outside of the cache",
    6: "query_start: must start at 0, not decrease and end at the number of rows",
    7: "block_tables: a position of a sequence has no block of the cache",
    8: "ancestors: a row must have slots of the cache, at most its position + 1 of them, then -1",
}

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# positions, query_start, tables, sequences, table width, ancestors, their width
_BATCH = [_P, _P, _P, _L, _L, _P, _L]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "advise_large_pages": (None, [_P, _L]),
    "packed_bytes": (_L, [_L, _L, _I]),
    "pack": (None, [_P, _L, _L, _I, _P, _I]),
    "unpack": (None, [_P, _L, _L, _I, _P]),
    "fp8_packed_bytes": (_L, [_L, _L, _I]),
    "fp8_pack": (None, [_P, _P, _L, _L, _I, _P, _I]),
    "fp8_is_fast": (_I, []),
    "linear": (None, [_P, _L, _L, _P, _L, _L, _I, _P, _L, _I, _I]),
    "mlp": (None, [_P, _L, _L, _P, _L, _L, _I, _P, _L, _I, _P, _I]),
    "per_head": (None, [_P, _L, _L, _L, _L, _P, _L, _L, _I, _P, _I]),
    "bundle_bytes": (_L, [_L, _L, _I]),
    "store_expert": (None, [_P, _P, _P, _L, _L, _I, _P]),
    "fp8_store_expert": (None, [_P, _P, _P, _P, _P, _P, _L, _L, _I, _P]),
    "fetch_expert": (None, [_P, _L, _L, _I, _P, _P, _P]),
    "experts": (_I, [_P, _L, _L, _P, _L, _P, _P, _L, _L, _L, _I, _P, _I]),
    "gate": (
        None,
        [_P, _L, _L, _I, _P, _P, _L, _L, _L, _L, _L, _I, _I, _I, _F, _P, _P, _I],
    ),
    "sort_pairs": (_L, [_P, _L, _L, _L, _P, _P, _P]),
    "combine": (_I, [_P, _L, _L, _I, _P, _P, _L, _L, _P, _I]),
    "rms_norm": (None, [_P, _L, _L, _L, _I, _P, _F, _P, _I]),
    "add_rms_norm": (None, [_P, _L, _P, _L, _L, _L, _I, _P, _F, _P, _I]),
    "rope": (_I, [_P, _L, _L, _L, _L, _L, _I, _P, _P, _L, _P, _I]),
    "write_cache": (_I, [_P, _L, _P, _L, _P, _L, _L, _L, _L, _P]),
    "latent_attention": (
        _I,
        [_P, _L, _L, _P, _L, _L, _L, _L, _L, _L, _P, _L, _L, _L, *_BATCH, _F, _I, _P, _I],
    ),
    "naive_attention": (
        _I,
        [_P, _L, _L, _L, _L, _L, _L, _L, _L, _P, _L, _L, _L, _P, *_BATCH, _F, _I, _P, _I],
    ),
    "mla": (_I, [_P, _P, _L, _L, _P, _L, _L, _P, *_BATCH, _P, _I]),
    "instruction_set": (ctypes.c_char_p, []),
}


def check(code: int) -> None:
    """Raises KernelArgumentError for what a checked function found in its arguments."""
    if code:
        raise KernelArgumentError(FAILURES[code])


class NativeLibrary:
    """ms_<name> as attribute <name>. build: instruction set and compiler, which decide the bits of
    results; description: that, and what else there is to say of it."""

    def __init__(self, functions: dict[str, Callable[..., Any]], build: str, remark: str) -> None:
        self.__dict__.update(functions)
        self.build, self.description = build, build + remark

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the native library has no function {name}")


class NativePart:
    """Calls into one library; the parts of NativeKernels are of this kind."""

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library


def load_library(library: Library) -> NativeLibrary:
    """Raises KernelsUnavailable when the file cannot be loaded or lacks a function."""
    try:
        loaded = ctypes.CDLL(str(library.path))
        functions = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"ms_{name}")
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{library.path.name} cannot be used: {error}") from error
    instructions = functions["instruction_set"]().decode()
    return NativeLibrary(functions, f"{instructions}, {library.compiler}", library.remark)
