"""Checks requests and turns them into messages to the scheduler. Checks that need no tokens come before tokenising."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from fenceline.config.engine_config import EngineConfig
from fenceline.config.image_rules import ImageRules
from fenceline.config.request_limits import (
    MAX_BODY_FRAMES,
    MAX_BODY_IMAGES,
    MAX_BODY_LOGPROBS,
    MAX_EXTRA_KEY_BYTES,
    MAX_PRIORITY,
    MAX_PROMPT_PIXEL_BYTES,
    MAX_RID_BYTES,
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
    PRESUMED_TOKEN_CHARS,
)
from fenceline.frontend.request_types import (
    GenerateInput,
    ImageSource,
    MediaSource,
    RequestError,
    VideoSource,
    not_unicode,
)
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.images.image_input import ImageInput
from fenceline.images.positions import position_delta
from fenceline.ipc.io_struct import IdArray, SchedulerReady, TokenizedGenerateReq, id_array
from fenceline.sampling.sampling_params import SamplingParams

_FEW_IDS = 256  # numpy's calls cost more than looking at so many
_OF_EMBEDDINGS = SamplingParams(max_new_tokens=0, temperature=0.0)


def check_untokenised(
    inp: GenerateInput, tokenizer: Tokenizer | None, config: EngineConfig, limits: SchedulerReady
) -> None:
    """Check everything that can be checked before tokenising, except sampling parameters and token ids. Raises
    RequestError with the remedy for the first thing that is wrong."""
    vocab_size = config.model.vocab_size
    check_kind(inp.embed, config)
    if (inp.text is None) == (inp.input_ids is None):
        raise RequestError(400, "give either text or input_ids, exactly one of them", param="text")
    if inp.text is not None and tokenizer is None:
        raise RequestError(400, "this server runs with --skip-tokenizer-init: send input_ids, not text", param="text")
    check_rid(inp.rid)
    if len(_utf8("extra_key", inp.extra_key)) > MAX_EXTRA_KEY_BYTES:
        raise RequestError(400, f"extra_key may have at most {MAX_EXTRA_KEY_BYTES} bytes", param="extra_key")
    if inp.priority:
        _check_priority(inp.priority, config.priority is not None)
    if not 0 <= inp.top_logprobs_num <= min(MAX_TOP_LOGPROBS, vocab_size):
        raise RequestError(
            400,
            f"top_logprobs_num must be between 0 and {min(MAX_TOP_LOGPROBS, vocab_size)}, got {inp.top_logprobs_num}",
            param="top_logprobs_num",
        )
    _check_token_ids_logprob(inp, vocab_size)
    if inp.text is not None and tokenizer is not None:
        check_length(len(inp.text), tokenizer, config, limits)
    longest = limits.max_req_input_len if inp.input_ids is None else len(inp.input_ids)
    _check_logprob_start(inp, longest)


def check_kind(embed: bool, config: EngineConfig) -> None:
    """Raise RequestError for a request that embeds on a server that generates, and the other way round."""
    if embed == config.model.embeds:
        return
    if embed:
        raise RequestError(
            400, "this server generates text: start it with --is-embedding for embeddings", code="unsupported"
        )
    raise RequestError(
        400,
        "this server embeds texts and generates none: use /v1/embeddings, or start it without --is-embedding",
        code="unsupported",
    )


def check_length(num_chars: int, tokenizer: Tokenizer, config: EngineConfig, limits: SchedulerReady) -> None:
    """Raise RequestError if a text of so many characters has too many tokens, whatever they are. Under
    --allow-auto-truncate only where the tokenizer takes no pieces, and so would tokenise what is cut afterwards."""
    if config.server_args.allow_auto_truncate and tokenizer.takes_pieces:
        return
    least = -(-num_chars // (tokenizer.max_token_chars or PRESUMED_TOKEN_CHARS))
    if least > limits.max_req_input_len:
        raise RequestError(
            400,
            f"the prompt has {num_chars} characters and so at least {least} tokens, this server takes at most "
            f"{limits.max_req_input_len} (context length {limits.context_length}); shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )


def check_rid(rid: str) -> None:
    """Raise RequestError for an id that is too long, or no text."""
    if len(rid) > MAX_RID_BYTES or len(_utf8("rid", rid)) > MAX_RID_BYTES:
        raise RequestError(400, f"rid may have at most {MAX_RID_BYTES} bytes", param="rid")


def _check_priority(priority: int, has_priorities: bool) -> None:
    if not has_priorities:
        raise RequestError(
            400,
            "this server does not schedule by priority: start it with --enable-priority-scheduling, or leave priority "
            "out",
            param="priority",
        )
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError(400, "priority must fit in 64 bits", param="priority")


def check_params(inputs: Sequence[GenerateInput], vocab_size: int, has_tokenizer: bool) -> None:
    """Raise RequestError for the first sampling parameter that is wrong. Prompts of a body share their parameters, and
    samples differ in the seed alone: what they share is checked once."""
    numbers: set[int] = set()
    tokens: set[tuple[int, int, int]] = set()
    try:
        for inp in inputs:
            params = inp.sampling_params
            if id(params) in numbers:
                continue
            numbers.add(id(params))
            params.verify_numbers()
            identity = (id(params.stop), id(params.stop_token_ids), id(params.logit_bias))
            if identity not in tokens:
                tokens.add(identity)
                params.verify_tokens(vocab_size)
                _check_stop(params, has_tokenizer)
    except ValueError as error:
        raise RequestError(400, str(error), param=str(error).split(" ", 1)[0].rstrip(":")) from error


def _check_stop(params: SamplingParams, has_tokenizer: bool) -> None:
    if params.stop and not has_tokenizer:
        raise RequestError(
            400, "this server runs with --skip-tokenizer-init: stop strings are impossible, use stop_token_ids",
            param="stop",
        )  # fmt: skip
    for stop in params.stop:
        _utf8("stop", stop)


def _utf8(name: str, text: str) -> bytes:
    """``text`` as UTF-8. JSON over HTTP can always be written so, a Python string need not."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise not_unicode(name) from error


