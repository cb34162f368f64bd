"""`moeserve launch slurm`: a job of many ranks as a batch file, submitted and watched on demand.

Everything that can be wrong is found before anything is submitted, and told at once. While watched,
the job is this terminal's: Ctrl-C ends it, and a failure is told here, first cause first.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.cluster.jobs import FOLDERS, JOB_FILE, SLURM, JobRecord, Registry, without_keys
from launch.cluster.sbatch import SCRIPT, Ask, sbatch_text
from launch.cluster.served import Served, check_served
from launch.cluster.slurm_commands import SlurmError, available, partitions, submit
from launch.cluster.slurm_watch import watch_job
from launch.output import unwritable_folder
from moeserve.errors import ConfigError
from moeserve.terminal import counted, say

_NAME = re.compile(r"[A-Za-z0-9_][\w.+@-]*", re.ASCII)
_FORMS = {  # of options that go into the batch file as they are
    "name": (_NAME, "one word of letters, digits and _ . + @ -"),
    "partition": (
        re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*", re.ASCII),
        "a name of letters, digits and _ . + @ -, or several joined by commas",
    ),
    "account": (_NAME, "one word of letters, digits and _ . + @ -"),
    "time": (
        re.compile(
            r"\d+(?::[0-5]?\d){0,2}|\d+-\d{1,2}(?::[0-5]?\d){0,2}|unlimited|infinite",
            re.IGNORECASE | re.ASCII,
        ),
        "as Slurm writes it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
        "DAYS-HOURS:MINUTES[:SECONDS], or UNLIMITED",
    ),
}
_SHORT = {"N": "nodes", "c": "cpus-per-task", "o": "output"}  # of sbatch
_ODD = re.compile(r"[\s%\"'\\]")  # what Slurm reads otherwise in the name of a file


@dataclass(frozen=True)
class SlurmLaunch:
    """The command line, as typed. ranks_per_node None: one a GPU. wait: seconds for the job to be
    ready once it runs; None: as long as it takes, 0: submit and leave."""

    nodes: int
    gpus_per_node: int
    ranks_per_node: int | None
    cpus_per_rank: int | None
    partition: str | None
    account: str | None
    time: str | None
    name: str
    extra: tuple[str, ...]
    output: Path | None
    python: str | None
    submit: bool
    wait: float | None
    detach: bool
    words: tuple[str, ...]

    def run(self) -> int:
        """The exit code. ConfigError: what is wrong, all of it; SlurmError: Slurm refused it."""
        problems: list[str] = []
        ranks = self.ranks_per_node or self.gpus_per_node
        self._check_sizes(problems)
        self._check_slurm(problems)
        folder = self._folder(problems)
        served = check_served(self.words, self.nodes * ranks, problems)
        if problems:
            raise ConfigError(problems)
        if served is None:
            return 0  # its help was asked for
        ask = Ask(
            nodes=self.nodes,
            ranks_per_node=ranks,
            gpus_per_node=self.gpus_per_node,
            folder=folder,
            words=served.words,
            python=self.python or sys.executable,
            home=Path(__file__).resolve().parents[2],
            name=self.name,
            partition=self.partition,
            account=self.account,
            time=self.time,
            cpus_per_rank=self.cpus_per_rank,
            extra=self.extra,
            restarts=served.max_restarts,
        )
        script = self._write(ask, served)
        if not self.submit:
            say(f"written: {script}")
            say(f"submit it with: sbatch {shlex.quote(str(script))}")
            say("or let moeserve submit and watch it: the same command with --submit")
            print(script)
            return 0
        return self._submit(ask, served, script)

    def _check_sizes(self, problems: list[str]) -> None:
        ranks = self.ranks_per_node
        if not self.gpus_per_node and not ranks:
            problems.append(
                "--gpus-per-node is missing: one rank a GPU; on CPUs give --ranks-per-node instead"
            )
        if self.gpus_per_node and ranks and ranks != self.gpus_per_node:
            problems.append(
                f"--ranks-per-node {ranks}: a rank has one GPU; leave it out, or give "
                f"--ranks-per-node {self.gpus_per_node}"
            )
        problems += [
            f"--extra {line!r}: must begin with '#SBATCH -'"
            for line in self.extra
            if not line.startswith("#SBATCH -") or "\n" in line
        ]
        settled = {
            "nodes": f"--nodes {self.nodes}",
            "ntasks-per-node": "the ranks a node",
            "gpus-per-node": f"--gpus-per-node {self.gpus_per_node}",
            "cpus-per-task": "--cpus-per-rank",
            "output": "--output",
        }
        for line in self.extra:
            name = re.match(r"#SBATCH --?([\w-]+)", line)
            option = _SHORT.get(name[1], name[1]) if name else ""
            if option in settled:
                problems.append(f"--extra {line!r}: {settled[option]} says that already")
        if not self.submit:
            problems += [
                f"{flag}: watches a job that --submit has submitted; give --submit too"
                for flag, given in (("--wait", self.wait is not None), ("--detach", self.detach))
                if given
            ]
        for option, (form, must) in _FORMS.items():
            value = getattr(self, option)
            if value is not None and not form.fullmatch(value):
                problems.append(f"--{option} {value!r}: must be {must}")

    def _check_slurm(self, problems: list[str]) -> None:
        if self.submit and not available("sbatch"):
            problems.append(
                "--submit: there is no sbatch on this machine; leave --submit out, and submit the "
                "file on one of the cluster's"
            )
        if not available("sinfo"):
            if not self.submit:
                say("no sinfo here: partition and sizes are not compared with the cluster's")
            return
        try:
            known = partitions()
        except SlurmError as error:
            if self.submit:
                problems.append(
                    f"--submit: Slurm does not answer here ({error}); leave --submit out, and "
                    "submit the file on a machine of the cluster"
                )
            elif not problems:
                say(f"{error}; partition and sizes are not compared with the cluster's")
            return
        names = ", ".join(sorted(name for name in known if name))
        part = known.get(self.partition or "")
        if part is None:
            problems.append(
                f"--partition {self.partition}: no such partition; this cluster has {names}"
                if self.partition
                else f"--partition is missing: this cluster has no default one; it has {names}"
            )
            return
        if self.nodes > part.nodes:
            problems.append(
                f"--nodes {self.nodes}: partition {part.name} has {counted(part.nodes, 'node')}"
            )
        if self.gpus_per_node > part.gpus_per_node:
            problems.append(
                f"--gpus-per-node {self.gpus_per_node}: nodes of partition {part.name} have "
                f"{counted(part.gpus_per_node, 'GPU')} at most"
            )

    def _folder(self, problems: list[str]) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = (self.output or FOLDERS / f"{self.name}-{stamp}").absolute()
        if _ODD.search(str(folder)):
            problems.append(f"--output {folder}: blanks, quotes and % mean something to Slurm")
        elif found := unwritable_folder("--output", folder):
            problems += found
        elif list(folder.glob("node-*.jsonl")):
            problems.append(f"--output {folder}: holds what another job wrote; name another folder")
        return folder

    def _write(self, ask: Ask, served: Served) -> Path:
        script = ask.folder / SCRIPT
        try:
            ask.folder.mkdir(parents=True, exist_ok=True)
            script.write_text(sbatch_text(ask))
            script.chmod(0o700)  # it may hold a key
        except OSError as error:
            raise ConfigError([f"--output {ask.folder}: {error.strerror}"]) from None
        if served.listens_anywhere:
            keyless = not any(word.startswith("--api-key") for word in served.words)
            say(
                f"--host {served.host}: the first node listens on all its addresses"
                + (", for whoever reaches them: --api-key asks for a key" if keyless else "")
            )
        return script

    def _submit(self, ask: Ask, served: Served, script: Path) -> int:
        job = submit(script)
        record = JobRecord(
            id=job,
            kind=SLURM,
            folder=str(ask.folder),
            nodes=ask.nodes,
            num_ranks=ask.num_ranks,
            command=("serve", *without_keys(served.words)),
            host="",
            pid=0,
            pid_started=0.0,
            started=time.time(),
            drain_seconds=served.drain_seconds,
            restarts=served.max_restarts,
        )
        (ask.folder / JOB_FILE).write_text(record.text())
        Registry.of_user().add(record)
        say(f"submitted: job {job}, {counted(ask.nodes, 'node')}, {counted(ask.num_ranks, 'rank')}")
        say(f"its folder: {ask.folder}")
        if self.wait == 0:
            say(f"watch it with: moeserve status {job}; end it with: moeserve stop {job}")
            print(job)
            return 0
        return watch_job(record, wait=self.wait, detach=self.detach)
