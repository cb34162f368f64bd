"""A byte-level BPE tokenizer made in code, so that a random checkpoint can be served.

Knows: tokenizer.json, tokenizer_config.json with a chat template in V3's manner. Every id of the
vocabulary decodes to something. Knows nothing of tensors.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
MARKERS = ("<｜User｜>", "<｜Assistant｜>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """ids 0, 1, 2: bos, eos, pad; then User, Assistant, 256 bytes, and merges of letters.

    A vocabulary of less than 261 has no room for all bytes: nothing is written then.
    """
    if vocab_size < len(SPECIAL) + len(MARKERS) + 256:
        return
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL, *MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    known = set(words)
    pairs = [a + b for a, b in product(ascii_lowercase, repeat=2)]
    for left, right in [
        *product(ascii_lowercase, ascii_lowercase),
        *product(pairs, ascii_lowercase),
        *product(pairs, pairs),
    ]:
        if len(words) >= vocab_size:
            break
        if left + right not in known:
            merges.append((left, right))
            words.append(left + right)
            known.add(left + right)
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
