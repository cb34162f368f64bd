"""`moeserve plan`: its flags. Knows typer; heavy imports wait until it is known what is asked for.

What flags mean: `asked`; what is done with them: `run`; rehearsals: launch/plan.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MODEL, LAYOUT, LOAD, ASK, OUT, REHEARSE = (
    "What is deployed",
    "Layout",
    "Load and limits",
    "What to do",
    "Output",
    "Rehearsal",
)
_NUMBER, _NAME = "N", "NAME"


def _flag(panel: str, metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A config.json, a checkpoint folder, deepseek-v3 or kimi-k2: no weights read; "
            "with --rehearse --routing trace: the file of loads",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        _flag(
            MODEL,
            _NAME,
            "A published deployment, which other flags change: v3-prefill-32, v3-decode-72, "
            "v3-decode-144, v3-decode-320 or k2-decode-96",
        ),
    ] = None,
    gpus: Annotated[
        str | None, _flag(MODEL, _NUMBER, "GPUs of a pool, over all of which experts are sharded")
    ] = None,
    gpu: Annotated[str | None, _flag(MODEL, _NAME, "h100, h800, h200, h20, b200 or gb200")] = None,
    phase: Annotated[
        str | None, _flag(MODEL, _NAME, r"prefill, decode or both [dim]\[default: both][/]")
    ] = None,
    redundant: Annotated[
        str | None,
        _flag(
            LAYOUT,
            _NUMBER,
            "Copies of experts a layer; auto: as many as fill the slots of all GPUs",
        ),
    ] = None,
    shared: Annotated[
        str | None, _flag(LAYOUT, _NAME, "The shared expert: replicated, or hosted in slots")
    ] = None,
    tp: Annotated[
        str | None, _flag(LAYOUT, _NUMBER, "GPUs that share attention (moeserve itself: 1)")
    ] = None,
    dispatch: Annotated[
        str | None,
        _flag(
            LAYOUT,
            _NAME,
            "How rows travel: deepep_ll, deepep_normal, deepep_v2, nvshmem, torch, allgather, "
            "auto, or prefill=NAME,decode=NAME; with --rehearse torch or allgather",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        _flag(
            LAYOUT,
            _NAME,
            "Groups of experts: free, node (each stays on one node), or auto: what is predicted to "
            "be quicker",
        ),
    ] = None,
    wire: Annotated[
        str | None,
        _flag(LAYOUT, _NAME, "Rows to the experts: fp8 or model; with --rehearse also fp8_ue8m0"),
    ] = None,
    no_overlap: Annotated[
        bool,
        typer.Option("--no-overlap", help="Without two-batch overlap", rich_help_panel=LAYOUT),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Which attention our kernels count, as for serve (the fitted model has no modes)",
            rich_help_panel=LAYOUT,
        ),
    ] = True,
    kv_cache_dtype: Annotated[
        str | None, _flag(LAYOUT, _NAME, "How the KV cache holds values: model (BF16) or fp8")
    ] = None,
    kv_fp8: Annotated[
        bool,
        typer.Option("--kv-fp8", help="Short for --kv-cache-dtype fp8", rich_help_panel=LAYOUT),
    ] = False,
    sequences: Annotated[
        str | None,
        _flag(
            LOAD,
            _NUMBER,
            "Running on a GPU; auto: the most that memory, dispatch and --tpot allow",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        _flag(LOAD, _NUMBER, "Prompt tokens of a GPU in a step; auto: as memory and --ttft allow"),
    ] = None,
    drafts: Annotated[str | None, _flag(LOAD, _NUMBER, "Tokens that MTP proposes a step")] = None,
    acceptance: Annotated[
        str | None,
        _flag(LOAD, "X", r"Share of them that is kept, each if the last was \[default: 0.85]"),
    ] = None,
    input_tokens: Annotated[
        str | None, _flag(LOAD, _NUMBER, r"Mean of a prompt \[default: 4096]")
    ] = None,
    output_tokens: Annotated[
        str | None, _flag(LOAD, _NUMBER, r"Mean of an answer \[default: 1024]")
    ] = None,
    cached_share: Annotated[
        str | None, _flag(LOAD, "X", "Share of prompt tokens found in the prefix cache")
    ] = None,
    trace: Annotated[
        Path | None,
        _flag(LOAD, "FILE", "Loads of experts, by which the layout is balanced: a recording"),
    ] = None,
    array: Annotated[
        str | None, _flag(LOAD, _NAME, "One of several arrays in that file, or a phase")
    ] = None,
    ttft: Annotated[str | None, _flag(LOAD, "S", "Limit of TTFT, such as 2 or 500ms")] = None,
    tpot: Annotated[str | None, _flag(LOAD, "S", "Limit of TPOT, such as 0.05 or 50ms")] = None,
    longest: Annotated[
        str | None,
        _flag(LOAD, _NUMBER, "Positions that a static reservation holds; default: the model's"),
    ] = None,
    price: Annotated[
        str | None, _flag(LOAD, "X", "Dollars of a GPU-hour; default: of the GPU's profile")
    ] = None,
    host_memory: Annotated[
        str | None, _flag(LOAD, "SIZE", "Of a node, such as 2TB; default: of the profile")
    ] = None,
    shared_memory: Annotated[
        str | None, _flag(LOAD, "SIZE", "/dev/shm of a node, such as 64GB, to be checked")
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Best layouts of a prefill and a decode pool within limits, and their ratio",
            rich_help_panel=ASK,
        ),
    ] = False,
    max_gpus: Annotated[
        str | None, _flag(ASK, _NUMBER, r"Of a pool, with --search \[default: 320]")
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Published measurements beside what is predicted",
            rich_help_panel=ASK,
        ),
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="A step kernel by kernel, by our kernels' counts of bytes and FLOPs (in --json "
            "always)",
            rich_help_panel=OUT,
        ),
    ] = False,
    predict: Annotated[
        str | None,
        _flag(
            ASK,
            _NAME,
            "Steps, and so layouts, waits and prices: fitted (on published throughputs) or kernels "
            r"(counts of bytes and FLOPs of ours) [dim]\[default: fitted][/]",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="End with exit code 1 if a rule is violated (or, with --search, no layout found)",
            rich_help_panel=ASK,
        ),
    ] = False,
    plot: Annotated[
        Path | None, _flag(OUT, "FILE", "A picture as well: .png, .svg or .html")
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object on stdout, and nothing else there", rich_help_panel=OUT
        ),
    ] = False,
    rehearse: Annotated[
        str | None,
        _flag(
            REHEARSE,
            _NAME,
            "Run a layout at its full number of ranks on tiny tensors, here: v3-decode-320, "
            "v3-decode-144 or v3-prefill-32",
        ),
    ] = None,
    routing: Annotated[
        str | None, _flag(REHEARSE, _NAME, r"random, or trace: as often as in FILE")
    ] = None,
    seed: Annotated[str | None, _flag(REHEARSE, _NUMBER, "Of all that is drawn")] = None,
) -> None:
    """Will it fit, how fast is it, what does it cost: memory, sequences, traffic, TTFT, TPOT and
    prices of a deployment, from config.json alone; every rule that it violates, with the nearest
    valid values.

    A violated rule is part of the report: the exit code stays 0 unless --check is given.
    """
    from launch.plan import Rehearse, run_rehearsal

    given: dict[str, Any] = {
        "preset": preset,
        "gpus": gpus,
        "gpu": gpu,
        "phase": phase,
        "redundant": redundant,
        "shared": shared,
        "tp": tp,
        "groups": groups,
        "no_overlap": no_overlap,
        "no_deterministic": not deterministic,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_fp8": kv_fp8,
        "sequences": sequences,
        "tokens": tokens,
        "drafts": drafts,
        "acceptance": acceptance,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cached_share": cached_share,
        "ttft": ttft,
        "tpot": tpot,
        "longest": longest,
        "price": price,
        "host_memory": host_memory,
        "shared_memory": shared_memory,
        "max_gpus": max_gpus,
    }
    doing: dict[str, Any] = {"search": search, "validate": validate, "check": check, "plot": plot}
    doing["predict"] = predict
    if rehearse is not None:
        asked = Rehearse(rehearse, routing, model, trace, seed, dispatch, wire, json, array)
        run_rehearsal(asked, _flags(given | doing | {"kernels": kernels}))
        return
    from launch.capacity.asked import Typed
    from launch.capacity.run import Run

    typed = Typed(
        model=model,
        dispatch=dispatch,
        wire=wire,
        trace=trace,
        array=array,
        predict=predict,
        **given,
    )
    unused = _flags({"routing": routing, "seed": seed})
    if validate:
        others = {"dispatch": dispatch, "wire": wire, "trace": trace, "array": array}
        unused += (["MODEL"] if model else []) + _flags(given | others | {"search": search})
    Run(typed, search, validate, check, plot, json, kernels, unused).run()


def _flags(given: dict[str, Any]) -> list[str]:
    """Those that were given."""
    return ["--" + name.replace("_", "-") for name, value in given.items() if value]
