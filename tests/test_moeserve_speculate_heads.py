"""Medusa and EAGLE heads on random weights: fp32 twins, published names, what drafters remember."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moeserve.continuation import Continuation
from moeserve.errors import ConfigError
from moeserve.request import Request, SamplingParams
from moeserve.sampler import sample
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk, Drafter
from moeserve.speculate.eagle import EagleHead, eagle_forward, eagle_slowly, load_eagle, read_eagle
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.head_file import HeadFile
from moeserve.speculate.medusa import (
    MedusaDrafter,
    load_medusa,
    medusa_logits,
    medusa_logits_slowly,
    read_medusa,
)
from moeserve.speculate.verify import Rule

D, V, F, DIM = 16, 30, 20, 8
EAGLE_CONFIG = {
    "hidden_size": D,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


def sequence(num: int = 6, name: str = "a", **params: object) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 50, "temperature": 0.0} | params)  # type: ignore[arg-type]
    tokens = tuple((7 * i + len(name)) % V for i in range(num))
    return Sequence(Request(request_id=name, prompt_token_ids=tokens, sampling=sampling), 0, 100)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator) * 0.3


def medusa_tensors(heads: int = 3, layers: int = 1) -> dict[str, Tensor]:
    tensors = {}
    for i in range(heads):
        for n in range(layers):
            tensors[f"medusa_head.{i}.{n}.linear.weight"] = random(D, D, seed=i * 9 + n)
            tensors[f"medusa_head.{i}.{n}.linear.bias"] = random(D, seed=i * 9 + n)
        tensors[f"medusa_head.{i}.{layers}.weight"] = random(V, D, seed=i) * 3
    return tensors


def eagle_tensors(embed: bool = True, bias: bool = True) -> dict[str, Tensor]:
    tensors = {"fc.weight": random(D, 2 * D)}
    if embed:
        tensors["embed_tokens.weight"] = random(V, D, seed=4)
    if bias:
        tensors["fc.bias"] = random(D)
    for i in range(2):
        at = f"layers.{i}"
        if i:
            tensors[f"{at}.input_layernorm.weight"] = 1 + random(D)
        for name, rows in (("q", 4), ("k", 2), ("v", 2)):
            weight = random(rows * DIM, D, seed=i + ord(name))
            tensors[f"{at}.self_attn.{name}_proj.weight"] = weight
        tensors[f"{at}.self_attn.o_proj.weight"] = random(D, 4 * DIM, seed=i)
        tensors[f"{at}.post_attention_layernorm.weight"] = 1 + random(D, seed=i)
        tensors[f"{at}.mlp.gate_proj.weight"] = random(F, D, seed=i)
        tensors[f"{at}.mlp.up_proj.weight"] = random(F, D, seed=i + 5)
        tensors[f"{at}.mlp.down_proj.weight"] = random(D, F, seed=i)
    return tensors


def eagle(**changes: bool) -> EagleHead:
    return load_eagle(HeadFile(eagle_tensors(**changes), EAGLE_CONFIG), D, V)


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: x.contiguous() for k, x in tensors.items()}, folder / "model.safetensors")
    return folder


# -- Medusa ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_is_its_twin(layers: int) -> None:
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers}
    heads = load_medusa(HeadFile(medusa_tensors(3, layers), config, "x", ("medusa_head.",)), D, V)
    hidden = random(5, D, seed=8)
    got = medusa_logits(heads, hidden)
    assert got.shape == (3, 5, V)
    torch.testing.assert_close(got, medusa_logits_slowly(heads, hidden), rtol=1e-5, atol=1e-5)


def test_medusa_reads_published_names_from_either_container(tmp_path: Path) -> None:
    config: dict[str, object] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    named = read_medusa(write(tmp_path / "a", medusa_tensors(), config), D, V)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    bare = {k.removeprefix("medusa_head."): x for k, x in medusa_tensors().items()}
    torch.save(bare, tmp_path / "b" / "medusa_lm_head.pt")
    pickled = read_medusa(tmp_path / "b", D, V)
    assert torch.equal(named[2].out, pickled[2].out) and len(named) == 3


def test_medusa_heads_may_share_the_targets_projection() -> None:
    """As with a projection of their own that is the target's; a left-over one is refused."""
    shared, own = random(V, D, seed=6), medusa_tensors()
    own |= {f"medusa_head.{i}.1.weight": shared for i in range(3)}
    bare = {k: x for k, x in own.items() if "linear" in k}
    config: dict[str, object] = {"medusa_num_heads": 3, "original_lm_head": True}
    heads = load_medusa(HeadFile(bare, config, "x", ("medusa_head.",)), D, V)
    hidden = random(4, D, seed=3)
    got = medusa_logits(heads, hidden, lambda x: x @ shared.T)
    full = HeadFile(own, {"medusa_num_heads": 3}, "x", ("medusa_head.",))
    torch.testing.assert_close(got, medusa_logits_slowly(load_medusa(full, D, V), hidden))
    drafter = MedusaDrafter(heads, logits_of=lambda x: x @ shared.T)
    assert drafter.memory_bytes() == sum(x.nbytes for x in bare.values())
    asks = [DraftAsk(sequence(temperature=0.0), 3, 0, hidden)]
    assert drafter.propose(asks, 3)[0].tokens == tuple(got[:, -1].argmax(-1).tolist())
    with pytest.raises(ConfigError, match="is not known"):
        load_medusa(HeadFile(own, config, "x", ("medusa_head.",)), D, V)


