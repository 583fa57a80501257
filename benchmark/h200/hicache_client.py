"""Code that the HiCache benchmarks share: flags, and a client of /generate that sends ids and reads tiers and
logprobs."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import aiohttp
import orjson

NUM_TOP = 8  # alternatives for each token whose logprobs are compared

Alternatives = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``tiers``: cached prompt tokens by where they were; logprobs are natural logarithms."""

    output_ids: list[int]
    cached_tokens: int
    tiers: Mapping[str, int]
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[Alternatives] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top: list[Alternatives] = field(default_factory=list)


class RequestFailed(Exception):
    """The server refused the request, closed the connection, or returned something else than was asked for."""


class Client:
    """Posts to one server; use it in an ``async with`` block."""

    def __init__(self, url: str, timeout_s: float = 120.0) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=timeout_s)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def generate(self, ids: Sequence[int], num_tokens: int, logprobs: bool = False) -> Answer:
        """``num_tokens`` greedy tokens after ``ids``. Raises RequestFailed."""
        body: dict[str, object] = {"input_ids": list(ids), "sampling_params": _greedy(num_tokens)}
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": NUM_TOP}
        answer = await self._post(body)
        if len(answer.output_ids) != num_tokens:
            raise RequestFailed(f"{len(answer.output_ids)} tokens came, {num_tokens} were asked for")
        return answer

    async def score(self, ids: Sequence[int], first: int) -> Answer:
        """An answer whose ``input_logprobs`` and ``input_top`` have the logprobs of ``ids[first:]``; ``first`` is at
        least 1. The first position of a request for logprobs has none, so the preceding one is requested too."""
        body: dict[str, object] = {"input_ids": list(ids), "sampling_params": _greedy(0), "return_logprob": True}
        answer = await self._post(body | {"top_logprobs_num": NUM_TOP, "logprob_start_len": first - 1})
        logprobs, top = answer.input_logprobs[1:], answer.input_top[1:]
        if not len(logprobs) == len(top) == len(ids) - first:
            raise RequestFailed(f"{len(logprobs)} logprobs for {len(ids) - first} tokens")
        return replace(answer, input_logprobs=logprobs, input_top=top)

    async def _post(self, body: Mapping[str, object]) -> Answer:
        data = orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(f"{self._url}/generate", data=data, headers=headers) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}: {raw[:300].decode(errors='replace')}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        return _answer(orjson.loads(raw))


def _greedy(num_tokens: int) -> dict[str, object]:
    return {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}


def _answer(reply: Mapping[str, object]) -> Answer:
    meta = reply["meta_info"]
    ids = reply["output_ids"]
    assert isinstance(meta, dict) and isinstance(ids, list)
    reason = meta["finish_reason"]
    if not isinstance(reason, dict) or reason["type"] != "length":
        raise RequestFailed(f"the request ended with {reason}")
    details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
    return Answer(
        output_ids=ids,
        cached_tokens=meta["cached_tokens"],
        tiers={tier: int(num) for tier, num in details.items() if isinstance(num, int)},
        output_logprobs=_chosen(meta, "output"),
        output_top=_top(meta, "output"),
        input_logprobs=_chosen(meta, "input"),
        input_top=_top(meta, "input"),
    )


def _chosen(meta: Mapping[str, list[list[float]]], side: str) -> list[float]:
    return [entry[0] for entry in meta.get(f"{side}_token_logprobs") or []]


def _top(meta: Mapping[str, list[list[list[float]]]], side: str) -> list[Alternatives]:
    lists = meta.get(f"{side}_top_logprobs") or []
    return [[(float(entry[0]), int(entry[1])) for entry in entries or []] for entries in lists]


async def in_turns(coroutines: Sequence[object], at_once: int) -> list[Answer]:
    """The answers in order, ``at_once`` requests at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(coroutine: object) -> Answer:
        async with gate:
            answer: Answer = await coroutine  # type: ignore[misc]
            return answer

    return list(await asyncio.gather(*(one(c) for c in coroutines)))


def random_ids(rng: random.Random, num: int, vocab: int) -> list[int]:
    """``num`` plain token ids."""
    return rng.choices(range(vocab), k=num)


def get_json(url: str) -> dict[str, object]:
    """The JSON that the server returns for ``url``. Raises RequestFailed."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return dict(json.load(response))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RequestFailed(f"{url}: {error}") from error


def server_state(url: str) -> dict[str, object]:
    """The scheduler's own state: ``internal_states[0]`` of /get_server_info. Raises RequestFailed."""
    states = get_json(f"{url}/get_server_info")["internal_states"]
    assert isinstance(states, list)
    return dict(states[0])


def flush(url: str) -> None:
    """Empty the prefix cache, all tiers. Raises RequestFailed while requests or transfers hold it."""
    try:
        with urllib.request.urlopen(f"{url}/flush_cache", timeout=60, data=b"") as response:
            response.read()
    except (urllib.error.URLError, OSError) as error:
        raise RequestFailed(f"flush_cache: {error}") from error


def words(flags: str) -> list[str]:
    """Flags given as one word."""
    return shlex.split(flags)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
