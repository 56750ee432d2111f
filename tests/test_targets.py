"""Names of targets, what they stand for, and what a host looks for."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from vllm_neuron import targets
from vllm_neuron.errors import ConfigError, IncompatibleHostError
from vllm_neuron.host import cpu
from vllm_neuron.targets import compile_target, lookup_targets, resolve_target

GiB = 1024**3
# From the psABI document: what each level adds to the one before, in LLVM's spelling.
V2 = {"cx16", "sahf", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"}
V3 = {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def host_with(monkeypatch: pytest.MonkeyPatch, level: str, *extra: str) -> None:
    """This machine, as if its processor had that level and those features."""
    monkeypatch.setattr(cpu, "host_features", lambda: frozenset({*cpu.LEVELS[level], *extra}))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the default is another one on Arm")
def test_cpu_is_one_level_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in ("x86-64-v2", "x86-64-v4"):
        host_with(monkeypatch, level)
        assert resolve_target("cpu").name == "cpu:x86-64-v3"
        assert compile_target().name == "cpu:x86-64-v3"


def test_a_level_requires_what_the_psabi_says() -> None:
    levels = {level: set(resolve_target(f"cpu:x86-64-{level}").required_features) for level in ("v2", "v3", "v4")}
    assert levels["v2"] >= V2
    assert levels["v2"].isdisjoint(V3)
    assert levels["v3"] >= V2 | V3
    assert levels["v3"].isdisjoint(V4)
    assert levels["v4"] >= V2 | V3 | V4


@pytest.mark.parametrize(
    ("name", "logical_cores", "gib"),
    [("trn1", 1, 16), ("trn1n", 1, 16), ("inf2", 1, 16), ("trn2", 2, 24), ("trn3", 2, 36)],
)
def test_memory_of_a_logical_core(name: str, logical_cores: int, gib: int) -> None:
    target = resolve_target(name)
    assert (target.compiler, target.logical_nc, target.memory_bytes) == ("neuronx-cc", logical_cores, gib * GiB)
    assert not target.runs_here


def test_logical_core_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (resolve_target("trn2").logical_nc, resolve_target("trn2").memory_bytes) == (1, 12 * GiB)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(ConfigError, match=r"NEURON_LOGICAL_NC_CONFIG=2: trn1 has no"):
        resolve_target("trn1")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("trn22", "trn2"),
        ("Inf1", "inf2"),
        ("cpu:x86-64-v5", "cpu:x86-64-v"),
        ("cuda:sm80", "cuda:sm_80"),
        ("cp", "cpu"),
    ],
)
def test_unknown_name_gets_the_nearest_and_the_list(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_target(name)
    message = str(caught.value)
    assert repr(name) in message
    assert f"Did you mean {nearest}" in message
    assert all(valid in message for valid in targets.target_names())


def test_every_listed_name_resolves_to_one_that_resolves_to_itself() -> None:
    for name in targets.target_names():
        target = resolve_target(name)
        assert resolve_target(target.name) == target
        assert resolve_target(f" {name.upper()} ") == target


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuda:sm_90", "generates no code"),
        ("vulkan", "64-bit integer"),
        ("cuda", "names its generation"),
        ("trn2+avx2", "trn2 can't have avx2"),
        ("cpu:x86-64-v3+neon", "can't have neon"),
    ],
)
def test_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_target(name)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 host")
def test_host_becomes_a_level_and_features(monkeypatch: pytest.MonkeyPatch) -> None:
    host_with(monkeypatch, "x86-64-v4", "avx512bf16", "clzero")
    target = resolve_target("cpu:host")
    assert target.name == "cpu:x86-64-v4+avx512bf16"
    assert "avx512bf16" in target.required_features
    host_with(monkeypatch, "x86-64-v2")
    assert resolve_target("cpu:x86-64-v4+avx512bf16") == target
    assert not target.runs_here


def test_host_runs_here() -> None:
    assert resolve_target("cpu:host").runs_here


def test_override_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert compile_target().name == "trn2"
    assert [target.name for target in lookup_targets()] == ["trn2"]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen2")
    with pytest.raises(ConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE: target 'gen2' is not known"):
        compile_target()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")
@pytest.mark.parametrize(
    ("host", "order"),
    [
        ("x86-64-v4", ["cpu:x86-64-v4", "cpu:x86-64-v3", "cpu:x86-64-v2"]),
        ("x86-64-v3", ["cpu:x86-64-v3", "cpu:x86-64-v2"]),
        ("x86-64-v2", ["cpu:x86-64-v2", "cpu:x86-64-v3"]),
        ("x86-64", ["cpu:x86-64-v3"]),
    ],
)
def test_lookup_takes_the_best_level_first(monkeypatch: pytest.MonkeyPatch, host: str, order: list[str]) -> None:
    host_with(monkeypatch, host)
    assert [target.name for target in lookup_targets()] == order


def test_better_target_is_what_the_host_could_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    host_with(monkeypatch, "x86-64-v4")
    better = targets.better_target(resolve_target("cpu:x86-64-v3"))
    assert better is not None
    assert better.name == "cpu:x86-64-v4"
    assert targets.better_target(resolve_target("cpu:x86-64-v4")) is None
    assert targets.better_target(resolve_target("trn2")) is None


def test_processor_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "host_features", frozenset)
    with pytest.raises(IncompatibleHostError, match="neither x86-64 nor 64-bit Arm"):
        resolve_target("cpu:host")


def neuron_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"dev/neuron0": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_neuron_device(tmp_path: Path) -> None:
    assert targets.neuron_device(tmp_path) is None
    driver = {"sys/devices/virtual/neuron_device/neuron0/info/architecture/instance_type": "Trn1\n"}
    assert targets.neuron_device(neuron_machine(tmp_path / "driver", driver)) == "trn1"
    firmware = {"sys/class/dmi/id/product_name": "trn2.48xlarge\n"}
    assert targets.neuron_device(neuron_machine(tmp_path / "firmware", firmware)) == "trn2"


def test_neuron_device_of_an_unknown_kind(tmp_path: Path) -> None:
    root = neuron_machine(tmp_path, {"sys/class/dmi/id/product_name": "trn9.metal"})
    with pytest.raises(ConfigError, match=r"Set NEURON_PLATFORM_TARGET_OVERRIDE to one of: trn1, trn1n, inf2"):
        targets.neuron_device(root)
