"""JSON schemas as the grammar library enforces them.

xgrammar takes most schemas, and silently leaves out what it does not enforce: ``not``, ``if``, ``uniqueItems``, a
``minimum`` beside a ``$ref``, and more. An answer would then not follow its schema without any sign of it. So a schema
is rewritten here with the keywords that are enforced, in the combinations in which they are, and anything else that
asserts something is refused with its place and the reason. Schemas that have to hold together are merged into one.
Answers may be fewer than a schema allows, never more: members that it does not name are not generated, for example.
Keywords that only describe are left out, and so are words that are not keywords of JSON Schema.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from fenceline.constrained.formats import LIMITED_PATTERNS, PATTERNS
from fenceline.constrained.multiples import multiples
from fenceline.constrained.regular import check_pattern, matches, within

MAX_DEPTH = 64  # of schemas within schemas
_MAX_INT = 2**53  # whole numbers up to this one are exact everywhere
_MAX_BOUND = 2**63 - 1  # the library takes no larger bounds of integers
_MAX_VALUES = 4096  # of one enum
_MAX_MERGED = 2000  # merged schemas: alternatives that have to hold together with others multiply
_MAX_PERMUTED, _MAX_SUBSETS = 4, 8  # values of an enum whose lists without repetition are written out

Schema = Mapping[str, Any]

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTED = ("Length", "Items", "Properties")  # of which there are a minimum and a maximum
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": (*_BOUNDS, "multipleOf"),
    "number": (*_BOUNDS, "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties"),
}  # fmt: skip
# A character that JSON does not escape, and that is not half of a surrogate pair.
_PLAIN = r'[^\x00-\x1f"\\\ud800-\udfff]'
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf")
_HANDLED = frozenset(
    (*_COMBINED, "nullable", "enum", "const", "type", *(name for names in _OF_TYPE.values() for name in names))
)
# Keywords of JSON Schema that assert something and that nothing enforces.
_NOT_ENFORCED = {
    "not": "what an answer must not be is not known before it ends",
    "if": "whether it holds is not known before the value ends: write the cases into anyOf",
    "then": "write the cases into anyOf",
    "else": "write the cases into anyOf",
    "contains": "which item fits is not known before the list ends",
    "minContains": "which items fit is not known before the list ends",
    "maxContains": "which items fit is not known before the list ends",
    "dependentRequired": "write the cases into anyOf",
    "dependentSchemas": "write the cases into anyOf",
    "dependencies": "write the cases into anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "$anchor": "use $ref with a path",
    "$dynamicAnchor": "use $ref with a path",
}
_UNIQUE_IGNORED = "uniqueItems is an annotation here: a grammar cannot compare items, except for those of a short enum"
_LOOK_AROUND_IGNORED = "look-around in a pattern beside a format is not enforced: the format is, instead of the pattern"

_FORMS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("pattern", "format"), (str, "a text")), "enum": (list, "a list"),
    "properties": (dict, "an object of schemas"), "patternProperties": (dict, "an object of schemas"),
    "required": (list, "a list of names"), "prefixItems": (list, "a list of schemas"),
    **dict.fromkeys(("uniqueItems", "nullable"), (bool, "true or false")),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), ((int, float), "a number")),
}  # fmt: skip


class SchemaError(ValueError):
    """A schema that cannot be enforced, with the place and the reason."""


class _Nothing(SchemaError):
    """A schema that no value satisfies. As an alternative, or of a member that may be missing, it is left out."""


class Enforced(NamedTuple):
    """A schema of which the library enforces every word. ``rules``: those of a grammar that belong in place of a
    constant, by the constant; the first of the rules has that name."""

    schema: object
    rules: dict[str, list[str]]


def enforced_schema(schema: object, noted: Callable[[str], object] = lambda _: None) -> Enforced:
    """``schema``, as parsed from JSON, as it is enforced. ``noted`` gets a line for each kind of keyword that is not
    enforced although it could be taken for more than an annotation. Raises SchemaError."""
    walk = _Walk(schema, noted)
    return Enforced(walk.whole(), walk.rules)


class _Walk:
    def __init__(self, root: object, noted: Callable[[str], object]) -> None:
        self._root = root
        self._noted = noted
        self._visited: set[str] = set()  # the places of all schemas, as a $ref names them
        self._refs: list[tuple[str, str]] = []  # from where, to where
        self._num_merged = 0
        self.rules: dict[str, list[str]] = {}
        self._rule_of: dict[str, str] = {}
        self._token = secrets.token_hex(8)  # so that no text of the schema is the name of a rule

    def whole(self) -> object:
        made = self._schema(self._root, "#", 0)
        for where, target in self._refs:
            if target not in self._visited:
                raise _error(where, f"$ref to {target[:80]!r}: there is no schema in this document")
        return made

    def _schema(self, schema: object, where: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise _error(where, f"schemas may be nested {MAX_DEPTH} deep")
        self._visited.add(where)
        if schema is True:
            return True
        made: dict[str, Any] = {}
        if isinstance(schema, dict):
            if "$id" in schema and where != "#":
                raise _error(where, "$id within a document is not followed: leave it out")
            for name in ("$defs", "definitions"):
                if name in schema:
                    made[name] = self._named(schema[name], f"{where}/{name}", depth)
        return made | self._together([schema], where, depth)

    def _together(self, schemas: Sequence[object], where: str, depth: int) -> dict[str, Any]:
        """One schema in place of ``schemas``, which have to hold together."""
        self._num_merged += len(schemas) > 1
        if depth > MAX_DEPTH or self._num_merged > _MAX_MERGED:
            raise _error(where, "too many schemas have to hold together: write them as one")
        todo = list(schemas)
        asserted: list[dict[str, Any]] = []
        choices: list[tuple[str, list[object]]] = []
        followed: set[str] = set()
        while todo:
            schema = todo.pop(0)
            if schema is True:
                continue
            given = self._given(schema, where)
            if given.get("nullable") is True:  # as OpenAPI 3.0 has it
                rest = {name: value for name, value in given.items() if name != "nullable"}
                choices.append(("anyOf", [rest, {"type": "null"}]))
                continue
            given.pop("nullable", None)
            if "$ref" in given:
                target = self._reference(given["$ref"], where)
                if given.keys() == {"$ref"} and not (todo or asserted or choices or followed):
                    self._refs.append((where, target))
                    return {"$ref": target}
                if target not in followed:
                    followed.add(target)
                    todo.append(self._found(target, where))
            if "allOf" in given:
                todo += _branches(given, "allOf", where)
            for name in ("anyOf", "oneOf"):
                if name in given:
                    choices.append((name, _branches(given, name, where)))
            plain = {name: value for name, value in given.items() if name not in _COMBINED}
            if plain:
                asserted.append(_modern(plain, where))
        if choices:
            name, branches = choices.pop(0)
            others = [*asserted, *({kind: value} for kind, value in choices)]
            return self._choice(name, branches, others, where, depth)
        given = {}
        for one in asserted:
            given = _merged(given, one, where)
        types = tuple(dict.fromkeys(_type_names(given.get("type"), where)))
        if "enum" in given or "const" in given:
            return self._values(given, types, where)
        return self._typed(given, types, where, depth)

    def _given(self, schema: object, where: str) -> dict[str, Any]:
        """The keywords of ``schema`` that are handled."""
        if schema is False or (isinstance(schema, dict) and schema.get("not") in ({}, True)):
            raise _Nothing(f"{where[:200]}: nothing satisfies false")
        if not isinstance(schema, dict):
            raise _error(where, "a schema is an object, true or false")
        for name in _NOT_ENFORCED:
            if name in schema:
                raise _error(where, f"{name} is not enforced: {_NOT_ENFORCED[name]}")
        given = {name: value for name, value in schema.items() if name in _HANDLED}
        _check_forms(given, where)
        return given

    # --- combinations

    def _choice(self, name: str, branches: list[object], others: list[Any], where: str, depth: int) -> dict[str, Any]:
        """``branches`` of anyOf or oneOf, each together with ``others``."""
        made: list[object] = []
        for index, branch in enumerate(branches):
            place = f"{where}/{name}/{index}"
            try:
                if others:
                    made.append(self._together([*others, branch], where, depth + 1))
                else:
                    made.append(self._schema(branch, place, depth + 1))
            except _Nothing:
                continue
        if not made:
            raise _Nothing(f"{where[:200]}: nothing satisfies any schema of {name}")
        if name == "oneOf":
            # Also those that have no answers here: values that are not generated for them may satisfy them.
            self._check_disjoint([branch for branch in branches if branch is not False], where)
        return {"anyOf": made}

    def _reference(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise _error(where, '$ref must point into this document: "#/$defs/..."')
        if "~" in value or "%" in value:
            raise _error(where, "$ref: names with ~, / or % are not found: rename what is referred to")
        return value

    def _found(self, target: str, where: str) -> object:
        found = self._lookup(target)
        if found is None:
            raise _error(where, f"$ref to {target[:80]!r}: there is no schema in this document")
        return found

    def _lookup(self, target: str) -> object:
        found: object = self._root
        for name in target.split("/")[1:]:
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _check_disjoint(self, branches: Sequence[object], where: str) -> None:
        """Raise SchemaError unless no answer for one alternative of oneOf satisfies another. Only different types, and
        a common property with different constants, are recognised as proof."""
        for one, other in itertools.combinations(map(self._resolved, branches), 2):
            if not _disjoint(one, other, self._resolved):
                raise _error(where, "oneOf is enforced only where no two of its schemas can hold at once: use anyOf")

    def _resolved(self, schema: object) -> Schema:
        """``schema``, or the schema to which it refers; an empty one if that is not found, or not alone."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            if "$ref" not in schema:
                return schema
            if schema.keys() & _HANDLED != {"$ref"} or not isinstance(schema["$ref"], str):
                return {}
            schema = self._lookup(schema["$ref"])
        return {}

    # --- values and types

    def _values(self, given: Schema, types: tuple[str, ...], where: str) -> dict[str, Any]:
        values = given["enum"] if "enum" in given else [given["const"]]
        if len(values) > _MAX_VALUES:
            raise _error(where, f"enum may have {_MAX_VALUES} values")
        if "const" in given and "enum" in given:
            values = [value for value in values if _same(value, given["const"])]
        values = [value for value in values if not types or any(_is_of(value, name) for name in types)]
        with _explained("pattern", where):
            values = [value for value in values if _fits(value, given, where)]
        if not values:
            raise _Nothing(f"{where[:200]}: no value of enum or const is of the type, or fits what stands beside it")
        for value in values:
            _check_numbers(value, where)
        return {"enum": values}

    def _typed(self, given: Schema, types: tuple[str, ...], where: str, depth: int) -> dict[str, Any]:
        if not types:  # keywords of a type are taken to mean it; values of other types are not generated then
            kinds = ("string", "number", "array", "object")
            types = tuple(name for name in kinds if not given.keys().isdisjoint(_OF_TYPE[name]))
            if not types:
                return {}
        if "number" in types:
            types = tuple(name for name in types if name != "integer")
        made: dict[str, Any] = {}
        left: list[str] = []
        written: list[object] = []  # alternatives in place of a type
        for name in types:
            try:
                match name:
                    case "string":
                        part = self._string(given, where)
                    case "integer" | "number":
                        part = self._number(given, name, where)
                    case "array":
                        part = self._array(given, where, depth)
                    case "object":
                        part = self._object(given, where, depth)
                    case _:
                        part = {}
            except _Nothing:
                if len(types) == 1:
                    raise
                continue
            if "anyOf" in part:
                written += part["anyOf"]
            else:
                left.append(name)
                made |= part
        if left:
            written.append({"type": left if len(left) > 1 else left[0], **made})
        if not written:
            raise _Nothing(f"{where[:200]}: nothing satisfies it")
        only = written[0]
        return only if len(written) == 1 and isinstance(only, dict) else {"anyOf": written}

    def _string(self, given: Schema, where: str) -> dict[str, Any]:
        counts = _counts(given, ("minLength", "maxLength"), where)
        least, most = counts.get("minLength", 0), counts.get("maxLength")
        if most is not None and most < least:
            raise _error(where, f"minLength {least} is more than maxLength {most}")
        known = {**PATTERNS, **(LIMITED_PATTERNS if most is not None else {})}
        own = known.get(given.get("format", ""))
        pattern = given.get("pattern", own)
        if pattern is None:
            return {"pattern": f"^{_PLAIN}{{{least},{'' if most is None else most}}}$"} if counts else {}
        if own is not None and _looks_around(pattern):  # zod's, of a format that it names beside
            self._noted(_LOOK_AROUND_IGNORED)
            pattern = own
        with _explained("pattern", where):
            return {"pattern": within(pattern, least, most)}

    def _number(self, given: Schema, name: str, where: str) -> dict[str, Any]:
        # Of two that are equal the exclusive one says more; max and min take the first.
        lows = [(given[word], word) for word in ("exclusiveMinimum", "minimum") if word in given]
        highs = [(given[word], word) for word in ("exclusiveMaximum", "maximum") if word in given]
        low = max(lows, key=lambda bound: bound[0], default=None)
        high = min(highs, key=lambda bound: bound[0], default=None)
        if name == "integer":
            low, high = _whole_bounds(low, high)
        if low is not None and high is not None and (low[0] > high[0] or _is_empty(low, high)):
            raise _Nothing(f"{where[:200]}: no number is between the bounds")
        if "multipleOf" in given:
            return self._multiples(_fraction(given["multipleOf"]), low, high, name, where)
        if name == "number" and low is not None and high is not None:
            step = _step_between(_fraction(low[0]), _fraction(high[0]))
            if step < _FINEST:
                return self._multiples(step, low, high, name, where)
        return {word: value for value, word in filter(None, (low, high))}

    def _multiples(
        self, exact: Fraction, low: _Bound | None, high: _Bound | None, name: str, where: str
    ) -> dict[str, Any]:
        if name == "integer":  # those of 2.5 are those of 5
            exact = Fraction(exact.numerator)
            if low is None and high is None and exact <= 1000:
                return {"multipleOf": int(exact)}
        ends: list[Fraction | None] = []
        for bound, toward in ((low, 1), (high, -1)):
            end = None if bound is None else _fraction(bound[0])
            if bound is not None and end is not None and bound[1].startswith("exclusive") and end % exact == 0:
                end += toward * exact
            ends.append(end)
        with _explained("multipleOf or the bounds", where):
            rule = self._rule(lambda rule: multiples(exact, ends[0], ends[1], rule), f"{exact} {ends}")
            return {"anyOf": [{"enum": [rule]}]}

    def _rule(self, made: Callable[[str], list[str]], key: str) -> str:
        """The name of the rule that ``made`` writes for a name; the same one for the same ``key``."""
        if key not in self._rule_of:
            rule = f"rule_{self._token}_{len(self.rules)}"
            self.rules[rule] = made(rule)
            self._rule_of[key] = rule
        return self._rule_of[key]

    def _array(self, given: Schema, where: str, depth: int) -> dict[str, Any]:
        made = _counts(given, ("minItems", "maxItems"), where)
        listed = given.get("prefixItems", [])[: made.get("maxItems")]
        first: list[object] = []
        items = given.get("items", True)
        try:
            for index, one in enumerate(listed):
                first.append(self._schema(one, f"{where}/prefixItems/{index}", depth + 1))
            rest = self._schema(items, f"{where}/items", depth + 1) if "items" in given else None
        except _Nothing:  # the list ends before that item
            rest = False
        if rest is False:
            made["maxItems"] = min(made.get("maxItems", len(first)), len(first))
        if made.get("minItems", 0) > made.get("maxItems", math.inf):
            raise _Nothing(f"{where[:200]}: the list would need more items than it may have")
        if given.get("uniqueItems") is True and made.get("maxItems", 2) > 1:
            values = None if listed or rest is False else self._few_values(items)
            if values is not None:
                return {"anyOf": _unique_lists(values, made.get("minItems", 0), made.get("maxItems"), where)}
            self._noted(_UNIQUE_IGNORED)
        if first:
            made["prefixItems"] = [{} if one is True else one for one in first]  # it takes no true there
        if made.get("maxItems", 1) == 0:
            return {"maxItems": 0}
        if rest is None and made.get("minItems", 0) > len(first):
            rest = True  # to the library there are no more items than those of prefixItems
        return made if rest is None else made | {"items": rest}

    def _few_values(self, schema: object) -> list[object] | None:
        """All values of the schema of a list's items, each once, if there are not too many to write out their lists."""
        found = self._resolved(schema)
        values: object = found.get("enum", [found["const"]] if "const" in found else None)
        if values is None and found.get("type") == "boolean":
            values = [True, False]
        if not isinstance(values, list) or not found.keys() & _HANDLED <= {"enum", "const", "type"}:
            return None
        names = _type_names(found.get("type"), "#")
        different = {_key(one): one for one in values if not names or any(_is_of(one, name) for name in names)}
        return list(different.values()) if len(different) <= _MAX_SUBSETS else None

    def _object(self, given: Schema, where: str, depth: int) -> dict[str, Any]:
        made = _counts(given, ("minProperties", "maxProperties"), where)
        listed = given.get("properties", {})
        required = given.get("required", [])
        others = given.get("additionalProperties", True)
        patterns = given.get("patternProperties", {})
        is_named = bool(listed)  # other members are not generated then
        names = self._names(given["propertyNames"], where, depth) if "propertyNames" in given else None
        listed = dict(listed)
        if isinstance(names, list) and not listed:
            listed, is_named = {name: others for name in names if not patterns}, True
        for name in required:
            if name not in listed:
                listed[name] = _unlisted(name, given, where)
                if listed[name] is False:
                    raise _Nothing(f"{where[:200]}: required names {name[:60]!r}, which no property may be called")
        properties = self._members(listed, required, patterns, names, others, where, depth)
        if properties:
            made["properties"] = properties
        if required:
            made["required"] = list(dict.fromkeys(required))
        if is_named or properties or (others is False and not patterns):
            made["additionalProperties"] = False
        elif isinstance(names, str) or patterns:
            if len(patterns) > 1 or (patterns and names is not None):
                raise _error(where, "one of propertyNames and patternProperties is enforced, with one pattern")
            pattern, schema = next(iter(patterns.items())) if patterns else (str(names), others)
            try:
                if patterns:
                    with _explained("pattern", where):
                        pattern = within(pattern, is_whole=False)
                member = self._schema(schema, f"{where}/patternProperties/{pattern}", depth + 1)
                made |= {"patternProperties": {pattern: member}, "additionalProperties": False}
            except _Nothing:
                made["additionalProperties"] = False
            except ValueError as error:
                raise (error if isinstance(error, SchemaError) else _error(where, f"pattern: {error}")) from error
        else:
            try:
                made["additionalProperties"] = self._schema(others, f"{where}/additionalProperties", depth + 1)
            except _Nothing:
                made["additionalProperties"] = False
        is_open = made["additionalProperties"] is not False or "patternProperties" in made
        if not is_open and made.get("minProperties", 0) > len(properties):
            raise _Nothing(f"{where[:200]}: minProperties are more than the properties")
        if made.get("maxProperties", math.inf) < len(made.get("required", ())):
            raise _Nothing(f"{where[:200]}: maxProperties are fewer than the required ones")
        if is_open and made.get("minProperties", 0) > 1:
            # The library counts members, but could count one name twice, as it can be written in several ways.
            raise _error(where, "minProperties above 1 is enforced only with properties: a name could come twice")
        return made

    def _members(
        self,
        listed: Mapping[str, object],
        required: Sequence[str],
        patterns: Mapping[str, object],
        names: list[str] | str | None,
        others: object,
        where: str,
        depth: int,
    ) -> dict[str, Any]:
        """The schemas of named members, each with those of patterns that it matches. ``names``: what all must be."""
        made: dict[str, Any] = {}
        if isinstance(names, str) and listed:
            raise _error(where, "propertyNames with a pattern is not enforced beside properties: leave it out")
        for name, schema in listed.items():
            place = f"{where}/properties/{name}"
            try:
                if isinstance(names, list) and name not in names:
                    raise _Nothing(f"{place[:200]}: propertyNames does not have this name")
                with _explained("pattern", where):
                    together = [one for pattern, one in patterns.items() if matches(pattern, name)]
                if together:
                    made[name] = self._together([schema, *together], place, depth + 1)
                else:
                    made[name] = self._schema(schema, place, depth + 1)
            except _Nothing:
                if name in required:
                    raise
            except ValueError as error:
                raise (error if isinstance(error, SchemaError) else _error(where, f"pattern: {error}")) from error
        return made

    def _names(self, schema: object, where: str, depth: int) -> list[str] | str | None:
        """What names of members must be: one of a list, or of a pattern; None for any."""
        made = self._together([schema, {"type": "string"}], f"{where}/propertyNames", depth + 1)
        if made.keys() <= {"enum"}:
            return made["enum"]
        if made.keys() <= {"type"}:
            return None
        if made.keys() <= {"type", "pattern"}:
            return str(made["pattern"])
        raise _error(where, "propertyNames is enforced with enum, pattern, format or a length")

    def _named(self, value: object, where: str, depth: int) -> dict[str, Any]:
        """Definitions; those that nothing satisfies are left out."""
        if not isinstance(value, dict):
            raise _error(where, "this is an object of schemas")
        made = {}
        for name, one in value.items():
            try:
                made[name] = self._schema(one, f"{where}/{name}", depth + 1)
            except _Nothing:
                self._visited.discard(f"{where}/{name}")
        return made


