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


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_nothing_about_the_process_changes_the_key(tmp_path: Path, seed: str) -> None:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(Path(__file__).parent),
        "HOME": str(tmp_path),
        "USER": f"user{seed}",
        "HOSTNAME": f"host{seed}",
        "TZ": "Asia/Kolkata",
        "LC_ALL": "C",
        "RANK": seed,
        "LOCAL_RANK": seed,
        "NEURON_RT_VISIBLE_CORES": seed,
    }
    command = [sys.executable, "-c", "import entries; print(entries.KEY)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KEY


@pytest.mark.parametrize("text", ["", KEY[:-1], KEY + "0", KEY.upper(), "../" + KEY, KEY[:-1] + "/", KEY + "\n"])
def test_what_is_not_a_key(text: str) -> None:
    assert is_key(KEY)
    assert not is_key(text)
