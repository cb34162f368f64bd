"""Text to token ids and back, as the checkpoint's own files say.

Knows tokenizer.json (through `tokenizers`), tokenizer_config.json and the few numbers of
config.json that bound token ids. Chat templates are rendered in `chat`, incremental decoding is in
`detokenize`.

Templated text is encoded as it stands: the template writes bos itself. A plain prompt gets bos
exactly when tokenizer_config.json says add_bos_token (or, where it says nothing, when the
tokenizer's post-processor does so).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from moeserve.errors import ConfigError, InvalidRequest

_LONG_TEXT = 8192  # characters; encoding more would hold the event loop for milliseconds


class Tokenizer:
    """The tokenizer of a checkpoint folder. ConfigError when its files are missing or broken."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                [
                    f"model.checkpoint={folder}: has no tokenizer.json; needed is the fast form "
                    "(other forms, such as tiktoken.model, must be converted first)"
                ]
            )
        try:
            self.fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError([f"{path}: not a tokenizer: {error}"]) from None
        self.fast.no_truncation()
        self.fast.no_padding()
        self.config: dict[str, Any] = read_json(folder / "tokenizer_config.json")
        model = read_json(folder / "config.json")
        model = model.get("text_config") or model
        # Ids the model has rows for; the tokenizer may know fewer (padding) or even more.
        self.vocab_size: int = model.get("vocab_size") or self.fast.get_vocab_size()
        self.bos_token = self._special("bos_token")
        self.eos_token = self._special("eos_token")
        self.bos_id = self.fast.token_to_id(self.bos_token) if self.bos_token else None

    def _special(self, name: str) -> str:
        """A token given as a string or as an AddedToken object; "" when there is none."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else ""

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """What chat templates may refer to: bos_token, eos_token and their kind."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
        return {name: text for name in names if (text := self._special(name))}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text. add_special_tokens: as for a plain prompt, see the module; False: none.
        InvalidRequest for half a surrogate pair (what undecodable bytes of a command line become).
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                piece = text[error.start : error.start + 1]
                raise InvalidRequest("prompt", piece, "must be valid Unicode") from None
        add_bos = self.config.get("add_bos_token")
        if add_special_tokens and add_bos is None:
            return self.fast.encode(text, add_special_tokens=True).ids
        ids = self.fast.encode(text, add_special_tokens=False).ids
        if add_special_tokens and add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same; a long text is encoded in a thread (the library releases the GIL)."""
        if len(text) <= _LONG_TEXT:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int, *, first: bool = False) -> str:
        """One token as text, special tokens included; bytes that are no character become U+FFFD.
        first: as at the beginning of a text, where some tokenizers drop a token's blank."""
        text = self.fast.decode([token_id], skip_special_tokens=False)
        if first or self.is_byte_level:
            return text
        return self.fast.decode([token_id, token_id], skip_special_tokens=False)[len(text) :]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that skip_special_tokens leaves out."""
        added = self.fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a token stands for bytes independently of its neighbours (GPT-2's alphabet)."""
        decoder = json.loads(self.fast.to_str()).get("decoder") or {}
        parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
        return [x.get("type") for x in parts or []] == ["ByteLevel"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is no such file. ConfigError when it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"{path}: must hold a JSON object"])
    return value
