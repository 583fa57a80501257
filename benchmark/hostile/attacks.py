"""Attacks by misbehaving clients, each limited in number and time.

An attack is a function that builds its payload and returns a coroutine function that sends it, so that building does
not take time from the server. ``limit_s`` limits the coroutine. Requests stay within the documented 64 MiB unless
exceeding it is the attack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import httptools
from wire import RESET, SILENT, Answer, Wire, exchange, head, outcome, post, request

MIB = 1 << 20


def leave_cores_to_the_server() -> None:
    """Let this process run only when a core has nothing else to do: a real attacker would be on another machine.

    Linux may share the cores among sessions first (``kernel.sched_autogroup_enabled``), whatever the priorities in
    them, so the server, its clients and the observer are in one session. The lowest niceness would not be enough: it
    may take the kernel 100 ms to move a waiting process to a core on which only such processes run. With the policy
    SCHED_IDLE it starts a process there at once."""
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # of Linux
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Target:
    """The server under attack. ``outcomes`` counts the attacker's outcomes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.outcomes: Counter[str] = Counter()

    async def send(
        self, data: bytes, wait_s: float = 120.0, *, leave_after_s: float | None = None, head_only: bool = False
    ) -> Answer | str:
        """Send one request on a new connection and count its outcome."""
        answer = await exchange(self.port, data, wait_s, leave_after_s=leave_after_s, head_only=head_only)
        self.outcomes[outcome(answer)] += 1
        return answer

    async def send_all(self, requests: Iterable[bytes], at_once: int, wait_s: float = 120.0) -> None:
        """Many requests, ``at_once`` at a time."""
        rest = iter(requests)

        async def some() -> None:
            for data in rest:
                await self.send(data, wait_s)

        await asyncio.gather(*(some() for _ in range(at_once)))


Run = Callable[[Target], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Attack:
    """``make`` builds the payload and returns the coroutine function. ``nofile``, ``flags``: how its server is
    started."""

    name: str
    make: Callable[[], Run]
    limit_s: float = 60.0
    nofile: tuple[int, int] | None = None
    flags: Sequence[str] = ()


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, *, limit_s: float = 60.0, nofile: tuple[int, int] | None = None, flags: Sequence[str] = ()
) -> Callable[[Callable[[], Run]], Callable[[], Run]]:
    """Add a function to the list of attacks."""

    def put(make: Callable[[], Run]) -> Callable[[], Run]:
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, make, limit_s, nofile, flags)
        return make

    return put


def one(name: str, path: str, body: Callable[[], object], *, limit_s: float = 100.0) -> None:
    """An attack of a single POST."""

    def make() -> Run:
        data = post(path, body())
        return lambda target: target.send(data)

    attack(name, limit_s=limit_s)(make)


def several(
    name: str, path: str, body: Callable[[], object], num: int, *, at_once: int | None = None, limit_s: float = 100.0
) -> None:
    """An attack of ``num`` equal POSTs, ``at_once`` at a time, by default all."""

    def make() -> Run:
        data = post(path, body())
        return lambda target: target.send_all([data] * num, at_once or num)

    attack(name, limit_s=limit_s)(make)


def repeated(before: bytes, item: bytes, num: int, after: bytes) -> bytes:
    """JSON with a long list: ``before``, ``num`` times ``item`` with commas, ``after``."""
    return before + b",".join([item] * num) + after


