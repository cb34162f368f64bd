"""HeadFile: the tensors and the config of a folder with trained heads (Medusa, EAGLE).

Every tensor is taken or refused by name, and all that is wrong is said at once (ConfigError).
Safetensors, or a pickled state dict read with weights_only, as such heads were published.

Knows: files, names, shapes. Knows nothing of what the tensors are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moeserve.errors import ConfigError, one_line

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


class HeadFile:
    """take each tensor once, then `done`. where: for messages. prefixes: name parts that some
    releases put before all names ("model.", "medusa_head.") and that are dropped."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        where: str = "heads",
        prefixes: tuple[str, ...] = (),
    ) -> None:
        self.config, self.where = dict(config), where
        self.problems: list[str] = []
        self._left: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            short = name
            for prefix in prefixes:
                short = short.removeprefix(prefix)
            if short in self._left:
                self.problems.append(f"{where}: tensor {short} is there twice")
            self._left[short] = tensor

    @classmethod
    def read(cls, folder: str | Path, prefixes: tuple[str, ...] = ()) -> HeadFile:
        """ConfigError if the folder lacks a readable config.json or weights."""
        folder = Path(folder)
        tensors: dict[str, Tensor] = {}
        try:
            config = json.loads((folder / "config.json").read_text())
            files = sorted(folder.glob("*.safetensors"))
            for path in files:
                tensors |= load_file(path)
            if not files:
                pickles = [folder / name for name in PICKLES if (folder / name).exists()]
                if not pickles:
                    raise FileNotFoundError(f"no *.safetensors and no {' or '.join(PICKLES)}")
                tensors = torch.load(pickles[0], map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a file can hold
            raise ConfigError([f"speculate={folder}: {one_line(error)}"]) from error
        return cls(tensors, config, f"speculate={folder}", prefixes)

    def refuse_if_other(self, kind: str) -> None:
        """kind: eagle or medusa, as asked for. ConfigError in one line where the folder is the
        other's: its tensors by name would be a line each."""
        looks = self.looks_like
        if looks not in (None, kind):
            folder = self.where.removeprefix("speculate=")
            an = {"eagle": "an EAGLE", "medusa": "a Medusa"}[str(looks)]
            raise ConfigError([f"{self.where}: looks like {an} folder; use {looks}:{folder}"])

    @property
    def looks_like(self) -> str | None:
        """eagle, medusa or None, by names that only one of them has, behind either's prefix."""

        def has(last: str) -> bool:
            return any(name == last or name.endswith(f".{last}") for name in self._left)

        eagle = has("fc.weight")
        medusa = has("0.0.linear.weight") or "medusa_num_heads" in self.config
        if eagle == medusa:
            return None
        return "eagle" if eagle else "medusa"

    def has(self, name: str) -> bool:
        return name in self._left

    def number(self, key: str, default: int | float | None = None) -> int | float:
        """Above 0 and finite."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"{self.where}: config.json {key}={value!r} must be a number")
            return default or 1
        if not (value > 0 and isfinite(value)):
            self.problems.append(f"{self.where}: config.json {key}={value!r} must be above 0")
            return default or 1
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.number(key, default)
        if value != int(value):
            self.problems.append(f"{self.where}: config.json {key}={value!r} must be whole")
        return max(int(value), 1)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape; a problem and zeros where it is another."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            self.problems.append(f"{self.where}: tensor {name} is missing")
        elif tuple(tensor.shape) != shape:
            self.problems.append(
                f"{self.where}: tensor {name} is {list(tensor.shape)}, must be {list(shape)}"
            )
        elif not bool(torch.isfinite(tensor.float()).all()):
            self.problems.append(f"{self.where}: tensor {name} holds NaN or infinity")
        else:
            return tensor
        return torch.zeros(shape)

    def done(self) -> None:
        """ConfigError with all problems, tensors that nobody took included."""
        self.problems += [f"{self.where}: tensor {name} is not known" for name in self._left]
        if self.problems:
            raise ConfigError(self.problems)
