#!/usr/bin/env bash
# Sets up, then checks style and types and runs the tests. With arguments it runs pytest with them only.
# pytest's last lines say how many CPU seconds it took without servers, and what is left to scripts/nightly.sh.
#   bash scripts/test.sh [pytest arguments...]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --with-tests

# One more than cores, as who starts or ends a server waits for it; more than four would want more than 16 GB, as
# each starts servers of 2 GB.
workers=$(($(env -u OMP_NUM_THREADS nproc) + 1))
workers=$((workers > 4 ? 4 : workers))
# Tests start servers of small models: more threads cost more in waiting for each other than they save.
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
bin=$PWD/.venv/bin
# Where it is set, as in many containers, every process that a test starts would compile our sources anew.
unset PYTHONDONTWRITEBYTECODE

if (($#)); then
  exec "$bin/python" -m pytest "$@"
fi

step() { echo "==> [${SECONDS} s] $*"; }
step "ruff check"
"$bin/ruff" check .
step "ruff format"
"$bin/ruff" format --check .
step "mypy, and pytest beside it"
"$bin/mypy" & # on one core, for a minute and a half where it has no cache
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT
"$bin/python" -m pytest --durations=15 --numprocesses "$workers" --dist loadfile --no-loadscope-reorder
wait "$mypy"
step "All passed"
