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

half() { # half WHICH PYTEST-OPTIONS...
  local which="$1"
  shift
  "$python" -m pytest -q -m "$which and not soak and not gpu" "$@"
}

workers="${FT_TEST_WORKERS:-2}"
serially=(-n "$workers" --dist loadfile)
[ "${FT_TEST_SERIAL:-0}" = 1 ] && serially=()

# Exit 5 is "no test selected": fine for one half, not for both.
half "not serial" -n "$workers" --dist worksteal "$@"
parallel=$?
half "serial and not alone" "${serially[@]}" "$@"
serial=$?
half "alone" "$@"
alone=$?

if [ "$parallel$serial$alone" = 555 ]; then echo "no test was selected" >&2; exit 5; fi
for code in "$parallel" "$serial" "$alone"; do
  [ "$code" = 0 ] || [ "$code" = 5 ] || exit "$code"
done
exit 0
