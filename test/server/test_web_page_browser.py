"""The page at / in a headless browser: the chat, the server beside it, keys, a narrow screen.

The browser is the system's Chromium (``apt-get install chromium``) or the one that ``playwright install`` brings.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_scheduler import Seed
from hostile_images import data_url, picture, png, written
from live_server import LiveServer, scheduler_state, wait_for
from vision_server import save_vision_model

playwright = pytest.importorskip("playwright.sync_api", reason="the extra 'test' is not installed: no playwright")

pytestmark = [pytest.mark.slow, pytest.mark.long]
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script> **bold** `code`"
DOT = written(picture(8, 8), "GIF")
OpenPage = Callable[..., Any]


def executable(chromium: Any) -> str | None:
    """Playwright's own browser (None) or the system's. Skips where there is neither."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        found = shutil.which(name)
        if found is not None:
            return found
    if not shutil.which(chromium.executable_path):
        pytest.skip("no browser: neither a Chromium of the system nor one of playwright's")
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium
        opened = chromium.launch(executable_path=executable(chromium), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens pages, and looks at the end whether one had an error, opened a dialog or asked anybody else."""
    contexts, wrong = [], list[str]()

    def open_page(server: LiveServer, width: int = 1280, height: int = 800, expected: str = "") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()

        def told(message: Any) -> None:
            if message.type == "error" and not (expected and expected in message.text):
                wrong.append(message.text)

        def asked(request: Any) -> None:
            if not request.url.startswith((server.base_url, "blob:", "data:")):
                wrong.append(request.url)

        def dialog(shown: Any) -> None:
            wrong.append(f"a dialog: {shown.message}")
            shown.dismiss()

        page.on("console", told)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", asked)
        page.on("dialog", dialog)
        page.goto(server.base_url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture(scope="module")
def demo() -> Iterator[LiveServer]:
    with LiveServer.real("--model-path", "demo", "--device", "cpu", "--max-total-tokens", "4096") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that repeats what it was asked."""
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text("{{ messages[-1].content }}")
    with LiveServer.fake("--chat-template", str(template)) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def tiers() -> Iterator[LiveServer]:
    """A server whose scheduler always tells the same of graphs and tiers."""
    with LiveServer.fake("--enable-hierarchical-cache") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("vision")
    save_vision_model(directory)
    with LiveServer.real("--model-path", str(directory), "--device", "cpu") as server:
        yield server.wait_ready()


def say(page: Any, text: str, **settings: object) -> None:
    if settings:
        page.locator("#settings summary").click()
        for name, value in settings.items():
            page.fill(f"[name={name}]", str(value))
        page.locator("#settings summary").click()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_a_chat_and_the_server_beside_it(demo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(demo)
    page.get_by_role("status").filter(has_text="Serving").wait_for()
    assert page.locator("#model").inner_text() == "demo"
    say(page, "Tell me a short story.", temperature=0, max_tokens=48)
    page.locator(".meta").filter(has_text="48 tokens").wait_for()
    shown = page.locator(".message.assistant .text").inner_text()
    with demo.client() as client:
        body = {"messages": [{"role": "user", "content": "Tell me a short story."}], "temperature": 0, "max_tokens": 48}
        said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert shown == said.strip() != ""
    # The second answer knows of the first.
    say(page, "And then?", max_tokens=4)
    page.locator(".meta").nth(1).wait_for()
    # The server's view, drawn from the recorder's steps.
    assert not page.locator("#accept-row").is_visible(), "no speculation"
    page.locator("#timeline rect.decode").first.wait_for()
    assert page.locator("#timeline path.results").count() >= 1
    page.locator("#hits").filter(has_text=re.compile("[1-9]")).wait_for()
    page.locator("#timeline").focus()
    newest = page.locator("#step").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step").inner_text() != newest
    assert page.locator("#timeline .chosen").count() == 1


def test_the_figures_are_the_schedulers(open_page: OpenPage, tiers: LiveServer) -> None:
    page = open_page(tiers)
    page.locator("#replays").filter(has_text="11 of 14 eligible steps (78.6%)").wait_for()
    assert page.locator("#repairs").inner_text() == "0" and page.locator("#retractions").inner_text() == "3"
    assert page.locator("#hits").inner_text() == "25%"
    assert page.locator("#hits-legend").inner_text().split() == [
        "device", "11", "host", "memory", "12", "storage", "13", "computed",
    ]  # fmt: skip
    shares = page.locator("#hits-bar span").evaluate_all("parts => parts.map((part) => parseFloat(part.style.width))")
    assert shares == pytest.approx([25 * part / 36 for part in (11, 12, 13)], abs=0.01)
    assert page.locator("#accept").inner_text() == "2.50 tokens a step"
    assert page.get_by_text("No steps yet.").is_visible()


def test_everything_that_can_be_used_has_a_name_and_a_key(open_page: OpenPage, tiers: LiveServer) -> None:
    page = open_page(tiers)
    page.locator("#settings summary").click()
    controls = page.locator("input:visible, textarea:visible, select:visible, button:visible")
    for control in controls.all():
        named = "e => (e.labels?.[0] ?? e).textContent.trim() || e.getAttribute('aria-label')"
        assert control.evaluate(named), control.evaluate("e => e.outerHTML")
    page.locator("body").evaluate("e => { document.activeElement.blur(); }")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"system", "temperature", "tools", "text", "send", "trace", "timeline"} <= reached


def test_a_reload_keeps_the_conversation(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    assert page.evaluate("document.activeElement.id") == "text", "one can write at once"
    say(page, "**first**", temperature=0.5, max_tokens=4)
    page.locator(".meta").wait_for()
    answer = page.locator(".message.assistant .text").inner_html()
    page.reload()
    assert page.locator(".message.user .said").inner_text() == "**first**"
    assert page.locator(".message.assistant .text").inner_html() == answer
    assert page.locator("[name=temperature]").input_value() == "0.5"
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    say(page, "second")
    page.locator(".message.assistant").nth(1).locator(".meta").wait_for()
    assert [turn["role"] for turn in sent[-1]["messages"]] == ["user", "assistant", "user"]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    assert page.locator(".message").count() == 0 and page.locator("#empty").is_visible()


def test_looking_closely_pauses_the_timeline_and_stops_no_answer(demo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(demo)
    say(page, "Hi", max_tokens=3)
    page.locator(".meta").wait_for()
    page.locator("#timeline rect.decode").first.wait_for()
    page.locator("#timeline").focus()
    assert not page.locator("#held").is_visible()
    page.keyboard.press("Space")
    assert page.locator("#held").is_visible() and page.locator("#timeline .chosen").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#held").is_visible(), "that key stops answers"
    page.keyboard.press("Space")
    assert not page.locator("#held").is_visible() and page.locator("#timeline .chosen").count() == 0


def test_an_answer_and_its_code_can_be_copied(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "see `x`\n\n```\na = 1\n```"
    with echo.client() as client:
        num_tokens = len(client.post("/tokenize", json={"prompt": text}).json()["tokens"])
    say(page, text, max_tokens=num_tokens)
    page.locator(".meta").wait_for()
    for name, copied in (("Copy the code", "a = 1"), ("Copy the answer", text)):
        page.get_by_role("button", name=name).click()
        page.get_by_text("Copied", exact=True).first.wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == copied


def test_figures_of_a_server_that_is_gone_are_dim(open_page: OpenPage) -> None:
    with LiveServer.fake() as server:
        server.wait_ready()
        page = open_page(server, expected="Failed to load resource")
        page.get_by_role("status").filter(has_text="Serving").wait_for()
        dim = "parseFloat(getComputedStyle(document.querySelector('.tiles')).opacity)"
        assert page.evaluate(dim) == 1
    page.get_by_role("status").filter(has_text="Not reachable").wait_for()
    assert page.evaluate(dim) < 1


def test_what_a_finger_touches_is_large_enough(browser: Any, echo: LiveServer) -> None:
    context = browser.new_context(has_touch=True, is_mobile=True, viewport={"width": 380, "height": 700})
    page = context.new_page()
    page.goto(echo.base_url)
    for control in page.locator("button:visible, input:visible, textarea:visible, summary:visible").all():
        assert control.bounding_box()["height"] >= 44, control.evaluate("e => e.outerHTML")
    assert page.evaluate("document.activeElement.id") != "text", "no keyboard over the page"
    context.close()


def test_the_api_page_is_grouped_and_describes_each_endpoint(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    page.goto(f"{echo.base_url}/docs")
    page.locator("summary code").first.wait_for()
    assert page.locator("h2").all_inner_texts() == ["OpenAI", "Anthropic", "Native", "Page"]
    for summary in page.locator("summary").all():
        assert len(summary.inner_text().split()) > 2, summary.inner_text()


def test_the_trace_is_a_click_away(demo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(demo)
    say(page, "Hi", max_tokens=3)
    page.locator(".meta").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Perfetto trace").click()
    assert download.value.suggested_filename.endswith(".trace.json")
    trace = json.loads(download.value.path().read_text())
    assert any(event["name"].startswith("launch step") for event in trace["traceEvents"])


def test_stopping_aborts_on_the_server(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    with echo.client() as client:
        for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
            say(page, "wait for ever", seed=Seed.HANG)
            page.get_by_text("Waiting for the first token").wait_for()
            page.locator("#running").filter(has_text="1").wait_for()
            stop()
            page.locator(".meta").filter(has_text="stopped").last.wait_for()
            wait_for(lambda: scheduler_state(client)["num_running_reqs"] == 0)
            page.locator("#running").filter(has_text="0").wait_for()
            page.get_by_role("button", name="New chat").click()
    assert page.get_by_role("button", name="Send").is_visible()


def test_what_was_stopped_belongs_to_its_chat_alone(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    sent: list[list[dict[str, Any]]] = []

    def told(request: Any) -> None:
        if request.url.endswith("/chat/completions"):
            sent.append(request.post_data_json["messages"])

    page.on("request", told)
    say(page, "words " * 50, seed=Seed.SLOW, max_tokens=500)
    page.locator(".message.assistant .text").wait_for()
    page.get_by_role("button", name="New chat").click()
    assert page.get_by_role("button", name="Send").is_visible()
    say(page, "a new one", seed=Seed.HANG)
    page.get_by_text("Waiting for the first token").wait_for()
    page.keyboard.press("Escape")
    page.locator(".meta").filter(has_text="stopped").wait_for()
    say(page, "and on", seed="", max_tokens=3)
    page.locator(".meta").filter(has_text="3 tokens").wait_for()
    assert [(turn["role"], turn["content"]) for turn in sent[-1]] == [
        ("user", "a new one"), ("assistant", ""), ("user", "and on"),
    ]  # fmt: skip


def test_what_the_model_writes_is_text(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    with echo.client() as client:
        num_tokens = len(client.post("/tokenize", json={"prompt": HOSTILE}).json()["tokens"])
    say(page, HOSTILE, max_tokens=num_tokens)
    page.locator(".meta").wait_for()
    answer = page.locator(".message.assistant .text")
    assert answer.inner_text() == HOSTILE.replace("**", "").replace("`", "")
    assert answer.locator("strong").inner_text() == "bold" and answer.locator("code").inner_text() == "code"
    assert page.locator("#messages img, #messages script").count() == 0


def test_markdown_as_far_as_it_goes(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    text = (
        "# Title\n\nA *word*, 2 * 3 * 4, a_b_c\n- one\n- two\n\n```python\nx = '<b>'\n\ny\n```\n> quoted\n\n3. three\n"
        "\nNext:\n| a | b |\n|---|:-:|\n| 1 | **2** |\n\n[a](https://x.example/y) [b](javascript:alert(1)) `` ` `` `\n"
    )
    shown = page.evaluate(
        """async (text) => {
            const { showMarkdown } = await import("/web/markdown.js");
            const grown = document.createElement("div"), whole = document.createElement("div");
            for (let end = 0; end <= text.length; end++) showMarkdown(grown, text.slice(0, end));
            showMarkdown(whole, text);
            return [grown.innerHTML, whole.innerHTML, [...whole.children].map((e) => [e.tagName, e.textContent])];
        }""",
        text,
    )
    assert shown[0] == shown[1], "the same, however it arrives"
    assert shown[2] == [
        ["H3", "Title"], ["P", "A word, 2 * 3 * 4, a_b_c"], ["UL", "onetwo"], ["DIV", "x = '<b>'\n\nyCopy"],
        ["BLOCKQUOTE", "quoted"], ["OL", "three"], ["P", "Next:"], ["DIV", "ab12"],
        ["P", "a [b](javascript:alert(1))  `  `"],
    ]  # fmt: skip
    assert shown[0].count("<a ") == 1 and 'href="https://x.example/y"' in shown[0]
    assert "<th>a</th>" in shown[0] and "<td><strong>2</strong></td>" in shown[0]


def test_no_text_makes_the_page_wait(echo: LiveServer, open_page: OpenPage) -> None:
    """Each character is looked at a fixed number of times; looking at the rest for each mark would take minutes."""
    marks = ["`", "``a", "*", "**a", "** ", "[", "[a](", "|-", "[a](http://b", "~~~", "> "]
    num_blocks = open_page(echo).evaluate(
        """async (marks) => {
            const { showMarkdown } = await import("/web/markdown.js");
            return marks.map((mark) => {
                const text = mark.repeat(50000), shown = document.createElement("div");
                showMarkdown(shown, text + "\\n\\n|" + text + "\\n|-|\\n" + text);
                return shown.children.length;
            });
        }""",
        marks,
    )
    assert len(num_blocks) == len(marks) and min(num_blocks) >= 1


def test_reasoning_is_folded_and_tools_are_answered_by_hand(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    bodies: list[dict[str, Any]] = []
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": ""}}
    parts = ('{"expression"', ': "12 + 30"}')
    deltas = [
        [{"reasoning_content": "I must add."}, {"tool_calls": [call]}]
        + [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts],
        [{"content": "It is 42."}],
    ]

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas.pop(0)]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        route.fulfill(content_type="text/event-stream", body="".join([*lines, "data: [DONE]\n\n"]))

    page.route("**/v1/chat/completions", answer)
    page.locator("#settings summary").click()
    page.get_by_role("button", name="Insert an example tool").click()
    say(page, "What is 12 + 30?")
    page.get_by_label("Result of calculator").fill("42")
    reasoning = page.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None and not page.get_by_text("I must add.").is_visible()
    reasoning.locator("summary").click()
    assert page.get_by_text("I must add.").is_visible()
    assert json.loads(page.locator(".call code").inner_text()) == {"expression": "12 + 30"}
    page.get_by_role("button", name="Send the result").click()
    page.get_by_text("It is 42.").wait_for()
    assert bodies[0]["tools"][0]["function"]["name"] == "calculator" and bodies[0]["tool_choice"] == "auto"
    asked, called, result = bodies[1]["messages"]
    assert asked == {"role": "user", "content": "What is 12 + 30?"}
    function = {"name": "calculator", "arguments": "".join(parts)}
    assert called["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "42"}


def test_an_error_is_shown_and_can_be_tried_again(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo, expected="400")
    say(page, "hello", tools='[{"type": "function"}]')
    page.get_by_role("alert").filter(has_text="tools").wait_for()
    page.locator("#settings summary").click()
    page.get_by_role("button", name="Reset settings").click()
    page.fill("[name=max_tokens]", "2")
    page.get_by_role("button", name="Try again").click()
    page.locator(".meta").filter(has_text="2 tokens").wait_for()
    assert page.get_by_role("alert").count() == 0


def sent_by(page: Any) -> list[dict[str, Any]]:
    """The bodies of the chat's requests, as they are sent."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    return sent


def remove_buttons(page: Any) -> Any:
    return page.get_by_role("list", name="Images to send").get_by_role("button")


def test_images_are_chosen_pasted_dropped_and_sent(vision: LiveServer, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(vision)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    sent = sent_by(page)
    chosen = [tmp_path / "one.png", tmp_path / "two.webp"]
    for file in chosen:
        file.write_bytes(written(picture(60, 40), file.suffix[1:].upper()))
    # By keyboard alone: two are chosen, the first is removed again.
    button = page.get_by_role("button", name="Add images")
    button.wait_for()

    def is_reached() -> bool:
        page.get_by_label("Message").focus()
        page.keyboard.press("Shift+Tab")
        return bool(page.evaluate("document.activeElement.id === 'add-images'"))

    chooser = None
    for _ in range(3):  # a busy browser may take the key for one of long ago, after which it opens nothing
        wait_for(is_reached)
        try:
            with page.expect_file_chooser(timeout=20_000) as choosing:
                page.keyboard.press("Enter")
        except playwright.TimeoutError:
            continue
        chooser = choosing.value
        break
    assert chooser is not None and chooser.is_multiple()
    chooser.set_files(chosen)
    page.get_by_role("img", name="image 2, two.webp").wait_for()
    page.wait_for_function("document.activeElement.id === 'text'")
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove image 1, one.png"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove image 1, two.webp"
    # Pasted from the clipboard. Cells of a table, which come with a picture of them, stay a text.
    cells = """(data) => {
        for (const type of ["text/plain", "text/html"]) data.setData(type, "1");
        return document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
    }"""
    assert page.evaluate(cells, dropped(page)) is True
    page.get_by_label("Message").focus()
    page.evaluate(
        """async (url) => {
            const blob = await new Promise((done) => {
                const image = new Image();
                image.onload = () => {
                    const canvas = document.createElement("canvas");
                    canvas.getContext("2d").drawImage(image, 0, 0);
                    canvas.toBlob(done);
                };
                image.src = url;
            });
            await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        }""",
        data_url(written(picture(30, 30), "PNG")),
    )
    page.keyboard.press("ControlOrMeta+v")
    remove_buttons(page).nth(1).wait_for()
    # Dropped, with a file that is no image.
    page.locator("#composer").dispatch_event("drop", {"dataTransfer": dropped(page)})
    page.get_by_role("alert").filter(has_text="notes.txt is not a PNG, JPEG, WebP or GIF image.").wait_for()
    remove_buttons(page).nth(2).wait_for()

    say(page, "What is it?", temperature=0, max_tokens=8)
    page.locator(".meta").filter(has_text="8 tokens").wait_for()
    assert remove_buttons(page).count() == 0 and page.get_by_role("alert").count() == 0
    [asked] = sent[0]["messages"]
    urls = [part["image_url"]["url"] for part in asked["content"][:3]]
    assert asked["content"][3:] == [{"type": "text", "text": "What is it?"}]
    assert urls[0] == data_url(chosen[1].read_bytes(), "image/webp") and urls[2] == data_url(DOT, "image/gif")
    shown = page.locator(".message.user").get_by_role("img")
    assert shown.evaluate_all("images => images.map((image) => image.src)") == urls
    wait_for(lambda: shown.evaluate_all("images => images.every((image) => image.naturalWidth > 0)"))
    # The model's answer is that to the same request of any client, the next turn has the images too.
    with vision.client() as client:
        body = sent[0] | {"stream": False, "stream_options": None}
        said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    page.get_by_role("button", name="Copy the answer").click()
    page.get_by_text("Copied", exact=True).wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == said != ""
    page.reload()
    assert shown.count() == 3, "a reload keeps them"
    say(page, "And then?")
    page.locator(".message.assistant .meta").nth(1).wait_for()
    assert sent[-1]["messages"][0] == asked and len(sent[-1]["messages"]) == 3


def dropped(page: Any) -> Any:
    return page.evaluate_handle(
        """(bytes) => {
            const data = new DataTransfer();
            data.items.add(new File(["text"], "notes.txt", { type: "text/plain" }));
            data.items.add(new File([new Uint8Array(bytes)], "dot.gif", { type: "image/gif" }));
            return data;
        }""",
        list(DOT),
    )


def test_refused_images_can_be_taken_back(vision: LiveServer, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(vision, expected="400")
    sent = sent_by(page)
    large, bomb = tmp_path / "large.jpg", tmp_path / "bomb.png"
    with large.open("wb") as file:
        file.truncate((32 << 20) + 1)
    bomb.write_bytes(png(10_000, 10_000))
    page.get_by_role("button", name="Add images").wait_for()  # by then the page knows how large a file may be
    page.locator("#image-files").set_input_files([large, bomb])
    page.get_by_role("alert").filter(has_text="large.jpg has more than the 32 MiB that the server takes.").wait_for()
    remove_buttons(page).wait_for()
    say(page, "What is it?", max_tokens=4)
    page.get_by_role("alert").filter(has_text="messages[0].content[0]: it has 10000x10000 pixels").wait_for()
    page.get_by_role("button", name="Edit the question").click()
    assert page.locator(".message").count() == 0 and page.get_by_role("alert").count() == 0
    assert page.get_by_label("Message").input_value() == "What is it?"
    page.get_by_role("button", name="Remove image 1").click()
    page.keyboard.press("Enter")
    page.locator(".meta").filter(has_text="4 tokens").wait_for()
    assert sent[-1]["messages"] == [{"role": "user", "content": "What is it?"}]


def test_a_model_that_reads_text_is_offered_no_images(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo)
    page.get_by_role("status").filter(has_text="Serving").wait_for()
    assert not page.get_by_role("button", name="Add images").is_visible()
    taken = "(data) => !document.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }))"
    assert page.evaluate(taken, dropped(page)) is False and remove_buttons(page).count() == 0


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer.fake("--api-key", "right", "--admin-api-key", "chief") as server:
        yield server.wait_ready()


def test_the_page_asks_for_the_key_and_keeps_it_in_its_tab(locked: LiveServer, open_page: OpenPage) -> None:
    page = open_page(locked, expected="401")
    page.get_by_role("dialog").wait_for()
    for key in ("wrong", "right"):
        page.get_by_role("textbox", name="Key").fill(key)
        page.get_by_role("button", name="Continue").click()
        if key == "wrong":
            page.get_by_text("did not accept").wait_for()
    page.get_by_role("status").filter(has_text="Serving").wait_for()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    page.get_by_role("status").filter(has_text="Serving").wait_for()
    assert not page.get_by_role("dialog").is_visible()
    page.get_by_role("button", name="Perfetto trace").click()
    page.get_by_role("heading", name="Admin API key").wait_for()
    page.get_by_role("textbox", name="Key").fill("chief")
    with page.expect_download():
        page.get_by_role("button", name="Continue").click()
    # Somebody who has no key is not asked again and again.
    stranger = open_page(locked, expected="401")
    stranger.get_by_role("button", name="Not now").click()
    stranger.get_by_role("button", name="Enter API key").wait_for()
    assert not stranger.get_by_role("dialog").is_visible()


def test_on_a_phone_nothing_is_wider_than_the_screen(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo, width=380, height=700)
    width = "document.documentElement.scrollWidth"
    say(page, "long" * 60 + " `" + "x" * 300 + "`", max_tokens=200)
    page.locator(".meta").wait_for()
    assert page.evaluate(width) == 380
    assert not page.locator("#server").is_visible()
    page.get_by_role("button", name="Server", exact=True).click()
    page.locator("#kv-legend").filter(has_text="tokens").wait_for()
    assert page.evaluate(width) == 380 and not page.locator("#chat").is_visible()


def test_nobody_asks_while_nobody_looks(echo: LiveServer, open_page: OpenPage) -> None:
    page = open_page(echo, width=380)
    page.get_by_role("status").filter(has_text="Serving").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    say(page, "some words", max_tokens=50, seed=Seed.SLOW)  # takes a second, three polls' time
    page.locator(".meta").wait_for()
    assert [url.rpartition("/")[2] for url in asked] == ["completions"]
    page.get_by_role("button", name="Server", exact=True).click()
    wait_for(lambda: page.evaluate("1") == 1 and any(url.endswith("/live_state") for url in asked))
