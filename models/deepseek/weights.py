"""The weights of a model in memory, as plain records.

Knows: which pieces a layer is made of. Knows nothing of where they come from or what is done with
them. Linear weights are in the kernels' own layout; norms, gates and biases are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from models.deepseek.kernels.base import ExpertWeights, LinearWeight


@dataclass(frozen=True)
class AttentionWeights:
    """qkv_a joins the projections that read the layer input, query rows first (q_a_proj, or q_proj
    when there is no query latent; then kv_a_proj_with_mqa). w_uk [H * c, n] and w_uv [H * v, c] are
    kv_b_proj taken apart per head; kv_b is kept whole only where naive attention may run."""

    qkv_a: LinearWeight
    q_a_norm: Tensor | None
    q_b: LinearWeight | None
    kv_a_norm: Tensor
    w_uk: LinearWeight
    w_uv: LinearWeight
    kv_b: LinearWeight | None
    o: LinearWeight


@dataclass(frozen=True)
class MlpWeights:
    """gate_up [2I, D], gate's rows first; down [D, I]."""

    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class MoeWeights:
    """gate [E, D] and bias [E] fp32; experts: this rank's slots; row: of the placement.

    shared: the shared expert in pieces of an expert's width, whose results add up (shared.py); none
    where it lies in slots. bundle_layout: what the bytes of a slot mean; only between ranks that
    have the same one may an expert travel as bytes.
    """

    row: int
    gate: Tensor
    bias: Tensor | None
    experts: ExpertWeights
    shared: tuple[MlpWeights, ...]
    bundle_layout: str


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor
    post_norm: Tensor
    attention: AttentionWeights
    ffn: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """One MTP layer. embed and head are the main model's own objects when the copies are equal."""

    layer: LayerWeights
    embed: Tensor
    head: LinearWeight
    enorm: Tensor
    hnorm: Tensor
    eh_proj: LinearWeight  # [D, 2D]: columns of the embedding first, then of the hidden state
    head_norm: Tensor


@dataclass(frozen=True)
class ModelWeights:
    """embed [V, D] in the model dtype; notes: what the loader decided, to be printed once.

    keeps_fp8: linears and experts that the checkpoint has as FP8 blocks lie in memory as such.
    """

    embed: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: LinearWeight
    mtp: list[MtpWeights]
    bytes_read: int = 0
    keeps_fp8: bool = False
    notes: tuple[str, ...] = field(default=())

    def moe_layers(self) -> list[MoeWeights]:
        """In order of the placement's rows, MTP layers last."""
        every = self.layers + [m.layer for m in self.mtp]
        return [w.ffn for w in every if isinstance(w.ffn, MoeWeights)]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held by this rank, by kind; storage that is shared is counted once."""
        total: dict[str, int] = {}
        seen: set[int] = set()

        def add(kind: str, *pieces: Tensor | LinearWeight | ExpertWeights | None) -> None:
            for piece in pieces:
                if piece is not None and id(piece) not in seen:
                    seen.add(id(piece))
                    total[kind] = total.get(kind, 0) + int(piece.nbytes)

        add("embed", self.embed)
        add("head", self.head)
        add("norm", self.final_norm)
        for layer in self.layers + [m.layer for m in self.mtp]:
            a, ffn = layer.attention, layer.ffn
            add("norm", layer.input_norm, layer.post_norm, a.q_a_norm, a.kv_a_norm)
            add("attention", a.qkv_a, a.q_b, a.w_uk, a.w_uv, a.kv_b, a.o)
            if isinstance(ffn, MlpWeights):
                add("dense_mlp", ffn.gate_up, ffn.down)
            else:
                add("gate", ffn.gate, ffn.bias)
                add("experts", ffn.experts)
                for piece in ffn.shared:
                    add("shared_expert", piece.gate_up, piece.down)
        for m in self.mtp:
            add("norm", m.enorm, m.hnorm, m.head_norm)
            add("mtp", m.embed, m.head, m.eh_proj)
        return total
