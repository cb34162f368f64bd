"""load_model: from a checkpoint folder to a DeepSeekModel on this rank, in one call.

Knows: the order config -> preflight -> weights -> dispatcher -> model. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dispatch.base import DispatchConfig, Dispatcher
from ep.group import EPGroup
from ep.placement import ExpertPlacement, PlacementError
from models.deepseek.checkpoint import preflight
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import Kernels
from models.deepseek.loader import Progress, WeightLoader
from models.deepseek.model import DeepSeekModel

DTYPES = (torch.float32, torch.bfloat16)


def load_model(
    checkpoint_dir: str | Path,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    group: EPGroup,
    dispatcher_factory: Callable[[DispatchConfig], Dispatcher],
    placement: ExpertPlacement | None = None,
    deterministic: bool = True,
    progress: Progress | None = None,
    with_mtp: bool = True,
    config: DeepSeekConfig | None = None,
    max_tokens_per_rank: int = 8192,
    max_positions: int | None = None,
    num_threads: int = 4,
    device: torch.device | str = "cpu",
) -> DeepSeekModel:
    """Read what this rank hosts and build its model.

    placement None: the trivial one, no redundant experts. progress(done bytes, total bytes, MB/s).
    with_mtp: load MTP layers if the config has any. max_tokens_per_rank: most tokens of one step,
    what the dispatcher's buffers are made for. The model's `weights.notes` say what was left out or
    decided: print them once. Raises UnsupportedModel, ConfigError, CheckpointError; PlacementError
    for a placement that does not fit, ValueError for another dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: valid are {', '.join(map(str, DTYPES))}")
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
    weights = WeightLoader(
        plan,
        kernels,
        dtype,
        keep_kv_b=not deterministic,
        progress=progress,
        num_threads=num_threads,
        device=device,
    ).load()
    dispatcher = dispatcher_factory(
        DispatchConfig(
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
            num_physical_experts=placement.num_physical_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            deterministic=deterministic,
        )
    )
    return DeepSeekModel(
        config,
        weights,
        kernels,
        dispatcher,
        placement,
        rank=group.rank,
        dtype=dtype,
        deterministic=deterministic,
        max_positions=max_positions,
    )
