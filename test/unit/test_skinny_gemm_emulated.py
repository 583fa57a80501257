"""The CUDA skinny GEMM without a GPU: its source on the emulation of sgl-kernel/tests/skinny_emulation.cpp.

There, asynchronous copies land as late or as early as they may, and the outputs of the preceding kernel appear only
once every thread waits for them; what is read too early is NaN.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2] / "sgl-kernel"
Emulate = Callable[..., bytes | None]

# tiles, warps_n, warps_k, depth, cluster, num_ctas, prefetch_bytes
CUTS = (
    (2, 1, 2, 2, 1, 0, 0),
    (2, 2, 2, 6, 1, 0, 128),
    (4, 1, 1, 3, 1, 1, 0),
    (3, 2, 1, 4, 1, 2, 0),
    (2, 1, 2, 2, 2, 2, 0),
    (2, 2, 1, 3, 4, 0, 64),
)
SHAPES = ((48, 256), (40, 136))  # weight rows and K: whole tiles, ragged ones
ROWS = (1, 8, 11, 16)


class Request(ctypes.Structure):
    """fenceline::SkinnyGemmRequest."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "norm_weight", "bias", "residual", "out")),
        *((name, ctypes.c_int32) for name in ("rows", "num_out", "k")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("gated", "tiles", "warps_n", "warps_k", "depth", "cluster")),
        *((name, ctypes.c_int32) for name in ("num_ctas", "prefetch_bytes", "pdl", "reserved")),
    )


def build(folder: Path, *replacements: tuple[str, str]) -> Emulate:
    """The emulation, with each first text of ``replacements`` in the kernel's source replaced by the second."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source = (ROOT / "csrc/skinny_kernel.cuh").read_text()
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    (folder / "skinny_kernel.cuh").write_text(source)
    library = folder / "emulation.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}", f"-I{ROOT / 'include'}"]
    command += ["-DFENCELINE_ONE_KERNEL"] if replacements else []
    subprocess.run([*command, str(ROOT / "tests/skinny_emulation.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).fenceline_emulate_skinny_gemm
    function.restype = ctypes.c_char_p
    emulate: Emulate = function
    return emulate


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    return build(tmp_path_factory.mktemp("skinny"))


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A bfloat16 copy that starts at a multiple of 16 bytes."""
    room = torch.empty(values.numel() + 8, dtype=torch.bfloat16)
    start = -room.data_ptr() % 16 // 2
    return room[start : start + values.numel()].view(values.shape).copy_(values)


def relative_error(
    emulate: Emulate, cut: tuple[int, ...], rows: int, shape: tuple[int, int], kind: str, eager: int
) -> float:
    n, k = shape
    gated, normed = kind == "gated", kind in ("norm", "gated")
    num_out = n // 2 if gated else n
    x, weight, norm = (
        aligned(torch.randn(rows, k)),
        aligned(torch.randn(n, k) / k**0.5),
        aligned(torch.randn(k)),
    )
    bias = torch.randn(n).bfloat16() if n == 40 else None
    residual = torch.randn(rows, num_out).bfloat16() if kind == "residual" else None
    wide = F.rms_norm(x.double(), (k,), norm.double(), 1e-6) if normed else x.double()
    want = F.linear(wide, weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = F.silu(gate) * up
    if residual is not None:
        want = want + residual.double()
    out = torch.full((rows, num_out), float("nan"), dtype=torch.bfloat16) if residual is None else residual
    optional = (norm if normed else None, bias, residual)
    pointers = [tensor if tensor is None else tensor.data_ptr() for tensor in optional]
    request = Request(
        x.data_ptr(), weight.data_ptr(), *pointers, out.data_ptr(), rows, num_out, k, 1e-6, gated, *cut, 1, 0
    )
    assert emulate(ctypes.byref(request), eager) is None
    return ((out.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_agrees_with_float64(emulate: Emulate, cut: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for (number, rows), shape in itertools.product(enumerate(ROWS), SHAPES):
        for eager, kind in enumerate(("plain", "norm", "gated", "residual")):
            if (kind == "gated" and cut[0] * cut[1] % 2) or (cut[0] == 3 and rows > 8):
                continue
            error = relative_error(emulate, cut, rows, shape, kind, (eager + number) % 2)
            assert error < 6e-3, (rows, shape, kind, error)


@pytest.mark.parametrize(
    ("old", "new", "eager"),
    [
        ("wait_for_oldest(p.depth);", "wait_for_oldest(p.depth + 1);", 0),
        ("wait_for_previous_kernel();", "", 0),
        ("    store_partial_sums(acc, square, kNorm && first && warp_n == 0);\n    __syncthreads();",
         "    store_partial_sums(acc, square, kNorm && first && warp_n == 0);", 0),
        ("__syncthreads();\n    cluster_barrier();", "", 0),
    ],
    ids=["copies", "kernel in front", "partial sums", "cluster"],
)  # fmt: skip
def test_each_wait_is_needed(tmp_path: Path, old: str, new: str, eager: int) -> None:
    torch.manual_seed(0)
    broken = build(tmp_path, (old, new))
    error = relative_error(broken, (2, 1, 2, 2, 2, 2, 0), 8, SHAPES[0], "residual", eager)
    assert not error < 6e-3


@pytest.mark.parametrize(
    ("cut", "rows", "said"),
    [
        ((4, 1, 2, 2, 1, 0, 0), 17, b"rows"),
        ((1, 1, 2, 2, 1, 0, 0), 1, b"tiles"),
        ((3, 1, 2, 2, 1, 0, 0), 9, b"3 for up to 8 rows"),
        ((2, 1, 2, 5, 1, 0, 0), 1, b"stages"),
        ((2, 1, 2, 2, 2, 3, 0), 1, b"num_ctas"),
    ],
)
def test_bad_requests_are_refused(emulate: Emulate, cut: tuple[int, ...], rows: int, said: bytes) -> None:
    zeros = torch.zeros(64, 64, dtype=torch.bfloat16)
    at = aligned(zeros).data_ptr()
    error = emulate(ctypes.byref(Request(at, at, None, None, None, at, rows, 16, 64, 0.0, 0, *cut, 1, 0)), 0)
    assert error is not None and said in error
