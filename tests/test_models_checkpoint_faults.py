"""Every fault of a checkpoint: one typed error that names the tensor or the file."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.errors import CheckpointError
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.deepseek.load import load_model
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.deepseek.safetensors_index import SafetensorsIndex

SINGLE = EPGroup.single()
INDEX = "model.safetensors.index.json"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.1.mlp.gate.weight"
EMBED = "model.embed_tokens.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config(
        "v3", num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1
    )  # fmt: skip
    path = tmp_path_factory.mktemp("sound") / "c"
    return write_random_checkpoint(path, config, fp8="fp32", num_shards=3, tokenizer=False)


def load(path: Path) -> Any:
    return load_model(
        path,
        dtype=torch.float32,
        kernels=TorchKernels(),
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
    )


class Broken:
    """A copy of the sound checkpoint, to be broken."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.path / INDEX).read_text())["weight_map"]

    def write_map(self, weight_map: dict[str, str]) -> None:
        (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def file_of(self, name: str) -> Path:
        return self.path / self.weight_map[name]

    def edit(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        file = self.file_of(name)
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, file)

    def drop(self, *names: str) -> None:
        for name in names:
            file = self.file_of(name)
            save_file({k: v.clone() for k, v in load_file(file).items() if k != name}, file)
        self.write_map({k: v for k, v in self.weight_map.items() if k not in names})

    def add(self, name: str, value: torch.Tensor) -> None:
        file = self.file_of(KV_A)
        save_file({k: v.clone() for k, v in load_file(file).items()} | {name: value}, file)
        self.write_map(self.weight_map | {name: file.name})


def drop_mtp(b: Broken) -> None:
    b.drop(*[n for n in b.weight_map if n.startswith("model.layers.2.")])


def truncate(b: Broken) -> None:
    file = b.path / "model-00002-of-000003.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1000])


def corrupt_header(b: Broken) -> None:
    file = b.path / "model-00001-of-000003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[20:40] = b"\x00" * 20
    file.write_bytes(raw)


def header_too_long(b: Broken) -> None:
    file = b.path / "model-00001-of-000003.safetensors"
    raw = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 1 << 50) + raw[8:])


def remove_shard(b: Broken) -> None:
    (b.path / "model-00003-of-000003.safetensors").unlink()


def remove_index(b: Broken) -> None:
    (b.path / INDEX).unlink()


def no_files(b: Broken) -> None:
    for file in [*b.path.glob("*.safetensors"), b.path / INDEX]:
        file.unlink()


def twice(b: Broken) -> None:
    other = b.path / "model-00003-of-000003.safetensors"
    value = torch.zeros(256)
    save_file({k: v.clone() for k, v in load_file(other).items()} | {NORM: value}, other)


def grow(b: Broken) -> None:
    file = b.path / "model-00002-of-000003.safetensors"
    file.write_bytes(file.read_bytes() + b"rest")


def replace_first_shard(b: Broken, by: str) -> None:
    file = b.path / "model-00001-of-000003.safetensors"
    file.unlink()
    if by == "link":
        file.symlink_to(b.path / "gone")
    elif by == "folder":
        file.mkdir()
    else:
        file.write_bytes(by.encode())


def edit_header(b: Broken, change: Callable[[dict[str, Any]], None]) -> None:
    file = b.file_of(NORM)
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def overlap(header: dict[str, Any]) -> None:
    other = next(k for k, v in header.items() if k != NORM and v.get("shape") == [256])
    header[NORM]["data_offsets"] = header[other]["data_offsets"]


def only_a_dangling_link(b: Broken) -> None:
    no_files(b)
    (b.path / "model.safetensors").symlink_to(b.path / "gone")


def only_a_folder(b: Broken) -> None:
    no_files(b)
    (b.path / "model.safetensors").mkdir()


def only_an_empty_shard(b: Broken) -> None:
    no_files(b)
    save_file({}, b.path / "model.safetensors")


def index_is_a_folder(b: Broken) -> None:
    (b.path / INDEX).unlink()
    (b.path / INDEX).mkdir()


