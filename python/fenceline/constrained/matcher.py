"""Compiled grammars in the scheduler's process, and the state of each request in its grammar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from fenceline.constrained.spec import GRAMMAR_REMEDY, MAX_HEADER_TOKENS, ThinkTokens

if TYPE_CHECKING:
    import xgrammar

I32 = npt.NDArray[np.int32]

_ALL = np.int32(-1)
# Requests of one grammar whose masks a thread fills, or whose tokens it accepts, before the grammar's time is checked
# again.
_AT_ONCE = 8
# Seconds of CPU time that a grammar may take: for each token, and beyond that in all. Ordinary grammars take 50 us a
# token. An ambiguous one may take longer with every token, and all requests of the batch wait for it.
TOKEN_S = 0.002
EXCESS_S = 0.1


class _NoTransformers(ModuleType):
    """In the place of transformers while the library is imported, which names types of tokenizers there. Nobody gives
    it one here, and the import takes half a second."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class GrammarStore:
    """The grammars that the front end has sent, each until the front end says that it will not use it again.
    Deserialising a grammar takes up to some hundred milliseconds, during which the interpreter lock is free:
    ``run_in_background`` does it. The scheduler's process has a thread for it."""

    def __init__(self, eos_token_ids: Sequence[int], decides: bool = True) -> None:
        """``decides``: whether the requests of a grammar that has taken too much time end at once. With several ranks
        no rank decides by its own clock, see :meth:`overdue`."""
        self._decides = decides
        self._eos = tuple(eos_token_ids)
        self._all_eos = frozenset(eos_token_ids)
        self._grammars: dict[int, Future[xgrammar.CompiledGrammar]] = {}
        # A clock lives as long as a request has it.
        self._clocks: WeakValueDictionary[int, GrammarClock] = WeakValueDictionary()
        # Those that :meth:`loaded` has not returned yet.
        self.loading: list[tuple[str, Future[xgrammar.CompiledGrammar]]] = []
        self.run_in_background: Callable[[Callable[[], None]], object] = lambda work: work()
        self._vocabulary: xgrammar.TokenizerInfo | None = None
        self._batch: xgrammar.BatchGrammarMatcher | None = None
        self._num_helpers = 0
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def prepare(self) -> None:
        """Import the library now, before a request has to wait for it. This may take seconds and holds the interpreter
        lock for most of them, so another thread would not help. Raises ValueError with the remedy if that fails."""
        has_transformers = "transformers" in sys.modules
        if not has_transformers:
            sys.modules["transformers"] = _NoTransformers("transformers")
        try:
            import xgrammar  # noqa: F401
        except ImportError as error:
            raise ValueError(f"--grammar-backend xgrammar: it cannot be used ({error}): {GRAMMAR_REMEDY}") from error
        finally:
            if not has_transformers:
                del sys.modules["transformers"]

    def use_threads(self, num: int) -> None:
        """From now on ``num`` threads, the caller's included, fill masks; to be called once. The library could use
        threads of its own, but starts new ones with each call, and their time is not counted."""
        self._num_helpers = num - 1
        for index in range(num - 1):
            Thread(target=self._help, name=f"masks-{index}", daemon=True).start()

    def load(self, id: str, grammar: int, data: bytes, vocabulary: bytes, forgotten: Sequence[int]) -> None:
        """Start to load ``grammar`` from ``data``; :meth:`loaded` returns ``id`` when that is done. ``vocabulary``:
        given with the first grammar, else empty. ``forgotten``: grammars that are not needed any more."""
        for number in forgotten:
            self._grammars.pop(number, None)  # it may never have been sent
        future: Future[xgrammar.CompiledGrammar] = Future()
        self._grammars[grammar] = future
        self.loading.append((id, future))
        self.run_in_background(partial(self._read, data, vocabulary, future))

    def loaded(self) -> list[tuple[str, BaseException | None]]:
        """The ids of grammars whose loading has ended since the last call, each with its error or None."""
        ended = [(id, future.exception()) for id, future in self.loading if future.done()]
        self.loading = [(id, future) for id, future in self.loading if not future.done()]
        return ended

    def begin(self, grammar: int, think: ThinkTokens | None) -> RequestGrammar:
        """The state of a new request, at the beginning of ``grammar``. Waits if that is still being loaded, and raises
        the error of a load that has failed."""
        import xgrammar

        compiled = self._grammars[grammar].result()
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not self._eos)
        clock = self._clocks.get(grammar)
        if clock is None or clock.is_over:  # its requests end, but new ones may try again
            clock = self._clocks[grammar] = GrammarClock(self._decides)
        return RequestGrammar(matcher, self._eos, think, clock)

    def may_end(self, tokens: Sequence[int]) -> bool:
        """Whether some answer may have ended with its latest token, see :meth:`RequestGrammar.may_end_with`."""
        return not self._eos or not self._all_eos.isdisjoint(tokens)

    def overdue(self) -> list[int]:
        """The grammars that have taken too much time on this rank and whose requests have not been ended for it."""
        return [grammar for grammar, clock in self._clocks.items() if clock.is_used_up and not clock.is_over]

    def end(self, grammars: Sequence[int]) -> None:
        """End the requests of ``grammars``, however much time these have taken on this rank."""
        for grammar in grammars:
            if grammar in self._clocks:
                self._clocks[grammar].is_ended = True

    def begin_fill(self, grammars: Sequence[RequestGrammar | None], masks: I32, finishes_now: bool = False) -> MaskFill:
        """Have the helper threads begin to fill ``masks`` [M, ceil(V / 32)] for those of M ``grammars`` that are given
        here. Until :meth:`finish_fill`, their state may not change, and they may not be begun again. Does not wait.
        ``finishes_now``: finish_fill follows at once, so one turn is left to the caller's thread."""
        import xgrammar

        self._batch = self._batch or xgrammar.BatchGrammarMatcher(max_threads=1)
        fill = MaskFill(grammars, masks)
        turns = _in_turns(grammars)
        self._share(fill, turns, min(self._num_helpers, len(turns) - finishes_now))
        return fill

    def finish_fill(
        self, fill: MaskFill, grammars: Sequence[RequestGrammar | None], least_more: Sequence[int] | None = None
    ) -> list[bool]:
        """Write to the masks of ``fill``, one bit for each token, which tokens may come next in each of M ``grammars``.
        Returns for each whether any token may come at all. ``grammars``: those of :meth:`begin_fill` or None, and
        others where none was given there. ``least_more`` [M]: how many more tokens an answer must have before it may
        end; it may end earlier if no other token is allowed. None: no more. None instead of a grammar, and a grammar
        that is too slow, allow all tokens."""
        masks, begun = fill.masks, fill.grammars
        if grammars is not begun:
            left = [None if place in fill.places else grammar for place, grammar in enumerate(grammars)]
            turns = _in_turns(left)
            self._share(fill, turns, min(self._num_helpers, len(turns) - 1))
        if len(fill.places) < len(grammars):  # for those that have no turn
            masks[[place for place in range(len(grammars)) if place not in fill.places]] = _ALL
        self._take_turns(fill)
        # A thread that has taken no turn is not waited for: its core may be busy.
        for error in [fill.done.get() for _ in range(fill.num_turns)]:
            if error is not None:
                raise error
        if least_more is not None or Grammars.of(grammars).may_think:
            for place, grammar in enumerate(grammars):
                least = 0 if least_more is None else least_more[place]
                if grammar is not None and (least > 0 or grammar.may_think):
                    grammar.adjust(masks[place], least)
        # Of booleans, this reads only as far as the first that is set.
        may_go_on: list[bool] = np.logical_or.reduce(masks.view(np.bool_), axis=1).tolist()
        return may_go_on

    def _share(self, fill: MaskFill, turns: list[_Turn], num_helpers: int) -> None:
        """Add ``turns`` to those of ``fill`` and wake ``num_helpers`` threads."""
        fill.add(turns)
        take = partial(self._take_turns, fill)
        for _ in range(num_helpers):
            self._work.put(take)

    def _help(self) -> None:
        """What each thread but the caller's does."""
        while True:
            self._work.get()()

    def _take_turns(self, fill: MaskFill) -> None:
        """Fill masks turn by turn, the last one first, until no turn is left; several threads share them. For each turn
        ``fill.done`` gets what went wrong, or None."""
        while True:
            try:
                turn = fill.turns.pop()
            except IndexError:
                return
            try:
                self._fill(*turn, fill.masks)
            except BaseException as error:  # raised again by finish_fill
                fill.done.put(error)
            else:
                fill.done.put(None)

    def _fill(self, clock: GrammarClock, places: list[int], matchers: list[Any], masks: I32) -> None:
        """Fill the masks of ``places`` by their ``matchers``, whose grammar has ``clock``."""
        assert self._batch is not None, "made by begin_fill"
        if clock.is_over:
            masks[places] = _ALL
            return
        begin = time.thread_time()
        self._batch.batch_fill_next_token_bitmask(matchers, masks, places)
        clock.count(len(places), time.thread_time() - begin)

    def _read(self, data: bytes, vocabulary: bytes, future: Future[xgrammar.CompiledGrammar]) -> None:
        try:
            import xgrammar

            if vocabulary:
                self._vocabulary = xgrammar.TokenizerInfo.deserialize_json(vocabulary.decode())
            assert self._vocabulary is not None, "the vocabulary comes with the first grammar"
            future.set_result(xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._vocabulary))
        except Exception as error:
            future.set_exception(error)


