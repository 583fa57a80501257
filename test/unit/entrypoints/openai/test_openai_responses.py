"""/v1/responses as the openai client sees it: items, streams, conversations that are kept, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from functools import partial

import openai
import orjson
import pytest
from chat_answer import ANSWER, TEMPLATE, prompt_of
from openai.types.responses import ResponseErrorEvent

from fenceline.entrypoints.openai.chat_reader import ChatReader
from fenceline.entrypoints.openai.serving_responses import ResponseStore
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer
from fenceline.ipc.io_struct import FinishReason

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
HI = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def flags(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return {"chat_template": str(path), "reasoning_parser": "qwen3"}


async def test_a_text(serve, flags):
    async with serve(**flags) as server:
        response = await server.client.responses.create(
            model="byte", input="Hi", instructions="Be brief.", max_output_tokens=50, temperature=0.5
        )
        assert response.output_text == "Hello wörld"
        assert (response.status, response.model, response.error) == ("completed", "byte", None)
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        assert prompt_of(server) == "[system]|Be brief.;[user]|Hi;[assistant]"
        params = server.link.sent[0].sampling_params
        assert (params.max_new_tokens, params.temperature) == (50, 0.5)


async def test_reasoning_text_and_calls_are_items(serve, flags):
    async with serve(**flags) as server:
        server.script.pieces = ANSWER
        response = await server.client.responses.create(model="byte", input="Hi", tools=[WEATHER])
        reasoning, message, call = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Let me see.")
        assert (message.type, message.content[0].text) == ("message", "I look.")
        assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris"}')
        assert len({item.id for item in response.output}) == 3


async def test_a_stream_says_the_same_item_by_item(serve, flags):
    async with serve(**flags) as server:
        server.script.pieces = ANSWER
        stream = await server.client.responses.create(model="byte", input="Hi", tools=[WEATHER], stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        part = ["response.content_part.added", "response.content_part.done"]
        kinds = [event.type for event in events if not event.type.endswith(".delta")]
        assert kinds == [
            "response.created", "response.in_progress",
            "response.output_item.added", part[0], "response.reasoning_text.done", part[1],
            "response.output_item.done",
            "response.output_item.added", part[0], "response.output_text.done", part[1], "response.output_item.done",
            "response.output_item.added", "response.function_call_arguments.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip
        deltas: dict[str, str] = {}
        for event in events:
            if event.type.endswith(".delta"):
                deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        final = events[-1].response
        assert list(deltas) == [item.id for item in final.output]
        assert list(deltas.values()) == ["Let me see.", "I look.", '{"city": "Paris"}']
        assert final.output[1].content[0].text == "I look." and final.usage.output_tokens > 0
        async with server.client.responses.stream(model="byte", input="Hi", tools=[WEATHER]) as parsed:
            assert (await parsed.get_final_response()).output[2].arguments == '{"city": "Paris"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on(serve, flags, stream):
    async with serve(**flags) as server:
        server.script.pieces = ANSWER
        first = await server.client.responses.create(
            model="byte", input="Hi", tools=[WEATHER], instructions="Be brief.", stream=stream
        )
        if stream:
            first = [event async for event in first][-1].response
        call = first.output[-1]
        await server.client.responses.create(
            model="byte",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}],
        )
        # Instructions hold for one response.
        said = '[user]|Hi;[assistant]Let me see.|I look.<tool_call>weather{"city": "Paris"};'
        assert prompt_of(server) == said + "[tool]|Sun;[assistant]"
        kept = await server.client.responses.retrieve(first.id)
        assert kept.output[1].content[0].text == "I look."
        await server.client.responses.delete(first.id)
        for gone in (first.id, "resp_unknown"):
            with pytest.raises(openai.NotFoundError):
                await server.client.responses.create(model="byte", input="x", previous_response_id=gone)


async def test_the_output_may_be_sent_back_instead(serve, flags):
    async with serve(**flags) as server:
        server.script.pieces = ANSWER
        first = await server.client.responses.create(model="byte", input="Hi", tools=[WEATHER], store=False)
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(first.id)
        items = [item.model_dump(exclude_none=True) for item in first.output]
        await server.client.responses.create(
            model="byte", input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, *items]
        )
        said = '[user]|Hi;[assistant]Let me see.|I look.<tool_call>weather{"city": "Paris"};'
        assert prompt_of(server) == said + "[assistant]"


async def test_tools_of_other_kinds_are_left_out(serve, flags, caplog):
    """What Codex sends: one tool that is not served must not refuse the whole request."""
    others = [
        {"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "mcp", "tools": [WEATHER]},
    ]  # fmt: skip
    async with serve(**flags, strict_fields=True) as server:
        for _ in range(2):
            response = await server.client.responses.create(
                model="byte", input="Hi", tools=[others[0], WEATHER, *others[1:]],
                include=["reasoning.encrypted_content", "web_search_call.action.sources"],
            )  # fmt: skip
            assert [tool.name for tool in response.tools] == ["weather"]
        assert prompt_of(server).count("<tool>") == 1
        await server.client.responses.create(model="byte", input="Hi", tools=others)
        assert prompt_of(server) == "[user]|Hi;[assistant]"
    told = [record.getMessage() for record in caplog.records if "is left out here" in record.getMessage()]
    assert sorted(told) == [
        f"A request has a tool of type '{kind}', which is left out here"
        for kind in ("custom", "namespace", "web_search")
    ]


async def test_usage_tells_tokens_of_reasoning(serve, flags, model_dir):
    """With the token that ends the thinking exactly, and as all of today's types of the SDKs demand."""
    tokenizer = load_tokenizer(model_dir)
    tokenizer.backend.add_special_tokens(["<think>", "</think>"])
    num = len("Let me see.") + 2
    async with serve(**flags, tokenizer=Tokenizer(tokenizer.backend)) as server:
        server.script.pieces = ANSWER
        response = await server.client.responses.create(model="byte", input="Hi", tools=[WEATHER])
        assert response.usage.output_tokens_details.reasoning_tokens == num
        assert response.usage.input_tokens_details.cache_write_tokens == 0
        stream = await server.client.responses.create(model="byte", input="Hi", stream=True)
        last = [event async for event in stream][-1].response
        assert last.usage.output_tokens_details.reasoning_tokens == num
        create = partial(server.client.chat.completions.create, model="byte")
        messages = [{"role": "user", "content": "Hi"}]
        answer = await create(messages=messages, n=2)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * num
        chunks = await create(messages=messages, stream=True, stream_options={"include_usage": True})
        *_, chunk = [chunk async for chunk in chunks]
        assert chunk.usage.completion_tokens_details.reasoning_tokens == num
        server.script.pieces = ["No thought."]
        answer = await create(messages=messages)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        raw = await create(messages=messages, extra_body={"separate_reasoning": False})
        assert raw.usage.completion_tokens_details is None, "it is not told from the rest"


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {}])
async def test_stored_items_may_be_referred_to(serve, flags, kind):
    """As the Vercel AI SDK does in every turn but the first."""
    async with serve(**flags) as server:
        server.script.pieces = ANSWER
        create = partial(server.client.responses.create, model="byte")
        first = await create(input="Hi", tools=[WEATHER])
        reasoning, message, call = first.output
        ids = [{**kind, "id": item.id} for item in (reasoning, message, call)]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
        second = await create(input=[{"role": "user", "content": "Hi"}, *ids, output])
        said = '[user]|Hi;[assistant]Let me see.|I look.<tool_call>weather{"city": "Paris"};'
        assert prompt_of(server) == said + "[tool]|Sun;[assistant]"
        # What was referred to is part of the conversation that is kept.
        await create(input="And?", previous_response_id=second.id)
        assert prompt_of(server).startswith(said + "[tool]|Sun;[assistant]Let me see.|I look.")
        sent = len(server.link.sent)
        for unknown in ("x", "msg_x_0", f"{message.id}0", f"{message.id[:-1]}9", message.id.replace("msg", "rs")):
            with pytest.raises(openai.NotFoundError, match="there is no item"):
                await create(input=[{"type": "item_reference", "id": unknown}])
        await server.client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="there is no item"):
            await create(input=ids)
        assert len(server.link.sent) == sent


