"""Normal mode among several nodes: the adapter on the emulation, ranks as threads of a board."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dispatch.base import CombineForm, DispatchConfig, DispatchError, WireFormat
from dispatch.deepep_normal import EmulatedNormalDispatcher
from dispatch.deepep_plan import row_bytes
from dispatch.emulation import Buffer, HostAssertion
from dispatch.emulation.nodes import nodes_of
from dispatch.emulation.normal import layout
from dispatch.selfcheck import CheckCase, differences, expected, make_case, random_placement
from dispatch.thread_group import ThreadBoard

CONFIG = DispatchConfig(256, 4, 8, 8, torch.bfloat16, deterministic=False)


class NodesOfTwo(EmulatedNormalDispatcher):
    @classmethod
    def library(cls) -> Any:
        return nodes_of(2)


KINDS = [(EmulatedNormalDispatcher, 16, 8), (NodesOfTwo, 4, 2), (NodesOfTwo, 8, 2)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases_of(size: int, wire: WireFormat) -> tuple[DispatchConfig, list[CheckCase]]:
    """Idle ranks, masked picks, everything to one rank, nothing at all."""
    placement = random_placement(2 * size, size, 1, 0)
    config = replace(CONFIG, num_physical_experts=placement.num_physical_experts, wire=wire)
    some = [(5 * rank) % 8 for rank in range(size)]
    return config, [
        make_case(config, placement, some, 0, masked=0.3),
        make_case(config, placement, [8] * size, 1),
        make_case(config, placement, some, 2, to_rank=size - 1),
        make_case(config, placement, [0] * size, 3),
        make_case(config, placement, [2] * size, 4, masked=1.1),
    ]


@pytest.mark.parametrize("wire", list(WireFormat))
@pytest.mark.parametrize(("kind", "size", "node"), KINDS)
def test_rows_arrive_as_the_twin_says_and_come_home(
    kind: type[EmulatedNormalDispatcher], size: int, node: int, wire: WireFormat
) -> None:
    config, cases = cases_of(size, wire)
    wanted = [expected(case, CombineForm.SUMMED, wire) for case in cases]
    board, found = ThreadBoard(size), []

    def body(rank: int) -> None:
        d = kind(board.group(rank, node), config)
        for number, (case, want) in enumerate(zip(cases, wanted, strict=True)):
            home = want[1][rank]
            # Shares of ranks and of nodes are rounded, and what they sum to.
            near = 3 * 2**-8 * (float(home.abs().max()) if home.numel() else 0.0)
            wrong = differences(d, case, rank, near, want)
            found.extend(f"case {number}, rank {rank}: {what}" for what in wrong)
        d.close()

    board.run(body)
    assert found == []


@pytest.mark.parametrize("wire", [WireFormat.MODEL, WireFormat.FP8])
@pytest.mark.parametrize(("kind", "size", "node"), KINDS[:2])
def test_a_row_crosses_once_to_each_node(
    kind: type[EmulatedNormalDispatcher], size: int, node: int, wire: WireFormat
) -> None:
    config, cases = cases_of(size, wire)
    case, board = cases[1], ThreadBoard(size)
    stats: list[Any] = [None] * size

    def body(rank: int) -> None:
        d = kind(board.group(rank, node), config)
        handle = d.dispatch_start(case.rows(rank, wire), case.slots[rank], case.weights[rank])
        d.dispatch_finish(handle)
        stats[rank] = d.stats

    board.run(body)
    local = config.num_physical_experts // size
    for rank, slots in enumerate(case.slots):
        ranks = [{s // local for s in picks if s >= 0} for picks in slots.tolist()]
        nodes = [{r // node for r in picks} for picks in ranks]
        here = rank // node
        per_rank = [sum(r in picks for picks in ranks) for r in range(size)]
        per_node = [sum(n in picks for picks in nodes) for n in range(size // node)]
        assert stats[rank].rows_sent_to_rank == per_rank
        assert stats[rank].rows_sent_to_node == per_node
        beside = sum(per_rank[here * node : (here + 1) * node]) - per_rank[rank]
        rows = beside + sum(per_node) - per_node[here]
        # Fewer than once to each rank: that is what nodes are for.
        assert rows < sum(per_rank) - per_rank[rank]
        assert stats[rank].dispatch_bytes == rows * (row_bytes(config) + 12 * config.top_k)


def test_two_layers_in_flight_come_home_in_any_order() -> None:
    config, cases = cases_of(4, WireFormat.MODEL)
    pair = [cases[0], cases[1]]
    board, found = ThreadBoard(4), []

    def body(rank: int) -> None:
        d = NodesOfTwo(board.group(rank, 2), config)
        handles = [d.dispatch_start(c.xs[rank], c.slots[rank], c.weights[rank]) for c in pair]
        got = [d.dispatch_finish(handle) for handle in reversed(handles)][::-1]
        for handle, received in zip(handles, got, strict=True):
            shares = received.weights.sum(1, keepdim=True)
            d.combine_start(handle, (received.x.float() * shares).to(torch.bfloat16))
        homes = [d.combine_finish(handle) for handle in reversed(handles)][::-1]
        for case, home in zip(pair, homes, strict=True):
            share = torch.where(case.slots[rank] >= 0, case.weights[rank], 0.0).sum(1, keepdim=True)
            want = case.xs[rank].float() * share
            if not torch.allclose(home, want, rtol=0.02, atol=0.02):
                found.append(rank)

    board.run(body)
    assert found == []


def test_the_library_s_own_calls_between_nodes() -> None:
    """The handle's shapes, a call by handle, weights and biases home, and what is refused."""
    config, cases = cases_of(4, WireFormat.MODEL)
    case, library, board = cases[0], nodes_of(2), ThreadBoard(4)
    experts, queues = config.num_physical_experts, library.Buffer.get_dispatch_config(4)

    def body(rank: int) -> None:
        group = board.group(rank, 2).cpu_group
        buffer = library.Buffer(
            group,
            queues.get_nvl_buffer_size_hint(512, 4),
            queues.get_rdma_buffer_size_hint(512, 4),
        )
        x, picks, weights = case.xs[rank], case.slots[rank].long(), case.weights[rank]
        ranks, nodes, each, in_rank, _ = buffer.get_dispatch_layout(picks, experts)
        assert nodes is not None and nodes.dtype == torch.int32
        assert nodes.tolist() == in_rank.view(-1, 2, 2).any(2).sum(0).tolist()
        shape = {
            "num_tokens_per_rank": ranks,
            "num_tokens_per_rdma_rank": nodes,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": each,
        }
        full = {"topk_idx": picks, "topk_weights": weights, **shape}
        with pytest.raises(AssertionError, match="num_worst_tokens"):
            buffer.dispatch(x, num_worst_tokens=64, **full)
        with pytest.raises(AssertionError, match="layout must be given"):
            buffer.dispatch(x, **{**full, "num_tokens_per_rdma_rank": None})
        with pytest.raises(HostAssertion, match="num_tokens_per_rdma_rank is int32"):
            buffer.dispatch(x, **{**full, "num_tokens_per_rdma_rank": nodes + 1})
        recv, idx, w, counts, handle, _ = buffer.dispatch(x, expert_alignment=4, **full)
        assert counts is not None and all(n % 4 == 0 for n in counts)
        rows, channels = recv.shape[0], queues.num_sms // 2
        shapes = [tuple(t.shape) for t in handle]
        assert shapes[:7] == [
            (x.shape[0], 4), (2, channels), (4, channels), (2, channels), (2,), (4, channels), (4,)
        ]  # fmt: skip
        passed = int(handle[4][-1])
        assert shapes[7:] == [(rows, 8), (x.shape[0], 2), (passed, 2)]
        assert int(handle[6][-1]) == rows and handle[5][:, -1].sum() == rows
        again, *rest, event = buffer.dispatch(x, handle=handle, async_finish=True)
        assert rest == [None] * 4 and again.isnan().all()
        event.current_stream_wait()
        assert torch.equal(again, recv)

        bias = torch.ones_like(x)
        out, back, _ = buffer.combine(recv, handle, topk_weights=w, bias=(bias, bias))
        share = in_rank.sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), x.float() * share + 2, rtol=0.02, atol=0.02)
        torch.testing.assert_close(back, torch.where(picks >= 0, weights, 0.0))
        with pytest.raises(HostAssertion, match="D \\* 2 / 16 divides by 32"):
            buffer.combine(recv[:, :128].contiguous(), handle)

    board.run(body)


