"""Chat templates: a conversation as the one text that the model was trained to continue.

Templates are Jinja programs that come with models. They are rendered in Jinja's sandbox with the same environment and
names as in ``transformers`` (``apply_chat_template``), so that the text is the same, character by character.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, NoReturn, TypeGuard

import jinja2
import pydantic_core
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.openai.tool_call_parser import tool_call_format_of
from fenceline.frontend.tokenizer import Tokenizer

Message = Mapping[str, object]

# Put where the last message ends. Whether its trailing blank is still there shows whether the template trims messages.
_CUT_HERE = "(the final message goes on here) "
# Variables that the renderer sets itself, so that a request must not. All others of chat_template_kwargs go to the
# template as they are.
_RESERVED = frozenset(
    ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template", "tokenize")
)
# What a template does with a message is found out by rendering some. In a part of a content, _TRACE is the value of a
# field that no template knows: where it is shown, the part was written as an object instead of as its text.
_FIRST, _SECOND, _TRACE = "first0probe", "second0probe", "trace0probe"
# In a content's parts: where an image stands, or a video.
IMAGE: Mapping[str, object] = {"type": "image"}
VIDEO: Mapping[str, object] = {"type": "video"}
_MEDIA = (("images", IMAGE), ("videos", VIDEO))
_KINDS = ("system", "user", "assistant", "calls", "tool")  # "calls": an assistant's message with calls
_PROBE_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": []},
    },
}


class _Systems(NamedTuple):
    """Whether a template shows several system messages at the beginning, each as one, and one that comes later."""

    several: bool
    late: bool


class ChatTemplate:
    """A compiled chat template. Immutable after construction."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: texts by name (``bos_token`` ...). Raises ValueError if ``source`` is not a template."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            names = {node.name for node in tree.find_all(nodes.Name)}
            self.has_tools = bool(names & {"tools", "available_tools"})  # the latter is what Granite's read
            self.tool_call_format = tool_call_format_of(source)
            # Granite's templates have no place for calls, and the first ones another name for their answers.
            self._calls_as_content = self.tool_call_format == "granite" and "tool_calls" not in source
            self._tool_role = "tool_response" if "'tool_response'" in source else "tool"
            self._no_content = None if _tests_content_for_none(tree) else ""
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"not a valid Jinja template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        with_tools = (False, True) if self.has_tools else (False,)
        # As long as these are found out, the template gets everything as it is.
        self._takes_parts = frozenset(_KINDS)
        self._arguments_as_sent, self._shows_text_as_arguments = False, True
        self._systems = dict.fromkeys(with_tools, _Systems(True, True))
        self._shows_text_as_arguments = _FIRST in self._probe(_conversation("calls", "", _FIRST), self.has_tools)
        if self._shows_text_as_arguments:
            objects = self._probe(_conversation("calls", "", f'{{"x": "{_FIRST}"}}'), self.has_tools)
            self._arguments_as_sent = _FIRST not in objects
        self._takes_parts = frozenset(kind for kind in _KINDS if self._loops_over_content(kind, with_tools))
        self._shows = {name: self._takes_parts for name, _ in _MEDIA}
        self._shows = {
            name: frozenset(kind for kind in self._takes_parts if self._places(part, kind, with_tools))
            for name, part in _MEDIA
        }
        self._systems = {tools: self._find_systems(tools) for tools in with_tools}

    def _probe(self, messages: Sequence[Message], tools: bool) -> str:
        """The prompt text, "" if the template refuses the messages."""
        try:
            return self.render(messages, tools=[_PROBE_TOOL] if tools else ())
        except (ValueError, RuntimeError):  # a RecursionError too
            return ""

    def _loops_over_content(self, kind: str, with_tools: Sequence[bool]) -> bool:
        """Whether the template shows all text parts of a message of ``kind``, and nothing but their texts."""
        whole = f"{_FIRST} {_SECOND}"
        parts = [{"type": "text", "text": text, "trace": _TRACE} for text in (_FIRST, _SECOND)]
        shown = False
        for tools in with_tools:
            num_shown = self._probe(_conversation(kind, whole), tools).count(whole)
            text = self._probe(_conversation(kind, parts), tools)
            num_parts = text.count(_FIRST) if _TRACE not in text else 0
            if num_shown and not num_parts == text.count(_SECOND) == num_shown:
                return False
            shown = shown or num_parts > 0
        return shown

    def _places(self, media: Mapping[str, object], kind: str, with_tools: Sequence[bool]) -> bool:
        """Whether the template shows where ``media`` stands in a message of ``kind``, unlike a part that it does not
        know."""
        text = {"type": "text", "text": _FIRST}
        shown = [
            [self._probe(_conversation(kind, [part, text]), tools) for part in (media, {"type": _TRACE})]
            for tools in with_tools
        ]
        return any(_FIRST in image and image != other for image, other in shown)

    def _find_systems(self, tools: bool) -> _Systems:
        end = {"role": "user", "content": "Hi"}

        def shows(before: Sequence[Message]) -> bool:
            """Whether a system message after ``before`` is shown as something else than a user's."""
            system, user = (
                self._probe([*before, {"role": role, "content": _SECOND}, end], tools) for role in ("system", "user")
            )
            return _SECOND in system and system != user

        turns = [end, {"role": "assistant", "content": "Ho"}]
        return _Systems(shows([{"role": "system", "content": _FIRST}]), shows(turns))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. It contains the special tokens, so it is tokenised without adding any.
        ``continue_final_message`` leaves the last message open, so that the model goes on with it. ``tools`` are what
        it may call, as OpenAI's objects. ``variables`` are the request's ``chat_template_kwargs``. Raises ValueError
        with the template's message if the template refuses the conversation, and RecursionError for values nested too
        deeply."""
        messages = self._with_systems_shown(messages, bool(tools))
        messages = _linked(messages, short_ids=self.tool_call_format == "mistral")
        if self.tool_call_format == "gpt-oss":
            messages = _one_call_each(messages)
        variables = dict(variables or {})
        if taken := _RESERVED.intersection(variables):
            raise ValueError(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}")
        conversation = [self._plain(message) for message in messages]
        if continue_final_message:
            if messages[-1].get("content") is None:
                raise ValueError("continue_final_message needs a last message with content to go on with")
            conversation[-1] = _marked(conversation[-1])
        context = {
            "available_tools": list(tools) or None,
            **self._special_tokens,
            **variables,
            "messages": conversation,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._render(context)
        except ValueError:
            if not tools and self.tool_call_format != "gpt-oss":
                raise
            text = self._render(self._completed(context))
        return _cut(text) if continue_final_message else text

    def _completed(self, context: Mapping[str, object]) -> Mapping[str, object]:
        """``context`` for a template that refuses what others take: each tool has a description and parameters. Of
        gpt-oss's, a call's preamble is a part of the thought; others may leave the thought out, and the text with it.
        """
        conversation, tools = context["messages"], context["tools"]
        assert isinstance(conversation, list)
        if self.tool_call_format == "gpt-oss":
            conversation = [_with_one_thought(message) for message in conversation]
        complete = [_complete_tool(tool) for tool in tools] if isinstance(tools, list) else None
        return {**context, "messages": conversation, "tools": complete}

    def _render(self, context: Mapping[str, object]) -> str:
        try:
            return self._template.render(context)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            # A template is a program: an unexpected value in a message can raise any exception in it.
            raise ValueError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error

    def _with_systems_shown(self, messages: Sequence[Message], tools: bool) -> Sequence[Message]:
        """System messages in the way in which the template shows them: if it takes only one, those at the beginning are
        one, and later ones, which it would refuse or leave out, belong to the user's message beside them."""
        systems = self._systems.get(tools, self._systems[False])
        num = next((i for i, one in enumerate(messages) if one.get("role") != "system"), len(messages))
        first, rest = messages[:num], messages[num:]
        if num > 1 and not systems.several:
            first = [_joined(first, "system")]
        return [*first, *(rest if systems.late else _as_users(rest))]

    def _plain(self, message: Message) -> dict[str, object]:
        """The message as templates expect it: without entries that are None (except a content that the template tests
        for None) and lists of no calls, with text parts joined unless the template loops over them, and with call
        arguments as objects."""
        plain = {name: value for name, value in message.items() if value is not None}
        if not plain.get("tool_calls"):
            plain.pop("tool_calls", None)
        kind = "calls" if "tool_calls" in plain else plain.get("role")
        content = plain.get("content")
        if not content and kind == "calls":
            content = plain["content"] = self._no_content
        elif _has_media(content):
            for name, part in _MEDIA:
                if part in content and kind not in self._shows[name]:
                    role = plain.get("role")
                    raise ValueError(f"the chat template has no place for {name} in messages of role {role}")
        elif content is None or (isinstance(content, list) and kind not in self._takes_parts):
            plain["content"] = _text_of(content)
        if "reasoning_content" in plain:
            plain.setdefault("thinking", plain["reasoning_content"])  # the name that some templates read
        calls = plain.get("tool_calls")
        if isinstance(calls, list):
            plain["tool_calls"] = objects = [self._plain_call(call) for call in calls]
            if self._calls_as_content:
                functions = [call["function"] for call in objects if "function" in call]
                plain["content"] = f"{plain['content'] or ''}<|tool_call|>{_to_json(functions)}"
        if plain.get("role") == "tool":
            plain["role"] = self._tool_role
        return plain

    def _plain_call(self, call: Mapping[str, object]) -> Mapping[str, object]:
        """OpenAI sends a call's arguments as JSON text, most templates want the object."""
        function = call.get("function")
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments") or "{}"
        if self._arguments_as_sent:
            arguments = arguments if isinstance(arguments, str) else _to_json(arguments)
        elif isinstance(arguments, str):
            arguments = self._object_of(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def _object_of(self, text: str) -> object:
        """What ``text`` says in JSON. Of anything but an object, what the template can show of it."""
        arguments: object = text
        try:
            arguments = json.loads(text)
        except json.JSONDecodeError:
            pass
        except ValueError:  # Python does not make a number of more than 4,300 digits
            raise ValueError("the arguments of a tool call have a number of too many digits") from None
        if not isinstance(arguments, dict) and not self._shows_text_as_arguments:
            return _completed_arguments(text)
        return arguments


def chat_template_of(tokenizer: Tokenizer | None, config: EngineConfig) -> ChatTemplate | str:
    """The template, or the reason why there is none. /v1/completions works without one. Raises ValueError if
    --chat-template is not a valid template."""
    if tokenizer is None:
        return "this server runs with --skip-tokenizer-init and has no chat template; use /generate with input_ids"
    if config.chat_template is not None:
        try:
            return ChatTemplate(config.chat_template, tokenizer.special_tokens)
        except ValueError as error:
            raise ValueError(f"--chat-template: {error}") from error
    if tokenizer.chat_template is None:
        return (
            "the model has no chat template: start the server with --chat-template FILE (a Jinja template), or use "
            "/v1/completions"
        )
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    except ValueError as error:
        return f"the model's chat template is broken ({error}): start the server with --chat-template FILE"


def _linked(messages: Sequence[Message], short_ids: bool) -> Sequence[Message]:
    """Answers of tools get the name of the function whose call they answer, which OpenAI's clients leave out and a few
    templates want. ``short_ids``: ids of calls that are not nine letters and digits, which Mistral's templates refuse,
    become a hash of them, in the call and in its answer."""
    linked: list[Message] = []
    names: dict[object, object] = {}
    for message in messages:
        calls = message.get("tool_calls")
        calls = [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        for call in calls:
            function = call.get("function")
            if isinstance(function, Mapping) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")
        answered = message.get("tool_call_id") if message.get("role") == "tool" else None
        if message.get("name") is None and names.get(answered) is not None:
            message = {**message, "name": names[answered]}
        if short_ids and isinstance(answered, str):
            message = {**message, "tool_call_id": _short_id(answered)}
        if short_ids and calls:
            calls = [
                {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call for call in calls
            ]
            message = {**message, "tool_calls": calls}
        linked.append(message)
    return linked


def _as_users(messages: Sequence[Message]) -> Sequence[Message]:
    """``messages`` without a system's: those are a part of the user's message beside them, or one of their own."""
    groups: list[list[Message]] = []
    for message in messages:
        latest = groups[-1][-1] if groups else {}
        roles = {message.get("role"), latest.get("role")}
        if roles == {"system"} or roles == {"system", "user"}:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [
        _joined(group, "user") if any(one.get("role") == "system" for one in group) else group[0] for group in groups
    ]


def _joined(messages: Sequence[Message], role: str) -> Message:
    contents = [message.get("content") for message in messages]
    if any(map(_has_media, contents)):
        parts: list[object] = []
        for content in filter(None, contents):
            parts += [{"type": "text", "text": "\n\n"}] if parts else []
            parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
        return {**messages[0], "role": role, "content": parts}
    texts = [_text_of(content) for content in contents]
    return {**messages[0], "role": role, "content": "\n\n".join(text for text in texts if text)}


def _one_call_each(messages: Sequence[Message]) -> Sequence[Message]:
    """``messages`` with one call in each, and the call's answer behind it: gpt-oss's template leaves out others."""
    apart: list[Message] = []
    answers: dict[str, deque[int]] = {}  # where they are, by the call's id, which may come again in a later turn
    for place, message in enumerate(messages):
        if message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str):
            answers.setdefault(str(message["tool_call_id"]), deque()).append(place)
    moved: set[int] = set()
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not (isinstance(calls, list) and len(calls) > 1):
            if place not in moved:
                apart.append(message)
            continue
        for index, call in enumerate(calls):
            apart.append({**(message if index == 0 else {"role": "assistant"}), "tool_calls": [call]})
            places = answers.get(str(call.get("id")) if isinstance(call, Mapping) else "", deque())
            while places and places[0] < place:
                places.popleft()
            if places:
                moved.add(places[0])
                apart.append(messages[places.popleft()])
    return apart


def _complete_tool(tool: Mapping[str, object]) -> Mapping[str, object]:
    """``tool`` with all that OpenAI's clients may leave out and some templates read."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    parameters = function.get("parameters")
    parameters = {"type": "object", "properties": {}, **(parameters if isinstance(parameters, Mapping) else {})}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _with_one_thought(message: Mapping[str, object]) -> Mapping[str, object]:
    """If the calls of a message follow both reasoning and text, both become its reasoning."""
    thought, text = message.get("thinking"), message.get("content")
    if not (message.get("tool_calls") and isinstance(thought, str) and isinstance(text, str) and text):
        return message
    return {**message, "thinking": f"{thought}\n\n{text}", "content": ""}


def _short_id(id: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _completed_arguments(text: str) -> Mapping[str, object]:
    """The arguments that ``text`` begins, if a call was cut off; other text as the one argument ``arguments``."""
    try:
        value = pydantic_core.from_json(text, allow_partial="trailing-strings")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _has_media(content: object) -> TypeGuard[list[object]]:
    return isinstance(content, list) and any(part in content for _, part in _MEDIA)


def _text_of(content: object) -> str:
    """The text of a message's content: a string, text parts or None."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _conversation(kind: str, content: object, arguments: str = "{}") -> Sequence[Message]:
    """A conversation with messages of ``kind`` that have ``content``, and a call's ``arguments``."""
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    function = {"name": "f", "arguments": arguments}
    calls = {**assistant, "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}
    tool = {"role": "tool", "tool_call_id": "call00000", "content": "ok"}
    match kind:
        case "system":
            return [{"role": "system", "content": content}, user]
        case "user":
            return [{**user, "content": content}, assistant, {**user, "content": content}]
        case "assistant":
            return [user, {**assistant, "content": content}, user]
        case "calls":
            return [user, {**calls, "content": content}, tool]
    return [user, {**calls, "content": None}, {**tool, "content": content}]


def _marked(message: dict[str, object]) -> dict[str, object]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CUT_HERE}
    if isinstance(content, list) and content:
        *rest, last = content
        if _has_media([last]):
            raise ValueError("continue_final_message needs a last message that ends with text")
        return {**message, "content": [*rest, {**last, "text": last["text"] + _CUT_HERE}]}
    raise ValueError("continue_final_message needs a last message with content to go on with")


def _cut(text: str) -> str:
    mark = text.rfind(_CUT_HERE.rstrip())
    if mark < 0:
        raise ValueError("continue_final_message: the chat template drops the last message, it cannot be continued")
    kept = text[:mark]
    return kept if text.startswith(_CUT_HERE, mark) else kept.rstrip()


# --- the environment that templates are written for


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for training. Here its content is
    rendered as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson``. Jinja's own escapes HTML, and models were not trained on escaped text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tests_content_for_none(tree: nodes.Template) -> bool:
    """Whether the template asks if a message's content is none; one that does not gets an empty text."""
    return any(_is_content(test.node) for test in tree.find_all(nodes.Test) if test.name == "none")


def _is_content(node: nodes.Node | None) -> bool:
    match node:
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == "content")
        case nodes.Name():  # a macro's parameter, or {% set content = message.content %}
            return node.name == "content"
    return False
