"""What the tests of the HTTP routes share: jobs of fake ranks, a script that says what it is asked
to, and readers. A file imports the fixtures that it wants, under the name of the function.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, echo, output, write_tokenizer

USER: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", name="folder")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer: all that a front end reads of a checkpoint."""
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module", name="job")
def scripted_job(folder: Path) -> Iterator[Rehearsal]:
    """Two ranks that say what `script` says, for all tests of a file."""
    with Rehearsal(folder, num_ranks=2, script=script) as running:
        yield running


@pytest.fixture(scope="module", name="http")
def http_of_the_file(job: Rehearsal) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=job.url, timeout=20) as client:
        yield client


@pytest.fixture(name="http")
def http_of_the_test(job: Rehearsal) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=job.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module", name="client")
def openai_client(job: Rehearsal) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{job.url}/v1", api_key="none", max_retries=0, timeout=20)


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
