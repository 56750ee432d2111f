"""``vllm-neuron cache`` and ``doctor`` as a user runs them: what is printed, what is left, and the exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import ABI, FLAGS, KEY, MODULE, OTHER, PARTS, fill, fill_other, manifest, stranger
from remotes import folder_tier
from test_entry import flip
from test_local import names

from vllm_neuron.cache.entry import write_entry
from vllm_neuron.cache.key import ArtifactKey, artifact_key
from vllm_neuron.cache.local import miss_record
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.manifests.store import ManifestStore

Run = Callable[..., subprocess.CompletedProcess[str]]
INNER = Path("neuron", "compile_cache")
TRACES = Path("neuron", "precompile_cache")


@pytest.fixture
def local(tmp_path: Path) -> LocalTier:
    """A local tier with KEY, which a remote folder has too, and OTHER."""
    tier = LocalTier(tmp_path / "root" / INNER)
    folder_tier(tmp_path / "remote").publish(tier.build(KEY, fill))
    tier.build(OTHER.digest, fill_other)
    return tier


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def start(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "root"),
                       "NEURON_LIBTORCH_REMOTE_CACHE": str(tmp_path / "remote"), **variables}  # fmt: skip
        command = [sys.executable, "-m", "vllm_neuron", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return start


def document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_list_show_and_verify(local: LocalTier, run: Run) -> None:
    rows = document(run("cache", "list", "--json"))
    assert {row["key"]: row["tier"] for row in rows} == {KEY: "local", OTHER.digest: "local"}
    assert document(run("cache", "show", KEY[:6]))["provenance"]["model"] == "tiny"
    assert {row["state"] for row in document(run("cache", "verify", "--json"))} == {"complete"}
    flip(local.root / KEY / "graph.vmfb")
    done = run("cache", "verify", "--json")
    assert done.returncode == 1
    assert {row["key"]: row["state"] for row in json.loads(done.stdout)} == {KEY: "damaged", OTHER.digest: "complete"}


def test_list_tells_what_a_remote_tier_has(local: LocalTier, run: Run, tmp_path: Path) -> None:
    """The same of an entry that only a remote tier has as of one that is here; of one that can't be read, its key."""
    here = next(row for row in document(run("cache", "list", "--json")) if row["key"] == KEY)
    fresh = {"VLLM_CACHE_ROOT": str(tmp_path / "fresh")}
    remote = str(tmp_path / "remote")
    assert document(run("cache", "list", "--json", **fresh)) == [{**here, "tier": remote}]
    [line] = [line for line in run("cache", "list", **fresh).stdout.splitlines() if line.lstrip().startswith(KEY)]
    assert [word in line for word in ("tiny", "cpu:x86-64-v3", "O2", "KiB")] == [True] * 4
    flip(tmp_path / "remote" / KEY / "metadata.json")
    listed = run("cache", "list", "--json", **fresh)
    assert document(listed) == [{"key": KEY, "tier": remote}]
    assert "is damaged" in listed.stderr


def test_verify_a_remote_tier(local: LocalTier, run: Run, tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    assert run("cache", "push").returncode == 0
    flip(local.root / KEY / "graph.vmfb")
    whole = {"key": KEY, "state": "complete", "reason": ""}
    assert document(run("cache", "verify", KEY[:6], "--remote", remote, "--json")) == [whole]
    flip(tmp_path / "remote" / KEY / "graph.vmfb")
    done = run("cache", "verify", "--remote", remote)
    assert done.returncode == 1
    assert f"{KEY}  damaged: the cache entry {remote}/{KEY} is damaged: the digest of graph.vmfb is not" in done.stdout
    assert f"{OTHER.digest}  complete\n" in done.stdout
    assert done.stdout.endswith(f"2 entries checked in {remote}\n")
    nowhere = run("cache", "verify", "--remote", "/nowhere/cache")
    assert (nowhere.returncode, nowhere.stdout) == (1, "")
    assert nowhere.stderr == "vllm-neuron: error: the remote cache /nowhere/cache is not there: no such folder\n"


def test_list_for_a_person_breaks_no_line(local: LocalTier, run: Run) -> None:
    lines = run("cache", "list", COLUMNS="40").stdout.splitlines()
    for key in (KEY, OTHER.digest):
        (line,) = (line for line in lines if key in line)
        assert "cpu:x86-64-v3" in line


def test_a_name_from_elsewhere_is_neither_markup_nor_obeyed_by_the_terminal(run: Run, tmp_path: Path) -> None:
    name = "/models/[/bold][red]x\x1b[2J\nsecond line"
    LocalTier(tmp_path / "root" / INNER).build(KEY, lambda folder: fill(folder, model=name))
    done = run("cache", "list")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if KEY in line)
    assert "/models/[/bold][red]x\\x1b[2J\\nsecond line" in line


