"""The XLA route: its modules are the same everywhere, alias what is written, and stand apart from the rest."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch
from jaxlib import _hlo
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_neuron.abi import TensorSpec
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile import request
from vllm_neuron.compile.capture import capture
from vllm_neuron.compile.pipeline import Pipeline
from vllm_neuron.errors import ConfigError
from vllm_neuron.lowering.canonical import CanonicalGraph
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.routes import Route, check_available, lower, to_stablehlo
from vllm_neuron.runtime.iree import IreeExecutable
from vllm_neuron.targets import resolve_target

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS = 12  # of two caches each: in natural order 10 comes after 9
SPECS = {
    "inputs.slots": TensorSpec("int64", (3,)),
    "inputs.x": TensorSpec("float32", (3, 8)),
    **{f"kv.{layer}.{side}": TensorSpec("float32", (16, 8)) for layer in range(LAYERS) for side in "kv"},
    "weights.w": TensorSpec("float32", (8, 8)),
}


def step(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = inputs["inputs.x"]
    for layer in range(LAYERS):
        keys, values = inputs[f"kv.{layer}.k"], inputs[f"kv.{layer}.v"]
        hidden = torch.nn.functional.silu(hidden @ inputs["weights.w"].t())
        keys.index_put_((inputs["inputs.slots"],), hidden)
        values.index_put_((inputs["inputs.slots"],), hidden * 2)
        hidden = torch.softmax(hidden @ keys.t(), -1) @ values
    return hidden


def graph() -> CanonicalGraph:
    mutated = [name for name in SPECS if name.startswith("kv.")]
    return capture(step, SPECS, mutated, FakeTensorMode(allow_non_fake_inputs=True))


def test_every_cache_is_aliased_to_its_own_output() -> None:
    captured = graph()
    text = _hlo.HloModule.from_serialized_hlo_module_proto(lower(captured, Route.XLA).data).to_string()
    header = text.splitlines()[0]
    caches = [index for index, name in enumerate(captured.input_names) if name.startswith("kv.")]
    assert len(caches) == 2 * LAYERS
    aliases = ", ".join(f"{{{output}}}: ({index}, {{}}, may-alias)" for output, index in enumerate(caches))
    assert f"input_output_alias={{ {aliases} }}" in header
    assert text.count(" parameter(") >= len(SPECS)


def test_the_bytes_are_the_same_in_every_process_and_name_no_place() -> None:
    module = lower(graph(), Route.XLA)
    assert (module.format, module.file_name) == ("hlo", "graph.hlo")
    digests = {hashlib.sha256(module.data).hexdigest(), hashlib.sha256(to_stablehlo(module).data).hexdigest()}
    folders = [str(REPOSITORY), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    for seed in ("0", "777"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(folders)}
        done = subprocess.run(
            [sys.executable, "-m", "test_xla_route"], capture_output=True, text=True, cwd="/", env=environment
        )
        assert set(done.stdout.split()) == digests, done.stderr
    for place in (REPOSITORY.as_posix(), "site-packages", ".py"):
        assert place.encode() not in module.data


def test_settings_of_jax_stay_as_they_are() -> None:
    lower(graph(), Route.XLA)
    assert not jax.config.jax_enable_x64
    assert not jax.config.jax_disable_jit


def test_a_module_is_converted_once_whatever_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys for all targets, a look-up and a compile are made from one conversion."""
    converted: list[LoweredModule] = []

    def convert(module: LoweredModule) -> LoweredModule:
        converted.append(to_stablehlo(module))
        return converted[-1]

    monkeypatch.setattr(request, "to_stablehlo", convert)
    targets = [resolve_target(f"cpu:x86-64-v{level}") for level in (4, 3, 2)]
    pipeline = Pipeline(TieredCache(LocalTier(tmp_path), []), targets[1], targets, 1)
    module = lower(graph(), Route.XLA)
    key = pipeline.key(module)
    assert not pipeline.has(module)
    assert pipeline.resolve(module, {}).key == key == pipeline.key(lower(graph(), Route.XLA))
    assert len(converted) == 1


def test_an_entry_has_the_proto_and_runs_in_place(tmp_path: Path) -> None:
    captured = graph()
    target = resolve_target("cpu")
    pipeline = Pipeline(TieredCache(LocalTier(tmp_path), []), target, [target], 1)
    module = lower(captured, Route.XLA)
    entry = pipeline.resolve(module, {}).entry
    assert entry.module_path.read_bytes() == module.data
    assert entry.module_path.name == "graph.hlo"
    assert "converted.mlir" in (entry.path / "command.txt").read_text()
    assert pipeline.key(lower(captured, Route.NATIVE)) != pipeline.key(module)
    torch.manual_seed(0)
    values = {name: torch.randn(spec.shape) for name, spec in SPECS.items()}
    values["inputs.slots"] = torch.tensor([5, 0, -1])
    mine = [values[name].clone() for name in captured.input_names]
    (result,) = IreeExecutable(entry.artifact_path, entry.abi).bind(mine)()
    torch.testing.assert_close(result, step(values), rtol=1e-4, atol=1e-4)
    for name, tensor in zip(captured.input_names, mine, strict=True):
        torch.testing.assert_close(tensor, values[name], rtol=1e-4, atol=1e-4)


def test_a_place_out_of_range_is_the_nearest_one_on_both_routes() -> None:
    def read_and_write(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[places], x.index_put((places,), torch.ones(()))

    x, places = torch.arange(6.0), torch.tensor([99, -99, -2])
    for backend in ("neuron_native", "vllm_neuron"):
        torch._dynamo.reset()
        read, written = torch.compile(read_and_write, backend=backend, fullgraph=True, dynamic=False)(x, places)
        assert read.tolist() == [5, 0, 4]
        assert written.tolist() == [1, 1, 2, 3, 1, 1]


def test_without_jax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    check_available(Route.NATIVE)
    for attempt in (lambda: check_available(Route.XLA), lambda: lower(graph(), Route.XLA)):
        with pytest.raises(ConfigError, match=r"the XLA route needs jax, .*\(pip install 'vllm-neuron\[xla\]'"):
            attempt()
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="the XLA route needs jax"):
        torch.compile(lambda x: x + 1, backend="vllm_neuron")(torch.ones(2))


if __name__ == "__main__":
    lowered = lower(graph(), Route.XLA)
    print(hashlib.sha256(lowered.data).hexdigest(), hashlib.sha256(to_stablehlo(lowered).data).hexdigest())
