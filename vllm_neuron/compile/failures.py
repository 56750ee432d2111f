"""What is kept of a compile that failed, beside the cache and never in it: ``<root>/.failures/<key>/``.

The folder has what reproduces the failure (the module, and the command line), the compiler's log, and the diagnosis.
Nothing reads it: the next run compiles again, and a compile that succeeds removes it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from vllm_neuron.cache.local.tier import LocalTier

DIAGNOSIS = "diagnosis.txt"
_FOLDER = "failures"
_KEPT = 50


def keep_failure(local: LocalTier, key: str, folder: Path, about: str, diagnosis: str) -> str:
    """Copy what is in ``folder`` beside the cache, the latest failure of each key.

    Returns ``diagnosis`` with the paths of the copies. Where the cache can't be written to, they are in a temporary
    folder, which nothing removes.
    """
    record: Path | None = None
    with contextlib.suppress(OSError):
        record = _store(local, key, folder)
    if record is None:
        record = Path(tempfile.mkdtemp(prefix="vllm-neuron-failure-"))
        _copy(folder, record)
    diagnosis = diagnosis.replace(str(folder), str(record))
    (record / DIAGNOSIS).write_text(f"{about}\n\n{diagnosis}\n")
    return diagnosis


def forget_failure(local: LocalTier, key: str) -> None:
    """Remove what is kept of ``key``: it has been compiled."""
    shutil.rmtree(_root(local) / key, ignore_errors=True)


def _root(local: LocalTier) -> Path:
    return local.root / f".{_FOLDER}"


def _store(local: LocalTier, key: str, folder: Path) -> Path | None:
    root = local.shared_folder(_FOLDER)
    if root is None:
        return None
    record = root / key
    if record.exists():
        shutil.rmtree(record)
    record.mkdir()
    _copy(folder, record)
    _trim(root)
    return record


def _copy(folder: Path, record: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, record / path.name)  # Its mode too would be an error where there are none.


def _trim(root: Path) -> None:
    """Keep the latest ones only: keys of models and compilers that are gone never succeed."""
    records = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in records[_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
