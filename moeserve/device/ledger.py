"""What a device's memory is planned for, said before it is taken, and held afterwards.

Each kind of use is planned in bytes, then measured as what is free before and after it was taken,
so that what libraries take beside torch counts too. `exceeded` says who took more than planned.

Knows bytes. Asks no device: who opens a ledger says how free bytes are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from models.deepseek.config import DeepSeekConfig

GIB = 1 << 30
# What allocators round up to, and what a context or a library takes by the way.
SLACK_SHARE = 0.02
SLACK_BYTES = 512 << 20
ATTENTION_PARTS = 512 << 20  # bytes that attention split over a long context leaves for its merge


class MemoryLedger:
    """free: bytes that are free on the device now. total: all it has."""

    def __init__(self, free: Callable[[], int], total: int) -> None:
        self._free, self.total = free, total
        self.at_start = self._mark = free()
        self.planned: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self._peaks: dict[str, int] = {}

    def plan(self, parts: Mapping[str, int]) -> None:
        """Bytes by kind; a kind that is planned again counts as told last."""
        self.planned.update(parts)

    def peak(self, kind: str) -> None:
        """What has been taken since the last `took` is of this kind, and may be given back now."""
        self._peaks[kind] = max(self._peaks.get(kind, 0), self._mark - self._free())

    def took(self, kind: str) -> int:
        """What has been taken since the last call is of this kind, or was at a `peak` -> its bytes.
        What was given back counts as nothing else."""
        now = self._free()
        taken, self._mark = max(self._mark - now, self._peaks.pop(kind, 0), 0), now
        self.taken[kind] = self.taken.get(kind, 0) + taken
        return taken

    def describe(self) -> str:
        """The plan in lines, before it is carried out."""
        kinds = {kind: size for kind, size in self.planned.items() if size}
        width = max((len(kind) for kind in kinds), default=0)
        lines = [
            f"memory plan: {sum(kinds.values()) / GIB:.2f} GiB of {self.at_start / GIB:.2f} free "
            f"({self.total / GIB:.2f} in all)"
        ]
        lines += [f"  {_words(k):<{width}} {size / GIB:9.3f} GiB" for k, size in kinds.items()]
        return "\n".join(lines)

    def shortage(self) -> str | None:
        """Why the plan cannot be carried out; None: it can."""
        need = sum(self.planned.values())
        if need <= self.at_start:
            return None
        largest = max(self.planned, key=lambda kind: self.planned[kind])
        return (
            f"memory: the plan needs {need} bytes ({need / GIB:.2f} GiB) and {self.at_start} are "
            f"free; most is for {_words(largest)} ({self.planned[largest] / GIB:.2f} GiB)"
        )

    def exceeded(self) -> list[str]:
        """A line for each kind that took more than planned; "weights" and "workspace" are held to
        all kinds of them ("weights: experts") together."""
        lines = []
        for kind, taken in self.taken.items():
            planned = sum(
                size for k, size in self.planned.items() if k == kind or k.startswith(f"{kind}: ")
            )
            if taken > planned * (1 + SLACK_SHARE) + SLACK_BYTES:
                lines.append(
                    f"memory: {_words(kind)} took {taken} bytes ({taken / GIB:.2f} GiB), "
                    f"{planned} ({planned / GIB:.2f} GiB) were planned for it"
                )
        return lines

    def report(self) -> dict[str, dict[str, int]]:
        """For `/health`."""
        return {"planned": dict(self.planned), "taken": dict(self.taken)}


def workspace_bytes(
    model: DeepSeekConfig, token_budget: int, rows: int, itemsize: int, expert_rows: int = 0
) -> int:
    """What a step holds while it runs, at most: activations of a layer for token_budget rows, and
    the logits of `rows`, their probabilities and a copy. Experts compute as many (token, expert)
    pairs at once as a rank may send, however many come (`run_experts`, most_pairs); or expert_rows,
    where a layout has so many (`Dispatcher.expert_rows`)."""
    c, picks = model, model.num_experts_per_tok + model.n_shared_experts
    attention = (c.q_lora_rank or 0) + c.cache_width
    attention += c.num_attention_heads * (
        c.qk_head_dim + c.kv_lora_rank + c.cache_width + c.v_head_dim
    )
    expert = 2 * c.hidden_size + 3 * c.moe_intermediate_size
    token = (6 * c.hidden_size + attention) * itemsize + 4 * c.hidden_size
    experts = max(token_budget * picks, expert_rows) * expert * itemsize
    return token_budget * token + experts + 12 * rows * c.vocab_size + ATTENTION_PARTS


def _words(kind: str) -> str:
    return kind.replace("_", " ")
