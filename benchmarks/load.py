"""Load on an OpenAI-compatible server, and the rates that it reaches under it.

Prompts are token ids, drawn at random, so that every server gets the same ones and no prefix is cached.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import httpx

VOCABULARY = range(1000, 40000)
LIMIT_S = 600


@dataclass(frozen=True)
class Arrival:
    """A chunk of a stream: when it came (seconds, monotonic), and how many tokens had come with it."""

    at: float
    tokens: int


def prompt(length: int, seed: int) -> list[int]:
    """``length`` random token ids; the same for the same seed."""
    return random.Random(seed).choices(VOCABULARY, k=length)


def prefill_rate(url: str, seed: int, *, streams: int, length: int) -> float:
    """Prompt tokens per second: ``streams`` requests at once, one token out of each."""
    prompts = [prompt(length, seed * 1000 + stream) for stream in range(streams)]
    start = time.monotonic()
    asyncio.run(_together(url, prompts, max_tokens=1))
    return streams * length / (time.monotonic() - start)


def decode_rate(url: str, seed: int, *, streams: int, length: int) -> float:
    """Output tokens per second of ``streams`` requests, while all of them are decoding.

    Counted from when the last stream has its first token to when the first stream has its last.
    """
    prompts = [prompt(16, seed * 1000 + stream) for stream in range(streams)]
    return steady_rate(asyncio.run(_together(url, prompts, max_tokens=length)))


def steady_rate(streams: list[list[Arrival]]) -> float:
    """Tokens per second of all streams, within the time in which all of them are running.

    Raises ``ValueError`` if there is no such time.
    """
    start = max(arrivals[0].at for arrivals in streams)
    end = min(arrivals[-1].at for arrivals in streams)
    if end <= start:
        raise ValueError("the streams did not run at the same time: ask for more tokens")
    within = [[arrival.tokens for arrival in arrivals if start <= arrival.at <= end] for arrivals in streams]
    return sum(tokens[-1] - tokens[0] for tokens in within) / (end - start)


def greedy_tokens(url: str, length: int) -> list[int]:
    """The ids of a greedy continuation of a fixed prompt: the same from every server that computes the same."""
    body = _body(prompt(24, seed=7), length) | {"stream": False, "stream_options": None, "return_token_ids": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
    response.raise_for_status()
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def _body(ids: list[int], max_tokens: int) -> dict[str, object]:
    return {
        "model": "bench",
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def _together(url: str, prompts: list[list[int]], max_tokens: int) -> list[list[Arrival]]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        return await asyncio.gather(*(_stream(client, _body(ids, max_tokens)) for ids in prompts))


async def _stream(client: httpx.AsyncClient, body: dict[str, object]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if chunk["choices"]:
                    arrivals.append(Arrival(time.monotonic(), chunk["usage"]["completion_tokens"]))
    if not arrivals or arrivals[-1].tokens != body["max_tokens"]:
        raise httpx.RemoteProtocolError(f"asked for {body['max_tokens']} tokens, got {arrivals[-1:]}")
    return arrivals
