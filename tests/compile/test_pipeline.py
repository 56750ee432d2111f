"""One lookup for every caller: local, remote, compile once per host, or fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.compile.modules import broken, scale, total
from tests.support.cold_starts import start_cold_together
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.source import Source
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.compile.miss_error import Miss, miss_error
from vllm_neuron.compile.pipeline import Pipeline, Publish
from vllm_neuron.compile.pool import GraphRequest, resolve_all
from vllm_neuron.errors import CacheError, CacheMissError, CompileError
from vllm_neuron.runtime.iree import IreeExecutable
from vllm_neuron.targets import resolve_target

REPOSITORY = Path(__file__).resolve().parents[2]
PROCESSES = 8


def pipeline(folder: Path, host: str, *, strict: bool = False, publish: Publish = Publish.NONE) -> Pipeline:
    """A host's pipeline over its own local tier and the remote tier that all hosts of ``folder`` share."""
    cache = TieredCache(LocalTier(folder / host), [open_remote(str(folder / "remote"))])
    target = resolve_target("cpu")
    return Pipeline(cache, target, [target], strict=strict, publish=publish)


def test_compiled_once_then_found_locally_and_by_another_host(tmp_path: Path) -> None:
    first = pipeline(tmp_path, "a", publish=Publish.REQUIRED).resolve(scale(3), {"graph": "g"})
    again = pipeline(tmp_path, "a").resolve(scale(3), {})
    other = pipeline(tmp_path, "b", strict=True).resolve(scale(3), {})
    assert [first.source, again.source, other.source] == [Source.COMPILED, Source.LOCAL, Source.REMOTE]
    assert first.published
    assert first.key == again.key == other.key
    assert other.entry.metadata.provenance == {"graph": "g"}
    (result,) = IreeExecutable(other.entry.artifact_path, other.entry.abi)([torch.arange(4.0)])
    torch.testing.assert_close(result, torch.tensor([0.0, 3.0, 6.0, 9.0]))


def test_an_artifact_that_can_not_be_loaded_here_is_a_failure_and_is_not_kept(tmp_path: Path) -> None:
    resolving = pipeline(tmp_path, "a", publish=Publish.REQUIRED)
    with pytest.raises(CompileError, match=r"its own runtime can't load: .*binding") as caught:
        resolving.resolve(total(40), {"graph": "g"})
    assert "Traceback" not in str(caught.value)
    assert resolving.lookup(total(40)) is None
    assert not list(tmp_path.rglob("*.vmfb")) or list(tmp_path.glob("a/.failures/*/graph.mlir"))
    resolving.resolve(total(8), {"graph": "g"})


def test_nothing_is_published_unless_asked(tmp_path: Path) -> None:
    pipeline(tmp_path, "a").resolve(scale(3), {})
    assert pipeline(tmp_path, "b").lookup(scale(3)) is None


def test_an_entry_that_only_the_local_tier_has_is_published_when_that_is_required(tmp_path: Path) -> None:
    pipeline(tmp_path, "a").resolve(scale(3), {})
    later = pipeline(tmp_path, "a", publish=Publish.REQUIRED).resolve(scale(3), {})
    assert (later.source, later.published) == (Source.LOCAL, True)
    assert not pipeline(tmp_path, "a", publish=Publish.REQUIRED).resolve(scale(3), {}).published


@pytest.mark.parametrize("policy", [Publish.REQUIRED, Publish.BEST_EFFORT])
def test_a_remote_that_takes_nothing_fails_only_a_required_publish(tmp_path: Path, policy: Publish) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / ".staging").write_text("a file where a folder has to be")
    resolving = pipeline(tmp_path, "a", publish=policy)
    if policy is Publish.REQUIRED:
        with pytest.raises(CacheError, match="can't be published"):
            resolving.resolve(scale(3), {})
    else:
        assert resolving.resolve(scale(3), {}).source is Source.COMPILED


