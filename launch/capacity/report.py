"""Everything `moeserve plan MODEL` says of one pool, as plain data.

Knows: which parts a report has. Knows nothing of flags or screens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.capacity.balance import Balance, balance
from launch.capacity.deployment import Deployment
from launch.capacity.memory import Concurrency, Memory, concurrency, memory
from launch.capacity.predict import Prediction, Workload, predict
from launch.capacity.rules import Violation, violations
from launch.capacity.times import Calibration

LENGTHS = (1024, 4096, 16384, 32768, 131072)


@dataclass(frozen=True)
class Report:
    """prediction: with the balance of the layout on its loads. kv_bytes: of a token, BF16 and FP8,
    MTP layers counted."""

    deployment: Deployment
    work: Workload
    memory: Memory
    kv_bytes: tuple[int, int]
    concurrency: list[Concurrency]
    balance: Balance
    prediction: Prediction
    violations: list[Violation]
    price: float

    def as_json(self) -> dict[str, Any]:
        d = self.deployment
        return {
            "model": d.model,
            "gpu": d.gpu.name,
            "gpus": d.gpus,
            "nodes": d.nodes,
            "phase": d.phase,
            "parameters": {"total": d.shape.total, "active": d.shape.active},
            "layout": {
                "slots": d.slots,
                "slots_per_gpu": d.slots_per_gpu,
                "redundant": d.redundant,
                "shared_expert": d.shared,
                "tp": d.tp,
                "dispatch": d.dispatch,
                "balance": self.balance.as_json(),
            },
            "load": {
                "sequences_per_gpu": d.sequences if d.phase == "decode" else None,
                "tokens_per_step_per_gpu": d.tokens if d.phase == "prefill" else d.decode_tokens,
                "drafts": d.drafts,
                "acceptance": d.acceptance,
                **asdict(self.work),
            },
            "memory_per_gpu": self.memory.as_json(),
            "kv_bytes_per_token": {"bf16": self.kv_bytes[0], "fp8": self.kv_bytes[1]},
            "concurrent_sequences_per_gpu": [asdict(c) for c in self.concurrency],
            "prediction": self.prediction.as_json(),
            "price_per_gpu_hour": self.price,
            "violations": [asdict(v) for v in self.violations],
        }


def report(
    d: Deployment,
    work: Workload,
    *,
    spread: Balance | None = None,
    price: float | None = None,
    longest: int | None = None,
    shared_memory: float | None = None,
    calibration: Calibration | None = None,
) -> Report:
    """spread: of the layout on the operator's loads; None: on typical ones. longest: positions that
    a static reservation holds; None: the model's."""
    spread = spread or balance(d)
    d = replace(d, balance=spread.mean)
    mtp = d.shape.config.num_mtp_layers
    longest = longest or d.shape.config.max_position_embeddings
    lengths = sorted({*(x for x in LENGTHS if x <= longest), longest})
    return Report(
        deployment=d,
        work=work,
        memory=memory(d),
        kv_bytes=(d.shape.kv_bytes(False, mtp), d.shape.kv_bytes(True, mtp)),
        concurrency=[concurrency(d, length, longest) for length in lengths],
        balance=spread,
        prediction=predict(d, work, price, calibration),
        violations=violations(d, work.context, shared_memory),
        price=d.gpu.price if price is None else price,
    )
