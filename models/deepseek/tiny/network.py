"""The DeepSeek-V3 architecture as a training network: plain MLA, sorted experts, one MTP layer.

Knows the mathematics of the forward pass and its gradients on two CPU cores; written for that, so
it is the third opinion beside the engine and transformers. Knows nothing of data, optimisers or
files. Sources: DeepSeek-V3 report (arXiv 2412.19437) 2.1.1 MLA, 2.1.2 MoE, 2.2 MTP.

Shape letters: B sequences, S positions, T = B*S tokens, D hidden, h heads, E routed experts,
K top-k, I expert width, N rows (token-expert pairs, each expert's run padded to ROWS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 64  # long runs of rows are padded to this, so that oneDNN meets few different shapes


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the names follow config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    intermediate_size: int = 768
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 96
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    moe_intermediate_size: int = 96
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(torch.autograd.Function):
    """x [.., D] of any float type -> normed and weighted, in `dtype`; fp32 inside, few passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.float()
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(size.square_().div_(x.shape[-1]).add_(eps))
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return (unit * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x (fp32) and weight."""
        unit, inverse, weight = ctx.saved_tensors
        grad = grads[0].float()
        d_weight = torch.mul(grad, unit).flatten(0, -2).sum(0)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, unit)[..., None]
        grad.addcmul_(unit, along, value=-1.0 / unit.shape[-1]).mul_(inverse)
        return grad, d_weight, None, None


class Norm(nn.Module):
    """RMSNorm in fp32, cast once. [.., D] -> [.., D]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The result is in `dtype`."""
        normed: Tensor = RMSNorm.apply(x, self.weight, self.eps, dtype)
        return normed


def matrix(rows: int, columns: int, zero: bool = False) -> nn.Parameter:
    """A weight [out, in]; projections into the residual stream start at zero."""
    weight = torch.zeros(rows, columns)
    if not zero:
        weight.uniform_(-(3**0.5) * columns**-0.5, 3**0.5 * columns**-0.5)
    return nn.Parameter(weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., in] @ weight [out, in]^T, in the precision of x."""
    return F.linear(x, weight.to(x.dtype))


def rotary(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [S, rope/2] of plain RoPE."""
    half = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float64)
    angle = torch.outer(
        torch.arange(length, dtype=torch.float64),
        shape.rope_theta ** (-half / shape.qk_rope_head_dim),
    )
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the interleaved pairs (2i, 2i+1) of x [B, S, h, rope]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention in its plain form (keys and values built for every position)."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        h, qk = s.num_attention_heads, s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_a_proj = matrix(s.q_lora_rank, s.hidden_size)
        self.q_a_layernorm = Norm(s.q_lora_rank, 1e-6)
        self.q_b_proj = matrix(h * qk, s.q_lora_rank)
        self.kv_a_proj_with_mqa = matrix(s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size)
        self.kv_a_layernorm = Norm(s.kv_lora_rank, 1e-6)
        self.kv_b_proj = matrix(h * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank)
        self.o_proj = matrix(s.hidden_size, h * s.v_head_dim, zero=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        s, (batch, length, _) = self.s, x.shape
        q = linear(self.q_a_layernorm(linear(x, self.q_a_proj), x.dtype), self.q_b_proj)
        q = q.view(batch, length, s.num_attention_heads, -1)
        q_nope, q_rope = q.split((s.qk_nope_head_dim, s.qk_rope_head_dim), -1)
        latent, k_rope = linear(x, self.kv_a_proj_with_mqa).split(
            (s.kv_lora_rank, s.qk_rope_head_dim), -1
        )
        kv = linear(self.kv_a_layernorm(latent, x.dtype), self.kv_b_proj)
        kv = kv.view(batch, length, s.num_attention_heads, -1)
        k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), -1)
        k_rope = rotate(k_rope[:, :, None], cos, sin).expand(-1, -1, s.num_attention_heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return linear(out.transpose(1, 2).reshape(batch, length, -1), self.o_proj)


class Dense(nn.Module):
    """down(silu(gate(x)) * up(x)): the dense layers' MLP and the shared expert."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = matrix(width, size)
        self.up_proj = matrix(width, size)
        self.down_proj = matrix(size, width, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., D]."""
        hidden = F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj)
        return linear(hidden, self.down_proj)


class ExpertSum(torch.autograd.Function):
    """sum_k weight[t, k] * expert[index[t, k]](x[t]), rows sorted by expert, gradients by hand."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, index: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """x [T, D], weight [T, K] fp32, index [T, K], gate_up [E, 2I, D], down [E, D, I]."""
        tokens, top_k = index.shape
        experts, width = down.shape[0], down.shape[2]
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts)
        step = ROWS if tokens * top_k > ROWS * experts else 4
        padded = (counts + step - 1) // step * step
        ends = padded.cumsum(0)
        shift = (ends - padded) - (counts.cumsum(0) - counts)  # what padding adds before expert e
        row_sorted = torch.arange(tokens * top_k) + shift[flat[order]]
        row_of = torch.empty_like(flat).index_copy_(0, order, row_sorted)  # [T*K]
        token_of = torch.zeros(int(ends[-1]), dtype=torch.long)
        token_of[row_sorted] = order // top_k
        scale = torch.zeros(int(ends[-1]), dtype=x.dtype)
        scale[row_sorted] = weight.reshape(-1)[order].to(x.dtype)
        bounds = [0, *ends.tolist()]
        rows = x.index_select(0, token_of)  # [N, D]
        gate_up, down = gate_up.to(x.dtype), down.to(x.dtype)
        hidden = rows.new_empty(bounds[-1], 2 * width)
        out = torch.empty_like(rows)
        for e in range(experts):
            a, b = bounds[e], bounds[e + 1]
            torch.mm(rows[a:b], gate_up[e].t(), out=hidden[a:b])
        gate, up = hidden.split(width, 1)
        act = F.silu(gate) * up
        for e in range(experts):
            a, b = bounds[e], bounds[e + 1]
            torch.mm(act[a:b], down[e].t(), out=out[a:b])
        each = out.index_select(0, row_of).view(tokens, top_k, -1)
        ctx.save_for_backward(row_of, token_of, scale, rows, hidden, act, each, weight)
        ctx.weights, ctx.bounds = (gate_up, down), bounds
        return torch.bmm(weight.to(x.dtype)[:, None], each)[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight, gate_up and down; index has none."""
        row_of, token_of, scale, rows, hidden, act, each, weight = ctx.saved_tensors
        (gate_up, down), bounds = ctx.weights, ctx.bounds
        grad = grads[0].contiguous()
        tokens, top_k, size = each.shape
        width = down.shape[2]
        d_weight = torch.bmm(each, grad[:, :, None])[..., 0].float()
        d_out = grad.index_select(0, token_of) * scale[:, None]  # zero on padding rows
        d_act = torch.empty_like(act)
        d_down, d_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        for e in range(down.shape[0]):
            a, b = bounds[e], bounds[e + 1]
            if b > a:
                torch.mm(d_out[a:b], down[e], out=d_act[a:b])
                torch.mm(d_out[a:b].t(), act[a:b], out=d_down[e])
        gate, up = hidden.split(width, 1)
        d_hidden = torch.empty_like(hidden)
        d_hidden[:, :width] = torch.ops.aten.silu_backward(d_act * up, gate)
        torch.mul(d_act, F.silu(gate), out=d_hidden[:, width:])
        d_rows = torch.empty_like(rows)
        for e in range(down.shape[0]):
            a, b = bounds[e], bounds[e + 1]
            if b > a:
                torch.mm(d_hidden[a:b], gate_up[e], out=d_rows[a:b])
                torch.mm(d_hidden[a:b].t(), rows[a:b], out=d_gate_up[e])
        d_x = d_rows.index_select(0, row_of).view(tokens, top_k, size).sum(1)
        return d_x, d_weight, None, d_gate_up.float(), d_down.float()


class MoE(nn.Module):
    """The gate (sigmoid, group-limited, bias for choice only), 32 experts and the shared expert."""

    bias: Tensor
    load: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        experts, width = s.n_routed_experts, s.moe_intermediate_size
        self.gate = matrix(experts, s.hidden_size)
        each = torch.empty(experts, 2 * width, s.hidden_size)
        self.gate_up = nn.Parameter(each.uniform_(-1, 1) * 3**0.5 * s.hidden_size**-0.5)
        self.down = nn.Parameter(torch.zeros(experts, s.hidden_size, width))
        self.shared_experts = Dense(s.hidden_size, width * s.n_shared_experts)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> (weights [T, K] scaled and normalised, expert ids [T, K])."""
        s = self.s
        score = torch.sigmoid(F.linear(x.float(), self.gate))
        with torch.no_grad():
            choice = (score + self.bias).view(-1, s.n_group, s.n_routed_experts // s.n_group)
            best = choice.topk(2, -1, sorted=False).values.sum(-1)
            keep = best.topk(s.topk_group, -1, sorted=False).indices
            mask = torch.ones_like(best, dtype=torch.bool).scatter_(1, keep, False)
            choice = choice.masked_fill(mask[..., None], float("-inf")).flatten(1)
            index = choice.topk(s.num_experts_per_tok, -1, sorted=False).indices
        weight = score.gather(1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return weight * s.routed_scaling_factor, index

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]. Leaves the step's tokens per expert in `load`."""
        weight, index = self.route(x)
        self.load = torch.bincount(index.flatten(), minlength=self.s.n_routed_experts).float()
        routed = ExpertSum.apply(x, weight, index, self.gate_up, self.down)
        return routed + self.shared_experts(x)


class Layer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). The residual stream stays fp32."""

    def __init__(self, s: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.mlp: nn.Module = Dense(s.hidden_size, s.intermediate_size) if dense else MoE(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """x [B, S, D] fp32 -> the same."""
        x = x + self.self_attn(self.input_layernorm(x, dtype), cos, sin)
        normed = self.post_attention_layernorm(x, dtype)
        return x + self.mlp(normed.flatten(0, 1)).view_as(x)


class Network(nn.Module):
    """The whole model. `forward` gives the two hidden states from which the head makes logits."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.7)
        self.layers = nn.ModuleList(
            Layer(s, dense=i < s.first_k_dense_replace) for i in range(s.num_hidden_layers)
        )
        self.norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.zeros(s.vocab_size, s.hidden_size))
        self.enorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.hnorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.eh_proj = matrix(s.hidden_size, 2 * s.hidden_size)
        self.mtp = Layer(s, dense=False)
        self.mtp_norm = Norm(s.hidden_size, s.rms_norm_eps)

    def moe_layers(self) -> list[MoE]:
        """The MoE blocks in order, the MTP layer's last."""
        found = [layer.mlp for layer in [*self.layers, self.mtp]]
        return [block for block in found if isinstance(block, MoE)]

    def forward(
        self, tokens: Tensor, following: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [B, S] and what follows each in the first sequences [M <= B, S] -> hidden states.

        Row i of the first [B, S, D] predicts token i+1; row i of the second [M, S, D], given token
        i+1, predicts token i+2.
        """
        cos, sin = rotary(tokens.shape[1], self.s)
        x = F.embedding(tokens, self.embed_tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, dtype)
        main = self.norm(x, torch.float32)
        if following is None:
            return main.to(dtype), None
        next_one = self.enorm(F.embedding(following, self.embed_tokens), dtype)
        before = self.hnorm(main[: len(following)], dtype)
        z = linear(torch.cat((next_one, before), -1), self.eh_proj)
        z = self.mtp(z.float(), cos, sin, dtype)
        return main.to(dtype), self.mtp_norm(z, dtype)
