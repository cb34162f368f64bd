"""What the members of the second API take, by version: names, order and defaults.

Plain data, as signatures.py is for the first API. `...` stands for "no default". Members that 2.5
takes from functions of its `comm` are in COMM_25: read elsewhere in its source.
"""

from __future__ import annotations

from dispatch.emulation.signatures import Signature

_SIZE: Signature = (
    ("group", ...),
    ("num_max_tokens_per_rank", ...),
    ("hidden", ...),
    ("num_topk", 0),
    ("use_fp8_dispatch", False),
    ("allow_hybrid_mode", True),
    ("allow_multiple_reduction", True),
)
_MOE: Signature = (
    ("num_max_tokens_per_rank", 0),
    ("hidden", 0),
    ("num_topk", 0),
    ("use_fp8_dispatch", False),
)
_MODES: Signature = (
    ("deterministic", False),
    ("allow_hybrid_mode", True),
    ("allow_multiple_reduction", True),
    ("prefer_overlap_with_compute", True),
)
_LIMITS: Signature = (
    ("num_allocated_qps", 0),
    ("num_cpu_timeout_secs", 300),
    ("num_gpu_timeout_secs", 100),
    ("explicitly_destroy", False),
)
_GATE: Signature = (
    ("num_experts", ...),
    ("num_topk", ...),
    ("num_scaleout_topk", 0),
    ("rdma_gbs", 0),
    ("nvlink_gbs", 0),
)
_DISPATCH: Signature = (
    ("x", ...),
    ("topk_idx", None),
    ("topk_weights", None),
    ("cumulative_local_expert_recv_stats", None),
    ("num_experts", None),
    ("num_max_tokens_per_rank", None),
    ("expert_alignment", None),
    ("num_sms", 0),
    ("num_qps", 0),
    ("previous_event", None),
)
_COMBINE: Signature = (
    ("x", ...),
    ("handle", ...),
    ("topk_weights", None),
    ("bias", None),
    ("num_sms", 0),
    ("num_qps", 0),
    ("previous_event", None),
)
_BEFORE_EPILOGUE: Signature = (("previous_event_before_epilogue", None),)
_STREAMS: Signature = (("async_with_compute_stream", False), ("allocate_on_comm_stream", False))
_LAYOUT: Signature = (
    ("do_cpu_sync", None),
    ("do_expand", False),
    ("do_zero_padding", False),
    ("use_tma_aligned_col_major_sf", False),
)
_DEFER: Signature = (("defer_epilogue", False),)

_HANDLE: dict[str, Signature] = {
    "__init__": tuple(
        (name, ...)
        for name in (
            "do_expand",
            "num_experts",
            "expert_alignment",
            "num_max_tokens_per_rank",
            "num_sms",
            "topk_idx",
            "num_recv_tokens",
            "num_expanded_tokens",
            "num_recv_tokens_per_expert_list",
            "psum_num_recv_tokens_per_scaleup_rank",
            "psum_num_recv_tokens_per_expert",
            "num_unaligned_recv_tokens_per_expert",
            "recv_src_metadata",
            "dst_buffer_slot_idx",
            "token_metadata_at_forward",
            "channel_linked_list",
        )
    ),
    "deterministic_sort": tuple(
        (name, ...)
        for name in (
            "do_cpu_sync",
            "is_cached_dispatch",
            "recv_x",
            "recv_sf",
            "recv_topk_idx",
            "recv_topk_weights",
            "channel_linked_list",
        )
    ),
}