def test_first_digits_of_no_key_and_of_several(local: LocalTier, run: Run) -> None:
    unknown = run("cache", "show", "nothing")
    assert (unknown.returncode, "'nothing' is not the beginning of any key" in unknown.stderr) == (2, True)
    like = KEY[:4] + "0" * 28
    shutil.copytree(local.root / KEY, local.root / like)
    several = run("cache", "show", KEY[:4])
    assert (several.returncode, f"is the beginning of 2 keys: {like}, {KEY}" in several.stderr) == (2, True)


def test_push_and_pull(local: LocalTier, run: Run, tmp_path: Path) -> None:
    ManifestStore(tmp_path / "root" / TRACES).store(manifest())
    pushed = document(run("cache", "push", "--json"))
    assert pushed["manifests"] == [{"key": manifest().key, "published": True}]
    assert {row["key"]: row["published"] for row in pushed["entries"]} == {KEY: False, OTHER.digest: True}
    other = str(tmp_path / "second")
    pulled = document(run("cache", "pull", "--json", VLLM_CACHE_ROOT=other))
    assert {row["key"]: row["fetched"] for row in pulled["entries"]} == {KEY: True, OTHER.digest: True}
    assert (pulled["missing"], pulled["manifests"]) == ([], [manifest().key])
    assert names(tmp_path / "second" / TRACES) == [f"{manifest().key}.json"]
    remote = pulled["tiers"][str(tmp_path / "remote")]
    assert (remote["fetches"], remote["bytes"]) == (2, sum(row["bytes"] for row in pulled["entries"]))
    assert LocalTier(tmp_path / "second" / INNER).keys() == sorted([KEY, OTHER.digest])
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"graphs": [{"key": "0" * 32}]}))
    missing = run("cache", "pull", "--plan", str(plan))
    assert (missing.returncode, "0" * 32 in missing.stderr) == (1, True)
    assert run("cache", "push", NEURON_LIBTORCH_REMOTE_CACHE="").returncode == 2


def test_pack_and_unpack(local: LocalTier, run: Run, tmp_path: Path) -> None:
    for one in (manifest(), stranger()):
        ManifestStore(tmp_path / "root" / TRACES).store(one)
    packed = document(run("cache", "pack", "cache.tar", KEY[:8], "--json"))
    assert (packed["entries"], packed["bytes"]) == ([KEY], (tmp_path / "cache.tar").stat().st_size)
    assert packed["manifests"] == [manifest().key]
    other = str(tmp_path / "second")
    assert document(run("cache", "unpack", "cache.tar", "--json", VLLM_CACHE_ROOT=other)) == {
        "entries": [{"key": KEY, "new": True}],
        "manifests": [{"key": manifest().key, "new": True}],
    }
    assert LocalTier(tmp_path / "second" / INNER).keys() == [KEY]
    assert names(tmp_path / "second" / TRACES) == [f"{manifest().key}.json"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pack", "."], ". is a folder: name the archive that is to be written"),
        (["pack", "nowhere/cache.tar"], "the archive nowhere/cache.tar can't be written"),
        (["unpack", "nowhere.tar"], "the archive nowhere.tar can't be read"),
        (["unpack", "."], "the archive . can't be read"),
        (["show", ""], "'' is not the beginning of any key"),
        (["push", "--plan", "."], ". is not a plan"),
        (["pull", KEY, "--plan", "plan.json"], "keys and --plan exclude each other"),
    ],
)
def test_mistakes_are_one_line(local: LocalTier, run: Run, words: list[str], told: str) -> None:
    done = run("cache", *words)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"vllm-neuron: error: {told}")
    assert len(done.stderr.splitlines()) == 1


