"""The results of a run: as JSON with every round, and as a table of medians and of ratios within a round."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

COLUMNS = {
    "start_cold_s": "ready, cold (s)",
    "start_warm_s": "ready, warm (s)",
    "prefill_1": "prefill, 1 stream (tok/s)",
    "prefill_8": "prefill, 8 streams (tok/s)",
    "decode_1": "decode, 1 stream (tok/s)",
    "decode_8": "decode, 8 streams (tok/s)",
}

_PLAIN_WIDTH = 140


def make_console() -> Console:
    """Standard output, as wide as the terminal; where it is a file, wide enough that no table wraps."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


@dataclass
class Series:
    """Measurements of one engine with one dtype: for each column a value per round, and its greedy tokens."""

    engine: str
    dtype: str
    values: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    def add(self, column: str, value: float) -> None:
        """Append the value of the next round."""
        self.values.setdefault(column, []).append(value)


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_at_start": os.getloadavg()[0],
    }


def ratio(ours: list[float], other: list[float]) -> float:
    """The median over rounds of ours to the other: a round's disturbance is in both, and cancels."""
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def rows(series: list[Series]) -> list[list[str]]:
    """A header, then a row per dtype and column, with a cell per engine.

    A cell is a median; in brackets, the first engine relative to that one.
    """
    engines = list(dict.fromkeys(one.engine for one in series))
    table = [["dtype", "measured", *engines]]
    for dtype in dict.fromkeys(one.dtype for one in series):
        first, *others = (one for one in series if one.dtype == dtype)
        for column, title in COLUMNS.items():
            cells = [f"{statistics.median(first.values[column]):.1f}"]
            cells += [
                f"{statistics.median(one.values[column]):.1f} ({ratio(first.values[column], one.values[column]):.2f}x)"
                for one in others
            ]
            table.append([dtype, title, *cells])
        same = ["same" if one.tokens == first.tokens else "different" for one in others]
        table.append([dtype, "32 greedy tokens", "-", *same])
    return table


def markdown(series: list[Series], about: dict[str, object]) -> str:
    """The table, with a legend and the facts of the run."""
    table = rows(series)
    lines = [f"| {' | '.join(row)} |" for row in table]
    lines.insert(1, "|" + " --- |" * len(table[0]))
    first = series[0].engine
    legend = (
        f"Medians over rounds that were interleaved between the engines. In brackets: {first} divided by that engine, "
        f"as the median of the ratios within a round; for rates above 1 {first} is faster, for times below 1."
    )
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return "\n".join(lines) + f"\n\n{legend}\n\n{facts}\n"


def write(folder: Path, name: str, series: list[Series], about: dict[str, object]) -> list[Path]:
    """Write ``NAME.json`` and ``NAME.md`` to ``folder``, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, table = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps({"about": about, "series": [asdict(one) for one in series]}, indent=1) + "\n")
    table.write_text(markdown(series, about))
    return [data, table]
