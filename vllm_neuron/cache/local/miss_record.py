"""What was looked for in strict mode and not found: kept, so that it can be explained after the process has ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_neuron.cache.disk import files
from vllm_neuron.cache.key import ArtifactKey, is_key
from vllm_neuron.cache.local.tier import LocalTier

logger = logging.getLogger("vllm.neuron.cache")

FOLDER = "misses"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class RecordedMiss:
    """A key that no tier had: its parts, what it was made from, and the command that fills it ('' where unknown)."""

    key: str
    parts: Mapping[str, str]
    provenance: Mapping[str, Any]
    command: str


def record(local: LocalTier, key: ArtifactKey, provenance: Mapping[str, Any], command: str = "") -> None:
    """Note a miss in the local tier. Where that can't be written to, nothing is noted."""
    folder = local.shared_folder(FOLDER)
    if folder is None:
        return
    if not command:  # A plan knows none: that of an earlier start stays.
        command = next((miss.command for miss in recorded(local) if miss.key == key.digest), "")
    document = {"parts": dict(key.parts), "provenance": dict(provenance), "command": command}
    try:
        with files.replacing(folder / f"{key.digest}.json") as aside:
            aside.write_text(json.dumps(document, indent=1, default=str) + "\n")
    except OSError as error:
        logger.debug("The miss of %s can't be noted: %s", key.digest, error)


def recorded(local: LocalTier) -> Iterator[RecordedMiss]:
    """The misses that were noted, the last one first. What can't be read is left out."""
    paths = [path for path in (local.root / f".{FOLDER}").glob("*.json") if is_key(path.stem)]
    for path in sorted(paths, key=_time, reverse=True):
        try:
            document = json.loads(path.read_bytes()[:_MAX_BYTES])
            yield RecordedMiss(path.stem, document["parts"], document["provenance"], document["command"])
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
