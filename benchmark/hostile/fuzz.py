"""Sends random requests to every endpoint, from a seed, while eight misbehaving clients run.

It checks that every complete request is answered within a time limit; that there is no 5xx except a 503 with a
documented reason; that a 200 is JSON or a complete stream; that known prompts get the same answers as before; and that
at the end the engine is idle and its pages are free.
A request depends only on the seed and its index, so that ``--replay SEED INDEX`` sends the same bytes again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httptools
import orjson
import psutil
from attacked import AttackedServer
from attacks import ATTACKS, Target, leave_cores_to_the_server, run_apart
from beside import MARK_MS, Observed, Observer, Sample, not_run, usual, worst
from wire import LEFT, RESET, SILENT, Answer, Wire, exchange, outcome, post, request

ALONE_S = 3.0  # how long the server is observed before the clients start
BOUND_S = 120.0
SLOW_S = 30.0  # an answer that takes longer is reported
SETTLED_S = 5.0  # after all requests have ended; memory that is still used then counts as kept
WORKERS = 16
# A short context limits the cost of requests for as many tokens as possible.
FLAGS = ("--context-length", "512", "--enable-metrics", "--max-queued-requests", "4000")
# The reasons of a 503 that docs/use/api.md lists: the server is full, or is not serving at the moment.
REASONS_503 = {
    "queue_full",
    "starting",
    "shutting_down",
    "unhealthy",
    "too_many_connections",
    "too_many_bodies",
}
MISBEHAVING = (
    "200 half heads",
    "100 slow bodies",
    "16 streams that are never read",
    "2,000 streams, each left after its first bytes",
    "5,000 connects and disconnects",
    "/generate, 30 million ids",
    "/tokenize, 30,000 texts",
    "64 stop strings that nearly match",
)

# --- one request from a seed

Span = tuple[float, float]  # two times of time.monotonic
Rng = random.Random
Value = Callable[[Rng], Any]

_BORDERS: list[Any] = [
    *(0, 1, -1, 2, 127, 128, 129, 511, 512, 513, 1023, 1024, 4096, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), -(2**63) - 1, 10**30, 0.0, -0.0, 0.5, 1.0, 1.0000001, 2.0, 1e-320, 1e-9, 1e308, -1e308),
    *(True, False, None),
    *("", " ", "a", "0", "1e9", "null", "\0", "\n", "\u0301", "\U0001f600", "\ufeff", "a" * 300, "x" * 5000),
    *([], {}, [None], [[]], [{}], [[[]]], {"": ""}, {"a": None}, [1, "a"], ["a", "b"], [1, 2], [0.5], [True], [2**40]),
    *({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}),
]  # fmt: skip
_TEXTS = [
    "Q: What is 12 + 30?\nA:",
    "Once upon a time",
    "Sort ascending: 5 3 9",
    "",
    "\n",
    "<|im_start|>user\nhi<|im_end|>",
    "\u00e9\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u202e",
    "word " * 100,
    "a" * 1500,
    "9" * 700,
    "\0\1\2",
]


def _border(rng: Rng) -> Any:
    value = rng.choice(_BORDERS)
    if isinstance(value, dict):
        value = dict(value)  # a copy, because callers may add values
    if rng.random() < 0.1:
        return [value] * rng.choice((1, 2, 5, 200))
    if rng.random() < 0.1:
        return {rng.choice(("a", "0", "5", "-1", "1e3")): value}
    return value


def _text(rng: Rng) -> str:
    return rng.choice(_TEXTS)


def _ids(rng: Rng) -> list[int]:
    return [rng.randrange(1024) for _ in range(rng.choice((1, 2, 5, 40, 400, 511, 512, 600)))]


def _rid(rng: Rng) -> str:
    return f"fuzz-{rng.randrange(40)}"


def _some(*values: Any) -> Value:
    return lambda rng: rng.choice(values)


_FLAG = _some(True, False)
_COMMON: dict[str, Value] = {
    "temperature": _some(0, 0.0, 0.7, 1, 2.0),
    "top_p": _some(1, 0.9, 0.01),
    "top_k": _some(-1, 1, 20, 1024),
    "min_p": _some(0, 0.1, 1),
    "presence_penalty": _some(-2, 0, 1.5),
    "frequency_penalty": _some(-2, 0, 1.5),
    "repetition_penalty": _some(0.5, 1.0, 1.2),
    "logit_bias": lambda rng: {str(rng.randrange(1024)): rng.choice((-100, 1.5, 100)) for _ in range(3)},
    "stop": lambda rng: rng.choice(("\n", [], ["a", "ab", "abc"], "x" * 4096, ["\u00e9", "\ud7ff"])),
    "stop_token_ids": _some([], [0], [2, 3, 1023], [5] * 100),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "no_stop_trim": _FLAG,
    "seed": _some(0, 1, 2**31, None),
    "n": _some(1, 1, 1, 2, 4, 16),
}
_SAMPLING: dict[str, Value] = {
    **_COMMON,
    "max_new_tokens": _some(0, 1, 8, 40, None),
    "min_new_tokens": _some(0, 1, 8),
    "sampling_seed": _some(3, None),
    "regex": _some("", None, "a+"),
    "json_schema": _some("", None, "{}"),
    "ebnf": _some(None, 'root ::= "a"'),
    "stop_regex": _some(None, "", "a+", ["(a+)+$"]),
    "custom_params": _some(None, {}, {"a": 1}),
}


def _sampling(rng: Rng) -> Any:
    return {"max_new_tokens": 8, **_pick(rng, _SAMPLING, 3)}


_GENERATE: dict[str, Value] = {
    "text": lambda rng: (
        _text(rng) if rng.random() < 0.7 else [_text(rng) for _ in range(rng.choice((1, 2, 9)))]
    ),
    "input_ids": lambda rng: _ids(rng) if rng.random() < 0.7 else [_ids(rng) for _ in range(3)],
    "sampling_params": lambda rng: (
        _sampling(rng) if rng.random() < 0.8 else [_sampling(rng) for _ in range(2)]
    ),
    "stream": _FLAG,
    "rid": lambda rng: _rid(rng) if rng.random() < 0.7 else [_rid(rng), _rid(rng)],
    "return_logprob": _some(True, False, [True, False]),
    "logprob_start_len": _some(-1, 0, 1, 5, [0, 1]),
    "top_logprobs_num": _some(0, 1, 5, 128, [1, 2]),
    "token_ids_logprob": _some(None, [0], [5, 6, 1023], [[1], [2]]),
    "return_text_in_logprobs": _FLAG,
    "priority": _some(0, 5, None),
    "extra_key": _some("", "a", None),
    "cache_salt": _some("", "salt", None),
    "lora_path": _some("", None, "a"),
    "session_params": _some(None, {}),
    "return_hidden_states": _some(False, [False]),
    "image_data": _some(None, ""),
    "bootstrap_host": _some(None, "here"),
    "input_embeds": _some(None, [[0.5]]),
    "model": _some("demo", "another"),
}
_OPENAI: dict[str, Value] = {
    **_COMMON,
    "model": _some("demo", "gpt-4", ""),
    "max_tokens": _some(1, 8, 40, None),
    "min_tokens": _some(0, 3),
    "stream": _FLAG,
    "stream_options": _some(None, {"include_usage": True}, {"continuous_usage_stats": True}, {}),
    "user": _some("me", None),
    "rid": lambda rng: _rid(rng),
    "response_format": _some(None, {"type": "text"}, {"type": "json_object"}),
    "cache_salt": _some("", "salt", None),
    "priority": _some(0, 5, None),
    "stop_regex": _some(None, "", "a+"),
    "guided_json": _some(None, {}, {"type": "object"}),
    "guided_regex": _some(None, "", "a"),
    "guided_choice": _some(None, ["a", "b"]),
    "structured_outputs": _some(None, {}),
    "use_beam_search": _FLAG,
    "prompt_logprobs": _some(None, 0, 5),
    "return_token_ids": _FLAG,
    "return_prompt_token_ids": _FLAG,
    "custom_params": _some(None, {}),
    "session_params": _some(None, {}),
}
_COMPLETIONS: dict[str, Value] = {
    **_OPENAI,
    "prompt": lambda rng: rng.choice(
        (_text(rng), [_text(rng), _text(rng)], _ids(rng), [_ids(rng), _ids(rng)])
    ),
    "echo": _FLAG,
    "logprobs": _some(None, 0, 5, 20),
    "best_of": _some(None, 1),
    "suffix": _some("", None),
}


def _message(rng: Rng) -> Any:
    content = rng.choice((_text(rng), [{"type": "text", "text": _text(rng)}], None, ""))
    message = {"role": rng.choice(("user", "assistant", "system", "tool", "developer")), "content": content}
    if rng.random() < 0.15:
        function = {"name": "f", "arguments": rng.choice(("{}", '{"a": [[1]]}', "no", {"a": 1}))}
        message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    return message


_CHAT: dict[str, Value] = {
    **_OPENAI,
    "messages": lambda rng: [_message(rng) for _ in range(rng.choice((1, 1, 2, 5, 20)))],
    "max_completion_tokens": _some(1, 8, None),
    "logprobs": _FLAG,
    "top_logprobs": _some(None, 0, 5),
    "chat_template_kwargs": _some({}, {"enable_thinking": False}, {"messages": []}, {"a": [1]}),
    "reasoning_effort": _some(None, "low"),
    "continue_final_message": _FLAG,
    "add_generation_prompt": _some(None, True),
    "separate_reasoning": _FLAG,
    "tools": _some([], [{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": _some(None, "none", "auto", "required"),
    "input_ids": lambda rng: _ids(rng),
}
_TOKENIZE: dict[str, Value] = {
    "prompt": lambda rng: (
        _text(rng) if rng.random() < 0.6 else [_text(rng) for _ in range(rng.choice((0, 1, 30)))]
    ),
    "messages": lambda rng: [_message(rng)],
    "add_special_tokens": _FLAG,
    "add_generation_prompt": _FLAG,
    "model": _some("demo"),
}
_DETOKENIZE: dict[str, Value] = {
    "tokens": lambda rng: rng.choice((_ids(rng), [_ids(rng)], [], [[]], [1024], [-1])),
    "skip_special_tokens": _FLAG,
}
_PROFILE: dict[str, Value] = {"num_steps": _some(1, "1", 2), "output_dir": _some("a", "../a", "/proc/x", "")}
_BODIES: list[tuple[int, str, dict[str, Value], tuple[str, ...]]] = [
    (30, "/generate", _GENERATE, ("text", "sampling_params")),
    (22, "/v1/completions", _COMPLETIONS, ("prompt", "max_tokens")),
    (22, "/v1/chat/completions", _CHAT, ("messages", "max_tokens")),
    (6, "/tokenize", _TOKENIZE, ("prompt",)),
    (2, "/v1/tokenize", _TOKENIZE, ("messages",)),
    (6, "/detokenize", _DETOKENIZE, ("tokens",)),
    (8, "/abort_request", {"rid": lambda rng: rng.choice((_rid(rng), "", "fuzz-", "f"))}, ("rid",)),
    (1, "/abort_request", {"abort_all": _FLAG}, ("abort_all",)),
    (1, "/pause_generation", {"mode": _some("abort", "retract", "in_place", "no")}, ("mode",)),
    (1, "/start_profile", _PROFILE, ("num_steps",)),
]  # fmt: skip
_PLAIN: list[tuple[int, str, str]] = [
    (4, "GET", "/health"),
    (1, "HEAD", "/health"),
    (1, "GET", "/health_generate"),
    (2, "GET", "/model_info"),
    (1, "GET", "/get_model_info"),
    (2, "GET", "/server_info"),
    (1, "GET", "/get_server_info"),
    (2, "GET", "/metrics"),
    (2, "GET", "/v1/models"),
    (1, "GET", "/v1/models/demo"),
    (1, "GET", "/v1/models/%00%ff/../x"),
    (2, "POST", "/flush_cache"),
    (1, "GET", "/flush_cache?timeout=0.1"),
    (1, "POST", "/flush_cache?timeout=nan&storage=2"),
    (1, "POST", "/flush_cache?storage=true"),
    (1, "POST", "/clear_hicache_storage_backend"),
    (1, "POST", "/hicache/storage-backend/clear"),
    (1, "POST", "/continue_generation"),
    (1, "POST", "/stop_profile"),
    (1, "GET", "/flight_recorder"),
    (1, "GET", "/flight_recorder?format=trace"),
    (1, "GET", "/flight_recorder?format=none"),
    (1, "GET", "/live_state"),
    (1, "GET", "/"),
    (1, "GET", "/web/../app.js"),
    (1, "POST", "/flight_recorder"),
    (1, "GET", "/openapi.json"),
    (1, "GET", "/docs"),
    (1, "GET", "/nowhere"),
    (1, "DELETE", "/generate"),
    (1, "OPTIONS", "/v1/completions"),
    (1, "PUT", "/generate"),
]


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """One request. ``leaves_after_s``: how long after sending the client disconnects. ``pieces``: in how many pieces
    the body is sent. ``undo``: a request that is sent afterwards, whatever the answer was."""

    path: str
    data: bytes
    head_only: bool = False
    leaves_after_s: float | None = None
    pieces: int = 1
    undo: bytes | None = None


# These are rare, because they mostly lead to a 400, and otherwise few requests would be served.
_SELDOM = {
    *(
        "regex",
        "json_schema",
        "ebnf",
        "stop_regex",
        "custom_params",
        "lora_path",
        "session_params",
        "image_data",
    ),
    *("bootstrap_host", "input_embeds", "guided_json", "guided_regex", "guided_choice", "structured_outputs"),
    *("use_beam_search", "prompt_logprobs", "tools", "tool_choice", "best_of", "suffix", "stream_options"),
    *(
        "top_logprobs",
        "continue_final_message",
        "response_format",
        "input_ids",
        "return_hidden_states",
        "priority",
    ),
    *("text", "prompt", "messages", "sampling_params"),
}


def _pick(rng: Rng, fields: dict[str, Value], most: int) -> dict[str, Any]:
    if rng.random() < 0.8:
        fields = {name: value for name, value in fields.items() if name not in _SELDOM}
    return {
        name: fields[name](rng) for name in rng.sample(list(fields), rng.randint(0, min(most, len(fields))))
    }


def _mutated(rng: Rng, body: dict[str, Any], fields: dict[str, Value]) -> Any:
    """``body`` with up to three errors, but mostly with none."""
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.6:
            body[rng.choice(list(fields))] = _border(rng)
        elif kind < 0.75:
            params = body.get("sampling_params")
            if isinstance(params, dict):
                params[rng.choice(list(_SAMPLING))] = _border(rng)
        elif kind < 0.85:
            body[
                rng.choice(("unknown", "", "__class__", "\u00e9", "a" * 200, f"field_{rng.randrange(500)}"))
            ] = _border(rng)
        elif kind < 0.95 and body:
            del body[rng.choice(list(body))]
        else:
            return _border(rng)
    return body


def _encoded(rng: Rng, body: Any) -> bytes:
    """``body`` as JSON, sometimes broken; integers may have any size."""
    data = json.dumps(body, ensure_ascii=rng.random() < 0.3).encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.9 or not data:
        return data
    at = rng.randrange(len(data))
    if kind < 0.93:
        return data[:at]
    if kind < 0.96:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind < 0.98:
        return (
            data[:at]
            + rng.choice((b"NaN", b"Infinity", b"\\ud800", b'"\\ud800"', b"1" * 5000, b"[" * 2000))
            + data[at:]
        )
    return rng.choice((b"", b"null", b"[]", b"\xff\xfe", data + data, b"\xef\xbb\xbf" + data))


def fuzzed(seed: int, index: int) -> Fuzzed:
    """Request number ``index`` of ``seed``."""
    rng = random.Random(f"{seed}:{index}")
    if rng.random() < 0.12:
        method, path = rng.choices([plain[1:] for plain in _PLAIN], [plain[0] for plain in _PLAIN])[0]
        body = b"" if rng.random() < 0.8 else _encoded(rng, _border(rng))
        undo = request("POST", "/continue_generation") if "pause" in path else None
        return Fuzzed(path, request(method, path, body), method == "HEAD", undo=undo)
    _, path, fields, needed = rng.choices(_BODIES, [body[0] for body in _BODIES])[0]
    body = {name: fields[name](rng) for name in needed}
    body = _mutated(rng, {**body, **_pick(rng, fields, 4)}, fields)
    undo = {
        "/pause_generation": request("POST", "/continue_generation"),
        "/start_profile": request("POST", "/stop_profile"),
    }.get(path)
    data = post(path, _encoded(rng, body))
    leaves = rng.random() * 0.3 if undo is None and rng.random() < 0.1 else None
    return Fuzzed(path, data, False, leaves, 3 if rng.random() < 0.05 else 1, undo)


# --- sending them


async def sent(port: int, fuzz: Fuzzed, held: list[Span] | None = None) -> Answer | str:
    """Send one request in the way that it describes. The time from a request with an ``undo`` to the answer of that
    is added to ``held``."""
    begin = time.monotonic()
    if fuzz.pieces == 1:
        answer = await exchange(
            port, fuzz.data, BOUND_S, leave_after_s=fuzz.leaves_after_s, head_only=fuzz.head_only
        )
    else:
        answer = await _in_pieces(port, fuzz)
    if fuzz.undo is not None:
        await exchange(port, fuzz.undo, BOUND_S)
        if held is not None:
            held.append((begin, time.monotonic()))
    return answer


async def _in_pieces(port: int, fuzz: Fuzzed) -> Answer | str:
    size = len(fuzz.data) // fuzz.pieces + 1
    try:
        async with asyncio.timeout(BOUND_S), Wire(port) as wire:
            for at in range(0, len(fuzz.data), size):
                await wire.send(fuzz.data[at : at + size])
                await asyncio.sleep(0.02)
            return await wire.answer()
    except TimeoutError:
        return SILENT
    except OSError:
        return RESET


def complaint(fuzz: Fuzzed, answer: Answer | str) -> str | None:
    """What is wrong with this answer; None if nothing is."""
    if isinstance(answer, str):
        return None if answer == LEFT else answer
    body = bytes(answer.body)
    if answer.status >= 500:
        try:
            code = orjson.loads(body)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = None
        if answer.status == 503 and (code in REASONS_503 or fuzz.path.startswith("/health")):
            return None
        return f"status {answer.status}: {body[:300]!r}"
    if fuzz.head_only or not body or fuzz.path.startswith(("/metrics", "/docs", "/flush_cache")):
        return None
    if fuzz.path.startswith("/web/") or body.startswith(b"<!doctype html>"):  # the page, and only it is HTML
        return None
    if body.startswith(b"data: "):
        return (
            None if body.rstrip().endswith(b"data: [DONE]") else f"a stream without its end: {body[-200:]!r}"
        )
    try:
        orjson.loads(body)
    except ValueError:
        return f"status {answer.status} and no JSON: {body[:300]!r}"
    return None


# --- known answers

_CANARY_PARAMS = {"max_new_tokens": 24, "seed": 11, "ignore_eos": True}
_CANARIES = [
    {"text": text, "sampling_params": {"temperature": temperature, **_CANARY_PARAMS}}
    for text in ("Q: What is 12 + 30?\nA:", "Once upon a time", "Sort ascending: 5 3 9\n", "Copy: red fox\n")
    for temperature in (0, 1)
]  # fmt: skip


async def canary(port: int, index: int) -> list[int]:
    """The ids that known prompt ``index`` gets. It is sent again while other clients abort everything."""
    while True:
        answer = await exchange(
            port, post("/generate", {**_CANARIES[index], "rid": f"canary-{time.monotonic_ns()}"}), BOUND_S
        )
        if isinstance(answer, str) or answer.status not in (200, 503):
            raise ValueError(
                f"canary {index}: {answer if isinstance(answer, str) else bytes(answer.body)[:300]!r}"
            )
        if answer.status == 200:
            value = answer.json()
            if value["meta_info"]["finish_reason"]["type"] != "abort":
                ids: list[int] = value["output_ids"]
                return ids
        await asyncio.sleep(0.05)


def misbehave(name: str, port: int, stop: Event) -> None:
    """The process of a misbehaving client, which repeats the same attack."""
    leave_cores_to_the_server()
    attack = ATTACKS[name]
    run = attack.make()

    parent = os.getppid()

    async def bounded() -> None:
        while not stop.is_set() and os.getppid() == parent:
            try:
                async with asyncio.timeout(min(attack.limit_s, 20)):
                    await run(Target(port))
            except (TimeoutError, OSError, httptools.HttpParserError):
                pass
            await asyncio.sleep(0.2)

    asyncio.run(bounded())


@dataclass
class Findings:
    """The failures, how often each outcome occurred, and when a request had paused the server or had it profiled,
    which stops everybody's tokens."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    held: list[Span] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Add a failure and print it at once."""
        self.failures.append(text)
        if len(self.failures) <= 50:
            print(f"FAILURE {text}", flush=True)


