"""Runs cases against real vLLM in processes of their own, and hands back what came of them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.support import forking

MODES = {
    "eager": {"VLLM_NEURON_CPU_MODE": "1"},
    "compiled": {},
    "compiled by the XLA route": {"VLLM_NEURON_BACKEND": "vllm_neuron"},
}


def run_cases(cases: list[dict[str, Any]], mode: str = "eager", timeout: float = 900) -> list[dict[str, Any]]:
    """The result of each case: what its ``do`` returns, with ``log``, ``exit`` and, if it raised, ``error``.

    A case is {"do": "generate" | "configure" | "parse" | "serve" | "recall" | "plan", ...; "env": variables to set,
    None to unset}.
    """
    variables = {**MODES[mode], "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return [_run_case(case, {**os.environ, **variables}, timeout) for case in cases]


def _run_case(case: dict[str, Any], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    for name, value in case.get("env", {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    with tempfile.TemporaryDirectory() as folder:
        code = forking.call("tests.support.engine", "answer", [case, folder], environment, Path(folder), timeout)
        answer = Path(folder, "answer")
        result: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {"exit": f"status {code}"}
        return {**result, "log": "".join(Path(folder, name).read_text() for name in ("stderr", "stdout"))}


def generate(case: dict[str, Any]) -> dict[str, Any]:
    """Make ``LLM(**args)``, and run each of ``calls``: {"prompts": texts or token ids, "params": one or one each}.

    A call with ``fails`` has to raise, and its result is the error.
    """
    from vllm import LLM

    llm = LLM(**{"disable_log_stats": False, **case["args"]})
    calls = [_failure(llm, call) if call.get("fails") else _call(llm, call) for call in case["calls"]]
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {"calls": calls, "metrics": metrics}


def configure(case: dict[str, Any]) -> dict[str, Any]:
    """Make the configuration of ``EngineArgs(**args)``, and nothing else."""
    from vllm.engine.arg_utils import EngineArgs

    return _facts(EngineArgs(**case["args"]).create_engine_config())


def parse(case: dict[str, Any]) -> dict[str, Any]:
    """Parse ``argv`` as the server's engine options, and make the configuration."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(case["argv"])
    args = AsyncEngineArgs.from_cli_args(arguments)
    return _facts(args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER))


def serve(case: dict[str, Any]) -> dict[str, Any]:
    """Run ``vllm serve`` with the arguments ``argv``, which has to end by itself: a server would not."""
    from vllm.entrypoints.cli.main import main as vllm

    tempfile.tempdir = None  # The case may have set TMPDIR.
    sys.argv = ["vllm", "serve", *case["argv"]]
    try:
        vllm()
    except Exception:
        sys.excepthook(*sys.exc_info())  # As the interpreter does, and for the exit status that it may ask for.
        raise
    raise AssertionError("it served")


def recall(case: dict[str, Any]) -> dict[str, Any]:
    """Ask the Precompile Cache for the graphs of ``EngineArgs(**args)``; with ``keep``, fill it with stand-ins first,
    and with ``damage``, truncate what this machine has. ``changes`` are made before: see ``tests.support.changes``.
    """
    import logging

    from vllm.engine.arg_utils import EngineArgs

    from tests.support import changes
    from vllm_neuron.cache.tiers import TieredCache
    from vllm_neuron.graphs.trace_cache import TraceCache
    from vllm_neuron.model.buckets import buckets_for

    logging.getLogger("vllm.neuron").setLevel("INFO")
    changes.make(case.get("changes", {}))
    config = EngineArgs(**case["args"]).create_engine_config()
    traces, buckets = TraceCache(config, TieredCache.from_environment()), buckets_for(config)
    if case.get("keep"):
        for bucket in buckets:
            traces.publish(traces.keep(changes.stand_in(bucket)))
    if case.get("damage"):
        changes.truncate_manifests()
    found = traces.recall(buckets)
    return {"found": sorted(found), "report": traces.report(buckets, found)}


