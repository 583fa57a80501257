"""Tokenising and detokenising beside the event loop, in pieces of some ten milliseconds.

Each request has one piece in work at a time. So requests take turns, however large they are, and work for a client that
has left ends with the piece in hand.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from fenceline.config import num_usable_cores
from fenceline.frontend.request_types import RequestError, not_unicode, shutting_down
from fenceline.frontend.tokenizer import PIECE_CHARS, Tokenizer
from fenceline.ipc.free_memory import trim_memory

T = TypeVar("T")
S = TypeVar("S", str, Sequence[int])

INLINE_CHARS = 2048  # so much is tokenised at once, on the loop: about half a millisecond
_INLINE_TEXTS, _INLINE_IDS = 16, 512
_PIECE_TEXTS = 256  # short texts in one piece
_PIECE_IDS = 1 << 14
_FEW_CHARS = 1 << 16  # texts of no more leave nothing behind that is worth a trim
_NICENESS = 10
_TRIM_BYTES, _TRIM_SOON_S, _TRIM_LATER_S = 8 << 20, 1.0, 4.0


def _yield_cores() -> None:
    """Let the event loop and an engine on a CPU come before this thread. Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


class TokenizePool:
    """The threads in which a tokenizer works. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Half of the cores that this process may use: where there are two, one is left to the scheduler.
        num_threads = min(4, max(1, num_usable_cores() // 2))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize", initializer=_yield_cores)
        self._memory = FreedMemory()
        self._closed = False

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int, max_total: int, truncate: bool = False
    ) -> list[Sequence[int]]:
        """The token ids of each text: a list or, of long texts, an array with 4 bytes for each id (a list takes 40).

        Raises RequestError as soon as a text that is tokenised in pieces has more than ``max_tokens``, or all texts
        together have more than ``max_total``, and for a string that is not valid Unicode.

        ``truncate``: return the first ``max_tokens`` of each text instead, the last of which are the special ones that
        end a text; the rest is not tokenised.
        """
        num_chars = sum(map(len, texts))
        inline = num_chars <= INLINE_CHARS and len(texts) <= _INLINE_TEXTS
        compact = num_chars > PIECE_CHARS
        encoded: list[list[int] | array[int]] = [array("i") if compact else [] for _ in texts]
        before, after = self._tokenizer.special_ids_around if add_special_tokens else ([], [])
        cut: set[int] = set()
        full: set[int] = set()  # texts that have enough tokens already
        total = 0
        try:
            for group in _grouped(self._pieces(texts, add_special_tokens, full), PIECE_CHARS, _PIECE_TEXTS):
                if inline:
                    found = self._encode(group)
                else:
                    found = await self._run(self._encode_batch, group)
                for piece, ids in zip(group, found, strict=True):
                    is_part = len(piece.content) < len(texts[piece.source])
                    if is_part and piece.source not in cut:
                        cut.add(piece.source)
                        encoded[piece.source].extend(before)
                    encoded[piece.source].extend(ids)
                    total += len(ids)
                    if is_part and len(encoded[piece.source]) > max_tokens:
                        if not truncate:
                            raise _too_many("the text has", max_tokens)
                        full.add(piece.source)
                if total > max_total:
                    raise _too_many("the texts together have", max_total)
            for index in cut:
                encoded[index].extend(after)
            for cut_off in encoded if truncate else ():
                if len(cut_off) > max_tokens:  # it ends as others do
                    del cut_off[max_tokens - len(after) :]
                    cut_off.extend(after)
            return list(encoded)
        finally:
            if num_chars > _FEW_CHARS:
                self._memory.freed(num_chars)

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
        if num_ids > _PIECE_IDS:
            self._memory.freed(8 * num_ids)
        return texts

    def close(self) -> None:
        """Stop. Requests that are not done get RequestError (503)."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        if self._closed:
            raise shutting_down()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise shutting_down() from None  # the piece was cancelled, not its caller
            raise

    def _encode(self, group: Sequence[_Piece[str]]) -> list[list[int]]:
        try:
            return [self._tokenizer.encode(piece.content, piece.special) for piece in group]
        except TypeError as error:  # a string that cannot be written as UTF-8
            raise not_unicode("text") from error

    def _encode_batch(self, group: Sequence[_Piece[str]]) -> list[list[int]]:
        """:meth:`_encode` without the GIL. With it, each system call of the event loop's thread, which releases the
        GIL, could take as long as the whole group."""
        ids: list[list[int]] = []
        try:
            for special, pieces in groupby(group, attrgetter("special")):
                ids += self._tokenizer.encode_batch([piece.content for piece in pieces], special)
        except TypeError as error:
            raise not_unicode("text") from error
        return ids

    def _pieces(self, texts: Sequence[str], add_special_tokens: bool, full: Container[int]) -> Iterator[_Piece[str]]:
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


class FreedMemory:
    """Decides when :func:`trim_memory` is worth its milliseconds: a second after 8 MiB have been freed, four seconds
    after less, and not more often. Lives on one event loop."""

    def __init__(self) -> None:
        self._num_bytes = 0  # freed since the last trim
        self._timer: asyncio.TimerHandle | None = None

    def freed(self, num_bytes: int) -> None:
        """``num_bytes`` have been freed, or are about to be."""
        self._num_bytes += num_bytes
        loop = asyncio.get_running_loop()
        when = loop.time() + (_TRIM_SOON_S if self._num_bytes >= _TRIM_BYTES else _TRIM_LATER_S)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._trim)

    def _trim(self) -> None:
        self._num_bytes, self._timer = 0, None
        asyncio.get_running_loop().run_in_executor(None, trim_memory)