async def _drive(port: int, seed: int, num: int, findings: Findings) -> None:
    known = [await canary(port, index) for index in range(len(_CANARIES))]
    if [await canary(port, index) for index in range(len(_CANARIES))] != known:
        findings.fail("a known prompt got another answer before anything was sent")
    indices = iter(range(num))
    start = time.monotonic()
    num_canaries = 0
    done = asyncio.Event()

    async def work() -> None:
        for index in indices:
            fuzz = fuzzed(seed, index)
            begin = time.monotonic()
            answer = await sent(port, fuzz, findings.held)
            if time.monotonic() - begin > SLOW_S:
                print(
                    f"slow: --replay {seed} {index}: {time.monotonic() - begin:.0f} s, {outcome(answer)}",
                    flush=True,
                )
            if index % 1000 == 999:
                print(f"{index + 1} requests, {time.monotonic() - start:.0f} s", flush=True)
            findings.statuses[f"{fuzz.path.partition('?')[0]} {outcome(answer)}"] += 1
            wrong = complaint(fuzz, answer)
            if wrong is not None:
                findings.fail(f"--replay {seed} {index}: {wrong}\n    {fuzz.data[:600]!r}")

    async def watch() -> None:
        nonlocal num_canaries
        while not done.is_set():
            index = num_canaries % len(known)
            num_canaries += 1
            try:
                if await canary(port, index) != known[index]:
                    findings.fail(f"canary {index} got another answer")
            except ValueError as error:
                findings.fail(str(error))
            await asyncio.sleep(0.2)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    done.set()
    await watching
    print(f"{num_canaries} known prompts asked meanwhile", flush=True)


