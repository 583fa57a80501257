"""A byte-level tokenizer for the tiny model's 64 tokens: letters, pairs of letters, and pieces of longer characters."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from fenceline.managers.tokenizer import Tokenizer
from fenceline.vgpu.proving.tiny_model import EOS_TOKEN, VOCAB_SIZE

_LETTERS = "abcdefghijklmnopqrstuvwxyz .,!"
_PAIRS = (*("th he in er an re on at en nd ti es or te of ed is it al ar st to nt".split()), "e ", " a")  # noqa: SIM905
_BYTES = (b"\xc3", b"\xa9", b"\xe2", b"\x82\xac", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x99\x82")
# The bytes of each id. The first, the end-of-sequence token, is special and makes no text.
PIECES = (b"", *(text.encode() for text in (*_LETTERS, *_PAIRS)), *_BYTES)
assert len(PIECES) == len(set(PIECES)) == VOCAB_SIZE and not PIECES[EOS_TOKEN], "one piece for each id"


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it, without merges: it only decodes."""
    # GPT-2's letters for bytes: printable Latin-1 stands for itself, the others follow U+0100 in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }
    vocab = {"".join(letters[byte] for byte in piece): id for id, piece in enumerate(PIECES) if piece}
    backend = RustTokenizer(models.BPE(vocab={"<end>": EOS_TOKEN, **vocab}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, {"eos_token": "<end>"})
