"""LayerContext: what layers are made with, and which part of each layer this process holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fenceline.config.quantization import QuantConfig
from fenceline.layers.kernels.base import LayerKernels, TorchLayerKernels
from fenceline.layers.quantized import QuantizedFormat, QuantizedWeight, make_format
from fenceline.layers.weight import DenseWeight, RMSNorm, Weight
from fenceline.memory_order import Communicator
from fenceline.memory_order.kernel import is_watched

_CONVERTS_FP8 = (8, 9)  # the first compute capability with instructions for it


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` equal parts; ``Shard()`` is the whole, which needs no communicator."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None
    ep_size: int = 1  # parts of a mixture's experts; ``size / ep_size`` ranks share the features of one

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert self.size % self.ep_size == 0, f"{self.ep_size} parts for {self.size} ranks"

    def divide(self, total: int, what: str) -> int:
        """``total / size``. Raises ``ValueError`` naming ``what`` if ``size`` does not divide it."""
        if total % self.size:
            raise ValueError(
                f"{what} {total} cannot be split over {self.size} ranks; choose a tensor-parallel size that divides it"
            )
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' partial sums ``x`` added up, in the memory of ``x``."""
        if self.size == 1:
            return x
        assert self.communicator is not None, "an all-reduce needs a communicator"
        return self.communicator.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' columns ``x`` [..., n], concatenated."""
        if self.size == 1:
            return x
        assert self.communicator is not None, "an all-gather needs a communicator"
        return self.communicator.all_gather(x)

    def exchange(self, data: bytes) -> list[bytes]:
        """All ranks' ``data``, in the order of ranks, at start-up only."""
        assert self.communicator is not None, "ranks talk through a communicator"
        return self.communicator.exchange(data)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' ``value``, at start-up only."""
        if self.size == 1:
            return value
        assert self.communicator is not None, "ranks agree through a communicator"
        return self.communicator.smallest(value)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """``dense`` and ``linear`` make the weight of a matrix [out_features, in_features], uninitialised, on the default
    device: ``dense`` for embeddings and the head, ``linear`` for the projections, which may have another kind."""

    shard: Shard  # which part of each matrix this process holds
    kernels: LayerKernels
    dtype: torch.dtype  # of activations, norms and biases
    dense: Callable[[int, int], DenseWeight]
    linear: Callable[[int, int], Weight]
    quantized: Callable[[QuantizedFormat], Weight] = QuantizedWeight  # a weight with a number format inside

    kv_dtype: torch.dtype | None = None  # of keys and values in the pool; None: ``dtype``
    norm_offset: float = 0.0  # what is added to the weights of norms
    format: QuantConfig | None = None  # of ``linear``; None: plain numbers

    def with_format(self, config: QuantConfig | None) -> LayerContext:
        """The context for a model whose linear layers have the format ``config``; None: this one."""
        if config is None:
            return self
        quantized, dtype = self.quantized, self.dtype

        def linear(out_features: int, in_features: int) -> Weight:
            return quantized(make_format(config, out_features, in_features, dtype))

        return dataclasses.replace(self, linear=linear, format=config)

    def norm(self, size: int, eps: float) -> RMSNorm:
        """An RMSNorm over ``size`` features."""
        return RMSNorm(size, eps, self.dtype, self.kernels, self.norm_offset)


def make_layer_context(device: torch.device, shard: Shard, dtype: torch.dtype) -> LayerContext:
    """Our own kernels on an NVIDIA GPU (compiled on first use, which takes seconds, once), their launches where a
    device watches its memory, torch's operators elsewhere.

    Raises ``ValueError`` with the remedy for a GPU without Triton.
    """
    if is_watched(device):
        return _launched_context(shard, dtype)
    if device.type != "cuda":
        return torch_context(shard, dtype)
    try:
        from fenceline.layers.kernels.cuda_kernels import (
            CudaDenseWeight,
            CudaLayerKernels,
            find_skinny_products,
        )
        from fenceline.layers.kernels.cuda_quantized import CudaQuantizedWeight, find_quantized_products
    except ImportError as error:
        raise ValueError(
            f"--device cuda needs Triton ({error}): pip install 'fenceline[cuda]', or use --device cpu"
        ) from error
    products = find_skinny_products(device)

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return CudaDenseWeight(out_features, in_features, dtype, products)

    quantized_products = functools.cache(find_quantized_products)  # tried when the first such weight is made

    def quantized(stored: QuantizedFormat) -> Weight:
        return CudaQuantizedWeight(stored, quantized_products(device, stored.kind))

    return LayerContext(shard, CudaLayerKernels(device), dtype, dense, dense, quantized)


def _launched_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    from fenceline.layers.kernels.launched import LaunchedDenseWeight, LaunchedLayerKernels

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return LaunchedDenseWeight(out_features, in_features, dtype)

    return LayerContext(shard, LaunchedLayerKernels(), dtype, dense, dense)


def torch_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    """Torch's operators on any device. The CPU runs them, and they are the reference for our own kernels."""

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return DenseWeight(out_features, in_features, dtype)

    return LayerContext(shard, TorchLayerKernels(), dtype, dense, dense)


def fp8_kv_dtype(device: torch.device) -> torch.dtype:
    """The type of a KV cache in FP8. Raises ``ValueError`` with the remedy for a GPU that cannot convert it."""
    if not converts_fp8(device):
        raise ValueError(
            "--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9 or more: leave it out"
        )
    return torch.float8_e4m3fn


def converts_fp8(device: torch.device) -> bool:
    """Whether kernels on ``device`` can read numbers in FP8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _CONVERTS_FP8
