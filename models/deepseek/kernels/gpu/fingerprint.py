"""What a compile case is known by: all that the compiler reads of it, and how that is counted.

Knows a kernel's source and what it calls. Comments and docstrings do not count. What a case is may
depend on triton's version (CompileCases are made by it): two versions' fingerprints differ, but
either is told without its compiler wherever `triton.__version__` says so.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from types import ModuleType
from typing import Any

from models.deepseek.kernels.gpu import aot
from models.deepseek.kernels.gpu.aot import CompileCase

_PLAIN = (bool, int, float, str, tuple)  # globals that a kernel may name where their type says so


def fingerprint(case: CompileCase, arch: int, triton: str) -> str:
    """Of the compiler's version, the kernel's text, that of all it calls, the constants they name
    and the case. 16 hex digits."""
    texts: dict[str, str] = {}
    _read_text(case.kernel, texts)
    settings = (
        *(sorted(case.signature.items()), sorted(case.constexprs.items(), key=str)),
        *(case.num_warps, case.num_stages, sorted(case.divisible), arch, triton),
    )
    return _digits([sorted(texts.items()), settings])


def counted(case: CompileCase, arch: int) -> str:
    """Of how a case is compiled and which of its instructions are counted. 8 hex digits."""
    return _digits([plain(inspect.getsource(aot)), case.wants.get(arch, ())])[:8]


def plain(source: str) -> str:
    """Without what no compiler reads: comments, docstrings, the way it is laid out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            body[0] = ast.Pass()
    return ast.unparse(tree)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _digits(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _read_text(kernel: Any, texts: dict[str, str]) -> None:
    """The source of a jitted function and of those it calls, by name or as a module's, its
    defaults, and values of the global constants that it names."""
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if name in texts:
        return
    texts[name] = plain(kernel.src)
    texts[f"{name}()"] = f"{_defaults(kernel.fn)} {getattr(kernel, 'noinline', None)}"
    names = kernel.fn.__code__.co_names
    found = {used: kernel.fn.__globals__.get(used) for used in names}
    for used, value in list(found.items()):
        if isinstance(value, ModuleType) and value.__name__.split(".")[0] != "triton":
            found |= {f"{used}.{x}": getattr(value, x, None) for x in names}
    for used, value in found.items():
        if hasattr(value, "src") and hasattr(value, "fn"):
            _read_text(value, texts)
        elif type(value).__name__ == "constexpr" or type(value) in _PLAIN:
            texts[f"{name}.{used}"] = repr(value)


def _defaults(function: Any) -> str:
    given = inspect.signature(function).parameters.values()
    return repr({x.name: x.default for x in given if x.default is not x.empty})
