"""How one of several implementations is taken: asked in order, every refusal told in words.

What products (gemm_adapters.py, gemm_choice.py) and MLA decode (mla_adapters.py, mla_guard.py) have
in common, as libraries and ours stand behind one call in both: who is asked, what becomes of one
that raises (`Failures`), what is said of it. Knows names and words; nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, Protocol, TypeVar

import torch

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
        why = refusal_of(backend, problem)
        if why is None:
            return Choice(backend, chosen(what, backend.name, passed))
        passed.append(passed_over(backend.name, why))
    raise nothing_fits(what, passed)


def refusal_of(backend: Candidate, problem: object) -> str | None:
    """Its refusal; a probe that raises, against its word, is one too."""
    try:
        return backend.refusal(problem)
    except Exception as error:
        return _probe_failed(error)


def in_words(
    refusal: Callable[[Any, Any], str | None],
) -> Callable[[Any, Any], str | None]:
    """For an adapter's `refusal`: a library may raise anything when it is looked at (a driver that
    is missing, a name that is no function), and that is why it cannot."""

    @wraps(refusal)
    def asked(self: Any, problem: Any) -> str | None:
        try:
            return refusal(self, problem)
        except Exception as error:
            return _probe_failed(error)

    return asked


def _probe_failed(error: Exception) -> str:
    return f"its probe raised {raised(error)}"


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


class Failures:
    """Of backends that raised when they were called: which problem, and which size of it, is not
    theirs any more. say: told a line of each as it happens.

    One that never did a problem is not asked for it again, at any size; one that has (libraries
    compile for each size as it comes) keeps the other sizes."""

    def __init__(self) -> None:
        self.say: Callable[[str], None] = lambda line: None
        self._did: set[tuple[str, Hashable]] = set()
        self._why: dict[tuple[str, Hashable, int | None], str] = {}

    def did(self, name: str, problem: Hashable) -> None:
        self._did.add((name, problem))

    def why(self, name: str, problem: Hashable, size: int) -> str | None:
        """Why it is not asked; None: it is."""
        of_all = self._why.get((name, problem, None))
        return self._why.get((name, problem, size)) if of_all is None else of_all

    def take(
        self, error: Exception, name: str, problem: Hashable, size: int, device: torch.device
    ) -> bool:
        """Note that it raised -> whether it keeps other sizes. size: a power of two (`at_most`).
        Where `nobody_goes_on` the error must be raised all the same."""
        kept = (name, problem) in self._did
        # That memory was short while a step was captured says nothing of the library.
        if not (isinstance(error, torch.OutOfMemoryError) and is_captured(device)):
            told, of = why_failed(error), f"{size // 2 + 1} to {size}" if size > 1 else "1"
            self._why[name, problem, size if kept else None] = told + f" at {of} rows" * kept
        return kept


def nobody_goes_on(device: torch.device) -> bool:
    """Whether an error must end what is done, so that no other backend may take the place of the
    one that raised: within a capture, for half of a library's kernels may be in the graph; and
    where the device is at fault.

    What a library checks or fails to compile before it launches does no harm, and what it launched
    before that wrote into memory of its own call. A fault on the device (an illegal address) stays
    for the life of the process: then the stream answers every question with it. Nobody waits for
    the answer: a stream that is at work is well."""
    if device.type != "cuda":
        return False
    if is_captured(device):
        return True
    try:
        torch.cuda.current_stream(device).query()
    except Exception:  # the fault, once more
        return True
    return False


def is_captured(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
