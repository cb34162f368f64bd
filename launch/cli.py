"""The command line: serve, generate, chat, bench, version. Parses and hands on; nothing else.

Heavy imports live inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.bench.app import bench_app
from launch.capacity.command import plan
from launch.cluster.app import launch_app, status, stop
from launch.commands import Command, Group
from launch.doctor.command import doctor
from launch.experts.app import experts_app
from launch.settings import OFFLINE, SERVING, Given, with_settings

EXIT_CODES = (
    "Exit codes: 0 done, or stopped as asked; 1 it failed; 2 wrong flags, settings or files; "
    "3 a rank died, or the front end was killed; 130 Ctrl-C before it was done."
)
INTERRUPTED = 130
PROMPTS, SAMPLING, ANSWER = "Prompts", "Sampling", "Answer"  # panels of `generate --help`


app = typer.Typer(
    name="moeserve",
    cls=Group,
    help="Serve DeepSeek-V3-class mixture-of-experts models with wide expert parallelism.",
    epilog=EXIT_CODES,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from launch.version import print_version

        print_version()
        raise typer.Exit()


@app.callback()
def before(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Versions of moeserve and of what it computes with",
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=Command)
@with_settings(SERVING)
def serve(
    given: Given,
    frontend: Annotated[
        str | None, typer.Option(hidden=True, help="Use a front end that exists: tcp://...")
    ] = None,
) -> None:
    """Serve CHECKPOINT over an OpenAI-style API. Under torchrun each process is one rank."""
    from launch.serve import serve as run

    run(given, frontend, sys.argv[1:])


@app.command(cls=Command)
@with_settings(OFFLINE, without=("engine.lockstep_timeout",))
def generate(
    given: Given,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A prompt; may be given several times", rich_help_panel=PROMPTS
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt from a file; - is standard input, the default",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="IDS",
            help="A prompt as token ids, such as 1,2,3; needs no tokenizer",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Put prompts through the chat template", rich_help_panel=PROMPTS
        ),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest answer", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="0 is greedy", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Choose among the likeliest tokens that make up this share",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Choose among this many of the likeliest tokens; 0: all",
            rich_help_panel=SAMPLING,
        ),
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End before this text; may be given several times",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-text", rich_help_panel=SAMPLING)
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout", rich_help_panel=ANSWER)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: log-probabilities, and N alternatives",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    record_experts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Save the load of each expert (.npz)", rich_help_panel=ANSWER
        ),
    ] = None,
) -> None:
    """Continue prompts without a server; text as it comes, or one JSON object."""
    from launch.generate import Ask
    from launch.generate import generate as run

    ask = Ask(
        prompts=tuple(prompt or ()),
        prompt_file=prompt_file,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        as_json=json,
        token_ids=tuple(prompt_ids or ()),
        logprobs=logprobs,
        record_experts=record_experts,
    )
    run(given, ask)


@app.command(cls=Command)
def chat(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="Of a server, such as http://127.0.0.1:8000"),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=r"A name in /v1/models [dim]\[default: the first][/]"),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told first")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer")] = 512,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy")] = 0.7,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="MOESERVE_API_KEY", help="If the server asks for one"),
    ] = None,
) -> None:
    """Talk to a server. /reset forgets, /help helps, /quit or /exit leaves, Ctrl-C stops an answer.

    In a pipe each line of standard input is a message.
    """
    from launch.chat import Chat

    Chat(url, model, system, max_tokens, temperature, api_key).run()


app.add_typer(bench_app)
app.add_typer(experts_app)
app.add_typer(launch_app)


app.command(cls=Command)(plan)
app.command(cls=Command)(doctor)
app.command(cls=Command)(status)
app.command(cls=Command)(stop)


@app.command(cls=Command)
def trace(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of a server, such as http://127.0.0.1:8000")
    ],
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps that have tokens; 1000 at most")
    ] = 32,
    seconds: Annotated[
        float, typer.Option(metavar="SEC", help="End by then, with the steps that came")
    ] = 60.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="For Perfetto (.json)")] = Path(
        "trace.json"
    ),
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="MOESERVE_ADMIN_KEY", help="If the server asks for one"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="MOESERVE_API_KEY",
            help="The same, of a server that has no admin key",
        ),
    ] = None,
) -> None:
    """Trace steps of all ranks of a server to one Perfetto file; says who waits for whom."""
    from launch.trace import TraceCommand

    TraceCommand(url, out, steps, seconds, json, admin_key or api_key).run()


@app.command(cls=Command)
def version() -> None:
    """Print versions of moeserve and of what it computes with."""
    from launch.version import print_version

    print_version()


def main() -> None:
    """Run the command line; typed errors become lines on stderr and an exit code."""
    signals = _hear_signals()
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED and isinstance(_cause(end), KeyboardInterrupt):
            print("moeserve: stopped before it was done", file=sys.stderr)
        raise
    except BrokenPipeError:  # the reader of our output left (`moeserve ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from launch.failure import exit_code_of, is_typed

        if is_typed(error):
            for line in str(error).splitlines():
                print(f"moeserve: {line}", file=sys.stderr)
            sys.exit(exit_code_of(error))
        # A library that is interrupted while it is imported may swallow that and break later.
        if signal.SIGINT in _heard(signals):
            print("moeserve: stopped before it was done", file=sys.stderr)
            sys.exit(INTERRUPTED)
        raise


def _hear_signals() -> int:
    """Have the numbers of signals written to a pipe, beside whatever handles them -> its end."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _heard(signals: int) -> bytes:
    try:
        return os.read(signals, 1024)
    except BlockingIOError:
        return b""


def _cause(end: SystemExit) -> BaseException | None:
    # typer makes its own exception of a Ctrl-C, and exits because of that.
    return end.__context__.__cause__ if end.__context__ is not None else None
