"""Makes SamplingParams of a body's fields. A value comes from the request, else from the model, else from OpenAI's
defaults."""

from __future__ import annotations

from collections.abc import Mapping

from fenceline.entrypoints.openai.protocol import GenerationBody
from fenceline.frontend.request_types import RequestError
from fenceline.sampling.sampling_params import SamplingParams

# Fields for which the model's generation_config.json may give a default (--sampling-defaults model).
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    body: GenerationBody, max_new_tokens: int, defaults: Mapping[str, float | int]
) -> SamplingParams:
    """The sampling parameters of a request; ranges are checked when it is submitted.

    ``defaults``: the model's values for fields that the request leaves out, by the names of ``SamplingParams``.
    Raises RequestError (400) for a malformed ``logit_bias``.
    """
    given = {name: value for name in _DEFAULTED if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        stop=tuple(body.stop),
        stop_token_ids=tuple(token for token in body.stop_token_ids if token is not None),
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        no_stop_trim=body.no_stop_trim or body.include_stop_str_in_output,
        seed=body.seed,
        **{**defaults, **given},
    )


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise RequestError(
                400,
                f'logit_bias keys must be token ids such as "50256", got {key[:40]!r}',
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias
