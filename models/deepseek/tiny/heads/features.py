"""What drafters learn from: windows of text, and the target's hidden states over them.

A third of the windows are corpus text, as the target was trained on; the others begin with a few
tokens of it and go on as the target does, mostly greedily: there drafts are judged in service.
Everything is cut and drawn from seeds, so that a second run sees the same.

Shape letters: N windows, S positions, D hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

from .. import corpus
from ..corpus import SOURCES
from ..data import Mixture
from ..network import Network
from ..tokenizer import write_tokens
from .generate import continuations

LENGTH = 256  # positions of a window
PROMPT = 48  # of them real text, where the target goes on
GROUP = 256  # sequences continued at once
GREEDY = 3  # of so many groups and one sampled
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Windows:
    """tokens [N, S + 1] and hidden [N, S, D] (bf16, after the final norm) of the positions 0..S-1.
    What follows position i is tokens[:, i + 1]."""

    tokens: Tensor
    hidden: Tensor

    @property
    def count(self) -> int:
        return len(self.tokens)


def write_corpus(work: Path, checkpoint: Path) -> None:
    """corpus.jsonl and its tokens in the checkpoint's own tokenizer, where they are not there."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "corpus.jsonl").exists():
        corpus.main(work)
    if not all((work / f"train.{source.name}.npy").exists() for source in SOURCES):
        with (work / "corpus.jsonl").open(encoding="utf-8") as stream:
            rows = [json.loads(line) for line in stream]
        write_tokens(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), rows, work)


def make_windows(net: Network, work: Path, groups: int) -> Windows:
    """groups * GROUP windows, shuffled; kept in `windows.*` of the work folder."""
    paths = [work / f"windows.{groups}.{kind}.npy" for kind in ("tokens", "hidden")]
    if not all(path.exists() for path in paths):
        third = groups // 3
        tokens = np.concatenate([_corpus_text(work, third), _own_text(net, work, groups - third)])
        tokens = np.random.default_rng(23).permutation(tokens)
        np.save(paths[0], tokens.astype(np.uint16))
        _write_hidden(net, torch.from_numpy(tokens), paths[1])
    hidden = np.load(paths[1], mmap_mode="r+")  # "r" would make a tensor that warns
    return Windows(
        torch.from_numpy(np.load(paths[0]).astype(np.int64)),
        torch.from_numpy(hidden).view(torch.bfloat16),
    )


def _corpus_text(work: Path, groups: int) -> np.ndarray:
    mixture = Mixture(work, seed=17)
    batches = [mixture.batch(i, GROUP, LENGTH)[:, : LENGTH + 1] for i in range(groups)]
    return torch.cat(batches).numpy()


def _own_text(net: Network, work: Path, groups: int) -> np.ndarray:
    mixture = Mixture(work, seed=19)
    found = []
    for i in track(range(groups), "own continuations"):
        prompts = mixture.batch(i, GROUP, PROMPT)[:, :PROMPT]
        heat = 0.0 if i % (GREEDY + 1) < GREEDY else TEMPERATURE
        found.append(continuations(net, prompts, LENGTH + 1 - PROMPT, heat, seed=i))
    return torch.cat(found).numpy()


@torch.inference_mode()
def _write_hidden(net: Network, tokens: Tensor, path: Path) -> None:
    part = path.with_suffix(".part")
    shape = (len(tokens), LENGTH, net.s.hidden_size)
    out = np.lib.format.open_memmap(part, mode="w+", dtype=np.int16, shape=shape)
    for start in track(range(0, len(tokens), 16), "features"):
        hidden, _ = net(tokens[start : start + 16, :-1], None, torch.bfloat16)
        out[start : start + 16] = hidden.view(torch.int16).numpy()
    out.flush()
    part.rename(path)
