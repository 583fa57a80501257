"""A grammar compiled for a vocabulary, in a process that may be killed at any time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fenceline.constrained.json_schema import MAX_DEPTH, Enforced, enforced_schema
from fenceline.constrained.regular import check_pattern
from fenceline.constrained.spec import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILED_BYTES = 16 << 20
# The trial of a grammar draws ``TRIAL_ANSWERS`` answers of up to ``TRIAL_TOKENS`` tokens. A token may take
# ``TRIAL_TOKEN_S`` of CPU time; beyond that all tokens together may take ``TRIAL_EXCESS_S``. Ordinary grammars take 50
# us a token.
TRIAL_ANSWERS, TRIAL_TOKENS = 2, 48
TRIAL_TOKEN_S, TRIAL_EXCESS_S = 0.002, 0.05


# The library's number for the serialised form that is known here. It changes with every change of the form.
FORMAT = "v16"


class _Edges(msgspec.Struct, forbid_unknown_fields=True):
    """All edges, in the order of the states that they leave: those of state s are ``data_[indptr_[s]:indptr_[s + 1]]``.
    The last number of an edge is the state that it enters."""

    data_: list[tuple[int, int, int]]
    indptr_: list[int]


class _Automaton(msgspec.Struct, forbid_unknown_fields=True):
    edges: _Edges
    edge_aux_data: msgspec.Raw
    edge_num: int


class _RuleAutomaton(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The states of one rule: those that can be reached from ``start``. ``ends`` may contain others too."""

    automaton: msgspec.Raw
    start: int
    ends: list[int]
    is_dfa: bool
    edge_num: int


def compact(data: str) -> bytes:
    """A smaller serialised form of the same grammar. ``data`` is what :meth:`xgrammar.CompiledGrammar.serialize_json`
    returns.

    In a compiled grammar the automata of all rules lie in one, which the rules share. In the serialised form each rule
    has a copy of it, and what is read back keeps these copies: with 300 rules 6 MB, almost all of which no rule can
    reach. Here each rule keeps only the edges that it can reach. The states keep their numbers, so a rule still has an
    entry, without edges, for every state before its own; and each rule still has a copy of the lists that some edges
    refer to (``edge_aux_data``).

    A form other than :data:`FORMAT`, or with unknown fields, is returned as it is.
    """
    try:
        return _compact(data)
    except (msgspec.DecodeError, KeyError):
        return data.encode()


def _compact(data: str) -> bytes:
    whole: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    if msgspec.json.decode(whole["__VERSION__"]) != FORMAT:
        return data.encode()
    grammar: dict[str, Any] = msgspec.json.decode(whole["grammar"], type=dict[str, msgspec.Raw])
    shared = bytes(grammar["complete_fsm"])
    automaton = msgspec.json.decode(shared, type=_Automaton)
    # A rule's entry is the automaton and two sizes.
    rules = msgspec.json.decode(grammar["per_rule_fsms"], type=list[list[_RuleAutomaton | int]])
    for rule in rules:
        for part in rule:
            if isinstance(part, _RuleAutomaton) and bytes(part.automaton) == shared:
                own = _reachable(automaton, part.start, part.ends)
                part.automaton = msgspec.Raw(msgspec.json.encode(own))
                part.edge_num = own.edge_num
    grammar["per_rule_fsms"] = rules
    whole["grammar"] = grammar
    return msgspec.json.encode(whole)


def _reachable(automaton: _Automaton, start: int, ends: list[int]) -> _Automaton:
    """The part of ``automaton`` that can be reached from the state ``start``, with entries up to the last of ``ends``,
    which the library expects to be states even if nothing reaches them."""
    edges, begins = automaton.edges.data_, automaton.edges.indptr_
    states, left = {start}, [start]
    while left:
        state = left.pop()
        for _, _, target in edges[begins[state] : begins[state + 1]]:
            if target not in states:
                states.add(target)
                left.append(target)
    first = min(states)
    own, own_begins = [], [0] * (first + 1)
    for state in range(first, max([*states, *ends]) + 1):
        if state in states:
            own += edges[begins[state] : begins[state + 1]]
        own_begins.append(len(own))
    return _Automaton(_Edges(own, own_begins), automaton.edge_aux_data, len(own))