_Bound = tuple[float, str]  # and its keyword
_FINEST = Fraction(1, 10**6)  # the library writes a number between two bounds with at most six digits after the point


def _is_empty(low: _Bound, high: _Bound) -> bool:
    return low[0] == high[0] and (low[1], high[1]) != ("minimum", "maximum")


def _step_between(low: Fraction, high: Fraction) -> Fraction:
    """A power of ten of which multiples are between the bounds, and not only they themselves unless they are equal."""
    steps = (_FINEST / 10**digits for digits in range(9))
    if low == high:
        return next((step for step in steps if low % step == 0), _FINEST)
    return next((step for step in steps if 2 * step <= high - low), _FINEST / 10**8)


def _whole_bounds(low: _Bound | None, high: _Bound | None) -> tuple[_Bound | None, _Bound | None]:
    """The bounds of an integer, as whole numbers that belong to it and that the library takes."""
    if low is not None:
        least = math.ceil(low[0]) if low[1] == "minimum" else math.floor(low[0]) + 1
        low = max(least, -_MAX_BOUND), "minimum"
    if high is not None:
        most = math.floor(high[0]) if high[1] == "maximum" else math.ceil(high[0]) - 1
        high = min(most, _MAX_BOUND), "maximum"
    if (low is not None and low[0] > _MAX_BOUND) or (high is not None and high[0] < -_MAX_BOUND):
        raise _Nothing("#: whole numbers beyond 2**63 are not generated")
    return low, high