def medusa_drafter(max_nodes: int | None = None, rule: Rule = Rule.SAME) -> MedusaDrafter:
    file = HeadFile(medusa_tensors(), {"medusa_num_heads": 3}, "x", ("medusa_head.",))
    return MedusaDrafter(load_medusa(file, D, V), max_nodes, rule)


def test_medusa_drafts_what_the_sampler_takes_of_its_heads() -> None:
    drafter: Drafter = medusa_drafter()
    hidden = random(4, D, seed=3)
    logits = medusa_logits_slowly(
        load_medusa(
            HeadFile(medusa_tensors(), {"medusa_num_heads": 3}, "x", ("medusa_head.",)), D, V
        ),
        hidden,
    )
    members = [
        sequence(name="a"),
        sequence(name="b", temperature=1.0, top_p=0.9, logprobs=2),
        sequence(name="c", repetition_penalty=1.8),
        sequence(name="d"),
    ]
    asks = [
        DraftAsk(one, most, 2, hidden[: i + 1])
        for i, (one, most) in enumerate(zip(members, (3, 3, 2, 0), strict=True))
    ]
    trees = drafter.propose(asks, 3)
    assert [t.num_nodes for t in trees] == [3, 3, 2, 0]
    for i in range(3):
        for d, token in enumerate(trees[i].tokens):
            row = Continuation(members[i], trees[i].tokens[:d])
            assert token == sample(logits[d, i][None].clone(), [row]).token_ids[0]
        assert not trees[i].probs
    assert [t.num_nodes for t in drafter.propose(asks, 1)] == [1, 1, 1, 0]
    assert drafter.propose([], 3) == [] and drafter.propose(asks, 0)[0].num_nodes == 0
    apart = medusa_drafter(rule=Rule.REJECTION).propose(asks, 3)
    assert sorted(apart[1].probs) == [0, 1, 2] and not apart[0].probs
    assert all(apart[1].probs[d][t] > 0 for d, t in enumerate(apart[1].tokens))
    assert drafter.memory_bytes() == sum(x.nbytes for x in medusa_tensors().values())


def test_medusa_trees_hold_the_likeliest_paths() -> None:
    drafter = medusa_drafter(max_nodes=12)
    hidden = random(1, D, seed=3)
    ask = DraftAsk(sequence(), 50, 5, hidden)
    tree = drafter.propose([ask], 3)[0]
    assert tree.num_nodes == 12 and tree.depth > 1
    best = medusa_logits(drafter._heads, hidden)[:, 0].argmax(-1).tolist()
    assert tree.paths[1] == (best[0],) and tuple(best[:2]) in tree.paths
    assert drafter.propose([DraftAsk(sequence(), 4, 5, hidden)], 1)[0].depth == 1
    assert drafter.propose([DraftAsk(sequence(), 4, 5, hidden)], 3)[0].num_nodes == 4


# -- EAGLE ----------------------------------------------------------------------------------------


def causal(m: int, past: int = 0) -> Tensor:
    return torch.arange(past + m) <= past + torch.arange(m)[:, None]


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_is_its_twin_in_any_chunks(bias: bool) -> None:
    head = eagle(bias=bias)
    embedded, hidden = random(7, D, seed=1), random(7, D, seed=2)
    wanted = eagle_slowly(head, embedded, hidden)
    whole, _ = eagle_forward(head, embedded, hidden, torch.arange(7), head.no_past(), causal(7))
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-5)
    past, parts = head.no_past(), []
    for start, end in ((0, 3), (3, 4), (4, 7)):
        out, past = eagle_forward(
            head,
            embedded[start:end],
            hidden[start:end],
            torch.arange(start, end),
            past,
            causal(end - start, start),
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-4, atol=1e-5)


