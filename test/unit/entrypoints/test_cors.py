"""--cors-allowed-origins: what a browser may do for pages of other sites."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from app_requests import ask, make_app
from starlette.types import ASGIApp

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs, parse_args

OURS, THEIRS = "https://chat.example.org", "https://evil.example.org"
ALLOWED = "access-control-allow-origin"


def preflight(app: ASGIApp, origin: str, path: str = "/v1/chat/completions") -> tuple[int, Mapping[str, str]]:
    """What a browser asks before it sends a page's request with a key."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    status, answer, _ = ask(app, path, headers, "OPTIONS")
    return status, answer


def test_without_the_flag_no_page_of_another_site_gets_anything() -> None:
    app = make_app()
    assert ALLOWED not in ask(app, "/v1/models", {"origin": OURS})[1]
    status, headers = preflight(app, OURS)
    assert status == 405 and ALLOWED not in headers


def test_a_named_site_is_allowed_and_others_are_not() -> None:
    app = make_app(cors_allowed_origins=("http://localhost:3000", OURS), api_key="key")
    status, headers = preflight(app, OURS)  # browsers send no key with this
    assert status == 200 and headers[ALLOWED] == OURS
    assert "authorization" in headers["access-control-allow-headers"]
    assert {"GET", "POST", "DELETE"} <= set(headers["access-control-allow-methods"].split(", "))
    status, headers = preflight(app, THEIRS)
    assert status == 400 and ALLOWED not in headers
    key = {"authorization": "Bearer key"}
    status, headers, _ = ask(app, "/v1/models", {"origin": OURS, **key})
    assert status == 200 and headers[ALLOWED] == OURS and "x-request-id" in headers
    assert "x-request-id" in headers["access-control-expose-headers"]
    assert ALLOWED not in ask(app, "/v1/models", {"origin": THEIRS, **key})[1]


@pytest.mark.parametrize("path", ["/v1/models", "/flush_cache", "/nothing"])
def test_a_permission_opens_nothing_and_the_refusal_is_readable(path: str) -> None:
    app = make_app(cors_allowed_origins=("*",), api_key="key")
    status, headers, body = ask(app, path, {"origin": THEIRS})
    assert status == 401 and headers[ALLOWED] == "*" and b"invalid_api_key" in body
    assert "access-control-allow-credentials" not in headers, "no cookies, no passwords of the browser"


@pytest.mark.parametrize("origin", ["", "chat.example.org", f"{OURS}/", f"{OURS}/chat", "HTTPS://A.B", "null"])
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-allowed-origins"):
        resolve(ServerArgs(model_path="demo", device="cpu", cors_allowed_origins=(origin,)))


def test_on_the_command_line() -> None:
    args = parse_args(["--model-path", "demo", "--cors-allowed-origins", OURS, "http://[::1]:8080"])
    assert args.cors_allowed_origins == (OURS, "http://[::1]:8080")
    resolve(args)
