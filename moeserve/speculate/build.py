"""From `--speculate` to a Speculator: what is checked before weights are read, and what is opened.

Knows settings, checkpoints' configs, which drafter wants what. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dispatch import create_dispatcher
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.checkpoint import preflight
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import CheckpointError
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels, fitting
from models.deepseek.load import load_model
from models.deepseek.mla import attention_shape
from moeserve.config import ServeConfig
from moeserve.device.stopwatch import stopwatch_of
from moeserve.errors import ConfigError
from moeserve.folder import read_model
from moeserve.runner import ModelRunner
from moeserve.scheduler import Scheduler
from moeserve.speculate.adaptive import AdaptiveDepth, FixedDepth
from moeserve.speculate.draft_model import DraftModelDrafter, tokenizer_problems
from moeserve.speculate.drafter import Drafter
from moeserve.speculate.eagle import EagleHead, read_eagle
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead, read_medusa
from moeserve.speculate.mtp import MtpDrafter
from moeserve.speculate.ngram import NgramDrafter
from moeserve.speculate.setting import MAX_DEPTH, SpeculateWish, folder_problem, read_speculate
from moeserve.speculate.speculator import Speculator
from moeserve.speculate.verify import Rule
from moeserve.tokenizer import Tokenizer

TREES = ("eagle", "medusa")  # drafters that can make some
DRAFT_ROWS = 2048  # of a draft model in a step: what it lacks of prompts comes in so many


@dataclass(frozen=True)
class SpeculatePlan:
    """wish: what "auto" became, never off. heads: read already, of the drafters that have some;
    model: the draft model's config. depth: the most drafts behind each other; nodes: of a
    sequence's tree. fingerprint: of what lies at the path. kernels: as asked for."""

    wish: SpeculateWish
    rule: Rule
    depth: int
    nodes: int
    note: str
    heads: EagleHead | tuple[MedusaHead, ...] | None = None
    model: DeepSeekConfig | None = None
    fingerprint: str = ""
    kernels: str = "auto"

    def cache_bytes(self, itemsize: int) -> int:
        """A token of the pool: a draft model has as many positions as the target, an EAGLE head at
        most. Its are padded (`eagle_padded`), or copied where they are."""
        if isinstance(self.heads, EagleHead):
            return 2 * self.heads.past_bytes
        if self.model is None:
            return 0
        return self.model.num_hidden_layers * self.model.cache_width * itemsize

    def memory_bytes(self, itemsize: int) -> int:
        """Of weights beside the model's. itemsize: of a value in the model's dtype."""
        if self.model is not None:
            assert self.wish.path is not None
            parts = _preflight(self.wish.path, self.model).memory_bytes(itemsize)
            return int(sum(parts.values()))
        if self.heads is None:
            return 0
        if isinstance(self.heads, EagleHead):
            return self.heads.nbytes
        return MedusaDrafter(self.heads).memory_bytes()

    def report(self) -> dict[str, object]:
        """For /health. depth: of drafts, None where it follows what pays."""
        return {
            "drafter": self.wish.name,
            "depth": self.wish.depth,
            "max_depth": self.depth,
            "max_nodes": self.nodes,
            "path": None if self.wish.path is None else self.wish.path.resolve().name,
            "rule": self.rule.value,
        }

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        return {
            "speculate.method": self.wish.without_path,
            "speculate.rule": self.rule.value,
            "speculate.nodes": self.nodes,
            "speculate.files": self.fingerprint,
        }


