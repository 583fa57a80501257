"""The body of /generate: parsed, checked and expanded into one GenerateInput per prompt and sample."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, TypeVar, cast

import msgspec
import orjson

from fenceline.config.engine_config import EngineConfig
from fenceline.config.request_limits import MAX_SAMPLES
from fenceline.constrained.spec import GrammarKind, GrammarSpec, ThinkTokens
from fenceline.entrypoints.fields import GENERATION, SAMPLING, FieldRules, UnknownFields, parse_known
from fenceline.entrypoints.video_parts import frame_times, frame_urls, num_frames, video_source
from fenceline.frontend.request_prepare import check_num_media
from fenceline.frontend.request_types import (
    TURN_REQUESTS,
    GenerateInput,
    ImageSource,
    MediaSource,
    RequestError,
    VideoSource,
    check_num_params,
    check_num_requests,
    expand_samples,
    new_rid,
)
from fenceline.ipc.io_struct import id_array
from fenceline.sampling.sampling_params import SamplingParams

T = TypeVar("T")
M = TypeVar("M")  # what stands for an image or a video beside a URL
S = TypeVar("S")
Prompt = tuple[str | None, Sequence[int] | None]  # text or ids
MAX_KEY_CHARS = 1024
NULL = msgspec.Raw(b"null")  # msgspec takes a union of Raw and None for None alone


class NativeSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``sampling_params`` as clients write them: SGLang's names, None or absent for the default. ``max_new_tokens``
    None means up to the end of the context; None among ``stop_token_ids`` is skipped."""

    max_new_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int | None] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    n: int | None = None
    json_schema: str | dict[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, object] | None = None


class PixelLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """To how many pixels images are resized, within the model's limits."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class VideoData(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A video: the URLs of its frames, or one URL of all; ``fps`` in a second, or at ``timestamps`` in seconds.
    ``sample_fps`` is another name of ``fps``. The limits of pixels are those of each frame."""

    video: str | list[str]
    type: Literal["video"] = "video"
    fps: float | str | None = None
    sample_fps: float | str | None = None
    timestamps: list[float] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /generate: the fields that do something. :mod:`fenceline.entrypoints.fields` knows the others."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: str | list[str | list[str | None] | None] | None = None
    video_data: str | VideoData | list[str | VideoData | list[str | VideoData | None] | None] | None = None
    mm_processor_kwargs: PixelLimits | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    require_reasoning: bool = False
    stream: bool = False
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    priority: int | None = None
    # Judged by the table like all others. SGLang's own clients send them with every request, mostly null: as long as
    # there is nothing else, the body is read once.
    model: msgspec.Raw = NULL
    audio_data: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    lora_path: msgspec.Raw = NULL
    session_params: msgspec.Raw = NULL
    custom_logit_processor: msgspec.Raw = NULL
    return_hidden_states: msgspec.Raw = NULL
    return_routed_experts: msgspec.Raw = NULL
    bootstrap_host: msgspec.Raw = NULL
    bootstrap_port: msgspec.Raw = NULL
    bootstrap_room: msgspec.Raw = NULL
    data_parallel_rank: msgspec.Raw = NULL
    routed_dp_rank: msgspec.Raw = NULL


_MENTIONED = tuple(
    name
    for name, default in zip(GenerateBody.__struct_fields__, GenerateBody.__struct_defaults__, strict=True)
    if default is NULL
)
SAMPLING_FIELDS = FieldRules(NativeSampling.__struct_fields__, SAMPLING, frozenset())
FIELDS = FieldRules(
    set(GenerateBody.__struct_fields__) - set(_MENTIONED),
    GENERATION,
    within={"sampling_params": SAMPLING_FIELDS.declared},
)


def parse_generate(data: bytes, unknown: UnknownFields) -> GenerateBody:
    """``data`` as a GenerateBody. Raises RequestError 400 for bad JSON, wrong types and fields that are refused."""
    body = parse_known(data, GenerateBody, FIELDS, unknown, _amend_sampling)
    mentioned = {name: value for name in _MENTIONED if (value := getattr(body, name)) is not NULL}
    if mentioned:
        FIELDS.unknown(mentioned)
    _check_counts(body)
    return body


