"""F16: memory that one stream still uses does not reach the allocator, which would hand it to another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guarded_runs import SHORT_SPIN_CYCLES, page_sizes, runners, spin_after_points, spin_after_waits, trace_shape
from step_traces import random_trace
from trace_runner import first_difference, make_runner, play

from fenceline.memory_order import InputRing, open_device
from fenceline.model_executor.step import StepBatch

pytestmark = pytest.mark.gpu


@page_sizes
def test_tenants_of_the_allocator_never_meet_a_step(page_size: int) -> None:
    """Others allocate, write and free between all launches, on the default stream and on COPY."""
    shape = trace_shape(page_size, logprob_share=0.1)
    batches = random_trace(160, 1000, shape)
    runner = make_runner(open_device("cuda"), shape)
    spin_after_points(runner.device.forward, SHORT_SPIN_CYCLES)
    sizes = [1 << power for power in range(9, 18)]

    def tenants(batch: StepBatch) -> None:
        for nbytes in sizes:
            torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")
            with runner.device.copy.active():
                torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")

    got = play(runner, batches, after_launch=tenants)
    assert first_difference(play(runners("cuda", page_size)[0], batches), got) == ""


@page_sizes
def test_a_prompt_that_outgrows_the_ring(page_size: int) -> None:
    """A ring of 4 kB, and prompts of 450 tokens, which need 11, while decode steps are in flight."""
    shape = trace_shape(page_size, prompts=(1, 9), outputs=(4, 9))
    long = trace_shape(page_size, prompts=(450,))
    batches = [*random_trace(161, 40, shape)]
    batches += random_trace(162, 4, long)
    runner = make_runner(open_device("cuda"), shape)
    ring = runner._inputs
    small = ring._make(0, 4096)
    runner.device.synchronize()
    ring._slots[0] = small
    spin_after_points(runner.device.forward, SHORT_SPIN_CYCLES)
    got = play(runner, batches)
    assert ring._slots[0] is not small, "it has grown"
    assert first_difference(play(runners("cuda", page_size)[0], batches), got) == ""


@pytest.mark.parametrize("severed", [(), ("growth_stop",)], ids=["guarded", "unguarded"])
def test_a_slot_that_grows_while_it_is_read(severed: tuple[str, ...]) -> None:
    """FORWARD reads the slot 10 ms late; the allocator's next customer has been given it by then."""
    torch.cuda.empty_cache()
    device = open_device("cuda", frozenset(severed))
    ring = InputRing(device)
    device.synchronize()
    values = np.arange(8000, dtype=np.int64)
    spin_after_waits(device.forward)
    freed = ring._slots[0].device
    address, nbytes = freed.data_ptr(), freed.numel()
    del freed
    views = ring.upload({"x": values})
    ring.upload({"x": np.zeros(20000, dtype=np.int64)})
    tenants: list[torch.Tensor] = []  # on the default stream, ordered with no other
    while not any(abs(tenant.data_ptr() - address) < nbytes for tenant in tenants):
        tenants.append(torch.zeros(nbytes, dtype=torch.uint8, device="cuda"))
        assert len(tenants) < 1000, "the allocator hands out again what was freed"
    device.synchronize()
    assert bool(np.array_equal(views["x"].cpu().numpy(), values)) == (not severed)
