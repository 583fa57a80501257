"""A grammar compiled for a vocabulary, in a process that may be killed at any time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fenceline.constrained.compact import compact
from fenceline.constrained.json_schema import MAX_DEPTH, enforced_schema
from fenceline.constrained.patterns import check_pattern
from fenceline.constrained.spec import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILED_BYTES = 16 << 20
# The trial of a grammar draws ``TRIAL_ANSWERS`` answers of up to ``TRIAL_TOKENS`` tokens. A token may take
# ``TRIAL_TOKEN_S`` of CPU time; beyond that all tokens together may take ``TRIAL_EXCESS_S``. Ordinary grammars take 50
# us a token.
TRIAL_ANSWERS, TRIAL_TOKENS = 2, 48
TRIAL_TOKEN_S, TRIAL_EXCESS_S = 0.002, 0.05


def make_vocabulary(
    tokenizer_json: str, special_ids: Collection[int], vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """The bytes of each of a tokenizer's ``vocab_size`` tokens. ``tokenizer_json``: the tokenizer as the library
    ``tokenizers`` writes it. Special tokens have no bytes, so no grammar allows them, except for ``eos_token_ids``,
    which end an answer."""
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
    vocabulary: xgrammar.TokenizerInfo, spec: GrammarSpec, max_whitespace: int | None
) -> bytes:
    """The compiled grammar, serialised. ``max_whitespace``: see :func:`spec.max_whitespace`.

    Raises ValueError with the reason if the grammar is wrong or could not be enforced, and MemoryError if there is not
    enough memory.
    """
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    try:
        whole = _compiled(compiler, spec, max_whitespace).serialize_json()
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
    """The grammar as the scheduler will have it. Raises ValueError if it is too large, and RuntimeError if the library
    does not take it."""
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
    compiler: xgrammar.GrammarCompiler, spec: GrammarSpec, max_whitespace: int | None
) -> xgrammar.CompiledGrammar:
    match spec.kind:
        case "json_schema":
            schema = json.dumps(enforced_schema(_parsed(spec.text)))
            return compiler.compile_json_schema(
                schema, any_whitespace=max_whitespace != 0, max_whitespace_cnt=max_whitespace or None
            )
        case "regex":
            check_pattern(spec.text, in_json=False)
            return compiler.compile_regex(spec.text)
        case "ebnf":
            return compiler.compile_grammar(spec.text)
        case "structural_tag":
            return compiler.compile_structural_tag(
                json.dumps(_enforced_tag(_parsed(spec.text), 0, max_whitespace))
            )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _enforced_tag(value: Any, depth: int, max_whitespace: int | None) -> Any:
    """``value``, a part of a structural tag, with its schemas rewritten as they are enforced and its patterns checked.
    In JSON ``max_whitespace`` characters of white space are allowed in one place, but at least one, unless the tag
    itself has a limit."""
    if depth > MAX_DEPTH:
        raise ValueError(f"tags may be nested {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_enforced_tag(one, depth + 1, max_whitespace) for one in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for name, one in value.items():
        if name in ("json_schema", "schema"):
            made[name] = enforced_schema(one)
        else:
            made[name] = _enforced_tag(one, depth + 1, max_whitespace)
    if value.get("type") == "json_schema" and max_whitespace is not None:
        made.setdefault("max_whitespace_cnt", max(max_whitespace, 1))
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        check_pattern(value["pattern"], in_json=False)
    return made
