"""What a pool gives: tokens a second, times that users see, what a million tokens cost.

Knows: two models of a step's time, what drafts gain, prices. Knows nothing of how pools are chosen
(`search`) or shown.

"fitted" (`times`) reckons from the model's shape; its constants were fitted on published
throughputs. "kernels" (`kernel_step`) counts what each of our kernels moves and computes, with the
same shares of peaks, in the mode of attention that the deployment says, which the fitted one does
not know. Fitted is the default: in the median it is nearer to what was published, held out or not
(`moeserve plan --validate`), and those engines' kernels were not ours; how near the other is to
ours shows on a GPU only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from launch.capacity.deployment import Deployment
from launch.capacity.times import Calibration, Step, decode_step, prefill_step, traffic_of
from launch.capacity.traffic import Traffic

By = Literal["fitted", "kernels"]
MODELS: tuple[By, ...] = ("fitted", "kernels")  # of a step's time; the first is the default
NO_KERNELS = "attention that GPUs share (tp) has no kernels here"
CACHE_READ = 5e9  # bytes a second of a GPU at which cached latents come from host memory or a peer
_MILLION = 1e6


@dataclass(frozen=True)
class Workload:
    """Means over requests: prompt and output tokens, share of prompt tokens found in the cache."""

    input_tokens: int = 4096
    output_tokens: int = 1024
    cached_share: float = 0.0

    @property
    def context(self) -> float:
        """Positions that a decoding sequence attends to, half of its output written."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Prediction:
    """Of one pool. tokens_per_s: of all its GPUs; prefill: computed prompt tokens, decode: output.
    ttft, tpot: seconds; None where the pool's phase has none. ttft is that of a busy pool: half a
    step until the next one begins, then the full steps that the prompt is part of; ttft_alone of a
    prompt that finds its GPU idle. cost: dollars a million. by: what the step was predicted by."""

    by: By
    step: Step
    tokens_per_s: float
    per_gpu: float
    per_node: float
    ttft: float | None
    ttft_alone: float | None
    tpot: float | None
    tokens_a_step: float  # output tokens of a sequence: 1, more with drafts
    mtp_gain: float  # tokens a second with drafts over without
    traffic: Traffic
    cost: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted_by": self.by,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.per_gpu,
            "tokens_per_s_per_node": self.per_node,
            "ttft_s": self.ttft,
            "ttft_alone_s": self.ttft_alone,
            "tpot_s": self.tpot,
            "tokens_a_step": self.tokens_a_step,
            "mtp_gain": self.mtp_gain,
            "step_s": self.step.as_json(),
            "traffic_bytes_per_token_per_layer": asdict(self.traffic),
            "cost_per_million": self.cost,
        }


def predict(
    d: Deployment,
    work: Workload,
    price: float | None = None,
    c: Calibration | None = None,
    by: By = "fitted",
) -> Prediction:
    """price: dollars of a GPU-hour; None: the profile's. by: "fitted" all the same where attention
    is shared, which `Prediction.by` tells."""
    c = c or Calibration()
    by = by if has_kernels(d) else "fitted"
    a_second = (d.gpu.price if price is None else price) / 3600
    if d.phase == "prefill":
        return _prefill(d, work, a_second, c, by)
    return _decode(d, work, a_second, c, by)


def has_kernels(d: Deployment) -> bool:
    """Whether it can be predicted by kernels: else for the reason `NO_KERNELS`."""
    return d.tp == 1


def mean_accepted(acceptance: float, drafts: int) -> float:
    """Tokens of a step: one, and drafts until the first that is refused (Leviathan et al., 2023,
    equation 1)."""
    if acceptance >= 1:
        return 1.0 + drafts
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def _decode(d: Deployment, work: Workload, a_second: float, c: Calibration, by: By) -> Prediction:
    pool = d.pool()
    step = _decode_once(d, work, d.drafts, c, by)
    gained = mean_accepted(d.acceptance, d.drafts)
    tpot = step.seconds / gained
    per_gpu = d.sequences / d.tp / tpot
    plain = _decode_once(d, work, 0, c, by) if d.drafts else step
    return Prediction(
        by,
        step,
        tokens_per_s=per_gpu * d.gpus,
        per_gpu=per_gpu,
        per_node=per_gpu * d.gpus_of_a_node,
        ttft=None,
        ttft_alone=None,
        tpot=tpot,
        tokens_a_step=gained,
        mtp_gain=per_gpu / (d.sequences / d.tp / plain.seconds),
        traffic=traffic_of(d.dispatch, d.shape, pool),
        cost={"output": a_second / per_gpu * _MILLION},
    )


def _decode_once(d: Deployment, work: Workload, drafts: int, c: Calibration, by: By) -> Step:
    """A step that verifies so many drafts, and the MTP layer that makes them, one after another."""
    if by == "kernels":
        return _by_kernels(replace(d, drafts=drafts) if drafts != d.drafts else d, work, c)
    step = decode_step(d.shape, d.pool(), d.sequences * (1 + drafts), work.context, c)
    if not drafts:
        return step
    one = decode_step(d.shape, d.pool(), d.sequences, work.context, c)
    layer = (one.seconds - one.head - one.dense) / d.shape.layers + one.head
    return Step(**(asdict(step) | {"seconds": step.seconds + drafts * layer}))


def _prefill(d: Deployment, work: Workload, a_second: float, c: Calibration, by: By) -> Prediction:
    pool = d.pool()
    cached = work.input_tokens * work.cached_share
    computed = max(work.input_tokens - cached, 1.0)
    step = _prefill_once(d, work, d.tokens, c, by)
    per_gpu = d.tokens / d.tp / step.seconds
    one = step if d.tokens <= computed else _prefill_once(d, work, computed, c, by)
    steps = math.ceil(computed / d.tokens)
    read = d.kv_bytes() / CACHE_READ
    return Prediction(
        by,
        step,
        tokens_per_s=per_gpu * d.gpus,
        per_gpu=per_gpu,
        per_node=per_gpu * d.gpus_of_a_node,
        ttft=(0.5 + steps) * step.seconds + cached * read,
        ttft_alone=max(computed / d.tokens, 1.0) * one.seconds + cached * read,
        tpot=None,
        tokens_a_step=1.0,
        mtp_gain=1.0,
        traffic=traffic_of(d.dispatch, d.shape, pool),
        cost={"input": a_second / per_gpu * _MILLION, "cached": a_second * read * _MILLION},
    )


def _prefill_once(d: Deployment, work: Workload, tokens: float, c: Calibration, by: By) -> Step:
    if by == "kernels":
        whole = math.ceil(tokens)
        return _by_kernels(replace(d, tokens=whole) if whole != d.tokens else d, work, c)
    cached = work.input_tokens * work.cached_share
    return prefill_step(d.shape, d.pool(), tokens, work.input_tokens, c, cached)


def _by_kernels(d: Deployment, work: Workload, c: Calibration) -> Step:
    from launch.capacity.kernel_step import kernel_step  # the kernels: modules of their own

    found = kernel_step(d, work, c)
    assert found is not None
    return found.step
