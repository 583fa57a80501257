"""Which LayerKernels a device gets."""

from __future__ import annotations

import torch

from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.torch_kernels import TorchLayerKernels


def make_layer_kernels(device: torch.device) -> LayerKernels:
    """Our own kernels on an NVIDIA GPU, torch's operators elsewhere.

    Raises ``ValueError`` with the remedy for a GPU without Triton.
    """
    if device.type != "cuda":
        return TorchLayerKernels()
    try:
        from fenceline.layers.kernels.cuda_kernels import make_cuda_kernels
    except ImportError as error:
        raise ValueError(
            f"--device cuda needs Triton ({error}): pip install 'fenceline[cuda]', or use --device cpu"
        ) from error
    return make_cuda_kernels(device)
