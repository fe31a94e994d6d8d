#!/usr/bin/env bash
# A demonstration: a trained model, coding agents that share its cache, the live page, and one line at the end.
#   bash scripts/demo.sh [--keep] [--pictures FOLDER] [--port PORT] [flags of scripts/serve.sh]
# Everything that it starts ends with it. --keep goes on serving behind the load, until Ctrl-C.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -n ${SERVE_DRY_RUN-} ]] || bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -W ignore "$root/scripts/demo/run.py" "$@"
