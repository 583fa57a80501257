"""Muon for the weight matrices (Keller Jordan, 2024): momentum, orthogonalised by Newton-Schulz steps."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(g: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices to g [n, rows, columns], by a quintic iteration."""
    a, b, c = _COEFFICIENTS
    x = g.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _muon_update(
    param: Tensor, momentum: Tensor, grad: Tensor, lr: Tensor, beta: float, weight_decay: float, dtype: torch.dtype
) -> None:
    momentum.lerp_(grad, 1 - beta)
    update = orthogonalize(grad.lerp(momentum, beta), dtype)  # Nesterov
    scale = max(1.0, param.size(-2) / param.size(-1)) ** 0.5
    param.mul_(1 - lr * weight_decay).sub_(update.to(param.dtype) * (lr * scale))


class OptimizerState(TypedDict):
    """What a checkpoint keeps: Muon's momenta and AdamW's own state."""

    momenta: list[Tensor]
    adam: dict[str, Any]


class Muon:
    """Muon over stacked matrices [n, rows, columns]; state is one fp32 momentum each."""

    def __init__(self, params: list[nn.Parameter], lr: float, dtype: torch.dtype, compiled: bool) -> None:
        self.params, self.lr, self.beta, self.weight_decay, self.dtype = params, lr, 0.95, 0.1, dtype
        self.momenta = [torch.zeros_like(param) for param in params]
        self._update = torch.compile(_muon_update, dynamic=False) if compiled else _muon_update

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        """One update at `lr * lr_scale`; consumes the gradients. What has none keeps its values."""
        lr = torch.tensor(self.lr * lr_scale, device=self.params[0].device)
        for param, momentum in zip(self.params, self.momenta, strict=True):
            if param.grad is None:
                continue
            self._update(param, momentum, param.grad, lr, self.beta, self.weight_decay, self.dtype)
            param.grad = None


class Optimizer:
    """Muon for the matrices, AdamW for embedding and norms, under one learning-rate scale."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], muon_lr: float, adam_lr: float,
        dtype: torch.dtype, compiled: bool,
    ) -> None:  # fmt: skip
        self.muon = Muon(matrices, muon_lr, dtype, compiled)
        self.adam_lr = adam_lr
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, lr_scale: float) -> None:
        """One update of every weight; consumes the gradients."""
        self.muon.step(lr_scale)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * lr_scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> OptimizerState:
        """The state to save; tensors are shared, not copied."""
        return {"momenta": self.muon.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: OptimizerState) -> None:
        """Restores a saved state."""
        for momentum, saved in zip(self.muon.momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self.adam.load_state_dict(state["adam"])
