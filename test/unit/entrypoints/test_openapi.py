"""The server's description of itself, and which of its endpoints a key opens."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import orjson
import pytest
from app_requests import ask, ask_many, make_app, paths_for
from fastapi import FastAPI
from starlette.types import ASGIApp

from fenceline.config import ConfigError, engine_config
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints import openapi
from fenceline.entrypoints.access import Access
from fenceline.frontend.metrics import Metrics

# Whoever adds an endpoint decides where it is declared, and here again, who may use it.
OPEN_PATHS = {"/health", "/metrics"}
NORMAL_PATHS = {
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses", "/v1/responses/{id}", "/v1/embeddings",
    "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score",
    "/v1/models", "/v1/models/{name}", "/tokenize",
    "/v1/tokenize", "/detokenize", "/v1/detokenize", "/health_generate", "/model_info", "/get_model_info",
    "/weight_version", "/get_weight_version",
    "/server_info", "/get_server_info", "/live_state",
}  # fmt: skip
ADMIN_PATHS = {
    "/flush_cache", "/clear_hicache_storage_backend", "/hicache/storage-backend/clear", "/abort_request",
    "/pause_generation", "/continue_generation", "/start_profile", "/stop_profile", "/flight_recorder",
    "/update_weights_from_disk", "/update_weights_from_tensor",
}  # fmt: skip
WITHOUT_BODY = {
    "/flush_cache", "/clear_hicache_storage_backend", "/hicache/storage-backend/clear", "/continue_generation",
    "/stop_profile", "/flight_recorder",
}  # fmt: skip


@pytest.fixture(scope="module")
def app() -> ASGIApp:
    return make_app()


@pytest.fixture(scope="module")
def document(app: ASGIApp) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, _, body = ask(app, "/openapi.json")
    assert status == 200
    loaded: dict[str, Any] = orjson.loads(body)
    return loaded


def test_every_post_has_a_body_that_says_what_it_may_hold(app: ASGIApp, document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            has_body = "requestBody" in operation
            assert has_body == (method in ("post", "put") and path not in WITHOUT_BODY), (method, path)
    schemas = document["components"]["schemas"]
    generate = schemas["GenerateBody"]["properties"]
    assert {"text", "input_ids", "sampling_params", "stream", "rid"} <= generate.keys()
    assert "lora_path" not in generate, "it is refused"
    assert "max_new_tokens" in schemas["NativeSampling"]["properties"]
    assert "messages" in schemas["ChatBody"]["required"]


def test_the_document_is_whole(document: dict[str, Any]) -> None:
    for name in re.findall(rb'"#/components/schemas/([^"]+)"', orjson.dumps(document)):
        assert name.decode() in document["components"]["schemas"]
    assert b"$defs" not in orjson.dumps(document)
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


def test_what_anybody_may_ask_for_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen connections may be answered in one turn of the event loop, which everybody else waits for."""
    rendered: list[str] = []
    render, describe = Metrics.exposition, openapi.describe_app

    def counted_render(metrics: Metrics) -> bytes:
        rendered.append("metrics")
        return render(metrics)

    def counted_describe(app: FastAPI) -> dict[str, Any]:
        rendered.append("document")
        return describe(app)

    monkeypatch.setattr(Metrics, "exposition", counted_render)
    monkeypatch.setattr(openapi, "describe_app", counted_describe)
    app = make_app(enable_metrics=True)
    many = ask_many(app, "/metrics", num=16)
    assert {(status, b"num_requests" in body) for status, _, body in many} == {(200, True)}
    assert rendered == ["metrics"], "those of one turn share it"
    assert ask(app, "/metrics")[0] == 200
    assert rendered == ["metrics", "metrics"], "a later one gets news"
    rendered.clear()
    documents = {body for _ in range(2) for _, _, body in ask_many(app, "/openapi.json", num=3)}
    assert len(documents) == 1
    assert rendered == ["document"]
    config = resolve(ServerArgs(model_path="demo", device="cpu"))
    shown = config.public_dict()
    monkeypatch.delattr(engine_config, "flags_of")
    assert config.public_dict() == shown


