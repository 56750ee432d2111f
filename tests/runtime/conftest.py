"""Small StableHLO modules, compiled for this host by the real compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_neuron.abi import Abi
from vllm_neuron.compilers.base import run_compiler
from vllm_neuron.compilers.iree import IreeCompiler
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.targets import resolve_target


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``build(text, target="cpu")``: the artifact of a module."""

    def compile_module(text: str, target: str = "cpu") -> Path:
        folder = tmp_path_factory.mktemp("module")
        (folder / "graph.mlir").write_text(text)
        compiler = IreeCompiler()
        flags = compiler.flags(resolve_target(target), 2, LoweredModule("stablehlo", b"", Abi((), ())))
        return run_compiler(compiler, folder, "graph.mlir", flags, "graph.vmfb").artifact

    return compile_module