def _unique_lists(values: Sequence[object], least: int, most: int | None, where: str) -> list[object]:
    """Schemas of all lists of ``least`` to ``most`` of ``values``, none of them twice: in any order if they are few."""
    order = itertools.permutations if len(values) <= _MAX_PERMUTED else itertools.combinations
    made: list[object] = []
    for count in range(least, min(len(values), len(values) if most is None else most) + 1):
        for chosen in order(values, count):
            one = {"type": "array", "prefixItems": [{"enum": [value]} for value in chosen], "minItems": count}
            made.append({**one, "items": False} if chosen else {"type": "array", "maxItems": 0})
    if not made:
        raise _Nothing(f"{where[:200]}: there are fewer different items than the list needs")
    return made


def _branches(given: Schema, name: str, where: str) -> list[object]:
    value = given[name]
    if not isinstance(value, list) or not value:
        raise _error(where, f"{name} is a list with at least one schema")
    return value


def _modern(given: dict[str, Any], where: str) -> dict[str, Any]:
    """``given`` as the latest draft writes it."""
    given = dict(given)
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(flag := given.get(exclusive), bool):
            del given[exclusive]
            if flag and bound in given:
                given[exclusive] = given.pop(bound)
    rest = given.pop("additionalItems", True)
    if isinstance(given.get("items"), list):
        given["prefixItems"] = given.pop("items")
        if rest is not True:
            given["items"] = rest
    return given