_Turn = tuple["GrammarClock", list[int], list[Any]]  # places among the requests, and their matchers


class MaskFill:
    """Masks [M, ceil(V / 32)] int32 that several threads fill, a few at a time."""

    def __init__(self, grammars: Sequence[RequestGrammar | None], masks: I32) -> None:
        self.grammars = grammars  # [M]
        self.masks = masks
        self.turns: list[_Turn] = []  # that no thread has taken yet
        self.num_turns = 0  # with those that have been taken
        self.places: set[int] = set()  # of all turns
        self.done = SimpleQueue[BaseException | None]()  # for each turn that has ended, what went wrong

    def add(self, turns: Sequence[_Turn]) -> None:
        """Let threads take ``turns``, the first one first."""
        for _, places, _ in turns:
            self.places.update(places)
        self.num_turns += len(turns)
        self.turns.extend(reversed(turns))


class GrammarClock:
    """The CPU time that one grammar takes, for all its present requests together, so that a hundred of them make other
    requests wait no longer than one does. Time that a token does not use is deducted from the excess of others."""

    def __init__(self, decides: bool = True) -> None:
        self._decides = decides
        self._excess_s = 0.0
        self._lock = Lock()
        self.is_ended = False  # by GrammarStore.end

    @property
    def is_used_up(self) -> bool:
        """Whether it has taken more time than other requests should have to wait."""
        return self._excess_s > EXCESS_S

    @property
    def is_over(self) -> bool:
        """Whether its requests have to end."""
        return self.is_ended or (self._decides and self.is_used_up)

    def count(self, num: int, seconds: float) -> None:
        """Count the CPU time of what has been done for ``num`` tokens: their masks were filled, or they were accepted.
        Each of the two may take half of ``TOKEN_S`` for a token."""
        with self._lock:
            self._excess_s = max(0.0, self._excess_s + seconds - num * TOKEN_S / 2)


