"""Who may use which route: no spelling of a path leads past a key, and web pages of other sites get nothing."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import orjson
import pytest
from app_requests import DeadLink, ask, make_app, routes_of
from starlette.types import ASGIApp

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.access import Access, Hosts, rule_of
from fenceline.entrypoints.supervisor import Supervisor
from fenceline.frontend.metrics import Metrics
from fenceline.frontend.request_types import RequestError
from fenceline.ipc.io_struct import SchedulerReady

EVIL = "https://evil.example.org"
LOCAL = {"host": "127.0.0.1:30000"}
JSON = {"content-type": "application/json", "content-length": "2"}


def error_of(body: bytes) -> str:
    error: str = orjson.loads(body)["error"]["code"]
    return error


# --- spellings of paths

PREFIXES = ("", "/", "/.", "/x/..", "//", "%2f", "%00", "%0a", "http://x")
SUFFIXES = (
    "", "%0a", "%0d", "%0d%0a", "%0a%0a", "%00", "%09", "%0b", "%0c", "%1c", "%7f", "%c2%85", "%e2%80%a8", "/", "//",
    "/.", "/..", "/x/..", "%2f", "%2e", ".", ";", ";x", ";x=1", "%3b", "%3f", "%23", "%20", "+", "%c0%af", "%ff", "\\",
    "%5c", ".json", "%250a", "%u000a",
)  # fmt: skip


def spellings(path: str) -> set[str]:
    """``path`` in other words, as uvicorn hands them to the application."""
    path = path.replace("{id}", "resp_1").replace("{name:path}", "demo")
    changed = {path.upper(), path.title(), path.replace("_", "%5f"), path.replace("/", "//"), path[:-1] + "%0a"}
    changed |= {path + suffix for suffix in SUFFIXES}
    changed |= {prefix + path + suffix for prefix in PREFIXES for suffix in ("", "%0a", "/")}
    return {unquote(spelling) for spelling in changed}


@pytest.mark.parametrize(
    "flags", [{"admin_api_key": "admin"}, {"api_key": "key"}, {"api_key": "a", "admin_api_key": "b"}]
)
def test_no_spelling_of_a_path_leads_past_a_key(flags: dict[str, str]) -> None:
    """A request that a handler gets would be answered with 200, a reason of its own or not at all."""
    app = make_app(**flags)
    protected = {Access.ADMINISTRATORS} | ({Access.CLIENTS} if "api_key" in flags else set())
    routes = [route for route in routes_of(app) if rule_of(route).access in protected]
    assert len(routes) >= 12
    for route in routes:
        for path in spellings(route.path):
            for method in sorted(route.methods or ()):
                status, _, body = ask(app, path, method=method)
                known = path.startswith(("/v1/models/", "/v1/responses/")) and path.isprintable()
                assert status in (400, 401) or (not known and status in (307, 404)), (method, path, status, body)


def test_control_characters_in_a_path_are_400_before_any_key() -> None:
    for app in (make_app(), make_app(api_key="key")):
        for path in ("/health\n", "/metrics\r", "/\n", "/v1/models/a\nb", "/v1/models\x00", "/nothing\x7f"):
            status, _, body = ask(app, path)
            assert status == 400 and b"control characters" in body, path


def test_a_request_without_the_key_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[DeadLink] = []
    monkeypatch.setattr(DeadLink, "wake", lambda link: woken.append(link))
    app = make_app(api_key="key")
    assert ask(app, "/generate", JSON, "POST")[0] == 401 and not woken
    assert ask(app, "/generate", JSON | {"x-api-key": "key"}, "POST")[0] != 401 and len(woken) == 1


def test_what_nobody_has_marked_is_for_administrators() -> None:
    app = make_app(admin_api_key="admin")
    for route in routes_of(app):
        assert rule_of(route).access is getattr(route.endpoint, "access", Access.ADMINISTRATORS)
    assert ask(app, "/stop_profile")[0] == 401


# --- web pages


@pytest.fixture(scope="module")
def app() -> ASGIApp:
    return make_app()


def changing(app: ASGIApp) -> list[tuple[str, str]]:
    """(method, path) of every request that changes something."""
    return [
        (method, route.path.replace("{id}", "resp_1"))
        for route in routes_of(app)
        if rule_of(route).changes
        for method in sorted(route.methods or ())
    ]


@pytest.mark.parametrize(
    "page",
    [
        {"origin": EVIL},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8080"},
        {"origin": "http://localhost:30000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": EVIL, "sec-fetch-site": "cross-site"},
    ],
)  # fmt: skip
def test_pages_of_other_sites_change_nothing(app: ASGIApp, page: dict[str, str]) -> None:
    requests = changing(app)
    assert {("POST", "/update_weights_from_disk"), ("GET", "/flush_cache"), ("DELETE", "/v1/responses/resp_1")} <= set(
        requests
    )
    for kind in ({"content-type": "text/plain", "content-length": "2"}, JSON, {}):
        for method, path in requests:
            status, _, body = ask(app, path, {**LOCAL, **page, **kind}, method)
            assert (status, error_of(body)) == (403, "origin_not_allowed"), (method, path)


def test_an_image_of_a_browser_without_a_site_changes_nothing(app: ASGIApp) -> None:
    """Browsers send Sec-Fetch-Site to https and to this machine alone, and Origin with no image."""
    for method, path in changing(app):
        if method == "GET":
            assert ask(app, path, {"host": "192.168.1.5:30000", "user-agent": "Mozilla/5.0 (X11)"})[0] == 403, path


@pytest.mark.parametrize(
    ("kind", "length", "status"),
    [
        ("application/json", "9", 400), ("application/json; charset=utf-8", "9", 400), ("application/x+json", "9", 400),
        ("text/plain", "9", 415), ("application/x-www-form-urlencoded", "9", 415), ("multipart/form-data", "9", 415),
        ("text/plain; a=application/json", "9", 415), (None, "9", 415), (None, "0", 400), ("text/plain", "0", 400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("own", [{"origin": "http://127.0.0.1:30000"}, {"sec-fetch-site": "same-origin"}])
def test_this_servers_own_page_sends_json(
    app: ASGIApp, kind: str | None, length: str, status: int, own: dict[str, str]
) -> None:
    headers = {**LOCAL, **own, "content-length": length, **({} if kind is None else {"content-type": kind})}
    assert ask(app, "/abort_request", headers, "POST")[0] == status  # 400: the handler's, for the empty body


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"])
def test_command_lines_and_sglangs_clients_need_no_header(app: ASGIApp, kind: str | None) -> None:
    """curl -d sends a form's type, SGLang's clients none with an empty body."""
    headers = {**LOCAL, "user-agent": "curl/8.0", "content-length": "2", **({"content-type": kind} if kind else {})}
    assert ask(app, "/abort_request", headers, "POST")[0] == 400, "the handler's, for the empty body"


def test_an_allowed_origin_may_and_a_key_is_permission_enough() -> None:
    app = make_app(cors_allowed_origins=("https://chat.example.org",))
    assert ask(app, "/abort_request", {**LOCAL, **JSON, "origin": "https://chat.example.org"}, "POST")[0] == 400
    assert ask(app, "/abort_request", {**LOCAL, **JSON, "origin": EVIL}, "POST")[0] == 403
    app = make_app(api_key="key")  # which no page knows unless its user has typed it there
    headers = {"host": "llm.example.org", "origin": EVIL, "authorization": "Bearer key", "content-length": "2"}
    assert ask(app, "/abort_request", headers, "POST")[0] == 400


def test_behind_a_proxy_that_speaks_tls_the_page_works(app: ASGIApp) -> None:
    names = make_app(allowed_hosts=("llm.example.org",))
    for server, headers in (
        (names, {"host": "llm.example.org", "origin": "https://llm.example.org"}),
        (app, {**LOCAL, "origin": "https://llm.example.org", "sec-fetch-site": "same-origin"}),
    ):
        assert ask(server, "/abort_request", {**headers, **JSON}, "POST")[0] == 400


# --- what is counted


def test_refused_requests_are_counted_by_status_and_reason() -> None:
    app = make_app(enable_metrics=True, api_key="key", disable_web_page=True)
    key = {"authorization": "Bearer key"}
    for path, headers, method in (
        ("/nothing", {}, "GET"), ("/nothing", key, "GET"), ("/nothing/else", key, "GET"), ("/v1/models", key, "POST"),
        ("/health\n", {}, "GET"), ("/abort_request", key, "POST"), ("/v1/messages", key, "POST"),
        ("/v1/completions", key, "POST"), ("/generate", {**key, "content-length": "99999999"}, "POST"),
    ):  # fmt: skip
        assert ask(app, path, headers, method)[0] >= 400
    lines = ask(app, "/metrics")[2].decode().splitlines()
    counts = {line.partition("{")[2] for line in lines if line.startswith("fenceline:num_refused_requests_total{")}
    labels = 'model_name="demo",reason="%s",status="%s"} %s'
    assert counts == {
        labels % ("invalid_api_key", 401, "1.0"), labels % ("not_found", 404, "2.0"),
        labels % ("invalid_request", 405, "1.0"), labels % ("invalid_request", 400, "1.0"),
        labels % ("invalid_json", 400, "3.0"), labels % ("body_too_large", 413, "1.0"),
    }  # fmt: skip


def test_the_reasons_are_bounded() -> None:
    metrics = Metrics("m")
    for number in range(1000):
        metrics.refused(RequestError(400, "", code=f"code {number}"))
    samples = [line for line in metrics.exposition().decode().splitlines() if "num_refused_requests_total{" in line]
    assert len(samples) <= 101 and sum(float(line.rpartition(" ")[2]) for line in samples) == 1000


# --- host names


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:30000", True), ("localhost", True), ("LOCALHOST:1", True), ("localhost.:80", True),
        ("[::1]:1", True),
        ("[fe80::1%eth0]", True), ("10.1.2.3", True), ("fenceline:30000", True), ("gpu-1.local", True),
        ("fenceline.default.svc.cluster.local:30000", True), ("host.docker.internal", True), ("a.localhost", True),
        ("evil.example.org", False), ("evil.example.org:30000", False), ("127.0.0.1.nip.io", False),
        ("localhost.evil.org", False), ("evil.org.", False), ("[evil.org]", False), ("local", True),
        ("evil.dev", False),
        ("127.0.0.1@evil.org", False), ("", False), ("evil.org:80@localhost", False), ("a.localhost.org", False),
    ],
)  # fmt: skip
def test_names_that_a_web_site_may_have_are_not_this_servers(host: str, known: bool) -> None:
    assert Hosts(("127.0.0.1", "machine")).has(host.encode()) == known


def test_own_and_allowed_names() -> None:
    hosts = Hosts(("0.0.0.0", "GPU1.lab.example.com"), ("llm.example.org", "*.corp.example"))
    for name in (b"gpu1.lab.example.com:1", b"llm.example.org", b"a.corp.example", b"a.b.corp.example:80"):
        assert hosts.has(name)
    for name in (b"x.llm.example.org", b"corp.example", b"evilcorp.example", b"\xff.example"):
        assert not hosts.has(name)
    assert Hosts(allowed=("*",)).has(b"anything.example.org")


def test_a_name_that_leads_here_from_outside_reads_nothing(app: ASGIApp) -> None:
    """DNS rebinding: for the browser the page and this server are one site."""
    for path in ("/v1/models", "/server_info", "/live_state", "/flight_recorder", "/docs", "/v1/responses/resp_1"):
        status, _, body = ask(app, path, {"host": "evil.example.org:30000"})
        assert (status, error_of(body)) == (403, "host_not_allowed"), path
    for path in ("/health", "/metrics", "/"):  # as with a key
        assert ask(app, path, {"host": "llm.example.org"})[0] in (200, 404, 503), path
    named = make_app(allowed_hosts=("llm.example.org",))
    assert ask(named, "/v1/models", {"host": "llm.example.org:30000"})[0] == 200
    keyed = make_app(api_key="key")
    assert ask(keyed, "/v1/models", {"host": "llm.example.org", "authorization": "Bearer key"})[0] == 200


@pytest.mark.parametrize("name", ["", "http://a.example.org", "a.example.org:80", "*.", "a*.org", "a b"])
def test_what_is_no_host_name_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        resolve(ServerArgs(model_path="demo", device="cpu", allowed_hosts=(name,)))


# --- at start


@pytest.mark.parametrize(
    ("host", "flags", "warns"),
    [
        ("0.0.0.0", {}, True), ("0.0.0.0", {"api_key": "key"}, False), ("::", {"admin_api_key": "key"}, True),
        ("127.0.0.1", {}, False), ("localhost", {}, False), ("192.168.1.5", {}, True),
    ],
)  # fmt: skip
def test_a_server_that_is_open_to_others_says_so(
    host: str, flags: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve(ServerArgs(model_path="demo", device="cpu", host=host, **flags))
    limits = SchedulerReady(
        max_total_num_tokens=1, max_running_requests=1, max_req_input_len=1, context_length=1, memory_bytes={}
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        Supervisor(config, cast(Any, None), sock)._announce(cast(Any, SimpleNamespace(limits=limits)))
    assert [record.levelname for record in caplog.records].count("WARNING") == warns
    assert ("Without --api-key" in caplog.text) == warns