def plan(case: dict[str, Any]) -> dict[str, Any]:
    """The graphs of a compile job with the command line ``argv`` for ``target``, by name: where each was found, and its
    key; of one that is missing, what comes nearest to it and how it differs. With ``compile`` they are compiled first.
    ``changes`` are made before: see ``tests.support.changes``.
    """
    from tests.support import changes
    from vllm_neuron import envs
    from vllm_neuron.cache.local import miss_record
    from vllm_neuron.cache.tiers import TieredCache
    from vllm_neuron.jobs.command_line import compile_for_targets

    changes.make(case.get("changes", {}))
    os.environ[envs.CPU_COMPILE.name] = "1"
    os.environ[envs.TARGET_OVERRIDE.name] = case["target"]
    if not case.get("compile"):
        os.environ[envs.DISABLE_WARMUP_COMPILE.name] = "1"
    report = compile_for_targets("vllm-neuron plan", case["argv"][0], case["argv"][1:], [case["target"]], "server")
    cache = TieredCache.from_environment()
    missed = {miss.key: miss for miss in miss_record.recorded(cache.local)}
    graphs: dict[str, dict[str, Any]] = {}
    for line in report.graphs:
        graphs[line.graph] = {"source": line.source, "key": line.key, "error": line.error}
        if line.source == "missing":
            [near] = cache.nearest(missed[line.key].parts, missed[line.key].provenance, 1)
            graphs[line.graph]["differences"] = near.differences
    return {"graphs": graphs}


def _facts(config: Any) -> dict[str, Any]:
    from vllm.config.utils import replace
    from vllm.v1.engine import core_client

    from vllm_neuron.graphs.provenance import compile_command
    from vllm_neuron.model.buckets import buckets_for
    from vllm_neuron.targets import resolve_target

    return {
        "command": compile_command(config, resolve_target("cpu")),
        "level": int(config.optimization_level),
        "level_when_made_again": int(replace(config).optimization_level),
        "buckets": [bucket.name for bucket in buckets_for(config)],
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "v2_runner": config.use_v2_model_runner,
        "ready_timeout": core_client.VLLM_ENGINE_READY_TIMEOUT_S,
    }


def _call(llm: Any, call: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def params(fields: dict[str, Any]) -> Any:
        fields = dict(fields)
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        if "logit_bias" in fields:  # JSON has no numbers as keys.
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        return SamplingParams(**fields)

    given = call["params"]
    sampling = [params(one) for one in given] if isinstance(given, list) else params(given)
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in call["prompts"]]
    return [_request(output) for output in llm.generate(prompts, sampling, use_tqdm=False)]


def _failure(llm: Any, call: dict[str, Any]) -> dict[str, Any]:
    try:
        _call(llm, call)
    except Exception as error:
        return {"error": str(error), "kinds": [kind.__name__ for kind in type(error).__mro__]}
    raise AssertionError(f"{call} was answered")


def _request(output: Any) -> dict[str, Any]:
    return {
        "prompt_ids": list(output.prompt_token_ids),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "ids": list(one.token_ids),
                "text": one.text,
                "reason": one.finish_reason,
                "logprobs": _logprobs(one.logprobs),
            }
            for one in output.outputs
        ],
    }


def _logprobs(positions: Any) -> Any:
    if positions is None:
        return None
    return [None if p is None else {str(token): (lp.logprob, lp.rank) for token, lp in p.items()} for p in positions]


def answer(case: dict[str, Any], folder: str) -> None:
    """Run one case in this process, write what came of it to ``folder``, and end."""
    Path(folder, "answer").write_text(json.dumps(_try(case)))
    sys.stdout.flush()
    sys.stderr.flush()
    # The exit handlers and threads of who forked this process are not its own.
    os._exit(0)


def _try(case: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"exit": 0, **globals()[case["do"]](case)}
    except SystemExit as stop:
        return {"exit": stop.code}
    except BaseException as error:
        traceback.print_exc()
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"exit": 1, "error": str(error), "kinds": kinds}
