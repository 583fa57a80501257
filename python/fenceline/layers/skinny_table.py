"""Chooses the kernel that multiplies few rows with a weight, and its configuration: by measurements for some GPUs, if
need be those of the nearest weight, otherwise by a guess.

benchmark/kernels/bench_skinny_gemm.py makes the measurements, and bench_quantized_gemm.py in the same folder those for
quantised weights. ``skinny_configs`` has one JSON file for each GPU: ``{"entries": {"1x6144x4096": {"kernel": "cuda",
"tiles": 4, ...}, ...}}``. A key consists of the number of rows, the weight's rows and K, and ``g`` at the end for a
gated product. For quantised weights the format and its group size follow: ``1x6144x4096 int4/128``. ``{"kernel":
"cublas"}`` means that the library product is faster than our kernels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fenceline.layers.kernels.triton.int4_gemm import MAX_INT4_ROWS, Int4Config
from fenceline.layers.kernels.triton.skinny_gemm import TritonConfig

# With more than MAX_CUDA_ROWS rows, a dense product is Triton's where that was measured to be faster, else cuBLAS's.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
QUANTIZED_ROW_BUCKETS = (*ROW_BUCKETS, 256, MAX_INT4_ROWS)
MAX_CUDA_ROWS = 16  # of one launch of fenceline_kernel's skinny GEMM
# The same of its direct kernel, and the warps of a block there.
MAX_DIRECT_ROWS, MAX_DIRECT_WARPS = 8, 12

# How much shared memory per block the skinny GEMM's configurations may need. sm_80, 90 and 100 have this much; sm_86,
# 89 and 120 do not.
SHARED_BYTES = 160 << 10


@dataclass(frozen=True, slots=True)
class CudaConfig:
    """The configuration of fenceline_kernel's skinny GEMM: the fields of ``fenceline_kernel.skinny.SkinnyConfig``."""

    tiles: int = 4
    warps_n: int = 1
    warps_k: int = 8
    depth: int = 3
    cluster: int = 1
    num_ctas: int = 0
    prefetch_bytes: int = 0
    pdl: bool = True
    direct: bool = False


def shared_bytes(config: CudaConfig, rows: int, bits: int = 16, group: int = 128, k: int = 0) -> int:
    """An upper bound of the shared memory that a block takes for ``rows`` rows of ``k`` and a weight whose numbers have
    ``bits`` bits, with one scale for each ``group`` of them (``shared_bytes`` in
    sgl-kernel/include/fenceline/skinny_gemm.h). Only the direct kernel's depends on ``k``."""
    if config.direct:
        sums = config.warps_k * rows * (config.warps_n * 16 + 8) + k * bits // 512 * 16 + 8
        return rows * (2 * k + 64) + 4 * sums
    scale_bytes = {16: 0, 8: 4, 4: 10 if group == 128 else 40}[bits]
    stage = config.tiles * (1024 + 8 * scale_bytes) + (rows + 1) * 2048 // bits
    sums = config.warps_k * rows * (config.warps_n * config.tiles * 8 + 9) * 4
    return config.warps_n * config.warps_k * config.depth * stage + sums


# None: cuBLAS.
SkinnyChoice = CudaConfig | TritonConfig | Int4Config | None