def _check_counts(body: GenerateBody) -> None:
    """Raise RequestError 400 for a list with more entries than there may be requests, too many images, or parameters
    with too many."""
    for listed in (
        body.text, body.sampling_params, body.rid, body.return_logprob, body.logprob_start_len, body.top_logprobs_num,
        body.token_ids_logprob, body.extra_key, body.cache_salt,
    ):  # fmt: skip
        if isinstance(listed, list):
            check_num_requests(len(listed), 1)
    params = body.sampling_params
    for one in params if isinstance(params, list) else [params]:
        if one is not None:
            check_num_params(one.stop, one.stop_token_ids, one.logit_bias)
    if body.input_ids and isinstance(body.input_ids[0], list):  # a mixture is refused later, see _prompts
        check_num_requests(len(body.input_ids), 1)
    videos = [one if isinstance(one, str) else one.video for one in _listed(body.video_data)]
    check_num_media(len(_listed(body.image_data)), sum(map(num_frames, videos)))


def _listed(given: str | M | list[str | M | list[str | M | None] | None] | None) -> list[str | M]:
    """All images, or videos, of a body."""
    listed: list[str | M] = []
    for one in given if isinstance(given, list) else [given]:
        listed += [each for each in (one if isinstance(one, list) else [one]) if each]
    return listed


def _amend_sampling(fields: dict[str, msgspec.Raw]) -> None:
    """Take out of ``sampling_params`` what changes nothing. Raises RequestError 400 for what is refused or unknown."""
    if "sampling_params" not in fields:
        return
    try:
        params = msgspec.json.decode(
            fields["sampling_params"], type=dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]] | None
        )
    except (msgspec.DecodeError, RecursionError):
        return  # to be refused for its type
    for one in params if isinstance(params, list) else [params or {}]:
        if unknown_names := SAMPLING_FIELDS.unknown(one):
            SAMPLING_FIELDS.refuse_unknown(min(unknown_names), "sampling parameter")
        for name in one.keys() - SAMPLING_FIELDS.declared:
            del one[name]
    fields["sampling_params"] = msgspec.Raw(msgspec.json.encode(params))


@dataclass(frozen=True, slots=True)
class Expanded:
    """The requests of one body. ``single``: the answer is one object, not a list."""

    inputs: list[GenerateInput]
    single: bool


def grammar_of(**given: str | dict[str, object] | None) -> GrammarSpec | None:
    """The one grammar among ``given``, each None or the text of its kind; a JSON text may come parsed. Raises
    RequestError (400) for several."""
    specs = []
    for kind, value in given.items():
        if isinstance(value, dict):
            try:
                value = orjson.dumps(value).decode()
            except orjson.JSONEncodeError as error:  # nested deeper than 254, numbers beyond 64 bits, half a character
                raise RequestError(400, f"{kind} cannot be used: {error}", param=kind) from None
        if value:  # an empty text is unset
            specs.append(GrammarSpec(cast(GrammarKind, kind), value))
    if len(specs) > 1:
        kinds = " and ".join(spec.kind for spec in specs)
        raise RequestError(400, f"{kinds} exclude each other: give one of them", param=specs[1].kind)
    return specs[0] if specs else None


