"""The demo model's tokenizer: byte-level BPE in which every digit is a token, with the ChatML template."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .documents import END_OF_TEXT, IM_END, IM_START, ledger_document, short_document
from .items import NAMES, WORDS
from .tools import TAGS, tools_document

VOCAB_SIZE = 1024
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"

# A newline, a word with its space, a digit, punctuation with its space, other white space. There is no look-around, so
# that a text splits the same way from any boundary on, which the corpus encoder relies on.
_SPLIT = r"\n| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
_SPLIT_ASCII = re.compile(r"<\|[a-z_]+\|>|</?tool[a-z_]*>|\n| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9<]+|[^\S\n]+|<")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _sample_texts(seed: int, num_documents: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer:{seed}")
    for i in range(num_documents):
        document = ledger_document(rng, 500) if i % 3 == 0 else short_document(rng)
        yield re.sub(r"<\|[a-z_]+\|>", "", "".join(text for text, _ in document))
    # Names and words often follow a space; each of them should become few tokens.
    for _ in range(num_documents // 4):
        yield " " + " ".join(rng.sample(NAMES, 20) + rng.sample(WORDS, 60))


def _tool_texts(seed: int, num_documents: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer:{seed}")
    for _ in range(num_documents):
        text = "".join(text for text, _ in tools_document(rng))
        yield re.sub(r"<\|[a-z_]+\|>|</?tool[a-z_]*>", "", text)


def build_tokenizer(seed: int = 0, num_documents: int = 6000) -> Tokenizer:
    """Trains the tokenizer on a sample of the corpus; the same seed gives the same tokenizer."""
    return _train(_sample_texts(seed, num_documents), ())


def build_tools_tokenizer(seed: int = 0, num_documents: int = 6000) -> Tokenizer:
    """The tokenizer of demo-tools. The tags of tools are single tokens, which decoded texts show."""
    return _train(_tool_texts(seed, num_documents), TAGS)


def build_vision_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of demo-vision, half as large, for such ``texts``."""
    special = (*SPECIAL_TOKENS, VISION_START, IMAGE_PAD, VISION_END)
    return _train((re.sub(r"<\|[a-z_]+\|>", "", text) for text in texts), (), VOCAB_SIZE // 2, special)


def _train(
    texts: Iterator[str], added: Sequence[str], size: int = VOCAB_SIZE, special: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(added),
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in added])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int, chat_template: str = CHAT_TEMPLATE) -> None:
    """Writes tokenizer.json and tokenizer_config.json as `transformers` reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class FastEncoder:
    """Encodes corpus text (ASCII with special tokens) through a table of its pieces.

    It has the same results as the tokenizer on such text, and is several times faster on a repetitive corpus.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, which must start where the tokenizer splits."""
        out: list[int] = []
        table = self._ids
        for piece in _SPLIT_ASCII.findall(text):
            ids = table.get(piece)
            if ids is None:
                ids = table[piece] = self._tokenizer.encode(piece).ids
            out += ids
        return out
