"""The HTTP client: sends one request and reads its reply as it comes."""

from __future__ import annotations

import resource
import time

import aiohttp
import orjson

from fenceline.benchmarking.endpoints import Endpoint
from fenceline.benchmarking.records import Call, Reply
from fenceline.benchmarking.stream import error_text, new_recorder

_TIMEOUT_S = 6 * 60 * 60
_READ_BUFFER_BYTES = 10 * 1024**2  # a slow event loop must not push back on the server it measures


def open_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """A session without a connection limit. The caller closes it.

    Each request has its own connection: a kept one may be closed by the server just as it is picked, and a POST
    is not retried.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        read_bufsize=_READ_BUFFER_BYTES,
        headers=headers,
    )


def raise_file_limit(wanted: int = 65535) -> None:
    """Raise the soft limit of open files, as far as the hard limit lets us: each request is a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


class Client:
    """Sends calls to one endpoint over one session."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        self.num_reads = 0  # socket reads that brought data, for bench_client_capacity

    async def send(self, call: Call) -> Reply:
        """Send ``call`` and wait for its whole reply. Failures come back as replies, never as exceptions."""
        endpoint = self.endpoint
        try:
            body = orjson.dumps(endpoint.payload(call))
        except orjson.JSONEncodeError as error:  # a file's prompt may hold half a surrogate pair
            return Reply(False, f"the prompt cannot be sent as JSON: {error}", start_time=time.perf_counter())
        start = time.perf_counter()
        recorder = new_recorder(endpoint.kind, start)
        try:
            async with self._session.post(endpoint.url, data=body, headers=self._headers) as response:
                if response.status != 200:
                    reason = _reason(await response.read())
                    status = f"HTTP {response.status} {response.reason or ''}"
                    return Reply(False, f"{status}: {reason}", start_time=start)
                if endpoint.stream:
                    read = response.content.readany
                    while data := await read():
                        self.num_reads += 1
                        recorder.feed(data, time.perf_counter())
                else:
                    recorder.whole(await response.read(), time.perf_counter())
            return recorder.finish(time.perf_counter())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Reply(False, f"{type(error).__name__}: {error}", start_time=start)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            return Reply(False, f"unreadable reply: {type(error).__name__}: {error}", start_time=start)


def _reason(body: bytes) -> str:
    """What an error's body says: the message of an error object, else the start of the body."""
    try:
        message = error_text(orjson.loads(body))
    except orjson.JSONDecodeError:
        message = None
    return message or body[:500].decode(errors="replace").strip()
