"""prepare: every start-up problem that can be known without weights, found at once on all ranks.

Knows: settings, the checkpoint's headers, what kernels and dispatchers say of this machine. Reads
no weights, allocates nothing. What "auto" resolved to is collected in `StartUp.notes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from dispatch.base import DispatchConfig
from dispatch.choice import Choice, Wish
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from ep.presets import PRESETS
from models.deepseek.checkpoint import preflight
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import CheckpointError
from models.deepseek.kernels.errors import KernelsUnavailable, KernelTableError
from models.deepseek.kernels.select import KernelChoice, create_kernels, fitting
from models.deepseek.mla import attention_shape
from moeserve.config import ServeConfig
from moeserve.device.choose import DeviceChoice, DeviceUnavailable, choose_device, look
from moeserve.dispatch_wire import WireChoice, decide_wire
from moeserve.dispatching import Offer, agree_on_dispatcher, make_offer, read_wish
from moeserve.folder import read_model
from moeserve.lockstep import agree_on, agree_on_problems
from moeserve.memory import AUTO_SHARE, CachePlan, CacheTooSmall, plan_cache, shortage
from moeserve.placing import first_placement
from moeserve.rebalancing.build import rebalance_problems
from moeserve.speculate.build import SpeculatePlan, plan_speculation
from moeserve.terminal import counted

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Settings that belong to one machine: paths may differ, what lies there may not (fingerprints).
_LOCAL = (
    "model.checkpoint",
    "model.chat_template",
    "model.kernel_table",
    "speculate.method",
    "parallel.placement",
    "parallel.interface",
    "engine.threads",
    "engine.device",  # what it has become is compared
)


@dataclass
class StartUp:
    """What the checks resolved: every "auto" has become a value here. dispatch: prefill's sizes.
    known_bytes: what this rank will want at least, by kind, as far as it is known."""

    model: DeepSeekConfig
    dtype: torch.dtype
    with_mtp: bool
    placement: ExpertPlacement
    device: DeviceChoice
    kernels: KernelChoice
    dispatch: DispatchConfig
    wire: WireChoice
    fingerprint: str
    known_bytes: dict[str, int]
    notes: list[str] = field(default_factory=list)
    chosen: Choice | None = None  # set once all ranks have agreed
    speculate: SpeculatePlan | None = None  # None: off
    weight_bytes: dict[str, int] = field(default_factory=dict)  # of this rank, by kind
    keeps_fp8: bool = False  # FP8 blocks stay such in memory

    @property
    def dispatchers(self) -> Choice:
        assert self.chosen is not None
        return self.chosen


def prepare(config: ServeConfig, group: EPGroup) -> StartUp:
    """All checks that need no weights; ConfigError with every problem of every rank."""
    problems: list[str] = []
    unknown: list[str] = []
    wish = read_wish(config, unknown)
    offers: list[Offer] = []
    start = _resolve(config, group, wish, problems, offers)
    problems += unknown
    choice = agree_on_dispatcher(group, wish, offers[0] if offers else None, problems)
    if start is not None and choice is not None:
        start.chosen = choice
        start.known_bytes["dispatch_buffers"] = choice.plan(group).total
        here, sharers = start.device.free_bytes(group.ranks_per_node)
        short = shortage(start.known_bytes, here, sharers)
        problems += [short] if short else []
    agree_on_problems(group, problems)
    assert start is not None
    agree_on(group, _shared_settings(config, start))
    return start


def _resolve(
    config: ServeConfig,
    group: EPGroup,
    wish: Wish | None,
    problems: list[str],
    offers: list[Offer],
) -> StartUp | None:
    """offers: gets this rank's, as soon as the model's sizes are known, whatever else is wrong."""
    folder = config.model.checkpoint
    model, found = read_model(folder)
    problems += found
    if config.parallel.ep != group.size:
        problems.append(
            f"parallel.ep={config.parallel.ep}: this job has {counted(group.size, 'rank')}; "
            f"start it with --ep {group.size} or as many processes as --ep says"
        )
    device = _device(config, group, problems)
    if device is not None and device.on_cpu and config.engine.graph_memory is not None:
        problems.append(
            f"engine.graph_memory={config.engine.graph_memory}: not used on a CPU: steps are "
            "captured on GPUs"
        )
    kernels = _kernels(config, device, problems)
    if model is None:  # nothing that depends on it can be said
        return None
    notes: list[str] = []
    dtype = _dtype(config, model, folder, notes)
    kernels = _fitting(config, model, dtype, kernels, problems)
    with_mtp = config.model.mtp and model.num_mtp_layers > 0
    speculate = plan_speculation(config, model, problems)
    if config.engine.ahead == "on" and speculate is not None:
        problems.append(
            "engine.ahead='on': speculation drafts from the tokens of the step before, which are "
            "not known ahead; leave one of them out"
        )
    beside = 0 if speculate is None else speculate.cache_bytes(dtype.itemsize)
    cache = _check_lengths(config, model, dtype, with_mtp, beside, problems)
    placement = first_placement(config, model, group, with_mtp, problems)
    if placement is None or kernels is None or device is None:
        return None
    try:
        plan = preflight(folder, model, placement, group.rank, with_mtp=with_mtp)
        if config.model.weights == "fp8" and not plan.has_fp8:
            problems.append("model.weights='fp8': this checkpoint has no FP8 blocks; leave it out")
    except CheckpointError as error:
        problems.extend(f"model.checkpoint={folder}: {p}" for p in error.shown)
    rows = decide_wire(config.parallel.wire, model.quantization, device.device.type)
    dispatch = DispatchConfig(
        hidden_size=model.hidden_size,
        top_k=model.num_experts_per_tok + placement.num_logical_experts - model.n_routed_experts,
        num_physical_experts=placement.num_physical_experts,
        max_tokens_per_rank=config.schedule.token_budget,
        dtype=dtype,
        deterministic=config.engine.deterministic,
        wire=rows.wire,
    )
    drafts = 0 if speculate is None else speculate.nodes
    offers.append(make_offer(config, group, dispatch, wish, drafts))
    problems += rebalance_problems(config, group, placement, model.n_group, model.n_routed_experts)
    if problems:
        return None
    if not device.on_cpu or config.engine.device != "auto":
        notes.append(device.note)
    notes.append(kernels.reason)
    notes.append(rows.note)
    if fp8_cache(config):
        notes.append(_cache_note(model, dtype))
    if speculate is not None:
        notes.append(speculate.note)
    if placement.num_empty_slots:
        hosted = placement.num_physical_experts - placement.num_empty_slots
        notes.append(
            f"placement: {hosted} experts and copies a layer leave {placement.num_empty_slots} of "
            f"{placement.num_physical_experts} slots empty ({placement.num_local_experts} a rank)"
        )
    preset = PRESETS.get(config.parallel.layout or "")
    if preset is not None and preset.gpus_per_node != group.ranks_per_node:
        notes.append(
            f"placement: layout {preset.name} was made for {preset.gpus_per_node} ranks a node; "
            f"here are {group.ranks_per_node}"
        )
    if config.parallel.shared_expert == "hosted":
        copies = int(placement.replica_count[:, model.n_routed_experts :].min())
        notes.append(
            "placement: the shared expert lies in slots, "
            f"{counted(copies, 'replica')} of it in every layer"
        )
    fingerprint = checkpoint_fingerprint(folder, plan.index.files)
    known = {
        "weights": min(plan.total_bytes, sum(plan.memory_bytes(dtype.itemsize).values())),
        "kv_cache": 0 if cache is None else cache.num_bytes,
        "drafter": 0 if speculate is None else speculate.memory_bytes(dtype.itemsize),
    }
    return StartUp(
        model,
        dtype,
        with_mtp,
        placement,
        device,
        kernels,
        dispatch,
        rows,
        fingerprint,
        known,
        notes,
        speculate=speculate,
        weight_bytes=plan.memory_bytes(dtype.itemsize),
        keeps_fp8=plan.has_fp8
        and (config.model.weights == "fp8" or kernels.kernels.fp8_is_fast)
        and config.model.weights != "dequantised",
    )


def _device(config: ServeConfig, group: EPGroup, problems: list[str]) -> DeviceChoice | None:
    asked = config.engine.device
    try:
        return choose_device(asked, look(), group.rank, group.ranks_per_node)
    except DeviceUnavailable as error:
        problems.append(f"engine.device={asked!r}: {error}")
        return None


def _kernels(
    config: ServeConfig, device: DeviceChoice | None, problems: list[str]
) -> KernelChoice | None:
    if device is None:  # what runs there cannot be said
        return None
    graphs = config.engine.graphs != "off"
    table = config.model.kernel_table
    try:
        fast = not config.engine.deterministic
        return create_kernels(config.model.kernels, device.device, table, graphs, fast)
    except KernelTableError as error:  # names the file
        problems.append(f"model.kernel_table={error}")
        return None
    except Exception as error:  # a broken compiler may raise anything
        problems.append(f"model.kernels={config.model.kernels!r}: {error}")
        return None


def _fitting(
    config: ServeConfig,
    model: DeepSeekConfig,
    dtype: torch.dtype,
    kernels: KernelChoice | None,
    problems: list[str],
) -> KernelChoice | None:
    name, shape = config.model.kernels, attention_shape(model)
    sizes = getattr(kernels and kernels.kernels, "block_sizes", None)
    if sizes is not None and config.cache.block_size not in sizes:
        given, valid = config.cache.block_size, ", ".join(map(str, sizes))
        near = min(sizes, key=lambda size: abs(size - given))
        problems.append(
            f"cache.block_size={given}: triton kernels take {valid}; nearest valid: {near}"
        )
    try:
        fit = kernels and fitting(kernels, name, shape, dtype, config.engine.deterministic)
    except KernelsUnavailable as error:
        problems.append(f"model.kernels={name!r}: {error}")
        return None
    why = fit.kernels.fp8_cache_misfit(shape) if fit and fp8_cache(config) else None
    if why is not None:
        problems.append(f"cache.kv_cache_dtype='fp8': {why}; nearest valid: model")
    return fit


def fp8_cache(config: ServeConfig) -> bool:
    return config.cache.kv_cache_dtype == "fp8"


def _cache_note(model: DeepSeekConfig, dtype: torch.dtype) -> str:
    now, before = (model.cache_bytes(dtype.itemsize, fp8) for fp8 in (True, False))
    name = str(dtype).removeprefix("torch.")
    return (
        f"KV cache: FP8, {now} bytes a token a layer ({before} in {name}): latents in e4m3 with a "
        f"scale for each 128 channels, rope keys in {name}"
    )


def _dtype(
    config: ServeConfig, model: DeepSeekConfig, folder: Path, notes: list[str]
) -> torch.dtype:
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype]
    outer = json.loads((folder / "config.json").read_text())
    inner = outer.get("text_config") or {}
    places = [source.get(key) for source in (inner, outer) for key in ("torch_dtype", "dtype")]
    named = str(next(filter(None, places), "bfloat16"))
    full = model.quantization is None and named == "float32"
    chosen = torch.float32 if full else torch.bfloat16
    stored = "FP8 blocks" if model.quantization is not None else named
    notes.append(f"dtype: {str(chosen).removeprefix('torch.')} (auto; the checkpoint has {stored})")
    return chosen


def _check_lengths(
    config: ServeConfig,
    model: DeepSeekConfig,
    dtype: torch.dtype,
    with_mtp: bool,
    beside: int,
    problems: list[str],
) -> CachePlan | None:
    """The cache, where its size was given. beside: bytes a token that a drafter's cache has."""
    most = model.max_position_embeddings
    wanted = config.schedule.max_model_len
    if wanted is not None and wanted > most:
        problems.append(
            f"schedule.max_model_len={wanted}: this model has {most} positions; at most {most}"
        )
        return None
    if config.cache.kv_tokens is None and config.cache.kv_memory is None:
        return None  # sized by what is available once the weights lie in place
    layers = model.num_hidden_layers + (model.num_mtp_layers if with_mtp else 0)
    try:
        a_token = layers * model.cache_bytes(dtype.itemsize, fp8_cache(config)) + beside
        return size_cache(config, a_token, most, 0, 1)
    except CacheTooSmall as error:
        problems.append(f"cache: {error}")
        return None


