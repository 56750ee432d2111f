"""``vllm-neuron compare`` on a real model: both routes agree with eager PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jaxlib import _hlo

from tests.support.models import make_tiny

COMMAND = [str(Path(sys.executable).with_name("vllm-neuron")), "compare"]
LAYERS = 2
SIZES = ["--dtype", "float32", "--max-model-len", "32", "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]


def aliased_parameters(proto: Path) -> list[int]:
    """Of an HLO module, the parameter that shares its buffer with each output from the first one on."""
    header = _hlo.HloModule.from_serialized_hlo_module_proto(proto.read_bytes()).to_string().splitlines()[0]
    aliases = [(int(output), int(parameter)) for output, parameter in re.findall(r"\{(\d+)\}: \((\d+), \{\}", header)]
    assert [output for output, _ in aliases] == list(range(2 * LAYERS))
    return [parameter for _, parameter in aliases]


@pytest.mark.slow
def test_both_routes_agree_with_eager_pytorch(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, str(model), *SIZES, "--steps", "3", "--json"], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["model"], report["dtype"], report["target"]) == (str(model), "float32", "cpu:x86-64-v3")
    assert [(result["bucket"], result["route"], result["tokens"]) for result in report["results"]] == [
        (bucket, route, tokens)
        for bucket, tokens in (("prefill_s32", 1), ("decode_b1", 3), ("decode_b2", 6))
        for route in ("neuron_native", "vllm_neuron")
    ]
    for result in report["results"]:
        assert 0 < result["max_error"] < 1e-4
        assert result["difference"] is None
    assert len(list(tmp_path.rglob("graph.mlir"))) == len(list(tmp_path.rglob("graph.hlo"))) == 3
    for proto in tmp_path.rglob("graph.hlo"):
        assert aliased_parameters(proto) == json.loads((proto.parent / "metadata.json").read_text())["abi"]["aliases"]


def test_a_target_that_does_not_run_here_is_told_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    done = subprocess.run([*COMMAND, str(tmp_path)], env=environment, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith("vllm-neuron: error: graphs for trn2 do not run on this machine")
