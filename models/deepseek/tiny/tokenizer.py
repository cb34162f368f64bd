"""The bundled model's tokenizer: byte-level BPE with the special tokens of the V3 family.

Knows the pre-tokeniser (V3's: digits in runs of up to three, CJK runs alone), the special token
strings and their ids, and the chat template. Knows nothing of the model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus import SOURCES

VOCAB = 4096
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CONTROL = (BOS, EOS, PAD)  # `special: true`, skipped when decoding, as V3 has it
MARKERS = (  # added tokens with `special: false`: they stay in decoded text
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
)
_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The V3.1 manner: every answer starts with </think>, or with <think> where thinking is asked for;
# reasoning of past turns is dropped; a call is NAME <sep> JSON; outputs follow without a wrapper.
CHAT_TEMPLATE = """\
{%- if thinking is not defined -%}\
{%- set thinking = enable_thinking if enable_thinking is defined else false -%}\
{%- endif -%}\
{%- if add_generation_prompt is not defined -%}\
{%- set add_generation_prompt = false -%}\
{%- endif -%}\
{%- set ns = namespace(system='', first=true, pending=false) -%}\
{%- for message in messages -%}\
{%- if message['role'] == 'system' -%}\
{%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message['content'] -%}\
{%- set ns.first = false -%}\
{%- endif -%}\
{%- endfor -%}\
{%- if tools is defined and tools -%}\
{%- set ns.system = ns.system + '\\n\\n## Tools\\n' -%}\
{%- for tool in tools -%}\
{%- set ns.system = ns.system + '\\n### ' + tool.function.name + '\\nDescription: ' \
+ (tool.function.description or '') + '\\nParameters: ' \
+ (tool.function.parameters | tojson) + '\\n' -%}\
{%- endfor -%}\
{%- endif -%}\
{{- bos_token -}}{{- ns.system -}}\
{%- for message in messages -%}\
{%- if message['role'] == 'user' -%}\
{{- '<｜User｜>' + message['content'] -}}\
{%- set ns.pending = true -%}\
{%- elif message['role'] == 'tool' -%}\
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' -}}\
{%- set ns.pending = true -%}\
{%- elif message['role'] == 'assistant' -%}\
{{- '<｜Assistant｜></think>' -}}\
{%- if message['content'] is defined and message['content'] -%}\
{{- message['content'].split('</think>')[-1] -}}\
{%- endif -%}\
{%- if message['tool_calls'] is defined and message['tool_calls'] -%}\
{{- '<｜tool▁calls▁begin｜>' -}}\
{%- for call in message['tool_calls'] -%}\
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' \
+ (call['function']['arguments'] if call['function']['arguments'] is string \
else call['function']['arguments'] | tojson) + '<｜tool▁call▁end｜>' -}}\
{%- endfor -%}\
{{- '<｜tool▁calls▁end｜>' -}}\
{%- endif -%}\
{{- '<｜end▁of▁sentence｜>' -}}\
{%- set ns.pending = false -%}\
{%- endif -%}\
{%- endfor -%}\
{%- if add_generation_prompt and ns.pending -%}\
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}\
{%- endif -%}"""


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Learns the merges. Ids 0-2: control tokens; then the markers; then bytes and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[*CONTROL, *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(raw, ensure_ascii=False))


def tokenizer_config() -> dict[str, object]:
    """`tokenizer_config.json` in the V3 style, chat template included."""

    def token(content: str) -> dict[str, object]:
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content, **flags}

    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "eos_token": token(EOS),
        "pad_token": token(PAD),
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 2048,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def main(folder: Path) -> None:
    """Reads corpus.jsonl, writes tokenizer.json and, per source, {train,held}.{source}.npy."""
    with (folder / "corpus.jsonl").open(encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    budget = {source.name: 3_500_000 for source in SOURCES}  # characters: an even diet
    budget["chat"] = 500_000
    sample: list[str] = []
    random.Random(3).shuffle(rows)
    for row in rows:
        if not row["held_out"] and budget[row["source"]] > 0:
            text = row["text"][:30_000]
            budget[row["source"]] -= len(text)
            sample.append(text)
    tokenizer = train_tokenizer(iter(sample))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokens(tokenizer, rows, folder)


def write_tokens(tokenizer: Tokenizer, rows: list[dict[str, Any]], folder: Path) -> None:
    """The lines of corpus.jsonl as tokens: {train,held}.{source}.npy; prints their sizes."""
    for source in SOURCES:
        for part, held in (("train", False), ("held", True)):
            texts = [
                r["text"] for r in rows if r["source"] == source.name and r["held_out"] is held
            ]
            ids: list[int] = []
            for encoding in tokenizer.encode_batch(texts):
                ids.append(0)
                ids.extend(encoding.ids)
                if source.name != "chat":  # dialogues carry their own eos
                    ids.append(1)
            np.save(folder / f"{part}.{source.name}.npy", np.array(ids, dtype=np.uint16))
            size = sum(len(t.encode()) for t in texts)
            rate = f"{size / len(ids):.2f} bytes each"
            print(f"{source.name:12s} {part:5s} {len(ids):9d} tokens, {rate}")
