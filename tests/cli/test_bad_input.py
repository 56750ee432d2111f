"""A user's mistake is one clear line and exit code 2, before anything is traced or even imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.models import make_tiny

VLLM_NEURON = str(Path(sys.executable).with_name("vllm-neuron"))
VLLM = str(Path(sys.executable).with_name("vllm"))
SMALL = ["--max-model-len", "128", "--max-num-seqs", "1", "--max-num-batched-tokens", "128"]
CPU_COMPILE = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "cpu"}


def run(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, env={**os.environ, **variables}, text=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model"), weights=False))


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if ": error: " in line]


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        (["--target", "trn22"], {}, "target 'trn22' is not known. Did you mean trn2? Valid targets: cpu,"),
        (["--target", "cuda:sm_90"], {}, "target 'cuda:sm_90' can't be compiled for"),
        ([], {"NEURON_PLATFORM_TARGET_OVERRIDE": "tnr1"}, "target 'tnr1' is not known. Did you mean trn1"),
        ([], {"VLLM_NEURON_CPU_MODE": "1"}, "VLLM_NEURON_CPU_COMPILE and VLLM_NEURON_CPU_MODE contradict each other"),
        (
            [],
            {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"},
            "VLLM_NEURON_CPU_COMPILE and NEURON_LIBTORCH_DISABLE_COMPILE_CACHE contradict each other",
        ),
        (
            [],
            {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "maybe"},
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE='maybe' is not valid; accepted: 1, true, yes, on, 0, false, no, off",
        ),
        ([], {"NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "0"}, "accepted: a whole number, 1 or more"),
    ],
)
def test_compile_tells_before_it_imports_anything(
    model: str, options: list[str], variables: dict[str, str], says: str
) -> None:
    (error,) = errors(run([VLLM_NEURON, "compile", model, *options], variables))
    assert says in error


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "There is no model folder"),
        ("empty", "has no config.json"),
        ("file", "is a file. Name a folder with config.json"),
    ],
)
def test_a_model_folder_that_is_none(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (error,) = errors(run([VLLM_NEURON, "compile", str(tmp_path / name)], {}))
    assert says in error
    assert str(tmp_path / name) in error


def test_a_cache_folder_that_is_a_file(model: str, tmp_path: Path) -> None:
    (tmp_path / "neuron").mkdir()
    (tmp_path / "neuron" / "compile_cache").touch()
    (error,) = errors(run([VLLM_NEURON, "compile", model], {"VLLM_CACHE_ROOT": str(tmp_path)}))
    assert str(tmp_path / "neuron" / "compile_cache") in error


def test_a_remote_cache_that_can_not_be_one(model: str, tmp_path: Path) -> None:
    (tmp_path / "remote").touch()
    (error,) = errors(run([VLLM_NEURON, "compile", model, "--remote", str(tmp_path / "remote")], {}))
    assert str(tmp_path / "remote") in error


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "is a folder. Name a file in it"),
        ("absent/report.json", "there is no folder"),
        ("file/report.json", "there is no folder"),
    ],
)
def test_a_report_that_can_not_be_written_is_told_before_anything_is_compiled(
    model: str, tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    (error,) = errors(run([VLLM_NEURON, "compile", model, "--report", str(tmp_path / name)], cache))
    assert f"--report {tmp_path / name}" in error
    assert says in error
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("compile", ["--max-model-len", "0"], "max_model_len must be a positive integer"),
        ("plan", ["--max-num-seqs", "-1"], "max_num_seqs: Input should be greater than or equal to 1"),
        ("compile", ["--hf-overrides", '{"vocab_size": "many"}'], "Field 'vocab_size' expected int, got str"),
        ("compile", ["--config", "absent.yaml"], "absent.yaml"),
        ("compile", ["--max-model-len", "128", "--max-num-batched-tokens", "16", "--no-enable-chunked-prefill"],
         "max_num_batched_tokens (16) is smaller than max_model_len (128)"),
        ("compare", ["--additional-config", "{neuron_config"], "additional_config"),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_one_line_too(model: str, command: str, options: list[str], says: str) -> None:
    (error,) = errors(forking.run([VLLM_NEURON, command, model, *options]))
    assert "vLLM does not accept this configuration: " in error
    assert says in error


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"num_key_value_heads": 3}, "AssertionError: num_heads (4) is not divisible by num_kv_heads (3)"),
        ({"hidden_act": "nonesuch"}, "ValueError: Unsupported activation: nonesuch"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 10000.0}},
         "ValueError: Unknown RoPE scaling type nonesuch"),
        ({"num_hidden_layers": 0}, "has no attention layers"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["compile", "plan"])
def test_a_model_that_can_not_be_built_is_one_line_too(
    model: str, command: str, overrides: dict[str, object], says: str
) -> None:
    done = forking.run([VLLM_NEURON, command, model, *SMALL, "--hf-overrides", json.dumps(overrides)])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("vllm-neuron: error: "))
    assert model in error
    assert says in error


def test_where_a_model_could_not_be_built_is_logged_for_who_asks(model: str) -> None:
    overrides = json.dumps({"hidden_act": "nonesuch"})
    done = forking.run([VLLM_NEURON, "plan", model, *SMALL, "--hf-overrides", overrides], VLLM_NEURON_LOG_LEVEL="DEBUG")
    assert done.returncode == 1
    log = done.stdout + done.stderr
    assert log.count("models/llama.py") > 0
    assert log.count("Not captured") == 1


def test_a_model_with_alibi_is_refused_before_it_is_built(model: str, tmp_path: Path) -> None:
    bloom = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "vocab_size": 1024, "hidden_size": 128,
             "n_layer": 2, "n_head": 4, "dtype": "float32"}  # fmt: skip
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(bloom))
    (error,) = errors(forking.run([VLLM_NEURON, "plan", str(tmp_path), "--max-model-len", "128"]))
    assert "A model with ALiBi is not supported" in error


@pytest.mark.parametrize("command", ["compile", "plan", "compare"])
def test_an_unknown_option_is_named_without_a_list_of_all_that_there_are(model: str, command: str) -> None:
    done = forking.run([VLLM_NEURON, command, model, "--max-model-lenght", "128"])
    assert done.returncode == 2
    usage, error = done.stderr.splitlines()
    assert usage.startswith(f"usage: vllm-neuron {command} MODEL ")
    assert error == f"vllm-neuron {command}: error: unrecognized arguments: --max-model-lenght 128"


@pytest.mark.parametrize(
    ("variables", "options", "says"),
    [
        ({"VLLM_NEURON_CPU_COMPILE": "1"}, [], "VLLM_NEURON_CPU_COMPILE needs a target to compile for"),
        (CPU_COMPILE, ["--additional-config", '{"neuron_config": {"num_seqs_buckets": [1, 3]}}', "--max-num-seqs", "2"],
         "num_seqs_buckets"),
    ],
)  # fmt: skip
def test_vllm_serve_tells_in_one_line_too(model: str, variables: dict[str, str], options: list[str], says: str) -> None:
    (error,) = errors(forking.run([VLLM, "serve", model, *options], **variables))
    assert says in error


@pytest.mark.parametrize("command", ["targets", "doctor"])
def test_standard_output_that_is_closed_or_full(command: str) -> None:
    assert "Traceback" not in run(["bash", "-c", f"'{VLLM_NEURON}' {command} >&-"], {}).stderr
    full = run(["bash", "-c", f"'{VLLM_NEURON}' {command} > /dev/full"], {})
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == "vllm-neuron: error: [Errno 28] No space left on device"


def test_a_misspelt_variable_is_warned_about_with_the_nearest_name(model: str) -> None:
    done = run([VLLM_NEURON, "compile", model, "--target", "nope"], {"VLLM_NEURON_CPU_COMPILER": "1"})
    assert "VLLM_NEURON_CPU_COMPILER is not a known variable, and has no effect." in done.stderr
    assert "Did you mean VLLM_NEURON_CPU_COMPILE?" in done.stderr
