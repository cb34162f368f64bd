"""The emulation of DeepEP's second API (2.1 and 2.5): signatures, sizes, formats, rules, errors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from elastic_cases import (
    LIBRARIES,
    TOKENS,
    VERSIONS,
    Alone,
    D,
    E,
    K,
    L,
    M,
    R,
    inputs,
    make,
    on_ranks,
)
from torch import Tensor

from dispatch import deepep_v2_limits as limits
from dispatch.base import WireFormat
from dispatch.emulation import BufferRuleError, HostAssertion
from dispatch.emulation.signatures import read_signatures
from dispatch.emulation.signatures_elastic import COMM_25, ELASTIC_SIGNATURES
from dispatch.fp8 import dequantise, quantise
from ep.group import EPGroup

WIRES = {"rows": WireFormat.FP8, "columns": WireFormat.FP8_UE8M0}


# -- signatures and sizes ------------------------------------------------------------------------


@VERSIONS
def test_signatures_are_those_of_the_library(version: str) -> None:
    for name, members in ELASTIC_SIGNATURES[version].items():
        emulated = getattr(LIBRARIES[version], name)
        members = {**members, **(COMM_25 if name == "EPBuffer" else {})}
        for member, parameters in members.items():
            value = getattr(emulated, member)
            value = value.fget if isinstance(value, property) else value
            found = list(inspect.signature(value).parameters.values())
            found = [p for p in found if p.name != "self"]
            want = [(n, inspect.Parameter.empty if d is ... else d) for n, d in parameters]
            read = [(p.name, as_written(p.default)) for p in found]
            assert read == want, f"{name}.{member}"
        public = {
            n
            for n, value in vars(emulated).items()
            if not n.startswith("_") and (callable(value) or isinstance(value, staticmethod))
        }
        public -= {"handle_type"}  # of the emulation
        assert public <= set(members), f"{name} has members the library has not"


def as_written(default: Any) -> Any:
    return str(default) if isinstance(default, torch.dtype) else default


def test_signatures_are_read_from_source() -> None:
    """By the same reader that is held against the real packages' sources."""
    for version, name in (("2.1.0", "ElasticBuffer"), ("2.5.0", "EPBuffer")):
        kind = getattr(LIBRARIES[version], name)
        with open(inspect.getsourcefile(kind) or "") as file:
            read = read_signatures(file.read(), name)
        more = COMM_25 if version == "2.5.0" else {}
        assert read == {**ELASTIC_SIGNATURES[version][name], **more}


@pytest.mark.parametrize(
    ("ranks", "tokens", "gib"),
    [
        (8, 128, 0.02),
        (8, 4096, 0.44),
        (16, 128, 0.07),
        (16, 4096, 1.13),
        (16, 8192, 2.23),
        (32, 8192, 4.46),
        (64, 128, 0.28),
    ],
)
def test_buffer_size_on_nodes_of_eight(ranks: int, tokens: int, gib: float) -> None:
    for api in (limits.ELASTIC, limits.EP):
        size = limits.buffer_bytes(
            api, max_tokens=tokens, hidden=7168, top_k=8, fp8=True, ranks=ranks, domain=8
        )
        assert size % 2**21 == 0 and size / 2**30 == pytest.approx(gib, abs=0.006)


