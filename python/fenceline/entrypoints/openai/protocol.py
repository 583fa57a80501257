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
    PrivateAttr,
    model_validator,
)

from fenceline.config.request_limits import (
    MAX_BODY_FRAMES,
    MAX_IMAGE_CHARS,
    MAX_MESSAGES,
    MAX_REQUESTS,
    MAX_RID_BYTES,
    MAX_SAMPLES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
)
from fenceline.entrypoints.fields import WITHOUT_EFFECT, Refused
from fenceline.entrypoints.video_parts import frame_times, frame_urls, num_frames, video_source
from fenceline.frontend.request_types import IMAGE_DETAILS, ImageDetail, ImageSource, MediaSource, VideoSource

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


def parse_one_prompt(value: object) -> Prompt:
    """``value`` if it is one text or one list of token ids. Raises ValueError otherwise."""
    prompts = parse_prompts(value)
    if len(prompts) > 1:
        raise ValueError("must be one text, or one list of token ids")
    return prompts[0]


def parse_texts(value: object) -> list[str]:
    """A text or a list of texts as a list. Raises ValueError for anything else and for empty texts."""
    texts = [prompt for prompt in parse_prompts(value) if isinstance(prompt, str)]
    if not texts:
        raise ValueError("must be a text or a list of texts")
    return texts


def parse_documents(value: object) -> list[str]:
    """The texts of documents, each of which is a text or an object with one. Raises as :func:`parse_texts`."""
    if not isinstance(value, list):
        raise ValueError("must be a list of texts")
    return parse_texts([one.get("text") if isinstance(one, dict) else one for one in value])


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


class ReadingBody(StrictModel):
    """The fields of routes whose requests are read, and generate no text."""

    model: str | None = Field(default=None, max_length=MAX_MODEL_CHARS)
    rid: str | None = Field(default=None, min_length=1, max_length=MAX_RID_BYTES)
    request_id: str | None = Field(default=None, min_length=1, max_length=MAX_RID_BYTES)  # vLLM's name of it
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None

    @property
    def stream(self) -> bool:
        """Nothing is streamed."""
        return False


