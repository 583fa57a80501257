"""Several ranks that speculate together: each verifies with its part of the target, and all give the tokens that one
rank gives without speculation."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file, save_file
from scheduler_driver import answers, request
from speculative_driver import (
    DRAFTS,
    EAGLE,
    EAGLE3,
    LATENT_DRAFTS,
    NEXTN,
    STANDALONE,
    count_tokens,
    make_driver,
    models,
    plain_answers,
    requests,
    target_of,
)

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.engine_config import EngineConfig
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.model_executor import model_runner
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepCosts
from fenceline.models.draft import SharingDraft
from fenceline.sampling.gumbel import mix_seeds
from fenceline.speculative.draws import best_drafts, draw_draft, drawn_tokens

__all__ = ["models"]  # a fixture

GRAPHS: dict[str, object] = {"cuda_graph_bs": [1, 2, 4, 8], "piecewise_cuda_graph_tokens": [16, 32]}


def _on_ranks(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None, size: int = 2, **options: object
) -> list[tuple[list[list[int]], Counter[int]]]:
    """The answers that each rank gives, and of its decode steps how many requests got how many tokens."""
    ranks = Ranks(size)

    def run(rank: int) -> tuple[list[list[int]], Counter[int]]:
        driver = make_driver(
            models,
            algorithm,
            draft,
            device=ranks.devices[rank],
            shard=ranks.shards[rank],
            **options,  # type: ignore[arg-type]
        )
        counts = count_tokens(driver)
        return answers(driver, requests(5)), counts

    return ranks.run(run)


OF_TREES = [(EAGLE, "eagle"), (EAGLE3, "eagle3"), (NEXTN, None), (STANDALONE, "near")]


@pytest.mark.parametrize(
    ("algorithm", "draft"), [*(draft for draft in DRAFTS if draft not in OF_TREES), LATENT_DRAFTS[1]]
)
def test_ranks_with_drafts_answer_as_one_without(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None
) -> None:
    expected = plain_answers(models, requests(5), target_of(draft))
    alone = make_driver(models, algorithm, draft, **GRAPHS)  # type: ignore[arg-type]
    counts = count_tokens(alone)
    assert answers(alone, requests(5)) == expected
    assert _on_ranks(models, algorithm, draft, **GRAPHS) == [(expected, counts)] * 2, "as many drafts count"


@pytest.mark.parametrize(("algorithm", "draft"), OF_TREES)
def test_ranks_with_trees_answer_as_one_without(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None
) -> None:
    expected = plain_answers(models, requests(5))
    for found, _ in _on_ranks(models, algorithm, draft, topk=3, **GRAPHS):
        assert found == expected


def test_ranks_agree_on_the_depth_of_their_steps(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measures its own steps; the depth is chosen by what rank 0 has measured. Alone, one of these two ranks would
    never draft, and the other always."""
    costs_of_drafts = iter([9.0, 0.0])  # of all drafts together, in steps without

    def measured(config: EngineConfig, *_: object) -> StepCosts:
        assert config.speculative is not None
        further = 1.0 + next(costs_of_drafts)
        return StepCosts((8,), ((1.0, *[further] * (len(config.speculative.shapes) - 1)),))

    monkeypatch.setattr(model_runner, "measure_steps", measured)
    expected = plain_answers(models, requests(5))
    first, second = _on_ranks(models, STANDALONE, "target", measures_steps=True)
    assert first == second and first[0] == expected


def test_no_rank_alone_shares_a_table_with_the_target(models: dict[str, Path], tmp_path: Path) -> None:
    """A draft that brings the target's embedding but for its last token: only the last rank's part differs."""
    shutil.copytree(models["eagle"], tmp_path / "eagle")
    path = tmp_path / "eagle" / "model.safetensors"
    target = {k: v for file in models["target"].glob("*.safetensors") for k, v in load_file(file).items()}
    table = target["model.embed_tokens.weight"].clone()
    table[-1] += 1
    save_file(load_file(path) | {"embed_tokens.weight": table}, path, {"format": "pt"})
    ranks = Ranks(2)

    def shares(rank: int) -> bool:
        driver = make_driver(
            models | {"eagle": tmp_path / "eagle"}, EAGLE, "eagle",
            device=ranks.devices[rank], shard=ranks.shards[rank],
        )  # fmt: skip
        assert isinstance(driver.worker, ModelRunner) and isinstance(driver.worker.draft, SharingDraft)
        return driver.worker.draft.embed_tokens is driver.worker.model.embed_tokens

    assert ranks.run(shares) == [False, False]


def test_ranks_short_of_memory_answer_as_one(models: dict[str, Path]) -> None:
    flags: dict[str, object] = {
        "page_size": 1,
        "max_total_tokens": 230,
        "schedule_conservativeness": 0.01,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "retract_policy": "offload",
    }
    expected = plain_answers(models, requests(5))
    for found, counts in _on_ranks(models, STANDALONE, "target", **flags):
        assert found == expected and max(counts) > 1


