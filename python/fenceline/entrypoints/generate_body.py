"""The body of /generate: parsed, checked and expanded into one GenerateInput per prompt and sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.config.request_limits import MAX_SAMPLES
from fenceline.config.sampling_params import SamplingParams
from fenceline.entrypoints.fields import GENERATION, SAMPLING, FieldRules, UnknownFields
from fenceline.entrypoints.json_body import parse_body
from fenceline.managers.request_types import (
    GenerateInput,
    RequestError,
    check_num_requests,
    expand_samples,
    new_rid,
)

T = TypeVar("T")
Prompt = tuple[str | None, list[int] | None]  # text or ids


class NativeSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``sampling_params`` as clients write them: SGLang's names, None or absent for the default."""

    max_new_tokens: int | None = None
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
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    n: int | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /generate: the fields that do something. :mod:`fenceline.entrypoints.fields` knows the others."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False


FIELDS = FieldRules(GenerateBody.__struct_fields__, GENERATION)
SAMPLING_FIELDS = FieldRules(NativeSampling.__struct_fields__, SAMPLING, frozenset())


def parse_generate(data: bytes, unknown: UnknownFields) -> GenerateBody:
    """``data`` as a GenerateBody. Raises RequestError 400 for bad JSON, wrong types and fields that are refused.

    The types forbid fields that they do not declare: only bodies that have such are looked at twice.
    """
    try:
        return parse_body(data, GenerateBody)
    except RequestError as error:
        if "unknown field" not in error.message:
            raise
    return parse_body(_without_extras(data, unknown), GenerateBody)


def _without_extras(data: bytes, unknown: UnknownFields) -> bytes:
    """``data`` without the fields that change nothing. Raises RequestError for those that are refused."""
    fields = parse_body(data, dict[str, msgspec.Raw])
    unknown.note(FIELDS.unknown(fields), FIELDS)
    kept = {name: value for name, value in fields.items() if name in FIELDS.declared}
    sampling = kept.get("sampling_params")
    if sampling is not None:
        kept["sampling_params"] = _sampling_without_extras(sampling)
    return msgspec.json.encode(kept)


def _sampling_without_extras(data: msgspec.Raw) -> msgspec.Raw:
    try:
        params = msgspec.json.decode(data, type=dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]] | None)
    except (msgspec.DecodeError, RecursionError):
        return data  # to be refused for its type
    for one in params if isinstance(params, list) else [params or {}]:
        for name in SAMPLING_FIELDS.unknown(one):
            SAMPLING_FIELDS.refuse_unknown(name, "sampling parameter")
        for name in one.keys() - SAMPLING_FIELDS.declared:
            del one[name]
    return msgspec.Raw(msgspec.json.encode(params))


@dataclass(frozen=True, slots=True)
class Expanded:
    """The requests of one body. ``single``: the answer is one object, not a list."""

    inputs: list[GenerateInput]
    single: bool


def expand(body: GenerateBody, config: EngineConfig, default_rid: str | None) -> Expanded:
    """One GenerateInput per prompt and sample, samples of a prompt side by side. Raises RequestError."""
    prompts, single = _prompts(body)
    num = len(prompts)
    check_num_requests(num, 1)
    given = NativeSampling() if body.sampling_params is None else body.sampling_params
    sampling = _spread(given, num, "sampling_params")
    n = _num_samples(sampling)
    check_num_requests(num, n)
    rids = _rids(body.rid, num, default_rid)
    family = "" if isinstance(body.rid, list) else body.rid or default_rid or ""
    logprob = _spread(body.return_logprob or False, num, "return_logprob")
    start = _spread(
        -1 if body.logprob_start_len is None else body.logprob_start_len, num, "logprob_start_len"
    )
    top = _spread(body.top_logprobs_num or 0, num, "top_logprobs_num")
    params: dict[int, SamplingParams] = {}  # each once, by the identity of what the client wrote
    for native in sampling:
        if id(native) not in params:
            params[id(native)] = _to_params(native, config)
    inputs: list[GenerateInput] = []
    for index, (text, ids) in enumerate(prompts):
        one = GenerateInput(
            text=text,
            input_ids=ids,
            sampling_params=params[id(sampling[index])],
            stream=body.stream,
            return_logprob=logprob[index],
            logprob_start_len=start[index],
            top_logprobs_num=top[index],
            rid=new_rid() if rids is None else rids[index],
            family="" if rids is None else family,
        )
        inputs.extend(expand_samples(one, n))
    return Expanded(inputs, single and n == 1)


def _prompts(body: GenerateBody) -> tuple[Sequence[Prompt], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError(400, "give either text or input_ids, not both and not neither", param="text")
    if body.text is not None:
        if isinstance(body.text, str):
            return [(body.text, None)], True
        return _some([(text, None) for text in body.text], "text"), False
    assert body.input_ids is not None
    kinds = set(map(type, body.input_ids))  # not one by one: there are thousands
    if len(kinds) > 1:
        raise RequestError(
            400, "input_ids mixes ids and lists of ids: send one or the other", param="input_ids"
        )
    if kinds == {list}:
        return [(None, cast(list[int], ids)) for ids in body.input_ids], False
    return [(None, cast(list[int], body.input_ids))], True


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


def _to_params(native: NativeSampling, config: EngineConfig) -> SamplingParams:
    values: dict[str, object] = {}
    if config.sampling_defaults == "model":
        values.update(config.model.sampling_defaults.as_dict())
    for name in SamplingParams.__struct_fields__:
        value = getattr(native, name)
        if value is not None:
            values[name] = value
    if native.sampling_seed is not None:
        values["seed"] = native.sampling_seed
    stop = native.stop
    values["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = tuple(native.stop_token_ids or ())
    return SamplingParams(**values)  # type: ignore[arg-type]  # both structs declare the same types
