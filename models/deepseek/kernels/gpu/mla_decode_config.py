"""Which tiles MLA decode runs with: by chip, heads and kind of cache, never by rows (law 5).

Chosen by what compiles without spills within a chip's shared memory; none was measured so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.deepseek.kernels.gpu.mla_plan import TILE, ByLoad


@dataclass(frozen=True)
class DecodeConfig:
    """block_h: heads of a program. halves, guarded: see mla_decode_kernel. per_chip: programs that
    a multiprocessor holds at once, by their shared memory."""

    block_h: int
    warps: int
    stages: int
    halves: int = 1
    guarded: int = 0
    per_chip: int = 1

    def name(self, fp8: bool, depth: int) -> str:
        kind = "fp8" if fp8 else "bf16"
        tree = f" tree{depth}" if depth else ""
        return f"{kind} {self.block_h}x{TILE} w{self.warps} s{self.stages}{tree}"


# wgmma and tcgen05 multiply 64 rows at a time or more. With 32 heads or fewer (a rank's share under
# tensor parallelism) a tile of 64 would be half empty or worse, in registers and shared memory as
# well, and the step is bound by reading the cache: there tiles of 16 and 32 go by mma.sync.
# (architecture, heads up to) -> config. By heads alone, never by rows: see law 5 above.
CONFIGS = {
    (90, 16): DecodeConfig(16, 8, 2, per_chip=2),
    (90, 32): DecodeConfig(32, 8, 2),
    (90, 1 << 30): DecodeConfig(64, 8, 3, guarded=1),
    (100, 16): DecodeConfig(16, 8, 2, per_chip=2),
    (100, 32): DecodeConfig(32, 8, 2),
    (100, 1 << 30): DecodeConfig(64, 8, 1, halves=2),
}
HEADS = (16, 32, 1 << 30)
FP8_HOPPER = DecodeConfig(64, 8, 2, guarded=2)  # of more than 32 heads
FILLED = 2  # times a GPU's programs: what a step is cut into by load, so that ends are ragged less


def choose_config(heads: int, arch: int, fp8: bool = False) -> DecodeConfig:
    """arch: 90 or 100 (anything newer counts as 100, anything older as 90)."""
    if fp8 and arch < 100 and heads > 32:
        return FP8_HOPPER
    return CONFIGS[100 if arch >= 100 else 90, next(most for most in HEADS if heads <= most)]


def fill(heads: int, processors: int, config: DecodeConfig) -> ByLoad:
    """Cuts by load with which a step fills `processors` multiprocessors FILLED times."""
    shares = -(-heads // config.block_h) * config.halves
    return ByLoad(max(1, FILLED * processors * config.per_chip // shares))
