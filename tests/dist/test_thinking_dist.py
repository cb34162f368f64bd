"""A limit on thinking over two ranks: requests cross it inside runs of drafts on both, at different
steps, and get the tokens and log-probabilities of one rank without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeserve.llm import LLM
from moeserve.request import SamplingParams
from moeserve.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny"
SETTINGS: dict[str, Any] = {"kv_tokens": 2048, "max_model_len": 128, "threads": 1, "quiet": True}


@pytest.mark.dist
@pytest.mark.parametrize("speculate", ["mtp:3", "ngram:4"])
def test_two_ranks_cut_thinking_where_one_does(speculate: str) -> None:
    tokenizer = Tokenizer(TINY)
    start, end = (tokenizer.fast.token_to_id(x) for x in ("<think>", "</think>"))
    text = tokenizer.encode("one two one two one two one two", add_special_tokens=True)
    sampling = [
        SamplingParams(
            temperature=0.9 if i % 3 == 2 else 0.0,
            seed=i,
            max_tokens=14 + i,
            ignore_eos=True,
            logprobs=1,
            max_thinking_tokens=i,
        )
        for i in range(12)
    ]
    with LLM(TINY, **SETTINGS) as alone:
        # It thinks what it thought before, so that a prompt look-up has drafts.
        first = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        again = alone.generate([[*text, start]], first)[0].token_ids
        prompts = [[*text[i % 3 :], start, *again, end, *text, start] for i in range(12)]
        wanted = alone.generate(prompts, sampling)
    with LLM(TINY, ep=2, speculate=speculate, **SETTINGS) as llm:
        found = llm.generate(prompts, sampling)
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert end in ours.token_ids[: i + 1]
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
    assert sum(x.num_accepted + x.num_rejected for x in found) > 0
