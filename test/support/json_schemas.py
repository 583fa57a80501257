"""Generated JSON schemas of any depth, a validator for the keywords that they use, and texts drawn from a grammar."""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import xgrammar

from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.spec import GrammarKind, GrammarSpec

Schema = dict[str, Any]


def generated_schema(random: Random, depth: int) -> Schema:
    """A schema of an object whose members nest up to ``depth`` levels, with definitions to which it refers."""
    defs = {name: _leaf(random) for name in ("one", "two")}
    return {**_object(random, depth, list(defs)), "$defs": defs}


def _object(random: Random, depth: int, defs: list[str]) -> Schema:
    names = random.sample(("a", "id", "name", "é", "x y", "list", 'q"t'), random.randint(1, 3))
    properties = {name: _any(random, depth - 1, defs) for name in names}
    required = [name for name in names if random.random() < 0.8]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "description": "made up",
    }


def _any(random: Random, depth: int, defs: list[str]) -> Schema:
    kind = random.choice(("leaf", "leaf", "ref", "any", "array", "object", "object", "map"))
    if depth <= 0 or kind == "leaf":
        return _leaf(random)
    match kind:
        case "ref":
            return {"$ref": f"#/$defs/{random.choice(defs)}"}
        case "any":
            return {"anyOf": [_any(random, depth - 1, defs), {"type": "null"}]}
        case "array":
            return {"type": "array", "items": _any(random, depth - 1, defs), "minItems": 1, "maxItems": 2}
        case "map":
            return {"type": "object", "additionalProperties": _leaf(random), "maxProperties": 1}
    return _object(random, depth, defs)


def _leaf(random: Random) -> Schema:
    low = random.randint(-30, 30)
    return random.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 200)},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + 1.5},
            {"type": "string", "maxLength": random.randint(1, 4)},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
            {"type": "boolean"},
            {"enum": ["red", "grün", 7, None]},
            {"const": "fixed"},
            {"type": ["boolean", "null"]},
            {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        )
    )


def problem(value: object, schema: Schema, root: Schema) -> str:
    """What in ``value`` does not follow ``schema``; "" if it is valid."""
    if "$ref" in schema:
        return problem(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        fits = any(type(value) is type(one) and value == one for one in allowed)
        return "" if fits else f"{value!r} is not in {allowed}"
    if "anyOf" in schema or "oneOf" in schema:
        fitting = [one for one in schema.get("anyOf", schema.get("oneOf")) if not problem(value, one, root)]
        right = len(fitting) == 1 if "oneOf" in schema else bool(fitting)
        return "" if right else f"{value!r} fits {len(fitting)} alternatives"
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(_is_of(value, name) for name in types):
        return f"{value!r} is not of {types}"
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, int | float):
        low, high = schema.get("minimum", -1e9), schema.get("maximum", 1e9)
        right = low <= value <= high and value > schema.get("exclusiveMinimum", -1e9)
        return "" if right else f"{value!r} is out of bounds"
    if isinstance(value, str):
        right = len(value) <= schema.get("maxLength", 1e9) and re.search(schema.get("pattern", ""), value)
        return "" if right else f"{value!r} is no such text"
    if isinstance(value, list):
        if not schema["minItems"] <= len(value) <= schema["maxItems"]:
            return f"{len(value)} items"
        return next(filter(None, (problem(one, schema["items"], root) for one in value)), "")
    assert isinstance(value, dict)
    return _object_problem(value, schema, root)


def _object_problem(value: dict[str, object], schema: Schema, root: Schema) -> str:
    properties = schema.get("properties", {})
    missing = set(schema.get("required", ())) - value.keys()
    if missing or len(value) > schema.get("maxProperties", 1e9):
        return f"{sorted(value)} lacks {sorted(missing)}"
    for name, one in value.items():
        part = properties.get(name, schema["additionalProperties"])
        if part is False:
            return f"{name!r} may not be there"
        if found := problem(one, part, root):
            return f"{name}: {found}"
    return ""


def _is_of(value: object, name: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "null": (type(None),),
        "array": (list,), "object": (dict,),
    }  # fmt: skip
    return type(value) in kinds[name]


_END = 256


@lru_cache
def vocabulary() -> xgrammar.TokenizerInfo:
    """A token for each byte, and the end."""
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    return xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[_END])


def compiled(kind: GrammarKind, text: str) -> xgrammar.CompiledGrammar:
    """As the scheduler has it. Raises ValueError."""
    data = compile_grammar(vocabulary(), GrammarSpec(kind, text), 2)
    return xgrammar.CompiledGrammar.deserialize_json(data.decode(), vocabulary())


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether ``text`` is an answer."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(_END)


def walk(grammar: xgrammar.CompiledGrammar, random: Random, hints: bytes = b"") -> str | None:
    """A text of the grammar, each byte drawn from those that may come, and from ``hints`` more often; None if it does
    not end soon."""
    matcher, words = xgrammar.GrammarMatcher(grammar), np.zeros((1, 9), np.int32)
    text = bytearray()
    for _ in range(3000):
        words.fill(-1)
        matcher.fill_next_token_bitmask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:257]
        allowed = np.flatnonzero(bits).tolist()
        closing = [token for token in (_END, *b'"}],:') if token in allowed]
        hinted = [token for token in hints if token in allowed]
        token = random.choice(closing) if closing and random.random() < 0.4 else random.choice(allowed)
        token = random.choice(hinted) if hinted and random.random() < 0.5 else token
        assert matcher.accept_token(token)
        if token == _END:
            return text.decode(errors="replace")  # halves of surrogate pairs may be in names, as U+FFFD
        text.append(token)
    return None