class EmbeddingBody(ReadingBody):
    """The body of /v1/embeddings."""

    input: Annotated[list[Prompt], PlainValidator(parse_prompts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    add_special_tokens: bool = True


class RerankBody(ReadingBody):
    """The body of /v1/rerank: Jina's and Cohere's fields, and SGLang's ``instruct``. A document may be an object with
    its ``text``."""

    query: str = Field(min_length=1)
    documents: Annotated[list[str], PlainValidator(parse_documents)]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    instruct: str | None = None
    instruction: str | None = None  # another name of it


class ScoreBody(ReadingBody):
    """The body of /v1/score. SGLang's form: ``query`` and ``items`` with ``label_token_ids``. vLLM's: ``text_1`` and
    ``text_2``, or ``queries`` and ``documents``."""

    query: Annotated[Prompt | None, BeforeValidator(parse_one_prompt)] = None
    items: Annotated[list[Prompt] | None, PlainValidator(parse_prompts)] = None
    label_token_ids: list[int] = Field(default_factory=list, max_length=MAX_TOKEN_IDS_LOGPROB)
    apply_softmax: bool = False
    item_first: bool = False
    text_1: Annotated[list[str] | None, PlainValidator(parse_texts)] = None
    text_2: Annotated[list[str] | None, PlainValidator(parse_texts)] = None
    queries: Annotated[list[str] | None, PlainValidator(parse_texts)] = None
    documents: Annotated[list[str] | None, PlainValidator(parse_texts)] = None
    instruct: str | None = None


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


class ImageUrl(StrictModel):
    """Where an image is: a ``data:`` URL, or one that the server may fetch."""

    url: str
    detail: ImageDetail | None = None


class PixelLimits(StrictModel):
    """To how many pixels images are resized, within the model's limits."""

    model_config = ConfigDict(extra="forbid")

    min_pixels: int | None = Field(default=None, ge=1, le=2**31)
    max_pixels: int | None = Field(default=None, ge=1, le=2**31)


class ImagePart(StrictModel):
    """An image in a message's content. Another route's request may say where it stood there."""

    type: Literal["image_url"]
    image_url: ImageUrl
    _place: str = PrivateAttr("")

    def source(self, place: str, limits: PixelLimits | None) -> ImageSource:
        """The image, which stands at ``place`` of the chat completion."""
        least, most = (None, None) if limits is None else (limits.min_pixels, limits.max_pixels)
        return ImageSource(self._place or place, self.image_url.url, self.image_url.detail or "auto", least, most)


class VideoPart(StrictModel):
    """A video in a message's content, in the form of Qwen's models: the URLs of its frames. ``sample_fps`` is another
    name of ``fps``."""

    type: Literal["video"]
    video: list[str]
    fps: float | str | None = None
    sample_fps: float | str | None = None
    timestamps: list[float] | None = None
    min_pixels: int | None = Field(default=None, ge=1, le=2**31)
    max_pixels: int | None = Field(default=None, ge=1, le=2**31)

    def source(self, place: str, limits: PixelLimits | None) -> VideoSource:
        """The video, which stands at ``place``."""
        least, most = self.min_pixels, self.max_pixels
        if limits is not None:
            least = limits.min_pixels if least is None else least
            most = limits.max_pixels if most is None else most
        times = frame_times(self.model_dump(include={"fps", "sample_fps", "timestamps"}), len(self.video))
        return video_source(place, self.video, times, least, most)


def _video_part(part: Mapping[str, object]) -> Mapping[str, object]:
    """``part`` as a :class:`VideoPart`, from that or from vLLM's form. Raises ValueError, whose text goes on after "a
    video"."""
    frames = frame_urls(_video_of(part))
    frame_times(part, len(frames))
    return {**part, "type": "video", "video": frames}


def _video_of(part: Mapping[str, object]) -> object:
    url = part.get("video_url")
    return part.get("video") if part.get("type") == "video" else url.get("url") if isinstance(url, dict) else url


def image_part(url: object, detail: object, place: str) -> ImagePart:
    """The image at ``place`` of another route's request. Raises ValueError for what is none."""
    part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    try:
        _check_image(part)
    except ValueError as error:
        raise ValueError(f"has {error}") from None
    made = ImagePart.model_validate(part)
    made._place = place
    return made


def _check_image(part: Mapping[str, object]) -> None:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not url:
        raise ValueError("an image without its URL")
    if len(url) > MAX_IMAGE_CHARS:
        raise ValueError(f"an image of {len(url)} characters, at most {MAX_IMAGE_CHARS} are allowed")
    detail = image.get("detail") if isinstance(image, dict) else None
    if detail is not None and detail not in IMAGE_DETAILS:
        raise ValueError(f"an image whose detail is not {', '.join(IMAGE_DETAILS)}")


def _known_parts(value: object) -> object:
    """Check the kinds of a message's parts before pydantic checks their fields, for a clear error message."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    parts: list[object] = list(value)
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        if kind not in ("text", "image_url", "video", "video_url"):
            raise ValueError(
                f"[{index}] is a part of type {str(kind)[:64]!r}; this server reads text, images and lists of frames: "
                'send parts of the form {"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": ...}}'
                ' or {"type": "video", "video": [...]}'
            )
        if not isinstance(part, dict):
            continue
        if kind == "image_url":
            try:
                _check_image(part)
            except ValueError as error:
                raise ValueError(f"[{index}] is {error}") from None
        elif kind in ("video", "video_url"):
            try:
                parts[index] = _video_part(part)
            except ValueError as error:
                raise ValueError(f"[{index}] is a video {error}") from None
        elif not isinstance(part.get("text"), str):
            raise ValueError(f"[{index}] is a text part whose text is not a string")
    return parts


def _not_too_many(messages: object) -> object:
    """Check the number of messages, of their parts and of their videos' frames before any of them is validated."""
    if isinstance(messages, list):
        given = [message.get("content") for message in messages if isinstance(message, dict)]
        contents = [content for content in given if isinstance(content, list)]
        num_parts = sum(map(len, contents))
        if max(len(messages), num_parts) > MAX_MESSAGES:
            raise ValueError(
                f"has {len(messages)} messages with {num_parts} parts, at most {MAX_MESSAGES} of each are allowed"
            )
        parts = [part for content in contents for part in content if isinstance(part, dict)]
        videos = [_video_of(part) for part in parts if part.get("type") in ("video", "video_url")]
        total = sum(map(num_frames, videos))
        if total > MAX_BODY_FRAMES:
            raise ValueError(f"has {total} frames of videos, at most {MAX_BODY_FRAMES} are allowed in one body")
    return messages


class ChatMessage(StrictModel):
    """One message of a conversation. ``developer`` is OpenAI's newer word for ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart | ImagePart | VideoPart] | str | None, BeforeValidator(_known_parts)] = None
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

    @property
    def text(self) -> str:
        """The text of the content, without what lies between its parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content or () if isinstance(part, TextPart)])


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
    mm_processor_kwargs: PixelLimits | None = None

    def images(self) -> list[MediaSource]:
        """The images and videos of all messages, in their order."""
        return [
            part.source(f"messages[{index}].content[{place}]", self.mm_processor_kwargs)
            for index, message in enumerate(self.messages)
            if isinstance(message.content, list)
            for place, part in enumerate(message.content)
            if isinstance(part, ImagePart | VideoPart)
        ]


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
