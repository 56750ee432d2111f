"""The published index of a remote folder: what a web server that shows the folder answers when asked for a list."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from vllm_neuron.cache.entry import complete_keys
from vllm_neuron.cache.http_remote import INDEX
from vllm_neuron.cache.manifest_folder import MANIFESTS, ManifestFolder
from vllm_neuron.errors import CacheError


def write(root: Path) -> int:
    """Write ``index.json`` in the folder of a remote tier; return the number of keys. Raises ``CacheError``."""
    aside = root / f".{INDEX}.{secrets.token_hex(8)}"
    try:
        keys, manifests = complete_keys(root), ManifestFolder(root / MANIFESTS).keys()
        aside.write_text(json.dumps({"keys": keys, "manifests": manifests}, indent=1) + "\n")
        aside.replace(root / INDEX)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CacheError(f"the index of {root} can't be written: {error}") from error
    return len(keys)
