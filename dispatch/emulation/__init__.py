"""`deep_ep` on CPUs: the names, shapes, limits and errors of DeepEP's first API, over gloo.

For tests, and to watch a low-latency layer without a GPU. What the library leaves undefined is
poisoned here (NaN, -1), and rules that it states but does not check are errors. Knows nothing of
who calls it: the adapters run on it unchanged.
"""

from __future__ import annotations

import torch

from dispatch.emulation.buffer import Buffer
from dispatch.emulation.errors import BufferRuleError, HostAssertion, PeerTimeout
from dispatch.emulation.events import Config, EventHandle, EventOverlap

__version__ = "2.1.0+emulated"
topk_idx_t = torch.int64

__all__ = [
    "Buffer",
    "BufferRuleError",
    "Config",
    "EventHandle",
    "EventOverlap",
    "HostAssertion",
    "PeerTimeout",
    "topk_idx_t",
]
