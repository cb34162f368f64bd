"""`moeserve launch slurm` with a Slurm of shell scripts: the file, the checks, what is said."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cluster import slurm_watch
from launch.cluster.jobs import Registry
from launch.cluster.sbatch import Ask, sbatch_text
from launch.cluster.served import check_served
from launch.cluster.slurm import SlurmLaunch
from launch.cluster.slurm_commands import JobState, SlurmError, partitions, state_of
from launch.cluster.stages import Record
from moeserve.errors import ConfigError

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "checkpoints" / "tiny")

# Each program keeps its calls in a file; the state of the one job is the text of another.
FAKES = {
    "sinfo": "echo 'main*|2|gpu:8'; echo 'gold|4|gpu:h100:4(S:0-1)'",
    "sbatch": "echo PENDING'|Resources|' > $HERE/state; echo '77;east'",
    "squeue": "cat $HERE/state",
    "scancel": 'case "$*" in *TERM*) echo "COMPLETED||n[0-1]" > $HERE/state;; '
    '*) echo "CANCELLED||n[0-1]" > $HERE/state;; esac',
}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, body in FAKES.items():
            path = folder / name
            path.write_text(
                f"#!/bin/sh\nHERE={shlex.quote(str(folder))}\n"
                f'echo {name} "$*" >> $HERE/calls\n{body}\n'
            )
            path.chmod(0o755)

    def set_state(self, text: str) -> None:
        draft = self.folder / "draft"
        draft.write_text(text + "\n")
        draft.rename(self.folder / "state")

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    for name in ("SLURM_EVERY", "SLURM_EVERY_READY", "FILES_EVERY", "MORE_REASONS"):
        monkeypatch.setattr(slurm_watch, name, 0.01)
    return Cluster(programs)


def launch(tmp_path: Path, *words: str, **more: object) -> SlurmLaunch:
    asked = {
        "nodes": 2,
        "gpus_per_node": 0,
        "ranks_per_node": 2,
        "cpus_per_rank": None,
        "partition": None,
        "account": None,
        "time": None,
        "name": "moeserve",
        "extra": (),
        "output": tmp_path / "job",
        "python": None,
        "submit": True,
        "wait": None,
        "detach": False,
        "words": words or ("serve", TINY),
    }
    return SlurmLaunch(**{**asked, **more})


def problems_of(asked: SlurmLaunch) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        asked.run()
    return caught.value.problems


# -- the file -----------------------------------------------------------------------------------


def test_the_file_is_a_shell_script_that_says_what_was_asked(tmp_path):
    ask = Ask(
        nodes=3,
        ranks_per_node=8,
        gpus_per_node=8,
        folder=tmp_path,
        words=("/data/my model", "--api-key", "a'b"),
        python="/opt/python",
        home=Path("/opt/here"),
        partition="gold",
        account="me",
        time="2-0",
        cpus_per_rank=12,
        extra=("#SBATCH --mem=0",),
    )
    text = sbatch_text(ask)
    for line in (
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=gold",
        "#SBATCH --account=me",
        "#SBATCH --time=2-0",
        "#SBATCH --mem=0",
        "exec srun --kill-on-bad-exit=1 \\",
        "  --cpus-per-task=12 \\",
    ):
        assert line in text.splitlines(), line
    script = tmp_path / "job.sbatch"
    # What srun would get: the words must survive the shell.
    script.write_text(text.replace("exec srun", "printf '%s\\n'"))
    told = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-8:] == [
        *("/opt/python", "-P", "-m", "moeserve", "serve"),
        *("/data/my model", "--api-key", "a'b"),
    ]
    directives = [x for x in text.splitlines() if x.startswith("#SBATCH")]
    first_command = next(i for i, x in enumerate(text.splitlines()) if x and x[0] != "#")
    assert all(text.splitlines().index(x) < first_command for x in directives)


def test_without_submit_it_is_written_and_nothing_is_called(cluster, tmp_path, capsys):
    assert launch(tmp_path, submit=False).run() == 0
    told = capsys.readouterr()
    path = Path(told.out.strip())
    assert path == tmp_path / "job" / "job.sbatch" and f"sbatch {path}" in told.err
    assert path.stat().st_mode & 0o077 == 0, "a key may be among the flags"
    assert not any(call.startswith("sbatch") for call in cluster.calls)


# -- what is checked ----------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once(cluster, tmp_path):
    words = ("serve", "/gone", "--colour", "--shape=round", "--ep", "3", "--port", "x")
    found = problems_of(
        launch(
            tmp_path,
            *words,
            nodes=3,
            gpus_per_node=9,
            ranks_per_node=2,
            extra=("--mem=0",),
            name="two words",
            output=tmp_path / "50% off",
        )
    )
    for start in (
        "--ranks-per-node 2: a rank has one GPU",
        "--extra '--mem=0'",
        "--name 'two words'",
        "--nodes 3: partition main has 2 nodes",
        "--gpus-per-node 9: nodes of partition main have 8 GPUs at most",
        "--output ",
        "serve: No such option: --colour",
        "serve: No such option: --shape",
        "--ep 3: this job has 6 ranks",
        "CHECKPOINT '/gone': no such folder",
        "--port 'x'",
    ):
        assert any(p.startswith(start) for p in found), (start, found)
    assert not any(call.startswith("sbatch") for call in cluster.calls)


def test_a_partition_is_one_of_the_clusters(cluster, tmp_path):
    assert problems_of(launch(tmp_path, partition="silver")) == [
        "--partition silver: no such partition; this cluster has gold, main"
    ]
    assert partitions()["gold"].gpus_per_node == 4 and partitions()[""].name == "main"


def test_without_slurm_a_file_can_be_written_but_not_submitted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(tmp_path, submit=False).run() == 0
    assert problems_of(launch(tmp_path, output=tmp_path / "b"))[0].startswith("--submit: there is")
    with pytest.raises(SlurmError, match="squeue: not found"):
        state_of("1")


def test_ranks_have_to_be_counted(cluster, tmp_path):
    assert "--gpus-per-node is missing" in problems_of(launch(tmp_path, ranks_per_node=None))[0]


def test_a_folder_with_another_jobs_stages_is_refused(cluster, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "node-a.jsonl").touch()
    assert "holds what another job wrote" in problems_of(launch(tmp_path))[0]


@pytest.mark.parametrize("words", [(), ("generate", TINY), ("serve",)])
def test_what_to_run_has_to_be_said(words):
    problems: list[str] = []
    assert check_served(words, 4, problems) is None and problems


def test_paths_become_absolute_and_loopback_is_not_silent(monkeypatch):
    monkeypatch.chdir(ROOT)
    served = check_served(("serve", "checkpoints/tiny", "--port=0"), 4, [])
    assert served is not None
    assert served.words == (TINY, "--port=0", "--host", "0.0.0.0") and served.listens_anywhere
    chosen = check_served(("serve", TINY, "--host", "127.0.0.1"), 4, [])
    assert chosen is not None and not chosen.listens_anywhere and "0.0.0.0" not in chosen.words


def test_sbatchs_own_words_are_told(cluster, tmp_path):
    (cluster.folder / "sbatch").write_text(
        "#!/bin/sh\n"
        "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1\n"
    )
    with pytest.raises(SlurmError, match="^sbatch: Batch job submission failed: Invalid account$"):
        launch(tmp_path).run()


# -- what is said while it runs -----------------------------------------------------------------


class Ranks:
    """What ranks would write, in steps: each waits until the watcher has asked again."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def say(self, rank: int, stage: str, **more: object) -> None:
        host = f"n{rank // 2}"
        record = {"rank": rank, "host": host, "stage": stage, "when": time.time(), **more}
        assert Record.parse(json.dumps(record))
        with (self._folder / f"node-{host}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def run(self) -> None:
        self._cluster.set_state("RUNNING||n[0-1]")
        for rank in range(4):
            self.say(rank, "starting")

    def serve(self) -> None:
        self.run()
        for rank in range(4):
            self.say(rank, "weights", done=10**6, total=10**6)
            self.say(rank, "ready")
        self.say(0, "serving", text="http://0.0.0.0:8000")

    def log(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


def watched(cluster: Cluster, asked: SlurmLaunch, acts: Callable[[Ranks], None]) -> int:
    """Run it; once submitted, acts happen on a thread."""
    assert asked.output is not None
    ranks, failed = Ranks(cluster, asked.output), []

    def act() -> None:
        try:
            deadline = time.monotonic() + 20
            while sum(call.startswith("squeue") for call in cluster.calls) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            acts(ranks)
        except BaseException as error:
            failed.append(error)
            cluster.set_state("FAILED||")
            raise

    thread = threading.Thread(target=act)
    thread.start()
    code = asked.run()
    thread.join()
    assert not failed
    return code


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def known_jobs(tmp_path: Path) -> list[str]:
    return [r.id for r in Registry(tmp_path / "home" / "moeserve" / "jobs").all()]


def test_ready_is_said_and_the_job_left_when_asked(cluster, tmp_path, capsys):
    code = watched(cluster, launch(tmp_path, detach=True), Ranks.serve)
    said = capsys.readouterr().err
    assert code == 0 and "submitted: job 77, 2 nodes, 4 ranks" in said
    assert "pending (Resources)" in said and "n1 (ranks 2-3): ready" in said
    assert ": http://n0:8000\n" in said and not any("scancel" in c for c in cluster.calls)
    assert known_jobs(tmp_path) == ["77"]


def test_submitted_and_left_at_once(cluster, tmp_path, capsys):
    assert launch(tmp_path, wait=0).run() == 0
    assert capsys.readouterr().out == "77\n"


def test_a_failure_before_it_is_ready_names_the_first_cause(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.run()
        ranks.log("rank-2.log", "Traceback\nmoeserve: out of disk\n")
        ranks.say(0, "failed", text="lost a peer", code=75)
        ranks.say(2, "failed", text="out of disk", code=1)
        cluster.set_state("FAILED|NonZeroExitCode|n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 1
    said = capsys.readouterr().err
    assert "moeserve: rank 2 on n1: out of disk\n" in said and "lost a peer" not in said
    assert "  | moeserve: out of disk" in said and not known_jobs(tmp_path)


def test_a_killed_rank_is_known_by_sruns_word(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.serve()
        ranks.log("job.log", "srun: error: n1: task 3: Killed\n")
        ranks.say(0, "failed", text="a step broke", code=1)
        cluster.set_state("FAILED||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 3
    assert "rank 3 on n1: died: killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "words", "code"),
    [
        ("CANCELLED", "was cancelled, not by this terminal", 3),
        ("TIMEOUT", "its time limit was reached", 1),
        ("NODE_FAIL", "job 77: node fail", 1),
        ("COMPLETED", "job 77 has ended: stopped", 0),
    ],
)
def test_ends_that_no_rank_can_tell_of(cluster, tmp_path, capsys, state, words, code):
    def acts(ranks: Ranks) -> None:
        ranks.serve()
        cluster.set_state(f"{state}||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == code
    assert words in capsys.readouterr().err


def test_a_job_that_starts_again_is_watched_on(cluster, tmp_path, capsys, monkeypatch):
    said: list[str] = []

    def acts(ranks: Ranks) -> None:
        ranks.serve()
        until(lambda: said.append(capsys.readouterr().err) or "ready after" in "".join(said))
        ranks.log("job.log", "srun: error: n1: task 3: Killed\n")
        ranks.say(0, "failed", text="lost a peer", code=75)
        until(lambda: said.append(capsys.readouterr().err) or "starts its ranks" in "".join(said))
        ranks.say(1, "failed", text="lost a peer", code=75)  # late, and of no more interest
        ranks.serve()
        until(
            lambda: said.append(capsys.readouterr().err) or "".join(said).count("ready after") > 1
        )
        cluster.set_state("COMPLETED||n[0-1]")

    monkeypatch.setattr(slurm_watch, "RESTART_REASONS", 0.2)
    code = watched(cluster, launch(tmp_path, "serve", TINY, "--max-restarts", "2"), acts)
    text = "".join(said) + capsys.readouterr().err
    assert text.count("rank 3 on n1: died") == 1 and "lost a peer" not in text
    assert code == 0 and not any(call.startswith("scancel") for call in cluster.calls)
    assert "--max-restarts" not in (tmp_path / "job" / "job.sbatch").read_text().split("run() {")[1]


@pytest.mark.parametrize(
    ("codes", "starts", "end"), [((1, 1, 1, 1), 3, 1), ((1, 2), 2, 2), ((1, 0), 2, 0)]
)
def test_the_file_starts_ranks_again(cluster, tmp_path, codes, starts, end):
    ask = Ask(2, 2, 0, tmp_path, ("/m",), "python", Path("/h"), restarts=2)
    script = tmp_path / "job.sbatch"
    script.write_text(sbatch_text(ask))
    for name, body in (
        (
            "srun",
            f"n=$(wc -l < $HERE/srun.n 2>/dev/null || echo 0); echo >> $HERE/srun.n; "
            f"set -- {' '.join(map(str, codes))}; shift $n; exit $1",
        ),
        ("sleep", 'echo "$1" >> $HERE/slept'),
    ):
        path = cluster.folder / name
        path.write_text(f"#!/bin/sh\nHERE={cluster.folder}\n{body}\n")
        path.chmod(0o755)
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == end, done.stderr
    assert (cluster.folder / "srun.n").read_text().count("\n") == starts
    assert (cluster.folder / "slept").read_text().split() == ["1", "2"][: starts - 1]


def test_a_job_that_hangs_after_a_failure_is_cancelled(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.run()
        ranks.say(1, "failed", text="no such file", code=2)

    assert watched(cluster, launch(tmp_path), acts) == 2
    assert "scancel 77" in cluster.calls


def test_too_slow(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        cluster.set_state("RUNNING||n[0-1]")
        ranks.say(0, "rendezvous")

    assert watched(cluster, launch(tmp_path, wait=0.5), acts) == 1
    said = capsys.readouterr().err
    assert "3 ranks of 4 never started" in said and "n0: rendezvous" in said
    assert "scancel 77" in cluster.calls


def test_a_folder_that_nodes_do_not_see_is_guessed(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slurm_watch, "SILENT_SECONDS", 0.05)
    said: list[str] = []

    def acts(ranks: Ranks) -> None:
        cluster.set_state("RUNNING||n[0-1]")
        until(
            lambda: said.append(capsys.readouterr().err) or "do all nodes see it" in "".join(said)
        )
        cluster.set_state("COMPLETED||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 0


def test_ctrl_c_cancels_what_is_not_ready(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.run()
        os.kill(os.getpid(), signal.SIGINT)

    assert watched(cluster, launch(tmp_path), acts) == 130
    assert "job 77 is cancelled" in capsys.readouterr().err and "scancel 77" in cluster.calls


def test_ctrl_c_drains_what_is_ready(cluster, tmp_path, capsys):
    said: list[str] = []

    def acts(ranks: Ranks) -> None:
        ranks.serve()
        until(lambda: said.append(capsys.readouterr().err) or "ready after" in "".join(said))
        os.kill(os.getpid(), signal.SIGINT)

    assert watched(cluster, launch(tmp_path), acts) == 0
    assert [c for c in cluster.calls if c.startswith("scancel")] == ["scancel --signal=TERM 77"]


def test_a_controller_that_does_not_answer_is_no_end(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        squeue = cluster.folder / "squeue"
        good = squeue.read_text()
        broken = cluster.folder / "broken"
        broken.write_text("#!/bin/sh\necho 'slurm_load_jobs error: timed out' >&2\nexit 1\n")
        broken.chmod(0o755)
        broken.rename(squeue)
        ranks.serve()
        said: list[str] = []
        until(lambda: said.append(capsys.readouterr().err) or "asking again" in "".join(said))
        broken.write_text(good)
        broken.chmod(0o755)
        broken.rename(squeue)
        cluster.set_state("COMPLETED||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 0


def test_a_job_that_slurm_has_forgotten_is_over():
    assert JobState("GONE").over and JobState("TIMEOUT").over
    assert not JobState("PENDING").over and not JobState("COMPLETING").over


def test_keys_do_not_stand_in_the_record(cluster, tmp_path):
    asked = launch(tmp_path, "serve", TINY, "--api-key", "secret", "--admin-key=hidden", wait=0)
    asked.run()
    record = (tmp_path / "job" / "job.json").read_text()
    assert "secret" not in record and "hidden" not in record
    assert "secret" in (tmp_path / "job" / "job.sbatch").read_text()


def test_from_the_command_line(cluster, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moeserve", "launch", "slurm", "--nodes", "2"),
            *("--ranks-per-node", "2", "--output", str(tmp_path / "job")),
            *("--", "serve", TINY, "--ep", "4", "--quiet"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (
        Path(done.stdout.strip())
        .read_text()
        .endswith(f"moeserve serve \\\n    {TINY} --ep 4 --quiet --host 0.0.0.0\n")
    )
