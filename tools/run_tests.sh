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

# One half: all that is selected; what failed is run once more, alone and one after the other, and only what fails again counts (a machine that is busy with something
# else makes a process test late, not wrong). Both results are printed.
half() { # half WHICH PYTEST-OPTIONS...
  local which="$1" code
  shift
  "$python" -m pytest -q -m "$which and not soak and not gpu" "$@"
  code=$?
  if [ "$code" = 1 ]; then
    echo "$which: what failed is run once more, alone"
    "$python" -m pytest -q --last-failed --last-failed-no-failures none -m "$which and not soak and not gpu" "${arguments[@]}"
    code=$?
    [ "$code" = 5 ] && code=1 # no test had failed: something was left behind
  fi
  return "$code"
}

arguments=("$@")
workers="${FT_TEST_WORKERS:-2}"
serially=(-n "$workers" --dist loadfile)
[ "${FT_TEST_SERIAL:-0}" = 1 ] && serially=()

# Exit 5 is "no test selected": fine for one half, not for both.
half "not serial" -n "$workers" "$@"
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