def plan_speculation(
    config: ServeConfig, model: DeepSeekConfig, problems: list[str]
) -> SpeculatePlan | None:
    """None where it is off, and where problems were found."""
    asked = config.speculate.method
    wish = read_speculate(asked)
    if wish.is_off:
        return None
    rule = Rule(config.speculate.rule)
    has_mtp = config.model.mtp and model.num_mtp_layers > 0
    why = ""
    if wish.name == "auto":
        wish = replace(wish, name="mtp" if has_mtp else "ngram")
        why = " (auto: the checkpoint has MTP)" if has_mtp else " (auto: no MTP is loaded)"
    setting = f"speculate.method={asked!r}"
    if missing := folder_problem(asked):
        problems += missing
        return None
    if wish.name == "mtp" and not has_mtp:
        lacks = (
            "its layer is left out by model.mtp"
            if model.num_mtp_layers > 0
            else "this checkpoint has no MTP layer"
        )
        problems.append(f"{setting}: {lacks}; valid: ngram, eagle:PATH, medusa:PATH, draft:PATH")
        return None
    heads: EagleHead | tuple[MedusaHead, ...] | None = None
    smaller: DeepSeekConfig | None = None
    most = MAX_DEPTH
    if wish.name == "draft":
        assert wish.path is not None
        smaller = _draft_config(config, model, wish.path, setting, problems)
        if smaller is None:
            return None
    elif wish.path is not None:
        read = read_eagle if wish.name == "eagle" else read_medusa
        heads = _heads(read, wish.path, model, setting, problems)
        if heads is None:
            return None
        if isinstance(heads, tuple):
            most = min(len(heads), MAX_DEPTH)
    if wish.depth is not None and wish.depth > most:
        problems.append(
            f"{setting}: K={wish.depth}, and there are {most} heads; nearest valid: {most}"
        )
        return None
    depth = wish.depth or most
    nodes = config.speculate.nodes
    if nodes is not None and wish.name not in TREES:
        problems.append(
            f"speculate.nodes={nodes}: {wish.name} drafts chains; trees are for "
            f"{' and '.join(TREES)}"
        )
        return None
    if nodes is not None and nodes < depth:
        problems.append(
            f"speculate.nodes={nodes}: a tree {depth} deep has at least {depth}; nearest valid: "
            f"{depth}, or a K of {nodes}"
        )
        return None
    nodes = nodes or depth
    how = f"{depth} deep" if wish.depth else f"as deep as pays, at most {depth}"
    tree = f", in trees of at most {nodes}" if nodes > depth else ""
    note = f"speculate: {wish.name}{why}, {how}{tree}; rule {rule.value}"
    rows = config.schedule.max_num_sequences * (1 + nodes)
    if rows > config.schedule.token_budget:
        note += (
            f"; {config.schedule.max_num_sequences} sequences with {nodes} drafts each are {rows} "
            f"tokens, more than --token-budget {config.schedule.token_budget}: drafts are cut then"
        )
    fingerprint = _fingerprint(wish.path)
    kernels = config.model.kernels
    return SpeculatePlan(wish, rule, depth, nodes, note, heads, smaller, fingerprint, kernels)


def open_speculator(
    plan: SpeculatePlan,
    runner: ModelRunner,
    scheduler: Scheduler,
    rank: int,
) -> Speculator:
    """Everything else stands already."""
    model: Any = runner.model
    policy: AdaptiveDepth | FixedDepth = (
        AdaptiveDepth(plan.depth) if plan.wish.depth is None else FixedDepth(plan.depth)
    )
    listener: list[Speculator] = []

    def begin_round(number: int, num_rows: int) -> None:
        listener[0].begin_round(number, num_rows)

    drafter = _drafter(plan, runner, scheduler, model, begin_round)
    speculator = Speculator(drafter, policy, runner, scheduler, rank, plan.rule)
    speculator.stopwatch = stopwatch_of(runner.cache.layers[0].device)
    listener.append(speculator)
    return speculator


def _drafter(
    plan: SpeculatePlan,
    runner: ModelRunner,
    scheduler: Scheduler,
    model: Any,
    begin_round: Callable[[int, int], None],
) -> Drafter:
    rule, depth = plan.rule, plan.depth
    if plan.model is not None:
        return _draft_model(plan, plan.model, runner, scheduler, model)
    if plan.heads is not None:
        weights = model.weights

        def logits_of(features: Any) -> Any:
            import torch

            rows = features.to(model.dtype)
            return model.kernels.linear(rows, weights.head, out_dtype=torch.float32)

        if isinstance(plan.heads, EagleHead):
            return EagleDrafter(plan.heads, weights.embed, logits_of, depth, plan.nodes, rule=rule)
        return MedusaDrafter(
            plan.heads[:depth], plan.nodes, rule=rule, logits_of=logits_of, device=model.device
        )
    if plan.wish.name == "ngram":
        return NgramDrafter(model.config.vocab_size, depth)
    layer = model.config.num_hidden_layers
    size = model.config.hidden_size
    return MtpDrafter(runner, runner.cache, layer, size, depth, rule, begin_round)


