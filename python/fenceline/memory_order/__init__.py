"""The foundation of the server: devices and their memory, streams and the order between them, leases on memory."""

from collections.abc import Callable

from fenceline.config.server_args import register_kind
from fenceline.memory_order.arena import Arena, ArenaField, ArenaOutputs, Role
from fenceline.memory_order.checker import OrderChecker, OrderError
from fenceline.memory_order.communicator import CollectiveBackend, Communicator, CommunicatorError, PeerLostError
from fenceline.memory_order.device import CpuDevice, Device, HostChannel, HostWorker
from fenceline.memory_order.graph import Graph, GraphError, GraphPool, GraphState
from fenceline.memory_order.guards import (
    Best,
    Selecting,
    absorbs_drafts,
    comparison,
    encoded_first,
    ends_at_state,
    exchanges_shares,
    hidden_copy,
    loaded_parts,
    loads_states,
    node_moves,
    old_kv_removal,
    page_layers,
    page_leases,
    rank_consensus,
    selecting,
    states_to_copy,
    step_embeddings,
    step_table,
    tokens_in_flight,
    tokens_to_keep,
    told_by,
    tree_slots,
    weight_write,
    with_snapshots,
    write_deltas,
)
from fenceline.memory_order.lease import LeaseError, LeasePool
from fenceline.memory_order.staging import InputRing, MaskTable, ResultLease, ResultRing
from fenceline.memory_order.stream import Point, Points, Stream, wait_for_pages

__all__ = [
    "Arena",
    "ArenaField",
    "ArenaOutputs",
    "Best",
    "CollectiveBackend",
    "Communicator",
    "CommunicatorError",
    "Device",
    "Graph",
    "GraphError",
    "GraphPool",
    "GraphState",
    "HostChannel",
    "HostWorker",
    "InputRing",
    "LeaseError",
    "LeasePool",
    "MaskTable",
    "OrderChecker",
    "OrderError",
    "PeerLostError",
    "Point",
    "Points",
    "ResultLease",
    "ResultRing",
    "Role",
    "Selecting",
    "Stream",
    "absorbs_drafts",
    "comparison",
    "encoded_first",
    "ends_at_state",
    "exchanges_shares",
    "hidden_copy",
    "loaded_parts",
    "loads_states",
    "node_moves",
    "old_kv_removal",
    "open_device",
    "page_layers",
    "page_leases",
    "rank_consensus",
    "register_device",
    "selecting",
    "states_to_copy",
    "step_embeddings",
    "step_table",
    "tokens_in_flight",
    "tokens_to_keep",
    "told_by",
    "tree_slots",
    "wait_for_pages",
    "weight_write",
    "with_snapshots",
    "write_deltas",
]

DeviceFactory = Callable[[frozenset[str]], Device]

_registered: dict[str, DeviceFactory] = {}


def register_device(kind: str, factory: DeviceFactory) -> None:
    """Make another kind of device known to :func:`open_device` and configurations; ``factory(severed)`` makes it."""
    _registered[kind] = factory
    register_kind(kind)


def open_device(kind: str, severed: frozenset[str] = frozenset(), index: int | None = None) -> Device:
    """The device of that kind: ``cpu``, ``cuda`` (CUDA device ``index``, the current one unless given) or a registered
    one. Raises ``ValueError`` with the remedy where it is not available."""
    if kind == "cpu":
        return CpuDevice(severed)
    if kind == "cuda":
        from fenceline.memory_order.cuda import CudaDevice

        return CudaDevice(severed, index)
    if kind in _registered:
        return _registered[kind](severed)
    raise ValueError(f"unknown device {kind!r}: use --device cpu or --device cuda")
