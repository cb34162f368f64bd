#!/usr/bin/env bash
# Run the tests with the pytest in $1 (a folder of programs); further arguments go to pytest, which
# then runs once. Without any, two lanes go side by side, since most tests keep one core busy: in one
# the tests that start ranks, then those of the GPU kernels in triton's interpreter, which needs a
# process of its own; in the other, which is shown as it goes, all others. Their closing lines come
# once more at the end, each with its name, and added up in the last line.
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
lane=
trap '[ -z "$lane" ] || kill -- "-$lane" 2>/dev/null || true; rm -rf "$logs"' EXIT
set -m # the lane is a process group of its own, which can be ended as a whole
(
  status=0
  "$bin/python" -m pytest -q -m dist -p no:cacheprovider >"$logs/ranks" 2>&1 || status=$?
  TRITON_INTERPRET=1 "$bin/python" -m pytest -q -p no:cacheprovider tests/interpreter \
    >"$logs/kernels" 2>&1 || status=$?
  exit "$status"
) </dev/null &
lane=$!
set +m
echo "tests without ranks (the others run beside them and are shown after):"
status=0
"$bin/python" -m pytest -q -m "not dist" 2>&1 | tee "$logs/others" || status=$?
echo "tests with ranks, then of GPU kernels in triton's interpreter:"
touch "$logs/ranks" "$logs/kernels"
tail -q -n +1 -f --pid="$lane" "$logs/ranks" "$logs/kernels"
wait "$lane" || status=$?
lane=

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
