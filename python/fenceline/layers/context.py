"""LayerContext: what every layer of a model is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.torch_kernels import TorchLayerKernels
from fenceline.layers.norm import RMSNorm
from fenceline.layers.shard import Shard
from fenceline.layers.weight import DenseWeight, Weight


@dataclass(frozen=True, slots=True)
class LayerContext:
    """``dense`` and ``linear`` make the weight of a matrix [out_features, in_features], uninitialised, on the default
    device: ``dense`` for embeddings and the head, ``linear`` for the projections, which may have another kind."""

    shard: Shard  # which part of each matrix this process holds
    kernels: LayerKernels
    dtype: torch.dtype  # of activations, norms and biases
    dense: Callable[[int, int], DenseWeight]
    linear: Callable[[int, int], Weight]

    def norm(self, size: int, eps: float) -> RMSNorm:
        """An RMSNorm over ``size`` features."""
        return RMSNorm(size, eps, self.dtype, self.kernels)


def make_layer_context(device: torch.device, shard: Shard, dtype: torch.dtype) -> LayerContext:
    """Our own kernels on an NVIDIA GPU (compiled on first use, which takes seconds, once), torch's operators elsewhere.

    Raises ``ValueError`` with the remedy for a GPU without Triton.
    """
    if device.type != "cuda":
        return torch_context(shard, dtype)
    try:
        from fenceline.layers.kernels.cuda_kernels import (
            CudaDenseWeight,
            CudaLayerKernels,
            find_skinny_products,
        )
    except ImportError as error:
        raise ValueError(
            f"--device cuda needs Triton ({error}): pip install 'fenceline[cuda]', or use --device cpu"
        ) from error
    products = find_skinny_products(device)

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return CudaDenseWeight(out_features, in_features, dtype, products)

    return LayerContext(shard, CudaLayerKernels(device), dtype, dense, dense)


def torch_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    """Torch's operators on any device: what a CPU and the virtual GPU run, and the reference for our own kernels."""

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return DenseWeight(out_features, in_features, dtype)

    return LayerContext(shard, TorchLayerKernels(), dtype, dense, dense)
