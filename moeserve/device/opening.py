"""What an engine on a GPU has beside one on a CPU: a memory plan that is held, captured steps,
steps planned ahead.

Knows settings, what `prepare` resolved, the runner. On CPUs none of it is opened unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dispatch.base import CombineForm, Dispatcher
from ep.group import EPGroup
from models.deepseek.config import DeepSeekConfig
from models.interface import ForwardBatch
from moeserve.config import ServeConfig
from moeserve.device.api import CudaApi, DeviceApi
from moeserve.device.choose import DeviceChoice
from moeserve.device.graphs import DEFAULT_MEMORY, Budget, Progress, StepGraphs
from moeserve.device.ladder import ladder
from moeserve.device.ledger import MemoryLedger, workspace_bytes
from moeserve.lockstep import agree_min
from moeserve.runner import ModelRunner

KV_SHARE = 0.95  # of what is left on a device when all others have theirs, for an automatic cache


def goes_ahead(
    asked: str, on_cpu: bool, speculates: bool, dispatcher: Dispatcher, notes: list[str]
) -> bool:
    """Whether steps are planned ahead (asked: `engine.ahead`). All that decides is the same on
    every rank; where it is a GPU's, notes say what became of it."""
    if asked == "off" or (asked == "auto" and on_cpu):
        return False
    why: str | None = None
    if speculates:
        why = "speculation drafts from the tokens of the step before, which are not known ahead"
    elif dispatcher.active_mask() is not None:
        why = (
            f"dispatcher {dispatcher.name!r} is asked after each step who answered, which waits "
            "for it"
        )
    if why is not None:
        notes.append(f"ahead: off; {why}")
        return False
    how = "asked for" if asked == "on" else "auto: on a GPU"
    notes.append(f"ahead: each step is planned while the one before it runs ({how})")
    return True


def decode_rows(config: ServeConfig, drafts: int) -> int:
    """The most rows of a decode step of a rank."""
    rows = config.schedule.max_num_sequences * (1 + drafts)
    return min(rows, config.schedule.token_budget)


def graph_memory(config: ServeConfig) -> int:
    if config.engine.graphs == "off":
        return 0
    return config.engine.graph_memory or DEFAULT_MEMORY


def open_ledger(
    config: ServeConfig,
    device: DeviceChoice,
    model: DeepSeekConfig,
    weights: dict[str, int],
    keeps_fp8: bool,
    buffers: int,
    drafts: int,
    itemsize: int,
    passing: int = 0,
    expert_rows: int = 0,
) -> MemoryLedger | None:
    """The plan of a GPU's memory but for the KV cache, whose size follows from it. weights: bytes
    by kind if none were FP8. buffers, passing: `BufferPlan`; expert_rows: `Dispatcher`. None on a
    CPU."""
    if device.on_cpu:
        return None
    where = device.device
    torch.cuda.set_device(where)
    free, total = torch.cuda.mem_get_info(where)
    ledger = MemoryLedger(lambda: int(torch.cuda.mem_get_info(where)[0]), int(total))
    rows = decode_rows(config, drafts)
    if keeps_fp8:
        weights = in_fp8(weights, model, itemsize)
    ledger.plan({f"weights: {kind}": size for kind, size in weights.items()})
    ledger.plan(
        {
            "dispatch_buffers": buffers,
            "graphs": graph_memory(config),
            "workspace": workspace_bytes(
                model, config.schedule.token_budget, rows, itemsize, expert_rows
            ),
            "workspace: rows on their way": passing,
        }
    )
    return ledger


def in_fp8(weights: dict[str, int], model: DeepSeekConfig, itemsize: int) -> dict[str, int]:
    """Bytes by kind where FP8 blocks stay such: a byte a value and a scale for 128 x 128 of them;
    but kv_b, which attention wants taken apart, is in the model's dtype."""
    c = model
    layers = c.num_hidden_layers + c.num_mtp_layers
    kv_b = layers * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    found = dict(weights)
    for kind in ("attention", "dense_mlp", "experts", "shared_expert"):
        if kind in found:
            found[kind] = found[kind] * 1025 // (1024 * itemsize)
    if "attention" in found:
        found["attention"] += kv_b * (itemsize - 1)
    return found


def plan_kv(ledger: MemoryLedger, given: int, most: int | None = None) -> None:
    """given: bytes that settings say, 0: what is left, up to what all sequences can use (most)."""
    others = sum(size for kind, size in ledger.planned.items() if kind != "kv_cache")
    left = max(int((ledger.at_start - others) * KV_SHARE), 0)
    ledger.plan({"kv_cache": given or (left if most is None else min(left, most))})


