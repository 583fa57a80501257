"""Arena: the static memory of graphs. Every field is declared, with the value that its padded rows have.

Three roles, which are three different memories (F9): a PLAN field is written by ``fill`` alone, once for a batch; an
INPUT field is derived from it, or advanced, by every replay; an OUTPUT field is written by a replay, and is leased
until the next one (F8). ``fill`` always writes head and tail (F7): a padded row never holds an earlier batch's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from fenceline.memory_order.device import Device, FillField
from fenceline.memory_order.edges import ARENA_PAD, PLAN_SOURCE, TOTAL_BUCKETS, Guard
from fenceline.memory_order.guards import derived_field, pad_value, padded_fields
from fenceline.memory_order.lease import LeaseError


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
        self.pads = {field.name: pad_value(device, field.pad) for field in fields}
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
        its own (F9)."""
        return self._tensors[derived_field(self._device, name, source)]

    def fill(self, sources: Mapping[str, torch.Tensor], num_live: int, num_rows: int | None = None) -> None:
        """Give the first ``num_live`` rows of every PLAN field the values of ``sources`` [num_live, *shape], its other
        rows and all of the INPUT fields their pads. On FORWARD, in one launch where the device can. ``num_rows``: how
        many rows the next replays read, all by default; the rest keep what they have. Raises ``ValueError`` unless
        ``sources`` are exactly the PLAN fields."""
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
        self._device.fill_rows(padded_fields(self._device, work))

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
