"""Every kind of store that the cache can have for a remote tier, each real: a folder, a mount, S3, HTTP."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

READY_SECONDS = 60
START_ATTEMPTS = 3


@dataclass
class Store:
    """One store: its URL, the URL to publish with (None: read-only), and how to do harm to a file of an entry."""

    url: str
    publish_url: str | None
    harm: Callable[[str, str, Callable[[Path], object]], None]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def find_program(name: str) -> str:
    """A program beside the interpreter, on PATH or in a folder of PYTHONPATH; skips the test where there is none."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """SeaweedFS, as the environment with which S3 clients find it. Nothing of it is left afterwards."""
    for attempt in range(START_ATTEMPTS):
        (inner := folder / str(attempt)).mkdir()
        server, environment = _start_s3(inner)
        try:
            # It needs many ports, and another process may have taken one since we looked: then it ends.
            if _make_bucket(server, environment):
                yield environment
                return
        finally:
            server.kill()
            server.wait()
    pytest.fail(f"the S3 server has ended {START_ATTEMPTS} times; see {folder}/*/log")


def _start_s3(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    program = find_program("weed")
    services = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(services))
    options = [f"-{name}.port={port}" for name, port in zip(services, ports, strict=False)]
    options += [f"-{name}.port.grpc={port}" for name, port in zip(services, ports[len(services) :], strict=False)]
    command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", *options,
               "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=16",
               "-s3.port.iceberg=0", "-s3.port.lance=0"]  # fmt: skip
    keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
    environment = {
        **keys,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[len(services) - 1]}",
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **keys}), environment


def _make_bucket(server: subprocess.Popen[bytes], environment: dict[str, str]) -> bool:
    """Whether the bucket is there; False where the server has ended."""
    code = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    deadline = time.monotonic() + READY_SECONDS
    while True:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if done.returncode == 0:
            return True
        if server.poll() is not None:
            return False
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.2)


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """Python's own web server over a folder, as its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def fuse_mount(source: Path, target: Path) -> Iterator[None]:
    """A folder shown through a FUSE file system."""
    program = find_program("bindfs")
    if not Path("/dev/fuse").exists():
        pytest.skip("this machine has no /dev/fuse")
    done = subprocess.run([program, "--no-allow-other", str(source), str(target)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"FUSE file systems can't be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=False)


@contextmanager
def folder_store(folder: Path) -> Iterator[Store]:
    def harm(key: str, name: str, damage: Callable[[Path], object]) -> None:
        damage(folder / key / name)

    yield Store(str(folder), str(folder), harm)


@contextmanager
def mounted_store(folder: Path) -> Iterator[Store]:
    """A remote folder on a FUSE file system."""
    behind, mount = folder / "behind", folder / "mount"
    behind.mkdir(parents=True)
    mount.mkdir()
    with fuse_mount(behind, mount), folder_store(mount / "cache") as store:
        yield store


@contextmanager
def http_store(folder: Path) -> Iterator[Store]:
    """A folder that one publishes to, and that a web server shows."""
    folder.mkdir(parents=True)
    with http_server(folder) as url, folder_store(folder) as store:
        yield Store(url, str(folder), store.harm)


@contextmanager
def s3_store(folder: Path, name: str) -> Iterator[Store]:
    """A prefix of the bucket of the server that this process's variables name."""
    import fsspec

    root = f"bucket/{name}"

    def harm(key: str, file: str, damage: Callable[[Path], object]) -> None:
        store = fsspec.filesystem("s3", use_listings_cache=False)
        (path,) = [path for path in store.find(f"{root}/{key}") if path.endswith(f"/{file}")]
        copy = folder / "copy"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(store.cat_file(path))
        damage(copy)
        store.rm(path)
        if copy.exists():
            store.pipe_file(path, copy.read_bytes())
            copy.unlink()

    yield Store(f"s3://{root}", f"s3://{root}", harm)
