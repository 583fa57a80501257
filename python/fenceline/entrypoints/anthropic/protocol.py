"""The bodies of Anthropic's Messages API, and the chat completions that they are turned into.

A request becomes the body of a chat completion: ``system`` and the blocks of messages become messages with text,
reasoning, calls and the tools' results. Types are strict, as of :mod:`fenceline.entrypoints.openai.protocol`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field, model_validator

from fenceline.config.request_limits import MAX_MESSAGES
from fenceline.entrypoints.fields import GENERATION, WITHOUT_EFFECT, FieldRules, Refused
from fenceline.entrypoints.openai.protocol import (
    CommonBody,
    ImagePart,
    JsonObject,
    StrictModel,
    TextPart,
    chat_only,
    common_fields,
    image_part,
    not_too_many_tools,
)

# How the block begins that Claude Code puts before its system prompt. What follows differs from request to request.
_BILLING_HEADER = "x-anthropic-billing-header"
# What the fields of a block must be, by its type. Others are refused.
_BLOCKS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "text": {"text": str},
    "image": {"source": dict},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}


def _known_blocks(value: object) -> object:
    """Check the kinds of a content's blocks and their fields, for a clear error message."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in _BLOCKS:
            raise ValueError(f"has a block of type {str(kind)[:64]!r}; this server reads {', '.join(_BLOCKS)}")
        for name, types in _BLOCKS[kind].items():
            if not isinstance(block.get(name), types):
                raise ValueError(f"has a block of type {kind!r} whose {name} is missing or of a wrong type")
        if kind == "image":
            _image_of(block, "content")
        if kind == "tool_result" and block.get("content") is not None:
            _content_of(block["content"], "content")
    return value


def _texts_only(value: object) -> object:
    if value is not None:
        _text_of(value)
    return value


def _text_of(content: object) -> str:
    """The text of a string or of text blocks. Raises ValueError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text blocks")
    for block in content:
        if not (isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)):
            raise ValueError("has a block that is no text, where text must be")
    return "\n".join(block["text"] for block in content)


def _content_of(content: object, place: str) -> str | list[TextPart | ImagePart]:
    """The content of a message of a chat completion: the text alone, unless images are among the blocks. ``place``:
    that of ``content`` in the request. Raises ValueError for what is neither."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text_of(content)
    return [
        _image_of(block, f"{place}[{index}]") if _is_image(block) else TextPart(type="text", text=_text_of([block]))
        for index, block in enumerate(content)
    ]


def _is_image(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _image_of(block: JsonObject, place: str) -> ImagePart:
    """The image of a block at ``place`` of the request. Raises ValueError."""
    source = block.get("source")
    match source.get("type") if isinstance(source, dict) else None:
        case "base64":
            assert isinstance(source, dict)
            media, data = source.get("media_type"), source.get("data")
            if not (isinstance(media, str) and isinstance(data, str)):
                raise ValueError("has an image whose source lacks its media_type or data")
            return image_part(f"data:{media};base64,{data}", None, place)
        case "url":
            assert isinstance(source, dict)
            return image_part(source.get("url"), None, place)
        case kind:
            raise ValueError(
                f"has an image whose source is of type {str(kind)[:64]!r}; this server reads base64 and url"
            )


def _not_too_many(messages: object) -> object:
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        num_blocks = sum(len(content) for content in contents if isinstance(content, list))
        if max(len(messages), num_blocks) > MAX_MESSAGES:
            raise ValueError(
                f"has {len(messages)} messages with {num_blocks} blocks, at most {MAX_MESSAGES} of each are allowed"
            )
    return messages


class InputMessage(StrictModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[JsonObject], BeforeValidator(_known_blocks)]

    @model_validator(mode="after")
    def _images_are_the_user_s(self) -> Self:
        if self.role == "system":
            _text_of(self.content)
        elif self.role == "assistant" and not isinstance(self.content, str) and any(map(_is_image, self.content)):
            raise ValueError("has an image, which messages of the assistant cannot have")
        return self


class InputTool(StrictModel):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ToolChoice(StrictModel):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(StrictModel):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]


def _of_a_schema(form: JsonObject) -> JsonObject:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise ValueError('must be {"type": "json_schema", "schema": {...}}')
    return form


