"""The body of /generate: parsed, checked and expanded into one GenerateInput per prompt and sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.config.sampling_params import SamplingParams
from fenceline.managers.request_types import MAX_SAMPLES, GenerateInput, RequestError, expand_samples, new_rid

T = TypeVar("T")
Prompt = tuple[str | None, list[int] | None]  # text or ids
MAX_PROMPTS = 4096
NULL = msgspec.Raw(b"null")  # msgspec takes a union of Raw and None for None alone


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
    # Understood and refused unless null.
    json_schema: msgspec.Raw = NULL
    regex: msgspec.Raw = NULL
    ebnf: msgspec.Raw = NULL
    structural_tag: msgspec.Raw = NULL
    stop_regex: msgspec.Raw = NULL
    custom_params: msgspec.Raw = NULL


_REFUSED_SAMPLING = {
    "json_schema": "constrained decoding is not available yet",
    "regex": "constrained decoding is not available yet",
    "ebnf": "constrained decoding is not available yet",
    "structural_tag": "constrained decoding is not available yet",
    "stop_regex": "use stop strings",
    "custom_params": "custom logit processors are not available",
}


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of /generate. Fields of SGLang that change nothing here are ignored."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    # Understood and refused unless null.
    input_embeds: msgspec.Raw = NULL
    image_data: msgspec.Raw = NULL
    video_data: msgspec.Raw = NULL
    audio_data: msgspec.Raw = NULL
    token_ids_logprob: msgspec.Raw = NULL
    lora_path: msgspec.Raw = NULL
    session_params: msgspec.Raw = NULL
    custom_logit_processor: msgspec.Raw = NULL
    return_hidden_states: bool | list[bool] = False


_REFUSED = {
    "input_embeds": "send text or input_ids",
    "image_data": "only text models are served",
    "video_data": "only text models are served",
    "audio_data": "only text models are served",
    "token_ids_logprob": "use top_logprobs_num",
    "lora_path": "merge the adapter into the model",
    "session_params": "send the whole conversation; its prefix is cached",
    "custom_logit_processor": "use logit_bias",
}


@dataclass(frozen=True, slots=True)
class Expanded:
    """The requests of one body. ``single``: the answer is one object, not a list."""

    inputs: list[GenerateInput]
    single: bool


def expand(body: GenerateBody, config: EngineConfig, default_rid: str | None) -> Expanded:
    """One GenerateInput per prompt and sample, samples of a prompt side by side. Raises RequestError."""
    _refuse(body, _REFUSED)
    if body.return_hidden_states is True or (
        isinstance(body.return_hidden_states, list) and any(body.return_hidden_states)
    ):
        raise RequestError(400, "return_hidden_states is not available", param="return_hidden_states")
    prompts, single = _prompts(body)
    num = len(prompts)
    given = NativeSampling() if body.sampling_params is None else body.sampling_params
    sampling = _spread(given, num, "sampling_params")
    n = _num_samples(sampling)
    if num * n > MAX_PROMPTS:
        raise RequestError(
            400, f"{num} prompts with {n} samples are more than {MAX_PROMPTS} in one request", param="n"
        )
    rids = _rids(body.rid, num, default_rid)
    family = "" if isinstance(body.rid, list) else body.rid or default_rid or ""
    logprob = _spread(body.return_logprob or False, num, "return_logprob")
    start = _spread(
        -1 if body.logprob_start_len is None else body.logprob_start_len, num, "logprob_start_len"
    )
    top = _spread(body.top_logprobs_num or 0, num, "top_logprobs_num")
    inputs: list[GenerateInput] = []
    for index, (text, ids) in enumerate(prompts):
        one = GenerateInput(
            text=text,
            input_ids=ids,
            sampling_params=_to_params(sampling[index], config),
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


def _refuse(struct: msgspec.Struct, table: dict[str, str]) -> None:
    for name, remedy in table.items():
        value: msgspec.Raw = getattr(struct, name)
        if value is not NULL and bytes(value) not in (b"null", b"[]", b"{}"):
            raise RequestError(400, f"{name} is not available: {remedy}", param=name, code="unsupported")


def _to_params(native: NativeSampling, config: EngineConfig) -> SamplingParams:
    _refuse(native, _REFUSED_SAMPLING)
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