def test_referred_items_are_bounded() -> None:
    """One stored item may be large, and an input may refer to it four thousand times."""
    store = ResponseStore(max_conversation_bytes=5000)
    store.add(response_of("resp_a", [{"id": "msg_a_0", "text": "x" * 2000}]), None, [])
    reference = {"type": "item_reference", "id": "msg_a_0"}
    assert store.resolved([reference, reference]) == [{"id": "msg_a_0", "text": "x" * 2000}] * 2
    with pytest.raises(RequestError, match="more than 5000 bytes") as caught:
        store.resolved([reference] * 3)
    assert caught.value.status == 400


@pytest.mark.parametrize("field", ["tools", "tool_choice", "text"])
async def test_what_is_nested_too_deeply_to_be_repeated_is_refused(serve, flags, field):
    deep: object = "x"
    for _ in range(300):
        deep = {"a": deep}
    value = {
        "tools": [WEATHER | {"parameters": deep}],
        "tool_choice": {"type": "function", "name": "weather", "x": deep},
        "text": {"format": {"type": "text", "x": deep}},
    }[field]
    async with serve(**flags) as server:
        with pytest.raises(openai.BadRequestError, match="nested"):
            await server.client.responses.create(model="byte", input="Hi", **{"tools": [WEATHER], field: value})
        assert not server.link.sent


