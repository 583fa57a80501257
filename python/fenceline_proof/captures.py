"""Graphs and their memory: what must hold of each capture, and of what the engine says before each replay.

Before a capture begins, its body must have run once, with the same operations and shapes and not on the default stream,
and that run must have ended: so nothing is compiled or set up while it is captured. A graph does something, and one for
n rows accesses no row of its arena beyond these. Plans of attention that a graph contains are made for the longest
requests. What a step computes for itself is read after it has been written. A row of an arena without a request holds
what docs/internals/graphs.md says, and a batch of other lengths than the arena's is refused.

The engine keeps the addresses of the memory that all graphs share, to notice when it has moved. Each graph is replayed
as often as there are steps of its size. And the engine says when the values of an arena, and of a graph's outputs,
begin to be others, on which the checks of freshness and of generations rely: as often as the batch changes, or a graph
is replayed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from fenceline.layers.forward_batch import AttentionPlan, GraphDecodeInputs, VerifyInputs
from fenceline.memory_order import Arena, Graph, GraphPool, Role
from fenceline.memory_order.edges import ARENA_PAD, KEPT_HIDDEN, MASK_ROWS, TOTAL_BUCKETS, Guard
from fenceline.model_executor.decode_runner import RepairError
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import StepBatch
from fenceline_proof.decisions import Decision, Event
from fenceline_proof.events import around
from fenceline_sim.audit import LaunchAuditor, ranges_of
from fenceline_sim.device import VgpuDevice, VgpuGraph
from fenceline_sim.memory import Access
from fenceline_sim.streams import RELEASE, Operation, VirtualStream
from fenceline_sim.tensor import VTensor

_ARENAS = ("decode.", "speculative.", "prefill.")
_OF_NODES = "speculative.target_"  # several rows for each request
_MASKS = "token_masks"
_COUNTED = "num_steps"
_NUM_AUDITED = 2  # launches of each kernel
_SINKS_TOKENS = 2  # a draft goes on from a last token and the one before it
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
        self._defaults = {stream.name for stream in device.gpu.default_streams}
        self._done: set[_Work] = set()
        self._graphs: list[VgpuGraph] = []
        self._pointers: dict[str, int] = {}
        # By the name of the memory and the guard that ensures it, since the engine serves.
        self._fills: Counter[tuple[str, str]] = Counter()
        device.gpu.submitted = self._submitted
        device.gpu.launches = LaunchAuditor(_NUM_AUDITED)
        around(device, "capture", before=self._begins, after=self._captured)
        around(device, "name_memory", before=self._named)

    def _named(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        self._pointers[name] = tensor.data_ptr()

    def _submitted(self, stream: VirtualStream, op: Operation) -> None:
        if stream.edge_name not in self._defaults:
            self._done.add(_work(op))

    def _begins(self, name: str, pool: GraphPool, body: Callable[[], None]) -> None:
        for stream in self._device.gpu.streams:
            left = [op.label for op in stream.queue if op.run is not None and op.label != RELEASE]
            if left and not self.wrong:
                self.wrong = f"captures: {name} begins before {left[0]} has run"

    def _captured(self, graph: Graph, name: str, pool: GraphPool, body: Callable[[], None]) -> None:
        assert isinstance(graph, VgpuGraph), "made by this device"
        self._graphs.append(graph)
        size = re.search(r"\[(\d+)\]", name)
        assert size is not None, f"{name} names its size"
        if not self.wrong and all(op.label == RELEASE for op in graph.raw.operations):
            self.wrong = f"captures: {name} does nothing"
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
        assert self._device.gpu.launches is not None, "it is there from the start"
        self._device.gpu.launches.is_on = True
        around(self._device, "begin_fill", before=self._begun)
        for graph in self._graphs:
            # The first replay of a graph uploads it to the device. A decode step has few graphs, a prefill step many.
            if graph.name.startswith("prefill") and graph.raw.num_replays == 0 and not self.wrong:
                self.wrong = f"captures: {graph.name} has not been replayed before the first request"
        self._first_replays = {graph.name: graph.raw.num_replays for graph in self._graphs}
        arenas = [
            runner.decode.arena,
            *([] if runner.prefill_graphs is None else [runner.prefill_graphs.arena]),
        ]
        for arena in arenas:
            self.wrong = self.wrong or _wrong_padding(arena, runner.speculative is not None)
        self.wrong = self.wrong or _wrong_bound(runner) or self._wrong_inputs(runner)
        has_masks = _MASKS in self._pointers and runner.model.context.shard.size == 1
        decode = (*_SHARED, *(_DRAFTS if runner.speculative is not None else ()))
        masks = (_MASKS,) if has_masks and runner.speculative is None else ()
        self._check_addresses("decode", runner.decode.addresses(), (*decode, *masks))
        if runner.prefill_graphs is not None:
            self._check_addresses("prefill", runner.prefill_graphs.addresses(), _SHARED[2:])

    def _wrong_inputs(self, runner: ModelRunner) -> str:
        """A step's own memory is read by its graphs only after they have written it, row by row; but for the number of
        steps, which they advance, and which the warm-up leaves at 0."""
        arena = runner.decode.arena
        names = {
            f"{arena.name}.{field.name}": np.zeros(
                self._device.gpu.tag_of(arena[field.name]).region.capacity, bool
            )
            for field in arena.fields.values()
            if field.role is Role.INPUT and field.name != _COUNTED
        }
        for graph in self._graphs:
            if re.fullmatch(r"decode\[\d+\]|verify.*", graph.name):
                for mask in names.values():
                    mask[:] = False
            for op in graph.raw.operations if not graph.name.startswith("prefill") else ():
                for access in op.reads:
                    seen = names.get(access.tag.name)
                    if seen is not None and not all(
                        seen[first:last].all() for first, last in ranges_of(access)
                    ):
                        what = f"{graph.name} reads {access.tag} at {op.place}"
                        return f"captures: {what} before it has written all of it"
                for access in op.writes:
                    seen = names.get(access.tag.name)
                    if seen is not None:
                        for first, last in ranges_of(access):
                            seen[first:last] = True
        steps = arena[_COUNTED] if _COUNTED in arena.fields else None
        if isinstance(steps, VTensor) and steps.plain.any():
            return f"captures: {steps.plain.tolist()} steps are counted before the first"
        return ""

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
        decodes = [step.batch for step in steps if step.batch.is_decode]
        batches = [batch.composition for batch in decodes]
        num_batches = sum(one != other for one, other in zip([None, *batches], batches, strict=False))
        num_replays = sum(self._is_replayed(runner.decode.sizes, batch, runner) for batch in decodes)
        sizes = () if runner.prefill_graphs is None else runner.prefill_graphs.sizes
        prompts = [step.batch for step in steps if not step.batch.is_decode]
        tokens = [batch.num_prompt_tokens for batch in prompts]
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
            elif name == _MASKS:
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
        return self._compare_replays(runner, decodes, tokens) or _compare_repairs(runner, decodes)

    def _compare_replays(
        self, runner: ModelRunner, decodes: Sequence[StepBatch], tokens: Sequence[int]
    ) -> str:
        """``tokens``: of each prefill step."""
        sizes, pieces = runner.decode.sizes, runner.prefill_graphs
        right: Counter[tuple[str, int, int]] = Counter()
        for batch in decodes:
            if self._is_replayed(sizes, batch, runner):
                size = min(size for size in sizes if size >= len(batch.rows))
                right["decode", size, batch.depth.depth] += 1
        captured = () if pieces is None else pieces.sizes
        for num in tokens:
            if num <= max(captured, default=0):
                right["prefill", min(size for size in captured if size >= num), 0] += 1
        for graph in self._graphs:
            found = re.fullmatch(r"(\w+)\[(\d+)\](?: of depth (\d+)|\.\d+)?", graph.name)
            if found is None:  # the draw under masks, which not every replay needs
                continue
            kind = "prefill" if found[1] == "prefill" else "decode"
            num = graph.raw.num_replays - self._first_replays[graph.name]
            num_steps = right[kind, int(found[2]), int(found[3] or 0)]
            if num != num_steps:
                return f"captures: {graph.name} is replayed {num} times, {num_steps} steps are of its size"
        return ""

    def _is_replayed(self, sizes: Sequence[int], batch: StepBatch, runner: ModelRunner) -> bool:
        has_padding = not runner._config.server_args.disable_cuda_graph_padding
        return len(batch.rows) <= max(sizes, default=0) if has_padding else len(batch.rows) in sizes


def _work(op: Operation) -> _Work:
    """What a kernel reads before it waits for the one in front is not always part of it, so reads are left out."""
    return op.label, str(op.place), tuple(access.layout.form.shape for access in op.writes)


def _rows_beyond(access: Access, size: int) -> int:
    """The last row of an arena's memory that is accessed if it is beyond the first ``size``, else 0."""
    tag = access.tag
    if not tag.name.startswith((*_ARENAS, _MASKS)) or tag.name.startswith(_OF_NODES) or not tag.row_bytes:
        return 0
    last = (max((end for _, end in ranges_of(access)), default=0) - 1) // tag.row_bytes
    return last if last >= size else 0


