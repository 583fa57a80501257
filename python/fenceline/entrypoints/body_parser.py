"""Parsing request bodies without keeping others waiting: a large one is parsed by a process of its own.

Parsers hold the GIL, and 64 MiB of JSON can take them seconds and gigabytes. So its values are counted first, by
searches for bytes. A body of many values, or of many bytes, goes to a helper process; what comes back is as small as
the limits on values and on each kind of body make it.
"""

from __future__ import annotations

import asyncio
import heapq
import io
import multiprocessing
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar, cast

from starlette.requests import Request

from fenceline.config.request_limits import MAX_BODY_VALUES
from fenceline.entrypoints.errors import too_deep
from fenceline.entrypoints.fields import MAX_NAMES_LOGGED, FieldRules, UnknownFields
from fenceline.managers.process import signals_blocked
from fenceline.managers.request_types import RequestError
from fenceline.managers.tokenize_pool import trim_memory

T = TypeVar("T")
Parse = Callable[[bytes, UnknownFields], T]

# A body of no more bytes is not looked at before it is parsed; one of no more bytes and values is parsed on the event
# loop, which takes some ten milliseconds at most.
_SMALL_BYTES = 32 << 10
_INLINE_BYTES = 2 << 20
_INLINE_VALUES = 1 << 17
_APART_CHARS = 4096  # longer strings are unpickled one by one, each a moment in which others may run


class BodyParser:
    """Parses the bodies of all endpoints. The helper process is started by the first body that needs it, and ends with
    this one, however it ends."""

    def __init__(self, context_length: int, unknown: UnknownFields) -> None:
        self.unknown = unknown
        self._max_values = max(MAX_BODY_VALUES, 2 * context_length)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._helper: tuple[BaseProcess, Connection] | None = None

    async def parse(self, request: Request, parse: Parse[T], empty: bytes = b"") -> T:
        """The body of ``request``, or ``empty`` for one without any bytes, as ``parse`` makes it: a function at the top
        of a module, or a partial one. Raises RequestError."""
        data = await request.body() or empty
        if len(data) <= _SMALL_BYTES:
            return parse(data, self.unknown)
        if len(data) <= _INLINE_BYTES and self._checked_values(data) <= _INLINE_VALUES:
            return parse(data, self.unknown)
        loop = asyncio.get_running_loop()
        body, strangers = await loop.run_in_executor(self._thread, self._parse_apart, parse, data)
        for names, rules in strangers:
            self.unknown.note(names, rules)
        return cast(T, body)

    def _checked_values(self, data: bytes) -> int:
        num_values = count_values(data, self._max_values)
        if num_values > self._max_values:
            raise too_many_values(self._max_values)
        return num_values

    def _parse_apart(self, parse: Parse[T], data: bytes) -> tuple[object, list[tuple[set[str], FieldRules]]]:
        try:
            connection = self._connection()
            connection.send((parse, self._max_values))
            connection.send_bytes(data)
            texts: list[bytes] = connection.recv()
            result = _Unpickler(connection.recv_bytes(), texts).load()
        except (EOFError, OSError) as error:
            self._helper = None  # the next body gets a new one
            raise RequestError(503, "the body could not be parsed: the process that does it ended") from error
        if isinstance(result, RequestError):
            raise result
        return cast("tuple[object, list[tuple[set[str], FieldRules]]]", result)

    def _connection(self) -> Connection:
        if self._helper is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name="body-parser", daemon=True)
            with signals_blocked():
                process.start()
            theirs.close()
            self._helper = process, ours
        return self._helper[1]


def count_values(data: bytes, most: int) -> int:
    """The strings, commas and opening brackets of JSON text, commas and brackets in strings left out.

    More than ``most`` are not counted to the end. What is no JSON gets any number."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = data.count(b'"') // 2
    if num_strings > most:
        return num_strings
    outside = b"".join(data.split(b'"')[::2])
    return num_strings + sum(map(outside.count, (b",", b"[", b"{")))


def too_many_values(most: int) -> RequestError:
    """The error of a body with more values than any honest one needs."""
    return RequestError(400, f"the body has more than {most} JSON values; send several requests")


# --- the helper process


class _Strangers(UnknownFields):
    """Keeps what is to be noted where the other bodies' are."""

    def __init__(self) -> None:
        super().__init__(strict=False)
        self.noted: list[tuple[set[str], FieldRules]] = []

    def note(self, names: set[str], rules: FieldRules) -> None:
        """As many names as may be logged."""
        self.noted.append((set(heapq.nsmallest(MAX_NAMES_LOGGED, names)), rules))


def _serve(connection: Connection) -> None:
    """Parse until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    while True:
        try:
            parse, most = connection.recv()
            data = connection.recv_bytes()
        except EOFError:
            return
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(_parsed(parse, data, most))
        connection.send(pickler.texts)
        connection.send_bytes(pickled.getbuffer())
        del parse, data, pickled, pickler
        trim_memory()


def _parsed(parse: Parse[T], data: bytes, most: int) -> object:
    """What :meth:`BodyParser._parse_apart` gets: the body and its unknown fields, or the error."""
    strangers = _Strangers()
    try:
        if count_values(data, most) > most:
            raise too_many_values(most)
        return parse(data, strangers), strangers.noted
    except RequestError as error:
        return error
    except RecursionError:
        return too_deep()
    except MemoryError:
        return RequestError(413, "the body takes more memory than there is; send several requests")


class _Pickler(pickle.Pickler):
    """Puts long strings aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.texts: list[bytes] = []

    def persistent_id(self, value: object) -> int | None:
        if type(value) is str and len(value) > _APART_CHARS:
            self.texts.append(value.encode("utf-8", "surrogatepass"))
            return len(self.texts) - 1
        return None


class _Unpickler(pickle.Unpickler):
    """Takes them back."""

    def __init__(self, pickled: bytes, texts: list[bytes]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._texts = texts

    def persistent_load(self, index: int) -> str:
        return self._texts[index].decode("utf-8", "surrogatepass")
