"""Incremental decoding: however the tokens are cut into messages, the text is that of decoding them at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level, word_piece
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.frontend.detokenizer_manager import ByteDecoder, DecoderFactory, IncrementalDecoder, WindowDecoder
from fenceline.frontend.tokenizer import Tokenizer

COMMON = st.sampled_from("the quickbrown fox.stop\n\t é漢字🙂🙃Ωμ\u200d\ufffd12+=")
TEXTS = st.text(COMMON | st.characters(codec="utf-8"), max_size=40)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece}[kind]()


@cache
def factory(kind: str) -> DecoderFactory:
    return DecoderFactory(tokenizer(kind))


def run(decoder: IncrementalDecoder, pieces: Sequence[Sequence[int]]) -> list[str]:
    return [*(decoder.feed(piece) for piece in pieces), decoder.flush()]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """``ids`` in consecutive pieces of the lengths ``cuts``, then one by one."""
    pieces, rest = [], ids
    for length in cuts:
        pieces.append(rest[:length])
        rest = rest[length:]
    return [*pieces, *([index] for index in rest)]


@given(st.data())
def test_any_tokens_of_a_byte_level_tokenizer_decode_as_at_once(data: st.DataObject) -> None:
    tok = tokenizer("byte_level")
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 4), max_size=8)))
    decoder = factory("byte_level").make([], skip)
    assert isinstance(decoder, ByteDecoder)
    assert "".join(run(decoder, pieces)) == tok.decode(ids, skip)


@given(TEXTS, st.lists(st.integers(0, 4), max_size=8))
def test_text_survives_a_byte_level_round_trip(text: str, cuts: list[int]) -> None:
    ids = tokenizer("byte_level").encode(text)
    parts = run(factory("byte_level").make([], False), cut(ids, cuts))
    assert "".join(parts) == text
    assert "".join(parts).count("\ufffd") == text.count("\ufffd")


@given(TEXTS, TEXTS, st.lists(st.integers(0, 4), max_size=8))
def test_output_after_a_prompt_is_what_the_prompt_does_not_have(prompt: str, text: str, cuts: list[int]) -> None:
    tok = tokenizer("byte_fallback")
    prompt_ids, ids = tok.encode("x" + prompt), tok.encode(text)
    decoder = factory("byte_fallback").make(prompt_ids[-8:], True)
    assert isinstance(decoder, ByteDecoder)
    whole = tok.decode([*prompt_ids, *ids])
    assert "".join(run(decoder, cut(ids, cuts))) == whole[len(tok.decode(prompt_ids)) :]


@given(TEXTS)
def test_first_space_of_a_sentencepiece_text_is_placed(text: str) -> None:
    tok = tokenizer("byte_fallback")
    bos = tok.backend.token_to_id("<s>")
    ids = tok.encode(text)
    assert "".join(run(factory("byte_fallback").make([bos], True), cut(ids, []))) == tok.decode(ids)


@given(st.data())
def test_window_decoder_equals_decoding_at_once(data: st.DataObject) -> None:
    tok = tokenizer("word_piece")
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), min_size=1, max_size=40))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 4), max_size=8)))
    decoder = factory("word_piece").make([], True)
    assert isinstance(decoder, WindowDecoder)
    assert "".join(run(decoder, pieces)) == tok.decode(ids)


@given(TEXTS, st.lists(st.integers(0, 4), max_size=8))
def test_window_decoder_keeps_characters_whole(text: str, cuts: list[int]) -> None:
    tok = tokenizer("byte_level")
    ids = tok.encode(text.replace("\ufffd", ""))
    parts = run(WindowDecoder(tok, [], True), cut(ids, cuts))
    assert "".join(parts) == text.replace("\ufffd", "")


def test_character_that_the_prompt_left_incomplete_is_completed() -> None:
    tok = tokenizer("byte_level")
    alphabet = {tok.token_text(index): index for index in range(tok.vocab_size)}
    byte_ids = [tok.backend.token_to_id(letter) for letter in ("Ċ", "ð", "Ł", "Ļ", "Ĥ")]  # newline, then 🙂
    assert None not in byte_ids, alphabet
    assert tok.decode(byte_ids) == "\n🙂"
    for split in range(2, 5):
        decoder = factory("byte_level").make(byte_ids[:split], True)
        assert "".join(run(decoder, [byte_ids[split:]])) == "🙂"


def test_incomplete_character_is_held_and_flushed_as_replacement() -> None:
    tok = tokenizer("byte_level")
    first_byte = tok.backend.token_to_id("ð")
    decoder = factory("byte_level").make([], True)
    assert decoder.feed([first_byte]) == ""
    assert decoder.flush() == "\ufffd"


def test_ids_outside_the_tokenizer_are_silent() -> None:
    tok = tokenizer("byte_level")
    ids = tok.encode("fox")
    decoder = factory("byte_level").make([], True)
    assert run(decoder, [[tok.vocab_size + 5], [*ids, tok.vocab_size]])[:2] == ["", "fox"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_table_agrees_with_the_tokenizer_on_every_single_token(kind: str) -> None:
    tok = tokenizer(kind)
    before = tok.encode("fox")
    for index in range(tok.vocab_size):
        expected = tok.decode([*before, index, *before], False)
        decoder = factory(kind).make([], False)
        assert "".join(run(decoder, [[*before, index, *before]])) == expected, tok.backend.id_to_token(index)


def test_a_piece_that_only_looks_like_a_byte_is_text() -> None:
    backend = RustTokenizer(models.WordLevel({"<0xZZ>": 0, "<0x41>": 1, "a": 2}, unk_token="a"))
    texts = TokenTexts(Tokenizer(backend))
    assert [texts.look_up(index)[1] for index in range(3)] == [b"<0xZZ>", b"A", b"a"]
