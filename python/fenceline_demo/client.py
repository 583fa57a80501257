"""A small asynchronous client: sends many prompts to one OpenAI-compatible server, a limited number at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import orjson

TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Server:
    """The server to ask: `base_url` without a trailing slash or /v1, the model's name, an API key or ''."""

    base_url: str
    model: str
    api_key: str = ""

    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one prompt. `error` is '' on success; only then the other fields are valid."""

    text: str
    error: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    latency_s: float = 0.0


def server_url(base_url: str | None, host: str, port: int) -> str:
    """The server's address from --base-url, or from --host (with or without http://) and --port."""
    if base_url:
        return base_url.rstrip("/").removesuffix("/v1")
    host = host.rstrip("/")
    return f"{host if '://' in host else f'http://{host}'}:{port}"


async def find_model(base_url: str, api_key: str) -> str:
    """The name of the first model that the server lists.

    Raises ValueError if no server answers there or it lists no models.
    """
    server = Server(base_url, "", api_key)
    try:
        async with aiohttp.ClientSession(headers=server.headers()) as session:
            async with session.get(f"{base_url}/v1/models", timeout=aiohttp.ClientTimeout(30)) as response:
                data = orjson.loads(await response.read())
        return str(data["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, LookupError, TypeError) as e:
        raise ValueError(
            f"no model found at {base_url}/v1/models ({type(e).__name__}: {e}): start the server, or give its address"
        ) from e


async def mean_accept_length(server: Server) -> float | None:
    """How many tokens a request got in a decode step, on average since the server's start; None if the server does not
    speculate or does not report it."""
    try:
        async with aiohttp.ClientSession(headers=server.headers()) as session:
            url = f"{server.base_url}/get_server_info"
            async with session.get(url, timeout=aiohttp.ClientTimeout(30)) as response:
                info = orjson.loads(await response.read())
        value = info["internal_states"][0]["avg_spec_accept_length"]
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, LookupError, TypeError):
        return None
    return value if isinstance(value, float) else None


async def flush_cache(server: Server) -> None:
    """Has the server forget the prompts, and the pictures' embeddings, that it knows. Raises ValueError if it cannot be
    asked or refuses."""
    try:
        async with aiohttp.ClientSession(headers=server.headers()) as session:
            url = f"{server.base_url}/flush_cache"
            async with session.post(url, params={"timeout": 10}, timeout=aiohttp.ClientTimeout(30)) as response:
                if response.status != 200:
                    raise ValueError(f"{url}: HTTP {response.status}: {(await response.text())[:300]}")
    except (aiohttp.ClientError, TimeoutError) as e:
        raise ValueError(f"{server.base_url}/flush_cache cannot be asked ({type(e).__name__}: {e})") from e


async def ask_all(
    server: Server,
    endpoint: str,
    bodies: Sequence[Mapping[str, object]],
    concurrency: int,
    on_reply: Callable[[Reply], None] = lambda reply: None,
) -> list[Reply]:
    """Posts each body to `endpoint` (/v1/completions or /v1/chat/completions), at most `concurrency` at once.

    Replies are in the order of the bodies; a failed request is a Reply with its error. `on_reply` is called with each
    reply as it arrives.
    """
    gate = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=server.headers()) as session:

        async def ask(body: Mapping[str, object]) -> Reply:
            async with gate:
                started = time.perf_counter()
                reply = await _post(session, f"{server.base_url}{endpoint}", {"model": server.model, **body}, started)
            on_reply(reply)
            return reply

        pending: list[Awaitable[Reply]] = [ask(body) for body in bodies]
        return list(await asyncio.gather(*pending))


async def _post(session: aiohttp.ClientSession, url: str, body: Mapping[str, object], started: float) -> Reply:
    try:
        async with session.post(url, data=orjson.dumps(body), headers={"Content-Type": "application/json"}) as response:
            raw = await response.read()
            if response.status != 200:
                return Reply("", f"HTTP {response.status}: {raw[:300].decode(errors='replace')}")
        return _parse(raw, time.perf_counter() - started)
    except (aiohttp.ClientError, TimeoutError) as e:
        return Reply("", f"{type(e).__name__}: {e}")


def _parse(raw: bytes, latency_s: float) -> Reply:
    try:
        data = orjson.loads(raw)
        choice, usage = data["choices"][0], data.get("usage") or {}
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            text=text or "",
            error="",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            latency_s=latency_s,
        )
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as e:
        return Reply("", f"unexpected reply ({type(e).__name__}: {e}): {raw[:300].decode(errors='replace')}")
