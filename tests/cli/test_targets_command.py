"""``vllm-neuron targets``: complete, and readable in a terminal of 80 columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.neuronx_cc_double import VERSION, install
from vllm_neuron.targets import resolve_target, target_names

VLLM_NEURON = str(Path(sys.executable).with_name("vllm-neuron"))
GiB = 1 << 30


def run(path: Path, *options: str, **variables: str) -> str:
    environment = {**os.environ, "PATH": str(path), "COLUMNS": "80", **variables}
    done = subprocess.run([VLLM_NEURON, "targets", *options], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    return install(tmp_path / "bin").parent


def test_every_name_is_there_in_80_columns(bin_folder: Path, tmp_path: Path) -> None:
    for path in (bin_folder, tmp_path):
        text = run(path)
        assert max(map(len, text.splitlines())) <= 80
        first_words = [line.split()[0] for line in text.splitlines() if line.strip()]
        assert set(target_names()) <= set(first_words)


def test_facts_of_the_table(bin_folder: Path, tmp_path: Path) -> None:
    lines = {line.split()[0]: line.split() for line in reversed(run(bin_folder).splitlines()) if line.strip()}
    assert lines["trn1"] == ["trn1", "neuronx-cc", "16", "GiB", "1", "yes", "no"]
    assert lines["trn2"] == ["trn2", "neuronx-cc", "24", "GiB", "2", "yes", "no"]
    assert lines["cuda:sm_80"] == ["cuda:sm_80", "iree", "yes", "no"]
    assert lines["neuronx-cc"] == ["neuronx-cc", VERSION]
    missing = run(tmp_path)
    assert ["trn2", "neuronx-cc", "24", "GiB", "2", "no", "no"] in [line.split() for line in missing.splitlines()]
    assert "is neither on PATH nor beside the Python interpreter" in " ".join(missing.split())


def test_json(bin_folder: Path) -> None:
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(run(bin_folder, "--json"))}
    assert rows["trn3"] == {
        "name": "trn3",
        "aliases": [],
        "compiler": "neuronx-cc",
        "compiler_version": VERSION,
        "compiles_here": True,
        "runs_here": False,
        "memory_bytes": 36 * GiB,
        "logical_nc": 2,
        "features": [],
    }
    assert {alias for row in rows.values() for alias in row["aliases"]} == {"cpu", "cpu:host"}
    assert rows[resolve_target("cpu:host").name]["runs_here"]
    assert "cpu" in rows[resolve_target("cpu").name]["aliases"]
    assert {"avx2", "fma", "sse4.2"} <= set(rows["cpu:x86-64-v3"]["features"])
    assert {resolve_target(name).name for name in target_names()} == set(rows)


@pytest.mark.parametrize(("cores", "trn1", "trn2"), [("1", 16, 12), ("2", 16, 24)])
def test_logical_cores_in_force(bin_folder: Path, cores: str, trn1: int, trn2: int) -> None:
    """A setting that one target can't have does not hide the others."""
    rows = {row["name"]: row for row in json.loads(run(bin_folder, "--json", NEURON_LOGICAL_NC_CONFIG=cores))}
    assert (rows["trn1"]["memory_bytes"], rows["trn1"]["logical_nc"]) == (trn1 * GiB, 1)
    assert (rows["trn2"]["memory_bytes"], rows["trn2"]["logical_nc"]) == (trn2 * GiB, int(cores))