def make_vocabulary(
    tokenizer_json: str, special_ids: Collection[int], vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """The bytes of each of a tokenizer's ``vocab_size`` tokens. ``tokenizer_json``: the tokenizer as the library
    ``tokenizers`` writes it. Special tokens have no bytes, so grammars allow of them ``eos_token_ids`` alone."""
    import xgrammar
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tokenizer_json)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = xgrammar.TokenizerInfo.from_huggingface(
        wrapped, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids) or None
    )
    texts = [""] * vocab_size
    for text, index in backend.get_vocab(with_added_tokens=True).items():
        if index < vocab_size and index not in special_ids:
            texts[index] = text
    return xgrammar.TokenizerInfo(
        texts,
        found.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
        add_prefix_space=found.add_prefix_space,
    )


def compile_grammar(
    vocabulary: xgrammar.TokenizerInfo,
    spec: GrammarSpec,
    max_whitespace: int | None,
    noted: Callable[[str], object] = lambda _: None,
) -> bytes:
    """The compiled grammar, serialised. ``max_whitespace``: see :func:`spec.max_whitespace`. ``noted``: see
    :func:`json_schema.enforced_schema`. Raises ValueError with the reason if the grammar is wrong or could not be
    enforced, and MemoryError if there is not enough memory."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    try:
        whole = _compiled(compiler, spec, max_whitespace, noted).serialize_json()
    # The library raises only the first; the second comes from a message of its that is cut within a character.
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(_reason(error)) from error
    data = compact(whole)
    try:
        compiled = _read_back(data, vocabulary)
    except RuntimeError:  # the library does not take the smaller form of this grammar
        data = whole.encode()
        compiled = _read_back(data, vocabulary)
    mask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
        raise ValueError("there is no text that satisfies it")
    _try_out(compiled, vocabulary)
    return data


def _read_back(data: bytes, vocabulary: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    """The grammar for the scheduler. Raises ValueError if it is too large, RuntimeError if the library refuses it."""
    import xgrammar

    if len(data) > MAX_COMPILED_BYTES:
        raise ValueError(
            f"the compiled grammar has {len(data)} bytes, at most {MAX_COMPILED_BYTES} are taken: make lengths and "
            "lists smaller"
        )
    return xgrammar.CompiledGrammar.deserialize_json(data.decode(), vocabulary)


def _try_out(compiled: xgrammar.CompiledGrammar, vocabulary: xgrammar.TokenizerInfo) -> None:
    """Draw some answers to measure the time that each token takes, which can be long if the grammar is ambiguous. In
    the server all other requests would wait. Raises ValueError if it is too long."""
    import xgrammar

    rng, excess_s = random.Random(0), 0.0
    num_words = -(-vocabulary.vocab_size // 32)
    usable = np.arange(32 * num_words) < vocabulary.vocab_size
    usable[list(vocabulary.stop_token_ids)] = False
    usable_words = np.packbits(usable, bitorder="little").view(np.int32)
    words = np.empty((1, num_words), np.int32)
    for _ in range(TRIAL_ANSWERS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(TRIAL_TOKENS):
            words.fill(-1)
            begin = time.thread_time()
            matcher.fill_next_token_bitmask(words, 0)
            filled = time.thread_time()
            allowed = words[0] & usable_words
            places = np.flatnonzero(allowed)
            if not len(places):
                break  # it ends here
            place = int(rng.choice(places))
            token = 32 * place + rng.choice([bit for bit in range(32) if int(allowed[place]) >> bit & 1])
            accepting = time.thread_time()
            # Not accepted if every token is allowed and this one has no text, which does not matter here.
            matcher.accept_token(token)
            took = filled - begin + time.thread_time() - accepting
            excess_s = max(0.0, excess_s + took - TRIAL_TOKEN_S)
            if excess_s > TRIAL_EXCESS_S:
                raise ValueError("its tokens take too long: make it less ambiguous")


def _reason(error: RuntimeError | UnicodeDecodeError) -> str:
    """The library's message, without the place in its source code at the beginning. Raises MemoryError if it says that
    memory was not enough."""
    text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    if "bad_alloc" in text:
        raise MemoryError from error
    _, of_source, rest = text.strip().rpartition(".cc:")
    return (rest.partition(": ")[2] if of_source else text).strip(" :\n")[:500]


def _compiled(
    compiler: xgrammar.GrammarCompiler, spec: GrammarSpec, max_whitespace: int | None, noted: Callable[[str], object]
) -> xgrammar.CompiledGrammar:
    match spec.kind:
        case "json_schema":
            enforced = enforced_schema(_parsed(spec.text), noted)
            if enforced.rules:
                return compiler.compile_grammar(_with_rules(enforced, max_whitespace))
            return compiler.compile_json_schema(
                json.dumps(enforced.schema),
                any_whitespace=max_whitespace != 0,
                max_whitespace_cnt=max_whitespace or None,
            )
        case "regex":
            check_pattern(spec.text)
            return compiler.compile_regex(spec.text)
        case "ebnf":
            return compiler.compile_grammar(spec.text)
        case "structural_tag":
            return compiler.compile_structural_tag(
                json.dumps(_enforced_tag(_current_tag(_parsed(spec.text)), 0, max_whitespace, noted))
            )


def _with_rules(enforced: Enforced, max_whitespace: int | None) -> str:
    """A schema as a grammar in the library's notation, with the rules that belong in it."""
    import xgrammar

    text = str(
        xgrammar.Grammar.from_json_schema(
            json.dumps(enforced.schema), any_whitespace=max_whitespace != 0, max_whitespace_cnt=max_whitespace or None
        )
    )
    for name, rules in enforced.rules.items():
        text = "\n".join((text.replace(json.dumps(json.dumps(name)), name), *rules))
    return text


