"""Known races of inference servers, as small programs: each is reported on every schedule, its repair is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fenceline.vgpu import RaceError, VirtualGpu, use

POLICIES = ("fifo", "eager", "laziest", "random", "pct")
SEEDS = 4
Program = Callable[[VirtualGpu, torch.device, bool], None]


def f1_backup_reads_what_forward_writes(gpu: VirtualGpu, device: torch.device, ordered: bool) -> None:
    """HiCache: KV is copied to the host while the forward is still writing it."""
    kv = torch.zeros(16, 4, device=device)
    host = gpu.pinned_buffer(16 * 16).view(torch.float32).view(16, 4)
    gpu.name_memory(kv, "kv", row_bytes=16)
    forward, store = gpu.stream("forward"), gpu.stream("store")
    gpu.synchronize_all()
    with gpu.on(forward):
        kv.index_copy_(0, torch.arange(4, 8, device=device), torch.ones(4, 4, device=device))
    if ordered:
        gpu.wait(store, gpu.record(forward))
    with gpu.on(store):
        host[4:8].copy_(kv[4:8], non_blocking=True)
    gpu.synchronize_all()


def f3_load_fills_what_forward_reads(gpu: VirtualGpu, device: torch.device, ordered: bool) -> None:
    """A load from the host fills slots that a step in flight still reads."""
    kv = torch.zeros(16, 4, device=device)
    gpu.name_memory(kv, "kv", row_bytes=16)
    forward, load = gpu.stream("forward"), gpu.stream("load")
    host = gpu.pinned_buffer(2 * 16).view(torch.float32).view(2, 4)
    gpu.host_access(host, True, "fill of a host page")
    host.zero_()
    slots = torch.tensor([5, 6, 9], device=device)
    gpu.synchronize_all()
    with gpu.on(forward):
        total = kv.index_select(0, slots).sum()
    if ordered:
        gpu.wait(load, gpu.record(forward))
    with gpu.on(load):
        kv[6:8].copy_(host, non_blocking=True)
    gpu.synchronize_all()
    assert total.item() == 0


def f12_staging_is_rewritten(gpu: VirtualGpu, device: torch.device, ordered: bool) -> None:
    """A pinned buffer is rewritten by the host before its asynchronous copy ran."""
    staging = gpu.pinned_buffer(64).view(torch.float32)
    inputs = torch.zeros(16, device=device)
    gpu.synchronize_all()
    copied = None
    for step in range(3):
        if ordered and copied is not None:
            gpu.synchronize(copied)
        gpu.host_access(staging, True, "pack of inputs")
        staging.fill_(step)
        inputs.copy_(staging, non_blocking=True)
        copied = gpu.record(gpu.thread.current)
    gpu.synchronize_all()


def f13_row_is_refilled(gpu: VirtualGpu, device: torch.device, ordered: bool) -> None:
    """A request's row is freed on the end of step k-1 and refilled while step k still writes it."""
    last_tokens = torch.zeros(8, dtype=torch.int64, device=device)
    gpu.name_memory(last_tokens, "last_tokens", row_bytes=8)
    forward, schedule = gpu.stream("forward"), gpu.stream("schedule")
    gpu.synchronize_all()
    with gpu.on(forward):
        rows = torch.tensor([2, 3], device=device)
        last_tokens[rows] = rows * 10
    if ordered:
        gpu.wait(schedule, gpu.record(forward))
    with gpu.on(schedule):
        last_tokens[torch.tensor([3], device=device)] = torch.tensor([7], device=device)
    gpu.synchronize_all()


def f16_tensor_is_freed_while_used_elsewhere(gpu: VirtualGpu, device: torch.device, ordered: bool) -> None:
    """A tensor of one stream is used on another, dropped, and its memory handed out again."""
    copy = gpu.stream("copy")
    result = torch.ones(64, device=device)
    gpu.wait(copy, gpu.record(gpu.default_stream))
    with gpu.on(copy):
        host = gpu.pinned_buffer(256).view(torch.float32)
        host.copy_(result, non_blocking=True)
    if ordered:
        gpu.wait(gpu.default_stream, gpu.record(copy))
    del result
    torch.zeros(64, device=device)
    gpu.synchronize_all()


EXHIBITS: dict[Program, tuple[str, str]] = {
    f1_backup_reads_what_forward_writes: ("RAW", "kv rows 4-7"),
    f3_load_fills_what_forward_reads: ("WAR", "kv row 6"),
    f12_staging_is_rewritten: ("WAR", "pinned memory [64] allocated at"),
    f13_row_is_refilled: ("WAW", "last_tokens row 3"),
    f16_tensor_is_freed_while_used_elsewhere: ("WAR", "tensor [64] allocated at"),
}


def run(program: Program, seed: int, policy: str, ordered: bool) -> RaceError | None:
    gpu = VirtualGpu(seed=seed, policy=policy)
    try:
        program(gpu, use(gpu), ordered)
    except RaceError as race:
        return race
    assert gpu.detector is not None and gpu.detector.num_accesses > 0
    return None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", EXHIBITS, ids=lambda program: program.__name__)
def test_the_race_is_reported_on_every_schedule(program: Program, policy: str) -> None:
    hazard, memory = EXHIBITS[program]
    for seed in range(SEEDS):
        race = run(program, seed, policy, ordered=False)
        assert race is not None, f"{policy} {seed}: silent"
        assert race.hazard == hazard and race.memory.startswith(memory), str(race)
        assert all("test_exhibits.py" in place for place in race.places)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", EXHIBITS, ids=lambda program: program.__name__)
def test_the_repaired_program_is_silent(program: Program, policy: str) -> None:
    for seed in range(SEEDS):
        race = run(program, seed, policy, ordered=True)
        assert race is None, str(race)


def test_a_report_names_both_operations_the_rows_and_the_missing_order() -> None:
    race = run(f13_row_is_refilled, 0, "random", ordered=False)
    assert race is not None
    text = str(race)
    assert "index_put_ writes it on forward" in text and "index_put_ writes it on schedule" in text
    assert "last_tokens[rows] = rows * 10" in text
    assert "schedule has to wait, before 2, for forward after 1" in text
