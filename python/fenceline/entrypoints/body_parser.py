"""Parses request bodies without making other requests wait: large bodies are parsed by a separate process.

Parsers hold the GIL, and 64 MiB of JSON can take them seconds and gigabytes. So the values of a body are counted first,
by searching for bytes. A body of many values, or of many bytes, goes to a helper process. The limits on values and on
each kind of body keep its result small, and the result is received in pieces, between which other tasks run. Bodies
that are parsed in this process are parsed one in each turn of the event loop, except for the smallest ones, because
dozens may arrive at the same time.
"""

from __future__ import annotations

import asyncio
import heapq
import io
import logging
import multiprocessing
import os
import pickle
import signal
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from fenceline.config.request_limits import MAX_BODY_OBJECTS, MAX_BODY_VALUES, MAX_IMAGE_CHARS, MAX_TEXT_CHARS
from fenceline.entrypoints.errors import internal_error, too_deep
from fenceline.entrypoints.fields import MAX_NAMES_LOGGED, FieldRules, UnknownFields
from fenceline.entrypoints.json_body import count_values
from fenceline.entrypoints.middleware import BODY_BYTES
from fenceline.entrypoints.sse import unless_gone
from fenceline.frontend.request_types import RequestError
from fenceline.ipc.child_process import starting_children
from fenceline.ipc.free_memory import trim_memory

T = TypeVar("T")
Parse = Callable[[bytes, UnknownFields], T]

logger = logging.getLogger(__name__)

_TINY_BYTES = 8 << 10  # bodies that are parsed as they come
# A body of no more bytes and values is parsed on the event loop, which takes some milliseconds.
_INLINE_BYTES = 512 << 10
_INLINE_VALUES = 1 << 15
_SMALL_BYTES = 2 * _INLINE_VALUES  # not counted: nearly all values take two bytes at least, with their comma
# Longer strings and lists of whole numbers are handed over one by one, lists in pieces: others run in between.
_APART_CHARS = 4096
_APART_IDS = 1024
_PIECE_IDS = 1 << 14
_NICENESS = 15  # the HTTP server and an engine on a CPU come first
# The helper has a minute for a body. Only time in which this process ran is counted: it may have been suspended itself.
_LOOK_INTERVAL_S = 1.0
_MAX_LOOKS = 60


async def _received(receive: Receive) -> deque[bytes]:
    """The parts of a body. Raises ClientDisconnect."""
    parts: deque[bytes] = deque()
    is_whole = False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if part := message.get("body"):
            parts.append(part)
        is_whole = not message.get("more_body", False)
    return parts


