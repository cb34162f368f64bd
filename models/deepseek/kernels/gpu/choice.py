"""How one of several implementations is taken: asked in order, every refusal told in words.

What products (gemm_adapters.py, gemm_choice.py) and MLA decode (mla_adapters.py, mla_guard.py) have
in common, as libraries and ours stand behind one call in both. Knows names and words; nothing of
what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dispatch.words import raised
from models.deepseek.kernels.gpu.errors import ShapeRefused


class Candidate(Protocol):
    @property
    def name(self) -> str: ...

    def refusal(self, problem: Any) -> str | None:
        """Why it cannot, in one line; None: it can. Never raises, needs no GPU."""
        ...


B = TypeVar("B", bound=Candidate)


@dataclass(frozen=True)
class Choice(Generic[B]):
    """backend, and one line a caller prints once: which it is, and why no earlier one."""

    backend: B
    reason: str


def first_that_fits(what: str, problem: object, backends: Sequence[B]) -> Choice[B]:
    """what: how the line begins. ShapeRefused with all reasons when every one refuses."""
    passed: list[str] = []
    for backend in backends:
        why = backend.refusal(problem)
        if why is None:
            return Choice(backend, chosen(what, backend.name, passed))
        passed.append(passed_over(backend.name, why))
    raise nothing_fits(what, passed)


def chosen(what: str, name: str, passed: Sequence[str]) -> str:
    """The line of a choice; passed: who was passed over before."""
    return f"{what}: {name}" + (f" ({'; '.join(passed)})" if passed else "")


def passed_over(name: str, why: str) -> str:
    return f"no {name}: {why}"


def nothing_fits(what: str, passed: Sequence[str]) -> ShapeRefused:
    return ShapeRefused(f"{what}: nothing fits: {'; '.join(passed)}")


def why_failed(error: Exception) -> str:
    """Of a library that raised when it was called."""
    return f"it raised {raised(error)}"


def load_library(
    name: str, load: Callable[[], Any], held: Any = None
) -> tuple[Any, None] | tuple[None, str]:
    """The module, or why there is none. held: in its place, where it is not None."""
    if held is not None:
        return held, None
    try:
        return load(), None
    except Exception as error:  # a wheel for CUDA fails in many ways without it
        return None, f"{name} cannot be imported: {raised(error)}"


def at_most(number: int) -> int:
    """The power of two that a number is filed under, so that few sizes are told apart."""
    return 1 << max(0, number - 1).bit_length()
