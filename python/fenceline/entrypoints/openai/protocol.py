"""What a client may send: the bodies of /v1/completions and /v1/chat/completions.

Field names are OpenAI's, with SGLang's and vLLM's extensions. A field that is absent or null takes its default. Fields
that are not declared here are checked by :mod:`fenceline.entrypoints.fields`. Types are strict: ``"n": "2"`` is an
error. Ranges of sampling parameters are checked by ``SamplingParams``. A list is checked up to its first wrong entry,
so that a million wrong entries cost no more than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    model_validator,
)

from fenceline.config.request_limits import (
    MAX_MESSAGES,
    MAX_REQUESTS,
    MAX_RID_BYTES,
    MAX_SAMPLES,
    MAX_TEMPLATE_BYTES,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
)
from fenceline.entrypoints.fields import WITHOUT_EFFECT, Refused

MAX_TOP_LOGPROBS = 20
MAX_MODEL_CHARS = 256  # limited because the name is repeated in every chunk

Prompt = str | list[int]
JsonObject = dict[str, object]


def parse_prompts(value: object) -> list[Prompt]:
    """The four forms of ``prompt`` (text, texts, token ids, lists of token ids) as a list of prompts. Raises ValueError
    for any other form and for empty prompts."""
    if isinstance(value, str):
        return [_checked_text(value)]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("is empty; give at least one character or token id")
    if _all_ids(value):
        return [value]
    if len(value) > MAX_REQUESTS:
        raise ValueError(
            f"has {len(value)} prompts, at most {MAX_REQUESTS} are allowed in one body; send several bodies"
        )
    if all(isinstance(item, str) for item in value):
        return [_checked_text(item) for item in value]
    if not all(isinstance(item, list) and _all_ids(item) for item in value):
        raise ValueError(
            "must not mix forms: give a string, a list of strings, a list of token ids (whole numbers) or a list of "
            "such lists"
        )
    if not all(value):
        raise ValueError("has an empty list of token ids; give at least one token id")
    return value


def parse_ids(value: object) -> list[int]:
    """``value`` if it is a list of token ids. Raises ValueError otherwise."""
    if not isinstance(value, list) or not _all_ids(value):
        raise ValueError("must be a list of token ids (whole numbers)")
    return value


def _checked_text(text: str) -> str:
    if not text:
        raise ValueError("is empty; give at least one character or token id")
    return text


def _all_ids(items: list[object]) -> bool:
    return set(map(type, items)) <= {int}  # bool is not int here


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StrictModel(BaseModel):
    """A part of a request: values have exactly the declared types, and cannot be changed."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(StrictModel):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(StrictModel):
    """The fields that mean the same on every route of OpenAI and Anthropic that generates. Every such body extends this
    one. A route whose requests are answered as chat completions hands them on with :func:`common_fields`, so that no
    field can be forgotten on one route."""

    #: The types of tools that are served. Others, such as those that their maker's servers run, are left out.
    tool_types: ClassVar[frozenset[str]] = frozenset(["function"])

    model: str | None = Field(default=None, max_length=MAX_MODEL_CHARS)
    stream: bool = False

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int = Field(default=0, ge=0, le=2**53)
    stop: Annotated[list[str], FailFast(), BeforeValidator(_stop_list)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int | None], FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False  # vLLM's name of it

    rid: str | None = Field(default=None, min_length=1, max_length=MAX_RID_BYTES)
    request_id: str | None = Field(default=None, min_length=1, max_length=MAX_RID_BYTES)  # vLLM's name of it
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    priority: int | None = None
    regex: str | None = None
    ebnf: str | None = None


def common_fields(body: CommonBody) -> dict[str, object]:
    """The fields of :class:`CommonBody` that a request gives, for the chat completion that it stands for."""
    return {name: getattr(body, name) for name in CommonBody.model_fields if name in body.model_fields_set}


class GenerationBody(CommonBody):
    """The fields that completions and chat completions share."""

    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=2**53)
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_cached_tokens_details: bool = False
    response_format: JsonObject | None = None


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(parse_prompts)]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)


class TextPart(StrictModel):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


def _text_parts_only(value: object) -> object:
    """Check the kinds of a message's parts before pydantic checks their fields, for a clear error message."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"has a part of type {kind!r}; this server reads text only: send parts of the form "
                '{"type": "text", "text": ...}'
            )
        if not isinstance(part.get("text"), str):
            raise ValueError("has a text part whose text is not a string")
    return value


def _not_too_many(messages: object) -> object:
    """Check the number of messages and of their parts before any of them is validated."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if max(len(messages), num_parts) > MAX_MESSAGES:
            raise ValueError(
                f"has {len(messages)} messages with {num_parts} parts, at most {MAX_MESSAGES} of each are allowed"
            )
    return messages


class ChatMessage(StrictModel):
    """One message of a conversation. ``developer`` is OpenAI's newer word for ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart] | str | None, BeforeValidator(_text_parts_only)] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of it
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        # An answer, and a tool's result, may be empty; this server's own answer then has the content null.
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("has no content")
        return self


def _not_too_large(kwargs: JsonObject) -> JsonObject:
    if kwargs and len(msgspec.json.encode(kwargs)) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"has more than {MAX_TEMPLATE_BYTES >> 10} KiB as JSON")
    return kwargs


class Function(StrictModel):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool of a conversation. Functions are the only kind."""

    type: Literal["function"] = "function"
    function: Function


def not_too_many_tools(tools: object) -> object:
    """Check the number and the size of the tools before any of them is validated."""
    if isinstance(tools, list):
        if len(tools) > MAX_TOOLS:
            raise ValueError(f"has {len(tools)} tools, at most {MAX_TOOLS} are allowed")
        if tools and len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
            raise ValueError(f"has more than {MAX_TOOLS_BYTES >> 10} KiB as JSON")
    return tools


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), BeforeValidator(_not_too_many)] = Field(min_length=1)
    input_ids: Annotated[list[int], PlainValidator(parse_ids)] = Field(default_factory=list)
    max_tokens: int | None = Field(default=None, ge=1, le=2**53)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**53)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    chat_template_kwargs: Annotated[JsonObject, AfterValidator(_not_too_large)] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True

    tools: Annotated[list[Tool], FailFast(), BeforeValidator(not_too_many_tools)] = Field(default_factory=list)
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool = True
    modalities: list[str] | None = None


def chat_only(instead: Mapping[str, str]) -> dict[str, Refused]:
    """The fields of a chat completion for routes that are answered as one and do not declare them: refused, unless
    they have their default. ``instead``: what some of them are called there."""
    return {
        name: Refused(
            f"use {instead.get(name, '/v1/chat/completions')}", neutral=(field.get_default(call_default_factory=True),)
        )
        for name, field in ChatBody.model_fields.items()
        if name not in WITHOUT_EFFECT
    }