OutputFormat = Annotated[JsonObject, AfterValidator(_of_a_schema)]


class OutputConfig(StrictModel):
    """What the answer is like."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(CommonBody):
    """The body of /v1/messages/count_tokens: what makes the prompt."""

    tool_types: ClassVar[frozenset[str]] = frozenset(["custom"])

    messages: Annotated[list[InputMessage], FailFast(), BeforeValidator(_not_too_many)] = Field(min_length=1)
    system: Annotated[str | list[JsonObject] | None, BeforeValidator(_texts_only)] = None
    tools: Annotated[list[InputTool], FailFast(), BeforeValidator(not_too_many_tools)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the beta's name of output_config.format
    context_management: JsonObject | None = None


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, le=2**53)
    stop_sequences: Annotated[list[str], FailFast()] = Field(default_factory=list)


_REFUSED: Mapping[str, Refused] = {
    **GENERATION,
    **chat_only(
        {
            "max_completion_tokens": "max_tokens",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            "reasoning_effort": "output_config.effort",
            "response_format": "output_config.format",
        }
    ),
    "container": Refused("no code is run here; leave it out"),
    "mcp_servers": Refused("the client calls tools; leave it out"),
}
_NO_EFFECT = WITHOUT_EFFECT | {"betas", "cache_control", "inference_geo", "speed"}
RULES: Mapping[type[BaseModel], FieldRules] = {
    CountBody: FieldRules(MessagesBody.model_fields, _REFUSED, _NO_EFFECT),
    MessagesBody: FieldRules(MessagesBody.model_fields, _REFUSED, _NO_EFFECT),
}


def chat_fields(body: CountBody) -> dict[str, object]:
    """The fields of the chat completion that ``body`` asks for."""
    fields: dict[str, object] = {**common_fields(body), "messages": list(_messages(body))}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({} if tool.description is None else {"description": tool.description}),
                    **({} if tool.strict is None else {"strict": tool.strict}),
                },
            }
            for tool in body.tools
        ]
    if body.tool_choice is not None:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    config = body.output_config or OutputConfig()
    fields["reasoning_effort"] = config.effort
    if form := config.format or body.output_format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
    if isinstance(body, MessagesBody):
        fields["max_tokens"] = body.max_tokens
        fields["stop"] = [*body.stop, *body.stop_sequences]
    fields["continue_final_message"] = body.messages[-1].role == "assistant"
    return fields


def _messages(body: CountBody) -> Iterator[dict[str, object]]:
    if body.system:
        yield from _system(body.system)
    for index, message in enumerate(body.messages):
        if message.role == "system":
            yield from _system(message.content)
        elif isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "user":
            yield from _user(message.content, f"messages[{index}].content")
        else:
            yield _assistant(message.content)


def _system(content: str | list[JsonObject]) -> Iterator[dict[str, object]]:
    """The message of a string or of text blocks, without Claude Code's billing header: no request would find the prefix
    of the one before. Nothing if there is no other block."""
    kept = content
    if not isinstance(content, str):
        kept = [block for block in content if not str(block["text"]).startswith(_BILLING_HEADER)]
    if kept or not content:
        yield {"role": "system", "content": _text_of(kept)}


def _user(blocks: list[JsonObject], place: str) -> Iterator[dict[str, object]]:
    """The tools' results as messages of their own, then the text and the images. ``place``: that of the blocks."""
    parts: list[TextPart | ImagePart] = []
    for index, block in enumerate(blocks):
        if block["type"] == "tool_result":
            content = _content_of(block.get("content") or "", f"{place}[{index}].content")
            if block.get("is_error"):
                error = "Error: "
                content = error + content if isinstance(content, str) else [TextPart(type="text", text=error), *content]
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
        elif block["type"] == "text":
            parts.append(TextPart(type="text", text=str(block["text"])))
        elif block["type"] == "image":
            parts.append(_image_of(block, f"{place}[{index}]"))
    if parts:
        yield {"role": "user", "content": parts}


def _assistant(blocks: list[JsonObject]) -> dict[str, object]:
    text = "".join(str(block["text"]) for block in blocks if block["type"] == "text")
    thinking = "".join(str(block["thinking"]) for block in blocks if block["type"] == "thinking")
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    message: dict[str, object] = {"role": "assistant", "content": None if calls and not text else text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message