async def test_an_answer_at_its_limit_is_incomplete(serve, flags):
    async with serve(**flags) as server:
        server.script.finish = FinishReason(type="length")
        response = await server.client.responses.create(model="byte", input="Hi")
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"


async def test_a_stream_that_a_defect_ends_says_so_as_an_event(serve, flags, monkeypatch):
    read = ChatReader.read

    def failing(self, chunk):
        yield from read(self, chunk)
        if chunk.finish_reason is not None:
            raise ValueError("a defect")

    monkeypatch.setattr(ChatReader, "read", failing)
    async with serve(**flags) as server:
        stream = await server.client.responses.create(model="byte", input="Hi", stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert isinstance(last, ResponseErrorEvent)
        assert (last.type, last.code) == ("error", "server_error")
        assert "ValueError" in last.message and "a defect" not in last.message


async def test_a_stream_that_fails_says_so(serve, flags):
    async with serve(**flags) as server:
        server.script.finish = FinishReason(type="abort", status_code=503, message="too long in the queue")
        stream = await server.client.responses.create(model="byte", input="Hi", stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, last.response.error.message) == ("response.failed", "too long in the queue")
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(last.response.id)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": [{"type": "item_reference"}]}, r"input \[0\] is an item_reference without its id"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, r"input \[0\] is of type 'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"\[0\] has an image without its URL"),
        ({"input": [{"role": "user", "content": [IMAGE | {"file_id": "f1"}]}]}, "no files are kept"),
        ({"input": [HI, {"role": "user", "content": [IMAGE]}]}, r"input\[1\].content\[0\]: this model reads text only"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "neither text nor an image"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "call_id, name and arguments"),
        ({"input": []}, "messages"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: this field is required"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].type: this field is required"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "only allowed with tools"),
        ({"tools": [WEATHER] * 129}, "has 129 tools"),
        ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens is not available: use max_output_tokens"),
        ({"background": True}, "background is not available"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "only allowed with tools"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
async def test_what_is_refused(serve, flags, fields, words):
    async with serve(**flags) as server:
        with pytest.raises(openai.BadRequestError, match=words):
            await server.client.responses.create(**{"model": "byte", "input": "Hi"} | fields)
        assert not server.link.sent


def response_of(id: str, output: Iterable[dict[str, object]] = ()) -> dict[str, object]:
    return {"id": id, "output": list(output)}


def test_the_store_is_bounded() -> None:
    """By number and by bytes; the least recently used go first."""
    store = ResponseStore(max_responses=3, max_bytes=5000, max_conversation_bytes=5000)
    for name in "abc":
        store.add(response_of(name), None, [])
    store.get("a")
    store.add(response_of("d"), None, [])
    with pytest.raises(RequestError):
        store.get("b")
    store.add(response_of("e"), None, [{"content": "x" * 4200}])
    for name in "acd":
        with pytest.raises(RequestError):
            store.get(name)
    # Too long a conversation: nobody else goes for it.
    store.add(response_of("f"), None, [{"content": "x" * 5000}])
    store.add(response_of("f"), store.get("e"), [{"content": "x" * 500}])
    with pytest.raises(RequestError):
        store.get("f")
    assert orjson.loads(store.get("e").response()) == {"id": "e", "output": []}
    store.delete("e")
    for name in "ghi":
        store.add(response_of(name), None, [{"content": "x" * 500}])
    assert [orjson.loads(store.get(name).response())["id"] for name in "ghi"] == list("ghi")


def test_the_store_takes_the_memory_that_it_counts() -> None:
    """Of short messages Python's objects would take twenty times their JSON."""
    most = 2 << 20
    store = ResponseStore(max_bytes=most)
    message = {"role": "user", "content": "x"}
    call = {"id": "fc_0", "type": "function_call", "arguments": "{}", "status": "completed"}
    tracemalloc.start()
    try:
        for number in range(400):
            new = [dict(message) for _ in range(300)]
            history = store.get(f"resp_{number - 1}") if number % 4 else None
            store.add(response_of(f"resp_{number}", [dict(call) for _ in range(20)]), history, new)
            del new, history
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most // 2 < used < 1.05 * most
    assert store.get("resp_399").conversation() == [message] * 1200
    with pytest.raises(RequestError):
        store.get("resp_0")
