"""The published index of a folder: what a web server that shows the folder answers when asked for a list."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_neuron.cache.disk import files
from vllm_neuron.cache.key import is_key
from vllm_neuron.cache.store.folder import FolderStore
from vllm_neuron.cache.store.layout import MANIFESTS, manifest_key, manifest_name
from vllm_neuron.errors import CacheError

INDEX = "index.json"


def write(root: Path) -> int:
    """Write ``index.json`` in the folder of a remote tier; return the number of keys. Raises ``CacheError``."""
    store = FolderStore(root)
    try:
        keys = store.names("")
        manifests = [key for name in store.names(MANIFESTS) if (key := manifest_key(name)) is not None]
        with files.replacing(root / INDEX) as aside:
            aside.write_text(json.dumps({"keys": keys, "manifests": manifests}, indent=1) + "\n")
    except OSError as error:
        raise CacheError(f"the index of {root} can't be written: {error}") from error
    return len(keys)


def names(text: bytes, folder: str) -> list[str]:
    """What an index says of ``folder``, as ``Reader.names``. Raises ``ValueError`` and its like where it is damaged."""
    keys = [key for key in json.loads(text)["manifests" if folder == MANIFESTS else "keys"] if isinstance(key, str)]
    known = [key for key in keys if is_key(key)]
    return [manifest_name(key) for key in known] if folder == MANIFESTS else known
