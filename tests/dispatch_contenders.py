"""The dispatchers that are put to the conformance suite, and what each is able to. A new backend is
one entry in `CONTENDERS`; what is asked of it: dispatch_conformance.py, dispatch_trials.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from dispatch_trials import EXPERTS, Shapes, Trial, Trials

from dispatch.allgather import AllGatherDispatcher
from dispatch.base import CombineForm, DispatchConfig, Dispatcher, Layout, WireFormat
from dispatch.collective import CollectiveDispatcher
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.deepep_normal import EmulatedNormalDispatcher
from dispatch.deepep_v2 import EmulatedElasticDispatcher, EmulatedEPDispatcher
from dispatch.local import LocalDispatcher
from dispatch.nvshmem import EmulatedSymmetricDispatcher
from ep.group import EPGroup


@dataclass(frozen=True)
class Contender:
    """One backend and what it is able to. The first of forms serves where one will do.

    name: in reports, one of a kind. kind: its class. ranks: how many it is tried with. hidden: at
    which corners are tried. hidden_sizes, top_ks: of the shapes that it takes. wire: how rows
    travel. summed_error: of the largest result, in the SUMMED form in bfloat16; row_error: of the
    same in any form, where it quantises in its own way; 0 is bit by bit. together: when one rank
    refuses, all end at that layer (else peers wait until it is gone, see the tests of failures).
    thousand: with how many ranks it makes a thousand steps. ordered: ROUTED rows of one source come
    in the order of its tokens. registered: the registry makes it. hooks: for its constructor.
    """

    name: str
    kind: type[Dispatcher]
    ranks: tuple[int, ...] = (2, 4, 8)
    forms: tuple[CombineForm, ...] = (CombineForm.PAIRS, CombineForm.SUMMED)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    hidden: int = 128
    hidden_sizes: tuple[int, ...] = (128, 256, 512, 1024, 1536, 2048, 4096, 5120, 7168)
    top_ks: tuple[int, ...] = tuple(range(1, 12))
    wire: WireFormat = WireFormat.MODEL
    experts: int = EXPERTS
    layout: Layout = Layout.ROUTED
    deterministic: bool = True
    summed_error: float = 0.0
    row_error: float = 0.0
    together: bool = True
    thousand: tuple[int, ...] = (2,)
    ordered: bool = True
    registered: bool = True
    hooks: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> Shapes:
        return Shapes(
            self.dtypes,
            self.hidden,
            self.hidden_sizes,
            self.top_ks,
            self.deterministic,
            self.wire,
            self.experts,
        )

    def make(self, group: EPGroup, config: DispatchConfig, form: CombineForm) -> Dispatcher:
        return self.kind.open(group, config, combine_form=form, **self.hooks)

    def tolerance(self, trial: Trial, form: CombineForm) -> float:
        """Absolute, of what comes home."""
        share = self.row_error
        if form is CombineForm.SUMMED:
            share += self.summed_error * (1 if trial.config.dtype is torch.bfloat16 else 2**-16)
        if not share:
            return 0.0
        homes = [home for home in trial.wanted[form][1] if home.numel()]
        return share * max((float(home.abs().max()) for home in homes), default=0.0)


# At most 16 slots a rank.
_SYMMETRIC: dict[str, Any] = {
    "forms": (CombineForm.PAIRS,),
    "dtypes": (torch.bfloat16,),
    "hidden_sizes": (128, 2048, 7168),
    "experts": 12,
    "layout": Layout.EXPANDED,
    "together": False,
}
# Weighted rows, shares of a rank and their sum in bfloat16. Alignment: small, else most is padding.
_ELASTIC: dict[str, Any] = {
    "forms": (CombineForm.SUMMED,),
    "dtypes": (torch.bfloat16,),
    "hidden": 256,
    "hidden_sizes": (256, 2048, 7168),
    "top_ks": (1, 8, 11),
    "deterministic": False,
    "summed_error": 7 * 2**-8,
    "together": False,
}
_LOW_LATENCY: dict[str, Any] = {
    "forms": (CombineForm.SUMMED,),
    "dtypes": (torch.bfloat16,),
    "hidden": 2048,
    "layout": Layout.MASKED,
    "deterministic": False,
    "summed_error": 3 * 2**-8,  # shares of ranks in the twin, the result here
    "together": False,
}
_NORMAL: dict[str, Any] = {
    "forms": (CombineForm.SUMMED,),
    "dtypes": (torch.bfloat16,),
    "hidden_sizes": (128, 2048, 7168),
    "top_ks": (1, 8, 11),
    "deterministic": False,
    "summed_error": 7 * 2**-8,
    "together": False,
}
_LL_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168)

CONTENDERS = (
    Contender("local", LocalDispatcher, ranks=(1,), thousand=(1,)),
    Contender(
        "local, fp8",
        LocalDispatcher,
        ranks=(1,),
        dtypes=(torch.bfloat16,),
        wire=WireFormat.FP8,
        thousand=(),
    ),
    Contender("torch", CollectiveDispatcher, thousand=(2, 4, 8)),
    Contender("torch, fp8", CollectiveDispatcher, dtypes=(torch.bfloat16,), wire=WireFormat.FP8),
    # A sum in bfloat16 of up to 8 ranks' shares: an addition may round by 2**-8 of what it adds.
    Contender("allgather", AllGatherDispatcher, summed_error=7 * 2**-8),
    Contender(
        "allgather, fp8",
        AllGatherDispatcher,
        dtypes=(torch.bfloat16,),
        wire=WireFormat.FP8_UE8M0,
        summed_error=7 * 2**-8,
    ),
    Contender(
        "deepep_ll (emulated)",
        EmulatedLowLatencyDispatcher,
        ranks=(1, 2, 4, 8),
        hidden_sizes=_LL_SIZES,
        **_LOW_LATENCY,
    ),
    # FP8 within: now and then another code than that of dispatch.fp8, 2**-4 of a value.
    Contender(
        "deepep_ll (emulated), fp8",
        EmulatedLowLatencyDispatcher,
        ranks=(1, 2),
        hidden_sizes=(2048, 7168),
        wire=WireFormat.FP8,
        row_error=2**-4,
        thousand=(),
        **_LOW_LATENCY,
    ),
    Contender(
        "deepep_ll (emulated), ue8m0",
        EmulatedLowLatencyDispatcher,
        ranks=(1,),
        hidden_sizes=(2048, 7168),
        wire=WireFormat.FP8_UE8M0,
        row_error=2**-4,
        thousand=(),
        **_LOW_LATENCY,
    ),
    Contender("deepep_normal (emulated)", EmulatedNormalDispatcher, **_NORMAL),
    Contender(
        "deepep_normal (emulated), fp8",
        EmulatedNormalDispatcher,
        ranks=(2, 8),
        wire=WireFormat.FP8,
        thousand=(),
        **_NORMAL,
    ),
    Contender(
        "deepep_normal (emulated), ue8m0",
        EmulatedNormalDispatcher,
        ranks=(2,),
        wire=WireFormat.FP8_UE8M0,
        thousand=(),
        **_NORMAL,
    ),
    Contender(
        "deepep_v2 (emulated)",
        EmulatedElasticDispatcher,
        ranks=(1, 2, 4, 8),
        ordered=False,
        **_ELASTIC,
    ),
    Contender(
        "deepep_v2 (emulated), expanded",
        EmulatedElasticDispatcher,
        ranks=(1, 2, 8),
        layout=Layout.EXPANDED,
        thousand=(),
        hooks={"expand": True, "alignment": 8},
        **_ELASTIC,
    ),
    Contender(
        "deepep_v2 (emulated), fp8 without sync",
        EmulatedElasticDispatcher,
        ranks=(1, 2, 8),
        wire=WireFormat.FP8,
        ordered=False,
        thousand=(),
        hooks={"cpu_sync": False},
        **_ELASTIC,
    ),
    Contender(
        "deepep_v2 (emulated 2.5), fp8 expanded without sync",
        EmulatedEPDispatcher,
        ranks=(1, 2, 4, 8),
        wire=WireFormat.FP8,
        layout=Layout.EXPANDED,
        registered=False,
        hooks={"expand": True, "cpu_sync": False, "alignment": 8},
        **_ELASTIC,
    ),
    Contender("nvshmem (emulated)", EmulatedSymmetricDispatcher, **_SYMMETRIC),
    Contender(
        "nvshmem (emulated), fp8",
        EmulatedSymmetricDispatcher,
        wire=WireFormat.FP8,
        **_SYMMETRIC,
    ),
)


def trials_of(contenders: Iterable[Contender], num_ranks: int) -> dict[str, Trials]:
    """By name. Contenders of the same shapes share what is computed ahead."""
    made: dict[Shapes, Trials] = {}
    for contender in contenders:
        if contender.shapes not in made:
            made[contender.shapes] = Trials.of(contender.shapes, num_ranks)
    return {c.name: made[c.shapes] for c in contenders}