def _driven(port: int, seed: int, num: int) -> Findings:
    findings = Findings()
    asyncio.run(_drive(port, seed, num, findings))
    return findings


async def _end_quietly(port: int, findings: Findings) -> None:
    """Check that the engine becomes idle and that its pages are free."""
    state: dict[str, Any] = {}
    for _ in range(120):
        answer = await exchange(port, request("GET", "/server_info"), BOUND_S)
        if isinstance(answer, str) or answer.status != 200:
            findings.fail(f"/server_info at the end: {outcome(answer)}")
            return
        info = answer.json()
        state = info["internal_states"][0]
        if not state["num_running_reqs"] and not state["num_queue_reqs"] and not info["num_active_requests"]:
            break
        await asyncio.sleep(0.5)
    else:
        findings.fail(f"not idle a minute after the end: {state}")
    answer = await exchange(port, request("POST", "/flush_cache"), BOUND_S)
    if outcome(answer) != "200":
        findings.fail(f"/flush_cache at the end: {outcome(answer)}")
    answer = await exchange(port, request("GET", "/server_info"), BOUND_S)
    if not isinstance(answer, str) and (used := answer.json()["internal_states"][0]["num_used_tokens"]):
        findings.fail(f"{used} tokens of the KV cache are still in use at the end")


