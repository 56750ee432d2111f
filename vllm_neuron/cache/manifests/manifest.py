"""A manifest: what is known of one captured graph, so that a later start need not capture it again.

One line of JSON, and, where it was signed, the signature in a second one. It names the module that the graph was
lowered to, which is enough to look artifacts up, and says what each input of the graph is. It is checked in full before
any of it is used: nothing in it is run, and no name in it is a path.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, ValidationError, model_validator

from vllm_neuron.abi import Abi, InputName, TensorSpec
from vllm_neuron.cache import trust
from vllm_neuron.cache.key import TraceKey, canonical_json, sha256
from vllm_neuron.cache.metadata import Key, Sha256, first_problem
from vllm_neuron.cache.store.layout import MAX_MANIFEST_BYTES
from vllm_neuron.errors import CacheError
from vllm_neuron.lowering.module import KnownModule

MANIFEST_VERSION = 1
"""Part of every trace key: a release that writes another form looks elsewhere."""

_MAX_INPUTS = 20_000

_Name = Annotated[str, StringConstraints(pattern=r"^(inputs|kv|weights)\.[A-Za-z0-9_.]{1,300}$")]
Spec = tuple[
    Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,20}$")],
    Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...], Field(max_length=16)],
]


class ManifestError(CacheError):
    """A manifest is truncated, damaged, another graph's, or of another form than this release writes."""

    code = "manifest"


class Manifest(BaseModel):
    """One captured graph. Consistent in itself: the parts give the key, ``checksum`` is over all the rest.

    ``inputs`` names the graph's inputs by position: ``inputs.<step input>``, ``kv.<layer>.k`` or ``.v``,
    ``weights.<parameter or buffer>``; ``abi`` has their shapes. ``unread`` are the weights and caches that the captured
    model had and the graph does not read: the model that is loaded must have just these and those.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    version: int
    key: Key
    parts: dict[str, str] = Field(max_length=100)
    graph: str = Field(max_length=200)
    model: str = Field(max_length=4096)
    module_format: str
    module_sha256: Sha256
    inputs: tuple[_Name, ...] = Field(max_length=_MAX_INPUTS)
    abi: dict[str, Any]
    unread: dict[_Name, Spec] = Field(max_length=_MAX_INPUTS)
    checksum: Sha256
    _signature: bytes = PrivateAttr(b"")

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if self.version != MANIFEST_VERSION:
            raise ValueError(f"it has version {self.version}, this release reads {MANIFEST_VERSION}")
        if self.checksum != _checksum(self.model_dump(mode="json", exclude={"checksum"})):
            raise ValueError("its checksum is not that of its content")
        if TraceKey.from_parts(self.parts).digest != self.key:
            raise ValueError("the key is not the digest of the parts")
        try:
            abi = Abi.from_json(self.abi)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the ABI does not parse: {error!r}") from error
        if canonical_json(abi.to_json()) != canonical_json(self.abi):
            raise ValueError("the ABI has values of other types than it should")
        if len(self.inputs) != len(abi.inputs) or len({*self.inputs, *self.unread}) != len(abi.inputs) + len(
            self.unread
        ):
            raise ValueError(f"{len(self.inputs)} names for {len(abi.inputs)} inputs, or a name twice")
        written = {self.inputs[index] for index in abi.aliases}
        if len(written) != len(abi.aliases) or written != {name for name in self.inputs if InputName(name).is_kv}:
            raise ValueError("the inputs that are written in place are not the KV caches")
        return self

    @property
    def module(self) -> KnownModule:
        """What the artifact's key is taken from."""
        return KnownModule(self.module_format, self.module_sha256, Abi.from_json(self.abi))

    def model_inputs(self) -> dict[str, TensorSpec]:
        """The weights and KV caches of the model that was captured, by name."""
        bound = zip(self.inputs, self.module.abi.inputs, strict=True)
        read = {name: spec for name, spec in bound if not InputName(name).is_step}
        return read | {name: TensorSpec(dtype, shape) for name, (dtype, shape) in self.unread.items()}

    def step_inputs(self) -> dict[str, TensorSpec]:
        """The step inputs that the graph reads, by name without the prefix."""
        bound = zip(map(InputName, self.inputs), self.module.abi.inputs, strict=True)
        return {name.bare: spec for name, spec in bound if name.is_step}

    def to_bytes(self) -> bytes:
        """The text of the file, with the signature that it came with."""
        return self._text() + self._signature

    def to_publish(self) -> bytes:
        """The text of the file for a place that others read, signed: see ``trust.to_publish``."""
        text = self._text()
        return text + (trust.to_publish(self.key, text, self._signature or None, trust.MANIFEST) or b"")

    def check_trusted(self) -> None:
        """Raise ``UntrustedEntryError`` where keys are trusted and none of them has signed this."""
        trust.check(self.key, self._text(), self._signature or None, trust.MANIFEST)

    def suffices_for(self, other: Manifest) -> bool:
        """Whether ``other`` need not be published where this one is."""
        text = self._text()
        return text == other._text() and trust.suffices(self.key, text, self._signature or None, trust.MANIFEST)

    def _text(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), sort_keys=True, allow_nan=False) + "\n").encode()


def make_manifest(
    key: TraceKey,
    graph: str,
    model: str,
    module: Any,
    inputs: tuple[str, ...],
    unread: dict[str, TensorSpec],
) -> Manifest:
    """The manifest of a captured graph. ``module`` is its ``ModuleIdentity``. Raises :class:`ManifestError`."""
    fields: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "key": key.digest,
        "parts": dict(key.parts),
        "graph": graph,
        "model": model,
        "module_format": module.format,
        "module_sha256": module.sha256,
        "inputs": list(inputs),
        "abi": module.abi.to_json(),
        "unread": {name: [spec.dtype, list(spec.shape)] for name, spec in unread.items()},
    }
    return parse_manifest(json.dumps(fields | {"checksum": _checksum(fields)}).encode(), key.digest)


def parse_manifest(data: bytes, key: str) -> Manifest:
    """The manifest of ``key`` from the bytes of its file. Raises :class:`ManifestError` that says what is wrong."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    text, _, signature = data.partition(b"\n")
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise ManifestError(first_problem(error)) from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(str(error)) from None
    if manifest.key != key:
        raise ManifestError(f"it is the manifest of {manifest.key}")
    manifest._signature = signature
    return manifest


def _checksum(fields: dict[str, Any]) -> str:
    return sha256(canonical_json(fields).encode())
