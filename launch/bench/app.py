"""`moeserve bench ...`: the command line of everything that measures.

Parses and hands on, as `launch.cli` does; each command has a file of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.bench.json_flag import JSON_HELP, OUT_HELP, ResultCommand
from launch.bench.kernels_command import kernels
from launch.bench.serve_flags import WHEN, Ask, with_ask
from launch.commands import Command, Group
from launch.settings import OFFLINE, Given, with_settings
from moeserve.errors import ConfigError

WORK, HOW, OUTPUT = "What travels", "How it is measured", "Output"
DISPATCH_EXAMPLES = (
    "Examples: `moeserve bench dispatch --emulate` (all backends, without a GPU); "
    "`moeserve bench dispatch --dispatch torch,allgather --sweep tokens --plot tokens.png`"
)


class _BenchGroup(Group):
    """A checkpoint in place of a command means `offline`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (os.sep in args[0] or Path(args[0]).is_dir()):
            args = ["offline", *args]
        return super().resolve_command(ctx, args)


bench_app = typer.Typer(
    name="bench",
    cls=_BenchGroup,
    help="Measure: a server under load, a checkpoint offline, speculation, a layer's all-to-alls.",
    epilog="`bench CHECKPOINT` is `bench offline CHECKPOINT`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench_app.command(cls=ResultCommand)
@with_ask()
def serve(ask: Ask) -> None:
    """Drive any OpenAI-style server, and report tokens/s of node and GPU, latencies, errors.

    Ctrl-C ends it with the report of what was done. Exit code 1: answers are missing or too short.
    """
    from launch.bench.serve import serve as run

    run(ask)


@bench_app.command(cls=ResultCommand)
@with_ask(without=("rate", "concurrency", "trace", "speed", "record"))
def sweep(
    ask: Ask,
    rates: Annotated[
        str | None,
        typer.Option(metavar="R,R,...", help="Calls a second, in turn", rich_help_panel=WHEN),
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Rates up to the knee, found by itself: the default",
            rich_help_panel=WHEN,
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A picture: .png or .svg", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Climb a ladder of rates to the knee; goodput is answers/s within the limits of TTFT and TPOT.

    Without limits: five times the TTFT and three times the TPOT of one call alone.
    """
    from launch.bench.sweep import Sweep

    if auto and rates is not None:
        raise ConfigError(["--auto and --rates: give one of them"])
    Sweep(rates, plot).run(ask)


@bench_app.command(cls=Command)
def compare(
    these: Annotated[Path, typer.Argument(metavar="A.json", help="Of bench serve, or of sweep")],
    those: Annotated[Path, typer.Argument(metavar="B.json", help="The same of another run")],
    force: Annotated[
        bool, typer.Option("--force", help="Compare although settings differ")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Ratios B / A of two runs of the same load: call by call, their median. Says what differs."""
    from launch.bench.compare import Compare

    Compare(these, those, force, json).run()


@bench_app.command(cls=ResultCommand)
@with_settings(
    OFFLINE,
    without=("model.served_name", "model.chat_template", "engine.lockstep_timeout", "engine.seed"),
)
def offline(
    given: Given,
    batch: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sequences at once, comma-separated")
    ] = "1,8,32",
    prompt_length: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens a prompt, decode")
    ] = 128,
    output_length: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens an answer, decode")
    ] = 64,
    prefill_length: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens a prompt, prefill; 0: leave it out")
    ] = 1024,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs a row; the median is shown")
    ] = 3,
    record_experts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the load of each expert (.npz)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=OUT_HELP)] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One more run, not counted, for Perfetto (.json)"),
    ] = None,
) -> None:
    """Decode and prefill of CHECKPOINT without HTTP: tables, and where stdout is no terminal one
    line of JSON after them; with --json that alone."""
    from launch.bench.offline import Bench

    lengths = (prompt_length, output_length, prefill_length)
    Bench(batch, *lengths, repeat, record_experts, json, out, trace).run(given)


