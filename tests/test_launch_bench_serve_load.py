"""Load, prompts and traces of `moeserve bench serve`: pure parts, by property."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_world import checkpoint_folder  # noqa: F401  (fixture)

from launch.bench.serve_call import CUT, Target
from launch.bench.serve_drive import Share, Tally, drive
from launch.bench.serve_figures import (
    Limits,
    figures,
)
from launch.bench.serve_flags import Ask
from launch.bench.serve_load import Lengths, Load, SharedPrefix, Turn, arrival_times
from launch.bench.serve_prompts import WORDS, Pool, PromptMaker
from launch.bench.serve_trace import at_speed, read_trace, write_trace
from moeserve.errors import ConfigError


def lengths(text: str) -> Lengths:
    problems: list[str] = []
    made = Lengths.parse("--input-tokens", text, problems)
    assert not problems, problems
    return made


# ---- when and how long --------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    times = list(itertools.islice(arrival_times(rate, "poisson", 3), 20_001))
    gap = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gap) / len(gap)
    assert times[0] == 0.0 and min(gap) >= 0
    assert mean == pytest.approx(1 / rate, rel=0.03)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in gap) / len(gap))
    assert deviation == pytest.approx(mean, rel=0.05)  # as only exponential ones have it
    assert sum(x > mean for x in gap) / len(gap) == pytest.approx(math.exp(-1), abs=0.02)


def test_fixed_gaps_do_not_drift() -> None:
    times = list(itertools.islice(arrival_times(10.0, "fixed", 0), 1001))
    assert times[1000] == 100.0 and times[1] == 0.1


@given(
    st.integers(0, 2**31), st.sampled_from(["512", "normal:60,30", "uniform:3,9", "lognormal:9,1"])
)
@settings(max_examples=25, deadline=None)
def test_a_seed_is_a_load(seed: int, text: str) -> None:
    def made(seed: int, **more: Any) -> list[Any]:
        load = Load(lengths(text), lengths("uniform:1,4"), seed=seed, turns=2, **more)
        return list(itertools.islice(load.conversations(), 12))

    timed = made(seed, rate=2.0)
    assert timed == made(seed, rate=2.0)
    # Other rates, and clients instead of rates, ask the same, only at other times.
    assert [x.turns for x in timed] == [x.turns for x in made(seed, concurrency=3)]
    assert timed != made(seed + 1, rate=2.0)
    assert all(x.input_tokens >= 1 and 1 <= x.output_tokens <= 4 for c in timed for x in c.turns)


@pytest.mark.parametrize(
    ("text", "mean", "least", "most"),
    [
        ("37", 37, 37, 37),
        ("normal:100,10", 100, 40, 160),
        ("uniform:10,20", 15, 10, 20),
        ("lognormal:100,0.5", 100 * math.exp(0.125), 10, 1000),
    ],
)
def test_lengths_are_of_their_distribution(text: str, mean: float, least: int, most: int) -> None:
    dice, made = random.Random(1), lengths(text)
    drawn = [made.draw(dice) for _ in range(8000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    assert least <= min(drawn) and max(drawn) <= most and str(made) == text


@pytest.mark.parametrize(
    "text", ["", "0", "1.5", "normal:5", "normal:5,-1", "uniform:9,3", "zipf:1,2", "nan", "1,2"]
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    problems: list[str] = []
    Lengths.parse("--input-tokens", text, problems)
    assert problems and "--input-tokens" in problems[0]


def test_workers_share_conversations_and_clients() -> None:
    load = Load(lengths("4"), lengths("2"), concurrency=5, requests=11)
    shares = [Share(index, 3) for index in range(3)]
    numbers = [x.number for share in shares for x in share.of(load.conversations())]
    assert sorted(numbers) == list(range(11))
    assert sum(share.clients(5) for share in shares) == 5


def test_time_bounds_what_is_begun() -> None:
    load = Load(lengths("4"), lengths("2"), rate=10.0, arrivals="fixed", seconds=1.0)
    assert len(list(load.conversations())) == 11


# ---- prompts ------------------------------------------------------------------------------


def test_prompts_have_their_lengths_and_share_their_beginning(folder: Path) -> None:
    pool = Pool.of_folder(folder)
    assert pool.ids is not None and pool.exact
    maker = PromptMaker(pool, 5, as_ids=True)
    shared = SharedPrefix.parse("0.5", [])
    made = [maker.of(k, 0, Turn(n, 1, shared.of(n))) for k, n in enumerate((40, 40, 80))]
    assert [len(x) for x in made] == [40, 40, 80]
    assert made[0][:20] == made[1][:20] == made[2][:20] and made[0][20:] != made[1][20:]
    assert made[0] == PromptMaker(pool, 5, as_ids=True).of(0, 0, Turn(40, 1, 20))
    assert made[0] != PromptMaker(pool, 6, as_ids=True).of(0, 0, Turn(40, 1, 20))
    assert set(made[2]) <= set(pool.ids)
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = PromptMaker(pool, 5, as_ids=False).of(0, 0, Turn(200, 1))
    assert len(tokenizer.encode(text).ids) == pytest.approx(200, rel=0.05)


def test_a_pool_from_tokenize_and_a_guess() -> None:
    pool = Pool.of_server(lambda text: [len(text), 7])
    assert pool.ids is not None and 7 in pool.ids and set(pool.costs) == {2}
    guess = Pool.guessed("nothing there")
    assert guess.ids is None and not guess.exact
    assert len(guess.text(140, random.Random(0)).split()) == 100
    assert len(set(WORDS)) > 100


# ---- traces -------------------------------------------------------------------------------


def test_traces_of_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"at": 3.5, "input_tokens": 9, "output_tokens": 2, "prompt": [1, 2]}\n\n'
        '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"at": 4, "conversation": 8, "input_tokens": 1, "output_tokens": 1}\n'
        '{"at": 5, "conversation": 8, "input_tokens": 2, "output_tokens": 1}\n'
    )
    trace = read_trace(file)
    assert [x.at for x in trace] == [0.0, 0.5, 1.0]
    assert trace[0].turns[0].blocks == (1, 2) and trace[1].turns[0].given == [1, 2]
    assert [x.input_tokens for x in trace[2].turns] == [1, 2]
    maker = PromptMaker(Pool("", tuple(range(99)), (1.0,) * len(WORDS)), 0, as_ids=True)
    one = maker.of(0, 0, trace[0].turns[0])
    other = maker.of(1, 0, Turn(900, 1, blocks=(1, 3)))
    assert len(one) == 700 and one[:512] == other[:512] and one[512:] != other[512:700]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[]", "line 1: '[]': must be a JSON object"),
        ("{", "line 1: '{' is no JSON"),
        ("xx", "line 1: 'xx' is no JSON (column 1); must be a JSON object"),
        ("y" * 100, f"line 1: '{60 * 'y'}...' is no JSON"),
        ('{"input_tokens": 1, "output_tokens": 1}', "at (or timestamp)"),
        ('{"at": -1, "input_tokens": 1, "output_tokens": 1}', "at: -1"),
        ('{"at": 0, "input_tokens": 1, "output_tokens": 0}', "at least 1"),
        ('{"at": 0, "input_tokens": 1, "output_tokens": 1, "prompt": 3}', "prompt"),
        ("", "holds no calls"),
    ],
)
def test_broken_traces_are_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match="trace.jsonl") as error:
        read_trace(file)
    assert named in str(error.value)


def test_turns_of_a_trace_are_in_order_and_all_as_fast(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [(13, "a"), (10.5, "b"), (11, "a"), (12, "b"), (20, ["a"])]
    file.write_text(
        "".join(
            json.dumps({"at": at, "conversation": x, "input_tokens": 1, "output_tokens": 1}) + "\n"
            for at, x in lines
        )
    )
    trace = read_trace(file)
    assert [[t.at for t in x.turns] for x in trace] == [[0.0, 1.5], [0.5, 2.5], [9.5]]
    fast = at_speed(trace, 2.0)
    assert [[t.at for t in x.turns] for x in fast] == [[0.0, 0.75], [0.25, 1.25], [4.75]]
    assert [x.at for x in fast] == [0.0, 0.25, 4.75]


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, [(0.0, 0, Turn(3, 4), [5, 6, 7]), (0.25, 1, Turn(2, 1), "text")])
    trace = read_trace(file)
    assert [(x.at, x.turns[0].given) for x in trace] == [(0.0, [5, 6, 7]), (0.25, "text")]


# ---- the drive ----------------------------------------------------------------------------


def test_ctrl_c_ends_a_run_with_what_was_done() -> None:
    import socket

    with socket.socket() as silent:  # takes connections, says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tally = Tally()

        def watch() -> None:
            if tally.sent == 3:
                os.kill(os.getpid(), signal.SIGINT)

        assert threading.current_thread() is threading.main_thread()
        load = Load(lengths("4"), lengths("2"), concurrency=3, requests=50)
        maker = PromptMaker(Pool.guessed(""), 0, as_ids=False)
        driven = drive(load, Target(url, "m", chat=False), maker, tally, watch=watch)
    assert driven.interrupted and [x.fault for x in driven.calls] == [CUT] * 3
    assert figures(driven.calls, 1, 1, Limits())["calls"]["cut_short_here"] == 3


def test_what_was_typed_becomes_a_load(tmp_path: Path) -> None:
    assert Ask("x").load().concurrency == 8 and Ask("x").load().requests == 100
    timed = Ask("x", rate=2.0, seconds=3.0).load()
    assert timed.open_loop and timed.requests is None
    with pytest.raises(ConfigError) as error:
        Ask("x", rate=-1.0, input_tokens="?", out=tmp_path / "no" / "x.json").load()
    assert len(error.value.problems) == 3  # all at once
