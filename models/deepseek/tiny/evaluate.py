"""Measures a release on its held-out texts: loss, MTP agreement, expert load; writes samples.

Knows what each figure means and prints one table. Always reads the released FP8 files (scales
applied, fp32 arithmetic), never the training state. Writes `eval.json` beside the weights and,
with matplotlib at hand, `load.png`.

Shape letters: B windows, S positions, L MoE layers (the MTP layer last), E experts.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.arguments import Parser, at_least, checkpoint

from .network import Network
from .release import load

SAMPLE = 90  # tokens a sample
PROMPTS = (
    "<｜User｜>Define a house.<｜Assistant｜></think>",
    "<｜User｜>What does kindness mean?<｜Assistant｜><think>",
    "<｜User｜>Continue: In the beginning God created the heavens<｜Assistant｜></think>",
    "<｜User｜>Write a Python function that returns the name of a file.<｜Assistant｜></think>",
    "<｜User｜>Write a speech for Hamlet.<｜Assistant｜></think>",
    "And it came to pass in those days, that",
    "KING HENRY\nMy lord of",
    "def read_lines(path):\n",
)


def windows(tokenizer: Tokenizer, text: str, length: int) -> Tensor:
    """Token windows [B, S+2] of one text, each started by bos."""
    ids = tokenizer.encode(text).ids
    count = (len(ids) - 1) // length
    return torch.tensor([[0, *ids[i * length : i * length + length + 1]] for i in range(count)])


@torch.no_grad()
def measure(net: Network, tokens: Tensor) -> dict[str, Any]:
    """loss and MTP loss (nats a token), agreement, MTP accuracy and load shares [L, E]."""
    length = tokens.shape[1] - 2
    total = {"loss": 0.0, "mtp_loss": 0.0, "agree": 0.0, "top1": 0.0}
    load = torch.zeros(len(net.moe_layers()), net.s.n_routed_experts)
    for part in tokens.split(8):
        main, mtp = net(part[:, :-2], part[:, 1:-1])
        assert mtp is not None
        first = (main @ net.lm_head.t()).log_softmax(-1)  # row i is about token i+1
        second = (mtp @ net.lm_head.t()).log_softmax(-1)  # row i is about token i+2
        truth = part[:, 1:-1, None]
        total["loss"] -= float(first.gather(2, truth).sum())
        total["mtp_loss"] -= float(second.gather(2, part[:, 2:, None]).sum())
        total["top1"] += float((first.argmax(-1) == truth[..., 0]).sum())
        same = second.argmax(-1)[:, :-1] == first.argmax(-1)[:, 1:]
        total["agree"] += float(same.sum()) * length / (length - 1)
        load += torch.stack([block.load for block in net.moe_layers()])
    count = tokens.shape[0] * length
    share = load / load.sum(1, keepdim=True)
    return {name: value / count for name, value in total.items()} | {"load": share}


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation between two load distributions [L, E], averaged over layers: 0..1."""
    return float((a - b).abs().sum(1).mean() / 2)