class RequestGrammar:
    """The state of one request in its grammar: exactly its published tokens have been accepted."""

    def __init__(self, matcher: Any, eos: tuple[int, ...], think: ThinkTokens | None, clock: GrammarClock) -> None:
        """``matcher``: xgrammar's GrammarMatcher. ``eos``: the tokens that end an answer, if it may end. ``think``:
        None if the model does not reason. ``clock``: that of the grammar."""
        self.matcher = matcher
        self._eos = eos
        self._think = think  # None once the reasoning is over
        self._in_thought = think is not None and think.is_open
        self._in_call = False  # which follows no grammar
        self._latest: tuple[int, ...] = ()  # the latest tokens of the reasoning, as many as its end may have
        self._header_left = 0  # how many more tokens the answer's header may have
        self.clock = clock

    @property
    def is_too_slow(self) -> bool:
        """Whether the grammar has taken more time than other requests should have to wait."""
        return self.clock.is_over

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and its end has been accepted."""
        return bool(self.matcher.is_terminated())

    def end_token(self, token: int) -> int | None:
        """``token``, with which the answer has ended; None if it is a part of it, because the model has no token for
        the end."""
        return token if token in self._eos else None

    def may_end_with(self, token: int) -> bool:
        """Whether the answer may have ended with ``token``, its latest: False means that :attr:`ended` is False."""
        return not self._eos or token in self._eos

    @property
    def may_think(self) -> bool:
        """Whether the reasoning has not ended, or may still begin."""
        return self._think is not None

    @property
    def is_matching(self) -> bool:
        """Whether the grammar decides on the next token, because the request is not in its reasoning."""
        return not (self._in_thought or self._in_call)

    def accept(self, token: int) -> bool:
        """Advance by a sampled token. Returns False if this token may not come."""
        if self._takes(token):
            begin = time.thread_time()
            accepted = bool(self.matcher.accept_token(token))
            self.clock.count(1, time.thread_time() - begin)
            return accepted
        return not self._in_thought or self._may_end_in_thought or token not in self._eos

    @property
    def _may_end_in_thought(self) -> bool:
        return self._think is not None and self._think.may_end

    def _takes(self, token: int) -> bool:
        """Whether ``token`` belongs to the grammar and not to the reasoning. Updates the state of the reasoning."""
        think = self._think
        if think is None:
            return True
        if self._in_call:
            return False
        if self._in_thought:
            if self._ends_thought(think, token):
                self._in_thought = False
                self._think = ThinkTokens(-1, (), False, calls=think.calls) if think.calls else None
            return False
        if token == think.start:
            self._in_thought = True
            return False
        if token in think.calls:
            self._in_call = True
            return False
        self._think = None
        return True

    def _ends_thought(self, think: ThinkTokens, token: int) -> bool:
        ends = (think.end, *think.or_end)
        self._latest = (*self._latest, token)[-max(map(len, (*ends, think.header_end))) :]
        if any(self._latest[-len(end) :] == end for end in ends):
            self._header_left = MAX_HEADER_TOKENS + len(think.header_end)
            return not think.header_end
        if self._header_left == 0:
            return False
        self._header_left -= 1
        return self._latest[-len(think.header_end) :] == think.header_end

    def adjust(self, words: I32, least_more: int) -> None:
        """Change a mask ``words`` [ceil(V / 32)] int32 for the reasoning and for ``least_more``, of which the grammar
        does not know. See ``GrammarStore.finish_fill``."""
        if self._in_thought:
            if least_more > 0 or not self._may_end_in_thought:
                _clear(words, self._eos)
            return
        if self._think is not None and not self._in_call:
            for token in (self._think.start, *self._think.calls):
                if token >= 0:
                    words[token // 32] |= _bit(token)
        if least_more > 0:
            before = words.copy()
            _clear(words, self._eos)
            if not words.any():
                words[:] = before


def accept_tokens(grammars: Sequence[RequestGrammar | None], tokens: Sequence[int]) -> list[bool | None]:
    """:meth:`RequestGrammar.accept` for many requests at once, with one token each. None for a request that has no
    grammar, one that is too slow, or that may think: there the caller has to use that method."""
    accepted: list[bool | None] = [None] * len(grammars)
    for clock, places, matchers in _in_turns(grammars, plain=True):
        if clock.is_over:
            continue
        begin = time.thread_time()
        for place, matcher in zip(places, matchers, strict=True):
            # One by one, which takes no longer than the library's function for many.
            accepted[place] = matcher.accept_token(tokens[place])
        clock.count(len(places), time.thread_time() - begin)
    return accepted


class Grammars(list["RequestGrammar | None"]):
    """The grammars of a step's requests. The list does not change, and several steps may have the same one: it keeps
    the turns in which they are asked. Drop it when a request leaves, because it keeps the states of all alive."""

    def __init__(self, grammars: Iterable[RequestGrammar | None]) -> None:
        super().__init__(grammars)
        self._turns: list[_Turn] | None = None
        self._may_think = True

    @staticmethod
    def of(grammars: Sequence[RequestGrammar | None]) -> Grammars:
        """``grammars`` itself if it is such a list."""
        return grammars if isinstance(grammars, Grammars) else Grammars(grammars)

    @property
    def may_think(self) -> bool:
        """Whether some request may think. Who does not now never will."""
        if self._may_think:
            self._may_think = any(grammar is not None and grammar.may_think for grammar in self)
        return self._may_think

    def in_turns(self, plain: bool) -> list[_Turn]:
        if self.may_think:
            return _make_turns(self, plain)
        if self._turns is None:
            self._turns = _make_turns(self, plain)
        return self._turns


def _in_turns(grammars: Sequence[RequestGrammar | None], plain: bool = False) -> list[_Turn]:
    """The requests whose next token the grammar decides on, or with ``plain`` those that will not think any more: those
    of one grammar together, a few at a time. A turn begins with a check of the time taken."""
    return Grammars.of(grammars).in_turns(plain)


def _make_turns(grammars: Sequence[RequestGrammar | None], plain: bool) -> list[_Turn]:
    by_clock: dict[GrammarClock, list[int]] = {}
    for place, grammar in enumerate(grammars):
        if grammar is None or (grammar.may_think if plain else not grammar.is_matching):
            continue
        places = by_clock.get(grammar.clock)
        if places is None:
            by_clock[grammar.clock] = [place]
        else:
            places.append(place)
    turns = []
    for clock, places in by_clock.items():
        for first in range(0, len(places), _AT_ONCE):
            some = places[first : first + _AT_ONCE]
            turns.append((clock, some, [grammars[place].matcher for place in some]))  # type: ignore[union-attr]
    return turns


def all_tokens(num_rows: int, num_words: int) -> I32:
    """Masks that allow all tokens, [num_rows, num_words] int32."""
    return np.full((num_rows, num_words), _ALL)


def _bit(token: int) -> np.int32:
    return np.int32((1 << token % 32) - (1 << 32) * (token % 32 == 31))


def _clear(words: I32, tokens: Sequence[int]) -> None:
    for token in tokens:
        words[token // 32] &= ~_bit(token)
