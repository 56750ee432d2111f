"""Running a compiler: nothing of it is left, whoever dies, and every failure is told in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from script_compiler import FAMILY, FAMILY_SIZE, ScriptCompiler, compile_with

from vllm_neuron.compilers.base import compiler_for, run_compiler
from vllm_neuron.errors import CompileError
from vllm_neuron.targets import Target, known_targets

COPY = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Generous: only a hang or a leak makes it fail."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def family(folder: Path) -> list[psutil.Process]:
    """The processes of ``FAMILY``, once all of them run."""
    wait_for(lambda: len(list(folder.glob("*.pid"))) == FAMILY_SIZE, "the compiler's family")
    return [psutil.Process(int(path.read_text())) for path in sorted(folder.glob("*.pid"))]


def nothing_is_left(folder: Path, processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(process.is_running() for process in processes), "the end of the compiler's family")
    wait_for(lambda: not list((folder / "out").glob(".scratch-*")), "the removal of the scratch folder")
    assert not (folder / "out" / "graph.bin").exists()


def caller(folder: Path) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("script_compiler.py")
    return subprocess.Popen([sys.executable, str(script), str(folder)], stderr=subprocess.DEVNULL)


def failure_of(folder: Path, fault: Callable[[list[psutil.Process]], None], timeout: float | None = None) -> str:
    """What a compile says whose family of processes meets the fault."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(compile_with, folder, FAMILY, str(folder), timeout=timeout)
        processes = family(folder)
        fault(processes)
        error = future.exception()
    assert isinstance(error, CompileError)
    nothing_is_left(folder, processes)
    return str(error)


def test_writes_artifact_log_and_command(tmp_path: Path) -> None:
    script = COPY + "; print('said'); open('own.log', 'w').write('kept too'); open('junk', 'w'); print(sys.argv[3:])"
    report = compile_with(tmp_path, script, "--flag=a b")
    assert report.artifact.read_text() == "module"
    assert report.log.read_text() == "said\n['--flag=a b']\nkept too"
    assert report.command[2:] == ["graph.mlir", "graph.bin", "--flag=a b"]
    assert report.seconds > 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"graph.mlir", "graph.bin", "compiler.log", "command.txt"}
    command = (tmp_path / "out" / "command.txt").read_text()
    assert command.endswith("graph.mlir graph.bin '--flag=a b'\n")
    assert command.startswith(Path(sys.executable).name)


def test_temporary_files_of_the_compiler_go_too(tmp_path: Path) -> None:
    script = COPY + f"; import tempfile; open({str(tmp_path / 'where')!r}, 'w').write(tempfile.mkstemp()[1])"
    compile_with(tmp_path, script)
    assert not Path((tmp_path / "where").read_text()).exists()


def test_measures_the_memory_of_all_that_the_compiler_starts(tmp_path: Path) -> None:
    child = "bytearray(b'x') * (300 << 20)"
    report = compile_with(tmp_path, COPY + f"; import subprocess; subprocess.run([sys.executable, '-c', {child!r}])")
    assert report.peak_memory_bytes > 300 << 20


def test_compiles_side_by_side(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(4)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda folder: compile_with(folder, COPY), folders))
    assert [report.artifact for report in reports] == [folder / "out" / "graph.bin" for folder in folders]


def test_killed_caller_leaves_nothing(tmp_path: Path) -> None:
    process = caller(tmp_path)
    processes = family(tmp_path)
    process.kill()
    process.wait()
    nothing_is_left(tmp_path, processes)


