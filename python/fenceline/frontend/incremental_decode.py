"""Token ids to text, a few tokens at a time: a character split over tokens comes out whole.

Two ways. A byte-level or byte-fallback tokenizer is a table from ids to bytes, and decoding is a UTF-8
decoder fed with them: exact, and a fraction of a microsecond a token. Any other tokenizer is decoded in a
sliding window: the text of the last tokens with and without the news, the difference is new.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

from fenceline.frontend.tokenizer import Tokenizer
from fenceline.frontend.tokenizer_traits import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE_TOKENS = 8  # a character has at most four bytes: beyond this the bytes are simply invalid
_WINDOW_TOKENS = 8  # context that decides about spaces; more than any tokenizer looks back


class IncrementalDecoder(Protocol):
    """The decoder of one request."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete; however tokens are grouped, the concatenation is the same."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never completed."""
        ...


class DecoderFactory:
    """Makes a request's decoder; holds the tables shared by all requests of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        recipe = _recipe(tokenizer)
        self._table: list[bytes] | None = None
        self._strip_lead = False
        if recipe is not None:
            self._strip_lead = recipe.strip_lead
            self._table = _byte_table(tokenizer, recipe.byte_level)
            self._plain_table = [
                b"" if index in self._special_ids else piece for index, piece in enumerate(self._table)
            ]

    def make(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for the output that follows a prompt ending in ``prompt_tail``."""
        if self._table is None:
            return WindowDecoder(self._tokenizer, prompt_tail, skip_special_tokens)
        table = self._plain_table if skip_special_tokens else self._table
        before = b"".join([table[index] for index in prompt_tail if 0 <= index < len(table)])
        return ByteDecoder(table, before, strip_lead=self._strip_lead and not before)


class ByteDecoder:
    """Decodes by a table from ids to bytes. Ids outside the table are silent, as in ``tokenizers``."""

    __slots__ = ("_decode", "_strip_lead", "_table")

    def __init__(self, table: list[bytes], before: bytes, strip_lead: bool) -> None:
        self._table = table
        self._strip_lead = strip_lead
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode(before[-4:].lstrip(bytes(range(0x80, 0xC0))))  # a character the prompt left incomplete

    def feed(self, ids: Sequence[int]) -> str:
        """See :class:`IncrementalDecoder`."""
        table = self._table
        try:
            data = table[ids[0]] if len(ids) == 1 else b"".join([table[index] for index in ids])
        except IndexError:
            data = b"".join([table[index] for index in ids if index < len(table)])
        if self._strip_lead and data:
            self._strip_lead = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def flush(self) -> str:
        """See :class:`IncrementalDecoder`."""
        return self._decode(b"", True)


class WindowDecoder:
    """Decodes a sliding window of tokens twice, without and with the newest ones; the difference is new."""

    __slots__ = ("_ids", "_num_read", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail[-_WINDOW_TOKENS:])
        self._num_read = len(self._ids)  # tokens of the window whose text is out

    def feed(self, ids: Sequence[int]) -> str:
        """See :class:`IncrementalDecoder`. One by one, so that grouping makes no difference."""
        return "".join([self._feed_one(index) for index in ids])

    def flush(self) -> str:
        """See :class:`IncrementalDecoder`."""
        return self._take() if len(self._ids) > self._num_read else ""

    def _feed_one(self, index: int) -> str:
        self._ids.append(index)
        if len(self._ids) - self._num_read < _MAX_INCOMPLETE_TOKENS and self._text(self._ids).endswith(
            _REPLACEMENT
        ):
            return ""
        return self._take()

    def _take(self) -> str:
        before = self._text(self._ids[: self._num_read])
        text = self._text(self._ids)[len(before) :]
        del self._ids[:-_WINDOW_TOKENS]
        self._num_read = len(self._ids)
        return text

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)


class _Recipe:
    """How tokens become bytes: by GPT-2's byte alphabet, or as text with ``<0x..>`` bytes."""

    def __init__(self, byte_level: bool, strip_lead: bool) -> None:
        self.byte_level = byte_level
        self.strip_lead = strip_lead


def _recipe(tokenizer: Tokenizer) -> _Recipe | None:
    """The recipe of the tokenizer's decoder, None if it is neither of the two kinds."""
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return _Recipe(byte_level=True, strip_lead=False)
    if state["type"] != "Sequence":
        return None
    steps = state["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    replaces_space = steps[0]["pattern"] == {"String": "▁"} and steps[0]["content"] == " "
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if not replaces_space or steps[3:] not in ([], [strip]):
        return None
    return _Recipe(byte_level=False, strip_lead=bool(steps[3:]))


def _byte_table(tokenizer: Tokenizer, byte_level: bool) -> list[bytes]:
    """The bytes of every id, empty where there is no token."""
    table = [b""] * tokenizer.vocab_size
    alphabet = byte_alphabet()
    for piece, index in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        table[index] = _byte_level(piece, alphabet) if byte_level else _byte_fallback(piece)
    for index in tokenizer.backend.get_added_tokens_decoder():
        text = tokenizer.token_text(index)  # added tokens are text, whatever their letters mean as bytes
        if _REPLACEMENT not in text and not (not byte_level and text == ""):
            table[index] = text.encode()
    return table


def _byte_level(piece: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[letter] for letter in piece])
    except KeyError:
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()
