"""What the control groups of this process leave it: both versions, every level from the process up to the mount.

Every function takes the root of the file system, ``/`` but in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the process may use, such as 1.5; None where nothing limits it."""
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that may still be allocated before a limit is met; None where nothing limits the process.

    Cached file pages that the kernel can drop count as available.
    """
    rooms = [room for folder in _folders(root, "memory") if (room := _room(folder)) is not None]
    return min(rooms, default=None)


def _quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    numbers = [int(word) for word in text.split() if word.lstrip("-").isdigit()]
    if len(numbers) != 2 or numbers[0] <= 0 or numbers[1] <= 0:  # "max 100000", or -1: no limit
        return None
    return numbers[0] / numbers[1]


def _room(folder: Path) -> int | None:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    # In version 1 the plain figure leaves out the groups below, and the total does not.
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return max(0, limit - used + min(reclaimable, used))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's group and of the groups above it, for one controller, in both versions."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for name in ("", "unified") if not controllers else (controllers, controller):
            mount = root / "sys/fs/cgroup" / name
            # In a container without a namespace of its own the path is the host's, and the mount is our group.
            group = mount / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
