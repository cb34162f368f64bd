"""What a step must at least take on one GPU: each of its kernels at the speed of memory or of the
matrix units, whichever is slower, one after the other.

The limit that a measured step stands beside: no gaps, no host, no all-to-alls, every peak reached.

    python -m models.deepseek.kernels.gpu.step_limit CONFIG_JSON

Knows loads of a step. Which kernels there are: step_kernels.py. Needs neither a GPU nor triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.arguments import Parser, told_in_a_line
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import CheckpointError, ConfigError, UnsupportedModel
from models.deepseek.kernels.gpu.bench.limits import Limits
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, Cuts
from models.deepseek.kernels.gpu.step_kernels import (
    Experts,
    Use,
    attention_absorbed,
    attention_fast,
    dense_layer,
    ends,
    gate_and_shared,
    routed_experts,
    spread_rows,
)

# About what copies and GEMMs reach on an H200; assumed, not measured here.
H200 = Limits(memory=4.3e12, bf16=0.7e15, fp8=1.4e15, fp8_by="assumed", overhead=0.0)


@dataclass(frozen=True)
class StepLoad:
    """One rank's step of `sequences`, each with `new` rows, which attend to `context` positions
    once they are written. absorbed: attention over latents, as decode has it, and prefill where
    bits count. experts: of this rank. hosted: pieces of the shared expert that lie among them; else
    each rank computes it for its own rows. kv_fp8: the cache. partitions: of attention over
    latents."""

    sequences: int
    new: int
    context: int
    absorbed: bool
    experts: Experts
    hosted: int = 0
    kv_fp8: bool = False
    partitions: Cuts = DETERMINISTIC

    @property
    def tokens(self) -> int:
        return self.sequences * self.new


def even_experts(
    m: DeepSeekConfig, tokens: int, ranks: int, physical: int, routed: bool, hosted: int = 0
) -> Experts:
    """Of one of `ranks` with `tokens` each, where loads are balanced over physical slots. routed:
    as for `Experts`; hosted: as for `StepLoad`."""
    slots = max(1, physical // ranks)
    pairs = tokens * ranks * (m.num_experts_per_tok + hosted) * slots / physical
    return Experts(tuple(spread_rows(pairs, slots)), routed)


def step_uses(m: DeepSeekConfig, load: StepLoad) -> Iterator[tuple[Use, int]]:
    """Each kernel, and how many layers have it."""
    contexts, new = [load.context] * load.sequences, [load.new] * load.sequences
    kind = attention_absorbed if load.absorbed else attention_fast
    attention = kind(m, contexts, new, load.kv_fp8, load.partitions)
    moe = gate_and_shared(m, load.tokens, load.hosted)
    moe += routed_experts(m, load.tokens, load.experts, True)
    yield from ((use, m.num_hidden_layers) for use in attention)
    if m.first_k_dense_replace:
        yield from ((use, m.first_k_dense_replace) for use in dense_layer(m, load.tokens))
    if m.num_moe_layers:
        yield from ((use, m.num_moe_layers) for use in moe)
    yield from ((use, 1) for use in ends(m, load.tokens, load.sequences))


def least_seconds(uses: Sequence[tuple[Use, int]], limits: Limits, *parts: str) -> float:
    """Of all uses, or of those in some parts of a step."""
    return sum(
        times * limits.seconds(use.cost, use.unit)
        for use, times in uses
        if not parts or use.part in parts
    )


def num_launches(uses: Sequence[tuple[Use, int]]) -> int:
    return sum(times * use.launches for use, times in uses)


# -- the table that stands in BENCHMARKS.md --------------------------------------------------------

# name, ranks, physical experts, of them pieces of the shared one, sequences (or prompts) a rank,
# positions each, decode
DEPLOYMENTS = (
    ("EP32 prefill", 32, 288, 0, 4, 4096, False),
    ("EP72 decode", 72, 288, 0, 128, 4096, True),
    ("EP144 decode", 144, 288, 0, 128, 4096, True),
    ("EP320 decode, shared expert in slots", 320, 320, 1, 128, 4096, True),
)


def table(m: DeepSeekConfig, limits: Limits = H200) -> str:
    lines = [
        "| deployment | tokens a GPU | compute of a step, ms | attention | experts | rest |",
        "|---|---|---|---|---|---|",
    ]
    for name, ranks, physical, hosted, sequences, length, decode in DEPLOYMENTS:
        new = 1 if decode else length
        # Low-latency kernels bring rows slot by slot.
        experts = even_experts(m, sequences * new, ranks, physical, not decode, hosted)
        load = StepLoad(sequences, new, length, decode, experts, hosted)
        uses = list(step_uses(m, load))
        whole = least_seconds(uses, limits)
        core, routed = (least_seconds(uses, limits, part) for part in ("core", "experts"))
        cells = (1e3 * x for x in (whole, core, routed, whole - core - routed))
        figures = " | ".join(f"{cell:.1f}" for cell in cells)
        lines.append(f"| {name} | {load.tokens} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="config.json, or a folder with one")
    with told_in_a_line(ConfigError, CheckpointError, UnsupportedModel):
        config = DeepSeekConfig.from_hf(parser.parse_args().config)
    print(table(config))


if __name__ == "__main__":
    main()