def _merged(one: dict[str, Any], other: dict[str, Any], where: str) -> dict[str, Any]:
    """The keywords of two schemas that have to hold together."""
    made = {**one, **other}
    items = [{name: part[name] for name in ("items", "prefixItems") if name in part} for part in (one, other)]
    if all(items) and not _same(*items):
        raise _error(where, "items of several schemas that hold together are not enforced: write them as one")
    objects = _OF_TYPE["object"]
    if not one.keys().isdisjoint(objects) and not other.keys().isdisjoint(objects):
        made |= _merged_members(one, other, where)
    for name in one.keys() & other.keys():
        pair = one[name], other[name]
        match name:
            case "type":
                made[name] = _common_types(_type_names(pair[0], where), _type_names(pair[1], where))
                if not made[name]:
                    raise _Nothing(f"{where[:200]}: no type is allowed by all schemas")
            case "enum":
                known = set(map(_key, pair[1]))
                made[name] = [value for value in pair[0] if _key(value) in known]
            case "const" if not _same(*pair):
                raise _Nothing(f"{where[:200]}: no value is allowed by all schemas")
            case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
                made[name] = max(pair)
            case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
                made[name] = min(pair)
            case "multipleOf" if pair[0] != pair[1]:
                if not all(type(part) is int and part > 0 for part in pair):
                    raise _error(where, "multipleOf of several schemas is enforced for whole numbers")
                made[name] = math.lcm(*pair)
            case "uniqueItems":
                made[name] = True in pair
            case "pattern" | "format" | "propertyNames" if not _same(*pair):
                raise _error(where, f"{name} of several schemas that hold together is not enforced")
    return made


