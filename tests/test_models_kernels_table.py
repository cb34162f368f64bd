"""A table of who won as a setting: read, refused in words, and what it puts before our kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ep.group import EPGroup
from models.deepseek.kernels.errors import KernelTableError
from models.deepseek.kernels.gpu import kernel_table, triton_kernels
from models.deepseek.kernels.gpu.bench import versions
from models.deepseek.kernels.gpu.bench.run import OURS, Row
from models.deepseek.kernels.gpu.bench.winners import Winners
from models.deepseek.kernels.gpu.gemm_adapters import GemmProblem
from models.deepseek.kernels.gpu.gemm_choice import FAMILIES, Gemms
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.kernels.select import create_kernels
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError
from moeserve.startup import prepare


def row(kernel: str, deep: float, **key: int) -> Row:
    return Row(
        kernel, str(key), key, "memory", 1.0, 1, 1, ours=2.0,
        rivals={"deep_gemm": deep, "torch bf16": 0.1}, differences={"deep_gemm": 0.001},
    )  # fmt: skip


def table(device: str) -> Winners:
    rows = [
        row("fp8_gemm", 3.0, rows=1, columns=7168, width=2048),
        row("fp8_gemm", 1.0, rows=4096, columns=7168, width=2048),
        row("grouped_masked", 1.0, experts=8, rows=32, columns=4096, width=7168),
    ]
    return Winners.from_rows(device, rows)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "HAVE_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "H200")


def test_a_table_puts_libraries_before_ours(h200: None, tmp_path: Path) -> None:
    file = tmp_path / "winners.json"
    table("H200").save(file)
    choice = create_kernels("triton", "cuda", file)
    assert choice.reason == (
        f"kernels: triton ({choice.kernels.description}; libraries where winners.json has them as "  # type: ignore[attr-defined]
        "winners)"
    )
    kernels = choice.kernels
    assert isinstance(kernels, TritonKernels)
    assert [b.name for b in kernels._backends] == ["fastest", OURS]
    by_hand = create_kernels("triton", "cuda", file, graphs=False).kernels
    assert not by_hand._graphs  # type: ignore[attr-defined]
    assert kernels._graphs  # who plans on the host each step is left out
    assert isinstance(create_kernels("triton", "cuda").kernels, TritonKernels)
    assert len(create_kernels("triton", "cuda").kernels._backends) == 1  # type: ignore[attr-defined]


def test_every_form_of_product_is_asked_for_by_the_name_it_is_measured_by() -> None:
    held = table("H200")
    assert held.pick(FAMILIES["dense"], ["deep_gemm"], rows=8192, columns=7168, width=2048)
    size = {"columns": 7168, "width": 2048}
    assert held.pick(FAMILIES["dense"], ["deep_gemm"], rows=2, **size) == OURS
    assert held.pick(FAMILIES["dense"], ["deep_gemm"], rows=4000, **size) == "deep_gemm"
    assert held.pick(FAMILIES["dense"], [], rows=4000, **size) == OURS  # not here
    size = {"columns": 4096, "width": 7168, "rows": 30}
    assert held.pick(FAMILIES["masked"], ["deep_gemm"], experts=8, **size) == "deep_gemm"
    for experts in (4, 5, 9, 32):  # the slots a GPU of real layouts: EP72, Kimi EP96, EP32
        assert held.pick(FAMILIES["masked"], ["deep_gemm"], experts=experts, **size) == "deep_gemm"
    assert held.pick(FAMILIES["masked"], ["deep_gemm"], experts=1, **size) is None
    assert held.pick(FAMILIES["contiguous"], ["deep_gemm"], experts=8, **size) is None


def test_a_product_goes_to_who_won(h200: None) -> None:
    class Library:
        name = "deep_gemm"
        dense = contiguous = masked = staticmethod(lambda *args, **more: args[0])

        def refusal(self, problem: GemmProblem) -> str | None:
            return None if problem.form == "dense" else "no"

    gemms = Gemms(90, [Library()], table("H200"))
    a, b = torch.zeros(4000, 2048), torch.zeros(7168, 2048)
    assert gemms.dense(a, a, b, b) is a
    assert gemms.choices == (
        "fp8 gemm, dense 7168 x 2048, 4096 rows or fewer: deep_gemm won at 4096 rows",
    )

    class Other(Library):
        def refusal(self, problem: GemmProblem) -> str | None:
            return None

    for rows, columns, said in (
        (16384, 7168, "16384 rows or fewer: deep_gemm won at 4096 rows"),
        (32768, 7168, "32768 rows or fewer: triton; nothing like it was measured"),
        (16, 7168, "16 rows or fewer: triton; nothing like it was measured"),
        (4, 7168, "4 rows or fewer: triton won at 1 rows"),
        (4096, 7040, "4096 rows or fewer: triton; nothing like it was measured"),
    ):
        gemms = Gemms(90, [Other()], table("H200"))
        gemms._taken(GemmProblem("dense", columns, 2048, 90), rows)
        assert gemms.choices == (f"fp8 gemm, dense {columns} x 2048, {said}",)


GOOD = {
    "format": "moeserve kernel winners 2",
    "device": "H200",
    "versions": {"triton": "3.7.1", "kernels": "0123456789ab"},
    "winners": {
        "fp8_gemm": [
            {
                "key": {"rows": 1, "columns": 7168, "width": 2048},
                "name": "deep_gemm",
                "seconds": {"triton": 2e-6, "deep_gemm": 1e-6},
            }
        ]
    },
}


def spoiled(*path: str | int, value: object) -> str:
    """A good file with one value in it changed."""
    held = json.loads(json.dumps(GOOD))
    part = held
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return json.dumps(held)


ROW = ("winners", "fp8_gemm", 0)
BAD_FILES = [
    ("", "is empty"),
    ("{", "Expecting property name"),
    ("[" * 100_000, "brackets within brackets"),
    ("[]", "format=None"),
    ('{"format": "other"}', "format='other'"),
    ('{"winners_table": 3}', "format=None"),
    ('{"format": "moeserve kernel winners 2"}', "not whole: 'device' is missing"),
    (spoiled("device", value=3), "device=3: must be the name of a GPU"),
    (spoiled("device", value=" "), "device=' ': must be the name of a GPU"),
    (spoiled("versions", value=[]), "versions=[]: must be an object"),
    (spoiled("versions", "triton", value=3), "versions.triton=3: must be text"),
    (spoiled("winners", value=[]), "winners=[]: must be an object"),
    (spoiled("winners", "fp9", value=[]), "winners.fp9: must be one of mla_decode, "),
    (spoiled("winners", "fp8_gemm", value=1), "winners.fp8_gemm=1: must be a list"),
    (spoiled(*ROW, value=[]), "winners.fp8_gemm[0]=[]: must be an object"),
    (spoiled(*ROW, value={}), "not whole: 'key' is missing"),
    (spoiled(*ROW, "key", value={"rows": 1}), "key has rows: must be of ['rows', 'columns', "),
    (spoiled(*ROW, "key", "rows", value="many"), "key.rows='many': must be a whole number"),
    (spoiled(*ROW, "key", "rows", value=-1), "key.rows=-1"),
    (spoiled(*ROW, "key", "rows", value=float("inf")), "key.rows=inf"),
    (spoiled(*ROW, "seconds", value={}), "seconds has no time of 'triton'"),
    (spoiled(*ROW, "name", value="other"), "seconds has no time of 'other'"),
    (spoiled(*ROW, "name", value=[1]), "seconds has no time of [1]"),
    (spoiled(*ROW, "seconds", "triton", value=0), "seconds.triton=0: must be seconds, above 0"),
    (spoiled(*ROW, "seconds", "triton", value=True), "seconds.triton=True"),
    (spoiled(*ROW, "seconds", "triton", value=float("nan")), "seconds.triton=nan"),
    (spoiled(*ROW, "seconds", "triton", value=float("inf")), "seconds.triton=inf"),
    (spoiled(*ROW, "seconds", "triton", value=10**400), "seconds.triton=1000"),
    (spoiled(*ROW, "seconds", "triton", value="1"), "seconds.triton='1'"),
]


def test_a_good_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "good.json"
    file.write_text(json.dumps(GOOD))
    assert Winners.load(file).as_json() == GOOD


@pytest.mark.parametrize(("text", "said"), BAD_FILES)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_bad_file_is_named(h200: None, tmp_path: Path, text: str, said: str, where: str) -> None:
    """Without a GPU as with one."""
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(KernelTableError, match="bad.json") as caught:
        create_kernels("triton" if where == "cuda" else "torch", where, file)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(KernelTableError, match="Is a directory; beside that, a table"):
        create_kernels("torch", "cpu", tmp_path)
    file = tmp_path / "bad.json"
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(KernelTableError, match="bad.json: .*codec can't decode"):
        create_kernels("torch", "cpu", file)


def test_another_devices_table_is_refused(h200: None, tmp_path: Path) -> None:
    file = tmp_path / "winners.json"
    file.write_text(json.dumps({"winners_table": table("B200").as_json()}))
    with pytest.raises(KernelTableError, match="measured on B200, this is H200"):
        create_kernels("triton", "cuda", file)
    with pytest.raises(KernelTableError, match="No such file"):
        create_kernels("triton", "cuda", tmp_path / "gone.json")


def test_a_table_of_other_versions_is_refused(
    h200: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "winners.json"
    table("H200").save(file)
    create_kernels("triton", "cuda", file)
    now = versions.versions_here()
    monkeypatch.setattr(kernel_table, "versions_here", lambda: now | {"triton": "9.1"})
    with pytest.raises(KernelTableError) as caught:
        create_kernels("triton", "cuda", file)
    said = f"winners.json: measured with triton {now['triton']}, here 9.1: who was faster then"
    assert said in str(caught.value) and "measures again" in str(caught.value)


def test_what_a_table_was_measured_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = versions.versions_here()
    assert list(here) == [
        "torch", "triton", "driver", "deep_gemm", "flash_mla", "flashinfer", "kernels",
    ]  # fmt: skip
    assert here["torch"] == torch.__version__ and here["deep_gemm"] == versions.NONE
    told = versions.differences({"torch": "1", "gone": "2"}, {"torch": "1", "new": "3"})
    assert told == "new none, here 3; gone 2, here none" and not versions.differences(here, here)
    file = tmp_path / "version"
    monkeypatch.setattr(versions, "DRIVER", file)
    assert versions.versions_here()["driver"] == versions.NONE
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert versions.versions_here()["driver"] == "580.65.06"


def test_a_kernels_text_counts_and_what_is_said_of_it_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    shutil.copytree(versions.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = versions.kernels_text()
    assert versions.kernels_text(folder) == before
    said, tile = folder / "fp8_gemm.py", folder / "gemm_tile.py"
    said.write_text("# more\n" + said.read_text().replace('"""', '"""More. ', 1))
    assert versions.kernels_text(folder) == before
    (folder / "sampling.py").write_text("")  # no library does the same
    assert versions.kernels_text(folder) == before
    tile.write_text(tile.read_text() + "\nGROUP_ROWS = 3\n")  # what a kernel is made of
    assert versions.kernels_text(folder) != before


def test_kernels_of_cpus_have_no_table(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(GOOD))
    with pytest.raises(KernelTableError, match="x.json: a table of kernels is for .*, on GPUs"):
        create_kernels("torch", "cpu", file)


def test_in_deterministic_mode_there_is_none(tmp_path: Path) -> None:
    given = {"checkpoint": str(tmp_path), "kernel_table": "x.json"}
    with pytest.raises(ConfigError, match="model.kernel_table='x.json': not used while engine"):
        ServeConfig.load(None, {"model": given})
    config = ServeConfig.load(None, {"model": given, "engine": {"deterministic": False}})
    assert config.model.kernel_table == Path("x.json")


def test_start_up_names_the_file(random_checkpoint: Path, tmp_path: Path) -> None:
    """Beside all else that is wrong, before any weight is read."""
    file = tmp_path / "bad.json"
    file.write_text("{}")
    model = {"checkpoint": random_checkpoint, "kernel_table": file}
    given = {"model": model, "engine": {"deterministic": False, "device": "cpu"}}
    schedule = {"max_model_len": 10**7}
    with pytest.raises(ConfigError) as caught:
        prepare(ServeConfig.load(None, given | {"schedule": schedule}), EPGroup.single())
    first, second = caught.value.problems
    assert first.startswith(f"model.kernel_table={file}: format=None: must be ")
    assert first.endswith("; beside that, a table of kernels is for triton kernels, on GPUs")
    assert "max_model_len=10000000" in second