class BodyParser:
    """Parses the bodies of all endpoints. The helper process is started for the first body that needs it, and ends
    together with this process, even if this one is killed."""

    def __init__(self, context_length: int, unknown: UnknownFields) -> None:
        self.unknown = unknown
        self._max_values = max(MAX_BODY_VALUES, 2 * context_length)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._helper: tuple[BaseProcess, Connection] | None = None
        self._inline = asyncio.Lock()
        self._helper_free = asyncio.Lock()  # while it is held, one body is with the helper
        self._next_look: asyncio.TimerHandle | None = None

    async def parse(self, request: Request, parse: Parse[T], empty: bytes = b"") -> T:
        """The body of ``request``, or ``empty`` for one without any bytes, as ``parse`` makes it: a function at the top
        of a module, or a partial one. Raises RequestError, and ClientDisconnect if the client leaves meanwhile."""
        parts = await _received(request.receive)
        request.scope[BODY_BYTES] = num_bytes = sum(map(len, parts))
        if num_bytes <= _INLINE_BYTES:
            data = b"".join(parts) or empty
            if num_bytes <= _TINY_BYTES:
                return parse(data, self.unknown)
            await self._inline.acquire()
            asyncio.get_running_loop().call_soon(self._inline.release)  # one in a turn
            if num_bytes <= _SMALL_BYTES or _at_most_values(data) <= _INLINE_VALUES:
                return parse(data, self.unknown)
            del data
        body, unknown_fields = await unless_gone(request, self._apart(parse, parts))
        for names, rules in unknown_fields:
            self.unknown.note(names, rules)
        return cast(T, body)

    async def _apart(
        self, parse: Parse[T], parts: deque[bytes]
    ) -> tuple[object, list[tuple[set[str], FieldRules | str]]]:
        """:meth:`_parse_apart`, one body after the other. Bodies wait here and not in the executor's queue, where
        bodies of clients that have disconnected would stay until their turn comes."""
        await self._helper_free.acquire()
        loop = asyncio.get_running_loop()
        # The looks begin when there is a helper to look at, which may have to be started first.
        work = self._thread.submit(
            self._parse_apart, parse, parts, lambda: loop.call_soon_threadsafe(self._look, _MAX_LOOKS)
        )
        # Released when the helper is done with the body, and not already when the client disconnects.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free_helper))
        try:
            return await asyncio.wrap_future(work)
        finally:
            del work  # else the error holds this frame, and this frame the error and the body

    def _free_helper(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._helper_free.release()

    def _look(self, num_left: int) -> None:
        """Kill a helper that was suspended or takes too long. Its request gets 503, the next body another helper."""
        if not num_left and self._helper is not None:
            logger.error("The process that parses large bodies has not answered for a minute; it is killed")
            self._helper[0].kill()
        else:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(_LOOK_INTERVAL_S, self._look, max(num_left - 1, 0))

    def _parse_apart(
        self, parse: Parse[T], parts: deque[bytes], started: Callable[[], object]
    ) -> tuple[object, list[tuple[set[str], FieldRules | str]]]:
        try:
            connection = self._connection()
            started()
            connection.send((parse, self._max_values, len(parts)))
            while parts:  # never joined here: a copy of 64 MiB is a copy too many
                connection.send_bytes(parts.popleft())
            apart: list[bytes | array[int]] = connection.recv()
            result = _Unpickler(connection.recv_bytes(), apart).load()
        except (EOFError, OSError) as error:
            self._helper = None  # the next body gets a new one
            raise RequestError(
                503, "the body could not be parsed: the process that parses large bodies ended"
            ) from error
        if isinstance(result, RequestError):
            try:
                raise result
            finally:
                del result  # else the error holds this frame, and this frame the error and the body
        return cast("tuple[object, list[tuple[set[str], FieldRules | str]]]", result)

    def _connection(self) -> Connection:
        if self._helper is None or not self._helper[0].is_alive():
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, _NICENESS), name="body-parser", daemon=True)
            with starting_children():
                process.start()
            theirs.close()
            self._helper = process, ours
        return self._helper[1]


def _at_most_values(data: bytes) -> int:
    """An upper bound of :func:`count_values` in a fraction of its time: commas and brackets in strings count too."""
    return data.count(b'"') // 2 + sum(map(data.count, (b",", b"[", b"{")))


def too_many_values(most: int) -> RequestError:
    """The error for a body with more values than a normal request needs."""
    return RequestError(400, f"the body has more than {most} JSON values; send several requests")


# --- the helper process


class _CollectedFields(UnknownFields):
    """Collects the unknown fields of one body, for the server process to note them with those of other bodies."""

    def __init__(self) -> None:
        super().__init__(strict=False)
        self.collected: list[tuple[set[str], FieldRules | str]] = []

    def note(self, names: set[str], rules: FieldRules | str) -> None:
        """Keep as many names as may be logged."""
        self.collected.append((set(heapq.nsmallest(MAX_NAMES_LOGGED, names)), rules))