def test_what_nodes_ask_of_a_group() -> None:
    board = ThreadBoard(16)
    config = replace(CONFIG, num_physical_experts=32)
    group = board.group(0, 8)
    plan = EmulatedNormalDispatcher.plan(group, config)
    queues = Buffer.get_dispatch_config(16)
    assert plan.held > queues.get_nvl_buffer_size_hint(512, 16) > 0
    assert queues.get_rdma_buffer_size_hint(512, 16) > 0
    with pytest.raises(DispatchError, match="4 ranks a node: must be 8"):
        EmulatedNormalDispatcher(board.group(0, 4), config)
    with pytest.raises(DispatchError, match="must be a multiple of 256; nearest is 256"):
        EmulatedNormalDispatcher(group, replace(config, hidden_size=128, wire=WireFormat.FP8))
    with pytest.raises(HostAssertion, match="are on several nodes"):
        Buffer(ThreadBoard(1).group(0).cpu_group or _Solo()).internode_dispatch(torch.zeros(1, 8))


class _Solo:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_layout_counts_a_token_once_a_node() -> None:
    picks = torch.tensor([[0, 1, 2], [7, -1, 6], [-1, -1, -1]])
    ranks, nodes, each, in_rank = layout(picks, 8, num_ranks=4, node=2)
    assert nodes is not None
    assert (ranks.tolist(), nodes.tolist()) == ([1, 1, 0, 1], [1, 1])
    assert each.tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    assert in_rank.tolist() == [[True, True, False, False], [False] * 3 + [True], [False] * 4]
