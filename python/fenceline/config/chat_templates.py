"""Reads the value of --chat-template: a file, or one of the built-in templates below, which have SGLang's names.

The built-in ones are for models without a template. They are Jinja, rendered in the same way as a model's own
(entrypoints/openai/chat_template.py). Contents are text or null. Tool calls in a history are written as JSON, because
these formats have no syntax for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fenceline.config import ConfigError, user_path

# The content of a message, empty for null, followed by its tool calls as JSON, one per line.
_CONTENT = """
{%- macro content_of(message) -%}
{{ message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}{{ call.function | tojson }}
{%- endfor -%}
{%- endmacro -%}
"""

# For formats without a system role, whose system message goes before the first user message.
_SYSTEM_FIRST = """
{%- set found = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}
{%- set found.system = messages[0].content -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
"""

_CHATML = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + content_of(message) + '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""

_LLAMA_3 = """{{ bos_token }}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + content_of(message) | trim + '<|eot_id|>' }}
{%- endfor -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"""

_LLAMA_2 = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ ' ' ~ content_of(message) | trim ~ ' ' ~ eos_token }}
{%- else -%}
{%- set system = '<<SYS>>\\n' ~ found.system ~ '\\n<</SYS>>\\n\\n' if found.system else '' -%}
{%- set found.system = '' -%}
{{ bos_token ~ '[INST] ' ~ (system ~ content_of(message)) | trim ~ ' [/INST]' }}
{%- endif -%}
{%- endfor -%}"""

_MISTRAL = """{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ ' ' ~ content_of(message) | trim ~ eos_token }}
{%- else -%}
{%- set system = found.system ~ '\\n\\n' if found.system else '' -%}
{%- set found.system = '' -%}
{{ '[INST] ' ~ system ~ content_of(message) ~ ' [/INST]' }}
{%- endif -%}
{%- endfor -%}"""

_VICUNA = """{{ bos_token }}
{%- set default = 'A chat between a curious user and an artificial intelligence assistant. The assistant gives '
    ~ "helpful, detailed, and polite answers to the user's questions." -%}
{{ found.system or default }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ ' ASSISTANT: ' ~ content_of(message) ~ eos_token }}
{%- else -%}
{{ ' USER: ' ~ content_of(message) }}
{%- endif -%}
{%- endfor -%}
{{ ' ASSISTANT:' if add_generation_prompt }}"""

_GEMMA = """{{ bos_token }}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{%- set system = found.system ~ '\\n\\n' if found.system and role == 'user' else '' -%}
{%- if system -%}{%- set found.system = '' -%}{%- endif -%}
{{ '<start_of_turn>' ~ role ~ '\\n' ~ (system ~ content_of(message)) | trim ~ '<end_of_turn>\\n' }}
{%- endfor -%}
{{ '<start_of_turn>model\\n' if add_generation_prompt }}"""

CHAT_TEMPLATES: Mapping[str, str] = {
    "chatml": _CONTENT + _CHATML,
    "gemma-it": _CONTENT + _SYSTEM_FIRST + _GEMMA,
    "llama-2": _CONTENT + _SYSTEM_FIRST + _LLAMA_2,
    "llama-3-instruct": _CONTENT + _LLAMA_3,
    "mistral": _CONTENT + _SYSTEM_FIRST + _MISTRAL,
    "vicuna_v1.1": _CONTENT + _SYSTEM_FIRST + _VICUNA,
}


def read_chat_template(name: str | None) -> str | None:
    if name is None:
        return None
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    path = user_path(name)
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {name}: no such file; give a file with a Jinja template, or one of "
            f"the names {', '.join(CHAT_TEMPLATES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {name}: cannot be read as UTF-8 text ({error})") from error
    return _template_of_json(name, text) if path.suffix == ".json" else text


def _template_of_json(name: str, text: str) -> str:
    """The template in a chat_template.json or tokenizer_config.json."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"--chat-template {name}: not valid JSON ({error})") from error
    template = value.get("chat_template") if isinstance(value, dict) else None
    if not isinstance(template, str):
        raise ConfigError(
            f"--chat-template {name}: expected an object with the template as the text of chat_template; for the "
            "template alone give the file the ending .jinja"
        )
    return template