def test_killed_caller_whose_forked_child_lives_on_leaves_nothing(tmp_path: Path) -> None:
    """Such a child holds the caller's end of the pipe open."""
    code = (
        "import os, sys, threading, time, pathlib\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from script_compiler import *\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "threading.Thread(target=compile_with, args=(folder, FAMILY, str(folder)), daemon=True).start()\n"
        "while len(list(folder.glob('*.pid'))) < FAMILY_SIZE: time.sleep(0.02)\n"
        "if os.fork() == 0: (folder / 'child').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    wait_for(lambda: bool((tmp_path / "child").exists() and (tmp_path / "child").read_text()), "the forked child")
    child = psutil.Process(int((tmp_path / "child").read_text()))
    try:
        processes = family(tmp_path)
        process.kill()
        process.wait()
        nothing_is_left(tmp_path, processes)
        assert child.is_running()
    finally:
        child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_caller_leaves_nothing(tmp_path: Path, number: int) -> None:
    process = caller(tmp_path)
    processes = family(tmp_path)
    process.send_signal(number)
    process.wait(60)
    nothing_is_left(tmp_path, processes)


def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    message = failure_of(tmp_path, lambda processes: processes[0].parent().kill())  # type: ignore[union-attr]
    assert message.startswith("script was killed, together with the process that supervised it")


def test_terminated_supervisor_leaves_nothing(tmp_path: Path) -> None:
    message = failure_of(tmp_path, lambda processes: processes[0].parent().terminate())  # type: ignore[union-attr]
    assert "stopped by a signal" in message


def test_time_limit(tmp_path: Path) -> None:
    assert "stopped after 5 s, its time limit" in failure_of(tmp_path, lambda processes: None, timeout=5)


def test_compiler_killed_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "5")
    message = failure_of(tmp_path, lambda processes: processes[0].kill())
    assert "ended by signal 9 (Killed)" in message
    assert "lower NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS (now 5)" in message


def test_compiler_that_crashes(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"ended by signal 11 \(Segmentation fault\)"):
        compile_with(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_processes_that_a_finished_compiler_leaves_are_ended(tmp_path: Path) -> None:
    script = COPY + (
        "; import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True)"
        f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    )
    compile_with(tmp_path, script)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_failure_names_the_first_error_the_advice_and_the_log(tmp_path: Path) -> None:
    script = """
import sys
for index in range(50000):
    print("note", index)
    if index == 7: print("graph.mlir:1: error: no such operation " + "x" * 100000)
print("error: and so on"); print("last line"); sys.exit(70)
"""
    with pytest.raises(CompileError) as caught:
        compile_with(tmp_path, script)
    diagnosis = str(caught.value)
    log = tmp_path / "out" / "compiler.log"
    cause = "graph.mlir:1: error: no such operation x"
    assert diagnosis.startswith(f"script failed with exit code 70. First error: {cause}")
    assert diagnosis.endswith(f"Buy a bigger boat. Log: {log}")
    assert "\n" not in diagnosis
    assert len(diagnosis) < 1000
    assert log.stat().st_size > 500_000


def test_failure_leaves_no_artifact_not_even_an_earlier_one(tmp_path: Path) -> None:
    compile_with(tmp_path, COPY)
    with pytest.raises(CompileError, match="failed with exit code 3"):
        compile_with(tmp_path, COPY + "; sys.exit(3)")
    assert not (tmp_path / "out" / "graph.bin").exists()


def test_success_without_an_artifact(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"without an error and without an artifact\. If it happens again, .* Log: "):
        compile_with(tmp_path, "")


def test_damaged_artifact_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="the artifact is damaged"):
        compile_with(tmp_path, "import sys; open(sys.argv[2], 'w').write('damaged')")
    assert not (tmp_path / "out" / "graph.bin").exists()


@pytest.mark.parametrize("path", [None, ""])
def test_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    class Missing(ScriptCompiler):
        def command(self, *_: object) -> list[str]:
            return [str(tmp_path / "missing")]

    if path is not None:
        monkeypatch.setenv("PATH", path)
    (tmp_path / "graph.mlir").touch()
    with pytest.raises(CompileError, match=r"could not be started: .*No such file.*missing"):
        run_compiler(Missing(tmp_path), tmp_path, "graph.mlir", (), "graph.bin")
    assert not list(tmp_path.glob(".scratch-*"))


def test_compiler_is_deaf_to_the_terminal(tmp_path: Path) -> None:
    """It reads nothing: a compiler that asks a question must not wait for an answer."""
    compile_with(tmp_path, COPY + "; assert sys.stdin.read() == ''")


def test_no_thread_and_no_descriptor_stays(tmp_path: Path) -> None:
    compile_with(tmp_path, COPY)
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())  # noqa: PTH208
    for _ in range(3):
        compile_with(tmp_path, COPY)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before  # noqa: PTH208


def test_every_target_has_the_compiler_that_it_names() -> None:
    assert all(compiler_for(target).name == target.compiler for target in known_targets())


def test_a_compiler_that_is_in_no_table_is_an_error() -> None:
    with pytest.raises(CompileError, match="target tpu names the compiler 'xlac'; the compilers are: iree, neuronx-cc"):
        compiler_for(Target("tpu", "tpu", "xlac"))
