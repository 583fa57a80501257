"""What a running server's drafts compute: their logits, step after step, are those of a plain reference that is given
the tokens so far and what was proposed, whatever came of prefill in chunks, cached prefixes and accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from draft_checkpoints import VOCAB, DraftCheckpoint
from draft_reference import Reference, target_states
from safetensors.torch import load_file
from scheduler_driver import Driver, answers, request
from speculative_driver import EAGLE3, NEXTN, count_tokens, make_driver, models

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.model_files import read_model_json
from fenceline.layers.forward_batch import ForwardBatch, ForwardMode
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.models.decoder import logits_rows

__all__ = ["models"]  # a fixture


@dataclass
class Chain:
    """Logits of the draft's steps, the first of which is at row ``row``: after ``row + 2`` tokens. ``ids``: the last of
    the tokens that each was computed from."""

    row: int
    ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def record(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Chain]:
    """The chains of the one request that runs at a time, filled while the driver runs."""
    assert isinstance(driver.worker, ModelRunner)
    draft, runner, chains = driver.worker.draft, driver.worker.speculative, list[Chain]()
    assert draft is not None and runner is not None
    forward, logits_of, is_within = draft.forward, draft.logits, list[bool]()

    def logits_and_record(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first of a step, of the hidden states that the step before has left."""
        logits = logits_of(hidden, out)
        if not is_within:
            last = [int(runner.arena["input_ids"][0, 0])]
            chains.append(Chain(int(runner.arena["lens"][0]) - 2, last, [logits[0].double()]))
        return logits

    def forward_and_record(
        batch: ForwardBatch, hidden: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_within.append(True)
        logits, following = forward(batch, hidden, step)
        is_within.clear()
        if len(logits):
            (row,) = logits_rows(batch.positions[0][:, None], batch)[:, 0].tolist()
            goes_on = step > 0
            if draft.max_steps is None:
                goes_on = batch.mode is ForwardMode.VERIFY and batch.num_tokens == 1
            if not goes_on:
                chains.append(Chain(row))
            chains[-1].ids += logits_rows(batch.input_ids[:, None], batch)[:, 0].tolist()
            chains[-1].logits.append(logits[0].double())
        return logits, following

    monkeypatch.setattr(draft, "forward", forward_and_record)
    monkeypatch.setattr(draft, "logits", logits_and_record)
    return chains


def reference_logits(
    reference: Reference, first: torch.Tensor, ids: Sequence[int], steps: int, by_layer: bool
) -> list[torch.Tensor]:
    """Of each step, after tokens with the target's hidden states ``first`` of all but the last; ``ids``: the tokens but
    for the first, and those that the draft has proposed."""
    num_rows, text, hidden, found = len(first), torch.tensor(ids), first, []
    for step in range(steps):
        if by_layer:
            logits, hidden = reference.step(text[step : step + num_rows], hidden, step)
        else:
            logits, following = reference.step(text[: num_rows + step], hidden, 0)
            hidden = torch.cat((hidden, following[-1:]))
        found.append(logits[-1])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "draft", "page_size", "depth_seed"), [(EAGLE3, "eagle3", 16, None), (NEXTN, "mtp", 1, 5)]
)
def test_draft_logits_equal_the_reference(
    models: dict[str, Path],
    algorithm: SpeculativeAlgorithm,
    draft: str | None,
    page_size: int,
    depth_seed: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = make_driver(models, algorithm, draft, page_size=page_size, depth_seed=depth_seed)
    counted, chains = count_tokens(driver), record(driver, monkeypatch)
    folder = models[draft or "target"]
    made = DraftCheckpoint(dict(read_model_json(folder)), load_file(folder / "model.safetensors"))
    target = transformers.AutoModelForCausalLM.from_pretrained(models["target"], attn_implementation="eager")
    weights = [
        made.tensors.get(f"{name}.weight", shared.weight).detach().double()
        for name, shared in (("embed_tokens", target.model.embed_tokens), ("lm_head", target.lm_head))
    ]
    reference = Reference(made, *weights)
    layers = driver.config.speculative.draft.aux_layers  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, VOCAB, (66,), generator=generator).tolist()  # chunks of 32, and two tokens
    num_cached = 0
    prompts = [prompt]
    for number in range(5):
        chains.clear()
        # Its noise makes draft and target agree often.
        req = request(f"r{number}", prompts[number], temperature=2.0, seed=number, max_new_tokens=30, ignore_eos=True)
        (output,) = answers(driver, [req])
        text = [*prompts[number], *output]
        last = driver.answers[req.rid].last
        assert last is not None
        num_cached += last.cached_tokens
        checked = 0
        for chain in chains:
            if chain.row + 2 > len(text):
                continue  # of a step behind the end
            known, steps = text[: chain.row + 2], len(chain.logits)
            assert chain.ids[0] == known[-1]
            ids = [*known[1:], *chain.ids[1:]]
            first = reference.first(target_states(target, torch.tensor(known[:-1]), layers))
            expected = reference_logits(reference, first, ids, steps, by_layer=draft == "mtp")
            for ours, theirs in zip(chain.logits, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
            checked += steps
        assert checked > (20 if depth_seed is None else 5)
        # The next prompt goes on from this answer, or leaves it: at the end of a page, and a few tokens before it.
        cut = [len(text), 64, 63, 61][number] if number < 4 else 0
        prompts.append([*text[:cut], *torch.randint(3, VOCAB, (5,), generator=generator).tolist()])
    assert num_cached > 150 and len(counted) > (2 if depth_seed is None else 1)
