"""What a compile job did, per graph: for a person, for a pipeline, and as an exit code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_neuron import envs


@dataclass(frozen=True)
class GraphLine:
    """One graph for one target. ``source`` is local, remote, compiled, missing or failed.

    ``shared`` says whether a remote tier has it, None where there is no remote tier.
    """

    graph: str
    target: str
    source: str
    key: str = ""
    seconds: float = 0.0
    artifact_bytes: int = 0
    peak_memory_bytes: int = 0
    published: bool = False
    shared: bool | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if production will find the graph: in a remote tier, where there is one."""
        return self.source not in ("missing", "failed") and self.shared is not False

    @property
    def result(self) -> str:
        """What became of it, in words."""
        published = ", published" if self.published else ""
        unshared = ", in no remote tier" if self.shared is False else ""
        return f"{self.source}{published}{unshared}"


@dataclass
class JobReport:
    """All graphs of one job."""

    model: str
    graphs: list[GraphLine] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 if every graph is there, else 1."""
        return 0 if self.graphs and all(line.ok for line in self.graphs) else 1

    def count(self, source: str) -> int:
        """How many graphs came from ``source``."""
        return sum(line.source == source for line in self.graphs)

    def summary(self) -> str:
        """One sentence with the numbers that matter."""
        parts = [f"{self.count(source)} {text}" for source, text in _SUMMARY.items() if self.count(source)]
        published = sum(line.published for line in self.graphs)
        unshared = sum(line.shared is False for line in self.graphs)
        where = f"; {published} newly published" if published else ""
        where += f"; {unshared} in no remote tier" if unshared else ""
        return f"{self.model}: {len(self.graphs)} graphs in {self.seconds:.1f} s: {', '.join(parts) or 'none'}{where}."

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, for ``--report``."""
        return {
            "model": self.model,
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
            "tiers": self.tiers,
            "graphs": [asdict(line) for line in self.graphs],
        }

    def write(self, path: Path) -> None:
        """Write :meth:`to_json` to ``path``. Raises ``OSError``."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    def print(self) -> None:
        """A table of the graphs, the errors in full, and the summary, to standard output."""
        console = Console(markup=False)  # A path may have brackets in it.
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH
        table = Table(title=f"Graphs of {self.model}", title_justify="left")
        for column in ("graph", "target", "result", "seconds", "artifact", "memory", "key"):
            numeric = column in ("seconds", "artifact", "memory")
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
        for line in self.graphs:
            table.add_row(
                line.graph,
                line.target,
                line.result,
                f"{line.seconds:.1f}",
                f"{line.artifact_bytes / 1024:.0f} KiB" if line.artifact_bytes else "",
                f"{line.peak_memory_bytes / 2**20:.0f} MiB" if line.peak_memory_bytes else "",
                line.key,
            )
        console.print(table)
        for line in self.graphs:
            if line.error:
                console.print(f"{line.graph}: {line.error}", style="red", highlight=False)
        console.print(self.summary(), highlight=False)
        # The first tier is the local one.
        if len(self.tiers) < 2 and all(line.shared is None for line in self.graphs):
            hint = f"No remote tier is set, with --remote or {envs.REMOTE_CACHE.name}: other machines can't use them."
            console.print(hint, highlight=False)


# Of a log file: wide enough for whole keys.
_PLAIN_WIDTH = 160

_SUMMARY = {
    "compiled": "compiled",
    "local": "already in the local tier",
    "remote": "already in the remote tier",
    "missing": "missing",
    "failed": "failed",
}
