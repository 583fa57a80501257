"""Which LayerKernels a device gets."""

from __future__ import annotations

import logging

import torch

from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.torch_kernels import TorchLayerKernels

logger = logging.getLogger(__name__)


def make_layer_kernels(device: torch.device) -> LayerKernels:
    """Our own kernels on an NVIDIA GPU, torch's operators elsewhere or where Triton is not installed."""
    if device.type != "cuda":
        return TorchLayerKernels()
    try:
        from fenceline.layers.kernels.cuda_kernels import make_cuda_kernels
    except ImportError as error:
        logger.warning(
            "Layers run on torch's operators, slowly: Triton is missing (%s); pip install 'fenceline[cuda]'",
            error,
        )
        return TorchLayerKernels()
    return make_cuda_kernels(device)
