"""Intake: makes requests of the messages in which they arrive."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np

from fenceline.config.engine_config import EngineConfig
from fenceline.constrained.matcher import GrammarStore
from fenceline.images.image_input import misplaced
from fenceline.images.positions import position_delta
from fenceline.ipc.io_struct import TokenizedGenerateReq, id_array
from fenceline.mem_cache.image_keys import ImageKeys
from fenceline.scheduler.req import LogprobLog, Req, Samples, emit_interval

_NO_PROMPT = Samples(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


class Intake:
    """Makes requests. ``capacity``: the most tokens that one may have; ``grammars``: those that they may name;
    ``keys``: what stands for their images in the keys of prefixes."""

    def __init__(self, config: EngineConfig, capacity: int, grammars: GrammarStore, keys: ImageKeys) -> None:
        self._config = config
        self._capacity = capacity
        self._grammars = grammars
        self._keys = keys
        self._seeds = Random(config.random_seed)
        # The last prompt and logit_bias that came in an HTTP body with several requests, after the body's number.
        self._latest_prompt: tuple[int, Samples] = 0, _NO_PROMPT
        self._latest_bias: tuple[int, dict[int, float]] = 0, {}

    def req_of(self, message: TokenizedGenerateReq, is_known: bool) -> tuple[Req, str]:
        """The request of ``message``, and why it is refused; empty if it is not. ``is_known``: its id is in use. The
        front end has checked its values; sizes are limited here once more."""
        message = self._with_bias(message)
        params, config = message.sampling_params, self._config
        eos = () if params.ignore_eos else config.model.eos_token_ids
        samples = self._samples_of(message)
        prompt_ids = samples.prompt_ids
        req = Req(
            source=msgspec.structs.replace(message, input_ids=id_array(), images=[]),
            prompt_ids=prompt_ids,
            prompt_keys=samples.prompt_keys,
            images=samples.images,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_new_tokens=min(params.max_new_tokens, self._room(samples)),
            emit_interval=emit_interval(message, config.server_args.stream_interval),
            samples=samples if message.body else None,
            rank=0 if config.priority is None else config.priority.rank(message.priority),
        )
        if message.grammar:
            req.grammar = self._grammars.begin(message.grammar, message.think)
        if is_known:
            return req, f"request id {req.rid!r} is already in use"
        if req.max_new_tokens < min(params.max_new_tokens, 1) or len(prompt_ids) == 0:
            return req, f"a prompt must have 1 to {self._capacity - 1} tokens"
        if why := self._refused_images(req):
            return req, why
        req.prompt_log = LogprobLog.of_prompt(message, prompt_ids)
        req.output_log = LogprobLog() if message.return_logprob else None
        return req, ""

    def _room(self, samples: Samples) -> int:
        """How many tokens an answer may have: as many as there is memory for, and positions."""
        num = len(samples.prompt_ids)
        return min(self._capacity - num, self._config.model.context_length - num - position_delta(samples.images))

    def _refused_images(self, req: Req) -> str:
        """Why the images of ``req`` cannot be computed; empty if they can."""
        vision = self._config.model.vision
        if not req.images:
            return ""
        if vision is None:
            return "this model reads no images: leave them out, or choose a model that does"
        most = self._config.num_embedding_rows
        if any(image.num_tokens > most for image in req.images):
            return f"an image has more than the {most} embeddings for which there is memory: lower max_pixels"
        factor, num_frames = vision.images.factor, vision.temporal_patch_size
        return misplaced(req.prompt_ids, req.images, vision.placeholders, factor, num_frames)

    def _with_bias(self, message: TokenizedGenerateReq) -> TokenizedGenerateReq:
        """``message`` with the logit_bias that samples of one prompt share. Without a prompt if that was lost."""
        body, bias = self._latest_bias
        params = message.sampling_params
        if message.same_bias and body == message.body and bias:
            params = msgspec.structs.replace(params, logit_bias=bias)
            return msgspec.structs.replace(message, sampling_params=params)
        if message.same_bias:
            return msgspec.structs.replace(message, input_ids=id_array(), same_prompt=False)
        if message.body and params.logit_bias:
            self._latest_bias = message.body, params.logit_bias
        return message

    def _samples_of(self, message: TokenizedGenerateReq) -> Samples:
        """The prompt of a request that has arrived, which the samples of one prompt share. Empty if the message before,
        which had the prompt, was lost."""
        body, latest = self._latest_prompt
        is_known = body == message.body != 0
        if message.same_prompt:
            return latest if is_known else _NO_PROMPT
        prompt_ids = np.frombuffer(message.input_ids, dtype=np.int32)  # the message's own memory
        images = tuple(message.images)
        prompt_keys = self._keys.keys_of(prompt_ids, images)
        if is_known and np.array_equal(latest.prompt_keys, prompt_keys):
            return latest
        samples = Samples(prompt_ids, prompt_keys, images)
        if message.body:
            self._latest_prompt = message.body, samples
        return samples