def drafter_of(head: EagleHead, **settings: object) -> EagleDrafter:
    out = random(V, D, seed=11) * 4
    return EagleDrafter(head, random(V, D, seed=4), lambda x: x @ out.T, **settings)  # type: ignore[arg-type]


def by_hand(head: EagleHead, one: Sequence, hidden: Tensor, depth: int) -> list[int]:
    """Greedy drafts, everything computed anew for each."""
    out, embed = random(V, D, seed=11) * 4, random(V, D, seed=4)
    tokens, features = list(one.tokens), hidden
    drafts: list[int] = []
    for _ in range(depth):
        made = eagle_slowly(head, embed[tokens[1:]], features)
        drafts.append(int((made[-1] @ out.T).argmax()))
        tokens.append(drafts[-1])
        features = torch.cat([features, made[-1:]])
    return drafts


def test_eagle_drafts_as_computed_anew_whatever_was_drafted_before() -> None:
    """A prefill in two chunks, then steps in which 0 to 3 drafts are accepted."""
    head = eagle()
    drafter = drafter_of(head)
    assert isinstance(drafter.name, str)
    one, other = sequence(6), sequence(4, "other")
    hidden = random(40, D, seed=6)
    drafter.propose([DraftAsk(one, 0, 0, hidden[:2])], 3)
    done = 2
    for accepted in (0, 3, 1, 2, 0):
        computed = one.num_tokens - 1
        ask = DraftAsk(one, 3, done, hidden[done:computed])
        trees = drafter.propose([DraftAsk(other, 2, 0, hidden[:3]), ask], 3)
        assert list(trees[1].tokens) == by_hand(head, one, hidden[:computed], 3)
        assert list(trees[0].tokens) == by_hand(head, other, hidden[:3], 2)
        done = computed
        for token in [*trees[1].tokens[:accepted], 5]:
            one.append(token)
        drafter.settle(one, accepted, 3 - accepted)
    used = drafter.memory_bytes()
    drafter.forget(["a", "other", "unknown"])
    assert drafter.memory_bytes() == head.nbytes < used


def test_eagle_sequences_of_a_step_go_through_the_head_together() -> None:
    """Of unlike lengths and limits, one without features: each drafts what it drafts alone."""
    drafter = drafter_of(eagle())
    members = [sequence(n, name=f"s{n}") for n in (5, 9, 3, 7, 6)]
    features = [random(len(s.tokens) - 1, D, seed=i) for i, s in enumerate(members)]
    most = (3, 1, 4, 0, 2)
    asks = [DraftAsk(s, m, 0, f) for s, m, f in zip(members, most, features, strict=True)]
    asks.append(DraftAsk(sequence(4, name="no features"), 3))
    trees = drafter.propose(asks, 3)
    assert [tree.num_nodes for tree in trees] == [3, 1, 3, 0, 2, 0]
    for ask, tree in zip(asks[:5], trees, strict=False):
        assert ask.hidden is not None
        alone = by_hand(drafter._head, ask.sequence, ask.hidden, tree.num_nodes)
        assert list(tree.tokens) == alone


def test_eagle_goes_on_behind_a_gap_and_after_preemption() -> None:
    drafter = drafter_of(eagle())
    one = sequence(8)
    hidden = random(8, D, seed=6)
    late = drafter.propose([DraftAsk(one, 2, 5, hidden[5:7])], 2)[0]  # a prefix-cache hit
    assert late.num_nodes == 2
    again = drafter.propose([DraftAsk(one, 2, 0, hidden[:7])], 2)[0]  # computed again
    assert list(again.tokens) == by_hand(drafter._head, one, hidden[:7], 2)
    assert drafter.propose([DraftAsk(one, 2, 7, None)], 2)[0].num_nodes == 0


