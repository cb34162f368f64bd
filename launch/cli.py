"""The command line: serve, generate, chat, bench, version. Parses and hands on; nothing else.

Heavy imports live inside the commands, so that `--help` answers at once. Exit codes: 0 done or
stopped, 1 a typed error, 2 wrong settings or files, 3 a rank died.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.settings import OFFLINE, SERVING, Given, with_settings

app = typer.Typer(
    name="moeserve",
    help="Serve DeepSeek-V3-class mixture-of-experts models with wide expert parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
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


@app.command()
@with_settings(OFFLINE, without=("engine.lockstep_timeout",))
def generate(
    given: Given,
    prompt: Annotated[list[str] | None, typer.Option(help="May be given several times")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A prompt from a file; - reads standard input")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="A prompt as token ids, such as 1,2,3")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts through the chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: all")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after end-of-text")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and N alternatives")
    ] = None,
    json: Annotated[bool, typer.Option(help="One JSON object on stdout")] = False,
) -> None:
    """Continue prompts without a server (from --prompt, --prompt-file or standard input)."""
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
    )
    run(given, ask)


@app.command()
def chat(
    url: Annotated[str, typer.Argument(help="Of a server, such as http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="A name in /v1/models [the first]")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    api_key: Annotated[str | None, typer.Option(envvar="MOESERVE_API_KEY")] = None,
) -> None:
    """Talk to a server. /reset forgets, /quit leaves, Ctrl-C stops an answer."""
    from launch.chat import Chat

    Chat(url, model, system, max_tokens, temperature, api_key).run()


@app.command()
@with_settings(
    OFFLINE,
    without=("model.served_name", "model.chat_template", "engine.lockstep_timeout", "engine.seed"),
)
def bench(
    given: Given,
    batch: Annotated[str, typer.Option(help="Sequences at once, comma-separated")] = "1,8,32",
    prompt_length: Annotated[int, typer.Option(min=1)] = 128,
    output_length: Annotated[int, typer.Option(min=2)] = 64,
    prefill_length: Annotated[int, typer.Option(min=0, help="0: leave prefill out")] = 1024,
    repeat: Annotated[int, typer.Option(min=1, help="Runs a row; the median is shown")] = 3,
) -> None:
    """Measure decode and prefill offline: a table, then one line of JSON."""
    from launch.bench import Bench

    Bench(batch, prompt_length, output_length, prefill_length, repeat).run(given)


@app.command()
def version() -> None:
    """Print versions of moeserve and of what it computes with."""
    import importlib.metadata as metadata
    import platform

    print(f"moeserve {metadata.version('moeserve')}")
    print(f"python {platform.python_version()}")
    for library in ("torch", "safetensors", "tokenizers"):
        print(f"{library} {metadata.version(library)}")


def main() -> None:
    """Run the command line; typed errors become lines on stderr and an exit code."""
    try:
        app()
    except BrokenPipeError:  # the reader of our output left (`moeserve ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from launch.failure import exit_code_of, is_typed

        if not is_typed(error):
            raise
        for line in str(error).splitlines():
            print(f"moeserve: {line}", file=sys.stderr)
        sys.exit(exit_code_of(error))
