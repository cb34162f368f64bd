"""From a LoadPlan to weights in memory: read, dequantise, join, store, in parallel.

Knows: which tensors make which piece, how FP8 blocks and RoPE layouts are undone, threads,
progress. Experts go straight into their stacked slots; at no time is there a second full copy.
Knows nothing of ranks (the plan does) and nothing of model math.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from ep.placement import EMPTY
from models.deepseek.checkpoint import LoadPlan
from models.deepseek.errors import CheckpointError
from models.deepseek.fp8 import Fp8Rows
from models.deepseek.kernels.base import ExpertWeights, Fp8ExpertWeights, Kernels, LinearWeight
from models.deepseek.layout import (
    embed_name,
    final_norm_name,
    head_name,
    layer_prefix,
    mtp_layers,
    placement_row,
)
from models.deepseek.shared import pieces_on_blocks
from models.deepseek.tensor_reader import Progress, TensorReader
from models.deepseek.weights import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

_COMPARE_BYTES = 1 << 26
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


class WeightLoader:
    """Single use: `WeightLoader(...).load()`.

    dtype: float32 or bfloat16. keep_kv_b: keep kv_b_proj whole as well, for naive attention.
    keep_fp8: linears and experts that are stored as FP8 blocks stay so in memory, with the same
    results; all but kv_b_proj, which is taken apart.
    """

    def __init__(
        self,
        plan: LoadPlan,
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        keep_kv_b: bool,
        keep_fp8: bool = False,
        progress: Progress | None = None,
        num_threads: int = 4,
        device: torch.device | str = "cpu",
    ) -> None:
        self.plan, self.config, self.index = plan, plan.config, plan.index
        self.kernels, self.dtype, self.keep_kv_b = kernels, dtype, keep_kv_b
        self.read = TensorReader(plan, kernels, dtype, torch.device(device), keep_fp8, progress)
        self._num_threads = num_threads
        self._notes: list[str] = list(plan.notes)
        self._mixed: list[str] = []

    def load(self) -> ModelWeights:
        """Raises CheckpointError for faults that only the payload shows."""
        c = self.config
        main = range(c.num_hidden_layers)
        mtp = mtp_layers(c) if self.plan.with_mtp else range(0)
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="load") as pool:
            tables = pool.submit(self._tables, mtp)
            layers = {n: self._submit_layer(pool, n) for n in (*main, *mtp)}
            extras = {n: pool.submit(self._mtp_extras, n) for n in mtp}
            embed, head, mtp_tables = tables.result()
            loaded = {n: _join(parts) for n, parts in layers.items()}
            mtp_weights = [MtpWeights(loaded[n], *mtp_tables[n], **extras[n].result()) for n in mtp]
        final_norm = self.read.vector(final_norm_name(c))
        self.read.finish()
        if self.read.problems:
            raise CheckpointError(str(self.index.directory), sorted(self.read.problems))
        if self._mixed:
            self._notes.append(
                f"experts of {len(self._mixed)} layers are dequantised: some are stored as FP8, "
                f"but not all that may lie in one slot could stay so: {min(self._mixed)}, ..."
            )
        return ModelWeights(
            embed=embed,
            layers=[loaded[n] for n in main],
            final_norm=final_norm,
            head=head,
            mtp=mtp_weights,
            bytes_read=self.index.bytes_read,
            notes=(*self._notes, *self.read.notes()),
        )

    # -- pieces of a layer -----------------------------------------------------------------

    def _submit_layer(self, pool: ThreadPoolExecutor, layer: int) -> dict[str, Any]:
        c = self.config
        p = layer_prefix(c, layer)
        parts: dict[str, Any] = {
            "input_norm": pool.submit(self.read.vector, p + "input_layernorm.weight"),
            "post_norm": pool.submit(self.read.vector, p + "post_attention_layernorm.weight"),
            "attention": pool.submit(self._attention, p + "self_attn."),
        }
        if layer < c.first_k_dense_replace:
            parts["ffn"] = pool.submit(self._mlp, p + "mlp.")
            return parts
        row = placement_row(c, layer)
        local = self.plan.placement.experts_of(self.plan.rank, row)
        slots: dict[int, list[int]] = {}
        for slot, expert in enumerate(local):
            if expert != EMPTY:
                slots.setdefault(expert, []).append(slot)
        stay = self._experts_stay_fp8(p + "mlp.")
        make = self.kernels.allocate_fp8_experts if stay else self.kernels.allocate_experts
        experts = make(len(local), c.hidden_size, c.moe_intermediate_size, self.dtype)
        if hasattr(experts, "ue8m0"):  # kernels that scale rows as weights are scaled have it
            parts["powers"] = pool.submit(self.read.scales_are_powers, self._fp8_names(p + "mlp."))
        parts["stores"] = [
            pool.submit(self._store, p + "mlp.", expert, experts, where, stay)
            for expert, where in slots.items()
        ]
        parts["gate"] = pool.submit(self.read.gate, p + "mlp.gate.")
        if c.n_shared_experts and not self.plan.shared_in_slots:
            parts["shared"] = pool.submit(self._shared, p + "mlp.shared_experts.")
        layout = (
            f"{self.kernels.name}, {'e4m3 for ' if stay else ''}{self.dtype}, D={c.hidden_size}, "
            f"I={c.moe_intermediate_size}, {experts.nbytes // experts.num_slots} bytes"
        )
        parts["moe"] = (row, experts, layout)
        return parts

    def _fp8_names(self, p: str) -> list[str]:
        """Of all experts of the layer, wherever they live, and of the shared one: how rows are
        quantised for one of them must depend on no other's whereabouts."""
        c = self.config
        owners = [f"{p}experts.{expert}." for expert in range(c.n_routed_experts)]
        if c.n_shared_experts:
            owners.append(f"{p}shared_experts.")
        names = [f"{owner}{n}.weight" for owner in owners for n in _EXPERT_PARTS]
        return [name for name in names if self.read.stays_fp8(name)]

    def _experts_stay_fp8(self, p: str) -> bool:
        """Of all experts of the layer, wherever they live, so that slots are alike on all ranks."""
        c = self.config
        owners = [f"{p}experts.{expert}." for expert in range(c.n_routed_experts)]
        if self.plan.shared_in_slots:
            owners.append(f"{p}shared_experts.")
        found = {
            self.read.stays_fp8(f"{owner}{n}.weight") for owner in owners for n in _EXPERT_PARTS
        }
        if self.plan.shared_in_slots and not pieces_on_blocks(c):
            found.add(False)
        if len(found) > 1:
            self._mixed.append(p.removesuffix(".mlp."))
        return found == {True}

    def _attention(self, p: str) -> AttentionWeights:
        c, heads = self.config, self.config.num_attention_heads
        kv_a = self._paired(p + "kv_a_proj_with_mqa.weight", 1)
        q_b: LinearWeight | None = None
        q_a_norm: Tensor | None = None
        names = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
        if c.q_lora_rank is None:
            names += ["q_proj"]
            first = self._paired(p + "q_proj.weight", heads)
        else:
            names += ["q_a_proj", "q_b_proj"]
            first = self.read.rows(p + "q_a_proj.weight")
            q_a_norm = self.read.vector(p + "q_a_layernorm.weight")
            q_b = self.read.linear(p + "q_b_proj", self._paired(p + "q_b_proj.weight", heads))
        kv_b = self.read.matrix(p + "kv_b_proj.weight")
        n, v, rank = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
        per_head = kv_b.view(heads, n + v, rank)
        up_k, up_v = per_head[:, :n], per_head[:, n:]
        weights = AttentionWeights(
            qkv_a=self.read.linear(p + "kv_a_proj_with_mqa", first, kv_a),
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a_norm=self.read.vector(p + "kv_a_layernorm.weight"),
            w_uk=self.read.linear(p + "kv_b_proj", up_k.transpose(1, 2).reshape(heads * rank, n)),
            w_uv=self.read.linear(p + "kv_b_proj", up_v.reshape(heads * v, rank)),
            kv_b=self.read.linear(p + "kv_b_proj", kv_b) if self.keep_kv_b else None,
            o=self.read.linear(p + "o_proj", self.read.rows(p + "o_proj.weight")),
        )
        self.read.done(f"{p}{name}.weight" for name in names)
        return weights

    def _paired(self, name: str, heads: int) -> Tensor | Fp8Rows:
        rows = self.read.rows(name)
        if isinstance(rows, Fp8Rows):
            return rows.move(lambda x: _pair_rows(x, heads, self.config))
        return _pair_rows(rows, heads, self.config)

    def _mlp(self, p: str) -> MlpWeights:
        names = [f"{p}{n}.weight" for n in _EXPERT_PARTS]
        weights = MlpWeights(
            gate_up=self.read.linear(names[0], self.read.rows(names[0]), self.read.rows(names[1])),
            down=self.read.linear(names[2], self.read.rows(names[2])),
        )
        self.read.done(names)
        return weights

    def _shared(self, p: str) -> tuple[MlpWeights, ...]:
        """The shared expert, in pieces of an expert's width."""
        names = [f"{p}{n}.weight" for n in _EXPERT_PARTS]
        gates, ups, downs = (self.read.pieces_of(name) for name in names)
        pieces = tuple(
            MlpWeights(self.read.linear(names[0], gate, up), self.read.linear(names[2], down))
            for gate, up, down in zip(gates, ups, downs, strict=True)
        )
        self.read.done(names)
        return pieces

    def _store(
        self,
        p: str,
        expert: int,
        experts: ExpertWeights | Fp8ExpertWeights,
        slots: list[int],
        stay: bool,
    ) -> None:
        """Read a logical expert into all slots that hold it."""
        piece = expert - self.config.n_routed_experts
        owner = f"{p}experts.{expert}." if piece < 0 else f"{p}shared_experts."
        names = [f"{owner}{n}.weight" for n in _EXPERT_PARTS]
        if piece >= 0:
            parts = [self.read.piece(name, piece, stay) for name in names]
        elif stay:
            parts = [self.read.rows(name) for name in names]
        else:
            parts = [self.read.matrix(name) for name in names]
        for slot in slots:
            if stay:
                cast(Fp8ExpertWeights, experts).store_fp8(slot, *cast(list[Fp8Rows], parts))
            else:
                experts.store(slot, *cast(list[Tensor], parts))
        self.read.done(names)

    # -- embedding, head, MTP --------------------------------------------------------------

    def _tables(
        self, mtp: range
    ) -> tuple[Tensor, LinearWeight, dict[int, tuple[Tensor, LinearWeight]]]:
        """Embedding and head, and MTP's copies of them, compared byte by byte."""
        c = self.config
        raw_embed = self.index.read(embed_name(c))
        embed = self.read.matrix_of(embed_name(c), raw_embed)
        stored_head = head_name(c) if head_name(c) in self.plan.index.tensors else embed_name(c)
        raw_head = raw_embed if stored_head == embed_name(c) else self.index.read(stored_head)
        if c.tie_word_embeddings and not _same_bytes(raw_head, raw_embed):
            self.read.problems.append(
                f"tensor {stored_head} differs from the embedding it is tied to"
            )
        head = self.read.linear(stored_head, self.read.matrix_of(stored_head, raw_head))
        copies: dict[int, tuple[Tensor, LinearWeight]] = {}
        for layer in mtp:
            p = layer_prefix(c, layer)
            names = p + "embed_tokens.weight", p + "shared_head.head.weight"
            raw = [self.index.read(name) for name in names]
            own_embed, own_head = embed, head
            if not _same_bytes(raw[0], raw_embed):
                own_embed = self.read.matrix_of(names[0], raw[0])
                self._notes.append(f"{names[0]} differs from the main embedding: kept apart")
            if not _same_bytes(raw[1], raw_head):
                own_head = self.read.linear(names[1], self.read.matrix_of(names[1], raw[1]))
                self._notes.append(f"{names[1]} differs from the main head: kept apart")
            copies[layer] = own_embed, own_head
            self.read.done(names)
        self.read.done((embed_name(c), stored_head))
        return embed, head, copies

    def _mtp_extras(self, layer: int) -> dict[str, Any]:
        p = layer_prefix(self.config, layer)
        return {
            "enorm": self.read.vector(p + "enorm.weight"),
            "hnorm": self.read.vector(p + "hnorm.weight"),
            "eh_proj": self.read.linear(p + "eh_proj", self.read.rows(p + "eh_proj.weight")),
            "head_norm": self.read.vector(p + "shared_head.norm.weight"),
        }


