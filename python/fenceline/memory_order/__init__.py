"""The foundation: where memory lives, what runs in which order, who owns what until when."""

from fenceline.memory_order.arena import Arena, ArenaField, ArenaOutputs, Role
from fenceline.memory_order.checker import OrderChecker, OrderError
from fenceline.memory_order.device import Device, open_device, register_device
from fenceline.memory_order.graph import Graph, GraphError, GraphPool, GraphState
from fenceline.memory_order.host_threads import HostChannel, HostWorker
from fenceline.memory_order.lease import LeaseError, LeasePool, page_leases
from fenceline.memory_order.relocation import RelocationClock, Stamp, comparison
from fenceline.memory_order.staging import InputRing, ResultLease, ResultRing
from fenceline.memory_order.stream import Point, Points, Stream, wait_for_pages

__all__ = [
    "Arena",
    "ArenaField",
    "ArenaOutputs",
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
    "OrderChecker",
    "OrderError",
    "Point",
    "Points",
    "RelocationClock",
    "ResultLease",
    "ResultRing",
    "Role",
    "Stamp",
    "Stream",
    "comparison",
    "open_device",
    "page_leases",
    "register_device",
    "wait_for_pages",
]
