"""The training loop of both heads: AdamW over the target's features for a number of steps.

Knows batches, the schedule, the curve (`log.jsonl`) and which rows of a head are judged by which
rows of the target. Knows nothing of how the networks work.

Shape letters: B sequences, S positions, D hidden, R rows, V vocabulary.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from .eagle import EagleNet
from .features import Windows
from .medusa import MedusaNet
from .objective import Disagreement, teacher

PASSES = 3  # depth to which EAGLE is trained on its own features
WARM = 50
BATCH = 12  # windows a step
CHECK = 96  # windows kept for the curve
FEATURE = 0.1  # weight of the distance between guessed and true features


class Drafts(Protocol):
    """loss of a batch, and of each depth the share of drafts that are the target's choice."""

    def __call__(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, list[float]]: ...


def eagle_loss(net: EagleNet, head: Tensor, passes: int = PASSES) -> Drafts:
    """head [V, D]: the target's."""

    def of(tokens: Tensor, hidden: Tensor) -> tuple[Tensor, list[float]]:
        found = net(tokens[:, 1:], hidden, passes)
        goal, choice = (x.unflatten(0, hidden.shape[:2]) for x in _teacher(hidden, head))
        total, right = torch.zeros(()), []
        for depth, feature in enumerate(found):
            # Row i guesses the feature of position i + 1, of which the last is not known.
            mine, true = feature[:, depth:-1].flatten(0, 1), hidden[:, depth + 1 :].flatten(0, 1)
            aim = goal[:, depth + 1 :].flatten(0, 1)
            loss, said = Disagreement.apply(mine, head, aim)
            total = total + loss + FEATURE * F.smooth_l1_loss(mine.float(), true.float())
            right.append(_share(said, choice[:, depth + 1 :].flatten()))
        return total / passes, right

    return of


def medusa_loss(net: MedusaNet, head: Tensor) -> Drafts:
    """head [V, D]: the target's."""

    def of(tokens: Tensor, hidden: Tensor) -> tuple[Tensor, list[float]]:
        goal, choice = (x.unflatten(0, hidden.shape[:2]) for x in _teacher(hidden, head))
        total, right = torch.zeros(()), []
        for number, feature in enumerate(net(hidden)):
            ahead = number + 1
            mine, aim = feature[:, :-ahead].flatten(0, 1), goal[:, ahead:].flatten(0, 1)
            loss, said = Disagreement.apply(mine, head, aim)
            total = total + loss
            right.append(_share(said, choice[:, ahead:].flatten()))
        return total / net.heads, right

    return of


def _teacher(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    return teacher(hidden.flatten(0, 1), head)


def _share(said: Tensor, choice: Tensor) -> float:
    return float((said == choice).float().mean())


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Rows [B] without end: each round takes every window once, in an order of its own."""
    number = 0
    while True:
        rng = torch.Generator().manual_seed(seed * 1000 + number)
        order = torch.randperm(count, generator=rng)
        yield from order[: count // BATCH * BATCH].split(BATCH)
        number += 1


def fit(
    net: nn.Module, drafts: Drafts, windows: Windows, steps: int, log: Path, peak: float = 2e-3
) -> list[dict[str, object]]:
    """Trains in place -> the curve. peak: the learning rate after the warm-up; cosine to zero."""
    torch.set_num_threads(1)  # with more, the order of sums (and so the weights) could differ
    shapes = [[p for p in net.parameters() if (p.ndim > 1) is many] for many in (True, False)]
    optimiser = torch.optim.AdamW(
        [{"params": shapes[0], "weight_decay": 0.02}, {"params": shapes[1], "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.98),
    )
    check = slice(windows.count - CHECK, windows.count)
    taken = batches(windows.count - CHECK, seed=29)
    curve: list[dict[str, object]] = []
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar, log.open("w", encoding="utf-8") as file:
        task = bar.add_task("training", total=steps)
        for step in range(1, steps + 1):
            for group in optimiser.param_groups:
                wave = 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
                group["lr"] = peak * min(step / WARM, 1.0) * wave
            rows = next(taken)
            loss, right = drafts(windows.tokens[rows], windows.hidden[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            bar.update(task, advance=1, description=f"loss {float(loss.detach()):.3f}")
            if step % 25 == 0 or step == steps:
                row: dict[str, object] = {"step": step, "loss": round(float(loss.detach()), 4)}
                row["seconds"] = round(time.perf_counter() - began, 1)
                row["right"] = [round(x, 4) for x in right]
                if step % 200 == 0 or step == steps:
                    row["check"] = _check(drafts, windows, check)
                curve.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    return curve


@torch.no_grad()
def _check(drafts: Drafts, windows: Windows, rows: slice) -> dict[str, object]:
    """The same figures on windows that were not trained on."""
    parts = [
        drafts(tokens, hidden)
        for tokens, hidden in zip(
            windows.tokens[rows].split(BATCH), windows.hidden[rows].split(BATCH), strict=True
        )
    ]
    shares = zip(*(right for _, right in parts), strict=True)
    return {
        "loss": round(sum(float(loss) for loss, _ in parts) / len(parts), 4),
        "right": [round(sum(share) / len(parts), 4) for share in shares],
    }
