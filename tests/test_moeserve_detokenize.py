"""Incremental text equals the full decode, whole characters only, stop strings cut right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.detokenize import Detokenizer, StopStrings, TokenBytes, _WindowDecoder, token_bytes
from moeserve.server.rehearsal import write_tokenizer
from moeserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def table(tokenizer: Tokenizer) -> TokenBytes:
    found = token_bytes(tokenizer)
    assert found is not None
    return found


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(x) for x in ids), detokenizer.flush()]


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 660), max_size=40), skip=st.booleans())
def test_deltas_add_up_to_the_full_decode_of_any_ids(
    tokenizer: Tokenizer, table: TokenBytes, ids: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, table, skip_special_tokens=skip)
    assert "".join(pieces(detokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_no_delta_of_real_text_holds_a_broken_character(
    tokenizer: Tokenizer, table: TokenBytes, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(Detokenizer(tokenizer, table, skip_special_tokens=False), ids)
    assert "".join(got) == text
    assert sum(x.count("\ufffd") for x in got) == text.count("\ufffd")


@pytest.mark.parametrize(
    "text",
    ["\U0001f389", "\U0001f469\u200d\U0001f467", "日本語のテキスト", "e\u0301a\u0308", "½ ∑"],
)
def test_characters_of_several_tokens_come_whole(
    tokenizer: Tokenizer, table: TokenBytes, text: str
) -> None:
    ids = [table_id for byte in text.encode() for table_id in [_byte_id(tokenizer, byte)]]
    assert len(ids) == len(text.encode())
    got = [x for x in pieces(Detokenizer(tokenizer, table), ids) if x]
    assert got == list(text)


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    from moeserve.detokenize import _byte_alphabet

    char = next(c for c, b in _byte_alphabet().items() if b == byte)
    found = tokenizer.fast.token_to_id(char)
    assert found is not None
    return int(found)


def test_unfinished_character_at_the_end_is_shown_as_replacement(
    tokenizer: Tokenizer, table: TokenBytes
) -> None:
    ids = [_byte_id(tokenizer, x) for x in "a🎉".encode()[:-1]]
    assert "".join(pieces(Detokenizer(tokenizer, table), ids)) == "a\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


def test_window_decoder_agrees_on_text(tokenizer: Tokenizer) -> None:
    text = "hello 🎉 世界 the quick brown fox é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = _WindowDecoder(tokenizer)
    got = [decoder.push(x) for x in ids] + [decoder.flush()]
    assert "".join(got) == text and "\ufffd" not in "".join(got)


def test_kept_special_tokens_are_seen(tokenizer: Tokenizer, table: TokenBytes) -> None:
    kept = Detokenizer(tokenizer, table, keep=frozenset({1}))
    assert "".join(pieces(kept, [0, 1, 2])) == "</s>"


# ---- stop strings -------------------------------------------------------------------------------


def slow_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a stop over pieces must give: the match that begins first, the shorter of two."""
    hits = [(text.find(x), len(x), x) for x in stops if x in text]
    return (text[: min(hits)[0]], min(hits)[2]) if hits else (text, None)


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stop_strings_cut_at_the_first_match_and_never_show_past_it(
    parts: list[str], stops: list[str]
) -> None:
    checker = StopStrings(stops)
    shown, seen = "", ""
    for part in parts:
        seen += part
        shown += checker.push(part)
        cut, match = slow_cut(seen, stops)
        assert cut.startswith(shown)  # nothing shown that a match would take back
        assert (checker.matched is None) == (match is None)  # found as soon as it is complete
        if match is not None:
            assert (shown, checker.matched) == (cut, match)
            return
    assert shown + checker.flush() == seen


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.text("ab", max_size=3), max_size=10), stop=st.text("ab", min_size=1))
def test_no_more_is_held_back_than_may_become_a_stop(parts: list[str], stop: str) -> None:
    checker = StopStrings([stop])
    seen = shown = ""
    for part in parts:
        seen += part
        shown += checker.push(part)
        if checker.matched is None:
            held = seen[len(shown) :]
            assert held == "" or stop.startswith(held)


def test_stop_spanning_tokens_and_in_the_last_token(
    tokenizer: Tokenizer, table: TokenBytes
) -> None:
    ids = [_byte_id(tokenizer, x) for x in b"say END now"]
    detokenizer = Detokenizer(tokenizer, table, stop=["END"])
    got = []
    for token_id in ids:
        got.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    assert "".join(got) == "say " and detokenizer.num_tokens == len("say END")
    assert detokenizer.flush() == ""


def test_held_back_tail_is_shown_when_no_stop_comes(
    tokenizer: Tokenizer, table: TokenBytes
) -> None:
    ids = [_byte_id(tokenizer, x) for x in b"the EN"]
    detokenizer = Detokenizer(tokenizer, table, stop=["END"])
    got = pieces(detokenizer, ids)
    assert got[-1] == "EN" and "".join(got) == "the EN"


def test_stop_string_made_of_an_unfinished_character(
    tokenizer: Tokenizer, table: TokenBytes
) -> None:
    """The replacement character that only the end brings may complete a stop string."""
    ids = [_byte_id(tokenizer, x) for x in b"ab\xf0\x9f"]
    detokenizer = Detokenizer(tokenizer, table, stop=["b\ufffd"])
    assert "".join(pieces(detokenizer, ids)) == "a" and detokenizer.stopped == "b\ufffd"


def test_include_stop_and_min_tokens(tokenizer: Tokenizer, table: TokenBytes) -> None:
    ids = [_byte_id(tokenizer, x) for x in b"xaxb"]
    shown = Detokenizer(tokenizer, table, stop=["x"], min_tokens=3, include_stop=True)
    got = []
    for token_id in ids:
        got.append(shown.push(token_id))
        if shown.stopped:
            break
    assert "".join(got) == "xax"  # the x at the beginning came before token three
