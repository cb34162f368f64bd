"""Bytes of a body to a checked object, or one error that names all that is wrong with it.

Three kinds of checks run even where another one failed, each on the fields that are good so far:
those of single fields (`fields`), rules over several, and what the model knows (given as a
function). A field that is null counts as not given.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from moeserve.errors import InvalidRequest, MissingField, raise_problems
from moeserve.server.fields import IGNORED, AnyBody, GenerationFields, StreamOptions, short

Body = TypeVar("Body", bound=AnyBody)
More = Callable[[AnyBody, frozenset[str]], Iterable[InvalidRequest]]
_NAME_END = re.compile(rb'"\s*:')
MOST = 20  # problems that one error names; what is wrong beyond them is mostly more of the same


def _nothing_more(body: AnyBody, bad: frozenset[str]) -> Iterable[InvalidRequest]:
    return ()


def parse(kind: type[Body], body: bytes, more: More = _nothing_more) -> Body:
    """A checked body from JSON bytes. InvalidRequest names field, value and what is valid;
    InvalidFields does so for several, in the order of the body, fields that are missing first.

    more: finds further problems of a body; it must not read the fields that are bad.
    """
    try:
        raw = from_json(body)  # lets NaN pass: the field's own check names it
    except ValueError as error:
        raise InvalidRequest("body", _start(body), f"must be a JSON object ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("body", _start(body), "must be a JSON object")
    # The fast reader keeps the last of two equal names in silence. A flat body with no more
    # names than fields (it may hold very many token ids) has no such pair.
    if len(_NAME_END.findall(body)) != len(raw):
        json.loads(body, object_pairs_hook=_once, parse_int=float)
    ignored = IGNORED if issubclass(kind, GenerationFields) else frozenset[str]()
    given = {k: v for k, v in raw.items() if v is not None and k not in ignored}
    problems: list[InvalidRequest] = []
    bad = frozenset[str]()
    made: Body
    try:
        made = kind.model_validate(given)
    except ValidationError as error:
        problems = _problems(kind, error)
        bad = frozenset(_owner(x) for x in problems)
        good = {name: value for name, value in given.items() if name not in bad}
        required = [x for x in bad if x in kind.model_fields and kind.model_fields[x].is_required()]
        values: dict[str, Any] = dict.fromkeys(required, []) | good
        made = cast(Any, kind).model_construct(**values)  # mypy takes it for the base class
    problems += [problem for names, problem in made.rules() if not bad.intersection(names)]
    bad |= {_owner(x) for x in problems}
    problems += more(made, bad)
    order = {name: place for place, name in enumerate(given)}
    problems.sort(key=lambda x: order.get(_owner(x), -1))
    raise_problems(problems[:MOST])
    return made


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    for name, value in pairs:
        if name in seen:
            raise InvalidRequest(name, short(value), "given twice in one object, once is enough")
        seen.add(name)


def _owner(problem: InvalidRequest) -> str:
    return problem.field.partition(".")[0]


def _problems(kind: type[BaseModel], error: ValidationError) -> list[InvalidRequest]:
    """One for each path that is wrong; of the branches of a union only the first speaks."""
    found: dict[str, InvalidRequest] = {}
    unions = set[str]()
    for details in error.errors():
        name = str(details["loc"][0])
        if name in unions:
            continue
        if any(map(_is_union_label, details["loc"][1:])):
            unions.add(name)
        problem = _problem(kind, name, details)
        found.setdefault(problem.field, problem)
    return list(found.values())


def _problem(kind: type[BaseModel], name: str, details: ErrorDetails) -> InvalidRequest:
    field = kind.model_fields.get(name)
    path = ".".join(str(x) for x in details["loc"] if not _is_union_label(x))
    value = short(details["input"])
    if details["type"] == "extra_forbidden":
        owner = _owner_of(kind, details["loc"])
        names = list(owner.model_fields)
        close = difflib.get_close_matches(str(details["loc"][-1]), names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = ", ".join(names)
        if issubclass(owner, GenerationFields):
            known += f"; accepted and without effect: {', '.join(sorted(IGNORED))}"
        return InvalidRequest(path, value, f"unknown field{hint}; known: {known}")
    valid = field.description if field is not None and field.description else details["msg"]
    if details["type"] == "missing":
        return MissingField(path, valid)
    return InvalidRequest(path, value, f"must be {valid}")


def _owner_of(kind: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """The model whose field the last part of the path would be."""
    if len(path) == 1:
        return kind
    field = kind.model_fields.get(str(path[0]))
    inner = None if field is None else field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else StreamOptions


def _is_union_label(part: Any) -> bool:
    return isinstance(part, str) and (part in ("str", "int", "[key]") or "[" in part)


def _start(body: bytes) -> str:
    return body[:40].decode(errors="replace")