def _wrong_padding(arena: Arena, has_draft: bool) -> str:
    """What rows without a request hold, beside what they must: they are a greedy request in row 0, the sink, of as few
    tokens as a step can go on from. It yields a token, and its scores are divided by 1. All else is 0."""
    lens = ("lens", "seq_lens", "plan_seq_lens", "draft_lens", "path_lens")
    right = dict.fromkeys(lens, _SINKS_TOKENS if has_draft else 1) | {"temperatures": 1, "counts": 1}
    for name, pad in arena.pads.items():
        if pad != right.get(name, 0) or isinstance(pad, bool) != (arena[name].dtype is torch.bool):
            return f"captures: rows of {arena.name}.{name} without a request hold {pad}, not {right.get(name, 0)}"
    return ""


def _compare_repairs(runner: ModelRunner, decodes: Sequence[StepBatch]) -> str:
    """A batch of the same requests, but of other lengths than those that the arena has, is refused."""
    decode = runner.decode
    if isinstance(decode, SpeculativeRunner) or not decodes or decode._filled is None:
        return ""
    last = replace(decodes[-1], seq_lens=decodes[-1].seq_lens + 5)
    try:
        decode.arrays(last)
    except RepairError:
        return ""
    return f"captures: a batch of {last.seq_lens} tokens is not noticed to be of other lengths"


def _wrong_bound(runner: ModelRunner) -> str:
    """The longest request that a step may have has all tokens of the context, the last of which has no row yet: the
    step computes it, and a draft's tokens behind it."""
    longest, decode = runner._config.model.context_length, runner.decode
    plans: list[tuple[AttentionPlan, int]] = []
    if isinstance(decode, SpeculativeRunner):
        for made in (captured.plans for captured in decode._captured.values()):
            all_plans = [made.verify, *made.extend, *made.steps]
            plans += [(plan, longest - 1 + made.shape.num_slots) for plan in all_plans]
    else:
        plans += [(captured.plan, longest) for captured in decode._captured.values()]
    for plan, right in plans:
        inputs = getattr(plan, "_inputs", None)
        if isinstance(inputs, VerifyInputs):
            bounds = inputs.max_seq_lens_cpu.tolist()
        elif isinstance(inputs, GraphDecodeInputs):
            bounds = [inputs.max_seq_len]
        else:
            continue
        if {*bounds} != {right}:
            return f"captures: attention is planned for requests of {bounds} tokens, {right} may be there"
    return ""
