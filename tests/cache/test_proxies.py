"""Stores that are reached through a proxy, which is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from entries import ARTIFACT, KEY, fill
from remotes import folder_tier
from stores import free_ports, http_server

from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.remote.urls import open_remote
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import ConfigError

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
LOGIN = "user:p%40ss"


@dataclass
class Proxy:
    """Its address, and the file to which it writes what it is asked for."""

    port: int
    log: Path

    def url(self, login: str = LOGIN) -> str:
        return f"http://{login}@127.0.0.1:{self.port}"

    def asked(self) -> str:
        return self.log.read_text().partition("\n")[2]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    log = tmp_path / "proxy.log"
    program = Path(__file__).with_name("proxying.py")
    with log.open("w") as output, subprocess.Popen([sys.executable, str(program), "user:p@ss"], stdout=output) as run:
        while not log.read_text().endswith("\n"):
            assert run.poll() is None
        yield Proxy(int(log.read_text().split()[0]), log)
        run.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder_tier(tmp_path / "remote").publish(LocalTier(tmp_path / "builder").build(KEY, fill))
    with http_server(tmp_path / "remote") as url:
        yield url


def look(tmp_path: Path, url: str) -> bytes | None:
    found = TieredCache(LocalTier(tmp_path / "local"), [open_remote(url)]).lookup(KEY)
    return None if found is None else found.entry.artifact_path.read_bytes()


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_server_is_asked_through_the_proxy(
    tmp_path: Path, server: str, proxy: Proxy, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy.url())
    assert look(tmp_path, server) == ARTIFACT
    assert f"GET {server}/{KEY}/graph.vmfb\n" in proxy.asked()


def test_https_goes_through_a_tunnel(
    tmp_path: Path, server: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url())
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    address = server.removeprefix("http://")
    assert look(tmp_path, f"https://{address}") is None, "the server speaks no TLS"
    assert f"CONNECT {address}\n" in proxy.asked()


@pytest.mark.parametrize("exempt", ["127.0.0.1", "example.com, 127.0.0.1:{port}", "127.0.0.0/8", "*"])
def test_no_proxy_names_what_is_asked_directly(
    tmp_path: Path, server: str, proxy: Proxy, exempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", proxy.url())
    monkeypatch.setenv("no_proxy", exempt.format(port=server.rpartition(":")[2]))
    assert look(tmp_path, server) == ARTIFACT
    assert proxy.asked() == ""


@pytest.mark.parametrize("exempt", ["example.com", "10.0.0.0/8", "127.0.0.1:1", "nonsense/99"])
def test_no_proxy_for_others_changes_nothing(
    tmp_path: Path, server: str, proxy: Proxy, exempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy.url())
    monkeypatch.setenv("no_proxy", exempt)
    assert look(tmp_path, server) == ARTIFACT
    assert proxy.asked() != ""


def test_a_dead_proxy_is_named_and_its_password_is_not(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("http_proxy", f"http://user:s3cret@127.0.0.1:{port}")
    assert look(tmp_path, server) is None
    assert f"(through the proxy http://127.0.0.1:{port})" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_proxy_that_refuses_is_named(
    tmp_path: Path, server: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("http_proxy", proxy.url("user:s3cret"))
    assert look(tmp_path, server) is None
    assert f"HTTP status 407 Proxy Authentication Required by the proxy http://127.0.0.1:{proxy.port}" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("value", ["socks5://user:s3cret@host:1080", "http://user:s3cret@host:port", "http://"])
def test_a_proxy_of_another_kind_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", value)
    with pytest.raises(
        ConfigError, match=r"^the proxy .*can't be used for mirror\.example; accepted: http://"
    ) as error:
        open_remote("https://mirror.example/cache")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_s3_is_asked_through_the_proxy(s3_environment: dict[str, str], proxy: Proxy, variable: str) -> None:
    bucket, url = f"s3://bucket/{uuid.uuid4().hex}", s3_environment["AWS_ENDPOINT_URL"]
    code = f"from vllm_neuron.cache.remote.urls import open_remote; print(open_remote({bucket!r}).keys())"

    def keys(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **s3_environment, **variables}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert keys(**{variable: proxy.url()}).stdout == "[]\n"
    assert f" {url}/bucket" in proxy.asked()
    before = proxy.asked()
    assert keys(**{variable: proxy.url(), "no_proxy": "127.0.0.1"}).stdout == "[]\n"
    assert proxy.asked() == before
    (port,) = free_ports(1)
    dead = keys(**{variable: f"http://user:s3cret@127.0.0.1:{port}"})
    assert f"127.0.0.1:{port}" in dead.stderr
    assert "s3cret" not in dead.stderr
