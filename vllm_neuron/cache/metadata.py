"""``metadata.json``: what an entry says about itself."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from vllm_neuron.abi import Abi
from vllm_neuron.cache.disk.files import NotAsExpected
from vllm_neuron.cache.key import FORMAT_VERSION, ArtifactKey, abi_digest, sha256

METADATA_FILE = "metadata.json"
COMPLETE_MARKER = ".compilation_complete"
SIGNATURE_FILE = "metadata.sig"

MAX_MARKER_BYTES = 1024
MAX_SIGNATURE_BYTES = 4096
MAX_METADATA_BYTES = 16 << 20
MAX_ENTRY_BYTES = 16 << 30
MAX_FILES = 64

# A plain name: no separator, no leading dot, nothing that a shell or a URL would read as something else.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class FileRecord(BaseModel):
    """Size in bytes of one file of an entry, and the digest of its content, as ``digests`` defines it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    size: int = Field(ge=0, le=MAX_ENTRY_BYTES)
    digest: Sha256


class Metadata(BaseModel):
    """Everything known of an entry. Consistent in itself: the parts give the key, and the ABI and the module's digest
    are the ones in the parts.

    ``abi`` is ``Abi.to_json()``. ``compile_seconds`` is wall-clock time, ``peak_memory_bytes`` the compiler's.
    ``required_features`` are the CPU features without which the artifact can't be loaded.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format_version: int
    key: Key
    key_parts: dict[str, str]
    abi: dict[str, Any]
    module_file: FileName
    artifact_file: FileName
    files: dict[FileName, FileRecord] = Field(max_length=MAX_FILES)
    required_features: tuple[str, ...] = ()
    provenance: dict[str, JsonValue] = {}
    compile_seconds: FiniteFloat = Field(default=0.0, ge=0)
    peak_memory_bytes: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Metadata:
        if ArtifactKey.from_parts(self.key_parts).digest != self.key:
            raise ValueError("the key is not the digest of the key parts")
        try:
            abi = Abi.from_json(self.abi)
            _ = self.compiler, self.compiler_version, self.target, self.level, self.flags
        except (KeyError, TypeError) as error:
            raise ValueError(f"the ABI or the key parts do not parse: {error!r}") from error
        if abi_digest(abi) != self.key_parts.get("abi"):
            raise ValueError("the ABI is not the one in the key parts")
        for name in (self.module_file, self.artifact_file):
            if name not in self.files:
                raise ValueError(f"{name} is not among the files")
        if self.files[self.module_file].digest != self.key_parts.get("module"):
            raise ValueError(f"{self.module_file} is not the module in the key parts")
        if self.size > MAX_ENTRY_BYTES:
            raise ValueError(f"its files take {self.size} bytes, at most {MAX_ENTRY_BYTES} are allowed")
        return self

    @model_validator(mode="after")
    def _no_reserved_names(self) -> Metadata:
        if reserved := self.files.keys() & {METADATA_FILE, SIGNATURE_FILE}:
            raise ValueError(f"{min(reserved)} can't be among the files")
        return self

    @property
    def size(self) -> int:
        """Bytes of all files that are listed."""
        return sum(record.size for record in self.files.values())

    @property
    def compiler(self) -> str:
        """Name of the compiler, such as ``iree``."""
        return self.key_parts["compiler"]

    @property
    def compiler_version(self) -> str:
        """The compiler's exact version."""
        return self.key_parts["compiler_version"]

    @property
    def target(self) -> str:
        """Canonical name of the target."""
        return self.key_parts["target"]

    @property
    def level(self) -> int:
        """Optimization level, 0 to 3."""
        return int(self.key_parts["level"].removeprefix("O"))

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags, in the order of its command line."""
        return tuple(json.loads(self.key_parts["flags"]))

    def to_json(self) -> str:
        """The text of ``metadata.json``."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True, allow_nan=False) + "\n"


class ForeignFormat(NotAsExpected):
    """Metadata of a format version that another release writes."""

    code = "foreign-format"


def parse_metadata(data: bytes, key: str) -> Metadata:
    """The metadata of ``key`` from the bytes of its ``metadata.json``; ``NotAsExpected`` where they are anything else.

    Of another format version is ``ForeignFormat``, which is one kind of that.
    """
    metadata = _parse(data)
    if metadata.key != key:
        raise NotAsExpected(f"it is the entry of key {metadata.key}")
    return metadata


@functools.lru_cache(maxsize=1024)
def _parse(data: bytes) -> Metadata:
    if (version := _format_version(data)) != FORMAT_VERSION:
        raise ForeignFormat(f"it has format version {version}, this release reads {FORMAT_VERSION}")
    try:
        return Metadata.model_validate_json(data)
    except ValidationError as error:
        raise NotAsExpected(f"{METADATA_FILE}: {first_problem(error)}") from error


def forget_parsed() -> None:
    """Let every ``metadata.json`` be parsed again, as in a new process."""
    _parse.cache_clear()


def marker_of(metadata: bytes) -> bytes:
    """What ``.compilation_complete`` holds for the bytes of ``metadata.json``."""
    return f"{sha256(metadata)}\n".encode()


def first_problem(error: ValidationError) -> str:
    """What is wrong first, and in which field, on one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def _format_version(data: bytes) -> JsonValue:
    """The format version that a ``metadata.json`` claims, or None where it has none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document.get("format_version") if isinstance(document, dict) else None
