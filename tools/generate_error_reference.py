"""Write ``docs/reference/errors.md`` from the error classes of the package."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import vllm_neuron

PACKAGE = Path(vllm_neuron.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference" / "errors.md"

INTRODUCTION = """\
# Errors and their codes

<!-- Generated from the error classes of vllm_neuron by `make docs`. Change their docstrings. -->

Every error that this package raises on purpose is a `vllm_neuron.errors.NeuronError`. Its attribute `code` stays the
same from release to release, while messages may change: decide by the code, show the message. The command line prints
the message as one line, and exits with 2 for a `ConfigError` and with 1 for any other.

| code | class | what it says |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class ErrorClass:
    """An exception class as its source has it. ``code`` is '' where it sets none of its own."""

    name: str
    bases: tuple[str, ...]
    code: str
    meaning: str


def error_classes() -> list[ErrorClass]:
    """Every exception class of the package, read from its source; those of ``errors.py`` first."""
    files = sorted(PACKAGE.rglob("*.py"), key=lambda file: (file.name != "errors.py", file))
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    ours = set[str]()
    # A base may come after what derives from it.
    while new := {node.name for node in classes if _is_error(node, ours)} - ours:
        ours |= new
    return [
        ErrorClass(node.name, _bases(node), _code(node), ast.get_docstring(node) or "")
        for node in classes
        if node.name in ours
    ]


def _bases(node: ast.ClassDef) -> tuple[str, ...]:
    return tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)


def _is_error(node: ast.ClassDef, ours: set[str]) -> bool:
    return any(base in ours or base.endswith(("Error", "Exception")) for base in _bases(node))


def _code(node: ast.ClassDef) -> str:
    for statement in node.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Constant):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            if ast.unparse(target) == "code":
                return str(statement.value.value)
    return ""


def page() -> str:
    """The whole page."""
    rows = [
        f"| `{error.code}` | `{error.name}` | {' '.join(error.meaning.replace('``', '`').split())} |"
        for error in error_classes()
    ]
    return INTRODUCTION + "\n".join(rows) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
