"""Train the bundled checkpoint's drafters: corpus, own text, features, the three, figures.

    python -m models.deepseek.tiny.heads WORK checkpoints/tiny [--only eagle,medusa,draft]

Writes beside the checkpoint, into the folder NAME-drafters, and fills the table of its card.

What lies in WORK already (corpus, windows, features) is not made again. Everything is drawn from
seeds and one thread computes, so the same machine gets the same weights. Needs what the recipe of
the checkpoint needs, 1 GB in WORK and about half an hour of one core.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from models.arguments import Parser, at_least, checkpoint, told_in_a_line

from ..corpus import MissingSource
from ..evaluate import fill_card
from ..network import Network
from ..release import load
from .draft import draft_loss, make_draft, read_draft, write_draft
from .eagle import EagleNet
from .evaluate import figures, report, write_figures
from .features import make_windows, write_corpus
from .files import Head, make_head, read_head, write_head
from .medusa import MedusaNet
from .train import eagle_loss, fit, medusa_loss

KINDS = ("eagle", "medusa", "draft")
SEED = 31
PEAKS = {"eagle": 2e-3, "medusa": 2e-3, "draft": 3e-3}  # learning rates
DEPTH = 5  # to which EAGLE and the draft model are measured; they can draft deeper


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    first = (__doc__ or "").splitlines()[0]
    options = Parser(description=first)
    options.add_argument("work", type=Path, help="work folder (about 1 GB)")
    options.add_argument("checkpoint", type=checkpoint, help="the target")
    options.add_argument("--only", default=",".join(KINDS), help="kinds, comma-separated")
    options.add_argument("--steps", type=at_least(1), default=500, help="training steps of each")
    options.add_argument(
        "--groups", type=at_least(1), default=24, help="of 256 windows to learn from"
    )
    options.add_argument("--out", type=Path, help="where to, if not beside it")
    return options


def main() -> None:
    """Makes what is missing, trains, writes, evaluates what was written."""
    options = parser()
    args = options.parse_args()
    kinds = args.only.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        options.error(f"argument --only: {','.join(unknown)}: valid are {', '.join(KINDS)}")
    torch.set_num_threads(1)
    with told_in_a_line():
        args.work.mkdir(parents=True, exist_ok=True)
    try:
        write_corpus(args.work, args.checkpoint)
    except MissingSource as error:
        sys.exit(f"error: {error}")
    net = load(args.checkpoint)
    windows = make_windows(net, args.work, args.groups)
    weight = net.lm_head.detach().bfloat16()
    out: Path = args.out or args.checkpoint.with_name(f"{args.checkpoint.name}-drafters")
    for kind in kinds:
        torch.manual_seed(SEED)
        folder, depth = out / kind, DEPTH
        head = make_draft() if kind == "draft" else make_head(kind, net)
        if isinstance(head, EagleNet):
            drafts = eagle_loss(head, weight)
        elif isinstance(head, MedusaNet):
            drafts, depth = medusa_loss(head, weight), head.heads
        else:
            drafts = draft_loss(head, weight)
        log = args.work / f"{kind}.log.jsonl"
        curve = fit(head, drafts, windows, args.steps, log, PEAKS[kind])
        if isinstance(head, Network):
            size = write_draft(head, folder, args.checkpoint)
            made: Head | Network = read_draft(folder)
        else:
            size = write_head(head, folder, net.s.vocab_size)
            made = read_head(kind, net, folder)
        found = figures(net, made, args.checkpoint, depth)
        found["training"] = {"steps": args.steps, "windows": windows.count, **curve[-1]}
        write_figures(found, folder / "eval.json")
        fill_card(out / "README.md", report(out))
        print(f"{folder}: {size / 1e6:.2f} MB, acceptance {found['acceptance']}", end=", ")
        print(f"{found['mean_accepted']:.2f} drafts accepted a run")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
