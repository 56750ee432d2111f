"""The clock of a start begins with the first process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# As the platform's module does: the call is made when the module is imported, in every process.
PLATFORM = """
import os
from vllm_neuron.execute.start_report import note_process_start
note_process_start()

def tell():
    print("BEGUN", os.environ["_VLLM_NEURON_STARTED"], flush=True)
"""
FIRST = """
import multiprocessing, time
import platform_of_test

if __name__ == "__main__":
    platform_of_test.tell()
    time.sleep(0.1)
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=platform_of_test.tell)
        process.start()
        process.join()
"""


def test_children_measure_from_the_start_of_the_first_process(tmp_path: Path) -> None:
    (tmp_path / "platform_of_test.py").write_text(PLATFORM)
    (tmp_path / "first.py").write_text(FIRST)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "first.py")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = done.stdout.splitlines()
    assert len(told) == 3
    assert len(set(told)) == 1
