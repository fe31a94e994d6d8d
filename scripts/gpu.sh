#!/usr/bin/env bash
# On a machine with a GPU: builds, checks and times the kernels, then runs the GPU tests. At most 30 minutes.
# Needs nvcc and a Python with torch, triton, flashinfer-python==0.6.18, typer and rich; the tests also pytest,
# hypothesis and sglang, without which they are left out. The package need not be installed.
#   bash scripts/gpu.sh             PYTHON=... chooses the Python
#   bash scripts/gpu.sh --dry-run   the same way without a GPU: proves the script, its times mean nothing
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
dry=()
[[ ${1-} == --dry-run ]] && dry=(--dry-run --out "${TMPDIR:-/tmp}/sgl_importance_dry_run.json")

die() {
  echo "error: $*" >&2
  exit 1
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" "$@"; }

has torch triton typer rich || die "$python lacks one of torch, triton, typer, rich: pip install them"
if ((${#dry[@]} == 0)); then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "torch of $python sees no CUDA device"
  has flashinfer || die "flashinfer is missing: pip install flashinfer-python==0.6.18"
  command -v nvcc >/dev/null || die "nvcc is missing: install the CUDA toolkit, or put its bin folder on PATH"
fi

# The folder kernels/ is imported under the package's name.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
ln -s "$PWD/kernels" "$packages/sgl_importance_kernels"
export PYTHONPATH="$packages:$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

failed=()
echo "==> [${SECONDS} s] build, check and time the kernels"
timeout 720 "$python" -W ignore benchmark/kernels/run.py "${dry[@]}" || failed+=("benchmark/kernels/run.py")
if ((${#dry[@]})); then
  echo "==> GPU tests: not in a dry run"
elif has pytest hypothesis sglang; then
  echo "==> [${SECONDS} s] GPU tests"
  timeout 900 "$python" -m pytest -m gpu test/kernels || failed+=("pytest -m gpu test/kernels")
else
  echo "==> GPU tests left out: they need pytest, hypothesis and sglang==0.5.21"
  failed+=("GPU tests, which did not run")
fi
((${#failed[@]} == 0)) || die "$(printf '%s; ' "${failed[@]}")see above"
echo "==> [${SECONDS} s] all passed"
