"""Signatures: only entries by those who are trusted come in from elsewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from entries import ARTIFACT, KEY, OTHER, fill, manifest
from remotes import folder_tier

from vllm_neuron.cache import archive
from vllm_neuron.cache.entry import Entry
from vllm_neuron.cache.local.tier import LocalTier
from vllm_neuron.cache.manifests.store import ManifestStore
from vllm_neuron.cache.remote.tier import RemoteTier
from vllm_neuron.cache.tiers import TieredCache
from vllm_neuron.errors import CacheError, ConfigError

SIGNING, TRUSTED = "VLLM_NEURON_CACHE_SIGNING_KEY", "VLLM_NEURON_CACHE_TRUSTED_KEYS"
PEM = serialization.Encoding.PEM


@pytest.fixture
def key(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """Makes a pair of keys by a name; returns the paths of the private and of the public one."""

    def make(name: str) -> tuple[str, str]:
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub.pem"
        made = Ed25519PrivateKey.generate()
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        private.write_bytes(made.private_bytes(PEM, pkcs8, plain))
        public.write_bytes(made.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
        return str(private), str(public)

    return make


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return LocalTier(tmp_path / "builder").build(KEY, fill)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteTier:
    return folder_tier(tmp_path / "remote")


@pytest.fixture
def look(tmp_path: Path, remote: RemoteTier) -> Callable[[], bool]:
    """Whether a new host gets the entry from the remote tier."""
    hosts = iter(range(100))
    return lambda: TieredCache(LocalTier(tmp_path / f"host{next(hosts)}"), [remote]).lookup(KEY) is not None


def test_only_the_trusted_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
    entry: Entry,
    remote: RemoteTier,
    look: Callable[[], bool],
    key: Callable[[str], tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (ours, ours_public), (_, other_public) = key("ours"), key("other")
    monkeypatch.setenv(SIGNING, ours)
    assert remote.publish(entry) is True
    monkeypatch.delenv(SIGNING)
    assert look()
    monkeypatch.setenv(TRUSTED, f"{other_public},{ours_public}")
    assert look()
    monkeypatch.setenv(TRUSTED, other_public)
    assert not look()
    assert "has no valid signature by a key that is trusted here" in caplog.text


def test_signature_is_over_this_entry_alone(
    monkeypatch: pytest.MonkeyPatch,
    entry: Entry,
    remote: RemoteTier,
    look: Callable[[], bool],
    key: Callable[[str], tuple[str, str]],
    tmp_path: Path,
) -> None:
    private, public = key("ours")
    monkeypatch.setenv(SIGNING, private)
    remote.publish(entry)
    signature = (Path(remote.name) / KEY / "metadata.sig").read_bytes()
    monkeypatch.delenv(SIGNING)
    other = folder_tier(tmp_path / "other")
    other.publish(LocalTier(tmp_path / "liar").build(KEY, lambda folder: fill(folder, b"of a liar")))
    (Path(other.name) / KEY / "metadata.sig").write_bytes(signature)
    monkeypatch.setenv(TRUSTED, public)
    assert TieredCache(LocalTier(tmp_path / "victim"), [other]).lookup(KEY) is None
    for nonsense in (b"", b"{}", b"[" * 1000, b'{"signature": "!"}', b'{"signature": 7}'):
        (Path(remote.name) / KEY / "metadata.sig").write_bytes(nonsense)
        assert not look()
    (Path(remote.name) / KEY / "metadata.sig").write_bytes(signature)
    assert look()


def test_unsigned_entry_is_replaced_by_who_signs_and_is_never_signed_by_him(
    monkeypatch: pytest.MonkeyPatch,
    entry: Entry,
    remote: RemoteTier,
    look: Callable[[], bool],
    key: Callable[[str], tuple[str, str]],
    tmp_path: Path,
) -> None:
    stranger = LocalTier(tmp_path / "stranger").build(KEY, lambda folder: fill(folder, b"of a stranger"))
    remote.publish(stranger)
    private, _ = key("ours")
    monkeypatch.setenv(SIGNING, private)
    assert not look()
    assert remote.publish(entry) is True
    assert remote.publish(entry) is False
    found = TieredCache(LocalTier(tmp_path / "host"), [remote]).lookup(KEY)
    assert found is not None
    assert found.entry.artifact_path.read_bytes() == ARTIFACT


def test_what_nobody_here_would_accept_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
    entry: Entry,
    remote: RemoteTier,
    key: Callable[[str], tuple[str, str]],
    tmp_path: Path,
) -> None:
    """Else a job says that it has published what production refuses. What is there and trusted is enough."""
    private, public = key("ours")
    store = ManifestStore(tmp_path / "manifests", [remote])
    monkeypatch.setenv(TRUSTED, public)
    attempts: list[Callable[[], object]] = [
        lambda: TieredCache(LocalTier(tmp_path / "host"), [remote]).publish_remote(entry),
        lambda: store.publish(manifest()),
        lambda: archive.pack([entry], tmp_path / "cache.tar"),
    ]
    for attempt in attempts:
        with pytest.raises(CacheError, match=f"is not signed, and only signed ones are accepted here: set {SIGNING} "):
            attempt()
    assert (remote.keys(), remote.manifest_keys(), list(tmp_path.glob("*.tar"))) == ([], [], [])
    monkeypatch.setenv(SIGNING, private)
    assert (remote.publish(entry), store.publish(manifest())) == (True, True)
    monkeypatch.delenv(SIGNING)
    assert (remote.publish(entry), store.publish(manifest())) == (False, False)


def test_archives_are_signed_and_checked(
    monkeypatch: pytest.MonkeyPatch, entry: Entry, key: Callable[[str], tuple[str, str]], tmp_path: Path
) -> None:
    (private, public), (_, other) = key("ours"), key("other")
    archive.pack([entry], tmp_path / "unsigned.tar")
    monkeypatch.setenv(SIGNING, private)
    archive.pack([entry], tmp_path / "signed.tar")
    monkeypatch.delenv(SIGNING)
    local, manifests = LocalTier(tmp_path / "local"), ManifestStore(tmp_path / "manifests")
    for trusted, name in ((public, "unsigned.tar"), (other, "signed.tar")):
        monkeypatch.setenv(TRUSTED, trusted)
        with pytest.raises(CacheError, match="sign"):
            archive.unpack(tmp_path / name, local, manifests)
        assert local.keys() == []
    monkeypatch.setenv(TRUSTED, public)
    assert archive.unpack(tmp_path / "signed.tar", local, manifests).entries == {KEY: True}


def test_manifests_are_signed_and_checked(
    monkeypatch: pytest.MonkeyPatch, remote: RemoteTier, key: Callable[[str], tuple[str, str]], tmp_path: Path
) -> None:
    (private, public), (_, other) = key("ours"), key("other")
    hosts = (ManifestStore(tmp_path / f"host{n}", [remote]) for n in range(100))
    ours = manifest()
    assert next(hosts).publish(ours) is True
    monkeypatch.setenv(TRUSTED, public)
    host = next(hosts)
    assert host.lookup(ours.key) is None
    assert f"manifest {ours.key} is not signed" in host.problems[ours.key]
    # Who signs replaces what is not signed, once; who does not leaves what is.
    monkeypatch.setenv(SIGNING, private)
    assert [next(hosts).publish(ours), next(hosts).publish(ours)] == [True, False]
    monkeypatch.delenv(SIGNING)
    monkeypatch.delenv(TRUSTED)
    assert next(hosts).publish(ours) is False
    monkeypatch.setenv(TRUSTED, public)
    host = next(hosts)
    assert host.lookup(ours.key) is not None
    # The signature goes along with what a host that signs nothing has fetched, and packs.
    found = host.lookup(ours.key)
    assert found is not None
    assert found.tier == "local"
    archive.pack([], tmp_path / "signed.tar", [found.manifest])
    monkeypatch.delenv(TRUSTED)
    archive.pack([], tmp_path / "unsigned.tar", [ours])
    monkeypatch.setenv(TRUSTED, public)
    local = LocalTier(tmp_path / "local")
    assert archive.unpack(tmp_path / "signed.tar", local, next(hosts)).manifests == {ours.key: True}
    with pytest.raises(CacheError, match="is not signed"):
        archive.unpack(tmp_path / "unsigned.tar", local, next(hosts))
    monkeypatch.setenv(TRUSTED, other)
    with pytest.raises(CacheError, match="no valid signature"):
        archive.unpack(tmp_path / "signed.tar", local, next(hosts))
    assert next(hosts).lookup(ours.key) is None


def test_openssl_makes_and_checks_the_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: Entry) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)], check=True)
    subprocess.run(["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)], check=True)
    monkeypatch.setenv(SIGNING, str(private))
    remote = folder_tier(tmp_path / "remote")
    remote.publish(entry)
    monkeypatch.delenv(SIGNING)
    monkeypatch.setenv(TRUSTED, str(public))
    assert TieredCache(LocalTier(tmp_path / "host"), [remote]).lookup(KEY) is not None
    assert remote.metadata(OTHER.digest) is None


@pytest.mark.parametrize("variable", [SIGNING, TRUSTED])
@pytest.mark.parametrize("content", [None, b"", b"no key", "rsa"])
def test_bad_keys_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, content: bytes | str | None
) -> None:
    path = tmp_path / f"{variable}.pem"
    if content == "rsa":
        made = generate_private_key(65537, 2048)
        private = made.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        public = made.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        path.write_bytes(private if variable == SIGNING else public)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    monkeypatch.setenv(variable, str(path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    with pytest.raises(ConfigError, match=f"{variable}.*{path}.*openssl"):
        TieredCache.from_environment()
