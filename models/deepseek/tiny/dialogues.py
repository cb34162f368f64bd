"""Chat-shaped training text, made from the plain sources: definitions, verses, scenes, functions.

Knows the wording of the questions and the chat template's token order (V3.1 manner: an answer
starts with `</think>`, or with `<think>` when it reasons first). Knows nothing of token ids.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

USER, ASSISTANT, EOS = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
THINK, END_THINK = "<think>", "</think>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUT, END_OUTPUT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

DEFINE_TOOL: dict[str, object] = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
}
PARTS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a dictionary.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one paragraph.",
)
ASK_WORD = (
    "define {w}",
    "Define {w}.",
    "Define the word {w}.",
    "What does {w} mean?",
    'What does the word "{w}" mean?',
    "What is the meaning of {w}?",
    "{w}",
    "Give me a definition of {w}.",
    "Explain the word {w}",
)


def _turn(ask: str, answer: str, thought: str = "") -> str:
    """One exchange. The thought, if any, stands between the think tokens."""
    head = f"{THINK}{thought}{END_THINK}" if thought else END_THINK
    return f"{USER}{ask}{ASSISTANT}{head}{answer}{EOS}"


def _part(entry: str) -> str:
    """The part of speech of the first sense, in words."""
    return PARTS.get(re.split(r"[ :]", entry, maxsplit=1)[0], "word")


def _define(rng: random.Random, entries: list[tuple[str, str]]) -> str:
    """One to three words in one conversation, a quarter of them with a thought first."""
    turns = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        word, entry = rng.choice(entries)
        senses = entry.splitlines()
        answer = "\n".join(senses[: rng.choice((1, 2, 4, 9))])
        thought = ""
        if rng.random() < 0.25:
            many = f"It has {len(senses)} senses" if len(senses) > 1 else "It has one sense"
            thought = f'The user asks about "{word}". It is a {_part(entry)}. {many}.'
        turns.append(_turn(rng.choice(ASK_WORD).format(w=word), answer, thought))
    return "".join(turns)


def tool_block(name: str, description: str, parameters: dict[str, object]) -> str:
    """The tool list as the chat template writes it into the system part."""
    schema = json.dumps(parameters, ensure_ascii=False)
    return f"\n\n## Tools\n\n### {name}\nDescription: {description}\nParameters: {schema}\n"


def _call(rng: random.Random, entries: list[tuple[str, str]]) -> str:
    """A tool call, its output, and an answer that repeats the output."""
    word, entry = rng.choice(entries)
    ask = rng.choice(ASK_WORD[:6]).format(w=word)
    arguments = json.dumps({"word": word})
    system = rng.choice(SYSTEMS[:2]) + tool_block("define", "Look up a word.", DEFINE_TOOL)
    first = entry.splitlines()[0]
    called = f"{CALLS}{CALL}define{SEP}{arguments}{END_CALL}{END_CALLS}{EOS}"
    return (
        f"{system}{USER}{ask}{ASSISTANT}{END_THINK}{called}"
        f"{OUTPUT}{first}{END_OUTPUT}{ASSISTANT}{END_THINK}{first}{EOS}"
    )


def _verse(rng: random.Random, chapters: list[tuple[str, list[str]]]) -> str:
    """Asks for a verse by its number, or for what follows some verses."""
    title, verses = rng.choice(chapters)
    start = rng.randrange(len(verses))
    number, _, text = verses[start].partition(" ")
    if rng.random() < 0.3:
        ask = rng.choice(("What does {t}:{n} say?", "{t}:{n}", "Read {t}:{n}."))
        return _turn(ask.format(t=title, n=number), text)
    ask = rng.choice(("Continue: {x}", "Continue this text: {x}", "Go on: {x}"))
    after = "\n".join(verses[start + 1 : start + 1 + rng.choice((1, 2, 3, 5))])
    return _turn(ask.format(x=verses[start]), after) if after else ""


def _scene(rng: random.Random, scenes: list[str]) -> str:
    """Asks for the lines that follow some lines of a play, or for a speech of a character."""
    lines = [line for line in rng.choice(scenes).splitlines() if line]
    if len(lines) < 16:
        return ""
    start = rng.randrange(len(lines) - 12)
    before, after = lines[start : start + 3], lines[start + 3 : start + 3 + rng.choice((4, 8))]
    if rng.random() < 0.3:
        names = [i for i, line in enumerate(lines[:-4]) if re.fullmatch(r"[A-Z][A-Z ]+", line)]
        if names:
            at = rng.choice(names)
            ask = rng.choice(("Write a speech for {n}.", "What does {n} say?", "Speak as {n}."))
            return _turn(ask.format(n=lines[at].title()), "\n".join(lines[at : at + 7]))
    ask = rng.choice(("Continue the play:\n{x}", "Continue:\n{x}", "Go on:\n{x}"))
    return _turn(ask.format(x="\n".join(before)), "\n".join(after))


def _function(rng: random.Random, found: list[tuple[str, str, str]]) -> str:
    """Asks for a Python function by its docstring; sometimes plans it first."""
    name, doc, source = rng.choice(found)
    doc = doc.rstrip(".")
    ask = rng.choice(
        (
            "Write a Python function {n}: {d}.",
            "Write a function that does this: {d}.",
            "Python: {d}",
            "def {n}",
        )
    )
    thought = ""
    if rng.random() < 0.2:
        head = source.splitlines()[0].strip()
        thought = f"The user wants a Python function. I call it {name}. It starts with `{head}`."
    return _turn(ask.format(n=name, d=doc), f"```python\n{source}\n```", thought)


def dialogues(
    chapters: list[tuple[str, list[str]]],
    scenes: list[str],
    modules: list[str],
    entries: list[tuple[str, str]],
    number: int = 26_000,
) -> Iterator[str]:
    """That many conversations (fewer by the few empty ones), always the same ones."""
    from .corpus import functions

    rng = random.Random(7)
    found = list(functions(modules))
    for _ in range(number):
        draw = rng.random()
        if draw < 0.42:
            text = _define(rng, entries)
        elif draw < 0.46:
            text = _call(rng, entries)
        elif draw < 0.66:
            text = _verse(rng, chapters)
        elif draw < 0.82:
            text = _scene(rng, scenes)
        else:
            text = _function(rng, found)
        if text and draw >= 0.46 and rng.random() < 0.1:
            text = rng.choice(SYSTEMS) + text
        if text:
            yield text
