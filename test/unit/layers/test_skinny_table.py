"""The choice of kernel for products of few rows: measured cuts where there are some, cuBLAS where ours cannot run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fenceline.layers.cuda_layers import is_right, probe_cut
from fenceline.layers.kernels.triton.skinny_gemm import Fusion, TritonConfig
from fenceline.layers.skinny_table import CudaConfig, GpuTraits, SkinnyTable, choice_to_json, load_table, table_key

H200 = GpuTraits(name="NVIDIA H200", num_sms=132, capability=(9, 0), has_cuda_kernels=True)
WITHOUT_NVCC = GpuTraits(name="NVIDIA H200", num_sms=132, capability=(9, 0), has_cuda_kernels=False)
UNKNOWN = GpuTraits(name="Some GPU", num_sms=80, capability=(8, 0), has_cuda_kernels=True)


@pytest.mark.parametrize("gpu", [H200, WITHOUT_NVCC, UNKNOWN])
def test_no_rows_are_nobodys_kernel(gpu: GpuTraits) -> None:
    """A prefill step in which no prompt is complete has no logits: memcheck's run found the launch of nothing."""
    assert load_table(gpu).choose(0, 151936, 1024, False) is None


def test_measured_cuts_are_taken_for_their_whole_bucket() -> None:
    table = load_table(H200)
    assert isinstance(table.choose(1, 6144, 4096, False), CudaConfig)
    assert table.choose(3, 6144, 4096, False) == table.choose(4, 6144, 4096, False)
    assert table.choose(16, 24576, 4096, True) is None  # cuBLAS measured better
    assert isinstance(table.choose(17, 6144, 4096, False), TritonConfig)
    assert table.choose(128, 6144, 4096, False) is None
    assert table.choose(129, 6144, 4096, False) is None  # nothing is measured for more rows


def test_without_the_cuda_package_no_choice_names_it() -> None:
    table = load_table(WITHOUT_NVCC)
    for rows in range(18):
        for shape in ((6144, 4096), (4096, 12288), (64, 64), (1000, 1024)):
            assert not isinstance(table.choose(rows, *shape, False), CudaConfig)


def test_k_that_cannot_be_read_in_16_bytes_goes_to_cublas() -> None:
    assert load_table(UNKNOWN).choose(1, 64, 100, False) is None


def test_choices_survive_the_file(tmp_path: Path) -> None:
    import json

    entries = {table_key(1, 64, 64, False): CudaConfig(tiles=2), table_key(2, 64, 64, True): None}
    text = json.dumps({"entries": {key: choice_to_json(choice) for key, choice in entries.items()}})
    (tmp_path / "Some_GPU.json").write_text(text)
    table = load_table(UNKNOWN, tmp_path)
    assert table.choose(1, 64, 64, False) == CudaConfig(tiles=2)
    assert table.choose(2, 64, 64, True) is None
    assert isinstance(SkinnyTable(UNKNOWN, {}).choose(1, 64, 64, False), CudaConfig)


def stand_in(
    weight: torch.Tensor, wrong: float, x: torch.Tensor, cut: CudaConfig, fusion: Fusion, out: torch.Tensor
) -> None:
    """A product by torch's operators, of which some are off by ``wrong``."""
    wide = x.float()
    if fusion.norm_weight is not None:
        wide = F.rms_norm(wide, fusion.norm_weight.shape, fusion.norm_weight.float(), fusion.eps)
    y = F.linear(wide, weight)
    if fusion.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if len(x) == 8 and fusion.residual is not None:
        y[-1] *= 1 + wrong
    out.copy_(y if fusion.residual is None else y + fusion.residual.float())


@pytest.mark.parametrize("wrong", [0.0, 0.5, float("nan")])
def test_a_skinny_gemm_that_is_wrong_at_start_is_not_used(wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    product = partial(stand_in, weight, wrong)
    cuts = ((1, probe_cut(2)), (8, probe_cut(4)))
    assert is_right("skinny GEMM", product, weight, cuts) is (wrong == 0)
    assert ("is wrong here" in caplog.text) is (wrong != 0)


def test_a_weight_without_measurements_takes_the_nearest_ones() -> None:
    """A quarter of Qwen3-8B's on each of four ranks: no kernel for these sizes is in the table."""
    table = load_table(H200)
    for rows in (1, 8, 32):
        assert table.choose(rows, 4096, 3072, False) == table.choose(rows, 4096, 4096, False) is not None
        assert table.choose(rows, 6144, 4096, True) == table.choose(rows, 12288, 4096, True) is not None
    far = table.choose(8, 4096, 65_536, False)
    assert far == SkinnyTable(H200, {}).choose(8, 4096, 65_536, False) != table.choose(8, 4096, 14_336, False)
    wide = SkinnyTable(H200, {table_key(1, 64, 1024, False): CudaConfig(warps_k=16)})
    assert wide.choose(1, 64, 512, False) == SkinnyTable(H200, {}).choose(1, 64, 512, False)


def test_more_rows_than_the_cuda_kernel_takes_are_tritons() -> None:
    cut = TritonConfig(64, 128, 4, 4)
    table = SkinnyTable(GpuTraits("x", 132, (9, 0), True), {table_key(32, 3072, 4096, False): cut})
    assert table.choose(17, 3072, 4096, False) == table.choose(32, 3072, 4096, False) == cut
    assert table.choose(33, 3072, 4096, False) is table.choose(17, 6150, 4096, False) is None
    assert table.choose(65, 3072, 4096, False) is None
