"""A mixture of experts in place of an MLP (arXiv:1701.06538, arXiv:2401.04088). A router sends each token through a few
of many small MLPs, the experts. In some families all tokens also go through one more MLP, the shared expert.

No shape depends on the routing and the host never waits for it, so a graph can capture all of it. Padded tokens, whose
keys go to the sink page, are sent to no expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fenceline.config.families import ExpertsConfig
from fenceline.config.model_config import ModelConfig
from fenceline.config.quantization import QuantConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BEFORE_MLP, Branch, BranchNorms, LayerSite
from fenceline.layers.expert_matrices import ExpertMatrices
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import MOST_JOINED, RELU2, LayerKernels, Routing
from fenceline.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from fenceline.layers.weight import DenseWeight, RMSNorm, WeightSlot, WeightSlots, whole


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the checkpoint: ``mixer`` is the MLP's, the others follow it. None: no such tensor."""

    mixer: str = "mlp"
    gate: str | None = "gate_proj"  # of each expert; None: they are down(relu(up(x))²)
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str | None = None  # a bias that is added to the scores when experts are chosen
    shared: str | None = None  # the shared expert
    shared_gate: str | None = None  # the product whose sigmoid is the weight of the shared expert
    router: str = "gate"
    # One tensor has the matrices of all experts: the rows of gate before those of up ("halves"), or one of each in turn
    # ("turns"), and then there are biases too. None: each matrix has a tensor.
    stacked: Literal["halves", "turns"] | None = None


class Router:
    """Chooses the experts of each token and their weights. Computed in float32."""

    def __init__(self, experts: ExpertsConfig, hidden_size: int, names: ExpertNames, kernels: LayerKernels) -> None:
        def scores() -> torch.Tensor:
            return torch.empty(experts.num_experts, dtype=torch.float32)

        self.experts, self.names = experts, names
        self._kernels = kernels
        self.weight = torch.empty(experts.num_experts, hidden_size, dtype=torch.float32)
        kernels.prepare_linear(experts.num_experts, hidden_size, torch.float32)
        self.bias = scores() if names.stacked == "turns" else None
        self.correction = None if names.correction is None else scores()

    def forward(
        self,
        x: torch.Tensor,
        out_slots: torch.Tensor,
        num_sink_slots: int,
        norm: RMSNorm | None = None,
        joined: bool = False,
    ) -> tuple[torch.Tensor, Routing]:
        """norm(x), of x [T, hidden_size], and its routing. Tokens with ``out_slots`` [T] below ``num_sink_slots`` go to
        no expert. ``joined``: see ``LayerKernels.route``."""
        if norm is None:
            logits = self._kernels.router_logits(x, self.weight)
        else:
            x, logits = self._kernels.normed_logits(x, norm.weight, norm.eps, self.weight)
        if self.bias is not None:
            logits.add_(self.bias)
        return x, self._kernels.route(logits, self.correction, out_slots, num_sink_slots, self.experts, joined)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = {f"{prefix}{self.names.router}.weight": whole(self.weight)}
        if self.bias is not None:
            slots[f"{prefix}{self.names.router}.bias"] = whole(self.bias)
        if self.correction is not None:
            slots[f"{prefix}{self.names.correction}"] = whole(self.correction)
        return slots


