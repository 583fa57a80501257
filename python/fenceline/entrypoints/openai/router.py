"""The routes of the OpenAI API. Handlers parse the body and answer; ``errors`` answers what they raise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.access import for_clients
from fenceline.entrypoints.anthropic.serving_messages import MessagesServing
from fenceline.entrypoints.body_parser import BodyParser, Parse
from fenceline.entrypoints.json_body import json_response
from fenceline.entrypoints.openai.answer import AnswerHead, Generator, ServedModel, answer_id
from fenceline.entrypoints.openai.chat_template import chat_template_of
from fenceline.entrypoints.openai.parsing import parse_body
from fenceline.entrypoints.openai.protocol import ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from fenceline.entrypoints.openai.reasoning_parser import REASONING_FORMATS
from fenceline.entrypoints.openai.serving_chat import ChatServing
from fenceline.entrypoints.openai.serving_completions import CompletionServing
from fenceline.entrypoints.openai.serving_embeddings import EmbeddingServing
from fenceline.entrypoints.openai.serving_rerank import RerankServing
from fenceline.entrypoints.openai.serving_responses import ResponsesServing
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.entrypoints.openai.tool_call_parser import TOOL_CALL_FORMATS

B = TypeVar("B", CompletionBody, ChatBody, EmbeddingBody, RerankBody, ScoreBody)
R = TypeVar("R")


def create_router(manager: Generator, config: EngineConfig, parser: BodyParser) -> APIRouter:
    """All ``/v1`` routes, Anthropic's too, over ``manager``, usually the TokenizerManager. Raises ValueError if
    --chat-template is not a valid template."""
    model = ServedModel.from_config(config)
    texts = TokenTexts(manager.tokenizer) if manager.tokenizer is not None else None
    completions = CompletionServing(manager, model, texts)
    chat = make_chat(manager, config, model, texts)
    embeddings = EmbeddingServing(manager, model)
    relevance = RerankServing(manager, model, config.model.embeds)
    router = APIRouter(tags=["OpenAI"])
    _add_model_routes(router, model)
    for serving in (ResponsesServing(chat, model, parser), MessagesServing(chat, model, manager, parser)):
        router.routes.extend(serving.router().routes)

    async def answer(
        request: Request, parse: Parse[B], prefix: str, respond: Callable[[B, AnswerHead, Request], Awaitable[R]]
    ) -> R:
        """What ``respond`` makes of the body, under an id that begins with ``prefix``."""
        body = await parser.parse(request, parse)
        with answer_id(prefix, body, request, manager) as rid:
            return await respond(body, AnswerHead.now(rid, model.name_for(body.model)), request)

    @router.post("/v1/completions")
    @for_clients
    async def create_completion(request: Request) -> Response:
        """Continue a prompt: text, token ids or a batch of either."""
        return await answer(request, _parse_completion, "cmpl-", completions.respond)

    @router.post("/v1/chat/completions")
    @for_clients
    async def create_chat_completion(request: Request) -> Response:
        """Write the assistant's next message of a conversation."""
        return await answer(request, _parse_chat, "chatcmpl-", chat.respond)

    @router.post("/v1/embeddings")
    @for_clients
    async def create_embeddings(request: Request) -> Response:
        """Embed a text, token ids or a batch of either."""
        return await answer(request, _parse_embedding, "embd-", embeddings.respond)

    @for_clients
    async def rerank(request: Request) -> Response:
        """Order documents by how well they answer a query."""
        return json_response(await answer(request, _parse_rerank, "rerank-", relevance.rerank))

    @for_clients
    async def score(request: Request) -> Response:
        """Score pairs of texts, or how likely given tokens are to follow a text."""
        return json_response(await answer(request, _parse_score, "score-", relevance.score))

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        router.add_api_route(path, rerank, methods=["POST"])
    for path in ("/score", "/v1/score"):
        router.add_api_route(path, score, methods=["POST"])
    return router


def make_chat(manager: Generator, config: EngineConfig, model: ServedModel, texts: TokenTexts | None) -> ChatServing:
    """What answers chat requests over ``manager``, with the chat template and the parsers that ``config`` or the
    template name. Raises ValueError if --chat-template is not a valid template."""
    template = chat_template_of(manager.tokenizer, config)
    shown = None if isinstance(template, str) else template.tool_call_format
    calls_name = config.server_args.tool_call_parser or shown
    calls = TOOL_CALL_FORMATS[calls_name] if calls_name is not None else None
    thinks = config.server_args.reasoning_parser
    if thinks is None and calls is not None and calls.reads_reasoning:
        thinks = "gpt-oss"  # nothing of such an answer can be read without
    reasoning = REASONING_FORMATS[thinks] if thinks is not None else None
    return ChatServing(manager, model, texts, template, reasoning, calls)


_parse_completion = partial(parse_body, CompletionBody)
_parse_chat = partial(parse_body, ChatBody)
_parse_embedding = partial(parse_body, EmbeddingBody)
_parse_rerank = partial(parse_body, RerankBody)
_parse_score = partial(parse_body, ScoreBody)


def _add_model_routes(router: APIRouter, model: ServedModel) -> None:
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "fenceline",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_length,
    }

    @router.get("/v1/models")
    @for_clients
    async def list_models() -> Response:
        """The served model, as a list of one."""
        return json_response({"object": "list", "data": [card]})

    @router.get("/v1/models/{name:path}")
    @for_clients
    async def retrieve_model(name: str) -> Response:
        """The served model by its name."""
        model.require(name)
        return json_response(card)
