"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made from."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
from gguf_files import tokenizer_metadata
from tiny_tokenizers import CORPUS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from fenceline.config import ConfigError
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import tokenizer_eos_id, tokenizer_vocab
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    *CORPUS[:3],
    "", " ", "  two", "12345 67.8", "I'M he'LL don't", "a\r\n\r\n b\n\n\n", "\t\tx = 1;\n",
    "naïve Ünïcödé 漢字かな 🙂🙃",
    "\u0065\u0301 combining", "<|im_end|>text<think> </think>", "HelloWORLD camelCase", "x" * 40, "a/b//c\n/", "…—–«»",
    "मनीष مرحبا שלום ไทย", "\x00\x7f\u200b\ufeff", "<s>not special</s>", "\u2581 blank \u2581\u2581",
]  # fmt: skip
# Pre-tokenizers as in the tokenizer.json of published models, by what llama.cpp calls them.
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _END
SPLITS = {
    "llama-bpe": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END,
    "qwen2": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END,
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_MARKS}",
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}|{_MARKS}",
    "smollm": None,
    "gpt-2": None,
}


def written(path: Path, metadata: Callable[[gguf.GGUFWriter], object]) -> Path:
    """A file with a tokenizer and hardly anything else."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata(writer)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(ours: Tokenizer, expected: Callable[[str], Sequence[int]], texts: Sequence[str] = TEXTS) -> None:
    for text in texts:
        assert ours.encode(text, add_special_tokens=False) == list(expected(text)), text


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizers(pre: str, tmp_path: Path) -> None:
    backend = RustTokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    pattern = SPLITS[pre]
    if pattern is not None:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), last])
    else:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, last])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, *TEXTS], trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = written(tmp_path / "model.gguf", tokenizer_metadata(tmp_path, pre))
    ours = load_tokenizer(path)
    assert_same(ours, lambda text: backend.encode(text, add_special_tokens=False).ids)
    assert ours.special_tokens == {"eos_token": "<|im_end|>"} and ours.chat_template == "{{ messages }}"
    assert ours.special_ids == {0, 1} and ours.special_ids_around == ([], [])
    assert tokenizer_eos_id(path) == 1
    vocab = tokenizer_vocab(path)
    assert vocab is not None and vocab == backend.get_vocab(with_added_tokens=True)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == backend.decode(ids)


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in [*CORPUS, *TEXTS[3:]] for line in text.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(
    model: sentencepiece.SentencePieceProcessor, **options: bool
) -> Callable[[gguf.GGUFWriter], None]:
    """As the conversion writes it, with a token that the user has added and one that fills a hole."""

    def kind(number: int) -> gguf.TokenType:
        if model.is_unknown(number):
            return gguf.TokenType.UNKNOWN
        if model.is_control(number):
            return gguf.TokenType.CONTROL
        return gguf.TokenType.BYTE if model.is_byte(number) else gguf.TokenType.NORMAL

    def add(writer: gguf.GGUFWriter) -> None:
        numbers = range(model.get_piece_size())
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*map(model.id_to_piece, numbers), "<tool>", "[PAD521]"])
        writer.add_token_scores([*map(model.get_score, numbers), -1000.0, -1000.0])
        writer.add_token_types([*map(kind, numbers), gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in options.items():
            getattr(writer, f"add_{name}")(value)

    return add


def test_sentencepiece_tokenizers(sentencepiece_model: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", sentencepiece_metadata(sentencepiece_model))
    ours = load_tokenizer(path)
    # sentencepiece takes special tokens in a text for letters, and one of their own alphabet for a space.
    texts = [text for text in TEXTS if text and "<s>" not in text and "\x00" not in text]
    assert_same(ours, sentencepiece_model.encode, texts)
    assert ours.special_ids_around == ([1], []) and ours.special_tokens["unk_token"] == "<unk>"
    for text in texts:
        assert ours.decode(ours.encode(text)) == sentencepiece_model.decode(sentencepiece_model.encode(text))
    last = sentencepiece_model.get_piece_size()
    assert ours.encode("<tool>", add_special_tokens=False) == [last] and ours.vocab_size == last + 1
    assert ours.decode([last]) == "<tool>"


def test_prefix_and_special_tokens_are_as_the_file_says(
    sentencepiece_model: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    options = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    ours = load_tokenizer(written(tmp_path / "a.gguf", sentencepiece_metadata(sentencepiece_model, **options)))
    assert ours.special_ids_around == ([], [2])
    with_prefix = load_tokenizer(written(tmp_path / "b.gguf", sentencepiece_metadata(sentencepiece_model)))
    for text in ("the fox", " the fox"):
        assert ours.encode(" " + text, False) == with_prefix.encode(text, False)
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_model": "t5"}, "its tokenizer is of the kind t5, which is not read (gpt2 and llama are); point"),
        ({"tokenizer_pre": "viking"}, "its pre-tokenizer viking is not known here; point --tokenizer-path"),
        ({"token_merges": None}, "its tokenizer has no merges; point --tokenizer-path"),
        ({"token_list": None}, "has no tokenizer; point --tokenizer-path"),
        ({"token_list": ["a", "a"]}, "a token of its tokenizer comes twice; point"),
        ({"token_types": [1]}, "its tokenizer has 2 tokens and 1 numbers as token_type; point"),
        ({"token_types": [math.inf, 1.0]}, "its tokenizer has 2 tokens and 1 numbers as token_type; point"),
        ({"tokenizer_model": "llama", "token_scores": [math.nan, 1.0]}, "its tokenizer has 2 tokens and 1 numbers as"),
        ({"token_list": ["a", "b" * 4097]}, "its tokenizer has a token of more than 4096 characters; point"),
    ],
)
def test_other_tokenizers_are_refused_with_the_remedy(change: dict[str, object], message: str, tmp_path: Path) -> None:
    entries: dict[str, object] = {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": ["a", "b"]}
    entries |= {"token_types": [1, 1], "token_merges": ["a b"], **change}

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in entries.items():
            if value is not None:
                getattr(writer, f"add_{name}")(value)

    path = written(tmp_path / "model.gguf", add)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_an_answer_ends_with_the_tokens_that_end_turns(tmp_path: Path) -> None:
    """But not with HTML's </s>, which is one of Gemma's tokens."""
    tokens = ["<|endoftext|>", "<|im_end|>", "</s>", "stop", "<turn>", "<eos>"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_block_count(1)
        writer.add_feed_forward_length(32)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 4, 1, 3, 1])
        writer.add_eot_token_id(4)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_uint32("general.sampling.top_k", 20)

    config = ModelConfig.from_dir(str(written(tmp_path / "model.gguf", add)))
    assert config.eos_token_ids == (0, 1, 4)
    assert config.sampling_defaults.as_dict() == {"temperature": 0.5, "top_k": 20}