def _heads(
    read: Callable[[Path, int, int], Any],
    path: Path,
    model: DeepSeekConfig,
    setting: str,
    problems: list[str],
) -> Any:
    try:
        return read(path, model.hidden_size, model.vocab_size)
    except ConfigError as error:
        problems += [f"{setting}: {p.partition(': ')[2]}" for p in error.problems]
        return None


def _draft_config(
    config: ServeConfig, model: DeepSeekConfig, path: Path, setting: str, problems: list[str]
) -> DeepSeekConfig | None:
    """Of a draft model that can be loaded and has the target's tokens."""
    smaller, found = read_model(path)
    found = [f"{setting}: {problem}" for problem in found]
    if smaller is not None:
        try:
            _preflight(path, smaller)
        except CheckpointError as error:
            found += [f"{setting}: {problem}" for problem in error.shown]
    if smaller is not None and smaller.vocab_size != model.vocab_size:
        found.append(
            f"{setting}: its vocabulary has {smaller.vocab_size} tokens, this checkpoint's "
            f"{model.vocab_size}; they must be the same"
        )
    elif smaller is not None and not found:
        try:
            ours, theirs = Tokenizer(path), Tokenizer(config.model.checkpoint)
            found += tokenizer_problems(ours, theirs)
        except ConfigError as error:  # token ids can be served without one, but not be compared
            found += [f"{setting}: tokenizers cannot be compared: {p}" for p in error.problems]
    problems += found
    return None if found else smaller


def _preflight(path: Path, config: DeepSeekConfig) -> Any:
    layers = config.num_placement_layers(False)
    placement = ExpertPlacement.trivial(layers, config.n_routed_experts, 1)
    return preflight(path, config, placement, 0, with_mtp=False)


def _draft_model(
    plan: SpeculatePlan,
    config: DeepSeekConfig,
    runner: ModelRunner,
    scheduler: Scheduler,
    target: Any,
) -> DraftModelDrafter:
    """All of it on each rank, which drafts for its own sequences. ConfigError on all alike."""
    alone = EPGroup.single()
    assert plan.wish.path is not None
    try:
        kernels = fitting(
            create_kernels(plan.kernels, target.device),
            plan.kernels,
            attention_shape(config),
            target.dtype,
            True,
        ).kernels
        model = load_model(
            plan.wish.path,
            dtype=target.dtype,
            kernels=kernels,
            group=alone,
            dispatcher_factory=lambda asked: (
                create_dispatcher(
                    "local", alone, asked, combine_pairs=kernels.combine_pairs
                ).dispatcher
            ),
            with_mtp=False,
            config=config,
            max_tokens_per_rank=DRAFT_ROWS,
            device=target.device,
        )
    except (KernelsUnavailable, CheckpointError) as error:
        raise ConfigError([f"speculate.method=draft:{plan.wish.path}: {error}"]) from None
    limits, cache = scheduler.limits, scheduler.cache
    return DraftModelDrafter(
        model,
        cache.pool.num_blocks,  # as many positions as the target has
        cache.block_size,
        limits.max_num_sequences,
        max_depth=plan.depth,
        max_rows=DRAFT_ROWS,
        rule=plan.rule,
        max_positions=config.max_position_embeddings,
    )


def _fingerprint(path: Path | None) -> str:
    """Names and sizes of the folder's files, and its config."""
    if path is None:
        return ""
    digest = blake2b(digest_size=12)
    for file in sorted(x for x in path.iterdir() if x.suffix in (".json", ".safetensors", ".bin")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        if file.name == "config.json":
            digest.update(file.read_bytes())
    return digest.hexdigest()
