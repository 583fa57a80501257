"""The schemas of everyday types, as zod and pydantic write them: each is taken, and every answer is valid.

Answers are drawn from the compiled grammar without a model. jsonschema judges them, to which formats are annotations.
Values of formats are judged by the standard library and by rules of their own.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional
from urllib.parse import urlsplit

import json_schemas
import jsonschema
import pydantic
import pytest
from json_schemas import compiled, walk
from pydantic import Field
from typing_extensions import TypedDict

from fenceline.constrained.formats import PATTERNS
from fenceline.constrained.json_schema import SchemaError, enforced_schema

_ZOD: dict[str, Any] = json.loads((Path(json_schemas.__file__).parent / "zod_schemas.json").read_text())
assert _ZOD.pop("version") == "zod 4.6.7, z.toJSONSchema"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Address(pydantic.BaseModel):
    street: str = Field(description="with its number")
    zip: str = Field(pattern=r"^\d{5}$")


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = Field(default=9, ge=0.0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    good: bool


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class OpenTyped(Open):
    __pydantic_extra__: dict[str, int]


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Keys(TypedDict):
    a: int
    b: NotRequired[str]


class Pair(NamedTuple):
    a: int
    b: str


class Order(pydantic.BaseModel):
    id: uuid.UUID
    at: datetime.datetime
    to: Address
    price: Decimal = Field(ge=0, decimal_places=2)
    colors: set[Color] = set()
    notes: dict[str, str] | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    previous: Optional[Order] = None  # noqa: UP045


_PYDANTIC: dict[str, Any] = {
    "int": int, "str": str, "float": float, "bool": bool, "none": None, "any": Any, "object": object,
    "optional": int | None, "union": int | str, "models": Address | Cat,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "literal": Literal["a"], "literals": Literal["a", 1, None, True], "enum": Color, "int enum": Number,
    "list": list[int], "bare list": list, "list of any": list[Any], "list of optional": list[int | None],
    "set": set[str], "set of enum": set[Color], "set of literal": set[Literal["a", "b", "c"]],
    "set of bool": set[bool], "frozenset": frozenset[int], "tuple": tuple[int, str], "empty tuple": tuple[()],
    "open tuple": tuple[int, ...], "bare tuple": tuple, "deque": collections.deque[int],
    "dict": dict, "dict of int": dict[str, int], "int keys": dict[int, str], "enum keys": dict[Color, int],
    "literal keys": dict[Literal["a", "b"], int], "uuid keys": dict[uuid.UUID, int],
    "date keys": dict[datetime.date, int], "pattern keys": dict[Annotated[str, Field(pattern="^k")], int],
    "long keys": dict[Annotated[str, Field(min_length=2)], int], "dict of models": dict[str, Address],
    "dict with a length": Annotated[dict[str, int], Field(min_length=1, max_length=3)],
    "nested": list[dict[str, list[Address]]], "defaultdict": collections.defaultdict[str, int],
    "uuid": uuid.UUID, "uuid4": pydantic.UUID4, "date": datetime.date, "datetime": datetime.datetime,
    "time": datetime.time, "timedelta": datetime.timedelta, "past": pydantic.PastDate,
    "aware": pydantic.AwareDatetime, "decimal": decimal.Decimal,
    "money": Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    "decimal from 0": Annotated[Decimal, Field(ge=0)], "bytes": bytes, "path": pathlib.Path,
    "file": pydantic.FilePath, "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address,
    "network": ipaddress.IPv4Network, "interface": ipaddress.IPv4Interface, "any ip": pydantic.IPvAnyAddress,
    "url": pydantic.AnyUrl, "http url": pydantic.HttpUrl, "file url": pydantic.FileUrl,
    "postgres": pydantic.PostgresDsn, "redis": pydantic.RedisDsn, "json": pydantic.Json,
    "json of int": pydantic.Json[int], "secret": pydantic.SecretStr, "regex": re.Pattern,
    "constr": pydantic.constr(min_length=1, max_length=10), "pattern": pydantic.constr(pattern=r"^[a-z]+$"),
    "short pattern": pydantic.constr(pattern=r"^[a-z]+$", max_length=10),
    "long pattern": pydantic.constr(pattern=r"^\w+$", min_length=3, max_length=16),
    "conint": pydantic.conint(ge=1, le=10), "gt": pydantic.conint(gt=0), "multiple": pydantic.conint(multiple_of=5),
    "multiple from 0": pydantic.conint(multiple_of=5, ge=0),
    "multiple to 100": pydantic.conint(multiple_of=15, ge=0, le=100), "confloat": pydantic.confloat(ge=0, le=1),
    "half": pydantic.confloat(multiple_of=0.5), "latitude": Annotated[float, Field(ge=-90, le=90)],
    "conlist": pydantic.conlist(int, min_length=1, max_length=3),
    "conset": pydantic.conset(int, min_length=1, max_length=3), "conset of enum": pydantic.conset(Color, min_length=1),
    "conbytes": pydantic.conbytes(min_length=1, max_length=8), "positive": pydantic.PositiveInt,
    "negative float": pydantic.NegativeFloat, "finite": pydantic.FiniteFloat, "strict": pydantic.StrictInt,
    "float bound": Annotated[int, Field(ge=0.0)], "int64": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "uint64": Annotated[int, Field(ge=0, le=2**64 - 1)], "base64": pydantic.Base64Str, "bytesize": pydantic.ByteSize,
    "json value": pydantic.JsonValue, "model": Address, "tree": Tree, "extra": Open, "typed extra": OpenTyped,
    "forbid": Closed, "typed dict": Keys, "named tuple": Pair, "order": Order, "list of orders": list[Order],
}  # fmt: skip

# Nothing else is refused: z.never() has no value at all, a text is enforced by one pattern without look-aheads, and
# alternatives that exclude each other by a constant or their type.
_REFUSED = {
    "never": "nothing satisfies",
    "two_regexes": "pattern of several schemas",
    "starts_and_ends": "pattern of several schemas",
    "regex_lookahead": "groups of the kinds",
    "xor_objects": "oneOf is enforced only",
    "emoji": "groups of the kinds",
}


def _is_duration(text: str) -> bool:
    date, _, time = text[1:].partition("T")
    parts = (re.fullmatch(r"(\d+Y)?(\d+M)?(\d+D)?", date), re.fullmatch(r"(\d+H)?(\d+M)?(\d+S)?", time))
    # Only adjacent units: P1Y2D and PT1H2S are not of the format.
    gaps = re.search(r"Y\d+D", date) or re.search(r"H\d+S", time)
    is_empty = (not date and not time) or ("T" in text and not time)
    return re.fullmatch(r"P\d+W", text) is not None or (text[0] == "P" and all(parts) and not gaps and not is_empty)


def _is_host(text: str) -> bool:
    labels = text.split(".")
    return len(text) <= 253 and all(re.fullmatch(r"(?!-)[0-9A-Za-z-]{1,63}(?<!-)", label) for label in labels)


def _is_email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    return (
        len(local) <= 64
        and re.fullmatch(r"[0-9A-Za-z_+-]+(\.[0-9A-Za-z_+-]+)*", local) is not None
        and _is_host(domain)
        and "." in domain
    )


def _is_uri(text: str) -> bool:
    parts = urlsplit(text)
    _ = parts.port  # raises ValueError
    right = re.fullmatch(r"[A-Za-z][0-9A-Za-z+.-]*:([0-9A-Za-z._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+", text)
    host = parts.hostname
    host_is_right = not host or re.fullmatch(r"[0-9A-Za-z]+([.-][0-9A-Za-z]+)*", host) is not None
    return right is not None and text.count("#") <= 1 and host_is_right


def _is_reference(text: str) -> bool:
    return _is_uri(text) or _is_uri(f"http://host/{text.lstrip('/')}") or _is_uri(f"http://host{text}")


def _is_pointer(text: str) -> bool:
    return re.fullmatch(r"(/([^~/]|~[01])*)*", text, re.DOTALL) is not None


def _parses(parse: Callable[[str], object]) -> Callable[[str], bool]:
    return lambda text: parse(text) is not None


_JUDGES: dict[str, Callable[[str], bool]] = {
    "date": _parses(datetime.date.fromisoformat),
    "date-time": lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None,
    "time": lambda text: datetime.time.fromisoformat(text).tzinfo is not None,
    "duration": _is_duration,
    "email": _is_email,
    "idn-email": _is_email,
    "hostname": _is_host,
    "idn-hostname": _is_host,
    "ipv4": _parses(ipaddress.IPv4Address),
    "ipv6": _parses(ipaddress.IPv6Address),
    "uri": _is_uri,
    "iri": _is_uri,
    "uri-reference": _is_reference,
    "iri-reference": _is_reference,
    "uri-template": lambda text: re.sub(r"\{[+#./;?&]?[\w.,:*]+\}", "", text).count("{") == 0,
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    **{
        f"uuid{version}": lambda text, version=version: uuid.UUID(text).version == int(version)
        for version in "1345678"
    },
    "json-pointer": _is_pointer,
    "relative-json-pointer": lambda text: (found := re.match(r"(0|[1-9]\d*)(?=/|#$|$)", text)) is not None
    and (text[found.end() :] == "#" or _is_pointer(text[found.end() :])),
    "base64": lambda text: re.fullmatch(r"[0-9A-Za-z+/]*={0,2}", text) is not None and len(text) % 4 == 0,
    "base64url": lambda text: re.fullmatch(r"[0-9A-Za-z_-]*={0,2}", text) is not None and len(text) % 4 == 0,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_every_value_of_a_format_is_valid(name: str) -> None:
    schema = {"type": "string", "format": name}
    grammar, random = compiled("json_schema", json.dumps(schema)), Random(name)
    values = {json.loads(text) for _ in range(100) if (text := walk(grammar, random)) is not None}
    assert len(values) > 20
    assert [value for value in values if not _JUDGES[name](value)] == []


def _valid(value: object, schema: dict[str, Any]) -> bool:
    steps = [part for part in re.findall(r'"multipleOf": [0-9.]+', json.dumps(schema)) if "0." in part]
    if steps:  # jsonschema divides floats: to it 0.07 is no multiple of 0.01
        return Decimal(repr(value)) % Decimal(steps[0].split()[1]) == 0
    validator = (
        jsonschema.Draft7Validator if "additionalItems" in json.dumps(schema) else jsonschema.Draft202012Validator
    )
    return validator(schema).is_valid(value)


def _with_nulls(schema: Any) -> Any:
    """A schema of OpenAPI 3.0 as one of today's."""
    if isinstance(schema, list):
        return [_with_nulls(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _with_nulls(value) for name, value in schema.items() if name != "nullable"}
    for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if made.get(name) is True:
            made[name] = made.pop(bound)
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") else made


def _values(schema: dict[str, Any], seed: str, num: int) -> list[object]:
    grammar, random = compiled("json_schema", json.dumps(schema)), Random(seed)
    # A text that is to end in "yz" would seldom end otherwise.
    hints = b'yz"' if re.search(r"[.][*]y?z", json.dumps(schema)) else b""
    texts = [walk(grammar, random, hints) for _ in range(num)]
    return [json.loads(text) for text in texts if text is not None and "\ufffd" not in text]


@pytest.mark.parametrize("name", [name for name in _ZOD if name.split()[0] not in _REFUSED])
def test_every_type_of_zod_is_taken_and_its_answers_are_valid(name: str) -> None:
    schema = _ZOD[name]
    values = _values(schema, name, 6)
    assert values
    assert [value for value in values if not _valid(value, _with_nulls(schema))] == []


@pytest.mark.parametrize("name", _PYDANTIC)
def test_every_type_of_pydantic_is_taken_and_valid(name: str) -> None:
    adapter = pydantic.TypeAdapter(_PYDANTIC[name])
    for mode in ("validation", "serialization"):
        schema = adapter.json_schema(mode=mode)
        values = _values(schema, name, 6)
        assert values
        assert [value for value in values if not _valid(value, schema)] == []


@pytest.mark.parametrize("name", [name for name in _ZOD if name.split()[0] in _REFUSED])
def test_what_has_no_values_or_needs_look_aheads_is_refused(name: str) -> None:
    with pytest.raises(SchemaError, match=_REFUSED[name.split()[0]]):
        enforced_schema(_ZOD[name])
