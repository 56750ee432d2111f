"""What one module is for one target: its key, and what the compiler is given. Derived once, and read by all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_neuron.cache.key import ArtifactKey, artifact_key
from vllm_neuron.compilers.base import Compiler, compiler_for
from vllm_neuron.lowering.module import LoweredModule, ModuleIdentity
from vllm_neuron.routes import to_stablehlo
from vllm_neuron.targets import Target

CONVERTED_FILE = "converted.mlir"


@dataclass(frozen=True)
class CompileRequest:
    """One module for one target. ``converted`` is the module in the form that the compiler takes; None: as it is."""

    key: ArtifactKey
    target: Target
    compiler: Compiler
    flags: tuple[str, ...]
    converted: LoweredModule | None

    @property
    def artifact_file(self) -> str:
        """``graph.vmfb``; a NEFF carries its key in its name, as the reference's does."""
        suffix = self.compiler.artifact_suffix
        return f"graph_{self.key.digest}.neff" if suffix == "neff" else f"graph.{suffix}"

    def module_file(self, module: LoweredModule) -> str:
        """The name of the file that the compiler is given of ``module``."""
        return module.file_name if self.converted is None else CONVERTED_FILE

    def files(self, module: LoweredModule) -> dict[str, bytes]:
        """``module``, and what it was converted to, by the names of their files in the entry."""
        files = {module.file_name: module.data}
        return files if self.converted is None else files | {CONVERTED_FILE: self.converted.data}


def compile_requests(
    module: ModuleIdentity, targets: Iterable[Target], level: int, compiler_args: Sequence[str]
) -> dict[str, CompileRequest]:
    """``module`` for each of ``targets``, by the target's name. It is converted once, for all that do not take it.

    ``compiler_args`` are given to each compiler after our own flags.
    """
    requests: dict[str, CompileRequest] = {}
    stablehlo: LoweredModule | None = None
    for target in {target.name: target for target in targets}.values():
        compiler = compiler_for(target)
        converted = None
        if module.format not in compiler.formats:
            assert isinstance(module, LoweredModule), "only modules of the native route are recalled without bytes"
            converted = stablehlo = stablehlo or to_stablehlo(module)
        flags = (*compiler.flags(target, level, converted or module), *compiler_args)
        version = compiler.version()
        key = artifact_key(module, compiler.name, version, flags, target.name, level, converted=converted)
        requests[target.name] = CompileRequest(key, target, compiler, flags, converted)
    return requests
