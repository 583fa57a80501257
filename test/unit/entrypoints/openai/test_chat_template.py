"""Chat templates render as in transformers, character by character."""

from __future__ import annotations

from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast
from vision_server import QWEN_VL

from fenceline.config.chat_templates import CHAT_TEMPLATES
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.frontend.tokenizer import load_tokenizer

# Templates in the manner of the families that are served, using what those templates use of Jinja.
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>' ~ message.content ~ '</tool_response>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and message.content is string %}
        {%- set ns.seen = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is defined else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{% for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
GEMMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' if messages[0]['content'] is string else '' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix, turns = "", messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
PARTS = """{%- macro text_of(content) %}
    {%- if content is string %}{{ content }}{%- else %}
        {%- for part in content %}{{ '(' ~ part.text ~ ')' }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}{{ message.role ~ ': ' ~ text_of(message.content) }}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
TEMPLATES["parts"] = PARTS

USER = {"role": "user", "content": ' What\'s <2+2> & "why"? ünï '}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4 "}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Sure?"}],
    "answered": [USER, ASSISTANT],
    "thought": [USER, {"role": "assistant", "content": "4", "reasoning_content": "sum"}],
    "tool": [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "<é>"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "R"},
    ],
}
TAKE_NO_TOOL_CALLS = ("llama3", "mistral", "gemma", "parts")
PAIRS = [
    (name, conversation)
    for name in TEMPLATES
    for conversation in CONVERSATIONS
    if conversation != "tool" or name not in TAKE_NO_TOOL_CALLS
]


@pytest.fixture(scope="module")
def peer(model_dir):
    """transformers' tokenizer of the same directory."""
    return PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def render(peer):
    """Render with ours and with transformers' renderer; both must agree."""

    def both(source: str, messages: list[dict], **options: object) -> str:
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        variables = options.pop("variables", {})
        ours = template.render(messages, variables=variables, **options)
        theirs = peer.apply_chat_template(messages, chat_template=source, tokenize=False, **options, **variables)
        assert ours == theirs
        return ours

    return both


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
@pytest.mark.parametrize("prompt", [True, False])
def test_parity(render, name, conversation, prompt):
    text = render(TEMPLATES[name], CONVERSATIONS[conversation], add_generation_prompt=prompt)
    assert "2+2" in text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["Four is", "Four is  ", "a\n", "Four."])
def test_parity_of_continued_messages(render, name, content):
    messages = [USER, {"role": "assistant", "content": content}]
    text = render(TEMPLATES[name], messages, continue_final_message=True, add_generation_prompt=False)
    assert text.rstrip().endswith(content.rstrip())


def test_parity_of_template_variables(render):
    closed = render(QWEN3, [USER], add_generation_prompt=True, variables={"enable_thinking": False})
    assert closed.endswith("<think>\n\n</think>\n\n")
    assert render(LLAMA3, [USER], add_generation_prompt=True, variables={"date_string": "1 May"}).count("1 May") == 1
    assert datetime.now().strftime("%Y") in render(LLAMA3, [USER], add_generation_prompt=True)
    assert render("{{ bos_token }}", [USER], variables={"bos_token": "B"}) == "B"


def test_parity_of_parts(render):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "(a)(b)" in render(PARTS, messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PARTS, "user: (a)(b)\n"),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }},{% endfor %}{% endfor %}", "a,b,"),
        ("{% for m in messages %}{{ m.content | map(attribute='text') | join('+') }}{% endfor %}", "a+b"),
        ("{% for m in messages %}{{ m.content if m.content is string else"
         " m.content | map(attribute='text') | join('+') }}{% endfor %}", "a+b"),
        ("{% for m in messages %}{% for line in m.content.split('x') %}{{ line }}{% endfor %}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}"
         "{% if x %}{% for p in x.content %}{% endfor %}{% endif %}", "a\nb"),
    ],
)  # fmt: skip
def test_which_templates_take_parts(source, text):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(source, {}).render(messages) == text


