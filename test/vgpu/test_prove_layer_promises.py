"""What layers promise that no model of the proof needs, each with a fault."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch

from fenceline.layers import mxfp4, rotary, weight
from fenceline.layers.forward_batch import AuxHiddenStates
from fenceline.layers.linear import RowParallelLinear, VocabParallelEmbedding, WideNorm
from fenceline.layers.quantized import Fp8Format, QuantizedFormat
from fenceline.vgpu.proving import layer_promises
from fenceline.vgpu.proving.layer_promises import compare_layers
from fenceline.vgpu.proving.runs import ANSWERS, Trial, run

torch.set_num_threads(1)


def nothing(self: Any, *args: Any, **named: Any) -> None:
    """In the place of a method that does something."""


def each_adds(self: RowParallelLinear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return self.weight.add_product(residual, x, self.bias)


def of_its_own(self: WideNorm, x: torch.Tensor) -> torch.Tensor:
    return self.kernels.rms_norm(x.contiguous(), self.weight, self.eps)


def a_row_more(matrix: torch.Tensor, group: int) -> Any:
    return round_to_fp8(matrix, 2 * group)


round_to_fp8, yarn, shorten, repacked = (
    layer_promises.round_to_fp8,
    rotary._yarn,
    weight._shorten,
    mxfp4._repacked,
)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (AuxHiddenStates, "keep", nothing, "hidden states before the layers"),
        (weight, "_shorten", lambda names: shorten(names[:-1]), "weights are named"),
        (VocabParallelEmbedding, "_product", lambda self, x, norm, out=None: self.weight.product(x), "the logits of"),
        (VocabParallelEmbedding, "with_rows", lambda self, ids, context: self, "a head with the rows"),
        (RowParallelLinear, "add_to", each_adds, "is added as"),
        (WideNorm, "forward", of_its_own, "a norm over"),
        (mxfp4, "_repacked", lambda blocks: repacked(blocks.flip(-1)), "in MXFP4 are loaded as"),
        (mxfp4, "round_to_mxfp4", lambda matrix: rounded(2 * matrix), "matrices are rounded to"),
        (layer_promises, "round_to_fp8", a_row_more, "numbers in groups of|of a group up to"),
        (Fp8Format, "_choose_input_scale", nothing, "the input scales"),
        (QuantizedFormat, "group_start", lambda self, name, shape, dim, start: start, "takes scales in FP8"),
        (rotary, "_yarn", lambda dim, theta, scaling: yarn(dim, theta + 1, scaling), "has the frequency"),
    ],
)  # fmt: skip
def test_promises_of_layers_are_kept(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = next(filter(None, (compare_layers(Random(seed)) for seed in range(60))))
    assert re.search(says, found), found


rounded = mxfp4.round_to_mxfp4


def test_a_run_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuxHiddenStates, "keep", nothing)
    found = next(one for one in (run(Trial("mixed", seed)) for seed in range(8)) if not one.clean)
    assert found.checker == ANSWERS and "layers: hidden states" in found.report
