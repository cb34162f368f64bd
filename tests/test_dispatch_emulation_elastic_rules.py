"""Rules and limits of the emulation of DeepEP's second API (2.1 and 2.5): each is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_cases import VERSIONS, D, E, K, M, inputs, make, on_ranks

from dispatch.emulation import BufferRuleError, EventHandle, HostAssertion
from ep.group import EPGroup


def test_picks_are_copied_in_2_1_unless_told_not_to() -> None:
    b = make("2.1.0")
    x, idx, w = inputs(0, 5)
    recv, _, _, handle, _ = b.dispatch(x, idx, w, num_experts=E)
    idx.fill_(-1)
    assert torch.equal(b.combine(recv, handle)[0].abs().sum() > 0, torch.tensor(True))
    x, idx, w = inputs(0, 5)
    recv, _, _, handle, _ = b.dispatch(x, idx, w, num_experts=E, do_handle_copy=False)
    idx.fill_(-1)
    with pytest.raises(BufferRuleError, match="topk_idx was written to"):
        b.combine(recv, handle)


def test_picks_are_held_in_2_5() -> None:
    b = make("2.5.0")
    x, idx, w = inputs(0, 5)
    with pytest.raises(AssertionError, match="do_handle_copy"):
        b.dispatch(x, idx, w, num_experts=E, do_handle_copy=True)
    recv, _, _, handle, _ = b.dispatch(x, idx, w, num_experts=E)
    assert handle.topk_idx is idx
    idx[0, 0] = -1
    with pytest.raises(AssertionError, match="must not be written to"):
        b.combine(recv, handle)


def test_epilogues_are_deferred_in_2_5() -> None:
    b = make("2.5.0")
    x, idx, w = inputs(0, 5)
    with pytest.raises(HostAssertion, match="needs async_with_compute_stream"):
        b.dispatch(x, idx, w, num_experts=E, defer_epilogue=True)
    later = {"async_with_compute_stream": True, "defer_epilogue": True}
    event = b.dispatch(x, idx, w, num_experts=E, **later)
    with pytest.raises(BufferRuleError, match="deferred epilogue was not run"):
        b.dispatch(x, idx, w, num_experts=E)
    recv, recv_idx, recv_w, handle = event.wait()
    assert recv.isfinite().all() and recv_idx.shape == recv_w.shape
    event = b.combine(recv, handle, **later)
    with pytest.raises(BufferRuleError, match="deferred epilogue was not run"):
        b.combine(recv, handle)
    out, none = event.current_stream_wait()
    assert none is None and out.isfinite().all()
    b.dispatch(x, idx, w, num_experts=E)


@VERSIONS
def test_a_handle_belongs_to_its_buffer(version: str) -> None:
    x, idx, w = inputs(0, 5)
    recv, _, _, handle, _ = make(version).dispatch(x, idx, w, num_experts=E)
    other = make(version)
    with pytest.raises(BufferRuleError, match="not one that this buffer made"):
        other.combine(recv, handle)
    with pytest.raises(BufferRuleError, match="not one that this buffer made"):
        other.dispatch(x, handle=handle)


@VERSIONS
def test_ranks_agree_on_sizes(version: str) -> None:
    def body(group: EPGroup) -> str:
        b = make(version, group.cpu_group)
        x, idx, w = inputs(group.rank, 2)
        try:
            b.dispatch(x, idx, w, num_experts=E, num_max_tokens_per_rank=M - group.rank)
        except BufferRuleError as error:
            return str(error)
        return "nothing"

    for said in on_ranks(body):
        assert "must be the same on all ranks" in said


BAD_CALLS: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("T=7 <= num_max_tokens_per_rank=6", HostAssertion, {"tokens": 7}),
    ("T=5 <= num_max_tokens_per_rank=4", HostAssertion, {"num_max_tokens_per_rank": 4}),
    ("documented are bfloat16", BufferRuleError, {"x": torch.zeros(5, D)}),
    ("contiguous", HostAssertion, {"x": torch.zeros(D, 5).bfloat16().t()}),
    ("multiple of 16", HostAssertion, {"x": torch.zeros(5, 12).bfloat16()}),
    ("multiple of 32", HostAssertion, {"x": torch.zeros(5, 24).bfloat16()}),
    ("int64", HostAssertion, {"topk_idx": torch.zeros(5, K, dtype=torch.int32)}),
    (r"topk_idx is \[5, K\]", HostAssertion, {"topk_idx": torch.zeros(4, K, dtype=torch.int64)}),
    ("topk_weights", HostAssertion, {"topk_weights": torch.zeros(5, K + 1)}),
    ("float32", HostAssertion, {"topk_weights": torch.zeros(5, K).double()}),
    ("picks an expert twice", BufferRuleError, {"topk_idx": torch.ones(5, K, dtype=torch.int64)}),
    ("0..5", BufferRuleError, {"topk_idx": torch.arange(5, 8).repeat(5, 1)}),
    ("K=33 <= 32", HostAssertion, {"topk_idx": -torch.ones(5, 33, dtype=torch.int64)}),
    ("experts a rank <=", HostAssertion, {"num_experts": 513}),
    ("E=2049 <= 2048", HostAssertion, {"num_experts": 2049}),
    ("num_experts must be given", AssertionError, {"num_experts": None}),
    (r"int32 \[6\]", HostAssertion, {"cumulative_local_expert_recv_stats": torch.zeros(6)}),
    ("num_sms=133", HostAssertion, {"num_sms": 133}),
    ("QPs are not enough", AssertionError, {"num_qps": 200}),
    ("needs do_expand", HostAssertion, {"do_zero_padding": True}),
    ("needs allocate_on_comm_stream", HostAssertion, {"previous_event": EventHandle()}),
    ("num_bytes", HostAssertion, {"num_max_tokens_per_rank": 10**5}),
    ("sf is", HostAssertion, {"sf": torch.zeros(4, 2)}),
    ("4 bytes a pack", HostAssertion, {"sf": torch.zeros(5, 2).double()}),
]


@VERSIONS
@pytest.mark.parametrize(("message", "kind", "change"), BAD_CALLS)
def test_limits_are_errors_of_the_same_kind(
    version: str, message: str, kind: type[Exception], change: dict[str, Any]
) -> None:
    change = dict(change)
    if change.get("num_sms") == 133 and version == "2.5.0":
        message = "num_sms=134"  # 2.5 rounds up to an even number
    x, idx, w = inputs(0, change.pop("tokens", 5))
    given = {"x": x, "topk_idx": idx, "topk_weights": w, "num_experts": E, **change}
    if "sf" in given:
        given["x"] = (x.to(torch.float8_e4m3fn), given.pop("sf"))
    if given["topk_idx"].shape[1] != given["topk_weights"].shape[1] and "topk_idx" in change:
        given["topk_weights"] = None
    with pytest.raises(kind, match=message):
        make(version).dispatch(**given)


@VERSIONS
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("bfloat16", {"x": lambda recv: recv.float()}),
        ("the dispatch gave", {"x": lambda recv: recv[:-1]}),
        ("topk_weights is float32", {"topk_weights": torch.zeros(3)}),
        ("bias is bfloat16", {"bias": torch.zeros(5, D)}),
        ("num_sms=-1", {"num_sms": -1}),
    ],
)
def test_a_combine_that_does_not_fit(version: str, message: str, change: dict[str, Any]) -> None:
    if version == "2.5.0" and "num_sms" in change:
        change = {"num_sms": -2}
        message = "num_sms=-2"
    b = make(version)
    x, idx, w = inputs(0, 5)
    recv, _, _, handle, _ = b.dispatch(x, idx, w, num_experts=E)
    change = dict(change)
    recv = change.pop("x", lambda rows: rows)(recv)
    with pytest.raises(HostAssertion, match=message):
        b.combine(recv, handle, **change)


@VERSIONS
def test_combine_wants_rows_of_256_channels(version: str) -> None:
    b = make(version, hidden=2 * D)
    x, idx, w = inputs(0, 5)
    narrow = torch.cat((x, x[:, :128]), 1)
    recv, _, _, handle, _ = b.dispatch(narrow, idx, w, num_experts=E)
    with pytest.raises(HostAssertion, match="D=384 is a multiple of 256"):
        b.combine(recv, handle)


@VERSIONS
def test_buffers_that_cannot_be(version: str) -> None:
    with pytest.raises(HostAssertion, match="multiple of 2097152"):
        make(version, num_bytes=10**6)
    with pytest.raises(HostAssertion, match="M=0 > 0"):
        make(version, num_max_tokens_per_rank=0)
    b = make(version)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        b.destroy()
    b = make(version, explicitly_destroy=True)
    b.barrier()
    assert b.get_physical_domain_size() == b.get_logical_domain_size() == (1, 1)
    assert b.get_theoretical_num_qps(b.get_theoretical_num_sms(E, K)) == 129
    b.destroy()
    x, idx, w = inputs(0, 5)
    with pytest.raises(HostAssertion, match="not destroyed"):
        b.dispatch(x, idx, w, num_experts=E)


def test_deterministic_torch_must_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    x, idx, w = inputs(0, 5)
    with pytest.raises(AssertionError, match="fill_uninitialized_memory"):
        make("2.1.0").dispatch(x, idx, w, num_experts=E)
