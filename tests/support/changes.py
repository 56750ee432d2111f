"""Changes of what a captured graph depends on, made to a process that has imported vLLM and not yet used it."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any


def make(changes: dict[str, Any]) -> None:
    """``path``: a folder to import from first; ``versions``: of torch, transformers or vllm; ``vllm``, ``own``: folders
    that stand for the package's own; ``model_class``: architecture to the module of a class ``Model``; ``memory``:
    bytes that this machine has."""
    import torch
    import transformers
    import vllm

    from vllm_neuron.graphs import trace_key

    modules = {"torch": torch, "transformers": transformers, "vllm": vllm}
    if "path" in changes:
        sys.path.insert(0, changes["path"])
    for name, version in changes.get("versions", {}).items():
        modules[name].__version__ = version
    if "vllm" in changes:
        vllm.__path__.insert(0, changes["vllm"])
    if "own" in changes:
        trace_key.__file__ = str(Path(changes["own"], "serve", "trace_key.py"))
    if "memory" in changes:
        import psutil

        machine = psutil.virtual_memory()._replace(total=changes["memory"], available=changes["memory"])
        psutil.virtual_memory = lambda: machine
    if "model_class" in changes:
        from vllm import ModelRegistry

        for architecture, module in changes["model_class"].items():
            ModelRegistry.register_model(architecture, importlib.import_module(module).Model)


def stand_in(bucket: Any) -> Any:
    """A captured graph of one weight and one KV cache, that nobody could run."""
    from vllm_neuron.abi import Abi, TensorSpec
    from vllm_neuron.graphs.trace_cache import CapturedGraph
    from vllm_neuron.lowering.module import LoweredModule

    ids, cache, weight = TensorSpec("int64", (4,)), TensorSpec("float32", (8, 2, 4)), TensorSpec("float32", (3,))
    abi = Abi((ids, cache, weight), (cache, TensorSpec("float32", (bucket.seqs, 16))), (1,))
    module = LoweredModule("stablehlo", bucket.name.encode(), abi)
    return CapturedGraph(bucket, module, ("inputs.input_ids", "kv.0.k", "weights.scale"), 1.0, {})


def truncate_manifests() -> None:
    """Take the end off every manifest of this machine."""
    from vllm_neuron.envs import get_neuron_precompile_cache_dir

    for path in Path(get_neuron_precompile_cache_dir()).glob("?" * 32 + ".json"):
        path.write_bytes(path.read_bytes()[:-100])


def copy_sources(package: Path, to: Path) -> Path:
    """The Python files of a package, in another folder."""

    def others(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not name.endswith(".py") and not Path(folder, name).is_dir()]

    shutil.copytree(package, to, ignore=others)
    return to


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> Path:
    """The metadata of an installed package, to be found in ``folder``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder
