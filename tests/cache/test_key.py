"""What changes a key, what does not, and that the part that changed is the one that is named."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from entries import ABI, FLAGS, KEY, MODULE, PARTS

from vllm_neuron.abi import TensorSpec
from vllm_neuron.cache.key import ArtifactKey, artifact_key, is_key

PYTHONPATH = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]

BASE = {
    "module": MODULE,
    "compiler": "iree",
    "compiler_version": "3.13.0",
    "flags": FLAGS,
    "target": "cpu:x86-64-v3",
    "level": 2,
}

INPUTS = ABI.inputs
CHANGES = [
    ("module", {"module": replace(MODULE, data=MODULE.data.replace(b"graph", b"other"))}),
    ("module_format", {"module": replace(MODULE, format="hlo")}),
    ("abi", {"module": replace(MODULE, abi=replace(ABI, aliases=()))}),
    ("abi", {"module": replace(MODULE, abi=replace(ABI, inputs=INPUTS[::-1]))}),
    ("abi", {"module": replace(MODULE, abi=replace(ABI, inputs=(INPUTS[0], TensorSpec("bfloat16", (8, 64)))))}),
    ("abi", {"module": replace(MODULE, abi=replace(ABI, inputs=(INPUTS[0], TensorSpec("float16", (64, 8)))))}),
    ("compiler", {"compiler": "neuronx-cc"}),
    ("compiler_version", {"compiler_version": "3.13.1"}),
    ("flags", {"flags": FLAGS[:1]}),
    ("flags", {"flags": FLAGS[::-1]}),
    ("flags", {"flags": (" ".join(FLAGS),)}),
    ("target", {"target": "cpu:x86-64-v4"}),
    ("level", {"level": 1}),
]


@pytest.mark.parametrize(("part", "change"), CHANGES, ids=[f"{part}-{n}" for n, (part, _) in enumerate(CHANGES)])
def test_each_part_changes_the_key_and_is_the_only_one_that_differs(part: str, change: dict[str, object]) -> None:
    changed = artifact_key(**{**BASE, **change})  # type: ignore[arg-type]
    assert changed.digest != KEY
    assert {name for name in PARTS.parts if PARTS.parts[name] != changed.parts[name]} == {part}


def test_key_is_the_documented_digest() -> None:
    parts = {
        "module": hashlib.sha256(MODULE.data).hexdigest(),
        "module_format": "stablehlo",
        "abi": hashlib.sha256(
            b'{"aliases":[1],"inputs":[["int64",[1,128]],["bfloat16",[64,8]]],'
            b'"outputs":[["bfloat16",[64,8]],["float32",[1,100]]]}'
        ).hexdigest(),
        "compiler": "iree",
        "compiler_version": "3.13.0",
        "flags": '["--iree-hal-target-device=local","--iree-llvmcpu-target-cpu=x86-64-v3"]',
        "target": "cpu:x86-64-v3",
        "level": "O2",
        "format": "1",
    }
    text = ",".join(f'"{name}":"{hashlib.sha256(parts[name].encode()).hexdigest()}"' for name in sorted(parts))
    assert hashlib.sha256(f"{{{text}}}".encode()).hexdigest()[:32] == KEY
    assert PARTS.parts == parts


def test_order_of_the_parts_does_not_matter() -> None:
    assert ArtifactKey.from_parts(dict(reversed(PARTS.parts.items()))).digest == KEY


def test_keys_are_equal_by_digest() -> None:
    assert len({PARTS, ArtifactKey.from_parts(PARTS.parts)}) == 1
    assert str(PARTS) == KEY


def test_equal_values_under_other_names_are_another_key() -> None:
    swapped = {**PARTS.parts, "target": PARTS.parts["level"], "level": PARTS.parts["target"]}
    assert ArtifactKey.from_parts(swapped).digest != KEY


PROPERTIES: dict[str, dict[str, str]] = {
    "home": {"HOME": "/nonexistent/home", "XDG_CACHE_HOME": "/nonexistent/cache"},
    "user": {"USER": "someone", "LOGNAME": "someone"},
    "host": {"HOSTNAME": "elsewhere"},
    "time zone": {"TZ": "Asia/Kolkata"},
    "locale": {"LC_ALL": "C", "LANG": "tr_TR.UTF-8"},
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "hash seed 4711": {"PYTHONHASHSEED": "4711"},
    "rank": {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "12345"},
    "placement": {"NEURON_RT_VISIBLE_CORES": "4-7", "CUDA_VISIBLE_DEVICES": "1", "NEURON_RT_ROOT_COMM_ID": "h:1"},
    "threads": {"OMP_NUM_THREADS": "7"},
    "cache folders": {"VLLM_CACHE_ROOT": "/nonexistent/a", "NEURON_LIBTORCH_REMOTE_CACHE": "/nonexistent/b"},
    "signing": {"VLLM_NEURON_CACHE_SIGNING_KEY": "/nonexistent/key.pem"},
    "workers": {"NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "3", "VLLM_NEURON_LOG_LEVEL": "DEBUG"},
}
IMPORTS = {"import order": "import vllm_neuron.targets, vllm_neuron.cache.tiers, json; ", "no imports before": ""}


def key_in_a_process(folder: Path, variables: dict[str, str], before: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *PYTHONPATH]), **variables}
    command = [sys.executable, "-c", f"{before}import entries; print(entries.KEY)"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("variables", PROPERTIES.values(), ids=PROPERTIES)
def test_the_environment_does_not_change_the_key(tmp_path: Path, variables: dict[str, str]) -> None:
    assert key_in_a_process(tmp_path, variables) == KEY


@pytest.mark.parametrize("before", IMPORTS.values(), ids=IMPORTS)
def test_import_order_does_not_change_the_key(tmp_path: Path, before: str) -> None:
    assert key_in_a_process(tmp_path, {}, before) == KEY


@pytest.mark.parametrize("text", ["", KEY[:-1], KEY + "0", KEY.upper(), "../" + KEY, KEY[:-1] + "/", KEY + "\n"])
def test_what_is_not_a_key(text: str) -> None:
    assert is_key(KEY)
    assert not is_key(text)