def test_a_dead_remote_tier_does_not_hide_the_local_one(local: LocalTier, run: Run) -> None:
    dead = {"NEURON_LIBTORCH_REMOTE_CACHE": "http://127.0.0.1:9/c"}
    listed = run("cache", "list", "--json", **dead)
    assert [row["key"] for row in document(listed)] == local.keys()
    assert "http://127.0.0.1:9/c can't be listed" in listed.stderr
    assert document(run("cache", "show", KEY[:6], **dead))["key"] == KEY
    pulled = run("cache", "pull", **dead)
    assert (pulled.returncode, len(pulled.stderr.splitlines())) == (1, 1)
    assert pulled.stderr.startswith("vllm-neuron: error: the entries of http://127.0.0.1:9/c can't be listed: ")


@pytest.mark.parametrize("words", [["list"], ["verify"], ["gc", "--max-size", "0"], ["pack", "c.tar"], ["unpack", "c"]])
def test_a_root_that_can_t_be_is_one_line(local: LocalTier, run: Run, words: list[str]) -> None:
    done = run("cache", *words, VLLM_CACHE_ROOT="/tmp/" + "a" * 300)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "can't be used: File name too long" in done.stderr


@pytest.mark.parametrize("command", ["list", "verify", "push", "gc --max-age 0s", "pack c.tar", "unpack c.tar"])
def test_a_cache_that_is_off_is_not_looked_after(local: LocalTier, run: Run, command: str) -> None:
    done = run("cache", *command.split(), NEURON_LIBTORCH_DISABLE_COMPILE_CACHE="1")
    assert done.returncode == 2
    assert "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1 turns the cache off" in done.stderr
    assert len(local.keys()) == 2


def test_gc_of_what_is_not_in_the_plan(local: LocalTier, run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"graphs": [{"graph": "decode_b4", "key": KEY}]}))
    dry = document(run("cache", "gc", "--plan", "plan.json", "--dry-run", "--json"))
    assert [row["key"] for row in dry["entries"]] == [OTHER.digest]
    assert len(local.keys()) == 2
    done = run("cache", "gc", "--plan", "plan.json", "--max-size", "1G")
    assert done.returncode == 0
    assert f"{OTHER.digest}  removed: not in the plan" in done.stdout
    assert local.keys() == [KEY]


