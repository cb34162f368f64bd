"""load_model: from a checkpoint folder to a DeepSeekModel on this rank, in one call.

Knows: the order config -> preflight -> weights -> dispatcher -> model. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dispatch.base import DispatchConfig, Dispatcher, WireFormat
from ep.group import EPGroup
from ep.placement import ExpertPlacement, PlacementError
from models.deepseek.checkpoint import preflight
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import Kernels
from models.deepseek.loader import WeightLoader
from models.deepseek.model import DeepSeekModel
from models.deepseek.tensor_reader import Progress

DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = ("auto", "fp8", "dequantised")


def load_model(
    checkpoint_dir: str | Path,
    *,
    dtype: torch.dtype,
    weights: str = "auto",
    kernels: Kernels,
    group: EPGroup,
    dispatcher_factory: Callable[[DispatchConfig], Dispatcher],
    placement: ExpertPlacement | None = None,
    deterministic: bool = True,
    progress: Progress | None = None,
    with_mtp: bool = True,
    config: DeepSeekConfig | None = None,
    max_tokens_per_rank: int = 8192,
    wire: WireFormat = WireFormat.MODEL,
    max_positions: int | None = None,
    num_threads: int = 4,
    device: torch.device | str = "cpu",
    fp8_cache: bool = False,
) -> DeepSeekModel:
    """Read what this rank hosts and build its model.

    weights: what becomes of FP8 blocks: kept as such ("fp8"), or brought to dtype ("dequantised"),
    with the same results (triton's products with them are W8A8: others, by the rounding of rows to
    e4m3); "auto" keeps them where the kernels are no slower with them.
    placement None: the trivial one, no redundant experts. progress(done bytes, total bytes, MB/s).
    with_mtp: load MTP layers if the config has any. max_tokens_per_rank: most tokens of one step,
    what the dispatcher's buffers are made for. wire: how rows travel to experts. fp8_cache: what
    `cache_spec` asks for (the kernels' `fp8_cache_misfit` says why not). The model's
    `weights.notes` say what was left out or decided: print them once. Raises UnsupportedModel,
    ConfigError, CheckpointError; PlacementError for a placement that does not fit, ValueError for
    another dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: valid are {', '.join(map(str, DTYPES))}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r}: valid are {', '.join(WEIGHTS)}")
    config = DeepSeekConfig.from_hf(checkpoint_dir) if config is None else config
    with_mtp = with_mtp and config.num_mtp_layers > 0
    if placement is None:
        placement = ExpertPlacement.trivial(
            config.num_placement_layers(with_mtp), config.n_routed_experts, group.size
        )
    if placement.num_ranks != group.size:
        raise PlacementError(
            f"placement is for {placement.num_ranks} ranks, the group has {group.size}"
        )
    plan = preflight(checkpoint_dir, config, placement, group.rank, with_mtp=with_mtp)
    keep_fp8 = weights == "fp8" or (weights == "auto" and kernels.fp8_is_fast)
    loaded = WeightLoader(
        plan,
        kernels,
        dtype,
        keep_kv_b=not deterministic,
        keep_fp8=keep_fp8,
        progress=progress,
        num_threads=num_threads,
        device=device,
    ).load()
    if plan.has_fp8:
        loaded = replace(
            loaded, keeps_fp8=keep_fp8, notes=(_fp8_note(weights, keep_fp8), *loaded.notes)
        )
    dispatcher = dispatcher_factory(
        DispatchConfig(
            hidden_size=config.hidden_size,
            top_k=plan.picks_per_token,
            num_physical_experts=placement.num_physical_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            deterministic=deterministic,
            wire=wire,
        )
    )
    return DeepSeekModel(
        config,
        loaded,
        kernels,
        dispatcher,
        placement,
        rank=group.rank,
        dtype=dtype,
        deterministic=deterministic,
        max_positions=max_positions,
        fp8_cache=fp8_cache,
    )


def _fp8_note(weights: str, keep: bool) -> str:
    done = "kept in memory" if keep else "dequantised at load"
    speed = "no slower" if keep else "slower"
    reason = f"auto: these kernels are {speed} with them" if weights == "auto" else "asked for"
    return f"weights: FP8 blocks {done} ({reason})"
