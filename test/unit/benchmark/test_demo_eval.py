"""The evaluation scripts against a little server that knows the answers, or gets some of them wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web

from fenceline_demo.client import Reply
from fenceline_demo.evaluation import compare, held_out_items, score
from fenceline_demo.picture_chat import held_out_pictures

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARK / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EVAL = _script("eval_demo")
Answerer = Callable[[dict[str, object]], str | None]


@contextmanager
def serving(answer: Answerer) -> Iterator[int]:
    """A server on a free port that replies with `answer(body)`, or with a 500 for None."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "demo"
        text = answer(body)
        if text is None:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        chat = request.path.endswith("/chat/completions")
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
        return web.json_response({"choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo"}]})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"internal_states": [{"avg_spec_accept_length": None}]})

    app = web.Application()

    async def flush(request: web.Request) -> web.Response:
        return web.Response(status=200 if answer({"flush": True}) else 400, text="busy")

    app.add_routes([web.get("/get_server_info", info), web.post("/flush_cache", flush)])
    app.add_routes([web.post("/v1/completions", complete), web.post("/v1/chat/completions", complete)])
    app.add_routes([web.get("/v1/models", models)])
    loop, runner = asyncio.new_event_loop(), web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield runner.addresses[0][1]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _knowing(num_items: int, wrong: tuple[str, ...] = ()) -> Answerer:
    """Answers the items of seed 0, those whose id is in `wrong` not."""
    table: dict[object, str] = {}
    for item in held_out_items(0, num_items):
        text = "no idea" if item.item_id in wrong else item.item.answer
        table[item.prompt()] = f" {text}"
        table[item.messages()[0]["content"]] = text

    def answer(body: dict[str, object]) -> str:
        if "messages" not in body:
            assert body["stop"] == ["\n"]
            return table[body["prompt"]]
        messages = body["messages"]
        assert isinstance(messages, list)
        return table[messages[0]["content"]]

    return answer


@pytest.mark.parametrize("layout", ["completions", "chat"])
def test_all_right(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    with serving(_knowing(24)) as port:
        flags = ["--port", str(port), "--num-items", "24", "--format", layout, "--json", str(file)]
        assert EVAL.main([*flags, "--min-accuracy", "1"]) == 0
    out = capsys.readouterr().out
    assert "100.00%" in out and "48 of them from the prefix cache" in out
    run = json.loads(file.read_bytes())
    assert run["accuracy"] == 1.0 and len(run["items"]) == 24 and len(run["categories"]) == 12


def test_wrong_answers_lower_the_accuracy_and_fail_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(_knowing(24, wrong=("add-0", "recall-1"))) as port:
        flags = ["--port", str(port), "--num-items", "24"]
        assert EVAL.main([*flags, "--min-accuracy", "0.95"]) == 1
        assert EVAL.main([*flags, "--min-accuracy", "0.90"]) == 0
    out = capsys.readouterr().out
    assert "91.67%" in out and "add-0: expected" in out and "below --min-accuracy" in out


def test_paired_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    with serving(_knowing(24, wrong=("sub-0",))) as port:
        assert EVAL.main(["--port", str(port), "--num-items", "24", "--json", str(before)]) == 0
        same = ["--port", str(port), "--num-items", "24", "--compare", str(before), "--require-equal"]
        assert EVAL.main(same) == 0
        other = ["--port", str(port), "--num-items", "24", "--format", "chat", "--compare", str(before)]
        assert EVAL.main(other) == 2
    assert "another prompt" in capsys.readouterr().err
    with serving(_knowing(24, wrong=("mul-0", "sort-1"))) as port:
        flags = ["--port", str(port), "--num-items", "24", "--compare", str(before)]
        assert EVAL.main([*flags, "--max-loss", "5"]) == 0
        assert EVAL.main([*flags, "--max-loss", "4"]) == 1
        assert EVAL.main([*flags, "--require-equal"]) == 1
    assert "3 answers differ, 2 newly wrong, 1 newly right, loss +4.17 points" in capsys.readouterr().out


def _seeing(num_items: int, wrong_in_company: bool = False) -> Answerer:
    """Answers questions about pictures, by all of a message; after a flush of the cache the second one wrongly, if
    so."""
    items = held_out_pictures(0, num_items)
    table = {json.dumps(item.messages()): item.item.answer for item in items}
    flushed = False

    def answer(body: dict[str, object]) -> str:
        nonlocal flushed
        if "flush" in body:
            flushed = True
            return "flushed"
        asked = json.dumps(body["messages"])
        return "no idea" if flushed and wrong_in_company and asked == list(table)[1] else table[asked]

    return answer


def test_pictures_alone_and_in_company(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-items", "18", "--pictures", "--alone", "--require-equal"]
    with serving(_seeing(18)) as port:
        assert EVAL.main([*flags, "--port", str(port), "--min-accuracy", "1"]) == 0
    out = capsys.readouterr().out
    assert "several" in out and "against each alone, 18 items: 0 answers differ" in out
    with serving(_seeing(18, wrong_in_company=True)) as port:
        assert EVAL.main([*flags, "--port", str(port)]) == 1
    out = capsys.readouterr().out
    assert "against each alone, 18 items: 1 answers differ, 1 newly wrong" in out and "differs: total-0" in out
    with serving(lambda body: "" if "flush" in body else "red") as port:
        assert EVAL.main([*flags, "--port", str(port)]) == 2
    assert "HTTP 400: busy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        EVAL.parse_args(["--pictures", "--categories", "add"])
    assert "choose from count" in capsys.readouterr().err


def test_no_server_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body: "") as port:
        pass  # the port is free again
    assert EVAL.main(["--port", str(port)]) == 2
    assert "start the server" in capsys.readouterr().err


def test_scores_are_exact_and_runs_must_pair() -> None:
    first, second = held_out_items(0, 2)
    answer = first.item.answer
    good = score(first, "p", Reply(f" {answer}\n", ""))
    assert good.correct
    assert not score(first, "p", Reply(answer + "0", "")).correct
    assert not score(first, "p", Reply(answer, "broken")).correct
    with pytest.raises(ValueError, match="share no items"):
        compare([good], [score(second, "p", Reply("", ""))])
