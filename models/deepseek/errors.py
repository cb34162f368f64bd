"""What a checkpoint or its config can do wrong, as typed errors that name everything at once.

Knows: names, reasons, lists of problems. Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Sequence

SUPPORTED_FAMILIES: tuple[str, ...] = (
    "deepseek_v2 (DeepSeek-V2, V2-Lite, Coder-V2)",
    "deepseek_v3 (DeepSeek-V3, R1, V3.1, Moonlight)",
    "kimi_k2 (Kimi-K2, FP8 or BF16)",
    "kimi_k25 (the text model inside, FP8 or BF16)",
    "glm4_moe_lite (GLM-4.7-Flash)",
)


class UnsupportedModel(ValueError):
    """A config that is understood well enough to know that it must not be served.

    model_type: as the config says ("" when absent); reason: one line; supported: the families that
    can be served.
    """

    def __init__(self, model_type: str, reason: str) -> None:
        self.model_type = model_type
        self.reason = reason
        self.supported = SUPPORTED_FAMILIES
        super().__init__(
            f"model_type {model_type!r} cannot be served: {reason}. "
            f"Supported: {'; '.join(SUPPORTED_FAMILIES)}"
        )


class ConfigError(ValueError):
    """A config of a supported family with missing or impossible values; lists all of them."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(f"{source}: {len(self.problems)} problem(s)\n{lines}")


class CheckpointError(ValueError):
    """A checkpoint that does not hold exactly what its config promises.

    problems: every fault found, each naming its tensor or file. Only the first `SHOWN` are printed.
    """

    SHOWN = 20

    def __init__(self, directory: str, problems: Sequence[str]) -> None:
        self.directory = directory
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {p}" for p in self.shown)
        super().__init__(f"checkpoint {directory}: {len(self.problems)} problem(s)\n{lines}")

    @property
    def shown(self) -> list[str]:
        """The first problems, and how many more there are."""
        more = len(self.problems) - self.SHOWN
        return [*self.problems[: self.SHOWN], *([f"... and {more} more"] if more > 0 else [])]
