"""/v1/chat/completions through the OpenAI client against a scripted model."""

from __future__ import annotations

import math

import openai
import pytest

from fenceline.ipc.io_struct import FinishReason

HI = [{"role": "user", "content": "Hi"}]
THINKING = ["<th", "ink>\nLet me", " see.\n</thi", "nk>", "\n\n", "Four", "."]


async def test_message(serve):
    async with serve() as server:
        answer = await server.client.chat.completions.create(model="byte", messages=HI)
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello wörld")
        prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        message = server.link.sent[0]
        assert list(message.input_ids) == server.tokenizer.encode(prompt, add_special_tokens=False)
        # Nothing asked for: the answer may take what the prompt leaves of the context.
        assert message.sampling_params.max_new_tokens == server.config.model.context_length - len(message.input_ids)
        assert answer.usage.prompt_tokens == len(message.input_ids)


async def test_bos_is_written_once(serve, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    async with serve(chat_template=str(template)) as server:
        await server.client.chat.completions.create(model="byte", messages=HI, n=2)
        bos = server.tokenizer.encode("<s>")
        for message in server.link.sent:
            assert list(message.input_ids) == bos + server.tokenizer.encode("Hi")


async def test_roles_parts_and_template_variables(serve, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}{{ '/' + m.name if m.name else '' }}:{{ m.content }}"
        "{{ m.tool_calls[0].function.arguments.x if m.tool_calls else '' }}]{% endfor %}"
        "{{ 'think' if enable_thinking else 'fast' }}-{{ reasoning_effort }}"
    )
    async with serve(chat_template=str(template)) as server:
        await server.client.chat.completions.create(
            model="byte",
            messages=[
                {"role": "developer", "content": "S"},
                {"role": "user", "name": "ann", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "R"},
            ],
            reasoning_effort="low",
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        text = server.tokenizer.decode(server.link.sent[0].input_ids)
        assert text == "[system:S][user/ann:a\nb][assistant:5][tool/f:R]think-low"


async def test_stream(serve):
    async with serve() as server:
        stream = await server.client.chat.completions.create(
            model="byte", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        first, *texts, finish, usage = chunks
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert [chunk.choices[0].delta.content for chunk in texts] == ["Hello", " w", "ör", "ld"]
        assert all(chunk.choices[0].delta.role is None for chunk in texts)
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["stop"]
        assert finish.choices[0].delta.content is None
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert (usage.choices, usage.usage.completion_tokens) == ([], 10)


async def test_stream_of_many_choices(serve):
    async with serve() as server:
        server.script.answer_of = lambda message: ["I am ", message.rid[-1]]
        stream = await server.client.chat.completions.create(
            model="byte", messages=HI, n=4, stream=True, extra_body={"rid": "0"}
        )
        texts, roles, finished = [""] * 4, [0] * 4, [0] * 4
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role is not None
            finished[choice.index] += choice.finish_reason is not None
        assert texts == [f"I am {i}" for i in range(4)]
        assert roles == finished == [1] * 4


async def test_logprobs(serve):
    async with serve() as server:
        whole = await server.client.chat.completions.create(model="byte", messages=HI, logprobs=True, top_logprobs=3)
        entries = whole.choices[0].logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "Hello wörld"
        assert entries[0].token == "He"
        assert entries[0].logprob == -0.5
        assert [top.logprob for top in entries[0].top_logprobs] == [-0.25, -0.5, -9999.0]
        assert math.isclose(math.exp(entries[0].logprob), 0.6065, abs_tol=1e-4)
        stream = await server.client.chat.completions.create(
            model="byte", messages=HI, logprobs=True, top_logprobs=3, stream=True
        )
        streamed = []
        async for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content
        assert streamed == entries
        chosen_only = await server.client.chat.completions.create(model="byte", messages=HI, logprobs=True)
        assert [entry.top_logprobs for entry in chosen_only.choices[0].logprobs.content] == [[]] * 10


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_limits(serve, name):
    async with serve() as server:
        server.script.finish = FinishReason(type="length", length=3)
        answer = await server.client.chat.completions.create(model="byte", messages=HI, **{name: 3})
        assert answer.choices[0].finish_reason == "length"
        assert server.link.sent[0].sampling_params.max_new_tokens == 3


async def test_continue_final_message(serve):
    async with serve() as server:
        await server.client.chat.completions.create(
            model="byte",
            messages=[*HI, {"role": "assistant", "content": "Well, "}],
            extra_body={"continue_final_message": True},
        )
        text = server.tokenizer.decode(server.link.sent[0].input_ids, skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\nWell, ")


async def test_reasoning_is_split(serve):
    async with serve(reasoning_parser="qwen3") as server:
        server.script.pieces = THINKING
        answer = await server.client.chat.completions.create(model="byte", messages=HI)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Let me see.", "Four.")
        raw = await server.client.chat.completions.create(
            model="byte", messages=HI, extra_body={"separate_reasoning": False}
        )
        assert raw.choices[0].message.content == "".join(THINKING)


@pytest.mark.parametrize(("stream_reasoning", "expected"), [(True, ["Let me", " see."]), (False, ["Let me see."])])
async def test_reasoning_streams(serve, stream_reasoning, expected):
    async with serve(reasoning_parser="qwen3") as server:
        server.script.pieces = THINKING
        stream = await server.client.chat.completions.create(
            model="byte", messages=HI, stream=True, extra_body={"stream_reasoning": stream_reasoning}
        )
        reasoning, content = [], []
        async for chunk in stream:
            delta = chunk.choices[0].delta
            if getattr(delta, "reasoning_content", None):
                reasoning.append(delta.reasoning_content)
            if delta.content:
                content.append(delta.content)
        assert reasoning == expected
        assert content == ["Four", "."]


@pytest.mark.parametrize(
    ("opening", "expected"),
    [("<think>\n", ("Let me see.", "Four.")), ("<think>\n\n</think>\n\n", (None, "Let me see.</think>Four."))],
)
async def test_template_that_opens_or_closes_the_thinking(serve, tmp_path, opening, expected):
    template = tmp_path / "template.jinja"
    # Jinja drops one newline at the end of a template, so it is written as an expression.
    template.write_text("{{ messages[0].content }}" + "{{ " + repr(opening) + " }}")
    async with serve(reasoning_parser="qwen3-thinking", chat_template=str(template)) as server:
        server.script.pieces = ["Let me see.", "</think>", "Four."]
        answer = await server.client.chat.completions.create(model="byte", messages=HI)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == expected


async def test_no_template_is_said_plainly(serve, model_dir):
    from fenceline.frontend.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir)
    tokenizer.chat_template = None
    async with serve(tokenizer=tokenizer) as server:
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
            await server.client.chat.completions.create(model="byte", messages=HI)
        answer = await server.client.completions.create(model="byte", prompt="a")
        assert answer.choices[0].text


async def test_broken_template_stops_the_start(serve, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    with pytest.raises(ValueError, match="--chat-template: not a valid Jinja template, line 1"):
        async with serve(chat_template=str(template)):
            pass


async def test_without_a_tokenizer(serve):
    async with serve(skip_tokenizer_init=True) as server:
        for call in (
            server.client.chat.completions.create(model="byte", messages=HI),
            server.client.completions.create(model="byte", prompt=[1]),
        ):
            with pytest.raises(openai.BadRequestError, match="use /generate with input_ids"):
                await call
