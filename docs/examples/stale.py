"""Five uses of stale memory that inference servers have had, on the virtual GPU: ``python docs/examples/stale.py``.

Each is in order on one stream, so that no race detector could object. Each takes ``guarded``: with it, what was missing
is there. Printed are their sources and reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from fenceline_sim import VirtualGpu, use
from fenceline_sim.errors import CheckError

Program = Callable[[VirtualGpu, torch.device, bool], None]


def f7_padding_is_stale(gpu: VirtualGpu, device: torch.device, guarded: bool) -> None:
    """A graph for four requests is replayed for two; the other rows still hold the batch before."""
    rows = torch.zeros(4, dtype=torch.int64, device=device)
    seen = torch.zeros_like(rows)
    gpu.name_memory(rows, "inputs", row_bytes=8)
    graph = gpu.graph("decode[4]")
    with gpu.capture(graph):
        seen.copy_(rows)
    for batch in ([7, 8, 9, 5], [3, 6]):
        gpu.checks.begin_fill([rows])
        rows[: len(batch)].copy_(torch.tensor(batch))
        if guarded:
            rows[len(batch) :].fill_(0)
        graph.replay()
    gpu.synchronize_all()


def f8_output_is_overwritten(gpu: VirtualGpu, device: torch.device, guarded: bool) -> None:
    """The output of one replay is looked at after the next replay has been launched."""
    x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    gpu.name_memory(out, "next_tokens", row_bytes=4)
    graph = gpu.graph("decode[4]")
    with gpu.capture(graph):
        out.copy_(x.mul_(2))
    kept = []
    for _ in range(2):
        gpu.checks.begin_fill([out])
        graph.replay()
        tokens = out[:2]
        gpu.checks.lease(tokens)
        kept.append(tokens.clone() if guarded else tokens)
    assert kept[0].tolist() == [2.0, 2.0] and kept[1].tolist() == [4.0, 4.0]


def f9_plan_is_overwritten(gpu: VirtualGpu, device: torch.device, guarded: bool) -> None:
    """What a batch is planned from is also what its graph advances: the second step plans from the first one's end."""
    plan = torch.tensor([5, 9], device=device)
    gpu.name_memory(plan, "plan.seq_lens", row_bytes=8)
    gpu.checks.protect_from_graphs(plan)
    seq_lens = torch.zeros_like(plan) if guarded else plan
    graph = gpu.graph("decode[2]")
    with gpu.capture(graph):
        torch.add(plan, 1, out=seq_lens)
    for _ in range(2):
        graph.replay()
    assert seq_lens.tolist() == [6, 10]


def f17_graph_writes_what_it_gave_back(gpu: VirtualGpu, device: torch.device, guarded: bool) -> None:
    """A graph's temporaries are in the common pool, where others get the memory once the capture has ended."""
    x = torch.ones(64, device=device)
    graph = gpu.graph("decode", pool=None if guarded else gpu.default_stream)
    with gpu.capture(graph):
        y = (x + 1) * 2
    table = torch.zeros(64, device=device)
    gpu.name_memory(table, "token_counts")
    graph.replay()
    assert y[0] == 4.0 and table.sum() == 0.0


def f18_padding_is_minus_one(gpu: VirtualGpu, device: torch.device, guarded: bool) -> None:
    """The padding of an index is -1, which names the last row, and that belongs to another request."""
    kv = torch.zeros(8, 4, device=device)
    gpu.name_memory(kv, "kv", row_bytes=16)
    slots = torch.tensor([3, 5, 0 if guarded else -1], device=device)
    gpu.name_memory(slots, "out_slots")
    kv[slots] = torch.ones(3, 4, device=device)
    gpu.synchronize_all()


PROGRAMS: tuple[Program, ...] = (
    f7_padding_is_stale,
    f8_output_is_overwritten,
    f9_plan_is_overwritten,
    f17_graph_writes_what_it_gave_back,
    f18_padding_is_minus_one,
)


def run(program: Program, guarded: bool, seed: int = 0, policy: str = "random") -> CheckError | None:
    """Run ``program`` on a fresh virtual GPU; what was found, if something was."""
    gpu = VirtualGpu(seed=seed, policy=policy)
    try:
        program(gpu, use(gpu), guarded)
    except CheckError as error:
        return error
    return None


def markdown() -> str:
    """Each program's source and its report."""
    parts = []
    for program in PROGRAMS:
        title, _, rest = program.__name__.partition("_")
        report = str(run(program, guarded=False))
        parts.append(
            f"### {title.upper()}: {rest.replace('_', ' ')}\n\n"
            f"```python\n{inspect.getsource(program)}```\n\n```text\n{report}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
