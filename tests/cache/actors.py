"""Programs that the cache's tests run as processes of their own. Each prints one word per event, for the test to see.

Run as ``python actors.py PROGRAM ARGUMENTS...``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from entries import KEY, fill
from remotes import folder_tier

from vllm_neuron.cache.local.key_lock import KeyLock
from vllm_neuron.cache.local.pins import Pin
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import NeuronError


def say(word: str) -> None:
    print(word, flush=True)


def compile_once(root: str, count: str, remote: str = "") -> None:
    """Look KEY up; on a miss, one process 'compiles' it: slowly, and with a line in the file ``count``."""
    cache = TieredCache(LocalTier(Path(root)), [folder_tier(Path(remote))] if remote else [])
    say("ready")
    sys.stdin.readline()
    found = cache.lookup(KEY)
    if found is None:
        with cache.lock(KEY):
            found = cache.lookup(KEY)
            if found is None:
                with Path(count).open("a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(0.3)
                entry = cache.local.build(KEY, fill)
                say(entry.artifact_path.read_bytes().hex())
                return
    say(found.entry.artifact_path.read_bytes().hex())


def fetch(root: str, remote: str) -> None:
    """Look KEY up, and say what was done for it."""
    cache = TieredCache(LocalTier(Path(root)), [folder_tier(Path(remote))])
    say("ready")
    sys.stdin.readline()
    found = cache.lookup(KEY)
    assert found is not None
    say(f"{found.tier} {cache.counters[remote].fetches} {found.entry.artifact_path.read_bytes().hex()}")


def hold(path: str) -> None:
    """Hold a lock until a line is read."""
    lock = KeyLock(Path(path))
    say(lock.acquire(60).name)
    sys.stdin.readline()
    lock.release()
    say("released")


def hold_with_child(path: str) -> None:
    """Hold a lock beside a forked child, which does nothing but live until it is killed."""
    lock = KeyLock(Path(path))
    say(lock.acquire(60).name)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    say(str(child))
    time.sleep(600)


def wait(path: str, timeout: str) -> None:
    """Say that the wait begins, and how it ends."""
    say("waiting")
    say(KeyLock(Path(path)).acquire(float(timeout)).name)


def stage(root: str) -> None:
    """Stay in the middle of making an entry."""
    with LocalTier(Path(root)).staging(KEY) as folder:
        fill(folder)
        say(str(folder))
        time.sleep(600)


def stage_private() -> None:
    """Stay in the middle of making an entry without a cache."""
    os.environ["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"] = "1"
    with TieredCache.from_environment().local.staging(KEY) as folder:
        fill(folder)
        say(str(folder))
        sys.stdin.readline()


def publish_remote(root: str, remote: str, artifact: str) -> None:
    """Publish an entry with an artifact of our own to a remote; say whether it landed."""
    entry = LocalTier(Path(root)).build(KEY, lambda folder: fill(folder, artifact.encode()))
    say("ready")
    sys.stdin.readline()
    say(str(folder_tier(Path(remote)).publish(entry)))


def as_user(uid: str, program: str, *arguments: str) -> None:
    """Run another program as the user ``uid``."""
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    PROGRAMS[program](*arguments)


def build(root: str) -> None:
    """Look KEY up and make it on a miss, with a cache of this root; say where it is."""
    try:
        tier = LocalTier(Path(root))
        entry = tier.lookup(KEY)
        say("miss" if entry is None else "hit")
        with tier.lock(KEY) as state:
            say(state.name)
        if entry is None:
            entry = tier.build(KEY, fill)
        say(str(entry.path))
        again = tier.lookup(KEY)
        say("found" if again is not None else "lost")
    except NeuronError as error:
        say(f"{type(error).__name__}: {error}")


def use(root: str, key: str) -> None:
    """Use an entry until killed, as a server does."""
    Pin(LocalTier(Path(root))).restrict([key])
    say("in use")
    time.sleep(600)


PROGRAMS = {f.__name__: f for f in (
    compile_once, fetch, hold, hold_with_child, wait, stage, stage_private, publish_remote, as_user, build, use,
)}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
