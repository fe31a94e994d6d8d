#!/usr/bin/env bash
# What is too long for every run: the nightly tests, an hour of endurance, the core under other interpreters,
# and lines that are broken one at a time.
# Writes benchmark/results/nightly/DATE.json.
#   bash scripts/nightly.sh [--minutes N] [--only tests,endurance,pythons,mutations]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --with-tests
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
exec .venv/bin/python scripts/nightly.py "$@"
