"""A compiled grammar is sent and kept without the copies that its serialised form has, and means the same."""

from __future__ import annotations

import json
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest
import xgrammar
from json_schemas import generated_schema

from fenceline.constrained.compile import compact, compile_grammar
from fenceline.constrained.spec import GrammarKind, GrammarSpec

_END = 256


@lru_cache
def _vocabulary() -> xgrammar.TokenizerInfo:
    """A token for each byte, and the end."""
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    return xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[_END])


def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(_vocabulary(), max_threads=1, cache_enabled=False)


def _wide_schema(num_properties: int) -> str:
    properties = {
        f"p{i}": {"type": "object", "properties": {"a": {"type": "integer", "minimum": i}}}
        for i in range(num_properties)
    }
    return json.dumps({"type": "object", "properties": properties})


def _num_edges(serialised: dict[str, Any]) -> tuple[int, int]:
    """Of the automaton that the rules share, and of the rules' own ones together."""
    grammar = serialised["grammar"]
    own = [part[0]["edge_num"] for rule in grammar["per_rule_fsms"] for part in rule if isinstance(part, list)]
    assert len(own) == len(grammar["rules"])
    return grammar["complete_fsm"]["edge_num"], sum(own)


def test_the_rules_have_as_many_edges_as_their_automaton() -> None:
    written = _compiler().compile_json_schema(_wide_schema(40)).serialize_json()
    shared, with_copies = _num_edges(json.loads(written))
    assert with_copies > 50 * shared
    assert _num_edges(json.loads(compact(written))) == (shared, shared)


def test_what_is_sent_to_the_scheduler_is_compact() -> None:
    data = compile_grammar(_vocabulary(), GrammarSpec("json_schema", _wide_schema(40)), 20)
    shared, own = _num_edges(json.loads(data))
    assert own == shared


def test_another_form_is_left_as_it_is() -> None:
    form = json.loads(_compiler().compile_regex("a").serialize_json()) | {"__VERSION__": "v0"}
    text = json.dumps(form)
    assert compact(text) == text.encode()


@pytest.mark.parametrize("change", ["new field", "another layout", "no rules"])
def test_a_form_with_other_contents_is_left_as_it_is(change: str) -> None:
    form = json.loads(_compiler().compile_regex("ab|c").serialize_json())
    if change == "new field":
        form["grammar"]["complete_fsm"]["edges"]["more"] = []
    elif change == "another layout":
        form["grammar"]["per_rule_fsms"] = [None]
    else:
        del form["grammar"]["per_rule_fsms"]
    text = json.dumps(form)
    assert compact(text) == text.encode()


def test_a_grammar_whose_smaller_form_is_not_taken_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenceline.constrained.compile.compact", lambda text: b"{}")
    data = compile_grammar(_vocabulary(), GrammarSpec("regex", "ab|c"), 20)
    assert data.decode() == _compiler().compile_regex("ab|c").serialize_json()


_NOTHING = '{"type": "string", "pattern": "^[^\\\\s\\\\S]$"}'  # no text satisfies it, so no edge leads to its end
_TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {"begin": f"<f{i}>", "content": {"type": "regex", "pattern": "[a-c]+"}, "end": "</f>"} for i in (1, 2)
        ],
        "excludes": ["zz"],
    },
}
_GRAMMARS: list[tuple[GrammarKind, str]] = [
    ("json_schema", f'{{"anyOf": [{{"type": "integer"}}, {_NOTHING}]}}'),
    ("json_schema", f'{{"type": "object", "properties": {{"a": {_NOTHING}, "b": {{"type": "null"}}}}}}'),
    ("structural_tag", json.dumps(_TAGS)),
    ("ebnf", 'root ::= "a" ("x" | "yz"){2,1000} "b"'),
    ("regex", "(ab|a[^x]{2,40}){3,9}(c|é)*"),
    ("regex", ""),
    ("ebnf", 'root ::= one ("," one){0,3} | two\none ::= "a" two?\ntwo ::= "(" root ")" | [x-z]{2,5}'),
    ("json_schema", _wide_schema(6)),
    ("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 30, "minLength": 1}}'),
    ("json_schema", '{"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "object", "properties":'
     ' {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}]}}}'),
    *(("json_schema", json.dumps(generated_schema(Random(seed), depth=4))) for seed in range(6)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), _GRAMMARS)
def test_a_compact_grammar_allows_the_same_tokens_at_every_step(kind: GrammarKind, text: str) -> None:
    compiler = _compiler()
    match kind:
        case "regex":
            whole = compiler.compile_regex(text)
        case "ebnf":
            whole = compiler.compile_grammar(text)
        case "structural_tag":
            whole = compiler.compile_structural_tag(text)
        case _:
            whole = compiler.compile_json_schema(text)
    data = compact(whole.serialize_json())
    small = xgrammar.CompiledGrammar.deserialize_json(data.decode(), _vocabulary())
    random, masks = Random(0), np.empty((2, 9), np.int32)
    for _ in range(8):
        matchers = [xgrammar.GrammarMatcher(whole), xgrammar.GrammarMatcher(small)]
        for _ in range(60):
            masks.fill(-1)
            for place, matcher in enumerate(matchers):
                matcher.fill_next_token_bitmask(masks, place)
            assert (masks[0] == masks[1]).all()
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")[:257])
            if not len(allowed):
                break  # within a text that can never be completed
            token = random.choice(allowed.tolist())
            assert [matcher.accept_token(token) for matcher in matchers] == [True, True]
            if matchers[0].is_terminated():
                break