def test_the_page_needs_nothing_from_elsewhere(app: ASGIApp) -> None:
    status, headers, body = ask(app, "/docs")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert b"openapi.json" in body
    assert not re.search(rb"https?://|src=|//cdn", body)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert ask(app, "/redoc")[0] == 404


def test_a_404_names_what_every_user_has(app: ASGIApp) -> None:
    status, _, body = ask(app, "/nothing\u2028here")
    message = orjson.loads(body)["error"]["message"]
    assert status == 404
    assert message == "no such endpoint: /nothing\\u2028here; /docs lists them all"


# --- keys


def test_every_endpoint_is_open_normal_or_an_administrators(app: ASGIApp, document: dict[str, Any]) -> None:
    assert document["paths"].keys() == OPEN_PATHS | NORMAL_PATHS | ADMIN_PATHS
    normal = {re.sub(":path", "", path) for path in paths_for(app, Access.CLIENTS)}
    assert paths_for(app, Access.ANYBODY) == OPEN_PATHS
    assert normal == NORMAL_PATHS | {"/docs", "/openapi.json"}
    assert paths_for(app, Access.ADMINISTRATORS) == ADMIN_PATHS


KEY, ADMIN = {"authorization": "Bearer key"}, {"authorization": "Bearer admin"}


@pytest.mark.parametrize(
    ("flags", "headers", "normal", "admin"),
    [
        ({}, {}, True, True),
        ({"api_key": "key"}, {}, False, False),
        ({"api_key": "key"}, KEY, True, True),
        ({"admin_api_key": "admin"}, {}, True, False),
        ({"admin_api_key": "admin"}, ADMIN, True, True),
        ({"api_key": "key", "admin_api_key": "admin"}, {}, False, False),
        ({"api_key": "key", "admin_api_key": "admin"}, KEY, True, False),
        ({"api_key": "key", "admin_api_key": "admin"}, ADMIN, False, True),
        ({"api_key": "key"}, {"authorization": "bearer key"}, True, True),
        ({"api_key": "key"}, {"authorization": "Basic key"}, False, False),
        ({"api_key": "key"}, {"authorization": "key"}, False, False),
        ({"api_key": "key"}, {"authorization": "Bearer ké"}, False, False),
        ({"api_key": "key"}, {"authorization": "Bearer "}, False, False),
        ({"api_key": "key"}, {"x-api-key": "key"}, True, True),
        ({"api_key": "key", "admin_api_key": "admin"}, {"x-api-key": "admin"}, False, True),
    ],
)
def test_keys_open_as_in_sglang(flags: dict[str, str], headers: dict[str, str], normal: bool, admin: bool) -> None:
    app = make_app(**flags)
    for paths, opens in ((NORMAL_PATHS, normal), (ADMIN_PATHS, admin), (OPEN_PATHS, True)):
        for path in paths:
            for method in ("GET", "POST", "PUT"):
                status, _, body = ask(app, path, headers, method)
                assert (status != 401) == opens, (path, body)


def test_documents_and_unknown_paths_need_the_key_too() -> None:
    app = make_app(api_key="key")
    for path in ("/docs", "/openapi.json", "/nothing", "/healthy", "/health/", "/metrics/x", "//flush_cache"):
        assert ask(app, path)[0] == 401, path


def test_the_configuration_that_is_shown_is_json() -> None:
    config = resolve(ServerArgs(model_path="demo", device="cpu", enable_hierarchical_cache=True))
    shown = replace(config, model=replace(config.model, unrotated_layers=frozenset((3, 1)))).public_dict()
    assert orjson.loads(orjson.dumps(shown))["model"]["unrotated_layers"] == [1, 3]


def test_keys_are_not_shown_and_are_checked_at_start() -> None:
    config = resolve(ServerArgs(model_path="demo", device="cpu", api_key="alpha", admin_api_key="beta"))
    assert config.public_dict()["admin_api_key"] is True
    for shown in (repr(config), str(config.public_dict())):
        assert "alpha" not in shown and "beta" not in shown
    for key in ("", " a", "a\n", "é"):
        with pytest.raises(ConfigError, match="--admin-api-key"):
            resolve(ServerArgs(model_path="demo", device="cpu", admin_api_key=key))
