"""The flags of ServeConfig's settings: one table, shared by every command that starts an engine.

A test holds the table and ServeConfig together. Values stay text until ServeConfig validates them
all at once. Imports nothing heavy: this is read for `--help`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.naming import Typed
from launch.output import no_file
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve.config import ServeConfig


@dataclass(frozen=True)
class Flag:
    """One setting's flag. default: as shown in the help. A secret may come from the
    environment: a command line shows in lists of processes."""

    section: str
    field: str
    metavar: str  # "" for a switch
    help: str
    default: str = ""
    envvar: str | None = None  # read where the flag is not given
    letter: str = ""  # its short form, such as -q

    @property
    def option(self) -> str:
        first = {"rebalance": "enabled", "speculate": "method"}.get(self.section)
        if first is None:
            return f"--{self.field.replace('_', '-')}"
        # These sections' settings say little alone.
        rest = "" if self.field == first else f"-{self.field.replace('_', '-')}"
        return f"--{self.section}{rest}"

    @property
    def declaration(self) -> str:
        """--x/--no-x for a switch that is on by default; one that is off is only turned on."""
        both = self.switch and self.default == "on"
        return f"{self.option}/--no-{self.option[2:]}" if both else self.option

    @property
    def switch(self) -> bool:
        return not self.metavar


FLAGS = (
    Flag("model", "served_name", "NAME", "Name in /v1/models", "the folder's name"),
    Flag("model", "dtype", "NAME", "auto, float32 or bfloat16", "auto"),
    Flag("model", "kernels", "NAME", "auto, native, torch or triton (GPUs)", "auto"),
    Flag("model", "kernel_table", "FILE", "Which implementation won at which shape, on this GPU"),
    Flag("model", "weights", "NAME", "FP8 blocks in memory: auto, fp8 or dequantised", "auto"),
    Flag("model", "mtp", "", "Load the multi-token-prediction layer, where there is one", "on"),
    Flag("model", "chat_template", "FILE", "A jinja2 file to use instead of the checkpoint's"),
    Flag("parallel", "ep", "N", "Ranks the experts are sharded over", "1"),
    Flag("parallel", "redundant_experts", "N", "Copies of experts a layer, over all ranks", "0"),
    Flag("parallel", "placement", "FILE", "A given placement (npz or JSON)"),
    Flag(
        "parallel",
        "shared_expert",
        "NAME",
        "replicated on each rank, or hosted in slots",
        "replicated",
    ),
    Flag(
        "parallel", "layout", "NAME", "prefill-ep32, decode-ep144 or decode-ep320: sets the above"
    ),
    Flag(
        "parallel",
        "dispatch",
        "NAME",
        "How tokens travel: local, torch, allgather, deepep_ll, deepep_normal, deepep_v2, nvshmem "
        "or auto; or prefill=NAME,decode=NAME (moeserve doctor says which can run)",
        "auto",
    ),
    Flag("parallel", "wire", "NAME", "How rows travel to experts: auto, model or fp8", "auto"),
    Flag(
        "parallel",
        "overlap",
        "N",
        "Tokens, 1 or more, from which halves overlap; auto or off",
        "auto",
    ),
    Flag("parallel", "emulate", "", "On CPUs, the emulation of what --dispatch names", "off"),
    Flag("parallel", "interface", "NAME", "Of several machines' ranks; or an address, a subnet"),
    Flag("cache", "block_size", "N", "Tokens a KV block", "16"),
    Flag(
        "cache",
        "kv_memory",
        "SIZE",
        "Memory of a rank's KV cache, such as 512MiB",
        "by what is free",
    ),
    Flag("cache", "kv_tokens", "N", "Tokens in a rank's KV cache, instead of --kv-memory"),
    Flag("cache", "kv_cache_dtype", "NAME", "How the KV cache holds values: model or fp8", "model"),
    Flag("cache", "prefix_cache", "", "Share cached blocks of equal prefixes", "on"),
    Flag("schedule", "max_num_sequences", "N", "Sequences running at once, a rank", "64"),
    Flag("schedule", "token_budget", "N", "Tokens a step, a rank", "512"),
    Flag("schedule", "chunk_size", "N", "Most prompt tokens of one sequence in a step"),
    Flag("schedule", "max_model_len", "N", "Longest sequence", "the model's"),
    Flag("engine", "deterministic", "", "The same tokens for every layout and company", "on"),
    Flag("engine", "seed", "N", "Seed of requests that bring none", "0"),
    Flag("engine", "lockstep_timeout", "SEC", "Silence after which /health says stalled", "60"),
    Flag("engine", "threads", "N", "Compute threads a rank", "cores / ranks here"),
    Flag("engine", "device", "NAME", "Where to compute: auto, cpu or cuda", "auto"),
    Flag("engine", "graphs", "NAME", "On GPUs, captured decode steps: auto or off", "auto"),
    Flag("engine", "ahead", "NAME", "Plan a step while one runs: auto (GPUs), on or off", "auto"),
    Flag("engine", "graph_memory", "SIZE", "Most memory of captured steps, a rank", "2GiB"),
    Flag("engine", "quiet", "", "Say nothing of how it starts; errors only", "off", letter="-q"),
    Flag("rebalance", "enabled", "", "Move experts while serving, by itself", "off"),
    Flag("rebalance", "interval_steps", "N", "Steps between looks at the load", "2000"),
    Flag("rebalance", "threshold", "X", "Mean over busiest rank load that will do", "0.95"),
    Flag("rebalance", "min_gain", "X", "Gain of that below which nothing moves", "0.01"),
    Flag("rebalance", "min_picks", "X", "Picks an expert that a window must have", "16"),
    Flag("rebalance", "windows", "N", "How many of the last looks are planned for", "1"),
    Flag("rebalance", "robust", "NAME", "How they join: mean, max, mean+<z>*std", "mean"),
    Flag("rebalance", "group_policy", "NAME", "Groups of experts: free, node, priced", "free"),
    Flag("rebalance", "max_moved_slots", "N", "Most slots that change at once"),
    Flag("rebalance", "max_staging_bytes", "SIZE", "A rank's spare memory", "one layer's slots"),
    Flag("rebalance", "deadline", "SEC", "Patience with a batch of layers", "60"),
    Flag("rebalance", "max_rate", "SIZE", "Most bytes a second into a rank", "no limit"),
    Flag(
        "speculate",
        "method",
        "HOW",
        "Who drafts tokens, K deep: off, auto, mtp:K, ngram:K, eagle:PATH, medusa:PATH, draft:PATH",
        "off",
    ),
    Flag("speculate", "rule", "NAME", "How drafts are judged: same or rejection", "same"),
    Flag("speculate", "nodes", "N", "Drafts in a tree of eagle or medusa, at most", "a chain"),
    Flag("server", "host", "ADDR", "Address to listen on", "127.0.0.1"),
    Flag("server", "port", "N", "Port to listen on; 0 takes any free one", "8000"),
    Flag("server", "max_queue", "N", "Requests in flight before 429", "512"),
    Flag("server", "drain_seconds", "SEC", "Patience with running requests at a stop", "30"),
    Flag("server", "rank_timeout", "SEC", "Silence of a rank's host after which it is dead", "20"),
    Flag(
        "server",
        "api_key",
        "KEY",
        "Asked of clients as 'Authorization: Bearer KEY'",
        envvar="MOESERVE_API_KEY",
    ),
    Flag(
        "server",
        "admin_key",
        "KEY",
        "Asked likewise of /experts, /debug, /reset_prefix_cache",
        "the API key",
        "MOESERVE_ADMIN_KEY",
    ),
    Flag("server", "max_restarts", "N", "Starts of all ranks after one died", "0"),
    Flag("server", "max_body_bytes", "SIZE", "A larger HTTP body gets 413", "32MiB"),
    Flag("server", "log_level", "NAME", "debug, info, warning or error", "info"),
)

_FOLDER = "Its folder: config.json, *.safetensors, tokenizer.json"
_CONFIG = "Settings from a TOML file; flags win over it"

# What commands without HTTP use
OFFLINE = ("model", "parallel", "cache", "schedule", "engine", "rebalance", "speculate")
SERVING = (*OFFLINE, "server")


def no_problems(config: ServeConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class Given:
    """What the command line said about settings, before validation."""

    checkpoint: Path | None
    config: Path | None
    flags: dict[str, dict[str, Any]]
    sections: tuple[str, ...]
    without: tuple[str, ...] = ()  # settings of these sections that the command does not use

    def in_users_words(self, problem: str) -> str:
        """The problem, its settings named as they were given: flags, or the file and its keys."""
        options = {(f.section, f.field): f for f in FLAGS}

        def option(section: str, field: str, value: object) -> str:
            flag = options[section, field].option
            return f"--no-{flag[2:]}" if value is False else flag

        return Typed(option, self.flags, self.checkpoint, self.config).name(problem)

    def resolve(
        self,
        *,
        needs_text: bool = False,
        own: Sequence[str] = (),
        more: Callable[[ServeConfig], list[str]] = no_problems,
        on_rank: bool = False,
        ranks_here: int | None = None,
    ) -> ServeConfig:
        """Defaults, then the TOML file, then flags. ConfigError lists every problem, those of the
        checkpoint's folder included. needs_text: the command wants a tokenizer. own: problems of
        the command's own flags, told first. more: finds those that only this command has.
        on_rank: what needs all ranks to agree is left to them, who say it once. ranks_here: on this
        machine, each of which needs a device; None: all, 0: nobody computes here, or others look.
        """
        from moeserve.config import ServeConfig
        from moeserve.folder import WANTED, folder_problems, read_model
        from moeserve.model_fit import given_placement, model_problems
        from moeserve.speculate.setting import folder_problem

        flags = {section: dict(fields) for section, fields in self.flags.items()}
        if self.checkpoint is not None:
            flags.setdefault("model", {})["checkpoint"] = self.checkpoint
        try:
            config = ServeConfig.load(self.config, flags)
        except ConfigError as error:
            folder = self.checkpoint
            its = [] if folder is None else folder_problems(folder, needs_text=needs_text)
            asked = flags.get("engine", {}).get("device")
            its += device_problems(asked, 1 if ranks_here is None else ranks_here)
            raise ConfigError([*own, *error.problems, *its, *_between(flags)]) from None
        problems = [*own]
        problems += [
            f"[{section}] is not used by this command; it uses: {', '.join(self.sections)}"
            for section in sorted(config.model_fields_set - set(self.sections))
        ]
        for name in self.without:
            section, _, field = name.partition(".")
            if field in getattr(config, section).model_fields_set:
                problems.append(f"{name} is not used by this command")
        if "checkpoint" in config.model.model_fields_set:
            problems += folder_problems(config.model.checkpoint, needs_text=needs_text)
        else:
            problems.append(f"model.checkpoint: not given; name {WANTED}")
        problems += _between(config.model_dump())
        problems += folder_problem(config.speculate.method)
        ranks = config.parallel.ep if ranks_here is None else ranks_here
        problems += device_problems(config.engine.device, ranks)
        problems += more(config)
        if not problems:
            model, _ = read_model(config.model.checkpoint)
            assert model is not None
            problems += model_problems(config, model)
            if not problems and config.parallel.placement is not None and not on_rank:
                layers = model.num_placement_layers(config.model.mtp and model.num_mtp_layers > 0)
                given_placement(config, model, layers, config.parallel.ep, problems)
        if problems:
            raise ConfigError(problems)
        return config


def device_problems(asked: object, ranks_here: int) -> list[str]:
    """Of CUDA devices that are asked for and not here: before anybody listens or waits for others.
    Only who asks for them waits for torch."""
    if asked != "cuda" or not ranks_here:
        return []
    from moeserve.device.choose import look, no_cuda, refused

    why = no_cuda(look(), ranks_here)
    return [] if why is None else [f"engine.device='cuda': {refused(why)}"]


def _between(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Settings that exclude each other, and files that are not there; by section and field."""
    problems = []
    cache = values.get("cache", {})
    if cache.get("kv_memory") is not None and cache.get("kv_tokens") is not None:
        problems.append("cache.kv_memory and cache.kv_tokens: give one of them, not both")
    for section, field in (
        ("model", "chat_template"),
        ("model", "kernel_table"),
        ("parallel", "placement"),
    ):
        file = values.get(section, {}).get(field)
        if file is not None and (why := no_file(Path(file))) is not None:
            problems.append(f"{section}.{field}={str(file)!r}: {why}")
    return problems


