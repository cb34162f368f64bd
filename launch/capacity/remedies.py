"""What a deployment breaks, as data, and values of one field that would mend it.

Knows: which values of a field are worth a look. Knows no rule: what is broken with another value is
asked of whoever knows them. A value is offered where nothing at all is broken with it; where other
fields break rules of their own, where those are all that stays broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.capacity.deployment import Deployment

ERROR, WARNING = "error", "warning"
MOST_TRIED = 96  # values of a field on each side


@dataclass(frozen=True)
class Violation:
    """rule: its short name. text: value, what would be valid. nearest: the same as data, by field
    of the deployment. severity: a warning runs, but not as well as it could, or not here. by:
    fields that another value of could help."""

    rule: str
    text: str
    nearest: tuple[tuple[str, int], ...] = ()
    severity: str = ERROR
    by: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        near: dict[str, list[int]] = {}
        for field, value in self.nearest:
            near.setdefault(field, []).append(value)
        return {"rule": self.rule, "severity": self.severity, "text": self.text, "nearest": near}


Ask = Callable[[Deployment], list[Violation]]


def errors(found: list[Violation]) -> list[Violation]:
    return [v for v in found if v.severity == ERROR]


def mended(d: Deployment, found: list[Violation], ask: Ask) -> list[Violation]:
    """With values that are valid; nearest of what comes in are only the first to be looked at. ask:
    what another deployment breaks."""
    known: dict[tuple[str, int], list[Violation]] = {}

    def broken(field: str, value: int) -> list[Violation]:
        if (field, value) not in known:
            change: Any = {field: value}
            known[field, value] = ask(replace(d, **change))
        return known[field, value]

    return [_mended(d, v, found, broken) if v.by else v for v in found]


def _mended(
    d: Deployment,
    v: Violation,
    found: list[Violation],
    broken: Callable[[str, int], list[Violation]],
) -> Violation:
    wrong = {x.rule for x in errors(found)}
    clean: list[tuple[str, int]] = []  # nothing at all is broken with it
    helps: list[tuple[str, int]] = []  # only what other fields can mend, or none
    for field in v.by:
        for side in _sides(d, field, [n for name, n in v.nearest if name == field]):
            first = None
            for value in side:
                left = broken(field, value)
                stays = any(x.rule == v.rule and _of_same_kind(x, v) for x in left)
                if not stays and not errors(left):
                    clean.append((field, value))
                    break
                if first is None and not stays and _no_worse(field, left, wrong):
                    first = (field, value)
            if first is not None:
                helps.append(first)
    near = clean or helps
    told = ", or ".join(_told(field, near) for field in v.by if any(n == field for n, _ in near))
    if not near:
        told = f"no other {' or '.join(map(_name, v.by))} alone would do"
    elif not clean:
        told += " (beside what the other rules ask for)"
    return replace(v, text=f"{v.text}; {told}", nearest=tuple(near))


def _of_same_kind(x: Violation, v: Violation) -> bool:
    return x.severity == v.severity and bool(set(x.by) & set(v.by))


def _no_worse(field: str, left: list[Violation], wrong: set[str]) -> bool:
    """Nothing else is broken than before, and nothing that this field alone could mend."""
    return all(x.rule in wrong and x.by != (field,) for x in errors(left))


def _told(field: str, near: list[tuple[str, int]]) -> str:
    values = sorted({value for name, value in near if name == field})
    return f"{_name(field)}: {' or '.join(map(str, values))}"


def _name(field: str) -> str:
    return "GPUs" if field == "gpus" else field


def _sides(d: Deployment, field: str, first: list[int]) -> Iterator[list[int]]:
    """Values below and above that of the deployment, the nearest ones first."""
    now: int = getattr(d, field)
    values = {n for n in (*first, *_worth_a_look(d, field)) if n != now}
    yield sorted((n for n in values if n < now), reverse=True)[:MOST_TRIED]
    yield sorted(n for n in values if n > now)[:MOST_TRIED]


def _worth_a_look(d: Deployment, field: str) -> Iterator[int]:
    if field == "tp":
        yield from range(1, d.gpu.domain + 1)
    elif field == "gpus":
        node = d.gpu.per_node
        yield from range(1, node)
        yield from range(node, d.slots + 1, node)
    elif field in ("sequences", "tokens"):
        size: int = getattr(d, field)
        # A batch is a multiple of 4 where ranks are odd.
        yield from range(size + 1, size + 5)
        while size > 1:
            size //= 2
            yield from (size, size - size % 4) if size > 4 else (size,)
