"""What a server does once before it serves: prefill steps and draws of the usual shapes, so that no kernel is compiled
and none is loaded onto the GPU while a request waits for it. Decode steps are warmed up as they are captured.

Where decode steps may propose more or fewer drafts, it measures how long they take.

All of it runs in the sink: row 0, whose pages are page 0, and slot 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig
from fenceline.memory_order import Device, Points
from fenceline.model_executor.step import (
    DecodeBatch,
    DepthChoice,
    ExtendBatch,
    ExtendSeq,
    ForwardResult,
    HeldStep,
    PageWrites,
    ScheduleBatch,
    StepCosts,
)
from fenceline.sampling.sampler import Sampler
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Tokens of a step: libraries choose another kernel for another size, and load it when it is first called.
_TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Lengths of a step's requests, and the prefix that each has. Attention has other kernels for a prefix.
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
_TOP_LOGPROBS = 5
# Steps of each size and depth that are measured at once, and how often: the best time counts, for whatever else runs on
# the machine only adds to it. And the largest size if there are no graphs.
_MEASURED_STEPS, _MEASURED_ROUNDS = 4, 3
_MOST_MEASURED = 32

Launch = Callable[[ScheduleBatch], ForwardResult | HeldStep]


def warm_up(device: Device, config: EngineConfig, launch: Launch) -> None:
    """Run prefill steps by ``launch`` and draws on FORWARD, and wait for them."""
    begin = time.perf_counter()
    num_steps = 0
    for batch in _extend_batches(config):
        _launched(launch, batch).wait()
        num_steps += 1
    with device.forward.active():
        _warm_up_sampler(device, config)
    device.synchronize()
    logger.info("Warmed up with %d prefill steps in %.1f s", num_steps, time.perf_counter() - begin)


def measure_steps(config: EngineConfig, launch: Launch) -> StepCosts:
    """What decode steps of each depth take, in seconds from one to the next: of one request, of twice as many and so on
    up to the largest graph. Requests are short, since what their keys take is much the same at each depth. They have a
    temperature."""
    assert config.speculative is not None, "steps have depths"
    begin, shapes, graphs = time.perf_counter(), config.speculative.shapes, config.cuda_graph_bs
    most = max(graphs) if graphs else min(config.max_running_requests, _MOST_MEASURED)
    sizes = tuple(dict.fromkeys([*(1 << n for n in range(most.bit_length())), most]))
    seconds = []
    for number, size in enumerate(sizes):
        batches = [_decode_batch(-1 - number, size, shape) for shape in shapes.values()]
        rounds = [[_measure(launch, batch) for batch in batches] for _ in range(_MEASURED_ROUNDS)]
        seconds.append([min(of_depth) for of_depth in zip(*rounds, strict=True)])
    costs = StepCosts.measured(sizes, seconds)
    by_depth = zip(shapes, zip(*costs.seconds, strict=True), strict=True)
    table = "; ".join(
        f"depth {depth}: " + " ".join(f"{1e3 * one:.2f}" for one in times) for depth, times in by_depth
    )
    logger.info(
        "Measured decode steps of %s requests in %.1f s, ms: %s",
        " ".join(map(str, sizes)), time.perf_counter() - begin, table,
    )  # fmt: skip
    return costs


def _measure(launch: Launch, batch: DecodeBatch) -> float:
    """Seconds of a step, one after the other, the results of each taken while the next one runs."""
    _launched(launch, batch).wait()
    begin = time.perf_counter()
    result = _launched(launch, batch)
    for _ in range(_MEASURED_STEPS - 1):
        following = _launched(launch, batch)
        result.wait()
        result = following
    result.wait()
    return (time.perf_counter() - begin) / _MEASURED_STEPS


def _launched(launch: Launch, batch: ScheduleBatch) -> ForwardResult:
    result = launch(batch)
    assert not isinstance(result, HeldStep), "no request here has a grammar"
    return result


def _decode_batch(composition: int, num_reqs: int, shape: StepShape) -> DecodeBatch:
    in_sink = np.zeros(num_reqs, dtype=np.int64)
    return DecodeBatch(
        composition=composition,
        rows=in_sink,
        seq_lens=in_sink + 1 + shape.num_slots,
        sampling=(_req_sampling({}, 1),) * num_reqs,
        page_writes=PageWrites(),
        after=Points.none(),
        committed_lens=in_sink,
        may_accept=np.ones(num_reqs, np.bool_),
        depth=DepthChoice(shape.depth),
    )


def _extend_batches(config: EngineConfig) -> Iterator[ExtendBatch]:
    """Of the sizes that this configuration can meet."""
    longest = config.model.context_length - 1
    most = config.chunked_prefill_size or config.max_prefill_tokens
    sizes = [size for size in _TOKENS if size < most] + [most]
    batches = [
        ((longest,) * (size // longest) + (size % longest,) * (size % longest > 0), 0) for size in sizes
    ]
    for lens, prefix in (*batches, *_BATCHES):
        if sum(lens) <= most and max(lens) + prefix <= longest and len(lens) <= config.max_running_requests:
            yield _extend_batch(lens, prefix)


def _extend_batch(lens: Sequence[int], prefix_len: int) -> ExtendBatch:
    greedy = _req_sampling({"temperature": 0.0}, prefix_len)
    in_sink = [np.zeros(num_tokens, dtype=np.int64) for num_tokens in lens]
    seqs = tuple(
        ExtendSeq(row=0, token_ids=zeros, prefix_len=prefix_len, out_slots=zeros, sampling=greedy)
        for zeros in in_sink
    )
    return ExtendBatch(seqs, PageWrites(), Points.none())


@torch.inference_mode()
def _warm_up_sampler(device: Device, config: EngineConfig) -> None:
    """With a Sampler of its own: the server's has no token counts before a request needs them."""
    vocab_size, place = config.model.vocab_size, device.torch_device
    sampler = Sampler(vocab_size, 1, place)
    no_ids = torch.zeros(0, dtype=torch.int64, device=place)
    sampler.begin_request(0, no_ids, no_ids)
    for num_reqs in _SAMPLED_ROWS:
        if num_reqs > config.max_running_requests:
            continue
        logits = torch.zeros(num_reqs, vocab_size, device=place)
        positions = torch.ones(num_reqs, dtype=torch.int64, device=place)
        for number, fields in enumerate(_SAMPLING):
            # Replaces one request of the batch, so that mixed batches are warmed up too.
            first = _req_sampling({"temperature": 0.0}, 1, logprobs=number % 2 == 1)
            rest = [_req_sampling(fields, 1)] * num_reqs
            for reqs in (rest, [first, *rest[1:]]):
                views = {name: torch.from_numpy(a).to(place) for name, a in sampling_arrays(reqs).items()}
                sampler.forward(logits, positions, SamplingBatch.from_views(reqs, views))


def _req_sampling(fields: dict[str, object], prompt_len: int, logprobs: bool = False) -> ReqSampling:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    top = _TOP_LOGPROBS if logprobs else 0
    return ReqSampling(
        params,
        seed=0,
        row=0,
        prompt_len=prompt_len,
        stop_ids=(0,),
        return_logprob=logprobs,
        top_logprobs_num=top,
    )
