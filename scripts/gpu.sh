#!/usr/bin/env bash
# On a machine with a GPU: builds, checks and times the kernels, then runs the GPU tests, file by file. No stage takes more
# than 270 s, none keeps the next from running, and what has been measured is written at once.
# Needs a Python with torch, triton, typer and rich; the kernels also nvcc and flashinfer-python (0.6.18, which
# sglang 0.5.21 brings; the variant compiles with 0.7.1 and 0.7.2, those of 0.5.22 and 0.5.23, too); the tests pytest and hypothesis, and all but three files of them sglang==0.5.21. What cannot run for want of them is named at the end.
#   bash scripts/gpu.sh             PYTHON=... chooses the Python, OUT=... the folder for results instead of benchmark/results
#   bash scripts/gpu.sh --dry-run   the same way without a GPU: proves the script, its times mean nothing
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
stage_seconds=270
benchmark=(--minutes 3.5)
[[ -z ${OUT-} ]] || { mkdir -p "$OUT"; benchmark+=(--out "$OUT/kernels.json"); }
dry=
if [[ ${1-} == --dry-run ]]; then
  dry=1
  [[ -n ${OUT-} ]] || benchmark+=(--out "${TMPDIR:-/tmp}/sgl_importance_dry_run.json")
  benchmark+=(--dry-run)
fi

die() {
  echo "error: $*" >&2
  exit 1
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" "$@"; }

has torch triton typer rich || die "$python lacks one of torch, triton, typer, rich: pip install them"
if [[ -z $dry ]]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "torch of $python sees no CUDA device"
fi

# The folder kernels/ is imported under the package's name.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
ln -s "$PWD/kernels" "$packages/sgl_importance_kernels"
export PYTHONPATH="$packages:$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

failed=()
stage() {
  local name=$1
  shift
  echo "==> [${SECONDS} s] $name"
  timeout "$stage_seconds" "$@" || failed+=("$name")
}
left_out() { echo "==> left out: $1"; failed+=("$1"); }

if [[ -n $dry ]] || { has flashinfer && command -v nvcc >/dev/null; }; then
  stage "build, check and time the kernels" "$python" -W ignore benchmark/kernels/run.py "${benchmark[@]}"
else
  left_out "benchmark/kernels/run.py, which needs nvcc and flashinfer-python"
fi
steps=()
[[ -z ${OUT-} ]] || steps+=(--out "$OUT/pages_step.json")
[[ -z $dry ]] || steps=(--dry-run)
stage "a decode step over tiered pages" "$python" -W ignore benchmark/sparse/step.py ${steps[@]+"${steps[@]}"}
if [[ -n $dry ]]; then
  echo "==> GPU tests: not in a dry run"
elif ! has pytest hypothesis; then
  left_out "GPU tests, which need pytest and hypothesis"
else
  files=(test/kernels/test_qk_probe.py test/kernels/test_logit_reduction.py test/kernels/test_tiered_kernels.py)
  has sglang && files=(test/kernels/test_*.py)
  has sglang || left_out "the other files of test/kernels, which need sglang==0.5.21"
  for file in "${files[@]}"; do
    # 5: none of its tests is for a GPU
    stage "$file" bash -c '"$@" || (($? == 5))' _ "$python" -m pytest -q -m gpu "$file"
  done
fi
((${#failed[@]} == 0)) || die "$(printf '%s; ' "${failed[@]}")see above"
echo "==> [${SECONDS} s] all passed"
