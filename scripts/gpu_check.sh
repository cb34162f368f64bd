#!/usr/bin/env bash
# scripts/gpu_check.py with a Python that can: $1 is a folder of programs that may not be there, $2
# another Python, all else goes to the script. Nothing is installed and nothing is downloaded. Of the
# two the first one is taken whose torch sees a GPU; where none does, the first one that has a torch
# at all (the script then says why there is nothing to check); else $2 (it says what is missing).
set -uo pipefail
bin=${1:?usage: gpu_check.sh BIN PYTHON [arguments of gpu_check.py]}
other=${2:?usage: gpu_check.sh BIN PYTHON [arguments of gpu_check.py]}
shift 2
sees='import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'

python=
for one in "$bin/python" "$other"; do
  "$one" -c "$sees" >/dev/null 2>&1
  case $? in
    0) python=$one why="its torch sees a GPU"; break ;;
    3) [ -n "$python" ] || { python=$one; why="its torch sees no GPU, nor does another here"; } ;;
  esac
done
[ -n "$python" ] || { python=$other; why="no torch was found"; }
echo "gpu-check with $python: $why" >&2
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
