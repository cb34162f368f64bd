"""`make demo`: two ranks serve the bundled model; a real client asks; what happened is shown.

Uses what any user would: the `moeserve serve` command, the `openai` client, /v1/experts and
/debug/state. Knows nothing of the inside.

    python -m launch.demo [CHECKPOINT] [--ep N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from launch.cluster.jobs import KEYS
from launch.front_end import python_command, python_environment
from launch.heat import heat_rows
from launch.signals import die_with_parent
from moeserve.errors import MoeserveError
from moeserve.terminal import PREFIX

TINY = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny"
START_SECONDS = 120
STOP_SECONDS = 45
READY = f"{PREFIX}ready: "


@dataclass(frozen=True)
class Ask:
    """A request; chat or plain completion. kind: what the model should recognise."""

    kind: str
    text: str
    chat: bool = False
    max_tokens: int = 90


PSALM = """Psalms 23

1 Yahweh is my shepherd: I shall lack nothing.
2 He makes me lie down in green pastures. He leads me beside still waters.
3 He restores my soul. He guides me in the paths of righteousness for his name's sake.
4"""
ASKS = (
    Ask("dictionary", "Define a house.", chat=True, max_tokens=70),
    Ask("drama", "HAMLET\nMy lord", max_tokens=80),
    Ask("Python", "def get_name(self):\n", max_tokens=80),
    Ask("verse", PSALM),
    Ask("verse again", PSALM + " Even though I walk"),
)


class Server:
    """A `moeserve serve` process; its messages are passed on, dimmed."""

    def __init__(self, checkpoint: Path, num_ranks: int, console: Any) -> None:
        command = [
            *python_command("moeserve"),
            "serve",
            str(checkpoint),
            *("--ep", str(num_ranks), "--port", "0", "--log-level", "warning"),
        ]
        parent = os.getpid()
        self._console = console
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            # A key of another server's is not asked for here.
            env={k: v for k, v in python_environment().items() if k not in KEYS.values()},
            preexec_fn=lambda: die_with_parent(parent),
        )
        self.url = ""
        Thread(target=self._listen, daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        while not self.url:
            code = self._process.poll()
            if code is not None:
                raise MoeserveError(f"the server ended with exit code {code} while starting")
            if time.monotonic() > deadline:
                self._process.terminate()
                raise MoeserveError(f"the server was not ready within {START_SECONDS} s")
            time.sleep(0.05)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._console.print(
                "  " + line.rstrip(),
                style="dim",
                markup=False,
                highlight=False,
                soft_wrap=True,  # lines of a log: not broken here
            )
            if line.startswith(READY):
                self.url = line.removeprefix(READY).strip()

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise MoeserveError(f"the server did not stop within {STOP_SECONDS} s") from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.demo")
    parser.add_argument("checkpoint", type=Path, nargs="?", default=TINY)
    parser.add_argument("--ep", type=int, default=2)
    options = parser.parse_args()
    try:
        run(options.checkpoint, options.ep)
    except MoeserveError as error:
        print(f"demo: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("\ndemo: stopped before it was done", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def run(checkpoint: Path, num_ranks: int) -> None:
    import httpx
    from openai import OpenAI
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 100
    began = time.monotonic()
    console.rule(f"moeserve serve {checkpoint.name} --ep {num_ranks}")
    server = Server(checkpoint, num_ranks, console)
    console.print(f"  up after {time.monotonic() - began:.1f} s")
    try:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        http = httpx.Client(base_url=server.url, timeout=10)
        model = client.models.list().data[0].id
        loads, seen = [], _totals(http)
        for ask in ASKS:
            _answer(console, client, model, ask)
            now = _totals(http, more_than=seen)
            loads.append((ask.kind, _minus(now, seen)))
            seen = now
        _together(console, client, model)
        state = http.get("/debug/state").json()
        _show_experts(console, state, loads)
        _show_ranks(console, state)
    finally:
        with contextlib.suppress(ProcessLookupError):
            code = server.stop()
    console.rule(f"stopped with exit code {code} after {time.monotonic() - began:.0f} s")
    if code:
        raise MoeserveError(f"the server ended with exit code {code}")


def _answer(console: Any, client: Any, model: str, ask: Ask) -> None:
    how = "chat" if ask.chat else "completion"
    console.print()
    console.rule(f"[bold]{ask.kind}[/] ({how})", align="left")
    console.print(ask.text, style="cyan", end="" if not ask.chat else "\n", markup=False)
    began = time.perf_counter()
    first, usage = 0.0, None
    for piece, said in _pieces(client, model, ask):
        usage = said or usage
        if piece:
            first = first or time.perf_counter()
            console.out(piece, end="", highlight=False)
    ended = time.perf_counter()
    if usage is None or not first:
        raise MoeserveError(f"the stream of {ask.kind!r} brought no text or no usage")
    rate = (usage.completion_tokens - 1) / max(ended - first, 1e-9)
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    console.print(
        f"\n  {usage.completion_tokens} tokens, {rate:.0f} tokens/s, first after "
        f"{(first - began) * 1e3:.0f} ms; prompt {usage.prompt_tokens} tokens, "
        f"{cached} of them cached",
        style="green" if cached else "dim",
        highlight=False,
    )


def _pieces(client: Any, model: str, ask: Ask) -> Iterator[tuple[str, Any]]:
    shared: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.max_tokens,
        "temperature": 0.6,
        "seed": 7,  # the same text at every start, whatever else runs
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.chat:
        messages = [{"role": "user", "content": ask.text}]
        for chunk in client.chat.completions.create(messages=messages, **shared):
            text = chunk.choices[0].delta.content if chunk.choices else ""
            yield text or "", chunk.usage
    else:
        for chunk in client.completions.create(prompt=ask.text, **shared):
            yield chunk.choices[0].text if chunk.choices else "", chunk.usage


# ---- what the ranks did ---------------------------------------------------------------------


def _totals(http: Any, more_than: list[list[int]] | None = None) -> list[list[int]]:
    """Tokens per layer and expert so far, once ranks have told them (a moment after a request)."""
    before = sum(map(sum, more_than or []))
    last: list[list[int]] = []
    for _ in range(100):
        totals = http.get("/v1/experts").json()["totals"]
        if more_than is None or (sum(map(sum, totals)) > before and totals == last):
            return totals
        last = totals
        time.sleep(0.1)
    raise MoeserveError("the ranks did not report what their experts did")


def _minus(now: list[list[int]], before: list[list[int]]) -> list[list[int]]:
    if not before:
        return now
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(now, before, strict=True)]


def _together(console: Any, client: Any, model: str) -> None:
    """Many requests at once, over all ranks: what a step shares pays off."""
    asks = [Ask(a.kind, a.text, max_tokens=48) for a in ASKS if not a.chat] * 4

    def tokens(ask: Ask) -> int:
        return sum(usage.completion_tokens for _, usage in _pieces(client, model, ask) if usage)

    began = time.perf_counter()
    with ThreadPoolExecutor(len(asks)) as pool:
        made = sum(pool.map(tokens, asks))
    rate = made / (time.perf_counter() - began)
    console.print()
    console.rule(f"[bold]{len(asks)} requests at once[/]", align="left")
    console.print(f"  {made} tokens, {rate:.0f} tokens/s", style="green", highlight=False)


def _show_experts(
    console: Any, state: dict[str, Any], loads: list[tuple[str, list[list[int]]]]
) -> None:
    ranks = len(state["ranks"])
    first = int(state["ranks"][0]["info"].get("first_moe_layer", 0))
    layers = zip(*(load for _, load in loads), strict=True)  # of each layer, a row a request
    totals = [[sum(cell) for cell in zip(*rows, strict=True)] for rows in layers]
    used = [(f"layer {first + i}", row) for i, row in enumerate(totals) if sum(row)]
    console.print()
    console.rule("tokens per expert (a cell each), by MoE layer; | between ranks")
    console.print(heat_rows(used, ranks, console.width))
    middle = len(used) // 2
    console.print(f"\n{used[middle][0]} by kind of text: experts specialise")
    console.print(heat_rows([(kind, load[middle]) for kind, load in loads], ranks, console.width))


def _show_ranks(console: Any, state: dict[str, Any]) -> None:
    from rich.table import Table

    ranks = state["ranks"]
    table = Table(title=f"memory (MiB), weights in {ranks[0]['info']['weights']}")
    table.add_column("kind")
    for rank in ranks:
        table.add_column(f"rank {rank['rank']}", justify="right")
    for kind in ranks[0]["info"]["memory_bytes"]:
        sizes = [rank["info"]["memory_bytes"][kind] / 2**20 for rank in ranks]
        table.add_row(kind.replace("_", " "), *(f"{size:.1f}" for size in sizes))
    table.add_section()
    resident = [rank["stats"]["rss_bytes"] / 2**20 for rank in ranks]
    table.add_row("process, all in all", *(f"{size:.0f}" for size in resident), style="bold")
    blocks = [
        f"{r['stats']['num_used_blocks'] + r['stats']['num_cached_blocks']} of {r['num_blocks']}"
        for r in ranks
    ]
    table.add_row("KV blocks held", *blocks)
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
