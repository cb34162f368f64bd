"""A draft model: a DeepSeek model of two narrow layers with the target's tokens, taught by it.

Two layers, since one alone cannot look up what followed a token the last time, and the target's own
greedy text repeats itself. Knows sizes, the lesson, and how it becomes a checkpoint (FP8 as the
target's, no MTP layer). Knows nothing of the training loop.

Shape letters: B sequences, S positions, R rows, D hidden, V vocabulary, E experts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..network import Network, Shape
from ..release import as_stored, config, dequantise, named_tensors
from .objective import CHUNK, teacher
from .train import Drafts

SHAPE = Shape(
    hidden_size=128,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    intermediate_size=384,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=64,
)
BIAS_SPEED = 2e-3
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Lesson(torch.autograd.Function):
    """Mean cross-entropy of softmax(hidden @ own head) against the goal, as `Disagreement`, with a
    gradient of the head too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [R, D] of the draft model; head [V, D] fp32; goal [R, V] -> loss, choice [R]."""
        low_head = head.to(hidden.dtype)
        grads, d_head = torch.empty_like(hidden), torch.zeros(head.shape)
        choice = torch.empty(len(hidden), dtype=torch.long)
        loss = torch.zeros(())
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            low = torch.log_softmax((hidden[rows] @ low_head.t()).float(), -1)
            choice[rows] = low.argmax(-1)
            aim = goal[rows].float()
            loss -= torch.linalg.vecdot(aim, low).sum()
            grad = low.exp_().sub_(aim).div_(len(hidden)).to(hidden.dtype)
            torch.mm(grad, low_head, out=grads[rows])
            d_head += grad.t() @ hidden[rows]
        ctx.save_for_backward(grads, d_head)
        ctx.mark_non_differentiable(choice)
        return loss / len(hidden), choice

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), d_head * grads[0], None


def draft_loss(net: Network, head: Tensor) -> Drafts:
    """head [V, D]: the target's. One share: of tokens that are the target's choice."""

    def of(tokens: Tensor, hidden: Tensor) -> tuple[Tensor, list[float]]:
        goal, choice = teacher(hidden.flatten(0, 1), head)
        mine, _ = net(tokens[:, :-1], None, torch.bfloat16)
        if torch.is_grad_enabled():
            _balance(net)
        loss, said = Lesson.apply(mine.flatten(0, 1), net.lm_head, goal)
        return loss, [float((said == choice).float().mean())]

    return of


@torch.no_grad()
def _balance(net: Network) -> None:
    """The gate's bias by the sign rule, as in the target's training; the MTP layer is not there."""
    for block in net.moe_layers()[:-1]:
        block.bias += BIAS_SPEED * torch.sign(block.load.mean() - block.load)


def make_draft() -> Network:
    """Untrained. Its MTP layer is neither trained nor stored."""
    net = Network(SHAPE)
    for name, parameter in net.named_parameters():
        if name.startswith(("mtp", "enorm", "hnorm", "eh_proj")):
            parameter.requires_grad_(False)
    return net


def _stored_names(net: Network) -> dict[str, Tensor]:
    mtp = f"model.layers.{net.s.num_hidden_layers}."
    return {name: x for name, x in named_tensors(net).items() if not name.startswith(mtp)}


def write_draft(net: Network, folder: Path, target: Path) -> int:
    """A checkpoint with the target's tokenizer -> bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = as_stored(_stored_names(net))
    file = folder / "model.safetensors"
    save_file(stored, file, metadata={"format": "pt"})
    file.chmod(0o644)
    values = config(net.s) | {"num_nextn_predict_layers": 0}
    text = json.dumps(dict(sorted(values.items())), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    for name in COPIED:
        shutil.copyfile(target / name, folder / name)
    return file.stat().st_size


@torch.no_grad()
def read_draft(folder: Path) -> Network:
    """What `write_draft` wrote; ValueError if names differ."""
    net = make_draft()
    source, target = load_file(folder / "model.safetensors"), _stored_names(net)
    plain = {name: x for name, x in source.items() if not name.endswith("_scale_inv")}
    if plain.keys() != target.keys():
        raise ValueError(f"{folder}: tensor names differ: {sorted(plain.keys() ^ target.keys())}")
    for name, tensor in target.items():
        scale = source.get(f"{name}_scale_inv")
        tensor.copy_(plain[name].float() if scale is None else dequantise(plain[name], scale))
    return net.eval()
