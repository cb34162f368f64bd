"""What can be wrong with the GPU kernels that is not our own fault."""

from __future__ import annotations


class TritonMissing(RuntimeError):
    """triton is wanted and not installed; the text says how to get it."""


class CompileFailed(RuntimeError):
    """A kernel does not compile for an architecture; the text names kernel, configuration, why."""


class ShapeRefused(ValueError):
    """A tensor's shape, dtype or stride that a kernel cannot take; the text says what it can."""


class RecordUnreadable(ValueError):
    """The record of compiled kernels is no such file; the text names the file and what is wrong."""
