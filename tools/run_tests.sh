#!/usr/bin/env bash
# Runs the tests in two halves: first what only computes; then what starts processes, sends signals and looks at the machine, a file at a time in each of two workers
# (these tests mostly wait; FT_TEST_SERIAL=1 runs them one after the other).
# Arguments go to pytest in both halves: tools/run_tests.sh tests/core -k placement. FT_TEST_WORKERS is the number of parallel workers.
set -uo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
FT_ETCD="$(tools/etcd.sh)" || exit 1
export FT_ETCD
export FT_TEST_CHECK_TREE="${FT_TEST_CHECK_TREE:-1}"

# Exit 5 is "no test selected": fine for one half, not for both.
"$python" -m pytest -q -n "${FT_TEST_WORKERS:-2}" -m "not serial and not soak and not gpu" "$@"
parallel=$?
serially=(-n "${FT_TEST_WORKERS:-2}" --dist loadfile)
[ "${FT_TEST_SERIAL:-0}" = 1 ] && serially=()
"$python" -m pytest -q "${serially[@]}" -m "serial and not soak and not gpu" "$@"
serial=$?

if [ "$parallel" = 5 ] && [ "$serial" = 5 ]; then echo "no test was selected" >&2; exit 5; fi
[ "$parallel" = 5 ] && parallel=0
[ "$serial" = 5 ] && serial=0
[ "$parallel" = 0 ] && exit "$serial"
exit "$parallel"
