"""Which architectures of vLLM's registry start here: tiny random models of each, loaded, captured, compared.

One line each: what was refused, what failed, and of what starts, how the loaded model differs from the captured one.
`python -m tools.model_census [MODEL_TYPE ...] [--json FILE]`; without arguments, all that transformers has a class for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.tiny_models import make_tiny

_SECONDS = 120


@dataclass
class Line:
    """What came of one model type. ``outcome``: starts, differs, refused, not built (by transformers), or failed."""

    model_type: str
    architecture: str = ""
    outcome: str = "failed"
    reason: str = ""
    seconds: float = 0.0


def census(model_types: list[str], options: dict[str, Any], log: Path | None) -> list[Line]:
    """A line for each model type, in order. Each is tried in a process of its own, forked from one that has vLLM."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.registry  # noqa: F401

    lines = []
    for model_type in model_types:
        line = _in_child(model_type, options, log)
        print(f"{line.model_type:24} {line.architecture:32} {line.outcome:10} {line.reason}", flush=True)
        lines.append(line)
    return lines


def _in_child(model_type: str, options: dict[str, Any], log: Path | None) -> Line:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census_") as folder:
        answer = Path(folder, "answer")
        pid = os.fork()
        if pid == 0:
            signal.alarm(_SECONDS)
            with (log or Path(os.devnull)).open("a") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            print(f"==== {model_type}", flush=True)
            answer.write_text(json.dumps(asdict(_try(model_type, options, Path(folder)))))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        line = Line(**json.loads(answer.read_text())) if answer.exists() else Line(model_type, reason=f"ended {status}")
    line.seconds = round(time.monotonic() - start, 1)
    return line


def _try(model_type: str, options: dict[str, Any], folder: Path) -> Line:
    line = Line(model_type)
    try:
        make_tiny(folder / "model", model_type)
        line.architecture = json.loads((folder / "model/config.json").read_text())["architectures"][0]
    except Exception as error:
        line.outcome, line.reason = "not built", _one_line(error)
        return line
    try:
        line.outcome, line.reason = _start(folder / "model", options)
    except BaseException as error:
        traceback.print_exc()
        line.outcome, line.reason = _refused_or_failed(error), _one_line(error)
    return line


def _start(folder: Path, options: dict[str, Any]) -> tuple[str, str]:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_neuron.graphs.model_capture import ModelCapture
    from vllm_neuron.model.buckets import buckets_for

    arguments = {"max_model_len": 128, "max_num_seqs": 1, "skip_tokenizer_init": True, "dtype": "float32"}
    config = EngineArgs(str(folder), **{**arguments, **options}).create_engine_config()
    model = ModelCapture(config)
    graph = model.capture(buckets_for(config)[-1])
    captured, loaded = graph.model_inputs(), _load(config)
    found = [
        f"{name} is {captured.get(name, 'absent')}, loaded {loaded.get(name, 'absent')}"
        for name in sorted(captured.keys() | loaded.keys())
        if name.startswith("weights.") and captured.get(name) != loaded.get(name)
    ]
    return ("differs", "; ".join(found)) if found else ("starts", f"{len(graph.input_names)} inputs")


def _load(config: Any) -> dict[str, Any]:
    """The loaded model's weights, by the names that graphs use."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from vllm_neuron.abi import TensorSpec
    from vllm_neuron.graphs.model_capture import model_parallel_state
    from vllm_neuron.model.step import StepModel

    with model_parallel_state(config), set_current_vllm_config(config):
        step = StepModel(get_model(vllm_config=config), config)
    return {f"weights.{name}": TensorSpec.of(tensor) for name, tensor in step.named_weights()}


def _refused_or_failed(error: BaseException) -> str:
    from vllm_neuron.errors import ConfigError, UnsupportedError

    return "refused" if isinstance(error, (ConfigError, UnsupportedError)) else "failed"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def main() -> None:
    """Count, and print a summary; the lines go to ``--json`` too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="a file for all that vLLM says")
    parser.add_argument("--transformers", action="store_true", help="through vLLM's Transformers backend")
    arguments = parser.parse_args()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    options = {"model_impl": "transformers"} if arguments.transformers else {}
    lines = census(arguments.model_types or sorted(known), options, arguments.log)
    print(dict(Counter(line.outcome for line in lines)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
