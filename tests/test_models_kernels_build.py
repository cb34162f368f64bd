"""Building and choosing kernels, and what they refuse: no real compiler is started here."""

from __future__ import annotations

import math
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, LinearWeight, MlaShape
from models.deepseek.kernels.build import SOURCES, build, kept
from models.deepseek.kernels.errors import KernelArgumentError, KernelsUnavailable
from models.deepseek.kernels.native_dense import NativeDense
from models.deepseek.kernels.native_kernels import NativeKernels
from models.deepseek.kernels.native_library import load_library
from models.deepseek.kernels.native_open import self_check
from models.deepseek.kernels.select import KernelChoice, create_kernels, fitting
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.interface import ForwardBatch

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "fake 1.0"; exit 0; fi
echo "$*" >> {log}
{body}
while [ $# -gt 0 ]; do [ "$1" = "-o" ] && echo made > "$2"; shift; done
"""


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """fake(body) installs a compiler that logs its calls and runs `body`; gives the log's path."""

    def install(body: str = "") -> Path:
        log, script = tmp_path / "calls", tmp_path / "fake-cxx"
        script.write_text(FAKE_COMPILER.format(log=log, body=body))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return log

    return install


def test_one_of_many_compiles_and_the_cache_serves_the_rest(fake_compiler) -> None:  # type: ignore[no-untyped-def]
    log = fake_compiler()
    found = []
    threads = [threading.Thread(target=lambda: found.append(build())) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({library.path for library in found}) == 1 and len(found) == 5
    assert found[0].path.read_text() == "made\n"
    calls = log.read_text().splitlines()
    assert len(calls) == len(list(SOURCES.glob("*.cpp"))) + 1  # each source, one link
    left = [p.name for p in found[0].path.parent.iterdir()]
    assert sorted(left) == sorted(found[0].path.stem + x for x in (".so", ".lock", ".stamp"))


def test_flags_and_compiler_make_another_library(fake_compiler) -> None:  # type: ignore[no-untyped-def]
    fake_compiler()
    plain, portable = build(), build(("MOESERVE_NO_SIMD",))
    assert plain.path != portable.path
    assert plain.compiler == "fake 1.0"


def test_a_failing_compiler_is_quoted(fake_compiler) -> None:  # type: ignore[no-untyped-def]
    fake_compiler('echo "x.cpp:3: error: boom"; exit 1')
    with pytest.raises(KernelsUnavailable, match="error: boom"):
        build()
    choice = create_kernels("auto")
    assert isinstance(choice.kernels, TorchKernels)
    assert "boom" in choice.reason and "torch" in choice.reason and "\n" not in choice.reason
    with pytest.raises(KernelsUnavailable):
        create_kernels("native")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler found"):
        build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="install g\\+\\+ or set CXX"):
        build()


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_library_of_a_compiler_that_is_gone_serves(
    native: NativeKernels, no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build()
    for name in ("auto", "native"):
        choice = create_kernels(name)
        assert isinstance(choice.kernels, NativeKernels)
        assert choice.reason.startswith(f"kernels: native ({native.description}; compiled earlier")
        assert choice.numerics == f"native {native.build}", "such hosts may serve with others"
        assert "no C++ compiler found" in choice.reason and "\n" not in choice.reason
    x, w = torch.randn(3, 70), torch.randn(9, 70)
    got, want = (k.linear(x, k.linear_weight(w, torch.float32)) for k in (choice.kernels, native))
    assert torch.equal(got, want)
    monkeypatch.setattr("models.deepseek.kernels.build._processor", lambda: "another")
    assert isinstance(create_kernels("auto").kernels, TorchKernels)


def test_the_newest_kept_library_of_the_same_flags_is_first(
    fake_compiler,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake_compiler()
    old = build()
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text().replace("fake 1.0", "fake 2.0"))
    new, other = build(), build(("MOESERVE_NO_SIMD",))
    os.utime(old.path, (1, 1))
    assert [(x.path, x.compiler) for x in kept((), "why")] == [
        (new.path, "fake 2.0"),
        (old.path, "fake 1.0"),
    ]
    assert [x.path for x in kept(("MOESERVE_NO_SIMD",), "why")] == [other.path]
    new.path.write_text("torn")
    assert [x.path for x in kept((), "why")] == [old.path]
    other.path.with_suffix(".stamp").write_bytes(b"\xff")
    assert kept(("MOESERVE_NO_SIMD",), "why") == []


def test_kept_libraries_that_are_none_are_named(
    fake_compiler,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_compiler()
    path = build().path
    monkeypatch.setenv("CXX", "absent")
    choice = create_kernels("auto")
    assert isinstance(choice.kernels, TorchKernels)
    assert "no C++ compiler found" in choice.reason
    assert f"kept {path.name} refused" in choice.reason and "\n" not in choice.reason


def test_a_library_that_computes_wrongly_is_found(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert self_check(native.library) == []
    right = NativeDense.linear
    for wrong in (lambda out: out.mul_(1.01), lambda out: out[-1:].fill_(math.nan)):

        def linear(self: NativeDense, x: Tensor, weight: LinearWeight, wrong=wrong) -> Tensor:  # type: ignore[no-untyped-def]
            out = right(self, x, weight)
            wrong(out)
            return out

        monkeypatch.setattr(NativeDense, "linear", linear)
        assert self_check(native.library)[0] == "linear in torch.float32"


def test_a_library_that_is_none(fake_compiler) -> None:  # type: ignore[no-untyped-def]
    fake_compiler()
    with pytest.raises(KernelsUnavailable, match="cannot be used"):
        load_library(build())


def test_a_torn_library_is_compiled_anew(fake_compiler) -> None:  # type: ignore[no-untyped-def]
    log = fake_compiler()
    path = build().path
    each = len(log.read_text().splitlines())
    for damage in (b"", b"mad", None):  # emptied, torn, without its stamp
        path.write_bytes(damage) if damage is not None else path.with_suffix(".stamp").unlink()
        log.write_text("")
        assert build().path == path and path.read_text() == "made\n"
        assert len(log.read_text().splitlines()) == each
    log.write_text("")
    build()
    assert log.read_text() == ""


def test_a_compiler_with_arguments(fake_compiler, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    log = fake_compiler()
    monkeypatch.setenv("CXX", f"env 'A=x y' {os.environ['CXX']}")
    assert build().compiler == "fake 1.0"
    assert "-shared" in log.read_text()
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler found .tried CXX='g"):
        build()


@pytest.mark.parametrize("script", ["no program", "#!/bin/sh\nexit 0\n", "#!/absent/interpreter"])
def test_whatever_the_compiler_is_there_is_a_fallback(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    choice = create_kernels("auto")
    assert isinstance(choice.kernels, TorchKernels)
    assert "no native: cannot compile" in choice.reason and "\n" not in choice.reason


def test_a_user_without_a_name_or_a_home(
    fake_compiler,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*_: object) -> None:
        raise KeyError("uid not found")

    fake_compiler()
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.chdir(tmp_path)  # an unresolved "~" would be a folder here
    (tmp_path / "~").write_text("in the way")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert build().path.parent == tmp_path / f"moeserve-{os.getuid()}"


@pytest.mark.parametrize(
    ("change", "dtype", "deterministic", "named"),
    [
        ({}, torch.bfloat16, False, None),
        ({"rank": 7}, torch.float32, False, None),
        ({"rank": 7}, torch.bfloat16, True, "kv_lora_rank + qk_rope_head_dim=11"),
        ({"nope_dim": 5, "value_dim": 3}, torch.bfloat16, True, None),
        ({"nope_dim": 5}, torch.bfloat16, False, "qk_nope_head_dim=5"),
        ({"value_dim": 3}, torch.bfloat16, False, "v_head_dim=3"),
        ({"rope_dim": 514}, torch.float32, True, "qk_rope_head_dim=514"),
    ],
)
def test_models_that_native_cannot_compute(
    native: NativeKernels,
    change: dict[str, int],
    dtype: torch.dtype,
    deterministic: bool,
    named: str | None,
) -> None:
    dims = {"num_heads": 2, "nope_dim": 4, "rope_dim": 4, "rank": 8, "value_dim": 4}
    shape = MlaShape(**(dims | change), scale=1.0, norm_eps=1e-6)  # type: ignore[arg-type]
    choice = KernelChoice(native, "kernels: native")
    if named is None:
        for name in ("auto", "native"):
            assert fitting(choice, name, shape, dtype, deterministic) is choice
        return
    other = fitting(choice, "auto", shape, dtype, deterministic)
    assert isinstance(other.kernels, TorchKernels)
    assert named in other.reason and "slow" in other.reason
    with pytest.raises(KernelsUnavailable, match=re.escape(named)):
        fitting(choice, "native", shape, dtype, deterministic)


def test_names() -> None:
    assert create_kernels("torch").kernels.name == "torch"
    with pytest.raises(ValueError, match="'cuda'.*auto, native, torch"):
        create_kernels("cuda")


# -- refusals --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native() -> NativeKernels:
    try:
        return NativeKernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


def test_dense_refusals(native: NativeKernels) -> None:
    weight = native.linear_weight(torch.ones(8, 6), torch.float32)
    with pytest.raises(KernelArgumentError, match=r"x is \(2, 5\).*\[T, 6\] torch.float32"):
        native.linear(torch.ones(2, 5), weight)
    with pytest.raises(KernelArgumentError, match="bfloat16"):
        native.linear(torch.ones(2, 6, dtype=torch.bfloat16), weight)
    with pytest.raises(KernelArgumentError, match="float16"):
        native.linear_weight(torch.ones(8, 6), torch.float16)
    with pytest.raises(KernelArgumentError, match="TorchLinearWeight"):
        foreign = TorchKernels().linear_weight(torch.ones(8, 6), torch.float32)
        native.linear(torch.ones(2, 6), foreign)
    with pytest.raises(KernelArgumentError, match="twice"):
        native.mlp(torch.ones(2, 6), weight, weight)
    with pytest.raises(KernelArgumentError, match="weight is torch.bfloat16"):
        native.rms_norm(torch.ones(2, 6), torch.ones(6, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(KernelArgumentError, match="per_head|must be \\[T, 2, 6\\]"):
        native.per_head(torch.ones(2, 3, 6), weight, 2)


def test_expert_refusals(native: NativeKernels) -> None:
    stacked = native.allocate_experts(2, 8, 4, torch.float32)
    x, rows = torch.ones(3, 8), torch.tensor([0, 3], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="pair_rows"):
        native.experts(x, rows, offsets, stacked)
    with pytest.raises(KernelArgumentError, match="offsets"):
        native.experts(x, rows[:1], offsets, stacked)
    with pytest.raises(KernelArgumentError, match="slots \\+ 1 = 3"):
        native.experts(x, rows, offsets[:2], stacked)
    with pytest.raises(KernelArgumentError, match="slot=2: must be 0..1"):
        stacked.bundle(2)
    with pytest.raises(KernelArgumentError, match=r"down is \(4, 8\): must be \(8, 4\)"):
        stacked.store(0, torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(KernelArgumentError, match="index"):
        native.combine_pairs(x, torch.tensor([[0, 3]]), torch.ones(1, 2))
    spec = GateSpec(9, 1, 1, "sigmoid", "top2", True, 1.0)
    with pytest.raises(KernelArgumentError, match="top_k=9: must be 1..8"):
        native.gate(x, torch.ones(8, 8), None, spec)


def test_attention_refusals(native: NativeKernels) -> None:
    def batch(positions: list[int], blocks: list[int], start: list[int]) -> ForwardBatch:
        return ForwardBatch(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.tensor(positions),
            slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
            query_start=torch.tensor(start, dtype=torch.int32),
            context_len=torch.tensor([max(positions) + 1], dtype=torch.int32),
            block_tables=torch.tensor([blocks], dtype=torch.int32),
            logits_rows=torch.zeros(0, dtype=torch.int64),
            max_query_len=len(positions),
            max_context_len=max(positions) + 1,
        )

    layer = torch.zeros(3, 4, 12)
    q_latent, q_rope = torch.ones(1, 2, 8), torch.ones(1, 2, 4)
    for blocks in ([-1, 0], [0, 3], [0]):
        with pytest.raises(KernelArgumentError, match="block_tables"):
            native.latent_attention(q_latent, q_rope, layer, batch([5], blocks, [0, 1]), 1.0)
    with pytest.raises(KernelArgumentError, match="query_start"):
        native.latent_attention(q_latent, q_rope, layer, batch([5], [0, 1], [0, 2]), 1.0)
    with pytest.raises(KernelArgumentError, match=r"\[blocks, block, 12\] torch.float32"):
        native.latent_attention(q_latent, q_rope, layer[..., 1:], batch([5], [0, 1], [0, 1]), 1.0)
    with pytest.raises(KernelArgumentError, match="slot_mapping"):
        native.write_cache(layer, q_latent[:, 0], q_rope[:, 0], torch.tensor([12]))
    with pytest.raises(KernelArgumentError, match="slot_mapping"):
        native.write_cache(layer, q_latent[:, 0], q_rope[:, 0], torch.tensor([-1]))
    with pytest.raises(KernelArgumentError, match="positions"):
        native.rope(q_rope, torch.tensor([7]), torch.ones(7, 4))
    odd = torch.zeros(3, 4, 11, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="=11: must be even in bfloat16"):
        native.latent_attention(
            q_latent[..., :7].bfloat16(), q_rope.bfloat16(), odd, batch([5], [0, 1], [0, 1]), 1.0
        )
