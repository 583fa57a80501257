"""TokenizerManager: requests in, chunks out; the main process's end of the pipeline.

::

    manager = TokenizerManager(config, tokenizer, link)
    async with await manager.submit(inp) as stream:             # RequestError before anything is sent
        async for chunk in stream: ...                          # GenerateChunk; leaving early aborts
    async with await manager.submit_many([inp, ...]) as group:  # all are accepted or none
        async for index, chunk in group: ...
        answers = await group.collect()
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Literal
from uuid import uuid4

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.config.request_limits import MAX_BODY_TOKENS, MAX_TOKENIZE_TOKENS
from fenceline.constrained.spec import GrammarSpec
from fenceline.frontend.control import MAX_FLUSH_WAIT_S, ControlClient
from fenceline.frontend.grammar_client import GrammarClient
from fenceline.frontend.image_client import ImageClient
from fenceline.frontend.metrics import Metrics
from fenceline.frontend.request_prepare import (
    build_message,
    check_ids,
    check_length,
    check_num_images,
    check_num_logprobs,
    check_num_pixels,
    check_num_tokens,
    check_params,
    check_placeholders,
    check_positions,
    check_untokenised,
    check_vocabulary,
    num_placeholders,
)
from fenceline.frontend.request_stream import RequestStream, StreamGroup
from fenceline.frontend.request_table import RequestEntry, RequestLog, RequestTable, RequestTrace, is_meant
from fenceline.frontend.request_types import (
    ORIGIN,
    TURN_REQUESTS,
    GenerateChunk,
    GenerateInput,
    MediaSource,
    RequestError,
    ServedWeights,
    VideoSource,
    check_num_requests,
    new_rid,
    shutting_down,
)
from fenceline.frontend.scheduler_link import SchedulerLink
from fenceline.frontend.tokenize_pool import TokenizePool
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.frontend.tracing import RequestTracer
from fenceline.images.image_input import ImageInput, expand_placeholders
from fenceline.images.positions import position_delta
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchStrOut,
    BatchTokenOut,
    ControlReply,
    FatalError,
    FinishReason,
    IdArray,
    InternalState,
    Message,
    SchedulerReady,
    ShutdownReq,
    StagesReport,
    StatsReport,
    TickReq,
    TokenizedGenerateReq,
    TokenOut,
    UpdateWeightsReq,
    id_array,
)

_MIN_TICK_S, _MAX_TICK_S = 0.01, 1.0

_TURN_IDS = 1 << 17  # of prompts that are looked through in one turn of the event loop: some milliseconds


class TokenizerManager:
    """Tokenises and validates requests, sends them to the scheduler and routes their outputs back. Lives on one event
    loop; every method belongs to that loop's thread. ``tokenizer`` is None under --skip-tokenizer-init. ``limits`` is
    None until the scheduler is ready."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, link: SchedulerLink) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = config.model.vocab_size
        self.weights = ServedWeights(config.model.model_path, config.server_args.weight_version)
        self.limits: SchedulerReady | None = None
        self.fatal: str | None = None
        self.metrics = Metrics(
            config.served_model_name,
            config.hicache is not None,
            config.server_args.metrics_prefix,
            config.server_args.dp_size,
        )
        self.control = ControlClient(link.send, config.server_args.dp_size)
        self._grammars = GrammarClient(config, tokenizer, self.control)
        self._images = ImageClient(config.images)
        self._link = link
        self._table = RequestTable(config.server_args.max_queued_requests, config.priority)
        self._log = RequestLog(config)
        self._tracer = None if config.traces is None else RequestTracer(config.traces, config)
        self._num_bodies = 0  # that had several prompts or samples
        self._preparing: set[str] = set()  # ids of requests between submit_many and the table
        self._preparations: set[_Preparation] = set()  # the calls of submit_many that they are in
        self._pool = None if tokenizer is None else TokenizePool(tokenizer)
        self._ready = asyncio.Event()
        self._dead = asyncio.Event()
        self._idle = asyncio.Event()
        self._draining = False
        limits_s = (config.server_args.req_waiting_timeout, config.server_args.req_running_timeout)
        timeouts = [limit_s for limit_s in limits_s if limit_s is not None]
        self._tick_s = min(max(min(timeouts) / 10, _MIN_TICK_S), _MAX_TICK_S) if timeouts else None
        self._ticker: asyncio.TimerHandle | None = None
        # Of each replica time.perf_counter() of the latest output of any request.
        self.last_news = [0.0] * config.server_args.dp_size

    # --- requests

    def expect(self) -> None:
        """A request has come whose body has not been read."""
        if not len(self._table):
            self._link.wake()

    async def submit(self, inp: GenerateInput) -> RequestStream:
        """Validate and send one request. Raises RequestError; then nothing was sent."""
        return (await self.submit_many([inp])).streams[0]

    async def submit_many(self, inputs: Sequence[GenerateInput]) -> StreamGroup:
        """Validate all requests, then send all but those that have been aborted meanwhile. Raises RequestError; then
        none was sent."""
        rids = [inp.rid for inp in inputs]
        ours = set(rids) - self._preparing  # an id that is already there is removed by the call that added it
        preparation = _Preparation(inputs)
        self._preparing |= ours
        self._preparations.add(preparation)
        try:
            async with preparation.wait:
                return await self._submit_many(inputs, rids, preparation.aborted)
        except TimeoutError:
            if len(preparation.aborted) < len(inputs):
                raise
            return StreamGroup([self._aborted(rid) for rid in rids])
        finally:
            self._preparations.discard(preparation)
            self._preparing -= ours

    async def _submit_many(
        self, inputs: Sequence[GenerateInput], rids: Sequence[str], aborted: Set[str]
    ) -> StreamGroup:
        limits, priority = self._require_serving(), self.config.priority
        if self.config.server_args.allow_auto_truncate:
            inputs = [_truncated(inp, limits.max_req_input_len) for inp in inputs]
        default_priority = 0 if priority is None else priority.default_value
        priorities = [default_priority if inp.priority is None else inp.priority for inp in inputs]
        for shared in {id(inp.images): inp.images for inp in inputs}.values():
            self.check_images(shared)
        inputs = self._with_tokenized_texts(inputs)
        given = await self._check_untokenised(inputs, limits)
        specs = {
            inp.grammar: 0 if priority is None else priority.rank(value)
            for inp, value in zip(inputs, priorities, strict=True)
            if inp.grammar is not None
        }
        self._grammars.check_all(specs)
        # Refuse now what is refused for prompts of any length; each has at least one token.
        self._table.admit(rids, [len(inp.input_ids or "?") for inp in inputs], priorities, limits)
        prompts = await self._prompt_ids(inputs, given, limits)
        prompts, images = await self._with_images(inputs, prompts, limits)
        with self._grammars.using() as used:
            grammars = {spec: await self._grammars.number_of(spec, rank, used) for spec, rank in specs.items()}
            limits = self._require_serving()  # tokenising may have taken a while
            messages = await self._messages(inputs, prompts, images, limits, default_priority, grammars)
            self._require_serving()  # no await from here on: a stream added after the engine has ended would never end
            check_num_logprobs(messages)
            for entry in self._table.admit(rids, [len(ids) for ids in prompts], priorities, limits):
                self._displace(entry)
            streams = [
                self._aborted(inp.rid) if inp.rid in aborted else self._start(inp, message, num_pixel_bytes)
                for inp, message, num_pixel_bytes in zip(inputs, messages, _pixel_bytes(images), strict=True)
            ]
            if self._tracer is not None:
                self._trace(inputs)
        return StreamGroup(streams)

    # A body may have thousands of prompts, so both methods let other tasks run from time to time. The samples of a
    # prompt share its ids, which are checked once.

    async def _check_untokenised(self, inputs: Sequence[GenerateInput], limits: SchedulerReady) -> dict[int, IdArray]:
        """Check ``inputs``. Returns the token ids that are given in place of texts, by the identity of the list."""
        for start in range(0, len(inputs), TURN_REQUESTS):
            check_params(inputs[start : start + TURN_REQUESTS], self.vocab_size, self.tokenizer is not None)
            if start:
                await asyncio.sleep(0)
        num_ids = 0
        given: dict[int, IdArray] = {}
        for index, inp in enumerate(inputs):
            check_untokenised(inp, self.tokenizer, self.config, limits)
            ids = inp.input_ids
            if ids is not None and id(ids) not in given:
                given[id(ids)] = check_ids(ids, self.vocab_size, limits)
                num_ids += len(ids)
            if (index + 1) % TURN_REQUESTS == 0 or num_ids > _TURN_IDS:
                num_ids = 0
                await asyncio.sleep(0)
        return given

    async def _messages(
        self,
        inputs: Sequence[GenerateInput],
        prompts: Sequence[IdArray],
        images: Sequence[Sequence[ImageInput]],
        limits: SchedulerReady,
        default_priority: int,
        grammars: Mapping[GrammarSpec, int],
    ) -> list[TokenizedGenerateReq]:
        messages: list[TokenizedGenerateReq] = []
        body = 0
        if len(inputs) > 1:
            self._num_bodies += 1
            body = self._num_bodies
        num_ids = 0
        checked: Sequence[int] | None = None
        for inp, ids, pictures in zip(inputs, prompts, images, strict=True):
            if inp.text is not None and ids is not checked:
                check_ids(ids, self.vocab_size, limits)
                checked = ids
                num_ids += len(ids)
            grammar = 0 if inp.grammar is None else grammars[inp.grammar]
            messages.append(
                build_message(inp, inp.rid, ids, self.vocab_size, limits, default_priority, body, grammar, pictures)
            )
            if len(messages) % TURN_REQUESTS == 0 or num_ids > _TURN_IDS:
                num_ids = 0
                await asyncio.sleep(0)
        # This comes last, without an await: which ids are in use changes while other tasks run.
        return [self._under_wire_rid(message) for message in messages]

    def _under_wire_rid(self, message: TokenizedGenerateReq) -> TokenizedGenerateReq:
        wire_rid = self._table.wire_rid(message.rid)
        return message if wire_rid == message.rid else msgspec.structs.replace(message, rid=wire_rid)

    def abort(self, rid: str = "", *, prefix: bool = False, abort_all: bool = False) -> None:
        """Abort the requests whose id, or whose body's id, is ``rid`` or, with ``prefix``, begins so; or all requests.
        Unknown and empty ids are ignored. Readers get a last chunk of type ``abort``. Requests that are being prepared
        are not sent, and do not wait any longer for their images."""
        if rid or abort_all:
            for preparation in self._preparations:
                preparation.abort("" if abort_all else rid, prefix or abort_all)
        if abort_all:
            self._link.send(AbortReq(rid="", abort_all=True))
            return
        for entry in self._table.named(rid, prefix) if rid else ():
            self._link.send(AbortReq(rid=entry.wire_rid))

    def is_active(self, rid: str) -> bool:
        """Whether a request of this id, or of a body with this id, is in flight or being prepared."""
        return rid in self._table or rid in self._preparing

    @contextmanager
    def reserved_id(self, wanted: str, instead: Callable[[], str] = new_rid) -> Iterator[str]:
        """The id of a request whose client gave none: ``wanted``, or one made by ``instead`` where that is taken. In
        the ``with`` block, in which the request is prepared and sent, nobody else gets the same: clients may send one
        X-Request-Id with several requests, and only ``rid`` promises to be unique."""
        rid = instead() if self.is_active(wanted) else wanted
        self._preparing.add(rid)
        try:
            yield rid
        finally:
            self._preparing.discard(rid)

    @property
    def num_active(self) -> int:
        """Requests in flight, waiting ones included."""
        return len(self._table)

    async def tokenize(
        self, texts: Sequence[str], add_special_tokens: bool = True, images: Sequence[MediaSource] = ()
    ) -> list[Sequence[int]]:
        """Token ids of each text as a list or, of long texts, an array, of a single one with those of its ``images``;
        off the event loop where that pays. Raises RequestError without a tokenizer, and for too many texts or tokens.
        """
        check_num_requests(len(texts), 1)
        texts = [self._as_tokenized(text, images) for text in texts] if images else texts
        most = max(MAX_TOKENIZE_TOKENS, self.config.model.context_length)
        encoded = await self._texts().encode(texts, add_special_tokens, most, most)
        if images:
            inp, limits = GenerateInput(text=texts[0], images=images), self._require_serving()
            prompts, _ = await self._with_images([inp], [id_array(encoded[0])], limits)
            return list(prompts)
        return encoded

    async def detokenize(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of ids, off the event loop. Raises RequestError without a tokenizer, for too many lists
        or ids, and for ids outside the vocabulary."""
        check_num_requests(len(lists), 1)
        pool = self._texts()
        most = max(MAX_TOKENIZE_TOKENS, self.config.model.context_length)
        if sum(map(len, lists)) > most:
            raise RequestError(400, f"tokens may have at most {most} ids; send several requests", param="tokens")
        for ids in lists:
            for start in range(0, len(ids), _TURN_IDS):
                check_vocabulary(ids[start : start + _TURN_IDS], self.vocab_size, "tokens")
                if start:
                    await asyncio.sleep(0)
        return await pool.decode(lists, skip_special_tokens)

    def check_text_length(self, num_chars: int) -> None:
        """Raise RequestError if a prompt of so many characters has too many tokens, whatever they are."""
        if self.tokenizer is not None:
            check_length(num_chars, self.tokenizer, self.config, self._require_serving())

    def check_images(self, images: Sequence[MediaSource]) -> None:
        """Raise RequestError for images that this server does not take, whatever they show."""
        self._images.check(images)

    def _with_tokenized_texts(self, inputs: Sequence[GenerateInput]) -> Sequence[GenerateInput]:
        """``inputs`` with the texts of prompts with images as the tokenizer gets them; samples share theirs."""
        texts: dict[tuple[int, int], str] = {}
        made = []
        for inp in inputs:
            if inp.images and inp.text is not None:
                key = id(inp.text), id(inp.images)
                if key not in texts:
                    texts[key] = self._as_tokenized(inp.text, inp.images)
                inp = inp if texts[key] is inp.text else replace(inp, text=texts[key])
            made.append(inp)
        return made

    def _as_tokenized(self, text: str, images: Sequence[MediaSource]) -> str:
        """``text``, a prompt with ``images``, as the tokenizer gets it. Raises RequestError (400) if it does not show
        where each of its videos stands."""
        rules = self._images.rules
        if rules is None:
            return text
        if rules.written is not None:
            text = text.replace(*rules.written)
        videos = [image for image in images if isinstance(image, VideoSource)]
        if not videos or rules.video is None:
            return text
        try:
            return rules.video.in_text(text, [(len(one.frames), one.times) for one in videos])
        except ValueError as error:
            raise RequestError(400, str(error), param=videos[0].place) from None

    def _with_groups(self, ids: IdArray, images: Sequence[MediaSource]) -> IdArray:
        """The same of a prompt that is given as token ids."""
        rules = self._images.rules
        videos = [image for image in images if isinstance(image, VideoSource)]
        if not videos or rules is None or rules.video is None:
            return ids
        self._texts()  # raises without a tokenizer
        assert self.tokenizer is not None
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        try:
            return id_array(rules.video.in_ids(ids, [(len(one.frames), one.times) for one in videos], encode))
        except ValueError as error:
            raise RequestError(400, str(error), param=videos[0].place) from None

    def _texts(self) -> TokenizePool:
        if self._pool is None:
            raise RequestError(
                400, "this server runs with --skip-tokenizer-init and can neither tokenise nor detokenise"
            )
        return self._pool

    async def _prompt_ids(
        self, inputs: Sequence[GenerateInput], given: Mapping[int, IdArray], limits: SchedulerReady
    ) -> list[IdArray]:
        """The token ids of all prompts, each tokenised once. ``given``: see :meth:`_check_untokenised`."""
        most = max(MAX_BODY_TOKENS, limits.context_length)
        tokenised: dict[int, IdArray] = {}
        for special in (True, False):
            texts = {id(i.text): i.text for i in inputs if i.text is not None and i.add_special_tokens is special}
            if texts:
                encode = self._texts().encode
                longest, truncate = limits.max_req_input_len, self.config.server_args.allow_auto_truncate
                encoded = await encode(list(texts.values()), special, longest, most, truncate)
                tokenised.update(zip(texts, map(id_array, encoded), strict=True))
        prompts = [given[id(inp.input_ids)] if inp.text is None else tokenised[id(inp.text)] for inp in inputs]
        total = sum(map(len, prompts))
        if total > most:
            raise RequestError(
                400,
                f"the prompts have {total} tokens together, each sample counted, at most {most} are allowed in one "
                "body; send several bodies",
                param="prompt",
            )
        return prompts

    async def _with_images(
        self, inputs: Sequence[GenerateInput], prompts: Sequence[IdArray], limits: SchedulerReady
    ) -> tuple[list[IdArray], list[Sequence[ImageInput]]]:
        """The prompts with as many placeholders as their images have tokens, and the images. Those that samples share
        are decoded once, and remain one object."""
        rules = self._images.rules
        if rules is None:
            return list(prompts), [()] * len(prompts)
        keys = [(id(ids), id(inp.images) if inp.images else 0) for inp, ids in zip(inputs, prompts, strict=True)]
        distinct = dict(zip(keys, zip(inputs, prompts, strict=True), strict=True))
        sources = [image for inp, _ in distinct.values() for image in inp.images]
        check_num_images(sources)
        num_bytes = 0
        for key, (inp, ids) in distinct.items():
            if inp.images and inp.text is None:
                ids = self._with_groups(ids, inp.images)
                distinct[key] = inp, ids
            check_placeholders(ids, inp.images, rules)
            if inp.images:
                least = self._images.least(inp.images)
                num_texts = len(ids) - sum(num_placeholders(inp.images, rules))
                check_num_tokens(num_texts + least.num_tokens, limits)
                check_positions(num_texts + least.num_moments, limits)
                check_num_pixels(least.num_bytes, inp.images)
                num_bytes += least.num_bytes
                await asyncio.sleep(0)
        decoded = iter(await self._images.prepare(sources, num_bytes, self._table.num_pixel_bytes))
        placed: dict[tuple[int, int], tuple[IdArray, Sequence[ImageInput]]] = {}
        for key, (inp, ids) in distinct.items():
            placed[key] = ids, ()
            if inp.images:
                given = islice(decoded, sum(num_placeholders(inp.images, rules)))
                placed[key] = ids, images = expand_placeholders(ids, given, rules.placeholders)
                check_num_tokens(len(ids), limits)
                check_positions(len(ids) + position_delta(images), limits)
                check_num_pixels(sum([len(one.pixels) for one in images]), inp.images)
        return [placed[key][0] for key in keys], [placed[key][1] for key in keys]

    def _start(self, inp: GenerateInput, message: TokenizedGenerateReq, num_pixel_bytes: int) -> RequestStream:
        stream = RequestStream(inp.rid, message.input_ids, self._abandon)
        self._table.add(message, stream, inp.family, num_pixel_bytes)
        self._link.send(message)
        self._start_ticks()
        self._log.received(inp, message)
        return stream

    def _trace(self, inputs: Sequence[GenerateInput]) -> None:
        """Have the requests that have just been started traced."""
        origin, num_samples = ORIGIN.get(), Counter(inp.family or inp.rid for inp in inputs)
        for inp in inputs:
            if (entry := self._table.get(inp.rid)) is not None:
                entry.trace = RequestTrace(origin, inp.sampling_params, num_samples[inp.family or inp.rid])

    def _aborted(self, rid: str) -> RequestStream:
        """The stream of a request that was aborted before it was sent."""
        stream = RequestStream(rid, (), lambda _: None)
        stream.push(
            GenerateChunk(
                rid=rid,
                text="",
                output_ids=[],
                prompt_tokens=0,
                completion_tokens=0,
                cached_tokens=0,
                e2e_latency=0.0,
                finish_reason=FinishReason(type="abort", message="aborted"),
            )
        )
        self.metrics.abandoned()
        return stream

    def _displace(self, entry: RequestEntry) -> None:
        """Abort a waiting request because the queue is full and requests of a better priority have arrived."""
        entry.displaced = True
        message = (
            f"the queue is full (--max-queued-requests {self.config.server_args.max_queued_requests}) and a request of"
            " higher priority took this one's place; try again later"
        )
        self._link.send(AbortReq(rid=entry.wire_rid, message=message, status_code=503))

    def _start_ticks(self) -> None:
        """While requests are in flight, send the scheduler the time often enough to end those whose time is over."""
        if self._ticker is None and self._tick_s is not None:
            self._tick()

    def _tick(self) -> None:
        self._ticker = None
        if self._tick_s is not None and len(self._table):
            self._link.send(TickReq(now=time.perf_counter()))
            self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _abandon(self, rid: str) -> None:
        """The client has left: forget the request and have the scheduler release it at once."""
        entry = self._table.abandon(rid)
        if entry is None:
            return
        self._link.send(AbortReq(rid=entry.wire_rid))
        self.metrics.abandoned()
        self._log.abandoned(entry)
        if self._tracer is not None:
            self._tracer.ended(entry, FinishReason(type="abort"), time.perf_counter())
        self._note_idle()

    def _require_serving(self) -> SchedulerReady:
        if self.fatal is not None:
            raise RequestError(503, f"the engine has stopped: {self.fatal}", code="engine_dead")
        if self._draining:
            raise shutting_down()
        if self.limits is None:
            raise RequestError(503, "the server is starting: the model is being loaded", code="starting")
        return self.limits

    # --- messages from the engine

    async def run(self) -> None:
        """Handle incoming messages until cancelled. Start it as a task before waiting for readiness."""
        while True:
            for message in await self._link.receive():
                self.handle(message)
            # Lets the readers of the streams run, also if messages arrive without pause.
            await asyncio.sleep(0)

    def handle(self, message: Message) -> None:
        """Apply one message from the scheduler or the detokenizer."""
        match message:
            case BatchStrOut():
                for out in message.outs:
                    self._deliver(out.token, out.text, message.replica)
            case BatchTokenOut():
                for token in message.outs:
                    self._deliver(token, "", message.replica)
            case ControlReply():
                self.control.resolve(message)
            case StagesReport():
                self._table.note_stages(message)
            case StatsReport():
                self.metrics.report(message.state, message.replica)
            case SchedulerReady():
                self.limits = message
                self._ready.set()
            case FatalError():
                self.fail(f"{message.source}: {message.message}")
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _deliver(self, token: TokenOut, text: str, replica: int) -> None:
        now = self.last_news[replica] = time.perf_counter()
        entry = self._table.advance(token)
        if entry is None:
            return  # its client left while the message was on its way
        self.metrics.observe(entry, token, now)
        if token.finish_reason is not None:
            self._log.finished(entry, token)
            self._note_idle()
        entry.stream.push(entry.chunk(token, text, now))
        if self._tracer is not None and token.finish_reason is not None:
            self._tracer.ended(entry, token.finish_reason, now)

    # --- control

    async def flush_cache(self, storage: bool = False, wait_s: float = 0.0) -> ControlReply:
        """Empty the prefix cache on device and host, with ``storage`` the storage tier too; ``success`` False if
        requests are in flight after ``wait_s`` seconds. Raises RequestError (400) if there is no storage tier."""
        if not 0 <= wait_s <= MAX_FLUSH_WAIT_S:
            raise RequestError(
                400, f"timeout must be between 0 and {MAX_FLUSH_WAIT_S:g} seconds, got {wait_s:g}", param="timeout"
            )
        hicache = self.config.hicache
        if storage and (hicache is None or hicache.storage is None):
            raise RequestError(
                400,
                "this server has no storage tier: start it with --enable-hierarchical-cache"
                " --hicache-storage-backend file, or leave storage out",
                param="storage",
            )
        return await self.control.flush_cache(storage, wait_s)

    async def update_weights(
        self,
        *,
        model_path: str | None = None,
        file: str | None = None,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        keep_pause: bool = False,
    ) -> ControlReply:
        """Replace the model's weights; see :class:`UpdateWeightsReq`. ``success`` False, with the reason, if they do
        not fit. Raises RequestError 503 if the engine does not serve."""
        self._require_serving()
        message = UpdateWeightsReq(
            id=uuid4().hex,
            model_path=model_path,
            file=file,
            weight_version=weight_version,
            abort_all_requests=abort_all_requests,
            keep_pause=keep_pause,
        )
        reply = await self.control.update_weights(message)
        if reply.success:
            self.weights.model_path = model_path or self.weights.model_path
            self.weights.version = self.weights.version if weight_version is None else weight_version
        return reply

    async def pause_generation(self, mode: str = "abort") -> ControlReply:
        """Stop scheduling; ``mode`` is abort, retract or in_place."""
        return await self.control.pause(mode)

    async def continue_generation(self) -> ControlReply:
        return await self.control.resume()

    async def profile(self, action: str, output_dir: str | None = None, num_steps: int | None = None) -> ControlReply:
        """``start`` or ``stop`` the scheduler's profiler."""
        return await self.control.profile(action, output_dir, num_steps)

    async def flight_recorder(self, form: Literal["file", "json", "trace"]) -> ControlReply:
        """The scheduler's last steps: of a file the reply's message is the path, JSON and a trace are its payload."""
        return await self.control.flight_recorder(form)

    async def internal_states(self) -> list[InternalState]:
        """The state of each replica's scheduler now. Raises RequestError 503 if one does not answer."""
        return [_state_of(reply) for reply in await self.control.internal_states()]

    async def live_state(self, num_steps: int) -> tuple[InternalState, bytes]:
        """The scheduler's state and its last steps as JSON (``scheduler.control.live_steps``), both of one moment; of
        several replicas the first one's. Raises RequestError 503 if it does not answer, or not yet, or no longer."""
        self._require_serving()
        reply = (await self.control.internal_states(num_steps))[0]
        return _state_of(reply), reply.payload

    # --- life cycle

    async def wait_ready(self) -> SchedulerReady:
        """Wait until the scheduler serves. Raises RequestError if it dies first."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self._dead)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return self._require_serving()

    async def wait_dead(self) -> str:
        """Wait until the engine has died; the reason."""
        await self._dead.wait()
        assert self.fatal is not None
        return self.fatal

    def fail(self, reason: str) -> None:
        """The engine has died: end every stream and refuse all further requests."""
        if self.fatal is not None:
            return
        self.fatal = reason
        error = RequestError(503, f"the engine has stopped: {reason}", code="engine_dead")
        end = FinishReason(type="abort", message=error.message, status_code=error.status)
        for entry in self._table.clear():
            entry.stream.fail(error)
            if self._tracer is not None:
                self._tracer.ended(entry, end, time.perf_counter())
        self.control.fail(error)
        self._dead.set()
        self._note_idle()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight; False if some remained after ``timeout_s``."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._table):
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def serving(self) -> bool:
        """Whether requests are accepted now."""
        return self.fatal is None and not self._draining and self.limits is not None

    def shutdown(self, *, drain: bool = False) -> None:
        """Tell the scheduler to stop and release threads. The link stays the caller's to close."""
        self._link.send(ShutdownReq(drain=drain))
        self._grammars.close()
        self._images.close()
        if self._pool is not None:
            self._pool.close()
        if self._tracer is not None:
            self._tracer.close()

    def _note_idle(self) -> None:
        if not len(self._table):
            self._idle.set()


class _Preparation:
    """A call of ``submit_many``. ``aborted``: the ids of its requests that have been aborted. ``wait`` surrounds what
    it waits for, and ends with a TimeoutError when all are."""

    __slots__ = ("_inputs", "aborted", "wait")

    def __init__(self, inputs: Sequence[GenerateInput]) -> None:
        self._inputs = inputs
        self.aborted: set[str] = set()
        self.wait = asyncio.timeout(None)

    def abort(self, rid: str, prefix: bool) -> None:
        """Abort the requests that ``rid`` means."""
        self.aborted |= {inp.rid for inp in self._inputs if is_meant(inp, rid, prefix)}
        if len(self.aborted) == len(self._inputs) and not self.wait.expired():
            self.wait.reschedule(0.0)


def _pixel_bytes(images: Sequence[Sequence[ImageInput]]) -> list[int]:
    """Of each request, its share of those that samples of a prompt share."""
    if not any(images):
        return [0] * len(images)
    sharing = Counter(map(id, images))
    return [sum([len(one.pixels) for one in pictures]) // sharing[id(pictures)] for pictures in images]


def _state_of(reply: ControlReply) -> InternalState:
    assert reply.state is not None, "a reply to GetInternalStateReq carries the state"
    return reply.state


def _truncated(inp: GenerateInput, max_tokens: int) -> GenerateInput:
    """--allow-auto-truncate for a prompt of ids; a text is cut where it is tokenised."""
    if inp.input_ids is None or len(inp.input_ids) <= max_tokens:
        return inp
    return replace(inp, input_ids=inp.input_ids[:max_tokens])
