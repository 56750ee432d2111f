"""Who may have made an entry: Ed25519 signatures over its metadata, which hold the digests of all its files.

A manifest is signed as a whole. Where ``VLLM_NEURON_CACHE_SIGNING_KEY`` names a private key, what is published is
signed with it. Where ``VLLM_NEURON_CACHE_TRUSTED_KEYS`` names public keys, entries and manifests enter the local tier
from elsewhere only with a valid signature by one of them. A process that signs trusts its own key too, and then no
stranger: it signs nothing that it has not made. The local tier itself is not asked: it is this user's own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_neuron import envs
from vllm_neuron.cache.disk import files
from vllm_neuron.cache.metadata import MAX_METADATA_BYTES, MAX_SIGNATURE_BYTES, METADATA_FILE, SIGNATURE_FILE
from vllm_neuron.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ENTRY, MANIFEST = "cache entry", "manifest"
"""What can be signed: a signature of one kind is none of the other."""


class UntrustedEntryError(CacheError):
    """An entry or a manifest has no signature by a key that is trusted here."""

    code = "untrusted-entry"


def signature(key: str, metadata: bytes, kind: str = ENTRY) -> bytes | None:
    """The text of ``metadata.sig`` for an entry's key and the bytes of its ``metadata.json``; None: nothing signs here.

    Of a manifest: what follows it in its file, for its trace key and its own bytes.

    Raises ``ConfigError`` where the variable does not name an Ed25519 private key.
    """
    path = envs.CACHE_SIGNING_KEY.get()
    if path is None:
        return None
    signed = _private_key(path).sign(_message(kind, key, metadata))
    return json.dumps({"algorithm": "ed25519", "signature": base64.b64encode(signed).decode()}).encode() + b"\n"


def to_publish(key: str, metadata: bytes, found: bytes | None, kind: str = ENTRY) -> bytes | None:
    """The signature to publish with: this process's own where it signs, else ``found``, which it came with.

    Raises ``UntrustedEntryError`` where those who trust what is trusted here would not accept it.
    """
    made = signature(key, metadata, kind) or found
    try:
        check(key, metadata, made, kind)
    except UntrustedEntryError as error:
        raise UntrustedEntryError(
            f"{error}: set {envs.CACHE_SIGNING_KEY.name} to sign what is published, "
            f"or unset {envs.CACHE_TRUSTED_KEYS.name}"
        ) from None
    return made


def check_signs() -> None:
    """Raise ``UntrustedEntryError`` where nobody here would accept what this process makes."""
    if envs.CACHE_TRUSTED_KEYS.get() and envs.CACHE_SIGNING_KEY.get() is None:
        raise UntrustedEntryError(
            f"what is made here would not be signed, and {envs.CACHE_TRUSTED_KEYS.name} accepts only signed entries: "
            f"set {envs.CACHE_SIGNING_KEY.name}, or unset {envs.CACHE_TRUSTED_KEYS.name}"
        )


def check(key: str, metadata: bytes, found: bytes | None, kind: str = ENTRY) -> None:
    """Raise ``UntrustedEntryError`` unless nobody in particular is trusted, or ``found`` is by one who is."""
    trusted = _trusted()
    if not trusted:
        return
    if found is None:
        raise UntrustedEntryError(f"{kind} {key} is not signed, and only signed ones are accepted here")
    if not _signed_by(trusted, _message(kind, key, metadata), found):
        raise UntrustedEntryError(f"{kind} {key} has no valid signature by a key that is trusted here")


def check_folder(folder: Path, key: str) -> None:
    """``check`` for the entry of ``key`` in a folder that this process has made."""
    with files.folder(folder) as descriptor:
        data = files.read_small(METADATA_FILE, MAX_METADATA_BYTES, descriptor)
        check(key, data, files.read_if_there(SIGNATURE_FILE, MAX_SIGNATURE_BYTES, descriptor))


def suffices(key: str, metadata: bytes, found: bytes | None, kind: str = ENTRY) -> bool:
    """Whether something that is in a store already would be accepted here, and so need not be replaced."""
    try:
        check(key, metadata, found, kind)
    except UntrustedEntryError:
        return False
    return True


def _trusted() -> list[Ed25519PublicKey]:
    """The keys that are trusted, none where anyone is. Who signs trusts its own: it must never sign a stranger's."""
    keys = [_public_key(path) for path in envs.CACHE_TRUSTED_KEYS.get() or ()]
    signing = envs.CACHE_SIGNING_KEY.get()
    return keys if signing is None else [*keys, _private_key(signing).public_key()]


def check_variables() -> None:
    """Read every key that the variables name. Raises ``ConfigError``."""
    if path := envs.CACHE_SIGNING_KEY.get():
        _private_key(path)
    for path in envs.CACHE_TRUSTED_KEYS.get() or ():
        _public_key(path)


def _signed_by(keys: list[Ed25519PublicKey], message: bytes, found: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        document = json.loads(found)
        signed = base64.b64decode(document["signature"], validate=True)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    for public in keys:
        try:
            public.verify(signed, message)
        except InvalidSignature:
            continue
        return True
    return False


def _message(kind: str, key: str, metadata: bytes) -> bytes:
    return f"vllm-neuron {kind}, format 1\n{key}\n{hashlib.sha256(metadata).hexdigest()}\n".encode()


@functools.lru_cache
def _private_key(path: str) -> Ed25519PrivateKey:
    name = envs.CACHE_SIGNING_KEY.name
    serialization = _serialization(name)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        loaded: Any = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{name}={path!r} can't be read ({error}); {_HOW_TO_MAKE}") from error
    if not isinstance(loaded, Ed25519PrivateKey):
        raise ConfigError(f"{name}={path!r} is not an Ed25519 key; {_HOW_TO_MAKE}")
    return loaded


@functools.lru_cache
def _public_key(path: str) -> Ed25519PublicKey:
    name = envs.CACHE_TRUSTED_KEYS.name
    serialization = _serialization(name)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        loaded: Any = serialization.load_pem_public_key(Path(path).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {path!r} can't be read ({error}); {_HOW_TO_EXPORT}") from error
    if not isinstance(loaded, Ed25519PublicKey):
        raise ConfigError(f"{name}: {path!r} is not an Ed25519 public key; {_HOW_TO_EXPORT}")
    return loaded


_HOW_TO_MAKE = "accepted: a PEM file, made with `openssl genpkey -algorithm ed25519 -out key.pem`"
_HOW_TO_EXPORT = "accepted: PEM files, made with `openssl pkey -in key.pem -pubout -out public.pem`"


def _serialization(variable: str) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise ConfigError(
            f"{variable} needs the package cryptography; run `pip install 'vllm-neuron[signing]'`"
        ) from error
    return serialization