class SharedExpert:
    """An MLP for all tokens, gated if the others are. In some families its result is multiplied by the sigmoid of a
    product of x."""

    def __init__(self, config: ModelConfig, size: int, names: ExpertNames, context: LayerContext) -> None:
        hidden_size = config.hidden_size
        outputs = {"up_proj": size} if names.gate is None else {"gate_proj": size, "up_proj": size}
        self.names, self.activation, self.kernels = names, config.activation, context.kernels
        inside = context.inside(str(names.shared))
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, outputs, False, inside)
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, False, inside)
        self.gate: ReplicatedLinear | None = None
        if names.shared_gate is not None:
            plain = replace(context, format=None)  # no format rounds it
            self.gate = ReplicatedLinear(names.shared_gate, hidden_size, 1, False, plain)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y [T, hidden_size] += this rank's part of the expert's result for x, in place; returns y."""
        if self.names.gate is None:
            inner = self.kernels.activate(self.gate_up_proj.forward(x), RELU2)
        else:
            inner = self.gate_up_proj.forward_gated(x, None, self.activation)
        if self.gate is not None:
            inner = inner * self.kernels.sigmoid(self.gate.forward(x))
        return self.down_proj.weight.add_product(y, inner, None)

    def weight_slots(self, prefix: str) -> WeightSlots:
        inside = f"{prefix}{self.names.shared}."
        slots = {**self.gate_up_proj.weight_slots(inside), **self.down_proj.weight_slots(inside)}
        return slots if self.gate is None else slots | self.gate.weight_slots(prefix)


class ExpertsMLP(Branch):
    """x += the sum of weight * expert(norm(x)) over each token's experts, + shared(norm(x)). Each rank holds a part of
    the features of every expert, or with --ep-size of some of the experts, and sees all tokens. It adds up what its
    parts contribute, so one all-reduce completes the result, whatever the routing is."""

    def __init__(self, site: LayerSite, names: ExpertNames = ExpertNames(), norms: BranchNorms = BEFORE_MLP) -> None:
        super().__init__(site.config, site.context, norms)
        self.name = names.mixer
        config, context = site.config, site.context.inside(self.name)
        assert config.experts is not None, "the family reads its experts from config.json"
        experts, hidden_size = config.experts, config.hidden_size
        self.names, self.shard, self._kernels = names, context.shard, context.kernels
        self.full_size = experts.intermediate_size
        # Which experts this rank holds, and which part of their features.
        group, part = divmod(self.shard.rank, num_parts := self.shard.size // self.shard.ep_size)
        num_own = experts.num_experts // self.shard.ep_size
        self.own = range(group * num_own, (group + 1) * num_own)
        assert num_own * self.shard.ep_size == experts.num_experts, "the flags have been checked"
        if self.full_size % num_parts:
            raise ValueError(
                f"expert features {self.full_size} cannot be split over {num_parts} ranks; choose a tensor-parallel"
                " size that divides them"
            )
        self.size = self.full_size // num_parts
        self.start = part * self.size
        self.adds_down_bias = part == 0  # only one rank adds it, because the ranks' results are summed
        self.router = Router(experts, hidden_size, names, context.kernels)
        all_experts = [f"experts.{expert}." for expert in range(experts.num_experts)]

        def format_of(*matrices: str) -> QuantConfig | None:
            names_of_all = [expert + matrix for expert in all_experts for matrix in matrices]
            return experts.format or context.format_of(names_of_all)

        # Projections to and from what the experts read and make, if it is not the hidden state.
        self.to_latent = self.from_latent = None
        if latent := experts.latent_size:
            self.to_latent = ReplicatedLinear("fc1_latent_proj", hidden_size, latent, False, context)
            self.from_latent = ReplicatedLinear("fc2_latent_proj", latent, hidden_size, False, context)
            hidden_size = latent
        self.inner_names = [name for name in (names.gate, names.up) if name is not None]
        up_format, down_format = format_of(*self.inner_names), format_of(names.down)
        self.shared = SharedExpert(config, experts.shared_size, names, context) if names.shared else None
        # Few tokens go through a shared expert that is like the others in the launches of these.
        shared = [] if self.shared is None else [self.shared.gate_up_proj.weight, self.shared.down_proj.weight]
        like = [weight for weight in shared if isinstance(weight, DenseWeight)]
        self.joins = (
            len(like) == 2 and up_format is None and down_format is None and experts.shared_size == self.full_size
            and self.shard.ep_size == 1 and not context.kernels.fixed_order and self.to_latent is None
            and names.gate is not None and names.shared_gate is None and names.stacked is None
        )  # fmt: skip
        num = num_own + self.joins
        self.gate_up = ExpertMatrices(num, len(self.inner_names) * self.size, hidden_size, context, up_format)
        self.down = ExpertMatrices(num, hidden_size, self.size, context, down_format)
        if self.joins:
            like[0].data, like[1].data = self.gate_up.data[-1], self.down.data[-1]
        self.limit, self.activation = experts.limit, config.activation
        self.gate_up_bias = self.down_bias = None
        if names.stacked == "turns":
            self.gate_up_bias = torch.empty(num_own, 2 * self.size, dtype=context.dtype)
            self.down_bias = torch.empty(num_own, hidden_size, dtype=context.dtype)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        h, joined = batch.normed.pop(self.input_norm, None), self.joins and len(x) <= MOST_JOINED
        read, norm = (x, self.input_norm) if h is None else (h, None)
        h, routing = self.router.forward(read, batch.out_slots, batch.kv_pool.page_size, norm, joined)
        if self.shard.ep_size > 1:
            routing = self._kernels.of_experts(routing, self.own)
        read = h if self.to_latent is None else self.to_latent.forward(h)
        if self.names.gate is None:
            inner = self._kernels.activate(self.gate_up.product(read, routing), RELU2)
        else:
            inner = self.gate_up.product(
                read, routing, gated=True, bias=self.gate_up_bias, limit=self.limit, activation=self.activation
            )
        product = self.down.product(inner, routing, bias=self.down_bias if self.adds_down_bias else None)
        adds = self.from_latent is None and self.adds_plainly and self.shard.size == 1
        adds = adds and (self.shared is None or h is not x)
        y = self._kernels.combine_experts(product, routing, x if adds else None)
        if self.from_latent is not None:  # of a sum it is the sum of the ranks' products
            y = self.from_latent.forward(y)
        if self.shared is not None and not joined:
            y = self.shared.add_to(y, h)
        return y if adds else self.add_parts(x, y, self.shard, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = self.router.weight_slots(prefix)
        for linear in (self.to_latent, self.from_latent):
            slots |= {} if linear is None else linear.weight_slots(prefix)
        if self.names.stacked:
            return slots | self._stacked_slots(f"{prefix}experts.")
        _, hidden_size, size = self.down.shape
        start, names, full = self.start, self.names, (self.full_size, hidden_size)
        for expert in range(self.router.experts.num_experts):
            inside, is_own = f"{prefix}experts.{expert}.", expert in self.own
            index = self.own.index(expert) if is_own else 0
            found = self.down.slots(inside + names.down, index, slice(0, hidden_size), full[::-1], 1, start)
            for number, name in enumerate(self.inner_names):
                rows = slice(number * size, (number + 1) * size)
                found |= self.gate_up.slots(inside + name, index, rows, full, 0, start)
            slots |= found if is_own else {name: _empty_slot(slot) for name, slot in found.items()}
        return slots if self.shared is None else slots | self.shared.weight_slots(prefix)

    def _stacked_slots(self, prefix: str) -> WeightSlots:
        """The slots of tensors that each hold the matrices or biases of all experts."""
        num, own, both = (self.router.experts.num_experts, slice(self.own.start, self.own.stop), 2 * self.full_size)
        hidden_size, start = self.down.shape[1], self.start

        def apart(x: torch.Tensor) -> torch.Tensor:
            """Rows of gate and up, [experts, 2 * features, ...] → [own experts, 2, features, ...]."""
            if self.names.stacked == "halves":
                return x[own].unflatten(1, (2, -1))
            return x[own].unflatten(1, (-1, 2)).transpose(1, 2)

        biases: WeightSlots = {}
        if self.gate_up_bias is not None and self.down_bias is not None:
            bias = self.gate_up_bias.unflatten(1, (2, -1))
            biases[f"{prefix}gate_up_proj_bias"] = WeightSlot(bias, (num, both), 2, start, apart)
            biases[f"{prefix}down_proj_bias"] = WeightSlot(self.down_bias, (num, hidden_size), 0, own.start)
        return {
            **biases,
            **self.gate_up.stacked_slots(f"{prefix}gate_up_proj", (num, both, hidden_size), apart, start, halves=True),
            **self.down.stacked_slots(
                f"{prefix}down_proj", (num, hidden_size, self.full_size), lambda x: x[own], start
            ),
        }


def _empty_slot(slot: WeightSlot) -> WeightSlot:
    """A slot for a tensor like that of ``slot`` of which this rank keeps nothing."""
    empty = torch.empty(0, dtype=slot.dtype)
    return WeightSlot(empty, slot.full_shape, convert=lambda tensor: tensor.reshape(-1)[:0], optional=slot.optional)