def _merged_members(one: Schema, other: Schema, where: str) -> dict[str, Any]:
    both = one, other
    if any("patternProperties" in part for part in both):
        raise _error(where, "patternProperties of several schemas that hold together are not enforced")
    listed = [part.get("properties", {}) for part in both]
    rests = [part.get("additionalProperties", True) for part in both]
    names = dict.fromkeys((*listed[0], *listed[1]))
    made: dict[str, Any] = {}
    if names:
        made["properties"] = {
            name: _both(*(part.get(name, rest) for part, rest in zip(listed, rests, strict=True))) for name in names
        }
    if any(rest is not True for rest in rests):
        made["additionalProperties"] = _both(*rests)
    if required := list(dict.fromkeys(name for part in both for name in part.get("required", ()))):
        made["required"] = required
    return made


def _unlisted(name: str, given: Schema, where: str) -> object:
    """What ``given`` demands of a member that its properties do not have, besides the schemas of patternProperties."""
    with _explained("pattern", where):
        is_matched = any(matches(pattern, name) for pattern in given.get("patternProperties", ()))
    return True if is_matched else given.get("additionalProperties", True)


def _both(one: object, other: object) -> object:
    if one is True or _same(one, other):
        return other
    return one if other is True else {"allOf": [one, other]}


def _common_types(one: Sequence[str], other: Sequence[str]) -> list[str]:
    common = [name for name in one if name in other]
    if ("integer" in one and "number" in other) or ("number" in one and "integer" in other):
        common.append("integer")
    return list(dict.fromkeys(common))


