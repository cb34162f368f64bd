"""ServeConfig: all settings of a job, frozen, in sections, validated once.

Every failure is found at once (`ConfigError.problems`), each with the nearest valid value where
one exists. Sources, later ones win: defaults, a TOML file (sections as tables), flags. An unknown
key is an error. Knows nothing of torch or of checkpoints: what needs the model's config is checked
in `check_against_model`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from dispatch import nothing_to_emulate, read_dispatch
from ep.nearest import nearest_hint
from ep.presets import PRESETS
from moeserve.errors import ConfigError
from moeserve.meant import hint
from moeserve.speculate.setting import read_speculate


def parse_size(value: object) -> object:
    """Bytes from '2GiB', '512M' (both of 1024) or '1GB' (of 1000); what is no text stays."""
    if not isinstance(value, str):
        return value
    units = {"": 1.0, "b": 1.0}
    for power, letter in enumerate("kmgt", start=1):
        units |= {letter: 1024.0**power, f"{letter}ib": 1024.0**power, f"{letter}b": 1e3**power}
    text = value.strip().lower()
    number = text.rstrip("kmgtib ")
    try:
        return round(float(number) * units[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise ValueError("must be bytes, such as 512MiB, 2GiB or 1073741824") from None


def parse_overlap(value: object) -> object:
    """'auto' is None; else 'off' or a number of tokens. 0 of them would be every step, and is what
    who means never may write: it is refused."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    text = str(value).strip().lower()
    if text in ("auto", "off"):
        return None if text == "auto" else text
    if not text.removeprefix("-").isdecimal():
        raise ValueError("must be auto, off or a number of tokens, such as 256")
    if int(text) < 1:
        raise ValueError(
            "must be auto, off or at least 1 token; nearest valid: 1 (every step); for never: use "
            "off"
        )
    return int(text)


