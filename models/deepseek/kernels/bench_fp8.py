"""Times products with weights kept in FP8 against the same weights dequantised to bf16.

`python -m models.deepseek.kernels.bench_fp8 [--threads N] [--seconds S]` prints a table. Both run
in turns over the same rows; the ratio is the median of paired ratios. Weights are several times
larger than any cache, as in a model. Shapes as in bench.py. Results must be equal, or it stops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from models.arguments import Parser, at_least, between
from models.deepseek.fp8 import Fp8Rows, quantise_weight
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.bench import COLD_BYTES, EXPERTS, HIDDEN, INTER, routed, seconds
from models.deepseek.kernels.select import create_kernels

BF16 = torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 256)


def quantised(n: int, k: int) -> Fp8Rows:
    return Fp8Rows.of(*quantise_weight(torch.randn(n, k) * k**-0.5))


def linear_pair(kernels: Kernels, rows: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    x = torch.randn(rows, HIDDEN).to(BF16)
    weight = quantised(2 * HIDDEN, HIDDEN)
    copies = COLD_BYTES // weight.values.nbytes
    plain = weight.dequantise(BF16)
    kept = cycle([kernels.fp8_linear_weight(weight, BF16) for _ in range(copies)])
    wide = cycle([kernels.linear_weight(plain, BF16) for _ in range(copies)])

    def in_fp8() -> Tensor:
        one = next(kept)
        assert one is not None
        return kernels.linear(x, one)

    return in_fp8, lambda: kernels.linear(x, next(wide))


def experts_pair(kernels: Kernels, rows: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    x = torch.randn(rows, HIDDEN).to(BF16)
    kept = kernels.allocate_fp8_experts(EXPERTS, HIDDEN, INTER, BF16)
    wide = kernels.allocate_experts(EXPERTS, HIDDEN, INTER, BF16)
    parts = [quantised(INTER, HIDDEN), quantised(INTER, HIDDEN), quantised(HIDDEN, INTER)]
    plain = [part.dequantise(BF16) for part in parts]
    for slot in range(EXPERTS):
        kept.store_fp8(slot, *parts)
        wide.store(slot, *plain)
    routes = [routed(rows) for _ in range(16)]
    turn, other = cycle(routes), cycle(routes)
    return (
        lambda: kernels.experts(x, *next(turn), kept),
        lambda: kernels.experts(x, *next(other), wide),
    )


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    parser.add_argument("--seconds", type=between(0), default=1.0, help="time for each row")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    choice = create_kernels("native")
    print(f"{choice.reason}; {options.threads} threads\n")
    print("| product | rows | FP8 us | bf16 us | ratio |\n| --- | ---: | ---: | ---: | ---: |")
    for name, pair in (("linear", linear_pair), ("experts", experts_pair)):
        for rows in ROWS:
            ours, theirs = pair(choice.kernels, rows)
            if not torch.equal(ours(), theirs()):
                raise SystemExit(f"{name}, {rows} rows: results differ")
            times: list[tuple[float, float]] = []
            end = time.perf_counter() + options.seconds
            while len(times) < 9 or time.perf_counter() < end:
                times.append((seconds(ours), seconds(theirs)))
            fp8, bf16 = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
            ratio = statistics.median(b / a for a, b in times)
            print(f"| {name} | {rows} | {fp8:.0f} | {bf16:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
