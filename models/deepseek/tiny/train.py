"""Trains the bundled model on two CPU cores under a time budget.

Knows the schedule (warm-up, stable, linear decay to zero, longer sequences at the end), the workers
(one thread each, parameters in shared memory: a busy neighbour delays one core, not both), how a
run is saved and resumed exactly, and the log. `--help` lists the options.

A file named `finish` in the work folder starts the decay at once (its content, if any, is the
number of minutes the decay shall take). Time in which the process is stopped is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor

from models.arguments import Parser, at_least, between, folder, told_in_a_line

from .corpus import SOURCES
from .data import Mixture, held_out
from .network import Network, Shape
from .objective import JointLoss
from .optim import Optimiser, balance

MTP_CE, MTP_AGREE = 0.15, 0.35
WARM_STEPS = 60
BIAS_SPEED = 2e-3


class Clock:
    """Training time without pauses in which the process was stopped (steps of 4x the usual)."""

    def __init__(self, elapsed: float) -> None:
        self.elapsed = elapsed
        self.usual = 0.0
        self.last = time.perf_counter()

    def tick(self) -> None:
        """Called once a step."""
        now = time.perf_counter()
        took = now - self.last
        self.last = now
        if self.usual and took > 4 * self.usual:
            took = self.usual
        self.usual = took if not self.usual else 0.95 * self.usual + 0.05 * took
        self.elapsed += took

    def restart(self) -> None:
        """Counts what came after the last tick (saving, evaluating) without calling it a step."""
        self.elapsed += min(time.perf_counter() - self.last, 60.0)
        self.last = time.perf_counter()


class Schedule:
    """The learning-rate multiplier as a function of step and elapsed seconds."""

    def __init__(self, minutes: float, decay_share: float, decay_from: float | None) -> None:
        self.end = minutes * 60
        self.decay_share = decay_share
        self.decay_from = decay_from  # seconds at which the decay began; None before it

    def rate(self, step: int, elapsed: float, folder: Path) -> float:
        """0 when the run is over."""
        if self.decay_from is None:
            finish = folder / "finish"
            if finish.exists():
                text = finish.read_text().strip()
                self.decay_from = elapsed
                left = self.end * self.decay_share
                self.end = elapsed + (float(text) * 60 if text else left)
            elif elapsed >= self.end * (1 - self.decay_share):
                self.decay_from = elapsed
        if self.decay_from is None:
            return min(1.0, (step + 1) / WARM_STEPS)
        return max(0.0, (self.end - elapsed) / max(self.end - self.decay_from, 1e-9))


@torch.no_grad()
def validate(net: Network, folder: Path) -> dict[str, float]:
    """Mean main loss per source on a few held-out windows, and of the MTP head over all."""
    found: dict[str, float] = {}
    second = 0.0
    for source in SOURCES:
        tokens = held_out(folder, source.name, 12, 256)
        hidden, mtp = net(tokens[:, :-2], tokens[:, 1:-1], torch.bfloat16)
        _, parts = JointLoss.apply(hidden, mtp, net.lm_head, tokens, MTP_CE, MTP_AGREE)
        found[source.name] = round(float(parts[0]), 4)
        second += float(parts[1]) / len(SOURCES)
    return found | {"mtp": round(second, 4)}


class Run:
    """One training run. Built once, then entered by each worker after the fork."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder: Path = args.folder
        torch.manual_seed(5)
        self.net = Network(Shape()).share_memory()
        self.optimiser = Optimiser(self.net, args.workers)
        self.data = Mixture(self.folder)
        self.step = self.seen = 0
        elapsed, end = 0.0, args.minutes * 60
        decay_from: float | None = None
        self.saved = self.folder / "run.pt"
        if self.saved.exists() and not args.fresh:
            state = torch.load(self.saved, weights_only=True)
            self.net.load_state_dict(state["net"])
            self.optimiser.load(state["optimiser"])
            self.data.used = state["used"]
            self.step, self.seen, elapsed = state["step"], state["seen"], state["elapsed"]
            decay_from = state["decay_from"]
            end = state["end"] if decay_from is not None else end
            print(f"resumed at step {self.step}, {self.seen / 1e6:.1f} M tokens", flush=True)
        self.clock = Clock(elapsed)
        self.schedule = Schedule(args.minutes, args.decay, decay_from)
        self.schedule.end = end
        s = self.net.s
        blocks = len(self.net.moe_layers())
        self.orders = torch.zeros(2, dtype=torch.float64).share_memory_()  # rate, length
        self.losses = torch.zeros(args.workers, 2).share_memory_()
        self.loads = torch.zeros(args.workers, blocks, s.n_routed_experts).share_memory_()
        self.meet: Any = processes.get_context("fork").Barrier(args.workers)
        self.last_save = elapsed

    def decide(self) -> None:
        """The first worker's word on the next step, for all workers."""
        args, left = self.args, 0.0
        rate = self.schedule.rate(self.step, self.clock.elapsed, self.folder)
        left = self.schedule.end - self.clock.elapsed
        late = self.schedule.decay_from is not None and left < args.long * self.schedule.end
        self.orders[0] = 0.0 if self.step >= args.steps else rate
        self.orders[1] = args.long_length if late else args.length

    def work(self, worker: int) -> None:
        """The loop of one worker; the first one also decides, balances, saves and logs."""
        torch.set_num_threads(1)
        if worker == 0:
            self.decide()
        self.meet.wait()
        while (rate := float(self.orders[0])) > 0:
            length = int(self.orders[1])
            tokens = self.data.batch(self.step, self.args.tokens // length, length)
            mine = tokens[worker :: self.args.workers]
            drafted = mine[: max(1, round(len(mine) * self.args.mtp))]
            hidden, mtp = self.net(mine[:, :-2], drafted[:, 1:-1], torch.bfloat16)
            loss, parts = JointLoss.apply(hidden, mtp, self.net.lm_head, mine, MTP_CE, MTP_AGREE)
            loss.backward()
            self.optimiser.publish(worker)
            self.losses[worker] = parts
            self.loads[worker] = torch.stack([block.load for block in self.net.moe_layers()])
            self.step += 1
            self.seen += tokens.shape[0] * length
            self.meet.wait()
            self.optimiser.step(worker, self.step, rate)
            if worker == 0:
                self.lead(rate, self.loads.sum(0))
            self.meet.wait()
        if worker == 0:
            self.save()
            minutes = self.clock.elapsed / 60
            print(f"done: step {self.step}, {self.seen / 1e6:.1f} M tokens, {minutes:.1f} minutes")

    def lead(self, rate: float, load: Tensor) -> None:
        """What only the first worker does at the end of a step."""
        speed = BIAS_SPEED * (rate if self.schedule.decay_from is not None else 1.0)
        skew = balance(self.net, load, speed)
        self.clock.tick()
        if self.step % 20 == 0:
            self.log(rate, skew)
        if self.clock.elapsed - self.last_save > self.args.save * 60:
            self.save()
            self.clock.restart()
        self.decide()

    def log(self, rate: float, skew: float) -> None:
        """One line on the screen and in log.jsonl."""
        main, second = self.losses.mean(0).tolist()
        row: dict[str, object] = {
            "step": self.step,
            "seen": self.seen,
            "minutes": round(self.clock.elapsed / 60, 2),
            "rate": round(rate, 4),
            "loss": round(main, 4),
            "mtp": round(second, 4),
            "skew": round(skew, 3),
            "tokens_per_s": round(self.args.tokens / self.clock.usual),
        }
        if self.step % self.args.validate == 0:
            row["held_out"] = validate(self.net, self.folder)
            self.clock.restart()
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)

    def save(self) -> None:
        """Writes run.pt, from which the run can be taken up."""
        state = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state(),
            "used": self.data.used,
            "elapsed": self.clock.elapsed,
            "step": self.step,
            "seen": self.seen,
            "decay_from": self.schedule.decay_from,
            "end": self.schedule.end,
        }
        part = self.folder / "run.part"
        torch.save(state, part)
        os.replace(part, self.saved)
        self.last_save = self.clock.elapsed


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    options = Parser(description="Train the bundled model.")
    options.add_argument("folder", type=folder, help="work folder that holds the token files")
    options.add_argument("--minutes", type=between(0), default=70, help="training time")
    options.add_argument("--decay", type=between(0), default=0.5, help="share of it for the decay")
    options.add_argument(
        "--long", type=between(0), default=0.2, help="share of it, at the end, for"
    )
    options.add_argument(
        "--long-length", type=at_least(1), default=1024, help="sequences of this length"
    )
    options.add_argument("--length", type=at_least(1), default=256, help="sequence length before")
    options.add_argument("--tokens", type=at_least(1), default=4096, help="tokens a step")
    options.add_argument(
        "--steps", type=at_least(1), default=10**9, help="stop after so many steps"
    )
    options.add_argument("--validate", type=at_least(1), default=400, help="steps between checks")
    options.add_argument("--save", type=between(0), default=4, help="minutes between saves")
    options.add_argument(
        "--workers", type=at_least(1), default=2, help="processes of a thread each"
    )
    options.add_argument("--mtp", type=between(0), default=0.25, help="share of sequences for MTP")
    options.add_argument("--fresh", action="store_true", help="do not resume")
    return options


def main() -> None:
    """Forks all workers but the first, which is this process."""
    args = parser().parse_args()
    torch.set_num_threads(1)
    with told_in_a_line():
        run = Run(args)
    context = processes.get_context("fork")
    others = [
        context.Process(target=run.work, args=(worker,), daemon=True)
        for worker in range(1, args.workers)
    ]
    for other in others:
        other.start()
    run.work(0)
    for other in others:
        other.join()


if __name__ == "__main__":
    main()