def test_parts_become_one_text_for_other_templates():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML, {}).render(messages)


# How the template of Gemma 3 places images, shortened.
GEMMA_3 = """{%- if messages[0]['content'] is string -%}{%- endif -%}
{%- for message in messages -%}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string -%}{{ message['content'] | trim }}
{%- else -%}{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}<end_of_turn>
{% endfor -%}"""
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("source", "image"), [(QWEN_VL, "<|vision_start|><|image_pad|><|vision_end|>"), (GEMMA_3, "<start_of_image>")]
)
def test_templates_place_images_among_texts(source, image):
    messages = [
        {"role": "user", "content": [IMAGE, TEXT, IMAGE]},
        ASSISTANT,
        {"role": "user", "content": [TEXT, IMAGE]},
    ]
    text = ChatTemplate(source, {}).render(messages)
    assert f"user\n{image}a{image}<" in text and f"user\na{image}<" in text


def test_templates_place_videos_among_texts():
    video = {"type": "video"}
    messages = [{"role": "user", "content": [video, TEXT, IMAGE]}]
    text = ChatTemplate(QWEN_VL, {}).render(messages)
    assert "<|vision_start|><|video_pad|><|vision_end|>a<|vision_start|><|image_pad|><|vision_end|><" in text
    with pytest.raises(ValueError, match="no place for videos in messages of role user"):
        ChatTemplate(GEMMA_3, {}).render(messages)


def test_an_image_in_a_late_system_message_stays():
    messages = [USER, {"role": "system", "content": [IMAGE, TEXT]}]
    late = "message['role'] == 'system' and not loop.first"
    users = QWEN_VL.replace("{{ message['role'] }}", f"{{{{ 1 // 0 if {late} else message['role'] }}}}")
    text = ChatTemplate(users, {}).render(messages)
    assert "\n\n<|vision_start|><|image_pad|><|vision_end|>a<|im_end|>" in text and text.count("<|im_start|>user") == 1


def test_arguments_of_calls_are_objects():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"function": {"name": "f", "arguments": "{a"}}
    template = ChatTemplate("{{ messages[0].tool_calls | tojson }}", {})
    assert '"arguments": {"a": 1}' in template.render([{"role": "assistant", "tool_calls": [call]}])
    assert '"arguments": "{a"' in template.render([{"role": "assistant", "tool_calls": [broken]}])


