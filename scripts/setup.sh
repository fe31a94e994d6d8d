#!/usr/bin/env bash
# Makes .venv and installs sglang, this package and its laboratory into it; does nothing when that is done already.
#   bash scripts/setup.sh [--with-tests] [--with-browser]
# --with-browser adds Playwright and, where there is none, a Chromium: for the tests and pictures of the live page.
# PYTHON names the interpreter for a new .venv (3.11 or newer). TARGET=cpu or TARGET=cuda overrides what
# nvidia-smi says.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
laboratory=$root/benchmark/lab
pins=$root/scripts/pins-cpu.txt
kernel_pins=$root/scripts/pins-kernels.txt
cpu_index=https://download.pytorch.org/whl/cpu

extras=runtime
browser=
for argument; do
  case $argument in
    --with-tests) extras=test ;;
    --with-browser) extras=test browser=wanted ;;
    *) echo "setup.sh: unknown argument '$argument': give --with-tests, --with-browser or none" >&2; exit 2 ;;
  esac
done

# ---- is it done already? ----

target() {
  if [[ -n ${TARGET-} ]]; then echo "$TARGET"
  elif nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda
  else echo cpu
  fi
}
target=$(target)
[[ $target == cpu || $target == cuda ]] || { echo "setup.sh: TARGET must be cpu or cuda, not '$target'" >&2; exit 2; }

# An editable install and the scripts in .venv name their folder: a moved checkout is set up again.
wanted=$( { echo "$target $root"; cat "$pins" "$kernel_pins" "$root/pyproject.toml" "$laboratory/pyproject.toml" "${BASH_SOURCE[0]}"; } | sha256sum | cut -d' ' -f1)
stamp() { echo "$venv/.sgl-importance-$1"; }
is_done() { [[ -x $venv/bin/python && $(cat "$(stamp "$1")" 2>/dev/null) == "$wanted" ]]; }


install_browser() {
  local found
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet 'playwright>=1.49'
  for found in "${CHROMIUM-}" chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v "$found" >/dev/null && { echo "==> Chromium: $found"; return; }
  done
  "$venv/bin/python" -m playwright install --only-shell chromium && return
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    apt-get install --yes --no-install-recommends chromium-headless-shell && return
  fi
  echo "setup.sh: no Chromium could be installed: install your system's, or name one in CHROMIUM" >&2
  return 1
}
finish() {
  [[ -z $browser ]] || install_browser
  exit
}

is_done "$extras" && finish

mkdir -p "$root/.cache"
exec 9>"$root/.cache/setup.lock"
if ! flock -n 9; then
  echo "==> Another set-up of this checkout is running: waiting for it"
  flock 9
  is_done "$extras" && finish
fi

# ---- .venv ----

step() { echo "==> [${SECONDS} s] $*"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup.sh: no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python3" >&2
  return 1
}

making=$root/.cache/setup.making
is_of_this_script() { [[ -e $making ]] || compgen -G "$venv/.sgl-importance-*" >/dev/null; }
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  if [[ -n $(ls -A "$venv" 2>/dev/null) ]] && ! is_of_this_script; then
    echo "setup.sh: .venv has no pip and was not made by this script: remove it, or run .venv/bin/python -m ensurepip" >&2
    exit 1
  fi
  python=$(find_python)
  touch "$making"
  step "Making .venv with $("$python" --version)"
  if ! "$python" -m venv --clear "$venv"; then
    echo "setup.sh: $python cannot make a virtual environment: install its venv package (python3-venv)" >&2
    exit 1
  fi
  rm "$making"
fi
rm -f "$(stamp runtime)" "$(stamp test)"

pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-cache-dir "$@" |
    { grep --line-buffered -v '^Requirement already satisfied' || true; }
}
pin() { grep "^$1==" "$pins"; }

# ---- packages ----

install_cpu_torch() {
  local torch
  torch=$(pin torch)
  # On PyPI this version is a CUDA build of several GB, so it is never let in by itself. A CPU build is "+cpu": from
  # where pip is configured to look, else from PyTorch's index. One of the same version that is there already stays.
  "$venv/bin/python" -m pip show torch 2>/dev/null | grep -E "^Version: ${torch#torch==}(\+|$)" >/dev/null && return
  step "Installing $torch for CPU (about 200 MB)"
  pip_install "$torch+cpu" 2>/dev/null && return
  pip_install --extra-index-url "$cpu_index" "$torch+cpu" && return
  echo "setup.sh: no CPU build of $torch for $("$venv/bin/python" --version) where pip looks, nor at $cpu_index: name an" \
    "index or a folder that has one in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, or another interpreter in PYTHON after" \
    "rm -r .venv. The build on PyPI is for CUDA and takes several GB; it serves too: .venv/bin/python -m pip install $torch" >&2
  return 1
}

check_cuda() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
  if [[ $driver =~ ^([0-9]+)\. ]] && ((BASH_REMATCH[1] < 580)); then
    echo "setup.sh: $(pin sglang) needs CUDA 13, and with it a driver from 580 on, not $driver: update the driver" >&2
    return 1
  fi
  # It builds norms and copies when it starts.
  if ! command -v nvcc >/dev/null && [[ ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
    echo "setup.sh: $(pin sglang) needs nvcc to start: install the CUDA toolkit 13, or name its folder in CUDA_HOME" >&2
    return 1
  fi
}

step "Setting up for $target"
if [[ $target == cuda ]]; then
  check_cuda || exit 1
  # Not run yet on a machine with a GPU.
  step "Installing $(pin sglang) with its own dependencies (about 7 GB)"
  if ! pip_install "$(pin sglang)"; then
    echo "setup.sh: $(pin sglang) could not be installed. Where cuda-tile is what failed: on PyPI that is a stub which" \
      "fetches itself from NVIDIA's package index; behind a mirror, name one that has it in PIP_EXTRA_INDEX_URL" >&2
    exit 1
  fi
  options=()
else
  install_cpu_torch
  step "Installing what sglang imports (about 400 MB)"
  pip_install --requirement <(grep -v '^sglang==' "$pins")
  step "Installing $(pin sglang)"
  pip_install --no-deps "$(pin sglang)"
  # pip would end with an ERROR that lists what sglang asks for on GPUs.
  options=(--no-warn-conflicts --constraint "$pins")
fi

step "Installing sgl-importance and its laboratory"
package=$root
[[ $extras == test ]] && package+='[test]'
pip_install "${options[@]}" --editable "$package" --editable "$laboratory"

if [[ $extras == test && $target == cpu ]] && command -v nvcc >/dev/null; then
  step "Fetching FlashInfer's headers, for the tests that compile against them (18 MB)"
  pip_install --no-deps --upgrade --target "$venv/flashinfer" --requirement "$kernel_pins" ||
    echo "setup.sh: not fetched: those tests will be skipped" >&2
fi

step "Checking that sglang can be imported"
# With the others numba compiles what the first server would wait for.
modules="sglang, sglang_importance.cpu, sgl_importance_lab, sgl_importance.reuse.hazards, sgl_importance_kernels.compiled"
modules+=", sgl_importance_kernels.sparse.decode_attention, sgl_importance_kernels.sparse.layer_pages"
modules+=", sgl_importance_kernels.pool_attention"
(cd / && "$venv/bin/python" -W ignore -c "import $modules")

for finished in runtime "$extras"; do echo "$wanted" >"$(stamp "$finished")"; done
step "Done: $(du -sh "$venv" | cut -f1) in .venv"
finish
