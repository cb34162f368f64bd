"""Captured decode steps: the whole forward of a rung of the ladder as one launch.

A captured step has a fixed number of rows; those that a rank does not need are padding: position
and slot -1, so that they write to no cache, attend to nothing and dispatch nothing. Its inputs lie
in memory of its own, filled by one copy from pinned memory (block tables by one more on the
device). What cannot be captured goes as it is, and is named once.

Knows the model as `CausalLM`, lockstep's numbers, DeviceApi. Knows nothing of plans or sampling.

Shape letters: T rows of a rung, n rows of this rank's step, D hidden, V vocabulary, L layers with
experts, K picks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from models.interface import ForwardBatch, ForwardOutput, PagedKVCache, StepObserver
from moeserve.device.api import DeviceApi, Event, Graph
from moeserve.device.ladder import MOST_CONTEXT, rung
from moeserve.device.staging import Pack
from moeserve.errors import EngineFailed, one_line

DEFAULT_MEMORY = 2 << 30
MAX_SECONDS = 180.0
WARM_UPS = 2  # the first compiles kernels, the second shows what each step takes
ELSEWHERE = "another rank cannot"

# (rung, captured so far, of how many) -> None; whether all ranks did, given that this one did
Progress = Callable[[int, int, int], None]
Agree = Callable[[bool], bool]


@dataclass(frozen=True)
class Budget:
    """Of all captured steps together, on a rank."""

    memory: int = DEFAULT_MEMORY
    seconds: float = MAX_SECONDS


class _Picks:
    """The observer while a step is captured: the picks' tensors, which each replay writes anew."""

    wants_rows = False  # to know them would be to wait for the device

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.ids: list[Tensor] = []

    def expert_picks(self, layer: int, ids: Tensor) -> None:
        self.layers.append(layer)
        self.ids.append(ids)

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        pass

    def part(self, name: str, seconds: float) -> None:
        pass


class _Inputs:
    """A rung's inputs: on the device for good, and where they are put together on the host."""

    def __init__(self, api: DeviceApi, rows: int, table_width: int) -> None:
        one, small = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
        pack = Pack(
            {
                "token_ids": one,
                "positions": one,
                "slot_mapping": one,
                "context_len": small,
                "query_start": torch.zeros(rows + 1, dtype=torch.int32),
            }
        )
        self.rows = rows
        self._pinned = api.pinned(pack.nbytes)
        self._memory = torch.zeros(pack.nbytes, dtype=torch.uint8, device=api.device)
        self._host = pack.views(self._pinned)
        self.device = pack.views(self._memory)
        self.tables = torch.zeros(rows, table_width, dtype=torch.int32, device=api.device)
        self.logits_rows = torch.arange(rows, device=api.device)
        self._copied: Event = api.event()

    def fill(self, host: ForwardBatch | None, there: ForwardBatch | None) -> None:
        """host, there: the step's batch where it was made and on the device; None: all padding."""
        self._copied.wait()
        n = 0 if host is None else host.num_tokens
        for name, rest in (("token_ids", 0), ("positions", -1), ("slot_mapping", -1)):
            if host is not None:
                self._host[name][:n] = getattr(host, name)
            self._host[name][n:] = rest
        s = 0 if host is None else host.num_sequences
        if host is not None:
            self._host["context_len"][:s] = host.context_len
            self._host["query_start"][: s + 1] = host.query_start
        self._host["context_len"][s:] = 0
        self._host["query_start"][s:] = n  # rows from there on are nobody's
        self._memory.copy_(self._pinned, non_blocking=True)
        self._copied.record()
        if there is not None and s:  # what stands elsewhere is old, and read by nobody
            self.tables[:s, : there.block_tables.shape[1]].copy_(there.block_tables)


@dataclass
class _Captured:
    """outputs: hidden [T, D], logits [T, V], picks [L, T, K] where the model tells any."""

    inputs: _Inputs
    graph: Graph
    layers: list[int]
    placement: Any