def test_eagle_trees_are_the_likeliest_paths_of_what_was_seen() -> None:
    head = eagle(embed=False)
    hidden = random(9, D, seed=6)
    one = sequence(6)
    wide = drafter_of(head, max_depth=3, max_nodes=9, width=3)
    tree = wide.propose([DraftAsk(one, 50, 0, hidden[:5])], 3)[0]
    assert tree.num_nodes == 9
    chain = by_hand(head, one, hidden[:5], 3)
    assert tree.paths[1] == (chain[0],)
    assert wide._known["a"].end == 5  # nothing of the tree is kept
    # Of the full tree each node's chance, computed anew.
    out, embed = random(V, D, seed=11) * 4, random(V, D, seed=4)
    full = drafter_of(head, max_depth=2, max_nodes=100, width=3)
    tree = full.propose([DraftAsk(one, 100, 0, hidden[:5])], 2)[0]
    assert tree.num_nodes == 3 + 9
    made = eagle_slowly(head, embed[one.tokens[1:]], hidden[:5])
    for token in (made[-1] @ out.T).topk(3).indices.tolist():
        features = torch.cat([hidden[:5], made[-1:]])
        after = eagle_slowly(head, embed[[*one.tokens[1:], token]], features)[-1]
        for second in (after @ out.T).topk(3).indices.tolist():
            assert (token, second) in tree.paths
    few = full.propose([DraftAsk(one, 2, 0, hidden[:5])], 2)[0]
    assert few.num_nodes == 2


def test_eagle_chains_by_chance_tell_their_distributions() -> None:
    one = sequence(6, temperature=1.0, top_k=4, seed=3)
    hidden = random(9, D, seed=6)
    tree = drafter_of(eagle(), rule=Rule.REJECTION).propose([DraftAsk(one, 3, 0, hidden[:5])], 3)[0]
    assert sorted(tree.probs) == [0, 1, 2]
    assert all((q > 0).sum() == 4 and q.sum() == pytest.approx(1) for q in tree.probs.values())
    assert not drafter_of(eagle()).propose([DraftAsk(one, 3, 0, hidden[:5])], 3)[0].probs


# -- files ----------------------------------------------------------------------------------------


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    tensors["fc.weight"] = random(D, D)
    del tensors["layers.0.mlp.up_proj.weight"]
    tensors["layers.9.mlp.up_proj.weight"] = random(2)
    tensors["fc.bias"] = torch.full((D,), float("nan"))
    config = EAGLE_CONFIG | {"rope_scaling": {"factor": 2}, "hidden_size": 99}
    prefixed = {f"model.{k}": x for k, x in tensors.items()}
    with pytest.raises(ConfigError) as error:
        read_eagle(write(tmp_path / "a", prefixed, config), D, V)
    said = str(error.value)
    for words in (
        "fc.weight is [16, 16], must be [16, 32]",
        "layers.0.mlp.up_proj.weight is missing",
        "layers.9.mlp.up_proj.weight is not known",
        "fc.bias holds NaN",
        "rope_scaling",
        "hidden_size=99",
    ):
        assert words in said
    with pytest.raises(ConfigError, match="EAGLE-3"):
        load_eagle(HeadFile({"d2t": random(3)}, EAGLE_CONFIG), D, V)
    with pytest.raises(ConfigError, match="medusa_num_heads=None"):
        load_medusa(HeadFile({}, {}), D, V)
    with pytest.raises(ConfigError, match="speculate="):
        read_medusa(tmp_path / "nowhere", D, V)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        read_medusa(tmp_path / "empty", D, V)


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("rope_theta", 0, "above 0"),
        ("rope_theta", float("nan"), "above 0"),
        ("rms_norm_eps", -1e-6, "above 0"),
        ("num_hidden_layers", 1.5, "whole"),
        ("num_attention_heads", 0, "above 0"),
        ("intermediate_size", "wide", "a number"),
    ],
)
def test_a_head_of_impossible_numbers_is_refused(key: str, value: object, must: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_eagle(HeadFile(eagle_tensors(), EAGLE_CONFIG | {key: value}), D, V)
    assert f"config.json {key}={value!r} must be {must}" in str(error.value)


def test_the_other_kinds_folder_is_one_line(tmp_path: Path) -> None:
    medusa_config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    both = {"eagle": (eagle_tensors(), EAGLE_CONFIG), "medusa": (medusa_tensors(), medusa_config)}
    for kind, (tensors, config) in both.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        for prefix in ("", "model."):
            named = {f"{prefix if kind == 'eagle' else ''}{x}": y for x, y in tensors.items()}
            save_file(named, tmp_path / kind / "model.safetensors")
            read = read_medusa if kind == "eagle" else read_eagle
            with pytest.raises(ConfigError) as raised:
                read(tmp_path / kind, D, V)
            (line,) = raised.value.problems
            assert f"use {kind}:{tmp_path / kind}" in line
