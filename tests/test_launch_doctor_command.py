"""`moeserve doctor` as a command: which parts are asked, what ends with exit code 1."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from launch.doctor import backends, gpu, local
from launch.doctor.backends import backend_checks
from launch.doctor.check import Check, State, exit_code, fails, missing, ok, warning
from launch.doctor.checkpoint import ReadRate, checkpoint_checks, measure_read, rate_check
from launch.doctor.command import SomethingFails, doctor
from launch.doctor.device import SECTION as CUDA
from launch.doctor.device import device_check, told_once
from launch.doctor.screen import show_checks
from moeserve.device import choose
from moeserve.device.choose import Cuda, no_cuda
from moeserve.errors import ConfigError

ROOT = Path(__file__).parents[1]
TINY = ROOT / "checkpoints" / "tiny"


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_every_dispatcher_answers_for_so_many_ranks() -> None:
    checks = by_name(backend_checks(16, None, has_gpu=False))
    assert checks["torch"].state is State.OK and "16 ranks" in checks["torch"].found
    assert checks["local"].state is State.MISSING and "--ranks 1" in checks["local"].remedy
    assert checks["deepep_ll"].state is State.MISSING
    assert checks["deepep_ll_emulated"].state is State.OK
    alone = by_name(backend_checks(1, TINY, has_gpu=False))
    assert alone["local"].state is State.OK and alone["torch"].state is State.MISSING
    assert exit_code([*checks.values(), *alone.values()]) == 0


def test_for_ranks_on_gpus_dispatchers_go_by_what_gpus_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo carries no rows of GPUs, and an emulation lives on CPUs: neither is ok, nor a remedy."""
    for have, why in ((False, "this torch is built without it"), (True, "no GPU here")):
        monkeypatch.setattr(backends, "_have_nccl", lambda have=have: have)
        checks = by_name(backend_checks(16, None, has_gpu=False, on_gpus=True))
        assert {c.state for c in checks.values()} == {State.MISSING}
        for name in ("torch", "allgather"):
            assert checks[name].reason == f"rows of GPUs go by NCCL: {why}"
        assert "on CPUs" in checks["deepep_ll_emulated"].reason
        assert not [c for c in checks.values() if "does here" in c.remedy]
    assert by_name(backend_checks(1, None, False, on_gpus=True))["local"].state is State.OK
    monkeypatch.setattr(backends, "_backend_of", lambda group: "nccl")
    assert by_name(backend_checks(16, None, False, on_gpus=True))["torch"].state is State.OK


def test_what_two_sections_look_at_stands_once() -> None:
    def told(ours: Check, theirs: Check) -> list[tuple[str, str, str]]:
        checks = [ok("host", ours.name, "not asked"), ours, theirs]
        return [(c.section, c.state.value, c.found) for c in told_once(checks)][1:]

    good, bad = ok(CUDA, "NCCL", "in torch"), fails(CUDA, "NCCL", "-", "no", "install")
    assert told(good, ok("libraries", "NCCL", "2.30.7")) == [(CUDA, "ok", "2.30.7")]
    assert told(good, missing("libraries", "NCCL", "why")) == [(CUDA, "ok", "in torch")]
    old = warning("libraries", "NCCL", "2.27.3", "old", "update")
    assert told(good, old) == [("libraries", "warning", "2.27.3")]
    assert (
        told(bad, old) == told(bad, missing("libraries", "NCCL", "why")) == [(CUDA, "fails", "-")]
    )
    assert told(ok(CUDA, "triton", "here"), ok("libraries", "Triton", "3.8")) == [
        (CUDA, "ok", "3.8")
    ]
    assert told_once([old]) == [old]


def test_a_machine_for_gpus_is_told_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_software", "_machine", "_network", "_rdma", "_backends"):
        monkeypatch.setattr(local, name, lambda *_: [])
    checks = local.local_checks(None, 8, device="cuda")
    names = [c.name.casefold() for c in checks if c.section in (CUDA, "GPU", "libraries")]
    assert len(names) == len(set(names)) and {"nccl", "triton", "flashinfer"} <= set(names)


def test_a_checkpoint_is_checked_and_read(tmp_path: Path) -> None:
    checks = by_name(checkpoint_checks(TINY))
    assert checks["folder"].state is State.OK and checks["read rate"].state is State.OK
    assert "MB/s" in checks["read rate"].found
    absent = [*checkpoint_checks(tmp_path / "no")]
    assert [c.state for c in absent] == [State.FAILS] and "no such folder" in absent[0].reason
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}")
        files[-1].write_bytes(b"x" * 1000)
    assert measure_read(files).bytes == 3000 and measure_read(files, most=1500).bytes == 1500
    slow = rate_check(ReadRate(100 << 20, 10.0, 100 << 20), 700 * 10**9)
    assert slow.state is State.WARNING and "minutes" in slow.reason
    assert "bypassed" in slow.found
    assert "from memory" in rate_check(ReadRate(10**9, 0.1, 0), 10**9).found
    assert "does not say" in rate_check(ReadRate(10**9, 0.1), 10**9).found