def test_gc_of_a_remote_tier(local: LocalTier, run: Run, tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    run("cache", "push")
    (tmp_path / "plan.json").write_text(json.dumps({"graphs": [{"graph": "decode_b4", "key": KEY}]}))
    dry = run("cache", "gc", "--plan", "plan.json", "--remote", remote, "--dry-run")
    assert f"{OTHER.digest}  would go: not in the plan" in dry.stdout
    assert f"would be freed in {remote}" in dry.stdout
    done = document(run("cache", "gc", "--plan", "plan.json", "--remote", f"file://{remote}", "--json"))
    assert [(row["key"], row["kept"], row["failed"]) for row in done["entries"]] == [(OTHER.digest, "", False)]
    assert folder_tier(tmp_path / "remote").keys() == [KEY]
    assert len(local.keys()) == 2, "the local tier is another"


def test_gc_of_a_remote_tier_that_can_t_be_written_to(
    local: LocalTier, run: Run, mount: Callable[..., None], tmp_path: Path
) -> None:
    mount("--bind", tmp_path / "remote", tmp_path / "remote")
    mount("-o", "remount,bind,ro", tmp_path / "remote")
    done = run("cache", "gc", "--max-age", "0s", "--remote", str(tmp_path / "remote"))
    assert done.returncode == 1
    assert f"{KEY}  kept, it can't be removed: " in done.stdout
    assert "Read-only file system" in done.stdout
    assert folder_tier(tmp_path / "remote").keys() == [KEY]


@pytest.mark.parametrize(
    ("remote", "told"),
    [
        ("http://127.0.0.1:9/cache", "is read-only, and nothing can be removed from it: name the folder or the bucket"),
        ("ro+file:///tmp", "is read-only, and nothing can be removed from it"),
        ("nowhere", "can't be listed: "),
        ("root/neuron/compile_cache", "is the local tier, where processes may use entries: leave out --remote"),
        ("a,b", "name one remote tier"),
        ("ftp://x/y", "ftp:// is not supported"),
        ("", "is empty"),
    ],
)
def test_what_gc_can_t_remove_from(local: LocalTier, run: Run, remote: str, told: str) -> None:
    done = run("cache", "gc", "--max-age", "0s", "--remote", remote)
    assert done.returncode in (1, 2)
    assert (told in done.stderr, len(done.stderr.splitlines())) == (True, 1)
    assert len(local.keys()) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "say what may go"),
        (["--max-size", "many"], "--max-size 'many' is not valid; accepted: a number and one of K, M, G, T"),
        (["--max-age", "3x"], "--max-age '3x' is not valid; accepted: a number and one of s, m, h, d, w"),
        (["--plan", "none.json"], "none.json is not a plan"),
    ],
)
def test_bad_arguments_of_gc(local: LocalTier, run: Run, words: list[str], told: str) -> None:
    done = run("cache", "gc", *words)
    assert (done.returncode, told in done.stderr) == (2, True)
    assert len(local.keys()) == 2


def test_explain(local: LocalTier, run: Run, tmp_path: Path) -> None:
    wanted = artifact_key(MODULE, "iree", "3.12.0", FLAGS, "cpu:x86-64-v3", 2)
    provenance = {"model": "tiny", "graph": "decode_b4", "bucket": "prefill_s128", "max_num_seqs": 16}
    miss_record.record(local, wanted, provenance, "vllm-neuron compile tiny --target cpu")
    for what in (wanted.digest, wanted.digest[:7], "decode_b4"):
        text = run("cache", "explain", what).stdout
        assert f"decode_b4, key {wanted.digest}, is in none of: " in text
        assert text.count(KEY) == 1, "once, though two tiers have it"
        near = f"Near: {KEY} in local, {tmp_path / 'remote'}\n"
        assert f"{near}  IREE 3.13.0 there, 3.12.0 here\n  max_num_seqs: 8 there, 16 here\n" in text
        assert "To fill the cache, run: vllm-neuron compile tiny --target cpu" in text
    found = document(run("cache", "explain", KEY, "--json"))
    assert found["in"] == ["local", str(tmp_path / "remote")]
    unknown = run("cache", "explain", "no_such_bucket")
    assert (unknown.returncode, "neither a key nor a bucket" in unknown.stderr) == (2, True)
    assert PARTS.digest == KEY
    assert ABI is MODULE.abi
    miss_record.record(local, wanted, provenance)
    assert "To fill the cache, run: vllm-neuron compile tiny" in run("cache", "explain", "decode_b4").stdout


def test_explain_of_a_bucket_that_several_entries_have(local: LocalTier, run: Run) -> None:
    keys = [artifact_key(MODULE, "iree", version, FLAGS, "cpu:x86-64-v3", 2) for version in ("1", "2")]
    for key in keys:

        def fill_bucket(folder: Path, key: ArtifactKey = key) -> None:
            (folder / "graph.mlir").write_bytes(MODULE.data)
            (folder / "graph.vmfb").write_bytes(b"artifact")
            write_entry(folder, key=key, abi=ABI, provenance={"graph": "decode_b8"})

        local.build(key.digest, fill_bucket)
    done = run("cache", "explain", "decode_b8")
    assert done.returncode == 2
    assert all(key.digest in done.stderr for key in keys)


