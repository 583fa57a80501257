"""Request bodies: JSON to typed structs with errors that say which field is wrong."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fenceline.managers.request_types import RequestError

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20


def parse_body(data: bytes, kind: type[T]) -> T:
    """``data`` as ``kind``. Raises RequestError 400 for bad JSON and for values of the wrong type.

    NaN and infinities are no JSON and refused like any other syntax error.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        path = str(error).partition(" - at `$.")[2]
        raise RequestError(400, str(error).replace("`$.", "`"), param=path.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
