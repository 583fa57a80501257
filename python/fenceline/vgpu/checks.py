"""Checks: what a program asks of its memory beside order. Nothing is asked of memory that nobody has named here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fenceline.vgpu.errors import CheckError
from fenceline.vgpu.findings import Findings
from fenceline.vgpu.memory import Tag
from fenceline.vgpu.operation import Operation, here
from fenceline.vgpu.watch import Fill, Watch, check, outlived, protected_write


class Checks:
    """Those of one virtual GPU. ``moment`` counts: operations submitted later have a greater ``seq``."""

    def __init__(self, findings: Findings, moment: Callable[[], int], enabled: bool) -> None:
        self.enabled = enabled
        self._findings = findings
        self._moment = moment

    def begin_fill(self, tensors: Sequence[torch.Tensor], guard: str = "") -> None:
        """Whoever reads ``tensors`` from now on must find what is written from now on; leased views of them end.

        ``guard`` is what reports call the mechanism that sees to it.
        """
        if self.enabled:
            fill = Fill(self._moment(), here(), guard)
            for tensor in tensors:
                _watch(tensor).begin_fill(fill)

    def protect_from_graphs(self, tensor: torch.Tensor, guard: str = "") -> None:
        """No graph may write the memory of ``tensor``, or ``ProtectionError`` is raised at capture or replay."""
        if self.enabled:
            _watch(tensor).protected_by = guard

    def lease(self, tensor: torch.Tensor) -> None:
        """``tensor`` and views made of it are good until the next ``begin_fill`` of their memory."""
        if self.enabled:
            tensor.generation = _watch(tensor).generation  # type: ignore[attr-defined]

    # --- for the rest of vgpu --------------------------------------------------------------------------

    def run(self, op: Operation) -> None:
        """``op`` is about to run."""
        if self.enabled:
            errors = check(op)
            if errors:
                self._findings.add_errors(errors)

    def use(self, tag: Tag, generation: int) -> None:
        """A view leased in ``generation`` is used."""
        if tag.watch is not None and tag.watch.generation != generation:
            self.found(outlived(tag, generation, here()))

    def graph_write(self, op: Operation, tag: Tag, graph: str) -> None:
        """``op`` of ``graph`` writes the memory of ``tag``, at every replay."""
        error = protected_write(op, tag, graph)
        if error is not None:
            self.found(error)

    def found(self, error: CheckError) -> None:
        """Something is wrong: raise it, or keep it."""
        if self.enabled:
            self._findings.add_errors([error])


def _watch(tensor: torch.Tensor) -> Watch:
    tag: Tag = tensor.allocation.tag  # type: ignore[attr-defined]
    if tag.watch is None:
        tag.watch = Watch(tag)
    return tag.watch
