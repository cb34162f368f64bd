"""Our engine against `transformers` on one machine: same checkpoint, same threads, in turn.

    python scripts/bench_versus_transformers.py CHECKPOINT [--batch 1,8,32] [--prefill 1024]

Each side has a process of its own, and only one of them works at a time. For each batch size the
two decode the same number of steps from the same prompts in turn (theirs, ours, theirs, ...), so
that a slow minute of a shared machine hits both; quoted are medians of a step and the median of the
paired ratios. Tokens are
random on both sides (ours are sampled at temperature 1, theirs drawn beforehand): greedy output of
random weights repeats itself, and few experts would be read. The limit of decode is the bytes that
a step must read (weights touched, counted from our own routing) over the read bandwidth measured
here; that of prefill is its FLOPs over the GEMM rate measured here.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ep.group import EPGroup
from models.arguments import Parser, at_least, checkpoint, several, told_in_a_line
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.errors import ConfigError
from moeserve.request import Request, SamplingParams


@dataclass
class Pair:
    """Seconds a step (or a prefill) of both sides, measured in turn."""

    theirs: list[float]
    ours: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(t / o for t, o in zip(self.theirs, self.ours, strict=True))


class Ours:
    def __init__(self, checkpoint: Path, dtype: str, threads: int, tokens: int) -> None:
        self.engine: Engine = build_engine(
            ServeConfig.load(
                None,
                {
                    "model": {"checkpoint": checkpoint, "dtype": dtype, "mtp": False},
                    "cache": {"kv_tokens": tokens, "prefix_cache": False},
                    "schedule": {"token_budget": 4096, "max_num_sequences": 64},
                    "engine": {"threads": threads},
                },
            ),
            EPGroup.single(),
        )
        self._count = 0

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        for ids in prompts:
            self._count += 1
            sampling = SamplingParams(
                temperature=1.0, seed=self._count, max_tokens=max_tokens, ignore_eos=True
            )
            self.engine.add_request(
                Request(
                    request_id=f"r{self._count}", prompt_token_ids=tuple(ids), sampling=sampling
                )
            )

    def drain(self) -> None:
        self.engine.abort([s.request_id for s in list(self.engine.scheduler.running)])
        while self.engine.has_work:
            self.engine.step()
        self.engine.step()

    def decode(self, steps: int) -> list[float]:
        return [timed(self.engine.step) for _ in range(steps)]

    def prefill(self, ids: list[int]) -> float:
        self.start([ids], 1)
        seconds = timed(self.engine.step)
        assert not self.engine.has_work
        return seconds


class Theirs:
    def __init__(self, checkpoint: Path, dtype: str, threads: int, experts: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=getattr(torch, dtype),
            experts_implementation=experts,
            attn_implementation="sdpa",
        ).eval()
        self.state: Any = None
        self.batch = 0
        self.vocab = self.model.config.vocab_size
        self.random = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def start(self, prompts: list[list[int]]) -> None:
        self.batch = len(prompts)
        out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self.state = out.past_key_values

    @torch.inference_mode()
    def step(self) -> None:
        assert self.state is not None
        tokens = torch.randint(3, self.vocab, (self.batch, 1), generator=self.random)
        out = self.model(tokens, cache=self.state, use_cache=True)
        out.logits[:, -1].argmax(-1)
        self.state = out.past_key_values

    def decode(self, steps: int) -> list[float]:
        return [timed(self.step) for _ in range(steps)]

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> float:
        return timed(lambda: self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1))


class Elsewhere:
    """`Theirs` in a process of its own: every method call goes through a pipe."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, arguments), daemon=True)
        process.start()
        self._pipe.recv()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            return self._pipe.recv()

        return call