def test_a_checkpoint_cut_short_fails_as_it_would_when_served(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).symlink_to(file)
    shard = tmp_path / "model-00002-of-000002.safetensors"
    shard.unlink()
    shard.write_bytes((TINY / shard.name).read_bytes()[:-1000])
    (check,) = checkpoint_checks(tmp_path)
    assert check.state is State.FAILS and exit_code([check]) == 1
    assert shard.name in check.reason and "truncated" in check.reason


def test_a_part_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> list[Check]:
        raise RuntimeError("as asked")

    parts = ("_software", "_machine", "_network", "_rdma", "_libraries", "_backends")
    for name in parts:
        monkeypatch.setattr(local, name, lambda *_: [ok("s", "n", "f")])
    monkeypatch.setattr(local, "_libraries", breaks)
    found = local.local_checks(None, 8)
    assert [c.found for c in found].count("f") == 5
    (bad,) = [c for c in found if c.state is State.FAILS]
    assert bad.section == "libraries" and "as asked" in bad.reason


def test_the_command_says_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [ok("host", "a", "b"), fails("GPU", "driver", "1", "is too old", "update it")]
    monkeypatch.setattr(local, "local_checks", lambda *_, **__: bad)
    with pytest.raises(SomethingFails, match="1 check fails:\nGPU: driver: is too old") as caught:
        doctor(json=True)
    assert caught.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["counts"]["fails"] == 1
    show_checks(bad, "title")
    shown = capsys.readouterr().out
    assert "fails: driver: update it" in shown and "1 ok, 0 missing, 0 warning, 1 fails" in shown
    for arguments in ({"ranks": 0}, {"nodes": True}, {"nodes": True, "ranks": 1}):
        with pytest.raises(ConfigError, match="--(ranks|nodes)"):
            doctor(**arguments)


@pytest.mark.parametrize(
    ("cuda", "ranks", "found", "why", "remedy"),
    [
        (Cuda(None, 0), 1, "torch for the CPU", "built without CUDA", "for CUDA"),
        (Cuda("13.0", 0, "too old"), 1, "sees none", "no CUDA device (too old)", "nvidia-smi"),
        (Cuda("13.0", 0, "Error 802: system not yet initialized"), 1, "none", "802", "fabricm"),
        (Cuda("13.0", 2), 8, "sees 2", "8 ranks here and 2 CUDA devices", "at most 2 ranks"),
        (Cuda("13.0", 8), 8, "sees 8", "", ""),
    ],
)
def test_what_cuda_needs_and_is_missing(
    cuda: Cuda, ranks: int, found: str, why: str, remedy: str
) -> None:
    """In the words in which every other command refuses."""
    check = device_check(cuda, ranks)
    assert found in check.found and why in check.reason and remedy in check.remedy
    assert check.reason == (no_cuda(cuda, ranks) or "")
    assert check.state is (State.FAILS if why else State.OK)


def test_a_machine_is_asked_for_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_software", "_machine", "_network", "_rdma", "_libraries", "_backends"):
        monkeypatch.setattr(local, name, lambda *_, name=name: [ok(name, "n", "f")])
    monkeypatch.setattr(choose, "look", lambda: Cuda(None, 0))
    monkeypatch.setattr(gpu, "run_smi", lambda *_: None)
    found = {name: local.local_checks(None, 8, device=name) for name in ("auto", "cpu", "cuda")}
    sections = {name: {c.section for c in checks} for name, checks in found.items()}
    assert sections["auto"] - sections["cpu"] == {"GPU", "_rdma", "_libraries"}
    assert sections["cuda"] - sections["auto"] == {"--device cuda"}
    assert {name: exit_code(checks) for name, checks in found.items()} == {
        "auto": 0, "cpu": 0, "cuda": 1,
    }  # fmt: skip
    bad = {(c.section, c.name) for c in found["cuda"] if c.state is State.FAILS}
    assert {("GPU", "devices"), ("--device cuda", "torch and GPUs")} <= bad
    with pytest.raises(ConfigError, match="--device gpu: must be one of auto, cpu, cuda") as caught:
        doctor(device="gpu", ranks=0)
    assert len(caught.value.problems) == 2


def test_this_machine_as_json() -> None:
    """The whole command, in a process: no section may break, nothing fails on a CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "moeserve", "doctor", str(TINY), "--json", "--ranks", "2"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    report = json.loads(done.stdout)
    sections = {c["section"] for c in report["checks"]}
    assert sections >= {"software", "host", "GPU", "network", "libraries", "dispatchers"}
    broken = [c for c in report["checks"] if c["name"] == "doctor"]
    assert not broken and done.returncode == (0 if report["ok"] else 1), done.stderr
