"""How the emulation refuses: as the library does where it does, by name where it would not notice.

Knows: the kinds of error. Checks in the library's Python are AssertionError; those of its C++ side
arrive in Python as RuntimeError.
"""

from __future__ import annotations


class HostAssertion(RuntimeError):
    """A check of the library's C++ side: the same kind of error, with the value beside it."""


class BufferRuleError(RuntimeError):
    """A rule that the library states but does not check: on a GPU this call would corrupt results
    or hang. Names the rule."""


class PeerTimeout(RuntimeError):
    """A peer sent nothing in time, and masks are off: on a GPU the kernel traps."""


def host_assert(condition: object, message: str) -> None:
    """HostAssertion unless condition. message: what must hold, and what was given."""
    if not condition:
        raise HostAssertion(f"Assertion failed: {message}")


def python_assert(condition: object, message: str) -> None:
    """AssertionError unless condition, as the library's Python does; also under `python -O`."""
    if not condition:
        raise AssertionError(message)
