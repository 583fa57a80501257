"""The CUDA skinny GEMM without a GPU, with plain and with quantised weights: its source on the emulation of
sgl-kernel/tests/skinny_emulation.cpp.

There, asynchronous copies land as late or as early as they may, and the outputs of the preceding kernel appear only
once every thread waits for them; what is read too early is NaN.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fenceline.config.quantization import QuantConfig
from fenceline.layers.quantized import FP8, make_format
from fenceline.layers.weight import fill_slots

ROOT = Path(__file__).parents[3] / "sgl-kernel"
Emulate = Callable[..., bytes | None]

# tiles, warps_n, warps_k, depth, cluster, num_ctas, prefetch_bytes
CUTS = (
    (2, 1, 2, 2, 1, 0, 0),
    (2, 2, 2, 6, 1, 0, 128),
    (4, 1, 1, 3, 1, 1, 0),
    (3, 2, 1, 4, 1, 2, 0),
    (2, 1, 2, 2, 1, 1, 0),
    (2, 1, 2, 2, 2, 2, 0),
    (2, 2, 1, 3, 4, 0, 64),
)
SHAPES = ((48, 256), (40, 136))  # weight rows and K: whole tiles, ragged ones
ROWS = (1, 8, 11, 16)
# Numbers of the source, their bits and how many have one scale; weight rows and K.
QUANTISED = {
    "kFp8": (8, 0, ((48, 512), (44, 272))),
    "kFp8Groups": (8, 128, ((48, 512), (44, 272))),
    "kInt4": (4, 128, ((48, 1024), (80, 384))),
    "kInt4Groups": (4, 32, ((48, 1024), (80, 288))),
}
# Of the direct kernel, from which weights go into registers: warps_n, warps_k, depth.
DIRECT_CUTS = ((1, 3, 2), (2, 1, 4), (1, 12, 2), (3, 2, 4))
DIRECT_SHAPES = {"kFp8": ((48, 512), (44, 320)), "kInt4": ((48, 1024), (80, 384))}
QUANTISED_CUTS = ((2, 1, 2, 2, 1, 0, 0), (6, 1, 1, 3, 1, 1, 64), (2, 2, 1, 4, 2, 2, 128))


class Request(ctypes.Structure):
    """fenceline::SkinnyGemmRequest."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "norm_weight", "bias", "residual", "out")),
        *((name, ctypes.c_void_p) for name in ("scales", "zeros")),
        *((name, ctypes.c_int32) for name in ("rows", "num_out", "k")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("gated", "tiles", "warps_n", "warps_k", "depth", "cluster")),
        *((name, ctypes.c_int32) for name in ("num_ctas", "prefetch_bytes", "pdl", "direct", "bits", "group")),
    )


