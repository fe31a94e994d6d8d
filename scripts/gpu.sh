#!/usr/bin/env bash
# Runs the kernels on a machine with a GPU: their tests, a decode step over tiered pages, then the kernel benchmark, in
# less than nine minutes. No stage keeps the next from running, and what has been measured is written at once.
#   bash scripts/gpu.sh carry FOLDER   here, with a network: wheels into FOLDER that the kernels need where there is none
#   bash scripts/gpu.sh [kernels]      there. WHEELS=FOLDER installs them into a folder of their own first,
#                                      PYTHON=... chooses the Python, OUT=... the folder for results
#   bash scripts/gpu.sh --dry-run      the same way without a GPU: proves the script, its times mean nothing
# Needs a Python with torch, triton, typer and rich; the kernel benchmark also nvcc and flashinfer-python (0.6.18, which
# sglang 0.5.21 brings); the tests pytest and hypothesis, and all but five files of them sglang==0.5.21. What cannot run
# for want of them is named at the end.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
benchmark=(--minutes 3)
[[ -z ${OUT-} ]] || { mkdir -p "$OUT"; benchmark+=(--out "$OUT/kernels.json"); }
die() {
  echo "error: $*" >&2
  exit 1
}

most_mib=60 # what may travel: the tracked files and the wheels together
if [[ ${1-} == carry ]]; then
  [[ -n ${2-} ]] || die "carry wants a folder: bash scripts/gpu.sh carry FOLDER"
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$2" flashinfer-python==0.6.18 apache-tvm-ffi==0.1.11
  bytes=$(($(git ls-files -z | du --files0-from=- -cb | tail -n 1 | cut -f 1) + $(du -sb "$2" | cut -f 1)))
  echo "tracked files and wheels: $((bytes / 2 ** 20)) MiB"
  ((bytes <= most_mib * 2 ** 20)) || die "more than $most_mib MiB"
  exit
fi
dry=
[[ ${1-} == kernels ]] && shift
if [[ ${1-} == --dry-run ]]; then
  dry=1
  [[ -n ${OUT-} ]] || benchmark+=(--out "${TMPDIR:-/tmp}/sgl_importance_dry_run.json")
  benchmark+=(--dry-run)
fi

has() { "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" "$@"; }

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
if [[ -n ${WHEELS-} ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$packages" "$WHEELS"/*.whl
fi
export PYTHONPATH="$packages:$PWD:$PWD/python:$PWD/benchmark/lab${PYTHONPATH:+:$PYTHONPATH}"

has torch triton typer rich || die "$python lacks one of torch, triton, typer, rich: pip install them"
if [[ -z $dry ]]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "torch of $python sees no CUDA device"
fi

# The folder kernels/ is imported under the package's name.
ln -s "$PWD/kernels" "$packages/sgl_importance_kernels"

failed=()
stage() { # seconds, name, command
  local seconds=$1 name=$2
  shift 2
  echo "==> [${SECONDS} s] $name"
  timeout "$seconds" "$@" || failed+=("$name")
}
left_out() { echo "==> left out: $1"; failed+=("$1"); }

no_sglang=(test/kernels/test_step_kernels.py test/kernels/test_tiered_kernels.py test/kernels/test_qk_probe.py test/kernels/test_logit_reduction.py)
if ! has pytest hypothesis; then
  left_out "GPU tests, which need pytest and hypothesis"
elif [[ -n $dry ]]; then
  # One of each kernel of a step, in Triton's interpreter.
  TRITON_INTERPRET=1 stage 270 "tests in the interpreter" "$python" -m pytest -q -p no:cacheprovider -m "not gpu" \
    test/kernels/test_step_kernels.py -k "frames or equal or number"
else
  files=("${no_sglang[@]}")
  has sglang && files=(test/kernels/test_*.py)
  has sglang || left_out "the other files of test/kernels, which need sglang==0.5.21"
  # 5: none of its tests is for a GPU
  stage 150 "GPU tests" bash -c '"$@" || (($? == 5))' _ "$python" -m pytest -q -p no:cacheprovider -m gpu "${files[@]}"
fi
steps=()
[[ -z ${OUT-} ]] || steps+=(--out "$OUT/pages_step.json")
[[ -z $dry ]] || steps+=(--dry-run)
stage 100 "a decode step over tiered pages" "$python" -W ignore benchmark/sparse/step.py ${steps[@]+"${steps[@]}"}
if [[ -n $dry ]] || { has flashinfer && command -v nvcc >/dev/null; }; then
  stage 240 "build, check and time the kernels" "$python" -W ignore benchmark/kernels/run.py "${benchmark[@]}"
else
  left_out "benchmark/kernels/run.py, which needs nvcc and flashinfer-python"
fi
((${#failed[@]} == 0)) || die "$(printf '%s; ' "${failed[@]}")see above"
echo "==> [${SECONDS} s] all passed"