_ELASTIC: dict[str, Signature] = {
    "__init__": (
        ("group", ...),
        ("num_bytes", None),
        ("num_cpu_bytes", 0),
        *_MOE,
        *_MODES,
        ("sl_idx", 3),
        *_LIMITS,
    ),
    "destroy": (),
    "get_buffer_size_hint": _SIZE,
    "barrier": (("use_comm_stream", True), ("with_cpu_sync", False), ("sequential", True)),
    "capture": (),
    "get_comm_stream": (),
    "get_physical_domain_size": (),
    "get_logical_domain_size": (),
    "get_theoretical_num_sms": (*_GATE, ("sm_read_gbs", 200), ("sm_write_gbs", 50)),
    "get_theoretical_num_qps": (("num_sms", ...),),
    "dispatch": (
        *_DISPATCH,
        *_BEFORE_EPILOGUE,
        *_STREAMS,
        ("handle", None),
        ("do_handle_copy", True),
        *_LAYOUT,
    ),
    "combine": (*_COMBINE, *_BEFORE_EPILOGUE, *_STREAMS),
    "get_engram_storage_size_hint": (
        ("num_entries", ...),
        ("hidden", ...),
        ("num_max_tokens_per_rank", ...),
        ("dtype", "torch.bfloat16"),
    ),
    "get_pp_buffer_size_hint": (("num_max_tensor_bytes", ...), ("num_max_inflight_tensors", ...)),
    "get_agrs_num_max_session_bytes": (("group", ...), ("shapes", ...), ("dtype", ...)),
    "get_agrs_buffer_size_hint": (("group", ...), ("num_max_session_bytes", ...)),
    "engram_write": (("storage", ...), ("sf", None)),
    "engram_fetch": (
        ("indices", ...),
        ("num_qps", 0),
        ("use_tma_aligned_col_major_sf", False),
    ),
    "pp_set_config": (("num_max_tensor_bytes", ...), ("num_max_inflight_tensors", ...)),
    "pp_send": (("t", ...), ("dst_rank_idx", ...), ("num_sms", 0)),
    "pp_recv": (("t", ...), ("src_rank_idx", ...), ("num_sms", 0)),
    "create_agrs_session": (),
    "destroy_agrs_session": (),
    "agrs_new_session": (("enabled", True),),
    "agrs_set_config": (("num_max_session_bytes", ...), ("num_max_all_gathers_per_session", ...)),
    "agrs_get_inplace_tensor": (("shapes", ...), ("dtype", ...)),
    "all_gather": (("t", ...),),
}

_EP: dict[str, Signature] = {
    "__init__": (
        ("group", ...),
        ("num_bytes", None),
        *_MOE,
        ("lb_allocation_plan_or_num_bytes", 0),
        *_MODES,
        ("sl_idx", None),
        *_LIMITS,
    ),
    "destroy": (),
    "get_buffer_size_hint": _SIZE,
    "capture": (),
    "get_theoretical_num_sms": (*_GATE, ("sm_read_gbs", 0), ("sm_write_gbs", 0)),
    "get_theoretical_num_qps": (("num_sms", ...),),
    "dispatch": (
        *_DISPATCH,
        *_STREAMS,
        ("handle", None),
        ("do_handle_copy", False),
        *_LAYOUT,
        *_DEFER,
    ),
    "combine": (*_COMBINE, *_STREAMS, *_DEFER),
    "lb_get_theoretical_num_sms": (),
    "lb_prefetch_weights": (
        ("redundant_expert_weights", ...),
        ("expert_weights", ...),
        ("redundancy_mapping", ...),
        ("num_sms", 0),
        ("previous_event", None),
    ),
    "lb_reduce_grads": (
        ("redundant_expert_grads", ...),
        ("expert_grads", ...),
        ("redundancy_mapping", ...),
        ("num_sms", 0),
        ("previous_event", None),
    ),
}

# Version -> class -> member -> parameters without self.
ELASTIC_SIGNATURES: dict[str, dict[str, dict[str, Signature]]] = {
    "2.1.0": {"ElasticBuffer": _ELASTIC, "EPHandle": _HANDLE},
    "2.5.0": {
        "EPBuffer": _EP,
        "EPHandle": {**_HANDLE, "topk_idx": ()},
        "EventOverlap": {
            "__init__": (("event", None), ("extra_tensors", None)),
            "current_stream_wait": (("release_handle", False),),
            "wait": (),
            "register_hook_after_wait": (("hook_after_wait", ...),),
        },
    },
}

# Members of EPBuffer that are functions of the package's `comm`, by name; the first parameter is
# the buffer.
COMM_25: dict[str, Signature] = {
    "barrier": (
        ("wait_comm_stream", True),
        ("with_cpu_sync", False),
        ("sequential", True),
        ("context_idx", None),
    ),
    "get_comm_stream": (),
    "get_physical_domain_size": (),
    "get_logical_domain_size": (("allow_hybrid_mode", None),),
}
