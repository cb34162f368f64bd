"""What is to be known of a run of `moeserve bench serve`: what was simulated, forced, late, or is
not known, in plain words. Knows the report's shape; nothing of screens.
"""

from __future__ import annotations

from typing import Any

from launch.bench.serve_call import Target
from launch.bench.serve_drive import SOON, Driven
from launch.bench.serve_load import Load
from launch.bench.serve_peer import Peer
from launch.bench.serve_prompts import Pool
from launch.bench.serve_text import TextCheck

SAME_KIND = 0.05  # tokens an event by which ITL becomes another thing


def caveats(
    report: dict[str, Any], load: Load, target: Target, pool: Pool, peer: Peer
) -> list[str]:
    """What was simulated, forced or is not known, in plain words."""
    said = []
    recorded = load.trace is not None and all(
        t.given is not None for c in load.trace for t in c.turns
    )
    made_up = not recorded or any(t.drawn for c in load.trace or () for t in c.turns)
    if made_up:
        said.append(
            "prompts are random tokens"
            + (", recorded when they were drawn" if recorded else "")
            + ": what experts they choose and how soon answers end is not what real text does"
        )
    if not recorded and not pool.exact:
        said.append(pool.source)
    if load.shared_prefix.share or load.shared_prefix.tokens:
        said.append(f"all prompts begin alike, as asked ({load.shared_prefix})")
    if load.turns > 1:
        said.append("the next turn of a conversation is asked as soon as the answer is there")
    said += _of_tokens(report, load, pool)
    if target.ignore_eos:
        said.append("answers were forced to their full length (ignore_eos)")
    if report["settings"]["warmup"]:
        several = report["generator"]["workers"]
        each = f" in each of {several} processes" if several > 1 else ""
        said.append(f"{report['settings']['warmup']} calls before these{each} do not count")
    if report["gpus_are"] == "CPU ranks":
        said.append(
            "the server computes on CPUs: a rank is a process, and its figures are none of a GPU"
        )
    if report["gpus_are"] == "ranks":
        said.append("what the ranks compute on is not known: /debug/state wants --admin-key")
    dispatch = (peer.health or {}).get("dispatch") or {}
    for phase in ("prefill", "decode"):
        part = dispatch.get(phase)
        if isinstance(part, dict) and part.get("emulated"):
            said.append(f"dispatch of {phase} is an emulation of {part['backend']} on CPUs")
    if peer.here:
        said.append("server and load generator share one machine and take its cores in turn")
    if not peer.ours:
        said.append(
            "the server is none of ours: steps of ranks, balance of experts, preemptions unknown"
        )
    if target.token_ids:
        said.append(
            "a token counts when it comes, also one without text (return_token_ids); of peers, and "
            "in other tools, the first text counts"
        )
    if report["tokens_are"] == "events":
        said.append("not all calls tell usage: an event was counted as one token there")
    if report["acceptance"]["accepted_share"] is None:
        said.append(f"no acceptance: {report['acceptance']['why']}")
    if 0 < report["calls"]["good"] < 100:
        said.append("p99 of fewer than a hundred calls is the slowest of them")
    if report["generator"]["was_limit"]:
        said.append("the load generator was the limit: " + report["generator"]["why"])
    else:
        said += _coarse(report)
    if report["interrupted"]:
        said.append("the run was stopped before its end: figures are of what was done")
    return said


def _of_tokens(report: dict[str, Any], load: Load, pool: Pool) -> list[str]:
    """How the server's answers and its usage are to be read."""
    said = []
    each = report["tokens_an_event"]
    if each is not None and abs(each - 1) > SAME_KIND:
        said.append(
            f"an event brought {each:.2f} tokens on average (several at once, or some without "
            "text): ITL is the time between events, of every server alike; TPOT is of tokens"
        )
    whole, pieces = (report["not_streamed"][x] for x in ("in_one_event", "in_one_piece"))
    if whole:
        said.append(
            f"{whole} answers came in one event: not streamed; they have no TPOT and no ITL, and "
            "keep no limit of TPOT"
        )
    if pieces:
        said.append(
            f"{pieces} answers came in one piece, all events at about one moment (held back before "
            "they came, or read late here): they have no TPOT and no ITL, and keep no limit of TPOT"
        )
    tokens = report["tokens"]
    told, cached = tokens["calls_with_input_told"], tokens["calls_with_cached_told"]
    if cached and cached < told:
        least = tokens["cached_input"] / tokens["input"]
        said.append(
            f"{told - cached} of {told} calls told no cached tokens: cached and computed ones are "
            f"of the other {cached} (if those had none, the share is {least:.1%})"
        )
    asked, held = tokens["asked_input"], tokens["input"]
    comparable = load.trace is None and load.turns == 1 and told == report["calls"]["sent"]
    if comparable and held and abs(held - asked) > (0.25 if pool.exact else 1.0) * asked:
        said.append(
            f"prompts are {held / told:.0f} tokens by the server's usage, {asked / told:.0f} were "
            "asked for"
        )
    return said


def _coarse(report: dict[str, Any]) -> list[str]:
    """Figures that are hardly longer than the generator's timers are late."""
    told = report["generator"]
    if not told["coarse"]:
        return []
    names = ", ".join(x.upper() for x in told["coarse"])
    late = told["loop_late_ms"]["p90"]
    behind = told["server_kept_up"] is False
    return [
        f"timers of the load generator were {late:.1f} ms late in one of ten cases: {names} can "
        "be told no finer" + ("; what limited the run was the server" if behind else "")
    ]


def of_turns(driven: Driven, load: Load) -> list[str]:
    """What became of the recorded times of later turns, and of turns after one that failed."""
    said = []
    later = [x for x in driven.calls if x.turn]
    if load.trace is not None and later:
        held = sorted(x.held for x in later if x.held > SOON)
        said.append(
            "a turn is asked at its recorded time, but never before the answer to the one before"
            + (
                f": {len(held)} of {len(later)} later turns were late because of slow answers, by "
                f"up to {1e3 * held[-1]:.0f} ms"
                if held
                else f"; all {len(later)} later turns were in time"
            )
        )
    if driven.left_out:
        said.append(f"{driven.left_out} turns were not asked: one before them failed")
    return said


def text_words(checked: TextCheck | None) -> list[str]:
    if checked is None or not checked.differs:
        return []
    return [
        f"the text of {checked.answers} answers is {checked.tokens} tokens by --tokenizer, usage "
        f"says {checked.usage}"
    ]


def cache_words(emptied: bool, kept: bool) -> str:
    if emptied:
        return "the server's prefix cache was emptied before"
    return "the server's prefix cache was " + (
        "left as it was"
        if kept
        else "not emptied: prompts of an earlier run with the same seed "
        "may still lie in it (take another --seed)"
    )
