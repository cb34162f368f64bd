"""What a deployment breaks, all of it at once, each with the nearest valid values.

Knows: divisibility, limits of the ways to dispatch, memory of GPUs and nodes. Knows nothing of
time. A rule is a function from a deployment to what it finds wrong. Limits of a way to dispatch are
asked of its own file, which asks the same before it is opened.

Shape letters: M tokens that a GPU dispatches at most, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dispatch import deepep, deepep_v2_limits, nvshmem_sizes
from dispatch.deepep_v2 import ALIGNMENT
from launch.capacity.deployment import Deployment
from launch.capacity.memory import dispatch_config, group_of, memory, sequences_that_fit
from launch.capacity.node import NEEDED_HOST, NEEDED_SHARED, Node
from launch.capacity.remedies import WARNING, Violation, errors, mended
from moeserve.terminal import counted

BLOCK = 128  # of FP8 scales
# What `--dispatch auto` takes, the first that no rule forbids: as `serve --dispatch auto` does.
ORDER = {
    "prefill": ("deepep_v2", "deepep_normal", "torch"),
    "decode": ("deepep_ll", "deepep_v2", "nvshmem", "torch"),
}
_MOST_SEQUENCES = 4096  # on a GPU, that `largest_batch` tries


def violations(
    d: Deployment,
    length: float,
    node: Node | None = None,
    follow: Callable[[Deployment], Deployment] = lambda other: other,
) -> list[Violation]:
    """length: mean positions of a sequence. node: what one has, where that is known. follow: with
    what was left to us chosen anew, where a field is another."""
    return mended(d, broken(d, length, node), lambda other: broken(follow(other), length, node))


def broken(d: Deployment, length: float, node: Node | None = None) -> list[Violation]:
    """As `violations`, without a look at what would be valid: much quicker where something is."""
    found = [*_layout(d), *_attention(d), *_drafts(d), *_dispatch(d)]
    if all(v.rule != "tokens of a step" for v in found):
        found += _memory(d, length)
    return found + list(_host(d, node or Node()))


def choose_dispatch(d: Deployment) -> Deployment:
    """With the way to dispatch that `auto` takes."""
    if d.gpus == 1:
        return replace(d, dispatch="local")
    ways = (replace(d, dispatch=name) for name in ORDER[d.phase])
    return next(way for way in ways if not errors(list(_dispatch(way))))


def largest_batch(d: Deployment, length: float, most: int = _MOST_SEQUENCES) -> int:
    """Sequences a GPU, up to `most`, that memory and the limits of its way to dispatch allow; 0:
    none."""

    def fits(sequences: int) -> bool:
        asked = replace(d, sequences=sequences)
        return sequences_that_fit(asked, length) >= sequences

    low, high = 0, most
    if d.dispatch == "deepep_ll" and d.gpus > 1:
        hidden = d.shape.config.hidden_size
        tokens = deepep.ll_largest_tokens(d.gpus, hidden, d.physical, None)
        high = min(most, tokens // (1 + d.drafts))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    # Some numbers of tokens are refused where the next smaller one is not.
    for sequences in range(low, max(low - 4, 0), -1):
        if not errors(list(_dispatch(replace(d, sequences=sequences)))):
            return sequences
    return low  # it is not the batch that is refused


def _layout(d: Deployment) -> Iterator[Violation]:
    m = d.shape.config
    if d.step_tokens < 1:
        name = "sequences" if d.phase == "decode" else "tokens"
        yield Violation(
            "tokens of a step",
            f"{name}={getattr(d, name)}: at least 1",
            ((name, 1), (name, 4)),
            by=(name,),
        )
    if d.hosted == 0 and d.shared == "hosted":
        yield Violation(
            "a shared expert", "the model has no shared expert that slots could host: replicated"
        )
    if d.gpus > d.slots:
        more = d.gpus - m.n_routed_experts - d.hosted
        yield Violation(
            "every GPU has an expert",
            f"{d.gpus} GPUs for {d.slots} slots",
            (("gpus", d.slots), ("redundant", more)),
            by=("gpus", "redundant"),
        )
    elif empty := d.physical - d.slots:
        near = [r for r in (d.redundant + empty - d.gpus, d.redundant + empty) if r >= 0]
        yield Violation(
            "slots divide",
            f"{d.slots} slots ({m.n_routed_experts + d.hosted} experts + {d.redundant} redundant) "
            f"over {d.gpus} GPUs: {d.slots_per_gpu} each, so {empty} "
            f"{'stays' if empty == 1 else 'stay'} empty",
            tuple(("redundant", r) for r in near),
            WARNING,
            by=("redundant",),
        )
    if d.gpus > d.gpu.per_node and d.gpus % d.gpu.per_node:
        yield Violation(
            "whole nodes",
            f"{d.gpus} GPUs with {d.gpu.per_node} a node",
            by=("gpus",),
        )


def _attention(d: Deployment) -> Iterator[Violation]:
    m = d.shape.config
    if d.tp == 1:
        return
    yield Violation(
        "data-parallel attention",
        f"tp={d.tp}: moeserve runs attention data-parallel (tp: 1); this plans another engine",
        (("tp", 1),),
        WARNING,
        by=("tp",),
    )
    heads = m.num_attention_heads
    if heads % d.tp:
        yield Violation("heads divide", f"{heads} heads over tp={d.tp}", by=("tp",))
    if d.gpus % d.tp:
        yield Violation("GPUs divide", f"{d.gpus} GPUs in groups of tp={d.tp}", by=("tp",))
    if d.tp > d.gpu.domain:
        yield Violation(
            "one NVLink domain",
            f"tp={d.tp}: at most {d.gpu.domain} share NVLink",
            by=("tp",),
        )
    if m.quantization is None:
        return
    sharded = {
        "heads x value dim (o_proj)": heads * m.v_head_dim,
        "heads x query dim (q_b_proj)": heads * m.qk_head_dim,
        "intermediate_size (dense layers)": m.intermediate_size,
        "shared expert's width": m.moe_intermediate_size * m.n_shared_experts,
    }
    for name, width in sharded.items():
        if width % (d.tp * BLOCK):
            yield Violation(
                "FP8 blocks",
                f"{name}: {width} over tp={d.tp} cuts blocks of {BLOCK}",
                by=("tp",),
            )


def _drafts(d: Deployment) -> Iterator[Violation]:
    if d.phase == "decode" and d.drafts and not d.shape.config.num_mtp_layers:
        yield Violation(
            "MTP layers",
            f"drafts={d.drafts}: the model has no MTP layer (num_nextn_predict_layers)",
            (("drafts", 0),),
            by=("drafts",),
        )


def _dispatch(d: Deployment) -> Iterator[Violation]:
    """What each way to dispatch says of numbers; machines and packages are `moeserve doctor`'s."""
    if d.gpus == 1 or d.step_tokens < 1 or d.dispatch in ("torch", "allgather"):
        return
    if d.dispatch == "local":
        yield Violation("local", f"{d.gpus} GPUs: for one GPU alone", by=("gpus",))
        return
    m = d.shape.config
    common: dict[str, Any] = {
        "num_ranks": d.gpus,
        "hidden": m.hidden_size,
        "top_k": d.picks,
        "num_experts": d.physical,
        "max_tokens": d.step_tokens,
    }
    if d.dispatch == "deepep_ll":
        said = deepep.ll_problems(**common, qp_depth=None)
        near = _ll_batch(d)
    elif d.dispatch == "deepep_v2":
        said = deepep_v2_limits.problems(
            deepep_v2_limits.ELASTIC,
            **common,
            num_nodes=group_of(d).num_nodes,
            alignment=ALIGNMENT,
            fp8=d.wire_fp8,
        )
        near = ()
    elif d.dispatch == "nvshmem":
        said = nvshmem_sizes.limit_problems(dispatch_config(d), d.gpus)
        near = (("gpus", nvshmem_sizes.MAX_RANKS),) if d.gpus > nvshmem_sizes.MAX_RANKS else ()
    else:
        said = deepep.normal_problems(
            num_ranks=d.gpus,
            ranks_per_node=min(d.gpus, d.gpu.per_node),
            node=deepep.RANKS_PER_NODE,
            hidden=m.hidden_size,
            top_k=d.picks,
            num_experts=d.physical,
            fp8=d.wire_fp8,
        )
        near = tuple(("gpus", ranks) for ranks in deepep.NORMAL_RANKS)
    for text in said:
        if text.startswith("decode needs"):  # said of the batch beside every limit
            continue
        if text.startswith("max_tokens") and d.phase == "decode":
            text += f" (of {d.sequences} sequences x (1 + {d.drafts}))"
        by = _about(d, text)
        yield Violation(d.dispatch, text, tuple(n for n in near if n[0] in by), by=by)


