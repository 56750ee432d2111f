"""What vLLM's server offers beside completions: refused without an effect, or answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tools.server import Server

# Each with its query or its body, and the words of the answer that say why.
REFUSED: dict[str, tuple[dict[str, Any] | None, str]] = {
    "/sleep": (None, "Sleep mode is not supported on the Neuron platform"),
    "/sleep?level=2&mode=keep": (None, "Sleep mode is not supported on the Neuron platform"),
    "/release_kv_cache_memory": (None, "The KV caches can't be released on the Neuron platform"),
    "/collective_rpc": ({"method": "reload_weights"}, "reload_weights"),
    "/collective_rpc?": ({"method": "sleep"}, "Sleep mode is not supported on the Neuron platform"),
    "/weight_checker": ({"action": "checksum"}, "compute_weight_checksums"),
    "/weight_checker?": ({"action": "reset"}, "reset_weights"),
    "/start_weight_update": (None, "start_weight_update"),
    "/finish_weight_update": ({"weight_version": "2"}, "finish_weight_update"),
    "/v1/load_lora_adapter": ({"lora_name": "one", "lora_path": "/tmp"}, ""),
    "/v1/unload_lora_adapter": ({"lora_name": "one"}, ""),
}
ANSWERED = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/wake_up", "/sleep?level=0", "/pause"]


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def state(server: Server) -> list[Any]:
    names = ("/is_sleeping", "/is_paused", "/weight_info", "/v1/models")
    answers = [httpx.get(server.url + name, timeout=60).json() for name in names]
    return [*answers[:3], [model["id"] for model in answers[3]["data"]]]


def tokens(server: Server) -> Any:
    body = {"model": "tiny", "prompt": [7, 300], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    return post(server, "/v1/completions", body).json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused_has_no_effect(dev_server: Server, path: str) -> None:
    before, expected = state(dev_server), tokens(dev_server)
    body, reason = REFUSED[path]
    refused = post(dev_server, path, body)
    assert refused.status_code >= 400 and reason in refused.text, refused.text
    assert state(dev_server) == before
    assert tokens(dev_server) == expected


@pytest.mark.parametrize("path", ANSWERED)
def test_what_is_answered_can_be_taken_back(dev_server: Server, path: str) -> None:
    before, expected = state(dev_server), tokens(dev_server)
    assert post(dev_server, path).status_code == 200
    assert post(dev_server, "/resume").status_code == 200
    assert state(dev_server) == before
    assert tokens(dev_server) == expected


def test_the_servers_own_process_is_among_its_metrics(dev_server: Server) -> None:
    tokens(dev_server)
    names = {line.split("{")[0].split(" ")[0] for line in httpx.get(f"{dev_server.url}/metrics").text.splitlines()}
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"} <= names
    assert {"vllm:generation_tokens_total", "vllm_neuron:startup_time_seconds", "python_info"} <= names
