"""The emulation among ranks (threads with gloo groups): normal mode, modes switched, lost peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_threads import gloo_threads

from dispatch.base import CombineForm, DispatchConfig
from dispatch.emulation import Buffer, BufferRuleError, HostAssertion, PeerTimeout
from dispatch.emulation.quantise import quantise
from dispatch.selfcheck import CheckCase, expected, make_case, outputs, random_placement
from ep.group import EPGroup

D, K, M = 2048, 3, 8


def case_of(size: int, tokens: list[int], seed: int = 0, **options: Any) -> CheckCase:
    placement = random_placement(6, size, 2, seed)
    config = DispatchConfig(
        D, K, placement.num_physical_experts, M, torch.bfloat16, deterministic=False
    )
    return make_case(config, placement, tokens, seed, **options)


def make(group: EPGroup, case: CheckCase, **options: Any) -> Buffer:
    config = Buffer.get_dispatch_config(group.size)
    experts = case.placement.num_physical_experts
    return Buffer(
        group.cpu_group,
        config.get_nvl_buffer_size_hint(2 * D, group.size),
        Buffer.get_low_latency_rdma_size_hint(M, D, group.size, experts),
        low_latency_mode=True,
        **options,
    )


def laid_out(buffer: Buffer, picks: torch.Tensor, experts: int) -> dict[str, Any]:
    ranks, nodes, each, in_rank, _ = buffer.get_dispatch_layout(picks, experts)
    assert nodes is None and ranks.dtype == each.dtype == torch.int32
    assert torch.equal(in_rank.sum(0), ranks.long())
    return {
        "num_tokens_per_rank": ranks,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": each,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_normal_mode_is_as_the_twin(size: int) -> None:
    some = [(5 * rank) % 8 for rank in range(size)]
    cases = [
        case_of(size, some, masked=0.3),
        case_of(size, [4] * size, to_rank=1),
        case_of(size, [0] * size),
    ]
    wanted = [expected(case, CombineForm.SUMMED) for case in cases]

    def body(group: EPGroup) -> int:
        rank = group.rank
        buffer = make(group, cases[0])
        for case, (received, home) in zip(cases, wanted, strict=True):
            x, picks, weights = case.xs[rank], case.slots[rank].long(), case.weights[rank]
            want = received[rank]
            experts = case.placement.num_physical_experts
            layout = laid_out(buffer, picks, experts)
            recv, idx, w, counts, handle, event = buffer.dispatch(
                x, topk_idx=picks, topk_weights=weights, expert_alignment=4, **layout
            )
            assert event.event is None
            assert torch.equal(recv, want.x) and torch.equal(idx, want.slots.long())
            assert torch.equal(w, want.weights)
            assert counts == [-(-n // 4) * 4 for n in want.counts.tolist()]
            assert len(handle) == 6 and handle[0].shape == (size, size)
            y = outputs(want, case, rank, CombineForm.SUMMED)
            bias = torch.ones_like(x)
            out, back, _ = buffer.combine(y, handle, topk_weights=w, bias=(bias, bias))
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.float(), home[rank] + 2, rtol=0.01, atol=0.01)
            torch.testing.assert_close(back, torch.where(picks >= 0, weights, 0.0))

            # Again by the handle; FP8 with the caller's scales; asynchronously.
            values, scales = quantise(x, round_scale=False)
            (again, s), *rest, event = buffer.dispatch(
                (values, scales), handle=handle, async_finish=True
            )
            assert rest == [None] * 4 and again.float().isnan().all()
            event.current_stream_wait()
            back_again = again.float() * s.repeat_interleave(128, 1)
            torch.testing.assert_close(back_again, want.x.float(), rtol=0.07, atol=0.01)

            # Room for the worst case instead of a count: the rest is poison.
            recv, idx, w, counts, *_ = buffer.dispatch(
                x, topk_idx=picks, topk_weights=weights, num_worst_tokens=8 * size, **layout
            )
            n = len(want.x)
            assert counts == [] and recv.shape == (8 * size, D) and torch.equal(recv[:n], want.x)
            assert recv[n:].isnan().all() and (idx[n:] == -1).all()
        return 1

    assert gloo_threads(size, body) == [1] * size


def test_after_normal_mode_the_buffer_must_be_cleaned() -> None:
    case = case_of(2, [3, 0])

    def body(group: EPGroup) -> int:
        buffer, rank = make(group, case), group.rank
        x, picks, weights = case.xs[rank], case.slots[rank].long(), case.weights[rank]
        experts = case.placement.num_physical_experts
        buffer.low_latency_dispatch(x, picks, M, experts)
        layout = laid_out(buffer, picks, experts)
        buffer.dispatch(x, topk_idx=picks, topk_weights=weights, **layout)
        with pytest.raises(BufferRuleError, match="clean_low_latency_buffer must come first"):
            buffer.low_latency_dispatch(x, picks, M, experts)
        buffer.clean_low_latency_buffer(M, D, experts)
        _, count, *_ = buffer.low_latency_dispatch(x, picks, M, experts)
        return int(count.sum())

    assert sum(gloo_threads(2, body)) == 9


def test_normal_mode_refuses() -> None:
    case = case_of(2, [3, 3])

    def body(group: EPGroup) -> int:
        buffer, rank = make(group, case), group.rank
        x, picks, weights = case.xs[rank], case.slots[rank].long(), case.weights[rank]
        layout = laid_out(buffer, picks, case.placement.num_physical_experts)
        full = {"topk_idx": picks, "topk_weights": weights, **layout}
        with pytest.raises(HostAssertion, match="x is bfloat16"):
            buffer.dispatch(x.float(), **full)
        with pytest.raises(AssertionError, match="layout must be given"):
            buffer.dispatch(x)
        with pytest.raises(AssertionError, match="go together"):
            buffer.dispatch(x, **{**full, "topk_weights": None})
        with pytest.raises(HostAssertion, match="multiple of 16"):
            buffer.dispatch(x[:, :12].contiguous(), **full)
        with pytest.raises(HostAssertion, match="K=33 <= 32"):
            wide = {"topk_idx": picks.repeat(1, 11), "topk_weights": weights.repeat(1, 11)}
            buffer.dispatch(x, **{**full, **wide})
        with pytest.raises(HostAssertion, match="needs previous_event and async_finish"):
            buffer.dispatch(x, **full, allocate_on_comm_stream=True)
        with pytest.raises(HostAssertion, match="num_nvl_bytes"):
            Buffer(group.cpu_group).dispatch(x, **full)
        with pytest.raises(HostAssertion, match="low_latency_mode=True"):
            Buffer(group.cpu_group).low_latency_dispatch(x, picks, M, 8)
        return 1

    assert gloo_threads(2, body) == [1, 1]


def test_a_lost_peer_is_an_error_without_masks() -> None:
    case = case_of(2, [3, 3])
    experts = case.placement.num_physical_experts

    def body(group: EPGroup) -> int:
        buffer = make(group, case)
        if group.rank == 1:
            return 0
        x, picks = case.xs[0], case.slots[0].long()
        with pytest.raises(PeerTimeout, match=r"timeout \(dispatch\): nothing came from rank 1"):
            buffer.low_latency_dispatch(x, picks, M, experts)
        return 1

    assert gloo_threads(2, body, leaving=(1,)) == [1, 0]


def test_masks_leave_a_rank_out_and_take_it_in_again() -> None:
    case = case_of(2, [4, 4])
    experts = case.placement.num_physical_experts
    local = experts // 2

    def body(group: EPGroup) -> int:
        rank = group.rank
        buffer = make(group, case, enable_shrink=True)
        x, picks, weights = case.xs[rank], case.slots[rank].long(), case.weights[rank]
        status = torch.full((2,), 7, dtype=torch.int32)
        for masked in (False, True, False):
            if masked:
                buffer.low_latency_update_mask_buffer(1 - rank, True)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == ([0, 0] if not masked else [rank, 1 - rank])
            recv, count, handle, _, _ = buffer.low_latency_dispatch(
                x, picks, M, experts, use_fp8=False
            )
            mine = (picks >= 0) & (picks // local == rank)
            if masked:
                assert int(count.sum()) == int(mine.sum()) and (handle[1][:, 1 - rank] == 0).all()
            out, _, _ = buffer.low_latency_combine(recv.nan_to_num(), picks, weights, handle)
            share = torch.where(mine if masked else picks >= 0, weights, 0.0).sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), x.float() * share, rtol=0.01, atol=0.01)
            buffer.low_latency_clean_mask_buffer()
        with pytest.raises(HostAssertion, match="int32"):
            buffer.low_latency_query_mask_buffer(torch.zeros(2))
        with pytest.raises(HostAssertion, match="rank 2"):
            buffer.low_latency_update_mask_buffer(2, True)
        return 1

    assert gloo_threads(2, body) == [1, 1]
