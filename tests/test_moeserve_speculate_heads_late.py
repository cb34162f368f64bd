"""Heads that draft before the host knows what a step chose draft what they draft behind it; an
engine with them; how often a device is waited for."""

from __future__ import annotations

import random
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
from moeserve.sampler import Sampled
from moeserve.sequence import SamplingNeeds, Sequence
from moeserve.sequence import _needs as needs_of
from moeserve.speculate import eagle_drafter, medusa
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.eagle import EagleHead, EagleLayer
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.late import ChosenHere, Late, judge
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead
from moeserve.speculate.speculator import Speculator
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Rule, Verdict, verify

# -- late verdicts --------------------------------------------------------------------------------


def choices(trees: list[DraftTree], rng: random.Random, fails: float = 0.0) -> Sampled:
    """Of all their rows: often a child's token, else any; some rows have none."""
    tokens: list[int] = []
    failed: dict[int, str] = {}
    for tree in trees:
        for children in tree.children:
            if rng.random() < fails:
                failed[len(tokens)] = "none"
            wanted = [tree.tokens[node] for node in children]
            tokens.append(rng.choice(wanted if wanted and rng.random() < 0.8 else range(V)))
    return Sampled(tokens, {}, failed)


def judged(trees: list[DraftTree], chosen: Sampled) -> tuple[Late, list[Verdict]]:
    """There, and as the host does."""
    members = [sequence(i) for i in range(len(trees))]
    choice = ChosenHere(chosen)
    want = verify(
        torch.zeros(len(chosen.token_ids), V), members, trees, sample=lambda *_: chosen
    )  # fmt: skip
    return judge(choice.tokens, choice.failed, trees), want


