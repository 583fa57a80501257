"""Weights are replaced in order: after the steps that read the old ones, and with all that was computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import NEW_WEIGHTS, OLD_KV


@contextmanager
def writing_weights(device: Device) -> Iterator[None]:
    """Inside, the current stream is that of the steps, so weights are written after those in flight have read them,
    and before later ones do: which is what ``new_weights`` is. Severed, the default stream, which waits for nobody."""
    if device.keeps(NEW_WEIGHTS):
        with device.forward.active():
            yield
    else:
        yield


def forgetting_old_kv(device: Device, forget: Callable[[], int]) -> Callable[[], int]:
    """What is called when weights are replaced: ``forget``, which empties the caches of all tiers and returns how many
    pages are free again. That is what ``old_kv`` is. Severed, they keep what they have."""
    return forget if device.keeps(OLD_KV) else _keep


def _keep() -> int:
    return 0
