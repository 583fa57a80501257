"""JSON schemas and regular expressions: what is enforced is enforced word by word, and the rest is refused."""

from __future__ import annotations

import json
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest
import xgrammar
from json_schemas import generated_schema, problem

import fenceline.constrained.compile
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.json_schema import SchemaError, enforced_schema
from fenceline.constrained.patterns import check_pattern, in_ascii
from fenceline.constrained.spec import GrammarKind, GrammarSpec, max_whitespace

_END = 256


@lru_cache
def _vocabulary() -> xgrammar.TokenizerInfo:
    """A token for each byte, and the end."""
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    return xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[_END])


def _compiled(kind: GrammarKind, text: str) -> xgrammar.CompiledGrammar:
    data = compile_grammar(_vocabulary(), GrammarSpec(kind, text), 2)
    return xgrammar.CompiledGrammar.deserialize_json(data.decode(), _vocabulary())


def _accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(_END)


def _walk(grammar: xgrammar.CompiledGrammar, random: Random) -> str | None:
    """A text of the grammar, each byte drawn from those that may come; None if it does not end soon."""
    matcher, words = xgrammar.GrammarMatcher(grammar), np.zeros((1, 9), np.int32)
    text = bytearray()
    for _ in range(3000):
        words.fill(-1)
        matcher.fill_next_token_bitmask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:257]
        allowed = np.flatnonzero(bits).tolist()
        closing = [token for token in (_END, *b'"}],:') if token in allowed]
        token = random.choice(closing) if closing and random.random() < 0.4 else random.choice(allowed)
        assert matcher.accept_token(token)
        if token == _END:
            return text.decode(errors="replace")  # halves of surrogate pairs may be in names, as U+FFFD
        text.append(token)
    return None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "integer"}}, "not is not enforced"),
        ({"if": {}, "then": {}}, "if is not enforced"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"minimum": 5}, "minimum without type"),
        ({"maxLength": 2}, "maxLength without type"),
        ({"required": ["a"]}, "required without type"),
        ({"type": "string", "pattern": "^a$", "maxLength": 2}, "pattern beside maxLength"),
        ({"type": "string", "format": "date", "minLength": 2}, "format beside minLength"),
        ({"type": "string", "format": "regex"}, "format must be among"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "multipleOf beside bounds"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is more"),
        ({"type": "integer", "minimum": 1.5}, "whole numbers"),
        ({"type": "integer", "maximum": 2**60}, "beyond 2\\*\\*53"),
        ({"type": "integer", "enum": ["a"]}, "no value of enum"),
        ({"enum": [1, 2], "minimum": 2}, "minimum beside enum"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required names 'b'"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "additionalProperties"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties"),
        ({"type": "object", "patternProperties": {"^a": {}, "^b": {}}}, "one pattern"),
        ({"anyOf": [{"type": "integer"}], "minimum": 5}, "minimum beside anyOf"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is enforced only"),
        ({"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 5}, "minimum beside \\$ref"),
        ({"$ref": "http://x/y"}, "point into this document"),
        ({"$ref": "#/$defs/nope"}, "no schema in this document"),
        ({"enum": [{"x": 1}], "$defs": {}, "examples": [{}], "anyOf": [{"$ref": "#/examples/0"}]}, "beside anyOf"),
        ({"examples": [{}], "anyOf": [{"$ref": "#/examples/0"}]}, "no schema in this document"),
        ({"type": "foo"}, "type must be among"),
        (False, "nothing satisfies"),
        (5, "a schema is"),
        ({"type": "string", "pattern": 'a"b'}, "JSON escapes"),
        ({"type": "string", "pattern": "a(?=b)"}, "groups of the kinds"),
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
    ],
)  # fmt: skip
def test_what_is_taken_is_enforced(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = _compiled("json_schema", json.dumps(schema))
    assert [text for text in good if not _accepts(grammar, text)] == []
    assert [text for text in bad if _accepts(grammar, text)] == []


def _nested(depth: int) -> Any:
    """Alternatives within alternatives, written out: twice as long with each level."""
    schema: Any = {"type": "string", "pattern": "^x{2}$"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}]}
    return schema


def test_alternatives_that_are_written_out_twice_at_each_level_are_compiled() -> None:
    """To the library each copy was another schema: at the eighth level it took more than 1 GiB."""
    grammar = _compiled("json_schema", json.dumps({"type": "object", "properties": {"a": _nested(10)}}))
    good = ['"xx"', '["xx"]', '[["xx", ["xx"]], "xx"]', "[" * 10 + '"xx"' + "]" * 10]
    bad = ['"x"', "[]", '["xx", "xx", "xx"]', "[" * 11 + '"xx"' + "]" * 11]
    assert [text for text in good if not _accepts(grammar, f'{{"a": {text}}}')] == []
    assert [text for text in bad if _accepts(grammar, f'{{"a": {text}}}')] == []


def test_a_schema_that_comes_twice_is_written_once_unless_places_within_it_are_referred_to() -> None:
    members: Any = {name: {"type": "integer"} for name in ("x", "y", "v", "w")}
    place: Any = {"type": "object", "properties": {**members, "z": {"enum": [1, 2]}}}
    twice = {"type": "object", "properties": {"from": place, "to": place, "$ref": {"type": "null"}}}
    made: Any = enforced_schema(twice)
    assert (
        made["properties"]["from"]
        == made["properties"]["to"]
        == {"$ref": f"#/$defs/{next(iter(made['$defs']))}"}
    )
    assert enforced_schema({"type": "array", "items": place}) == {
        "type": "array", "items": {**place, "additionalProperties": False}
    }  # fmt: skip
    other = {
        **twice,
        "properties": {**twice["properties"], "more": {"$ref": "#/properties/from/properties/x"}},
    }
    assert "$defs" not in enforced_schema(other)  # type: ignore[operator]
    grammar = _compiled("json_schema", json.dumps(twice))
    assert _accepts(grammar, '{"from": {"x": 1, "z": 2}, "to": {"y": 3}}')
    assert not _accepts(grammar, '{"from": {"x": 1, "z": 3}}')
    named = {
        "$defs": {"p": place, "q": place},
        "type": "array",
        "prefixItems": [place, {"$ref": "#/$defs/q"}],
    }
    grammar = _compiled("json_schema", json.dumps({**named, "items": False}))
    assert _accepts(grammar, '[{"x": 1}, {"z": 1}]') and not _accepts(grammar, '[{"x": 1}, {"z": 3}]')


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("twice", [False, True])
def test_every_text_of_a_generated_schema_is_valid(seed: int, twice: bool) -> None:
    random = Random(seed)
    schema = generated_schema(random, depth=1 + seed % 4)
    if twice:  # then it is written once, and referred to
        defs = schema.pop("$defs")  # type: ignore[attr-defined]
        both = {"left": schema, "right": schema}
        schema = {
            "type": "object",
            "properties": both,
            "required": ["left", "right"],
            "additionalProperties": False,
        }
        schema = {**schema, "$defs": defs}
    grammar = _compiled("json_schema", json.dumps(schema))
    texts = [text for _ in range(8) if (text := _walk(grammar, random)) is not None]
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
        (
            "ebnf",
            'root ::= "a" | [é-ü]\non"e ::= "é"*',
            "EBNF",
        ),  # the library cuts its message within a character
        ("structural_tag", '{"type": "structural_tag"}', "format"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}',
            "not is not enforced",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        _compiled(kind, text)
    assert ".cc" not in str(caught.value)


@pytest.mark.parametrize("words", ["/src/a.cc:12: EBNF: wrong", "wrong", "[12:00:00] x.cc:3: EBNF: wrong "])
def test_every_error_of_the_library_has_a_reason(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(fenceline.constrained.compile, "_compiled", fail)
    with pytest.raises(ValueError, match="^(EBNF: )?wrong$"):
        compile_grammar(_vocabulary(), GrammarSpec("regex", "a"), 2)
    words = "std::bad_alloc"  # alternatives that are nested: each level doubles what they take
    with pytest.raises(MemoryError):
        compile_grammar(_vocabulary(), GrammarSpec("regex", "a"), 2)


@pytest.mark.parametrize(
    ("pattern", "in_json"),
    [
        ("a^b", False), ("a$b", False), ("(^a)", False), (r"\Aa", False), (r"(a)\1", False), ("(?i)a", False),
        (r"\x2", False), ("[]a]", False), (r"\n", True), ("\t", True), (r"\\", True), (r"\x22", True), ("a\\", False),
        ("(?<!b)a", False),
    ],
)  # fmt: skip
def test_patterns_that_mean_something_else_to_the_library_are_refused(pattern: str, in_json: bool) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        check_pattern(pattern, in_json)


@pytest.mark.parametrize(
    "pattern", [r"^a$|^b$", r"[\n\"]x", r"\d+\.\d{2}", "(?:a|(?<n>b))*", r"[^\]]+", "é.", "a|b$"]
)
def test_ordinary_patterns_are_taken(pattern: str) -> None:
    check_pattern(pattern, in_json=True)


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"[^x]|\d\\", r"[^x]|\d\\"),
        ("é[à-ü]😀", r"\u{E9}[\u{E0}-\u{FC}]\u{1F600}"),
        (r"\—\\é\.", r"\u{2014}\\\u{E9}\."),
    ],
)
def test_a_pattern_is_written_in_ascii(pattern: str, written: str) -> None:
    assert in_ascii(pattern) == written


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
def test_no_class_has_what_json_escapes_beside_characters_beyond_ascii(pattern: str, text: str) -> None:
    """As the library reads such a pattern, quotes and control characters would come as they are."""
    grammar = _compiled("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    assert _accepts(grammar, f'"{text}"')
    for char in ('"', "\\", "\n", "\x01"):
        for wrong in (char, f"é{char}", f"{char}😀", f"—{char}"):
            assert not _accepts(grammar, f'"{wrong}"'), wrong


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


def test_a_grammar_whose_tokens_take_ever_longer_is_refused_when_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens would be everybody's: the scheduler ends it only after one has taken long."""
    with pytest.raises(ValueError, match="its tokens take too long: make it less ambiguous"):
        _compiled("regex", _ENTANGLED)
    monkeypatch.setattr(fenceline.constrained.compile, "TRIAL_ANSWERS", 0)
    matcher = xgrammar.GrammarMatcher(_compiled("regex", _ENTANGLED))
    assert matcher.accept_string("x")


def test_the_trial_of_a_grammar_draws_answers_that_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """To their end, and counts what their tokens take beyond what each may."""
    monkeypatch.setattr(fenceline.constrained.compile, "TRIAL_TOKEN_S", -1.0)
    monkeypatch.setattr(fenceline.constrained.compile, "TRIAL_EXCESS_S", 2.5)
    _compiled("regex", "a")  # a token in each of two answers
    with pytest.raises(ValueError, match="too long"):
        _compiled("regex", "[0-9]{5}")  # each digit is a token
