"""What is refused, what is ignored, and the lines of the start-up log, through vLLM's own ways in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import run_cases
from tests.support.models import make_tiny

BASE = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
ROUTE_LINES = ("optimization level", "--optimization-level: keeping")
NATIVE = "Using default optimization level O2 on the Neuron native route"
XLA = "Defaulting optimization level to O1 on the XLA route"
KEPT = "Explicit --optimization-level: keeping O{}"
ON_XLA = {"VLLM_NEURON_BACKEND": "vllm_neuron"}
ROUTE_WARNINGS = {
    "vllm_neuron": [
        "The XLA route (VLLM_NEURON_BACKEND=vllm_neuron) is deprecated. Unset the variable to run the native route."
    ],
    "neuron_nativ": ["VLLM_NEURON_BACKEND='neuron_nativ' is not a valid route. The native route runs now."],
}
BACKENDS = (None, "neuron_native", "neuron", "vllm_neuron", "neuron_nativ")
LEVEL_OPTIONS: dict[int | None, list[str]] = {None: [], 1: ["-O1"], 2: ["-O2"], 3: ["--optimization-level", "3"]}
OFF_CPU_MODE = {"VLLM_NEURON_CPU_MODE": None}
COMPILES_FOR_TRN2 = OFF_CPU_MODE | {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}

REFUSED: list[tuple[dict[str, Any], dict[str, str | None], str]] = [
    ({"enable_lora": True}, {}, "LoRA"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, {}, "Speculative decoding"),
    ({"pipeline_parallel_size": 2}, {}, "Pipeline parallelism"),
    ({"tensor_parallel_size": 2}, {}, "Tensor parallelism"),
    ({"tensor_parallel_size": 2}, COMPILES_FOR_TRN2, "Tensor parallelism"),
    ({"data_parallel_size": 2}, {}, "Data parallelism"),
    ({"kv_cache_dtype": "fp8"}, {}, "A KV cache of another type than the model"),
    ({"cpu_offload_gb": 1.0}, {}, "Weight offloading"),
    ({"max_model_len": -1}, {}, "Fitting max_model_len to the memory"),
    ({"runner": "pooling"}, {}, "A pooling model"),
    ({"enable_prompt_embeds": True}, {}, "A prompt of embeddings"),
    ({"enforce_eager": True}, OFF_CPU_MODE, "Eager mode"),
    ({"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}}, {}, "A quantized checkpoint (fp8)"),
]  # fmt: skip


@pytest.fixture(scope="module")
def configured(tiny_config: Path) -> dict[str, list[dict[str, Any]]]:
    """Every configuration of this file, made in one parent process."""
    model = {**BASE, "model": str(tiny_config)}

    def make(env: dict[str, str | None] | None = None, **args: Any) -> dict[str, Any]:
        return {"do": "configure", "args": {**model, **args}, "env": env or {}}

    def parse(*argv: str, **env: str | None) -> dict[str, Any]:
        return {"do": "parse", "argv": ["--model", str(tiny_config), *argv], "env": env}

    groups = {
        "refused": [make(env, **args) for args, env, _ in REFUSED],
        "ignored": [
            make(),
            make(compilation_config={"mode": 3}),
            make(attention_backend="FLASH_ATTN"),
            make(gpu_memory_utilization=0.5),
            make({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, gpu_memory_utilization=0.5),
            make(enforce_eager=True),
        ],
        "levels": [
            make(),
            make(optimization_level=2),
            make(optimization_level=0),
            make(ON_XLA),
            make(ON_XLA, optimization_level=2),
            make(ON_XLA, optimization_level=3),
            parse(),
            parse("-O", "1"),
            parse("--optimization-level=3"),
        ],
        "routes": [
            case
            for backend in BACKENDS
            for case in (
                *(parse(*options, VLLM_NEURON_BACKEND=backend) for options in LEVEL_OPTIONS.values()),
                make({"VLLM_NEURON_BACKEND": backend}, optimization_level=2),
            )
        ],
        "command line": [
            parse("--additional-config", '{"neuron_config": {"nums": [1]}}'),
            parse("--max-num-seqs", "4", "--additional-config", '{"neuron_config": {"num_seqs_buckets": [2]}}'),
            parse(VLLM_NEURON_CPU_MODE="maybe"),
            parse("--enable-lora"),
            parse(NEURON_PLATFORM_TARGET_OVERRIDE="trn9"),
            parse(VLLM_NEURON_LOG_LEVEL="loud"),
            parse(NEURON_PLATFORM_TARGET_OVERRIDE="trn2", VLLM_NEURON_CPU_MODE=None),
            parse("--additional-config", '{"neuron_config": {"compiler_args": "--verbose=info"}}'),
            parse("--additional-config", '{"neuron_config": {"compiler_args": ["--lnc", "1"]}}'),
        ],
        "variables": [
            make({"VLLM_NEURON_CPU_MOD": "1", "VLLM_SOMETHING_ELSE": "1", "VLLM_NEURON_BARRIER_TIMEOUT": "60"}),
            make({"VLLM_SOMETHING_ELSE": "1"}, fail_on_environ_validation=True),
        ],
        "sizes": [
            parse(NEURON_PLATFORM_TARGET_OVERRIDE="cpu"),
            parse(NEURON_PLATFORM_TARGET_OVERRIDE="trn2"),
        ],
    }  # fmt: skip
    answers = iter(run_cases([case for cases in groups.values() for case in cases]))
    return {name: [next(answers) for _ in cases] for name, cases in groups.items()}


def test_what_is_refused_is_named_in_one_line(configured: dict[str, list[dict[str, Any]]]) -> None:
    for result, (_, _, feature) in zip(configured["refused"], REFUSED, strict=True):
        assert result.get("error", "").startswith(f"{feature} is not supported on the Neuron platform. "), result["log"]
        assert "\n" not in result["error"]
        assert result["kinds"][:3] == ["ConfigError", "NeuronError", "ValueError"]


def test_what_is_ignored_is_warned_about(configured: dict[str, list[dict[str, Any]]]) -> None:
    warned = [
        [line.split("] ", 1)[1] for line in result["log"].splitlines() if "has no effect" in line]
        for result in configured["ignored"]
    ]
    tail = "has no effect on the Neuron platform for the target cpu:x86-64-v3"
    assert warned == [
        [],
        [f"--compilation-config {tail}"],
        [f"--attention-backend {tail}"],
        [f"--gpu-memory-utilization {tail}"],
        [],
        [],
    ]


def test_levels_and_their_lines(configured: dict[str, list[dict[str, Any]]]) -> None:
    expected = [
        (2, NATIVE), (2, KEPT.format(2)), (0, KEPT.format(0)), (1, XLA), (2, KEPT.format(2)), (3, KEPT.format(3)),
        (2, NATIVE), (1, KEPT.format(1)), (3, KEPT.format(3)),
    ]  # fmt: skip
    assert [level_and_line(result) for result in configured["levels"]] == expected


def level_and_line(result: dict[str, Any]) -> tuple[int, str]:
    """The level in force, and the one line of the log that tells it, however often the configuration is made anew."""
    assert result["level_when_made_again"] == result["level"]
    lines = [line for line in result["log"].splitlines() if any(part in line for part in ROUTE_LINES)]
    assert len(lines) == 1, result["log"]
    return result["level"], lines[0].split("] ", 1)[1]


def test_every_route_at_every_level(configured: dict[str, list[dict[str, Any]]]) -> None:
    """Every value of the variable with every way to give a level, and with none."""
    results = iter(configured["routes"])
    for backend in BACKENDS:
        for explicit in (*LEVEL_OPTIONS, 2):
            result = next(results)
            default = (1, XLA) if backend == "vllm_neuron" else (2, NATIVE)
            assert level_and_line(result) == (default if explicit is None else (explicit, KEPT.format(explicit)))
            about = [line for line in result["log"].splitlines() if "VLLM_NEURON_BACKEND" in line]
            assert [line.split("] ", 1)[1] for line in about] == ROUTE_WARNINGS.get(backend, [])
            assert all(line.split()[0] == "WARNING" or " WARNING " in line for line in about)


def test_command_lines_end_with_one_line_and_status_2(configured: dict[str, list[dict[str, Any]]]) -> None:
    expected = [
        "neuron_config has no option 'nums': ",
        "The largest of num_seqs_buckets must equal max_num_seqs (4), not 2: ",
        "VLLM_NEURON_CPU_MODE='maybe' is not valid; accepted: ",
        "LoRA is not supported on the Neuron platform. ",
        "NEURON_PLATFORM_TARGET_OVERRIDE: target 'trn9' is not known. Did you mean trn",
        "VLLM_NEURON_LOG_LEVEL='loud' is not valid; accepted: ",
        "this package runs artifacts for CPU targets only, not for trn2: set VLLM_NEURON_CPU_COMPILE=1 to compile for",
        "compiler_args are for neuronx-cc, and cpu:x86-64-v3 is compiled by iree: drop them from neuron_config",
        "compiler_args can't have --lnc, which this package sets: set NEURON_LOGICAL_NC_CONFIG",
    ]
    for result, message in zip(configured["command line"], expected, strict=True):
        assert result["exit"] == 2, result
        (line,) = [line for line in result["log"].splitlines() if line.startswith("vllm: error: ")]
        assert line.startswith(f"vllm: error: {message}")
        assert "Traceback" not in result["log"]


def test_unknown_variables(configured: dict[str, list[dict[str, Any]]]) -> None:
    """Ours are known to vLLM's check, a misspelt one is ours to report, and another's is reported as vLLM does."""
    log = configured["variables"][0]["log"]
    assert "VLLM_NEURON_CPU_MOD is not a known variable, and has no effect. Did you mean VLLM_NEURON_CPU_MODE?" in log
    assert [line.split(": ")[-1] for line in log.splitlines() if "Unknown vLLM environment variable" in line] == [
        "VLLM_SOMETHING_ELSE"
    ]
    assert configured["variables"][1]["error"].startswith("Unknown environment variable VLLM_SOMETHING_ELSE")


def test_default_sizes_follow_the_target_and_not_the_host(configured: dict[str, list[dict[str, Any]]]) -> None:
    for result in configured["sizes"]:
        assert (result["max_num_batched_tokens"], result["max_num_seqs"]) == (2048, 256)


def test_vllm_is_told_how_we_work(configured: dict[str, list[dict[str, Any]]]) -> None:
    """Steps are synchronous, the scheduler speaks to a runner of the first kind, and compiling may take its time."""
    result = configured["ignored"][0]
    assert (result["async_scheduling"], result["v2_runner"], result["ready_timeout"]) == (False, False, 24 * 3600)


@pytest.mark.slow
def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds: dict[str, tuple[Any, str, str]] = {
        "DeepseekV2ForCausalLM": (transformers.DeepseekV2Config(**sizes), "ConfigError",
                                  "A model with multi-head latent attention is not supported"),
        "MambaForCausalLM": (transformers.MambaConfig(vocab_size=1024, hidden_size=128, num_hidden_layers=2),
                             "ConfigError", "A model with state-space layers is not supported"),
        "WhisperForConditionalGeneration": (transformers.WhisperConfig(), "ConfigError",
                                            "An encoder-decoder model is not supported"),
        "BloomForCausalLM": (transformers.BloomConfig(vocab_size=1024, hidden_size=128, n_layer=2, n_head=4),
                             "ConfigError", "A model with ALiBi is not supported"),
    }  # fmt: skip
    cases = []
    for name, (config, _, _) in kinds.items():
        folder = make_tiny(tmp_path / name, weights=False)
        config.architectures = [name]
        config.save_pretrained(folder)
        args = {"model": str(folder), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1}
        cases.append({"do": "generate", "args": {**args, "load_format": "dummy"}, "calls": []})
    for (_, kind, message), result in zip(kinds.values(), run_cases(cases), strict=True):
        assert (result["kinds"][0], result["error"][: len(message)]) == (kind, message), result["log"]


@pytest.mark.slow
def test_the_serve_command_itself(tiny_config: Path) -> None:
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(tiny_config)]
    options = ["--additional-config", '{"neuron_config": {"num_seqs_buckets": [7]}}']
    done = subprocess.run([sys.executable, *command, *options], text=True, capture_output=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "vllm: error: The largest of num_seqs_buckets must equal max_num_seqs (256), not 7: "
        "change the list, or set --max-num-seqs 7"
    )
