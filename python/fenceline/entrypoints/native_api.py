"""The native API: SGLang's endpoints other than OpenAI's, apart from /generate."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.access import for_anybody, for_clients
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.fields import OPENAI, PROFILE, PROFILE_WITHOUT_EFFECT, FieldRules, UnknownFields, parse_known
from fenceline.entrypoints.generate_api import generate
from fenceline.entrypoints.json_body import PartsResponse, json_response, parse_body
from fenceline.entrypoints.openai.chat_template import chat_template_of
from fenceline.entrypoints.openai.parsing import parse_body as parse_chat_body
from fenceline.entrypoints.openai.parsing import refuse_chat
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.serving_chat import tokenize_conversation
from fenceline.entrypoints.sse import unless_gone, while_connected
from fenceline.entrypoints.update_weights import (
    WITHOUT_EFFECT,
    UpdateFromDiskBody,
    UpdateFromTensorBody,
    answer_of,
    update_from_body,
    update_from_disk,
)
from fenceline.frontend.request_types import GenerateInput, RequestError, new_rid
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import ControlReply, SchedulerReady
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.version import __version__

HEALTH_TIMEOUT_S = 20.0
MAX_PROFILE_STEPS = 1_000_000
Body = TypeVar("Body", bound=msgspec.Struct)


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """/abort_request."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """/pause_generation."""

    mode: str = "abort"


class ProfileBody(msgspec.Struct, forbid_unknown_fields=True):
    """/start_profile. SGLang's own clients send ``num_steps`` as text."""

    output_dir: str | None = None
    num_steps: int | str | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """/tokenize of texts; a body with ``messages`` is a :class:`ChatBody`."""

    prompt: str | list[str]
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """/detokenize."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


_NO_FIELDS: frozenset[str] = frozenset()
_RULES: dict[type[msgspec.Struct], FieldRules] = {
    AbortBody: FieldRules(AbortBody.__struct_fields__, {}, _NO_FIELDS),
    PauseBody: FieldRules(PauseBody.__struct_fields__, {}, _NO_FIELDS),
    UpdateFromDiskBody: FieldRules(UpdateFromDiskBody.__struct_fields__, {}, WITHOUT_EFFECT),
    UpdateFromTensorBody: FieldRules(UpdateFromTensorBody.__struct_fields__, {}, WITHOUT_EFFECT),
    ProfileBody: FieldRules(ProfileBody.__struct_fields__, PROFILE, PROFILE_WITHOUT_EFFECT),
    TokenizeBody: FieldRules(TokenizeBody.__struct_fields__, OPENAI),
    DetokenizeBody: FieldRules(DetokenizeBody.__struct_fields__, OPENAI),
}


def _for_json(ids: Sequence[int]) -> Sequence[int] | npt.NDArray[np.intc]:
    return np.frombuffer(ids, dtype=np.intc) if isinstance(ids, array) else ids


def _parse_struct(kind: type[Body], data: bytes, unknown: UnknownFields) -> Body:
    return parse_known(data, kind, _RULES[kind], unknown)


def _parse_tokenize(data: bytes, unknown: UnknownFields) -> TokenizeBody | ChatBody:
    fields = parse_body(data, dict[str, msgspec.Raw])
    if "messages" in fields:
        return parse_chat_body(ChatBody, data, unknown)
    if "prompt" not in fields:
        raise RequestError(
            400, "prompt is missing: give a text or several in it, or a conversation in messages", param="prompt"
        )
    return _parse_struct(TokenizeBody, data, unknown)


class NativeApi:
    """Handlers of the native endpoints; each takes the request and gives a response."""

    def __init__(self, manager: TokenizerManager, config: EngineConfig, parser: BodyParser) -> None:
        self._manager = manager
        self._config = config
        self._parser = parser
        self._template = chat_template_of(manager.tokenizer, config)
        self._exposition: bytes | None = None  # the metrics as they are in this turn of the event loop

    async def _read(self, request: Request, kind: type[Body], *, optional: bool = False) -> Body:
        """The body of ``request``; an empty one as ``{}`` where it is ``optional``."""
        parse = partial(_parse_struct, kind)
        return await self._parser.parse(request, parse, empty=b"{}" if optional else b"")

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Native"])
        both = ["GET", "POST"]
        router.add_api_route("/generate", self.generate, methods=["POST", "PUT"])
        router.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        router.add_api_route("/health_generate", self.health_generate, methods=["GET"])
        for prefix in ("/get_model_info", "/model_info"):
            router.add_api_route(prefix, self.model_info, methods=["GET"])
        for prefix in ("/get_server_info", "/server_info"):
            router.add_api_route(prefix, self.server_info, methods=["GET"])
        router.add_api_route("/flush_cache", self.flush_cache, methods=both)
        router.add_api_route("/clear_hicache_storage_backend", self.clear_storage, methods=both)
        router.add_api_route("/hicache/storage-backend/clear", self.clear_storage, methods=["POST"])
        router.add_api_route("/abort_request", self.abort_request, methods=["POST"])
        router.add_api_route("/pause_generation", self.pause_generation, methods=["POST"])
        router.add_api_route("/continue_generation", self.continue_generation, methods=["POST"])
        router.add_api_route("/update_weights_from_disk", self.update_from_disk, methods=["POST"])
        router.add_api_route("/update_weights_from_tensor", self.update_from_tensor, methods=["POST"])
        for prefix in ("/get_weight_version", "/weight_version"):
            router.add_api_route(prefix, self.weight_version, methods=["GET"])
        router.add_api_route("/start_profile", self.start_profile, methods=both)
        router.add_api_route("/stop_profile", self.stop_profile, methods=both)
        router.add_api_route("/flight_recorder", self.flight_recorder_json, methods=["GET"])
        router.add_api_route("/flight_recorder", self.flight_recorder_file, methods=["POST"])
        for prefix in ("", "/v1"):
            router.add_api_route(f"{prefix}/tokenize", self.tokenize, methods=["POST"])
            router.add_api_route(f"{prefix}/detokenize", self.detokenize, methods=["POST"])
        router.add_api_route("/metrics", self.metrics, methods=["GET"])
        return router

    # --- generation

    @for_clients
    async def generate(self, request: Request) -> Response:
        """Complete one prompt or several; see docs/use/api.md."""
        return await generate(self._manager, self._config, self._parser, request)

    # --- health and information

    @for_anybody
    async def health(self) -> Response:
        """200 while requests are accepted, else 503."""
        return Response(status_code=200 if self._manager.serving else 503)

    @for_clients
    async def health_generate(self) -> Response:
        """200 if each replica generates a token, or embeds one, for this request or any other, within 20 seconds, else
        503. Also 200 while weights are being replaced, when nothing is generated."""
        if self._manager.serving and self._manager.control.updating:
            return Response(status_code=200)
        probes = [
            GenerateInput(
                rid=f"HEALTH_CHECK_{new_rid()}",
                input_ids=[self._config.model.bos_token_id or 0],
                sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
                replica=replica,
                embed=self._config.model.embeds,
            )
            for replica in range(self._config.server_args.dp_size)
        ]
        asked_at = time.perf_counter()
        try:
            async with await self._manager.submit_many(probes) as group:
                await asyncio.wait_for(group.collect(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            self._require_news_since(asked_at)
        except RequestError as error:
            if error.code != "queue_full":
                raise
            # A full queue is no failure if something was generated lately.
            self._require_news_since(asked_at - HEALTH_TIMEOUT_S)
        return Response(status_code=200)

    def _require_news_since(self, moment: float) -> None:
        if self._manager.control.updating:
            return
        silent = [replica for replica, heard in enumerate(self._manager.last_news) if heard < moment]
        if silent:
            of = "the engine" if len(self._manager.last_news) == 1 else f"replica {silent[0]}"
            raise RequestError(503, f"{of} generated nothing within {HEALTH_TIMEOUT_S:g} s", code="unhealthy")

    @for_clients
    async def model_info(self) -> Response:
        """What is being served."""
        config = self._config
        return json_response(
            {
                "model_path": self._manager.weights.model_path,
                "tokenizer_path": config.tokenizer_path,
                "served_model_name": config.served_model_name,
                "is_generation": not config.model.embeds,
                "preferred_sampling_params": None,
                "weight_version": self._manager.weights.version,
                "architecture": config.model.architecture,
                "architectures": [config.model.architecture],
                "model_type": config.model.model_type,
                "load_format": config.server_args.load_format,
                "has_image_understanding": config.images is not None,
                "has_audio_understanding": False,
                "vocab_size": config.model.vocab_size,
                "context_length": config.model.context_length,
                "dtype": config.model.dtype,
            }
        )

    @for_clients
    async def server_info(self) -> Response:
        """The resolved arguments, the limits found at start and the scheduler's state now."""
        return json_response(await describe_server(self._manager, self._config))

    @for_anybody
    async def metrics(self) -> Response:
        """Prometheus' text format; 404 without --enable-metrics."""
        if not self._config.server_args.enable_metrics:
            raise RequestError(404, "start the server with --enable-metrics to have /metrics")
        if self._exposition is None:  # it takes a millisecond or two, and a turn may have dozens of requests
            self._exposition = self._manager.metrics.exposition()
            asyncio.get_running_loop().call_soon(self._forget_exposition)
        return Response(self._exposition, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _forget_exposition(self) -> None:
        self._exposition = None

    # --- control, for administrators

    async def flush_cache(self, request: Request, storage: bool = False, timeout: float = 0.0) -> Response:
        """Empty the prefix cache on device and host, with ``storage`` the storage tier too; 400 while requests are
        running or waiting, and if there is no storage tier. With ``timeout`` seconds it waits for the requests; if the
        client leaves meanwhile, nothing is flushed."""
        await unless_gone(request, self._flush(storage, timeout))
        return PlainTextResponse("Cache flushed.\n")

    async def clear_storage(self) -> Response:
        """Empty the storage tier and with it the tiers above, whose pages count as stored; 400 as above."""
        await self._flush(storage=True)
        return json_response("Hierarchical cache storage backend cleared.")

    async def _flush(self, storage: bool, timeout: float = 0.0) -> None:
        reply = await self._manager.flush_cache(storage, timeout)
        if not reply.success:
            raise RequestError(400, reply.message or "the cache is in use; wait for the running requests")

    async def abort_request(self, request: Request) -> Response:
        """Abort the requests whose id begins with ``rid``, as SGLang does, or all; an unknown id is no error: the
        request may just have finished."""
        body = await self._read(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError(400, "give rid, or abort_all: true", param="rid")
        self._manager.abort(body.rid, prefix=True, abort_all=body.abort_all)
        return Response(status_code=200)

    async def pause_generation(self, request: Request) -> Response:
        """Stop scheduling: ``mode`` is abort, retract or in_place."""
        body = await self._read(request, PauseBody, optional=True)
        return _control_response(await self._manager.pause_generation(body.mode))

    async def continue_generation(self) -> Response:
        """Resume scheduling."""
        return _control_response(await self._manager.continue_generation())

    async def update_from_disk(self, request: Request) -> Response:
        """Replace the model's weights by another checkpoint of the same model; 400 where it does not fit, and then
        nothing has changed."""
        body = await self._read(request, UpdateFromDiskBody)
        return _updated(await update_from_disk(self._manager, body))

    async def update_from_tensor(self, request: Request) -> Response:
        """Replace some of the model's weights by tensors in the body; otherwise as /update_weights_from_disk."""
        body = await self._read(request, UpdateFromTensorBody)
        return _updated(await update_from_body(self._manager, body))

    @for_clients
    async def weight_version(self) -> Response:
        """The label of the weights."""
        return json_response({"weight_version": self._manager.weights.version})

    async def start_profile(self, request: Request) -> Response:
        """Start the profiler, optionally for a number of steps."""
        body = await self._read(request, ProfileBody, optional=True)
        num_steps = _num_steps(body.num_steps)
        return _control_response(await self._manager.profile("start", body.output_dir or None, num_steps))

    async def stop_profile(self) -> Response:
        """Stop the profiler; the answer says where the trace is."""
        return _control_response(await self._manager.profile("stop"))

    async def flight_recorder_json(self, format: Literal["json", "trace"] = "json") -> Response:
        """The scheduler's last steps as JSON, or with ``format=trace`` the last 128 as a trace for Perfetto; 400 with
        --flight-recorder-steps 0."""
        if format == "trace" and self._config.server_args.dp_size > 1:
            raise RequestError(400, "a trace is of one replica, and this server has several: use format=json")
        reply = await self._manager.flight_recorder(format)
        if not reply.success:
            raise RequestError(400, reply.message)
        return PartsResponse([reply.payload])

    async def flight_recorder_file(self) -> Response:
        """Write the scheduler's last steps to a file on the server; the answer says where."""
        reply = await self._manager.flight_recorder("file")
        if not reply.success:
            raise RequestError(400, reply.message)
        return json_response({"success": True, "path": reply.message})

    # --- tokenizer

    @for_clients
    async def tokenize(self, request: Request) -> Response:
        """Token ids of one text or several, or of a conversation as the chat template writes it."""
        body = await self._parser.parse(request, _parse_tokenize)
        if isinstance(body, ChatBody):
            return await self._tokenize_chat(request, body)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        tokens = await while_connected(request, self._manager.tokenize(texts, body.add_special_tokens))
        counts = [len(ids) for ids in tokens]
        single = isinstance(body.prompt, str)
        return json_response(
            {
                "tokens": _for_json(tokens[0]) if single else [_for_json(ids) for ids in tokens],
                "count": counts[0] if single else counts,
                "max_model_len": self._config.model.context_length,
            }
        )

    async def _tokenize_chat(self, request: Request, body: ChatBody) -> Response:
        refuse_chat(body)
        tokens = await tokenize_conversation(self._manager, self._template, body, request)
        return json_response(
            {"tokens": _for_json(tokens), "count": len(tokens), "max_model_len": self._config.model.context_length}
        )

    @for_clients
    async def detokenize(self, request: Request) -> Response:
        """The text of one list of token ids or several."""
        body = await self._read(request, DetokenizeBody)
        kinds = set(map(type, body.tokens))
        if len(kinds) > 1:
            raise RequestError(400, "tokens mixes ids and lists of ids: send one or the other", param="tokens")
        nested = kinds == {list}
        lists = cast(list[list[int]], body.tokens if nested else [body.tokens])
        texts = await while_connected(request, self._manager.detokenize(lists, body.skip_special_tokens))
        return json_response({"text": texts if nested else texts[0]})


async def describe_server(manager: TokenizerManager, config: EngineConfig) -> dict[str, object]:
    """What /server_info says."""
    dp_size = config.server_args.dp_size
    states: list[dict[str, Any]] = [msgspec.to_builtins(state) for state in await manager.internal_states()]
    for state in states:
        state |= _sglang_state(state, manager.limits, dp_size)
    return {
        **config.public_dict(),
        "model_path": manager.weights.model_path,
        "weight_version": manager.weights.version,
        **({} if manager.limits is None else _without_tag(manager.limits)),
        "internal_states": states,
        "num_active_requests": manager.num_active,
        "version": __version__,
    }


def _sglang_state(state: Mapping[str, Any], limits: SchedulerReady | None, dp_size: int) -> dict[str, object]:
    """What SGLang's clients look for in ``internal_states``; memory in GB there."""
    bytes_of = state["memory_bytes"]
    graphs = [state[name] for name in ("cuda_graphs", "piecewise_cuda_graphs") if state[name] is not None]
    return {
        "effective_max_running_requests_per_dp": (None if limits is None else limits.max_running_requests // dp_size),
        "memory_usage": {
            "weight": round(bytes_of.get("weights", 0) / 2**30, 2),
            "kvcache": round(bytes_of.get("kv_cache", 0) / 2**30, 2),
            "token_capacity": state["max_total_num_tokens"],
            "graph": round(sum(graph["capture_bytes"] for graph in graphs) / 2**30, 2),
        },
    }


def _without_tag(message: msgspec.Struct) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(message)
    fields.pop("type", None)
    return fields


def _num_steps(given: int | str | None) -> int | None:
    """The number of steps to record, None for all until /stop_profile. Raises RequestError 400."""
    if given is None or given == "":
        return None
    number = given
    if isinstance(given, str):
        number = int(given) if given.isascii() and given.isdigit() and len(given) <= 18 else 0
    if not isinstance(number, int) or not 1 <= number <= MAX_PROFILE_STEPS:
        raise RequestError(
            400,
            f"num_steps must be a number between 1 and {MAX_PROFILE_STEPS}, got {str(given)[:40]}",
            param="num_steps",
        )
    return number


def _updated(reply: ControlReply) -> Response:
    response = json_response(answer_of(reply))
    if not reply.success:
        response.status_code = 400
    return response


def _control_response(reply: ControlReply) -> Response:
    if not reply.success:
        raise RequestError(400, reply.message or "the scheduler refused")
    return json_response({"success": True, "message": reply.message})
