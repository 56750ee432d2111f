"""A user's mistake is one line and status 2 from ``vllm serve`` too, and comes before weights are read."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import run_cases
from tests.support.models import make_tiny

SIZES = ["--dtype", "float32", "--max-model-len", "128"]


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def with_code_of_its_own(folder: Path) -> str:
    make_tiny(folder, weights=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    return str(folder)


def test_what_vllm_raises_is_one_line(tiny_config: Path, tmp_path: Path, taken_port: int) -> None:
    model, long = str(tiny_config), tmp_path / ("long" * 20)
    long.mkdir()
    two = ["--enable-lora", "--kv-cache-dtype", "fp8"]
    cases: list[tuple[list[str], dict[str, str | None], list[str]]] = [
        ([model, *SIZES, "--enable-sleep-mode"], {}, ["Sleep mode is not supported"]),
        ([model, "--dtype", "float32", "--max-model-len", "100000"], {}, ["max_model_len", "100000"]),
        ([with_code_of_its_own(tmp_path / "own"), *SIZES], {}, ["trust_remote_code"]),
        ([model, *SIZES, "--host", "127.0.0.1", "--port", str(taken_port)], {},
         [f"can't listen on 127.0.0.1:{taken_port}: Address already in use. Choose another --port"]),
        ([model, *SIZES, "--port", "0"], {"TMPDIR": str(long), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
         [f"TMPDIR={long} is too long for sockets", "at most 70 bytes"]),
        ([model, *SIZES, "--enable-auto-tool-choice"], {}, ["--enable-auto-tool-choice requires --tool-call-parser"]),
        ([model, *SIZES, "--enable-auto-tool-choice", "--tool-call-parser", "own"], {}, ["invalid tool call parser"]),
        ([model, "--config", "absent.yaml"], {}, ["absent.yaml"]),
        ([model, *SIZES, *two, "--port", "0"], {}, ["LoRA is not supported", "A KV cache of another type than the"]),
    ]  # fmt: skip
    found = run_cases([{"do": "serve", "argv": argv, "env": env} for argv, env, _ in cases])
    for (_, _, says), result in zip(cases, found, strict=True):
        assert result["exit"] == 2 and "Traceback" not in result["log"], result["log"]
        (line,) = [line for line in result["log"].splitlines() if ": error: " in line]
        assert all(part in line for part in says), line


def test_the_command_itself(tiny_config: Path) -> None:
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(tiny_config), "--max-model-len", "100000"]
    done = subprocess.run([sys.executable, *command], text=True, capture_output=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("vllm: error: vLLM does not accept this configuration: ")


def test_layers_are_refused_before_weights_are_missed(tmp_path: Path) -> None:
    """A mixture that is told to route at random: the folder has no weights, and nothing looks for them."""
    folder = make_tiny(tmp_path / "model", "qwen3_moe", weights=False)
    env = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
    args = {"model": str(folder), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1}
    (refused,) = run_cases([{"do": "generate", "args": args, "calls": [], "env": env}])
    shutil.rmtree(folder)
    assert refused["kinds"][0] == "UnsupportedError", refused["log"]
    assert "a mixture of experts with routing by RoutingSimulatorRouter" in refused["error"]
    assert refused["error"].endswith("Serve another model")
