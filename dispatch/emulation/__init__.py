"""`deep_ep` 2.1 on CPUs: names, shapes, limits and errors of DeepEP's first API and of its second,
over gloo. 2.5, which has the second alone, is elastic_25.py.

For tests, and to watch a low-latency layer without a GPU. What the library leaves undefined is
poisoned here (NaN, -1), and rules that it states but does not check are errors. Knows nothing of
who calls it: the adapters run on it unchanged.
"""

from __future__ import annotations

import torch

from dispatch.emulation.buffer import Buffer
from dispatch.emulation.elastic import ElasticBuffer
from dispatch.emulation.elastic_handle import EPHandle
from dispatch.emulation.errors import BufferRuleError, HostAssertion, PeerTimeout
from dispatch.emulation.events import Config, EventHandle, EventOverlap

__version__ = "2.1.0+emulated"
topk_idx_t = torch.int64

__all__ = [
    "Buffer",
    "BufferRuleError",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HostAssertion",
    "PeerTimeout",
    "topk_idx_t",
]
