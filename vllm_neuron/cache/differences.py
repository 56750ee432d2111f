"""What is different between two records of plain values, in words, as far as a person reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

_FIELDS_SHOWN = 5
_LONGEST = 200
_BEFORE = 40


def differences(name: str, there: object, here: object) -> list[str]:
    """One phrase for each field that differs, such as ``model.hidden_size: 128 there, 256 here``; at most five.

    ``there`` and ``here`` are plain values called ``name``; those of mappings are compared field by field. A field that
    one side lacks is ``unset`` on it. Records may come from strangers: what a terminal would obey is escaped.
    """
    found = list(_differences(name, there, here))
    more = len(found) - _FIELDS_SHOWN
    return [*found[:_FIELDS_SHOWN], *([f"{name}: {more} more fields differ"] if more > 0 else [])]


def _differences(name: str, there: object, here: object) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for field in sorted(there.keys() | here.keys()):
            yield from _differences(f"{name}.{printable(field)}", there.get(field), here.get(field))
    elif there != here:
        texts = _text(there), _text(here)
        equal = next((place for place, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), 0)
        yield "{}: {} there, {} here".format(name, *(_cut(text, equal) for text in texts))


def _text(value: object) -> str:
    if value is None:
        return "unset"
    return printable(value if isinstance(value, str) else json.dumps(value, default=str))


def _cut(text: str, equal: int) -> str:
    """At most so much of a text as can be read, with the place where it differs, after ``equal`` letters, in it."""
    start = max(0, equal - _BEFORE) if equal > _LONGEST - _BEFORE else 0
    rest = text[start:]
    return f"{'...' if start else ''}{rest if len(rest) <= _LONGEST else f'{rest[: _LONGEST - 3]}...'}"


def printable(text: str) -> str:
    """``text`` with what a terminal would obey, and what would look like another line, escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