def _current_tag(value: Any) -> Any:
    """``value``, a structural tag, with the older form, ``structures`` and ``triggers``, written as the current one."""
    if not isinstance(value, dict) or "structures" not in value or "format" in value:
        return value
    structures, triggers = value["structures"], value.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise ValueError('structures is a list of {"begin": ..., "schema": {...}, "end": ...}')
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema") or {}},
            "end": one.get("end"),
        }
        for one in structures
    ]
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _enforced_tag(value: Any, depth: int, max_whitespace: int | None, noted: Callable[[str], object]) -> Any:
    """``value``, a part of a structural tag, with its schemas rewritten as they are enforced and its patterns checked.
    In JSON ``max_whitespace`` characters of white space are allowed in one place, but at least one, unless the tag
    itself has a limit."""
    if depth > MAX_DEPTH:
        raise ValueError(f"tags may be nested {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_enforced_tag(one, depth + 1, max_whitespace, noted) for one in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for name, one in value.items():
        if name not in ("json_schema", "schema"):
            made[name] = _enforced_tag(one, depth + 1, max_whitespace, noted)
            continue
        enforced = enforced_schema(one, noted)
        if enforced.rules:
            if value.get("type") != "json_schema":
                raise ValueError("multipleOf with bounds or of decimals is not enforced within this kind of tag")
            most = value.get("max_whitespace_cnt", max_whitespace and max(max_whitespace, 1))
            return {"type": "grammar", "grammar": _with_rules(enforced, most)}
        made[name] = enforced.schema
    if value.get("type") == "json_schema" and max_whitespace is not None:
        made.setdefault("max_whitespace_cnt", max(max_whitespace, 1))
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        check_pattern(value["pattern"])
    return made
