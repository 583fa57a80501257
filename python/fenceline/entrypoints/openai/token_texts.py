"""The bytes of single tokens, which logprobs report because a token may be half a character."""

from __future__ import annotations

import json

from fenceline.frontend.tokenizer import BYTE_TOKEN, Tokenizer, byte_alphabet


class TokenTexts:
    """Bytes and display texts of a tokenizer's tokens, computed once per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.backend.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = "ByteLevel" in kinds
        self._byte_alphabet = byte_alphabet()
        self._blank_marks = bool(kinds & {"Metaspace", "Replace"})
        self._cache: dict[int, tuple[str, bytes]] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of texts by ``skip_special_tokens``."""
        return token_id in self._tokenizer.special_ids

    def look_up(self, token_id: int) -> tuple[str, bytes]:
        """(display text, bytes). Bytes that are not whole characters are shown as ``bytes:\\xe2\\x82``."""
        known = self._cache.get(token_id)
        if known is None:
            raw = self._bytes(token_id)
            known = self._cache[token_id] = (_display(raw), raw)
        return known

    def _bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._tokenizer.backend.id_to_token(token_id)
        if piece is None:
            return b""  # the model's vocabulary may be padded beyond the tokenizer's
        if self._byte_level:
            table = self._byte_alphabet
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
        if byte := BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if self._blank_marks:
            return piece.replace("\u2581", " ").encode()
        return self._tokenizer.token_text(token_id).encode()


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _display(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