_CONFIGS = Path(__file__).parent / "skinny_configs"
_CONFIG_TYPES: Mapping[str, type[CudaConfig] | type[TritonConfig] | type[Int4Config]] = {
    "cuda": CudaConfig,
    "triton": TritonConfig,
    "int4": Int4Config,
}
# Without a measurement our kernels are used up to this many rows, because then a product takes as long as reading the
# weight.
_GUESSED_ROWS = 8
# By how many times the sizes of a weight may differ from those of a measured one whose choice it takes. Of the measured
# ones on an H200, 173 of 182 take the same kernel by their nearest neighbour within this as by their own figures.
_NEAR = 2.0


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """The properties of a GPU on which a guess depends. ``has_cuda_kernels``: fenceline_kernel can be used on it."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    has_cuda_kernels: bool


class SkinnyTable:
    """The choice for each product; it does not change after the table has been made."""

    def __init__(self, gpu: GpuTraits, entries: Mapping[str, SkinnyChoice]) -> None:
        """``entries`` by ``table_key``."""
        self._gpu = gpu
        self._entries = dict(entries)
        self._near: dict[str, SkinnyChoice] = {}  # what has been chosen without a measurement

    def choose(self, rows: int, weight_rows: int, k: int, gated: bool) -> SkinnyChoice:
        """How to multiply [rows, k] with a weight [weight_rows, k]; None leaves it to cuBLAS. ``rows`` is 0 for the
        logits of a step in which no prompt is complete, which cuBLAS computes too."""
        if rows == 0:
            return None
        bucket = next((size for size in ROW_BUCKETS if rows <= size), None)
        if bucket is None or k % 8 != 0:
            return None
        key = table_key(bucket, weight_rows, k, gated)
        if key in self._entries:
            found = self._entries[key]
            if self._gpu.has_cuda_kernels or not isinstance(found, CudaConfig):
                return found
        if key not in self._near:
            self._near[key] = self._nearest(bucket, weight_rows, k, gated)
        return self._near[key]

    def _nearest(self, rows: int, weight_rows: int, k: int, gated: bool) -> SkinnyChoice:
        """The choice for the nearest measured weight that is near enough and whose choice can be used; else a guess."""
        near: list[tuple[float, str]] = []
        for key in self._entries:
            measured = re.fullmatch(rf"{rows}x(\d+)x(\d+){'g' if gated else ''}", key)
            if measured is not None:
                steps = math.log(weight_rows / int(measured[1]), _NEAR), math.log(k / int(measured[2]), _NEAR)
                if max(map(abs, steps)) <= 1:
                    near.append((math.hypot(*steps), key))
        for _, key in sorted(near):
            found = self._entries[key]
            if not isinstance(found, CudaConfig):
                return found
            if self._gpu.has_cuda_kernels and 64 * found.warps_k * found.cluster <= k:
                return found
        return self._guess(rows, weight_rows, k, gated)

    def choose_quantized(
        self, rows: int, weight_rows: int, k: int, gated: bool, numbers: str, guess: SkinnyChoice
    ) -> SkinnyChoice:
        """Like ``choose``, for a quantised weight. ``guess`` is returned without a measurement. None: the library's."""
        bucket = next((size for size in QUANTIZED_ROW_BUCKETS if rows <= size), None)
        if bucket is None:
            return guess
        found = self._entries.get(table_key(bucket, weight_rows, k, gated, numbers), guess)
        return found if self._gpu.has_cuda_kernels or not isinstance(found, CudaConfig) else guess

    def _guess(self, rows: int, weight_rows: int, k: int, gated: bool) -> SkinnyChoice:
        on_hopper = self._gpu.capability >= (9, 0)
        if self._gpu.has_cuda_kernels and rows <= _GUESSED_ROWS:
            tiles = 4 if weight_rows >= 32 * self._gpu.num_sms else 2
            return CudaConfig(tiles=tiles, warps_k=min(8, max(1, k // 128)), pdl=on_hopper)
        if rows == 1:
            outs = weight_rows // 2 if gated else weight_rows
            block_n = next((n for n in (8, 4, 2) if outs >= 2 * n * self._gpu.num_sms), 1)
            return TritonConfig(block_n, block_k=512, num_warps=4, launch_pdl=on_hopper)
        return None


def table_key(rows: int, weight_rows: int, k: int, gated: bool, numbers: str = "") -> str:
    """The key of a product in a file of measurements. ``rows`` is one of ROW_BUCKETS or
    QUANTIZED_ROW_BUCKETS; ``numbers`` is the format of a quantised weight."""
    return f"{rows}x{weight_rows}x{k}{'g' if gated else ''}{' ' * bool(numbers)}{numbers}"


def load_table(gpu: GpuTraits, folder: Path = _CONFIGS) -> SkinnyTable:
    """The table for ``gpu``: its measurements if there is a file with its name, otherwise only guesses."""
    path = folder / f"{gpu.name.replace(' ', '_')}.json"
    if not path.exists():
        return SkinnyTable(gpu, {})
    stored = json.loads(path.read_text(encoding="utf-8"))["entries"]
    return SkinnyTable(gpu, {key: _choice_from(fields) for key, fields in stored.items()})


def choice_to_json(choice: SkinnyChoice) -> dict[str, object]:
    """What ``load_table`` reads back as ``choice``."""
    for kernel, config_type in _CONFIG_TYPES.items():
        if isinstance(choice, config_type):
            return {"kernel": kernel, **asdict(choice)}
    return {"kernel": "cublas"}


def _choice_from(fields: Mapping[str, object]) -> SkinnyChoice:
    rest = {name: value for name, value in fields.items() if name != "kernel"}
    kernel = fields["kernel"]
    return None if kernel == "cublas" else _CONFIG_TYPES[str(kernel)](**rest)  # type: ignore[arg-type]