# Llama 3.1 and DeepSeek V3 in the ways that matter here: calls in a branch of their own, and a test for none.
LLAMA31 = """{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- '' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}"""
DEEPSEEK = """{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for call in message['tool_calls'] %}
            {{- call['function']['name'] + call['function']['arguments'] }}
        {%- endfor %}
    {%- else %}{{ message['role'] + ': ' + message['content'] }}
    {%- endif %}
{%- endfor %}"""
PLAIN = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '\n' }}{% endfor %}"
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
CALLED = [
    {"role": "user", "content": "12 + 30?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "user", "content": "And then?"},
]
HISTORY_TEMPLATES = {
    **TEMPLATES, "llama31": LLAMA31, "deepseek": DEEPSEEK, "plain": PLAIN,
    **{f"--chat-template {name}": source for name, source in CHAT_TEMPLATES.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORY_TEMPLATES)
@pytest.mark.parametrize("content", [None, "", "left out", "Let me see."])
def test_a_history_with_calls_renders_on_every_template(name, content):
    called = dict(CALLED[1], content=content)
    if content == "left out":
        del called["content"]
    template = ChatTemplate(HISTORY_TEMPLATES[name], {"bos_token": "<s>", "eot_token": "</s>", "eos_token": "</s>"})
    text = template.render([CALLED[0], called, CALLED[2]])
    assert "12 + 30?" in text and "And then?" in text
    assert "None" not in text
    if name in ("chatml", "llama31") or "--" in name or (name == "deepseek" and content != "Let me see."):
        assert "add" in text


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama31"])
def test_calls_render_as_in_transformers(peer, name):
    messages = [dict(CALLED[1], tool_calls=[{**CALL, "function": {"name": "add", "arguments": {"a": 12}}}])]
    theirs = peer.apply_chat_template(
        [CALLED[0], *messages], chat_template=HISTORY_TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(HISTORY_TEMPLATES[name], {"bos_token": "<s>"}).render(CALLED[:2]) == theirs


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>system\nBe brief.\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
         "<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"),
        ("llama-3-instruct", "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHo"
         "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nSo?<|eot_id|><|start_header_id|>assistant"
         "<|end_header_id|>\n\n"),
        ("llama-2", "<s>[INST] <<SYS>>\nBe brief.\n\n<</SYS>>\n\nHi [/INST] Ho </s><s>[INST] So? [/INST]"),
        ("mistral", "<s>[INST] Be brief.\n\n\nHi [/INST] Ho</s>[INST] So? [/INST]"),
        ("vicuna_v1.1", "<s>Be brief.\n USER: Hi ASSISTANT: Ho</s> USER: So? ASSISTANT:"),
        ("gemma-it", "<s><start_of_turn>user\nBe brief.\n\n\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
         "<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n"),
    ],
)  # fmt: skip
def test_templates_by_name(name, text):
    turns = [("user", "Hi"), ("assistant", "Ho"), ("user", "So?")]
    messages = [SYSTEM, *({"role": role, "content": content} for role, content in turns)]
    assert ChatTemplate(CHAT_TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}).render(messages) == text
    assert "Hi" in ChatTemplate(CHAT_TEMPLATES[name], {}).render(messages)  # of a model without BOS and EOS


@pytest.mark.parametrize(
    ("source", "messages", "options", "complaint"),
    [
        (MISTRAL, [USER, USER], {}, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", [USER], {}, "cannot render these messages: TypeError"),
        ("{{ 1 // 0 }}", [USER], {}, "cannot render"),
        ("{{ nothing.at.all }}", [USER], {}, "refuses these messages: 'nothing' is undefined"),
        ("{{ messages.append(1) }}", [USER], {}, "refuses"),
        ("{{ ''.__class__.__mro__ }}", [USER], {}, "refuses"),
        (CHATML, [USER], {"variables": {"messages": []}}, "cannot set messages"),
        ("x", [USER], {"continue_final_message": True}, "drops the last message"),
        (CHATML, [{"role": "assistant"}], {"continue_final_message": True}, "needs a last message with content"),
        (CHATML, [{"role": "user", "content": [IMAGE, TEXT]}], {}, "no place for images in messages of role user"),
        (PARTS, [{"role": "user", "content": [IMAGE, TEXT]}], {}, "no place for images in messages of role user"),
        (QWEN_VL, [{"role": "user", "content": [TEXT, IMAGE]}], {"continue_final_message": True}, "ends with text"),
    ],
)
def test_complaints(source, messages, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate(source, {}).render(messages, **options)


def test_broken_template_names_the_line():
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


def test_rendering_leaves_messages_alone():
    messages = [USER, {"role": "assistant", "content": "Well", "reasoning_content": "r"}]
    before = [dict(message) for message in messages]
    ChatTemplate(CHATML, {}).render(messages, continue_final_message=True)
    assert messages == before


def test_model_directory_with_transformers(model_dir):
    """The whole way from a model directory, its own template and special tokens included."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(model_dir), AutoTokenizer.from_pretrained(str(model_dir))
    text = ChatTemplate(ours.chat_template, ours.special_tokens).render([SYSTEM, USER])
    assert text == theirs.apply_chat_template([SYSTEM, USER], tokenize=False, add_generation_prompt=True)
    assert ours.encode(text, add_special_tokens=False) == theirs.apply_chat_template(
        [SYSTEM, USER], add_generation_prompt=True, return_dict=False
    )
