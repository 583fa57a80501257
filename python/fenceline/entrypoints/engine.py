"""Engine: the server's processes without HTTP, for use from Python."""

from __future__ import annotations

import asyncio
import atexit
import base64
import io
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np
import orjson
import uvloop
from starlette.requests import Request
from starlette.types import Message

from fenceline.config import ConfigError
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.gguf_file import is_gguf
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.generate_api import AnswerWriter, answers_of, make_writers, stream_answers, thinking_end_id
from fenceline.entrypoints.generate_body import GenerateBody, NativeSampling, expand, parse_generate
from fenceline.entrypoints.launch import EngineBackend, FrontEnd
from fenceline.entrypoints.launch import launch as launch_replicas
from fenceline.entrypoints.native_api import describe_server
from fenceline.entrypoints.openai.answer import AnswerHead, ServedModel
from fenceline.entrypoints.openai.parsing import Body, parse_body
from fenceline.entrypoints.openai.protocol import ChatBody, EmbeddingBody, ReadingBody, RerankBody, ScoreBody
from fenceline.entrypoints.openai.router import make_chat
from fenceline.entrypoints.openai.serving_chat import ChatServing
from fenceline.entrypoints.openai.serving_embeddings import EmbeddingServing, vector_of
from fenceline.entrypoints.openai.serving_rerank import RerankServing
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.entrypoints.update_weights import UpdateFromDiskBody, answer_of, update_from_disk, update_from_tensors
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import RequestError, new_rid
from fenceline.frontend.tokenizer import gguf_for_transformers
from fenceline.frontend.tokenizer_manager import TokenizerManager

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Answer = dict[str, Any]  # the JSON object that /generate answers with

STOP_TIMEOUT_S = 5.0
_VLLM_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# What sampling parameters are called in the bodies of chat requests.
_CHAT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


class SamplingParams(NativeSampling, kw_only=True):
    """Sampling parameters of :class:`Engine` and :class:`fenceline.LLM`: those of /generate (a dict of them is taken
    too). What is not given is as in the model's generation_config.json. ``max_tokens`` and ``min_tokens`` are vLLM's
    names of ``max_new_tokens`` and ``min_new_tokens``."""

    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    min_tokens: int | None = None


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
Params = Mapping[str, Any] | SamplingParams
Conversation = Sequence[Mapping[str, Any]]  # messages


