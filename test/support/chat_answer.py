"""A chat template that shows all parts of a conversation, and an answer with reasoning, text and a tool call. The tests
of all endpoints with such answers use them."""

from __future__ import annotations

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool><tool_call>{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.reasoning_content or '' }}|{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWER = [
    "<think>Let me", " see.</think>", "I look.\n", '<tool_call>{"name": "weather", "arguments": {"city": "Par',
    'is"}}</tool_call>',
]  # fmt: skip


def prompt_of(server) -> str:  # type: ignore[no-untyped-def]
    """The text of the last prompt that the scripted model got."""
    return server.tokenizer.decode(server.link.sent[-1].input_ids, skip_special_tokens=False)
