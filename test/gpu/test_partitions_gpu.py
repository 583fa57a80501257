"""What steps side by side on one GPU rest on: two streams with multiprocessors of their own (green contexts).

Each test says which multiprocessors (SMs) ran the blocks of a kernel. ``SM_PARTITIONS=FILE`` writes what was seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "h200"))

from sm_partitions import Partition, num_sms, split

pytestmark = pytest.mark.gpu

_NUM_BLOCKS = 2048


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[Partition, Partition]]:
    """Three quarters of the GPU, about, and the rest: one split, of which both parts are used."""
    whole = num_sms()
    pair = split(whole * 3 // 4)
    yield pair
    if path := os.environ.get("SM_PARTITIONS"):
        with open(path, "w") as file:
            json.dump({"whole": whole, "parts": [[one.num_sms, one.seen] for one in pair]}, file)


@pytest.fixture(scope="module")
def sm_ids() -> Callable[[torch.Tensor], None]:
    """``f(out)``: a kernel of ``_NUM_BLOCKS`` blocks, each of which works a while and stores its SM. Long enough that
    all SMs which it may use get some."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, steps):  # type: ignore[no-untyped-def]
        index = tl.program_id(0)
        value = tl.load(out + index)
        for _ in range(steps):
            value = (value * 1103515245 + 12345) % 2147483647
        sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(out + index, sm)

    def run(out: torch.Tensor) -> None:
        kernel[(len(out),)](out, 20_000)

    run(torch.zeros(_NUM_BLOCKS, dtype=torch.int32, device="cuda"))  # compiles
    torch.cuda.synchronize()
    return run


def _new() -> torch.Tensor:
    return torch.zeros(_NUM_BLOCKS, dtype=torch.int32, device="cuda")


def _ids(out: torch.Tensor) -> set[int]:
    return set(out.tolist())


def test_kernels_stay_in_partitions_that_share_no_sm(
    parts: tuple[Partition, Partition], sm_ids: Callable[[torch.Tensor], None]
) -> None:
    found = []
    for part in parts:
        out = _new()
        part.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(part.stream):
            sm_ids(out)
        part.stream.synchronize()
        part.seen["eager"] = sorted(_ids(out))
        found.append(_ids(out))
    assert [len(ids) for ids in found] == [part.num_sms for part in parts]
    assert not found[0] & found[1]


def test_a_graph_stays_where_it_was_captured(
    parts: tuple[Partition, Partition], sm_ids: Callable[[torch.Tensor], None]
) -> None:
    """Also if it is replayed on the other partition's stream, and if it was captured beside another stream of the
    primary context, to which it forked: that branch escapes."""
    for part, other in (parts, parts[::-1]):
        out, forked, graph, side = _new(), _new(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=part.stream):
            sm_ids(out)
            side.wait_stream(part.stream)
            with torch.cuda.stream(side):
                sm_ids(forked)
            part.stream.wait_stream(side)
        for name, stream in (("own", part.stream), ("other", other.stream)):
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.synchronize()
            part.seen[f"graph on {name}"] = sorted(_ids(out))
            part.seen[f"fork on {name}"] = sorted(_ids(forked))
            assert _ids(out) == set(part.seen["eager"]), name
            assert len(_ids(forked)) > part.num_sms, name


def test_one_partition_does_not_wait_for_the_other(
    parts: tuple[Partition, Partition], sm_ids: Callable[[torch.Tensor], None]
) -> None:
    """A short kernel ends while the other partition is full of blocks that wait; an event orders the two if asked."""
    long, short = parts
    busy, quick, after = _new(), _new()[:8], _new()[:8]
    torch.cuda.synchronize()
    with torch.cuda.stream(long.stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
        for _ in range(4):
            sm_ids(busy)
        done = torch.cuda.Event()
        done.record(long.stream)
    begun = time.perf_counter()
    with torch.cuda.stream(short.stream):
        sm_ids(quick)
        short.stream.synchronize()
        assert not done.query(), f"the short kernel took {time.perf_counter() - begun:.3f} s"
        short.stream.wait_event(done)
        sm_ids(after)
        short.stream.synchronize()
    assert done.query()
