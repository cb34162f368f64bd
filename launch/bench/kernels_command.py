"""`moeserve bench kernels` as it is typed: one command, three ways to look at kernels.

Knows its flags and which of the three uses which: one that does nothing in the way that was asked
for is an error, found before any work as all that is wrong with what was typed is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from launch.bench.json_flag import JSON_HELP
from launch.choices import not_one_of
from launch.output import unwritable

DEVICES = ("cpu", "cuda")
ON_CPU, ON_CUDA, COMPILED = "--device cpu", "--device cuda", "--compile-only"
# By flag: the ways that use it. (--only and --json are of all.)
USED_BY = {
    "--kernels": (ON_CPU,),
    "--seconds": (ON_CPU,),
    "--threads": (ON_CPU,),
    "--renew": (COMPILED,),
    "--device": (ON_CPU, ON_CUDA),
    "--budget": (ON_CUDA,),
    "--winners": (ON_CUDA,),
}
KERNELS, SECONDS, BUDGET = "auto", 0.5, 300.0


def kernels(
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Kernels whose name contains this")
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=rf"auto, native or torch [dim]\[default: {KERNELS}][/]"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.01, help=rf"Time for each kernel [dim]\[default: {SECONDS}][/]"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads; default: torch's")
    ] = None,
    compile_only: Annotated[
        bool,
        typer.Option(
            "--compile-only",
            help="Compile the GPU kernels for sm_90a and sm_100a, without a GPU, and compare "
            "registers, spills, shared memory and instructions with the record",
        ),
    ] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="With --compile-only: what comes out is the record now")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="cpu, or cuda: the GPU kernels at DeepSeek-V3's shapes, beside "
            r"libraries that are installed [dim]\[default: cpu][/]",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=1,
            help=rf"With --device cuda: seconds in all [dim]\[default: {BUDGET:.0f}][/]",
        ),
    ] = None,
    winners: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --device cuda: who was fastest at which shape, to choose by"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Time each kernel of a layer beside the best that plain torch has, in turn, and beside what
    this machine can do: its fastest product, its fastest read.

    Exit code 1: a kernel failed, does not compile, or is worse than recorded, or --budget did not
    suffice for all shapes. 3: all compiled, and
    none of them is in the record of this triton, so nothing was compared.
    """
    given = {
        "--kernels": kernels,
        "--seconds": seconds,
        "--threads": threads,
        "--renew": renew or None,
        "--device": device,
        "--budget": budget,
        "--winners": winners,
    }
    way = COMPILED if compile_only else ON_CUDA if device == "cuda" else ON_CPU
    problems = unused(way, given)
    if device is not None and device not in DEVICES:
        problems.append(not_one_of("--device", device, DEVICES))
    if way == ON_CUDA:
        problems += unwritable("--winners", winners)
    if way == COMPILED:
        from launch.bench.kernels_compiled import KernelCompilation

        raise typer.Exit(KernelCompilation(only or "", renew).run(as_json, problems))
    if way == ON_CUDA:
        from launch.bench.kernels_gpu import GpuKernelBench

        bench = GpuKernelBench(only or "", budget or BUDGET, winners)
        raise typer.Exit(bench.run(as_json, problems))
    from launch.bench.kernels import KernelBench

    KernelBench(only or "", kernels or KERNELS, seconds or SECONDS, threads).run(as_json, problems)


def unused(way: str, given: dict[str, Any]) -> list[str]:
    """A line for each flag that was given and is none of this way's."""
    return [
        f"{flag}: only with {' or '.join(ways)}; {way} does not use it"
        for flag, ways in USED_BY.items()
        if given[flag] is not None and way not in ways
    ]
