"""What each member of the library takes: names, order and defaults, by version.

Plain data. A test holds the emulation against it, and the real package where it is installed. `...`
stands for "no default". Only the first API (`Buffer`) is emulated so far.
"""

from __future__ import annotations

import ast
from typing import Any

Signature = tuple[tuple[str, Any], ...]

_EVENTS: Signature = (
    ("previous_event", None),
    ("async_finish", False),
    ("allocate_on_comm_stream", False),
)
_LL_SIZES: Signature = (("num_max_dispatch_tokens_per_rank", ...), ("hidden", ...))

_DISPATCH: Signature = (
    ("x", ...),
    ("handle", None),
    ("num_tokens_per_rank", None),
    ("num_tokens_per_rdma_rank", None),
    ("is_token_in_rank", None),
    ("num_tokens_per_expert", None),
    ("topk_idx", None),
    ("topk_weights", None),
    ("expert_alignment", 1),
)
_COMBINE: Signature = (
    ("x", ...),
    ("handle", ...),
    ("topk_weights", None),
    ("bias", None),
    ("config", None),
    *_EVENTS,
)

_BUFFER: dict[str, Signature] = {
    "__init__": (
        ("group", ...),
        ("num_nvl_bytes", 0),
        ("num_rdma_bytes", 0),
        ("low_latency_mode", False),
        ("num_qps_per_rank", 24),
        ("allow_nvlink_for_low_latency_mode", True),
        ("allow_mnnvl", False),
        ("explicitly_destroy", False),
        ("enable_shrink", False),
        ("comm", None),
    ),
    "destroy": (),
    "is_sm90_compiled": (),
    "set_num_sms": (("new_num_sms", ...),),
    "capture": (),
    "get_low_latency_rdma_size_hint": (*_LL_SIZES, ("num_ranks", ...), ("num_experts", ...)),
    "get_comm_stream": (),
    "get_local_buffer_tensor": (
        ("dtype", ...),
        ("size", None),
        ("offset", 0),
        ("use_rdma_buffer", False),
    ),
    "get_dispatch_config": (("num_ranks", ...),),
    "get_combine_config": (("num_ranks", ...),),
    "get_dispatch_layout": (("topk_idx", ...), ("num_experts", ...), *_EVENTS),
    "dispatch": (
        *_DISPATCH,
        ("num_worst_tokens", 0),
        ("config", None),
        *_EVENTS,
    ),
    "combine": _COMBINE,
    "internode_dispatch": (
        *_DISPATCH,
        ("config", None),
        *_EVENTS,
    ),
    "internode_combine": _COMBINE,
    "clean_low_latency_buffer": (*_LL_SIZES, ("num_experts", ...)),
    "low_latency_dispatch": (
        ("x", ...),
        ("topk_idx", ...),
        ("num_max_dispatch_tokens_per_rank", ...),
        ("num_experts", ...),
        ("cumulative_local_expert_recv_stats", None),
        ("dispatch_wait_recv_cost_stats", None),
        ("use_fp8", True),
        ("round_scale", False),
        ("use_ue8m0", False),
        ("async_finish", False),
        ("return_recv_hook", False),
    ),
    "low_latency_combine": (
        ("x", ...),
        ("topk_idx", ...),
        ("topk_weights", ...),
        ("handle", ...),
        ("use_logfmt", False),
        ("zero_copy", False),
        ("async_finish", False),
        ("return_recv_hook", False),
        ("out", None),
        ("combine_wait_recv_cost_stats", None),
    ),
    "low_latency_update_mask_buffer": (("rank_to_mask", ...), ("mask", False)),
    "low_latency_query_mask_buffer": (("mask_status", ...),),
    "low_latency_clean_mask_buffer": (),
    "get_next_low_latency_combine_buffer": (("handle", ...),),
}

# Version -> class -> member -> parameters without self.
SIGNATURES: dict[str, dict[str, dict[str, Signature]]] = {
    "2.1.0": {
        "Buffer": _BUFFER,
        "EventOverlap": {
            "__init__": (("event", None), ("extra_tensors", None)),
            "current_stream_wait": (("release_handle", False),),
            "register_hook_after_wait": (("hook_after_wait", ...),),
        },
        "Config": {
            "__init__": (
                ("num_sms", 20),
                ("num_max_nvl_chunked_send_tokens", 6),
                ("num_max_nvl_chunked_recv_tokens", 256),
                ("num_max_rdma_chunked_send_tokens", 6),
                ("num_max_rdma_chunked_recv_tokens", 256),
            ),
            "get_nvl_buffer_size_hint": (("hidden_bytes", ...), ("num_ranks", ...)),
            "get_rdma_buffer_size_hint": (("hidden_bytes", ...), ("num_ranks", ...)),
        },
    },
}

# What the fork in the pinned wheel (sgl-deep-ep 0.1.2.post1) has besides, as method -> (parameter
# that comes before, more parameters). Positions differ from upstream's: callers use keywords.
FORK_EXTRA: dict[str, tuple[tuple[str, Signature], ...]] = {
    "__init__": (("allow_mnnvl", (("use_fabric", None),)),),
    "low_latency_dispatch": (
        ("dispatch_wait_recv_cost_stats", (("x_global_scale", None),)),
        ("use_ue8m0", (("use_nvfp4", False),)),
    ),
    "low_latency_combine": (
        (
            "combine_wait_recv_cost_stats",
            (("overlap", False), ("src_signals", None), ("src_signal_expect_value", 0)),
        ),
    ),
}


def fork_signatures() -> dict[str, Signature]:
    """`Buffer` of the pinned wheel."""
    found = {}
    for method, signature in SIGNATURES["2.1.0"]["Buffer"].items():
        extra = dict(FORK_EXTRA.get(method, ()))
        found[method] = tuple(p for own in signature for p in (own, *extra.get(own[0], ())))
    return found


def read_signatures(source: str, name: str) -> dict[str, Signature]:
    """Public members of class `name` in Python source, without importing it: parameters but self,
    literal defaults. KeyError if there is no such class."""
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    found: dict[str, Signature] = {}
    for node in classes[name].body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name.startswith("_") and node.name != "__init__":
            continue
        arguments = node.args.posonlyargs + node.args.args
        defaults = [...] * (len(arguments) - len(node.args.defaults))
        pairs = zip(arguments, [*defaults, *map(_literal, node.args.defaults)], strict=True)
        found[node.name] = tuple((a.arg, d) for a, d in pairs if a.arg != "self")
    return found


def _literal(node: Any) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
