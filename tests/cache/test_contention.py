"""Many processes and several hosts after the same keys, at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from contending import KEYS, make
from remotes import folder_tier
from test_local import names

from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.tiers import TieredCache

PROGRAM = Path(__file__).with_name("contending.py")
PROCESSES = 64


@contextmanager
def all_at_once(commands: list[list[str]]) -> Iterator[list[dict[str, Any]]]:
    """What each command prints, all having begun at the same time."""
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        assert {process.stdout.readline() for process in processes if process.stdout} == {"ready\n"}
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(commands)
        yield [json.loads(output) for output in outputs]


def command(what: str, root: Path, remote: str, count: Path, number: int) -> list[str]:
    return [sys.executable, str(PROGRAM), what, str(root), remote, str(count), str(number)]


@pytest.mark.slow
def test_many_processes_on_a_few_keys(tmp_path: Path) -> None:
    remote = folder_tier(tmp_path / "remote")
    there = sorted(KEYS)[:4]
    builder = LocalTier(tmp_path / "builder")
    for key in there:
        remote.publish(builder.build(key, lambda folder, key=key: make(folder, key, "builder")))  # type: ignore[misc]
    count = tmp_path / "count"
    commands = [command("lookup", tmp_path / "root", remote.name, count, n) for n in range(PROCESSES)]
    with all_at_once(commands) as results:
        made = Counter(line.split()[0] for line in count.read_text().splitlines())
        assert made == {key: 1 for key in KEYS if key not in there}
        fetched = Counter(key for result in results for key in result if result[key]["fetched"])
        assert fetched == dict.fromkeys(there, 1)
        for key in KEYS:
            assert len({result[key]["content"] for result in results}) == 1
    assert names(tmp_path / "root" / ".staging") == []
    # How long after an entry had its name, or after it was asked for, a process had it.
    named = {key: (tmp_path / "root" / key).stat().st_ctime for key in KEYS}
    late = [result[key]["at"] - max(result[key]["since"], named[key]) for result in results for key in KEYS]
    print(
        f"latest {max(late):.2f} s after the winner was done, 99 % within {sorted(late)[len(late) * 99 // 100]:.2f} s"
    )
    print(f"{PROCESSES} processes, {len(KEYS)} keys: made {dict(made)}, fetched {dict(fetched)}")


def isolated(words: list[str]) -> list[str]:
    """A command in a network namespace of its own, where this user may make one."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "true"], capture_output=True).returncode:
        return words
    return [unshare, "--net", *words]


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_two_hosts_publish_the_same_keys(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "s3":
        request.getfixturevalue("s3")
    remote = str(tmp_path / "remote") if kind == "folder" else f"s3://bucket/{uuid.uuid4().hex}"
    commands = [command("publish", tmp_path / f"host{n}", remote, tmp_path / "unused", n) for n in range(2)]
    if kind == "folder":
        commands = [isolated(words) for words in commands]
    with all_at_once(commands) as results:
        for key in KEYS:
            landed = [result[key]["landed"] for result in results]
            assert sorted(landed) == [False, True]
            store = open_remote(remote)
            found = TieredCache(LocalTier(tmp_path / f"reader-{kind}"), [store]).lookup(key)
            assert found is not None
            assert found.entry.artifact_path.read_bytes() == f"{key} by {landed.index(True)}".encode() * 1000
    assert sorted(open_remote(remote).keys()) == sorted(KEYS)
