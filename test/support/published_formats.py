"""How models write tool calls and read their answers. For each published chat template there is a minimal one of our
own that marks messages, calls and answers in the same way (its description of the tools is shorter), and a call as such
a model writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

# The arguments of the calls in WRITTEN.
CITY = 'Zürich "West"\n<b> 日本 \\ {'
ARGUMENTS = {"city": CITY, "days": 3, "hourly": True, "fields": ["a]", {"b": None}]}
CALLS = [("weather", ARGUMENTS), ("now", {})]
_JSON = '{"city": "Zürich \\"West\\"\\n<b> 日本 \\\\ {", "days": 3, "hourly": true, "fields": ["a]", {"b": null}]}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "fields": {"type": "array"},
            },
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@dataclass(frozen=True, slots=True)
class Published:
    """``mirrors``: the published template. ``written``: CALLS (only the first if ``num_calls`` is 1) as the model
    writes them. ``history``: the same calls and two answers, "rain" and "noon", as the template writes them in a
    history, with a user's message before them and the beginning of the next answer after them; WRITTEN, ID1 and ID2
    stand for ``written`` and the ids of calls. ``thinks``: the family's --reasoning-parser. ``thought``: the reasoning
    "so" as the model writes it."""

    parser: str
    mirrors: str
    template: str
    written: str
    history: str
    num_calls: int = 2
    thinks: str = "qwen3"
    thought: str = "<think>so</think>\n\n"
    special_tokens: dict[str, str] = field(default_factory=lambda: {"bos_token": "<s>", "eos_token": "</s>"})


_CHATML_CALLS = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' + ('\\n' + content if content else '') }}
        {%- for call in message.tool_calls %}
            {%- set arguments = call.function.arguments %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

_HERMES = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.role == 'tool' %}
        {%- if message.name is not defined %}{{ raise_exception('an answer of a tool needs a name') }}{% endif %}
        {{- '\\n<tool_response>\\n{"name": "' + message.name + '", "content": ' + message.content | tojson }}
        {{- '}\\n</tool_response> <|im_end|>\\n' }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{ "arguments": ' + call.function.arguments | tojson }}
            {{- ', "name": "' + call.function.name + '"}\\n</tool_call> ' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

_LLAMA_31 = """{{- bos_token }}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- head('system') + system + '<|eot_id|>' }}
{%- if tools %}
    {%- if not messages %}{{ raise_exception('no first user message') }}{% endif %}
    {{- head('user') + tools | tojson(indent=4) + messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {{- head('assistant') + '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- head('ipython') }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- head(message.role) + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- head('assistant') if add_generation_prompt }}"""

_PYTHONIC = """{{- bos_token }}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- if tools %}{{ '[func_name1(params_name1=params_value1), func_name2(params)] of ' + tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- head('assistant') + '[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name in call.function.arguments %}
                {{- name + '=' + '%s' | format(call.function.arguments[name]) + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ')' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- head('ipython') + {'output': message.content} | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- head(message.role) + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- head('assistant') if add_generation_prompt }}"""

_MISTRAL_V3 = """{{- bos_token }}
{%- macro checked(id) %}
    {%- if id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}{{ id }}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and loop.last }}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + checked(call.id) + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + checked(message.tool_call_id) }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

_MISTRAL_V11 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content if messages[0].content is string else messages[0].content[0].text %}
    {%- set turns = messages[1:] %}
    {{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools }}
{%- set users = namespace(turn=true) %}
{%- for message in turns if message.role != 'tool' and not message.tool_calls %}
    {%- if (message.role == 'user') != users.turn %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set users.turn = not users.turn %}
{%- endfor %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '[INST]' }}
        {%- if message.content is string %}{{ message.content }}{% else %}
            {%- for part in message.content %}
                {%- if part.type == 'text' %}{{ part.text }}{% else %}{{ raise_exception('only text') }}{% endif %}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
            {{- '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- (message.content if message.content is string else message.content[0].text) + eos_token }}
    {%- else %}
        {{- raise_exception('a system message is the first one') }}
    {%- endif %}
{%- endfor %}"""

_QWEN3_CODER = """
{%- if tools %}{{ '<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue' + tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls | length > 0 %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content | trim + '\\n' if message.content | trim else '') }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set structured = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + key + '>\\n' + (value | tojson if structured else value | string) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

_QWEN_35 = """
{%- macro shown(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'text' in part %}{{ part.text }}{% else %}{{ raise_exception('no such part') }}{% endif %}
        {%- endfor %}
    {%- elif content is not none and content is defined %}{{ raise_exception('no such content') }}{% endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue' + tools | tojson }}
    {{- '\\n\\n' + shown(messages[0].content) | trim if messages[0].role == 'system' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + shown(messages[0].content) | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = shown(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('a system message is the first one') }}{% endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n\\n' if content else '') if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set structured = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + key + '>\\n' + (value | tojson if structured else value | string) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem and loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{ raise_exception('no such role') }}{% endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt }}"""

_SEED_OSS = """
{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- endif %}
{{- bos_token + 'system\\n' + system if system is defined }}
{%- for tool in tools or [] if tool.type == 'function' %}
    {{- '\\ndef ' + tool.function.name + '(' }}
    {%- for name, value in tool.function.parameters.properties.items() %}{{ name + ': ' + value.type }}{% endfor %}
    {{- '): ' + tool.function.description | trim }}
{%- endfor %}
{{- '\\n<seed:tool_call>\\n<function=name>\\n' if tools }}
{{- eos_token if tools or system is defined }}
{%- for message in turns %}
    {{- bos_token + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls | length > 0 %}
        {{- message.content | trim + '\\n' if message.content is string and message.content | trim }}
        {%- for call in message.tool_calls %}
            {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>' + (value if value is string else value | string) + '</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</seed:tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- message.content | trim if message.content is string }}
    {%- else %}{{ message.content + '' }}{% endif %}
    {{- eos_token }}
{%- endfor %}
{{- bos_token + 'assistant\\n' if add_generation_prompt }}"""

_DEEPSEEK_V3 = """{{- bos_token }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] + '<｜Assistant｜>' }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {{- ('' if message['content'] is none else message['content']) + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message['tool_calls'] %}
            {{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' }}
            {{- call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] }}
            {{- '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' else '\\n' }}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- message['content'] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}"""

_DEEPSEEK_V31 = """
{%- set found = namespace(system='', first=true) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set found.system = found.system + ('' if found.first else '\\n\\n') + message['content'] %}
    {%- set found.first = false %}
{%- endfor %}
{{- bos_token + found.system }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] }}
        {%- if loop.last %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {{- '<｜Assistant｜></think>' + ('' if message['content'] is none else message['content']) }}
        {{- '<｜tool▁calls▁begin｜>' }}
        {%- for call in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' }}
            {{- call['function']['arguments'] + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜Assistant｜></think>' + message['content'] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}"""

_GLM_45 = """{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n<tool_call>name\\n<arg_key>key</arg_key>' + tools | tojson }}{% endif %}
{%- macro shown(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{{ part.text if part is mapping and part.type == 'text' }}{% endfor %}
    {%- else %}{{ content }}{% endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'tool' and message.content is string %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>' }}
        {%- for one in message.content %}
            {{- '\\n<tool_response>\\n' ~ (one.output if one.output is defined else one) ~ '\\n</tool_response>' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (message.reasoning_content or '') + '</think>' }}
        {{- '\\n' + shown(message.content) | trim if shown(message.content) | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in (call.function.arguments or {}).items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role in ('user', 'system') %}
        {{- '<|' + message.role + '|>\\n' + shown(message.content) }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""

_MINIMAX_M2 = """
{%- macro shown(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{{ part.text if part is mapping and part.type == 'text' }}{% endfor %}
    {%- else %}{{ content }}{% endif %}
{%- endmacro %}
{%- set system, turns = none, messages %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system, turns = messages[0], messages[1:] %}
{%- endif %}
{{- ']~!b[]~b]system\\n' + (shown(system.content) if system and system.content else '') }}
{%- if tools %}{{ '<minimax:tool_call>\\n<invoke name="name">' + tools | tojson }}{% endif %}
{{- '[e~[\\n' }}
{%- set called = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {%- if called.name is none %}{{ raise_exception('an answer without a call') }}{% endif %}
        {%- if loop.previtem.role != 'tool' %}{{ ']~b]tool' }}{% endif %}
        {%- if message.content is string %}{{ '\\n<response>' + message.content + '</response>' }}{% else %}
            {%- for one in message.content %}
                {{- '\\n<response>' ~ (one.output if one.output is defined else one) ~ '\\n</response>' }}
            {%- endfor %}
        {%- endif %}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '[e~[\\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- ']~b]ai\\n' + shown(message.content) }}
        {%- set called.name = none %}
        {%- if message.tool_calls %}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in message.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- set arguments = call.function.arguments %}
                {%- for key, value in arguments.items() %}
                    {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) }}
                    {{- '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
                {%- set called.name = call.function.name %}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- elif message.role == 'user' %}
        {{- ']~b]user\\n' + shown(message.content) + '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{{- ']~b]ai\\n<think>\\n' if add_generation_prompt }}"""

_SEP, _END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_GPT_OSS = """{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') }}
{{- '\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set told, turns = '', messages %}
{%- if messages[0].role in ('developer', 'system') %}
    {%- set told, turns = messages[0].content, messages[1:] %}
{%- endif %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + told + '<|end|>' if told }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = () => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if message.content and message.thinking %}{{ raise_exception('pass one of them') }}{% endif %}
        {%- if message.content or message.thinking %}
            {%- set thought = message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
        {%- set called.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- set called.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if called.name is none %}{{ raise_exception('an answer without a call') }}{% endif %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""

_GRANITE_30 = """
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + ('' if loop.last else '\\n\\n') }}{% endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] in ('system', 'user', 'assistant') %}
        {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'assistant_tool_call' %}
        {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'tool_response' %}
        {{- '<|start_of_role|>tool_response<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}"""

_GRANITE_32 = """
{%- set told = ' Use <|tool_call|>.' if available_tools else '' %}
{{- '<|start_of_role|>system<|end_of_role|>Granite.' + told + '<|end_of_text|>\\n' }}
{%- if available_tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + available_tools | tojson + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
{%- endfor %}"""

_EXAONE_4 = """
{%- for tool in tools or [] %}{{ '<tool>' }}{{ tool | tojson(ensure_ascii=False) | safe }}{{ '</tool>\\n' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '\\n' if loop.previtem.role == 'tool' else '[|tool|]\\n' }}
        {{- '<tool_result>{"result": ' + message.content | tojson + '}</tool_result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '[|endofturn|]\\n' }}{% endif %}
        {%- continue %}
    {%- endif %}
    {{- '[|' + message.role + '|]\\n' }}
    {%- if message.tool_calls %}
        {{- message.content + '\\n' if message.content else '<think>\\n\\n</think>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' + ('' if loop.last else '\\n') }}
        {%- endfor %}
    {%- else %}{{ message.content }}{% endif %}
    {{- '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[|assistant|]\\n<think>\\n' if enable_thinking else '[|assistant|]\\n<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""

_OLMO_3 = """
{%- for tool in tools or [] %}{{ '<functions>' }}{{ tool | tojson }}{{ '</functions>' }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('environment' if message.role == 'tool' else message.role) + '\\n' }}
    {{- message.content or '' }}
    {%- if message.tool_calls %}
        {{- '<function_calls>' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + '=' + value | tojson + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ')' + ('' if loop.last else '\\n') }}
        {%- endfor %}
        {{- '</function_calls>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

PUBLISHED: dict[str, Published] = {
    "Qwen2.5 and Qwen3": Published(
        parser="qwen25",
        mirrors="Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B, tokenizer_config.json",
        template=_CHATML_CALLS + "{# <tool_call> #}",
        written=f'<tool_call>\n{{"name": "weather", "arguments": {_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        history="<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nWRITTEN<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "Hermes 2 Pro": Published(
        parser="qwen25",
        mirrors="NousResearch/Hermes-2-Pro-Llama-3-8B, tool_use; vllm: examples/tool_chat_template_hermes.jinja",
        template=_HERMES,
        written=f'<tool_call>\n{{ "arguments": {_JSON}, "name": "weather"}}\n</tool_call> \n'
        '<tool_call>\n{ "arguments": {}, "name": "now"}\n</tool_call> ',
        history="<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nWRITTEN<|im_end|>\n<|im_start|>tool\n"
        '<tool_response>\n{"name": "weather", "content": "rain"}\n</tool_response> <|im_end|>\n<|im_start|>tool\n'
        '<tool_response>\n{"name": "now", "content": "noon"}\n</tool_response> <|im_end|>\n<|im_start|>assistant\n',
    ),
    "Llama 3.1": Published(
        parser="llama3",
        mirrors="meta-llama/Llama-3.1-8B-Instruct, tokenizer_config.json; one call at a time",
        template=_LLAMA_31 + '{# "parameters": dictionary of argument name and its value #}',
        written=f'{{"name": "weather", "parameters": {_JSON}}}',
        history="<s><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "And?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nWRITTEN<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n\"rain\"<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        num_calls=1,
    ),
    "Llama 3.2 and 4, pythonic": Published(
        parser="pythonic",
        mirrors="vllm: examples/tool_chat_template_llama3.2_pythonic.jinja; its history writes texts without quotes",
        template=_PYTHONIC,
        written=f"[weather(city={CITY!r}, days=3, hourly=True, fields=['a]', {{'b': None}}]), now()]",
        history="<s><|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant"
        f"<|end_header_id|>\n\n[weather(city={CITY}, days=3, hourly=True, fields=['a]', {{'b': None}}]), now()]"
        '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n{"output": "rain"}<|eot_id|><|start_header_id|>'
        'ipython<|end_header_id|>\n\n{"output": "noon"}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
    "Mistral 7B v0.3": Published(
        parser="mistral",
        mirrors="mistralai/Mistral-7B-Instruct-v0.3, tokenizer_config.json (tokenizer v3)",
        template=_MISTRAL_V3,
        written=f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_JSON}, "id": "ID1"}}, '
        '{"name": "now", "arguments": {}, "id": "ID2"}]',
        history="<s>[INST] And?[/INST]WRITTEN</s>"
        '[TOOL_RESULTS] {"content": rain, "call_id": "ID1"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": noon, "call_id": "ID2"}[/TOOL_RESULTS]',
    ),
    "Mistral Small 3.2": Published(
        parser="mistral",
        mirrors="mistralai/Mistral-Small-3.2-24B-Instruct-2506 (tokenizer v11)",
        template=_MISTRAL_V11,
        written=f"[TOOL_CALLS]weather[CALL_ID]ID1[ARGS]{_JSON}[TOOL_CALLS]now[CALL_ID]ID2[ARGS]{{}}",
        history="<s>[INST]And?[/INST]WRITTEN</s>[TOOL_RESULTS]ID1[TOOL_CONTENT]rain[/TOOL_RESULTS]"
        "[TOOL_RESULTS]ID2[TOOL_CONTENT]noon[/TOOL_RESULTS]",
    ),
    "Qwen3-Coder": Published(
        parser="qwen3_coder",
        mirrors="Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja",
        template=_QWEN3_CODER,
        written=f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=fields>\n[\"a]\", {\"b\": null}]\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        history="<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nWRITTEN<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "Qwen3.5": Published(
        parser="qwen3_coder",
        mirrors="Qwen/Qwen3.5-4B, chat_template.jinja; an answer begins within its thought",
        template=_QWEN_35,
        written=f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=fields>\n[\"a]\", {\"b\": null}]\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        history="<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nWRITTEN<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n",
    ),
    "Seed-OSS": Published(
        parser="seed_oss",
        mirrors="ByteDance-Seed/Seed-OSS-36B-Instruct, chat_template.jinja; it writes lists as Python does",
        template=_SEED_OSS,
        written=f"<seed:tool_call>\n<function=weather>\n<parameter=city>{CITY}</parameter>\n<parameter=days>3</parameter>"
        "\n<parameter=hourly>True</parameter>\n<parameter=fields>[\"a]\", {\"b\": null}]</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        history=f"<s>user\nAnd?</s><s>assistant\n\n<seed:tool_call>\n<function=weather>\n<parameter=city>{CITY}</parameter>"
        "\n<parameter=days>3</parameter>\n<parameter=hourly>True</parameter>\n<parameter=fields>['a]', {'b': None}]"
        "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
        "</s><s>tool\nrain</s><s>tool\nnoon</s><s>assistant\n",
        thinks="seed_oss",
        thought="<seed:think>so</seed:think>\n\n",
    ),
    "DeepSeek V3": Published(
        parser="deepseekv3",
        mirrors="deepseek-ai/DeepSeek-V3-0324, tokenizer_config.json",
        template=_DEEPSEEK_V3,
        written=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{_SEP}weather\n```json\n{_JSON}\n```{_END}\n"
        f"<｜tool▁call▁begin｜>function{_SEP}now\n```json\n{{}}\n```{_END}<｜tool▁calls▁end｜>",
        history="<s><｜User｜>And?<｜Assistant｜>WRITTEN<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"
        "rain<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>noon<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        thinks="deepseek-v3",
    ),
    "DeepSeek V3.1": Published(
        parser="deepseekv3",
        mirrors="deepseek-ai/DeepSeek-V3.1, tokenizer_config.json",
        template=_DEEPSEEK_V31,
        written=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather{_SEP}{_JSON}{_END}"
        f"<｜tool▁call▁begin｜>now{_SEP}{{}}{_END}<｜tool▁calls▁end｜>",
        history="<s><｜User｜>And?<｜Assistant｜></think>WRITTEN<｜end▁of▁sentence｜><｜tool▁output▁begin｜>rain"
        "<｜tool▁output▁end｜><｜tool▁output▁begin｜>noon<｜tool▁output▁end｜>",
        thinks="deepseek-v3",
    ),
    "GLM-4.5 and 4.6": Published(
        parser="glm45",
        mirrors="zai-org/GLM-4.5 and GLM-4.6, chat_template.jinja",
        template=_GLM_45,
        written=f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>hourly</arg_key>\n<arg_value>true</arg_value>\n<arg_key>fields</arg_key>\n"
        '<arg_value>["a]", {"b": null}]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        history="[gMASK]<sop><|user|>\nAnd?<|assistant|>\n<think></think>\nWRITTEN<|observation|>\n<tool_response>\n"
        "rain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|assistant|>",
        thinks="glm45",
    ),
    "EXAONE 4.0": Published(
        parser="qwen25",
        mirrors="LGAI-EXAONE/EXAONE-4.0-32B, chat_template.jinja, as bfcl_eval quotes it in Exaone4FCHandler",
        template=_EXAONE_4,
        written=f'<tool_call>{{"name": "weather", "arguments": {_JSON}}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        history="[|user|]\nAnd?[|endofturn|]\n[|assistant|]\n<think>\n\n</think>\n\nWRITTEN[|endofturn|]\n"
        '[|tool|]\n<tool_result>{"result": "rain"}</tool_result>\n<tool_result>{"result": "noon"}</tool_result>'
        "[|endofturn|]\n[|assistant|]\n<think>\n\n</think>\n\n",
    ),
    "MiniMax-M2": Published(
        parser="minimax-m2",
        mirrors="MiniMaxAI/MiniMax-M2, chat_template.jinja; an answer begins within its thought",
        template=_MINIMAX_M2,
        written=f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="hourly">true</parameter>\n<parameter name="fields">'
        '["a]", {"b": null}]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        history="]~!b[]~b]system\n[e~[\n]~b]user\nAnd?[e~[\n]~b]ai\n\nWRITTEN[e~[\n]~b]tool\n<response>rain</response>"
        "\n<response>noon</response>[e~[\n]~b]ai\n<think>\n",
        thinks="minimax",
    ),
    "OLMo 3": Published(
        parser="olmo3",
        mirrors="allenai/Olmo-3.1-32B-Instruct, chat_template.jinja",
        template=_OLMO_3,
        written='<function_calls>weather(city="Zürich \\"West\\"\\n<b> 日本 \\\\ {", days=3, hourly=true, '
        'fields=["a]", {"b": null}])\nnow()</function_calls>',
        history="<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nWRITTEN<|im_end|>\n<|im_start|>environment\n"
        "rain<|im_end|>\n<|im_start|>environment\nnoon<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gpt-oss": Published(
        parser="gpt-oss",
        mirrors="openai/gpt-oss-20b, chat_template.jinja; the answer ends at <|call|>, which is no text",
        template=_GPT_OSS,
        written=f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_JSON}",
        history="<|start|>system<|message|>Reasoning: medium\n# Valid channels: analysis, commentary, final.<|end|>"
        "<|start|>user<|message|>And?<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
        f"<|message|>{_JSON}<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '"rain"<|end|>'
        "<|start|>assistant",
        num_calls=1,
        thinks="gpt-oss",
        thought="<|channel|>analysis<|message|>so<|end|><|start|>assistant",
    ),
    "Granite 3.0": Published(
        parser="granite",
        mirrors="ibm-granite/granite-3.0-8b-instruct, tokenizer_config.json",
        template=_GRANITE_30,
        written=f'<|tool_call|>[{{"name": "weather", "arguments": {_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        history="<|start_of_role|>user<|end_of_role|>And?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        "WRITTEN<|end_of_text|>\n<|start_of_role|>tool_response<|end_of_role|>rain<|end_of_text|>\n"
        "<|start_of_role|>tool_response<|end_of_role|>noon<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "Granite 3.2": Published(
        parser="granite",
        mirrors="ibm-granite/granite-3.2-8b-instruct, tokenizer_config.json",
        template=_GRANITE_32,
        written=f'<|tool_call|>[{{"name": "weather", "arguments": {_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        history="<|start_of_role|>system<|end_of_role|>Granite.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>And?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        "WRITTEN<|end_of_text|>\n<|start_of_role|>tool<|end_of_role|>rain<|end_of_text|>\n"
        "<|start_of_role|>tool<|end_of_role|>noon<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
}  # fmt: skip