def words(num_chars: int) -> str:
    """Text that the tokenizer splits into short words."""
    return ("ledger of three small foxes 12 " * (num_chars // 31 + 1))[:num_chars]


@attack("nothing")
def _nothing() -> Run:
    return lambda target: asyncio.sleep(5)


@attack("nothing for a minute", limit_s=70.0)
def _nothing_for_long() -> Run:
    """No attack, for as long as a long attack takes, so that their worst moments can be compared."""
    return lambda target: asyncio.sleep(60)


# --- cost before validation

one("/tokenize, a text of 60 MB", "/tokenize", lambda: {"prompt": words(60_000_000)})
several("/tokenize, 1 MB a hundred times", "/tokenize", lambda: {"prompt": words(MIB)}, 100, at_once=16)
several("/detokenize, 100,000 ids a hundred times", "/detokenize", lambda: {"tokens": [300] * 100_000}, 100, at_once=16)


@attack("/generate, 50 MB of text, left after 1 s")
def _left() -> Run:
    data = post("/generate", {"text": words(50_000_000)})

    async def run(target: Target) -> None:
        await asyncio.gather(*(target.send(data, leave_after_s=1.0) for _ in range(3)))

    return run


several(
    "64 bodies of 60 MB of ids at once", "/generate", lambda: repeated(b'{"input_ids":[', b"9", 30_000_000, b"]}"), 64
)
several(
    "640 bodies of 130,000 ids, 64 at once",
    "/generate",
    lambda: repeated(b'{"sampling_params":{"temperature":-1},"input_ids":[', b"9", 130_000, b"]}"),
    640,
    at_once=64,
)
several(
    "640 bodies of 1.9 MB of text, 64 at once",
    "/v1/completions",
    lambda: {"prompt": words(1_900_000), "temperature": -1},
    640,
    at_once=64,
)

# --- headers and framing of HTTP


def _raw(name: str, make: Callable[[], bytes], *, num: int = 1, limit_s: float = 60.0) -> None:
    def build() -> Run:
        data = make()
        return lambda target: target.send_all([data] * num, min(num, 16), wait_s=limit_s)

    attack(name, limit_s=limit_s)(build)


_raw(
    "HTTP/1.0, a thousand",
    lambda: post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}).replace(
        b"HTTP/1.1", b"HTTP/1.0", 1
    ),
    num=1000,
)
_raw(
    "a chunked body of a million one-byte chunks",
    lambda: (
        head("POST", "/generate", ["Transfer-Encoding: chunked"]) + b"\r\n" + b"1\r\n[\r\n" * 1_000_000 + b"0\r\n\r\n"
    ),
)


# --- connections


def _half_requests(num: int, data: bytes, hold_s: float) -> Run:
    """``num`` connections that send ``data`` and then nothing, until the server closes them or ``hold_s`` seconds are
    over."""

    async def hold(target: Target) -> None:
        try:
            async with asyncio.timeout(hold_s), Wire(target.port) as wire:
                await wire.send(data)
                target.outcomes[outcome(await wire.answer())] += 1
        except TimeoutError:
            target.outcomes["held"] += 1
        except OSError:
            target.outcomes[RESET] += 1

    async def run(target: Target) -> None:
        await asyncio.gather(*(hold(target) for _ in range(num)))

    return run


_HALF_HEAD = b"POST /generate HTTP/1.1\r\nHost: a\r\nX-Half"
_HALF_BODY = head("POST", "/generate", ["Content-Length: 1000000"]) + b'\r\n{"text": "'


@attack("200 half bodies of 32 MB", limit_s=40)
def _big_half_bodies() -> Run:
    return _half_requests(
        200, head("POST", "/generate", ["Content-Length: 60000000"]) + b"\r\n" + b"[" * 32_000_000, 30
    )


def _drip(first: bytes, drop: bytes, num: int, every_s: float, hold_s: float) -> Run:
    """``num`` connections that send ``first`` and then ``drop`` every ``every_s`` seconds."""

    async def slow(target: Target) -> None:
        try:
            async with asyncio.timeout(hold_s), Wire(target.port) as wire:
                await wire.send(first)
                answer = asyncio.ensure_future(wire.answer())
                try:
                    while not answer.done():
                        await asyncio.wait([answer], timeout=every_s)
                        if not answer.done() and not await wire.send(drop):
                            break
                    target.outcomes[outcome(await answer)] += 1
                finally:
                    answer.cancel()
        except TimeoutError:
            target.outcomes["held"] += 1
        except OSError:
            target.outcomes[RESET] += 1

    async def run(target: Target) -> None:
        await asyncio.gather(*(slow(target) for _ in range(num)))

    return run


@attack("300 slow bodies, a byte every 0.2 s", limit_s=40)
def _slow_bodies() -> Run:
    return _drip(_HALF_BODY, b"a", 300, 0.2, 30)


# --- generation


def _long_ids() -> list[int]:
    rng = random.Random(7)
    return [rng.randrange(300, 1000) for _ in range(3900)]


