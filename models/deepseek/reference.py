"""The reference model: fp32, slow, obvious, the third opinion on every fast path (law 6).

No cache, no paging, no kernels, no ranks: one sequence in, all logits out, a loop wherever a loop
says it plainest. It shares nothing with the serving path but the config and the raw tensors.

Shape letters: T tokens, D hidden, H heads, c kv_lora_rank, r rope dim, n nope dim, v value dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.deepseek.config import DeepSeekConfig
from models.deepseek.safetensors_index import SafetensorsIndex


@dataclass(frozen=True)
class ReferenceOutput:
    """logits [T, V]; hidden [T, D] after the final norm; routing[layer][t]: the expert ids chosen
    for token t, one entry a MoE layer."""

    logits: Tensor
    hidden: Tensor
    routing: list[list[frozenset[int]]]


class _Tree:
    """Where the rows of one sequence stand: positions [T]; hidden [T, T]: row i does not see row j.
    parents[i] < i: the row that row i follows, -1 for the first; None: each follows the last."""

    def __init__(self, num_rows: int, parents: Seq[int] | None) -> None:
        parents = range(-1, num_rows - 1) if parents is None else parents
        self.positions = torch.zeros(num_rows)
        self.hidden = torch.ones(num_rows, num_rows, dtype=torch.bool)
        for row, parent in enumerate(parents):
            self.hidden[row, row] = False
            if parent >= 0:
                self.hidden[row] &= self.hidden[parent]
                self.positions[row] = self.positions[parent] + 1


class ReferenceModel:
    """Reads tensors when they are needed. check `config.num_mtp_layers` before `draft`."""

    def __init__(self, checkpoint_dir: str | Path, config: DeepSeekConfig | None = None) -> None:
        self.config = DeepSeekConfig.from_hf(checkpoint_dir) if config is None else config
        self._index = SafetensorsIndex.open(checkpoint_dir)

    def forward(self, tokens: list[int], parents: Seq[int] | None = None) -> ReferenceOutput:
        """Logits of every row of one sequence, which may end in a tree of drafts (`_Tree`)."""
        c = self.config
        tree = _Tree(len(tokens), parents)
        x = self._tensor("model.embed_tokens.weight")[torch.tensor(tokens, dtype=torch.long)]
        routing: list[list[frozenset[int]]] = []
        for layer in range(c.num_hidden_layers):
            dense = layer < c.first_k_dense_replace
            x = self._layer(x, f"model.layers.{layer}.", dense, tree, routing)
        hidden = _rms(x, self._tensor("model.norm.weight"), c.rms_norm_eps)
        head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        return ReferenceOutput(hidden @ self._tensor(head).T, hidden, routing)

    def draft(
        self,
        hidden: Tensor,
        next_tokens: list[int],
        depth: int = 0,
        parents: Seq[int] | None = None,
    ) -> ReferenceOutput:
        """MTP layer `depth` over a whole sequence: hidden [T, D] from `forward` (after its final
        norm) and each row's next token; row i's logits predict the token after next_tokens[i]."""
        c = self.config
        p = f"model.layers.{c.num_hidden_layers + depth}."
        embedded = self._tensor(p + "embed_tokens.weight")[torch.tensor(next_tokens)]
        embedded = _rms(embedded, self._tensor(p + "enorm.weight"), c.rms_norm_eps)
        state = _rms(hidden, self._tensor(p + "hnorm.weight"), c.rms_norm_eps)
        x = torch.cat((embedded, state), dim=-1) @ self._tensor(p + "eh_proj.weight").T
        routing: list[list[frozenset[int]]] = []
        x = self._layer(x, p, False, _Tree(len(next_tokens), parents), routing)
        out = _rms(x, self._tensor(p + "shared_head.norm.weight"), c.rms_norm_eps)
        return ReferenceOutput(
            out @ self._tensor(p + "shared_head.head.weight").T, out, routing
        )  # fmt: skip

    # -- parts -----------------------------------------------------------------------------

    def _layer(
        self, x: Tensor, p: str, dense: bool, tree: _Tree, routing: list[list[frozenset[int]]]
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        normed = _rms(x, self._tensor(p + "input_layernorm.weight"), eps)
        x = x + self._attention(normed, p + "self_attn.", tree)
        normed = _rms(x, self._tensor(p + "post_attention_layernorm.weight"), eps)
        if dense:
            return x + self._mlp(normed, p + "mlp.")
        return x + self._moe(normed, p + "mlp.", routing)

    def _attention(self, x: Tensor, p: str, tree: _Tree) -> Tensor:
        """Naive form: keys and values of each head written out."""
        c = self.config
        n, r, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        if c.q_lora_rank is None:
            q = x @ self._tensor(p + "q_proj.weight").T
        else:
            low = x @ self._tensor(p + "q_a_proj.weight").T
            low = _rms(low, self._tensor(p + "q_a_layernorm.weight"), c.latent_norm_eps)
            q = low @ self._tensor(p + "q_b_proj.weight").T
        kv = x @ self._tensor(p + "kv_a_proj_with_mqa.weight").T
        latent, k_rope = kv[:, : c.kv_lora_rank], kv[:, c.kv_lora_rank :]
        latent = _rms(latent, self._tensor(p + "kv_a_layernorm.weight"), c.latent_norm_eps)
        wide = latent @ self._tensor(p + "kv_b_proj.weight").T
        k_rope = self._rotate(k_rope, tree.positions)
        heads = []
        for h in range(c.num_attention_heads):
            q_head = q[:, h * (n + r) : (h + 1) * (n + r)]
            q_head = torch.cat((q_head[:, :n], self._rotate(q_head[:, n:], tree.positions)), dim=1)
            kv_head = wide[:, h * (n + v) : (h + 1) * (n + v)]
            keys = torch.cat((kv_head[:, :n], k_rope), dim=1)
            scores = q_head @ keys.T * self._softmax_scale()
            chance = torch.softmax(scores.masked_fill(tree.hidden, -math.inf), dim=-1)
            heads.append(chance @ kv_head[:, n:])
        return torch.cat(heads, dim=1) @ self._tensor(p + "o_proj.weight").T

    def _softmax_scale(self) -> float:
        c = self.config
        scale = 1 / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
        yarn = c.rope.yarn
        if yarn is None or not yarn.mscale_all_dim or yarn.factor <= 1:
            return scale
        return scale * (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, r]: pair j of the token at position t turns by t * frequency j."""
        c = self.config
        r = c.qk_rope_head_dim
        factor = c.rope.yarn.cos_sin_factor() if c.rope.yarn else 1.0
        out = torch.empty_like(x)
        for j in range(r // 2):
            first, second = (2 * j, 2 * j + 1) if c.rope.interleaved else (j, j + r // 2)
            angle = positions * self._frequency(j)
            cos, sin = angle.cos() * factor, angle.sin() * factor
            out[:, first] = x[:, first] * cos - x[:, second] * sin
            out[:, second] = x[:, first] * sin + x[:, second] * cos
        return out

    def _frequency(self, j: int) -> float:
        """YaRN: fast pairs stay, slow pairs are stretched by the factor, between them a ramp."""
        c = self.config
        r, theta, yarn = c.qk_rope_head_dim, c.rope.theta, c.rope.yarn
        plain = float(theta ** (-2 * j / r))
        if yarn is None:
            return plain

        def index(beta: float) -> float:
            turns = yarn.original_max_position_embeddings / (beta * 2 * math.pi)
            return r * math.log(turns) / (2 * math.log(theta))

        low, high = index(yarn.beta_fast), index(yarn.beta_slow)
        if yarn.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, r - 1.0)
        if low == high:
            high += 0.001
        ramp = min(max((j - low) / (high - low), 0.0), 1.0)
        return plain / yarn.factor * ramp + plain * (1 - ramp)

    def _mlp(self, x: Tensor, p: str) -> Tensor:
        gate = x @ self._tensor(p + "gate_proj.weight").T
        up = x @ self._tensor(p + "up_proj.weight").T
        return (gate * torch.sigmoid(gate) * up) @ self._tensor(p + "down_proj.weight").T

    def _moe(self, x: Tensor, p: str, routing: list[list[frozenset[int]]]) -> Tensor:
        """Experts one by one over the tokens that chose them, then the shared expert."""
        c = self.config
        out = torch.zeros_like(x)
        logits = x @ self._tensor(p + "gate.weight").T
        picks = [self._choose(logits[t], p) for t in range(x.shape[0])]
        routing.append([frozenset(chosen) for chosen in picks])
        for expert in range(c.n_routed_experts):
            rows = [t for t, chosen in enumerate(picks) if expert in chosen]
            if rows:
                weight = torch.tensor([[picks[t][expert]] for t in rows])
                out[rows] += self._mlp(x[rows], f"{p}experts.{expert}.") * weight
        return out + self._mlp(x, p + "shared_experts.") if c.n_shared_experts else out

    def _choose(self, logits: Tensor, p: str) -> dict[int, float]:
        """One token's experts and their weights."""
        c = self.config
        if c.scoring_func == "sigmoid":
            scores = torch.sigmoid(logits)
            choice = (scores + self._tensor(p + "gate.e_score_correction_bias")).tolist()
            masked = -math.inf
        else:
            scores = torch.softmax(logits, dim=-1)
            choice, masked = scores.tolist(), 0.0
        size = c.n_routed_experts // c.n_group
        if c.topk_method != "greedy" and c.n_group > 1:
            members = [choice[g * size : (g + 1) * size] for g in range(c.n_group)]
            best = 2 if c.scoring_func == "sigmoid" else 1
            worth = [sum(sorted(m, reverse=True)[:best]) for m in members]
            order = sorted(range(c.n_group), key=lambda g: (-worth[g], g))
            for group in order[c.topk_group :]:
                choice[group * size : (group + 1) * size] = [masked] * size
        ids = sorted(range(c.n_routed_experts), key=lambda e: (-choice[e], e))
        ids = ids[: c.num_experts_per_tok]
        weights = {e: float(scores[e]) for e in ids}
        if c.norm_topk_prob:
            total = sum(weights.values()) + 1e-20
            weights = {e: w / total for e, w in weights.items()}
        return {e: w * c.routed_scaling_factor for e, w in weights.items()}

    def _tensor(self, name: str) -> Tensor:
        """fp32; FP8 blocks multiplied by their scales one by one."""
        name = self.config.tensor_prefix + name
        stored = self._index.read(name)
        if stored.dtype != torch.float8_e4m3fn:
            return stored.to(torch.float32)
        value = stored.to(torch.float32)
        scale = self._index.read(name + "_scale_inv")
        if scale.dtype == torch.float8_e8m0fnu:
            scale = torch.pow(2.0, scale.view(torch.uint8).to(torch.float64) - 127)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
                value[block] *= float(scale[i, j])
        return value


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight
