"""The audit of what operations of the virtual GPU declare: it runs each twice and compares every byte that it could
reach.

An operation fails if bytes outside its declared writes changed, or if the values it wrote change when everything that
it did not declare as read is poisoned first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.kernel import Kernel, register_launcher
from fenceline_sim import backend
from fenceline_sim.errors import CheckError
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.kernels import launch_declared
from fenceline_sim.memory import Access, Accesses, Region, Tag, row_values
from fenceline_sim.streams import Operation
from fenceline_sim.tensor import VTensor

Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

# Operators that draw random numbers: two runs of these may differ.
_DRAWING = ("rand", "uniform", "normal", "bernoulli", "multinomial", "dropout", "exponential")


class AuditError(CheckError):
    """An operation touched memory that it had not declared."""

    checker = "audit"


class Auditor:
    """Runs all operations of ``gpu`` under audit. Costs several times the operation and all memory that it names."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.num_audited = 0
        gpu.execute = self.run

    def run(self, op: Operation) -> None:
        """Run ``op``. Raises ``AuditError``."""
        self._twice(op, ())

    def _twice(self, op: Operation, others: Sequence[Tag]) -> None:
        """Run ``op``, and again for the check. Raises ``AuditError`` naming the operation, the memory and the bytes.
        ``others``: memory that it could reach, whether it declares an access to it or not."""
        assert op.run is not None, "marks and waits touch no memory"
        regions = {tag.region: tag for tag in (*others, *(access.tag for access in (*op.reads, *op.writes)))}
        read = {region: _mask(op.reads, region) for region in regions}
        written = {region: _mask(op.writes, region) for region in regions}
        before = {region: _bytes(region).copy() for region in regions}
        op.run()
        after = {region: _bytes(region).copy() for region in regions}
        for region, tag in regions.items():
            changed = (before[region] != after[region]) & ~written[region]
            if changed.any():
                raise AuditError(f"{op.label} writes {tag} {_span(changed)} without declaring it\n  at {op.place}")
        if any(word in op.label for word in _DRAWING):
            return
        self.num_audited += 1
        for region in regions:
            _bytes(region)[:] = before[region]
            _poison(region, ~read[region])
        poisoned = {region: _bytes(region).copy() for region in regions}
        self._again(op)
        for region, tag in regions.items():
            # An operation may leave some of the declared bytes unwritten, in both runs.
            left = (after[region] == before[region]) & (_bytes(region) == poisoned[region])
            differs = (_bytes(region) != after[region]) & written[region] & ~left
            _bytes(region)[:] = after[region]
            if differs.any():
                raise AuditError(
                    f"{op.label} depends on memory that it does not declare as read: {tag} {_span(differs)} came out "
                    f"differently when that was poisoned\n  at {op.place}"
                )

    def _again(self, op: Operation) -> None:
        assert op.run is not None, "it ran a moment ago"
        try:
            op.run()
        except Exception as error:
            raise AuditError(
                f"{op.label} fails when memory that it does not declare as read is poisoned: {error}\n  at {op.place}"
            ) from error


class LaunchAuditor(Auditor):
    """Audits the first ``num_each`` launches of each declared kernel from its :meth:`start` on, with all memory of its
    operands. Made before the engine, so that it knows the launches that graphs replay.

    Kernels of attention are left out: their reference implementations gather masked tokens as well.
    """

    def __init__(self, gpu: VirtualGpu, num_each: int) -> None:
        self.num_audited = 0
        self.nums: Counter[str] = Counter()
        self._gpu, self._num_each = gpu, num_each
        self._operands: dict[str, set[Tag]] = defaultdict(set)  # by kernel
        register_launcher(backend.NAME, self._launch)

    def start(self) -> None:
        """The engine is about to work."""
        self._gpu.execute = self.run

    def _launch(self, kernel: Kernel, compute: Callable[..., None], operands: tuple[Any, ...]) -> None:
        if self.nums[kernel.name] < self._num_each:
            self._operands[kernel.name] |= {one.allocation.tag for one in operands if isinstance(one, VTensor)}
        launch_declared(kernel, compute, operands)

    def run(self, op: Operation) -> None:
        """Run ``op``. Raises ``AuditError``."""
        assert op.run is not None, "marks and waits touch no memory"
        is_attention = any(callable(access.rows) for access in op.reads)
        if op.label in self._operands and self.nums[op.label] < self._num_each and not is_attention:
            self.nums[op.label] += 1
            self._twice(op, [tag for tag in self._operands[op.label] if not tag.ended])
        else:
            op.run()


def _bytes(region: Region) -> Bytes:
    values: Bytes = region.bytes.numpy()
    return values


def _poison(region: Region, where: Mask) -> None:
    kept = _bytes(region).copy()
    region.poison()
    np.copyto(_bytes(region), kept, where=~where)


def _mask(accesses: Accesses, region: Region) -> Mask:
    mask = np.zeros(region.capacity, np.bool_)
    for access in accesses:
        if access.tag.region is region:
            for first, last in ranges_of(access):
                mask[first:last] = True
    return mask


def ranges_of(access: Access) -> list[tuple[int, int]]:
    """The bytes that ``access`` covers, as half-open ranges. The numbers of its rows are read from memory now."""
    if access.rows is None:
        return list(access.layout.ranges)
    form, num_rows = access.layout.form, access.layout.form.shape[0]
    step = form.stride[0] * form.itemsize
    start, span = access.layout.offset * form.itemsize, form.nbytes - (num_rows - 1) * step
    rows = row_values(access.rows)
    rows = np.where(rows < 0, rows + num_rows, rows)
    return [(start + row * step, start + row * step + span) for row in rows.tolist() if 0 <= row < num_rows]


def _span(mask: Mask) -> str:
    where = np.flatnonzero(mask)
    return f"bytes {where[0]}..{where[-1] + 1}"
