#!/usr/bin/env bash
# Runs the tests in two halves: what only computes in parallel, what starts processes, sends signals and looks at the machine one after the other.
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
"$python" -m pytest -q -m "serial and not soak and not gpu" "$@"
serial=$?

if [ "$parallel" = 5 ] && [ "$serial" = 5 ]; then echo "no test was selected" >&2; exit 5; fi
[ "$parallel" = 5 ] && parallel=0
[ "$serial" = 5 ] && serial=0
[ "$parallel" = 0 ] && exit "$serial"
exit "$parallel"
