"""Footprints: the KV pages that a decode step accesses, compared with those that it has declared.

``--memory-check order`` knows of a step what is declared of it (``StepAccesses.decode``), and orders transfers by that.
A page that is accessed and not declared would be unknown to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fenceline.memory_order.access import Memory, PagedMemory, Rows
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.vgpu.device import VgpuDevice
from fenceline.vgpu.tags import Tags


class _Declared:
    """The pages of one operation: see ``memory_order.access.Accesses``."""

    def __init__(self, pages: PagedMemory) -> None:
        self._pages = pages
        self.read_there: set[int] = set()
        self.written_there: set[int] = set()

    def read(self, memory: Memory, rows: Rows | None = None) -> None:
        if memory is self._pages:
            self.read_there |= _numbers(rows)

    def write(self, memory: Memory, rows: Rows | None = None) -> None:
        if memory is self._pages:
            self.written_there |= _numbers(rows)

    def read_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self.read(memory, memory.pages_of(rows, lengths))

    def append_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self.read_pages(memory, rows, lengths)
        self.write(memory, memory.last_pages_of(rows, lengths))

    def write_table(self, memory: PagedMemory, rows: Rows, columns: Rows, pages: Rows) -> None:
        memory.write_table(rows, columns, pages)

    def release(self, memory: Memory) -> None:
        return

    def occupy_sm(self) -> None:
        return


def _numbers(rows: Rows | None) -> set[int]:
    assert rows is not None, "a step names its pages"
    return set(np.unique(rows).tolist())


def check_footprints(device: VgpuDevice, runner: ModelRunner, tags: Tags) -> None:
    """From now on give each decode step of ``tags`` the pages that ``runner`` declares for it."""
    accesses = runner._accesses

    def declared(stream: StreamName, label: str, names: Callable[..., None], *args: Any) -> None:
        if names != accesses.decode and names != accesses.extend:
            return
        op = _Declared(accesses.pages)
        names(op, *args)
        if names == accesses.decode:
            tags.declared(frozenset(op.read_there | op.written_there), frozenset(op.written_there))

    device._readers += (declared,)