def test_a_damaged_entry_is_fetched_and_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = pipeline(tmp_path, "a", publish=Publish.REQUIRED).resolve(scale(3), {}).key.digest
    artifact = tmp_path / "remote" / key / "graph.vmfb"
    artifact.write_bytes(artifact.read_bytes()[:-1])
    found = pipeline(tmp_path, "b", publish=Publish.REQUIRED).resolve(scale(3), {})
    assert (found.source, found.published) == (Source.COMPILED, True)
    assert len([one for one in caplog.records if key in one.getMessage() and one.levelname == "WARNING"]) == 1


def test_strict_compiles_nothing(tmp_path: Path) -> None:
    strict = pipeline(tmp_path, "a", strict=True)
    with pytest.raises(CacheMissError, match=strict.key(scale(3)).digest):
        strict.resolve(scale(3), {"graph": "decode_b1"})
    assert strict.cache.local.keys() == []


def test_what_nobody_would_accept_is_not_even_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_NEURON_CACHE_TRUSTED_KEYS", str(tmp_path / "public.pem"))
        job = pipeline(tmp_path, "a", publish=Publish.REQUIRED)
        with pytest.raises(CacheError, match=r"would not be signed, .* set VLLM_NEURON_CACHE_SIGNING_KEY, or unset"):
            job.resolve(scale(3), {"graph": "g"})
        assert job.cache.local.keys() == []
        assert pipeline(tmp_path, "a").resolve(scale(3), {}).source is Source.COMPILED


def test_the_error_of_a_strict_start_says_all_that_helps(tmp_path: Path) -> None:
    near = pipeline(tmp_path, "a")
    near.level = 1
    near.resolve(scale(3), {"graph": "decode_b1", "max_num_seqs": 8})
    strict = pipeline(tmp_path, "a", strict=True)
    misses = [
        Miss(f"decode_b{n}", strict.key(scale(3 * n)), {"graph": "decode_b1", "max_num_seqs": 16}) for n in (1, 2)
    ]
    message = str(miss_error(strict.cache, "my/model", misses, 7, "vllm-neuron compile my/model"))
    assert "2 of 7 graphs of my/model" in message
    assert f"decode_b1  key {misses[0].key.digest}" in message
    assert f"decode_b2  key {misses[1].key.digest}" in message
    assert f"{tmp_path / 'a'} (local)" in message
    assert f"{tmp_path / 'remote'} (remote, no such folder)" in message
    assert "level: O1 there, O2 here" in message
    assert "max_num_seqs: 8 there, 16 here" in message
    assert message.endswith("To fill the cache, run: vllm-neuron compile my/model")


def test_one_failure_does_not_stop_the_others_and_leaves_no_entry(tmp_path: Path) -> None:
    compiling = pipeline(tmp_path, "a")
    modules = {"good": scale(2), "bad": broken(), "fine": scale(4)}
    outcomes = resolve_all(compiling, (GraphRequest(name, module, {}) for name, module in modules.items()))
    assert [outcome.request.name for outcome in outcomes] == list(modules)
    assert [outcome.resolution is not None for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].error, CompileError)
    assert "error:" in str(outcomes[1].error)
    assert sorted(compiling.cache.local.keys()) == sorted(compiling.key(scale(n)).digest for n in (2, 4))


def test_levels_and_targets_have_keys_of_their_own(tmp_path: Path) -> None:
    base = pipeline(tmp_path, "a")
    other = pipeline(tmp_path, "a")
    other.level = 3
    keys = {base.key(scale(3)).digest, other.key(scale(3)).digest, base.key(scale(4)).digest}
    for target in (resolve_target(f"cpu:x86-64-v{n}") for n in (2, 4)):
        keys.add(Pipeline(base.cache, target, [target]).key(scale(3)).digest)
    assert len(keys) == 5


def test_processes_that_start_cold_at_once_compile_each_graph_once(tmp_path: Path) -> None:
    printed, compilers = start_cold_together("tests.compile.resolve_many", PROCESSES, tmp_path)
    assert compilers == 3
    sources = [json.loads(text) for text in printed]
    flat = [source for each in sources for source in each]
    assert (flat.count("compiled"), flat.count("local")) == (3, 3 * PROCESSES - 3)
