"""The order in which weights are replaced: after the steps that read the old ones. What was computed with the old ones
is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import NEW_WEIGHTS, OLD_KV


@contextmanager
def writing_weights(device: Device) -> Iterator[None]:
    """Guard ``new_weights``: inside, FORWARD is the current stream, so weights are written after the steps in flight
    have read them and before later steps do. Severed, it is the default stream, which waits for no other."""
    if device.keeps(NEW_WEIGHTS):
        with device.forward.active():
            yield
    else:
        yield


def forgetting_old_kv(device: Device, forget: Callable[[], int]) -> Callable[[], int]:
    """Guard ``old_kv``: what is called when weights are replaced, ``forget``, which empties the caches of all tiers and
    returns how many pages are free again. Severed, the caches keep what they have."""
    return forget if device.keeps(OLD_KV) else _keep


def _keep() -> int:
    return 0
