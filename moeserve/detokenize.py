"""Token ids to text as they come: never half a character, never a piece of a stop string.

`TokenBytes` turns ids into bytes for byte-level tokenizers (all of the served families), so that a
UTF-8 decoder holds back exactly the unfinished character. Other decoders, which may look at a
token's neighbours, go through `_WindowDecoder`. `StopStrings` holds back what may become a stop
string. `Detokenizer` joins them for one sequence. Knows nothing of HTTP.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from moeserve.tokenizer import Tokenizer


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    table.update({chr(256 + index): value for index, value in enumerate(others)})
    return table


class TokenBytes:
    """Bytes of each token of a byte-level tokenizer, looked up once and kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know (padding of the vocabulary)."""
        found = self._known.get(token_id)
        if found is None:
            token = self._tokenizer.fast.id_to_token(token_id) or ""
            values = [self._alphabet.get(char) for char in token]
            # An added token with a character outside the alphabet stands for its own text.
            found = token.encode() if None in values else bytes(x for x in values if x is not None)
            self._known[token_id] = found
        return found


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a token that stands for one byte


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def ahead(self, token_id: int) -> int: ...


class _ByteDecoder:
    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._table[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)

    def ahead(self, token_id: int) -> int:
        first = self._table[token_id][:1]
        goes_on = not first or 0x80 <= first[0] < 0xC0
        return int(not goes_on and bool(self._utf8.getstate()[0]))


class _WindowDecoder:
    """For decoders that look at neighbours: decode a window, emit what it adds.

    The window restarts at the last token after which the text was whole, so the cost per token
    stays small.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode, self._name = tokenizer.fast.decode, tokenizer.fast.id_to_token
        self._context: list[int] = []  # already emitted, there so that the next ones see it
        self._fresh: list[int] = []

    def push(self, token_id: int) -> str:
        self._fresh.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._fresh) < 8:
            return ""
        self._context, self._fresh = self._fresh, []
        return text

    def flush(self) -> str:
        text = self._new_text() if self._fresh else ""
        self._fresh = []
        return text

    def ahead(self, token_id: int) -> int:
        waiting = self._new_text() if self._fresh else ""
        if not waiting or _BYTE.fullmatch(self._name(token_id) or ""):
            return 0  # bytes are read together with those before them
        self._fresh.append(token_id)
        joined = self._new_text()
        self._fresh.pop()
        return len(waiting) if joined.startswith(waiting) else 0

    def _new_text(self) -> str:
        before = self._decode(self._context, skip_special_tokens=False) if self._context else ""
        whole = self._decode(self._context + self._fresh, skip_special_tokens=False)
        return whole[len(before) :]


class StopStrings:
    """Passes text on, except a tail that may be the start of a stop string; cuts at the first one.

    Of two matches the one that begins first wins, and of those the shorter one: it was complete
    first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show now. Once `matched` is set, only "" follows."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        hits = [(at, len(stop), stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if hits:
            at, _, self.matched = min(hits)
            self._held = ""
            return whole[:at]
        keep = max(self._overlap(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """The sequence has ended without a match: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of text that is a beginning of stop (not all of it)."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class Detokenizer:
    """Text of one sequence, token by token.

    skip_special_tokens leaves special ids out, except those in `keep` (markers that are parsed
    later on, such as think tags). Stop strings count from token number min_tokens on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: TokenBytes | None,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._decoder: _Decoder = (
            _ByteDecoder(table) if table is not None else _WindowDecoder(tokenizer)
        )
        self._skip = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.num_tokens = 0
        self.num_characters = 0  # decoded so far (an unfinished one not), held back or not

    def offset(self, token_id: int) -> int:
        """Where the text of this token will begin if it comes next: behind the characters so far;
        behind an unfinished one as well, unless the token goes on with it."""
        if token_id in self._skip:
            return self.num_characters
        return self.num_characters + self._decoder.ahead(token_id)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._stop.matched

    def push(self, token_id: int) -> str:
        """New text that may be shown after this token; "" while it must wait for more."""
        self.num_tokens += 1
        if token_id in self._skip:
            return ""
        return self._checked(self._decoder.push(token_id))

    def flush(self) -> str:
        """What is left when the sequence has ended, an unfinished character as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._checked(self._decoder.flush())
        return text if self.stopped is not None else text + self._stop.flush()

    def _checked(self, text: str) -> str:
        self.num_characters += len(text)
        if self.num_tokens < self._min_tokens:
            return text
        shown = self._stop.push(text)
        if self._stop.matched is not None and self._include_stop:
            shown += self._stop.matched
        return shown


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The table for a byte-level tokenizer, None for others (they take the slower window way)."""
    return TokenBytes(tokenizer) if tokenizer.is_byte_level else None