def _about(d: Deployment, text: str) -> tuple[str, ...]:
    """Fields that help: other GPUs do not help against a batch, nor the reverse."""
    if text.startswith("max_tokens"):
        return ("sequences",) if d.phase == "decode" else ("tokens",)
    return ("gpus",) if " ranks" in text.split(":")[0] else ()


def _ll_batch(d: Deployment) -> tuple[tuple[str, int], ...]:
    """The largest batch that low-latency kernels take, if it is the batch that is too large."""
    most = deepep.ll_largest_tokens(d.gpus, d.shape.config.hidden_size, d.physical, None)
    if d.phase != "decode":
        return (("tokens", most),) if d.tokens > most else ()
    step = deepep.ll_token_step(d.gpus)
    valid = [s for s in range(1, most // (1 + d.drafts) + 1) if s * (1 + d.drafts) % step == 0]
    below = [s for s in valid if s <= d.sequences]
    return (("sequences", below[-1]),) if below and below[-1] != d.sequences else ()


def _memory(d: Deployment, length: float) -> Iterator[Violation]:
    held = memory(d)
    if held.kv <= 0:
        name = "sequences" if d.phase == "decode" else "tokens"
        yield Violation(
            "GPU memory",
            f"{held.used / 1e9:.1f} of {held.total / 1e9:.0f} GB are used before any cache",
            by=("gpus", name),
        )
        return
    fit = sequences_that_fit(d, length)
    if d.phase == "decode" and fit < d.sequences:
        most = largest_batch(d, length)
        small = 0 if d.kv_fp8 else largest_batch(replace(d, kv_fp8=True), length)
        fits = f": at most {most}" if most else ""
        yield Violation(
            "KV cache",
            f"{counted(d.sequences, 'sequence')} of {length:.0f} positions "
            f"{'does' if d.sequences == 1 else 'do'} not fit into "
            f"{held.kv / 1e9:.1f} GB{fits}{f', {small} in FP8' if small > most else ''}",
            (("sequences", most),) if most else (),
            by=("sequences",) if most else ("gpus", "sequences"),
        )
    if d.phase == "prefill" and fit < 1:
        yield Violation(
            "KV cache",
            f"a prompt of {length:.0f} positions does not fit into {held.kv / 1e9:.1f} GB"
            + ("" if d.kv_fp8 else " (an FP8 cache takes 0.57 as much)"),
            by=("gpus", "tokens"),
        )


def _host(d: Deployment, node: Node) -> Iterator[Violation]:
    here = d.gpus_of_a_node
    host = d.gpu.host_memory if node.host_memory is None else node.host_memory
    if here * NEEDED_HOST > host:
        yield Violation(
            "host memory",
            f"{counted(here, 'rank')} {'needs' if here == 1 else 'need'} "
            f"{here * NEEDED_HOST / 1e9:.0f} GB of a node's {host / 1e9:.4g}: at most "
            f"{counted(int(host // NEEDED_HOST), 'rank')} a node",
        )
    if node.shared_memory is not None and here * NEEDED_SHARED > node.shared_memory:
        yield Violation(
            "shared memory",
            f"/dev/shm has {node.shared_memory / 1e9:.4g} GB for {counted(here, 'rank')}: needs "
            f"{here * NEEDED_SHARED / 1e9:.0f} GB, or at most "
            f"{counted(int(node.shared_memory // NEEDED_SHARED), 'rank')} a node",
        )
