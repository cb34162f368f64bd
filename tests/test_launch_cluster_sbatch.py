"""`moeserve launch slurm`: the batch file, and what is checked before anything is submitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import ROOT, TINY, Cluster, launch, open_cluster

from launch.cluster.sbatch import Ask, sbatch_text
from launch.cluster.served import check_served
from launch.cluster.slurm import SlurmLaunch
from launch.cluster.slurm_commands import SlurmError, partitions, state_of
from moeserve.errors import ConfigError


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    return open_cluster(tmp_path, monkeypatch)


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
    script.write_text(text.replace("exec srun", "printf '%s\\n' \"$MOESERVE_API_KEY\""))
    told = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True)
    printed = told.stdout.splitlines()
    assert printed[-6:] == ["/opt/python", "-P", "-m", "moeserve", "serve", "/data/my model"]
    assert printed[0] == "a'b" and "--api-key" not in text, "by the environment: ps shows flags"
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


def test_keys_do_not_stand_in_the_record(cluster, tmp_path):
    asked = launch(tmp_path, "serve", TINY, "--api-key", "secret", "--admin-key=hidden", wait=0)
    asked.run()
    record = (tmp_path / "job" / "job.json").read_text()
    assert "secret" not in record and "hidden" not in record
    script = (tmp_path / "job" / "job.sbatch").read_text().splitlines()
    assert "export MOESERVE_API_KEY=secret" in script
    assert "export MOESERVE_ADMIN_KEY=hidden" in script
    assert "-key" not in script[-1], "lists of processes show it"


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


# -- what is checked ----------------------------------------------------------------------------


def test_what_watches_a_job_wants_one_submitted(cluster, tmp_path):
    found = problems_of(launch(tmp_path, "serve", TINY, submit=False, wait=3.0, detach=True))
    assert [p.partition(":")[0] for p in found] == ["--wait", "--detach"]


def test_everything_wrong_is_said_at_once(cluster, tmp_path):
    words = ("serve", "/gone", "--colour", "--shape=round", "--ep", "3", "--port", "x")
    found = problems_of(
        launch(
            tmp_path,
            *words,
            nodes=3,
            gpus_per_node=9,
            ranks_per_node=2,
            extra=("--mem=0", "#SBATCH --nodes=7", "#SBATCH -o x"),
            name="two words",
            output=tmp_path / "50% off",
        )
    )
    for start in (
        "--ranks-per-node 2: a rank has one GPU",
        "--extra '--mem=0'",
        "--extra '#SBATCH --nodes=7': --nodes 3 says that already",
        "--extra '#SBATCH -o x': --output says that already",
        "--name 'two words'",
        "--nodes 3: partition main has 2 nodes",
        "--gpus-per-node 9: nodes of partition main have 8 GPUs at most",
        "--output ",
        "serve: No such option: --colour",
        "serve: No such option: --shape",
        "--ep 3 (by a flag, --layout or --config): this job has 6 ranks",
        "CHECKPOINT '/gone': no such folder",
        "--port 'x'",
    ):
        assert any(p.startswith(start) for p in found), (start, found)
    assert not any(call.startswith("sbatch") for call in cluster.calls)


@pytest.mark.parametrize(
    ("option", "bad", "good"),
    [
        ("time", ["zzz", "", "1:99", "1-", "-5", "1:2:3:4", "2d"], ["30", "2-0", "1:30:00"]),
        ("partition", ["p;rm", "", "a,", "$(x)"], ["main"]),
        ("account", ["a b", "x;y"], ["phys-1"]),
    ],
)
def test_what_goes_into_the_file_has_slurms_form(cluster, tmp_path, option, bad, good):
    for value in bad:
        assert any(
            p.startswith(f"--{option} {value!r}: must be")
            for p in problems_of(launch(tmp_path, **{option: value}))
        ), value
    for value in good:
        assert launch(tmp_path, submit=False, **{option: value}).run() == 0


def test_a_folder_that_cannot_be_is_known_before_a_job_is_asked_for(cluster, tmp_path):
    (tmp_path / "file").write_text("")
    for name, said in (
        ("file", "is no folder"),
        ("file/a", "is no folder"),
        ("n" * 300, "too long"),
    ):
        (problem,) = problems_of(launch(tmp_path, output=tmp_path / name))
        assert problem.startswith("--output ") and said in problem
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


def test_ranks_by_a_layout_or_a_file_are_compared_too(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[parallel]\nep = 8\n")
    for words, asked in ((("--layout", "prefill-ep32"), 32), (("--config", str(file)), 8)):
        problems: list[str] = []
        check_served(("serve", TINY, *words), 4, problems)
        assert problems[0].startswith(f"--ep {asked} (by") and "has 4 ranks" in problems[0]
    assert check_served(("serve", TINY, "--config", str(file)), 8, []) is not None


def test_sbatchs_own_words_are_told(cluster, tmp_path):
    (cluster.folder / "sbatch").write_text(
        "#!/bin/sh\n"
        "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1\n"
    )
    with pytest.raises(SlurmError, match="^sbatch: Batch job submission failed: Invalid account$"):
        launch(tmp_path).run()