def _join(parts: dict[str, Any]) -> LayerWeights:
    def result(name: str) -> Any:
        future: Future[Any] | None = parts.get(name)
        return future.result() if future is not None else None

    for store in parts.get("stores", ()):
        store.result()
    ffn = result("ffn")
    if ffn is None:
        row, experts, layout = parts["moe"]
        shared: tuple[MlpWeights, ...] = result("shared") or ()
        if (powers := result("powers")) is not None:
            linears = [linear for mlp in shared for linear in (mlp.gate_up, mlp.down)]
            for weight in (experts, *(w for w in linears if hasattr(w, "ue8m0"))):
                weight.ue8m0 = powers  # a shared expert gives beside slots what it gives in them
            if powers:
                layout += ", scales are powers of two"
        gate, bias = result("gate")
        ffn = MoeWeights(row, gate, bias, experts, shared, layout)
    return LayerWeights(result("input_norm"), result("post_norm"), result("attention"), ffn)


def _pair_rows(weight: Tensor, heads: int, c: Any) -> Tensor:
    """Rows of a projection whose last r rows a head are rotated, brought to interleaved pairs.

    Half-split RoPE rotates rows (i, i + r/2) together; moving row i to 2i and row i + r/2 to 2i + 1
    on both queries and keys leaves every dot product as it is.
    """
    if c.rope.interleaved:
        return weight
    r = c.qk_rope_head_dim
    per_head = weight.view(heads, -1, weight.shape[1])
    fixed, rotated = per_head[:, :-r], per_head[:, -r:]
    pairs = torch.stack((rotated[:, : r // 2], rotated[:, r // 2 :]), dim=2).flatten(1, 2)
    return torch.cat((fixed, pairs), dim=1).view_as(weight)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr():
        return True
    x, y = a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    step = _COMPARE_BYTES
    return all(torch.equal(x[i : i + step], y[i : i + step]) for i in range(0, len(x), step))
