"""Heads that draft before the host knows what a step chose draft what they draft behind it; an
engine with them; how often a device is waited for."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA
from heads_world import GREEDY, KINDS, MOST, RANDOM, D, V, eagles, medusas, sequence
from speculate_world import pick_there, requests, write_heads
from torch import Tensor
from walked_model import walking

from ep.group import EPGroup
from models import crossing
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.sequence import SamplingNeeds, Sequence
from moeserve.sequence import _needs as needs_of
from moeserve.speculate import eagle_drafter, medusa
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.eagle import EagleHead, EagleLayer
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.late import Late, judge
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Rule

# -- late verdicts --------------------------------------------------------------------------------


def step_of(
    drafts: dict[str, DraftTree], members: list[Sequence], most: list[int], seed: int
) -> tuple[list[DraftAsk], Late, list[list[int]]]:
    """What a step computes, asks before the host knows what it chose; verdicts; accepted drafts
    and what was chosen behind them. A prompt comes in two chunks."""
    generator = torch.Generator().manual_seed(seed)
    before: list[DraftAsk] = []
    tokens: list[int] = []
    trees: list[DraftTree] = []
    ends: list[list[int]] = []
    for i, one in enumerate(members):
        tree = drafts.get(one.request_id, DraftTree())
        known = one.num_tokens - 1
        first = known if one.request_id in drafts else 2 * (seed > 0)
        last = known + 1 if seed or i != 1 else 2  # the first step has no more of it
        hidden = torch.randn(last + tree.num_nodes - first, D, generator=generator)
        if last <= known:
            before.append(DraftAsk(one, 0, first, hidden))
            ends.append([])
            continue
        before.append(DraftAsk(one, most[i], first, hidden, len(trees)))
        right = (seed + i) % (tree.num_nodes + 1)
        chosen = [*tree.tokens[:right], *((t + 1) % V for t in (*tree.tokens[right:], i))]
        tokens += chosen
        trees.append(tree)
        ends.append(chosen[: right + 1])
    verdicts = judge(torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.bool), trees)
    return before, verdicts, ends


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_with_late_verdicts_they_are_the_same(kind: str) -> None:
    drafters = medusas(3) if kind == "medusa" else eagles(max_depth=4)
    kinds = (GREEDY, RANDOM, {"temperature": 1.4, "seed": 3})
    ours, theirs = ([sequence(i, 4 + i, **kinds[i % 3]) for i in range(6)] for _ in range(2))
    host, there = drafters
    drafts: dict[str, DraftTree] = {}
    accepted_so_far: set[int] = set()
    for seed in range(12):
        most = [MOST[(seed + i) % len(MOST)] for i in range(6)]
        before, verdicts, ends = step_of(drafts, theirs, most, seed)
        assert there.drafts_late(theirs)
        asked = there.ask_late(before, 4, verdicts)
        accepted = verdicts.accepted.tolist()
        accepted_so_far |= set(accepted)
        after = []
        for one, other, ask, chosen in zip(ours, theirs, before, ends, strict=True):
            assert ask.hidden is not None
            for token in chosen:
                one.append(token)
                other.append(token)
            rows = ask.hidden
            if ask.late is not None:
                assert len(chosen) == accepted[ask.late] + 1
                rows = rows[: len(rows) - verdicts.drafts[ask.late] + accepted[ask.late]]
                host.settle(one, accepted[ask.late], 0)
            after.append(DraftAsk(one, ask.most, ask.first, rows))
        want = host.propose(after, 4)
        assert asked.told(asked.tensors, accepted) == want
        drafts = {
            one.request_id: tree
            for one, tree, ask in zip(ours, want, before, strict=True)
            if ask.late is not None
        }
    assert accepted_so_far == {0, 1, 2, 3, 4}
    if isinstance(host, EagleDrafter) and isinstance(there, EagleDrafter):
        for name, known in host._known.items():
            mine = there._known[name]
            assert (mine.start, mine.end) == (known.start, known.end)
            torch.testing.assert_close(mine.past, known.past)


def test_what_is_not_drafted_late() -> None:
    """On CPUs, trees, what wants the host."""
    edited = sequence(1, repetition_penalty=1.3)
    for host, there in (medusas(1), eagles()):
        assert not host.drafts_late([sequence(0)]) and there.drafts_late([sequence(0)])
        assert there.drafts_late([]) and not there.drafts_late([sequence(0), edited])
    for _, there in (medusas(1, max_nodes=9), eagles(max_nodes=9)):
        assert not there.drafts_late([sequence(0)])


# -- an engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("v3", num_hidden_layers=2, vocab_size=64)
    made = tmp_path_factory.mktemp("v3")
    for kind in ("medusa", "eagle"):
        write_heads(made / kind, kind, config["hidden_size"], 64)
    return write_random_checkpoint(made, config, tokenizer=False)


def served(folder: Path, kind: str, nodes: int | None, there: bool) -> tuple[Any, Any, int]:
    """What each request is told, what was drafted after each sequence, how many steps were late."""
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder, "kernels": "torch"},
            "cache": {"kv_tokens": 224},
            "schedule": {"max_model_len": 96, "max_num_sequences": 5, "token_budget": 40},
            "speculate": {"method": f"{kind}:{folder / kind}:3", "nodes": nodes},
            "engine": {"quiet": True},
        },
    )
    engine = build_engine(config, EPGroup.single())
    speculator = engine.speculator
    assert speculator is not None
    drafter: Any = speculator.drafter
    drafter._picker.pick = pick_there if there else None
    told: dict[str, Any] = {}
    drafted: dict[tuple[str, int], Any] = {}
    num_late, take = 0, speculator.take_late

    def taken(*args: Any) -> None:
        nonlocal num_late
        num_late += 1
        take(*args)

    speculator.take_late = taken  # type: ignore[method-assign]
    asked = requests(64, 12, 96, 12)  # at last one that wants the host
    asked.sort(key=lambda r: bool(needs_of(r.sampling) & SamplingNeeds.EDITED))
    for request in asked[:10]:
        engine.add_request(request)
    for _ in range(300):
        for output in engine.step():
            tokens, logprobs, _ = told.get(output.request_id, ((), (), None))
            tokens, logprobs = tokens + output.token_ids, logprobs + output.logprobs
            told[output.request_id] = tokens, logprobs, output.finish_reason
        assert engine.failure is None and speculator.failure is None
        for one in engine.scheduler.running:
            if one.drafts is not None:
                drafted[one.request_id, one.num_tokens] = one.drafts.tokens, one.drafts.parents
        if not engine.has_work:
            return told, drafted, num_late
    raise AssertionError("there is still work")


@pytest.mark.parametrize("nodes", [None, 8])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_an_engine_drafts_the_same(folder: Path, kind: str, nodes: int | None) -> None:
    """Requests of every kind, chunks, preemption, tokens that end an output amid its drafts. Before
    the host knows what was accepted it may give a sequence more or fewer drafts."""
    want, host, _ = served(folder, kind, nodes, False)
    got, there, num_late = served(folder, kind, nodes, True)
    assert got == want and len(want) == 10
    assert num_late > 4 if nodes is None else not num_late
    if nodes is not None:
        assert there == host
    for at in there.keys() & host.keys():
        (mine, _), (theirs, _) = there[at], host[at]
        least = min(len(mine), len(theirs))
        assert mine[:least] == theirs[:least]
    assert len(there.keys() & host.keys()) > 15


# -- waits ----------------------------------------------------------------------------------------

WIDE = 128


def cuda_drafter(kind: str, nodes: int | None, rule: Rule) -> Any:
    """Weights are on the CPU until the drafter is made."""
    if kind == "medusa":
        blocks = ((torch.zeros(WIDE, WIDE), torch.zeros(WIDE)),)
        heads = [MedusaHead(blocks, torch.zeros(2 * WIDE, WIDE)) for _ in range(4)]
        return MedusaDrafter(heads, nodes, rule, device=CUDA)
    layer = EagleLayer(
        None, *(torch.zeros(WIDE, WIDE) for _ in range(4)), torch.zeros(WIDE),
        *(torch.zeros(WIDE, WIDE) for _ in range(3)),
    )  # fmt: skip
    head = EagleHead(torch.zeros(WIDE, 2 * WIDE), None, None, (layer,), 2, 64, 1e4, 1e-5)
    embed, out = (torch.zeros(2 * WIDE, WIDE, device=CUDA) for _ in range(2))
    return EagleDrafter(
        head, embed, lambda x: torch.nn.functional.linear(x, out), 4, nodes, rule=rule
    )


@pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("nodes", [None, 12])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_device_is_waited_for_once(
    kind: str, nodes: int | None, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = KINDS if rule is Rule.SAME or nodes else (GREEDY,)
    home: Any = medusa if kind == "medusa" else eagle_drafter

    def told(parts: Any) -> Any:
        """Instead of zeros, which no tree may have as siblings."""
        crossing.brought(parts)
        return [_counted(x.shape, x.dtype) for x in parts]

    with walking() as fake:
        drafter = cuda_drafter(kind, nodes, rule)
        if nodes:
            monkeypatch.setattr(home, "brought", told)
        for first in (0, 4):
            members = [
                DraftAsk(
                    sequence(i, 5 + first, **kinds[i % len(kinds)]), most, first,
                    torch.zeros(4, WIDE, device=CUDA),
                )
                for i, most in enumerate(MOST)
            ]  # fmt: skip
            fake.waits.clear()
            trees = drafter.propose(members, 4)
            assert [wait.partition(":")[0] for wait in fake.waits] == ["cpu crossing.py"]
            most = nodes or 4
            assert [tree.num_nodes for tree in trees] == [min(ask.most, most) for ask in members]
            for ask in members:
                drafter.settle(ask.sequence, 0, 0)
        fake.waits.clear()
        idle = [replace(ask, most=0) for ask in members]
        assert all(tree.num_nodes == 0 for tree in drafter.propose(idle, 4))
        assert fake.waits == []
        if nodes is None:
            drafts = [i % 3 for i in range(len(MOST))]
            members = [
                DraftAsk(
                    sequence(i, 9 - num, **kinds[i % len(kinds)]), most, 8 - num,
                    torch.zeros(1 + num, WIDE, device=CUDA), i,
                )
                for i, (most, num) in enumerate(zip(MOST, drafts, strict=True))
            ]  # fmt: skip
            rows = torch.zeros(len(MOST) + sum(drafts), dtype=torch.int64, device=CUDA)
            firsts = [0, *accumulate(1 + num for num in drafts)]
            drafter.ask_late(members, 4, Late(rows, rows[: len(MOST)], firsts[:-1], drafts))
            assert fake.waits == []


def _counted(shape: Seq[int], dtype: torch.dtype) -> Tensor:
    """As of a tree whose nodes are the root's children: numbers, tokens, parents; or tokens of one
    row after another."""
    if dtype != torch.int64:
        return torch.full(shape, 0.1, dtype=dtype)
    made = torch.arange(shape[-1]).expand(shape).clone()
    if len(shape) == 3:
        made[2] = -1
    return made
