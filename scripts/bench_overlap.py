"""What two-batch overlap hides of a slow network: a demonstration on one rank, with real sleeps.

    python scripts/bench_overlap.py [CHECKPOINT] [--per-token-us 10,20] [--latency-ms 0.1]

One rank whose rows travel nowhere, behind a dispatcher that holds each way back for latency +
tokens * per-token (`dispatch.delayed`); the processor is free meanwhile, as it is where a network
card or a GPU's copy engine does the sending. Steps alternate: whole, in halves, in halves, whole.
Shown are medians of a step and of what it waited, and halves / whole in time and in processor time
(`computing`: each expert's weights are read twice). Where sending itself takes a core there is less
to gain: this shows that it overlaps, not that it is fast.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dispatch.delayed import DelayedDispatcher
from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.arguments import Parser, at_least, between, checkpoint, several, told_in_a_line
from models.deepseek.errors import CheckpointError, ConfigError, UnsupportedModel
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.offline import OfflineRunner

CASES = {"decode, 16 sequences": (16, 1), "decode, 64": (64, 1), "prefill, 256 tokens": (1, 256)}
CONTEXT = 32  # tokens before a decode


@dataclass
class Steps:
    """Seconds of steps, what each of them waited, and the processor's; [0] whole, [1] in halves."""

    took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    computed: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    waited: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


def main() -> None:
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    bundled = Path(__file__).parents[1] / "checkpoints" / "tiny"
    parser.add_argument("checkpoint", nargs="?", type=checkpoint, default=str(bundled))
    parser.add_argument("--per-token-us", type=several(between(0)), default="0,10,20")
    parser.add_argument("--latency-ms", type=between(0), default=0.1, help="of each way besides")
    parser.add_argument("--rounds", type=at_least(1), default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with told_in_a_line(CheckpointError, ConfigError, UnsupportedModel):
        model, network = load(options.checkpoint, options.latency_ms * 1e-3)
    heads = ("a token", 10), ("whole", 9), ("waits", 8), ("halves", 9), ("waits", 8), ("ratio", 8)
    print(f"{'case':<22}" + "".join(f"{h:>{n}}" for h, n in (*heads, ("computing", 11))))
    figures = []
    for per_token in (float(x) for x in options.per_token_us.split(",")):
        network.per_token = per_token * 1e-6
        for name, (sequences, tokens) in CASES.items():
            steps = measure(model, network, sequences, tokens, options.rounds)
            figures.append({"case": name, "per_token_us": per_token} | summary(steps))
            print(row(figures[-1]), flush=True)
    print(json.dumps({"latency_ms": options.latency_ms, "figures": figures}))


def load(checkpoint: Path, latency: float) -> tuple[DeepSeekModel, DelayedDispatcher]:
    alone, kernels = EPGroup.single(), create_kernels("auto").kernels
    model = load_model(
        checkpoint,
        dtype=torch.bfloat16,
        kernels=kernels,
        group=alone,
        dispatcher_factory=lambda config: DelayedDispatcher(
            LocalDispatcher(alone, config, combine_pairs=kernels.combine_pairs), latency
        ),
        with_mtp=False,
    )
    assert isinstance(model.dispatcher, DelayedDispatcher)
    return model, model.dispatcher


@torch.inference_mode()
def measure(
    model: DeepSeekModel, network: DelayedDispatcher, sequences: int, tokens: int, rounds: int
) -> Steps:
    runner = OfflineRunner(model, num_blocks=64 + sequences * (4 + rounds // 4))
    steps, vocabulary = Steps(), model.config.vocab_size
    if tokens == 1:
        context = [7 * i % vocabulary for i in range(CONTEXT)]
        runner.step({s: [s, *context] for s in range(sequences)})
    prompt = [i % vocabulary for i in range(tokens)]
    for number in range(rounds):
        for halves in (False, True) if number % 2 else (True, False):
            waited, start, own = network.waited, time.perf_counter(), time.thread_time()
            runner.step(dict.fromkeys(range(sequences), prompt), halves=halves)
            steps.took[halves].append(time.perf_counter() - start)
            steps.computed[halves].append(time.thread_time() - own)
            steps.waited[halves].append(network.waited - waited)
            if tokens > 1:
                runner.free(0)
    return steps


def summary(steps: Steps) -> dict[str, float]:
    whole, halves = (statistics.median(x) * 1e3 for x in steps.took)
    waits = [statistics.median(x) * 1e3 for x in steps.waited]
    return {
        "whole_ms": whole,
        "whole_waits_ms": waits[0],
        "halves_ms": halves,
        "halves_waits_ms": waits[1],
        "ratio": paired(steps.took),
        "computing_ratio": paired(steps.computed),
    }


def paired(seconds: tuple[list[float], list[float]]) -> float:
    return statistics.median(b / a for a, b in zip(*seconds, strict=True))


def row(x: dict[str, float]) -> str:
    return (
        f"{x['case']:<22}{x['per_token_us']:>7g} us{x['whole_ms']:>9.2f}{x['whole_waits_ms']:>8.2f}"
        f"{x['halves_ms']:>9.2f}{x['halves_waits_ms']:>8.2f}{x['ratio']:>8.2f}{x['computing_ratio']:>11.2f}"
    )


if __name__ == "__main__":
    main()
