#!/usr/bin/env bash
# Makes .venv hold requirements/NAME.txt and this project (editable). Usage: tools/setup_venv.sh demo|test
#
# Needs Python >= 3.11 with venv and a package index; no root. Idempotent, and quick when nothing changed: a stamp in .venv holds the hash of
# everything that decides what is installed. PYTHON=... chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

name="${1:-test}"
venv=.venv
[ -f "requirements/$name.txt" ] || { echo "setup: there is no requirements/$name.txt (demo or test)" >&2; exit 2; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" && { echo "$PYTHON"; return; }
        echo "setup: PYTHON=$PYTHON is not a Python >= 3.11 ($("$PYTHON" --version 2>&1 | head -1 || true))" >&2
        exit 2
    fi
    for candidate in python3.11 python3 python3.12 python3.13; do
        new_enough "$candidate" && { echo "$candidate"; return; }
    done
    echo "setup: no Python >= 3.11 found on PATH; install one (3.11 is what is tested) or say PYTHON=/path/to/python3.11" >&2
    exit 2
}

# The test set contains the demo set, so an up-to-date test stamp serves both.
wanted() { cat requirements/*.txt pyproject.toml | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d' ' -f1; }
stamp="$(wanted)"
for have in "$name" test; do
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.installed-$have" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
done

if ! new_enough "$venv/bin/python"; then
    python="$(find_python)" || exit $?
    echo "setup: making $venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$venv" || { echo "setup: '$python -m venv' failed (on Debian and Ubuntu: install python3-venv)" >&2; exit 2; }
fi

echo "setup: installing requirements/$name.txt into $venv (once; the first time this takes some minutes)"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq "$@"; }
pip install -r "requirements/$name.txt" || { echo "setup: pip could not install requirements/$name.txt (see its message above)" >&2; exit 1; }
pip install --no-deps --no-build-isolation -e . || { echo "setup: pip could not install the project itself (see its message above)" >&2; exit 1; }
echo "$stamp" > "$venv/.installed-$name"