def mtp_not_in_the_config(b: Broken) -> None:
    config = json.loads((b.path / "config.json").read_text())
    (b.path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))


def fuse(b: Broken) -> None:
    prefix = "model.layers.1.mlp.experts."
    b.drop(*[n for n in b.weight_map if n.startswith(prefix)])
    b.add(prefix + "gate_up_proj", torch.zeros(8, 256, 256))


FAULTS: dict[str, tuple[Callable[[Broken], None], list[str]]] = {
    "missing tensor": (lambda b: b.drop(NORM), [f"missing tensor {NORM}"]),
    "missing expert": (
        lambda b: b.drop(EXPERT, EXPERT + "_scale_inv"), [f"missing tensor {EXPERT}"]),
    "missing scale": (lambda b: b.drop(KV_A + "_scale_inv"), [f"missing scale {KV_A}_scale_inv"]),
    "scale without weight": (
        lambda b: b.drop(KV_A), [f"missing tensor {KV_A}", f"without weight: {KV_A}_scale_inv"]),
    "scale of another shape": (
        lambda b: b.edit(KV_A + "_scale_inv", lambda t: t[:1]), ["[1, 2]", "[2, 2]", KV_A]),
    "scale of integers": (
        lambda b: b.edit(KV_A + "_scale_inv", lambda t: t.int()), ["dtype I32", KV_A]),
    "scale beside bf16": (
        lambda b: b.edit(KV_A, lambda t: t.bfloat16()), ["BF16, not FP8", f"{KV_A}_scale_inv"]),
    "wrong shape": (lambda b: b.edit(NORM, lambda t: t[:100]), [NORM, "[100]", "[256]"]),
    "transposed": (lambda b: b.edit(EXPERT, lambda t: t.T), [EXPERT, "[128, 256]"]),
    "integers": (lambda b: b.edit(NORM, lambda t: t.int()), [NORM, "dtype I32"]),
    "e5m2": (
        lambda b: b.edit(KV_A, lambda t: t.float().to(torch.float8_e5m2)), [KV_A, "F8_E5M2"]),
    "fp8 norm": (
        lambda b: b.edit(NORM, lambda t: t.to(torch.float8_e4m3fn)), [NORM, "F8_E4M3"]),
    "unexpected": (
        lambda b: b.add("model.layers.0.self_attn.q_norm.weight", torch.ones(4)),
        ["unexpected tensor model.layers.0.self_attn.q_norm.weight"]),
    "one layer too many": (
        lambda b: b.add("model.layers.3.input_layernorm.weight", torch.ones(256)),
        ["unexpected tensor model.layers.3.input_layernorm.weight"]),
    "int4": (
        lambda b: (b.drop(EXPERT, EXPERT + "_scale_inv"),
                   b.add(EXPERT + "_packed", torch.ones(4, 4, dtype=torch.int32)))[1],
        [f"missing tensor {EXPERT}", "quantisation not built"]),
    "absent MTP layer": (drop_mtp, ["MTP layer model.layers.2 is absent", "num_nextn"]),
    "half an MTP layer": (
        lambda b: b.drop("model.layers.2.enorm.weight"), ["model.layers.2.enorm.weight"]),
    "truncated": (truncate, ["model-00002-of-000003.safetensors: truncated"]),
    "corrupt header": (corrupt_header, ["model-00001-of-000003.safetensors: corrupt header"]),
    "header too long": (header_too_long, ["model-00001-of-000003.safetensors: corrupt header"]),
    "bytes too many": (grow, ["model-00002-of-000003.safetensors: 4 bytes after"]),
    "missing file": (remove_shard, ["to model-00003-of-000003.safetensors, which is missing"]),
    "no index": (remove_index, ["3 shards", "without model.safetensors.index.json"]),
    "no files": (no_files, ["no *.safetensors file"]),
    "broken index": (lambda b: (b.path / INDEX).write_text("{") and None, [f"{INDEX}: not a read"]),
    "index with a path": (
        lambda b: b.write_map(b.weight_map | {NORM: "../x.safetensors"}), ["../x.safetensors"]),
    "index of another file": (
        lambda b: b.write_map(b.weight_map | {KV_A: "model-00003-of-000003.safetensors"}),
        [f"tensor {KV_A}: the index says model-00003-of-000003.safetensors"]),
    "not in the index": (
        lambda b: b.write_map({k: v for k, v in b.weight_map.items() if k != NORM}),
        [f"tensor {NORM}", "is not in model.safetensors.index.json"]),
    "empty file": (lambda b: replace_first_shard(b, ""), ["00001-of-000003.safetensors: trunc"]),
    "dangling link": (
        lambda b: replace_first_shard(b, "link"), ["000003.safetensors, which is missing"]),
    "folder for a shard": (
        lambda b: replace_first_shard(b, "folder"), ["000003.safetensors, which is missing"]),
    "nothing but a dangling link": (
        only_a_dangling_link, ["model.safetensors: cannot be read (No such file"]),
    "nothing but a folder": (only_a_folder, ["model.safetensors: cannot be read (Is a dir"]),
    "nothing but an empty shard": (only_an_empty_shard, ["model.safetensors: holds no tensor"]),
    "index is a folder": (index_is_a_folder, [f"{INDEX}: cannot be read (Is a directory)"]),
    "index of nothing": (lambda b: b.write_map({}), [f"{INDEX}: its weight_map is empty"]),
    "overlapping tensors": (lambda b: edit_header(b, overlap), ["begins at byte", "ends at"]),
    "offsets that are no integers": (
        lambda b: edit_header(b, lambda h: h[NORM].update(data_offsets=[0.0, 512.0])),
        ["corrupt header", NORM]),
    "MTP layer that the config lacks": (
        mtp_not_in_the_config, ["unexpected MTP layer model.layers.2", "num_nextn_predict_layers"]),
    "fused experts": (fuse, ["missing tensor model.layers.1.mlp.experts.0.", "experts fused"]),
    "stored twice": (twice, [f"tensor {NORM} is stored twice"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_found_in_headers_before_any_payload(
    fault: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)
    damage, named = FAULTS[fault]
    damage(Broken(path))
    monkeypatch.setattr(SafetensorsIndex, "read", lambda self, name: pytest.fail(f"read {name}"))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    text = "\n".join(caught.value.problems)
    assert all(part in text for part in named), text


def test_a_missing_shard_is_one_problem_and_many_are_cut(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)
    remove_shard(Broken(path))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert len(caught.value.problems) == 1
    many = CheckpointError("c", [str(i) for i in range(CheckpointError.SHOWN + 5)])
    assert many.shown[-1] == "... and 5 more" and len(many.shown) == CheckpointError.SHOWN + 1


def test_all_problems_come_at_once(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)
    broken = Broken(path)
    broken.drop(NORM)
    broken.drop(EXPERT + "_scale_inv")
    broken.add("extra", torch.ones(1))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [BIAS, EXPERT + "_scale_inv", NORM, GATE, EMBED, EXPERT])
def test_values_that_would_poison_every_token(
    name: str, value: float, sound: Path, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:  # has a code for NaN and none for infinity
            tensor.view(torch.uint8).view(-1)[7] = 0xFF
        else:
            tensor.view(-1)[7 % tensor.numel()] = value
        return tensor

    Broken(path).edit(name, poison)
    with pytest.raises(CheckpointError, match="NaN or infinity") as caught:
        load(path)
    assert name in str(caught.value)


def test_negative_scales(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)
    Broken(path).edit(EXPERT + "_scale_inv", lambda scale: -scale)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv holds negative"):
        load(path)


def test_a_layer_too_many_is_one_problem(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)
    mtp_not_in_the_config(Broken(path))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert len(caught.value.problems) == 1


def test_a_shard_that_the_index_does_not_name_is_told(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(sound, path)
    save_file({"a": torch.zeros(2)}, path / "consolidated.safetensors")
    assert any("consolidated.safetensors" in note for note in load(path).weights.notes)
    assert not any("consolidated" in note for note in load(sound).weights.notes)


def test_the_sound_one_loads(sound: Path) -> None:
    assert load(sound).num_mtp_layers == 1
