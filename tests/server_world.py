"""What the tests of the HTTP routes share: a script that says what it is asked to, and readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, echo, output

USER: list[Any] = [{"role": "user", "content": "hello"}]


def script(request: Request) -> Iterator[TokenOutput]:
    """Says what it is asked to by logit_bias (ids in order of bias), else echoes the prompt."""
    bias = request.sampling.logit_bias
    if not bias:
        yield from echo(request)
        return
    ids = [x for x, _ in sorted(bias.items(), key=lambda pair: pair[1])]
    for index, token_id in enumerate(ids):
        last = index == len(ids) - 1 or index + 1 == request.sampling.max_tokens
        yield output(request, (token_id,), FinishReason.STOP if last else None, first=index == 0)
        if last:
            return


def bias(job: Rehearsal, text: str, *extra: int) -> dict[str, float]:
    """logit_bias that makes the script say this text, then the extra ids."""
    ids = [*job.service.tokenizer.encode(text, add_special_tokens=False), *extra]
    assert len(set(ids)) == len(ids)
    return {str(x): index - 50 for index, x in enumerate(ids)}


def events(text: str) -> list[dict[str, Any]]:
    parts = text.split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]"
    return [json.loads(x.removeprefix("data: ")) for x in parts]


def write_sentencepiece_like(folder: Path) -> None:
    """A tokenizer of the other kind: blanks are part of tokens, one is put before the text, bytes
    of unknown characters are tokens, the text is normalised, decoding looks at neighbours."""
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyz,.:<>/|"]
    pairs = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "a"), ("l", "l")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{x:02X}>" for x in range(256)), *letters]
    vocabulary = {x: i for i, x in enumerate([*pieces, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))
