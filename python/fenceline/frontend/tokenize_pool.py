"""Tokenising and detokenising beside the event loop, in pieces of some ten milliseconds.

A request has one piece in work at a time, so that requests take turns however large they are, and none goes on when its
caller has left.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from fenceline.frontend.request_types import RequestError, not_unicode
from fenceline.frontend.tokenizer import PIECE_CHARS, Tokenizer

T = TypeVar("T")
S = TypeVar("S", str, Sequence[int])

INLINE_CHARS = 2048  # so much is tokenised at once, on the loop: about half a millisecond
_INLINE_TEXTS, _INLINE_IDS = 16, 512
_PIECE_TEXTS = 256  # short texts in one piece
_PIECE_IDS = 1 << 14
_TRIM_CHARS = 1 << 20  # after so much, memory that the tokenizer has given back goes back to the system


class TokenizePool:
    """The threads in which a tokenizer works. Lives on one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Half of the cores, so that there is one for the scheduler where there are two.
        num_threads = min(4, max(1, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._closed = False

    async def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_tokens: int,
        max_total: int,
        truncate: bool = False,
    ) -> list[list[int]]:
        """The token ids of each text. Raises RequestError as soon as one that goes in pieces has more than
        ``max_tokens``, or all together more than ``max_total``, and for what is no Unicode text.

        ``truncate``: the first ``max_tokens`` of each text instead; what is behind them is not tokenised.
        """
        num_chars = sum(map(len, texts))
        inline = num_chars <= INLINE_CHARS and len(texts) <= _INLINE_TEXTS
        encoded: list[list[int]] = [[] for _ in texts]
        cut: set[int] = set()
        full: set[int] = set()  # texts of which no more is wanted
        total = 0
        try:
            for group in _grouped(self._pieces(texts, add_special_tokens, full), PIECE_CHARS, _PIECE_TEXTS):
                found = self._encode(group) if inline else await self._run(self._encode, group)
                for piece, ids in zip(group, found, strict=True):
                    encoded[piece.source] += ids
                    total += len(ids)
                    if len(piece.content) < len(texts[piece.source]):
                        cut.add(piece.source)
                        if len(encoded[piece.source]) > max_tokens:
                            if not truncate:
                                raise _too_many("the text has", max_tokens)
                            full.add(piece.source)
                if total > max_total:
                    raise _too_many("the texts together have", max_total)
            for index in cut if add_special_tokens else ():
                encoded[index] = self._tokenizer.with_special_ids(encoded[index])
            if truncate:
                encoded = [ids[:max_tokens] for ids in encoded]
        finally:
            if num_chars > _TRIM_CHARS:
                self._trim()
        return encoded

    async def decode(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids."""
        texts: list[str] = []
        pieces = (_Piece(index, ids, skip_special_tokens) for index, ids in enumerate(lists))
        num_ids = sum(map(len, lists))
        for group in _grouped(pieces, _PIECE_IDS, _PIECE_TEXTS):
            ids = [piece.content for piece in group]
            if num_ids <= _INLINE_IDS and len(lists) <= _INLINE_TEXTS:
                return self._tokenizer.decode_batch(ids, skip_special_tokens)
            texts += await self._run(self._tokenizer.decode_batch, ids, skip_special_tokens)
        if num_ids > _TRIM_CHARS // 4:
            self._trim()
        return texts

    def close(self) -> None:
        """Begin nothing more. Whoever still waits for a piece, or needs another one, gets RequestError (503)."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        if self._closed:
            raise _closing()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise _closing() from None  # the piece was cancelled, not its caller
            raise

    def _trim(self) -> None:
        if not self._closed:
            self._threads.submit(trim_memory)

    def _encode(self, group: Sequence[_Piece[str]]) -> list[list[int]]:
        try:
            return [self._tokenizer.encode(piece.content, piece.special) for piece in group]
        except TypeError as error:  # a string that cannot be written as UTF-8
            raise not_unicode("text") from error

    def _pieces(
        self, texts: Sequence[str], add_special_tokens: bool, full: Container[int]
    ) -> Iterator[_Piece[str]]:
        for index, text in enumerate(texts):
            if len(text) <= PIECE_CHARS:
                yield _Piece(index, text, add_special_tokens)
                continue
            try:
                for part in self._tokenizer.pieces(text):
                    if index in full:
                        break
                    yield _Piece(index, part, add_special_tokens and len(part) == len(text))
            except ValueError as error:
                raise RequestError(400, str(error), param="text") from error


class _Piece(NamedTuple, Generic[S]):
    """A text or a part of it, or a list of ids. ``special``: with special tokens."""

    source: int  # which of the texts or lists it is of
    content: S
    special: bool


def _grouped(pieces: Iterable[_Piece[S]], max_size: int, max_pieces: int) -> Iterator[list[_Piece[S]]]:
    """Consecutive pieces, at least one, that have together ``max_size`` characters or ids at most."""
    group: list[_Piece[S]] = []
    size = 0
    for piece in pieces:
        if group and (size + len(piece.content) > max_size or len(group) == max_pieces):
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece.content)
    if group:
        yield group


def _too_many(what: str, most: int) -> RequestError:
    return RequestError(
        400,
        f"{what} more than {most} tokens, this server takes at most {most}; shorten the prompt",
        param="prompt",
        code="context_length_exceeded",
    )


def _closing() -> RequestError:
    return RequestError(503, "the server is shutting down", code="shutting_down")


def trim_memory() -> None:
    """Give free memory of the C library back to the system. It keeps that otherwise, gigabytes of it in each thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
