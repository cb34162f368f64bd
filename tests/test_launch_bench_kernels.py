"""`moeserve bench kernels`: what it measures is what it says, and wrong flags are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.bench.app import bench_app
from launch.bench.kernels import KernelBench
from moeserve.errors import ConfigError


def refused(*words: str) -> list[str]:
    error = CliRunner().invoke(bench_app, ["kernels", *words]).exception
    assert isinstance(error, ConfigError), error
    return error.problems


def test_one_kernel_beside_torch_and_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    KernelBench("gate 32", "torch", 0.01, None).run(as_json=True)
    found = json.loads(capsys.readouterr().out)  # one document and nothing else
    (row,) = found["kernels"]
    assert "gate 32" in row["kernel"]
    assert row["ours"] > 0 and row["theirs"] > 0 and row["ratio"] > 0
    assert row["of_read"] == pytest.approx(row["gbytes"] / found["limits"]["gbytes"])
    assert row["of_peak"] == pytest.approx(row["gflops"] / found["limits"]["gflops"])


def test_progress_counts_those_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []

    class Told:
        def __init__(self, shown: bool, unit: str) -> None: ...

        def __call__(self, where: str, done: int, total: int) -> None:
            told.append((where, done, total))

        def close(self) -> None: ...

    monkeypatch.setattr("launch.bench.kernels.StepProgress", Told)
    KernelBench("32 rows", "torch", 0.01, None).run(as_json=False)
    names = ("mlp 32 rows", "gate 32 rows", "add_rms_norm 32 rows", "per_head 32 rows")
    assert told == [(name, n, 4) for n, name in enumerate(names)] + [("done", 4, 4)]
    out = capsys.readouterr().out
    assert all(name in out for name in names) and "{" not in out


def test_wrong_names_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        KernelBench("fp9", "nativ", 0.01, None).run(as_json=False)
    first, second = caught.value.problems
    assert "must be one of auto, native, torch; nearest: native" in first
    assert second.startswith("--only 'fp9': in no kernel's name: linear bfloat16 1x1024x4096, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compile-only", "--device", "cuda"), "--device: only with --device cpu or --device"),
        (("--compile-only", "--device", "cpu"), "--compile-only does not use it"),
        (("--compile-only", "--winners", "x.json"), "--winners: only with --device cuda; --comp"),
        (("--compile-only", "--kernels", "torch"), "--kernels: only with --device cpu; --compile"),
        (("--compile-only", "--seconds", "1"), "--seconds: only with --device cpu; --compile-only"),
        (("--compile-only", "--threads", "1"), "--threads: only with --device cpu"),
        (("--compile-only", "--budget", "9"), "--budget: only with --device cuda"),
        (("--budget", "9"), "--budget: only with --device cuda; --device cpu does not use it"),
        (("--winners", "x.json"), "--winners: only with --device cuda"),
        (("--renew",), "--renew: only with --compile-only"),
        (("--device", "cuda", "--renew"), "--renew: only with --compile-only"),
        (("--device", "cuda", "--kernels", "torch"), "--kernels: only with --device cpu"),
        (("--device", "cuda", "--seconds", "1"), "--seconds: only with --device cpu"),
        (("--device", "tpu"), "--device tpu: must be one of cpu, cuda"),
    ],
)
def test_a_flag_that_does_nothing_here_is_an_error(words: tuple[str, ...], said: str) -> None:
    assert any(said in problem for problem in refused(*words, "--only", "nosuch"))


def test_all_that_is_wrong_is_told_without_a_gpu(tmp_path: Path) -> None:
    """A name that is in no kernel's, a file that cannot be written, and then the missing device."""
    found = refused("--device", "cuda", "--only", "nosuch", "--winners", str(tmp_path))
    assert found[0] == f"--winners {str(tmp_path)!r}: is a folder"
    assert found[1].startswith("--only 'nosuch': in no kernel's name: mla_decode, ")
    assert found[2].startswith("--device cuda: ") and len(found) == 3
