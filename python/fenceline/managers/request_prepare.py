"""From a GenerateInput to the scheduler's message: tokenise, check, clip."""

from __future__ import annotations

import msgspec

from fenceline.config.sampling_params import SamplingParams
from fenceline.managers.io_struct import SchedulerReady, TokenizedGenerateReq
from fenceline.managers.request_types import GenerateInput, RequestError
from fenceline.managers.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 128
MAX_TOKEN_IDS_LOGPROB = 128
MAX_EXTRA_KEY_BYTES = 512
MAX_STOP_CHARS = 4096  # bounds the work of looking for the beginning of one


def check_prompt_form(inp: GenerateInput, tokenizer: Tokenizer | None) -> None:
    """What can be said before tokenising. Raises RequestError."""
    if (inp.text is None) == (inp.input_ids is None):
        raise RequestError(400, "give either text or input_ids, not both and not neither", param="text")
    if inp.text is not None and tokenizer is None:
        raise RequestError(
            400, "this server runs with --skip-tokenizer-init: send input_ids, not text", param="text"
        )
    for name, strings in (
        ("text", (inp.text or "",)),
        ("stop", inp.sampling_params.stop),
        ("rid", (inp.rid,)),
        ("extra_key", (inp.extra_key,)),
    ):
        if not all(map(_is_unicode, strings)):
            raise RequestError(400, f"{name} has half a surrogate pair: it is not Unicode text", param=name)
    if any(len(stop) > MAX_STOP_CHARS for stop in inp.sampling_params.stop):
        raise RequestError(400, f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop")
    if len(inp.extra_key.encode()) > MAX_EXTRA_KEY_BYTES:
        raise RequestError(400, f"extra_key may have at most {MAX_EXTRA_KEY_BYTES} bytes", param="extra_key")
    if not -(2**63) <= inp.priority < 2**63:
        raise RequestError(400, "priority must fit in 64 bits", param="priority")
    if inp.sampling_params.stop and tokenizer is None:
        raise RequestError(
            400, "this server runs with --skip-tokenizer-init: stop strings are impossible, use stop_token_ids",
            param="stop",
        )  # fmt: skip


def _is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8; JSON over HTTP always can, a Python string need not."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_ids(ids: list[int], vocab_size: int, limits: SchedulerReady) -> None:
    """Raise RequestError for an empty or oversized prompt and for ids outside the vocabulary."""
    if not ids:
        raise RequestError(400, "the prompt is empty", param="prompt")
    if len(ids) > limits.max_req_input_len:
        raise RequestError(
            400,
            f"the prompt has {len(ids)} tokens, this server takes at most {limits.max_req_input_len} "
            f"(context length {limits.context_length}); shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            400, f"token id {bad} is outside the vocabulary of {vocab_size}", param="input_ids"
        )


def fit_params(
    params: SamplingParams, prompt_len: int, vocab_size: int, limits: SchedulerReady
) -> SamplingParams:
    """Check ``params`` and clip ``max_new_tokens`` to what context and memory can hold. Raises RequestError."""
    try:
        params.verify(vocab_size)
    except ValueError as error:
        raise RequestError(400, str(error), param=str(error).split(" ", 1)[0].rstrip(":")) from error
    room = min(limits.context_length, limits.max_total_num_tokens) - prompt_len
    if params.max_new_tokens <= room:
        return params
    return msgspec.structs.replace(
        params, max_new_tokens=max(room, 0), min_new_tokens=min(params.min_new_tokens, max(room, 0))
    )


def build_message(
    inp: GenerateInput, wire_rid: str, ids: list[int], vocab_size: int, limits: SchedulerReady
) -> TokenizedGenerateReq:
    """The checked message. Raises RequestError with the remedy for the first thing that is wrong."""
    check_ids(ids, vocab_size, limits)
    if not 0 <= inp.top_logprobs_num <= min(MAX_TOP_LOGPROBS, vocab_size):
        raise RequestError(
            400,
            f"top_logprobs_num must be between 0 and {min(MAX_TOP_LOGPROBS, vocab_size)}, "
            f"got {inp.top_logprobs_num}",
            param="top_logprobs_num",
        )
    if not -1 <= inp.logprob_start_len <= len(ids):
        raise RequestError(
            400,
            f"logprob_start_len must be between -1 and the prompt's length {len(ids)}, "
            f"got {inp.logprob_start_len}",
            param="logprob_start_len",
        )
    return TokenizedGenerateReq(
        rid=wire_rid,
        input_ids=ids,
        sampling_params=fit_params(inp.sampling_params, len(ids), vocab_size, limits),
        stream=inp.stream,
        return_logprob=inp.return_logprob,
        logprob_start_len=inp.logprob_start_len,
        top_logprobs_num=inp.top_logprobs_num,
        token_ids_logprob=_checked_token_ids_logprob(inp, vocab_size),
        extra_key=inp.extra_key,
        priority=inp.priority,
    )


def _checked_token_ids_logprob(inp: GenerateInput, vocab_size: int) -> list[int]:
    ids = list(inp.token_ids_logprob) if inp.return_logprob else []
    if len(ids) > MAX_TOKEN_IDS_LOGPROB:
        raise RequestError(
            400,
            f"token_ids_logprob may name at most {MAX_TOKEN_IDS_LOGPROB} tokens, got {len(ids)}",
            param="token_ids_logprob",
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                400,
                f"token_ids_logprob: {token} is outside the vocabulary of {vocab_size}",
                param="token_ids_logprob",
            )
    return ids
