"""GrammarClient: the front end's record of compiled grammars, and its connection to the process that compiles them.

A grammar is compiled once, in a separate process (:mod:`fenceline.constrained.compile_server`), sent to the scheduler,
and from then on named by a number. When there are too many, the least recently used ones are forgotten, here and in the
scheduler. If a grammar could not be compiled, the reason is kept in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from fenceline.config import num_usable_cores
from fenceline.config.engine_config import EngineConfig
from fenceline.constrained.compile_server import COMPILING, CompileJob, VocabularySource, serve
from fenceline.constrained.spec import MAX_GRAMMAR_CHARS, GrammarSpec, max_whitespace
from fenceline.frontend.control import ControlClient
from fenceline.frontend.job_process import JobProcess, JobQueue, RestartedProcess
from fenceline.frontend.request_types import RequestError, shutting_down
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.ipc.forked_jobs import JobResult

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 1024
# Of all compiled grammars: what their rules take, and what the tokens of the vocabulary add to their masks.
MAX_GRAMMAR_BYTES, MAX_GRAMMAR_BYTES_OF_TOKEN = 32 << 20, 1536
MAX_ERRORS = 4096
MAX_WAITING = 1024  # to be compiled
MAX_OF_BODY = 16  # different ones

_Key = tuple[str, bytes]  # the kind, and the SHA-256 of the text, which may be long


class _Grammar:
    """A grammar that is compiled or is being compiled. ``num_users``: how many requests are being prepared and will
    name it. ``is_queued``: it waits to be compiled."""

    __slots__ = ("is_queued", "key", "num_bytes", "num_users", "number", "ready")

    def __init__(self, key: _Key, number: int) -> None:
        self.key = key
        self.number = number
        self.is_queued = True
        self.ready: asyncio.Task[None] | None = None
        self.num_bytes = 0
        self.num_users = 0

    @property
    def is_done(self) -> bool:
        """Whether it is known if the grammar can be used: requests can name it, or compiling it has failed."""
        return self.ready is not None and self.ready.done()


class GrammarClient:
    """Lives on one event loop."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, control: ControlClient) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._control = control
        self._max_whitespace = max_whitespace(config.server_args.constrained_json_whitespace_pattern)
        self._grammars: OrderedDict[_Key, _Grammar] = OrderedDict()
        self._errors: OrderedDict[_Key, str] = OrderedDict()
        self._num_bytes = 0
        self._max_bytes = MAX_GRAMMAR_BYTES + MAX_GRAMMAR_BYTES_OF_TOKEN * config.model.vocab_size
        self._num_made = 0
        self._forgotten: list[int] = []  # and not told yet
        self._process = RestartedProcess(self._start_process)
        self._notes: set[str] = set()  # that have been logged
        self._vocabulary_sent = False
        # Half of the cores, so that generation has the others; two, so that nobody waits for one alone.
        self._num_children = min(8, max(2, num_usable_cores() // 2))
        self._queue = JobQueue(self._num_children)
        self._loading = asyncio.Lock()  # one grammar is sent after the other
        self._closed = False

    @contextmanager
    def using(self) -> Iterator[list[_Grammar]]:
        """While requests are prepared, the grammars that :meth:`number_of` adds to the list are not forgotten. Those
        that wait to be compiled and have no user any more are dropped."""
        used: list[_Grammar] = []
        try:
            yield used
        finally:
            for grammar in used:
                grammar.num_users -= 1
                if grammar.num_users or grammar.is_done or not grammar.is_queued:
                    continue
                if self._grammars.get(grammar.key) is grammar:
                    assert grammar.ready is not None
                    grammar.ready.cancel()
                    del self._grammars[grammar.key]

    def check_all(self, specs: Collection[GrammarSpec]) -> None:
        """:meth:`check` those of one body, and how many they are."""
        for spec in specs:
            self.check(spec)
        if len(specs) > MAX_OF_BODY:
            raise RequestError(400, f"a body may have {MAX_OF_BODY} different grammars, got {len(specs)}")

    def check(self, spec: GrammarSpec) -> None:
        """Raise RequestError (400) for a grammar that this server cannot compile, whatever it says."""
        reason = self._config.refuses_grammars
        if reason is None and len(spec.text) > MAX_GRAMMAR_CHARS:
            reason = f"{spec.kind} may have {MAX_GRAMMAR_CHARS} characters, got {len(spec.text)}"
        if reason is not None:
            raise RequestError(400, reason, param=spec.kind)
        try:
            spec.text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                400, f"{spec.kind} has half a surrogate pair: it is not Unicode text", param=spec.kind
            ) from None

    async def number_of(self, spec: GrammarSpec, rank: int, used: list[_Grammar]) -> int:
        """The number under which the scheduler knows the compiled ``spec``, at least until ``used``, of :meth:`using`,
        ends. The smallest ``rank`` is compiled first. Raises RequestError: 400 with the reason where it cannot be
        compiled, 503 where it could be later."""
        key = (spec.kind, hashlib.sha256(spec.text.encode()).digest())
        if (reason := self._errors.get(key)) is not None:
            self._errors.move_to_end(key)
            raise RequestError(400, f"{spec.kind}: {reason}", param=spec.kind)
        grammar = self._grammars.get(key) or self._begin(key, spec, rank)
        self._grammars.move_to_end(key)
        grammar.num_users += 1
        used.append(grammar)
        assert grammar.ready is not None
        # Others may wait for the same grammar, so a client that leaves does not end the task.
        await asyncio.shield(grammar.ready)
        return grammar.number

    def close(self) -> None:
        """End the process that compiles. Requests that wait for it get RequestError (503)."""
        self._closed = True
        self._process.close()

    def _begin(self, key: _Key, spec: GrammarSpec, rank: int) -> _Grammar:
        if self._closed:
            raise shutting_down()
        if sum(grammar.is_queued for grammar in self._grammars.values()) >= MAX_WAITING:
            raise RequestError(503, f"{MAX_WAITING} grammars wait to be compiled; try again later")
        self._num_made += 1
        grammar = self._grammars[key] = _Grammar(key, self._num_made)
        grammar.ready = asyncio.get_running_loop().create_task(self._make(spec, grammar, rank))
        grammar.ready.add_done_callback(_note_error)
        return grammar

    async def _make(self, spec: GrammarSpec, grammar: _Grammar, rank: int) -> None:
        """Compile ``spec`` and have the scheduler take it in."""
        try:
            vocabulary, made = await self._compiled(spec, grammar, rank)
            if made.error and made.is_refused:
                self._errors[grammar.key] = made.error
                if len(self._errors) > MAX_ERRORS:
                    self._errors.popitem(last=False)
                raise RequestError(400, f"{spec.kind}: {made.error}", param=spec.kind)
            if made.error:
                raise RequestError(503, f"{spec.kind}: {made.error}", param=spec.kind)
            for note in set(made.notes) - self._notes:
                self._notes.add(note)
                logger.warning("%s: %s", spec.kind, note)
            async with self._loading:
                grammar.num_bytes = len(made.data)
                self._num_bytes += grammar.num_bytes
                self._forget()
                await self._load(grammar.number, made.data, vocabulary)
        except BaseException:
            self._num_bytes -= grammar.num_bytes
            if self._grammars.get(grammar.key) is grammar:
                del self._grammars[grammar.key]
            raise

    async def _compiled(self, spec: GrammarSpec, grammar: _Grammar, rank: int) -> tuple[bytes, JobResult]:
        """The vocabulary, and the result of compiling ``spec`` when it is its turn. Only at its turn it depends on a
        process: one that ends before is replaced."""
        for is_long in (False, True):
            if is_long and not grammar.num_users:
                raise RequestError(503, f"{spec.kind}: the client that asked for it has disconnected")
            grammar.is_queued = True
            async with self._queue.turn(rank, is_long):
                grammar.is_queued = False
                process = self._process.get()
                vocabulary = await process.started()
                made = await process.compile(spec, self._max_whitespace, is_short=not is_long)
            if not made.is_given_up:
                break
        return vocabulary, made

    async def _load(self, number: int, data: bytes, vocabulary: bytes) -> None:
        """Have the scheduler load it, and forget those that it still has to forget, including this one if it fails."""
        forgotten, self._forgotten = self._forgotten, []
        try:
            first = b"" if self._vocabulary_sent else vocabulary
            reply = await self._control.load_grammar(number, data, first, forgotten)
            if not reply.success:
                raise RequestError(500, f"the grammar could not be loaded: {reply.message}")
        except BaseException:
            self._forgotten += [*forgotten, number]
            raise
        self._vocabulary_sent = True

    def _forget(self) -> None:
        """Drop those that have not been used for the longest time, until there are not too many."""
        for key, grammar in list(self._grammars.items()):
            if len(self._grammars) <= MAX_GRAMMARS and self._num_bytes <= self._max_bytes:
                return
            if not grammar.num_users and grammar.is_done:
                del self._grammars[key]
                self._num_bytes -= grammar.num_bytes
                self._forgotten.append(grammar.number)

    def _start_process(self) -> CompileProcess:
        assert self._tokenizer is not None, "checked before"
        source = VocabularySource(
            self._tokenizer.backend.to_str(),
            self._tokenizer.special_ids,
            self._config.model.vocab_size,
            tuple(self._config.model.eos_token_ids),
        )
        return CompileProcess(source, self._num_children)


def _note_error(task: asyncio.Task[None]) -> None:
    """Callers that wait for the task get its error. If nobody waits any more, the error must not be logged."""
    if not task.cancelled():
        task.exception()


class CompileProcess(JobProcess):
    """The process that compiles ``num_children`` grammars at a time."""

    def __init__(self, source: VocabularySource, num_children: int) -> None:
        # The source is not among its arguments: starting it would wait for it to read them.
        super().__init__("grammar-compiler", serve, (num_children,), msgspec.msgpack.encode(source), COMPILING)

    async def compile(self, spec: GrammarSpec, max_whitespace: int | None, is_short: bool) -> JobResult:
        """The result of a CompileJob. Raises RequestError (503) if the process ends before, or does not answer."""
        return await self.run(lambda id: CompileJob(id, is_short, spec, max_whitespace))
