"""Every fault of the reference page, really injected: what the user sees is what the page says."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from entries import ARTIFACT, FILES, KEY, OTHER, fill, manifest
from remotes import folder_tier
from stores import free_ports, fuse_mount
from test_entry import flip, link, remove, rewrite_metadata, truncate

from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.store.folder import FolderStore
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "cache-faults.md"
LISTED = tuple(name for name in FILES if name != ".compilation_complete")


def rows() -> dict[str, str]:
    """What the page says that the log says, by fault."""
    lines = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {cells[0].strip(): cells[1].strip().strip("`") for cells in lines[2:]}


ROWS = rows()


@dataclass
class Bench:
    """A host with an entry in its local tier and the same one in a remote folder."""

    root: Path
    remote: Path
    caplog: pytest.LogCaptureFixture

    def look(self, remote: RemoteTier | None = None, key: str = KEY) -> str | None:
        """The tier that a new process of this host would find the entry in."""
        found = TieredCache(LocalTier(self.root), [remote] if remote else []).lookup(key)
        assert found is None or found.entry.artifact_path.read_bytes() == ARTIFACT
        return None if found is None else found.tier

    def sees(self, fault: str, text: str | None = None) -> None:
        """The log, or ``text``, says what the page says of ``fault``."""
        assert ROWS[fault]
        pattern = ".*".join(re.escape(part) for part in ROWS[fault].split("…"))
        text = "\n".join(record.getMessage() for record in self.caplog.records) if text is None else text
        assert re.search(f"^{pattern}$", text, re.MULTILINE), f"{ROWS[fault]}\nis not in\n{text}"
        self.caplog.clear()


@pytest.fixture
def bench(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.WARNING)
    entry = LocalTier(tmp_path / "root").build(KEY, fill)
    folder_tier(tmp_path / "remote").publish(entry)
    return Bench(tmp_path / "root", tmp_path / "remote", caplog)


@pytest.fixture
def small(tmp_path: Path, mount: Callable[..., None]) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", path)
    return path


@pytest.fixture
def read_only(tmp_path: Path, mount: Callable[..., None]) -> Callable[[Path], Path]:
    def show(folder: Path) -> Path:
        path = tmp_path / "read-only"
        path.mkdir()
        mount("--bind", folder, path)
        mount("-o", "remount,ro,bind", path)
        return path

    return show


@pytest.fixture(scope="session")
def build_shim(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a library from a C file of this folder, for processes to start with."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make system calls fail with")

    def build(name: str) -> Path:
        library = tmp_path_factory.mktemp("shim") / f"{name}.so"
        source = HERE / f"{name}.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        return library

    return build


@pytest.fixture(scope="session")
def shim(build_shim: Callable[[str], Path]) -> Path:
    """A library that makes reads fail."""
    return build_shim("failing_reads")


@pytest.fixture
def look_with_failing_reads(shim: Path, bench: Bench) -> Callable[..., str]:
    def look(number: int, path: Path, *arguments: Path, times: int = 1000) -> str:
        environment = {**os.environ, "LD_PRELOAD": str(shim), "FAULT_PATH": str(path), "FAULT_ERRNO": str(number),
                       "FAULT_TIMES": str(times)}  # fmt: skip
        command = [sys.executable, str(HERE / "looking_up.py"), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    return look


def fill_big(folder: Path) -> None:
    fill(folder, bytes(4 << 20))


def test_local_disk_full(bench: Bench, small: Path) -> None:
    assert LocalTier(small / "root").build(KEY, fill_big).artifact_path.stat().st_size == 4 << 20
    bench.sees("local disk full")
    assert not (small / "root" / KEY).exists()


def test_local_read_only(bench: Bench, read_only: Callable[[Path], Path]) -> None:
    local = LocalTier(read_only(bench.root))
    assert local.lookup(KEY) is not None
    with pytest.raises(CacheError, match=f"it is the entry of key {KEY}"):
        local.build(OTHER.digest, fill)
    bench.sees("local file system read-only")


@pytest.mark.parametrize(
    ("fault", "number"), [("local read error (EIO)", errno.EIO), ("local stale handle (ESTALE)", errno.ESTALE)]
)
@pytest.mark.parametrize("name", FILES)
def test_local_read_errors(
    bench: Bench, look_with_failing_reads: Callable[..., str], fault: str, number: int, name: str
) -> None:
    output = look_with_failing_reads(number, bench.root / KEY / name, bench.root)
    bench.sees(fault, output)
    assert output.endswith("miss\n")
    assert bench.look() == "local", "the entry is as good as before"


def test_remote_read_errors(bench: Bench, look_with_failing_reads: Callable[..., str], tmp_path: Path) -> None:
    path, host = bench.remote / KEY / "graph.vmfb", tmp_path / "host"
    output = look_with_failing_reads(errno.EIO, path, host, bench.remote)
    bench.sees("remote read error (EIO)", output)
    assert output.endswith("miss\n")
    assert ROWS["remote stale handle, once (ESTALE)"] == "(nothing)"
    assert look_with_failing_reads(errno.ESTALE, path, host, bench.remote, times=1) == "hit: remote\n"


@pytest.mark.parametrize(
    ("fault", "harm", "files"),
    [
        ("local file truncated", truncate, [name for name in LISTED if name != "metadata.json"]),
        ("local file changed", flip, [name for name in LISTED if name != "metadata.json"]),
        ("local file missing", remove, LISTED),
        ("local metadata changed", flip, ["metadata.json", ".compilation_complete"]),
        ("local metadata changed", truncate, ["metadata.json", ".compilation_complete"]),
        ("local file is a link", link, FILES),
    ],
)
def test_local_damage(bench: Bench, fault: str, harm: Callable[[Path], None], files: list[str]) -> None:
    for name in files:
        harm(bench.root / KEY / name)
        assert bench.look() is None
        bench.sees(fault)
        assert not (bench.root / KEY).exists()
        assert any((path / name).exists() or harm is remove for path in (bench.root / ".quarantine").glob(f"{KEY}.*"))
        assert bench.look(folder_tier(bench.remote)) == "remote"
        (bench.root.parent / "outside").unlink(missing_ok=True)
        (bench.root / "outside").unlink(missing_ok=True)


def test_local_entry_renamed(bench: Bench) -> None:
    (bench.root / KEY).rename(bench.root / OTHER.digest)
    assert bench.look(key=OTHER.digest) is None
    bench.sees("local entry renamed")


def test_local_entry_of_another_format(bench: Bench) -> None:
    rewrite_metadata(bench.root / KEY, lambda document: document.update(format_version=99))
    assert bench.look() is None
    bench.sees("local entry of another format")
    assert (bench.root / KEY).exists()


@pytest.mark.parametrize(("fault", "harm"), [("remote file truncated", truncate), ("remote file changed", flip)])
def test_remote_damage(bench: Bench, fault: str, harm: Callable[[Path], None], tmp_path: Path) -> None:
    remote = folder_tier(bench.remote)
    for n, name in enumerate(name for name in LISTED if name != "metadata.json"):
        harm(bench.remote / KEY / name)
        bench.root, mine = tmp_path / f"host{n}", bench.root
        assert bench.look(remote) is None
        bench.sees(fault)
        bench.root = mine
        entry = LocalTier(mine).lookup(KEY)
        assert entry is not None
        assert remote.publish(entry) is True


def test_remote_entry_renamed_or_of_another_format(bench: Bench, tmp_path: Path) -> None:
    remote = folder_tier(bench.remote)
    bench.root = tmp_path / "host"
    (bench.remote / KEY).rename(bench.remote / OTHER.digest)
    assert bench.look(remote, OTHER.digest) is None
    bench.sees("remote entry renamed")
    (bench.remote / OTHER.digest).rename(bench.remote / KEY)
    rewrite_metadata(bench.remote / KEY, lambda document: document.update(format_version=99))
    assert bench.look(remote) is None
    bench.sees("remote entry of another format")


def test_remote_server_gone(bench: Bench, tmp_path: Path) -> None:
    bench.root = tmp_path / "host"
    remote = open_remote(f"http://127.0.0.1:{free_ports(1)[0]}/cache")
    assert bench.look(remote) is None
    bench.sees("remote server gone")
    cache = TieredCache(LocalTier(bench.root), [remote])
    assert cache.lookup(OTHER.digest) is None
    assert bench.caplog.records == [], "one warning, not one for every key"
    assert "not asked: asking for" in cache.describe()[1]


@pytest.fixture
def stopped_mount(bench: Bench, tmp_path: Path) -> Iterator[Path]:
    """The remote folder on a file system whose server does not answer."""
    mount = tmp_path / "mount"
    mount.mkdir()
    before = {process.pid for process in psutil.process_iter()}
    with fuse_mount(bench.remote, mount):
        (server,) = [
            process
            for process in psutil.process_iter(["name"])
            if process.pid not in before and process.info["name"] == "bindfs"
        ]
        server.send_signal(signal.SIGSTOP)
        yield mount
        server.send_signal(signal.SIGCONT)


def test_remote_mount_hangs(bench: Bench, stopped_mount: Path, tmp_path: Path) -> None:
    class Mounted(FolderStore):
        def __init__(self, root: Path) -> None:
            super().__init__(bench.remote)
            self.root = root

    bench.root = tmp_path / "host"
    remote = RemoteTier(Mounted(stopped_mount), silence=1.0)
    assert bench.look(remote) is None
    bench.sees("remote mount hangs")
    assert bench.look(remote, OTHER.digest) is None
    assert bench.caplog.records == []
    never_asked = TieredCache(LocalTier(bench.root), [RemoteTier(Mounted(stopped_mount), silence=1.0)])
    assert "(remote, not asked: looking for it failed: nothing came" in never_asked.describe()[1]


def test_remote_disk_full(bench: Bench, small: Path, tmp_path: Path) -> None:
    local = LocalTier(tmp_path / "big")
    entry = local.build(KEY, fill_big)
    cache = TieredCache(local, [open_remote(str(small / "remote"))])
    with pytest.raises(CacheError) as error:
        cache.publish_remote(entry)
    bench.sees("remote disk full", str(error.value))
    assert cache.where(KEY) == ["local"]
    assert list((small / "remote" / ".staging").iterdir()) == []


def test_remote_read_only(bench: Bench, read_only: Callable[[Path], Path], tmp_path: Path) -> None:
    local = LocalTier(bench.root)
    (tmp_path / "empty").mkdir()
    cache = TieredCache(local, [open_remote(str(read_only(tmp_path / "empty")))])
    entry = local.lookup(KEY)
    assert entry is not None
    with pytest.raises(CacheError) as error:
        cache.publish_remote(entry)
    bench.sees("remote file system read-only", str(error.value))


def test_remote_entry_not_signed(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(tmp_path / "key.pem")], check=True)
    monkeypatch.setenv("VLLM_NEURON_CACHE_SIGNING_KEY", str(tmp_path / "key.pem"))
    bench.root = tmp_path / "host"
    assert bench.look(folder_tier(bench.remote)) is None
    bench.sees("remote entry not signed")


def test_file_system_without_modes(bench: Bench, build_shim: Callable[[str], Path], tmp_path: Path) -> None:
    """Both tiers, and manifests, on one where nobody may set a mode: everything is stored, and told once."""
    local, remote = tmp_path / "no modes" / "local", tmp_path / "no modes" / "remote"
    code = (
        "import sys; from pathlib import Path; from entries import KEY, fill, manifest;"
        "from vllm_neuron.cache.local.pins import Pin; from vllm_neuron.cache.local.tier import LocalTier;"
        "from vllm_neuron.cache.remote.urls import open_remote; from vllm_neuron.cache.tiers import TieredCache;"
        "local, remote = LocalTier(Path(sys.argv[1])), open_remote(sys.argv[2]); Pin(local).settle([KEY]);"
        "cache = TieredCache(local, [remote])\n"
        "with cache.lock(KEY): cache.publish_remote(local.build(KEY, fill))\n"
        "remote.write_manifest(manifest().key, manifest().to_bytes())"
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": str(build_shim("failing_modes")),
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-c", code, str(local), str(remote)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    bench.sees("modes can't be set", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    bench.root = local
    assert bench.look() == "local"
    bench.root = tmp_path / "host"
    assert bench.look(folder_tier(remote)) == "remote"
    assert folder_tier(remote).manifest_keys() == [manifest().key]


def test_every_row_of_the_page_is_tested() -> None:
    text = Path(__file__).read_text()
    assert len(ROWS) > 20
    assert [fault for fault in ROWS if f'"{fault}"' not in text] == []