def _serve(pipe: Any, arguments: tuple[Any, ...]) -> None:
    side = Theirs(*arguments)
    pipe.send(None)
    while True:
        try:
            name, values = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(side, name)(*values))


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_bandwidth() -> float:
    """Bytes a second of reading a gigabyte with all threads: the best of five."""
    data = torch.ones(2**28)
    data.sum()
    return data.nbytes / min(timed(data.sum) for _ in range(5))


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square GEMM with all threads: the best of five."""
    a, b = torch.randn(2048, 2048, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    torch.mm(a, b)
    return 2 * 2048**3 / min(timed(lambda: torch.mm(a, b)) for _ in range(5))


def step_bytes(ours: Ours, before: np.ndarray, after: np.ndarray) -> int:
    """Weight bytes that one decode step reads: everything but the embedding, and of the routed
    experts those that `after - before` (picks [L, E] of one step) touched."""
    config = ours.engine.runner.model.config
    width = ours.engine.runner.cache.layers[0].element_size()
    expert = 3 * config.hidden_size * config.moe_intermediate_size * width
    touched = int(((after - before) > 0).sum())
    return touched * expert + dense_values(config) * width


def dense_values(config: Any) -> int:
    """Values outside of routed experts and embedding that every step reads."""
    d, heads = config.hidden_size, config.num_attention_heads
    q_out = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    q = d * q_out if not config.q_lora_rank else config.q_lora_rank * (d + q_out)
    kv = d * (config.kv_lora_rank + config.qk_rope_head_dim)
    kv_b = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    attention = q + kv + kv_b + heads * config.v_head_dim * d
    dense_layers = config.first_k_dense_replace
    moe_layers = config.num_hidden_layers - dense_layers
    shared = 3 * d * config.moe_intermediate_size * (config.n_shared_experts or 0)
    gate = 2 * d * config.n_routed_experts  # fp32: twice a bf16 value
    return (
        config.num_hidden_layers * attention
        + dense_layers * 3 * d * config.intermediate_size
        + moe_layers * (shared + gate)
        + config.vocab_size * d
    )


def active_values(config: Any) -> int:
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    routed = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
    return dense_values(config) - config.vocab_size * config.hidden_size + moe_layers * routed


def prompts_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=checkpoint)
    parser.add_argument("--batch", type=several(at_least(1)), default="1,8,32")
    parser.add_argument("--prompt-length", type=at_least(1), default=128)
    parser.add_argument("--prefill", type=at_least(1), default=1024)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--steps", type=at_least(1), default=4, help="decode steps a round")
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--experts", default="grouped_mm", help="experts of transformers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    batches = [int(x) for x in arguments.batch.split(",")]
    say = Console(stderr=True).print

    bandwidth = read_bandwidth()
    rate = gemm_rate(getattr(torch, arguments.dtype))
    say(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, GEMM {rate / 1e9:.0f} GFLOP/s")
    total = arguments.rounds * arguments.steps + 3
    tokens = max(batches) * (arguments.prompt_length + total + 32) + arguments.prefill + 64
    ours = Ours(arguments.checkpoint, arguments.dtype, arguments.threads, tokens)
    theirs = Elsewhere(arguments.checkpoint, arguments.dtype, arguments.threads, arguments.experts)
    config = ours.engine.runner.model.config
    result: dict[str, Any] = {
        "checkpoint": arguments.checkpoint.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "read_gb_s": round(bandwidth / 1e9, 1),
        "gemm_gflop_s": round(rate / 1e9),
        "decode": {},
    }
    table = Table("case", "transformers", "moeserve", "ratio", "limit", "share of limit")

    for batch in batches:
        prompts = prompts_of(batch, arguments.prompt_length, config.vocab_size, batch)
        theirs.start(prompts)
        ours.start(prompts, total + 8)
        while any(s.num_remaining_tokens > 1 for s in ours.engine.scheduler.running) or (
            ours.engine.scheduler.waiting
        ):
            ours.engine.step()
        theirs.decode(1)
        ours.decode(1)
        recorder = ours.engine.recorder
        assert recorder is not None
        before = recorder.totals.copy()
        ours.decode(1)
        theirs.decode(1)
        needed = step_bytes(ours, before, recorder.totals)
        pair = Pair([], [])
        for _ in range(arguments.rounds):
            pair.theirs.append(statistics.median(theirs.decode(arguments.steps)))
            pair.ours.append(statistics.median(ours.decode(arguments.steps)))
        ours.drain()
        them, us = statistics.median(pair.theirs), statistics.median(pair.ours)
        limit = batch / (needed / bandwidth)
        table.add_row(
            f"decode, batch {batch}",
            f"{batch / them:.1f} tok/s",
            f"{batch / us:.1f} tok/s",
            f"{pair.ratio:.2f}x",
            f"{limit:.0f} tok/s",
            f"{batch / us / limit:.0%}",
        )
        result["decode"][batch] = {
            "transformers_tok_s": round(batch / them, 1),
            "moeserve_tok_s": round(batch / us, 1),
            "ratio": round(pair.ratio, 2),
            "limit_tok_s": round(limit),
            "step_bytes": needed,
        }

    ids = prompts_of(1, arguments.prefill, config.vocab_size, 99)[0]
    theirs.prefill(ids)
    ours.prefill(ids)
    pair = Pair([], [])
    for _ in range(arguments.rounds):
        pair.theirs.append(theirs.prefill(ids))
        pair.ours.append(ours.prefill(ids))
    them, us = statistics.median(pair.theirs), statistics.median(pair.ours)
    limit = rate / (2 * active_values(config))
    table.add_row(
        f"prefill, {len(ids)} tokens",
        f"{len(ids) / them:.0f} tok/s",
        f"{len(ids) / us:.0f} tok/s",
        f"{pair.ratio:.2f}x",
        f"{limit:.0f} tok/s",
        f"{len(ids) / us / limit:.0%}",
    )
    result["prefill"] = {
        "tokens": len(ids),
        "transformers_tok_s": round(len(ids) / them),
        "moeserve_tok_s": round(len(ids) / us),
        "ratio": round(pair.ratio, 2),
        "limit_tok_s": round(limit),
    }
    Console(stderr=True).print(table)
    print(json.dumps(result), file=sys.stdout)


if __name__ == "__main__":
    with told_in_a_line(ConfigError):
        main()
