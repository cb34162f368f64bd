"""Trained heads as a folder: one safetensors file in bf16, config.json, and back.

Shape letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..network import Network
from .eagle import EagleNet
from .medusa import MedusaNet

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Head = EagleNet | MedusaNet


def make_head(kind: str, net: Network) -> Head:
    """An untrained head of this kind for the target."""
    if kind == "eagle":
        return EagleNet(net.embed_tokens.detach(), net.s.rms_norm_eps)
    return MedusaNet(net.s.hidden_size)


def write_head(head: Head, folder: Path, vocab_size: int) -> int:
    """-> bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: x.bfloat16().contiguous() for name, x in head.published().items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    text = json.dumps(head.config(vocab_size), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return (folder / WEIGHTS).stat().st_size


@torch.no_grad()
def read_head(kind: str, net: Network, folder: Path) -> Head:
    """What `write_head` wrote, into a head of the usual sizes; ValueError if names differ."""
    head = make_head(kind, net)
    source: dict[str, Tensor] = load_file(folder / WEIGHTS)
    target = head.published()
    if source.keys() != target.keys():
        raise ValueError(f"{folder}: tensor names differ: {sorted(source.keys() ^ target.keys())}")
    for name, tensor in target.items():
        tensor.copy_(source[name])
    return head.eval()
