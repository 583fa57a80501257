"""Steps for F11: batches and prompts of every length around the captured sizes, and far beyond the largest; played on
runners with and without graphs, by one rank or by several together."""

from __future__ import annotations

from functools import partial
from random import Random

from step_traces import PLAIN, TraceMaker, TraceReq, TraceShape
from trace_runner import make_runner, play, same_tokens

from fenceline.layers.context import Shard
from fenceline.memory_order import Device
from fenceline.model_executor.step import StepBatch

SIZES = (1, 2, 4)
PIECES = (64, 1024)
_SHAPE = TraceShape(page_size=16, num_rows=20, num_pages=1200)
_PROMPTS = (1, 63, 64, 65, 1023, 1024, 1025, 1300)
_BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 17)


def boundary_trace(shape: TraceShape, prompts: tuple[int, ...], batches: tuple[int, ...]) -> list[StepBatch]:
    """Prompts of all ``prompts`` lengths, alone and together; then decode batches of all sizes, up and down."""
    maker = TraceMaker(shape, Random(11))
    reqs: list[TraceReq] = []

    def join(length: int) -> TraceReq:
        req = maker.new_req(length, 2 * len(batches) * 3, PLAIN[length % len(PLAIN)])
        assert req is not None
        reqs.append(req)
        return req

    for length in prompts:
        maker.extend([join(length)])
        maker.decode([reqs[-1]])
    maker.extend([join(length) for length in prompts if len(reqs) < shape.num_rows])
    while len(reqs) < max(batches):
        maker.extend([join(3 + len(reqs) % 5)])
    for size in (*batches, *reversed(batches)):
        for _ in range(2):
            maker.decode(reqs[-size:])
    return maker.batches


def difference_across_ranks(device: Device, shard: Shard, experts: bool = False) -> str:
    """The steps run without graphs, and then twice in a row with graphs of decode and of prefill's pieces. Returns
    where the tokens begin to differ, "" if they do not. All ranks call this together. ``experts``: of a mixture of
    experts."""
    batches = boundary_trace(_SHAPE, _PROMPTS, _BATCHES)
    make = partial(make_runner, device, _SHAPE, context_length=1536, dtype="float32", shard=shard, experts=experts)
    expected = play(make(()), batches)
    runner = make(SIZES, piecewise_cuda_graph_tokens=PIECES, chunked_prefill_size=2048)
    for _ in range(2):
        found = same_tokens(expected, play(runner, batches))
        if found:
            return found
    for stats in (runner.decode.stats, runner.prefill_graph_stats):
        assert stats is None or (stats.replays > 0 and not stats.repairs), stats
    return ""
