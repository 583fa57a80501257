"""Compiled grammars in the scheduler's process, and where each request stands in its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from fenceline.constrained.spec import ThinkTokens

if TYPE_CHECKING:
    import xgrammar

I32 = npt.NDArray[np.int32]

_ALL = np.int32(-1)
# CPU time that a grammar may take: for each token, and beyond that in all. Ordinary ones take 50 us a token; an
# ambiguous one may take longer with every token, and everybody in the batch waits for it.
TOKEN_S = 0.002
EXCESS_S = 0.1


class GrammarStore:
    """The grammars that the front end has sent, until it says that it will not name them again.

    Taking one apart takes up to some hundred milliseconds and gives up the interpreter meanwhile: ``run_beside`` is how
    that is done; the scheduler's process has a thread for it.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.num_words = -(-vocab_size // 32)  # of a mask
        self._eos = tuple(eos_token_ids)
        self._grammars: dict[int, Future[xgrammar.CompiledGrammar]] = {}
        self._clocks: WeakValueDictionary[int, GrammarClock] = (
            WeakValueDictionary()
        )  # while requests hold them
        self._loading: list[tuple[str, Future[xgrammar.CompiledGrammar]]] = []
        self.run_beside: Callable[[Callable[[], None]], object] = lambda work: work()
        self._vocabulary: xgrammar.TokenizerInfo | None = None

    def prepare(self) -> None:
        """Import the library, which takes seconds, before anybody waits for a step."""
        import xgrammar  # noqa: F401

    def load(self, id: str, grammar: int, data: bytes, vocabulary: bytes, forgotten: Sequence[int]) -> None:
        """Take in ``grammar``; :meth:`loaded` tells when it is there, by ``id``. ``vocabulary``: with the first."""
        for number in forgotten:
            self._grammars.pop(number, None)  # it may never have come
        future: Future[xgrammar.CompiledGrammar] = Future()
        self._grammars[grammar] = future
        self._loading.append((id, future))
        self.run_beside(partial(self._read, data, vocabulary, future))

    @property
    def num_loading(self) -> int:
        """How many have not been told of yet."""
        return len(self._loading)

    def loaded(self) -> list[tuple[str, BaseException | None]]:
        """Those that are there since the last call, by id, and what went wrong."""
        if not self._loading:
            return []
        ended = [(id, future.exception()) for id, future in self._loading if future.done()]
        self._loading = [(id, future) for id, future in self._loading if not future.done()]
        return ended

    def begin(self, grammar: int, think: ThinkTokens | None) -> RequestGrammar:
        """A request's place at the beginning of ``grammar``. Waits for one that is still being taken apart."""
        import xgrammar

        compiled = self._grammars[grammar].result()
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not self._eos)
        clock = self._clocks.get(grammar)
        if clock is None or clock.is_over:  # its requests end; those that come now have another chance
            clock = self._clocks[grammar] = GrammarClock()
        return RequestGrammar(matcher, self._eos, think, clock)

    def _read(self, data: bytes, vocabulary: bytes, future: Future[xgrammar.CompiledGrammar]) -> None:
        try:
            import xgrammar

            if vocabulary:
                self._vocabulary = xgrammar.TokenizerInfo.deserialize_json(vocabulary.decode())
            assert self._vocabulary is not None, "the vocabulary comes with the first grammar"
            future.set_result(xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._vocabulary))
        except Exception as error:
            future.set_exception(error)


class GrammarClock:
    """The time that one grammar takes, for all requests that are there with it: a hundred of them together make others
    wait no longer than one. What one token takes less than it may is deducted from what others have taken more."""

    def __init__(self) -> None:
        self._excess_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has taken more time than others can be made to wait."""
        return self._excess_s > EXCESS_S

    @contextmanager
    def running(self) -> Iterator[None]:
        """One of the two things that a token takes: it is accepted, or the mask for it is filled."""
        begin = time.thread_time()
        yield
        self._excess_s = max(0.0, self._excess_s + time.thread_time() - begin - TOKEN_S / 2)


class RequestGrammar:
    """Which tokens may come next in one request. Its published tokens have been accepted, no others."""

    def __init__(
        self, matcher: Any, eos: tuple[int, ...], think: ThinkTokens | None, clock: GrammarClock
    ) -> None:
        """``matcher``: xgrammar's GrammarMatcher. ``eos``: the tokens that end an answer, when it may end. ``clock``:
        of the grammar."""
        self._matcher = matcher
        self._eos = eos
        self._think = think  # None once it is over
        self._in_thought = think is not None and think.is_open
        self._clock = clock

    @property
    def is_too_slow(self) -> bool:
        """Whether the grammar has taken more time than others can be made to wait."""
        return self._clock.is_over

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and its end has been accepted."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Go on by a token that was sampled; False if it is none that may come."""
        with self._clock.running():
            return self._accept(token)

    def _accept(self, token: int) -> bool:
        think = self._think
        if think is None:
            return bool(self._matcher.accept_token(token))
        if self._in_thought:
            if token == think.end:
                self._think, self._in_thought = None, False
            return token not in self._eos
        if token == think.start:
            self._in_thought = True
            return True
        self._think = None
        return bool(self._matcher.accept_token(token))

    def fill(self, words: I32, least_more: int) -> bool:
        """Write which tokens may come next, one bit each, to ``words`` [1, ceil(V / 32)] int32, all of which are set.

        ``least_more``: for how many tokens the answer is not to end yet, which it does all the same where nothing else
        may come. False if nothing may come at all.
        """
        if self._in_thought:
            _clear(words, self._eos)
            return True
        with self._clock.running():
            self._matcher.fill_next_token_bitmask(words, 0)
        if self._think is not None and self._think.start >= 0:
            words[0, self._think.start // 32] |= _bit(self._think.start)
        if least_more > 0:
            before = words.copy()
            _clear(words, self._eos)
            if not words.any():
                words[:] = before
        return bool(words.any())


def all_tokens(num_rows: int, num_words: int) -> I32:
    """Masks that allow everything, [num_rows, num_words]."""
    return np.full((num_rows, num_words), _ALL)


def _bit(token: int) -> np.int32:
    return np.int32((1 << token % 32) - (1 << 32) * (token % 32 == 31))


def _clear(words: I32, tokens: Sequence[int]) -> None:
    for token in tokens:
        words[0, token // 32] &= ~_bit(token)
