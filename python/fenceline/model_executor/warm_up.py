"""Warm-up: before a server serves, it runs prefill steps and draws of the usual shapes, so that no kernel has to be
compiled or loaded onto the GPU while a request waits. Decode steps are warmed up when they are captured.

These steps use only the sink: row 0, whose pages are page 0, and slot 0. Of a model that reads images they also
compute a small image and the largest ones, into rows that no image has yet.

If the depth of drafts may vary, the decode steps of each depth are also timed. For this, requests with rows and pages
of their own are used, because all tokens in the sink are the same and are not sent to any experts. Steps of prompts
beside which others decode are timed if there is a limit on what these wait.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig
from fenceline.config.vision import VisionConfig
from fenceline.images.image_input import ImageInput
from fenceline.memory_order import Device, LeasePool, Point, Points
from fenceline.model_executor.step import (
    Chunk,
    DepthChoice,
    Encode,
    ForwardResult,
    HeldStep,
    MixedCosts,
    PageWrites,
    StepBatch,
    StepCosts,
)
from fenceline.sampling.sampler import Sampler, prompt_logprobs
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Numbers of tokens in a step. Libraries choose kernels by size, and load each one when it is first called. Between 512
# and 2,048, where a burst of short prompts is computed, they choose another kernel every few hundred tokens.
_TOKENS = (*(1, 2, 4, 8, 16, 32, 64, 128, 256), *range(512, 2048, 128), *(2048, 3072, 4096, 6144, 8192))
# The lengths of a step's requests, and the length of the prefix that each of them has. Attention uses other kernels
# for requests with a prefix.
_BATCHES = (
    ((32,) * 4, 0), ((128,) * 8, 0), ((32,) * 32, 0), ((1, 7, 100, 500), 0),
    ((1,), 100), ((64,), 500), ((1024,), 1024), ((32,) * 4, 200), ((1, 7, 100, 500), 1000),
)  # fmt: skip
_SAMPLED_ROWS = (1, 2, 8, 32)
_SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"logit_bias": {0: 1.0}, "min_new_tokens": 1},
)
_NUM_PLAIN = 2  # the first ones of _SAMPLING, which set at most a temperature
_TOP_LOGPROBS = 5
# The number of steps of each size and depth that are timed together, and how often that is repeated. The shortest time
# counts, because other work on the machine can only add to it. And the largest size that is timed without graphs.
_MEASURED_STEPS, _MEASURED_ROUNDS = 4, 3
_MOST_MEASURED = 32

# The same of steps with prompts, by tokens. And who decodes beside them when that is timed: so many, and so long.
_MIXED_TOKENS, _MIXED_STEPS, _MIXED_ROUNDS = (32, 64, 128, 256, 512, 1024, 2048), 2, 2
_MIXED_DECODES, _MIXED_CONTEXT, _MIXED_PREFIX = 32, 2048, 4096

Launch = Callable[[StepBatch], ForwardResult | HeldStep]


def warm_up(device: Device, config: EngineConfig, launch: Launch, is_new: bool = False) -> None:
    """Run prefill steps with ``launch``, and draws on FORWARD, and wait for the device. ``is_new``: compile what they
    launch first."""

    def run() -> int:
        num_steps = 0
        for batch in _extend_batches(config):
            _launched(launch, batch).wait()
            num_steps += 1
        with device.forward.active():
            _warm_up_sampler(device, config)
        return num_steps

    begin = time.perf_counter()
    if is_new:
        device.compile_ahead(run)
    num_steps = run()
    device.synchronize()
    logger.info("Warmed up with %d prefill steps in %.1f s", num_steps, time.perf_counter() - begin)


def measure_steps(config: EngineConfig, launch: Launch, rows: LeasePool, pages: LeasePool) -> StepCosts:
    """Measure the time in seconds from one decode step to the next, for each depth and for batches of 1, 2, 4, ...
    requests up to the largest graph. The requests are short, because attention to a longer context takes about the same
    time at each depth. They are sampled with a temperature, and each begins with a random token. Their memory is leased
    for the duration. If there is not enough of it, the other requests are in the sink; such large batches cannot occur
    in the server either."""
    assert config.speculative is not None, "steps have depths"
    begin, shapes, graphs = time.perf_counter(), config.speculative.shapes, config.cuda_graph_bs
    most = max(graphs) if graphs else min(config.max_running_requests, _MOST_MEASURED)
    sizes = tuple(dict.fromkeys([*(1 << n for n in range(most.bit_length())), most]))
    seconds = []
    num_tokens = 1 + (_MEASURED_STEPS + 1) * config.speculative.largest.num_slots
    reqs = _MeasuredRequests(rows, pages, config.server_args.page_size, num_tokens, most, config.model.context_length)
    prompts = reqs.prompts(config)
    for number, size in enumerate(sizes):
        batches = [reqs.decode_batch(-1 - number, size, shape) for shape in shapes.values()]
        rounds = []
        for _ in range(_MEASURED_ROUNDS):
            measured = [_measure(launch, prompts, batch, _MEASURED_STEPS) for batch in batches]
            rounds.append([seconds_of_depth for seconds_of_depth, _ in measured])
            done = measured[-1][1]
        seconds.append([min(of_depth) for of_depth in zip(*rounds, strict=True)])
    reqs.release(done)
    costs = StepCosts.measured(sizes, seconds)
    by_depth = zip(shapes, zip(*costs.seconds, strict=True), strict=True)
    table = "; ".join(f"depth {depth}: " + " ".join(f"{1e3 * one:.2f}" for one in times) for depth, times in by_depth)
    logger.info(
        "Measured decode steps of %s requests in %.1f s, ms: %s",
        " ".join(map(str, sizes)), time.perf_counter() - begin, table,
    )  # fmt: skip
    return costs


def measure_mixed(config: EngineConfig, launch: Launch, rows: LeasePool, pages: LeasePool) -> MixedCosts:
    """Measure the time in seconds of steps with prompts, in the sink, of random tokens; what is added by a prefix; and
    what by the contexts of those that decode, for which memory is leased as in :func:`measure_steps`."""
    begin, longest = time.perf_counter(), config.model.context_length - 1
    most = config.chunked_prefill_size or config.max_prefill_tokens
    sizes = [size for size in _MIXED_TOKENS if size < min(most, longest)] + [min(most, longest, _MIXED_TOKENS[-1])]

    def seconds(batch: StepBatch) -> tuple[float, Point]:
        rounds = [_measure(launch, (), batch, _MIXED_STEPS) for _ in range(_MIXED_ROUNDS)]
        return min(one for one, _ in rounds), rounds[-1][1]

    def prompt(size: int, prefix: int = 0) -> StepBatch:
        return _extend_batch((size,), prefix, config.model.vocab_size)

    alone = np.minimum.accumulate([seconds(prompt(size))[0] for size in sizes][::-1])[::-1].tolist()
    far = 8 * sizes[-1]  # a CPU, whose chunks are short, takes long for more
    prefix = min(_MIXED_PREFIX, far, longest - sizes[-1])
    per_pair = (seconds(prompt(sizes[-1], prefix))[0] - alone[-1]) / (sizes[-1] * prefix) if prefix else 0.0
    num, page_size = min(_MIXED_DECODES, config.max_running_requests), config.server_args.page_size
    # One of them at least is not in the sink.
    length = min(_MIXED_CONTEXT, far, longest, pages.num_free * page_size)
    reqs = _MeasuredRequests(rows, pages, page_size, length, num, config.model.context_length)
    for first in reqs.prompts(config):
        _launched(launch, first).wait()
    beside = reqs.decode_batch(0, num, StepShape())
    lens = np.where(beside.rows == 0, 1, beside.seq_lens)  # as the device has them
    beside, none = replace(beside, starts=lens - 1, seq_lens=lens), np.zeros(num, np.int64)
    short = replace(beside, rows=none, starts=none, seq_lens=none + 1)
    without, _ = seconds(prompt(sizes[0]).beside(short))
    with_context, done = seconds(prompt(sizes[0]).beside(beside))
    reqs.release(done)
    per_context = (with_context - without) / int(lens.sum())
    costs = MixedCosts(tuple(sizes), tuple(alone), max(per_pair, 0.0), max(per_context, 0.0))
    logger.info(
        "Measured steps of %s prompt tokens in %.1f s, ms: %s; after a prefix of %d: %.2f more; beside %d that decode,"
        " of %d tokens: %.2f more",
        " ".join(map(str, sizes)), time.perf_counter() - begin, " ".join(f"{1e3 * one:.2f}" for one in alone),
        prefix, 1e3 * costs.per_pair * sizes[-1] * prefix, num, length, 1e3 * costs.per_context * int(lens.sum()),
    )  # fmt: skip
    return costs


def _measure(launch: Launch, prompts: Sequence[StepBatch], batch: StepBatch, num_steps: int) -> tuple[float, Point]:
    """Compute ``prompts``, then time ``num_steps`` of ``batch``. As when serving, each step's results are awaited
    while the next step runs. Returns the mean seconds of a step, and the Point that ends the last one."""
    for prompt in prompts:
        _launched(launch, prompt).wait()
    _launched(launch, batch).wait()
    begin = time.perf_counter()
    result = _launched(launch, batch)
    for _ in range(num_steps - 1):
        following = _launched(launch, batch)
        result.wait()
        result = following
    result.wait()
    return (time.perf_counter() - begin) / num_steps, result.done


def _launched(launch: Launch, batch: StepBatch) -> ForwardResult:
    result = launch(batch)
    assert not isinstance(result, HeldStep), "no request here has a grammar"
    return result


class _MeasuredRequests:
    """``most`` requests for :func:`measure_steps`. As many as memory allows have a row of their own and pages for
    ``num_tokens`` tokens; the others are in the sink. ``longest`` is the model's context length."""

    def __init__(
        self, rows: LeasePool, pages: LeasePool, page_size: int, num_tokens: int, most: int, longest: int
    ) -> None:
        self._num_tokens, self._row_pool, self._page_pool = num_tokens, rows, pages
        num_pages = -(-num_tokens // page_size)
        num = min(most, rows.num_free, pages.num_free // num_pages) if num_tokens <= longest else 0
        leased_rows, leased_pages = rows.alloc(num), pages.alloc(num * num_pages)
        assert leased_rows is not None and leased_pages is not None, "there are as many"
        (self._leased_rows, row_points), (self._leased_pages, page_points) = leased_rows, leased_pages
        self._after = row_points.join(page_points)
        self._rows = np.zeros(most, dtype=np.int64)
        self._rows[:num] = self._leased_rows
        self._writes = PageWrites(
            np.repeat(self._leased_rows.astype(np.int64), num_pages),
            np.tile(np.arange(num_pages, dtype=np.int64), num),
            self._leased_pages,
        )
        self._first_slots = np.zeros(most, dtype=np.int64)
        self._first_slots[:num] = self._leased_pages[::num_pages].astype(np.int64) * page_size

    def prompts(self, config: EngineConfig) -> list[StepBatch]:
        """Prefill steps with one token of each request."""
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=len(self._rows))
        size = min(config.chunked_prefill_size or config.max_prefill_tokens, len(self._rows))
        rows, chunks = (self._rows.tolist(), [*map(Chunk, tokens.reshape(-1, 1), self._first_slots.reshape(-1, 1))])
        samplings, starts = [self._sampling(i) for i in range(len(rows))], [0] * len(rows)
        parts = [slice(first, first + size) for first in range(0, len(rows), size)]
        return [
            StepBatch.of_chunks(
                rows[part], starts[part], chunks[part], samplings[part],
                PageWrites.none() if part.start else self._writes, self._after,
            )
            for part in parts
        ]  # fmt: skip

    def decode_batch(self, composition: int, num_reqs: int, shape: StepShape) -> StepBatch:
        """A decode step of the first ``num_reqs`` requests."""
        rows = self._rows[:num_reqs]
        in_sink = rows == 0
        return StepBatch(
            rows=rows,
            starts=np.zeros(num_reqs, dtype=np.int64),
            seq_lens=np.where(in_sink, 1 + shape.num_slots, self._num_tokens),
            samples=np.ones(num_reqs, np.bool_),
            sampling=tuple(self._sampling(i) for i in range(num_reqs)),
            page_writes=PageWrites.none(),
            after=Points.none(),
            composition=composition,
            may_accept=np.ones(num_reqs, np.bool_),
            depth=DepthChoice(shape.depth),
        )

    def _sampling(self, index: int) -> ReqSampling:
        return replace(_req_sampling({}, 1), seed=index, row=int(self._rows[index]))

    def release(self, done: Point) -> None:
        """Give the memory back; ``done`` is the Point that ends the last step of any of the requests."""
        points = Points.of(done)
        self._row_pool.retire(self._leased_rows, after=points)
        self._page_pool.retire(self._leased_pages, after=points)


def _extend_batches(config: EngineConfig) -> Iterator[StepBatch]:
    """Prefill steps of the sizes that are possible in this configuration."""
    longest = config.model.context_length - 1
    most = config.chunked_prefill_size or config.max_prefill_tokens
    sizes = [size for size in _TOKENS if size < most] + [most]
    batches = [((longest,) * (size // longest) + (size % longest,) * (size % longest > 0), 0) for size in sizes]
    for lens, prefix in (*batches, *_BATCHES):
        if sum(lens) <= most and max(lens) + prefix <= longest and len(lens) <= config.max_running_requests:
            yield _extend_batch(lens, prefix)
    if config.mixes_steps:
        for num in _SAMPLED_ROWS:  # in the sink too
            if num <= config.max_running_requests:
                decodes = replace(_extend_batch((1,) * num, 0), chunks=())
                yield from (_extend_batch((size,), 0).beside(decodes) for size in (1, min(most, 300, longest)))
    if config.model.vision is not None:
        for encodes in _warm_up_images(config.model.vision, config.num_embedding_rows, most):
            yield replace(_extend_batch((1,), 0), encodes=encodes)


def _warm_up_images(vision: VisionConfig, num_rows: int, most: int) -> Iterator[tuple[Encode, ...]]:
    """A small image, then as many of the largest as one step computes; ``most``: embeddings, unless it is one image."""
    yield (_black_image(vision, 2, 1),)
    side = math.isqrt(min(vision.images.most_tokens, num_rows))
    first = _black_image(vision, side, 1)
    size = len(first.rows)
    yield tuple([_black_image(vision, side, 1 + i * size) for i in range(max(min(most, num_rows) // size, 1))])


def _black_image(vision: VisionConfig, side: int, row: int) -> Encode:
    """An image of ``side`` x ``side`` embeddings, or as many as all images have, in rows from ``row`` on."""
    height, width = vision.images.size or (side * vision.images.factor,) * 2
    grid = height // vision.images.factor, width // vision.images.factor
    image = ImageInput(pixels=bytes(3 * height * width), height=height, width=width, grid=grid, digest=b"")
    return Encode(image, np.arange(row, row + image.num_tokens))


def _extend_batch(lens: Sequence[int], prefix_len: int, vocab_size: int = 1) -> StepBatch:
    """Prompts in the sink, of random tokens below ``vocab_size``."""
    in_sink, random = [np.zeros(num_tokens, dtype=np.int64) for num_tokens in lens], np.random.default_rng(0)
    greedy = _req_sampling({"temperature": 0.0}, prefix_len)
    none, num = PageWrites.none(), len(lens)
    chunks = [*map(Chunk, [random.integers(vocab_size, size=num_tokens) for num_tokens in lens], in_sink)]
    return StepBatch.of_chunks([0] * num, [prefix_len] * num, chunks, [greedy] * num, none, Points.none())


@torch.inference_mode()
def _warm_up_sampler(device: Device, config: EngineConfig) -> None:
    """Warm up sampling with a separate Sampler, because the server's Sampler should not allocate token counts before a
    request needs them. If grammars are possible, plain draws are also made with masks, since on a GPU each combination
    of operands is a kernel of its own. Logprobs of prompts are those of logits in the model's dtype."""
    vocab_size, place = config.model.vocab_size, device.torch_device
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    fixed_order = config.server_args.enable_deterministic_inference
    sampler = Sampler(vocab_size, 1, place, fixed_order)
    no_ids = torch.zeros(0, dtype=torch.int64, device=place)
    sampler.begin_request(0, no_ids, no_ids)
    for num_reqs in _SAMPLED_ROWS:
        if num_reqs > config.max_running_requests:
            continue
        logits = torch.zeros(num_reqs, vocab_size, dtype=dtype, device=place)
        masks = torch.full((num_reqs, -(-vocab_size // 32)), -1, dtype=torch.int32, device=place)
        positions = torch.ones(num_reqs, dtype=torch.int64, device=place)
        prompt_logprobs(logits, positions, _TOP_LOGPROBS, fixed_order=fixed_order)
        rows = torch.arange(num_reqs, device=place)
        # What speculation verifies is not stored as the last tokens of the requests' rows.
        places = [(rows, torch.empty_like(rows)), (None, None)][: 1 if config.speculative is None else 2]
        for number, fields in enumerate(_SAMPLING):
            # This greedy request replaces one of the batch, so that mixed batches are warmed up too.
            first = _req_sampling({"temperature": 0.0}, 1, logprobs=number % 2 == 1)
            rest = [_req_sampling(fields, 1)] * num_reqs
            for reqs in (rest, [first, *rest[1:]]):
                views = {name: torch.from_numpy(a).to(place) for name, a in sampling_arrays(reqs).items()}
                batch = SamplingBatch.from_views(reqs, views)
                for kept in places:
                    sampler.forward(logits, positions, batch, None, *kept)
                    if config.refuses_grammars is None and number < _NUM_PLAIN:
                        sampler.forward(logits, positions, batch, masks, *kept)


def _req_sampling(fields: dict[str, object], prompt_len: int, logprobs: bool = False) -> ReqSampling:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    top = _TOP_LOGPROBS if logprobs else 0
    return ReqSampling(
        params, seed=0, row=0, prompt_len=prompt_len, stop_ids=(0,), return_logprob=logprobs, top_logprobs_num=top
    )
