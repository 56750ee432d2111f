"""A small entry, made the way that the pipeline makes one."""

from __future__ import annotations

from pathlib import Path

from vllm_neuron.abi import Abi, TensorSpec
from vllm_neuron.cache.entry import write_entry
from vllm_neuron.cache.key import TraceKey, artifact_key
from vllm_neuron.cache.manifests.manifest import Manifest, make_manifest
from vllm_neuron.lowering.module import LoweredModule

ABI = Abi(
    inputs=(TensorSpec("int64", (1, 128)), TensorSpec("bfloat16", (64, 8))),
    outputs=(TensorSpec("bfloat16", (64, 8)), TensorSpec("float32", (1, 100))),
    aliases=(1,),
)
MODULE = LoweredModule("stablehlo", b"module @graph {}\n" * 8, ABI)
FLAGS = ("--iree-hal-target-device=local", "--iree-llvmcpu-target-cpu=x86-64-v3")
PARTS = artifact_key(MODULE, "iree", "3.13.0", FLAGS, "cpu:x86-64-v3", 2)
KEY = PARTS.digest
OTHER = artifact_key(MODULE, "iree", "3.13.0", FLAGS, "cpu:x86-64-v3", 3)
ARTIFACT = bytes(range(256)) * 40
FILES = (".compilation_complete", "command.txt", "compiler.log", "graph.mlir", "graph.vmfb", "metadata.json")


def fill(folder: Path, artifact: bytes = ARTIFACT, model: str = "tiny") -> None:
    """Make ``folder`` the entry of KEY."""
    (folder / "graph.mlir").write_bytes(MODULE.data)
    (folder / "graph.vmfb").write_bytes(artifact)
    (folder / "command.txt").write_text("iree-compile graph.mlir -o graph.vmfb\n")
    (folder / "compiler.log").write_text("nothing to say\n")
    write_entry(
        folder,
        key=PARTS,
        abi=ABI,
        required_features=("avx2", "fma"),
        provenance={"model": model, "bucket": "prefill_s128", "max_num_seqs": 8},
        compile_seconds=1.5,
        peak_memory_bytes=1 << 20,
    )


def manifest(graph: str = "decode_b4") -> Manifest:
    """What a start that uses KEY or OTHER knows of its graph."""
    names = ("inputs.input_ids", "kv.0.k")
    return make_manifest(TraceKey.from_parts({"bucket": graph}), graph, "tiny", MODULE, names, {})


def stranger() -> Manifest:
    """The manifest of a graph that is in no entry."""
    module = LoweredModule("stablehlo", b"module @another {}", ABI)
    return make_manifest(TraceKey.from_parts({"bucket": "x"}), "x", "tiny", module, ("inputs.input_ids", "kv.0.k"), {})


def fill_other(folder: Path) -> None:
    """Make ``folder`` the entry of OTHER, which has no provenance."""
    (folder / "graph.mlir").write_bytes(MODULE.data)
    (folder / "graph.vmfb").write_bytes(ARTIFACT)
    write_entry(folder, key=OTHER, abi=ABI)
