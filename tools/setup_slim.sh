#!/usr/bin/env bash
# Makes .venv-slim/: what production needs to serve from a cache. No torch-mlir, no IREE compiler, no JAX, no build tools.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-slim
wanted="$PWD $(cat requirements/*.txt pyproject.toml tools/setup_slim.sh $(git ls-files vllm_neuron) | cksum)"
if [[ -f $venv/.setup && "$(cat "$venv/.setup")" == "$wanted" ]]; then
    exit 0
fi

step() { printf '[slim setup %4ds] %s\n' "$SECONDS" "$*"; }
install() { "$venv/bin/python" -m pip install -qq --constraint requirements/constraints.txt "$@"; }

step "virtual environment in $venv/"
.venv/bin/python -m venv --clear "$venv"
step "torch and build tools (about half a minute)"
install -r requirements/build.txt
step "vLLM from source, and what it needs (about a minute)"
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.32.0 install --no-build-isolation -r requirements/vllm.txt
step "this package, without its compiler"
install --no-build-isolation .
"$venv/bin/python" -m pip uninstall -qq --yes setuptools-rust setuptools-scm semantic-version wheel
"$venv/bin/python" -m pip list --format freeze | grep -iE '^(torch-mlir|iree-base-compiler|jax|jaxlib)==' && exit 1
echo "$wanted" >"$venv/.setup"
step "done: $(du -sh "$venv" | cut -f1), and .venv/ has $(du -sh .venv/ | cut -f1)"
