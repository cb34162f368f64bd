"""Captured steps and steps planned ahead over real gloo ranks: all take the same rung, one with no
rows too, and the tokens are those of plain steps.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import fork_ranks, run_ranks

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.device.api import ReplayedApi
from moeserve.device.opening import open_graphs, warm_up_prefill
from moeserve.device.staging import Staging
from moeserve.request import Request, SamplingParams

MAX_LEN = 64
PROMPTS = ((0, [3, 9, 4, 40]), (0, [7] * 20), (1, [5, 6, 8]))  # rank, tokens


@pytest.mark.dist
def test_ranks_replay_the_same_rung_and_give_the_same_tokens(tmp_path: Path) -> None:
    one, other = run_ranks(__file__, 2, tmp_path, timeout=150)
    for report in (one, other):
        assert report["captured"] == report["plain"] == report["ahead"]
        assert report["rungs"] == [1, 2, 4]
    assert [len(t) for t in one["plain"].values()] == [14, 15]
    assert [len(t) for t in other["plain"].values()] == [16]
    assert one["replays"] == other["replays"] > 10
    assert one["padding"] != other["padding"]
    # One rank's rows attend to too much: no rank replays that step.
    assert one["bounded"] == one["plain"] and other["bounded"] == other["plain"]
    assert one["too_long"] == other["too_long"] > 3
    assert one["fewer"] == other["fewer"] and 0 < one["fewer"] < one["replays"]
    assert (one["says"], other["says"]) == ("another rank cannot", "as asked")
    # The start measures the worst: all rows of both ranks come to each, with all their picks.
    for report in (one, other):
        rows, pairs = zip(*report["came"], strict=True)
        assert max(rows) == 2 * 12 and max(pairs) == 2 * 12 * report["picks"]
        assert 12 * report["picks"] in pairs  # as many as are sent, where all are sent evenly
    assert len(one["came"]) == len(other["came"])


def tokens(
    folder: Path, group: EPGroup, ahead: bool, captured: bool, most_context: int | None = None
) -> tuple[Any, Any]:
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder / "v3", "kernels": "torch"},
            "parallel": {"ep": group.size, "dispatch": "torch"},
            "engine": {"quiet": True, "ahead": ahead},
            "cache": {"kv_tokens": 512},
            "schedule": {"max_model_len": MAX_LEN, "token_budget": 12, "max_num_sequences": 4},
        },
    )
    engine = build_engine(config, group)
    runner = engine.runner
    if captured:
        api = ReplayedApi()
        runner.staging = Staging(api)
        dispatcher: Any = runner.model.dispatcher  # type: ignore[attr-defined]
        dispatcher.graph_safe = True  # what waits may be replayed where nothing is captured
        runner.graphs = open_graphs(config, group, runner, MAX_LEN, 0, [], api=api)
        if most_context is not None and runner.graphs is not None:
            runner.graphs.most_context = most_context
    said: dict[str, list[int]] = {}
    for number, (rank, prompt) in enumerate(PROMPTS):
        if rank == group.rank:
            sampling = SamplingParams(max_tokens=14 + number, temperature=0.0, ignore_eos=True)
            engine.add_request(
                Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling)
            )
            said[str(number)] = []
    engine.request_stop()
    while not engine.stopped:
        for output in engine.step():
            assert output.error is None
            said[output.request_id] += output.token_ids
    graphs = runner.graphs
    engine.close()
    return said, graphs


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    plain, _ = tokens(folder, group, ahead=False, captured=False)
    captured, graphs = tokens(folder, group, ahead=False, captured=True)
    ahead, _ = tokens(folder, group, ahead=True, captured=True)
    # Of rank 0: its rows reach 51 positions together, rank 1's 19 alone.
    bounded, fewer = tokens(folder, group, ahead=False, captured=True, most_context=40)
    report = {
        "plain": plain,
        "captured": captured,
        "ahead": ahead,
        "rungs": list(graphs.rungs),
        "replays": graphs.num_replays,
        "padding": graphs.num_padding_rows,
        "bounded": bounded,
        "fewer": fewer.num_replays,
        "too_long": fewer.num_too_long,
    }
    report |= worst(folder, group)
    # What one rank cannot capture, none replays.
    api = ReplayedApi(refuse=frozenset({0}) if group.rank == 1 else frozenset())
    report["says"] = refusal(folder, group, api)
    return report


def plain_settings(folder: Path, group: EPGroup) -> ServeConfig:
    return ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder / "v3", "kernels": "torch"},
            "parallel": {"ep": group.size, "dispatch": "torch"},
            "engine": {"quiet": True},
            "cache": {"kv_tokens": 512},
            "schedule": {"max_model_len": MAX_LEN, "token_budget": 12, "max_num_sequences": 4},
        },
    )


def worst(folder: Path, group: EPGroup) -> dict[str, Any]:
    """came: rows and valid pairs of each layer on this rank while prefill is warmed up."""
    engine = build_engine(plain_settings(folder, group), group)
    dispatcher: Any = engine.runner.model.dispatcher  # type: ignore[attr-defined]
    finish, came = dispatcher.dispatch_finish, []

    def seen(handle: Any) -> Any:
        received = finish(handle)
        came.append((received.slots.shape[0], int((received.slots >= 0).sum())))
        return received

    dispatcher.dispatch_finish = seen
    warm_up_prefill(engine.runner, 12)
    picks = min(dispatcher.config.top_k, dispatcher.num_local_experts)
    engine.close()
    return {"came": came, "picks": picks}


def refusal(folder: Path, group: EPGroup, api: ReplayedApi) -> str:
    config = plain_settings(folder, group)
    engine = build_engine(config, group)
    dispatcher: Any = engine.runner.model.dispatcher  # type: ignore[attr-defined]
    dispatcher.graph_safe = True
    notes: list[str] = []
    graphs = open_graphs(config, group, engine.runner, MAX_LEN, 0, notes, api=api)
    assert graphs is not None and graphs.rungs == (1, 2), notes
    # Experts moved; one rank cannot capture 2 rows again: all take another step, none waits.
    model: Any = engine.runner.model
    model.adopt_placement(replace(model.placement, generation=model.placement.generation + 1))
    if group.rank == 1:
        api.refuse = frozenset({api.num_captures})
    assert graphs.ready(2, True) is None and graphs.rungs == (1,)
    assert graphs.ready(1, True) == 1 and graphs.num_recaptures == 1
    engine.close()
    said, again = graphs.notes
    assert "of 2 rows are no longer captured" in again
    return "as asked" if "not permitted" in said else said.rpartition(": ")[2]


def write(folder: Path) -> None:
    config = family_config("v3", "tiny", num_hidden_layers=2, num_nextn_predict_layers=0)
    write_random_checkpoint(folder / "v3", config, tokenizer=False)


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main, before=write))