def _check_forms(given: Schema, where: str) -> None:
    """Raise SchemaError for a keyword whose value is of no use."""
    for name, value in given.items():
        kinds, words = _FORMS.get(name, (object, ""))
        is_flag = isinstance(value, bool) and not name.startswith("exclusive")  # in draft 4 those are
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        if not isinstance(value, kinds) or (kinds == (int, float) and (is_flag or is_infinite)):
            raise _error(where, f"{name} is {words}")
    if given.get("multipleOf", 1) <= 0:
        raise _error(where, "multipleOf is above 0")
    if not all(isinstance(name, str) for name in given.get("required", ())):
        raise _error(where, "required is a list of names")
    _counts(given, [name for name in given if name[:3] in ("min", "max") and name[3:] in _COUNTED], where)
    _type_names(given.get("type"), where)


def _type_names(given: object, where: str) -> list[str]:
    """The types that are named; empty if there is no ``type``, which allows all."""
    names: list[Any] = given if isinstance(given, list) else [given] if given is not None else []
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            raise _error(where, f"type must be among {', '.join(_TYPES)}")
    if given is not None and not names:
        raise _error(where, "type is an empty list")
    return names


@contextmanager
def _explained(keyword: str, where: str) -> Iterator[None]:
    """A ValueError inside this context becomes a SchemaError of ``keyword``."""
    try:
        yield
    except SchemaError:
        raise
    except ValueError as error:
        raise _error(where, f"{keyword}: {error}") from error


