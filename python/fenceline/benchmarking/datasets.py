"""Synthetic datasets: made from a seed on this machine, nothing is ever downloaded."""

from __future__ import annotations

import numpy as np

from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.dataset_files import conversations_from_file, requests_from_file
from fenceline.benchmarking.endpoints import backend_kind
from fenceline.benchmarking.records import BenchRequest, Content, Turn
from fenceline.benchmarking.tokenizer import Tokenizer, count_tokens
from fenceline.benchmarking.words import WORDS


def build_requests(args: BenchArgs, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    """The run's requests, a function of ``args`` (its seed included) and the tokenizer.

    Raises:
        ValueError: the dataset needs a tokenizer, or a file is unreadable or holds nothing usable.
    """
    rng = np.random.default_rng(args.seed)
    if args.dataset_name == "random-ids":
        return _random_ids(args, tokenizer, rng)
    if tokenizer is None:
        raise ValueError(
            f"--dataset-name {args.dataset_name} needs a tokenizer: pass --tokenizer DIR_OR_HUB_ID"
        )
    if args.dataset_name == "random":
        return _random(args, TextMaker(tokenizer, rng, args.tokenize_prompt), rng)
    if args.dataset_name == "generated-shared-prefix":
        return _shared_prefix(args, TextMaker(tokenizer, rng, args.tokenize_prompt), rng)
    if args.dataset_name == "multi-turn" and not args.dataset_path:
        return _multi_turn(args, TextMaker(tokenizer, rng, args.tokenize_prompt), rng)
    read = conversations_from_file if args.dataset_name == "multi-turn" else requests_from_file
    return read(args, tokenizer, rng)


class TextMaker:
    """Makes text of a wanted number of tokens out of plain words.

    Args:
        tokenizer: counts, and encodes where ids are wanted.
        rng: the run's generator; each call draws from it.
        as_ids: make token ids (exact lengths, no special tokens) instead of text.
    """

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._as_ids = as_ids
        costs = [len(tokenizer.encode(" " + word, add_special_tokens=False)) for word in WORDS]
        self._costs = np.asarray(costs, dtype=np.int64)
        self._num_special = count_tokens(tokenizer, "")
        self._cost_of = dict(zip(WORDS, costs, strict=True))
        self._cheap = np.flatnonzero(self._costs == self._costs.min())

    def content(self, num_tokens: int) -> Content:
        """Text (or ids) of ``num_tokens`` tokens, BOS and the like included where the tokenizer adds them."""
        if self._as_ids:
            ids = self._tokenizer.encode(" ".join(self._words(num_tokens)), add_special_tokens=False)
            return [ids[i % len(ids)] for i in range(num_tokens)]
        return " ".join(self._fitted(num_tokens))

    def count(self, content: Content) -> int:
        """Tokens of ``content`` as the server will count them."""
        return count_tokens(self._tokenizer, content) if isinstance(content, str) else len(content)

    def _words(self, num_tokens: int) -> list[str]:
        """Words whose costs sum to ``num_tokens`` or just above; at least one."""
        guess = max(1, num_tokens // int(self._costs.min()))
        drawn = self._rng.integers(0, len(WORDS), size=guess)
        sums = np.cumsum(self._costs[drawn])
        num = int(np.searchsorted(sums, num_tokens)) + 1
        return [WORDS[i] for i in drawn[:num]]

    def _fitted(self, num_tokens: int) -> list[str]:
        """Words whose joined text is ``num_tokens`` tokens long; off by a few only if words cannot make it."""
        words = self._words(max(1, num_tokens - self._num_special))
        for _ in range(8):  # tokens of neighbours may merge, so measure and correct
            excess = self.count(" ".join(words)) - num_tokens
            if excess == 0:
                break
            while excess > 0 and words:
                excess -= self._cost_of[words.pop()]
            while excess < 0 or not words:
                word = WORDS[int(self._rng.choice(self._cheap))]
                words.append(word)
                excess += self._cost_of[word]
        return words


def draw_lens(rng: np.random.Generator, full: int, range_ratio: float, num: int) -> list[int]:
    """``num`` lengths, uniform over [max(1, full * range_ratio), full]."""
    low = max(1, int(full * range_ratio))
    return [int(n) for n in rng.integers(low, full + 1, size=num)]


def _random(args: BenchArgs, maker: TextMaker, rng: np.random.Generator) -> list[BenchRequest]:
    input_lens = draw_lens(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    output_lens = draw_lens(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    contents = [maker.content(n) for n in input_lens]
    return [
        BenchRequest((Turn(content, maker.count(content), output_len),))
        for content, output_len in zip(contents, output_lens, strict=True)
    ]


def _random_ids(args: BenchArgs, tokenizer: Tokenizer | None, rng: np.random.Generator) -> list[BenchRequest]:
    input_lens = draw_lens(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    output_lens = draw_lens(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    if tokenizer is None and args.vocab_size is None:
        raise ValueError("--dataset-name random-ids needs --tokenizer DIR_OR_HUB_ID or --vocab-size N")
    vocab_size = args.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    special = tokenizer.all_special_ids if tokenizer else []
    allowed = np.setdiff1d(np.arange(vocab_size), np.asarray(special, dtype=np.int64))
    as_text = backend_kind(args.backend) == "chat"
    if as_text and tokenizer is None:
        raise ValueError(
            f"{args.backend} takes text only: pass --tokenizer so that random ids can be decoded"
        )
    requests = []
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        ids: Content = [int(i) for i in rng.choice(allowed, size=input_len)]
        content = tokenizer.decode(ids) if as_text and tokenizer and not isinstance(ids, str) else ids
        requests.append(BenchRequest((Turn(content, input_len, output_len),)))
    return requests


def _joined(head: Content, tail: Content) -> Content:
    if isinstance(head, str):
        assert isinstance(tail, str)
        return f"{head}\n\n{tail}"
    assert not isinstance(tail, str)
    return head + tail


def _shared_prefix(args: BenchArgs, maker: TextMaker, rng: np.random.Generator) -> list[BenchRequest]:
    """Groups of conversations that start with the same system prompt. --num-prompts does not apply."""
    num = args.gsp_num_groups * args.gsp_prompts_per_group
    system_lens = draw_lens(rng, args.gsp_system_prompt_len, args.gsp_range_ratio, args.gsp_num_groups)
    question_lens = draw_lens(rng, args.gsp_question_len, args.gsp_range_ratio, num * args.gsp_num_turns)
    output_lens = draw_lens(rng, args.gsp_output_len, args.gsp_range_ratio, num * args.gsp_num_turns)
    systems = [maker.content(n) for n in system_lens]
    requests = []
    for i in range(num):
        turns = []
        for turn in range(args.gsp_num_turns):
            k = i * args.gsp_num_turns + turn
            content = maker.content(question_lens[k])
            if turn == 0:
                content = _joined(systems[i // args.gsp_prompts_per_group], content)
            turns.append(Turn(content, maker.count(content), output_lens[k]))
        requests.append(BenchRequest(tuple(turns)))
    if args.gsp_ordered:
        return requests
    return [requests[i] for i in rng.permutation(num)]


def _multi_turn(args: BenchArgs, maker: TextMaker, rng: np.random.Generator) -> list[BenchRequest]:
    later_len = args.multi_turn_question_len or args.random_input_len
    requests = []
    for _ in range(args.num_prompts):
        lens = draw_lens(rng, args.random_input_len, args.random_range_ratio, 1)
        lens += draw_lens(rng, later_len, args.random_range_ratio, args.multi_turn_num_turns - 1)
        output_lens = draw_lens(rng, args.random_output_len, args.random_range_ratio, len(lens))
        contents = [maker.content(n) for n in lens]
        turns = [
            Turn(content, maker.count(content), output_len)
            for content, output_len in zip(contents, output_lens, strict=True)
        ]
        requests.append(BenchRequest(tuple(turns)))
    return requests
