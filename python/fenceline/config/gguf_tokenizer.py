"""The vocabulary of a GGUF file as the files of a tokenizer, tokenizer.json and tokenizer_config.json.

The two kinds that the served families have: byte-level BPE with merges ("gpt2"), and sentencepiece's BPE with scores
and byte fallback ("llama"), whose merges follow from the scores.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fenceline.config import ConfigError
from fenceline.config.gguf_file import GGUFArray, Value

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_PADDING = re.compile(r"\[PAD\d+\]")  # conversions fill holes with these, which are no tokens
_MOST_CHARS = 4096  # of a token: far beyond any, and to find the halves of long ones takes long
_BLANK = "\u2581"  # sentencepiece's for a space
# Tokens that end a turn or a text, by which llama.cpp knows them too. Files often name only one as the end.
_STOPS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>",
        "<|end_of_text|>", "<eos>", "[EOS]", "[EOT]", "[e~[",
    )
)  # fmt: skip

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_MARKS}|{_END}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_MARKS}|{_END}"
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{'|'.join(_CASED)}|\p{{N}}|{_SLASHES}|{_END}"
_GPT_4O = rf"{'|'.join(f'{cased}{_CONTRACTIONS}?' for cased in _CASED)}|\p{{N}}{{1,3}}|{_SLASHES}|{_END}"
# Patterns by the name of the pre-tokenizer: where a text is split before merges. None: GPT-2's own; "digits": the same
# after each digit has been split off.
_PATTERNS: Mapping[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA_3),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), "digits"),
    **dict.fromkeys(("gpt-2", "olmo", "exaone4", "phi-2", "mellum"), None),
    "seed-coder": _SEED,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT_4O),
}
# Texts that are a token are not taken apart, and begin with a BOS unless the file says otherwise.
_WHOLE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
_ELSEWHERE = "point --tokenizer-path to a folder with the model's tokenizer.json"


class Vocabulary:
    """The tokens of the file at ``path``. Raises ``ConfigError``, one line with the file and the remedy, when something
    is asked for that the file does not have."""

    def __init__(self, path: Path, metadata: Mapping[str, Value | GGUFArray]) -> None:
        self._path = path
        self._metadata = metadata

    def _get(self, key: str) -> Value | GGUFArray | None:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _list(self, key: str) -> list[Value] | None:
        found = self._get(key)
        return found.values() if isinstance(found, GGUFArray) else None

    def _numbers(self, key: str) -> list[float] | None:
        values = self._list(key)
        if values is None:
            return None
        numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if len(numbers) < max(len(values), len(self.tokens)):
            raise self._refusal(f"its tokenizer has {len(self.tokens)} tokens and {len(numbers)} numbers as {key}")
        return numbers

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self._path}: {why}; {_ELSEWHERE}")

    def _id(self, name: str, default: int | None = None) -> int | None:
        found = self._get(f"{name}_token_id")
        number = found if isinstance(found, int) and not isinstance(found, bool) else default
        return number if number is not None and 0 <= number < len(self.tokens) else None

    @functools.cached_property
    def tokens(self) -> Sequence[str]:
        """All tokens by their ids; empty if the file has none."""
        tokens = [str(token) for token in self._list("tokens") or []]
        if max(map(len, tokens), default=0) > _MOST_CHARS:
            raise self._refusal(f"its tokenizer has a token of more than {_MOST_CHARS} characters")
        return tokens

    @functools.cached_property
    def _types(self) -> Sequence[int]:
        types = self._numbers("token_type")
        return [_NORMAL] * len(self.tokens) if types is None else [int(kind) for kind in types]

    @property
    def _is_sentencepiece(self) -> bool:
        return self._get("model") == "llama"

    @property
    def bos_id(self) -> int | None:
        return self._id("bos", 1 if self._is_sentencepiece else None)

    @property
    def eos_id(self) -> int | None:
        return self._id("eos", 2 if self._is_sentencepiece else None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        named = {self.eos_id, self._id("eot"), self._id("eom")}
        known = {
            number
            for number, (token, kind) in enumerate(zip(self.tokens, self._types, strict=False))
            if token in _STOPS and kind == _CONTROL
        }
        return tuple(sorted(number for number in named | known if number is not None))

    def tokenizer_config(self) -> dict[str, object]:
        """tokenizer_config.json, with the chat template."""
        unknown = self._id("unknown", 0 if self._is_sentencepiece else None)
        ids = {"bos": self.bos_id, "eos": self.eos_id, "unk": unknown, "pad": self._id("padding")}
        specials = {f"{name}_token": self.tokens[number] for name, number in ids.items() if number is not None}
        ending = {} if self.eos_id is None else {str(self.eos_id): {"content": self.tokens[self.eos_id]}}
        template = self._metadata.get("tokenizer.chat_template")
        return {
            **specials,
            "added_tokens_decoder": ending,
            **({"chat_template": template} if isinstance(template, str) else {}),
        }

    def tokenizer(self) -> dict[str, object]:
        """tokenizer.json. Raises ``ConfigError`` for kinds of tokenizers that are not known here."""
        kind, pre = self._get("model"), self._get("pre")
        if not self.tokens:
            raise self._refusal("has no tokenizer")
        if kind not in ("gpt2", "llama"):
            raise self._refusal(f"its tokenizer is of the kind {kind}, which is not read (gpt2 and llama are)")
        if kind == "gpt2" and pre not in _PATTERNS:
            raise self._refusal(f"its pre-tokenizer {pre} is not known here")
        texts = [self._text(number) for number in range(len(self.tokens))]
        vocab = {text: number for number, text in enumerate(texts) if text is not None}
        if len(vocab) < sum(text is not None for text in texts):
            raise self._refusal("a token of its tokenizer comes twice")
        added = [
            {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": self._types[number] != _USER_DEFINED}
            for number, text in enumerate(texts)
            if text and self._types[number] in _ADDED
        ]
        parts = self._sentencepiece(vocab) if kind == "llama" else self._byte_level(vocab, str(pre))
        around = self._around(str(pre))
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts} | around

    def _text(self, number: int) -> str | None:
        """A token as it is in tokenizer.json; None: it is there to fill a hole."""
        text, kind = self.tokens[number], self._types[number]
        if kind == _UNUSED and _PADDING.fullmatch(text):
            return None
        # They are found in texts in which spaces have not been replaced yet.
        return text.replace(_BLANK, " ") if kind == _USER_DEFINED and self._is_sentencepiece else text

    def _around(self, pre: str) -> dict[str, object]:
        """What is put around a text."""
        by_default = self._is_sentencepiece or pre in _WHOLE
        pieces: list[object] = [{"Sequence": {"id": "A", "type_id": 0}}]
        used: dict[str, object] = {}
        for name, number, default in (("bos", self.bos_id, by_default), ("eos", self.eos_id, False)):
            asked = self._get(f"add_{name}_token")
            if number is not None and (default if asked is None else asked):
                token = self.tokens[number]
                pieces.insert(0 if name == "bos" else len(pieces), {"SpecialToken": {"id": token, "type_id": 0}})
                used[token] = {"id": token, "ids": [number], "tokens": [token]}
        if not used:
            return {"post_processor": None}
        pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
        return {
            "post_processor": {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": used}
        }

    def _byte_level(self, vocab: Mapping[str, int], pre: str) -> dict[str, object]:
        merges = self._list("merges")
        if merges is None:
            raise self._refusal("its tokenizer has no merges")
        pairs = [str(merge).partition(" ")[::2] for merge in merges]
        pattern = _PATTERNS[pre]
        own = pattern is None or pattern == "digits"
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": own}
        first: list[object] = []
        if pattern == "digits":
            first = [{"type": "Digits", "individual_digits": True}]
        elif pattern is not None:
            split = {"Regex": pattern}
            first = [{"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False}]
        return {
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, last]},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": _bpe(vocab, pairs, ignore_merges=pre in _WHOLE),
        }

    def _sentencepiece(self, vocab: Mapping[str, int]) -> dict[str, object]:
        scores = self._numbers("scores")
        if scores is None:
            raise self._refusal("its tokenizer has no scores")
        normal = {token: number for token, number in vocab.items() if self._types[number] == _NORMAL}
        # A merge ranks as high as what it makes. Of several that make the same, that of the smaller ids comes first.
        pairs: list[tuple[str, str]] = []
        for token, _ in sorted(normal.items(), key=lambda item: (-scores[item[1]], item[1])):
            halves = [
                (normal[first], normal[second], first, second)
                for cut in range(1, len(token))
                if (first := token[:cut]) in normal and (second := token[cut:]) in normal
            ]
            pairs += [(first, second) for _, _, first, second in sorted(halves)]
        replace: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
        back: list[object] = [
            {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._get("add_space_prefix") is not False:
            replace = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _BLANK}, replace]}
            back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._id("unknown", 0)
        named = None if unknown is None else self.tokens[unknown]
        return {
            "normalizer": replace,
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": back},
            "model": _bpe(vocab, pairs, unk_token=named, fuse_unk=True, byte_fallback=True),
        }


def _bpe(vocab: Mapping[str, int], merges: Sequence[Sequence[str]], **changes: object) -> dict[str, object]:
    model: dict[str, object] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": dict(vocab), "merges": [list(pair) for pair in merges],
    }  # fmt: skip
    return model | changes
