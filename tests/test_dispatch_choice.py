"""Which backend each phase gets: names, what ranks say, buffers, one dispatcher or two."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import dispatch
from dispatch import choose_dispatcher, parse_dispatch
from dispatch.base import BufferPlan, CombineForm, DispatchConfig, DispatchError, Probe
from dispatch.choice import PHASES, CannotRun, Probes, Wish, step_bounds
from dispatch.local import LocalDispatcher
from dispatch.phased import PhasedDispatcher
from ep.group import EPGroup

CONFIG = DispatchConfig(4, 2, 6, 8, torch.float32, deterministic=False)
CONFIGS = {"prefill": CONFIG, "decode": replace(CONFIG, max_tokens_per_rank=2)}
SINGLE = EPGroup.single()
NAMES = ("local", "torch", "allgather", "deepep_ll", "deepep_v2", "deepep_normal", "nvshmem")


class Toy(LocalDispatcher):
    """Stands for a backend: opens where `local` does."""

    bytes_of_token = BufferPlan(10, 1)
    closed: list[str]  # by all
    broken = False

    def __init__(self, group: Any, config: DispatchConfig, **hooks: Any) -> None:
        if self.broken:
            raise DispatchError("no memory")
        super().__init__(group, config, **hooks)

    @classmethod
    def plan(cls, group: Any, config: DispatchConfig) -> BufferPlan:  # type: ignore[override]
        n, one = config.max_tokens_per_rank, cls.bytes_of_token
        return BufferPlan(one.held * n, one.passing * n)

    def close(self) -> None:
        self.closed.append(self.name)


@pytest.fixture(name="kinds")
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Toy]]:
    """A registry of toys; those that end in _emulated too."""
    closed: list[str] = []
    names = [*NAMES, "deepep_ll_emulated"]
    kinds = {n: type(n, (Toy,), {"name": n, "closed": closed}) for n in names}
    monkeypatch.setattr(dispatch, "_BACKENDS", dict.fromkeys(names, ("here", "X")))
    monkeypatch.setattr(dispatch, "_load", kinds.__getitem__)
    return kinds


def said(**able: str) -> Probes:
    """able: by backend, the phases in which it runs; the others can run nothing."""
    names = [*NAMES, "deepep_ll_emulated"]
    return {
        phase: {
            n: Probe(phase in able.get(n, ""), f"{n} for {phase}" if n in able else "no such chip")
            for n in names
        }
        for phase in PHASES
    }


BOTH = "prefill decode"


def took(probes: Probes, asked: str = "auto", emulate: bool = False) -> tuple[str, str]:
    choice = choose_dispatcher(parse_dispatch(asked, emulate), [probes], CONFIGS)
    return choice.prefill.backend, choice.decode.backend


def test_auto_takes_the_best_of_each_phase(kinds: dict[str, type[Toy]]) -> None:
    assert took(said(local=BOTH, torch=BOTH)) == ("local", "local")
    assert took(said(torch=BOTH)) == ("torch", "torch")
    assert took(said(torch=BOTH, deepep_normal=BOTH)) == ("deepep_normal", "torch")
    assert took(said(torch=BOTH, deepep_ll=BOTH)) == ("torch", "deepep_ll")
    assert took(said(torch=BOTH, nvshmem=BOTH)) == ("torch", "nvshmem")
    every = said(torch=BOTH, deepep_v2=BOTH, deepep_normal=BOTH, deepep_ll="decode", nvshmem=BOTH)
    assert took(every) == ("deepep_v2", "deepep_ll")
    assert took(said(torch=BOTH, deepep_v2="prefill")) == ("deepep_v2", "torch")
    # An emulation is never found by itself.
    assert took(said(torch=BOTH, deepep_ll_emulated=BOTH)) == ("torch", "torch")


def test_a_rank_that_refuses_speaks_for_all(kinds: dict[str, type[Toy]]) -> None:
    able, other = said(torch=BOTH, deepep_ll=BOTH), said(torch=BOTH)
    choice = choose_dispatcher(Wish(), [able, other, able], CONFIGS)
    assert (choice.prefill.backend, choice.decode.backend) == ("torch", "torch")
    assert choice.refused["deepep_ll"] == "rank 1: no such chip"
    assert choose_dispatcher(Wish(), [able] * 3, CONFIGS).decode.backend == "deepep_ll"


def test_names_are_taken_at_their_word(kinds: dict[str, type[Toy]]) -> None:
    probes = said(torch=BOTH, deepep_ll="decode", deepep_ll_emulated=BOTH)
    assert took(probes, "prefill=torch,decode=deepep_ll") == ("torch", "deepep_ll")
    assert took(probes, "decode=deepep_ll") == ("torch", "deepep_ll")
    with pytest.raises(CannotRun) as caught:
        took(probes, "deepep_ll")
    assert caught.value.refusals == {"prefill": {"deepep_ll": "deepep_ll for prefill"}}
    assert took(probes, "deepep_ll", emulate=True) == ("deepep_ll", "deepep_ll")
    wish = parse_dispatch("prefill=torch,decode=deepep_ll", emulate=True)
    choice = choose_dispatcher(wish, [probes], CONFIGS)
    assert choice.decode.emulated and not choice.prefill.emulated
    assert choice.report()["decode"] == {
        "backend": "deepep_ll",
        "reason": "deepep_ll_emulated for decode",
        "emulated": True,
    }
    with pytest.raises(CannotRun, match="^dispatcher 'local', 'torch' refuse: no such chip$"):
        choose_dispatcher(
            Wish(), [{p: {n: s[n] for n in NAMES[:2]} for p, s in said().items()}], CONFIGS
        )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("deepep_l", r"^must be one of auto, local.*or prefill=NAME,decode=NAME; nearest: dee"),
        ("deepep_ll_emulated", "must be one of .*; nearest: deepep_ll"),
        ("", "must be one of auto"),
        ("prefill=torch,decode=x,y=z", "'y=z': no phase; must be prefill=NAME.*; 'x': must be"),
        ("prefill=torch,prefill=torch", "'prefill=torch': given twice"),
        ("torch,deepep_ll", "must be one of .*; nearest: prefill=torch,decode=deepep_ll"),
        ("torch,Local", "must be one of .*; nearest: prefill=torch,decode=local"),
        ("torch,pigeon,local", "must be one of auto"),
        ("Torch", "must be one of .*; nearest: torch$"),
        ("decode=DEEPEP_LL", "'DEEPEP_LL': must be one of .*; nearest: deepep_ll$"),
        ("prefill=", "'': must be one of"),
    ],
)
def test_what_names_nothing_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DispatchError, match=problem) as caught:
        parse_dispatch(text)
    assert "_emulated" not in str(caught.value)


def test_emulate_wants_a_name_that_has_an_emulation() -> None:
    with pytest.raises(
        DispatchError, match="^auto has no emulation; those that have: deepep_ll, deep"
    ):
        parse_dispatch("auto", emulate=True)
    with pytest.raises(DispatchError, match="prefill=torch has no emulation"):
        parse_dispatch("prefill=torch", emulate=True)
    assert parse_dispatch("decode=deepep_ll", emulate=True) == Wish("auto", "deepep_ll", True)


def test_bounds_of_a_step() -> None:
    assert step_bounds(512, 64, 2) == {"prefill": 512, "decode": 64}
    assert step_bounds(33, 64, 3) == {"prefill": 36, "decode": 36}  # R * M: multiples of 4
    assert step_bounds(33, 5, 8) == {"prefill": 33, "decode": 5}
    assert step_bounds(512, 64, 4, drafts=2) == {"prefill": 512, "decode": 192}
    assert step_bounds(9000, 4096, 2) == {"prefill": 9000, "decode": 1024}
    assert step_bounds(1, 1, 1) == {"prefill": 4, "decode": 4}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 24, 32, 72, 128, 144, 160, 320])
def test_room_of_an_expert_is_whole_tiles_where_that_is_asked(ranks: int) -> None:
    for tokens in (1, 33, 72, 127, 128, 1024):
        plain = step_bounds(512, tokens, ranks)
        tiled = step_bounds(512, tokens, ranks, tile=128)
        for phase, bound in tiled.items():
            assert bound * ranks % 128 == 0 and bound <= 1024
            step = 128 // math.gcd(128, ranks)
            assert 0 <= bound - plain[phase] < step, "no more than it takes"


def test_two_backends_become_one_dispatcher(kinds: dict[str, type[Toy]]) -> None:
    choice = choose_dispatcher(Wish(), [said(torch=BOTH, deepep_ll=BOTH)], CONFIGS)
    assert choice.plan(SINGLE) == BufferPlan(10 * 8 + 10 * 2, 8)  # one of them at work
    d = choice.open(SINGLE)
    assert isinstance(d, PhasedDispatcher) and d.name == "prefill=torch,decode=deepep_ll"
    assert d.decode.config.max_tokens_per_rank == 2
    first, second, *refused = choice.describe().splitlines()
    assert first == "dispatcher prefill=torch: torch for prefill (auto: best for prefill)"
    assert second.startswith(
        "dispatcher decode=deepep_ll: deepep_ll for decode (auto: before torch"
    )
    assert second.endswith("; decode steps above 2 tokens as prefill")
    assert refused == ["  not local, allgather, deepep_v2, deepep_normal, nvshmem: no such chip"]
    d.close()
    assert sorted(kinds["torch"].closed) == ["deepep_ll", "torch"]


def test_one_backend_for_both_phases_is_no_pair(kinds: dict[str, type[Toy]]) -> None:
    choice = choose_dispatcher(Wish("deepep_v2", "deepep_v2"), [said(deepep_v2=BOTH)], CONFIGS)
    assert choice.plan(SINGLE) == BufferPlan(80, 8)
    d = choice.open(SINGLE)
    assert type(d) is kinds["deepep_v2"] and d.config == CONFIG
    assert choice.describe() == "dispatcher deepep_v2: deepep_v2 for prefill"
    assert choice.refused["torch"] == "no such chip"  # for `/health`
    assert choice.report()["decode"] == choice.report()["prefill"]


def test_results_come_home_in_one_form(kinds: dict[str, type[Toy]]) -> None:
    kinds["nvshmem"].combine_form = CombineForm.PAIRS
    kinds["deepep_v2"].combine_form = CombineForm.SUMMED
    # torch can do either: it does as its partner.
    choice = choose_dispatcher(Wish(), [said(torch=BOTH, nvshmem=BOTH)], CONFIGS)
    d = choice.open(SINGLE)
    assert isinstance(d, PhasedDispatcher) and d.combine_form is CombineForm.PAIRS
    assert d.prefill.name == "torch" and d.prefill.combine_form is CombineForm.PAIRS
    # Two that can not agree: auto goes on, names are refused.
    able = said(torch=BOTH, deepep_v2="prefill", nvshmem=BOTH)
    auto = choose_dispatcher(Wish(), [able], CONFIGS)
    assert (auto.prefill.backend, auto.decode.backend) == ("deepep_v2", "torch")
    why = "hands results home as PAIRS, prefill=deepep_v2 as SUMMED; choose deepep_v2 for both"
    assert auto.refused["nvshmem"].startswith(why)
    with pytest.raises(CannotRun, match=f"'nvshmem' refuses: {why}"):
        choose_dispatcher(Wish("deepep_v2", "nvshmem"), [able], CONFIGS)
    named = choose_dispatcher(Wish(decode="nvshmem"), [able], CONFIGS)
    assert named.prefill.backend == "torch"
    assert named.refused["deepep_v2"].startswith("hands results home as SUMMED, decode=nvshmem")


def test_nothing_stays_open_where_one_cannot_open(kinds: dict[str, type[Toy]]) -> None:
    choice = choose_dispatcher(Wish(), [said(torch=BOTH, deepep_ll=BOTH)], CONFIGS)
    kinds["deepep_ll"].broken = True
    with pytest.raises(DispatchError, match="no memory"):
        choice.open(SINGLE)
    assert kinds["torch"].closed == ["torch"]


def test_refusals_name_the_phase_where_it_matters(kinds: dict[str, type[Toy]]) -> None:
    probes = said(torch=BOTH, deepep_v2="decode", nvshmem=BOTH)
    refused = choose_dispatcher(Wish(), [probes], CONFIGS).refused
    assert refused["local"] == refused["deepep_ll"] == refused["deepep_normal"] == "no such chip"
    assert refused["nvshmem"].startswith("could run; deepep_v2 is ")  # another is better
    assert "deepep_v2" not in refused  # it was taken, for decode
    named = choose_dispatcher(Wish("torch", "torch"), [probes], CONFIGS).refused
    both = "for prefill: deepep_v2 for prefill; for decode: could run; torch was asked for"
    assert named["deepep_v2"] == both


def test_all_others_are_told_of_also_those_that_could_run(kinds: dict[str, type[Toy]]) -> None:
    able = said(torch=BOTH, allgather=BOTH)
    for asked, reason in (
        ("auto", "could run; torch sends fewer bytes"),
        ("torch", "could run; torch was asked for"),
        ("decode=torch", "for prefill: could run; torch sends fewer bytes; for decode: could run; "
         "torch was asked for"),
    ):  # fmt: skip
        choice = choose_dispatcher(parse_dispatch(asked), [able], CONFIGS)
        assert choice.refused["allgather"] == reason
        assert {*choice.refused, choice.prefill.backend} == {*NAMES}
        assert ("not allgather: " in choice.describe()) == (asked != "torch")
    auto = choose_dispatcher(Wish(), [able], CONFIGS)
    assert auto.prefill.reason.endswith(" (auto: before allgather, for it sends fewer bytes)")
    assert took(said(allgather=BOTH)) == ("allgather", "allgather")
    # What was named is not what auto would have taken: nothing says that it is best.
    named = choose_dispatcher(parse_dispatch("allgather"), [able], CONFIGS)
    assert named.prefill.reason == "allgather for prefill"
    assert named.refused["torch"] == "could run; allgather was asked for"