def memory_of_processes(pid: int) -> list[int]:
    """Resident bytes of a server's main process, scheduler and detokenizer, and of the processes for large bodies and
    grammars, which start when they are first needed."""
    main = psutil.Process(pid)
    children = sorted(main.children(), key=lambda child: child.create_time())
    return [process.memory_info().rss for process in (main, *children)]


def run_fuzz(args: argparse.Namespace) -> int:
    """Run it; returns 1 if anything failed."""
    if args.replay:
        return _replay(args)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with AttackedServer(args.python_path, [*FLAGS, *args.flags]) as server:
        server.wait_ready()
        clients = [
            context.Process(target=misbehave, args=(name, server.port, stop), daemon=True)
            for name in MISBEHAVING[: args.misbehaving]
        ]
        with Observer(server.port, server.pid) as observer:
            time.sleep(ALONE_S)
            begin = time.monotonic()
            for client in clients:
                client.start()
            try:
                findings = run_apart(_driven, server.port, args.seed, args.num)
            finally:
                stop.set()
                for client in clients:
                    client.join(30)
                    client.kill()
            seen = observer.look()
        took = time.monotonic() - begin
        if not server.alive:
            findings.fail(f"the server has ended; the end of its log:\n{server.log_text()[-3000:]}")
        else:
            asyncio.run(_end_quietly(server.port, findings))
            time.sleep(SETTLED_S)
            kept = [round(num_bytes / 1e6) for num_bytes in memory_of_processes(server.pid)]
            print(
                f"an idle server's memory, MB: main {kept[0]}, its children as they were started {kept[1:]}"
            )
        log = server.log_text()
    if "Traceback" in log:
        findings.fail("a traceback in the server's log:\n" + log[log.index("Traceback") :][:3000])
    for status, count in sorted(findings.statuses.items()):
        print(f"{count:>7}  {status}")
    memory = [sample.took for sample in seen.memory]
    print(
        f"{args.num} requests in {took:.0f} s; worst /health {1e3 * worst(seen.health, begin):.0f} ms new,"
        f" {1e3 * worst(seen.kept, begin):.0f} ms kept (usual {1e3 * usual(seen.health, begin):.1f});"
        f" memory {memory[0] / 1e6:.0f} MB, peak {max(memory) / 1e6:.0f}, at the end {memory[-1] / 1e6:.0f};"
        f" {len(findings.failures)} failures"
    )
    for what, samples in (("new", seen.health), ("kept", seen.kept)):
        print(f"/health on a {what} connection took more than {_above_mark(seen, samples, begin)}")
    following = usual(seen.next_tokens, begin)
    late_tokens = _above_mark(seen, seen.next_tokens, begin, following, findings.held)
    print(f"a stream's next token (usual {1e3 * following:.1f} ms) was late by more than {late_tokens}")
    first = usual(seen.first_tokens, begin)
    firsts = [sample.took for sample in seen.first_tokens if sample.start >= begin] or [0.0]
    print(
        f"a stream's first token (usual {1e3 * first:.1f} ms), which waits in the queue behind all others', came after"
        f" {1e3 * statistics.median(firsts):.0f} ms (median of {len(firsts)}), {1e3 * max(firsts):.0f} at worst"
    )
    return 1 if findings.failures else 0


