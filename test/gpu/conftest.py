"""What tests of kernels on a GPU share."""

from __future__ import annotations

import pytest
import torch

from fenceline.layers.cuda_layers import CudaProduct, _find_cuda_product


@pytest.fixture(params=[False, True], ids=["plain", "pdl"])
def pdl(request: pytest.FixtureRequest) -> bool:
    """Programmatic dependent launch, where the GPU has it."""
    wanted: bool = request.param
    if wanted and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    return wanted


@pytest.fixture(scope="session")
def product() -> CudaProduct:
    """fenceline_kernel's product of few rows."""
    found = _find_cuda_product(torch.device("cuda"))
    if found is None:
        pytest.skip("fenceline_kernel cannot be used here")
    return found
