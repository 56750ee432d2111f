"""Many graphs at once: each is resolved as soon as it has been lowered, while the next is still being captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from queue import SimpleQueue
from typing import Any

from vllm_neuron.compile.admission import compile_workers
from vllm_neuron.compile.pipeline import Pipeline, Resolution
from vllm_neuron.compilers.base import compiler_for
from vllm_neuron.errors import NeuronError
from vllm_neuron.lowering.module import ModuleIdentity


@dataclass(frozen=True)
class GraphRequest:
    """One named graph to resolve, with the provenance that a new entry for it records.

    ``found`` is the entry, where it has been looked up already.
    """

    name: str
    module: ModuleIdentity
    provenance: dict[str, Any]
    found: Resolution | None = None


@dataclass(frozen=True)
class GraphOutcome:
    """What became of one request: a resolution, or the error that prevented it or what is owed with it."""

    request: GraphRequest
    resolution: Resolution | None
    error: NeuronError | None


def resolve_all(
    pipeline: Pipeline,
    requests: Iterable[GraphRequest],
    on_outcome: Callable[[GraphOutcome], None] = lambda outcome: None,
) -> list[GraphOutcome]:
    """Resolve every request, in the order given; one failure does not stop the others.

    ``requests`` may be slow to produce: work on those that it has given goes on meanwhile. ``on_outcome`` is called in
    this thread, as outcomes come. An error that is not a :class:`NeuronError` is a defect, and is raised.
    """
    finished: SimpleQueue[GraphOutcome | BaseException] = SimpleQueue()
    order: list[GraphRequest] = []
    outcomes: dict[int, GraphOutcome] = {}
    # Its threads do not keep a process from ending, as those of ``concurrent.futures`` do: whoever is interrupted, or
    # fails elsewhere, does not wait for compilers. These end when they find that their caller is gone.
    pool = ThreadPool(compile_workers(compiler_for(pipeline.compile_for).memory_bytes))
    try:
        for request in requests:
            order.append(request)
            pool.apply_async(_resolve, (pipeline, request), callback=finished.put, error_callback=finished.put)
        for _ in order:
            outcome = finished.get()
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[id(outcome.request)] = outcome
            on_outcome(outcome)
    finally:
        pool.terminate()
    return [outcomes[id(request)] for request in order]


def _resolve(pipeline: Pipeline, request: GraphRequest) -> GraphOutcome:
    try:
        return GraphOutcome(request, pipeline.resolve(request.module, request.provenance, request.found), None)
    except NeuronError as error:
        return GraphOutcome(request, None, error)
