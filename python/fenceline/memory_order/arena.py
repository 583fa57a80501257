"""Arena: the static memory of graphs. Every field is declared, with the value that its padded rows have.

Three roles, which are three different memories (F9): a PLAN field is written by ``fill`` alone, once for a batch; an
INPUT field is derived from it, or advanced, by every replay; an OUTPUT field is written by a replay, and is leased
until the next one (F8). ``fill`` always writes head and tail (F7): a padded row never holds an earlier batch's value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from fenceline.memory_order.device import Device, FillField
from fenceline.memory_order.edges import ARENA_PAD, KEPT_HIDDEN, PLAN_SOURCE, SINK, TOTAL_BUCKETS, Guard
from fenceline.memory_order.lease import LeaseError

_SINK_ID = 0  # the row, page and slot that only padding uses


class Role(Enum):
    """Who writes a field."""

    PLAN = "plan"  # fill; graphs only read it
    INPUT = "input"  # fill resets it, replays derive or advance it
    OUTPUT = "output"  # replays


@dataclass(frozen=True, slots=True)
class ArenaField:
    """A field whose rows have ``shape``. ``pad`` is what a row without a request holds; an index field has ``SINK``."""

    name: str
    dtype: torch.dtype
    role: Role
    pad: int | float | Guard
    shape: tuple[int, ...] = ()


class Arena:
    """The fields, each a tensor [num_rows, *shape] that never moves and outlives every graph (F17)."""

    def __init__(self, device: Device, name: str, num_rows: int, fields: Sequence[ArenaField]) -> None:
        self.name = name
        self.num_rows = num_rows
        self.fields: Mapping[str, ArenaField] = {field.name: field for field in fields}
        self.num_fills = 0
        self.generation = 0  # of the outputs: the number of replays so far
        self._device = device
        self.pads = {field.name: _pad(device, field.pad) for field in fields}
        self._tensors: dict[str, torch.Tensor] = {}
        for field in fields:
            shape = (num_rows, *field.shape)
            tensor = torch.full(shape, self.pads[field.name], dtype=field.dtype, device=device.torch_device)
            device.name_rows(tensor, f"{name}.{field.name}")
            if field.role is Role.PLAN:
                device.protect_from_graphs(tensor, PLAN_SOURCE)
            self._tensors[field.name] = tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole field, [num_rows, *shape]."""
        return self._tensors[name]

    def derived(self, name: str, source: str) -> torch.Tensor:
        """INPUT field ``name``, [num_rows, *shape], which replays derive from PLAN field ``source``. It has memory of
        its own (F9).

        Severed (``plan_source``), it is written over ``source`` itself, from which the next replay derives it again.
        """
        return self._tensors[name if self._device.keeps(PLAN_SOURCE) else source]

    def fill(self, sources: Mapping[str, torch.Tensor], num_live: int, num_rows: int | None = None) -> None:
        """Give the first ``num_live`` rows of every PLAN field the values of ``sources`` [num_live, *shape], its
        other rows and all of the INPUT fields their pads. On FORWARD, in one launch where the device can.

        ``num_rows``: how many rows the next replays read, all by default; the rest keep what they have.

        Raises ``ValueError`` unless ``sources`` are exactly the PLAN fields.
        """
        plan = [field.name for field in self.fields.values() if field.role is Role.PLAN]
        if sources.keys() != set(plan):
            raise ValueError(f"arena {self.name} is filled with {', '.join(plan)}, all of them")
        rows = self._tensors
        if num_rows is not None:
            rows = {name: tensor[:num_rows] for name, tensor in rows.items()}
        work = [FillField(rows[name], sources[name], num_live, self.pads[name]) for name in plan]
        work += [
            FillField(rows[field.name], None, 0, self.pads[field.name])
            for field in self.fields.values()
            if field.role is Role.INPUT
        ]
        self.num_fills += 1
        self._device.begin_fill([field.target for field in work], ARENA_PAD)
        if not self._device.keeps(ARENA_PAD):  # only heads: tails keep the values of an earlier batch
            work = [replace(f, target=f.target[:num_live]) if f.source is not None else f for f in work]
        self._device.fill_rows(work)

    def begin_replay(self) -> ArenaOutputs:
        """The outputs of the replay that is about to be submitted. This ends the leases of earlier replays' outputs."""
        self.generation += 1
        outputs = [self[field.name] for field in self.fields.values() if field.role is Role.OUTPUT]
        self._device.begin_fill(outputs, TOTAL_BUCKETS)  # rows beyond the captured size are not written
        return ArenaOutputs(self, self.generation)


class ArenaOutputs:
    """The outputs of one replay, leased until the next replay of the same arena."""

    def __init__(self, arena: Arena, generation: int) -> None:
        self._arena = arena
        self._generation = generation

    def take(self, name: str, num_rows: int) -> torch.Tensor:
        """The first ``num_rows`` rows of an OUTPUT (or INPUT) field, to be used on FORWARD before the next replay is
        submitted. Raises :class:`LeaseError` after that."""
        arena = self._arena
        assert arena.fields[name].role is not Role.PLAN, f"{name} is no output"
        if arena.generation != self._generation:
            raise LeaseError(
                f"{arena.name}.{name} of replay {self._generation} is gone: replay {arena.generation} writes it"
            )
        tensor = arena[name][:num_rows]
        arena._device.lease(tensor)
        return tensor


def keep_hidden(device: Device, kept: torch.Tensor, x: torch.Tensor) -> None:
    """Guard ``kept_hidden``: copy ``x`` to ``kept``, both [T, features], on the current stream, for a graph that is
    replayed after the present one. Severed, ``kept`` holds what an earlier step has copied."""
    if device.keeps(KEPT_HIDDEN):
        kept.copy_(x)


def _pad(device: Device, pad: int | float | Guard) -> int | float:
    """The number that ``pad`` stands for: for ``SINK`` the id of the row, page or slot that only padding uses (F18).

    Severed, it is -1, as upstream once had it, which names the last row, and that belongs to a request.
    """
    if isinstance(pad, Guard):
        assert pad is SINK, f"{pad.name} is no pad"
        return _SINK_ID if device.keeps(SINK) else -1
    return pad


def size_lookup(device: Device, padding: bool) -> Callable[[Sequence[int], int], int | None]:
    """Guard ``total_buckets``: a function that finds the graph of a batch. It takes the captured sizes, ascending, and
    the size of the batch, and returns the smallest size that holds the batch, or without ``padding`` only its exact
    size. If there is none it returns None, and the batch runs without a graph.

    Severed, a batch that is too large is cut to the largest graph that is not larger.
    """
    if not device.keeps(TOTAL_BUCKETS):
        return _cut_to_fit
    return _padded if padding else _exact


def _padded(sizes: Sequence[int], num: int) -> int | None:
    index = bisect_left(sizes, num)
    return sizes[index] if index < len(sizes) else None


def _exact(sizes: Sequence[int], num: int) -> int | None:
    return num if _padded(sizes, num) == num else None


def _cut_to_fit(sizes: Sequence[int], num: int) -> int:
    return sizes[max(bisect_right(sizes, num) - 1, 0)]
