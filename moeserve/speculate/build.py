"""From `--speculate` to a Speculator: what is checked before weights are read, and what is opened.

Knows settings, checkpoints' configs, which drafter wants what. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from models.deepseek.config import DeepSeekConfig
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError
from moeserve.runner import ModelRunner
from moeserve.scheduler import Scheduler
from moeserve.speculate.adaptive import AdaptiveDepth, FixedDepth
from moeserve.speculate.drafter import Drafter
from moeserve.speculate.eagle import EagleHead, read_eagle
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead, read_medusa
from moeserve.speculate.mtp import MtpDrafter
from moeserve.speculate.ngram import NgramDrafter
from moeserve.speculate.setting import MAX_DEPTH, SpeculateWish, read_speculate
from moeserve.speculate.speculator import Speculator
from moeserve.speculate.verify import Rule

SUPPORTED = ("mtp", "ngram", "eagle", "medusa")


@dataclass(frozen=True)
class SpeculatePlan:
    """wish: what "auto" became, never off. heads: read already, of the drafters that have some.
    depth: the most drafts behind each other. fingerprint: of what lies at the path."""

    wish: SpeculateWish
    rule: Rule
    depth: int
    note: str
    heads: EagleHead | tuple[MedusaHead, ...] | None = None
    fingerprint: str = ""

    @property
    def memory_bytes(self) -> int:
        """Of weights beside the model's."""
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
            "path": None if self.wish.path is None else self.wish.path.resolve().name,
            "rule": self.rule.value,
        }

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        return {
            "speculate.method": self.wish.without_path,
            "speculate.rule": self.rule.value,
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
    if wish.name == "mtp" and not has_mtp:
        lacks = (
            "model.mtp is off" if model.num_mtp_layers > 0 else "this checkpoint has no MTP layer"
        )
        problems.append(f"{setting}: {lacks}; valid: ngram, eagle:PATH, medusa:PATH, draft:PATH")
        return None
    if wish.name not in SUPPORTED:
        problems.append(f"{setting}: not built yet; valid: {', '.join(SUPPORTED)}")
        return None
    heads: EagleHead | tuple[MedusaHead, ...] | None = None
    most = MAX_DEPTH
    if wish.path is not None:
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
    how = f"{depth} deep" if wish.depth else f"as deep as pays, at most {depth}"
    note = f"speculate: {wish.name}{why}, {how}; rule {rule.value}"
    rows = config.schedule.max_num_sequences * (1 + depth)
    if rows > config.schedule.token_budget:
        note += (
            f"; {config.schedule.max_num_sequences} sequences with {depth} drafts each are {rows} "
            f"tokens, more than --token-budget {config.schedule.token_budget}: drafts are cut then"
        )
    return SpeculatePlan(wish, rule, depth, note, heads, _fingerprint(wish.path))


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

    speculator = Speculator(
        _drafter(plan, runner, model, begin_round), policy, runner, scheduler, rank, plan.rule
    )
    listener.append(speculator)
    return speculator


def _drafter(
    plan: SpeculatePlan, runner: ModelRunner, model: Any, begin_round: Callable[[int, int], None]
) -> Drafter:
    rule, depth = plan.rule, plan.depth
    if plan.heads is not None:
        weights = model.weights

        def logits_of(features: Any) -> Any:
            import torch

            rows = features.to(model.dtype)
            return model.kernels.linear(rows, weights.head, out_dtype=torch.float32)

        if isinstance(plan.heads, EagleHead):
            return EagleDrafter(plan.heads, weights.embed, logits_of, depth, rule=rule)
        return MedusaDrafter(plan.heads[:depth], rule=rule, logits_of=logits_of)
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
    if not path.is_dir():
        problems.append(f"{setting}: {path} is no folder; it must hold config.json and weights")
        return None
    try:
        return read(path, model.hidden_size, model.vocab_size)
    except ConfigError as error:
        problems += [f"{setting}: {p.partition(': ')[2]}" for p in error.problems]
        return None


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