class Engine:
    """An engine in child processes, driven from any thread.

    ::

        with fenceline.Engine("demo") as engine:
            print(engine.generate("Once upon a time", {"max_new_tokens": 32})["text"])

    Keyword arguments are the server's flags. ``launch`` starts the backend; the default starts processes.
    Raises ConfigError for wrong arguments and RuntimeError if the engine does not come up.
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        launch: Callable[[EngineConfig], EngineBackend] = launch_replicas,
        **server_args: Any,
    ) -> None:
        if model_path is not None:
            server_args["model_path"] = model_path
        self.config = resolve(ServerArgs.from_kwargs({"log_level": "error", **server_args}))
        node = self.config.server_args.node_rank
        if node > 0:
            raise ConfigError(
                f"node_rank={node}: an Engine answers on node 0; start this node by python -m fenceline.launch_server"
                f" --node-rank {node} with the same flags"
            )
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._closed = False
        self._served = ServedModel.from_config(self.config)
        self._front_end: FrontEnd | None = None
        self._backend = launch(self.config)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._front_end = self._run(self._start())
        except BaseException:
            self.shutdown()
            raise

    async def _start(self) -> FrontEnd:
        front_end = FrontEnd(self.config, self._backend)
        try:
            await front_end.manager.wait_ready()
        except BaseException:
            await front_end.close()
            raise
        return front_end

    # --- generation

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Complete one prompt or several, given as text or token ids. Returns what /generate answers: one dict for one
        prompt, a list for several or ``n`` > 1, an iterator of dicts with ``stream``. ``options`` are /generate's other
        fields (``return_logprob``, ``rid``, ...); ``image_data`` may be images of Pillow and arrays too, uint8 [height,
        width, 3], and ``video_data`` lists of these, or uint8 [frames, height, width, 3]. Raises ValueError for a wrong
        request and RuntimeError if the engine cannot serve it."""
        body = _body(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._iterate(body)
        return self._run(self._answer(body))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """:meth:`generate` for callers that run an event loop; with ``stream`` it returns an async iterator."""
        body = _body(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._aiterate(body)
        return await self._await(self._answer(body))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Write the assistant's next message of one conversation or of several. Returns what /v1/chat/completions
        answers: one dict, a list for several conversations, with ``stream`` an iterator of one conversation's chunks.
        ``options`` are other fields of that route (``tools``, ``response_format``, ``chat_template_kwargs``, ...). In a
        content, ``{"type": "image", "image": ...}`` is an image of Pillow, an array, or a URL, and ``{"type": "video",
        "video": ..., "fps": ...}`` a list of these, or an array.
        Raises like :meth:`generate`."""
        several = are_several(messages)
        conversations: Sequence[Any] = messages if several else [messages]
        params = sampling_params if isinstance(sampling_params, (list, tuple)) else None
        params = params or [sampling_params] * len(conversations)
        if len(params) != len(conversations) or (several and stream):
            raise ValueError("give sampling_params for each conversation; stream one conversation at a time")
        bodies = [
            _chat_body(one, of_one, {"stream": stream, **options})
            for one, of_one in zip(conversations, params, strict=True)
        ]
        if stream:
            return self._chat_chunks(bodies[0])
        answers = self._run(self._chat_answers(bodies))
        return answers if several else answers[0]

    async def _chat_answers(self, bodies: Sequence[ChatBody]) -> list[Answer]:
        answering = [asyncio.ensure_future(self._chat_answer(body)) for body in bodies]
        try:
            return await asyncio.gather(*answering)
        finally:  # if one fails, the others are not wanted any more
            for one in answering:
                one.cancel()

    async def _chat_answer(self, body: ChatBody) -> Answer:
        answer: Answer = orjson.loads(b"".join([part async for part in self._chat_bytes(body)]))
        return answer

    def _chat_chunks(self, body: ChatBody) -> Iterator[Answer]:
        pieces, rest = self._chat_bytes(body), b""
        try:
            while (piece := self._run(_next(pieces))) is not None:
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if (data := event.removeprefix(b"data: ")) == b"[DONE]":
                        continue
                    chunk: Answer = orjson.loads(data)
                    if "error" in chunk:
                        raise RuntimeError(chunk["error"]["message"])
                    yield chunk
        finally:  # without waiting: the garbage collector may do this on the engine's own thread
            if not self._closed:
                asyncio.run_coroutine_threadsafe(pieces.aclose(), self._loop)

    async def _chat_bytes(self, body: ChatBody) -> AsyncGenerator[bytes, None]:
        """The answer as it goes over HTTP, without HTTP."""
        gone = asyncio.Event()  # is never set: leaving the generator ends the answer
        pieces: asyncio.Queue[bytes] = asyncio.Queue(1)

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if piece := message.get("body"):
                await pieces.put(piece)

        async def answer() -> None:
            head = AnswerHead.now(body.rid or body.request_id or f"chatcmpl-{new_rid()}", self._served.name)
            try:
                response = await self._chat.respond(body, head, Request(scope, receive))
                await response(scope, receive, send)
            except Exception:  # but not if it is cancelled: then nobody takes the pieces
                await pieces.put(b"")
                raise
            await pieces.put(b"")

        scope: dict[str, Any] = {"type": "http"}
        answering = asyncio.ensure_future(answer())
        try:
            while piece := await pieces.get():
                yield piece
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    @cached_property
    def _chat(self) -> ChatServing:
        tokenizer = self._manager.tokenizer
        texts = None if tokenizer is None else TokenTexts(tokenizer)
        return make_chat(self._manager, self.config, self._served, texts)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it. Raises ValueError if the engine runs without one."""
        if self.config.server_args.skip_tokenizer_init:
            raise ValueError("the engine was started with skip_tokenizer_init: it has no tokenizer")
        if is_gguf(Path(self.config.tokenizer_path)):
            return gguf_for_transformers(self.config.tokenizer_path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.tokenizer_path, local_files_only=True, trust_remote_code=False)

    def get_tokenizer(self) -> Any:
        """:attr:`tokenizer`, by SGLang's and vLLM's name."""
        return self.tokenizer

    async def _submit(self, body: GenerateBody) -> tuple[StreamGroup, list[AnswerWriter], bool]:
        tokenizer = self._manager.tokenizer
        thinking_end = thinking_end_id(body, self.config, tokenizer)
        expanded = await expand(body, self.config, None, thinking_end)
        group = await self._manager.submit_many(expanded.inputs)
        writers = make_writers(expanded, group, body, self.config, self._manager, thinking_end)
        return group, writers, expanded.single

    async def _answer(self, body: GenerateBody) -> Answer | list[Answer]:
        group, writers, single = await self._submit(body)
        async with group:
            parts = await answers_of(await group.collect(), writers)
            answers = [orjson.loads(b"".join(answer)) for answer in parts]
        return answers[0] if single else answers

    def _iterate(self, body: GenerateBody) -> Iterator[Answer]:
        group, writers, _ = self._run(self._submit(body))
        incremental = self.config.server_args.incremental_streaming_output
        answers = stream_answers(group, writers, incremental, b"".join)
        try:
            while (answer := self._run(_next(answers))) is not None:
                yield orjson.loads(answer)
        finally:
            if not self._closed:
                self._loop.call_soon_threadsafe(group.close)

    async def _aiterate(self, body: GenerateBody) -> AsyncIterator[Answer]:
        group, writers, _ = await self._await(self._submit(body))
        incremental = self.config.server_args.incremental_streaming_output
        answers = stream_answers(group, writers, incremental, b"".join)
        try:
            while (answer := await self._await(_next(answers))) is not None:
                yield orjson.loads(answer)
        finally:
            if not self._closed:
                self._loop.call_soon_threadsafe(group.close)

    # --- embeddings

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        dimensions: int | None = None,
        **options: Any,
    ) -> Any:
        """The embeddings of one text or several, given as text or token ids, by an engine with ``is_embedding``: one
        dict for one text, a list for several, as of SGLang's: ``embedding``, floats of length 1, and ``meta_info``.
        ``options`` are other fields of /v1/embeddings. Raises like :meth:`generate`."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either prompt or input_ids, exactly one of them")
        given: Any = input_ids if prompt is None else prompt
        body = _checked_body(EmbeddingBody, {"input": given, "dimensions": dimensions, **options})
        serving = EmbeddingServing(self._manager, self._served)
        chunks = self._run(serving.chunks(body, self._head_of(body).id, None))
        answers = [
            {
                "embedding": vector_of(chunk, dimensions).tolist(),
                "meta_info": {
                    "id": chunk.rid,
                    "prompt_tokens": chunk.prompt_tokens,
                    "cached_tokens": chunk.cached_tokens,
                    "e2e_latency": chunk.e2e_latency,
                },
            }
            for chunk in chunks
        ]
        several = not isinstance(given, str) and (prompt is not None or not isinstance(given[0], int))
        return answers if several else answers[0]

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> Answer:
        """How well each document answers a query, the best first: what /v1/rerank answers. ``options`` are its other
        fields (``instruct``, ``top_n``, ...). Raises like :meth:`generate`."""
        body = _checked_body(RerankBody, {"query": query, "documents": documents, **options})
        return self._run(self._relevance.rerank(body, self._head_of(body), None))

    def score(
        self,
        query: str | Sequence[int] | None = None,
        items: str | Sequence[str] | Sequence[Sequence[int]] | None = None,
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **options: Any,
    ) -> Any:
        """For each item the probabilities that the tokens ``label_token_ids`` follow the query and it, as of SGLang's;
        with ``text_1`` and ``text_2`` instead, a list with the score of each pair, as of vLLM's. ``options`` are other
        fields of /v1/score. Raises like :meth:`generate`."""
        fields: dict[str, object] = {"query": query, "items": items, "label_token_ids": label_token_ids}
        fields |= {"apply_softmax": apply_softmax, "item_first": item_first, **options}
        body = _checked_body(ScoreBody, fields)
        answer: Any = self._run(self._relevance.score(body, self._head_of(body), None))
        return answer["scores"] if "scores" in answer else [one["score"] for one in answer["data"]]

    def _head_of(self, body: ReadingBody) -> AnswerHead:
        return AnswerHead.now(body.rid or body.request_id or new_rid(), self._served.name)

    @property
    def _relevance(self) -> RerankServing:
        return RerankServing(self._manager, self._served, self.config.model.embeds)

    # --- control

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Abort the request with this id (with all samples of its prompt), or all. Their callers get what was generated
        so far."""

        async def abort() -> None:
            self._manager.abort(rid, abort_all=abort_all)

        self._run(abort())

    def flush_cache(self, storage: bool = False) -> bool:
        """Empty the prefix cache, with ``storage`` the storage tier too; False, and nothing done, while requests are
        in flight. Raises ValueError if there is no storage tier."""
        return self._run(self._manager.flush_cache(storage)).success

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> tuple[bool, str, int]:
        """Replace the model's weights by another checkpoint of the same model, a directory or a hub id. Requests that
        run are aborted, or computed again with the new weights from their tokens so far. Returns whether this
        succeeded, a message, and how many requests were running. If it failed, the message is the reason and nothing
        has changed. Raises ValueError if there is no checkpoint."""
        body = UpdateFromDiskBody(model_path, load_format, abort_all_requests, weight_version)
        reply = self._run(update_from_disk(self._manager, body))
        return reply.success, reply.message, int(str(answer_of(reply)["num_paused_requests"]))

    def update_weights_from_tensor(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> tuple[bool, str]:
        """Replace some weights: (name, tensor) pairs with the checkpoint's names and whole shapes, on any device;
        otherwise as :meth:`update_weights_from_disk`. ``flush_cache`` is SGLang's; caches are always emptied."""
        if load_format is not None:
            raise ValueError(f"load_format {load_format!r} is not supported: leave it out")
        update = update_from_tensors(self._manager, named_tensors, weight_version, abort_all_requests)
        reply = self._run(update)
        return reply.success, reply.message

    def get_server_info(self) -> dict[str, Any]:
        return self._run(describe_server(self._manager, self.config))

    def start_profile(self, output_dir: str | None = None, num_steps: int | None = None) -> None:
        """Start the scheduler's profiler; its trace goes below ``torch_profiler_dir``, in ``output_dir`` there. Raises
        RuntimeError if it refuses."""
        self._profile("start", output_dir, num_steps)

    def stop_profile(self) -> str:
        """Stop the profiler; says where the trace is. Raises RuntimeError if none was running."""
        return self._profile("stop", None, None)

    def _profile(self, action: str, output_dir: str | None, num_steps: int | None) -> str:
        reply = self._run(self._manager.profile(action, output_dir, num_steps))
        if not reply.success:
            raise RuntimeError(reply.message)
        return reply.message

    # --- life cycle

    @property
    def _manager(self) -> TokenizerManager:
        if self._front_end is None or self._closed:
            raise RuntimeError("the engine was shut down")
        return self._front_end.manager

    def shutdown(self) -> None:
        """End the engine and its processes; requests in flight fail. Harmless to repeat."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        front_end = self._front_end
        if front_end is None:
            self._backend.stop(0.0)
        else:
            self._wait(_say_goodbye(front_end.manager))
            self._backend.stop(STOP_TIMEOUT_S)  # in this thread: at exit no other can be started any more
            self._wait(front_end.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- between threads

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, run on the engine's loop while this thread waits."""
        if self._closed:
            work.close()
            raise RuntimeError("the engine was shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except RequestError as error:
            raise _python_error(error) from error
        except BaseException:  # Ctrl-C while waiting: the request is not wanted any more
            future.cancel()
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise RuntimeError("the engine was shut down")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except RequestError as error:
            raise _python_error(error) from error


async def _say_goodbye(manager: TokenizerManager) -> None:
    manager.fail("it was shut down")
    manager.shutdown()


async def _next(answers: AsyncIterator[bytes]) -> bytes | None:
    return await anext(answers, None)


def are_several(messages: Conversation | Sequence[Conversation]) -> bool:
    """Whether these are conversations, and not the messages of one. What is neither counts as one, to be refused."""
    return isinstance(messages, (list, tuple)) and bool(messages) and not isinstance(messages[0], Mapping)


def _python_error(error: RequestError) -> ValueError | RuntimeError:
    return ValueError(error.message) if 400 <= error.status < 499 else RuntimeError(error.message)


def _body(
    prompt: str | Sequence[str] | None,
    sampling_params: Params | Sequence[Params] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    stream: bool,
    options: dict[str, Any],
) -> GenerateBody:
    """The request as /generate would get it, checked the same way. Raises ValueError."""
    params: object = None
    if isinstance(sampling_params, (list, tuple)):
        params = [params_dict(one) for one in sampling_params]
    elif sampling_params is not None:
        params = params_dict(sampling_params)
    fields = {
        "text": prompt, "sampling_params": params, "input_ids": input_ids, "stream": stream, **options,
    }  # fmt: skip
    if "video_data" in fields:
        fields["video_data"] = video_objects(fields["video_data"])
    try:
        return parse_generate(_as_json(fields), UnknownFields(strict=True))
    except RequestError as error:
        raise _python_error(error) from error


def _chat_body(messages: object, params: object, options: Mapping[str, object]) -> ChatBody:
    """The request as /v1/chat/completions would get it, checked the same way. Raises ValueError."""
    given = {_CHAT_NAMES.get(name, name): value for name, value in params_dict(params).items()}
    return _checked_body(ChatBody, {"messages": _with_image_urls(messages), **given, **options})


def _checked_body(kind: type[Body], fields: Mapping[str, object]) -> Body:
    """``fields`` as a route would get them, checked the same way. Raises ValueError."""
    try:
        return parse_body(kind, _as_json(fields), UnknownFields(strict=True))
    except RequestError as error:
        raise _python_error(error) from error


def params_dict(params: object) -> dict[str, Any]:
    """Sampling parameters as /generate takes them. Raises ValueError for anything else."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    if not isinstance(params, SamplingParams):
        name = f"{type(params).__module__}.{type(params).__qualname__}".removeprefix("builtins.")
        raise ValueError(f"sampling_params: give a dict or a fenceline.SamplingParams, or a list of them, not {name}")
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    return {
        _VLLM_NAMES.get(name, name): value
        for name, value in given.items()
        if value is not msgspec.UNSET and (value is not None or name in ("max_new_tokens", "max_tokens"))
    }


def _as_json(fields: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False, default=_image_url).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _with_image_urls(messages: object) -> object:
    """``messages`` with OpenAI's parts in place of those that hold an image as Hugging Face's and vLLM's do."""

    def part_of(part: object) -> object:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in ("image", "image_pil") and kind in part:
            return {"type": "image_url", "image_url": {"url": part[kind], "detail": part.get("detail")}}
        return part

    if not isinstance(messages, (list, tuple)):
        return messages
    return [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        else message
        for message in messages
    ]


def video_objects(given: object) -> object:
    """``video_data`` with objects in place of lists of frames and arrays, each of which is one video."""
    if isinstance(given, np.ndarray) and given.ndim == 4:
        return {"video": given}
    if isinstance(given, list | tuple) and given:
        is_one = not isinstance(given[0], str | Mapping | list | tuple | None) and getattr(given[0], "ndim", 3) == 3
        return {"video": given} if is_one else [video_objects(one) for one in given]
    return given


def _image_url(value: object) -> object:
    """An image of Pillow, or an array, as a ``data:`` URL, without loss; an array of frames as a list of these. Raises
    TypeError for anything else."""
    from PIL import Image

    if isinstance(value, np.ndarray) and value.ndim == 4:
        return list(value)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))):
            raise TypeError(f"an image is an array of uint8 [height, width, 3], not {value.dtype} {list(value.shape)}")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise TypeError(f"{type(value).__name__} is neither JSON nor an image")
    file = io.BytesIO()
    image = value if value.mode in _PNG_MODES else value.convert("RGB")
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