def _check_token_ids_logprob(inp: GenerateInput, vocab_size: int) -> None:
    ids = inp.token_ids_logprob if inp.return_logprob else ()
    if len(ids) > MAX_TOKEN_IDS_LOGPROB:
        raise RequestError(
            400,
            f"token_ids_logprob may name at most {MAX_TOKEN_IDS_LOGPROB} tokens, got {len(ids)}",
            param="token_ids_logprob",
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                400, f"token_ids_logprob: {token} is outside the vocabulary of {vocab_size}", param="token_ids_logprob"
            )


def _check_logprob_start(inp: GenerateInput, longest: int) -> None:
    if not -1 <= inp.logprob_start_len <= longest:
        raise RequestError(
            400,
            f"logprob_start_len must be between -1 and the prompt's length {longest}, got {inp.logprob_start_len}",
            param="logprob_start_len",
        )


def check_num_logprobs(messages: Sequence[TokenizedGenerateReq]) -> None:
    """Raise RequestError if the prompts of one body ask for more logprobs than are kept for one answer."""
    total = sum(
        (len(message.input_ids) - message.logprob_start_len)
        * (1 + message.top_logprobs_num + len(message.token_ids_logprob))
        for message in messages
        if message.return_logprob and message.logprob_start_len >= 0
    )
    if total > MAX_BODY_LOGPROBS:
        raise RequestError(
            400,
            f"the prompts have {total} logprobs together, alternatives and each sample counted, at most "
            f"{MAX_BODY_LOGPROBS} are allowed in one body; send several bodies",
            param="top_logprobs_num",
        )


def check_ids(ids: Sequence[int], vocab_size: int, limits: SchedulerReady) -> IdArray:
    """``ids`` as they are sent. Raises RequestError for an empty or too long prompt and unknown ids."""
    if not ids:
        raise RequestError(400, "the prompt is empty", param="prompt")
    check_num_tokens(len(ids), limits)
    return check_vocabulary(ids, vocab_size, "input_ids")


