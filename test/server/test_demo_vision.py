"""demo-vision over HTTP: held-out questions about pictures, alone and in company, and what shows that it looks."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer

from fenceline_demo.client import Server, ask_all
from fenceline_demo.picture_chat import held_out_pictures

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import eval_demo

pytestmark = [pytest.mark.long, pytest.mark.slow]
PAGE = Path(__file__).parents[2] / "docs" / "use" / "images.md"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server whose chunks end within pictures."""
    flags = ["--device", "cpu", "--chunked-prefill-size", "64", "--max-total-tokens", "8192"]
    with LiveServer.real("--model-path", "demo-vision", *flags) as live:
        yield live.wait_ready().base_url


def test_held_out_questions_alone_and_in_company(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pictures", "--alone", "--require-equal", "--num-items", "90", "--concurrency", "32"]
    assert eval_demo.main(["--base-url", url, *flags, "--min-accuracy", "0.95"]) == 0, capsys.readouterr().out
    assert "0 answers differ" in capsys.readouterr().out


def test_pictures_in_each_others_places_give_wrong_answers(url: str) -> None:
    """What the evaluation would see if embeddings were mixed up: the same questions, each about another picture."""
    items = held_out_pictures(3, 40, ("picture", "several"))
    bodies = []
    for item, other in zip(items, [*items[2:], *items[:2]], strict=True):
        [message], [donor] = item.messages(), other.messages()
        assert isinstance(message["content"], list) and isinstance(donor["content"], list)
        [text] = [part for part in message["content"] if part["type"] == "text"]
        parts = [part for part in donor["content"] if part["type"] != "text"]
        bodies.append({"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 40, "temperature": 0})
    replies = asyncio.run(ask_all(Server(url, "default"), "/v1/chat/completions", bodies, 16))
    assert not any(reply.error for reply in replies)
    right = sum(reply.text.strip() == item.item.answer for reply, item in zip(replies, items, strict=True))
    assert right < len(items) // 4


def test_a_later_turn_brings_a_second_picture(url: str) -> None:
    """The first picture is still what its number says, and the second one is what the question is about."""
    asked = held_out_pictures(7, 6, ("picture",))
    pairs = list(zip(asked[:3], asked[3:], strict=True))
    found, wanted = [], []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        def answer(messages: list[Any]) -> str:
            ask: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 40}
            return client.chat.completions.create(messages=messages, **ask).choices[0].message.content or ""

        for first, second in pairs:
            messages: list[Any] = [*first.messages()]
            found.append(answer(messages))
            messages.append({"role": "assistant", "content": found[-1]})
            parts: Any = second.messages()[0]["content"]
            picture = [part for part in parts if part["type"] == "image_url"]
            text = {"type": "text", "text": "What is in the second image?"}
            messages.append({"role": "user", "content": [*picture, text]})
            found.append(answer(messages))
            wanted += [first.item.answer, second.item.answer]
    assert sum(map(str.__eq__, found, wanted)) >= len(wanted) - 1, (found, wanted)


def test_the_example_of_the_documentation_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, rest = PAGE.read_text().partition("```python\n")[2].partition("```")
    printed = re.search(r"```\n(.*?)```", rest, re.DOTALL)
    assert printed is not None
    exec(compile(code.replace("http://127.0.0.1:30000", url), str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed[1]
