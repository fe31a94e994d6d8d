#!/usr/bin/env bash
# Runs the tests beside other releases of sglang, each in an environment of its own in .cache/versions.
#   bash scripts/versions.sh [RELEASE...] [-- pytest arguments]
#   WHEELS=dist bash scripts/versions.sh [RELEASE...]    # the wheels of scripts/release.py, in environments of their own
# Without a release: those that the self-check knows. Without arguments: the self-check, launches, attention, the tree, storage and equality.
# An environment holds the release and what it pins of transformers and its kind (about 400 MB); everything else, torch
# first of all, comes from .venv (scripts/setup.sh --with-tests), or from the environment of the interpreter in PYTHON.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON-$root/.venv/bin/python}
"$python" -c 'import sglang, pytest' 2>/dev/null || {
  echo "versions.sh: $python has no sglang or no pytest: run scripts/setup.sh --with-tests, or name another with PYTHON" >&2
  exit 1
}

# Modules that are nightly only for their length belong to a release's tests.
selected='not gpu and (not nightly or nightly_module)'
releases=()
while (($#)) && [[ $1 != -- ]]; do releases+=("$1"); shift; done
(($# == 0)) || shift
tests=("$@")
((${#tests[@]})) || tests=(test/plugin test/attention test/tree test/storage test/equality)
((${#releases[@]})) || releases=(0.5.21 0.5.22 0.5.23)

install() {  # whatever else it is given is installed there too
  local release=$1 folder=$2 packages
  shift 2
  rm -rf "$folder"
  "$python" -m venv --without-pip "$folder"
  packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Its own packages are found first, the others behind them, this package's editable install included. By a link, so
  # that all of them lie below the environment's prefix.
  ln -s "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$folder/shared"
  echo "import site; site.addsitedir('$folder/shared')" >"$packages/shared.pth"
  pip_install() { "$python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$packages" "$@"; }
  pip_install "sglang==$release"
  # shellcheck disable=SC2046  # one word per package
  pip_install $(grep -hE '^Requires-Dist: (transformers|tokenizers|compressed-tensors|xgrammar|openai)==' \
    "$packages/sglang-$release.dist-info/METADATA" | cut -d' ' -f2 | tr -d '\r') "$@"
  touch "$folder/complete"
}

commands() {
  local folder=$1 name
  for name in sgl-importance sglang; do
    sed "1s|.*|#!$folder/bin/python|" "$(dirname "$python")/$name" >"$folder/bin/$name"
    chmod +x "$folder/bin/$name"
  done
}

# Where only wheels are installed, away from the checkout: doctor, and a served answer.
check_wheels() {
  local folder=$root/.cache/versions/$1-wheels work
  work=$(mktemp -d)
  install "$1" "$folder" "$WHEELS"/sgl_importance-*.whl "$WHEELS"/sgl_importance_lab-*.whl && commands "$folder" &&
    cp "$root/scripts/check_served.py" "$work" && cd "$work" && "$folder/bin/python" -P -W ignore check_served.py
}

failed=()
for release in "${releases[@]}"; do
  if [[ -n ${WHEELS-} ]]; then
    echo "==> sglang $release: wheels of $WHEELS"
    (check_wheels "$release") || failed+=("$release")
    continue
  fi
  folder=$root/.cache/versions/$release
  [[ -e $folder/complete ]] || { echo "==> sglang $release: installing"; install "$release" "$folder"; }
  commands "$folder"
  "$folder/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

print(f"==> sglang {version('sglang')}, torch {version('torch')}, transformers {version('transformers')}")
PYTHON
  (cd "$root" && "$folder/bin/python" -W ignore -m pytest -q -W ignore -m "$selected" "${tests[@]}") || failed+=("$release")
done
((${#failed[@]} == 0)) || { echo "versions.sh: failed beside sglang ${failed[*]}" >&2; exit 1; }
echo "==> passed beside sglang ${releases[*]}"