def check_num_tokens(num_tokens: int, limits: SchedulerReady) -> None:
    """Raise RequestError for a prompt of so many tokens, those of images included, if that is too long."""
    if num_tokens > limits.max_req_input_len:
        raise RequestError(
            400,
            f"the prompt has {num_tokens} tokens, this server takes at most {limits.max_req_input_len} "
            f"(context length {limits.context_length}); shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )


def check_positions(num_positions: int, limits: SchedulerReady) -> None:
    """Raise RequestError for a prompt whose videos take so long that its positions, at least so many, go on for longer
    than the context is."""
    if num_positions >= limits.context_length:
        raise RequestError(
            400,
            f"the frames of the prompt's videos are so far apart in time that it has {num_positions} positions or more,"
            f" at most {limits.context_length - 1} are possible; give fps or timestamps with less time between frames",
            param="prompt",
            code="context_length_exceeded",
        )


def check_num_images(images: Iterable[MediaSource]) -> None:
    """Raise RequestError for more images, or frames of videos, than the prompts of one body may have together."""
    counts = [(1, 0) if isinstance(image, ImageSource) else (0, len(image.frames)) for image in images]
    check_num_media(sum(num for num, _ in counts), sum(num for _, num in counts))


def check_num_media(num_images: int, num_frames: int) -> None:
    """As :func:`check_num_images`."""
    for total, most, what, param in (
        (num_images, MAX_BODY_IMAGES, "images", "image_data"),
        (num_frames, MAX_BODY_FRAMES, "frames of videos", "video_data"),
    ):
        if total > most:
            raise RequestError(
                400,
                f"the prompts have {total} {what} together, at most {most} are allowed in one body; send "
                "several bodies",
                param=param,
            )


def check_num_pixels(num_bytes: int, images: Sequence[MediaSource]) -> None:
    """Raise RequestError for ``images`` of a prompt with so many bytes of pixels as the model gets them."""
    if num_bytes > MAX_PROMPT_PIXEL_BYTES:
        raise RequestError(
            400,
            f"the prompt's images have {num_bytes >> 20} MiB of pixels, at most {MAX_PROMPT_PIXEL_BYTES >> 20} are "
            "allowed: send fewer images, or limit max_pixels",
            param=images[0].place,
        )


def num_placeholders(images: Sequence[MediaSource], rules: ImageRules) -> tuple[int, int]:
    """How many tokens stand for ``images`` in a prompt: one for each, and one for each group of a video's frames."""
    videos = [image for image in images if isinstance(image, VideoSource)]
    of_videos = 0 if rules.video is None else sum(rules.video.settings.num_groups(len(one.frames)) for one in videos)
    return len(images) - len(videos), of_videos


def check_placeholders(ids: IdArray, images: Sequence[MediaSource], rules: ImageRules) -> None:
    """Raise RequestError unless the prompt has a placeholder for each of its images, and of its videos' groups."""
    values = np.frombuffer(ids, dtype=np.int32)
    for what, placeholder, wanted in zip(
        ("image", "video"), rules.placeholders, num_placeholders(images, rules), strict=True
    ):
        num = int(np.count_nonzero(values == placeholder))
        if num != wanted:
            groups = f" of {rules.video.settings.group_size} frames" if what == "video" and rules.video else ""
            raise RequestError(
                400,
                f"the prompt has {num} {what} placeholders and the request {wanted} {what}s{groups}: give one {what} "
                "for each, and do not write the model's image tokens into texts",
                param=images[0].place if images else "prompt",
            )


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> IdArray:
    """``ids`` as they are sent. Raises RequestError for ids outside the vocabulary."""
    try:
        made = id_array(ids)
        if len(made) <= _FEW_IDS:
            low, high = min(made, default=0), max(made, default=0)
        else:
            unsigned = np.frombuffer(made, dtype=np.uint32)
            if int(unsigned.max()) < vocab_size:  # which a negative id is far beyond
                return made
            values = unsigned.view(np.int32)
            low, high = int(values.min()), int(values.max())
    except OverflowError:  # a number of more than 32 bits
        made, low, high = id_array(), min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(400, f"token id {bad} is outside the vocabulary of {vocab_size}", param=param)
    return made


def fit_params(
    params: SamplingParams, prompt_len: int, vocab_size: int, limits: SchedulerReady, images: Sequence[ImageInput] = ()
) -> SamplingParams:
    """``params`` with ``max_new_tokens`` clipped to what context and memory can hold after a prompt with ``images``,
    and without stop tokens outside the vocabulary, which nothing ever matches."""
    stops = params.stop_token_ids
    if stops and not (min(stops) >= 0 and max(stops) < vocab_size):
        known = tuple(token for token in params.stop_token_ids if 0 <= token < vocab_size)
        params = msgspec.structs.replace(params, stop_token_ids=known)
    room = min(limits.context_length, limits.max_total_num_tokens) - prompt_len
    if images:
        room = min(room, limits.context_length - prompt_len - position_delta(images))
    if params.max_new_tokens <= room:
        return params
    return msgspec.structs.replace(
        params, max_new_tokens=max(room, 0), min_new_tokens=min(params.min_new_tokens, max(room, 0))
    )


def build_message(
    inp: GenerateInput,
    wire_rid: str,
    ids: IdArray,
    vocab_size: int,
    limits: SchedulerReady,
    default_priority: int = 0,
    body: int = 0,
    grammar: int = 0,
    images: Sequence[ImageInput] = (),
) -> TokenizedGenerateReq:
    """The message of a request whose parameters and ids have been checked; ``body`` and ``grammar`` are
    those of the message. ``images``: at their places among ``ids``. Raises
    RequestError for a logprob_start_len beyond the prompt's tokens."""
    if inp.input_ids is None:
        _check_logprob_start(inp, len(ids))
    return TokenizedGenerateReq(
        rid=wire_rid,
        input_ids=ids,
        images=list(images),
        sampling_params=_OF_EMBEDDINGS
        if inp.embed
        else fit_params(inp.sampling_params, len(ids), vocab_size, limits, images),
        stream=inp.stream,
        return_logprob=inp.return_logprob,
        logprob_start_len=inp.logprob_start_len,
        top_logprobs_num=inp.top_logprobs_num,
        token_ids_logprob=list(inp.token_ids_logprob) if inp.return_logprob else [],
        extra_key=inp.extra_key,
        priority=default_priority if inp.priority is None else inp.priority,
        body=body,
        grammar=grammar,
        think=inp.think if grammar else None,
        replica=inp.replica,
        embed=inp.embed,
    )