def build(folder: Path, *replacements: tuple[str, str], numbers: str = "kBf16") -> Emulate:
    """The emulation with weights of ``numbers``, with each first text of ``replacements`` in the kernel's source
    replaced by the second."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    sources = {name: (ROOT / "csrc" / name).read_text() for name in ("skinny_kernel.cuh", "skinny_direct.cuh")}
    for old, new in replacements:
        assert sum(old in source for source in sources.values()) == 1
        sources = {name: source.replace(old, new) for name, source in sources.items()}
    for name, source in sources.items():
        (folder / name).write_text(source)
    library = folder / "emulation.so"
    command = [
        "g++",
        "-std=c++17",
        "-O0",
        "-shared",
        "-fPIC",
        f"-I{folder}",
        f"-I{ROOT / 'include'}",
        f"-I{ROOT / 'csrc'}",
    ]
    command += [f"-DFENCELINE_NUMBERS={numbers}", *["-DFENCELINE_ONE_KERNEL"] * bool(replacements)]
    subprocess.run([*command, str(ROOT / "tests/skinny_emulation.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).fenceline_emulate_skinny_gemm
    function.restype = ctypes.c_char_p
    emulate: Emulate = function
    return emulate


@pytest.fixture(scope="module")
def emulation_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulate]:
    """The emulation with weights of these numbers, built once."""
    return cache(lambda numbers: build(tmp_path_factory.mktemp("skinny"), numbers=numbers))


@pytest.fixture(scope="module")
def emulate(emulation_of: Callable[[str], Emulate]) -> Emulate:
    return emulation_of("kBf16")


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy that starts at a multiple of 16 bytes: of bytes as they are, else bfloat16."""
    dtype = values.dtype if values.dtype.itemsize == 1 else torch.bfloat16
    room = torch.empty(values.numel() + 16, dtype=dtype)
    start = -room.data_ptr() % 16 // dtype.itemsize
    return room[start : start + values.numel()].view(values.shape).copy_(values)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [N, K] as the kernel reads it. ``plain``: what its numbers mean, float64."""

    data: torch.Tensor
    plain: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bits: int = 16
    group: int = 0


def make_weight(n: int, k: int, bits: int = 16, group: int = 0) -> StoredWeight:
    matrix = torch.randn(n, k) / k**0.5 * torch.rand(n, 1)
    if bits == 16:
        plain = aligned(matrix)
        return StoredWeight(plain, plain.double())
    config = QuantConfig(method="on-line", kind="int4", group_size=group)
    if bits == 8:
        config = QuantConfig(method="on-line", kind="fp8", scales="block" if group else "channel")
    stored = make_format(config, n, k, torch.float32)
    fill_slots(stored.slots("x", slice(None), (n, k), 0, 0), [("x.weight", matrix)])
    if bits == 4:
        assert stored.zeros is not None
        stored.zeros.copy_(torch.randint(0, 17, stored.zeros.shape))  # also 16, which GPTQ has
    data = aligned(stored.data.view(torch.uint8))
    return StoredWeight(data, stored.dequantized(torch.float64), stored.scales, stored.zeros, bits, group)


def relative_error(
    emulate: Emulate,
    cut: tuple[int, ...],
    rows: int,
    weight: StoredWeight,
    kind: str,
    eager: int,
    biased: bool = False,
    direct: bool = False,
) -> float:
    n, k = weight.plain.shape
    gated, normed = kind == "gated", kind in ("norm", "gated")
    num_out = n // 2 if gated else n
    x, norm = aligned(torch.randn(rows, k)), aligned(torch.randn(k))
    bias = torch.randn(n).bfloat16() if biased else None
    room = torch.full((rows + 1, num_out), float("nan"), dtype=torch.bfloat16)  # the last row is nobody's
    out = room[:rows]
    residual = out.copy_(torch.randn(rows, num_out)) if kind == "residual" else None
    wide = F.rms_norm(x.double(), (k,), norm.double(), 1e-6) if normed else x.double()
    want = F.linear(wide, weight.plain, None if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = F.silu(gate) * up
    if residual is not None:
        want = want + residual.double()
    optional = (norm if normed else None, bias, residual)
    pointers = [tensor if tensor is None else tensor.data_ptr() for tensor in optional]
    stored = [tensor if tensor is None else tensor.data_ptr() for tensor in (weight.scales, weight.zeros)]
    request = Request(
        x.data_ptr(), weight.data.data_ptr(), *pointers, out.data_ptr(), *stored, rows, num_out, k, 1e-6, gated,
        *cut, 1, direct, weight.bits, weight.group,
    )  # fmt: skip
    assert emulate(ctypes.byref(request), eager) is None
    assert room[rows:].isnan().all()
    return ((out.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_agrees_with_float64(emulate: Emulate, cut: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for (number, rows), shape in itertools.product(enumerate(ROWS), SHAPES):
        for eager, kind in enumerate(("plain", "norm", "gated", "residual")):
            if (kind == "gated" and cut[0] * cut[1] % 2) or (cut[0] == 3 and rows > 8):
                continue
            error = relative_error(
                emulate, cut, rows, make_weight(*shape), kind, (eager + number) % 2, biased=shape[0] == 40
            )
            assert error < 6e-3, (rows, shape, kind, error)


@pytest.mark.long
@pytest.mark.parametrize("numbers", QUANTISED)
def test_quantised_weights_agree_with_float64(emulation_of: Callable[[str], Emulate], numbers: str) -> None:
    torch.manual_seed(0)
    emulate = emulation_of(numbers)
    bits, group, shapes = QUANTISED[numbers]
    cuts = [cut for cut in QUANTISED_CUTS if cut[0] != 6 or numbers != "kInt4Groups"]
    for (n, k), (turn, cut) in itertools.product(shapes, enumerate(cuts)):
        weight = make_weight(n, k, bits, group)
        for number, kind in enumerate(("plain", "norm", "gated", "residual")):
            rows = (1, 8 if cut[0] == 6 else 11)[(number + turn) % 2]
            error = relative_error(emulate, cut, rows, weight, kind, number // 2, biased=number % 3 == 0)
            assert error < 8e-3, (n, k, cut, rows, kind, error)
    if numbers == "kInt4Groups":
        error = relative_error(emulate, QUANTISED_CUTS[0], 3, make_weight(40, 448, 4, 64), "norm", 0)
        assert error < 8e-3, error


@pytest.mark.parametrize("numbers", DIRECT_SHAPES)
def test_weights_that_go_into_registers_agree_with_float64(
    emulation_of: Callable[[str], Emulate], numbers: str
) -> None:
    torch.manual_seed(0)
    emulate = emulation_of(numbers)
    bits, group, _ = QUANTISED[numbers]
    for (n, k), (turn, (warps_n, warps_k, depth)) in itertools.product(DIRECT_SHAPES[numbers], enumerate(DIRECT_CUTS)):
        weight = make_weight(n, k, bits, group)
        for number, kind in enumerate(("plain", "norm", "gated", "residual")):
            rows = (1, 8, 5)[(number + turn) % 3]
            cut = (2, warps_n, warps_k, depth, 1, 0, (0, 64, 1 << 15)[(number + turn) % 3])
            error = relative_error(emulate, cut, rows, weight, kind, 0, biased=(number + turn) % 2 == 0, direct=True)
            assert error < 8e-3, (n, k, cut, rows, kind, error)


def test_every_fp8_number_is_itself(emulation_of: Callable[[str], Emulate]) -> None:
    """Each E4M3 number but NaN, times 1, with scales that bring the sums to every size."""
    emulate = emulation_of("kFp8")
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~codes.view(FP8).float().isnan()]
    data = torch.zeros(len(codes), 16, dtype=torch.uint8)
    places = torch.arange(len(codes)) % 16
    data[torch.arange(len(codes)), places] = codes
    scales = 2.0 ** (torch.arange(len(codes)) % 40 - 30.0)
    plain = data.view(FP8).double() * scales[:, None].double()
    weight = StoredWeight(aligned(data), plain, scales, None, 8, 0)
    x, out = aligned(torch.ones(1, 16)), torch.empty(1, len(codes), dtype=torch.bfloat16)
    request = Request(
        x.data_ptr(), weight.data.data_ptr(), None, None, None, out.data_ptr(), scales.data_ptr(), None,
        1, len(codes), 16, 0.0, 0, *QUANTISED_CUTS[0], 1, 0, 8, 0,
    )  # fmt: skip
    assert emulate(ctypes.byref(request), 0) is None
    assert torch.equal(out[0].double(), plain.sum(1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "kind", "eager"),
    [
        ("if (kShared) __syncwarp();\n", "", "norm", 0),
        ("if (kShared) __syncwarp();  // the other lanes", "//", "plain", 1),
    ],
    ids=["copied", "read"],
)
def test_lanes_wait_for_each_other(tmp_path: Path, old: str, new: str, kind: str, eager: int) -> None:
    """What norm_weight and the scales are is copied by one lane and read by others."""
    torch.manual_seed(0)
    broken = build(tmp_path, (old, new), numbers="kInt4")
    error = relative_error(broken, (2, 1, 2, 2, 1, 1, 0), 3, make_weight(48, 1024, 4, 128), kind, eager)
    assert not error < 8e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "eager"),
    [
        ("wait_for_oldest(p.depth);", "wait_for_oldest(p.depth + 1);", 0),
        ("wait_for_previous_kernel();\n    // Past", "// Past", 0),
        ("    store_partial_sums(acc, square, kNorm && first && warp_n == 0);\n    __syncthreads();",
         "    store_partial_sums(acc, square, kNorm && first && warp_n == 0);", 0),
        ("__syncthreads();\n    cluster_barrier();", "", 0),
    ],
    ids=["copies", "kernel in front", "partial sums", "cluster"],
)  # fmt: skip
def test_each_wait_is_needed(tmp_path: Path, old: str, new: str, eager: int) -> None:
    torch.manual_seed(0)
    broken = build(tmp_path, (old, new))
    error = relative_error(broken, (2, 1, 2, 2, 2, 2, 0), 8, make_weight(*SHAPES[0]), "residual", eager)
    assert not error < 6e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wait_for_previous_kernel();\n    store_x(norm);", "store_x(norm);"),
        ("load_early();\n    __syncthreads();", "load_early();"),
        ("add_squares();\n    __syncthreads();", "add_squares();"),
    ],
    ids=["kernel in front", "x", "partial sums"],
)
def test_each_wait_of_the_direct_kernel_is_needed(tmp_path: Path, old: str, new: str) -> None:
    """Of FP8 without a norm, where threads do not wait for those of their warp either."""
    torch.manual_seed(0)
    broken = build(tmp_path, (old, new), numbers="kFp8")
    cut, weight = (2, 1, 3, 2, 1, 0, 0), make_weight(48, 512, 8, 0)
    assert not relative_error(broken, cut, 3, weight, "plain", 0, direct=True) < 8e-3


@pytest.mark.parametrize(
    ("cut", "rows", "said"),
    [
        ((2, 1, 2, 2, 1, 0, 0), 9, b"up to 8 rows"),
        ((4, 1, 2, 2, 1, 0, 0), 1, b"2 tiles"),
        ((2, 1, 2, 3, 1, 0, 0), 1, b"2 or 4 stages"),
        ((2, 1, 2, 2, 2, 0, 0), 1, b"no clusters"),
        ((2, 1, 13, 2, 1, 0, 0), 1, b"12 warps"),
    ],
)
def test_bad_direct_requests_are_refused(emulate: Emulate, cut: tuple[int, ...], rows: int, said: bytes) -> None:
    at = aligned(torch.zeros(64, 64, dtype=torch.bfloat16)).data_ptr()
    request = Request(at, at, None, None, None, at, at, None, rows, 16, 64, 0.0, 0, *cut, 1, 1, 8, 0)
    error = emulate(ctypes.byref(request), 0)
    assert error is not None and said in error


def test_bfloat16_has_no_direct_kernel(emulate: Emulate) -> None:
    at = aligned(torch.zeros(64, 64, dtype=torch.bfloat16)).data_ptr()
    cut = (2, 1, 2, 2, 1, 0, 0)
    request = Request(at, at, None, None, None, at, None, None, 1, 16, 64, 0.0, 0, *cut, 1, 1, 16, 0)
    error = emulate(ctypes.byref(request), 0)
    assert error is not None and b"no direct kernel" in error


@pytest.mark.parametrize(
    ("cut", "rows", "said"),
    [
        ((4, 1, 2, 2, 1, 0, 0), 17, b"rows"),
        ((1, 1, 2, 2, 1, 0, 0), 1, b"tiles"),
        ((3, 1, 2, 2, 1, 0, 0), 9, b"3 for up to 8 rows of bfloat16"),
        ((2, 1, 2, 5, 1, 0, 0), 1, b"stages"),
        ((2, 1, 2, 2, 2, 3, 0), 1, b"num_ctas"),
    ],
)
def test_bad_requests_are_refused(emulate: Emulate, cut: tuple[int, ...], rows: int, said: bytes) -> None:
    zeros = torch.zeros(64, 64, dtype=torch.bfloat16)
    at = aligned(zeros).data_ptr()
    request = Request(at, at, None, None, None, at, None, None, rows, 16, 64, 0.0, 0, *cut, 1, 0, 16, 0)
    error = emulate(ctypes.byref(request), 0)
    assert error is not None and said in error


@pytest.mark.parametrize(
    ("bits", "group", "k", "num_out", "has_scales", "said"),
    [
        (8, 64, 64, 16, True, b"no such numbers"),
        (4, 16, 64, 16, True, b"no such numbers"),
        (2, 0, 64, 16, True, b"no such numbers"),
        (8, 0, 40, 16, True, b"multiple of 16"),
        (4, 64, 32, 16, True, b"multiple of the group"),
        (4, 32, 64, 12, True, b"multiple of 8"),
        (8, 0, 64, 16, False, b"needs scales"),
        (16, 0, 64, 16, True, b"needs scales"),
    ],
)
def test_bad_quantised_requests_are_refused(
    emulate: Emulate, bits: int, group: int, k: int, num_out: int, has_scales: bool, said: bytes
) -> None:
    at = aligned(torch.zeros(64, 64)).data_ptr()
    scales, zeros = at if has_scales else None, at if bits == 4 else None
    request = Request(at, at, None, None, None, at, scales, zeros, 1, num_out, k, 0.0, 0, *CUTS[0], 1, 0, bits, group)
    error = emulate(ctypes.byref(request), 0)
    assert error is not None and said in error


@pytest.mark.parametrize(
    ("bits", "group", "tiles", "rows"), [(8, 0, 3, 1), (8, 0, 6, 9), (4, 32, 6, 1), (4, 128, 6, 9)]
)
def test_tiles_that_numbers_do_not_have_are_refused(
    emulate: Emulate, bits: int, group: int, tiles: int, rows: int
) -> None:
    at = aligned(torch.zeros(64, 128)).data_ptr()
    zeros = at if bits == 4 else None
    cut = (tiles, *CUTS[0][1:])
    request = Request(at, at, None, None, None, at, at, zeros, rows, 16, 128, 0.0, 0, *cut, 1, 0, bits, group)
    error = emulate(ctypes.byref(request), 0)
    assert error is not None and b"tiles for each warp" in error
