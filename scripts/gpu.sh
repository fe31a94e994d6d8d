#!/usr/bin/env bash
# What a machine with a GPU is to show, as two commands of less than nine minutes each. Neither needs a network, no stage
# keeps the next from running, tests come first, and what has been measured is written at once.
#   bash scripts/gpu.sh [kernels]      tests of the kernels, a decode step over tiered pages, the kernel benchmark
#   bash scripts/gpu.sh serve          served models: a tiny one's answers, and steps in an 8B shape, stock and tiered
#   bash scripts/gpu.sh carry {kernels,serve} FOLDER   elsewhere, with a network: the wheels that a command needs
# --dry-run behind a command takes the same way without a GPU: it proves the script, its times mean nothing.
# WHEELS=FOLDER installs the wheels into a folder of their own first, PYTHON=... chooses the Python (3.12 for wheels that
# were carried), OUT=... the folder for results.
# Needs a Python with torch, triton, typer, rich, pytest and hypothesis, and nvcc; `kernels` also flashinfer-python (0.6.18,
# which sglang 0.5.21 brings), `serve` sglang==0.5.21. What cannot run for want of them is named at the end.
set -euo pipefail

for folder in WHEELS OUT; do [[ -z ${!folder-} ]] || declare "$folder=$(realpath -m "${!folder}")"; done
[[ ${PYTHON-} != */* ]] || PYTHON=$(realpath -s "$PYTHON")
[[ ${1-} != carry || $# -ne 3 ]] || set -- carry "$2" "$(realpath -m "$3")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
die() {
  echo "error: $*" >&2
  exit 1
}

command=kernels
case ${1-} in
  carry) shift && exec "$python" scripts/gpu/carry.py "$@" ;;
  kernels | serve) command=$1 && shift ;;
esac
dry=
[[ ${1-} != --dry-run ]] || { dry=--dry-run && shift; }
(($# == 0)) || die "unknown argument '$1': give kernels, serve or carry, and --dry-run behind the first two"

has() { "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" "$@"; }

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
out=${OUT:-$([[ -n $dry ]] && echo "$packages" || echo benchmark/results)}
mkdir -p "$out"
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

# What is built on this machine is linked with -lcudart and -lcuda: one folder with both, wherever they lie.
if [[ -z $dry ]] && nvcc=$(command -v nvcc); then
  export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
  mkdir "$packages/lib"
  for name in cudart cuda; do
    library=$({ find -L "$CUDA_HOME" -name "lib$name.so*"; ldconfig -p | awk "/lib$name\.so/ {print \$NF}"; } 2>/dev/null | sed -n 1p)
    [[ -z $library ]] || ln -s "$library" "$packages/lib/lib$name.so"
  done
  export LIBRARY_PATH=$packages/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
  FLASHINFER_CUDA_ARCH_LIST=${FLASHINFER_CUDA_ARCH_LIST:-$("$python" -c 'import torch
major, minor = torch.cuda.get_device_capability()
print(f"{major}.{minor}" + "a" * (major >= 9))')}
  export FLASHINFER_CUDA_ARCH_LIST
fi

failed=()
stage() { # seconds, name, command
  local seconds=$1 name=$2
  shift 2
  [[ -z $dry ]] || seconds=$((20 * seconds)) # in the interpreter, on few cores
  echo "==> [${SECONDS} s] $name"
  timeout "$seconds" "$@" || failed+=("$name")
}
left_out() { echo "==> left out: $1"; failed+=("$1"); }
# Without 5: none of a file's tests is for a GPU.
tests() { stage 120 "$1" bash -c '"$@" || (($? == 5))' _ "$python" -m pytest -q -p no:cacheprovider "${@:2}"; }

kernels() {
  if ! has pytest hypothesis; then
    left_out "GPU tests, which need pytest and hypothesis"
  elif [[ -n $dry ]]; then
    # One of each kernel of a step.
    TRITON_INTERPRET=1 tests "tests in the interpreter" -m "not gpu" test/kernels/test_step_kernels.py -k "frames or equal or number"
  else
    tests "GPU tests" -m gpu test/kernels/test_{step_kernels,tiered_kernels,qk_probe,logit_reduction}.py
  fi
  stage 100 "a decode step over tiered pages" "$python" -W ignore benchmark/sparse/step.py --out "$out/pages_step.json" $dry
  if [[ -n $dry ]] || { has flashinfer && command -v nvcc >/dev/null; }; then
    stage 240 "build, check and time the kernels" "$python" -W ignore benchmark/kernels/run.py --minutes 3 --out "$out/kernels.json" $dry
  else
    left_out "benchmark/kernels/run.py, which needs nvcc and flashinfer-python"
  fi
}

serve() {
  has sgl_kernel || export PYTHONPATH="$PYTHONPATH:$PWD/scripts/gpu/stand_ins" SGLANG_IS_FLASHINFER_AVAILABLE=false \
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
  unset PYTHONDONTWRITEBYTECODE # or every process of every server compiles sglang again
  has sglang || die "$python has no sglang: install sglang==0.5.21, or carry it (WHEELS)"
  has sglang_importance || die "this tree is not on the path of $python"
  "$python" scripts/gpu/announce.py "$packages"
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
  if ! has pytest hypothesis; then
    left_out "tests, which need pytest and hypothesis"
  elif [[ -n $dry ]]; then
    tests "tests beside sglang" -m "not gpu" test/kernels/test_reserved_memory.py
  else
    tests "GPU tests beside sglang" -m gpu test/kernels/test_{gpu_producers,gpu_rows,captured_step}.py
  fi
  local minutes=4 of_answers=1.8
  [[ -z $dry ]] || minutes=120 of_answers=30
  stage 115 "answers of a tiny model" "$python" -W ignore scripts/gpu/served_answers.py --out "$out/served_answers.jsonl" \
    --logs "${OUT:-$packages}" --minutes "$of_answers" $dry
  stage 255 "steps of a served model" "$python" -W ignore benchmark/kernels/served_steps.py --out "$out/served_steps.jsonl" \
    --logs "${OUT:-$packages}" --minutes "$minutes" $dry
}

"$command"
((${#failed[@]} == 0)) || die "$(printf '%s; ' "${failed[@]}")see above"
echo "==> [${SECONDS} s] all passed"