async def expand(
    body: GenerateBody, config: EngineConfig, default_rid: str | None, thinking_end: int | None = None
) -> Expanded:
    """One GenerateInput per prompt and sample, samples of a prompt side by side. Raises RequestError. ``thinking_end``:
    the token that ends the thinking with which every answer begins, None where they do not. Others run in between:
    there may be thousands."""
    prompts, single = _prompts(body, config.model.context_length)
    num = len(prompts)
    check_num_requests(num, 1)
    given = NativeSampling() if body.sampling_params is None else body.sampling_params
    sampling = _spread(given, num, "sampling_params")
    n = _num_samples(sampling)
    check_num_requests(num, n)
    rids = _rids(body.rid, num, default_rid)
    family = "" if isinstance(body.rid, list) else body.rid or default_rid or ""
    logprob = _spread(body.return_logprob or False, num, "return_logprob")
    start = _spread(-1 if body.logprob_start_len is None else body.logprob_start_len, num, "logprob_start_len")
    top = _spread(body.top_logprobs_num or 0, num, "top_logprobs_num")
    named = _token_ids_logprob(body.token_ids_logprob, num)
    shared = shared_inputs(body, num)
    params: dict[int, SamplingParams] = {}  # each once, by the identity of what the client wrote
    grammars: dict[int, GrammarSpec | None] = {}
    think = None if thinking_end is None else ThinkTokens(-1, (thinking_end,), is_open=True)
    for native in sampling:
        if id(native) not in params:
            params[id(native)] = _to_params(native, config)
            grammars[id(native)] = grammar_of(
                json_schema=native.json_schema,
                regex=native.regex,
                ebnf=native.ebnf,
                structural_tag=native.structural_tag,
            )
            if len(params) % TURN_REQUESTS == 0:
                await asyncio.sleep(0)
    inputs: list[GenerateInput] = []
    images = _media(body, num, single)
    for index, (text, ids) in enumerate(prompts):
        one = GenerateInput(
            text=text,
            input_ids=ids,
            images=images[index],
            sampling_params=params[id(sampling[index])],
            return_logprob=logprob[index],
            logprob_start_len=start[index],
            top_logprobs_num=top[index],
            token_ids_logprob=named[index],
            grammar=grammars[id(sampling[index])],
            think=think,
            rid=new_rid() if rids is None else rids[index],
            family="" if rids is None else family,
            **shared[index],
        )
        inputs.extend(expand_samples(one, n))
        if (index + 1) % (TURN_REQUESTS // n) == 0:
            await asyncio.sleep(0)
    return Expanded(inputs, single and n == 1)


def _prompts(body: GenerateBody, most: int) -> tuple[Sequence[Prompt], bool]:
    """The prompts, and whether there is one that is not in a list. The number of ids is checked first."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError(400, "give either text or input_ids, exactly one of them", param="text")
    if body.text is not None:
        if isinstance(body.text, str):
            return [(body.text, None)], True
        return _some([(text, None) for text in body.text], "text"), False
    assert body.input_ids is not None
    if len(body.input_ids) <= most:
        # Most bodies have one list of ids. Looking at thousands of them first would take as long as this. What raises
        # are lists, or an id that is refused later.
        with suppress(TypeError, OverflowError):
            return [(None, id_array(cast(list[int], body.input_ids)))], True
    # A longer prompt is refused or cut, whatever is behind: looking at 100,000 ids would keep others waiting.
    first = body.input_ids if isinstance(body.input_ids[0], list) else body.input_ids[: most + 1]
    kinds = set(map(type, first))
    if len(kinds) > 1:
        raise RequestError(400, "input_ids mixes ids and lists of ids: send one or the other", param="input_ids")
    if kinds == {list}:
        return [(None, cast(list[int], ids)) for ids in body.input_ids], False
    return [(None, cast(list[int], body.input_ids))], True


def _media(body: GenerateBody, num: int, single: bool) -> Sequence[Sequence[MediaSource]]:
    """The images and videos of each prompt."""
    limits = body.mm_processor_kwargs or PixelLimits()

    def image(place: str, url: str) -> ImageSource:
        return ImageSource(place, url, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels)

    def video(place: str, given: str | VideoData) -> VideoSource:
        one = VideoData(video=given) if isinstance(given, str) else given
        least = limits.min_pixels if one.min_pixels is None else one.min_pixels
        most = limits.max_pixels if one.max_pixels is None else one.max_pixels
        try:
            urls = frame_urls(one.video)
            return video_source(place, urls, frame_times(msgspec.structs.asdict(one), len(urls)), least, most)
        except ValueError as error:
            raise RequestError(400, f"{place}: it is a video {error}", param=place) from None

    images = _of_prompts(body.image_data, image, num, single, "image_data")
    videos = _of_prompts(body.video_data, video, num, single, "video_data")
    if not body.video_data:
        return images
    return [[*pictures, *films] for pictures, films in zip(images, videos, strict=True)]


def _of_prompts(
    given: str | M | list[str | M | list[str | M | None] | None] | None,
    source: Callable[[str, str | M], S],
    num: int,
    single: bool,
    name: str,
) -> list[list[S]]:
    """The sources of each prompt. One is that of all prompts, and those of a single prompt may be one list."""
    if not given:
        return [[]] * num
    if not isinstance(given, list):
        return [[source(name, given)]] * num
    if single and not any(isinstance(one, list) for one in given):
        return [
            [source(f"{name}[{index}]", one) for index, one in enumerate(given) if one and not isinstance(one, list)]
        ]
    sources: list[list[S]] = []
    for index, one in enumerate(_spread(given, num, name)):
        place = f"{name}[{index}]"
        if isinstance(one, list):
            sources.append([source(f"{place}[{number}]", each) for number, each in enumerate(one) if each])
        else:
            sources.append([source(place, one)] if one else [])
    return sources


def _some(prompts: list[Prompt], name: str) -> list[Prompt]:
    if not prompts:
        raise RequestError(400, f"{name} is an empty list: there is nothing to do", param=name)
    return prompts


def _spread(value: T | list[T], num: int, name: str) -> list[T]:
    """A value for each prompt: a list must have one per prompt, anything else holds for all."""
    if not isinstance(value, list):
        return [value] * num
    if len(value) != num:
        raise RequestError(400, f"{name} has {len(value)} entries for {num} prompts", param=name)
    return value


def _token_ids_logprob(given: list[int | list[int] | None] | None, num: int) -> list[list[int]]:
    """One list of ids for all prompts, or a list (or null) for each."""
    if given is None:
        return [[]] * num
    ids = [one for one in given if isinstance(one, int)]
    if ids and len(ids) == len(given):
        return [ids] * num
    if ids:
        raise RequestError(
            400, "token_ids_logprob mixes ids and lists of ids: send one or the other", param="token_ids_logprob"
        )
    lists = [one if isinstance(one, list) else [] for one in given]
    return _spread(lists, num, "token_ids_logprob") if lists else [[]] * num


class SharedFields(Protocol):
    """The fields of a body that mean the same on every route that generates, /generate too."""

    @property
    def stream(self) -> bool:
        """Whether the answer is sent as it grows."""

    @property
    def priority(self) -> int | None:
        """Which waiting request goes first."""

    @property
    def cache_salt(self) -> str | list[str | None] | None:
        """Whose prefixes a prompt may share: one for all prompts, or one for each."""

    @property
    def extra_key(self) -> str | list[str | None] | None:
        """The same as ``cache_salt``; both must be equal."""


class SharedInput(TypedDict):
    """What :class:`SharedFields` are in a GenerateInput. ``extra_key`` is the namespace of the prompt's KV: "" for the
    common one, else a digest of salt and key, from which neither can be read."""

    stream: bool
    priority: int | None
    extra_key: str


def shared_inputs(body: SharedFields, num: int) -> list[SharedInput]:
    """The shared fields of ``body`` for each of its ``num`` prompts; whatever makes a GenerateInput of a body takes
    them from here. Raises RequestError for lists of another length and for texts that are too long."""
    keys = [""] * num
    if body.cache_salt or body.extra_key:
        salts = _key_texts(body.cache_salt, num, "cache_salt")
        keys = list(map(_namespace, salts, _key_texts(body.extra_key, num, "extra_key")))
    return [SharedInput(stream=body.stream, priority=body.priority, extra_key=key) for key in keys]


def _key_texts(given: str | list[str | None] | None, num: int, name: str) -> list[str]:
    texts = [text or "" for text in _spread(given, num, name)]
    if any(len(text) > MAX_KEY_CHARS for text in texts):
        raise RequestError(400, f"{name} may have at most {MAX_KEY_CHARS} characters", param=name)
    return texts


def _namespace(salt: str, key: str) -> str:
    if not salt and not key:
        return ""
    # The length says where the salt ends: no two pairs are written the same way.
    return hashlib.sha256(f"{len(salt)}:{salt}{key}".encode()).hexdigest()


def _rids(rid: str | list[str] | None, num: int, default: str | None) -> list[str] | None:
    if rid is None:
        if default is None:
            return None
        rid = default
    if isinstance(rid, str):
        if not rid:
            raise RequestError(400, "rid must not be empty", param="rid")
        return [rid] if num == 1 else [f"{rid}_{index}" for index in range(num)]
    return _spread(rid, num, "rid")


def _num_samples(sampling: Sequence[NativeSampling]) -> int:
    counts = {1 if params.n is None else params.n for params in sampling}
    if len(counts) > 1:
        raise RequestError(400, "n must be the same for all prompts of a request", param="n")
    n = counts.pop()
    if not 1 <= n <= MAX_SAMPLES:
        raise RequestError(400, f"n must be between 1 and {MAX_SAMPLES}, got {n}", param="n")
    return n


_NATIVE_FIELDS = NativeSampling.__struct_fields__
_FIELDS = frozenset(SamplingParams.__struct_fields__)
assert set(_NATIVE_FIELDS) >= _FIELDS, "clients can give each of them"


def _to_params(native: NativeSampling, config: EngineConfig) -> SamplingParams:
    values: dict[str, object] = {}
    if config.server_args.sampling_defaults == "model":
        values.update(config.model.sampling_defaults.as_dict())
    for name, value in zip(_NATIVE_FIELDS, msgspec.structs.astuple(native), strict=True):
        if value is not None and value is not msgspec.UNSET and name in _FIELDS:
            values[name] = value
    if native.max_new_tokens is None:
        values["max_new_tokens"] = config.model.context_length  # clipped to what the prompt leaves
    if native.sampling_seed is not None:
        values["seed"] = native.sampling_seed
    stop = native.stop
    values["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = tuple(token for token in native.stop_token_ids or () if token is not None)
    return SamplingParams(**values)  # type: ignore[arg-type]  # both structs declare the same types
