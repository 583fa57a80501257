"""Parameters: where a checkpoint's tensors go, and the products that read them.

A linear layer holds a Weight and uses only its methods. A Weight says where a checkpoint's tensors go and how the
matrix is multiplied. A subclass must implement ``slots`` and ``product``. The other products are those that a decoder
layer needs; a subclass whose kernels fuse them overrides them. Quantised weights are in quantized.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fenceline.layers.kernels.base import SILU, LayerKernels

_SHOWN_NAMES = 4
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # as F.linear
# Name in the checkpoint → place in the model.
WeightSlots = dict[str, "WeightSlot"]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where a tensor of the checkpoint goes. ``dest`` is a view into a parameter; it takes the range ``[start, start +
    dest.shape[dim])`` along ``dim`` of a checkpoint tensor of ``full_shape``. ``dest`` may be empty, for example on a
    rank that only holds padding of the vocabulary.

    If the checkpoint stores the values in another way, ``convert`` makes the tensor of which ``dest`` takes its part
    from the checkpoint's whole tensor. ``loaded`` is called when all slots of the model have been filled. Slots that
    must all be filled if one of them is have the same object in ``together``; None: the slot is independent.
    ``optional``: the checkpoint may lack the tensor, and the parameter then keeps its values.
    """

    dest: torch.Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    loaded: Callable[[], None] | None = None
    together: object | None = None
    optional: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type that a checkpoint's tensor for this slot is given where we choose it: the parameter's."""
        return self.dest.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that the slot fills."""
        return self.dest.nbytes

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` (on any device) into the parameter and convert it to its type. A floating-point parameter
        takes any type of at least 16 bits, one of FP8 only its own type, and one of integers any integer type. Raises
        ``ValueError`` for a wrong shape or a type that does not fit (a quantised checkpoint)."""
        self.check_type(name, tensor)
        self.check(name, tensor)
        if self.convert is not None:
            tensor = self.convert(tensor.to(self.dest.device))
        self.dest.copy_(tensor.narrow(self.dim, self.start, self.dest.shape[self.dim]))

    def check_type(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ``ValueError`` for a type that does not fit."""
        if not self.dest.dtype.is_floating_point:
            if tensor.dtype.is_floating_point:
                raise ValueError(f"weight {name} is {tensor.dtype}, it must hold whole numbers")
        elif self.dest.dtype.itemsize < 2:
            if tensor.dtype != self.dest.dtype:
                raise ValueError(
                    f"weight {name} is {tensor.dtype}, config.json announces {self.dest.dtype}; the weights and"
                    " config.json belong to different models"
                )
        elif not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(f"weight {name} is {tensor.dtype}; use the model's unquantised weights")

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ``ValueError`` for a wrong shape. If one number is expected, it may have any shape."""
        if tuple(tensor.shape) == self.full_shape or (self.full_shape == () and tensor.numel() == 1):
            return
        raise ValueError(
            f"weight {name} has shape {list(tensor.shape)}, config.json asks for {list(self.full_shape)}; "
            f"the weights and config.json belong to different models"
        )


def whole(param: torch.Tensor) -> WeightSlot:
    """The slot of a parameter that is not split."""
    return WeightSlot(param, tuple(param.shape))


def fill_slots(
    slots: WeightSlots,
    weights: Iterable[tuple[str, torch.Tensor]],
    ignored: Callable[[str], bool] = lambda name: False,
    partly: bool = False,
    only_check: bool = False,
) -> None:
    """Load each (name, tensor) pair of ``weights`` into the slot with its name, one after the other. Raises
    ``ValueError`` for a tensor that has no slot (unless its name is ``ignored``, or it is a bias or a zero point that
    is zero), comes twice or has the wrong shape or type, and for slots that no tensor has filled. With ``partly`` slots
    may stay as they are, but of slots that belong together (``WeightSlot.together``) either all or none must be filled.
    With ``only_check`` nothing is written, and tensors on the device ``meta`` are enough. The values of tensors on
    other devices are then checked too if none of their values are kept."""
    missing = set(slots)
    unexpected = []
    for name, tensor in weights:
        if name not in slots:
            if not ignored(name) and not _adds_nothing(name, tensor):
                unexpected.append(name)
            continue
        if name not in missing:
            raise ValueError(f"weight {name} comes twice; remove the extra safetensors file")
        if only_check:
            slots[name].check_type(name, tensor)
            slots[name].check(name, tensor)
        if not only_check or (not tensor.is_meta and not slots[name].dest.numel()):
            slots[name].load(name, tensor)
        missing.discard(name)
    if unexpected:
        raise ValueError(
            f"the checkpoint holds weights that the model does not have: {_shorten(unexpected)}; "
            f"check config.json (architectures, num_hidden_layers, attention_bias, tie_word_embeddings)"
        )
    lacking = sorted(name for name in missing if not slots[name].optional)
    if lacking and not partly:
        raise ValueError(
            f"the checkpoint lacks weights: {_shorten(lacking)}; "
            f"check config.json (num_hidden_layers, tie_word_embeddings) or download the model again"
        )
    filled = {id(slot.together) for name, slot in slots.items() if name not in missing}
    parts = [(name, slots[name].together) for name in sorted(missing)]
    lacking = [name for name, group in parts if group is not None and id(group) in filled]
    if lacking:
        raise ValueError(f"some weights that belong together are missing: {_shorten(lacking)}; send all of them")
    for name, slot in slots.items():
        if slot.loaded is not None and name not in missing and not only_check:
            slot.loaded()


# Names of tensors that are added or subtracted, and of which some tools store zeros where the model has none.
ADDED = (".bias", "_zero_point")


def _adds_nothing(name: str, tensor: torch.Tensor) -> bool:
    """Whether the tensor is such a one. One without values is taken for it until its values are read."""
    return name.endswith(ADDED) and (tensor.is_meta or not tensor.any())


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


class RMSNorm:
    """x [..., size] → x / rms(x) * weight over the last axis. ``offset`` is added to the checkpoint's weights. The sum
    is kept in float32, because rounding it to ``dtype`` would lose digits."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, kernels: LayerKernels, offset: float = 0.0) -> None:
        self.eps = eps
        self.offset = offset
        self.weight = torch.empty(size, dtype=torch.float32 if offset else dtype)
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape and dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def weight_slots(self, name: str) -> WeightSlots:
        """The slot named ``{name}.weight``."""
        slot = whole(self.weight)
        if self.offset:
            slot = replace(slot, convert=lambda weight: weight.float() + self.offset)
        return {f"{name}.weight": slot}


class Weight(ABC):
    """A matrix [out_features, in_features]. All products run on the current stream and never make the host wait.
    Activations are contiguous [T, features] in the model's dtype; sums are at least float32. A bias is
    [out_features]."""

    kind: str  # the number format: "dense"

    def __init__(self, out_features: int, in_features: int) -> None:
        self.shape = (out_features, in_features)

    @abstractmethod
    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        """Where the checkpoint's tensors of the matrix ``name`` go: into ``rows`` of this weight. This rank keeps the
        part that begins at ``start`` along ``dim`` of the whole matrix of ``full_shape``."""

    def moves_rows(self, size: int) -> None:
        """Tells the weight that rows of the checkpoint's matrix are reordered within groups of ``size`` when loaded."""
        return

    @abstractmethod
    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] @ weight [N, K] transposed + bias → [T, N], in ``out`` if given."""

    def normed_product(
        self, x: torch.Tensor, norm: RMSNorm, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``product`` of norm(x)."""
        return self.product(norm.forward(x), bias, out)

    def gated_product(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        bias: torch.Tensor | None,
        kernels: LayerKernels,
        activation: str = SILU,
    ) -> torch.Tensor:
        """activation(gate) * up for norm(x), or for x if ``norm`` is None, as in a gated MLP (arXiv:2002.05202):
        [T, N / 2]. The first half of the weight's rows makes gate, the second half up. ``kernels`` computes the
        activation where the product does not; ``activation``: see ``LayerKernels.activate``."""
        product = self.product(x, bias) if norm is None else self.normed_product(x, norm, bias)
        return kernels.activate(product, activation)

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``residual`` [T, N] += the product of x, in place; returns ``residual``."""
        return residual.add_(self.product(x, bias))


class DenseWeight(Weight):
    """Plain floating-point numbers, multiplied by torch's operators: the reference on any device."""

    kind = "dense"

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, linear: Linear = F.linear) -> None:
        """Uninitialised, on the default device. ``linear`` computes the product."""
        super().__init__(out_features, in_features)
        self.linear = linear
        self.data = torch.empty(out_features, in_features, dtype=dtype)

    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        return {f"{name}.weight": WeightSlot(self.data[rows], full_shape, dim, start)}

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.linear(x, self.data, bias)
        return y if out is None else out.copy_(y)