@torch.no_grad()
def generate(net: Network, ids: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Up to `count` new tokens, greedy at temperature 0; stops after eos."""
    rng = torch.Generator().manual_seed(seed)
    out = list(ids)
    for _ in range(count):
        main, _ = net(torch.tensor([out]), None)
        logits = main[0, -1] @ net.lm_head.t()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            top = (logits / temperature).softmax(-1).sort(descending=True)
            keep = top.values.cumsum(0) - top.values < 0.95
            chosen = int(top.indices[torch.multinomial(top.values * keep, 1, generator=rng)])
        out.append(chosen)
        if chosen == 1:
            break
    return out[len(ids) :]


@torch.no_grad()
def agreement_on_own_text(net: Network, texts: list[tuple[list[int], list[int]]]) -> float:
    """How often the MTP draft equals the next token, along (prompt ids, greedy new ids)."""
    same = total = 0
    for ids, new in texts:
        whole = torch.tensor([ids + new])
        main, mtp = net(whole[:, :-1], whole[:, 1:])
        assert mtp is not None
        drafts = (mtp[0] @ net.lm_head.t()).argmax(-1)[len(ids) - 1 : -1]
        truth = whole[0, len(ids) + 1 :]
        same += int((drafts == truth).sum())
        total += len(truth)
    return same / max(total, 1)


def figures(folder: Path, length: int) -> dict[str, Any]:
    """All figures of a release, as plain data."""
    net = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sources: dict[str, Any] = {}
    for path in sorted((folder / "heldout").glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        per_token = len(text.encode()) / len(tokenizer.encode(text).ids)
        found = measure(net, windows(tokenizer, text, length))
        peak = found["load"].max(1).values * net.s.n_routed_experts
        sources[path.stem] = {
            "loss": found["loss"],
            "perplexity": math.exp(found["loss"]),
            "bits_per_byte": found["loss"] / math.log(2) / per_token,
            "top1": found["top1"],
            "mtp_loss": found["mtp_loss"],
            "mtp_agreement": found["agree"],
            "load_max_over_mean": [round(float(v), 3) for v in peak],
            "load_share": [[round(float(v), 5) for v in row] for row in found["load"]],
        }
    loads = {name: torch.tensor(row["load_share"]) for name, row in sources.items()}
    apart = {f"{a}-{b}": distance(loads[a], loads[b]) for a, b in combinations(loads, 2)}
    prompts = [[0, *tokenizer.encode(prompt).ids] for prompt in PROMPTS]
    greedy = [generate(net, ids, SAMPLE, 0.0, 0) for ids in prompts]
    mean = lambda key: sum(row[key] for row in sources.values()) / len(sources)  # noqa: E731
    mixed = torch.stack(list(loads.values())).mean(0).max(1).values * net.s.n_routed_experts
    return {
        "window": length,
        "mean_loss": mean("loss"),
        "mean_bits_per_byte": mean("bits_per_byte"),
        "mtp_agreement": mean("mtp_agreement"),
        "mtp_agreement_on_own_greedy_text": agreement_on_own_text(
            net, list(zip(prompts, greedy, strict=True))
        ),
        "load_max_over_mean_of_the_mixture": [round(float(v), 3) for v in mixed],
        "load_distance": apart,
        "load_distance_mean": sum(apart.values()) / len(apart),
        "sources": sources,
        "samples": [
            {
                "prompt": prompt,
                "greedy": tokenizer.decode(new, skip_special_tokens=False),
                "sampled": tokenizer.decode(
                    generate(net, ids, SAMPLE, 0.7, 1), skip_special_tokens=False
                ),
            }
            for prompt, ids, new in zip(PROMPTS, prompts, greedy, strict=True)
        ],
    }


def picture(found: dict[str, Any], path: Path) -> None:
    """Heat-maps of load over mean, one a source, layers down and experts across."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(found["sources"])
    figure, axes = pyplot.subplots(len(names), 1, figsize=(9, 1.35 * len(names) + 0.8), sharex=True)
    for axis, name in zip(axes, names, strict=True):
        share = torch.tensor(found["sources"][name]["load_share"])
        image = axis.imshow(share * share.shape[1], aspect="auto", cmap="magma", vmin=0, vmax=4)
        layers = [f"layer {i + 1}" for i in range(len(share) - 1)] + ["MTP"]
        axis.set_yticks(range(len(share)), layers, fontsize=7)
        axis.set_title(name, fontsize=9, loc="left", pad=3)
    axes[-1].set_xlabel("routed expert")
    figure.tight_layout(rect=(0, 0, 0.91, 1))
    bar = figure.add_axes((0.92, 0.1, 0.015, 0.8))
    figure.colorbar(image, cax=bar, label="load / mean load")
    figure.savefig(path, dpi=110)


def report(found: dict[str, Any]) -> str:
    """The table that is printed and put in the model card."""
    lines = [
        "| held-out text | loss (nats/token) | perplexity | bits/byte | top-1 | MTP agreement "
        "| load max/mean, layers 1-4, MTP |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["sources"].items():
        peaks = " ".join(f"{v:.1f}" for v in row["load_max_over_mean"])
        lines.append(
            f"| {name} | {row['loss']:.3f} | {row['perplexity']:.1f} | {row['bits_per_byte']:.2f} "
            f"| {row['top1']:.3f} | {row['mtp_agreement']:.3f} | {peaks} |"
        )
    peaks = " ".join(f"{v:.1f}" for v in found["load_max_over_mean_of_the_mixture"])
    lines.append(
        f"| **mean** | {found['mean_loss']:.3f} | | {found['mean_bits_per_byte']:.2f} | "
        f"| {found['mtp_agreement']:.3f} | {peaks} (of the mixture) |"
    )
    far = max(found["load_distance"], key=found["load_distance"].get)
    near = min(found["load_distance"], key=found["load_distance"].get)
    lines.append(
        f"\nLoad distance between two kinds of text (total variation, mean over layers): "
        f"{found['load_distance_mean']:.2f} on average, {found['load_distance'][far]:.2f} for "
        f"{far}, {found['load_distance'][near]:.2f} for {near}. MTP agreement along the model's "
        f"own greedy text: {found['mtp_agreement_on_own_greedy_text']:.3f}."
    )
    return "\n".join(lines)


def fill_card(card: Path, table: str) -> None:
    """Puts the table between the card's marks, where there is a card with marks."""
    if card.exists():
        head, mark, rest = card.read_text(encoding="utf-8").partition("<!-- figures -->\n")
        _, end, tail = rest.partition("<!-- /figures -->")
        if mark and end:
            card.write_text(f"{head}{mark}{table}\n{end}{tail}", encoding="utf-8")


def main() -> None:
    """Evaluates a release folder."""
    options = Parser(description="Evaluate a release of the bundled model.")
    options.add_argument("folder", type=checkpoint)
    options.add_argument("--length", type=at_least(2), default=512)
    args = options.parse_args()
    torch.set_num_threads(1)  # with more, small products crawl on a busy machine
    found = figures(args.folder, args.length)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (args.folder / "eval.json").write_text(text, encoding="utf-8")
    print(report(found))
    fill_card(args.folder / "README.md", report(found))
    for sample in found["samples"]:
        print(f"\n--- {sample['prompt']}\n[greedy] {sample['greedy']}\n[0.7] {sample['sampled']}")
    try:
        picture(found, args.folder / "load.png")
    except ImportError as error:
        print(f"no heat-map: {error}")


if __name__ == "__main__":
    main()
