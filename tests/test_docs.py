"""The documentation is true: what it says to run runs, what it names exists, what is generated is current."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import pages
from tests.support.models import make_tiny
from tools import generate_variable_reference
from vllm_neuron import envs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
SESSIONS = [page for page in PAGES if list(pages.commands(page))]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_variable_reference_is_current() -> None:
    assert generate_variable_reference.PAGE.read_text() == generate_variable_reference.page(), "run `make docs`"


def test_there_are_pages_with_commands() -> None:
    assert {page.name for page in SESSIONS} >= {
        "README.md",
        "compile-and-deploy.md",
        "choose-a-route.md",
        "look-after-the-cache.md",
    }


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@every_page
def test_variables_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    known = {name for variable in envs.VARIABLES for name in (variable.name, *variable.old_names)}
    named = set(re.findall(r"\b(?:VLLM_NEURON|NEURON_LIBTORCH|NEURON)_[A-Z_]+[A-Z]\b", text))
    assert named <= known
    paths = re.findall(r"`((?:tests|tools|vllm_neuron|benchmarks|examples|requirements|docs|\.ci)/[\w./-]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@every_page
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets


@every_page
def test_every_command_is_of_a_kind_that_is_run(page: Path) -> None:
    for command in pages.commands(page):
        assert pages.program(command) in pages.PROGRAMS or command.startswith("export "), command


@every_page
def test_python_blocks_parse(page: Path) -> None:
    for block in pages.blocks(page):
        if block.language == "python":
            ast.parse(block.text)


@pytest.mark.slow
@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.name)
def test_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "my-model")
    with pages.Session(tmp_path, pages.clean_environment(tmp_path / "cache")) as session:
        for block in pages.blocks(page):
            session.run(block)


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run([sys.executable, "-m", "tools.demo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Paris" in done.stdout
    assert "0 compilations in the server" in done.stdout
    left = [process.info for process in psutil.process_iter(["pid", "cmdline"]) if process.pid not in before]
    assert not [info for info in left if str(ROOT / ".demo") in " ".join(info["cmdline"] or [])]


@pytest.mark.parametrize("example", ["compile_function.py"])
def test_example_of_user_code(example: str, tmp_path: Path) -> None:
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split(":")[1]) < 1e-5


@pytest.mark.slow
def test_example_of_offline_generation(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    command = [sys.executable, str(ROOT / "examples" / "generate_offline.py"), str(model)]
    environment = pages.clean_environment(tmp_path / "cache")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
