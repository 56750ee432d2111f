"""Compile a model without its weights, then serve it strictly from what was compiled, and ask it a question.

Everything lies under ``.demo/``: ``config-only/`` is what the compile job sees, ``build/`` its own cache, ``remote/``
the tier that both sides share, ``production/`` the server's cache, empty at each run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from tools.server import ServerError, end_servers_on_sigterm, serving

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "models" / "smollm2-135m-bfloat16"
DEMO = ROOT / ".demo"
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
START = "start a strict server with an empty local cache"
# Four graphs: prefill of 128 and 256 tokens, decode of 1 and 2 sequences.
SHAPE = ["--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "256"]
COMPILATION = re.compile(r"Compiling .+ \(key [0-9a-f]{32}\)")
READY = re.compile(
    r"Graphs ready: (?P<all>\d+) in (?P<seconds>[\d.]+) s "
    r"\((?P<local>\d+) from the local tier, (?P<remote>\d+) from the remote tier, (?P<compiled>\d+) compiled\)"
)

console = Console()


class DemoError(Exception):
    """Something was not as the demo promises."""


class Clock:
    """Seconds per phase, in the order in which the phases ran; and per part of a phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.parts: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce the phase, and time it."""
        console.print(f"[bold cyan]>[/] {name}")
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start

    def table(self) -> Table:
        """One row per phase, and the sum."""
        table = Table("phase", title="Where the time went")
        table.add_column("seconds", justify="right")
        for name, seconds in self.seconds.items():
            table.add_row(name, f"{seconds:.1f}")
            for part, part_seconds in self.parts.get(name, {}).items():
                table.add_row(f"[dim]  of which: {part}[/]", f"[dim]{part_seconds:.1f}[/]")
        table.add_section()
        table.add_row("all", f"{sum(self.seconds.values()):.1f}")
        return table


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run a command whose own output tells how far it is. Raises :class:`DemoError` on a bad exit status."""
    done = subprocess.run(command, env=environment, cwd=DEMO)
    if done.returncode:
        raise DemoError(f"exit status {done.returncode} from: {' '.join(command)}")


def settings(cache: Path) -> dict[str, str]:
    """The environment of one machine: its own local cache, and the remote tier that all share."""
    ours = ("VLLM_NEURON_", "NEURON_", "VLLM_CACHE_ROOT")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return inherited | {
        "VLLM_CACHE_ROOT": str(cache),
        "NEURON_LIBTORCH_REMOTE_CACHE": str(DEMO / "remote"),
        "VLLM_NEURON_BACKEND": "neuron_native",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def program(name: str) -> str:
    """A console script of this environment."""
    return str(Path(sys.executable).with_name(name))


def strip_weights(model: Path, folder: Path) -> None:
    """Copy all of ``model`` but its weights to ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    console.print(f"  the compile job sees only: {names}")


def compile_ahead(folder: Path) -> None:
    """Compile every bucket for ``cpu``, and publish it to the remote tier."""
    command = [program("vllm-neuron"), "compile", str(folder), *SHAPE, "--target", "cpu"]
    run(command, settings(DEMO / "build"))
    if not any((DEMO / "remote").iterdir()):
        raise DemoError(f"the compile job succeeded, and published nothing to {DEMO / 'remote'}")


def ask(url: str) -> str:
    """The model's greedy answer to the question."""
    message = {"role": "user", "content": QUESTION}
    body = {"model": "demo", "messages": [message], "max_tokens": 32, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    response.raise_for_status()
    answer: str = response.json()["choices"][0]["message"]["content"]
    return answer


def serve_and_ask(clock: Clock, log: Path) -> str:
    """Ask a strict server whose local cache was empty. Returns the answer."""
    cache = DEMO / "production"
    shutil.rmtree(cache, ignore_errors=True)
    environment = settings(cache) | {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    command = [program("vllm"), "serve", str(MODEL), *SHAPE, "--served-model-name", "demo", "--shutdown-timeout", "10"]
    with serving(command, environment, log) as server:
        with clock.phase(START):
            server.wait("the server starts", console)
        with clock.phase("ask over HTTP"):
            return ask(server.url)


def report(clock: Clock, answer: str, log: str) -> None:
    """Print the answer, the compilations and the times. Raises :class:`DemoError` where they aren't as promised."""
    ready = READY.search(log)
    if ready is None:
        raise DemoError("the server's log does not say where its graphs came from")
    # Two witnesses: what the server sums up, and the line that each compilation begins with.
    compilations = max(int(ready["compiled"]), len(COMPILATION.findall(log)))
    console.print(f"\n[bold]{QUESTION}[/]\n[bold green]{answer}[/]\n")
    console.print(f"{compilations} compilations in the server; {ready['remote']} graphs fetched from the remote tier")
    clock.parts[START] = {"capture the graphs, look them up, fetch them": float(ready["seconds"])}
    console.print(clock.table())
    if compilations:
        raise DemoError(f"a strict server compiled {compilations} graphs")
    if ready["remote"] != ready["all"]:
        raise DemoError(f"only {ready['remote']} of {ready['all']} graphs came from the remote tier")
    if EXPECTED not in answer:
        raise DemoError(f"the answer does not mention {EXPECTED}")


def main() -> int:
    """Run the demo. Returns 0 if all was as promised, else 1."""
    end_servers_on_sigterm()
    DEMO.mkdir(exist_ok=True)
    log = DEMO / "server.log"
    log.unlink(missing_ok=True)
    clock = Clock()
    try:
        with clock.phase("write the packaged model as a checkpoint (once)"):
            run(
                [sys.executable, str(ROOT / "tools" / "make_smollm2.py"), str(MODEL), "--dtype", "bfloat16"],
                settings(DEMO / "build"),
            )
        with clock.phase("compile ahead of time, without the weights"):
            strip_weights(MODEL, DEMO / "config-only")
            compile_ahead(DEMO / "config-only")
        answer = serve_and_ask(clock, log)
        report(clock, answer, log.read_text(errors="replace"))
    except (DemoError, ServerError, httpx.HTTPError) as error:
        if log.exists():
            tail = log.read_text(errors="replace").splitlines()[-30:]
            console.print("\n".join(tail), f"\n(the whole log: {log})", markup=False, highlight=False)
        console.print(f"[bold red]demo failed:[/] {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