@pytest.mark.parametrize(
    ("algorithm", "draft", "topk"),
    [(EAGLE, "eagle", 1), (EAGLE3, "eagle3", 3), (NEXTN, "mtp", 1), (STANDALONE, "near", 3)],
)
def test_drafts_gather_no_whole_rows(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that need a temperature at most, so that the target gathers none either."""

    def never(*_: object) -> torch.Tensor:
        raise AssertionError("whole rows are gathered")

    reqs = [
        request(f"r{i}", [5 + i, 7, 9 + i], seed=i, temperature=0.4 * i, max_new_tokens=20, ignore_eos=True)
        for i in range(4)
    ]
    expected = plain_answers(models, reqs)
    monkeypatch.setattr(VocabParallelEmbedding, "whole_logits", never)
    ranks = Ranks(2)

    def run(rank: int) -> list[list[int]]:
        driver = make_driver(models, algorithm, draft, device=ranks.devices[rank], shard=ranks.shards[rank], topk=topk)
        return answers(driver, reqs)

    assert ranks.run(run) == [expected] * 2


# --- the draws themselves

TARGET_VOCAB, NUM_ROWS = 4000, 6
SCALES = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])  # 0: greedy
TEMPERATURES = torch.tensor([0.3, 1.0, 0.8, 1.3, 1.0, 2.0])


class Draws:
    """Logits of a draft's vocabulary, and what one rank and several draw from them."""

    def __init__(self, vocab_size: int, size: int, greedy: bool, some_tokens: bool) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        self.logits = torch.randn(NUM_ROWS, vocab_size, generator=generator).mul_(8).round_().div_(4)  # with ties
        tokens = torch.randperm(TARGET_VOCAB, generator=generator)[:vocab_size].sort().values
        self.ranks = Ranks(size)
        self._target_ids = tokens if some_tokens else None
        self._vocab_size = TARGET_VOCAB if some_tokens else vocab_size
        keys = None if greedy else torch.from_numpy(mix_seeds(range(NUM_ROWS)))
        self._inputs = (None if greedy else TEMPERATURES, None if greedy else SCALES, keys)

    def _part(self, shard: Shard) -> tuple[torch.Tensor, VocabParallelEmbedding]:
        head = VocabParallelEmbedding(self.logits.shape[1], 4, torch_context(shard, torch.float32))
        own = self.logits.new_full((NUM_ROWS, head.weight.shape[0]), -torch.inf)
        own[:, : head.num_live_rows] = self.logits[:, head.first_row :][:, : head.num_live_rows]
        return own, head

    def drafts(self, shard: Shard) -> list[int]:
        """A draft of each row."""
        positions = torch.arange(NUM_ROWS)
        pieces = draw_draft(*self._part(shard), self._target_ids, self._vocab_size, *self._inputs, positions, ahead=2)
        assert not pieces.largest.isnan().any(), "kernels are told of NaN by +inf"
        return drawn_tokens(pieces).tolist()

    def trees(self, shard: Shard, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best ``topk`` of each row, and the logarithms of their shares."""
        positions = torch.arange(NUM_ROWS)
        return best_drafts(*self._part(shard), self._target_ids, self._vocab_size, *self._inputs, positions, topk)

    def whole_rows(self, shard: Shard) -> torch.Tensor:
        own, head = self._part(shard)
        return head.whole_logits(own)


@pytest.mark.parametrize("some_tokens", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("vocab_size", "size"), [(1000, 2), (1001, 4), (5, 4)])
def test_ranks_draw_the_drafts_of_one(vocab_size: int, size: int, greedy: bool, some_tokens: bool) -> None:
    draws = Draws(vocab_size, size, greedy, some_tokens)
    expected = draws.drafts(Shard())
    assert draws.ranks.run(lambda rank: draws.drafts(draws.ranks.shards[rank])) == [expected] * size
    draws.logits += torch.rand(draws.logits.shape)  # which of tied tokens a top-k takes is not said
    ids, shares = draws.trees(Shard(), 4)
    for found, theirs in draws.ranks.run(lambda rank: draws.trees(draws.ranks.shards[rank], 4)):
        assert found.tolist() == ids.tolist()
        torch.testing.assert_close(theirs, shares, atol=1e-5, rtol=1e-5)


def test_what_ranks_exchange_for_a_draft_stays_small() -> None:
    draws = Draws(1000, 2, greedy=False, some_tokens=True)
    sent, shards = draws.ranks.bytes_sent, draws.ranks.shards
    draws.ranks.run(lambda rank: draws.whole_rows(shards[rank]))
    assert sent == [NUM_ROWS * 500 * 4] * 2  # half a row, in float32
    draws.ranks.run(lambda rank: draws.drafts(shards[rank]))
    assert [num - NUM_ROWS * 2000 for num in sent] == [NUM_ROWS * 12] * 2  # maximum, score, id
    draws.ranks.run(lambda rank: draws.trees(shards[rank], 4))
    assert [num - NUM_ROWS * 2012 for num in sent] == [NUM_ROWS * (4 + 9 * 8)] * 2  # 4 scores and ids, a total


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_draft_without_numbers_is_refused_on_all_ranks(bad: float, greedy: bool) -> None:
    draws = Draws(1000, 2, greedy, some_tokens=True)
    good = draws.drafts(Shard())
    draws.logits[3, 700] = bad  # a column of the second rank
    draws.logits[4] = -torch.inf
    expected = [*good[:3], -1, -1, good[5]]
    assert draws.drafts(Shard()) == expected
    shards = draws.ranks.shards
    assert draws.ranks.run(lambda rank: draws.drafts(shards[rank])) == [expected] * 2
    for _, shares in draws.ranks.run(lambda rank: draws.trees(shards[rank], 4)):
        assert not (shares[3:5] < torch.inf).any() and (shares[[0, 1, 2, 5]] < torch.inf).all()
