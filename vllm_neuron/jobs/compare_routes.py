"""The job of ``vllm-neuron compare``: both routes and eager PyTorch, on one model, its weights and the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model

from vllm_neuron.abi import dtype_name
from vllm_neuron.execute.base import allocate
from vllm_neuron.execute.compiled import CompiledExecutor
from vllm_neuron.execute.eager import EagerExecutor
from vllm_neuron.execute.start_report import StartClock
from vllm_neuron.graphs.graph_set import GraphSet
from vllm_neuron.graphs.prepare import Policy
from vllm_neuron.jobs.command_line import engine_config, parse
from vllm_neuron.jobs.divergence import BucketResult, Comparison, Sizes
from vllm_neuron.model.buckets import buckets_for
from vllm_neuron.model.groups import init_groups_alone
from vllm_neuron.model.kv import planned_blocks
from vllm_neuron.model.level import chosen_level
from vllm_neuron.model.patches.building import set_ir_defaults, without_accelerator
from vllm_neuron.model.step import StepModel, model_inputs
from vllm_neuron.routes import Route, default_level
from vllm_neuron.targets import compile_target


@dataclass(frozen=True)
class ComparisonReport:
    """Every bucket by every route, against eager PyTorch."""

    model: str
    dtype: str
    target: str
    results: list[BucketResult]

    @property
    def exit_code(self) -> int:
        """1 if a greedy token differs anywhere, else 0."""
        return int(any(result.difference is not None for result in self.results))

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        results = [asdict(result) for result in self.results]
        return {"model": self.model, "dtype": self.dtype, "target": self.target, "results": results}

    def print(self) -> None:
        """A table, to standard output."""
        title = f"{self.model} in {self.dtype} for {self.target}, against eager PyTorch"
        table = Table(title=title, title_justify="left")
        for column in ("graph", "route", "tokens", "max error", "first differing token"):
            table.add_column(column, justify="right" if column in ("tokens", "max error") else "left")
        for result in self.results:
            table.add_row(result.bucket, result.route, str(result.tokens), f"{result.max_error:.2e}", _describe(result))
        Console(markup=False).print(table)  # A path may have brackets in it.


def compare_routes(model: str, options: Sequence[str], steps: int) -> ComparisonReport:
    """Compare the routes on ``model`` with vLLM's command-line ``options``.

    Exits with 2 on an option that vLLM does not know; raises :class:`ConfigError` for a configuration that can't be
    served.
    """
    arguments = parse("vllm-neuron compare", model, options)
    arguments.model = arguments.model_tag
    return _compare(engine_config(arguments, "server"), chosen_level(arguments.optimization_level), steps)


def _compare(vllm_config: Any, level: int | None, steps: int) -> ComparisonReport:
    """Compile all graphs of one configuration by both routes; run each of them and eager PyTorch on the same inputs.

    ``level`` is the optimization level of both; None for the default of each. Raises what capture and compilers raise.
    """
    without_accelerator()
    # One after the other, and before gloo and IREE have threads: capture workers are forked.
    graphs: dict[Route, GraphSet] = {}
    for route in Route:
        graphs[route] = GraphSet(vllm_config, Policy.comparing(route, default_level(route) if level is None else level))
        graphs[route].wait()
    step_model = _load(vllm_config)
    blocks = planned_blocks(step_model, vllm_config)
    reference = EagerExecutor(step_model, *_caches(step_model, blocks))
    others = {
        route.value: CompiledExecutor(
            found, step_model, model_inputs(step_model, *_caches(step_model, blocks)), StartClock()
        )
        for route, found in graphs.items()
    }
    for executor in others.values():
        executor.prepare()
    sizes = Sizes.of(vllm_config, blocks)
    results = list(Comparison(sizes, buckets_for(vllm_config), reference, others, steps).run())
    model = vllm_config.model_config
    return ComparisonReport(model.model, dtype_name(model.dtype), compile_target().name, results)


def _load(vllm_config: Any) -> StepModel:
    set_ir_defaults(vllm_config)
    with set_current_vllm_config(vllm_config):
        init_groups_alone(vllm_config)
        return StepModel(get_model(vllm_config=vllm_config), vllm_config)


def _caches(step_model: StepModel, blocks: int) -> tuple[list[Any], list[Any]]:
    pairs = [(allocate(k), allocate(v)) for k, v in step_model.kv_specs(blocks)]
    return [k for k, _ in pairs], [v for _, v in pairs]


def _describe(result: BucketResult) -> str:
    found = result.difference
    if found is None:
        return "none"
    return (
        f"step {found.step}, sequence {found.sequence}: {found.found} for {found.expected} ({found.margin:.1e} apart)"
    )