def any_tree(rng: random.Random, most: int, vocab: int) -> DraftTree:
    """Of few tokens, so that a token stands under many nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randrange(most + 1)):
        parent, token = rng.randrange(-1, len(tokens)), rng.randrange(vocab)
        taken = [t for t, above in zip(tokens, parents, strict=True) if above == parent]
        if token not in taken:
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


def test_trees_are_judged_as_the_host_does() -> None:
    seen = set()
    for seed in range(300):
        rng = random.Random(seed)
        most = rng.choice((1, 3, 9, 20))
        trees = [any_tree(rng, most, rng.choice((2, 4, V))) for _ in range(rng.randrange(6))]
        if seed % 10 == 0:
            trees = [chain(tree.tokens) for tree in trees]
        chosen = choices(trees, rng, fails=(seed % 3) * 0.1)
        late, verdicts = judged(trees, chosen)
        assert late.accepted.tolist() == [verdict.num_accepted for verdict in verdicts]
        starts = list(accumulate((tree.num_rows for tree in trees), initial=0))
        branches = not all(tree.is_chain for tree in trees)
        assert (late.walked is not None) is branches
        hidden = torch.arange(starts[-1] + 3.0)[:, None]  # behind three rows of others
        rows = late.along(hidden, [3 + x for x in starts[:-1]]) if branches else hidden[3:]
        assert len(rows) == len(late.tokens)
        for j, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            first, num = late.firsts[j], verdict.num_accepted
            assert late.drafts[j] == (tree.depth if branches else tree.num_nodes)
            path = [0, *(node + 1 for node in verdict.nodes)]
            behind = [path[-1]] * (tree.depth - num) if branches else range(num + 1, tree.num_rows)
            mine = rows[first : first + late.drafts[j] + 1, 0]
            assert mine.tolist() == [3 + starts[j] + row for row in (*path, *behind)]
            tokens = late.tokens[first : first + len(verdict.tokens)].tolist()
            assert tuple(tokens) == verdict.tokens
            seen.add((num, verdict.failed is None, branches))
    assert {(n, fine, True) for n in range(4) for fine in (True, False)} <= seen
    assert {(5, True, True), (2, True, False), (0, False, False)} <= seen


def step_of(
    drafts: dict[str, DraftTree], members: list[Sequence], most: list[int], seed: int
) -> tuple[list[DraftAsk], Late, list[tuple[Verdict, Tensor] | None]]:
    """What a step computes, asks before the host knows what it chose; what the host knows then:
    verdicts, and rows of tokens that stay. A prompt comes in two chunks."""
    generator = torch.Generator().manual_seed(seed)
    trees = [drafts.get(one.request_id, DraftTree()) for one in members]
    starts: list[int] = []
    computed: list[Tensor] = []
    goes_on: list[int] = []
    for i, (one, tree) in enumerate(zip(members, trees, strict=True)):
        known = one.num_tokens - 1
        first = known if one.request_id in drafts else 2 * (seed > 0)
        last = known + 1 if seed or i != 1 else 2  # the first step has no more of it
        starts.append(first)
        computed.append(torch.randn(last + tree.num_nodes - first, D, generator=generator))
        if last > known:
            goes_on.append(i)
    of_step = [trees[i] for i in goes_on]
    late, verdicts = judged(of_step, choices(of_step, random.Random(seed)))
    before: list[DraftAsk] = []
    found: list[tuple[Verdict, Tensor] | None] = []
    for i, one in enumerate(members):
        number = goes_on.index(i) if i in goes_on else None
        hidden, rows = computed[i], trees[i].num_rows
        found.append(None)
        if number is not None:
            found[-1] = verdicts[number], _rows(hidden, rows, verdicts[number].rows)
            if late.walked is not None and trees[i].num_nodes:
                end = late.firsts[number] + late.drafts[number] + 1
                hidden = _rows(hidden, rows, late.walked[late.firsts[number] : end].tolist())
        before.append(DraftAsk(one, 0 if number is None else most[i], starts[i], hidden, number))
    return before, late, found


def _rows(hidden: Tensor, num: int, wanted: Seq[int]) -> Tensor:
    """Of the last num rows the wanted ones, behind all others."""
    return torch.cat([hidden[:-num], hidden[-num:][list(wanted)]])


HEADS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "medusa": (lambda **kw: medusas(3, **kw), {}, 1),
    "eagle": (eagles, {"max_depth": 4}, 1),
    "medusa trees": (lambda **kw: medusas(3, **kw), {"max_nodes": 20, "width": 4}, 5),
    "eagle trees": (eagles, {"max_depth": 4, "max_nodes": 20, "width": 3}, 5),
}


@pytest.mark.parametrize("kind", HEADS)
def test_with_late_verdicts_they_are_the_same(kind: str) -> None:
    """more: times as many drafts."""
    made, settings, more = HEADS[kind]
    host, there = made(**settings)
    kinds = (GREEDY, RANDOM, {"temperature": 1.4, "seed": 3})
    ours, theirs = ([sequence(i, 4 + i, **kinds[i % 3]) for i in range(6)] for _ in range(2))
    drafts: dict[str, DraftTree] = {}
    accepted_so_far: set[int] = set()
    branched = 0
    for seed in range(12):
        most = [more * MOST[(seed + i) % len(MOST)] for i in range(6)]
        before, late, found = step_of(drafts, theirs, most, seed)
        branched += late.walked is not None
        assert there.drafts_late(theirs)
        asked = there.ask_late(before, 4, late)
        accepted = late.accepted.tolist()
        accepted_so_far |= set(accepted)
        after = []
        for one, other, ask, known in zip(ours, theirs, before, found, strict=True):
            rows = ask.hidden
            if known is not None:
                verdict, rows = known
                for token in verdict.tokens:
                    one.append(token)
                    other.append(token)
                host.settle(one, verdict.num_accepted, 0)
            after.append(DraftAsk(one, ask.most, ask.first, rows))
        want = host.propose(after, 4)
        assert asked.told(asked.tensors, accepted) == want
        drafts = {
            one.request_id: tree
            for one, tree, known in zip(ours, want, found, strict=True)
            if known is not None
        }
    assert accepted_so_far == {0, 1, 2, 3, 4} and (branched > 6) is (more > 1)
    if isinstance(host, EagleDrafter):
        for name, mine in there._known.items():
            held = host._known[name]
            assert (mine.start, mine.end) == (held.start, held.end)
            torch.testing.assert_close(mine.past, held.past)


def test_what_is_not_drafted_late() -> None:
    """On CPUs; what wants the host, which trees do not."""
    edited = sequence(1, repetition_penalty=1.3)
    for host, there in (medusas(1), eagles()):
        assert not host.drafts_late([sequence(0)]) and there.drafts_late([sequence(0)])
        assert there.drafts_late([]) and not there.drafts_late([sequence(0), edited])
    for host, there in (medusas(1, max_nodes=9), eagles(max_nodes=9)):
        assert not host.drafts_late([sequence(0)])
        assert there.drafts_late([sequence(0), edited])


# -- an engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("v3", num_hidden_layers=2, vocab_size=64)
    made = tmp_path_factory.mktemp("v3")
    for kind in ("medusa", "eagle"):
        write_heads(made / kind, kind, config["hidden_size"], 64)
    return write_random_checkpoint(made, config, tokenizer=False)


def served(
    folder: Path, kind: str | None, nodes: int | None = None, there: bool = False
) -> tuple[Any, Any, int]:
    """What each request is told, what was drafted after each sequence, how many steps were late.
    kind None: without drafts."""
    speculate = {} if kind is None else {"method": f"{kind}:{folder / kind}:3", "nodes": nodes}
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder, "kernels": "torch"},
            "cache": {"kv_tokens": 224},
            "schedule": {"max_model_len": 96, "max_num_sequences": 5, "token_budget": 40},
            "speculate": speculate,
            "engine": {"quiet": True},
        },
    )
    engine = build_engine(config, EPGroup.single())
    speculator: Any = engine.speculator
    told: dict[str, Any] = {}
    drafted: dict[tuple[str, int], Any] = {}
    num_late = 0

    def taken(*args: Any) -> None:
        nonlocal num_late
        num_late += 1
        Speculator.take_late(speculator, *args)

    if speculator is not None:
        speculator.drafter._picker.pick = pick_there if there else None
        speculator.take_late = taken
    asked = requests(64, 12, 96, 12)  # at last one that wants the host
    asked.sort(key=lambda r: bool(needs_of(r.sampling) & SamplingNeeds.EDITED))
    for request in asked[:10]:
        engine.add_request(request)
    for _ in range(300):
        for output in engine.step():
            tokens, logprobs, _ = told.get(output.request_id, ((), (), None))
            tokens, logprobs = tokens + output.token_ids, logprobs + output.logprobs
            told[output.request_id] = tokens, logprobs, output.finish_reason
        assert engine.failure is None and (speculator is None or speculator.failure is None)
        for one in engine.scheduler.running:
            if one.drafts is not None:
                drafted[one.request_id, one.num_tokens] = one.drafts
        if not engine.has_work:
            return told, drafted, num_late
    raise AssertionError("there is still work")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return served(folder, None)[0]


@pytest.mark.parametrize("nodes", [None, 8])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_an_engine_drafts_the_same(folder: Path, plain: Any, kind: str, nodes: int | None) -> None:
    """Requests of every kind, chunks, preemption, tokens that end an output amid its drafts. Before
    the host knows what was accepted it may give a sequence more or fewer drafts."""
    want, host, _ = served(folder, kind, nodes, False)
    got, there, num_late = served(folder, kind, nodes, True)
    assert got == want == plain and len(want) == 10
    assert num_late > 4
    branched = 0
    for at in there.keys() & host.keys():
        (fewer, more) = sorted((there[at], host[at]), key=lambda tree: tree.num_nodes)
        wanted = set(fewer.paths[1:])
        nodes_of = [i for i, path in enumerate(more.paths[1:]) if path in wanted]
        assert more.keep(nodes_of) == fewer
        branched += not fewer.is_chain
    assert len(there.keys() & host.keys()) > 15
    assert (branched > 10) is (nodes is not None)


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
        judged_there = [chain(range(i % 3)) for i in range(len(MOST))]
        if nodes:
            judged_there[2] = DraftTree((0, 1, 1), (-1, 0, -1))
        *roots, rows = accumulate((tree.num_rows for tree in judged_there), initial=0)
        zeros = torch.zeros(rows, WIDE, device=CUDA)
        late = judge(zeros[:, 0].long(), zeros[:, 0] > 0, judged_there)
        assert (late.walked is None) is (nodes is None)
        parts = (zeros if nodes is None else late.along(zeros, roots)).split(
            [num + 1 for num in late.drafts]
        )
        members = [
            DraftAsk(sequence(i, 9 - num, **kinds[i % len(kinds)]), MOST[i], 8 - num, parts[i], i)
            for i, num in enumerate(late.drafts)
        ]
        asked = drafter.ask_late(members, 4, late)
        assert fake.waits == []
        there = asked.told([_counted(x.shape, x.dtype) for x in asked.tensors], late.drafts)
        assert [tree.num_nodes > 0 for tree in there] == [most > 0 for most in MOST]


def _counted(shape: Seq[int], dtype: torch.dtype) -> Tensor:
    """As of a tree whose nodes are the root's children: numbers, tokens, parents; or tokens of one
    row after another; chances; rows without a token: none."""
    if dtype != torch.int64:
        return torch.full(shape, 0.0 if dtype == torch.bool else 0.1, dtype=dtype)
    made = torch.arange(shape[-1]).expand(shape).clone()
    if len(shape) == 3:
        made[2] = -1
    return made
