"""The bytes that no dispatch could leave out: what benchmarks and tests hold sent bytes against.

Knows: which ranks a token's picks lie on, what a row must carry. Knows nothing of transports; what
they add (counts, headers, padding) is the difference to `DispatchStats`.

Who keeps a dispatch of FP8 rows within 2 % of it, by bytes and not by luck:

    torch           where no part of a row is padded (D a multiple of 512, K even), once the rows
                    that leave a rank have 100 * (R - 1) bytes: 50 times its counts, of 2 bytes each
                    (4, and 200, above 32767 tokens a rank). At any other D that is a multiple of
                    128 a row is up to 5 bytes longer (fp8: 2)
    deepep_normal   on one node, where D is 320 * K or more and a multiple of 512: picks have 8
                    bytes there, not 2
    the others      by chance: allgather sends every token to every rank, deepep_ll and nvshmem a
                    row to every expert, deepep_v2 rounds parts of rows up to 32 bytes and sends
                    counts of every expert

Shape letters: T tokens, D hidden, K top-k, R ranks, G = ceil(D / 128) scale blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dispatch.base import CombineForm, DispatchConfig
from dispatch.wire import RowFormat, SendPlan


@dataclass(frozen=True)
class IdealBytes:
    """For the tokens of one rank: dispatch leaves it, combine comes home to it. Summed over ranks,
    both are what must be sent."""

    dispatch: int
    combine: int

    @property
    def total(self) -> int:
        return self.dispatch + self.combine


def ideal_bytes(
    config: DispatchConfig, slots: Tensor, rank: int, num_ranks: int, form: CombineForm
) -> IdealBytes:
    """slots [T, K] int32 physical or -1, of the tokens whose home is `rank`; config.wire counts.

        dispatch = S * (hidden + scales + ids + weights) = S * (D * v + s + 2 * K + 4 * K)
        combine  = S * D * w (SUMMED) or Q * D * w (PAIRS)

    S: distinct (token, destination rank other than home). Q: picks (token, k) on other ranks. w:
    bytes of the model dtype. v, s: w, 0 (wire=model); 1, 4 * G (fp8); 1, G (fp8_ue8m0). An id has
    2 bytes; 4 where a rank has 32768 slots or more.
    """
    local = config.num_physical_experts // num_ranks
    plan = SendPlan.make(slots, num_ranks, local)
    rows = sum(plan.row_counts) - plan.row_counts[rank]
    row = RowFormat.choose(config.hidden_size, config.top_k, config.dtype, local, config.wire)
    away = int(((plan.destination >= 0) & (plan.destination != rank)).sum())
    results = away if form is CombineForm.PAIRS else rows
    return IdealBytes(rows * row.least_bytes, results * config.hidden_size * config.dtype.itemsize)
