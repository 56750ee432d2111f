"""One module through its compiler: admitted to the host, tried again alone where memory was short."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_neuron import envs
from vllm_neuron.cache import failpoint
from vllm_neuron.cache.failpoint import Failpoint
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.compile.admission import compile_slot, compile_workers, every_slot
from vllm_neuron.compile.failures import forget_failure, keep_failure
from vllm_neuron.compilers.base import Compiler, CompileReport, run_compiler
from vllm_neuron.errors import CompileError, CompilerMemoryError
from vllm_neuron.host.cpu import available_memory_bytes
from vllm_neuron.runtime.iree import why_not_loaded

logger = logging.getLogger("vllm.neuron.compile")

_GiB = 1 << 30


@dataclass(frozen=True)
class Work:
    """What is compiled: ``module_file`` and ``artifact_file`` are names; ``about`` is for a person.

    ``runs_here`` says that this host is one to load the artifact on.
    """

    key: str
    module_file: str
    artifact_file: str
    flags: Sequence[str]
    about: str
    runs_here: bool


def compile_admitted(local: LocalTier, compiler: Compiler, work: Work, folder: Path) -> CompileReport:
    """Compile ``work`` in ``folder``, within the bounds of the host that the processes around ``local`` share.

    Raises ``CompileError`` with a diagnosis, also for an artifact that should load here and does not, and keeps what
    reproduces the failure: see ``failures``.
    """
    try:
        report = _compile(local.shared_folder("slots"), compiler, work, folder)
        if work.runs_here:
            _check_loads(compiler, report)
    except CompileError as error:
        raise type(error)(keep_failure(local, work.key, folder, work.about, str(error))) from None
    forget_failure(local, work.key)
    return report


def _check_loads(compiler: Compiler, report: CompileReport) -> None:
    reason = why_not_loaded(report.artifact)
    if reason:
        raise CompileError(
            f"{compiler.name} made an artifact that its own runtime can't load: {reason}. It is not kept. Split the "
            f"function into smaller ones, and report it: what reproduces it is beside the log. Log: {report.log}"
        )


def _compile(slots: Path | None, compiler: Compiler, work: Work, folder: Path) -> CompileReport:
    try:
        with compile_slot(slots, compile_workers(compiler.memory_bytes)):
            logger.info("Compiling %s", work.about)
            return _run(compiler, work, folder)
    except CompilerMemoryError:
        logger.warning("%s ran out of memory. It is compiled again when no other compiler runs", work.about)
    with every_slot(slots):
        available = available_memory_bytes()
        try:
            return _run(compiler, work, folder)
        except CompilerMemoryError as error:
            raise CompilerMemoryError(
                f"compiled twice, the second time alone, with {available / _GiB:.0f} GiB of memory free: {error}"
            ) from None


def _run(compiler: Compiler, work: Work, folder: Path) -> CompileReport:
    timeout = envs.COMPILER_TIMEOUT.get()
    failpoint.reached(Failpoint.COMPILING)
    return run_compiler(compiler, folder, work.module_file, work.flags, work.artifact_file, timeout)
