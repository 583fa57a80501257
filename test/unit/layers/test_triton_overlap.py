"""Decode attention that starts while the preceding kernel still runs: what it may access before its wait, in Triton's
interpreter and in the machine code; and launches that share a workspace.

A script under pytest, as ``test_triton_attention.py`` is, for the same reason.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import case, decode, spoil
from triton_interpreter import compile_kernel, outcomes_of, print_outcomes, set_up_interpreter

INTERPRETED = (
    "nothing_of_the_kernel_in_front_is_read_before_the_wait",
    "launches_on_one_workspace_leave_no_trace",
    "a_workspace_too_small_is_refused",
)
COMPILED = ("decode_attention", "kernel_in_front")

interpreted = outcomes_of(__file__)
compiled = outcomes_of(__file__, "compile")


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_machine_code(name: str, compiled: dict[str, str]) -> None:
    assert compiled[name] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def check_nothing_of_the_kernel_in_front_is_read_before_the_wait() -> None:
    """The preceding kernel has written q and the queries' slots only when a worker's wait is over; all that is fetched
    before is there by then, and of the requests: no column past an end is followed."""
    batches = ((1, [50], 1), (1, [37, 1, 33], 1), (64, [64, 65], 1), (1, [50], 5), (16, [37, 4, 33], 4))
    for page_size, batch, num_queries in batches:
        step = case(batch, [num_queries] * len(batch), page_size, (4, 2))
        spoil(step)
        alone = decode(step, 5)
        fetched = _Fetched(step)
        with fetched.in_place_of_the_gpu():
            overlapped = decode(step, 5, queries=fetched.queries, launch_pdl=True)
        assert torch.equal(overlapped, alone)
        assert fetched.num_waits == 2 * 5, "every worker waits: kernels behind count on it"
        if batch != [50]:
            continue
        bytes_of_all = 2 * (batch[0] - num_queries) * 2 * 16 * 4  # keys and values of two heads
        assert len(fetched.sectors) * 32 == bytes_of_all, "all but the queries, and nothing twice"


class _Fetched:
    """The kernel before a decode launch, and the GPU's part in overlapping the two."""

    def __init__(self, step) -> None:  # type: ignore[no-untyped-def]
        size = step.pool.page_size
        self.queries = torch.cat(step.queries)
        self._outputs = [self.queries]
        for row, length, new in zip(step.rows, step.seq_lens, step.query_lens, strict=True):
            for at in range(length - new, length):
                slot = int(step.page_table[row, at // size]) * size + at % size
                self._outputs += [step.pool.row(1, "k")[slot], step.pool.row(1, "v")[slot]]
        self._written = [output.clone() for output in self._outputs]
        caches = (step.pool.row(1, "k"), step.pool.row(1, "v"))
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in caches]
        last = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self._outputs[1:]]
        self._last = {at for start, end in last for at in range(start, end, 32)}
        self.sectors: set[int] = set()
        self.num_waits = 0

    def begin(self) -> None:
        """A worker starts: the preceding kernel has written nothing yet."""
        for output in self._outputs:
            output.fill_(float("nan"))

    def wait(self) -> None:
        self.num_waits += 1
        for output, written in zip(self._outputs, self._written, strict=True):
            output.copy_(written)

    def fetch(self, pointers, live) -> None:  # type: ignore[no-untyped-def]
        addresses = pointers.handle.data
        chosen = np.broadcast_to(live.handle.data, addresses.shape).astype(bool)
        for at in addresses[chosen].tolist():
            assert any(start <= at < end for start, end in self._ranges), "outside of the pool"
            assert at not in self._last and at not in self.sectors
            self.sectors.add(at)

    @contextlib.contextmanager
    def in_place_of_the_gpu(self) -> Iterator[None]:
        from fenceline.layers.kernels.triton import decode_attention as module

        real = module.tl_cuda, module._prefetch_sectors
        module.tl_cuda = SimpleNamespace(gdc_launch_dependents=self.begin, gdc_wait=self.wait)
        module._prefetch_sectors = self.fetch
        try:
            yield
        finally:
            module.tl_cuda, module._prefetch_sectors = real