one(
    "n=128 with a prompt of 3,900 tokens",
    "/generate",
    lambda: {"input_ids": _long_ids(), "sampling_params": {"n": 128, "max_new_tokens": 20}},
    limit_s=60,
)
one(
    "n=128 for 32 prompts, each with a bias of 1,000 tokens",
    "/generate",
    lambda: {
        "input_ids": [[5 + i, 6, 7] for i in range(32)],
        "sampling_params": {"n": 128, "max_new_tokens": 4, "logit_bias": {str(token): 0.5 for token in range(1000)}},
    },
    limit_s=60,
)
one(
    "completions, n=128 for 8 long prompts",
    "/v1/completions",
    lambda: {"prompt": [_long_ids()] * 8, "n": 128, "max_tokens": 20},
    limit_s=60,
)


@attack("4,096 prompts of 3,900 tokens, left after 5 s", limit_s=20)
def _flood() -> Run:
    rng = random.Random(3)
    prompts = [[rng.randrange(300, 1000) for _ in range(3900)] for _ in range(4096)]
    data = post("/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 100}})
    return lambda target: target.send(data, leave_after_s=5.0)


@attack("4,096 short prompts, left after 5 s", limit_s=20)
def _short_flood() -> Run:
    data = post("/generate", {"text": ["Once upon a time"] * 4096, "sampling_params": {"max_new_tokens": 500}})
    return lambda target: target.send(data, leave_after_s=5.0)


@attack("2,000 streams, each left after its first bytes", limit_s=60)
def _left_streams() -> Run:
    data = post("/generate", {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 2000}, "stream": True})

    async def run(target: Target) -> None:
        async def some(num: int) -> None:
            for _ in range(num):
                try:
                    async with asyncio.timeout(30), Wire(target.port) as wire:
                        await wire.send(data)
                        await wire.read()
                        target.outcomes["left"] += 1
                except (TimeoutError, OSError):
                    target.outcomes[SILENT] += 1

        await asyncio.gather(*(some(62) for _ in range(32)))

    return run


def _unread(body: object, num: int) -> Run:
    data = post("/generate", body)

    async def run(target: Target) -> None:
        async with asyncio.timeout(20):
            wires = [Wire(target.port, receive_bytes=2048) for _ in range(num)]
            for wire in wires:
                await wire.__aenter__()
                await wire.send(data)
            try:
                await asyncio.sleep(15)
                target.outcomes["never read"] += num
            finally:
                for wire in wires:
                    await wire.__aexit__()

    return run


@attack("64 streams that are never read", limit_s=30)
def _unread_streams() -> Run:
    params = {"max_new_tokens": 3000, "ignore_eos": True}
    return _unread({"text": "Once", "sampling_params": params, "stream": True, "return_logprob": True}, 64)


@attack("16 streams that are never read", limit_s=30)
def _few_unread_streams() -> Run:
    return _unread({"text": "Once", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}, 16)


@attack("32 large answers that are never read", limit_s=30)
def _unread_answers() -> Run:
    params = {"max_new_tokens": 1, "n": 4}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128}
    return _unread({"input_ids": _long_ids(), "sampling_params": params, **logprobs}, 32)


