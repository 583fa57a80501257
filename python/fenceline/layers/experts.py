"""A mixture of experts in place of an MLP (arXiv:1701.06538, arXiv:2401.04088): a router sends each token through a few
of many small MLPs, and in some families all tokens through one more, the shared expert.

No shape depends on the routing and the host never waits for it, so a graph can capture the whole. Padded tokens, whose
keys go to the sink, go to no expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fenceline.config.families import ExpertsConfig
from fenceline.config.model_config import ModelConfig
from fenceline.layers.branch import Branch, BranchNorms
from fenceline.layers.context import LayerContext, converts_fp8
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import LayerKernels, Routing
from fenceline.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from fenceline.layers.mxfp4 import mxfp4_slots
from fenceline.layers.quantized import QuantizedFormat, make_format
from fenceline.layers.weight import WeightSlot, WeightSlots, whole

_BEFORE = BranchNorms("post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the checkpoint, below the mixer's. None: the family has no such tensor."""

    gate: str = "gate_proj"  # of each expert
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str | None = None  # of the scores when experts are chosen
    shared: str | None = None  # the shared expert
    shared_gate: str | None = None  # how much of it a token takes
    router: str = "gate"
    together: bool = (
        False  # all experts' matrices in one tensor each, gate and up row by row in turn, and biases
    )


class Router:
    """Which experts each token goes through, and how much each of them counts. Computed in float32."""

    def __init__(
        self, experts: ExpertsConfig, hidden_size: int, names: ExpertNames, kernels: LayerKernels
    ) -> None:
        def scores() -> torch.Tensor:
            return torch.empty(experts.num_experts, dtype=torch.float32)

        self.experts, self.names = experts, names
        self._kernels = kernels
        self.weight = torch.empty(experts.num_experts, hidden_size, dtype=torch.float32)
        self.bias = scores() if names.together else None
        self.correction = None if names.correction is None else scores()

    def forward(self, x: torch.Tensor, out_slots: torch.Tensor, num_sink_slots: int) -> Routing:
        """x [T, hidden_size]. Tokens whose ``out_slots`` [T] are among the first ``num_sink_slots`` go to no expert."""
        logits = self._kernels.router_logits(x, self.weight)
        if self.bias is not None:
            logits.add_(self.bias)
        return self._kernels.route(logits, self.correction, out_slots, num_sink_slots, self.experts)

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        slots = {f"{prefix}{self.names.router}.weight": whole(self.weight)}
        if self.bias is not None:
            slots[f"{prefix}{self.names.router}.bias"] = whole(self.bias)
        if self.correction is not None:
            slots[f"{prefix}{self.names.correction}"] = whole(self.correction)
        return slots


class SharedExpert:
    """The SwiGLU of all tokens, in some families weighted by the sigmoid of a product."""

    def __init__(self, config: ModelConfig, size: int, names: ExpertNames, context: LayerContext) -> None:
        hidden_size = config.hidden_size
        outputs = {"gate_proj": size, "up_proj": size}
        self.names = names
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, outputs, False, context)
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, False, context)
        self.gate: ReplicatedLinear | None = None
        if names.shared_gate is not None:
            plain = replace(context, linear=context.dense)  # no format rounds it
            self.gate = ReplicatedLinear(names.shared_gate, hidden_size, 1, False, plain)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y [T, hidden_size] += this rank's part of the expert of x, in place; returns y."""
        gated = self.gate_up_proj.forward_gated(x, None)
        if self.gate is not None:
            gated = gated * self.gate.forward(x).sigmoid()
        return self.down_proj.weight.add_product(y, gated, None)

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        inside = f"{prefix}{self.names.shared}."
        slots = {**self.gate_up_proj.weight_slots(inside), **self.down_proj.weight_slots(inside)}
        return slots if self.gate is None else slots | self.gate.weight_slots(prefix)


class ExpertMatrices:
    """A matrix [rows, k] of each expert, in the number format of the model's linear layers. One format holds them all,
    one below the other: ``data`` [num, rows, k] and, in FP8, ``scales`` [num, rows, groups]."""

    def __init__(self, num: int, rows: int, k: int, context: LayerContext) -> None:
        """Uninitialised, on the default device."""
        self.shape = num, rows, k
        self.scales: torch.Tensor | None = None
        self._stored: QuantizedFormat | None = None
        if context.format is None:
            self.data = torch.empty(num, rows, k, dtype=context.dtype)
        else:
            self._stored = make_format(context.format, num * rows, k, context.dtype)
            if not converts_fp8(self._stored.data.device):
                raise ValueError(
                    "experts in fp8 need a GPU of compute capability 8.9 or more: use the model's unquantised weights"
                )
            self.data = self._stored.data.view(num, rows, -1)
            self.scales = self._stored.scales.view(num, rows, -1)

    def slots(
        self, name: str, expert: int, rows: slice, full_shape: tuple[int, int], dim: int, start: int
    ) -> WeightSlots:
        """Where the tensors of the matrix ``name`` go: into ``rows`` of that of ``expert``. See ``Weight.slots``."""
        if self._stored is None:
            return {f"{name}.weight": WeightSlot(self.data[expert, rows], full_shape, dim, start)}
        first = expert * self.shape[1]
        return self._stored.slots(name, slice(first + rows.start, first + rows.stop), full_shape, dim, start)


