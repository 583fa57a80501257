"""The audit of what operations of the virtual GPU declare: it runs each twice and compares every byte that it could
reach.

An operation fails if bytes outside its declared writes changed, or if the values it wrote change when everything that
it did not declare as read is poisoned first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conformance_vgpu import make_gpu
from scheduler_driver import answers
from tiny_model import tiny_driver, tiny_requests

from fenceline.memory_order.kernel import Kernel, declared, register_launcher
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim import VgpuDevice, backend
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


class AuditError(CheckError, checker="audit"):
    """An operation touched memory that it had not declared."""


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


# --- what it finds


def test_audit_finds_an_undeclared_write() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x = torch.zeros(8, device=device)

    def kernel(x: torch.Tensor) -> None:
        x[:5] = 1

    declared("kernel", "x first", "-> first").launch(lambda x, first: kernel(x), x, x[:4])
    with pytest.raises(AuditError, match=r"kernel writes tensor \[8\].*bytes 1[678]\.\.20 without declaring"):
        gpu.synchronize_all()


def test_audit_finds_an_undeclared_read() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x, y = torch.ones(8, device=device), torch.zeros(4, device=device)

    def kernel(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x[4:])

    declared("kernel", "x y first", "first -> y").launch(lambda x, y, first: kernel(x, y), x, y, x[:4])
    with pytest.raises(AuditError, match="depends on memory that it does not declare"):
        gpu.synchronize_all()


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_accumulating_operators_of_torch_declare_that_they_read() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x, rows = torch.ones(4, 2, device=device), torch.tensor([1, 1, 3], device=device)
    x.index_put_((rows,), torch.ones(3, 2, device=device), accumulate=True)
    x.scatter_(0, torch.zeros(1, 2, dtype=torch.int64, device=device), x[1:2].clone(), reduce="add")
    x.index_add_(0, rows, torch.ones(3, 2, device=device))
    assert x[:, 0].tolist() == [4.0, 5.0, 1.0, 3.0]


@pytest.mark.parametrize("flags", [{}, {"cuda_graph_bs": (2, 4), "context_length": 64}], ids=["eager", "graphs"])
def test_the_engines_operators_touch_what_they_declare(flags: dict[str, object]) -> None:
    gpu = VirtualGpu()
    auditor = Auditor(gpu)
    expected = answers(tiny_driver("cpu", **flags), tiny_requests(2))
    assert answers(tiny_driver(VgpuDevice(gpu=gpu), **flags), tiny_requests(2)) == expected
    assert auditor.num_audited > 500


@pytest.mark.parametrize("workload", ["conversations", "experts", "speculation_trees", "flashinfer", "launched"])
def test_the_engines_kernels_touch_what_they_declare(workload: str) -> None:
    """Of all memory of their operands, whether they declare an access to it or not."""
    scenario, gpu = WORKLOADS[workload].make(Random(2)), VirtualGpu()
    auditor = LaunchAuditor(gpu, num_each=2)
    try:
        loop = Loop(make_config(scenario.flags, "vgpu"), VgpuDevice(gpu=gpu), scenario=scenario)
        auditor.start()
        loop.run()
    finally:
        register_launcher("vgpu", launch_declared)
    assert len(auditor.nums) > 5 and "skinny_linear" in auditor.nums
