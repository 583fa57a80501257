"""JSON schemas and regular expressions: what is enforced is enforced word by word, and the rest is refused."""

from __future__ import annotations

import itertools
import json
import re
from random import Random
from typing import Any

import pytest
import xgrammar
from json_schemas import accepts, compiled, generated_schema, problem, vocabulary, walk

import fenceline.constrained.compile
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.json_schema import SchemaError, enforced_schema
from fenceline.constrained.regular import check_pattern, matches
from fenceline.constrained.spec import GrammarKind, GrammarSpec, max_whitespace


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "integer"}}, "not is not enforced"),
        ({"if": {}, "then": {}}, "if is not enforced"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "format": "date", "maxLength": 9}, "no text of that length"),
        ({"type": "string", "pattern": "^a(?=b)$"}, "groups of the kinds"),
        ({"type": "string", "pattern": "(^a)"}, "outside of groups"),
        ({"type": "string", "pattern": "(a$|b)"}, "outside of groups"),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "maxLength": 3}, "pattern of several schemas"),
        ({"type": "string", "pattern": r"^(a)\1$"}, "not possible"),
        ({"type": "number", "multipleOf": 0}, "above 0"),
        ({"type": "number", "multipleOf": 1e-20}, "15 digits after the point"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "no multiple between"),
        ({"type": "integer", "multipleOf": 99991, "minimum": 1}, "too many rules"),
        ({"type": "integer", "minimum": 1e999}, "minimum is a number"),
        ({"type": "integer", "minimum": 2, "exclusiveMaximum": 2.5, "exclusiveMinimum": 2}, "between the bounds"),
        ({"type": "integer", "minimum": 2**64}, "beyond 2\\*\\*63"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is more"),
        ({"const": 2**60}, "beyond 2\\*\\*53"),
        ({"type": "integer", "enum": ["a"]}, "no value of enum"),
        ({"enum": [[1, 2]], "minItems": 2}, "minItems beside enum"),
        ({"enum": [1, 2], "minimum": 3}, "no value of enum"),
        ({"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "required names 'b'"),
        ({"type": "array", "items": {"enum": [1, 1.0]}, "minItems": 2, "uniqueItems": True}, "fewer different items"),
        (
            {"oneOf": [{"properties": {"a": {}}, "required": ["a"], "type": "object"},
                {"properties": {"b": {}}, "required": ["b"], "type": "object"}]},
            "oneOf is enforced only",
        ),
        ({"oneOf": [{"propertyNames": False, "minProperties": 1}, {"type": "string"}]}, "oneOf is enforced only"),
        ({"properties": {"a": {}}, "minProperties": 2}, "more than the properties"),
        ({"properties": {"a": {}}, "required": ["a"], "maxProperties": 0}, "fewer than the required"),
        ({"type": "array", "uniqueItems": 3}, "true or false"),
        ({"type": "array", "items": False, "minItems": 1}, "more items than it may have"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nothing satisfies"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}, "beside properties"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties"),
        ({"type": "object", "patternProperties": {"^a": {}, "^b": {}}}, "one pattern"),
        ({"anyOf": [{"maximum": 4}, {"type": "string"}], "type": "integer", "minimum": 5}, "any schema of anyOf"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "no type is allowed"),
        ({"allOf": [{"patternProperties": {"a": {}}}, {"properties": {"b": {}}}]}, "hold together"),
        ({"allOf": [{"items": {"type": "integer"}}, {"prefixItems": [{"minimum": 5}]}]}, "items of several"),
        ({"allOf": [{"anyOf": [{"minimum": i} for i in range(50)]}] * 3}, "too many schemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is enforced only"),
        ({"$ref": "http://x/y"}, "point into this document"),
        ({"$ref": "#/$defs/nope"}, "no schema in this document"),
        ({"examples": [{}], "anyOf": [{"$ref": "#/examples/0"}]}, "no schema in this document"),
        ({"type": "foo"}, "type must be among"),
        (False, "nothing satisfies"),
        (5, "a schema is"),
        ({"type": "string", "pattern": "a\\x01"}, "JSON text cannot have"),
        ({"type": "string", "pattern": "a(?<=b)"}, "groups of the kinds"),
        ({"type": "string", "pattern": "a{100000000000,999999999999}"}, "too large"),
        ({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False, "required": ["y"]}, "'y'"),
        ({"allOf": [{"const": 1}, {"enum": [True]}]}, "no value of enum"),
        ({"enum": [10**400], "const": 10**400}, "beyond 2"),
        ({"allOf": [{"format": "date"}, {"format": "ipv4"}], "type": "string"}, "format of several"),
        ({"oneOf": [{"type": "string", "nullable": True}, {"type": "null"}]}, "oneOf is enforced only"),
        ({"oneOf": [{"const": [1]}, {"const": [1.0]}]}, "oneOf is enforced only"),
        ({"type": "string", "nullable": "yes"}, "nullable is true or false"),
    ],
)  # fmt: skip
def test_what_is_not_enforced_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        enforced_schema(schema)


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError, match="64 deep"):
        enforced_schema(schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 17}, ["3", "17"], ["2", "18", "3.5", "03"]),
        ({"type": "integer", "multipleOf": 3}, ["6", "-3", "0"], ["4", "7"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0", "0.0", "1.1", "1e5"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"日é"'], ['"a"', '"abcd"', '"a\n"', '"a\0"']),
        ({"type": "string", "minLength": 2}, ['"ab"', f'"{"a" * 99}"'], ['"a"', '"a\t"']),
        ({"type": "string", "pattern": "^a$|^[^b]b$"}, ['"a"', '"cb"'], ['""b"', '"ab|"', '"\\b"', '"bb"']),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[null]"], ["[null, 1]"]),
        ({"type": ["integer", "string"], "enum": [1, "a", None]}, ["1", '"a"'], ["null", "2"]),
        ({"enum": [1, 2, 3], "const": 2, "title": "t"}, ["2"], ["1", "3"]),
        ({"type": "object", "properties": {"a": {}}, "x-mine": 1}, ['{"a": [1]}', "{}"], ['{"b": 1}']),
        ({"type": "object", "patternProperties": {"^x[0-9]$": {"const": 1}}}, ['{"x1": 1}'], ['{"y": 1}']),
        ({"type": "object", "propertyNames": {"pattern": "^k$"}}, ['{"k": 1}'], ['{"l": 1}']),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
                "a": {"type": "object", "properties": {"t": {"const": "a"}}, "required": ["t"]},
                "b": {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"]},
            }},
            ['{"t": "a"}', '{"t": "b"}'], ["{}", '{"t": "c"}'],
        ),
        (
            {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
            ['{"n": null}', '{"n": {"n": null}}'], ["{}"],
        ),
        # Schemas that have to hold together.
        ({"type": "integer", "allOf": [{"minimum": 3}, {"exclusiveMaximum": 5}]}, ["3", "4"], ["2", "5"]),
        ({"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 5}, ["5"], ["4", "5.5"]),
        ({"type": "number", "anyOf": [{"maximum": 1}, {"minimum": 9, "maximum": 10}]}, ["0.5", "9"], ["2", '"a"']),
        (
            {"allOf": [{"properties": {"a": {"type": "number"}}, "required": ["a"]},
                {"properties": {"a": {"minimum": 2}, "b": {"type": "null"}}}]},
            ['{"a": 2}', '{"a": 2.5, "b": null}'], ["{}", '{"a": 1}', '{"a": 2, "b": 1}', "3"],
        ),
        (
            {"allOf": [{"type": "object", "properties": {"a": {}, "c": {}}, "additionalProperties": False},
                {"properties": {"a": {"const": 1}, "b": {}}}]},
            ['{"a": 1}', '{"c": []}'], ['{"b": 1}', '{"a": 2}'],
        ),
        ({"allOf": [{"type": ["string", "number"]}, {"type": ["integer", "null"]}]}, ["1"], ["null", "1.5"]),
        (
            {"type": "string", "pattern": "^[a-z]+@[a-z]+$", "minLength": 6, "maxLength": 7},
            ['"abc@cde"'], ['"a@b"', '"abcd@efg"'],
        ),
        (
            {"type": "string", "pattern": "^[a-z]+@[a-z]+$", "minLength": 6},
            ['"abcd@b"', '"abcdefg@h"'], ['"a@b"', '"abc@e"'],
        ),
        ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6, "type": "integer"}], "minimum": 1}, ["12", "24"], ["0", "6"]),
        ({"enum": ["a", "bb", 3], "minLength": 2, "minimum": 4}, ['"bb"'], ['"a"', "3"]),
        ({"anyOf": [False, {"not": {}}, {"const": 1}]}, ["1"], ["2"]),
        ({"properties": {"a": False, "b": {"const": 1}}}, ['{"b": 1}', "{}"], ['{"a": 1}']),
        # Keywords without a type.
        ({"minimum": 5}, ["5.5"], ["4", '"a"']),
        ({"required": ["a"], "properties": {"a": {"const": 1}}}, ['{"a": 1}'], ["{}", "1"]),
        # Members.
        ({"properties": {"a": {"const": 1}}, "additionalProperties": True}, ['{"a": 1}'], ['{"a": 2}', '{"b": 1}']),
        ({"type": "object", "additionalProperties": {"const": 1}, "required": ["k"]}, ['{"k": 1}'], ["{}", '{"k": 2}']),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}}, ['{"b": 1}'], ['{"c": 1}']),
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}}, ['{"x": 1}'], ['{"x": 2}']),
        (
            {"propertyNames": {"minLength": 2}, "additionalProperties": {"const": 1}, "type": "object"},
            ['{"xy": 1}', "{}"], ['{"x": 1}', '{"xy": 2}'],
        ),
        ({"patternProperties": {"^x": {"const": 1}}}, ['{"xyz": 1}'], ['{"xyz": 2}', '{"y": 1}']),
        (
            {"patternProperties": {"^x": {"minimum": 3}}, "properties": {"x": {"type": "integer"}, "y": {"const": 1}}},
            ['{"x": 3, "y": 1}'], ['{"x": 2}', '{"y": 2}'],
        ),
        (
            {"patternProperties": {"^x": {}}, "additionalProperties": {"const": 1}, "required": ["y"]},
            ['{"y": 1}'], ['{"y": 2}', "{}"],
        ),
        (
            {"patternProperties": {"^x": {"const": 1}}, "properties": {"ax": {"const": 2}}},
            ['{"ax": 2}'], ['{"ax": 1}'],
        ),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": True}}}], "type": "object"},
            ["{}"], ['{"a": true}', '{"a": 1}'],
        ),
        # Lists.
        ({"items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[2]", "[1, 1]"]),
        ({"items": [{"const": 1}], "additionalItems": {"const": 2}}, ["[1]", "[1, 2, 2]"], ["[2]", "[1, 1]"]),
        ({"prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1}, ["[1]"], ["[1, 2]"]),
        ({"prefixItems": [{"const": 1}, False]}, ["[1]"], ["[1, 2]"]),
        ({"prefixItems": [True, {"const": 1}]}, ['["a", 1]', "[]"], ["[1, 2]"]),
        ({"prefixItems": [{"const": 1}], "minItems": 2}, ["[1, 2]"], ["[1]", "[2, 1]"]),
        (
            {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
            ["[]", '["b", "a"]', '["a"]'], ['["a", "a"]', '["a", "b", "a"]'],
        ),
        (
            {"type": ["array", "null"], "items": {"enum": list(range(8))}, "uniqueItems": True, "minItems": 7},
            ["[0, 1, 2, 3, 4, 5, 7]", "null"], ["[]", "[0, 0, 1, 2, 3, 4, 5]"],
        ),
        # Numbers.
        ({"type": "integer", "minimum": 0.0, "maximum": 2.5}, ["0", "2"], ["-1", "3"]),
        ({"type": "integer", "exclusiveMinimum": 1.5, "maximum": 3}, ["2", "3"], ["1", "4"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [f"{2**63 - 1}"], [f"{2**63}", "1.5"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [f"{2**63 - 1}"], ["-1", f"{2**64}"]),
        ({"type": "integer", "minimum": 2, "exclusiveMaximum": True, "maximum": 4}, ["2", "3"], ["4"]),
        ({"type": "integer", "multipleOf": 15, "minimum": 0, "exclusiveMaximum": 9000}, ["0", "8985"], ["-15", "9000"]),
        ({"type": "number", "multipleOf": 0.25, "exclusiveMinimum": 0}, ["0.25", "1.5", "7"], ["0", "0.3", "-0.25"]),
        ({"type": "number", "multipleOf": 0.01, "maximum": 1}, ["0.07", "0.5", "1", "-3.10"], ["0.075", "1.01"]),
        ({"type": "integer", "multipleOf": 2.5}, ["5", "-10"], ["2", "2.5"]),
        ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, ["0.0000001", "0.00000015"], ["", "0.0000003"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, ["0.0000005"], ["0", "0.000001"]),
        ({"type": "number", "minimum": 0.12345678, "maximum": 0.12345678}, ["0.12345678"], ["", "0.123456"]),
        # Texts.
        ({"type": "string", "pattern": '^"\\\\\\n$'}, ['"\\"\\\\\\n"'], ['""\\\\n"']),
        ({"type": "string", "pattern": "^(?=x)y$", "format": "ipv4"}, ['"1.2.3.4"'], ['"y"']),
        ({"type": "string", "pattern": r"^\(?=[(?=]$", "format": "date"}, ['"(=="', '"=?"'], ['"2020-01-01"']),
        ({"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 7}, ['"a-b"', '"abc"'], ['"aaaa-bbb"']),
        ({"type": "string", "pattern": "^(x[0-9]+)?$"}, ['""', '"x12"'], ['"12"']),
        ({"type": "string", "format": "unheard-of", "maxLength": 1}, ['"a"'], ['"ab"']),
        ({"type": "string", "format": "date", "pattern": "^a$"}, ['"a"'], ['"2020-01-01"']),
        ({"type": "string", "pattern": "^(?:(?:ab)?)*$", "minLength": 1}, ['"ab"', '"abab"'], ['""']),
        ({"nullable": True, "type": "string", "enum": ["a"]}, ['"a"', "null"], ['"b"']),
    ],
)  # fmt: skip
def test_what_is_taken_is_enforced(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compiled("json_schema", json.dumps(schema))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def _pattern(random: Random, depth: int) -> str:
    """A pattern of the letters a, b and c."""
    kind = random.random()
    if depth == 0 or kind < 0.3:
        return random.choice(("a", "b", "[ab]", "c"))
    if kind < 0.5:
        return _pattern(random, depth - 1) + _pattern(random, depth - 1)
    if kind < 0.65:
        return f"(?:{_pattern(random, depth - 1)}|{_pattern(random, depth - 1)})"
    many = random.choice(("*", "+", "?", "{0,2}", "{1,2}", "{2}", "{2,}"))
    return f"(?:{random.choice(('a', 'bc', 'a+', 'b|c+'))}){many}"


def test_patterns_mean_what_they_mean_elsewhere() -> None:
    """The library itself reads one of a hundred of them wrongly."""
    random = Random(0)
    texts = ["".join(letters) for length in range(5) for letters in itertools.product("abc", repeat=length)]
    num_taken = 0
    for _ in range(500):
        pattern = _pattern(random, 3)
        right = [text for text in random.sample(texts, 40) if re.fullmatch(pattern, text)]
        try:
            grammar = compiled("json_schema", json.dumps({"type": "string", "pattern": pattern}))
        except ValueError as error:
            assert "no text matches" in str(error) and not right, pattern
            continue
        num_taken += 1
        for text in random.sample(texts, 40):
            assert accepts(grammar, f'"{text}"') == bool(re.fullmatch(pattern, text)), (pattern, text)
    assert num_taken > 400


@pytest.mark.parametrize("pattern", ["^a", "b$", "^a|b$", "^a$|^(?:b|c+)", "(a|b)c{2}|^$"])
def test_a_pattern_is_found_where_its_anchors_say(pattern: str) -> None:
    texts = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]
    assert [text for text in texts if matches(pattern, text)] == [text for text in texts if re.search(pattern, text)]


def test_what_is_an_annotation_although_it_asserts_is_noted() -> None:
    noted: list[str] = []
    for items in ({"type": "string"}, {"enum": ["a", "b"]}):
        enforced_schema({"type": "array", "items": items, "uniqueItems": True}, noted.append)
    for pattern in ("^(?=x)y$", "^[(?=]$"):
        enforced_schema({"type": "string", "pattern": pattern, "format": "ipv4"}, noted.append)
    assert len(noted) == 2 and "uniqueItems" in noted[0] and "look-around" in noted[1]


@pytest.mark.parametrize("older", [False, True])
def test_the_older_structural_tag_means_the_same(older: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 5, "minimum": 0}}}
    schema = {**schema, "required": ["n"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"begin": "<f>", "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [{"type": "tag", **tag, "content": content}]}
    current = {"type": "structural_tag", "format": form}
    old = {"type": "structural_tag", "structures": [{**tag, "schema": schema}], "triggers": ["<f"]}
    grammar = compiled("structural_tag", json.dumps(old if older else current))
    for text in ('so <f>{"n": 15}</f> it', "no call"):
        assert accepts(grammar, text), text
    for text in ('<f>{"n": 7}</f>', '<f>{"n": -5}</f>', "<f>{}</f>", "<f>1</f>", "<g>"[:1] + "f"):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("twice", [False, True])
def test_every_text_of_a_generated_schema_is_valid(seed: int, twice: bool) -> None:
    random = Random(seed)
    schema = generated_schema(random, depth=1 + seed % 4)
    if twice:  # then it is written once, and referred to
        defs = schema.pop("$defs")  # type: ignore[attr-defined]
        both = {"left": schema, "right": schema}
        schema = {"type": "object", "properties": both, "required": ["left", "right"], "additionalProperties": False}
        schema = {**schema, "$defs": defs}
    grammar = compiled("json_schema", json.dumps(schema))
    texts = [text for _ in range(8) if (text := walk(grammar, random)) is not None]
    # The library's classes of characters let halves of surrogate pairs through, which are no text.
    texts = [text for text in texts if "\ufffd" not in text]
    assert texts
    for text in texts:
        assert problem(json.loads(text), schema, schema) == "", (schema, text)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"minimum": NaN}', "not valid JSON"),
        ("json_schema", '{"$ref": "#"}', "no text that satisfies"),
        ("regex", "a(", "parenthesis"),
        ("regex", r"\bq", "not possible"),
        ("ebnf", 'root ::= "a" nope', "nope"),
        ("ebnf", 'root ::= "a" | [é-ü]\non"e ::= "é"*', "EBNF"),  # the library cuts its message within a character
        ("structural_tag", '{"type": "structural_tag"}', "format"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {"const": 1}}}}',
            "not is not enforced",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        compiled(kind, text)
    assert ".cc" not in str(caught.value)


@pytest.mark.parametrize("words", ["/src/a.cc:12: EBNF: wrong", "wrong", "[12:00:00] x.cc:3: EBNF: wrong "])
def test_every_error_of_the_library_has_a_reason(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(fenceline.constrained.compile, "_compiled", fail)
    with pytest.raises(ValueError, match="^(EBNF: )?wrong$"):
        compile_grammar(vocabulary(), GrammarSpec("regex", "a"), 2)
    words = "std::bad_alloc"  # alternatives that are nested: each level doubles what they take
    with pytest.raises(MemoryError):
        compile_grammar(vocabulary(), GrammarSpec("regex", "a"), 2)


@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(^a)", r"\Aa", r"(a)\1", "(?i)a", r"\x2", "[]a]", "a\\", "(?<!b)a"])
def test_patterns_that_the_library_misreads_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"^a$|^b$", r"[\n\"]x", r"\d+\.\d{2}", "(?:a|(?<n>b))*", r"[^\]]+", "é.", "a|b$"])
def test_ordinary_patterns_are_taken(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("[^x]|é", "é"),
        ("é.", "éa"),
        (r"\S😀?", "a😀"),
        ("[^é]", "a"),
        (r"—[\s\S]?", "—a"),
        (r"\W|ü", "ü"),
        ("[à-ü].", "éa"),
    ],
)
def test_no_class_has_what_json_escapes_beside_non_ascii(pattern: str, text: str) -> None:
    """As the library reads such a pattern, quotes and control characters would come as they are."""
    grammar = compiled("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    assert accepts(grammar, f'"{text}"')
    for char in ('"', "\\", "\n", "\x01"):
        for wrong in (char, f"é{char}", f"{char}😀", f"—{char}"):
            assert not accepts(grammar, f'"{wrong}"'), wrong


@pytest.mark.parametrize(
    ("pattern", "most"),
    [(None, 20), ("", 0), (r"[\n\t ]*", None), (r"[ \t\n]?", 1), (r"[\n\t ]{0,7}", 7), (r"[\s]*", None)],
)
def test_the_pattern_of_white_space_is_a_limit(pattern: str | None, most: int | None) -> None:
    assert max_whitespace(pattern) == most


@pytest.mark.parametrize("pattern", [r"[ ]*", "a", r"[\n\t ]+", r"\s*"])
def test_other_patterns_of_white_space_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="constrained-json-whitespace-pattern"):
        max_whitespace(pattern)


_ENTANGLED = "((a?|[^x]|.*?){0,30})+x"  # each token is read in more ways than the one before


def test_a_grammar_whose_tokens_take_ever_longer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would be everybody's: the scheduler ends it only after one has taken long."""
    with pytest.raises(ValueError, match="its tokens take too long: make it less ambiguous"):
        compiled("regex", _ENTANGLED)
    monkeypatch.setattr(fenceline.constrained.compile, "TRIAL_ANSWERS", 0)
    matcher = xgrammar.GrammarMatcher(compiled("regex", _ENTANGLED))
    assert matcher.accept_string("x")


def test_the_trial_of_a_grammar_draws_answers_that_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """To their end, and counts what their tokens take beyond what each may."""
    monkeypatch.setattr(fenceline.constrained.compile, "TRIAL_TOKEN_S", -1.0)
    monkeypatch.setattr(fenceline.constrained.compile, "TRIAL_EXCESS_S", 2.5)
    compiled("regex", "a")  # a token in each of two answers
    with pytest.raises(ValueError, match="too long"):
        compiled("regex", "[0-9]{5}")  # each digit is a token
