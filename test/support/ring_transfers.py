"""Uploads and downloads through the rings of memory_order that need every one of their edges."""

from __future__ import annotations

import numpy as np
import torch

from fenceline.memory_order import Device, InputRing, ResultRing


def ring_transfers(device: Device) -> list[int]:
    """Uploads without waits, then results that are taken late. Returns the values of the results, each twice."""
    inputs, results, small = InputRing(device), ResultRing(device), ResultRing(device, small_by_forward=True)
    taken: list[int] = []
    pending = []
    with torch.inference_mode():
        for step in range(6):
            for part in range(3):
                views = inputs.upload({"x": np.array([step * 10 + part], dtype=np.int64)})
            with device.forward.active():
                doubled = views["x"] * 2
            # COPY waits for FORWARD, so a host that has waited for COPY need not wait for FORWARD.
            more = {"more": doubled} if step % 2 else {}  # several are packed first
            pending.append((small.download({"y": doubled} | more), results.download({"y": doubled})))
            if len(pending) == 2:
                taken += [value for lease in pending.pop(0) for value in lease.wait()["y"].tolist()]
        taken += [value for lease in pending.pop() for value in lease.wait()["y"].tolist()]
    device.synchronize()
    return taken
