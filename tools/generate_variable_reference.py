"""Write ``docs/reference/variables.md`` from the one table of variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_neuron.envs import VARIABLES, Variable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "variables.md"

INTRODUCTION = """\
# Environment variables

<!-- Generated from vllm_neuron/envs.py by `make docs`. Change the table there. -->

Variables are read when they are needed, not when the package is imported. The route is read once, in the first process.

- An empty variable is an unset one.
- Booleans take `0`, `1`, `true`, `false`, `yes`, `no`, `on`, `off`, in any case.
- Anything that is not accepted is an error at start, which names the variable and what it accepts.
- An old name works, with a warning. The new name wins where both are set.
- A variable that begins with `VLLM_NEURON_` or `NEURON_LIBTORCH_` and is not in this table is warned about, with the
  nearest name that is.
"""


def entry(variable: Variable[Any]) -> str:
    """The section of one variable."""
    facts = [f"- accepts: {variable.parse.accepted}", f"- default: {_default(variable)}"]
    if variable.old_names:
        facts.append("- old name: " + ", ".join(f"`{name}`" for name in variable.old_names))
    return "\n".join([f"## `{variable.name}`", "", variable.meaning, "", *facts])


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, "\n\n".join(entry(variable) for variable in VARIABLES), ""])


def _default(variable: Variable[Any]) -> str:
    if variable.default_text:
        return variable.default_text
    if variable.default is None:
        return "unset"
    value = int(variable.default) if isinstance(variable.default, bool) else variable.default
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
