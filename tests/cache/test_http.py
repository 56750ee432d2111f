"""Web servers that fail, cut off, redirect, or answer nonsense."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, OTHER, PARTS, fill, manifest, stranger
from remotes import folder_tier

from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.manifests.store import ManifestStore
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.store import index
from vllm_neuron.cache.tiers import Found, TieredCache
from vllm_neuron.compile.miss_error import Miss, miss_error
from vllm_neuron.errors import CacheError

Answer = Callable[[BaseHTTPRequestHandler, Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder_tier(tmp_path / "remote").publish(LocalTier(tmp_path / "builder").build(KEY, fill))
    return tmp_path / "remote"


@contextmanager
def serving(folder: Path, answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """A server that answers as told; its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self, folder / self.path.lstrip("/"))

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, path: Path, *, length: int | None = None) -> None:
    """Answer with a file, or that there is none; ``length`` is claimed in place of the true one."""
    if not path.is_file():
        handler.send_error(404)
        return
    data = path.read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def lookup(tmp_path: Path, url: str) -> Found | None:
    return TieredCache(LocalTier(tmp_path / "local"), [open_remote(url)]).lookup(KEY)


def test_server_that_fails_at_first(tmp_path: Path, folder: Path) -> None:
    seen: set[str] = set()

    def answer(handler: BaseHTTPRequestHandler, path: Path) -> None:
        if handler.path in seen:
            send(handler, path)
        else:
            seen.add(handler.path)
            handler.send_error(503)

    with serving(folder, answer) as (address, _):
        found = lookup(tmp_path, f"http://{address}")
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == ARTIFACT


def test_server_that_cuts_a_file_off_once(tmp_path: Path, folder: Path) -> None:
    cut: list[str] = []

    def answer(handler: BaseHTTPRequestHandler, path: Path) -> None:
        if path.name == "graph.vmfb" and not cut:
            cut.append(path.name)
            send(handler, path, length=2 * len(ARTIFACT))
            handler.close_connection = True
        else:
            send(handler, path)

    with serving(folder, answer) as (address, _):
        found = lookup(tmp_path, f"http://{address}")
    assert cut == ["graph.vmfb"]
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == ARTIFACT


def test_server_that_always_fails_is_asked_a_few_times(tmp_path: Path, folder: Path) -> None:
    with serving(folder, lambda handler, path: handler.send_error(500)) as (address, asked):
        assert lookup(tmp_path, f"http://{address}") is None
        assert 1 < len(asked) < 12


@pytest.mark.parametrize("status", [401, 403])
def test_server_that_refuses_is_asked_once(
    tmp_path: Path, folder: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(folder, lambda handler, path: handler.send_error(status)) as (address, asked):
        assert lookup(tmp_path, f"http://{address}") is None
        assert len(asked) == 1
    assert f"HTTP status {status}" in caplog.text


def send_or_forbid(handler: BaseHTTPRequestHandler, path: Path) -> None:
    """As a bucket without permission to list: what is absent is forbidden."""
    if path.is_file():
        send(handler, path)
    else:
        handler.send_error(403)


def test_server_that_forbids_what_is_absent(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry without a signature arrives, with its manifest; one that is absent is a miss that says what may be."""
    remote = folder_tier(folder)
    remote.write_manifest(manifest().key, manifest().to_bytes())
    index.write(folder)
    with serving(folder, send_or_forbid) as (address, _):
        tier = open_remote(f"http://{address}")
        cache = TieredCache(LocalTier(tmp_path / "local"), [tier])
        found = cache.lookup(KEY)
        assert found is not None
        assert found.entry.artifact_path.read_bytes() == ARTIFACT
        store = ManifestStore(tmp_path / "manifests", [tier])
        assert store.fetch_of([found.entry.metadata]) == [manifest().key]
        assert ManifestStore(tmp_path / "others", [tier]).lookup(stranger().key) is None
        assert (store.problems, caplog.text) == ({}, "")
        assert cache.lookup(OTHER.digest) is None
        assert "HTTP status 403 Forbidden: it is absent, or not to be read from here" in caplog.text
        message = str(miss_error(cache, "tiny", [Miss("decode_b4", OTHER, {})], 1, "make it"))
        assert f"A remote tier failed for 1 of them; {OTHER.digest} in http://{address}: " in message
        assert f"{KEY} in local, http://{address}: " in message


def test_an_entry_is_not_its_own_neighbour(tmp_path: Path, folder: Path) -> None:
    """One that is listed and can't be fetched: the message says why, and nothing of differences."""
    index.write(folder)

    def answer(handler: BaseHTTPRequestHandler, path: Path) -> None:
        if path.name == "graph.vmfb":
            handler.send_error(403)
        else:
            send(handler, path)

    with serving(folder, answer) as (address, _):
        cache = TieredCache(LocalTier(tmp_path / "local"), [open_remote(f"http://{address}")])
        assert cache.lookup(KEY) is None
        message = str(miss_error(cache, "tiny", [Miss("decode_b4", PARTS, {})], 1, "make it"))
    assert "Nearest" not in message
    assert f"{KEY} in http://{address}: [Errno 13] HTTP status 403 Forbidden" in message


def test_redirect_and_password(tmp_path: Path, folder: Path) -> None:
    wanted = "Basic " + base64.b64encode(b"user:pass word").decode()

    def answer(handler: BaseHTTPRequestHandler, path: Path) -> None:
        if handler.headers["Authorization"] != wanted:
            handler.send_error(401)
        elif handler.path.startswith("/old/"):
            handler.send_response(302)
            handler.send_header("Location", handler.path.removeprefix("/old"))
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        else:
            send(handler, path)

    with serving(folder, answer) as (address, _):
        assert lookup(tmp_path, f"http://user:pass%20word@{address}/old") is not None


@pytest.mark.parametrize("text", [b"", b"[]", b'{"keys": 7}', b"\xff", b"[" * 100_000])
def test_index_that_is_nonsense(folder: Path, text: bytes) -> None:
    (folder / "index.json").write_bytes(text)
    with serving(folder, send) as (address, _), pytest.raises(CacheError, match=r"index\.json is damaged"):
        open_remote(f"http://{address}").keys()


def test_index_is_not_believed_where_it_names_other_things_than_keys(folder: Path) -> None:
    (folder / "index.json").write_text(f'{{"keys": ["../../etc", "{KEY}", ""]}}')
    with serving(folder, send) as (address, _):
        assert open_remote(f"http://{address}").keys() == [KEY]


def test_answers_without_an_end_are_cut_off(tmp_path: Path, folder: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler, path: Path) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        try:
            for _ in range(1 << 14):
                handler.wfile.write(b" " * (1 << 16))
        except OSError:
            return

    with serving(folder, answer) as (address, _):
        assert lookup(tmp_path, f"http://{address}") is None