def test_the_hint_is_of_one_domain() -> None:
    for version, api in (("2.1.0", limits.ELASTIC), ("2.5.0", limits.EP)):
        kind = type(make(version))
        for fp8 in (False, True):
            want = limits.buffer_bytes(
                api, max_tokens=4096, hidden=7168, top_k=8, fp8=fp8, ranks=1, domain=1
            )
            assert kind.get_buffer_size_hint(Alone(), 4096, 7168, 8, fp8) == want
        # 0 picks counts as 32; sums at home alone need room for every pick.
        assert kind.get_buffer_size_hint(Alone(), 64, D) == kind.get_buffer_size_hint(
            Alone(), 64, D, 32
        )
        many = kind.get_buffer_size_hint(Alone(), 4096, D, 8, allow_multiple_reduction=False)
        assert many > kind.get_buffer_size_hint(Alone(), 4096, D, 8)
    row = limits.row_bytes(limits.ELASTIC, 7168, 224, 8, True)
    assert row == 7168 + 224 + 128  # 64 of picks and weights, 36 of where from, to 32
    assert row <= 1.02 * (7168 + 224 + 64)
    assert limits.row_bytes(limits.EP, 7168, 224, 8, True) == -(-row // 64) * 64


# -- a dispatch ----------------------------------------------------------------------------------


@VERSIONS
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("wire", ["bf16", "rows", "columns"])
def test_dispatch_gives_rows_in_the_stated_form(
    version: str, expand: bool, sync: bool, wire: str
) -> None:
    alignment = 4 if expand else 1

    def body(group: EPGroup) -> None:
        rank = group.rank
        b = make(version, group.cpu_group, use_fp8_dispatch=wire != "bf16")
        x, idx, w = inputs(rank, TOKENS[rank])
        rows: Any = x
        if wire != "bf16":
            q = quantise(x, WIRES[wire])
            rows = (q.values, q.scales)
        stats = torch.ones(L, dtype=torch.int32)
        recv, recv_idx, recv_w, handle, event = b.dispatch(
            rows,
            idx,
            w,
            stats,
            num_experts=E,
            expert_alignment=alignment,
            do_cpu_sync=sync,
            do_expand=expand,
            use_tma_aligned_col_major_sf=wire == "columns",
        )
        assert event.event is None
        everyone = [inputs(r, TOKENS[r]) for r in range(R)]
        sent = [
            (r, t)
            for r in range(R)
            for t in range(TOKENS[r])
            if mine(everyone[r][1][t], rank).any()
        ]
        counts = [sum(int((i == rank * L + e).sum()) for _, i, _ in everyone) for e in range(L)]
        aligned = [-(-n // alignment) * alignment for n in counts]
        n, z = len(sent), sum(aligned)
        if not sync:
            n, z = R * M, limits.expanded_rows(R, M, K, L, alignment)
            assert z == -(-(R * M * min(K, L) + (alignment - 1) * L) // alignment) * alignment
        width = z if expand else n
        # What the handle says.
        assert handle.num_recv_tokens == n and handle.num_expanded_tokens == z or not sync
        assert handle.num_recv_tokens_per_expert_list == (aligned if sync else [])
        by_rank = [sum(r <= s for r, _ in sent) for s in range(R)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == by_rank
        starts = [sum(aligned[:e]) for e in range(L)]
        ends = [s + (c if expand else a) for s, c, a in zip(starts, counts, aligned, strict=True)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert (stats - 1).tolist() == counts
        meta = handle.recv_src_metadata
        assert meta.dtype == torch.int32 and meta.shape == (n, K + 2)
        assert handle.dst_buffer_slot_idx.shape == idx.shape
        # The rows: grouped by source rank, in no order within it.
        values, scales = recv if isinstance(recv, tuple) else (recv, None)
        assert values.shape == (width, D) and values.is_contiguous()
        assert values.dtype == (torch.bfloat16 if wire == "bf16" else torch.float8_e4m3fn)
        if scales is not None:
            packs = q.scales.shape[1]
            strides = (1, -(-width // 4) * 4) if wire == "columns" else (packs, 1)
            assert scales.shape == (width, packs) and scales.dtype == q.scales.dtype
            assert scales.stride() == strides or width <= 1
        found = [divmod(int(number), M) for number in meta[: len(sent), 0]]
        assert sorted(found) == sent and [r for r, _ in found] == [r for r, _ in sent]
        read = torch.zeros(width, dtype=torch.bool)
        for i, (r, t) in enumerate(found):
            theirs = everyone[r]
            here = mine(theirs[1][t], rank)
            last = max(k for k in range(K) if here[k])
            assert int(meta[i, 1]) == r * K + last
            local = torch.where(here, theirs[1][t] - rank * L, -1)
            if not expand:
                assert torch.equal(recv_idx[i], local)
                assert torch.equal(recv_w[i], theirs[2][t])  # elsewhere's weights too
                places = [i]
            else:
                assert recv_idx is None and recv_w.shape == (width,)
                places = meta[i, 2:][here].tolist()
                assert (meta[i, 2:][~here] == -1).all()
                for place, e, k in zip(
                    places, local[here].tolist(), here.nonzero().squeeze(1).tolist(), strict=True
                ):
                    assert starts[e] <= place < starts[e] + counts[e]
                    assert float(recv_w[place]) == float(theirs[2][t, k])
            for place in places:
                assert not read[place]
                read[place] = True
                assert same_row(values, scales, place, theirs[0][t], wire)
        assert int(read.sum()) == (sum(counts) if expand else len(sent))
        # What is not valid is poison: whoever reads it will see.
        assert values[~read].float().isnan().all() and recv_w[~read].isnan().all()
        if recv_idx is not None:
            assert (recv_idx[~read] > E).all()

    on_ranks(body)


def mine(picks: Tensor, rank: int) -> Tensor:
    return (picks >= rank * L) & (picks < (rank + 1) * L)


def same_row(values: Tensor, scales: Tensor | None, at: int, x: Tensor, wire: str) -> bool:
    if scales is None:
        return torch.equal(values[at], x)
    q = quantise(x[None], WIRES[wire])
    want = dequantise(q.values, q.scales, q.scale_format, torch.float32)[0]
    row = dequantise(values[at][None], scales[at][None], q.scale_format, torch.float32)[0]
    return torch.equal(row, want)


@VERSIONS
def test_nothing_is_there_before_the_wait(version: str) -> None:
    b = make(version)
    x, idx, w = inputs(0, 5)
    recv, recv_idx, _, handle, event = b.dispatch(
        x, idx, w, num_experts=E, async_with_compute_stream=True
    )
    assert recv.isnan().all() and (recv_idx > E).all()
    assert (handle.psum_num_recv_tokens_per_scaleup_rank > R * M).all()
    with pytest.raises(BufferRuleError, match="not waited for"):
        b.combine(recv, handle)
    event.current_stream_wait()
    assert not recv.isnan().any()
    out, none, event = b.combine(recv, handle, async_with_compute_stream=True)
    assert out.isnan().all() and none is None
    event.current_stream_wait(release_handle=True)
    want = torch.where((idx >= 0).any(1, keepdim=True), x, 0)
    assert torch.equal(out, want) and event.event is None


@VERSIONS
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("multiple", [True, False])
def test_combine_adds_up_without_weights(version: str, expand: bool, multiple: bool) -> None:
    def body(group: EPGroup) -> None:
        b = make(version, group.cpu_group, allow_multiple_reduction=multiple)
        x, idx, w = inputs(group.rank, TOKENS[group.rank])
        recv, _, recv_w, handle, _ = b.dispatch(
            x, idx, w, num_experts=E, do_expand=expand, expert_alignment=8, do_cpu_sync=False
        )
        weighs = multiple or not expand
        bias = torch.full_like(x, 0.5)
        out, weights, _ = b.combine(recv, handle, recv_w if weighs else None, (bias, bias))
        owner = idx.div(L, rounding_mode="floor")
        ranks = torch.tensor([[len({*o} - {-1})] for o in owner.tolist()])
        times = (idx >= 0).sum(1, keepdim=True) if expand else ranks
        torch.testing.assert_close(
            out.float(), x.float() * times.view(-1, 1) + 1, rtol=0.01, atol=0.02
        )
        if weighs:
            assert torch.equal(weights, torch.where(idx >= 0, w, 0.0))
        else:
            assert weights is None
            with pytest.raises(BufferRuleError, match="one by one carry no weights"):
                b.combine(recv, handle, recv_w)

    on_ranks(body)


@VERSIONS
@pytest.mark.parametrize("expand", [False, True])
def test_a_handle_brings_the_layout_again(version: str, expand: bool) -> None:
    def body(group: EPGroup) -> None:
        b = make(version, group.cpu_group)
        x, idx, w = inputs(group.rank, TOKENS[group.rank])
        first, picks, weights, handle, _ = b.dispatch(
            x, idx, w, num_experts=E, do_expand=expand, expert_alignment=4
        )
        again, picks_again, none, same, _ = b.dispatch(-x, handle=handle, do_expand=expand)
        assert same is handle and none is None
        valid = ~first.isnan()
        assert torch.equal(again[valid], -first[valid]) and again[~valid].isnan().all()
        assert picks is None or torch.equal(picks, picks_again)
        assert b.dispatch(x, topk_weights=w, handle=handle, do_expand=expand)[2] is not None
        for wrong, kind in (
            ({"topk_idx": idx}, AssertionError),
            ({"do_cpu_sync": True}, AssertionError),
            ({"num_experts": 2 * E}, AssertionError),
            (
                {"cumulative_local_expert_recv_stats": torch.zeros(L, dtype=torch.int32)},
                HostAssertion,
            ),
            ({"do_expand": not expand}, HostAssertion),
        ):
            with pytest.raises(kind):
                b.dispatch(x, **{"handle": handle, "do_expand": expand, **wrong})
        out, _, _ = b.combine(again, handle)
        assert out.isfinite().all()

    on_ranks(body)


@VERSIONS
def test_padding_is_zero_where_that_was_asked_for(version: str) -> None:
    b = make(version)
    x, idx, w = inputs(0, 5)
    recv, _, recv_w, handle, _ = b.dispatch(
        x, idx, w, num_experts=E, do_expand=True, expert_alignment=4, do_zero_padding=True
    )
    assert recv.isfinite().all() and recv_w.isfinite().all()
    counts = handle.num_unaligned_recv_tokens_per_expert
    assert int((recv == 0).all(1).sum()) == recv.shape[0] - int(counts.sum())


@VERSIONS
def test_rows_of_a_source_are_in_order_only_where_that_was_asked_for(version: str) -> None:
    x, _, w = inputs(0, 5)
    idx = torch.arange(K).repeat(5, 1)
    orders = []
    for deterministic in (False, True):
        b = make(version, deterministic=deterministic)
        recv, _, _, handle, _ = b.dispatch(x, idx, w, num_experts=E)
        orders.append(handle.recv_src_metadata[:, 0].tolist())
        assert torch.equal(recv, x[handle.recv_src_metadata[:, 0].long()])
    assert orders[0] != orders[1] == [0, 1, 2, 3, 4]