class StepGraphs:
    """max_len: the longest sequence, which bounds block tables. What attention is cut into is
    bounded by most_context too: steps with more go as they are."""

    def __init__(
        self,
        model: Any,
        cache: PagedKVCache,
        api: DeviceApi,
        rungs: Sequence[int],
        max_len: int,
        set_bound: Callable[[int], None] = lambda rows: None,
        collective: bool = False,
    ) -> None:
        """set_bound: tells the dispatcher that a decode step of so many rows follows. collective:
        peers are in the warm-up's exchanges: where it fails nothing can follow."""
        self._model, self._cache, self._api = model, cache, api
        self._max_len, self._set_bound, self._collective = max_len, set_bound, collective
        self.wanted = tuple(rungs)
        self.most_context = MOST_CONTEXT  # of a step's rows together; the same on all ranks
        self.rungs: tuple[int, ...] = ()  # those that all ranks have, ascending
        self._held: dict[int, _Captured] = {}
        self.notes: list[str] = []
        self.say: Callable[[str], None] = lambda line: None  # what the start could not tell
        self._budget, self._agree = Budget(), cast(Agree, bool)
        self._free = self._taken = 0  # bytes: free without captured steps, and what those take
        self.seconds = 0.0
        self.num_replays = self.num_padding_rows = self.num_recaptures = 0
        self.num_too_long = 0

    # -- capture -------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_all(
        self,
        budget: Budget | None = None,
        progress: Progress = lambda size, done, of: None,
        agree: Agree = bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The largest first: the smaller ones live in its memory. Collective, where the model is; a
        rung counts where every rank has it (agree)."""
        self._budget = budget = budget or Budget()
        self._agree = agree
        start = clock()
        self._api.give_back()  # what the start left is no memory of captured steps
        self._free = self._api.free_bytes()
        done: list[int] = []
        failed: dict[str, list[int]] = {}
        for number, size in enumerate(reversed(self.wanted)):
            progress(size, number, len(self.wanted))
            late = clock() - start > budget.seconds
            why = self._try(size, f"{budget.seconds:.0f} s have gone" if late else None)
            if why is None:
                done.append(size)
            else:
                failed.setdefault(why, []).append(size)
        progress(0, len(self.wanted), len(self.wanted))
        self.rungs = tuple(sorted(done))
        self.seconds = clock() - start
        for why, sizes in failed.items():
            told = ", ".join(map(str, sorted(sizes)))
            self.notes.append(f"graphs: decode steps of {told} rows are not captured: {why}")

    def _try(self, size: int, why: str | None = None) -> str | None:
        """Why not all ranks have this rung now; None: they have. why: what this rank knows against
        it. What one rank knows alone (its clock, its memory) is agreed before any of them is in an
        exchange, and what came of it once more behind them: law 1."""
        inputs: _Inputs | None = None
        if why is None:
            try:
                inputs = _Inputs(self._api, size, -(-self._max_len // self._cache.block_size))
                inputs.fill(None, None)
            except Exception as error:  # no memory, on the host or on the device
                inputs, why = None, one_line(error)
        if not self._collective or self._agree(why is None):
            if inputs is not None:
                why = self._capture(size, inputs)
            if self._agree(why is None):
                return None
        del inputs
        self._drop(size)
        return why or ELSEWHERE

    def _drop(self, size: int) -> None:
        """With its memory, which smaller ones may have then."""
        self._held.pop(size, None)
        self._api.give_back()
        self._taken = max(self._free - self._api.free_bytes(), 0)

    def _capture(self, size: int, inputs: _Inputs) -> str | None:
        """Why this rank cannot capture the rung, or not within the budget; None: it has."""
        observers: list[_Picks] = []
        num_finished = 0

        def body() -> list[Tensor]:
            nonlocal num_finished
            observer = _Picks()
            observers.append(observer)
            self._set_bound(size)
            out = self._model.forward(self._batch(inputs), self._cache, observer)
            picks = [torch.stack(observer.ids)] if observer.ids else []
            num_finished += 1
            return [out.hidden, out.logits, *picks]

        doing = "warming up"
        try:
            for _ in range(WARM_UPS):
                self._api.warm_up(body)
            doing = "capturing"
            graph = self._api.capture(body)
        except Exception as error:  # whatever a kernel or library raises that may not be captured
            # Where a forward was left in its midst, peers wait in its exchanges, or dispatchers
            # have counted other calls than theirs (which of two buffers is next).
            if self._collective and (doing == "warming up" or num_finished <= WARM_UPS):
                raise EngineFailed(
                    f"{doing} a step of {size} rows: {one_line(error)}; "
                    "--graphs off goes without captured steps"
                ) from error
            return one_line(error)
        self._held[size] = _Captured(inputs, graph, observers[-1].layers, self._placement)
        self._api.give_back()  # what warming up took, steps that are not captured take as well
        if (taken := self._free - self._api.free_bytes()) > self._budget.memory:
            return f"{taken} bytes would be taken, --graph-memory is {self._budget.memory}"
        self._taken = taken
        return None

    def _batch(self, inputs: _Inputs) -> ForwardBatch:
        """A new object each time: what kernels keep of a batch belongs to one capture."""
        tensors: dict[str, Any] = dict(inputs.device)
        return ForwardBatch(
            **tensors,
            block_tables=inputs.tables,
            logits_rows=inputs.logits_rows,
            max_query_len=1,
            max_context_len=self._max_len,
            padding=inputs.device["slot_mapping"] < 0,
            total_context=self.most_context,
        )

    @property
    def _placement(self) -> Any:
        return getattr(self._model, "placement", None)

    # -- a step --------------------------------------------------------------------------------

    def rung(self, max_tokens: int | None, decode_only: bool, context: int = 0) -> int | None:
        """See `ladder.rung`: the same on all ranks."""
        return rung(max_tokens, decode_only, self.rungs, context, self.most_context)

    @torch.inference_mode()
    def ready(
        self, max_tokens: int | None, decode_only: bool, context: int = 0, own: int | None = None
    ) -> int | None:
        """`rung`, captured again where it is of a placement that is out of use. Collective then:
        placements change on all ranks before the same step, and a rung that one rank cannot
        capture again is out of use on all; this step goes as it is (None). own: of `context`, this
        rank's."""
        size = self.rung(max_tokens, decode_only, context)
        if size is None:
            if self.rung(max_tokens, decode_only) is not None:
                self._note_context(context, own)
            return None
        if self._held[size].placement is self._placement:
            return size
        self._api.give_back()
        self._free = self._api.free_bytes() + self._taken  # what others took since is not ours
        del self._held[size]  # first: the new one may live in its memory
        why = self._try(size)
        if why is None:
            self.num_recaptures += 1
            return size
        self.rungs = tuple(n for n in self.rungs if n != size)
        self.notes.append(
            f"graphs: decode steps of {size} rows are no longer captured since experts moved: {why}"
        )
        if why != ELSEWHERE:
            self.say(self.notes[-1])
        return None

    def _note_context(self, context: int, own: int | None) -> None:
        """A step goes as it is for its contexts alone: counted, and named once, aloud by the ranks
        whose contexts they are."""
        self.num_too_long += 1
        if self.num_too_long == 1:
            self.notes.append(
                f"graphs: decode steps whose rows attend to more than {self.most_context} "
                f"positions on a rank are not captured (the first has {context})"
            )
            if own == context:
                self.say(self.notes[-1])

    def run(
        self,
        size: int,
        host: ForwardBatch,
        there: ForwardBatch,
        observer: StepObserver | None = None,
    ) -> ForwardOutput:
        """The step's batch as it lies on the host and on the device; no more than `size` rows, no
        trees; size: from `ready`. logits are the captured step's own until the next one."""
        held = self._held[size]
        assert held.placement is self._placement  # or it routes by tables that are out of use
        n = host.num_tokens
        assert n <= size and host.ancestors is None
        # Or attention writes behind the room that was made for it.
        assert host.total_context is not None and host.total_context <= self.most_context
        held.inputs.fill(host, there)
        if bool((host.token_ids < 0).any()):  # known on the device only (ahead.py)
            held.inputs.device["token_ids"][:n].copy_(there.token_ids)
        start = time.perf_counter()
        held.graph.replay()
        self.num_replays += 1
        self.num_padding_rows += size - n
        hidden, logits, *picks = held.graph.outputs
        if observer is not None:
            if picks:
                kept = picks[0][:, :n].clone()
                for number, layer in enumerate(held.layers):
                    observer.expert_picks(layer, kept[number])
            observer.part("other", time.perf_counter() - start)
        rows = host.logits_rows
        all_rows = rows.shape[0] == n and bool((rows == torch.arange(n)).all())
        # hidden may be kept for later steps (drafters hold it): the captured one is written again.
        return ForwardOutput(
            hidden=hidden[:n].clone(),
            logits=logits[:n] if all_rows else logits.index_select(0, there.logits_rows),
        )

    def report(self) -> dict[str, object]:
        """For `/debug/state`; `/health` has the rows."""
        return {
            "rows": list(self.rungs),
            "seconds": round(self.seconds, 2),
            "replays": self.num_replays,
            "padding_rows": self.num_padding_rows,
            "captured_again": self.num_recaptures,
            "too_long": self.num_too_long,
            "notes": list(self.notes),
        }
