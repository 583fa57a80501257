"""Engine: the server's processes without HTTP, for use from Python."""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import orjson
import uvloop

from fenceline.config import ConfigError
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.generate_api import (
    AnswerWriter,
    answers_of,
    make_writers,
    stream_answers,
    thinking_end_id,
)
from fenceline.entrypoints.generate_body import GenerateBody, expand, parse_generate
from fenceline.entrypoints.launch import EngineBackend, FrontEnd
from fenceline.entrypoints.native_api import describe_server
from fenceline.entrypoints.replicas import launch as launch_replicas
from fenceline.entrypoints.update_weights import (
    UpdateFromDiskBody,
    answer_of,
    update_from_disk,
    update_from_tensors,
)
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer_manager import TokenizerManager

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Answer = dict[str, Any]  # the JSON object that /generate answers with

STOP_TIMEOUT_S = 5.0


class Engine:
    """An engine in child processes, driven from any thread.

    ::

        if __name__ == "__main__":  # the child processes import the main module
            with fenceline.Engine(model_path="demo") as engine:
                print(engine.generate("Once upon a time", {"max_new_tokens": 32})["text"])

    Keyword arguments are the server's flags. ``launch`` starts the backend; the default starts processes.
    Raises ConfigError for wrong arguments and RuntimeError if the engine does not come up.
    """

    def __init__(
        self, launch: Callable[[EngineConfig], EngineBackend] = launch_replicas, **server_args: Any
    ) -> None:
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
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """Complete one prompt or several, given as text or token ids.

        Returns what /generate answers: one dict for one prompt, a list for several or ``n`` > 1, an iterator
        of dicts with ``stream``. ``options`` are /generate's other fields (``return_logprob``, ``rid``, ...).
        Raises ValueError for a wrong request and RuntimeError if the engine cannot serve it.
        """
        body = _body(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._iterate(body)
        return self._run(self._answer(body))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """:meth:`generate` for callers that run an event loop; with ``stream`` it returns an async iterator."""
        body = _body(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._aiterate(body)
        return await self._await(self._answer(body))

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

    # --- control

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Abort one request by its id, or all. Their callers get what was generated so far."""

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
        run are aborted, or computed again with the new weights from their tokens so far.

        Returns whether this succeeded, a message, and how many requests were running. If it failed, the message is the
        reason and nothing has changed. Raises ValueError if there is no checkpoint.
        """
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
        """What /server_info says."""
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


def _python_error(error: RequestError) -> ValueError | RuntimeError:
    return ValueError(error.message) if 400 <= error.status < 499 else RuntimeError(error.message)


def _body(
    prompt: str | Sequence[str] | None,
    sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    stream: bool,
    options: dict[str, Any],
) -> GenerateBody:
    """The request as /generate would get it, checked the same way. Raises ValueError."""
    fields = {
        "text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream, **options,
    }  # fmt: skip
    try:
        return parse_generate(json.dumps(fields, allow_nan=False).encode(), UnknownFields(strict=True))
    except RequestError as error:
        raise _python_error(error) from error
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
