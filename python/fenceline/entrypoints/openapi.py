"""The description of the API: /openapi.json with the bodies of requests, and the page /docs that shows it.

Handlers parse the bodies themselves, so FastAPI does not know their fields. They are described from the types that the
handlers parse them into.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fenceline.entrypoints.access import for_clients
from fenceline.entrypoints.anthropic.protocol import CountBody, MessagesBody
from fenceline.entrypoints.generate_body import GenerateBody
from fenceline.entrypoints.native_api import AbortBody, DetokenizeBody, PauseBody, ProfileBody, TokenizeBody
from fenceline.entrypoints.openai.protocol import ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from fenceline.entrypoints.openai.responses_protocol import ResponsesBody
from fenceline.entrypoints.update_weights import UpdateFromDiskBody, UpdateFromTensorBody

_REFS = "#/components/schemas/"
# The type of the body by path, and whether the body may be missing.
BODIES: dict[str, tuple[type, bool]] = {
    "/generate": (GenerateBody, False),
    "/abort_request": (AbortBody, False),
    "/pause_generation": (PauseBody, True),
    "/update_weights_from_disk": (UpdateFromDiskBody, False),
    "/update_weights_from_tensor": (UpdateFromTensorBody, False),
    "/start_profile": (ProfileBody, True),
    "/tokenize": (TokenizeBody, False),
    "/v1/tokenize": (TokenizeBody, False),
    "/detokenize": (DetokenizeBody, False),
    "/v1/detokenize": (DetokenizeBody, False),
    "/v1/completions": (CompletionBody, False),
    "/v1/chat/completions": (ChatBody, False),
    "/v1/embeddings": (EmbeddingBody, False),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (RerankBody, False)),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreBody, False)),
    "/v1/responses": (ResponsesBody, False),
    "/v1/messages": (MessagesBody, False),
    "/v1/messages/count_tokens": (CountBody, False),
}


def describe_app(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of ``app`` with :data:`BODIES`."""
    with warnings.catch_warnings():
        # FastAPI warns that a route of two methods uses one operation id twice; the ids are replaced below.
        warnings.simplefilter("ignore")
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    structs = [_without_raw(kind) for kind, _ in set(BODIES.values()) if issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components(
        structs, schema_hook=lambda kind: {"description": "any JSON value"}, ref_template=_REFS + "{name}"
    )
    kinds = dict.fromkeys(kind for kind, _ in BODIES.values() if issubclass(kind, BaseModel))
    _, models = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFS + "{model}")
    document.setdefault("components", {}).setdefault("schemas", {}).update({**components, **models["$defs"]})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = f"{method}_{path.strip('/').replace('/', '_')}"
            if path in BODIES and method != "get":
                operation["requestBody"] = _body(*BODIES[path])
    return document


def _without_raw(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """``kind`` without its fields of type Raw: those are refused or have no effect, so they are not documented."""
    shown: list[tuple[str, Any, Any]] = [
        (field.name, field.type, msgspec.NODEFAULT if field.required else field.default)
        for field in msgspec.structs.fields(kind)
        if field.type is not msgspec.Raw
    ]
    return msgspec.defstruct(kind.__name__, shown, kw_only=True, namespace={"__doc__": kind.__doc__})


def _body(kind: type, optional: bool) -> dict[str, Any]:
    schema = {"$ref": _REFS + kind.__name__}
    if kind is TokenizeBody:  # a conversation is tokenised too
        schema = {"anyOf": [schema, {"$ref": _REFS + ChatBody.__name__}]}  # type: ignore[dict-item]
    return {"required": not optional, "content": {"application/json": {"schema": schema}}}


def install_docs(app: FastAPI) -> None:
    """Serve /openapi.json and /docs. The page loads nothing from other sites. FastAPI's own page loads a program from
    one, which does not work without the internet and which careful browsers block."""
    page = files("fenceline.entrypoints").joinpath("docs_page.html").read_text(encoding="utf-8")

    @cache
    def document() -> bytes:  # writing it takes longer than all else that a request for it costs
        return orjson.dumps(describe_app(app))

    @for_clients
    async def openapi(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    @for_clients
    async def docs(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    app.add_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    app.add_route("/docs", docs, methods=["GET"], include_in_schema=False)


_POLICY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
