"""Do public load tools see what `moeserve bench serve` sees? The same load by each, in turn.

    moeserve serve checkpoints/tiny --ep 2 &
    python scripts/compare_load_tools.py URL --tokenizer DIR --aiperf BIN --guidellm BIN

BIN are the tools' commands, each in an environment of its own (they bring hundreds of packages; so
never in CI). Every round runs ours and each tool once, in an order that rotates: what slows the
machine for a while slows them alike. Prompts are random in each; lengths, answers forced to their
full length, and the number of clients are the same. Prints a table of medians over rounds, then one
line of JSON. How a tool counts: TTFT to the first chunk with text; "ITL" of both is our TPOT, (last
- first) / (tokens - 1); throughput is output tokens over the whole run, in aiperf from the first
request's start to the last one's end. With --paced there is no model: our front end over a rank
that takes so many ms for every step, which is then what tools should see.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.arguments import Parser, at_least, between, folder

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_second", "requests_per_second")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("url", nargs="?", help="of a server; or --paced")
    parser.add_argument(
        "--paced", type=between(0.001), metavar="MS", help="our front end, steps of this"
    )
    parser.add_argument("--tokenizer", type=tokenizer, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--aiperf")
    parser.add_argument("--guidellm")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--requests", type=at_least(1), default=100)
    parser.add_argument("--concurrency", type=at_least(1), default=4)
    parser.add_argument("--input-tokens", type=at_least(1), default=64)
    parser.add_argument("--output-tokens", type=at_least(1), default=32)
    options = parser.parse_args()
    if (options.url is None) == (options.paced is None):
        parser.error("give a URL or --paced MS, one of them")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        parser.error(f"argument url: {options.url!r}: must be http://HOST:PORT")
    for tool in ("aiperf", "guidellm"):
        if (given := getattr(options, tool)) is not None and shutil.which(given) is None:
            parser.error(f"argument --{tool}: {given!r}: no program of that name")
    with paced_server(options) if options.paced else contextlib.nullcontext():
        compare(options)


def tokenizer(text: str) -> Path:
    """A folder with a tokenizer.json."""
    if not (folder(text) / "tokenizer.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: has no tokenizer.json")
    return Path(text)


@contextlib.contextmanager
def paced_server(options: argparse.Namespace) -> Iterator[None]:
    """Our front end over a rank that takes so many ms for every step and computes nothing. It says
    "the the the ...": each token has a text, which tools wait for."""
    from moeserve.server.rehearsal import FakeRank, Rehearsal, say
    from moeserve.tokenizer import Tokenizer

    word = Tokenizer(options.tokenizer).encode(" the", add_special_tokens=False)[-1]

    class PacedRank(FakeRank):
        def _step(self) -> list[Any]:
            time.sleep(options.paced / 1e3)
            return super()._step()

    server = Rehearsal(options.tokenizer.resolve(), max_model_len=2048)
    server._make_rank = lambda rank, address: PacedRank(  # type: ignore[method-assign]
        rank, 1, address, script=say(*[word] * 2048), max_model_len=2048
    )
    with server:
        options.url = server.url
        yield


def compare(options: argparse.Namespace) -> None:
    tools = {"bench serve": ours}
    if options.aiperf:
        tools["aiperf"] = aiperf
    if options.guidellm:
        tools["guidellm"] = guidellm
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    for number in range(options.rounds):
        names = [*tools]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(tools[name](options, Path(folder), number))
            load = os.getloadavg()[0]
            print(f"round {number}: {name}: {runs[name][-1]}, load {load:.1f}", file=sys.stderr)
    print(f"{'median of rounds':28}" + "".join(f"{name:>16}" for name in tools))
    for metric in METRICS:
        values = [statistics.median(x.get(metric, float("nan")) for x in runs[n]) for n in tools]
        print(f"{metric:28}" + "".join(f"{x:16.2f}" for x in values))
    print(json.dumps({"options": vars(options), "runs": runs}, default=str))


def run(command: list[str], folder: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def ours(options: argparse.Namespace, folder: Path, number: int) -> dict[str, float]:
    file = folder / "ours.json"
    root = Path(__file__).parents[1]
    command = [
        *(sys.executable, "-m", "moeserve", "bench", "serve", options.url, "--endpoint", "chat"),
        *("--tokenizer", str(options.tokenizer.resolve()), "--out", str(file), "--ignore-eos"),
        *("--concurrency", str(options.concurrency), "--requests", str(options.requests)),
        *("--input-tokens", str(options.input_tokens)),
        *("--output-tokens", str(options.output_tokens), "--seed", str(number)),
    ]
    os.environ["PYTHONPATH"] = str(root)
    run(command, folder)
    del os.environ["PYTHONPATH"]
    report = json.loads(file.read_text())
    latency, rates = report["latency_ms"], report["throughput"]["all"]
    return {
        "ttft_ms": latency["ttft"]["p50"],
        "tpot_ms": latency["tpot"]["p50"],
        "e2e_ms": latency["e2e"]["p50"],
        "output_tokens_per_second": rates["output_tokens_per_second"],
        "requests_per_second": rates["requests_per_second"],
    }


def aiperf(options: argparse.Namespace, folder: Path, number: int) -> dict[str, float]:
    command = [
        *(options.aiperf, "profile", "--model", options.model, "--url", options.url),
        *("--endpoint-type", "chat", "--streaming", "--ui", "none"),
        *("--tokenizer", str(options.tokenizer.resolve())),
        *("--synthetic-input-tokens-mean", str(options.input_tokens)),
        *("--output-tokens-mean", str(options.output_tokens)),
        *("--request-count", str(options.requests), "--concurrency", str(options.concurrency)),
        *("--extra-inputs", "ignore_eos:true", "--warmup-request-count", "2"),
        *("--random-seed", str(number + 1), "--no-server-metrics", "--no-gpu-telemetry"),
        *("--output-artifact-dir", str(folder)),
    ]
    run(command, folder)
    file = next(folder.rglob("profile_export_aiperf.json"))
    held: dict[str, Any] = json.loads(file.read_text())

    def of(name: str, part: str) -> float:
        return float(held[name][part])

    return {
        "ttft_ms": of("time_to_first_token", "p50"),
        "tpot_ms": of("inter_token_latency", "p50"),
        "e2e_ms": of("request_latency", "p50"),
        "output_tokens_per_second": of("output_token_throughput", "avg"),
        "requests_per_second": of("request_throughput", "avg"),
    }


def guidellm(options: argparse.Namespace, folder: Path, number: int) -> dict[str, float]:
    file = folder / "guidellm.json"
    data = f"kind=synthetic_text,prompt_tokens={options.input_tokens}"
    command = [
        *(options.guidellm, "run"),
        *("--backend", f"kind=openai_http,target={options.url},model={options.model}"),
        *("--profile", f"kind=concurrent,streams={options.concurrency}"),
        *("--constraint", f"kind=max_requests,count={options.requests}"),
        *("--data", f"{data},output_tokens={options.output_tokens}"),
        *("--tokenizer", f"kind=huggingface_auto,model={options.tokenizer.resolve()}"),
        *("--output", f"kind=json,path={file}"),
    ]
    run(command, folder)
    metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]

    def of(name: str, part: str) -> float:
        held = metrics[name]["successful"]
        return float(held["mean"] if part == "mean" else held["percentiles"][part])

    return {
        "ttft_ms": of("time_to_first_token_ms", "p50"),
        "tpot_ms": of("inter_token_latency_ms", "p50"),
        "e2e_ms": 1e3 * of("request_latency", "p50"),
        "output_tokens_per_second": of("output_tokens_per_second", "mean"),
        "requests_per_second": of("requests_per_second", "mean"),
    }


if __name__ == "__main__":
    main()
