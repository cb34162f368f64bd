"""Tool calls out of text: both formats, whatever the pieces; what is no call stays text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.reasoning import ReasoningSplitter
from moeserve.tool_calls import CallPiece, ToolCallParser, _deepseek, _kimi

CALLS, END_CALLS, CALL, SEP, END = _deepseek().markers
KIMI_CALLS, KIMI_END_CALLS, KIMI_CALL, KIMI_SEP, KIMI_END = _kimi().markers


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{END}"


def kimi(name: str, arguments: str) -> str:
    return f"{KIMI_CALL}{name}{KIMI_SEP}{arguments}{KIMI_END}"


Parsed = tuple[str, list[tuple[str, str]]]


def parser(text: str, **more: object) -> ToolCallParser:
    number = itertools.count()
    form = _kimi() if "<|tool" in text else _deepseek()
    return ToolCallParser(form, new_id=lambda: f"call_{next(number)}", **more)  # type: ignore[arg-type]


def parse(text: str, cuts: list[int], **more: object) -> tuple[Parsed, list[CallPiece], list[str]]:
    found = parser(text, **more)
    bounds = [0, *sorted(x % (len(text) + 1) for x in cuts), len(text)]
    got = [found.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    got.append(found.flush())
    content = "".join(x[0] for x in got)
    pieces = [piece for x in got for piece in x[1]]
    return (
        (content, [(x.name, x.arguments) for x in found.calls]),
        pieces,
        [x.id for x in found.calls],
    )


PARIS, ROME = '{"city": "Paris"}', '{"city":"Ro\\"me}","deep":[{"a":{}},"}"]}'
GOOD: list[tuple[str, Parsed]] = [
    ("just text", ("just text", [])),
    ("", ("", [])),
    (CALLS + v31("weather", PARIS) + END_CALLS, ("", [("weather", PARIS)])),
    (CALLS + v3("weather", PARIS) + END_CALLS, ("", [("weather", PARIS)])),
    (
        f"Let me look.{CALLS}{v3('weather', PARIS)}\n{v3('weather', ROME)}{END_CALLS}",
        ("Let me look.", [("weather", PARIS), ("weather", ROME)]),
    ),
    (
        CALLS + v31("a", "{}") + v31("b", ROME) + END_CALLS + "bye",
        ("bye", [("a", "{}"), ("b", ROME)]),
    ),
    (CALLS + v31("time", "") + END_CALLS, ("", [("time", "{}")])),
    (CALLS + v3("time", "") + END_CALLS, ("", [("time", "{}")])),
    (f"{CALLS}{CALL}function{SEP}time\n{{}}{END}{END_CALLS}", ("", [("time", "{}")])),
    (f"{CALLS}{CALL}time{SEP} {{}} {END}", ("", [("time", "{}")])),  # the section's end is lost
    (f"{CALLS}{CALL}time{SEP}{{}}", ("", [("time", "{}")])),  # stopped right after the object
    (f"{CALLS}{CALL}a{SEP}{{}}{CALL}b{SEP}{{}}{END_CALLS}", ("", [("a", "{}"), ("b", "{}")])),
    (v31("lone", PARIS), ("", [("lone", PARIS)])),  # no section at all
    (
        CALLS + v31("wetter_für", '{"ort": "Köln 🎉"}') + END_CALLS,
        ("", [("wetter_für", '{"ort": "Köln 🎉"}')]),
    ),
    (CALLS + v31("function", PARIS).replace("function", "functio"), ("", [("functio", PARIS)])),
    (
        KIMI_CALLS
        + kimi("functions.weather:0", PARIS)
        + kimi("functions.a.b:1", "{}")
        + KIMI_END_CALLS,
        ("", [("weather", PARIS), ("a.b", "{}")]),
    ),
    (
        f"so {KIMI_CALLS} {kimi(' weather:12 ', ' {} ')} {KIMI_END_CALLS}",
        ("so ", [("weather", "{}")]),
    ),
]
MALFORMED = [
    f"{CALLS}{END_CALLS}",
    f"{CALLS}hello{END_CALLS}",
    f"{CALLS}{CALL}{END}{END_CALLS}",
    f"{CALLS}{CALL}weather{END}{END_CALLS}",
    f"{CALLS}{CALL}{SEP}{PARIS}{END}{END_CALLS}",
    f"{CALLS}{CALL}two words{SEP}{PARIS}{END}{END_CALLS}",
    f"{CALLS}{CALL}weather{SEP}city=Paris{END}{END_CALLS}",
    f"{CALLS}{CALL}weather{SEP}[1]{END}{END_CALLS}",
    f'{CALLS}{CALL}weather{SEP}{{"city": }}{END}{END_CALLS}',
    f'{CALLS}{CALL}weather{SEP}{{"city": NaN}}{END}{END_CALLS}',
    f'{CALLS}{CALL}weather{SEP}{{"city": "a\nb"}}{END}{END_CALLS}',
    f'{CALLS}{CALL}weather{SEP}{{"city": "Par',
    f'{CALLS}{CALL}weather{SEP}{{"city": "Par{END}{END_CALLS}',
    f"{CALLS}{CALL}weather{SEP}{{]{END}{END_CALLS}",
    f"{CALLS}{CALL}weather{SEP}{PARIS} and more{END}{END_CALLS}",
    f"{CALLS}{CALL}weather{SEP}{PARIS}{SEP}{END}{END_CALLS}",
    f"{CALLS}{CALL}function{SEP}weather\n```json\nnone\n```{END}{END_CALLS}",
    f"{CALLS}{CALL}function{SEP}weather\n```json\n{{\n```{END}{END_CALLS}",
    f"{CALLS}{CALL}gadget{SEP}weather\n```json\n{{}}\n```{END}{END_CALLS}",
    f'{CALLS}{CALL}function{SEP}{{"name": "weather"}}{END}{END_CALLS}',
    f"{CALLS}{CALL}{'x' * 300}{SEP}{PARIS}{END}{END_CALLS}",
    f"{CALLS}{CALL}function{SEP}{'x' * 300}\n{PARIS}{END}{END_CALLS}",
    f"{CALLS}{CALL}weather",
    f"{CALLS}{CALL}function{SEP}weather\n``",
    f"{CALLS[:-2]} and {END_CALLS}{SEP}{END}",
    f"a{CALLS}  ",
    CALLS[:7],
    "{" * 5000 + CALLS,
    f"{CALLS}{CALL}deep{SEP}" + '{"a":' * 3000 + "1" + "}" * 3000 + END,
    f"{KIMI_CALLS}{KIMI_CALL}{KIMI_SEP}{PARIS}{KIMI_END}{KIMI_END_CALLS}",
    f"{KIMI_CALLS}{KIMI_CALL}functions.weather:0{KIMI_SEP}none{KIMI_END}{KIMI_END_CALLS}",
]
cuts = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize(("text", "expected"), GOOD)
@settings(max_examples=40, deadline=None)
@given(cuts=cuts)
def test_calls_are_found_whatever_the_pieces(text: str, expected: Parsed, cuts: list[int]) -> None:
    parsed, pieces, ids = parse(text, cuts)
    assert parsed == expected
    _check_pieces(pieces, expected[1], ids)
    assert parse(text, list(range(len(text))))[0] == expected  # letter by letter


def _check_pieces(pieces: list[CallPiece], calls: list[tuple[str, str]], ids: list[str]) -> None:
    """Name and id first and once, then arguments that add up, one call after the other."""
    assert [x.index for x in pieces] == sorted(x.index for x in pieces)
    for index, (name, arguments) in enumerate(calls):
        first, *rest = [x for x in pieces if x.index == index]
        assert (first.name, first.id, first.arguments) == (name, ids[index], "")
        assert not any(x.name or x.id for x in rest)
        assert "".join(x.arguments for x in rest) == arguments
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("text", MALFORMED)
@settings(max_examples=30, deadline=None)
@given(cuts=cuts)
def test_what_is_no_call_is_text_and_nothing_is_lost(text: str, cuts: list[int]) -> None:
    assert parse(text, cuts)[0] == (text, [])
    if len(text) < 500:
        assert parse(text, list(range(len(text))))[0] == (text, [])


MARKERS = [CALLS, END_CALLS, CALL, SEP, END]
WORDS = ["function", "name", "\n", "```", "json", "{", "}", '"', "a", " ", ":", "1", CALL[:4], "{}"]


@settings(max_examples=600, deadline=None)
@given(
    parts=st.lists(st.sampled_from(MARKERS + WORDS) | st.text(max_size=3), max_size=25), cuts=cuts
)
def test_any_text_gives_the_same_in_any_pieces(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole, _, ids = parse(text, [])
    again, pieces, _ = parse(text, cuts)
    assert again == whole
    content, calls = whole
    assert {x.index for x in pieces} == set(range(len(calls)))  # nothing but whole calls
    _check_pieces(pieces, calls, ids)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert content == text
    assert len(ids) == len(calls)


def test_a_good_call_survives_a_bad_one_beside_it() -> None:
    bad = f"{CALL}weather{SEP}nothing{END}"
    for text in (
        CALLS + v31("a", "{}") + bad + v31("b", "{}") + END_CALLS,
        CALLS + v31("a", "{}") + "\n" + bad + "\n" + v31("b", "{}") + END_CALLS,
    ):
        (content, calls), _, _ = parse(text, list(range(len(text))))
        assert calls == [("a", "{}"), ("b", "{}")]
        assert content.strip() == bad
    (content, calls), _, _ = parse(CALLS + bad + v31("b", "{}") + END_CALLS, [])
    assert (content, calls) == (CALLS + bad, [("b", "{}")])


def test_a_call_goes_out_once_it_is_whole() -> None:
    found = parser("")
    for char in f"{CALLS}{CALL}weather{SEP}{PARIS}":
        assert found.push(char) == ("", [])
    assert found.calls == []  # more may follow the object
    pieces = [CallPiece(0, "call_0", "weather"), CallPiece(0, arguments=PARIS)]
    assert found.push(END) == ("", pieces) and len(found.calls) == 1


@pytest.mark.parametrize(
    "broken", ['{"city": "Par', '{"city": }', "{} and more", "{}{}", '["city"]', '{"a": NaN}']
)
def test_nothing_of_a_broken_call_goes_out_but_its_text(broken: str) -> None:
    text = f"{CALLS}{CALL}weather{SEP}{broken}"
    for cuts in ([], list(range(len(text)))):
        assert parse(text, cuts)[:2] == ((text, []), [])
        (content, calls), pieces, _ = parse(text + END + v31("next", "{}"), cuts)
        assert calls == [("next", "{}")] and content.startswith(text)
        assert [(x.index, x.name) for x in pieces] == [(0, "next"), (0, "")]


def test_after_the_last_allowed_call_nothing_is_read() -> None:
    text = "so" + CALLS + v31("a", "{}") + v31("b", "{}") + END_CALLS + "bye"
    for pieces in ([], list(range(len(text)))):
        (content, calls), found, _ = parse(text, pieces, most=1)
        assert (content, calls) == ("so", [("a", "{}")]) and {x.index for x in found} == {0}
    found_ = parser(text, most=1)
    found_.push(text)
    assert found_.done and found_.push("more") == ("", [])


def test_markers_that_are_not_shown_are_left_out_of_what_becomes_content() -> None:
    text = f"x{CALLS}{CALL}weather{SEP}none{END}{END_CALLS}"
    assert parse(text, [3, 9], hidden=MARKERS)[0] == ("xweathernone", [])


def test_kimi_ids_are_kept_for_the_model_reads_them_again() -> None:
    text = KIMI_CALLS + kimi("functions.weather:7", "{}") + kimi("bare", "{}") + KIMI_END_CALLS
    assert parse(text, [])[2] == ["functions.weather:7", "functions.bare:1"]


def test_a_tool_may_be_called_function() -> None:
    text = CALLS + v31("function", PARIS) + END_CALLS
    assert parse(text, [], names=["function"])[0] == ("", [("function", PARIS)])


@settings(max_examples=50, deadline=None)
@given(cuts=cuts)
def test_calls_may_end_the_reasoning_of_kimi(cuts: list[int]) -> None:
    ends = parser(KIMI_CALLS).ends_reasoning
    text = f"I should look{KIMI_CALLS}{kimi('functions.a:0', '{}')}"
    splitter = ReasoningSplitter(opened=True, ends=ends)
    bounds = [0, *sorted(x % (len(text) + 1) for x in cuts), len(text)]
    got = [splitter.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    got.append(splitter.flush())
    assert "".join(x[0] for x in got) == "I should look"
    assert "".join(x[1] for x in got) == text.removeprefix("I should look")
    assert parser("").ends_reasoning == []