# -- agreements ---------------------------------------------------------------------------------


def checkpoint_fingerprint(folder: Path, files: Iterable[str]) -> str:
    """A hash of the config, the names and sizes of weight files and their headers: enough to see
    that two hosts serve different checkpoints, without reading weights. files: those that are
    loaded; what else lies in the folder is nobody's business."""
    digest = blake2b(digest_size=12)
    digest.update((folder / "config.json").read_bytes())
    for name in files:
        path = folder / name
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, 1 << 26)))
    return digest.hexdigest()


def _shared_settings(config: ServeConfig, start: StartUp) -> dict[str, Any]:
    """What every rank must have alike: all but what belongs to one machine or to the front end."""
    flat: dict[str, Any] = {}
    for section, values in config.model_dump(mode="json", exclude={"server"}).items():
        flat |= {f"{section}.{name}": value for name, value in values.items()}
    for local in _LOCAL:
        flat.pop(local, None)
    flat |= {} if start.speculate is None else start.speculate.shared
    return flat | {
        "checkpoint": start.fingerprint,
        "placement": start.placement.fingerprint,
        # Another instruction set sums in another order: law 5 would not hold between such hosts.
        "kernels": start.kernels.numerics if config.engine.deterministic else "any",
        "dtype": str(start.dtype),
        "device": start.device.device.type,
        "torch": torch.__version__,
    }


def size_cache(
    config: ServeConfig,
    bytes_per_token: int,
    model_len: int,
    available: int,
    ranks_here: int,
    beside: Mapping[str, int] | None = None,
    share: float = AUTO_SHARE,
) -> CachePlan:
    """`plan_cache` with the settings' values."""
    return plan_cache(
        bytes_per_token=bytes_per_token,
        block_size=config.cache.block_size,
        model_max_len=model_len,
        max_model_len=config.schedule.max_model_len,
        max_num_sequences=config.schedule.max_num_sequences,
        kv_tokens=config.cache.kv_tokens,
        kv_memory=config.cache.kv_memory,
        available_bytes=available,
        ranks_here=ranks_here,
        beside=beside,
        share=share,
        form="FP8" if fp8_cache(config) else "",
    )
