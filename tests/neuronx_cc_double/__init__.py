"""A test double of neuronx-cc: a program with its command line, its files and its failures, that compiles nothing.

It does what is publicly known of the real one: checks its arguments, parses the module, leaves scratch files and a log
in its working directory, starts children, writes a file with the structure of a NEFF. What is to go wrong is read from
the script that ``NEURONX_CC_DOUBLE`` names: see ``behaviours``.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "2.21.33363.0+82129205"


def install(folder: Path, version: str = VERSION) -> Path:
    """Puts the double into ``folder`` as ``neuronx-cc``; a PATH of this folder alone is enough for it to run."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "neuronx-cc"
    program.write_text(
        f"#!{sys.executable}\n"
        "# A test double: it compiles nothing.\n"
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from tests.neuronx_cc_double.program import main\n"
        f"main(sys.argv[1:], {version!r})\n"
    )
    program.chmod(0o755)
    return program
