"""Graphs and their memory: what must hold of each capture, and of what the engine says before each replay.

A capture's body has been run before, operation by operation, so that nothing is compiled or set up while it is
captured. A graph for n rows accesses no row of its arena beyond these. The engine keeps the addresses of the memory
that all graphs share, to notice when it has moved. And it says when the values of an arena, and of a graph's outputs,
begin to be others, on which the checks of freshness and of generations rely: as often as the batch changes, or a graph
is replayed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from fenceline.memory_order import Graph, GraphPool, Role
from fenceline.memory_order.edges import ARENA_PAD, KEPT_HIDDEN, MASK_ROWS, TOTAL_BUCKETS, Guard
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import DecodeBatch, ExtendBatch
from fenceline.vgpu.audit import ranges_of
from fenceline.vgpu.device import VgpuDevice, VgpuGraph
from fenceline.vgpu.memory import Access
from fenceline.vgpu.proving.decisions import Decision, Event
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.streams import RELEASE, Operation, VirtualStream

_ARENAS = ("decode.", "speculative.", "prefill.")
_OF_NODES = "speculative.target_"  # several rows for each request
_SHARED = ("req_pool.page_table", "req_pool.last_tokens", "kv_pool.layer0.k", "kv_pool.layer0.v")
_DRAFTS = ("draft_state.lens", "draft_state.hidden")
_REPLAYED = ("decode.next_tokens", "decode.logits", "speculative.target_logits")
_HIDDEN = "speculative.target_hidden"
_EACH_STEP = (
    "speculative.counts",
    "speculative.num_bad",
    "speculative.path",
    "speculative.path_tokens",
    _HIDDEN,
)

_Work = tuple[
    str, str, tuple[tuple[int, ...], ...]
]  # an operation's label, its place, and the shapes that it writes


class Captures:
    """Watches ``device`` from before the engine is made."""

    def __init__(self, device: VgpuDevice) -> None:
        self.wrong = ""
        self._device = device
        self._done: set[_Work] = set()
        self._graphs: list[VgpuGraph] = []
        self._pointers: dict[str, int] = {}
        # By the name of the memory and the guard that ensures it, since the engine serves.
        self._fills: Counter[tuple[str, str]] = Counter()
        self._num_before = 0  # replays of decode graphs before the engine serves
        device.gpu.submitted = self._submitted
        around(device, "capture", after=self._captured)
        around(device, "name_memory", before=self._named)

    def _named(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        self._pointers[name] = tensor.data_ptr()

    def _submitted(self, stream: VirtualStream, op: Operation) -> None:
        self._done.add(_work(op))

    def _captured(self, graph: Graph, name: str, pool: GraphPool, body: Callable[[], None]) -> None:
        assert isinstance(graph, VgpuGraph), "made by this device"
        self._graphs.append(graph)
        size = re.search(r"\[(\d+)\]", name)
        assert size is not None, f"{name} names its size"
        for op in graph.raw.operations:
            if op.label == RELEASE:
                continue
            if not self.wrong and _work(op) not in self._done:
                self.wrong = f"captures: {name} has {op.label} at {op.place}, which has not been run before"
            for access in (*op.reads, *op.writes):
                beyond = _rows_beyond(access, int(size[1]))
                if beyond and not self.wrong:
                    self.wrong = f"captures: {name} accesses row {beyond} of {access.tag} at {op.place}"

    def begin_serving(self, runner: ModelRunner) -> None:
        """The engine has been made."""
        self._device.gpu.submitted = None
        around(self._device, "begin_fill", before=self._begun)
        for graph in self._graphs:
            # The first replay of a graph uploads it to the device. A decode step has few graphs, a prefill step many.
            if graph.name.startswith("prefill") and graph.raw.num_replays == 0 and not self.wrong:
                self.wrong = f"captures: {graph.name} has not been replayed before the first request"
        self._num_before = self._num_decoded()
        has_masks = "token_masks" in self._pointers and runner.model.context.shard.size == 1
        decode = (*_SHARED, *(_DRAFTS if runner.speculative is not None else ()))
        masks = ("token_masks",) if has_masks and runner.speculative is None else ()
        self._check_addresses("decode", runner.decode.addresses(), (*decode, *masks))
        if runner.prefill_graphs is not None:
            self._check_addresses("prefill", runner.prefill_graphs.addresses(), _SHARED[2:])

    def _check_addresses(self, kind: str, kept: Sequence[int], names: Sequence[str]) -> None:
        for name in names:
            if self._pointers[name] not in kept and not self.wrong:
                self.wrong = f"captures: {kind} graphs would not notice that {name} has moved"

    def _begun(self, tensors: Sequence[torch.Tensor], guard: Guard) -> None:
        self._fills.update((self._device.gpu.tag_of(tensor).name, guard.name) for tensor in tensors)

    def compare(self, runner: ModelRunner, events: Sequence[Event]) -> str:
        """What was wrong at the start, or is wrong with what has been said of the memory since; "" if nothing."""
        if self.wrong:
            return self.wrong
        steps = [event for event in events if isinstance(event, Decision)]
        decodes = [step.batch for step in steps if isinstance(step.batch, DecodeBatch)]
        batches = [batch.composition for batch in decodes]
        num_batches = sum(one != other for one, other in zip([None, *batches], batches, strict=False))
        num_replays = sum(self._is_replayed(runner.decode.sizes, batch, runner) for batch in decodes)
        num = self._num_decoded() - self._num_before
        if runner.speculative is None and num != num_replays:
            return f"captures: decode graphs are replayed {num} times for {num_replays} steps that have one"
        sizes = () if runner.prefill_graphs is None else runner.prefill_graphs.sizes
        prompts = [step.batch for step in steps if isinstance(step.batch, ExtendBatch)]
        tokens = [sum(len(seq.token_ids) for seq in batch.seqs) for batch in prompts]
        num_prompts = sum(num <= max(sizes, default=0) for num in tokens)
        for name in self._pointers:
            guard = TOTAL_BUCKETS
            if name.startswith("prefill."):
                assert runner.prefill_graphs is not None, "it has this memory"
                role = runner.prefill_graphs.arena.fields[name.removeprefix("prefill.")].role
                right, guard = num_prompts, TOTAL_BUCKETS if role is Role.OUTPUT else ARENA_PAD
            elif name in _REPLAYED:
                right = num_replays
            elif name in _EACH_STEP:
                right = len(decodes)
                guard = KEPT_HIDDEN if name == _HIDDEN else TOTAL_BUCKETS
            elif name == "token_masks":
                right, guard = sum(step.masks is not None for step in steps), MASK_ROWS
            elif name.startswith(_ARENAS) and not name.startswith(_OF_NODES):
                right, guard = num_batches, ARENA_PAD
            else:
                continue
            told = self._fills[name, guard.name]
            if told != right:
                return (
                    f"captures: {told} times new values of {name} are said to begin, they do {right};"
                    f" missing guard: {guard.name}"
                )
        return ""

    def _num_decoded(self) -> int:
        """Replays of decode graphs, without those of draws under masks, which are graphs of their own."""
        graphs = [graph for graph in self._graphs if re.fullmatch(r"decode\[\d+\]", graph.name)]
        return sum(graph.raw.num_replays for graph in graphs)

    def _is_replayed(self, sizes: Sequence[int], batch: DecodeBatch, runner: ModelRunner) -> bool:
        has_padding = not runner._config.server_args.disable_cuda_graph_padding
        return len(batch.rows) <= max(sizes, default=0) if has_padding else len(batch.rows) in sizes


def _work(op: Operation) -> _Work:
    """What a kernel reads before it waits for the one in front is not always part of it, so reads are left out."""
    return op.label, str(op.place), tuple(access.layout.form.shape for access in op.writes)


def _rows_beyond(access: Access, size: int) -> int:
    """The last row of an arena's memory that is accessed if it is beyond the first ``size``, else 0."""
    tag = access.tag
    if not tag.name.startswith(_ARENAS) or tag.name.startswith(_OF_NODES) or not tag.row_bytes:
        return 0
    last = (max((end for _, end in ranges_of(access)), default=0) - 1) // tag.row_bytes
    return last if last >= size else 0
