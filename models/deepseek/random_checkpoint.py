"""Random checkpoints on disk, shaped like real releases: for tests and benchmarks.

Knows: which values each kind of tensor gets (gate biases non-zero and partly negative, norms near
1), shards with a weight and its scale apart, FP8 with each kind of scale, a byte-level tokenizer.
Written tensor by tensor, seeded by name: the same seed gives the same bytes whatever the shards.

    python -m models.deepseek.random_checkpoint OUT --family v3 --size tiny
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.arguments import Parser, at_least, told_in_a_line
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import ConfigError
from models.deepseek.fp8 import quantise_weight, scale_shape
from models.deepseek.layout import (
    SCALE_SUFFIX,
    Expected,
    embed_name,
    expected_tensors,
    head_name,
    layer_prefix,
    mtp_layers,
)
from models.deepseek.random_families import FAMILIES, SIZES, family_config
from models.deepseek.random_tokenizer import write_tokenizer
from models.deepseek.safetensors_index import INDEX_NAME

FP8_KINDS = ("fp32", "pow2", "e8m0")  # scales: any F32, powers of two as F32, E8M0 bytes
_QUANTISED = ("attention", "dense_mlp", "shared_expert", "experts")
_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_random_checkpoint(
    out: str | Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    fp8: str | None = None,
    num_shards: int = 1,
    tokenizer: bool = True,
    bias_shift: float = 0.0,
) -> Path:
    """Write config.json, tensors (and a tokenizer) to the folder `out`; -> the folder.

    dtype: of all tensors that are not quantised (gate biases are F32). fp8: one of FP8_KINDS, or
    None. num_shards > 1: an index, and each scale in another shard than its weight. bias_shift is
    added to every gate bias: below -1 makes all choice scores negative.
    """
    if fp8 is not None and fp8 not in FP8_KINDS:
        raise ValueError(f"fp8={fp8!r}: valid are None, {', '.join(FP8_KINDS)}")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(config)
    if fp8 is not None:
        quant = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                 "weight_block_size": [128, 128]}  # fmt: skip
        config["quantization_config"] = quant | ({} if fp8 == "fp32" else {"scale_fmt": "ue8m0"})
    parsed = DeepSeekConfig.from_hf(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights: list[_Entry] = []
    scales: list[_Entry] = []
    for item in expected_tensors(parsed).values():
        _entries(item, _Recipe(parsed, seed, bias_shift), dtype, fp8, weights, scales)
    shards = _deal(weights, scales, num_shards)
    if num_shards == 1:
        _write_shard(folder / "model.safetensors", shards[0])
    else:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{num_shards:06d}.safetensors"
            _write_shard(folder / file, shard)
            weight_map |= {e.name: file for e in shard}
        total = sum(e.nbytes for e in weights + scales)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    if tokenizer:
        write_tokenizer(folder, parsed.vocab_size)
    return folder


@dataclass(frozen=True)
class _Recipe:
    config: DeepSeekConfig
    seed: int
    bias_shift: float


def _random_tensor(item: Expected, recipe: _Recipe) -> Tensor:
    """fp32 values of one tensor. MTP's embedding and head are the main model's."""
    name, config, seed = item.name, recipe.config, recipe.seed
    for layer in mtp_layers(config):
        p = layer_prefix(config, layer)
        name = {p + "embed_tokens.weight": embed_name(config),
                p + "shared_head.head.weight": head_name(config)}.get(name, name)  # fmt: skip
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    value = torch.empty(item.shape).normal_(generator=generator)
    if name.endswith("e_score_correction_bias"):
        return value * 0.3 + recipe.bias_shift
    if len(item.shape) == 1:
        return 1 + 0.1 * value
    if name == embed_name(config):
        return value
    return value.mul_(item.shape[1] ** -0.5)


def _entries(
    item: Expected,
    recipe: _Recipe,
    dtype: torch.dtype,
    fp8: str | None,
    weights: list[_Entry],
    scales: list[_Entry],
) -> None:
    def plain() -> Tensor:
        return _random_tensor(item, recipe)

    if fp8 is None or item.kind not in _QUANTISED:
        stored = torch.float32 if item.name.endswith("e_score_correction_bias") else dtype
        weights.append(_Entry(item.name, stored, item.shape, plain))
        return
    ue8m0 = fp8 != "fp32"
    scale_dtype = torch.float8_e8m0fnu if fp8 == "e8m0" else torch.float32
    weights.append(
        _Entry(
            item.name,
            torch.float8_e4m3fn,
            item.shape,
            lambda: quantise_weight(plain(), ue8m0=ue8m0)[0],
        )
    )
    scales.append(
        _Entry(
            item.name + SCALE_SUFFIX,
            scale_dtype,
            scale_shape(item.shape),
            lambda: _scale_bytes(quantise_weight(plain(), ue8m0=ue8m0)[1], scale_dtype),
        )
    )


def _scale_bytes(scale: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float8_e8m0fnu:
        return scale
    exponent = torch.frexp(scale).exponent - 1 + 127  # scale = 2^(byte - 127)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def _deal(weights: list[_Entry], scales: list[_Entry], num_shards: int) -> list[list[_Entry]]:
    """Runs of about equal bytes; a scale goes to the shard after its weight's."""
    shards: list[list[_Entry]] = [[] for _ in range(num_shards)]
    total, done = sum(e.nbytes for e in weights), 0
    home: dict[str, int] = {}
    for entry in weights:
        home[entry.name] = min(done * num_shards // max(total, 1), num_shards - 1)
        shards[home[entry.name]].append(entry)
        done += entry.nbytes
    for entry in scales:
        shards[(home[entry.name.removesuffix(SCALE_SUFFIX)] + 1) % num_shards].append(entry)
    return shards


def _write_shard(path: Path, entries: list[_Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # Wide types first keeps every tensor at an aligned address.
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)
    for entry in entries:
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(len(raw) + 8) % 64)  # payload starts on a multiple of 64
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for entry in entries:
            value = entry.make().to(entry.dtype).contiguous()
            file.write(value.view(-1).view(torch.uint8).numpy().data)


def main() -> None:
    parser = Parser(description="Write a random checkpoint.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="v3")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--fp8", choices=FP8_KINDS, default=None, help="quantise; kind of scales")
    parser.add_argument("--shards", type=at_least(1), default=None, help="default: 1 tiny, 4 bench")
    parser.add_argument(
        "--mtp", type=at_least(0), default=None, help="MTP layers (default: the family's)"
    )
    parser.add_argument(
        "--hidden", type=at_least(1), default=None, help="hidden size (DeepEP: from 2048)"
    )
    parser.add_argument(
        "--layers", type=at_least(1), default=None, help="layers, the dense first included"
    )
    args = parser.parse_args()
    given = {
        "num_nextn_predict_layers": args.mtp,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    with told_in_a_line(ConfigError):
        config = family_config(args.family, args.size, **overrides)
        DeepSeekConfig.from_hf(config)
        args.out.mkdir(parents=True, exist_ok=True)
    config["torch_dtype"] = args.dtype
    shards = args.shards or (1 if args.size == "tiny" else 4)
    folder = write_random_checkpoint(
        args.out, config, seed=args.seed, dtype=getattr(torch, args.dtype), fp8=args.fp8,
        num_shards=shards,
    )  # fmt: skip
    count = sum(
        math.prod(e.shape) for e in expected_tensors(DeepSeekConfig.from_hf(config)).values()
    )
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {count / 1e6:.1f} M parameters, {size / 1e6:.1f} MB, {shards} shard(s)")


if __name__ == "__main__":
    main()
