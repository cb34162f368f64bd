"""The command line as a process: exit codes, one line a problem, and a quick --help."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from launch import cli
from launch.serve import port_problems
from moeserve.config import ServeConfig

ROOT = Path(__file__).parents[1]


def moeserve(*arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT, stdin: str = ""):
    return subprocess.run(
        [sys.executable, "-m", "moeserve", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | (env or {}),
        timeout=60,
    )


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.fixture
def folder() -> Path:
    return ROOT / "checkpoints" / "tiny"


def test_help_names_all_commands_and_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "moeserve", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0
    for command in ("serve", "generate", "chat", "bench", "version"):
        assert command in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "fastapi", "pydantic", "zmq", "httpx", "tokenizers"}


@pytest.mark.parametrize(
    "command",
    [
        "",
        "serve",
        "generate",
        "chat",
        "bench",
        "bench offline",
        "bench serve",
        "bench sweep",
        "bench compare",
        "bench dispatch",
        "bench kernels",
        "plan",
        "launch",
        "launch slurm",
        "launch hosts",
        "status",
        "stop",
        "version",
    ],
)
def test_every_command_has_tidy_help(command):
    done = moeserve(*command.split(), "--help")
    assert done.returncode == 0
    narrow = moeserve(*command.split(), "--help", env={"COLUMNS": "80"})
    assert "…" not in narrow.stdout, "a flag's name is cut"
    for odd in ("<bool>", "<str>", "<int>", "list[", "no-json", "None", "[dim]", "[/]"):
        assert odd not in done.stdout.replace("URL      <str>", ""), odd


def test_help_tells_the_exit_codes():
    said = " ".join(moeserve("--help").stdout.split())
    assert "2 wrong flags" in said and "130 Ctrl-C" in said


@pytest.mark.parametrize("asked", ["version", "--version", "-V"])
def test_version(asked):
    done = moeserve(asked)
    assert done.returncode == 0 and done.stderr == ""
    first, python, torch, *_, kernels = done.stdout.splitlines()
    assert first.startswith("moeserve 0.1.0") and torch.startswith("torch 2.")
    assert python.startswith(f"python {sys.version_info[0]}.{sys.version_info[1]}")
    assert kernels.startswith(("kernels: native", "kernels: torch"))
    assert ("(commit " in first) == (ROOT / ".git").exists()


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_problems_are_lines_on_stderr_and_exit_code_2(command):
    done = moeserve(command, "/gone", "--ep", "zero", "--dtype", "int3")
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith("moeserve: ") for line in lines), lines
    assert "'/gone': no such folder" in done.stderr and "--ep 'zero'" in done.stderr


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_an_architecture_that_is_not_built_is_the_first_problem(command, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    done = moeserve(command, str(tmp_path), stdin="hello")
    assert done.returncode == 2
    first, *more = done.stderr.splitlines()
    assert "deepseek_v4" in first and "Supported" in first
    assert any("tokenizer.json" in line for line in more) == (command != "bench")
    assert any("holds no *.safetensors" in line for line in more)


@pytest.mark.parametrize("stdin", ["", "\n", " \n\n"])
def test_generate_wants_something_to_continue(folder, stdin):
    done = moeserve("generate", str(folder), stdin=stdin)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "standard input holds no text" in done.stderr


def test_unknown_flag_is_refused(folder):
    done = moeserve("serve", str(folder), "--blok-size", "4")
    assert done.returncode == 2 and "--blok-size" in done.stderr and "--block-size" in done.stderr


def test_server_flags_are_unknown_to_offline_commands(folder):
    done = moeserve("generate", str(folder), "--port", "1")
    assert done.returncode == 2
    assert "--port is a setting that `generate` does not use" in done.stderr
    assert "--prompt" not in done.stderr, "which is not what was meant"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("bench", "serve", "http://x:1", "--turns", "0"), "--turns '0': must be at least 1"),
        (("launch", "slurm", "--nodes=0"), "--nodes '0': must be at least 1"),
        (("bench", "serve", "http://x:1", "--rate", "abc"), "--rate 'abc': must be a number"),
        (("doctor", "--ranks", "x"), "--ranks 'x': must be a whole number"),
    ],
)
def test_a_bad_value_is_told_in_the_words_of_all_checks(words, line):
    done = moeserve(*words)
    assert done.returncode == 2 and done.stderr == f"moeserve: {line}\n"


def test_taken_port_is_refused_before_anything_starts(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = moeserve("serve", str(folder), "--port", str(port), "--placement", "/gone.json")
    assert done.returncode == 2
    gone, taken_port = done.stderr.splitlines()
    assert "--placement '/gone.json': no such file" in gone and f"--port {port}" in taken_port


@pytest.mark.parametrize(
    "host, problem",
    [("no-such-host.invalid", "does not resolve"), ("192.0.2.1", "is no address of this machine")],
)
def test_host_that_is_not_ours(host, problem):
    (found,) = port_problems(ServeConfig.load(None, {"server": {"host": host}}))
    assert found.startswith(f"server.host={host!r}: {problem}")


def test_ep_must_equal_torchruns_world_size(folder):
    # A rank tells the others before it leaves: here it is the only one.
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    done = moeserve("serve", str(folder), "--ep", "4", env=place)
    assert done.returncode == 2
    assert "--ep 4:" in done.stderr and "WORLD_SIZE=1" in done.stderr


def test_offline_commands_refuse_to_run_as_a_rank(folder):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    done = moeserve("generate", str(folder), "--prompt", "x", env=place)
    assert done.returncode == 2 and "torchrun" in done.stderr


def test_chat_without_a_server():
    done = moeserve("chat", "http://127.0.0.1:9", stdin="hello\n")
    assert done.returncode == 1 and "no server answers" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_foreign_package_is_named(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "ep.py").write_text("")
    done = moeserve("version", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert str(tmp_path / "models" / "__init__.py") in done.stderr
    assert str(tmp_path / "ep.py") in done.stderr


@pytest.fixture
def interrupted(monkeypatch, capsys) -> Iterator[Callable[[Callable[[], None]], tuple[int, str]]]:
    """Run main() with a body in place of the commands -> exit code, stderr."""
    before = signal.set_wakeup_fd(-1)

    def run(body: Callable[[], None]) -> tuple[int, str]:
        monkeypatch.setattr(cli, "app", body)
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, capsys.readouterr().err

    yield run
    signal.set_wakeup_fd(before)


def test_ctrl_c_is_one_line_and_130(interrupted):
    app = typer.Typer()

    @app.command()
    def command() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    assert interrupted(lambda: app([])) == (130, "moeserve: stopped before it was done\n")


def test_ctrl_c_that_a_library_swallowed_is_no_bug(interrupted):
    def body() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise AttributeError("half imported")

    assert interrupted(body) == (130, "moeserve: stopped before it was done\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    before = signal.set_wakeup_fd(-1)
    monkeypatch.setattr(cli, "app", lambda: {}["nothing"])
    with pytest.raises(KeyError):
        cli.main()
    signal.set_wakeup_fd(before)
