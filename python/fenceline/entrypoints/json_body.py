"""Bodies in JSON: requests' become typed structs, with errors that say which field is wrong; answers are written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fenceline.frontend.request_types import RequestError

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
PIECE_BYTES = 128 << 10  # of an answer that is sent in pieces


class PartsResponse(Response):
    """A JSON answer that is the concatenation of ``parts``. A large one is sent in pieces, each in a turn of the event
    loop of its own: joined and written as one, forty megabytes of logprobs would be copied several times in one turn,
    which everybody waits for. A client that does not read stops it at the piece in hand."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        num_bytes = sum(map(len, parts))
        self._parts = parts if num_bytes > PIECE_BYTES else ()
        super().__init__(b"" if self._parts else b"".join(parts), media_type="application/json")
        self.headers["content-length"] = str(num_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._parts:
            await super().__call__(scope, receive, send)
            return
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        for piece in pieces(self._parts):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def pieces(parts: Sequence[bytes]) -> Iterator[bytes]:
    """``parts`` again, cut and joined into pieces of :data:`PIECE_BYTES`; the last is shorter."""
    held: list[memoryview] = []
    room = PIECE_BYTES
    for part in parts:
        rest = memoryview(part)
        while rest:
            held.append(rest[:room])
            room -= len(held[-1])
            rest = rest[len(held[-1]) :]
            if not room:
                yield b"".join(held)
                held, room = [], PIECE_BYTES
    if held:
        yield b"".join(held)


def json_response(value: object) -> Response:
    """``value`` as a JSON answer; may hold numpy arrays."""
    return PartsResponse([orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)])


def parse_body(data: bytes, kind: type[T]) -> T:
    """``data`` as ``kind``. Raises RequestError 400 for bad JSON and for values of the wrong type, and RecursionError
    (which is answered with 400, see :mod:`fenceline.entrypoints.errors`) for values nested too deeply. NaN and
    infinities are no JSON and refused like any other syntax error."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if "int_max_str_digits" in str(error):
            raise RequestError(400, "the body has a number of too many digits") from None
        path = str(error).partition(" - at `$.")[2]
        raise RequestError(400, str(error).replace("`$.", "`"), param=path.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def count_values(data: bytes, most: int) -> int:
    """The strings, commas and opening brackets of JSON text, commas and brackets in strings left out. More than
    ``most`` are not counted to the end. What is no JSON gets any number."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = data.count(b'"') // 2
    if num_strings > most:
        return num_strings
    outside = b"".join(data.split(b'"')[::2])
    return num_strings + sum(map(outside.count, (b",", b"[", b"{")))
