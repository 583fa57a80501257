"""Attention, sampling and loading of random inputs are compared with what they must do, and models of several families
and number formats with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from tiny_model import without_questions

from fenceline.layers import decoder_layer
from fenceline.layers.attention.reference import ReferencePlan
from fenceline.layers.decoder_layer import SelfAttention
from fenceline.layers.expert_matrices import ExpertMatrices
from fenceline.layers.experts import SharedExpert
from fenceline.layers.linear import VocabParallelEmbedding, WideNorm
from fenceline.layers.weight import WeightSlot
from fenceline.sampling import sampler, sampling_batch
from fenceline.sampling.sampler import TokenCounts
from fenceline.vgpu.proving.runs import ANSWERS, Trial, run
from fenceline.vgpu.proving.sampled_batches import compare_sampling
from fenceline.vgpu.proving.weight_slots import compare_weight_slots

torch.set_num_threads(1)

last_in_nucleus, begin, arrays_of = sampler._last_in_nucleus, TokenCounts.begin, sampling_batch._add_filters
penalized = TokenCounts.apply
attend = ReferencePlan.attend
check = WeightSlot.check


def without_sinks(self: ReferencePlan, *args: Any) -> torch.Tensor:
    return attend(self, *args[:-1], replace(args[-1], sinks=None))


def counts_every_second(
    self: TokenCounts, row: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor
) -> None:
    begin(self, row, prompt_ids, output_ids[::2])


def shifted(self: TokenCounts, *args: Any) -> torch.Tensor:
    return penalized(self, *args) - 1


def names_all(arrays: dict[str, Any], reqs: Any) -> None:
    arrays_of(arrays, reqs)
    if "top_ks" in arrays:
        arrays.setdefault("filter_index", sampling_batch.np.arange(len(reqs)))


def shapes_of_two(self: WeightSlot, name: str, tensor: torch.Tensor) -> None:
    check(self if self.full_shape else replace(self, full_shape=(2,)), name, tensor)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "compare", "says"),
    [
        (sampler, "_last_in_nucleus", lambda *args: last_in_nucleus(*args) + 1, compare_sampling, "are kept"),
        (TokenCounts, "begin", counts_every_second, compare_sampling, "is drawn in place of"),
        (TokenCounts, "apply", shifted, compare_sampling, "penalties change the logits of"),
        (sampling_batch, "_add_filters", names_all, compare_sampling, "names none or all of"),
        (WeightSlot, "check_type", lambda *args: None, compare_weight_slots, "are taken"),
        (WeightSlot, "check", shapes_of_two, compare_weight_slots, "are refused"),
    ],
)
def test_random_inputs_show_the_fault(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fault: Callable[..., Any],
    compare: Callable[[Random], str],
    says: str,
) -> None:
    assert not any(compare(Random(seed)) for seed in range(40))
    monkeypatch.setattr(owner, name, fault)
    found = [compare(Random(seed)) for seed in range(40)]
    assert any(says in one for one in found), found
    outcomes = (run(Trial("mixed", seed)) for seed in range(60))
    assert next(outcome for outcome in outcomes if not outcome.clean)


def as_it_is(self: Any, x: Any, *args: Any) -> Any:
    return x


def not_masked(self: VocabParallelEmbedding, x: torch.Tensor, norm: Any, out: Any = None) -> torch.Tensor:
    return self._product(x, norm, out)


def of_the_next(self: ExpertMatrices, name: str, expert: int, *args: Any) -> Any:
    return slots(self, name, (expert + 1) % self.shape[0], *args)


def only_with_scaled_keys(self: SelfAttention, attended: torch.Tensor) -> torch.Tensor:
    return attended if self._kv_scales.k == 1 else values(self, attended)


def not_between_pieces(self: SelfAttention, batch: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfAttention, "_as_values", as_it_is)
        between_pieces(self, batch)


slots, values = ExpertMatrices.slots, SelfAttention._as_values
between_pieces, in_order = SelfAttention.attend_between_pieces, decoder_layer._reordered


def in_reverse(order: Any, convert: Any, tensor: torch.Tensor) -> torch.Tensor:
    return in_order(order[::-1], convert, tensor)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "workload"),
    [
        (SharedExpert, "add_to", as_it_is, "experts"),
        (ExpertMatrices, "slots", of_the_next, "experts"),
        (ReferencePlan, "attend", without_sinks, "windows"),
        (WideNorm, "forward", as_it_is, "models"),
        (SelfAttention, "_take_kv_scales", lambda self: None, "fp8"),
        (SelfAttention, "_as_values", only_with_scaled_keys, "fp8"),
        (SelfAttention, "attend_between_pieces", not_between_pieces, "fp8"),
        (decoder_layer, "_reordered", in_reverse, "models"),
        (VocabParallelEmbedding, "own_logits", not_masked, "ranks"),
    ],
)
def test_runs_of_models_show_the_fault(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any], workload: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    without_questions(monkeypatch)
    outcomes = (run(Trial(workload, seed)) for seed in range(40))
    found = next(outcome for outcome in outcomes if not outcome.clean)
    assert found.checker == ANSWERS and (" in place of " in found.report or "alone it is" in found.report)
