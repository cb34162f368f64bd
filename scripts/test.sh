#!/usr/bin/env bash
# Run the tests with the pytest in $1 (a folder of programs); further arguments go to pytest, which
# then runs once. Without any, two runs go side by side, since most tests keep one core busy: the
# tests that start ranks, and all others; after the latter, those of the GPU kernels in triton's
# interpreter, which needs a process of its own. Their closing lines come once more at the end, each
# with its name, and added up in the last line.
# One thread a process: the suite runs many processes, and their figures are not what is tested.
set -euo pipefail
bin=${1:?usage: test.sh BIN [pytest arguments]}
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ $# -gt 0 ]; then
  case "$*" in *tests/interpreter*) export TRITON_INTERPRET=1 ;; esac
  exec "$bin/python" -m pytest -q "$@"
fi

logs=$(mktemp -d)
began=$SECONDS
ranks=
trap '[ -z "$ranks" ] || kill "$ranks" 2>/dev/null || true; rm -rf "$logs"' EXIT
"$bin/python" -m pytest -q -m dist -p no:cacheprovider >"$logs/ranks" 2>&1 &
ranks=$!
echo "tests without ranks (those with ranks run beside them and are shown after):"
status=0
"$bin/python" -m pytest -q -m "not dist" 2>&1 | tee "$logs/others" || status=$?
echo "tests of GPU kernels in triton's interpreter:"
TRITON_INTERPRET=1 "$bin/python" -m pytest -q -p no:cacheprovider tests/interpreter 2>&1 \
  | tee "$logs/kernels" || status=$?
echo "tests with ranks:"
tail -n +1 -f --pid="$ranks" "$logs/ranks"
wait "$ranks" || status=$?
ranks=

# "3 failed, 2961 passed, 3 skipped in 804.00s" of each, under its name, then all added up.
echo
for run in others:"tests without ranks" kernels:"GPU kernels, interpreted" ranks:"tests with ranks"; do
  printf '%s: %s\n' "${run#*:}" "$(tail -n 1 "$logs/${run%%:*}" | tr -d '=' | sed 's/^ *//; s/ *$//')"
done
tail -qn 1 "$logs/others" "$logs/kernels" "$logs/ranks" | awk -v seconds=$((SECONDS - began)) '
  { gsub("=", ""); sub(/ in [0-9.]+s.*/, ""); n = split($0, parts, ", ")
    for (i = 1; i <= n; i++) { split(parts[i], word, " "); sum[word[2]] += word[1] } }
  END { order = "failed passed skipped xfailed xpassed error errors warning warnings"
        n = split(order, names, " "); line = ""
        for (i = 1; i <= n; i++) if (sum[names[i]])
          line = line (line == "" ? "" : ", ") sum[names[i]] " " names[i]
        printf "%s in %.2fs\n", line, seconds }'
exit "$status"
