"""A grammar compiled for a vocabulary, in a process that may be killed at any time."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from fenceline.constrained.json_schema import MAX_DEPTH, enforced_schema
from fenceline.constrained.patterns import check_pattern
from fenceline.constrained.spec import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILED_BYTES = 16 << 20


def make_vocabulary(
    tokenizer_json: str, special_ids: Collection[int], vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """The bytes of each of the ``vocab_size`` tokens of a tokenizer, ``tokenizer_json`` as the library ``tokenizers``
    writes it. Special tokens have none: no grammar lets them be sampled, but for ``eos_token_ids``, which end an
    answer."""
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

    Raises ValueError with the reason where it is wrong or would not be enforced, and MemoryError where it needs more
    than there is.
    """
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    try:
        compiled = _compiled(compiler, spec, max_whitespace)
        data: str = compiled.serialize_json()
    except (
        RuntimeError,
        UnicodeDecodeError,
    ) as error:  # the library's only kind, and one that ends within a character
        raise ValueError(_reason(error)) from error
    if len(data) > MAX_COMPILED_BYTES:
        raise ValueError(
            f"the compiled grammar has {len(data)} bytes, at most {MAX_COMPILED_BYTES} are taken: make lengths and "
            "lists smaller"
        )
    mask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
        raise ValueError("there is no text that satisfies it")
    return data.encode()


def _reason(error: RuntimeError | UnicodeDecodeError) -> str:
    """What the library says, without the place in its source code that it begins with. Raises MemoryError."""
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
        raise ValueError(f"it is no JSON: {error}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _enforced_tag(value: Any, depth: int, max_whitespace: int | None) -> Any:
    """``value``, a part of a structural tag, whose schemas and patterns are those that are enforced. At least one
    character of white space is allowed, and no more than ``max_whitespace``, unless the tag says so itself."""
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
