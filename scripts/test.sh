#!/usr/bin/env bash
# Run the tests with the pytest in $1 (a folder of programs); further arguments go to pytest.
# Two workers (WORKERS=0: none, as one process): tests/conftest.py says which tests go where.
# One thread a process: the suite runs many processes, and their figures are not what is tested.
set -euo pipefail
bin=${1:?usage: test.sh BIN [pytest arguments]}
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$bin/python" -m pytest -q -n "${WORKERS:-2}" --dist loadgroup "$@"
