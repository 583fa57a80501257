"""The tokenizer as the server uses it: the Rust one of ``tokenizers``, without transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from fenceline.config.request_limits import MAX_UNBROKEN_CHARS
from fenceline.frontend.tokenizer_traits import cut_pattern, most_chars_per_token

PIECE_CHARS = 1 << 15  # some ten milliseconds
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHORT_CHARS = 2048  # below, the plain call costs less


class Tokenizer:
    """A loaded tokenizer. ``special_tokens`` maps ``bos_token`` ... to texts, as chat templates read them;
    ``chat_template`` is the template that came with it, if any. Thread-safe; encoding a long text releases the GIL.

    ``max_token_chars``: the most characters that one token may stand for, None if that cannot be said.
    """

    def __init__(
        self,
        backend: RustTokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.max_token_chars = most_chars_per_token(backend)
        self._token_texts: dict[int, str] = {}  # of tokens that were asked for; at most the vocabulary
        self._cut = cut_pattern(backend)
        #: The special tokens that ``add_special_tokens`` puts before and after a text.
        self.special_ids_around = self._find_special_ids_around()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written in the text are recognised."""
        if len(text) <= _SHORT_CHARS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Only the batch calls of tokenizers release the GIL; without offsets they are faster, too.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @property
    def takes_pieces(self) -> bool:
        """Whether :meth:`pieces` cuts long texts."""
        return self._cut is not None

    def pieces(self, text: str) -> Iterator[str]:
        """``text`` in parts of about :data:`PIECE_CHARS` characters, whose ids (:meth:`encode` without special tokens)
        are together those of the whole, or as one part if that cannot be said of this tokenizer.

        Raises ValueError where there is no place to cut for :data:`MAX_UNBROKEN_CHARS`.
        """
        start = 0
        while self._cut is not None and len(text) - start > PIECE_CHARS:
            earliest = start + PIECE_CHARS
            found = self._cut.search(text, earliest, earliest + MAX_UNBROKEN_CHARS)
            if found is not None:
                yield text[start : found.start()]
                start = found.start()
            elif len(text) - earliest > MAX_UNBROKEN_CHARS:
                raise ValueError(
                    f"a text may have at most {MAX_UNBROKEN_CHARS} characters without space or punctuation"
                )
            else:
                break
        yield text[start:]

    def _find_special_ids_around(self) -> tuple[list[int], list[int]]:
        inner = self.backend.encode("a", add_special_tokens=False).ids
        outer = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(outer) - len(inner) + 1 if inner else 0):
            if outer[start : start + len(inner)] == inner:
                return outer[:start], outer[start + len(inner) :]
        self._cut = None  # where they would go is not known
        return [], []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, nothing cleaned up; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """:meth:`decode` for each of ``lists``. Releases the GIL."""
        return self.backend.decode_batch(
            [list(ids) for ids in lists], skip_special_tokens=skip_special_tokens
        )

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.backend.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load from a local directory with a ``tokenizer.json``.

    A directory with only a sentencepiece model is converted by transformers, which costs its import.
    Raises ValueError with the remedy if there is no tokenizer.
    """
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    specials = _special_tokens(config, folder)
    template = _chat_template(config, folder)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer(RustTokenizer.from_file(str(folder / "tokenizer.json")), specials, template)
    return Tokenizer(_convert(folder), specials, template)


def _convert(folder: Path) -> RustTokenizer:
    try:
        from transformers import AutoTokenizer

        backend: RustTokenizer | None = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        )._tokenizer
        if backend is None:
            raise TypeError("it has no fast implementation")
        return backend
    except Exception as error:  # whatever transformers raises, the remedy is the same
        raise ValueError(
            f"no tokenizer in {folder}: it needs a tokenizer.json; point --tokenizer-path to one or use "
            f"--skip-tokenizer-init ({type(error).__name__})"
        ) from error


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, object], folder: Path) -> dict[str, str]:
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    found = {}
    for name in _SPECIAL_NAMES:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _chat_template(config: dict[str, object], folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named templates: the default one
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
