"""The values that callers of the TokenizerManager pass in and get back: inputs, chunks and the error of a request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import msgspec

from fenceline.config.request_limits import MAX_REQUESTS, MAX_SAMPLES
from fenceline.constrained.spec import GrammarSpec, ThinkTokens
from fenceline.images.video import FrameTimes
from fenceline.ipc.io_struct import CachedTokensDetails, FinishReason, SpecCounts, TokenLogprobs, TokenPairs
from fenceline.sampling.sampling_params import SamplingParams, check_counts

TURN_REQUESTS = 128  # of one body that are worked on in one turn of the event loop: some milliseconds
# What requests are for, as traces name it.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
OTHER_OPERATION = "text_completion"


@dataclass(slots=True)
class ServedWeights:
    """The model's weights as clients know them: where they are from, and --weight-version or what an update said."""

    model_path: str
    version: str


class RequestError(Exception):
    """A request that cannot be served: the HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, type: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _error_type(status)

    def __reduce__(self) -> tuple[object, ...]:
        return _request_error, (self.status, self.message, self.param, self.code, self.type)


def not_unicode(name: str) -> RequestError:
    """The error of a text that cannot be written as UTF-8."""
    return RequestError(400, f"{name} has half a surrogate pair: it is not Unicode text", param=name)


def shutting_down() -> RequestError:
    """The error of a request that comes, or has not been answered, when the server stops."""
    return RequestError(503, "the server is shutting down", code="shutting_down")


def _request_error(status: int, message: str, param: str | None, code: str | None, type: str) -> RequestError:
    return RequestError(status, message, param=param, code=code, type=type)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def _error_type(status: int) -> str:
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")


def new_rid() -> str:
    """A fresh request id: 32 hexadecimal digits."""
    return os.urandom(16).hex()


ImageDetail = Literal["auto", "low", "high"]
IMAGE_DETAILS: tuple[str, ...] = get_args(ImageDetail)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a client gives it. ``place``: where it stands in the request, for errors. ``url``: a ``data:`` URL,
    one of http or https, or the base64 text alone. ``min_pixels`` and ``max_pixels``: limits of the size to which it is
    resized, within the model's."""

    place: str
    url: str
    detail: ImageDetail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video as a client gives it: a list of ``frames``, which are at ``times``; ``place``: see ``ImageSource``."""

    place: str
    frames: tuple[ImageSource, ...]
    times: FrameTimes = FrameTimes()


MediaSource = ImageSource | VideoSource


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """What the HTTP request says of a request's place in a trace: ``headers`` are traceparent and tracestate, as far as
    they were sent."""

    headers: Mapping[str, str]
    operation: str

    @classmethod
    def of(cls, path: str, headers: Mapping[bytes, bytes]) -> TraceOrigin:
        """That of an HTTP request."""
        names = ("traceparent", "tracestate")
        found = {name: headers[name.encode()].decode("latin-1") for name in names if name.encode() in headers}
        return cls(found, _OPERATIONS.get(path, OTHER_OPERATION))


ORIGIN: ContextVar[TraceOrigin | None] = ContextVar("trace_origin", default=None)
"""That of the HTTP request that the current task works on, where requests are traced; None for those of Python."""


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One prompt, one sample. Exactly one of ``text`` and ``input_ids`` is given. ``images``: images and videos, one
    for each of the prompt's placeholders; those of each kind in their order.

    ``add_special_tokens``: False where ``text`` is a rendered chat template, which writes its own BOS.
    ``family``: the client's one id for several requests, such as the samples of a prompt, that aborts them all.
    ``logprob_start_len``, ``token_ids_logprob``, ``extra_key`` and ``priority`` are those of
    :class:`TokenizedGenerateReq`; a ``priority`` of None is --default-priority-value. ``grammar``: the form of the
    answer, None for any, which begins after what the model thinks between the tokens ``think``. ``embed``: the answer
    is the prompt's embedding, for which no sampling parameter matters.
    """

    text: str | None = None
    input_ids: Sequence[int] | None = None
    images: Sequence[MediaSource] = ()
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    rid: str = field(default_factory=new_rid)
    family: str = ""
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] = ()
    extra_key: str = ""
    priority: int | None = None
    add_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    think: ThinkTokens | None = None
    replica: int | None = None  # of several, the one that must answer
    embed: bool = False


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request took. None for a stage that it did not reach."""

    queue_time_s: float | None  # from its arrival at the scheduler to the step that began it
    first_token_latency_s: float | None  # from its arrival at the server to the first token
    decode_throughput: float | None  # tokens/s after the first one; None for a single token


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The new output of one request since its last chunk. Chunks for a slow reader are merged, not queued. ``text``,
    ``output_ids`` and ``output_logprobs`` are new ones only; the three token counts and ``e2e_latency`` (seconds since
    the request arrived) are totals. ``input_logprobs`` comes once, with the first chunk. ``finish_reason`` and
    ``times`` are not None in the last chunk only, nor is ``embedding``, of a request that embeds (see
    ``DecodeInfo``)."""

    rid: str
    text: str
    output_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    output_logprobs: TokenLogprobs | None = None
    input_logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    num_retractions: int = 0
    cached_tokens_details: CachedTokensDetails | None = None  # None without HiCache
    times: RequestTimes | None = None
    spec: SpecCounts | None = None  # None without speculation
    embedding: bytes | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last chunk."""
        return self.finish_reason is not None


def merge_chunks(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """Consecutive chunks of one request (at least one) as one chunk; linear in their total size."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    ids: list[int] = []
    for chunk in chunks:
        ids.extend(chunk.output_ids)
    return msgspec.structs.replace(
        last,
        text="".join([chunk.text for chunk in chunks]),
        output_ids=ids,
        output_logprobs=_joined([chunk.output_logprobs for chunk in chunks]),
        input_logprobs=_joined([chunk.input_logprobs for chunk in chunks]),
    )


