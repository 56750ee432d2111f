"""The server with its engine in a process of its own: requests, streaming, cancelling, metrics, the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import MODES
from tests.support.reference import greedy

pytestmark = pytest.mark.slow

PROMPT = [7, 300, 12, 45]
STARTUP_SECONDS = 300


class Server:
    """A running server of one model."""

    def __init__(self, folder: Path, mode: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base, self.model, self.log = f"http://127.0.0.1:{port}", str(folder), log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port", str(port)]
        options = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--shutdown-timeout", "30"]
        # Metrics of its own, whatever this process has loaded.
        inherited = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, *options], env={**inherited, **MODES[mode]}, stdout=stream, stderr=stream
            )

    def wait(self) -> None:
        end = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.base}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-5000:])

    def open(self, path: str, **fields: Any) -> Any:
        body = json.dumps({"model": self.model, "temperature": 0, **fields}).encode()
        request = urllib.request.Request(self.base + path, body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)

    def post(self, path: str, **fields: Any) -> Any:
        with self.open(path, **fields) as response:
            return json.load(response)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.base}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path], mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tiny("llama"), mode, tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait()
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_completions_chat_and_streaming(server: Server) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == greedy(Path(server.model), PROMPT, 8)
    messages = [{"role": "user", "content": "What is this?"}]
    whole = server.post("/v1/chat/completions", messages=messages, max_tokens=6, ignore_eos=True)
    text = whole["choices"][0]["message"]["content"]
    with server.open("/v1/chat/completions", messages=messages, max_tokens=6, ignore_eos=True, stream=True) as stream:
        events = [line.decode().removeprefix("data: ").strip() for line in stream if line.strip()]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == text


def test_a_cancelled_request_frees_its_place(server: Server) -> None:
    """As many are cancelled as there are places; the next one is answered, and answered right."""
    for _ in range(2):
        stream = server.open("/v1/completions", prompt=PROMPT, max_tokens=250, ignore_eos=True, stream=True)
        stream.readline()
        stream.close()
    answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=4, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == greedy(Path(server.model), PROMPT, 4)


def test_metrics_of_the_engine_reach_the_server(server: Server) -> None:
    before = server.metrics()
    server.post("/v1/completions", prompt=PROMPT, max_tokens=5, ignore_eos=True)
    after = server.metrics()
    assert after["vllm_neuron:startup_time_seconds"] > after["vllm_neuron:model_load_time_seconds"] > 0

    def grown(name: str) -> float:
        return after[f"vllm_neuron:{name}"] - before[f"vllm_neuron:{name}"]

    # The first token comes from the prefill, and each of the others from a decode step.
    assert grown('neff_execution_count{bucket_name="decode_b1"}') == 4
    assert grown('neff_execution_count{bucket_name="decode_b2"}') == 0
    assert grown('neff_execution_count{bucket_name="prefill_s128"}') == 1
    assert grown("num_batched_tokens_padding") == 128 - len(PROMPT)
    assert grown("num_seqs_padding") == 0


def test_the_time_of_each_compilation_reaches_the_server(server: Server, mode: str) -> None:
    gauge = "vllm_neuron:compilation_time_seconds"
    found = {name for name in server.metrics() if name.startswith(gauge)}
    buckets = [] if mode == "eager" else ["prefill_s128", "prefill_s256", "decode_b1", "decode_b2"]
    assert found == {f'{gauge}{{bucket_name="{bucket}"}}' for bucket in buckets}


def test_the_server_ends_when_told(server: Server) -> None:
    """Last: it takes the server away."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=120) == 0
    assert "force kill" not in server.log.read_text()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_sixteen_requests_at_once(tiny: Callable[[str], Path], tmp_path: Path, architecture: str) -> None:
    """Of many lengths, more than there are places, on compiled graphs: each gets what it would get alone."""
    folder = tiny(architecture)
    prompts = [[(11 * i * i + 37 * j) % 1000 + 10 for j in range(3 + 9 * i)] for i in range(16)]
    running = Server(folder, "compiled", tmp_path / "log")
    try:
        running.wait()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(
                lambda ids: running.post(
                    "/v1/completions", prompt=ids, max_tokens=12, ignore_eos=True, return_token_ids=True
                ),
                prompts,
            )
            found = [answer["choices"][0]["token_ids"] for answer in answers]
    finally:
        running.process.terminate()
        running.process.wait(60)
    assert found == [greedy(folder, ids, 12) for ids in prompts]
