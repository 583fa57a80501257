"""LayerContext: what layers are made with, and which part of each layer this process holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fenceline.config.quantization import QuantConfig
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.fixed_order import FixedOrderKernels
from fenceline.layers.quantized import QuantizedFormat, QuantizedWeight, make_format
from fenceline.layers.weight import DenseWeight, RMSNorm, Weight
from fenceline.memory_order import Communicator, Selecting

_CONVERTS_FP8 = (8, 9)  # the first compute capability with instructions for it


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` equal parts; ``Shard()`` is the whole, which needs no communicator."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None
    ep_size: int = 1  # into how many groups the experts are divided; ``size / ep_size`` ranks share each expert

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
        """Adds up the ranks' partial sums ``x`` in place; returns ``x``, which is then the same on all ranks."""
        if self.size == 1:
            return x
        assert self.communicator is not None, "an all-reduce needs a communicator"
        return self.communicator.all_reduce(x)

    def all_reduce_add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor | None:
        """``residual`` += the sum of the ranks' ``x``, in place; returns norm(residual). Returns None, having done
        nothing, if the communicator has no such fused operation for this case."""
        assert self.communicator is not None, "an all-reduce needs a communicator"
        return self.communicator.all_reduce_add_norm(x, residual, norm.weight, norm.eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' columns ``x`` [..., n], concatenated in the order of ranks: [..., size * n]."""
        if self.size == 1:
            return x
        assert self.communicator is not None, "an all-gather needs a communicator"
        return self.communicator.all_gather(x)

    def exchange(self, data: bytes) -> list[bytes]:
        """All ranks' ``data``, in the order of ranks. The host waits for all of them, so this is used at start and for
        updates of the weights, but not in steps."""
        assert self.communicator is not None, "several ranks have a communicator"
        return self.communicator.exchange(data)

    def of_first(self, data: bytes) -> bytes:
        """Rank 0's ``data``, at start-up only."""
        return data if self.size == 1 else self.exchange(data)[0]

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' ``value``, at start-up only."""
        if self.size == 1:
            return value
        assert self.communicator is not None, "several ranks have a communicator"
        return self.communicator.smallest(value)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What layers are made with. ``dense`` and ``linear`` make the uninitialised weight of a matrix [out_features,
    in_features] on the default device: ``dense`` for embeddings and the head, ``linear`` for the projections, which may
    be quantised. ``format`` is the number format of the projections, except for those that the checkpoint leaves plain;
    None: all are plain. ``module`` is the prefix of the names in the checkpoint of layers that are made with this
    context, for example ``model.layers.3.mlp.``"""

    shard: Shard  # which part of each matrix this process holds
    kernels: LayerKernels
    dtype: torch.dtype  # of activations, norms and biases
    dense: Callable[[int, int], DenseWeight]
    quantized: Callable[[QuantizedFormat], Weight] = QuantizedWeight  # makes a weight that is stored so

    kv_dtype: torch.dtype | None = None  # of keys and values in the pool; None: ``dtype``
    selecting: Selecting = Selecting()  # how sparse attention selects tokens
    norm_offset: float = 0.0  # is added to the weights of norms
    format: QuantConfig | None = None
    module: str = ""

    def inside(self, name: str) -> LayerContext:
        """The context for layers inside the module ``name``."""
        return dataclasses.replace(self, module=f"{self.module}{name}.")

    def linear(self, out_features: int, in_features: int, names: Sequence[str]) -> Weight:
        """The weight that holds the matrices ``names`` of the checkpoint, concatenated along their rows. Raises
        ``ValueError`` for a matrix that its format cannot hold, and if only some of them are quantised."""
        config = self.format_of(names)
        if config is None:
            return self.dense(out_features, in_features)
        return self.quantized(make_format(config, out_features, in_features, self.dtype))

    def format_of(self, names: Sequence[str]) -> QuantConfig | None:
        """The format of the matrices ``names`` (relative to ``module``), which are multiplied as one; None: plain
        numbers. Raises ``ValueError`` if they differ."""
        if self.format is None:
            return None
        formats = {name: self.format.of(self.module + name) for name in names}
        first, *others = formats
        for other in others:
            if not _stored_alike(formats[first], formats[other]):
                plain, stored = (other, first) if formats[other] is None else (first, other)
                how = "it leaves {} plain and {} not" if formats[plain] is None else "{} and {} have different formats"
                raise ValueError(
                    f"the checkpoint is quantised ({self.format.method}), but of {self.module.removesuffix('.')}"
                    f" {how.format(plain, stored)}, which are multiplied as one matrix; use a checkpoint in which they"
                    " agree, or the model's unquantised weights"
                )
        return formats[first]

    def norm(self, size: int, eps: float) -> RMSNorm:
        """An RMSNorm over ``size`` features."""
        return RMSNorm(size, eps, self.dtype, self.kernels, self.norm_offset)


def _stored_alike(a: QuantConfig | None, b: QuantConfig | None) -> bool:
    """Whether two formats are the same but for the modules that have them."""
    if a is b or a is None or b is None:
        return a is b
    return dataclasses.replace(a, plain=(), only=(), others=()) == dataclasses.replace(b, plain=(), only=(), others=())


_registered: dict[str, Callable[[Shard, torch.dtype], LayerContext]] = {}


def register_layers(device_type: str, make: Callable[[Shard, torch.dtype], LayerContext]) -> None:
    """Say that torch devices of ``device_type`` have layers of their own; ``make`` makes their context."""
    _registered[device_type] = make


def make_layer_context(
    device: torch.device, shard: Shard, dtype: torch.dtype, fixed_order: bool = False
) -> LayerContext:
    """The context for ``device``. An NVIDIA GPU gets our own kernels, which are compiled on first use (this takes
    seconds, once), a device with layers of its own gets these. Other devices get torch's operators. ``fixed_order``: a
    row's result may not depend on the rows computed beside it. Raises ``ValueError`` for a GPU without Triton."""
    if device.type in _registered:
        return _registered[device.type](shard, dtype)
    if device.type != "cuda":
        return fixed_order_context(shard, dtype) if fixed_order else torch_context(shard, dtype)
    try:
        from fenceline.layers import cuda_layers, cuda_quantized
    except ImportError as error:
        raise ValueError(
            f"--device cuda needs Triton ({error}): pip install 'fenceline[cuda]', or use --device cpu"
        ) from error
    make_dense: Callable[[int, int], DenseWeight]
    find, fixed = cuda_quantized.find_quantized_products, None
    if fixed_order:
        multiply, fixed = cuda_layers.find_fixed_product(device)
        make_dense = functools.partial(cuda_layers.FixedDenseWeight, dtype=dtype, multiply=multiply)
        find = functools.partial(cuda_quantized.find_fixed_products, workspace=fixed)
    else:
        products = cuda_layers.find_skinny_products(device)
        make_dense = functools.partial(cuda_layers.CudaDenseWeight, dtype=dtype, products=products)
    quantized_products = functools.cache(find)  # the trial runs when the first such weight is made

    def quantized(stored: QuantizedFormat) -> Weight:
        return cuda_quantized.CudaQuantizedWeight(stored, quantized_products(device, stored.kind))

    return LayerContext(shard, cuda_layers.CudaLayerKernels(device, fixed), dtype, make_dense, quantized)


def torch_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    """A context with torch's operators, for any device. The CPU uses it, and it is the reference for our kernels."""

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return DenseWeight(out_features, in_features, dtype)

    return LayerContext(shard, LayerKernels(), dtype, dense)


def fixed_order_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    """``torch_context`` whose results for a row are the same bits whatever the other rows are. For a CPU."""
    kernels = FixedOrderKernels()

    def dense(out_features: int, in_features: int) -> DenseWeight:
        kernels.prepare_linear(out_features, in_features, dtype)
        return DenseWeight(out_features, in_features, dtype, kernels.linear)

    def quantized(stored: QuantizedFormat) -> Weight:
        kernels.prepare_linear(*stored.shape, dtype)
        return QuantizedWeight(stored, kernels.linear)

    return LayerContext(shard, kernels, dtype, dense, quantized)


def fp8_kv_dtype(device: torch.device) -> torch.dtype:
    """The dtype of a KV cache in FP8. Raises ``ValueError`` with the remedy for a GPU that cannot convert FP8."""
    if not converts_fp8(device):
        raise ValueError("--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9 or more: leave it out")
    return torch.float8_e4m3fn


def converts_fp8(device: torch.device) -> bool:
    """Whether kernels on ``device`` can read numbers in FP8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _CONVERTS_FP8
