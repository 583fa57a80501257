"""Tiny real tokenizers, trained by the test: byte-level BPE, sentencepiece-like with byte fallback, WordPiece."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from fenceline.frontend.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog. 12 + 30 = 42, isn't it?",
    "naïve café 漢字 かな 🙂🙃 Ωμέγα — the end.\n\n\tdef f(x):\n        return x\n",
    "stop STOP stopping, stopped; once upon a time there was a stop sign",
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen. One added token has letters that stand for bytes in GPT-2's
    alphabet."""
    backend = RustTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("été ok", special=False)])
    return Tokenizer(backend, {"eos_token": SPECIALS[2]})


def byte_fallback() -> Tokenizer:
    """A tokenizer like those of Llama 2 and Mistral: spaces are ▁, unknown characters are <0x..> bytes."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    words = ["▁the", "▁quick", "▁fox", "▁", "the", "stop", "▁stop", "fox", "▁▁", *"stopeé漢."]
    pieces += [(word, -float(rank + 1)) for rank, word in enumerate(words)]
    backend = RustTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>"})


def word_piece() -> Tokenizer:
    """A tokenizer whose tokens have no fixed bytes: whether a space precedes a piece depends on the piece."""
    words = sorted({word for line in CORPUS for word in line.split()})
    letters = sorted({letter for word in words for letter in word})
    vocab = ["[UNK]", *letters, *[f"##{letter}" for letter in letters], *[w for w in words if len(w) > 1]]
    backend = RustTokenizer(
        models.WordPiece({word: index for index, word in enumerate(dict.fromkeys(vocab))}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return Tokenizer(backend)