def test_index(local: LocalTier, run: Run, tmp_path: Path) -> None:
    assert document(run("cache", "index", str(tmp_path / "remote"), "--json")) == {"keys": 1}
    assert json.loads((tmp_path / "remote" / "index.json").read_text()) == {"keys": [KEY], "manifests": []}
    assert run("cache", "index", "nowhere").returncode == 2


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in json.loads(done.stdout)}


def test_doctor(local: LocalTier, run: Run, tmp_path: Path) -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stdout
    found = findings(done)
    assert found["remote tier"]["found"] == f"{tmp_path}/remote answers"
    assert str(local.root) in found["local tier"]["found"]
    assert "2 entries" in found["local tier"]["found"]
    assert set(found) >= {"variables", "compiler", "machine", "cpu features"}


def test_the_remote_tier_can_be_named_on_the_command_line(local: LocalTier, run: Run, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    pushed = run("cache", "push", KEY, "--remote", other)
    assert pushed.returncode == 0, pushed.stderr
    assert folder_tier(tmp_path / "other").keys() == [KEY]
    fresh = {"VLLM_CACHE_ROOT": str(tmp_path / "fresh"), "NEURON_LIBTORCH_REMOTE_CACHE": ""}
    assert f"{KEY}  fetched from {other}" in run("cache", "pull", "--remote", other, **fresh).stdout
    assert other in run("cache", "list", "--remote", other, **fresh).stdout


def test_a_remote_tier_that_has_nothing_to_fetch(run: Run) -> None:
    done = run("cache", "pull", "--remote", "/nowhere/cache")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("there is nothing to fetch in /nowhere/cache (remote, no such folder)")


def test_push_tells_of_what_it_leaves_out(local: LocalTier, run: Run) -> None:
    (local.root / KEY / "graph.mlir").write_text("damaged")
    done = run("cache", "push")
    assert done.returncode == 0, done.stderr
    assert f"warning: {KEY} is left out, because it is not whole: see `vllm-neuron cache verify`" in done.stderr
    assert OTHER.digest in done.stdout


@pytest.mark.parametrize(
    ("variables", "check", "verdict", "told"),
    [
        ({"VLLM_NEURON_CPU_COMPIL": "1"}, "variables", "warning", "VLLM_NEURON_CPU_COMPILE"),
        ({"VLLM_NEURON_BACKEND": "neuron_nativ"}, "variables", "warning", "'neuron_nativ', which is no route"),
        ({"VLLM_NEURON_CPU_MODE": "perhaps"}, "variables", "error", "VLLM_NEURON_CPU_MODE='perhaps'"),
        ({"NEURON_LIBTORCH_REMOTE_CACHE": "ftp://x/y"}, "remote tiers", "error", "ftp:// is not supported"),
        ({"NEURON_LIBTORCH_REMOTE_CACHE": "http://127.0.0.1:9/c"}, "remote tier", "error", "can't be asked"),
        ({"NEURON_LIBTORCH_REMOTE_CACHE": "/nowhere/cache"}, "remote tier", "warning", "is not there (yet)"),
        ({"VLLM_CACHE_ROOT": "/dev/null"}, "local tier", "error", "is not a folder"),
        ({"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"}, "local tier", "warning", "the cache is disabled"),
        ({"VLLM_NEURON_CACHE_SIGNING_KEY": "/nowhere"}, "variables", "error", "VLLM_NEURON_CACHE_SIGNING_KEY"),
    ],
)
def test_doctor_finds(run: Run, variables: dict[str, str], check: str, verdict: str, told: str) -> None:
    done = run("doctor", "--json", **variables)
    rows = [row for row in json.loads(done.stdout) if row["check"] == check and row["verdict"] == verdict]
    assert any(told in row["found"] + row["fix"] for row in rows), done.stdout
    assert done.returncode == (verdict == "error")
