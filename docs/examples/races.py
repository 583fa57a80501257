"""Five races that inference servers have had, as programs for the virtual GPU: ``python docs/examples/races.py``.

Each takes ``ordered``: with it, the order that was missing is there. Printed are their sources and reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from fenceline_sim import RaceError, VirtualGpu, use

Program = Callable[[VirtualGpu, torch.device, bool], None]


def f1_backup_reads_what_forward_writes(gpu: VirtualGpu, device: torch.device, ordered: bool) -> None:
    """HiCache: KV is copied to the host while the forward is still writing it."""
    kv = torch.zeros(16, 4, device=device)
    host = gpu.pinned.buffer(16 * 16).view(torch.float32).view(16, 4)
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
    host = gpu.pinned.buffer(2 * 16).view(torch.float32).view(2, 4)
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
    staging = gpu.pinned.buffer(64).view(torch.float32)
    gpu.name_memory(staging, "staging")
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
    """A tensor of one stream is used on another and dropped, and its memory is allocated again."""
    copy = gpu.stream("copy")
    result = torch.ones(64, device=device)
    gpu.name_memory(result, "result")
    gpu.wait(copy, gpu.record(gpu.default_stream))
    with gpu.on(copy):
        host = gpu.pinned.buffer(256).view(torch.float32)
        host.copy_(result, non_blocking=True)
    if ordered:
        gpu.wait(gpu.default_stream, gpu.record(copy))
    del result
    torch.zeros(64, device=device)
    gpu.synchronize_all()


PROGRAMS: tuple[Program, ...] = (
    f1_backup_reads_what_forward_writes,
    f3_load_fills_what_forward_reads,
    f12_staging_is_rewritten,
    f13_row_is_refilled,
    f16_tensor_is_freed_while_used_elsewhere,
)


def run(program: Program, ordered: bool, seed: int = 0, policy: str = "random") -> RaceError | None:
    """Run ``program`` on a fresh virtual GPU; the race that was found, if one was."""
    gpu = VirtualGpu(seed=seed, policy=policy)
    try:
        program(gpu, use(gpu), ordered)
    except RaceError as race:
        return race
    return None


def markdown() -> str:
    """Each program's source and its report."""
    parts = []
    for program in PROGRAMS:
        title, _, rest = program.__name__.partition("_")
        report = str(run(program, ordered=False))
        parts.append(
            f"### {title.upper()}: {rest.replace('_', ' ')}\n\n"
            f"```python\n{inspect.getsource(program)}```\n\n```text\n{report}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
