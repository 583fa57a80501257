"""Products of many rows with a large weight: which of cuBLAS' algorithms is the fastest here, measured at start.

Long prefill is bound by the GPU's power: its clock sinks until the power fits, so the algorithm that moves the fewest
bytes wins, which cuBLAS' own order does not know. On an H200 another than the first does the 8B's gate and up product,
half of all its work, 4.7 % faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from fenceline.layers.kernels.cublaslt import Algorithm, CublasLt
from fenceline.memory_order import Device

logger = logging.getLogger(__name__)

# With fewer rows torch's choice is taken.
MIN_ROWS = 1024
_MEASURED_ROWS = 2048
# Smaller weights' products end before anything could be won (0.2 ms of one H200), and measuring is time at start.
_MIN_WEIGHT_SIZE = 32 << 20
_MAX_PROPOSALS = 8
# Another algorithm must be so much faster, for measurements differ by 1 % and equal choices keep results equal.
_MARGIN = 0.02
_NUM_ROUNDS = 3
_ROUND_S = 0.025  # long enough for the clock to follow the power

Product = Callable[[], object]


class ManyRowsProducts:
    """The chosen algorithms by the shape of the weight."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._cublas: CublasLt | None = None
        self._chosen: dict[tuple[int, int], Algorithm] = {}
        self._accepted: dict[tuple[int, int, int], bool] = {}  # by rows and the weight's shape

    def choose(self, weights: Sequence[torch.Tensor], device: Device) -> None:
        """Measure the products of ``weights``, one of each shape that is to be multiplied without a bias; nothing is
        done for small ones. At start: waits for the device and needs memory for a step's activations."""
        device.synchronize()  # the weights were written on the default stream
        for weight in weights:
            shape = (weight.shape[0], weight.shape[1])
            if weight.numel() < _MIN_WEIGHT_SIZE or weight.dtype == torch.float32 or shape in self._chosen:
                continue
            try:
                self._cublas = self._cublas or CublasLt(self._torch_device)
            except (OSError, RuntimeError) as error:
                logger.info("cuBLAS' other algorithms are not tried: %s", error)
                return
            proposals = self._cublas.proposals(_MEASURED_ROWS, weight, _MAX_PROPOSALS)
            best = self._fastest(weight, proposals, device)
            if best is not None:
                self._chosen[shape] = proposals[best]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """x [T, K] times weight [N, K] transposed → [T, N], in ``out`` if given; None: torch does it as well."""
        rows, (n, k) = x.shape[0], weight.shape
        if rows < MIN_ROWS:
            return None
        algorithm = self._chosen.get((n, k))
        if algorithm is None:
            return None
        assert self._cublas is not None
        accepted = self._accepted.get((rows, n, k))
        if accepted is None:
            accepted = self._accepted[rows, n, k] = self._cublas.accepts(rows, weight, algorithm)
        if not accepted:
            return None
        if out is None:
            out = x.new_empty(rows, n)
        self._cublas.linear(x, weight, algorithm, out)
        return out

    def _fastest(self, weight: torch.Tensor, proposals: Sequence[Algorithm], device: Device) -> int | None:
        """The proposal to take instead of torch's choice, None to stay with that."""
        cublas = self._cublas
        assert cublas is not None
        with device.forward.active():
            x = torch.randn(_MEASURED_ROWS, weight.shape[1], device=weight.device).to(weight.dtype)
            out = x.new_empty(_MEASURED_ROWS, weight.shape[0])
            products: list[Product] = [lambda: F.linear(x, weight)]
            for proposal in proposals:
                products.append(lambda chosen=proposal: cublas.linear(x, weight, chosen, out))  # type: ignore[misc]
            seconds = measure(products, device.synchronize)
        best = choose_product(seconds)
        if best is None:
            return None
        logger.info(
            "Products with the weight of %d x %d: cuBLAS' proposal %d of %d, %.1f %% faster than torch's choice",
            *(*weight.shape, best, len(proposals), 100 * (seconds[0] / seconds[best] - 1)),
        )
        return best - 1


def choose_product(seconds: Sequence[float]) -> int | None:
    """The fastest of the products, of which the first is torch's; None unless it is clearly faster than that."""
    best = min(range(len(seconds)), key=lambda index: seconds[index])
    return best if seconds[best] < seconds[0] * (1 - _MARGIN) else None


def measure(
    products: Sequence[Product],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds that a call of each takes, on the mean of some rounds in which all have their turn. A round before them
    heats the GPU and does not count."""
    num_calls, seconds = [], [0.0] * len(products)
    for product in products:
        product()  # loads what it needs
        synchronize()
        begin = clock()
        product()
        synchronize()
        num_calls.append(max(1, round(_ROUND_S / (clock() - begin))))
    for number in range(_NUM_ROUNDS + 1):
        for index, product in enumerate(products):
            begin = clock()
            for _ in range(num_calls[index]):
                product()
            synchronize()
            if number:
                seconds[index] += (clock() - begin) / num_calls[index] / _NUM_ROUNDS
    return seconds