def _above_mark(
    seen: Observed, samples: Iterable[Sample], begin: float, less: float = 0.0, held: Sequence[Span] = ()
) -> str:
    """How many of the samples that started after ``begin`` took more than the mark, ``less`` seconds not counted; how
    many of these also without the time in which the observer itself did not run, and without that in ``held``."""
    waits = [Sample(sample.start, sample.took - less) for sample in samples if sample.start >= begin]
    late = [wait for wait in waits if 1e3 * wait.took > MARK_MS]
    own = [Sample(wait.start, wait.took - not_run(seen.lag, wait)) for wait in late]
    text = f"{MARK_MS:g} ms {len(late)} times of {len(waits)} (worst {1e3 * worst(waits, begin):.0f} ms)"
    if held:
        own = [Sample(wait.start, wait.took - _overlap(held, wait)) for wait in own]
        text += f", and without the {len(held)} times in which a request had paused or profiled the server"
    times = sorted((round(1e3 * wait.took) for wait in own if 1e3 * wait.took > MARK_MS), reverse=True)
    return f"{text}, without the time in which the observer did not run {len(times)} times: {times[:12]} ms"


def _overlap(spans: Sequence[Span], wait: Sample) -> float:
    """The seconds of ``wait`` that are in one of the spans, which may overlap."""
    covered, until = 0.0, wait.start
    for begin, end in sorted(spans):
        begin, end = max(begin, until), min(end, wait.start + wait.took)
        if end > begin:
            covered, until = covered + end - begin, end
    return covered


def _replay(args: argparse.Namespace) -> int:
    seed, index = args.replay
    fuzz = fuzzed(seed, index)
    print(fuzz)
    with AttackedServer(args.python_path, [*FLAGS, *args.flags]) as server:
        server.wait_ready()
        answer = asyncio.run(sent(server.port, fuzz))
        print(
            outcome(answer),
            "" if isinstance(answer, str) else bytes(answer.body)[:4000].decode(errors="replace"),
        )
        print(server.log_text()[-3000:])
    wrong = complaint(fuzz, answer)
    print(f"FAILURE {wrong}" if wrong else "nothing wrong")
    return 1 if wrong else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``fuzz``."""
    parser.add_argument("--num", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--misbehaving",
        type=int,
        default=8,
        help="misbehaving clients that run meanwhile (default: 8, the most)",
    )
    parser.add_argument(
        "--replay", type=int, nargs=2, metavar=("SEED", "INDEX"), help="send this one request again"
    )
    parser.add_argument("--python-path", type=Path, default=Path(__file__).parents[2] / "python")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of the server, last")
    parser.set_defaults(run=run_fuzz)
