"""What can go wrong with kernels: no compiler, or arguments that do not fit together."""

from __future__ import annotations


class KernelsUnavailable(RuntimeError):
    """An implementation cannot run on this machine; the message says why."""


class KernelTableError(ValueError):
    """A file is no table of kernels, or one for another device; names it and what would be."""


class KernelArgumentError(ValueError):
    """A tensor's shape, dtype, layout or an index in it does not fit; names it and the limit."""