def _joined(parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    present = [part for part in parts if part is not None]
    if len(present) <= 1:
        return present[0] if present else None
    joined = TokenLogprobs(token_ids=[], logprobs=[], top_logprobs=TokenPairs(), token_ids_logprobs=TokenPairs())
    for part in present:
        joined.token_ids.extend(part.token_ids)
        joined.logprobs.extend(part.logprobs)
        joined.top_logprobs.extend(part.top_logprobs)
        joined.token_ids_logprobs.extend(part.token_ids_logprobs)
    return joined


def check_num_requests(num_prompts: int, n: int) -> None:
    """Raise RequestError (400) when prompts times ``n`` are more than one body may ask for."""
    if num_prompts * n > MAX_REQUESTS:
        raise RequestError(
            400,
            f"{num_prompts} prompts with n={n} are {num_prompts * n} requests, at most {MAX_REQUESTS} are allowed in "
            "one body; send several bodies",
            param="n",
        )


def check_num_params(stop: str | Sequence[str] | None, stop_token_ids: Sized | None, logit_bias: Sized | None) -> None:
    """Raise RequestError (400) for sampling parameters with too many entries, before they are copied."""
    try:
        check_counts(1 if isinstance(stop, str) else len(stop or ()), len(stop_token_ids or ()), len(logit_bias or ()))
    except ValueError as error:
        raise RequestError(400, str(error), param=str(error).split(" ", 1)[0]) from error


def expand_samples(inp: GenerateInput, n: int) -> list[GenerateInput]:
    """``n`` independent samples of one prompt. The first keeps the rid; sample i of a seeded request
    draws with ``seed + i``. Raises RequestError unless 1 <= n <= 128."""
    if not 1 <= n <= MAX_SAMPLES:
        raise RequestError(400, f"n must be between 1 and {MAX_SAMPLES}, got {n}", param="n")
    if n == 1:
        return [inp]
    return [inp, *(_sample(inp, index) for index in range(1, n))]


def _sample(inp: GenerateInput, index: int) -> GenerateInput:
    params = inp.sampling_params
    if params.seed is not None:
        shifted = (params.seed + index + 2**63) % 2**64 - 2**63
        params = msgspec.structs.replace(params, seed=shifted)
    return replace(inp, rid=f"{inp.rid}-{index}", family=inp.family or inp.rid, sampling_params=params)


def may_wait(inputs: Sequence[GenerateInput]) -> bool:
    """Whether their preparation may wait for another process."""
    return any(inp.grammar is not None or inp.images for inp in inputs)


def error_of(chunk: GenerateChunk) -> RequestError | None:
    """The error that ended the request, if it was one: an abort that carries a status code."""
    reason = chunk.finish_reason
    if reason is None or reason.type != "abort" or reason.status_code is None:
        return None
    return RequestError(reason.status_code, reason.message or "the request was aborted")
