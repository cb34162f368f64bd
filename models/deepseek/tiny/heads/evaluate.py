"""How well a drafter's drafts are accepted: greedy service on held-out prompts, run after run.

The target goes on greedily from held-out text; at each position the head drafts as it would there,
and what is accepted is counted as the engine counts it: a draft counts as refused behind a refused
one, a run of k drafts moves by what was accepted and one more. Beside it, teacher-forced: how often
the draft of depth i is the target's choice on text that is not its own.

Shape letters: B sequences, S positions, K depths, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..network import Network
from .eagle import EagleNet
from .features import PROMPT
from .files import Head
from .generate import continuations

OUTPUT = 160  # tokens that the target adds to each prompt
PROMPTS = 8  # of each kind of text
Drafter = Head | Network
SOURCES = ("bible", "chat", "pydoc", "python", "shakespeare", "wordnet")


def held_out_prompts(checkpoint: Path, length: int = PROMPT, each: int = PROMPTS) -> Tensor:
    """Tokens [sources * each, length] that begin with bos, from places all over the texts."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    found = []
    for name in SOURCES:
        text = (checkpoint / "heldout" / f"{name}.txt").read_text(encoding="utf-8")
        ids = tokenizer.encode(text).ids
        step = (len(ids) - length) // each
        found += [[0, *ids[i * step : i * step + length - 1]] for i in range(each)]
    return torch.tensor(found)


@torch.inference_mode()
def choices(head: Drafter, weight: Tensor, tokens: Tensor, hidden: Tensor, depths: int) -> Tensor:
    """tokens [B, S + 1], hidden [B, S, D] of all but the last -> drafts [K, B, S]: what depth d
    says of the token d + 2 places after each position, drafts above it being right."""
    if isinstance(head, Network):  # a draft model: what it says of the text up to there
        said = (head(tokens[:, :-1], None)[0] @ head.lm_head.t()).argmax(-1)
        return torch.stack([torch.roll(said, -1 - d, 1) for d in range(depths)])
    if isinstance(head, EagleNet):
        # Pass j stands j rows further on: its row i belongs to the run that began at i - j.
        found = head(tokens[:, 1:], hidden, depths)
        found = [torch.roll(x, -j, 1) for j, x in enumerate(found)]
    else:
        found = head(hidden)[:depths]
    return torch.stack([(x.to(weight.dtype) @ weight.t()).argmax(-1) for x in found])


def right_drafts(drafts: Tensor, tokens: Tensor) -> Tensor:
    """[K, B, S]: whether each draft is the token that came. Places behind the end are wrong."""
    depths, _, length = drafts.shape
    right = torch.zeros_like(drafts, dtype=torch.bool)
    for d in range(depths):
        end = length - 1 - d
        right[d, :, :end] = drafts[d, :, :end] == tokens[:, d + 2 : d + 2 + end]
    return right


def runs(right: Tensor, start: int, depth: int) -> tuple[list[int], list[int], int]:
    """Walk one sequence, right [K, S], from position `start` on as service would: drafted and
    accepted by depth, and the number of runs. A run that would reach over the end is left out."""
    drafted, accepted, number, at = [0] * depth, [0] * depth, 0, start
    while at + depth + 1 < right.shape[1]:
        good = 0
        while good < depth and right[good, at]:
            good += 1
        for d in range(depth):
            drafted[d] += 1
            accepted[d] += d < good
        number += 1
        at += good + 1
    return drafted, accepted, number


def figures(net: Network, head: Drafter, checkpoint: Path, depth: int) -> dict[str, Any]:
    """All figures, as plain data."""
    prompts = held_out_prompts(checkpoint)
    tokens = continuations(net, prompts, OUTPUT)
    weight = net.lm_head.detach().bfloat16()
    with torch.inference_mode():
        hidden = torch.cat([net(x[:, :-1], None, torch.bfloat16)[0] for x in tokens.split(16)])
    right = right_drafts(choices(head, weight, tokens, hidden, depth), tokens)
    sources = {}
    total = _Count(depth)
    for number, name in enumerate(SOURCES):
        mine = _Count(depth)
        for row in range(number * PROMPTS, (number + 1) * PROMPTS):
            mine.add(*runs(right[:, row], PROMPT - 1, depth))
            total.add(*runs(right[:, row], PROMPT - 1, depth))
        sources[name] = mine.figures()
    return {
        "temperature": 0.0,
        "depth": depth,
        "prompt_length": PROMPT,
        "output_length": OUTPUT,
        "prompts": len(prompts),
        **total.figures(),
        "sources": sources,
        "on_held_out_text": _teacher_forced(net, head, checkpoint, depth),
    }


def _teacher_forced(net: Network, head: Drafter, checkpoint: Path, depth: int) -> list[float]:
    """By depth: how often the draft is the target's choice there, over held-out text itself."""
    tokens = held_out_prompts(checkpoint, 257, 4)
    weight = net.lm_head.detach().bfloat16()
    with torch.inference_mode():
        hidden, _ = net(tokens[:, :-1], None, torch.bfloat16)
        own = (hidden @ weight.t()).argmax(-1)
    drafts = choices(head, weight, tokens, hidden, depth)
    length = hidden.shape[1]
    return [
        round(float((drafts[d, :, : length - 1 - d] == own[:, d + 1 :]).float().mean()), 4)
        for d in range(depth)
    ]


class _Count:
    def __init__(self, depth: int) -> None:
        self.drafted, self.accepted, self.number = [0] * depth, [0] * depth, 0

    def add(self, drafted: list[int], accepted: list[int], number: int) -> None:
        self.drafted = [a + b for a, b in zip(self.drafted, drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, accepted, strict=True)]
        self.number += number

    def figures(self) -> dict[str, Any]:
        """acceptance: of all drafts at a depth; rate: of those behind accepted ones."""
        above = [self.number, *self.accepted[:-1]]
        pairs = zip(self.accepted, above, strict=True)
        return {
            "acceptance": [
                round(a / max(d, 1), 4) for a, d in zip(self.accepted, self.drafted, strict=True)
            ],
            "rate": [round(a / max(b, 1), 4) for a, b in pairs],
            "mean_accepted": round(sum(self.accepted) / max(self.number, 1), 4),
            "runs": self.number,
        }


def report(folder: Path) -> str:
    """The table of all drafters in a folder, for its card."""
    lines = ["| drafter | accepted, by depth | a run | on other text |", "|---|---|---|---|"]
    for path in sorted(folder.glob("*/eval.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        accepted, other = (
            " ".join(f"{x:.2f}" for x in told[key]) for key in ("acceptance", "on_held_out_text")
        )
        lines.append(
            f"| `{path.parent.name}` | {accepted} | {told['mean_accepted']:.2f} of {told['depth']} "
            f"| {other} |"
        )
    return "\n".join(lines)


def write_figures(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