def with_settings(
    sections: tuple[str, ...],
    without: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command CHECKPOINT, --config and the flags of `sections`, handed in as `given`.
    without: names such as engine.seed that the command has no use for."""
    flags = [f for f in FLAGS if f.section in sections and f"{f.section}.{f.field}" not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**arguments: Any) -> None:
            values: dict[str, dict[str, Any]] = {}
            for flag in flags:
                value = arguments.pop(flag.field)
                if value is not None:
                    values.setdefault(flag.section, {})[flag.field] = value
            given = Given(
                arguments.pop("checkpoint"), arguments.pop("config"), values, sections, without
            )
            try:
                command(given=given, **arguments)
            except ConfigError as error:
                raise ConfigError([given.in_users_words(p) for p in error.problems]) from None

        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in inspect.signature(command, eval_str=True).parameters.items()
            if name != "given"
        ]
        shared = [
            _parameter("checkpoint", Path, typer.Argument(metavar="CHECKPOINT", help=_FOLDER)),
            _parameter("config", Path, typer.Option(metavar="FILE", help=_CONFIG)),
            *(
                _parameter(
                    f.field,
                    bool if f.switch else str,
                    typer.Option(
                        *filter(None, (f.declaration, f.letter)),
                        help=f"{f.help} [dim]\\[default: {f.default}][/]" if f.default else f.help,
                        metavar=None if f.switch else f.metavar,
                        envvar=f.envvar,
                        rich_help_panel=f"Settings: {f.section}",
                    ),
                )
                for f in flags
            ),
        ]
        parameters = [shared[0], *own, *shared[1:]]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(name: str, kind: type, info: Any) -> inspect.Parameter:
    # One keyword-only optional parameter, as if it had been written in the command's signature.
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, info],
    )