def _fraction(value: float) -> Fraction:
    """The number that is written, of which a float is only near."""
    return Fraction(Decimal(repr(value)))


def _looks_around(pattern: str) -> bool:
    """Whether ``pattern`` cannot be read because of a look-around; in a class or after a backslash it is none."""
    try:
        check_pattern(pattern)
    except ValueError:
        return re.search(r"\(\?<?[=!]", pattern) is not None
    return False


def _fits(value: object, given: Schema, where: str) -> bool:
    """Whether a value of an enum satisfies the keywords beside it."""
    if isinstance(value, str):
        length = _counts(given, ("minLength", "maxLength"), where)
        is_long = length.get("minLength", 0) <= len(value) <= length.get("maxLength", math.inf)
        return is_long and ("pattern" not in given or matches(given["pattern"], value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        bounds = {name: given[name] for name in (*_BOUNDS, "multipleOf") if name in given}
        if "multipleOf" in bounds and _fraction(value) % _fraction(bounds["multipleOf"]) != 0:
            return False
        low = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
        high = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
        is_inside = low <= value <= high
        return is_inside and value not in (bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum"))
    kind = "array" if isinstance(value, list) else "object" if isinstance(value, dict) else None
    beside = sorted(given.keys() & set(_OF_TYPE.get(kind or "", ())))
    if beside:
        raise _error(where, f"{beside[0]} beside enum or const is not enforced: leave it out")
    return True


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
    names = [*(given if isinstance(given, list) else [given]), *(["null"] if schema.get("nullable") is True else [])]
    return {"number" if name == "integer" else str(name) for name in names}


def _constants(schema: Schema) -> set[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    nulls = [None] if schema.get("nullable") is True else []
    return {_key(value) for value in (*values, *nulls)} if isinstance(values, list) else None


def _key(value: object) -> str:
    """Equal values have equal keys: 1 and 1.0 are equal, and neither is true."""
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


def _same(one: object, other: object) -> bool:
    return _key(one) == _key(other)


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


def _error(where: str, reason: str) -> SchemaError:
    return SchemaError(f"{where[:200]}: {reason}")
