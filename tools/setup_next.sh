#!/usr/bin/env bash
# Makes .venv-next/: the release of vLLM after the one that is pinned, to lie over .venv/ by way of PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.33.0
folder=.venv-next
[[ -f $folder/.setup && "$(cat "$folder/.setup")" == "$version" ]] && exit 0

rm -rf "$folder"
printf '[next setup] vLLM %s from source (about half a minute)\n' "$version"
install() { .venv/bin/python -m pip install -qq --no-deps --target "$folder" "$@"; }
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version install --no-build-isolation --no-binary vllm "vllm==$version"
install orjson
echo "$version" >"$folder/.setup"