def check_launches_on_one_workspace_leave_no_trace() -> None:
    """Launch after launch on one workspace, cut differently, with workers in any order: counters are zero between,
    and results those of the first."""
    from triton.runtime.interpreter import interpreter_builder

    from fenceline.layers.kernels.triton import decode_attention as module

    step = case([200, 3, 90], [1, 1, 1], 16, (2, 1))
    expected = {workers: decode(step, workers) for workers in (3, 8)}
    keys = step.pool.row(1, "k")
    workspace = module.DecodeWorkspace(keys.shape[1], keys.shape[2], 8, keys.device)
    real = interpreter_builder.set_grid_idx
    random = np.random.default_rng(4)
    for workers in (8, 3, 8):
        order = random.permutation(workers)
        interpreter_builder.set_grid_idx = lambda x, y, z, order=order: real(x, int(order[y]), z)
        try:
            output = decode(step, workers, workspace=workspace)
        finally:
            interpreter_builder.set_grid_idx = real
        assert torch.equal(output, expected[workers])


def check_a_workspace_too_small_is_refused() -> None:
    step = case([9], [1], 16, (4, 2))
    with pytest.raises(AssertionError):
        decode(step, 9)
    with pytest.raises(AssertionError):
        decode(step, 0)


def check_decode_attention() -> None:
    """Up to the wait nothing is written, and only lengths, rows and page ids are read, words of their own; q, keys and
    values travel by the vector."""
    from fenceline.layers.kernels.triton import decode_attention as module

    shape = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM_PAD": 128, "GROUP": 4, "PAGE_SIZE": 1, "ROWS": 16}
    shape |= {"TAIL": 0, "TAIL_PAD": 16, "SHARED": False, "MIN_BLOCKS": 1, "APART": False}
    shape |= {
        "NUM_QUERIES": 1,
        "NUM_NODES": 1,
        "TREE": False,
        "MERGED_ROWS": 4,
        "PART": 4,
        "SEGMENT": 0,
        "MAX_SEGMENTS": 0,
    }
    shape |= {"PATHS": 0, "PATH_NODES": 0}
    few = {"BATCH_PAD": 1, "BLOCK_N": 32, "NUM_WORKERS": 33, "MERGE": 8}
    many = {"BATCH_PAD": 64, "BLOCK_N": 128, "NUM_WORKERS": 16, "MERGE": 32}
    for cut, num_warps, num_stages in ((few, 2, 1), (many, 8, 5)):
        constants = shape | cut | {"PDL": True, "NUM_PREFETCHED": 2}
        ptx = compile_kernel(module._decode_kernel, constants, "sm_90", num_warps, num_stages, True)
        ahead, behind = ptx.split("griddepcontrol.wait")
        assert "prefetch.global.L2" in ahead and "prefetch.global.L2" not in behind and "atom." in behind
        assert not re.search(r"st\.global|atom\.|red\.global|cp\.async|ld\.global\S*\.v\d", ahead)


def check_kernel_in_front() -> None:
    """``rotate_and_store`` lets its dependents start only after its own wait, as ``decode_attention`` asks."""
    from fenceline.layers.kernels.triton import rotate_store

    shape = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "BLOCK_HALF": 64, "BLOCK_HEADS": 4}
    kernel = rotate_store._rotate_and_store_kernel
    ptx = compile_kernel(kernel, shape | {"HAS_NORMS": False, "ROUNDS": False, "PDL": True}, "sm_90", 2, 3, True)
    assert 0 < ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        set_up_interpreter()
    names = INTERPRETED if sys.argv[1] == "interpret" else COMPILED
    print_outcomes({name: globals()[f"check_{name}"] for name in names})
