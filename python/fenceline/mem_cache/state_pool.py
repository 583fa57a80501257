"""StatePool: the states of recurrent layers, a slot for each request row and snapshots of these in further slots, with
which other requests begin."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from fenceline.config.engine_config import EngineConfig
from fenceline.config.state_layout import GRID, StateSpec
from fenceline.mem_cache.kv_pool import cache_budget, zeros
from fenceline.memory_order import Device, LeasePool

_ALIGNMENT = 16  # bytes, so that kernels may load vectors

logger = logging.getLogger(__name__)


class StatePool:
    """``num_rows`` slots of request rows, which have the rows' numbers, and after them those of ``num_snapshots``
    snapshots. ``layers`` has the tensors of each layer by the names of its spec: of what it carries [number of slots,
    *shape], of what it keeps [num_rows, length, *shape]. The carried parts of a slot lie together, so that one copy
    moves those of all layers, and neighbours in a tensor do not.

    A row's slot belongs to the request that has the row: it is leased and retired with it. Slot 0 is that of the sink,
    which padding reads and writes. Snapshots are leased from ``snapshots``, under the numbers of their slots.
    """

    def __init__(
        self,
        num_rows: int,
        num_snapshots: int,
        specs: Sequence[StateSpec],
        device: torch.device,
        grid: int = GRID,
        most_undone: int = 0,
    ) -> None:
        """``grid``: tokens between two states that a slot may carry. ``most_undone``: see ``TokenRow.length``."""
        num_slots = num_rows + num_snapshots
        self.grid = grid
        self.num_rows = num_rows
        # What the bytes of a snapshot are, the same for equal ones.
        self.description = f"states each {grid}: {[spec.carried for spec in specs]}"
        self.snapshots = LeasePool("state snapshots", num_slots, reserved=num_rows)
        self.carried = zeros((num_slots, carried_nbytes(specs)), torch.uint8, device)
        self.kept = zeros((num_rows, _kept_nbytes(specs, most_undone)), torch.uint8, device)
        self.layers: list[dict[str, torch.Tensor]] = []
        carried, kept = _Views(self.carried), _Views(self.kept)
        for spec in specs:
            tensors = {row.name: carried.next(row.shape, row.dtype) for row in spec.carried}
            for rows in spec.kept:
                shape = rows.length(most_undone), *rows.row.shape
                tensors[rows.row.name] = kept.next(shape, rows.row.dtype)
            self.layers.append(tensors)

    @property
    def nbytes(self) -> int:
        return self.carried.nbytes + self.kept.nbytes

    @property
    def of_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What layers change: all but the snapshots."""
        return self.carried[: self.num_rows], self.kept

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """For each (source, slot) in turn: ``slot`` carries what ``source`` does. Call on FORWARD only."""
        for source, slot in copies:
            self.carried[slot].copy_(self.carried[source])


class _Views:
    """Hands out tensors [N, *shape] that lie behind one another in each of ``slots`` [N, nbytes]."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self._first = 0

    def next(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        typed: torch.dtype = getattr(torch, dtype)
        first, nbytes = self._first, math.prod(shape) * typed.itemsize
        self._first += _aligned(nbytes)
        return self._slots[:, first : first + nbytes].view(typed).view(len(self._slots), *shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def carried_nbytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of a snapshot: what all layers carry."""
    return sum(_aligned(row.nbytes) for spec in specs for row in spec.carried)


def _kept_nbytes(specs: Sequence[StateSpec], most_undone: int) -> int:
    return sum(_aligned(rows.length(most_undone) * rows.row.nbytes) for spec in specs for rows in spec.kept)


def request_nbytes(specs: Sequence[StateSpec], most_undone: int) -> int:
    """Bytes of a running request: what all layers carry and keep."""
    return carried_nbytes(specs) + _kept_nbytes(specs, most_undone)


def most_running(config: EngineConfig, device: Device, specs: Sequence[StateSpec]) -> int:
    """``config.max_running_requests``; unless ``--max-running-requests`` is given no more than have room for their
    states and, if prefixes are cached, for a snapshot each. Raises ``ValueError`` with the remedy if the states of all
    that are asked for, or of one, have no room."""
    args, carried = config.server_args, carried_nbytes(specs)
    row_bytes = request_nbytes(specs, config.most_undone)
    budget = max(_share(config, device) - row_bytes, 0)  # without the sink
    most = config.max_running_requests
    if args.max_running_requests is None:
        with_snapshot = row_bytes + (0 if args.disable_radix_cache else carried)
        most = min(most, max(budget // with_snapshot, 1))
    if budget < most * row_bytes:
        raise ValueError(
            f"--max-running-requests {most}: the states of a request take {row_bytes / 1e6:.1f} MB, and"
            f" --mamba-full-memory-ratio {args.mamba_full_memory_ratio:g} leaves {budget / 1e9:.1f} GB for all of them;"
            f" give at most {budget // row_bytes}, or raise the ratio"
        )
    return most


def _share(config: EngineConfig, device: Device) -> int:
    """Bytes of the memory for the cache that states may take (``--mamba-full-memory-ratio``)."""
    ratio = config.server_args.mamba_full_memory_ratio
    return int(cache_budget(config, device, config.num_sharing) * ratio / (1 + ratio))


def num_snapshots(config: EngineConfig, device: Device, specs: Sequence[StateSpec]) -> int:
    """How many snapshots the pool has beside the slots of rows. ``--max-mamba-cache-size`` if given; else as many as
    fit into the states' share of the memory for the cache (``--mamba-full-memory-ratio``), but no more than prefixes
    of all running requests, for which there is room (``most_running``), can use. Raises ``ValueError`` with the remedy
    if not all that are wanted fit."""
    args, most, carried = config.server_args, config.max_running_requests, carried_nbytes(specs)
    row_bytes = request_nbytes(specs, config.most_undone)
    if args.disable_radix_cache:
        number = 0
    elif args.max_mamba_cache_size is not None:
        number = args.max_mamba_cache_size - most
        left = device.memory_info()[0] - (most + 1) * row_bytes
        if number * carried > left:
            raise ValueError(
                f"--max-mamba-cache-size {args.max_mamba_cache_size}: so many states take"
                f" {((most + 1) * row_bytes + number * carried) / 1e9:.1f} GB, more than there is beside the weights;"
                f" give at most {most + max(left, 0) // carried}, or leave it out"
            )
    else:
        # What has been allocated since the number of requests was found may have taken a little of their room.
        left = max(_share(config, device) - (most + 1) * row_bytes, 0)
        number = min(left // carried, most * (config.model.context_length // config.state_grid))
    logger.info(
        "States take %.2f GiB: of %d running requests, and %d snapshots",
        ((most + 1) * row_bytes + number * carried) / 2**30, most, number,
    )  # fmt: skip
    return number