def _serve(connection: Connection, niceness: int) -> None:
    """Parse bodies until the other end is closed, at a low priority: generation goes first if there are few cores."""
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    while True:
        try:
            parse, most, num_parts = connection.recv()
            data = b"".join([connection.recv_bytes() for _ in range(num_parts)])
        except EOFError:
            return
        pickled, apart = _pickled(_parsed(parse, data, most))
        connection.send(apart)
        connection.send_bytes(pickled)
        del parse, data, pickled, apart
        trim_memory()


def _parsed(parse: Parse[T], data: bytes, most: int) -> object:
    """The result for :meth:`BodyParser._parse_apart`: the body and its unknown fields, or the error."""
    unknown_fields = _CollectedFields()
    try:
        if count_values(data, most) > most:
            raise too_many_values(most)
        return parse(data, unknown_fields), unknown_fields.collected
    except RequestError as error:
        return error
    except RecursionError:
        return too_deep()
    except MemoryError:
        return RequestError(413, "parsing the body takes more memory than is available; send several requests")
    except Exception as defect:  # of ours; the next bodies still want this process
        logger.exception("a body could not be parsed")
        return internal_error(defect)


def _pickled(result: object) -> tuple[bytes, list[bytes | array[int]]]:
    """``result`` for :class:`_Unpickler`, or an error in its place if it is too deep or has too many objects."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(result)
    except RecursionError:
        return pickle.dumps(too_deep()), []
    except RequestError as error:
        return pickle.dumps(error), []
    except Exception as defect:  # of ours; the next bodies still want this process
        logger.exception("a body could not be handed over")
        return pickle.dumps(internal_error(defect)), []
    return file.getvalue(), pickler.apart


# How images begin: data: URLs, and PNG, JPEG, WebP and GIF files in base64.
_IMAGES = ("data:", "iVBORw0KGgo", "/9j/", "UklGR", "R0lGODdh", "R0lGODlh")


class _Pickler(pickle.Pickler):
    """Puts long strings and long lists of whole numbers aside. Raises RequestError for more than
    :data:`MAX_BODY_OBJECTS` others: each costs this process's parent time to build and to free."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.apart: list[bytes | array[int]] = []
        self._num_objects = 0

    def persistent_id(self, value: object) -> int | None:
        self._num_objects += 1
        if self._num_objects > MAX_BODY_OBJECTS:
            raise RequestError(
                400, f"the body has more than {MAX_BODY_OBJECTS} values, besides token ids; send several requests"
            )
        if type(value) is str and len(value) > _APART_CHARS:
            if len(value) > (MAX_IMAGE_CHARS if value.startswith(_IMAGES) else MAX_TEXT_CHARS):
                raise RequestError(
                    400,
                    f"a text has {len(value)} characters, at most {MAX_TEXT_CHARS} are allowed in one; shorten it",
                    code="context_length_exceeded",
                )
            self.apart.append(value.encode("utf-8", "surrogatepass"))
            return len(self.apart) - 1
        if type(value) is list and len(value) > _APART_IDS and set(map(type, value)) == {int}:
            try:
                self.apart.append(array("q", value))
            except OverflowError:
                return None
            return len(self.apart) - 1
        return None


class _Unpickler(pickle.Unpickler):
    """Puts back what :class:`_Pickler` has put aside."""

    def __init__(self, pickled: bytes, apart: list[bytes | array[int]]) -> None:
        super().__init__(_Frames(pickled))
        self._apart = apart

    def persistent_load(self, index: int) -> str | list[int]:
        part = self._apart[index]
        if isinstance(part, bytes):
            return part.decode("utf-8", "surrogatepass")
        ids: list[int] = []
        for start in range(0, len(part), _PIECE_IDS):
            ids += part[start : start + _PIECE_IDS]
        return ids


class _Frames:
    """A file whose methods are Python's: other threads may run whenever the unpickler asks for its next 64 KiB."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, num_bytes: int = -1) -> bytes:
        return self._file.read(num_bytes)

    def readline(self) -> bytes:
        return self._file.readline()
