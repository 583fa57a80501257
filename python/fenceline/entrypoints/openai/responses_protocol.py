"""The body of /v1/responses, and the chat completion that it is turned into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from fenceline.config.request_limits import MAX_MESSAGES
from fenceline.entrypoints.fields import OPENAI, WITHOUT_EFFECT, FieldRules, Refused
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

Message = dict[str, object]  # of a chat completion
MAX_ID_CHARS = 64

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def _known_items(value: object) -> object:
    """Check the kinds of the input's items and their fields, for a clear error message."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} items, at most {MAX_MESSAGES} are allowed")
    for index, item in enumerate(value):
        try:
            _check_item(item)
        except ValueError as error:
            raise ValueError(f"[{index}] {error}") from None
    return value


def item_kind(item: JsonObject) -> object:
    """The type of an item, which two kinds may leave out."""
    return item.get("type") or ("item_reference" if "id" in item and "role" not in item else "message")


def _check_item(item: object) -> None:
    if not isinstance(item, dict):
        raise ValueError("must be an object")
    match item_kind(item):
        case "message":
            if item.get("role") not in ("user", "assistant", "system", "developer"):
                raise ValueError("is a message whose role is not user, assistant, system or developer")
            _content_of(item.get("content"), "content")
            if item["role"] == "assistant":
                _text_of(item.get("content"))
        case "function_call":
            if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
                raise ValueError("is a function_call, which has the strings call_id, name and arguments")
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise ValueError("is a function_call_output without its call_id")
            _content_of(item.get("output") or "", "output")
        case "reasoning":
            _text_of(item.get("content") or [], ("reasoning_text",))
        case "item_reference":
            if not isinstance(item.get("id"), str):
                raise ValueError("is an item_reference without its id")
        case kind:
            raise ValueError(
                f"is of type {str(kind)[:64]!r}; this server reads message, function_call, function_call_output, "
                "reasoning and item_reference"
            )


def _text_of(content: object, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    """The text of a string or of parts. Raises ValueError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("has no text: give a string or a list of parts")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not (isinstance(text, str) and part.get("type") in kinds):
            raise ValueError("has a part that is neither text nor an image")
        texts.append(text)
    return "\n".join(texts)


def _content_of(content: object, place: str) -> str | list[TextPart | ImagePart]:
    """The content of a message of a chat completion: the text alone, unless images are among the parts. ``place``: that
    of ``content`` in the request. Raises ValueError for what is neither."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text_of(content)
    parts: list[TextPart | ImagePart] = []
    for index, part in enumerate(content):
        if not _is_image(part):
            parts.append(TextPart(type="text", text=_text_of([part])))
        elif part.get("file_id") is not None:
            raise ValueError("has an image by its file_id, but no files are kept here: send it as a data: URL")
        else:
            parts.append(image_part(part.get("image_url"), part.get("detail"), f"{place}[{index}]"))
    return parts


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


class ResponsesTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class TextSettings(StrictModel):
    """The form of the answer's text."""

    format: JsonObject | None = None


class ReasoningSettings(StrictModel):
    """How much the model reasons, for templates that know it."""

    effort: str | None = None


def _no_logprobs(include: list[str]) -> list[str]:
    if "message.output_text.logprobs" in include:
        raise ValueError("has message.output_text.logprobs, which only /v1/chat/completions has")
    return include  # all else is part of the answer if there is any of it


class ResponsesBody(CommonBody):
    """The body of /v1/responses."""

    input: Annotated[str | list[JsonObject], BeforeValidator(_known_items)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=MAX_ID_CHARS)
    store: bool = True
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**53)
    tools: Annotated[list[ResponsesTool], FailFast(), BeforeValidator(not_too_many_tools)] = Field(default_factory=list)
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool = True
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    include: Annotated[list[str], AfterValidator(_no_logprobs)] = Field(default_factory=list)


_REFUSED: Mapping[str, Refused] = {
    **OPENAI,
    **chat_only(
        {
            "max_completion_tokens": "max_output_tokens",
            "max_tokens": "max_output_tokens",
            "messages": "input, or /v1/chat/completions",
            "reasoning_effort": "reasoning.effort",
            "response_format": "text.format",
        }
    ),
    "background": Refused("stream, or wait for the answer"),
    "conversation": Refused("use previous_response_id, or send the whole conversation"),
    "max_tool_calls": Refused("the client runs the calls and can count them"),
    "prompt": Refused("there are no stored prompts; send it as instructions and input"),
    "top_logprobs": Refused("use /v1/chat/completions", neutral=(0,)),
    "truncation": Refused("leave old items out of the input", neutral=("disabled",)),
}
_NO_EFFECT = WITHOUT_EFFECT | {"stream_options"}
RULES = FieldRules(ResponsesBody.model_fields, _REFUSED, _NO_EFFECT)


def chat_fields(body: ResponsesBody, history: list[Message]) -> JsonObject:
    """The fields of the chat completion that answers ``body`` after ``history``."""
    first: list[Message] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return {
        **common_fields(body),
        "messages": [*first, *history, *input_messages(body.input)],
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if body.text is None else _response_format(body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }


def input_messages(items: str | list[JsonObject]) -> list[Message]:
    """The messages of a chat completion that an input, or the output of an earlier response, stands for."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return list(_messages(items))


def _messages(items: list[JsonObject]) -> Iterator[Message]:
    """What the model has written since the last message of another role is one message: reasoning, text, calls."""
    own: Message = {}
    for index, item in enumerate(items):
        kind = item_kind(item)
        if kind == "reasoning":
            text = _text_of(item.get("content") or [], ("reasoning_text",))
            if own:
                yield own
            own = {"role": "assistant", "content": None, "reasoning_content": text} if text else {}
        elif kind == "message" and item["role"] == "assistant":
            if own.get("content") is not None or own.get("tool_calls"):
                yield own
                own = {}
            own = {"role": "assistant"} | own | {"content": _text_of(item["content"])}
        elif kind == "function_call":
            own = {"role": "assistant", "content": None} | own
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = own.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            if own:
                yield own
                own = {}
            if kind == "message":
                yield {"role": item["role"], "content": _content_of(item["content"], f"input[{index}].content")}
            else:
                content = _content_of(item.get("output") or "", f"input[{index}].output")
                yield {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    if own:
        yield own


def _tool(tool: ResponsesTool) -> JsonObject:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(form: JsonObject | None) -> JsonObject | None:
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