def no_graphs(
    config: ServeConfig, runner: ModelRunner, rows: int, trees: bool = False
) -> str | None:
    """Why decode steps are not captured; None: they can be. trees: drafts may be such; which rank
    has one in a step is not agreed, so ranks with and without one would take different steps."""
    if config.engine.graphs == "off":
        return "off (asked for)"
    if trees:
        return "none; drafts are trees, and captured steps take chains only"
    dispatcher = getattr(runner.model, "dispatcher", None)
    if dispatcher is None:
        return None
    dispatcher.set_step_bound(rows, True)  # of two backends, that of decode
    if not dispatcher.graph_safe:
        return (
            f"none; dispatcher {dispatcher.name!r} cannot be captured: the host waits for what "
            "ranks send"
        )
    return None


def open_graphs(
    config: ServeConfig,
    group: EPGroup,
    runner: ModelRunner,
    max_len: int,
    drafts: int,
    notes: list[str],
    progress: Progress = lambda size, done, of: None,
    api: DeviceApi | None = None,
    trees: bool = False,
) -> StepGraphs | None:
    """Capture decode steps at a ladder of sizes; notes: what came of it. Collective on `group`.
    trees: the same on all ranks, see `no_graphs`. None where there are none."""
    rows = decode_rows(config, drafts)
    why = no_graphs(config, runner, rows, trees)
    if why is not None:
        notes.append(f"graphs: {why}")
        return None
    dispatcher = getattr(runner.model, "dispatcher", None)

    def set_bound(size: int) -> None:
        if dispatcher is not None:
            dispatcher.set_step_bound(size, True)

    device = runner.cache.layers[0].device
    graphs = StepGraphs(
        runner.model, runner.cache, api or CudaApi(device), ladder(rows), max_len, set_bound,
        collective=group.size > 1,
    )  # fmt: skip
    graphs.capture_all(
        Budget(memory=graph_memory(config)), progress, lambda ok: bool(agree_min(group, int(ok)))
    )
    told = ", ".join(map(str, graphs.rungs)) or "no size"
    notes.append(f"graphs: decode steps captured at {told} rows in {graphs.seconds:.1f} s")
    notes += graphs.notes
    return graphs if graphs.rungs else None


def worst_picks(
    rows: int, top_k: int, num_ranks: int, local: int, form: CombineForm, device: torch.device
) -> Iterator[Tensor]:
    """[rows, top_k] int32, physical slots: what all ranks send alike, where each has `local` slots.
    First evenly to all: as many pairs come as are sent. Then, to each rank in turn, all rows: the
    most that can come to it, with one pick each where it sends back a sum of them, with all that it
    can have where it sends back each."""

    def count(size: int) -> Tensor:
        return torch.arange(size, dtype=torch.int32, device=device)

    numbers = count(rows * top_k).view(rows, top_k)
    even = numbers % (num_ranks * local)
    even[:, num_ranks * local :] = -1  # a token's slots are distinct
    yield even
    each = min(top_k, local) if form is CombineForm.PAIRS else 1
    for rank in range(num_ranks if num_ranks > 1 else 0):
        picks = torch.full((rows, top_k), -1, dtype=torch.int32, device=device)
        picks[:, :each] = (count(rows)[:, None] + count(each)) % local + rank * local
        yield picks


@torch.inference_mode()
def warm_up_prefill(
    runner: ModelRunner, rows: int, measured: Callable[[], None] = lambda: None
) -> None:
    """A step of the largest size whose rows are all nobody's, then the worst that can be sent in
    one (`worst_picks`): takes what such steps will take. measured: called behind each, and may give
    back what it left. Collective, where the model is."""
    device = runner.cache.layers[0].device
    nobody = torch.full((rows,), -1, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=nobody,
        slot_mapping=nobody,
        query_start=torch.zeros(2, dtype=torch.int32, device=device),
        context_len=torch.zeros(1, dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        logits_rows=nobody[:0],
        max_query_len=1,
        max_context_len=1,
        padding=nobody < 0,
    )
    dispatcher = getattr(runner.model, "dispatcher", None)
    if dispatcher is not None:
        dispatcher.set_step_bound(rows)
    runner.model.forward(batch, runner.cache, None)
    measured()
    exchange = getattr(runner.model, "exchange", None)
    placement = getattr(runner.model, "placement", None)
    if dispatcher is None or exchange is None or placement is None:
        return
    ranks, local = placement.num_ranks, placement.num_local_experts
    top_k, form = dispatcher.config.top_k, dispatcher.combine_form
    for picks in worst_picks(rows, top_k, ranks, local, form, device):
        exchange(picks)
        measured()