@bench_app.command(cls=Command)
@with_settings(
    OFFLINE,
    without=(
        *("model.served_name", "model.chat_template", "engine.lockstep_timeout", "engine.seed"),
        "speculate.method",
    ),
)
def speculate(
    given: Given,
    speculate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOW",
            help="A drafter, as of serve; give it again for more of them "
            r"[dim]\[default: mtp:auto][/]",
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            metavar="K,...", help="Depths of drafters that name none, such as 1,2,4 or 2,auto"
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences, over all ranks")] = "1",
    prompt_length: Annotated[str, typer.Option(metavar="N", help="Tokens a prompt")] = "48",
    output_length: Annotated[str, typer.Option(metavar="N", help="Tokens an answer")] = "64",
    temperature: Annotated[str, typer.Option(metavar="X", help="Of sampling; 0: greedy")] = "0",
    repeat: Annotated[str, typer.Option(metavar="N", help="Pairs a row; the median counts")] = "9",
    warmup: Annotated[str, typer.Option(metavar="N", help="Pairs before, not counted")] = "1",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=r"Text that prompts are cut from [dim]\[default: the checkpoint's heldout/][/]",
        ),
    ] = None,
    seed: Annotated[
        str, typer.Option(metavar="N", help="Of all that is drawn: prompts, samples")
    ] = "0",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture too; ends in .png or .svg")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Speed-up of decode by drafts against none, in pairs; acceptance by position; and the speed-up
    that Leviathan's theorem predicts from it. Exit code 1: tokens differ."""
    from launch.bench.speculate import SpeculateBench
    from launch.bench.speculate_flags import SpeculateFlags

    flags = SpeculateFlags(
        speculate=tuple(speculate or ()),
        k=k,
        batch=batch,
        repeat=repeat,
        warmup=warmup,
        prompt_length=prompt_length,
        output_length=output_length,
        temperature=temperature,
        seed=seed,
        prompts=prompts,
        plot=plot,
    )
    SpeculateBench(flags, json).run(given)


@bench_app.command(cls=Command, epilog=DISPATCH_EXAMPLES)
def dispatch(
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Of expert loads, with --skew trace"),
    ] = None,
    dispatch: Annotated[
        str, typer.Option(metavar="NAME,...", help="Backends, or all", rich_help_panel=WORK)
    ] = "all",
    ep: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help=r"Ranks [dim]\[default: 2; under torchrun its own; with --sweep ranks 8][/]",
            rich_help_panel=WORK,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help=r"Tokens a rank [dim]\[default: 1,8,64,512; with --emulate 1,8,64][/]",
            rich_help_panel=WORK,
        ),
    ] = None,
    hidden: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help=r"Values a token [dim]\[default: 7168; with --emulate 2048][/]",
            rich_help_panel=WORK,
        ),
    ] = None,
    top_k: Annotated[
        str, typer.Option(metavar="N", help="Experts a token", rich_help_panel=WORK)
    ] = "8",
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help=r"Experts of the layer [dim]\[default: 256, or as many as FILE has; with "
            "--emulate 32][/]",
            rich_help_panel=WORK,
        ),
    ] = None,
    redundant: Annotated[
        str,
        typer.Option(metavar="N", help="Copies of hot experts", rich_help_panel=WORK),
    ] = "0",
    skew: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="uniform, zipf:S (the i-th hottest expert 1 / i^S as often), or trace FILE",
            rich_help_panel=WORK,
        ),
    ] = "uniform",
    array: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One of several arrays in FILE", rich_help_panel=WORK),
    ] = None,
    wire: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="model (bfloat16), fp8, fp8_ue8m0", rich_help_panel=WORK
        ),
    ] = "model,fp8",
    form: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="How results come home: pairs (deterministic), summed, or auto: pairs where a "
            "backend can, else summed",
            rich_help_panel=WORK,
        ),
    ] = "auto",
    steps: Annotated[
        str, typer.Option(metavar="N", help="Layers that count", rich_help_panel=HOW)
    ] = "20",
    warmup: Annotated[
        str, typer.Option(metavar="N", help="Layers before them", rich_help_panel=HOW)
    ] = "3",
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate",
            help="DeepEP and nvshmem as their emulation on CPUs: bytes and limits are the "
            "library's, times say nothing of it",
            rich_help_panel=HOW,
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="cpu, cuda, or auto: cuda where each rank here has a GPU of its own",
            rich_help_panel=HOW,
        ),
    ] = "auto",
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Growth with ranks, tokens or hidden", rich_help_panel=HOW
        ),
    ] = None,
    seed: Annotated[
        str, typer.Option(metavar="N", help="Of all that is drawn", rich_help_panel=HOW)
    ] = "0",
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A picture too; ends in .png or .svg", rich_help_panel=OUTPUT
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object on stdout", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Time and bytes of a layer's two all-to-alls, beside a plain exchange of the least bytes.

    Each backend's results are checked against the slow twin before it is timed.
    Starts its own ranks, or is one under torchrun. Exit code 1: a result is wrong,
    or a backend that was named (of all: every one) could not be measured.
    """
    from launch.bench.dispatch import DispatchBench
    from launch.bench.dispatch_flags import DispatchFlags

    flags = DispatchFlags(
        backends=dispatch,
        ep=ep,
        tokens=tokens,
        hidden=hidden,
        top_k=top_k,
        experts=experts,
        redundant=redundant,
        skew=skew,
        trace=trace,
        array=array,
        wire=wire,
        form=form,
        steps=steps,
        warmup=warmup,
        emulate=emulate,
        device=device,
        sweep=sweep,
        seed=seed,
        plot=plot,
    )
    DispatchBench(flags, json).run()


bench_app.command(cls=Command)(kernels)
