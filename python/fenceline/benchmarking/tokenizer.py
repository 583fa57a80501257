"""The functions of a tokenizer that the benchmark needs, loaded without importing torch if possible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from fenceline.benchmarking.records import Message
from fenceline.config.gguf_file import is_gguf
from fenceline.frontend.tokenizer import gguf_for_transformers

# Tokens are only counted here, so transformers should not warn about texts longer than the model's context.
_NO_LIMIT = 10**30


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    vocab_size: int
    all_special_ids: list[int]
    chat_template: object

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a local directory, GGUF file or hub id. Raises ValueError with the remedy if that fails."""
    from transformers import PreTrainedTokenizerFast

    if is_gguf(Path(name)):
        return cast(Tokenizer, gguf_for_transformers(name, model_max_length=_NO_LIMIT))
    try:
        if not Path(name).is_dir() or (Path(name) / "tokenizer.json").is_file():
            # The fast class alone does not import torch; AutoTokenizer does, which costs seconds.
            return cast(Tokenizer, PreTrainedTokenizerFast.from_pretrained(name, model_max_length=_NO_LIMIT))
    except Exception:  # there is no tokenizer.json; AutoTokenizer below converts the tokenizer, or reports the reason
        pass
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, model_max_length=_NO_LIMIT)
        return cast(Tokenizer, tokenizer)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"cannot load the tokenizer {name!r} ({reason}): pass --tokenizer with a local directory or hub id"
        ) from error


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The number of tokens of ``text`` as a server counts them, including special tokens such as BOS."""
    return len(tokenizer.encode(text))
