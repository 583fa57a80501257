"""The tokenizer as the server uses it: the Rust one of ``tokenizers``, without transformers or torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from fenceline.config.model_files import is_file, read_optional
from fenceline.config.request_limits import MAX_UNBROKEN_CHARS

PIECE_CHARS = 1 << 15  # some ten milliseconds
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The files that have the vocabulary where there is no tokenizer.json.
_VOCABULARIES = ("*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_SHORT_CHARS = 2048  # below, the plain call costs less
# A batch call would take all cores for itself; how many threads tokenise is up to TokenizePool, unless the environment
# says otherwise.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A loaded tokenizer. ``special_tokens`` maps ``bos_token`` ... to texts, as chat templates read them;
    ``chat_template`` is the template that came with it, if any. Thread-safe; encoding a long text releases the GIL.
    ``max_token_chars``: the most characters that one token may stand for, None if that cannot be said."""

    def __init__(
        self, backend: RustTokenizer, special_tokens: dict[str, str] | None = None, chat_template: str | None = None
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
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """:meth:`encode` for each of ``texts``. Releases the GIL, which only the batch calls of tokenizers do."""
        batch = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    @property
    def takes_pieces(self) -> bool:
        """Whether :meth:`pieces` cuts long texts."""
        return self._cut is not None

    def pieces(self, text: str) -> Iterator[str]:
        """``text`` in parts of about :data:`PIECE_CHARS` characters. The ids of the parts (:meth:`encode` without
        special tokens), joined, are those of the whole text. It stays one part if this tokenizer does not guarantee
        that. Raises ValueError where there is no place to cut for :data:`MAX_UNBROKEN_CHARS`."""
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
        return self.backend.decode_batch([list(ids) for ids in lists], skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.backend.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load from a local directory with a ``tokenizer.json``, or from a GGUF file. A directory with only a sentencepiece
    model is converted by transformers, which costs its import. Its code is never run. Raises ValueError with the remedy
    without one."""
    folder = Path(path)
    config = read_optional(folder / "tokenizer_config.json")
    specials = _special_tokens(config, folder)
    template = _chat_template(config, folder)
    file = folder / "tokenizer.json"
    if not is_file(file):
        return Tokenizer(_convert(folder, config), specials, template)
    inside = None if folder.is_dir() else json.dumps(read_optional(file))
    try:
        backend = RustTokenizer.from_file(str(file)) if inside is None else RustTokenizer.from_str(inside)
    except Exception as error:  # of no class of its own
        raise ValueError(f"{file}: is no tokenizer ({error}); download the file again") from error
    return Tokenizer(backend, specials, template)


def gguf_for_transformers(path: str | Path, **options: object) -> Any:
    """The tokenizer of a GGUF file as transformers has it, which does not read such files; ``options`` are its."""
    from transformers import PreTrainedTokenizerFast

    ours = load_tokenizer(path)
    return PreTrainedTokenizerFast(
        tokenizer_object=ours.backend, chat_template=ours.chat_template, **ours.special_tokens, **options
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, folder: str) -> None:
    """Raises ValueError with the remedy if ``tokenizer``, from ``folder``, belongs to a model of another vocabulary
    than one of ``vocab_size`` tokens. Models may have rows that no token uses, and tokenizers a few tokens that only a
    vision tower reads: one in a hundred is allowed."""
    outside = sum(index >= vocab_size for index in tokenizer.backend.get_vocab(with_added_tokens=True).values())
    if outside * 100 <= vocab_size <= tokenizer.vocab_size * 2:
        return
    raise ValueError(
        f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model {vocab_size}: they do not belong"
        " together; point --tokenizer-path to the model's tokenizer or use --skip-tokenizer-init"
    )


def _convert(folder: Path, config: Mapping[str, object]) -> RustTokenizer:
    remedy = "point --tokenizer-path to a folder with a tokenizer.json or use --skip-tokenizer-init"
    # Without a vocabulary transformers would make a tokenizer of its special tokens alone.
    if not [path for pattern in _VOCABULARIES for path in sorted(folder.glob(pattern)) if is_file(path)]:
        raise ValueError(f"no tokenizer in {folder}: {remedy}")
    try:
        from transformers import AutoTokenizer

        # False: code from the folder is neither run nor offered on the terminal.
        backend: RustTokenizer | None = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )._tokenizer
        if backend is None:
            raise TypeError("it has no fast implementation")
        return backend
    except Exception as error:  # whatever transformers raises, the remedy is the same
        own_code = "auto_map" in config or "auto_map" in read_optional(folder / "config.json")
        reason = "it is code in that folder (auto_map), which is never run" if own_code else "it cannot be converted"
        raise ValueError(f"no tokenizer in {folder}: {reason}; {remedy} ({type(error).__name__})") from error


def _special_tokens(config: dict[str, object], folder: Path) -> dict[str, str]:
    merged = {**read_optional(folder / "special_tokens_map.json"), **config}
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
    if is_file(file):
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named templates: the default one
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


# --- what a tokenizer's parts say about every text: how much of it one token may stand for, and where it may be cut

# Both are derived from the kinds of normaliser, pre-tokenizer and model that are known here. For any other kind the
# answer is None, which is always right.

State = Mapping[str, object]

# How many characters of a text a normaliser may make one of: Unicode's longest canonical decomposition has four.
_SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_KEEPS_ALL = frozenset(("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Punctuation", "Split"))

# What the alternatives of a pre-tokenizer's pattern may be. None of them goes from a letter or digit on to one of
# _FOLLOWERS, looks back, or looks further ahead than one character after blank space.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_ALTERNATIVES = frozenset(
    (
        _CONTRACTION, *["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"],
        *_CASED, *(cased + _CONTRACTION + "?" for cased in _CASED),
        r" ?\p{L}+", r"\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\n", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"[^\S\n]+",
    )
)  # fmt: skip
# Letters and digits after which a text may be cut (blocks that hold nothing else), and what has to follow: blank space
# and punctuation that no normaliser joins with a letter. No apostrophe: patterns know contractions.
_WORD = (
    "0-9A-Za-z\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0400-\u0481\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_FOLLOWERS = ' \n!"#$%&()*+,-./:;<=>?@[\\]_{|}~\u3001\u3002\uff0c\uff01\uff1f\uff1a\uff1b'


def most_chars_per_token(backend: RustTokenizer) -> int | None:
    """The largest number of characters of any text that one token may stand for; None if it is not known."""
    shrink = _shrink(_state(backend.normalizer))
    if shrink is None or not all(_keeps_all(part) for part in _parts(_state(backend.pre_tokenizer))):
        return None
    # These take any number of blanks with them.
    if any(token.lstrip or token.rstrip for token in _added(backend)):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    if not _knows_every_character(backend, vocab):
        return None
    return shrink * max(map(len, vocab))


def cut_pattern(backend: RustTokenizer) -> re.Pattern[str] | None:
    """Matches, without any length, where a text may be cut: the token ids of the parts, without special tokens around
    them, are those of the whole. None if no such place is known."""
    followers = _followers(_parts(_state(backend.pre_tokenizer)))
    if followers is None or not all(part["type"] == "NFC" for part in _parts(_state(backend.normalizer))):
        return None
    kept = set(followers)
    for token in _added(backend):
        swallows_next = token.rstrip and re.search(f"[{_WORD}]$", token.content)
        if token.single_word or swallows_next:
            return None
        kept -= set(re.findall(f"(?<=[{_WORD}]).", token.content, re.DOTALL))
    return re.compile(f"(?<=[{_WORD}])(?=[{re.escape(''.join(sorted(kept)))}])") if kept else None


def _state(part: Any) -> State | None:
    """A part's settings as in tokenizer.json."""
    if part is None:
        return None
    state: State = json.loads(part.__getstate__())
    return state


def _parts(state: State | None) -> Sequence[State]:
    """The members of a sequence, or the one part; none for None."""
    if state is None:
        return ()
    if state["type"] != "Sequence":
        return (state,)
    members = state.get("normalizers") or state.get("pretokenizers") or []
    assert isinstance(members, list)
    return [part for member in members for part in _parts(member)]


def _added(backend: RustTokenizer) -> Sequence[AddedToken]:
    return list(backend.get_added_tokens_decoder().values())


def _shrink(state: State | None) -> int | None:
    shrink = 1
    for part in _parts(state):
        if part["type"] == "Replace":
            found, content = part["pattern"], part["content"]
            assert isinstance(found, dict) and isinstance(content, str)
            if len(found.get("String", ())) != 1 or not content:
                return None
            continue
        factor = _SHRINKS.get(str(part["type"]))
        if factor is None:
            return None
        shrink *= factor
    return shrink


def _keeps_all(part: State) -> bool:
    return part["type"] in _KEEPS_ALL and part.get("behavior") != "Removed"


def _knows_every_character(backend: RustTokenizer, vocab: Mapping[str, int]) -> bool:
    """Whether nothing becomes an unknown token, or none: each byte has a token of its own."""
    model = backend.model
    if type(model).__name__ not in ("BPE", "Unigram"):
        return False
    if any(part["type"] == "ByteLevel" for part in _parts(_state(backend.pre_tokenizer))):
        return type(model).__name__ == "BPE" and all(letter in vocab for letter in byte_alphabet())
    state: State = json.loads(model.__getstate__())
    return bool(state.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _followers(parts: Sequence[State]) -> str | None:
    """What may stand after a cut, for these pre-tokenizers; None if nothing may."""
    if len(parts) == 1 and parts[0]["type"] == "Metaspace":
        # Words begin with a blank, and a text that begins with one gets no other.
        return " " if parts[0].get("split") is True else None
    for part in parts:
        if part["type"] == "ByteLevel":
            if part["add_prefix_space"]:
                return None
        elif part["type"] == "Split":
            pattern = part["pattern"]
            assert isinstance(pattern, dict)
            known = _alternatives(pattern.get("Regex", "")) <= _ALTERNATIVES
            if not known or part["invert"] or part["behavior"] != "Isolated":
                return None
        elif part["type"] != "Digits":
            return None
    splits = any(part["type"] == "Split" or part.get("use_regex") for part in parts)
    return _FOLLOWERS if splits else None


def _alternatives(pattern: str) -> set[str]:
    """``pattern`` split at each | that is in no parentheses and no brackets."""
    found, depth, start = set(), 0, 0
    for index, char in enumerate(pattern):
        escaped = index > 0 and pattern[index - 1] == "\\"
        if char in "([" and not escaped:
            depth += 1
        elif char in ")]" and not escaped:
            depth -= 1
        elif char == "|" and depth == 0:
            found.add(pattern[start:index])
            start = index + 1
    found.add(pattern[start:])
    return found


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # what sentencepiece calls a byte that is in no other piece


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable Latin-1 stands for itself, the rest follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return letters
