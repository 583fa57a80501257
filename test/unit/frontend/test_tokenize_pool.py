"""Texts in pieces: the ids of the whole, in bounded calls, and no further than somebody wants to know."""

from __future__ import annotations

import asyncio
import os
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CORPUS, byte_fallback, byte_level, word_piece
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.frontend import tokenize_pool, tokenizer
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenize_pool import TokenizePool
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LETTERS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_LETTERS}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def demo() -> Tokenizer:
    return load_tokenizer(resolve(ServerArgs(model_path="demo", device="cpu")).tokenizer_path)


@cache
def split_by(pattern: str) -> Tokenizer:
    """Byte-level BPE after a pattern, NFC before, BOS and EOS around, as Llama 3 and Qwen have it."""
    backend = RustTokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("the.end", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return Tokenizer(backend)


@cache
def metaspace() -> Tokenizer:
    """Unigram after Metaspace, as T5 has it."""
    backend = RustTokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend)


CUT: dict[str, Callable[[], Tokenizer]] = {
    "demo": demo, "byte_level": cache(byte_level), "llama3": lambda: split_by(LLAMA3), "o200k": lambda: split_by(O200K),
    "metaspace": metaspace,
}  # fmt: skip
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "byte_fallback": cache(byte_fallback),
    "word_piece": cache(word_piece),
    "unknown pattern": lambda: split_by(r"\S+ \S+|\s+"),
}

WORDS = st.one_of(
    st.sampled_from([
        "the", " quick", "it's", " I'LL", "don't.", " 12345", "漢字", "。", "かな", "café", "e\u0301", "\u0301", "\n",
        "\r\n", "  ", " ", "\t", "   x", "<|im_start|>", "<think>", "été ok", "the.end", "the", ".end", "<s>", "🙂",
        "ー", "3.14", "!?", "/\n", "\u1100\u1161", "a ", " ,", "_b", "\u00a0", "\u3000", "x" * 30,
    ]),
    st.text(max_size=6),
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=40).map("".join)


def encode(tokens: Tokenizer, texts: list[str], special: bool, limit: int = 10**9) -> list[list[int]]:
    async def run() -> list[list[int]]:
        pool = TokenizePool(tokens)
        try:
            return [list(ids) for ids in await pool.encode(texts, special, limit, 10**9)]
        finally:
            pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans(), size=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_pieces_have_the_ids_of_the_whole(name: str, texts: list[str], special: bool, size: int) -> None:
    tokens = {**CUT, **WHOLE}[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", size)
        patch.setattr(tokenize_pool, "PIECE_CHARS", size)
        patch.setattr(tokenize_pool, "INLINE_CHARS", 0)
        assert encode(tokens, texts, special) == [tokens.encode(text, special) for text in texts]


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@given(text=TEXTS)
@settings(max_examples=40, deadline=None)
def test_no_token_stands_for_more_characters_than_said(name: str, text: str) -> None:
    tokens = {**CUT, **WHOLE}[name]()
    most = tokens.max_token_chars
    assert (most is None) == (name in ("metaspace", "word_piece"))
    if most is not None:
        assert len(text) <= most * len(tokens.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", CUT)
def test_ordinary_text_is_cut_into_pieces(name: str) -> None:
    tokens = CUT[name]()
    text = "".join(CORPUS) * 1000
    parts = list(tokens.pieces(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= tokenizer.PIECE_CHARS + 100


class Calls:
    """What the tokenizer was given: characters, and by which threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.on_call: Callable[[], None] = lambda: None
        plain = Tokenizer.encode_batch

        def counted(tokens: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            self.sizes += map(len, texts)
            self.threads.add(threading.get_ident())
            self.on_call()
            return plain(tokens, texts, add_special_tokens)

        monkeypatch.setattr(Tokenizer, "encode_batch", counted)


def test_a_text_over_the_limit_is_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    with pytest.raises(RequestError, match="more than 20000 tokens") as caught:
        encode(demo(), ["the fox, " * 1_000_000], True, limit=20_000)
    assert caught.value.code == "context_length_exceeded"
    assert max(calls.sizes) < 40_000
    assert sum(calls.sizes) < 200_000


def test_a_text_without_a_place_to_cut_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    with pytest.raises(RequestError, match="characters without space"):
        encode(demo(), ["a" * 1_000_000], True)
    assert calls.sizes == []


async def test_many_texts_leave_the_loop_and_the_requests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has one call for all threads in work: another one's is at most one call per request later."""
    calls = Calls(monkeypatch)
    pool = TokenizePool(demo())
    ended: list[str] = []

    async def one(name: str, texts: list[str]) -> None:
        await pool.encode(texts, True, 10**9, 10**9)
        ended.append(name)

    large = asyncio.ensure_future(one("large", ["the fox"] * 4000))
    await asyncio.sleep(0)
    await one("small", ["the fox"] * 20)
    assert ended == ["small"]
    await large
    assert threading.get_ident() not in calls.threads
    pool.close()


async def test_what_leaves_the_loop_does_not_hold_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop would wait for it after each of its system calls. Only the library's batch calls release it."""
    holders: set[int] = set()

    def encode_holding_the_lock(tokens: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        holders.add(threading.get_ident())
        return []

    monkeypatch.setattr(Tokenizer, "encode", encode_holding_the_lock)
    pool = TokenizePool(demo())
    await pool.encode(["the fox"] * 4000, True, 10**9, 10**9)
    await pool.encode(["the fox, " * 10_000], True, 10**9, 10**9)
    pool.close()
    assert not holders


async def test_ids_of_a_long_text_take_four_bytes_each() -> None:
    """As Python numbers in a list they would take forty, which hundreds of requests do not give back at once."""
    pool = TokenizePool(demo())
    text = "the fox and the ledger, 12; " * 10_000
    expected = demo().encode(text)
    tracemalloc.start()
    [ids] = await pool.encode([text], True, 10**9, 10**9)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pool.close()
    assert list(ids) == expected
    assert num_bytes < 6 * len(expected)


@pytest.mark.parametrize("num_words", [30, 30_000])
async def test_a_text_that_is_cut_off_ends_as_others_do(num_words: int) -> None:
    """The state of the last token may be all that is wanted of it."""
    pool = TokenizePool(split_by(LLAMA3))
    text = "fox " * num_words
    whole = split_by(LLAMA3).encode(text)
    [ids] = await pool.encode([text], True, 10, 10**9, truncate=True)
    pool.close()
    assert list(ids) == [*whole[:9], whole[-1]] and whole[-1] == 1


async def test_threads_leave_a_core_of_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the machine has: the scheduler works on one of them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    calls, pool = Calls(monkeypatch), TokenizePool(demo())
    await asyncio.gather(*(pool.encode(["the fox"] * 500, True, 10**9, 10**9) for _ in range(16)))
    pool.close()
    assert len(calls.threads) == 1


async def test_nothing_more_is_tokenised_for_a_caller_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    begun = threading.Event()
    calls.on_call = begun.set
    pool = TokenizePool(demo())
    work = asyncio.ensure_future(pool.encode(["the fox, " * 1_000_000], True, 10**9, 10**9))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    pool._threads.shutdown(wait=True)
    assert len(calls.sizes) <= 2


@given(st.lists(st.lists(st.integers(0, 1023), max_size=20), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_lists_of_ids_are_decoded_as_one_by_one(lists: list[list[int]]) -> None:
    async def run() -> list[str]:
        pool = TokenizePool(demo())
        try:
            return await pool.decode(lists, True)
        finally:
            pool.close()

    assert asyncio.run(run()) == [demo().decode(ids) for ids in lists]
