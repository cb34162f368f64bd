"""The flags that `moeserve bench serve` and `sweep` share, and the load that they ask for.

One table, from which both commands get their options. Imports nothing heavy: this is read for
`--help`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.bench.json_flag import JSON_HELP, OUT_HELP
from launch.output import unwritable
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from launch.bench.serve_load import Load

WHAT, WHEN, HOW, WHERE, OUTPUT = "What is asked", "When", "How", "Where", "Output"
CONCURRENCY = 8  # where nothing is said of when
REQUESTS = 100  # where nothing bounds the run


@dataclass(frozen=True)
class Ask:
    """What was typed. Lengths are still text."""

    url: str
    model: str | None = None
    tokenizer: Path | None = None
    endpoint: str | None = None
    rate: float | None = None
    arrivals: str | None = None
    concurrency: int | None = None
    trace: Path | None = None
    speed: float | None = None
    requests: int | None = None
    seconds: float | None = None
    input_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: str | None = None
    turns: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: str | None = None
    seed: int = 0
    warmup: int = 2
    keep_cache: bool = False
    workers: int = 1
    timeout: float = 600.0
    ttft_limit: float | None = None
    tpot_limit: float | None = None
    nodes: int | None = None
    gpus: int | None = None
    api_key: str | None = None
    admin_key: str | None = None
    allow_errors: bool = False
    json: bool = False
    out: Path | None = None
    html: Path | None = None
    record: Path | None = None

    def load(self) -> Load:
        """ConfigError with every problem of the flags."""
        from launch.bench.serve_load import Lengths, Load, SharedPrefix, check_load
        from launch.bench.serve_trace import at_speed, read_trace

        problems: list[str] = []
        timed = self.rate is not None or self.trace is not None or self.concurrency is not None
        requests = self.requests
        if requests is None and self.seconds is None and self.trace is None:
            requests = REQUESTS
        made = Load(
            input_tokens=Lengths.parse("--input-tokens", self.input_tokens or "512", problems),
            output_tokens=Lengths.parse("--output-tokens", self.output_tokens or "128", problems),
            seed=self.seed,
            rate=self.rate,
            arrivals=self.arrivals or "poisson",
            concurrency=self.concurrency if timed else CONCURRENCY,
            requests=requests,
            seconds=self.seconds,
            shared_prefix=SharedPrefix.parse(self.shared_prefix or "0", problems),
            turns=self.turns or 1,
        )
        problems += self._contradictions()
        trace = None
        for check in (lambda: check_load(made), self.extra):
            try:
                check()
            except ConfigError as error:
                problems += error.problems
        if self.trace is not None:
            try:
                trace = at_speed(read_trace(self.trace), self.speed or 1.0)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return Load(**{x.name: getattr(made, x.name) for x in fields(made)} | {"trace": trace})

    def extra(self) -> dict[str, Any]:
        if self.extra_body is None:
            return {}
        try:
            held = json.loads(self.extra_body)
        except ValueError:
            held = None
        if not isinstance(held, dict):
            raise ConfigError([f"--extra-body {self.extra_body!r}: must be a JSON object"])
        return held

    def _contradictions(self) -> list[str]:
        problems = []
        ways = {"--rate": self.rate, "--concurrency": self.concurrency, "--trace": self.trace}
        given = [flag for flag, value in ways.items() if value is not None]
        if self.trace is not None and len(given) > 1:
            problems.append(f"{' and '.join(given)}: give one of them")
        if self.trace is not None:
            own = ("input_tokens", "output_tokens", "shared_prefix", "turns", "arrivals")
            problems += [
                f"--{name.replace('_', '-')}: the trace says that itself; leave it out"
                for name in own
                if getattr(self, name) is not None
            ]
        elif self.speed is not None:
            problems.append("--speed: goes with --trace")
        if self.arrivals is not None and self.rate is None and self.trace is None:
            problems.append("--arrivals: goes with --rate")
        if self.endpoint not in (None, "chat", "completions"):
            problems.append(f"--endpoint {self.endpoint!r}: valid are chat, completions")
        if (self.turns or 1) > 1 and self.endpoint == "completions":
            problems.append(f"--turns {self.turns}: a conversation needs --endpoint chat")
        files = {"--out": self.out, "--html": self.html, "--record": self.record}
        for flag, file in files.items():
            problems += unwritable(flag, file)
        return problems

    @property
    def is_chat(self) -> bool:
        return self.endpoint == "chat" or (self.endpoint is None and (self.turns or 1) > 1)


@dataclass(frozen=True)
class _Flag:
    name: str
    kind: Any
    panel: str
    help: str
    metavar: str | None = None  # None: a switch
    least: float | None = None
    envvar: str | None = None
    default: str = ""  # as shown, where the value's own default does not say it


_FLAGS = (
    _Flag("rate", float, WHEN, "Calls a second, whether the server keeps up or not", "X"),
    _Flag("arrivals", str, WHEN, "Of --rate: poisson, or fixed gaps", "NAME", default="poisson"),
    _Flag("concurrency", int, WHEN, "So many clients, each with one call at a time", "N", 1,
          default=str(CONCURRENCY)),
    _Flag("trace", Path, WHEN, "Recorded calls at their times (JSON lines)", "FILE"),
    _Flag("speed", float, WHEN, "Of --trace: so many times as fast", "X", 0.001),
    _Flag("requests", int, WHEN, "Calls (conversations with --turns)", "N", 1,
          default=f"{REQUESTS}, or all of the trace"),
    _Flag("seconds", float, WHEN, "Begin no call after this; those that run are waited for", "S"),
    _Flag("input_tokens", str, WHAT, "Prompt length: N, normal:MEAN,DEVIATION, uniform:LEAST,MOST "
          "or lognormal:MEDIAN,SIGMA", "LENGTH", default="512"),
    _Flag("output_tokens", str, WHAT, "Most tokens of an answer, likewise", "LENGTH",
          default="128"),
    _Flag("shared_prefix", str, WHAT, "What all prompts begin with: a share of each (below 1), or "
          "tokens", "X", default="0"),
    _Flag("turns", int, WHAT, "Turns of a conversation; the answer is part of the next prompt",
          "N", 1, default="1"),
    _Flag("temperature", float, WHAT, "0 is greedy", "X", 0),
    _Flag("ignore_eos", bool, WHAT, "Force answers to their full length"),
    _Flag("extra_body", str, WHAT, "Fields that each call has beside", "JSON"),
    _Flag("seed", int, WHAT, "Of all that is drawn", "N", 0),
    _Flag("model", str, WHERE, "A name in /v1/models", "NAME", default="the first"),
    _Flag("endpoint", str, WHERE, "completions, or chat (always with --turns)", "NAME",
          default="completions"),
    _Flag("tokenizer", Path, WHERE, "A folder with tokenizer.json, for prompts of known length",
          "DIR", default="the server's /tokenize"),
    _Flag("nodes", int, WHERE, "Machines of the server, for figures a node", "N", 1,
          default="from /health, else 1"),
    _Flag("gpus", int, WHERE, "Its GPUs, for figures a GPU", "N", 1,
          default="ranks in /health, else 1"),
    _Flag("api_key", str, WHERE, "If the server asks for one", "KEY", envvar="MOESERVE_API_KEY"),
    _Flag("admin_key", str, WHERE, "To read our server's layout, where it has one", "KEY",
          envvar="MOESERVE_ADMIN_KEY"),
    _Flag("warmup", int, HOW, "Calls before, that do not count", "N", 0),
    _Flag(
        "keep_cache",
        bool,
        HOW,
        "Leave our server's prefix cache as it is; else it is emptied before",
    ),
    _Flag("workers", int, HOW, "Processes that send and read", "N", 1),
    _Flag("timeout", float, HOW, "Patience with a silent server", "S", 0.001),
    _Flag("ttft_limit", float, HOW, "Most ms to the first token, for goodput", "MS", 0),
    _Flag("tpot_limit", float, HOW, "Most ms a token after it, for goodput", "MS", 0),
    _Flag("allow_errors", bool, HOW, "Exit with 0 although calls failed"),
    _Flag("json", bool, OUTPUT, JSON_HELP),
    _Flag("out", Path, OUTPUT, OUT_HELP, "FILE"),
    _Flag("html", Path, OUTPUT, "A page with plots, self-contained", "FILE"),
    _Flag("record", Path, OUTPUT, "What was sent, for --trace", "FILE"),
)  # fmt: skip


def with_ask(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command URL and the flags above, handed in as `ask`; `without` some of them."""
    defaults = {x.name: x.default for x in fields(Ask)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**arguments: Any) -> None:
            names = {x.name for x in fields(Ask)}
            own = {name: arguments.pop(name) for name in [*arguments] if name in names}
            command(ask=Ask(**own), **arguments)

        url = typer.Argument(metavar="URL", help="Of a server, such as http://127.0.0.1:8000")
        kept = [x for x in _FLAGS if x.name not in without]
        shared = [
            inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, url])
        ]
        shared += [_parameter(x, defaults[x.name]) for x in kept]
        extra = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in inspect.signature(command, eval_str=True).parameters.items()
            if name != "ask"
        ]
        parameters = [shared[0], *extra, *shared[1:]]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(flag: _Flag, default: Any) -> inspect.Parameter:
    name = "--" + flag.name.replace("_", "-")
    shown = f" [dim]\\[default: {flag.default}][/]" if flag.default else ""
    option = typer.Option(
        name,
        metavar=flag.metavar,
        help=flag.help + shown,
        envvar=flag.envvar,
        rich_help_panel=flag.panel,
        show_default=default not in (None, False),
        min=flag.least,
    )
    kind = flag.kind if default is not None else flag.kind | None
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(
        flag.name, keyword, default=default, annotation=Annotated[kind, option]
    )
