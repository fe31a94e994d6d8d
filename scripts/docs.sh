#!/usr/bin/env bash
# Builds the documentation into build/site; a warning is an error.
#   bash scripts/docs.sh [--serve] [arguments of mkdocs]
# --serve shows it on http://127.0.0.1:8000 and follows changes. PYTHON names the interpreter for the environment of its
# own, .cache/docs: the generator needs neither sglang nor torch, and must not move their versions. Numbers and references are
# made from benchmark/results and the code, by .venv.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.cache/docs
pins=$root/scripts/pins-docs.txt

command=(build --strict --site-dir "$root/build/site")
if [[ ${1-} == --serve ]]; then
  command=(serve --strict --dev-addr 127.0.0.1:8000)
  shift
fi

wanted=$(sha256sum <"$pins")
if [[ $(cat "$venv/.pins" 2>/dev/null) != "$wanted" ]]; then
  "${PYTHON-python3}" -m venv --clear "$venv" ||
    { echo "docs.sh: ${PYTHON-python3} cannot make a virtual environment: install its venv package (python3-venv)" >&2; exit 1; }
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --requirement "$pins"
  echo "$wanted" >"$venv/.pins"
fi

cd "$root"
[[ -x .venv/bin/python ]] ||
  { echo "docs.sh: references are made from the code, and there is no .venv: run bash scripts/setup.sh first" >&2; exit 1; }
.venv/bin/python -W ignore scripts/render_docs.py
exec "$venv/bin/python" -m mkdocs "${command[@]}" "$@"