class ExpertsMLP(Branch):
    """x += sum of weight * expert(norm(x)) over each token's experts, + shared(norm(x)). Each rank holds a part of the
    features of every expert, or with --ep-size of some of them, and sees all tokens. It adds up what its part gives, so
    one sum over the ranks completes the result, however the tokens are spread over the experts."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        names: ExpertNames = ExpertNames(),
        norms: BranchNorms = _BEFORE,
    ) -> None:
        super().__init__(config, context, norms)
        assert config.experts is not None, "the family reads its experts from config.json"
        experts, hidden_size = config.experts, config.hidden_size
        self.names, self.shard, self._kernels = names, context.shard, context.kernels
        self.full_size = experts.intermediate_size
        # This rank's experts, and its part of their features.
        group, part = divmod(self.shard.rank, num_parts := self.shard.size // self.shard.ep_size)
        num_own = experts.num_experts // self.shard.ep_size
        self.own = range(group * num_own, (group + 1) * num_own)
        assert num_own * self.shard.ep_size == experts.num_experts, "the flags have been checked"
        assert not (names.together and self.shard.ep_size > 1), "the flags have been checked"
        if self.full_size % num_parts:
            raise ValueError(
                f"expert features {self.full_size} cannot be split over {num_parts} ranks; choose a tensor-parallel"
                " size that divides them"
            )
        self.size = self.full_size // num_parts
        self.start = part * self.size
        self.router = Router(experts, hidden_size, names, context.kernels)
        self.gate_up = ExpertMatrices(num_own, 2 * self.size, hidden_size, context)
        self.down = ExpertMatrices(num_own, hidden_size, self.size, context)
        self.shared = SharedExpert(config, experts.shared_size, names, context) if names.shared else None
        self.limit, self.mxfp4 = experts.limit, experts.mxfp4
        self.gate_up_bias = self.down_bias = None
        if names.together:
            self.gate_up_bias = torch.empty(experts.num_experts, 2 * self.size, dtype=context.dtype)
            self.down_bias = torch.empty(experts.num_experts, hidden_size, dtype=context.dtype)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        h = x if self.input_norm is None else self.input_norm.forward(x)
        routing = self.router.forward(h, batch.out_slots, batch.kv_pool.page_size)
        if self.shard.ep_size > 1:
            routing = routing.of_experts(self.own)
        gate_up, down = self.gate_up, self.down
        gated = self._kernels.grouped_product(
            h,
            gate_up.data,
            routing,
            gated=True,
            bias=self.gate_up_bias,
            limit=self.limit,
            scales=gate_up.scales,
        )
        down_bias = self.down_bias if self.shard.rank == 0 else None  # the ranks' results are summed
        product = self._kernels.grouped_product(gated, down.data, routing, bias=down_bias, scales=down.scales)
        if self.shared is None and self.adds_plainly and self.shard.size == 1:
            return self._kernels.combine_experts(product, routing, x)
        y = self._kernels.combine_experts(product, routing)
        if self.shared is not None:
            y = self.shared.add_to(y, h)
        return self.add(x, self.shard.all_reduce(y))

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = self.router.weight_slots(prefix)
        if self.names.together:
            return slots | self._slots_together(f"{prefix}experts.")
        _, hidden_size, size = self.down.shape
        start, names, full = self.start, self.names, (self.full_size, hidden_size)
        for expert in range(self.router.experts.num_experts):
            inside, is_own = f"{prefix}experts.{expert}.", expert in self.own
            index = self.own.index(expert) if is_own else 0
            found = {
                **self.gate_up.slots(inside + names.gate, index, slice(0, size), full, 0, start),
                **self.gate_up.slots(inside + names.up, index, slice(size, 2 * size), full, 0, start),
                **self.down.slots(inside + names.down, index, slice(0, hidden_size), full[::-1], 1, start),
            }
            slots |= found if is_own else {name: _nothing_of(slot) for name, slot in found.items()}
        return slots if self.shared is None else slots | self.shared.weight_slots(prefix)

    def _slots_together(self, prefix: str) -> WeightSlots:
        """The slots of all experts' matrices in one tensor each: plain ones, which are transposed, or MXFP4's."""
        assert self.gate_up_bias is not None and self.down_bias is not None
        (num, hidden_size, _), start = self.down.shape, self.shard.rank * self.size
        both, down = 2 * self.full_size, self.down.data
        gate_up, bias = self.gate_up.data.unflatten(1, (2, -1)), self.gate_up_bias.unflatten(1, (2, -1))
        slots = {
            f"{prefix}gate_up_proj_bias": WeightSlot(bias, (num, both), 2, start, _apart),
            f"{prefix}down_proj_bias": whole(self.down_bias),
        }
        if self.mxfp4:
            rows = (num, both, hidden_size)
            slots |= mxfp4_slots(
                f"{prefix}gate_up_proj", gate_up, rows, 1, start, lambda x: _apart(x[None])[0]
            )
            return slots | mxfp4_slots(
                f"{prefix}down_proj", down, (num, hidden_size, self.full_size), 1, start
            )
        slots[f"{prefix}gate_up_proj"] = WeightSlot(
            gate_up, (num, hidden_size, both), 2, start, lambda x: _apart(x.transpose(1, 2))
        )
        slots[f"{prefix}down_proj"] = WeightSlot(
            down, (num, self.full_size, hidden_size), 2, start, lambda x: x.transpose(1, 2)
        )
        return slots


def _nothing_of(slot: WeightSlot) -> WeightSlot:
    """For a tensor like that of ``slot``, of which this rank takes no part."""
    empty = torch.empty(0, dtype=slot.dtype)
    return WeightSlot(empty, slot.full_shape, convert=lambda tensor: tensor.reshape(-1)[:0])


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turn, [experts, 2 features, ...] → [experts, 2, features, ...]."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2)
