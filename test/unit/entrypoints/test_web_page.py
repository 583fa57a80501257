"""The page at / without a browser: its files, who may have them, and what they may contain; what it asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson
import pytest
from app_requests import ask, make_app
from embedding_model import random_qwen3, save_embedder
from fake_scheduler import FakeScheduler

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints import live_state
from fenceline.entrypoints.live_state import NUM_STEPS, LiveState
from fenceline.entrypoints.web_page import PAGE_PATHS
from fenceline.frontend.metrics import Metrics
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import InternalState, SchedulerReady

TEXTS = {
    path.name: path.read_text(encoding="utf-8") for path in files("fenceline.entrypoints").joinpath("web").iterdir()
}


# --- files


def test_every_file_is_served_with_headers_that_forbid() -> None:
    app = make_app(api_key="key")
    served = set()
    for path in PAGE_PATHS:
        status, headers, body = ask(app, path)
        assert status == 200, "the page is there without a key"
        served.add(body.decode())
        rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
        assert rules["default-src"] == "'none'" and rules["frame-ancestors"] == "'none'"
        assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
        assert rules["img-src"] == "'self' data:", "also what a person adds"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-type"].split(";")[0] == {
            "/": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml",
        }[path.rpartition(".")[2]]  # fmt: skip
    assert served == set(TEXTS.values()), "each file has a path"


def test_a_browser_keeps_a_file_and_asks_whether_it_changed() -> None:
    app = make_app()
    _, headers, body = ask(app, "/")
    assert body and headers["cache-control"] == "no-cache"
    for known in (headers["etag"], f'"other", W/{headers["etag"]}'):
        status, again, body = ask(app, "/", {"if-none-match": known})
        assert (status, body, again["etag"]) == (304, b"", headers["etag"])
        assert "content-security-policy" in again
    assert ask(app, "/", {"if-none-match": '"other"'})[0] == 200


def test_a_server_of_embeddings_shows_no_chat(tmp_path: Path) -> None:
    save_embedder(random_qwen3(), tmp_path)
    pages = [ask(make_app(str(folder)), "/")[2].decode() for folder in (tmp_path, "demo")]
    for page, chats in zip(pages, (False, True), strict=True):
        assert ('data-pane="server">\n' in page) is not chats, "what a narrow screen shows first"
        for tag in re.findall(r'<section id="chat"[^>]*>|<nav[^>]*>', page):
            assert (" hidden" in tag) is not chats
        assert (" hidden" in re.findall(r'<p id="embeds"[^>]*>', page)[0]) is chats


def test_the_page_can_be_taken_away() -> None:
    app = make_app(disable_web_page=True)
    for path in (*PAGE_PATHS, "/live_state"):
        assert ask(app, path)[0] == 404
    assert ask(app, "/docs")[0] == 200


def test_the_files_name_no_others_and_nothing_elsewhere() -> None:
    for name, text in TEXTS.items():
        named = re.findall(r"""(?:src|href)="([^"]+)"|from "([^"]+)"|url\(([^)]+)\)""", text)
        assert {path for groups in named for path in groups if path} <= PAGE_PATHS, name
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    for name, text in TEXTS.items():
        assert not re.search(r"\bstyle=|\son[a-z]+=\"|<script>|<style", text), f"{name}: the policy forbids it"


def test_no_text_can_become_markup() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\b|new Function|localStorage"
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            assert not re.search(ways, text), name


# --- what it asks for


class Engine:
    """As far as the live state asks the tokenizer manager."""

    def __init__(self) -> None:
        self.asked = 0
        self.num_active = 1
        self.answer = asyncio.Event()
        self.failure: RequestError | None = None
        self.running = 1
        self.metrics = Metrics("demo")
        self.limits = SchedulerReady(
            max_total_num_tokens=4096, max_running_requests=3, max_req_input_len=63, context_length=64, memory_bytes={}
        )

    async def live_state(self, num_steps: int) -> tuple[InternalState, bytes]:
        assert num_steps == NUM_STEPS
        self.asked += 1
        await self.answer.wait()
        if self.failure is not None:
            raise self.failure
        state = msgspec.structs.replace(FakeScheduler(()).state(), num_running_reqs=self.running)
        return state, b'{"steps":[]}'


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def view(engine: Engine) -> LiveState:
    config = resolve(ServerArgs(model_path="demo", device="cpu", api_key="secret-key"))
    return LiveState(cast(TokenizerManager, engine), config)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the event loop's clock."""
    now = [100.0]
    monkeypatch.setattr(live_state, "_now", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


async def seen(view: LiveState) -> dict[str, Any]:
    response = await view.live_state()
    assert response.headers["cache-control"] == "no-store"
    content: dict[str, Any] = orjson.loads(response.body)
    return content


async def test_what_it_says(view: LiveState, engine: Engine) -> None:
    engine.answer.set()
    content = await seen(view)
    assert content["max_running_requests"] == 3, "as many as the scheduler has room for"
    assert content["model"] == "demo" and content["recorded"] == {"steps": []} and content["records_steps"] is True
    assert content["has_image_understanding"] is False and content["max_image_bytes"] == 32 << 20
    state = content["state"]
    assert state["num_running_reqs"] == 1 and state["cuda_graphs"]["replays"] == 7
    assert "secret" not in orjson.dumps(content).decode()


async def test_a_hundred_viewers_cost_the_scheduler_what_one_does(
    view: LiveState, engine: Engine, clock: Callable[[float], None]
) -> None:
    viewers = [asyncio.ensure_future(seen(view)) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock(10)  # the scheduler is in a long step: it is not asked again
    viewers += [asyncio.ensure_future(seen(view)) for _ in range(100)]
    await asyncio.sleep(0)
    assert engine.asked == 1
    viewers[0].cancel()  # one that leaves takes nothing from the others
    engine.answer.set()
    contents = await asyncio.gather(*viewers[1:])
    assert engine.asked == 1 and all(content == contents[0] for content in contents)
    clock(live_state.MIN_INTERVAL_S - 10.1)
    for _ in range(20):
        await seen(view)
    assert engine.asked == 1


async def test_news_come_five_times_a_second_or_in_two_seconds(
    view: LiveState, engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.answer.set()
    for _ in range(16):
        await seen(view)
        clock(1 / 16)
    assert engine.asked == 4, "every fourth sixteenth of a second is the first after 0.2 s"
    engine.running = engine.num_active = 0
    clock(1)
    await seen(view)
    engine.asked = 0
    for _ in range(31):
        await seen(view)
        clock(1 / 16)
    assert engine.asked == 0
    engine.num_active = engine.running = 1  # a request is there: nobody waits for the two seconds
    assert (await seen(view))["state"]["num_running_reqs"] == 1


async def test_a_failure_is_told_and_not_kept(view: LiveState, engine: Engine, clock: Callable[[float], None]) -> None:
    engine.answer.set()
    await seen(view)
    clock(1)
    engine.failure = RequestError(503, "the server is starting", code="starting")
    for _ in range(2):
        with pytest.raises(RequestError, match="starting"):
            await seen(view)
    engine.failure = None
    assert await seen(view), "at once"
    assert engine.asked == 4


def test_the_data_needs_the_key_and_an_engine() -> None:
    app = make_app(api_key="key")
    assert ask(app, "/live_state")[0] == 401
    status, _, body = ask(app, "/live_state", {"authorization": "Bearer key"})
    assert status == 503 and b"starting" in body
