"""The sampler of ranks: the tokens that one sampler draws from the whole row, and no more exchanged than they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from ranks import Ranks

from fenceline.layers.context import torch_context
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.sampling.rank_sampler import RankSampler, gather_pieces
from fenceline.sampling.sampler import SampleOutput, Sampler
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams

CPU = torch.device("cpu")
NUM_ROWS, NUM_REQS = 16, 12


def make_batch(reqs: Sequence[ReqSampling]) -> SamplingBatch:
    views = {name: torch.from_numpy(array) for name, array in sampling_arrays(reqs).items()}
    return SamplingBatch.from_views(reqs, views)


def request(index: int, **params: float) -> ReqSampling:
    return ReqSampling(SamplingParams(**params), seed=index * 77 + 5, row=index + 1, prompt_len=3)  # type: ignore[arg-type]


def greedy(index: int) -> ReqSampling:
    return request(index, temperature=0.0)


def drawn(index: int) -> ReqSampling:
    return request(index, temperature=0.3 + index / 4)


def mixed(index: int) -> ReqSampling:
    return greedy(index) if index % 3 == 0 else drawn(index)


def filtered(index: int) -> ReqSampling:
    return request(index, temperature=1.0, top_p=0.5) if index == 4 else mixed(index)


def penalised(index: int) -> ReqSampling:
    return request(index, temperature=1.0, repetition_penalty=3.0) if index == 7 else mixed(index)


def scored(index: int) -> ReqSampling:
    return replace(mixed(index), return_logprob=True, top_logprobs_num=2)


def sample(
    size: int,
    logits: torch.Tensor,
    kind: Callable[[int], ReqSampling],
    steps: int = 1,
    masks: torch.Tensor | None = None,
) -> tuple[list[SampleOutput], list[list[SampleOutput]], int]:
    """What one sampler draws, what each of ``size`` ranks draws, and how many elements each of them has sent."""
    num_reqs, vocab_size = logits.shape
    batch, ranks = make_batch([kind(index) for index in range(num_reqs)]), Ranks(size)
    samplers: list[Sampler] = [Sampler(vocab_size, NUM_ROWS, CPU)]
    parts = [logits]
    for shard in ranks.shards:
        head = VocabParallelEmbedding(vocab_size, 4, torch_context(shard, torch.float32))
        part = logits.new_full((num_reqs, head.weight.shape[0]), -torch.inf)
        part[:, : head.num_live_rows] = logits[:, head.first_row : head.first_row + head.num_live_rows]
        samplers.append(RankSampler(head, NUM_ROWS, CPU))
        parts.append(part)
    seen = torch.arange(min(vocab_size, 3))
    for sampler in samplers:
        for row in () if batch.penalty_rows is None else batch.penalty_rows.tolist():
            sampler.begin_request(row, seen, seen[:1])

    def run(which: int) -> list[SampleOutput]:
        positions = torch.arange(num_reqs)
        return [samplers[which].forward(parts[which], positions + step, batch, masks) for step in range(steps)]

    return run(0), ranks.run(lambda rank: run(rank + 1)), ranks.num_sent[0]


@pytest.mark.parametrize("kind", [greedy, drawn, mixed, filtered, penalised, scored])
@pytest.mark.parametrize(("vocab_size", "size"), [(40, 2), (41, 2), (41, 4), (5, 4)])
def test_ranks_draw_what_one_draws(kind: Callable[[int], ReqSampling], vocab_size: int, size: int) -> None:
    logits = torch.randn(NUM_REQS, vocab_size, generator=torch.Generator().manual_seed(1))
    expected, by_rank, _ = sample(size, logits, kind, steps=8)
    for outputs in by_rank:
        for ours, whole in zip(outputs, expected, strict=True):
            assert ours.next_tokens.tolist() == whole.next_tokens.tolist()
            assert (ours.logprobs is None) == (whole.logprobs is None)
            if ours.logprobs is not None and whole.logprobs is not None:
                assert torch.equal(ours.logprobs.chosen, whole.logprobs.chosen)
                assert torch.equal(ours.logprobs.top_ids, whole.logprobs.top_ids)


def test_masks_hold_for_the_tokens_of_every_rank() -> None:
    """As a grammar's do: beside requests that ask for nothing else, each draws the only token that it may."""
    allowed = torch.arange(NUM_REQS) * 7 % 41
    masks = torch.zeros(NUM_REQS, 2, dtype=torch.int32)
    masks[torch.arange(NUM_REQS), allowed // 32] = (1 << allowed % 32).int()
    _, by_rank, _ = sample(4, torch.randn(NUM_REQS, 41), mixed, masks=masks)
    assert [output.next_tokens.tolist() for (output,) in by_rank] == [allowed.tolist()] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_the_lowest_of_tied_tokens_wins(size: int) -> None:
    logits = torch.zeros(NUM_REQS, 23)
    for row in range(NUM_REQS):
        logits[row, [3 + row // 2, 12, 22]] = 5.0
    _, by_rank, _ = sample(size, logits, greedy)
    for (output,) in by_rank:
        assert output.next_tokens.tolist() == [3 + row // 2 for row in range(NUM_REQS)]


def test_rows_without_a_number_give_a_token_of_the_vocabulary() -> None:
    logits = torch.randn(NUM_REQS, 41)
    logits[2], logits[3], logits[4, 40] = torch.nan, -torch.inf, torch.nan
    for kind in (greedy, drawn):
        _, by_rank, _ = sample(4, logits, kind)
        tokens = [output.next_tokens.tolist() for (output,) in by_rank]
        assert all(row == tokens[0] for row in tokens)
        assert all(0 <= token < 41 for token in tokens[0])


def test_rows_are_gathered_only_where_somebody_looks_at_them() -> None:
    logits = torch.randn(NUM_REQS, 1000)
    assert sample(2, logits, greedy)[2] == NUM_REQS * 2  # a score and an id
    assert sample(2, logits, mixed)[2] == NUM_REQS * 3  # and the maximum
    for kind in (filtered, penalised, scored):
        assert sample(2, logits, kind)[2] == NUM_REQS * 500


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_gathered_pieces_are_contiguous(num_pieces: int) -> None:
    """The kernels read them without strides. A small vocabulary is one piece on each rank."""
    ranks = Ranks(2)
    scores, ids = torch.randn(NUM_REQS, num_pieces), torch.arange(NUM_REQS * num_pieces, dtype=torch.int32)
    parts = ranks.run(lambda rank: gather_pieces(ranks.shards[rank], scores + rank, ids.view(NUM_REQS, -1) + rank))
    for gathered in parts:
        assert all(values.is_contiguous() for values in gathered)
        assert torch.equal(gathered[0], torch.cat((scores, scores + 1), 1))
        assert torch.equal(gathered[1], torch.cat((ids.view(NUM_REQS, -1), ids.view(NUM_REQS, -1) + 1), 1))
