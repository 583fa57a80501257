"""JSON schemas as the grammar library enforces them.

xgrammar takes most schemas, and silently leaves out what it does not enforce: ``not``, ``if``, ``uniqueItems``, a
``minimum`` beside a ``$ref``, and more. An answer would then not follow its schema without any sign of it. So a schema
is rewritten here with the keywords that are enforced, in the combinations in which they are, and anything else that
asserts something is refused with its place and the reason. Keywords that only describe are left out, and so are words
that are not keywords of JSON Schema.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fenceline.constrained.patterns import check_pattern, in_ascii

MAX_DEPTH = 64  # of schemas within schemas
_MAX_INT = 2**53  # the library reads numbers of a schema as doubles
_MAX_VALUES = 4096  # of one enum

Schema = Mapping[str, Any]

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_FORMATS = frozenset(
    (
        "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
        "uri-template", "uuid", "json-pointer", "relative-json-pointer",
    )
)  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": (*_BOUNDS, "multipleOf"),
    "number": (*_BOUNDS, "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties"),
}  # fmt: skip
# A character that JSON does not escape, and that is not half of a surrogate pair.
_PLAIN = r'[^\x00-\x1f"\\\ud800-\udfff]'
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_HANDLED = frozenset((*_COMBINED, "type", *(name for names in _OF_TYPE.values() for name in names)))
# Keywords of JSON Schema that assert something and that nothing enforces.
_NOT_ENFORCED = frozenset(
    (
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
        "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
        "contentEncoding", "contentMediaType", "contentSchema", "$dynamicRef", "$recursiveRef", "$anchor",
        "$dynamicAnchor",
    )
)  # fmt: skip


class SchemaError(ValueError):
    """A schema that cannot be enforced, with the place and the reason."""


def enforced_schema(schema: object) -> object:
    """``schema``, as parsed from JSON, in a form of which the library enforces every word. Raises SchemaError."""
    walk = _Walk(schema)
    made = walk.whole()
    # References to definitions stay valid when schemas are moved; references to other places might not.
    movable = all(target.count("/") <= 2 and "/properties" not in target for target in walk.targets)
    return _Sharing(made).whole() if isinstance(made, dict) and movable else made


class _Walk:
    def __init__(self, root: object) -> None:
        self._root = root
        self._visited: set[str] = set()  # the places of all schemas, as a $ref names them
        self._refs: list[tuple[str, str]] = []  # from where, to where

    @property
    def targets(self) -> set[str]:
        """The places that are referred to."""
        return {target for _, target in self._refs}

    def whole(self) -> object:
        made = self._schema(self._root, "#", 0)
        for where, target in self._refs:
            if target not in self._visited:
                raise _error(where, f"$ref to {target[:80]!r}: there is no schema in this document")
        return made

    def _schema(self, schema: object, where: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise _error(where[:200], f"schemas may be nested {MAX_DEPTH} deep")
        self._visited.add(where)
        if schema is True:
            return True
        if schema is False:
            raise _error(where, "nothing satisfies false")
        if not isinstance(schema, dict):
            raise _error(where, "a schema is an object, true or false")
        for name in sorted(_NOT_ENFORCED & schema.keys()):
            if not (name == "uniqueItems" and schema[name] is False):
                raise _error(where, f"{name} is not enforced: leave it out")
        if "$id" in schema and where != "#":
            raise _error(where, "$id within a document is not followed: leave it out")
        made: dict[str, Any] = {}
        for name in ("$defs", "definitions"):
            if name in schema:
                made[name] = self._named(schema[name], f"{where}/{name}", depth)
        return made | self._asserted(schema, where, depth)

    def _asserted(self, schema: Schema, where: str, depth: int) -> dict[str, Any]:
        """The part of ``schema`` that asserts something, as it is enforced."""
        given = {name: schema[name] for name in schema if name in _HANDLED}
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in given:
                beside = sorted(given.keys() - {name})
                if name in ("anyOf", "oneOf", "allOf") and beside == ["type"] and self._implied(given, name):
                    beside = []
                if beside:
                    raise _error(
                        where, f"{beside[0]} beside {name} is not enforced: write it into what is referred to"
                    )
                return self._combined(name, given[name], where, depth)
        types = self._types(given.get("type"), where)
        if "enum" in given or "const" in given:
            return self._values(given, types, where)
        return self._typed(given, types, where, depth)

    def _implied(self, given: Schema, name: str) -> bool:
        """Whether every alternative repeats the ``type`` that is given beside them."""
        branches = given[name]
        return isinstance(branches, list) and all(
            isinstance(one, dict) and one.get("type") == given["type"] for one in branches
        )

    # --- combinations

    def _combined(self, name: str, value: object, where: str, depth: int) -> dict[str, Any]:
        if name == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                raise _error(where, '$ref must point into this document: "#/$defs/..."')
            if "~" in value or "%" in value:
                raise _error(where, "$ref: names with ~, / or % are not found: rename what is referred to")
            self._refs.append((where, value))
            return {"$ref": value}
        if not isinstance(value, list) or not value:
            raise _error(where, f"{name} is a list with at least one schema")
        if name == "allOf" and len(value) > 1:
            raise _error(where, "allOf of several schemas is not enforced: merge them")
        made = [self._schema(one, f"{where}/{name}/{index}", depth + 1) for index, one in enumerate(value)]
        if name == "oneOf":
            self._check_disjoint(value, where)
        return {"allOf" if name == "allOf" else "anyOf": made}

    def _check_disjoint(self, branches: Sequence[object], where: str) -> None:
        """Raise SchemaError unless no two alternatives of oneOf can hold at once. Only different types, or a common
        property with different constants, are recognised as proof."""
        for index, one in enumerate(branches):
            for other in branches[index + 1 :]:
                if not _disjoint(self._resolved(one), self._resolved(other), self._resolved):
                    raise _error(
                        where,
                        "oneOf is enforced only where no two of its schemas can hold at once: use anyOf",
                    )

    def _resolved(self, schema: object) -> Schema:
        """``schema``, or the schema to which it refers; an empty one if that cannot be found."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            ref = schema.get("$ref")
            if not isinstance(ref, str):
                return schema
            found: object = self._root
            for name in ref.split("/")[1:]:
                found = found.get(name) if isinstance(found, dict) else None
            schema = found
        return {}

    # --- values and types

    def _types(self, given: object, where: str) -> tuple[str, ...]:
        """The types that are named; empty if there is no ``type``, which allows all."""
        names = given if isinstance(given, list) else [given] if given is not None else []
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                raise _error(where, f"type must be among {', '.join(_TYPES)}")
        if given is not None and not names:
            raise _error(where, "type is an empty list")
        return tuple(dict.fromkeys(names))

    def _values(self, given: Schema, types: tuple[str, ...], where: str) -> dict[str, Any]:
        beside = sorted(given.keys() - {"enum", "const", "type"})
        if beside:
            raise _error(where, f"{beside[0]} beside enum or const is not enforced: leave it out")
        values = given["enum"] if "enum" in given else [given["const"]]
        if not isinstance(values, list):
            raise _error(where, "enum is a list")
        if len(values) > _MAX_VALUES:
            raise _error(where, f"enum may have {_MAX_VALUES} values")
        if "const" in given and "enum" in given:
            values = [value for value in values if _same(value, given["const"])]
        values = [value for value in values if not types or any(_is_of(value, name) for name in types)]
        if not values:
            raise _error(where, "no value of enum or const is of the type")
        for value in values:
            _check_numbers(value, where)
        return {"enum": values}

    def _typed(self, given: Schema, types: tuple[str, ...], where: str, depth: int) -> dict[str, Any]:
        if not types:  # keywords of one type say nothing about values of other types
            fitting = [name for name, words in _OF_TYPE.items() if not given.keys().isdisjoint(words)]
            if not fitting:
                return {}
            raise _error(where, f"{min(given)} without type is not enforced: add the type")
        unfit = sorted(given.keys() - {"type"} - {word for name in types for word in _OF_TYPE.get(name, ())})
        if unfit:  # these keywords say nothing about values of these types
            given = {name: value for name, value in given.items() if name not in unfit}
        made: dict[str, Any] = {"type": list(types) if len(types) > 1 else types[0]}
        made |= self._string(given, where) if "string" in types else {}
        made |= self._number(given, types, where)
        made |= self._array(given, where, depth) if "array" in types else {}
        made |= self._object(given, where, depth) if "object" in types else {}
        return made

    def _string(self, given: Schema, where: str) -> dict[str, Any]:
        made = _counts(given, ("minLength", "maxLength"), where)
        for name in ("pattern", "format"):
            if name in given:
                if made:
                    raise _error(where, f"{name} beside {min(made)} is not enforced: choose one")
                if not isinstance(given[name], str):
                    raise _error(where, f"{name} is a text")
                made = {name: given[name]}
        if made.keys() & {"minLength", "maxLength"}:
            return {"pattern": _of_length(made.get("minLength", 0), made.get("maxLength"), where)}
        if "pattern" in made:
            made["pattern"] = _checked_pattern(made["pattern"], where)
        if "format" in made and made["format"] not in _FORMATS:
            raise _error(where, f"format must be among {', '.join(sorted(_FORMATS))}")
        return made

    def _number(self, given: Schema, types: tuple[str, ...], where: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in (*_BOUNDS, "multipleOf"):
            if name not in given:
                continue
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _error(where, f"{name} is a number")
            _check_numbers(value, where)
            made[name] = value
        factor = made.get("multipleOf", 1)
        if "multipleOf" in made and ("number" in types or type(factor) is not int or not 0 < factor <= 1000):
            raise _error(where, "multipleOf is enforced for integers and up to 1000")
        if "multipleOf" in made and len(made) > 1:
            raise _error(where, "multipleOf beside bounds is not enforced: leave one out")
        if "integer" in types and any(isinstance(value, float) for value in made.values()):
            raise _error(where, "bounds of an integer are whole numbers")
        return made

    def _array(self, given: Schema, where: str, depth: int) -> dict[str, Any]:
        made = _counts(given, ("minItems", "maxItems"), where)
        items = given.get("items")
        if items is False:
            made["items"] = False
        elif items is not None:
            made["items"] = self._schema(items, f"{where}/items", depth + 1)
        if "prefixItems" in given:
            listed = given["prefixItems"]
            if not isinstance(listed, list):
                raise _error(where, "prefixItems is a list of schemas")
            made["prefixItems"] = [
                self._schema(one, f"{where}/prefixItems/{index}", depth + 1)
                for index, one in enumerate(listed)
            ]
        return made

    def _object(self, given: Schema, where: str, depth: int) -> dict[str, Any]:
        made = _counts(given, ("minProperties", "maxProperties"), where)
        properties = self._named(given.get("properties", {}), f"{where}/properties", depth)
        if properties:
            made["properties"] = properties
        required = given.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _error(where, "required is a list of names")
        for name in required:
            if name not in properties:
                raise _error(where, f"required names {name[:60]!r}, which properties does not have")
        if required:
            made["required"] = list(dict.fromkeys(required))
        further = self._further(given, properties, where, depth)
        if further.get("additionalProperties") is not False and made.get("minProperties", 0) > 1:
            # The library counts members, but could count one name twice, as it can be written in several ways.
            raise _error(where, "minProperties above 1 is enforced only with additionalProperties false")
        return made | further

    def _further(self, given: Schema, properties: Schema, where: str, depth: int) -> dict[str, Any]:
        """The keywords for members beside ``properties``. There are no such members unless the schema allows them, as
        in OpenAI's strict mode."""
        asked = [name for name in ("patternProperties", "propertyNames") if name in given]
        others = given.get("additionalProperties", not properties and not asked)
        if others is not False and (properties or "patternProperties" in asked):
            raise _error(
                where,
                "additionalProperties beside properties must be false: a name could be written in two ways",
            )
        made: dict[str, Any] = {"additionalProperties": others}
        if others is not False and others is not True:
            made["additionalProperties"] = self._schema(others, f"{where}/additionalProperties", depth + 1)
        if len(asked) > 1 or (asked and properties):
            raise _error(where, f"{asked[0]} beside other members is not enforced: leave one out")
        if "patternProperties" in asked:
            patterns = self._named(given["patternProperties"], f"{where}/patternProperties", depth)
            if len(patterns) != 1:
                raise _error(where, "patternProperties is enforced for one pattern")
            made["patternProperties"] = {
                _checked_pattern(pattern, where): schema for pattern, schema in patterns.items()
            }
        if "propertyNames" in asked:
            names = given["propertyNames"]
            if (
                not isinstance(names, dict)
                or not names.keys() <= {"type", "pattern"}
                or "pattern" not in names
            ):
                raise _error(where, "propertyNames is enforced with a pattern")
            made["propertyNames"] = self._string({"pattern": names["pattern"]}, f"{where}/propertyNames")
            made["additionalProperties"] = True if others is False else made["additionalProperties"]
        return made

    def _named(self, value: object, where: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _error(where, "this is an object of schemas")
        return {name: self._schema(one, f"{where}/{name}", depth + 1) for name, one in value.items()}


_SHARED_SIZE = 16  # number of values; smaller schemas are written out each time
_MAPS_OF_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "allOf", "prefixItems")


class _Sharing:
    """Replaces a schema that occurs several times by a definition and references to it. The library treats each copy as
    a different schema, so that nested alternatives would double with each level."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._numbers: dict[object, int] = {}  # each different value has one
        self._sizes: dict[int, int] = {}
        self._number_of: dict[int, int] = {}  # by the id() of an object, which lives as long as the root
        self._counts: Counter[int] = Counter()
        self._names: dict[int, str] = {}
        self._made: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        self._number(self._root)
        self._count(self._root)
        made = self._rebuilt(self._root, is_root=True)
        return {**made, "$defs": {**made.get("$defs", {}), **self._made}} if self._made else made

    def _number(self, value: object) -> int:
        """Equal values have equal numbers; the order of names counts."""
        size, key = 1, (type(value).__name__, value if not isinstance(value, dict | list) else None)
        if isinstance(value, dict):
            parts = [(name, self._number(one)) for name, one in value.items()]
            size, key = size + sum(self._sizes[number] for _, number in parts), ("dict", tuple(parts))
        elif isinstance(value, list):
            numbers = [self._number(one) for one in value]
            size, key = size + sum(map(self._sizes.__getitem__, numbers)), ("list", tuple(numbers))
        number = self._numbers.setdefault(key, len(self._numbers))
        self._sizes[number] = size
        if isinstance(value, dict):
            self._number_of[id(value)] = number
        return number

    def _count(self, schema: dict[str, Any]) -> None:
        for one in _within(schema):
            number = self._number_of[id(one)]
            self._counts[number] += 1
            if self._counts[number] == 1:  # its copies have the same subschemas
                self._count(one)

    def _rebuilt(self, schema: dict[str, Any], is_root: bool = False) -> dict[str, Any]:
        made = dict(schema)
        for name, value in schema.items():
            if name in _MAPS_OF_SCHEMAS:
                place = (
                    self._rebuilt_definition if is_root and name in ("$defs", "definitions") else self._placed
                )
                made[name] = {key: place(one) for key, one in value.items()}
            elif name in _LISTS_OF_SCHEMAS:
                made[name] = [self._placed(one) for one in value]
            elif name in ("items", "additionalProperties"):
                made[name] = self._placed(value)
        return made

    def _rebuilt_definition(self, schema: object) -> object:
        return self._rebuilt(schema) if isinstance(schema, dict) else schema

    def _placed(self, schema: object) -> object:
        """What is written in place of ``schema``: the schema itself, or a reference to its definition."""
        if not isinstance(schema, dict):
            return schema
        number = self._number_of[id(schema)]
        if self._counts[number] < 2 or self._sizes[number] < _SHARED_SIZE:
            return self._rebuilt(schema)
        if number not in self._names:
            taken = self._root.get("$defs", {})
            name = next(name for i in range(len(taken) + 1) if (name := f"same{number}_{i}") not in taken)
            self._names[number] = name
            self._made[name] = self._rebuilt(schema)
        return {"$ref": f"#/$defs/{self._names[number]}"}


def _within(schema: Schema) -> list[dict[str, Any]]:
    """The direct subschemas of ``schema``."""
    found: list[object] = []
    for name, value in schema.items():
        if name in _MAPS_OF_SCHEMAS:
            found += value.values()
        elif name in _LISTS_OF_SCHEMAS:
            found += value
        elif name in ("items", "additionalProperties"):
            found.append(value)
    return [one for one in found if isinstance(one, dict)]


def _disjoint(one: Schema, other: Schema, resolved: Callable[[object], Schema]) -> bool:
    kinds = _kinds(one), _kinds(other)
    if kinds[0] is not None and kinds[1] is not None and kinds[0].isdisjoint(kinds[1]):
        return True
    values = _constants(one), _constants(other)
    if values[0] is not None and values[1] is not None:
        return values[0].isdisjoint(values[1])
    for name in set(one.get("required") or ()) & set(other.get("required") or ()):
        both = [
            _constants(resolved(schema.get("properties", {}).get(name)))
            for schema in (one, other)
            if isinstance(schema.get("properties"), dict)
        ]
        if len(both) == 2 and both[0] is not None and both[1] is not None and both[0].isdisjoint(both[1]):
            return _kinds(one) == {"object"} == _kinds(other)
    return False


def _kinds(schema: Schema) -> set[str] | None:
    """The types of ``schema``'s values, an integer being a number; None if it does not say."""
    given = schema.get("type")
    if given is None:
        return None
    names = given if isinstance(given, list) else [given]
    return {"number" if name == "integer" else str(name) for name in names}


def _constants(schema: Schema) -> set[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    return {json.dumps(float(v) if type(v) is int else v, sort_keys=True) for v in values}


def _same(one: object, other: object) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_of(value: object, name: str) -> bool:
    match name:
        case "string":
            return isinstance(value, str)
        case "integer":
            return type(value) is int or (type(value) is float and value.is_integer())
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def _check_numbers(value: object, where: str) -> None:
    if isinstance(value, list):
        for one in value:
            _check_numbers(one, where)
    elif isinstance(value, dict):
        for one in value.values():
            _check_numbers(one, where)
    elif isinstance(value, int) and abs(value) > _MAX_INT:
        raise _error(where, f"{value} is beyond 2**53, up to which whole numbers are exact")


def _counts(given: Schema, names: Sequence[str], where: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in names:
        if name in given:
            if type(given[name]) is not int or not 0 <= given[name] <= _MAX_INT:
                raise _error(where, f"{name} is a whole number of at least 0")
            made[name] = given[name]
    return made


def _of_length(least: int, most: int | None, where: str) -> str:
    """A pattern for strings of ``least`` to ``most`` characters. For minLength and maxLength themselves the library
    would allow control characters, which JSON has to escape."""
    if most is not None and most < least:
        raise _error(where, f"minLength {least} is more than maxLength {most}")
    return f"^{_PLAIN}{{{least},{'' if most is None else most}}}$"


def _checked_pattern(pattern: str, where: str) -> str:
    try:
        check_pattern(pattern, in_json=True)
    except ValueError as error:
        raise _error(where, f"pattern: {error}") from error
    return in_ascii(pattern)


def _error(where: str, reason: str) -> SchemaError:
    return SchemaError(f"{where[:200]}: {reason}")
