"""Which algorithm multiplies many rows: measured in turn on a hot GPU, taken only where it is clearly the faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fenceline.layers.kernels import many_rows
from fenceline.layers.kernels.cublaslt import Algorithm
from fenceline.layers.kernels.many_rows import MIN_ROWS, ManyRowsProducts, choose_product, measure
from fenceline.memory_order import open_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ([1.0], None),
        ([1.0, 2.0, 1.5], None),
        ([1.0, 0.99, 0.985], None),  # within what measurements differ by
        ([1.0, 0.97, 0.95], 2),
        ([1.0, 0.9, 0.95], 1),
    ],
)
def test_torchs_choice_stays_unless_another_is_clearly_faster(seconds: list[float], best: int | None) -> None:
    assert choose_product(seconds) == best


class Gpu:
    """Time passes in calls; each takes ``costs`` of its product, all twice as long once the GPU is hot."""

    def __init__(self, costs: list[float], hot_after_s: float) -> None:
        self.now, self.costs, self.hot_after_s = 0.0, costs, hot_after_s
        self.calls: list[int] = []
        self._queued = 0.0

    def product(self, index: int) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(index)
            self._queued += self.costs[index] * (2.0 if self.now > self.hot_after_s else 1.0)

        return call

    def synchronize(self) -> None:
        self.now += self._queued
        self._queued = 0.0

    def clock(self) -> float:
        return self.now


def test_all_are_measured_in_turn_when_the_gpu_is_hot() -> None:
    gpu = Gpu([0.001, 0.0005, 0.004], hot_after_s=0.06)
    seconds = measure([gpu.product(index) for index in range(3)], gpu.synchronize, gpu.clock)
    assert seconds == pytest.approx([0.002, 0.001, 0.008])
    turns = [index for index, before in zip(gpu.calls, [None, *gpu.calls], strict=False) if index != before]
    assert turns[3:] == [0, 1, 2] * 4
    assert gpu.calls.count(0) > 4 * 20, "long enough for the clock to follow the power"


class FakeCublas:
    """Three algorithms, of which the one at ``fast`` is the fastest; none takes an odd number of rows."""

    def __init__(self, device: torch.device) -> None:
        self.used: list[Algorithm] = []

    def proposals(self, rows: int, weight: torch.Tensor, most: int) -> list[Algorithm]:
        return [Algorithm((index,)) for index in range(3)]

    def accepts(self, rows: int, weight: torch.Tensor, algorithm: Algorithm) -> bool:
        return rows % 2 == 0

    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: Algorithm, out: torch.Tensor) -> None:
        self.used.append(algorithm)
        out.copy_(F.linear(x, weight))


def products(monkeypatch: pytest.MonkeyPatch, seconds: list[float], weight: torch.Tensor) -> ManyRowsProducts:
    monkeypatch.setattr(many_rows, "CublasLt", FakeCublas)
    monkeypatch.setattr(many_rows, "measure", lambda calls, synchronize: seconds[: len(calls)])
    monkeypatch.setattr(many_rows, "_MIN_WEIGHT_SIZE", 64)
    found = ManyRowsProducts(CPU)
    found.choose([weight, torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(99, 99)], open_device("cpu"))
    return found


def test_the_chosen_one_multiplies_the_rows_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(16, 8).bfloat16()
    found = products(monkeypatch, [1.0, 0.9, 0.8, 0.9], weight)
    x = torch.randn(MIN_ROWS + 1, 8).bfloat16()
    got = found(x[:-1], weight)
    assert got is not None
    torch.testing.assert_close(got, F.linear(x[:-1], weight))
    out = torch.empty(MIN_ROWS, 16, dtype=torch.bfloat16)
    assert found(x[1:], weight, out) is out
    torch.testing.assert_close(out, F.linear(x[1:], weight))
    assert found._cublas is not None
    assert [algorithm.data[0] for algorithm in found._cublas.used] == [1, 1]
    assert found(x, weight) is None, "an odd number: torch's"
    assert found(x[:10], weight) is None, "few rows: torch's"
    assert found(x[:-1], torch.randn(8, 8).bfloat16()) is None, "another shape: torch's"


def test_where_torchs_choice_is_as_good_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(16, 8).bfloat16()
    found = products(monkeypatch, [1.0, 0.99, 1.0, 1.0], weight)
    assert found(torch.randn(MIN_ROWS, 8).bfloat16(), weight) is None


def test_without_the_library_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> None:
        raise OSError("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setattr(many_rows, "CublasLt", missing)
    monkeypatch.setattr(many_rows, "_MIN_WEIGHT_SIZE", 64)
    weight = torch.randn(16, 8).bfloat16()
    found = ManyRowsProducts(CPU)
    found.choose([weight], open_device("cpu"))
    assert found(torch.randn(MIN_ROWS, 8).bfloat16(), weight) is None
