"""From the text of an environment variable to its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Parser(Generic[T_co]):
    """Turns a variable's text into its value. ``convert`` raises ``ValueError`` on anything not ``accepted``."""

    kind: str
    accepted: str
    convert: Callable[[str], T_co]

    def __call__(self, text: str) -> T_co:
        return self.convert(text)


def absolute(text: str) -> str:
    """A path as an absolute one, `~` resolved. Raises ``ValueError`` where it stands for no home."""
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError(f"{text}: there is no such home folder") from None


def _paths(text: str) -> tuple[str, ...]:
    if not all(part.strip() for part in text.split(",")):
        raise ValueError(text)
    return tuple(absolute(part.strip()) for part in text.split(","))


def _remotes(text: str) -> str:
    """Folders become absolute; URLs, and what is empty, are for the cache to judge."""
    parts = (part.strip() for part in text.split(","))
    return ",".join(part if "://" in part or not part else absolute(part) for part in parts)


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _number(text: str, least: float, most: float = math.inf) -> float:
    value = float(text)
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(text)
    return value


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError(text)
    return text.upper()


BOOLEAN = Parser("bool", f"{', '.join(_TRUE + _FALSE)} (in any case)", _boolean)
COUNT = Parser("int", "a whole number, 1 or more", lambda text: int(_number(str(int(text)), 1)))
SECONDS = Parser("seconds", "a number of seconds, 0.001 or more", lambda text: _number(text, 0.001))
TEXT = Parser("str", "any text", str)
PATH = Parser("path", "a folder", absolute)
REMOTES = Parser("paths or URLs", "folders or URLs, separated by commas", _remotes)
FILE = Parser("path", "a file", absolute)
FILES = Parser("paths", "files, separated by commas", _paths)
LOGICAL_CORES = Parser("int", "1 or 2", lambda text: int(_number(str(int(text)), 1, 2)))
FRACTION = Parser("float", "a number from 0 to 1", lambda text: _number(text, 0, 1))
GIBIBYTES = Parser("float", "a number of GiB, 0 or more", lambda text: _number(text, 0))
LEVEL = Parser("str", "DEBUG, INFO, WARNING, ERROR, CRITICAL", _level)
