"""Settings: every problem at once, each with what would be valid; sizes with units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ServeConfig
from moeserve.errors import ConfigError


def problems(**sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.load(None, sections)
    return caught.value.problems


@pytest.mark.parametrize(
    ("section", "field", "value", "says"),
    [
        ("parallel", "ep", 0, "must be at least 1; nearest valid: 1"),
        ("parallel", "ep", "2000", "must be at most 1024; nearest valid: 1024"),
        ("parallel", "ep", "two", "must be a whole number"),
        ("schedule", "token_budget", 2.5, "must be a whole number"),
        ("schedule", "max_model_len", 1, "must be at least 2"),
        ("engine", "lockstep_timeout", 0, "must be above 0"),
        ("engine", "lockstep_timeout", "soon", "must be a number"),
        ("cache", "prefix_cache", "maybe", "must be true or false"),
        ("model", "dtype", "float23", "one of auto, float32, bfloat16; nearest: float32"),
        ("model", "dtype", "q", "one of auto, float32, bfloat16"),
        ("model", "dtype", "BFloat16", "; nearest: bfloat16"),
        ("parallel", "wire", "FP8", "one of auto, model, fp8; nearest: fp8 (what its scales are"),
        ("parallel", "wire", "fp8_ue8m0", "; nearest: fp8 (what its scales are, the checkpoint"),
        ("parallel", "wire", "BF16", "; nearest: model (rows as the model computes)"),
        ("parallel", "wire", "models", "one of auto, model, fp8; nearest: model"),
        ("model", "dtype", "BF16", "; nearest: bfloat16"),
        ("model", "dtype", "fp16", "; nearest: bfloat16 (float16 is not computed in)"),
        ("model", "dtype", "fp32", "; nearest: float32"),
        ("model", "dtype", "fp8", "; nearest: auto (FP8 weights: see weights)"),
        ("model", "kernels", "gpu", "one of auto, native, torch, triton; nearest: triton"),
        ("model", "kernels", "Triton", "; nearest: triton"),
        ("model", "kernels", "deep_gemm", "; nearest: triton (a library beside it: by"),
        ("model", "weights", "bf16", "; nearest: dequantised"),
        ("model", "weights", "fp8_e4m3", "; nearest: fp8"),
        ("engine", "device", "gpu", "must be one of auto, cpu, cuda; nearest: cuda"),
        ("engine", "device", "GPU", "; nearest: cuda"),
        ("engine", "device", "cuda:0", "; nearest: cuda (each rank takes one of its own)"),
        ("engine", "device", "cpuu", "; nearest: cpu"),
        ("engine", "graphs", False, "must be one of auto, off; nearest: off"),
        ("engine", "graphs", "on", "; nearest: auto (on GPUs, where steps can be captured)"),
        ("engine", "ahead", "yes", "must be one of auto, on, off; nearest: on"),
        ("speculate", "method", "none", "; nearest: off"),
        ("speculate", "method", "nextn", "; nearest: mtp"),
        ("speculate", "rule", "greedy", "must be one of same, rejection; nearest: same"),
        ("server", "log_level", "warn", "; nearest: warning"),
        ("parallel", "shared_expert", "slot", "; nearest: hosted"),
        ("parallel", "dispatch", "deepep_low_latency", "; nearest: deepep_ll"),
        ("parallel", "dispatch", "naive", "; nearest: allgather"),
        ("cache", "kv_cache_dtype", "fp8_e5m2", "; nearest: fp8 (e4m3, a scale for each"),
        ("cache", "kv_cache_dtype", "auto", "; nearest: model (the model's own dtype)"),
        ("parallel", "dispatch", "Torch", "must be one of auto, local, torch, allgather"),
        ("parallel", "dispatch", "nccl", "prefill=NAME,decode=NAME; nearest: torch"),
        ("parallel", "dispatch", "torch,allgather", "nearest: prefill=torch,decode=allgather"),
        ("parallel", "dispatch", "prefil=torch", "no phase; must be prefill=NAME,decode=NAME"),
        ("parallel", "layout", "v3-decode-320", "; nearest: decode-ep320"),
        ("parallel", "layout", "Decode-EP144", "; nearest: decode-ep144"),
        ("cache", "kv_memory", "3GiX", "must be bytes, such as 512MiB"),
        ("cache", "kv_memory", "", "must be bytes"),
        ("cache", "kv_memory", "inf", "must be bytes"),
        ("cache", "kv_memory", "1e400gib", "must be bytes"),
        ("cache", "kv_memory", "-1MiB", "must be at least 1"),
        ("cache", "kv_memori", "1MiB", "unknown setting; known: block_size"),
    ],
)
def test_each_problem_names_setting_value_and_what_is_valid(
    section: str, field: str, value: object, says: str
) -> None:
    (line,) = problems(**{section: {field: value}})
    assert line.startswith(f"{section}.{field}={value!r}: ") and says in line


def test_all_problems_are_told_at_once() -> None:
    found = problems(parallel={"ep": 0}, cache={"block_size": 0}, server={"port": -1})
    assert [x.partition("=")[0] for x in found] == [
        "parallel.ep",
        "cache.block_size",
        "server.port",
    ]


def test_how_tokens_travel_is_checked_with_the_rest() -> None:
    found = problems(parallel={"ep": 0, "dispatch": "x", "wire": "y", "overlap": 0})
    assert [x.partition("=")[0] for x in found] == [
        f"parallel.{name}" for name in ("ep", "dispatch", "wire", "overlap")
    ]


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"dispatch": "torch"}, "parallel.emulate: parallel.dispatch=torch has no emulation; "),
        ({}, "parallel.emulate: dispatch auto has no emulation; those that have: deepep_ll, "),
        ({"dispatch": "prefill=torch"}, "parallel.emulate: parallel.dispatch=prefill=torch has no"),
    ],
)
def test_emulate_wants_something_that_has_an_emulation(parallel: dict[str, Any], says: str) -> None:
    first, second = problems(parallel=parallel | {"emulate": True, "ep": 0})
    assert first.startswith(says) and second.startswith("parallel.ep=0")
    named = {"dispatch": "decode=deepep_ll", "emulate": True}
    assert ServeConfig.load(None, {"parallel": named}).parallel.emulate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("2GiB", 2 << 30),
        ("1.5kb", 1500),
        ("3 MiB", 3 << 20),
        ("512M", 512 << 20),
        ("4g", 4 << 30),
        ("5B", 5),
    ],
)
def test_sizes_have_units_wherever_they_come_from(tmp_path: Path, text: str, size: int) -> None:
    assert ServeConfig.load(None, {"cache": {"kv_memory": text}}).cache.kv_memory == size
    toml = tmp_path / "settings.toml"
    toml.write_text(f'[cache]\nkv_memory = "{text}"\n')
    assert ServeConfig.load(toml, {}).cache.kv_memory == size


def test_a_section_that_is_no_table_and_broken_files(tmp_path: Path) -> None:
    toml = tmp_path / "settings.toml"
    for text, says in (
        ("cache = 5", "must be a table of settings"),
        ("[cache", "not valid TOML"),
        ("[nothing]\na = 1", "unknown setting; known: model"),
    ):
        toml.write_text(text)
        with pytest.raises(ConfigError, match=says):
            ServeConfig.load(toml, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        ServeConfig.load(tmp_path / "none.toml", {})


def test_memory_of_captured_steps_where_none_is_captured_is_an_error() -> None:
    first, second = problems(engine={"graph_memory": "1GiB", "graphs": "off", "device": "cpu"})
    assert first == f"engine.graph_memory={1 << 30}: not used while engine.graphs is off"
    assert second.endswith("not used while engine.device is cpu: steps are captured on GPUs")
    assert ServeConfig.load(None, {"engine": {"graph_memory": "1GiB"}}).engine.graph_memory
