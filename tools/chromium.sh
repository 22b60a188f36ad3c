#!/usr/bin/env bash
# Prints the path of a Chromium for the tests of the dashboard's page, installing Debian's or Ubuntu's where there is none, apt-get works and this is root.
#
# Looks at FT_CHROMIUM, then chromium, chromium-browser, google-chrome on PATH. Without one those tests are skipped, and say why. Never needed to use ft-state.
set -euo pipefail

if [ -n "${FT_CHROMIUM:-}" ]; then
    [ -x "$FT_CHROMIUM" ] && { echo "$FT_CHROMIUM"; exit 0; }
    echo "chromium: FT_CHROMIUM=$FT_CHROMIUM is no executable" >&2
    exit 2
fi
first() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
first && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || true
    first && exit 0
fi
echo "chromium: none on PATH and none could be installed (needs root and apt-get); say FT_CHROMIUM=/path/to/chromium" >&2
exit 1
