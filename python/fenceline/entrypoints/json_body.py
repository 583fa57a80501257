"""Bodies in JSON: requests' become typed structs, with errors that say which field is wrong; answers are written."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import orjson
from starlette.responses import Response

from fenceline.frontend.request_types import RequestError

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20


def json_response(value: object) -> Response:
    """``value`` as a JSON answer; may hold numpy arrays."""
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def parse_body(data: bytes, kind: type[T]) -> T:
    """``data`` as ``kind``. Raises RequestError 400 for bad JSON and for values of the wrong type, and
    RecursionError (which is answered with 400, see :mod:`fenceline.entrypoints.errors`) for values nested too deeply.

    NaN and infinities are no JSON and refused like any other syntax error.
    """
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
    """The strings, commas and opening brackets of JSON text, commas and brackets in strings left out.

    More than ``most`` are not counted to the end. What is no JSON gets any number."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = data.count(b'"') // 2
    if num_strings > most:
        return num_strings
    outside = b"".join(data.split(b'"')[::2])
    return num_strings + sum(map(outside.count, (b",", b"[", b"{")))
