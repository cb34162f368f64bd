"""What `moeserve plan` does with its flags: a plan, a search or a validation; shown, drawn, told as
JSON.

Knows the order of things. Knows nothing of how any of them is reckoned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.capacity.asked import Asked, Typed, predicted_by, read
from launch.capacity.candidates import Candidate
from launch.capacity.parts import FAST_MODE, is_least, mode_of
from launch.capacity.predict import MODELS, By
from launch.capacity.report import named_otherwise, unquantised
from launch.capacity.search import Found, Ratio, ratio, search
from launch.capacity.searching import told
from launch.capacity.validate import Validation, validate
from launch.capacity.values import Values
from launch.output import unwritable
from moeserve.errors import ConfigError, MoeserveError
from moeserve.terminal import counted

PICTURES = (".png", ".svg", ".html")


class RulesViolated(MoeserveError):
    """`--check`, and the deployment may not run as it is; the report was printed."""


@dataclass(frozen=True)
class Run:
    """unused: flags that were given and have no meaning here."""

    typed: Typed
    search: bool
    validate: bool
    check: bool
    plot: Path | None
    as_json: bool
    kernels: bool
    unused: list[str]

    def run(self) -> None:
        """ConfigError for flags; RulesViolated after everything was shown."""
        asked = self._asked()
        if isinstance(asked, str):
            self._validate(asked)
        elif self.search:
            self._search(asked)
        else:
            self._plan(asked)

    def _asked(self) -> Asked | By:
        """What a validation asks for is only by which model."""
        mode = "--validate" if self.validate else "--search" if self.search else "plan MODEL"
        unused = list(self.unused)
        unused += ["--kernels"] if self.kernels and (self.search or self.validate) else []
        typed = asdict(self.typed)
        if self.search:
            names = (
                "redundant",
                "shared",
                "tp",
                "dispatch",
                "groups",
                "sequences",
                "tokens",
                "drafts",
            )
            unused += [f"--{name}" for name in names if typed[name] is not None]
            unused += ["--no-overlap"] if self.typed.no_overlap else []
            unused += ["--preset"] if self.typed.preset is not None else []
            if self.typed.no_deterministic and self.typed.predict in (None, MODELS[0]):
                unused.append(FAST_MODE)
        elif typed["max_gpus"] is not None and not self.validate:
            unused.append("--max-gpus")
        of_rehearsals = ("--routing", "--seed")
        problems = [
            f"{flag}: goes with --rehearse"
            if flag in of_rehearsals
            else f"{flag}: the fitted model has no modes; give --predict kernels too"
            if flag == FAST_MODE and self.search
            else f"{flag}: has no meaning with {mode}"
            for flag in unused
        ]
        if self.plot is not None and self.plot.suffix not in PICTURES:
            problems.append(f"--plot={self.plot}: must end in one of {', '.join(PICTURES)}")
        problems += unwritable("--plot", self.plot)
        asked: Asked | By = MODELS[0]
        try:
            asked = self._model() if self.validate else read(self.typed, self.search)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return asked

    def _model(self) -> By:
        v = Values()
        by = predicted_by(v, self.typed.predict)
        v.check()
        return by

    def _plan(self, asked: Asked) -> None:
        plan = asked.plan()
        if self.plot is not None:
            from launch.capacity.picture import draw_plan

            draw_plan(plan, self.plot)

        def show(console: Any) -> None:
            from launch.capacity.screen import show_plan

            show_plan(plan, console, self.kernels)

        self._tell(plan.as_json(), show)
        wrong = len(plan.errors)
        self._end(f"{counted(wrong, 'rule')} {'are' if wrong > 1 else 'is'} violated", wrong)

    def _search(self, asked: Asked) -> None:
        found = [
            search(
                base,
                asked.work,
                asked.limits,
                asked.most_gpus,
                asked.price,
                asked.loads_of(base),
                by=asked.by,
                every=self.plot is not None,  # a picture shows them all
                progress=shown,
            )
            for base, shown in ((b, told(f"search, {b.phase}")) for b in asked.bases)
        ]
        shares = None
        best = {f.phase: f.best for f in found}
        prefill, decode = best.get("prefill"), best.get("decode")
        if prefill is not None and decode is not None:
            shares = ratio(prefill, decode, asked.work)
        if self.plot is not None:
            from launch.capacity.picture_search import draw_search

            draw_search(found, shares, asked, self.plot)
        said = search_json(found, shares, asked)

        def show(console: Any) -> None:
            from launch.capacity.screen_search import show_search

            show_search(found, shares, asked, console)

        self._tell(said, show)
        none = sum(f.best is None for f in found)
        verb = "have" if none > 1 else "has"
        self._end(f"{counted(none, 'phase')} {verb} no layout within the limits", none)

    def _validate(self, by: By) -> None:
        found: Validation = validate(by=by)
        steps = None
        if by == "kernels":
            from launch.capacity.kernel_presets import preset_steps

            steps = preset_steps()
        if self.plot is not None:
            from launch.capacity.picture_points import draw_validation

            draw_validation(found, self.plot)

        def show(console: Any) -> None:
            from launch.capacity.screen_points import show_validation

            show_validation(found, console, steps)

        said = found.as_json()
        said["presets"] = None if steps is None else [x.as_json() for x in steps]
        self._tell(said, show)

    def _tell(self, said: dict[str, Any], show: Callable[[Any], None]) -> None:
        if self.as_json:
            print(json.dumps(said))
        else:
            from rich.console import Console

            console = Console(highlight=False)
            show(console)
            if self.plot is not None:
                console.print(f"picture: {self.plot}", markup=False)
        sys.stdout.flush()

    def _end(self, said: str, wrong: int) -> None:
        if self.check and wrong:
            raise RulesViolated(f"--check: {said}")


def search_json(found: list[Found], shares: Ratio | None, asked: Asked) -> dict[str, Any]:
    d = asked.bases[0]
    best = [f.best for f in found if f.best is not None]
    return {
        "model": d.model,
        "gpu": d.gpu.name,
        "max_gpus": asked.most_gpus,
        "limits": {"ttft_s": asked.limits.ttft, "tpot_s": asked.limits.tpot},
        "workload": asdict(asked.work),
        "price_per_gpu_hour": d.gpu.price if asked.price is None else asked.price,
        "predict": asked.by,
        "deterministic": d.deterministic,
        "prefill_is_least": asked.by == "kernels" and is_least("prefill", mode_of(d)),
        "phases": {f.phase: _found_json(f) for f in found},
        "ratio": None if shares is None else asdict(shares),
        "cost_per_million": _costs(best),
        "notes": unquantised(d) + [v.text for v in named_otherwise(d)],
    }


def _found_json(f: Found) -> dict[str, Any]:
    return {
        "tried": f.tried,
        "gpus_step": f.gpus_step,
        "allowed": f.num_allowed,
        "pareto": [x.as_json() | {"within_limit": x.keeps(f.limit)} for x in f.pareto],
        "best": None if f.best is None else f.best.as_json(),
    }


def _costs(best: list[Candidate]) -> dict[str, float | None]:
    found = {kind: dollars for x in best for kind, dollars in x.prediction.cost.items()}
    return {kind: found.get(kind) for kind in ("input", "cached", "output")}