several(
    "128 logprobs for each of 3,900 tokens, with texts",
    "/generate",
    lambda: {
        "input_ids": _long_ids(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 128,
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 1},
    },
    8,
)
one(
    "128 logprobs, n=128, a stream",
    "/generate",
    lambda: {
        "input_ids": _long_ids()[:1000],
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 128,
        "return_text_in_logprobs": True,
        "stream": True,
        "sampling_params": {"max_new_tokens": 50, "n": 128, "ignore_eos": True},
    },
    limit_s=60,
)
several(
    "8 streams that repeat 128 logprobs of 3,900 tokens",
    "/generate",
    lambda: {
        "input_ids": _long_ids(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 128,
        "stream": True,
        "sampling_params": {"max_new_tokens": 50, "ignore_eos": True},
    },
    8,
)


@attack("8 clients that repeat such streams and read slowly", limit_s=60)
def _slow_readers() -> Run:
    body = {
        "input_ids": _long_ids(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 128,
        "stream": True,
        "sampling_params": {"max_new_tokens": 50, "ignore_eos": True},
    }
    data = post("/generate", body)

    async def run(target: Target) -> None:
        async def read(until: float) -> None:
            async with Wire(target.port, receive_bytes=1 << 16) as wire:
                await wire.send(data)
                while time.monotonic() < until and await wire.read():
                    if wire.current.complete:
                        break
                    await asyncio.sleep(0.02)

        async def repeat() -> None:
            end = time.monotonic() + 40
            while time.monotonic() < end:
                try:
                    # Some 10 MB are read of an answer of hundreds.
                    await read(min(end, time.monotonic() + 10))
                    target.outcomes["left"] += 1
                except (OSError, httptools.HttpParserError):
                    target.outcomes[RESET] += 1

        await asyncio.gather(*(repeat() for _ in range(8)))

    return run


several(
    "completions, echo with 20 logprobs of 3,900 tokens",
    "/v1/completions",
    lambda: {"prompt": _long_ids(), "echo": True, "logprobs": 20, "max_tokens": 1},
    8,
)
one(
    "128 streams that repeat their text, 3,000 tokens",
    "/generate",
    lambda: {"text": "Once", "stream": True, "sampling_params": {"max_new_tokens": 3000, "n": 128, "ignore_eos": True}},
    limit_s=40,
)

# --- ids and control


@attack("a hundred rids of 4 MB", limit_s=60)
def _long_rids() -> Run:
    bodies = [
        post("/generate", {"text": "a", "rid": f"{i}" + "r" * 4_000_000, "sampling_params": {"max_new_tokens": 1}})
        for i in range(20)
    ]
    return lambda target: target.send_all(bodies * 5, 4)


several(
    "a list of 4,096 rids of 12 KB",
    "/generate",
    lambda: {
        "text": ["a"] * 4096,
        "rid": [f"{i}" + "r" * 12_000 for i in range(4096)],
        "sampling_params": {"max_new_tokens": 1},
    },
    1,
    limit_s=60,
)


@attack("one rid by 2,000 requests", limit_s=60)
def _same_rid() -> Run:
    data = post("/generate", {"text": "a", "rid": "the same\nfor all", "sampling_params": {"max_new_tokens": 4}})
    return lambda target: target.send_all([data] * 2000, 32)


@attack("10,000 aborts of unknown requests", limit_s=60)
def _aborts() -> Run:
    bodies = [post("/abort_request", {"rid": f"unknown-{i}"}) for i in range(10_000)]
    return lambda target: target.send_all(bodies, 16)


one("an abort of 60 MB", "/abort_request", lambda: {"rid": "r" * 60_000_000})


@attack("2,000 requests and aborts by a common prefix", limit_s=60)
def _prefix_aborts() -> Run:
    async def run(target: Target) -> None:
        async def some(worker: int) -> None:
            for index in range(60):
                rid = f"common-{worker}-{index}"
                body = {"text": "Once", "rid": rid, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
                asked = asyncio.ensure_future(target.send(post("/generate", body), 30))
                await asyncio.sleep(0.01)
                await target.send(post("/abort_request", {"rid": "common" if index % 10 == 0 else rid}), 30)
                await asked

        await asyncio.gather(*(some(worker) for worker in range(32)))

    return run


def _storm(path: str, num: int, method: str = "GET", body: bytes = b"") -> Callable[[], Run]:
    def make() -> Run:
        data = request(method, path, body)
        return lambda target: target.send_all([data] * num, 16)

    return make


attack("2,000 GET /server_info")(_storm("/server_info", 2000))
attack("2,000 GET /live_state")(_storm("/live_state", 2000))
attack("2,000 GET /")(_storm("/", 2000))
attack("500 GET /flight_recorder")(_storm("/flight_recorder", 500))
attack("500 GET /flight_recorder?format=trace")(_storm("/flight_recorder?format=trace", 500))
attack("500 POST /flight_recorder")(_storm("/flight_recorder", 500, "POST"))
attack("500 GET /metrics", flags=("--enable-metrics",))(_storm("/metrics", 500))
attack("2,000 POST /flush_cache")(_storm("/flush_cache", 2000, "POST"))
attack("500 GET /openapi.json")(_storm("/openapi.json", 500))
attack("500 GET /health_generate")(_storm("/health_generate", 500))
attack("5,000 wrong requests")(_storm("/generate", 5000, "POST", b'{"text": 1}'))


@attack("profiles at 200 paths", limit_s=60)
def _profiles() -> Run:
    paths = ["/".join(["a"] * 1500), "a" * 5000, "\0", "../../x", "a\nb", "", "~", "\u0131", "/dev/null/x", "/proc/1/x"]
    bodies = [
        part
        for path in paths * 2
        for part in (post("/start_profile", {"output_dir": path, "num_steps": 1}), request("POST", "/stop_profile"))
    ]
    return lambda target: target.send_all(bodies, 1, wait_s=30)
