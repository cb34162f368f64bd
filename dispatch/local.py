"""LocalDispatcher: one rank holds every expert, so nothing travels.

Knows: the interface, both combine forms. Knows nothing of process groups: it is the backend of
EP = 1 and copies no row. FP8 rows pass through as they are, so that one rank rounds as many do.

Shape letters: T tokens, D hidden, K top-k, P physical slots (all local here), Q valid pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dispatch import combine
from dispatch.base import (
    BufferPlan,
    CombineForm,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    DispatchStats,
    Fp8Tokens,
    Handle,
    Layout,
    Probe,
    Received,
)
from dispatch.combine import CombinePairs
from dispatch.fp8 import row_scales
from dispatch.handles import (
    HandleState,
    TokenHandle,
    check_outputs,
    check_probe,
    check_rows,
    check_slots,
    form_for,
    pair_index,
)
from dispatch.route import count_picks


class LocalDispatcher(Dispatcher):
    """Dispatch and combine within one process. combine_pairs: `Kernels.combine_pairs` or None.

    Received rows are x itself, those without any valid slot included.
    """

    name = "local"
    graph_safe = True  # nothing travels, and on a device nothing is asked of it

    def __init__(
        self,
        group: Any,
        config: DispatchConfig,
        *,
        combine_form: CombineForm | None = None,
        combine_pairs: CombinePairs | None = None,
    ) -> None:
        check_probe(self.name, self.probe(group, config))
        self.config = config
        self.combine_form = form_for(config, combine_form)
        self.stats = DispatchStats(rows_sent_to_rank=[0])
        self._combine = combine_pairs or combine.combine_pairs
        self._closed = False

    @staticmethod
    def probe(group: Any, config: DispatchConfig) -> Probe:
        if group.size != 1:
            return Probe(
                False, f"it sends nothing, which only one rank can do; here are {group.size}"
            )
        return Probe(True, "one rank holds every expert; nothing travels")

    @staticmethod
    def plan(group: Any, config: DispatchConfig) -> BufferPlan:
        return BufferPlan()

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        if self._closed:
            raise DispatchError("dispatcher 'local' is closed")
        values, scales = check_rows(self.config, x, slots, weights, self._bound)
        if slots.device.type == "cpu":  # elsewhere the range shows by itself, as picks are counted
            check_slots(self.config, slots)
        self.stats.rows_sent_to_rank = [values.shape[0]]
        return TokenHandle(owner=self, x=values, slots=slots, weights=weights, scales=scales)

    def dispatch_finish(self, handle: Handle) -> Received:
        handle = TokenHandle.expect(handle, self, HandleState.SENT)
        handle.state = HandleState.RECEIVED
        try:
            counts = count_picks(handle.slots, self.config.num_physical_experts)
        except RuntimeError:
            check_slots(self.config, handle.slots)
            raise
        if counts.shape[0] != self.config.num_physical_experts:  # free, where a range check is not
            check_slots(self.config, handle.slots)
        self.stats.calls += 1
        weights = torch.where(handle.slots >= 0, handle.weights, 0.0)
        return Received(
            Layout.ROUTED,
            handle.x,
            handle.slots,
            weights,
            counts,
            handle.scales,
            row_scales(self.config.hidden_size, self.config.wire)[0],
        )

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        handle = TokenHandle.expect(handle, self, HandleState.RECEIVED)
        check_outputs(self.combine_form, handle.slots, self.config.hidden_size, y, index)
        handle.y, handle.index, handle.state = y, index, HandleState.RETURNED

    def combine_finish(self, handle: Handle) -> Tensor:
        handle = TokenHandle.expect(handle, self, HandleState.RETURNED)
        y, index, handle.y, handle.state = handle.y, handle.index, None, HandleState.SPENT
        assert y is not None
        if self.combine_form is CombineForm.SUMMED:
            return y.to(torch.float32)
        if index is None:
            index = pair_index(handle.slots)
        return self._combine(y, index, handle.weights)

    def close(self) -> None:
        self._closed = True