def parse_switch(value: object) -> object:
    """'on' and 'off' may be true and false in a file."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Size = Annotated[int, BeforeValidator(parse_size)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(parse_switch)]
Threshold = Annotated[int | Literal["off"] | None, BeforeValidator(parse_overlap)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    checkpoint: Path = Path()
    served_name: str = ""  # name in /v1/models; empty: the checkpoint folder's name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: the checkpoint's, bf16 for FP8
    kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    # Who won at which shape, of libraries and our GPU kernels (`moeserve bench kernels --winners`)
    kernel_table: Path | None = None
    # FP8 blocks in memory: kept, or brought to dtype; the same results (auto: whichever is faster)
    weights: Literal["auto", "fp8", "dequantised"] = "auto"
    mtp: bool = True  # load the MTP layer where the checkpoint has one
    chat_template: Path | None = None


class ParallelSection(Section):
    ep: int = Field(1, ge=1, le=1024)
    redundant_experts: int = Field(0, ge=0)
    placement: Path | None = None  # a given placement (npz or JSON); default: the trivial one
    # On each rank for its own tokens, or in slots as an expert that every token picks
    shared_expert: Literal["replicated", "hosted"] = "replicated"
    layout: str | None = None  # a preset (ep/presets.py): sets ep, redundant_experts, shared_expert
    dispatch: str = "auto"  # or a backend's name, or prefill=NAME,decode=NAME
    # How hidden rows travel to experts (auto: FP8 on GPUs for FP8 checkpoints; dispatch_wire.py)
    wire: Literal["auto", "model", "fp8"] = "auto"
    # Agreed tokens a rank from which a step goes in two halves; None: auto (overlap.py)
    overlap: Threshold = None
    emulate: bool = False  # of a backend that wants GPUs, its emulation on CPUs
    # By which ranks of several machines talk: a name, an address or a subnet; default: by routes
    interface: str | None = Field(None, min_length=1)

    @field_validator("layout")
    @classmethod
    def _is_preset(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"must be one of {', '.join(PRESETS)}{nearest_hint(value, PRESETS)}")
        return value

    @field_validator("dispatch")
    @classmethod
    def _names_dispatchers(cls, value: str) -> str:
        problems: list[str] = []
        if read_dispatch(value, problems) is None:
            raise ValueError("; ".join(problems))
        return value


class CacheSection(Section):
    block_size: int = Field(16, ge=1, le=1024)
    kv_memory: Size | None = Field(None, ge=1)  # bytes a rank
    kv_tokens: int | None = Field(None, ge=1)  # tokens a rank; default when both are None: auto
    # How latents lie in it: in the model's dtype, or in e4m3 with a scale for each 128 channels
    # and rope keys as they are (models/deepseek/kernels/fp8_latents.py): other tokens, more room
    kv_cache_dtype: Literal["model", "fp8"] = "model"
    prefix_cache: bool = True


class ScheduleSection(Section):
    max_num_sequences: int = Field(64, ge=1)  # running at once, a rank
    token_budget: int = Field(512, ge=1)  # tokens a step, a rank (prefill chunks + decode)
    chunk_size: int | None = Field(None, ge=1)  # most prefill tokens of one sequence in a step
    max_model_len: int | None = Field(None, ge=2)  # default: the model's, bounded by the pool


class EngineSection(Section):
    deterministic: bool = True  # law 5: same tokens for every layout, chunking and company
    seed: int = 0
    lockstep_timeout: float = Field(60.0, gt=0)  # seconds without progress before /health says so
    threads: int | None = Field(None, ge=1)  # compute threads a rank; default: cores / local ranks
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where each rank here can have one
    graphs: Literal["auto", "off"] = "auto"  # captured decode steps on GPUs, where they can be
    # Plan a step while the one before it runs; not beside speculation (auto: on GPUs)
    ahead: Switch = "auto"
    graph_memory: Size | None = Field(None, ge=1)  # bytes that all of them may take; None: 2 GiB
    quiet: bool = False  # say nothing of how the engine is put together


class RebalanceSection(Section):
    """Moving experts while serving. Without `enabled` it is done when an operator asks for it."""

    enabled: bool = False
    interval_steps: int = Field(2000, ge=1)  # steps with work between looks at the load window
    threshold: float = Field(0.95, gt=0, le=1)  # utilisation (mean / busiest rank) that is enough
    min_gain: float = Field(0.01, ge=0, lt=1)  # of utilisation, below which nothing is moved
    min_picks: float = Field(16.0, ge=0)  # mean picks an expert in the window: fewer say too little
    windows: int = Field(1, ge=1, le=64)  # how many of the last windows are planned for
    robust: str = "mean"  # how several windows join: mean, max, mean+<z>*std
    group_policy: Literal["free", "node", "priced"] = "free"
    max_moved_slots: int | None = Field(None, ge=1)  # of all layers, at once
    # Spare bytes a rank, held while moving; default: as much as the slots of one layer
    max_staging_bytes: Size | None = Field(None, ge=1)
    deadline: float = Field(60.0, gt=0)  # seconds for a batch of layers, then all give up
    max_rate: Size | None = Field(None, ge=1)  # bytes a second into a rank; default: no limit


class SpeculateSection(Section):
    """Drafts that a step verifies beside its own token; with the rule "same" no token depends on
    any of it."""

    method: str = "off"  # who drafts, and how deep (speculate/setting.py)
    # same: a draft is accepted where the target would choose it; rejection: by Leviathan's rule,
    # more often at temperatures above 0, the same distribution, other tokens for a seed
    rule: Literal["same", "rejection"] = "same"
    # Of a tree of drafts, where the drafter makes some (eagle, medusa); default: a chain
    nodes: int | None = Field(None, ge=1, le=64)

    @field_validator("method")
    @classmethod
    def _can_be_read(cls, value: str) -> str:
        read_speculate(value)
        return value


class ServerSection(Section):
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65535)  # 0: any free one, printed
    max_queue: int = Field(512, ge=1)  # requests waiting or running before 429
    drain_seconds: float = Field(30.0, ge=0)
    rank_timeout: float = Field(20.0, gt=1)  # seconds a rank's host may be silent before it is dead
    api_key: str | None = Field(None, min_length=1)  # asked of /v1 as "Authorization: Bearer ..."
    # Asked of /experts, /debug and /reset_prefix_cache; where it is not set, api_key is.
    admin_key: str | None = Field(None, min_length=1)
    max_restarts: int = Field(0, ge=0)  # of all ranks, after one died; by our launcher only
    max_body_bytes: Size = Field(32 << 20, ge=1024)  # a larger HTTP body gets 413
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ServeConfig(Section):
    model: ModelSection = ModelSection()
    parallel: ParallelSection = ParallelSection()
    cache: CacheSection = CacheSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    rebalance: RebalanceSection = RebalanceSection()
    speculate: SpeculateSection = SpeculateSection()
    server: ServerSection = ServerSection()

    @classmethod
    def load(cls, toml: Path | None, flags: dict[str, dict[str, Any]]) -> ServeConfig:
        """Merge a TOML file and flags ({section: {field: value}}, None means not given)."""
        merged: dict[str, Any] = {}
        if toml is not None:
            try:
                merged = tomllib.loads(toml.read_text())
            except OSError as error:
                raise ConfigError([f"config={toml}: cannot be read: {error.strerror}"]) from None
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError([f"config={toml}: not valid TOML: {error}"]) from None
        for section, fields in flags.items():
            given = {k: v for k, v in fields.items() if v is not None}
            if given:
                table = merged.setdefault(section, {})
                if not isinstance(table, dict):
                    raise ConfigError([f"{section}={table!r}: must be a table of settings"])
                table.update(given)
        problems = [*_apply_layout(merged), *_emulation(merged)]
        try:
            config = cls.model_validate(merged)
        except ValidationError as error:
            problems += [_problem(cls, e) for e in error.errors()]
        else:
            problems += [*_unused(config.rebalance), *_unused_graphs(config.engine)]
            if config.model.kernel_table is not None and config.engine.deterministic:
                problems.append(
                    f"model.kernel_table={str(config.model.kernel_table)!r}: not used while "
                    "engine.deterministic is on, where bits may not depend on who was faster; "
                    "turn that off or leave this out"
                )
            if config.speculate.rule != "same" and read_speculate(config.speculate.method).is_off:
                problems.append(
                    f"speculate.rule={config.speculate.rule!r}: not used while speculate.method is "
                    "off"
                )
        if problems:
            raise ConfigError(problems)
        return config


def _unused(section: RebalanceSection) -> list[str]:
    """Settings of rebalancing that do nothing beside the others."""
    problems = []
    if "interval_steps" in section.model_fields_set and not section.enabled:
        problems.append(
            f"rebalance.interval_steps={section.interval_steps}: not used unless rebalance.enabled "
            "is true"
        )
    if section.robust != "mean" and section.windows == 1:
        problems.append(
            f"rebalance.robust={section.robust!r}: joins several windows; give rebalance.windows, "
            "at least 2"
        )
    return problems


def _unused_graphs(section: EngineSection) -> list[str]:
    """Memory for captured steps where none is captured. (Of device auto: start-up knows.)"""
    if section.graph_memory is None:
        return []
    said = f"engine.graph_memory={section.graph_memory}: not used while"
    problems = []
    if section.graphs == "off":
        problems.append(f"{said} engine.graphs is off")
    if section.device == "cpu":
        problems.append(f"{said} engine.device is cpu: steps are captured on GPUs")
    return problems


def flat_name(section: str, field: str) -> str:
    """What a setting is called where there are no sections: by its own name, but those of
    rebalancing and speculation, which say little alone, with that in front (`rebalance` is its
    switch, `speculate` its method)."""
    first = {"rebalance": "enabled", "speculate": "method"}.get(section)
    if first is None:
        return field
    return section if field == first else f"{section}_{field}"


def _apply_layout(merged: dict[str, Any]) -> list[str]:
    """Give the settings that a named layout stands for; -> those given otherwise."""
    parallel = merged.get("parallel")
    preset = PRESETS.get(str(parallel.get("layout"))) if isinstance(parallel, dict) else None
    if preset is None:
        return []
    assert isinstance(parallel, dict)
    means = {
        "ep": preset.num_gpus,
        "redundant_experts": preset.num_redundant,
        "shared_expert": preset.shared,
    }
    problems = [
        f"parallel.{name}={parallel[name]!r}: parallel.layout={preset.name!r} means {value!r}; "
        "leave one of them out"
        for name, value in means.items()
        if name in parallel and str(parallel[name]) != str(value)
    ]
    merged["parallel"] = means | parallel
    return problems


def _emulation(merged: dict[str, Any]) -> list[str]:
    """Where nothing that is named can be emulated. What names nothing is said elsewhere."""
    parallel = merged.get("parallel")
    given = str(parallel.get("emulate")).lower() if isinstance(parallel, dict) else ""
    if given not in ("true", "1", "yes", "on", "y", "t"):  # as pydantic reads a bool
        return []
    assert isinstance(parallel, dict)
    asked = parallel.get("dispatch")
    wish = read_dispatch(str(asked or "auto"), [])
    why = None if wish is None else nothing_to_emulate(wish)
    which = "dispatch auto" if asked is None else f"parallel.dispatch={asked}"
    return [] if why is None else [f"parallel.emulate: {which} {why}"]


def _problem(root: type[BaseModel], error: Any) -> str:
    path = ".".join(str(x) for x in error["loc"])
    if error["type"] == "extra_forbidden":
        model: type[BaseModel] = root
        for name in error["loc"][:-1]:
            model = model.model_fields[str(name)].annotation  # type: ignore[assignment]
        return f"{path}={error['input']!r}: unknown setting; known: {', '.join(model.model_fields)}"
    return f"{path}={error['input']!r}: {_valid(error)}"


def _valid(error: Any) -> str:
    """What would be valid, with the nearest value where there is one."""
    limits: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"must be at least {limits['ge']}; nearest valid: {limits['ge']}"
        case "less_than_equal":
            return f"must be at most {limits['le']}; nearest valid: {limits['le']}"
        case "greater_than":
            return f"must be above {limits['gt']}"
        case "literal_error":
            names = limits["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            place = ".".join(map(str, error["loc"]))
            told = hint(place, str(error["input"]), names)
            return f"must be one of {', '.join(names)}{told}"
        case "value_error":
            return str(limits["error"])
        case "model_type" | "model_attributes_type":
            return "must be a table of settings"
        case "int_parsing" | "int_type" | "int_from_float":
            return "must be a whole number"
        case "float_parsing" | "float_type":
            return "must be a number"
        case "bool_parsing" | "bool_type":
            return "must be true or false"
        case "string_too_short":
            return "must not be empty"
    return str(error["msg"])
