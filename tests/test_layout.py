"""The house rules that a machine can check: one-way imports, sizes of files, lone backends."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package may import those to its right, never those to its left.
PACKAGES = ["launch", "moeserve", "models", "dispatch", "ep"]
# The entry point looks the command line up by name; nothing else may know the outermost package.
ENTRY_POINTS = {"moeserve/__main__.py"}
# Each is imported in one file, inside a function, so that its absence is an answer and not a crash.
BACKENDS = {"deep_ep", "nvshmem", "deep_gemm", "flash_mla", "mooncake", "nixl"}
MAX_LINES = 500


def sources(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py") if "_build" not in p.parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names imported anywhere in a file, by statement or by importlib with a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value), node.lineno


def wrong_imports(package: str, tree: ast.AST) -> list[str]:
    """Imports of packages to the left of `package`."""
    left = PACKAGES[: PACKAGES.index(package)]
    return [f"line {line}: {name}" for name, line in imports(tree) if name.split(".")[0] in left]


def backends_at_top(tree: ast.Module) -> list[str]:
    """Backend libraries imported as the module is imported."""
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    outside = [node for node in ast.walk(tree) if id(node) not in inside]
    names = {name.split(".")[0] for node in outside for name, _ in imports_of(node)}
    return sorted(names & BACKENDS)


def imports_of(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from imports(node)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    found = {}
    for path in sources(package):
        name = path.relative_to(ROOT).as_posix()
        wrong = wrong_imports(package, ast.parse(path.read_text()))
        if wrong and name not in ENTRY_POINTS:
            found[name] = wrong
    assert found == {}


def test_no_library_imports_tests() -> None:
    found = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources(*PACKAGES)
        for name, _ in imports(ast.parse(path.read_text()))
        if name.split(".")[0] in ("tests", "pytest", "hypothesis")
    ]
    assert found == []


def test_each_backend_library_is_imported_in_one_file_and_lazily() -> None:
    homes: dict[str, list[str]] = {}
    at_top = {}
    for path in sources(*PACKAGES):
        tree = ast.parse(path.read_text())
        name = path.relative_to(ROOT).as_posix()
        for library in sorted({name.split(".")[0] for name, _ in imports(tree)} & BACKENDS):
            homes.setdefault(library, []).append(name)
        if backends_at_top(tree):
            at_top[name] = backends_at_top(tree)
    assert {library: files for library, files in homes.items() if len(files) > 1} == {}
    assert at_top == {}


def test_files_are_short_enough_to_read() -> None:
    files = [*sources(*PACKAGES, "tests")]
    for ending in ("*.cpp", "*.h", "*.hpp", "*.cu"):
        files += [p for package in PACKAGES for p in (ROOT / package).rglob(ending)]
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in files
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_every_module_says_what_it_knows() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in sources(*PACKAGES)
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_no_global_statement_and_no_utils() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sources(*PACKAGES)
        if path.stem == "utils"
        or any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert found == []


def test_the_tests_folder_shadows_nothing() -> None:
    folders = [p for p in (ROOT / "tests").rglob("*") if p.is_dir() and p.name != "__pycache__"]
    assert [p.name for p in folders if p.name in PACKAGES] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_light_packages_stay_light() -> None:
    """Importing ep and dispatch starts no process group, no thread and no heavy library."""
    code = (
        "import sys, threading, ep.placement, ep.load, dispatch.route, dispatch.collective\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized() and threading.active_count() == 1\n"
        "heavy = {'fastapi', 'transformers', 'zmq', 'models', 'moeserve', 'launch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "[]", run.stderr


# -- the rules themselves must be able to fail ---------------------------------------------


@pytest.mark.parametrize(
    ("package", "source", "wrong"),
    [
        ("ep", "import dispatch.base", 1),
        ("dispatch", "from models.interface import ForwardBatch", 1),
        ("models", "def f():\n    from moeserve import engine", 1),
        ("moeserve", "import importlib\nimportlib.import_module('launch.cli')", 1),
        ("launch", "import moeserve, models, dispatch, ep", 0),
        ("dispatch", "from ep.group import EPGroup\nimport launcher", 0),
    ],
)
def test_the_import_rule_can_fail(package: str, source: str, wrong: int) -> None:
    assert len(wrong_imports(package, ast.parse(source))) == wrong


def test_the_backend_rule_can_fail() -> None:
    assert backends_at_top(ast.parse("try:\n    import deep_ep\nexcept ImportError:\n    pass"))
    assert not backends_at_top(ast.parse("def f():\n    import deep_ep"))
