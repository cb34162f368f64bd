"""From a LoadPlan to weights in memory: read, dequantise, join, store, in parallel.

Knows: which tensors make which piece, how FP8 blocks and RoPE layouts are undone, threads,
progress. Experts go straight into their stacked slots; at no time is there a second full copy.
Knows nothing of ranks (the plan does) and nothing of model math.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from ep.placement import EMPTY
from models.deepseek.checkpoint import LoadPlan
from models.deepseek.errors import CheckpointError
from models.deepseek.fp8 import Fp8Rows, dequantise_weight, scale_to_float
from models.deepseek.kernels.base import ExpertWeights, Fp8ExpertWeights, Kernels, LinearWeight
from models.deepseek.layout import (
    SCALE_SUFFIX,
    embed_name,
    final_norm_name,
    head_name,
    layer_prefix,
    mtp_layers,
    placement_row,
)
from models.deepseek.weights import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

# (bytes done, bytes in all, MB/s so far); called from loader threads, one at a time.
Progress = Callable[[int, int, float], None]
_COMPARE_BYTES = 1 << 26
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


class _Progress:
    """Serialises the callback and keeps it to ten calls a second."""

    def __init__(self, total: int, callback: Progress | None) -> None:
        self._total, self._callback = total, callback
        self._start, self._last = time.perf_counter(), 0.0
        self._done = 0
        self._lock = Lock()

    def update(self, done: int, last: bool = False) -> None:
        if self._callback is None:
            return
        now = time.perf_counter()
        with self._lock:
            done = self._done = max(done, self._done)
            if last or now - self._last >= 0.1:
                self._last = now
                seconds = max(now - self._start, 1e-9)
                self._callback(done, self._total, done / seconds / 1e6)


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
        self.kernels, self.dtype = kernels, dtype
        self.keep_kv_b, self.keep_fp8 = keep_kv_b, keep_fp8
        self.device = torch.device(device)
        self._num_threads = num_threads
        self._progress = _Progress(plan.total_bytes, progress)
        self._problems: list[str] = []
        self._notes: list[str] = list(plan.notes)
        self._coarse_biases: list[str] = []
        self._unaligned: list[str] = []

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
        final_norm = self._vector(final_norm_name(c))
        self._progress.update(self.index.bytes_read, last=True)
        self.index.close()
        if self._problems:
            raise CheckpointError(str(self.index.directory), sorted(self._problems))
        if self._coarse_biases:
            self._notes.append(
                f"{len(self._coarse_biases)} gate biases are stored in less than F32, which may "
                f"change choices of experts: {min(self._coarse_biases)}, ..."
            )
        if self._unaligned:
            self._notes.append(
                f"{len(self._unaligned)} FP8 weights are dequantised, since scales change within a "
                f"panel of their rows: {min(self._unaligned)}, ..."
            )
        return ModelWeights(
            embed=embed,
            layers=[loaded[n] for n in main],
            final_norm=final_norm,
            head=head,
            mtp=mtp_weights,
            bytes_read=self.index.bytes_read,
            notes=tuple(self._notes),
        )

    # -- single tensors --------------------------------------------------------------------

    def _matrix(self, name: str) -> Tensor:
        """[out, in] in the model dtype (a view of the file when it is stored so)."""
        assert name in self.plan.hosted
        weight = self.index.read(name)
        if weight.dtype != torch.float8_e4m3fn:
            return self._finite(f"tensor {name}", weight.to(self.dtype))
        value = dequantise_weight(weight, self._scale(name), self.dtype)
        return self._finite(f"tensor {name}", value)

    def _rows(self, name: str) -> Tensor | Fp8Rows:
        """As _matrix, but rows of FP8 as they are where they may stay so."""
        if not self._stays_fp8(name):
            return self._matrix(name)
        assert name in self.plan.hosted
        rows = Fp8Rows.of(self.index.read(name), self._scale(name))
        if not rows.is_finite(self.dtype):
            self._problems.append(f"tensor {name} holds NaN or infinity")
        return rows

    def _stays_fp8(self, name: str) -> bool:
        return self.keep_fp8 and self.index.tensors[name].dtype == "F8_E4M3"

    def _scale(self, name: str) -> Tensor:
        """fp32 scales of the FP8 weight `name`."""
        scale = scale_to_float(self.index.read(name + SCALE_SUFFIX))
        if bool((scale < 0).any()):
            self._problems.append(f"scale {name}{SCALE_SUFFIX} holds negative values")
        return self._finite(f"scale {name}{SCALE_SUFFIX}", scale)

    def _vector(self, name: str) -> Tensor:
        value = self.index.read(name).to(torch.float32, copy=True).to(self.device)
        return self._finite(f"tensor {name}", value)

    def _finite(self, what: str, value: Tensor) -> Tensor:
        """value: one NaN in it would poison the tokens that meet it, and then their neighbours."""
        # The extremes propagate NaN, and finding them is ten times quicker than isfinite.
        low, high = value.aminmax()
        if not math.isfinite(low) or not math.isfinite(high):
            self._problems.append(f"{what} holds NaN or infinity")
        return value

    def _linear(self, name: str, *pieces: Tensor | Fp8Rows) -> LinearWeight:
        """Rows of the pieces joined: a copy in any case, so that no weight lives in the file."""
        quantised = tuple(p for p in pieces if isinstance(p, Fp8Rows))
        if quantised and len(quantised) == len(pieces):
            rows = Fp8Rows.join(quantised)
            moved = Fp8Rows(rows.values.to(self.device), rows.scales.to(self.device))
            kept = self.kernels.fp8_linear_weight(moved, self.dtype)
            if kept is not None:
                return kept
        if quantised:
            self._unaligned.append(name)
        plain = [p.dequantise(self.dtype) if isinstance(p, Fp8Rows) else p for p in pieces]
        joined = torch.cat(plain) if len(plain) > 1 else plain[0].clone()
        return self.kernels.linear_weight(joined.to(self.device), self.dtype)

    def _done(self, names: Iterable[str]) -> None:
        for name in names:
            for stored in (name, name + SCALE_SUFFIX):
                if stored in self.plan.hosted:
                    self.index.release(stored)
        self._progress.update(self.index.bytes_read)

    # -- pieces of a layer -----------------------------------------------------------------

    def _submit_layer(self, pool: ThreadPoolExecutor, layer: int) -> dict[str, Any]:
        c = self.config
        p = layer_prefix(c, layer)
        parts: dict[str, Any] = {
            "input_norm": pool.submit(self._vector, p + "input_layernorm.weight"),
            "post_norm": pool.submit(self._vector, p + "post_attention_layernorm.weight"),
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
        names = [f"{p}mlp.experts.{expert}.{n}.weight" for expert in slots for n in _EXPERT_PARTS]
        stay = bool(names) and all(self._stays_fp8(name) for name in names)
        make = self.kernels.allocate_fp8_experts if stay else self.kernels.allocate_experts
        experts = make(len(local), c.hidden_size, c.moe_intermediate_size, self.dtype)
        parts["stores"] = [
            pool.submit(self._store, f"{p}mlp.experts.{expert}.", experts, where, stay)
            for expert, where in slots.items()
        ]
        parts["gate"] = pool.submit(self._gate, p + "mlp.gate.")
        if c.n_shared_experts:
            parts["shared"] = pool.submit(self._mlp, p + "mlp.shared_experts.")
        parts["moe"] = (row, experts)
        return parts

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
            first = self._rows(p + "q_a_proj.weight")
            q_a_norm = self._vector(p + "q_a_layernorm.weight")
            q_b = self._linear(p + "q_b_proj", self._paired(p + "q_b_proj.weight", heads))
        kv_b = self._matrix(p + "kv_b_proj.weight")
        n, v, rank = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
        per_head = kv_b.view(heads, n + v, rank)
        up_k, up_v = per_head[:, :n], per_head[:, n:]
        weights = AttentionWeights(
            qkv_a=self._linear(p + "kv_a_proj_with_mqa", first, kv_a),
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a_norm=self._vector(p + "kv_a_layernorm.weight"),
            w_uk=self._linear(p + "kv_b_proj", up_k.transpose(1, 2).reshape(heads * rank, n)),
            w_uv=self._linear(p + "kv_b_proj", up_v.reshape(heads * v, rank)),
            kv_b=self._linear(p + "kv_b_proj", kv_b) if self.keep_kv_b else None,
            o=self._linear(p + "o_proj", self._rows(p + "o_proj.weight")),
        )
        self._done(f"{p}{name}.weight" for name in names)
        return weights

    def _paired(self, name: str, heads: int) -> Tensor | Fp8Rows:
        rows = self._rows(name)
        if isinstance(rows, Fp8Rows):
            return rows.move(lambda x: _pair_rows(x, heads, self.config))
        return _pair_rows(rows, heads, self.config)

    def _mlp(self, p: str) -> MlpWeights:
        names = [f"{p}{n}.weight" for n in _EXPERT_PARTS]
        weights = MlpWeights(
            gate_up=self._linear(names[0], self._rows(names[0]), self._rows(names[1])),
            down=self._linear(names[2], self._rows(names[2])),
        )
        self._done(names)
        return weights

    def _store(
        self, p: str, experts: ExpertWeights | Fp8ExpertWeights, slots: list[int], stay: bool
    ) -> None:
        names = [f"{p}{n}.weight" for n in _EXPERT_PARTS]
        if stay:
            quantised = [cast(Fp8Rows, self._rows(name)) for name in names]
            for slot in slots:
                cast(Fp8ExpertWeights, experts).store_fp8(slot, *quantised)
        else:
            gate, up, down = (self._matrix(name) for name in names)
            for slot in slots:
                experts.store(slot, gate, up, down)
        self._done(names)

    def _gate(self, p: str) -> tuple[Tensor, Tensor | None]:
        name = p + "weight"
        weight = self.index.read(name)
        if weight.dtype == torch.float8_e4m3fn:
            weight = dequantise_weight(weight, self._scale(name))
        gate = self._finite(f"gate {name}", weight.to(torch.float32, copy=True).to(self.device))
        if not self.config.has_gate_bias:
            return gate, None
        name = p + "e_score_correction_bias"
        bias = self._vector(name)
        stored = self.index.tensors[name].dtype
        if stored != "F32":
            self._coarse_biases.append(f"{name} ({stored})")
        return gate, bias

    # -- embedding, head, MTP --------------------------------------------------------------

    def _tables(
        self, mtp: range
    ) -> tuple[Tensor, LinearWeight, dict[int, tuple[Tensor, LinearWeight]]]:
        """Embedding and head, and MTP's copies of them, compared byte by byte."""
        c = self.config
        raw_embed = self.index.read(embed_name(c))
        embed = self._matrix_of(embed_name(c), raw_embed)
        stored_head = head_name(c) if head_name(c) in self.plan.index.tensors else embed_name(c)
        raw_head = raw_embed if stored_head == embed_name(c) else self.index.read(stored_head)
        if c.tie_word_embeddings and not _same_bytes(raw_head, raw_embed):
            self._problems.append(f"tensor {stored_head} differs from the embedding it is tied to")
        head = self._linear(stored_head, self._matrix_of(stored_head, raw_head))
        copies: dict[int, tuple[Tensor, LinearWeight]] = {}
        for layer in mtp:
            p = layer_prefix(c, layer)
            names = p + "embed_tokens.weight", p + "shared_head.head.weight"
            raw = [self.index.read(name) for name in names]
            own_embed, own_head = embed, head
            if not _same_bytes(raw[0], raw_embed):
                own_embed = self._matrix_of(names[0], raw[0])
                self._notes.append(f"{names[0]} differs from the main embedding: kept apart")
            if not _same_bytes(raw[1], raw_head):
                own_head = self._linear(names[1], self._matrix_of(names[1], raw[1]))
                self._notes.append(f"{names[1]} differs from the main head: kept apart")
            copies[layer] = own_embed, own_head
            self._done(names)
        self._done((embed_name(c), stored_head))
        return embed, head, copies

    def _matrix_of(self, name: str, raw: Tensor) -> Tensor:
        """An own copy in the model dtype of a tensor that has been read already."""
        if raw.dtype == torch.float8_e4m3fn:
            value = dequantise_weight(raw, self._scale(name), self.dtype)
        else:
            value = raw.to(self.dtype, copy=True)
        return self._finite(f"tensor {name}", value).to(self.device)

    def _mtp_extras(self, layer: int) -> dict[str, Any]:
        p = layer_prefix(self.config, layer)
        return {
            "enorm": self._vector(p + "enorm.weight"),
            "hnorm": self._vector(p + "hnorm.weight"),
            "eh_proj": self._linear(p + "eh_proj", self._rows(p + "eh_proj.weight")),
            "head_norm": self._vector(p + "shared_head.norm.weight"),
        }


def _join(parts: dict[str, Any]) -> LayerWeights:
    def result(name: str) -> Any:
        future: Future[Any] | None = parts.get(name)
        return future.result() if future is not None else None

    for store in parts.get("stores", ()):
        store.result()
    ffn = result("ffn")
    if ffn is None:
        row, experts = parts["moe"]
        gate, bias = result("gate")
        ffn = MoeWeights(row, gate, bias, experts, result("shared"))
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
