"""MLA: decode over a paged cache in bf16 and FP8, prefill with and without a prefix, cache write
and read.

Beside decode (ours is cut at fixed positions): the same cut by load, as fast mode has it, FlashMLA
and FlashInfer through the adapters a runner uses, and plain torch, which gathers what it attends to
(bf16, up to `Sizes.torch_positions`). Beside prefill: torch's scaled dot-product attention over
keys that are expanded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from models.deepseek.kernels.gpu import mla_cache, mla_decode, mla_gather, mla_prefill
from models.deepseek.kernels.gpu.bench.case import BY_LOAD, Case, Prepared, largest_difference
from models.deepseek.kernels.gpu.bench.rivals import arch_of
from models.deepseek.kernels.gpu.bench.sizes import Sizes
from models.deepseek.kernels.gpu.dense import dense
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_adapters import MlaProblem, MlaStep
from models.deepseek.kernels.gpu.mla_flash_mla import FlashMla
from models.deepseek.kernels.gpu.mla_flashinfer import FlashInferMla
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, DecodePlan, plan_decode
from models.deepseek.kernels.gpu.mla_prefill_plan import GATHER_TILE, plan_prefill
from models.deepseek.kernels.gpu.mla_rows import row_bytes
from models.deepseek.kernels.gpu.scatter_rows import scatter_cost, scatter_rows
from models.interface import ForwardBatch

BF16 = torch.bfloat16
BESIDE_CACHE = 2 << 30  # bytes: queries, results, parts, what a clock writes over


def attention_cases(s: Sizes, device: torch.device) -> Iterator[Case]:
    for fp8 in (False, True):
        for rows in s.decode:
            for context in s.contexts:
                yield _decode_case(s, rows, context, 1, fp8, device)
    yield _decode_case(s, s.decode[-2], s.contexts[0], 3, False, device)
    for prompts in s.prompts:
        told = " + ".join(f"{new} behind {prefix}" for new, prefix in dict.fromkeys(prompts))
        new = [n for n, _ in prompts]
        contexts = [n + before for n, before in prompts]
        yield Case(
            "mla_prefill",
            f"{len(prompts)} x {told}",
            {"rows": sum(new), "context": max(contexts), "heads": s.heads},
            mla_prefill.cost(
                contexts, new, s.heads, rank=s.rank, rope=s.rope, nope=s.nope, value=s.value
            ),
            "bf16",
            _make_prefill(s, contexts, new, device),
            first=True,
        )
    for fp8 in (False, True):
        for tokens in (s.decode[-2], s.prefill):
            yield Case(
                "mla_cache",
                f"{tokens} rows, {_kind(fp8)}",
                {"rows": tokens, "fp8": int(fp8)},
                mla_cache.cost(tokens, s.rank, s.rope, fp8),
                "none",
                _make_write(s, tokens, fp8, device),
            )
    for fp8 in (False, True):
        yield Case(
            "mla_gather",
            f"{s.prefill} positions, {_kind(fp8)}",
            {"rows": s.prefill, "fp8": int(fp8)},
            mla_gather.cost(s.prefill, s.rank, s.rope, fp8),
            "none",
            _make_gather(s, fp8, device),
        )
    for tokens in (s.decode[-2], s.prefill):
        yield Case(
            "scatter_rows",
            f"{tokens} rows",
            {"rows": tokens},
            scatter_cost(tokens, s.rank, s.rope),
            "none",
            _make_scatter(s, tokens, device),
        )


def paged_batch(
    contexts: list[int], new: list[int], block: int, device: torch.device
) -> ForwardBatch:
    """Sequences whose blocks lie scattered over a cache that holds them and nothing else."""
    needed = [-(-n // block) for n in contexts]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[at : at + count]
        at += count
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(contexts, new, strict=True)])
    ids = torch.zeros(sum(new), dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=ids,
        positions=positions.to(device),
        slot_mapping=ids,
        query_start=starts.to(device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_rows=ids[:0],
        max_query_len=max(new),
        max_context_len=max(contexts),
    )


def random_layer(s: Sizes, blocks: int, fp8: bool, device: torch.device) -> Tensor:
    """A layer of the cache full of values that are numbers."""
    if not fp8:
        return torch.randn(blocks, s.block, s.width, dtype=BF16, device=device)
    raw = torch.empty(
        blocks, s.block, row_bytes(s.rank, s.rope, True), dtype=torch.uint8, device=device
    )
    raw.fill_(0x38)  # e4m3 1.0
    at = s.rank + 4 * (s.rank // 128)
    raw[..., s.rank : at] = torch.ones(s.rank // 128, device=device).view(torch.uint8)
    raw[..., at:] = torch.ones(s.rope, dtype=BF16, device=device).view(torch.uint8)
    raw[..., : s.rank : 3] = 0xB4  # -0.75
    return raw


def _kind(fp8: bool) -> str:
    return "fp8" if fp8 else "bf16"


def _decode_case(
    s: Sizes, rows: int, context: int, each: int, fp8: bool, device: torch.device
) -> Case:
    drafts = f", {each} rows each" if each > 1 else ""
    cache = rows * -(-context // s.block) * s.block * row_bytes(s.rank, s.rope, fp8)
    return Case(
        "mla_decode",
        f"{rows} x {context} {_kind(fp8)}{drafts}",
        {"rows": rows * each, "context": context, "heads": s.heads, "fp8": int(fp8)},
        mla_decode.cost([context] * rows, s.heads, s.rank, s.rope, fp8=fp8, rows_each=each),
        "bf16",
        _make_decode(s, rows, context, each, fp8, device),
        first=each == 1 and context in (s.contexts[0], s.contexts[-1]),
        memory=cache + BESIDE_CACHE,
    )


def _make_decode(
    s: Sizes, rows: int, context: int, each: int, fp8: bool, device: torch.device
) -> Callable[[], Prepared]:
    def make() -> Prepared:
        batch = paged_batch([context] * rows, [each] * rows, s.block, device)
        layer = random_layer(s, rows * -(-context // s.block), fp8, device)
        q = torch.randn(rows * each, s.heads, s.width, dtype=BF16, device=device)
        plan = plan_decode(batch, s.heads, s.rank)
        lengths = [context - each + 1 + i for _ in range(rows) for i in range(each)]
        step = MlaStep(plan, batch.block_tables, s.scale, lengths)
        problem = MlaProblem(s.heads, s.rank, s.rope, s.block, arch_of(device), fp8=fp8)

        def cut(plan: DecodePlan) -> Callable[[], Tensor]:
            return lambda: mla_decode.mla_decode(
                q, layer, plan, batch.block_tables, s.scale, rope=s.rope
            )[0]

        ours = cut(plan)
        rivals: dict[str, Callable[[], object]] = {}
        cuts = mla_decode.cuts_by_load(s.heads, device, fp8)
        if cuts.parts(lengths) != DETERMINISTIC.parts(lengths):
            rivals[BY_LOAD] = cut(plan_decode(batch, s.heads, s.rank, partitions=cuts))
        absent = {}
        for backend in (FlashMla(), FlashInferMla()):
            why = backend.refusal(problem)
            try:
                if why is None:
                    decode = backend.step(problem, step)
                    rivals[backend.name] = lambda decode=decode: decode(q, layer)[0]  # type: ignore[misc]
            except (ShapeRefused, RuntimeError, TypeError) as error:
                why = (str(error).splitlines() or [""])[0]
            if why is not None:
                absent[backend.name] = why
        if not fp8 and each == 1 and rows * context <= s.torch_positions:
            rivals["torch"] = _torch_decode(s, q, layer, batch, context)
        return Prepared(ours, rivals, absent, largest_difference)

    return make


def _torch_decode(
    s: Sizes, q: Tensor, layer: Tensor, batch: ForwardBatch, context: int
) -> Callable[[], Tensor]:
    def decode() -> Tensor:
        rows = layer[batch.block_tables.long()].flatten(1, 2)[:, :context]
        scores = torch.bmm(q, rows.transpose(1, 2)).float() * s.scale
        chances = torch.softmax(scores, dim=2).to(BF16)
        return torch.bmm(chances, rows[..., : s.rank])

    return decode


def _make_prefill(
    s: Sizes, context: list[int], new: list[int], device: torch.device
) -> Callable[[], Prepared]:
    def make() -> Prepared:
        batch = paged_batch(context, new, s.block, device)
        layer = random_layer(s, sum(-(-n // s.block) for n in context), False, device)
        both = s.nope + s.value
        kv_b = torch.randn(s.heads * both, s.rank, dtype=BF16, device=device) / s.rank**0.5
        q = torch.randn(sum(new), s.heads, s.nope + s.rope, dtype=BF16, device=device)
        plan = plan_prefill(context, new, device)

        def expand(latents: Tensor) -> Tensor:
            return dense(latents, kv_b).view(-1, s.heads, both)

        def ours() -> Tensor:
            return mla_prefill.mla_prefill(
                q, layer, batch.block_tables, plan, expand, s.scale,
                rank=s.rank, nope=s.nope, value=s.value,
            )[0]  # fmt: skip

        whole = len(set(context)) == 1 and context == new  # one causal triangle for all
        if not whole:
            return Prepared(ours, absent={"torch": "no causal mask behind a prefix"})
        length, count = context[0], len(context)

        def theirs() -> Tensor:
            rows = layer[batch.block_tables.long()].flatten(1, 2)[:, :length]
            wide = F.linear(rows[..., : s.rank], kv_b).view(count, length, s.heads, both)
            shared = rows[:, :, None, s.rank :].expand(-1, -1, s.heads, -1)
            keys = torch.cat((wide[..., : s.nope], shared), -1).transpose(1, 2)
            values = F.pad(wide[..., s.nope :], (0, s.nope + s.rope - s.value)).transpose(1, 2)
            queries = q.view(count, length, s.heads, -1).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=s.scale
            )
            return out[..., : s.value].transpose(1, 2).flatten(0, 1)

        return Prepared(ours, {"torch": theirs}, compare=largest_difference)

    return make


def _make_write(s: Sizes, tokens: int, fp8: bool, device: torch.device) -> Callable[[], Prepared]:
    def make() -> Prepared:
        joined = torch.randn(tokens, s.q_rank + s.width, dtype=BF16, device=device)
        latent, key = joined[:, s.q_rank : s.q_rank + s.rank], joined[:, s.q_rank + s.rank :]
        weight = torch.ones(s.rank, device=device)
        angles = torch.rand(tokens, s.rope, device=device)
        blocks = -(-tokens // s.block)
        layer = random_layer(s, blocks, fp8, device)
        positions = torch.arange(tokens, device=device)
        slots = torch.randperm(blocks * s.block, device=device)[:tokens]

        def ours() -> object:
            return mla_cache.write_latents(
                latent, key, weight, 1e-6, positions, angles, slots, layer
            )

        return Prepared(ours)

    return make


def _make_gather(s: Sizes, fp8: bool, device: torch.device) -> Callable[[], Prepared]:
    """A prefix of s.prefill positions, out of blocks that lie scattered."""

    def make() -> Prepared:
        batch = paged_batch([s.prefill], [1], s.block, device)
        layer = random_layer(s, -(-s.prefill // s.block), fp8, device)
        latent, key = mla_gather.room(s.prefill, s.rank, s.rope, device)
        starts = range(0, s.prefill, GATHER_TILE)
        told = [[0, at, min(GATHER_TILE, s.prefill - at), at, s.prefill, 0] for at in starts]
        tiles = torch.tensor(told, dtype=torch.int32).to(device)

        def ours() -> object:
            mla_gather.gather_latents(tiles, batch.block_tables, layer, latent, key)
            return latent

        if fp8:
            return Prepared(ours)
        blocks = batch.block_tables.long()
        parts = mla_gather.room(s.prefill, s.rank, s.rope, device)

        def theirs() -> Tensor:
            rows = layer[blocks].flatten(0, 2)[: s.prefill]
            parts[0].copy_(rows[:, : s.rank])
            parts[1].copy_(rows[:, s.rank :])
            return parts[0]

        return Prepared(ours, {"torch": theirs}, compare=largest_difference)

    return make


def _make_scatter(s: Sizes, tokens: int, device: torch.device) -> Callable[[], Prepared]:
    def make() -> Prepared:
        latent = torch.randn(tokens, s.rank, dtype=BF16, device=device)
        key = torch.randn(tokens, s.rope, dtype=BF16, device=device)
        blocks = -(-tokens // s.block)
        layer = random_layer(s, blocks, False, device)
        other, joined = layer.clone(), torch.cat((latent, key), 1)
        slots = torch.randperm(blocks * s.block, device=device)[:tokens]

        def ours() -> object:
            scatter_rows(layer, latent, key, slots)
            return layer

        def theirs() -> object:
            other.view(-1, s.width).index_copy_(0, slots, joined)
            return other

        return Prepared(ours, {"torch": theirs}, compare=largest_difference)

    return make
