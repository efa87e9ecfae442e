#!/usr/bin/env bash
# Runs a command where a Docker engine can be reached: the one that is there, or a private one that
# is started for it. Says so, and ends well, where neither can be had.
set -euo pipefail
engine=${ENGINE:-../shared/tools/docker-engine}

if ! docker compose version >/dev/null 2>&1 || ! docker info >/dev/null 2>&1; then
    if [ ! -x "$engine" ]; then
        echo "skipped: no Docker engine answers, and there is no $engine that could start one"
        exit 0
    fi
    "$engine" || { echo "skipped: $engine could not start an engine, see above"; exit 0; }
    . "${H:-${TMPDIR:-/tmp}/docker-engine}/env.sh"
    trap '"$engine" down' EXIT
fi
HALFMOON_TEST_COMPOSE=1 "$@"
