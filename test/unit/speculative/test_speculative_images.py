"""Drafts of models that read images: they see the images' embeddings at the images' positions, and fare the same
whether a prompt is computed or found in a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import transformers
from draft_checkpoints import VisionDraft, save_vision_draft
from draft_reference import Reference, TargetStates
from scheduler_driver import Driver
from speculative_driver import check_token_rows
from vision_cases import CASES, IMAGE, ONE, Case, image_request, picture, processor_of
from vision_cases import vision_driver as make_driver

from fenceline.ipc.io_struct import ContinueGenerationReq, PauseGenerationReq, SpecCounts
from fenceline.layers.forward_batch import ForwardBatch, ForwardMode
from fenceline.model_executor.model_runner import ModelRunner

SIZE = 48  # of the hidden states in vision_cases
# Architectures with the kind of draft, and its number of layers.
DRAFTS = [
    ("Qwen2_5_VLForConditionalGeneration", "EAGLE3", 1),
    ("Qwen2_5_VLForConditionalGeneration", "NEXTN", 1),
    ("Qwen2_5_VLForConditionalGeneration", "NEXTN", 2),
    ("Qwen3VLForConditionalGeneration", "EAGLE3", 1),
    ("Qwen3VLForConditionalGeneration", "NEXTN", 3),
    ("Gemma3ForConditionalGeneration", "EAGLE3", 1),
]


Make = Callable[[str, str, int], VisionDraft]


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return cache(lambda *case: save_vision_draft(*case, tmp_path_factory.mktemp("model")))


@dataclass
class Seen:
    """What transformers' model computes of a prompt: the embeddings of its tokens and their positions [3, T], what its
    layers read [T, size], and what its final norm reads and returns."""

    embedded: torch.Tensor
    positions: torch.Tensor | None
    layers: list[torch.Tensor]
    last: torch.Tensor
    normed: torch.Tensor


@torch.no_grad()
def seen_by(model: transformers.PreTrainedModel, ids: list[int], case: Case) -> Seen:
    found: dict[str, torch.Tensor | None] = {}
    text = model.model.language_model

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: found.update({name: args[0] if args else kwargs["hidden_states"]})

    def keep_inputs(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        found.update(embedded=kwargs["inputs_embeds"], positions=kwargs.get("position_ids"))

    hooks = [text.register_forward_pre_hook(keep_inputs, with_kwargs=True)]
    hooks += [
        layer.register_forward_pre_hook(keep(f"layer{i}"), with_kwargs=True) for i, layer in enumerate(text.layers)
    ]
    hooks.append(text.norm.register_forward_pre_hook(keep("last"), with_kwargs=True))
    inputs = dict(processor_of(model)(case[1], return_tensors="pt"))
    inputs.pop("num_crops", None)
    kinds = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    prompt = torch.tensor([ids])
    normed = model.model(input_ids=prompt, use_cache=False, **{kinds: (prompt == IMAGE).int()}, **inputs)
    for hook in hooks:
        hook.remove()
    tensors = {name: None if value is None else value.squeeze() for name, value in found.items()}
    positions = tensors["positions"]
    if positions is not None and positions.dim() > 1:
        positions = positions[-3:]  # transformers may pass those of texts before them
    layers = [tensors[f"layer{i}"] for i in range(len(text.layers))]
    embedded, last = tensors["embedded"], tensors["last"]
    assert embedded is not None and last is not None
    return Seen(
        embedded.double(), positions, [layer.double() for layer in layers if layer is not None], last.double(),
        normed.last_hidden_state[0].double(),
    )  # fmt: skip


def reference_of(made: VisionDraft, seen: Seen, ids: torch.Tensor, driver: Driver) -> tuple[Reference, torch.Tensor]:
    """A plain draft for this prompt, and the hidden states of its first step."""
    draft, target = made.draft, made.target
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    embedding = draft.tensors.get("embed_tokens.weight", tables[0].detach()).double()
    if made.target.config.model_type == "gemma3" and "embed_tokens.weight" not in draft.tensors:
        embedding = embedding * SIZE**0.5
    head = draft.tensors.get("lm_head.weight", tables[1].detach()).double()
    images = torch.where((ids == IMAGE)[:, None], seen.embedded, torch.nan)
    images = torch.cat((images, torch.full((4, SIZE), torch.nan, dtype=torch.float64)))
    speculative = driver.config.speculative
    assert speculative is not None
    positions = None
    if seen.positions is not None and seen.positions.dim() > 1:
        axes = torch.tensor(speculative.draft.model.rope_axes)
        assert len(axes.unique()) == 3, "all axes turn some pairs"
        positions = seen.positions[axes].T
    inputs = [*seen.layers, seen.last]
    aux = [inputs[layer] for layer in speculative.draft.aux_layers]
    states = TargetStates(seen.normed, torch.cat(aux, -1) if aux else torch.empty(0))
    reference = Reference(draft, embedding, head, positions, images)
    return reference, reference.first(states)


@pytest.mark.parametrize(("name", "algorithm", "num_layers"), DRAFTS)
@pytest.mark.parametrize("index", [1, 4])
def test_drafts_see_images(made_of: Make, name: str, algorithm: str, num_layers: int, index: int) -> None:
    """The draft's hidden states of all tokens of a prompt that is computed in chunks, which end within images and just
    before them, are those of a plain draft that reads transformers' embeddings of images at transformers' positions."""
    made, case = made_of(name, algorithm, num_layers), CASES[index]
    chunk = 33 if name.startswith("Gemma3") else 7
    driver = make_driver(
        made.directory, page_size=1, chunked_prefill_size=chunk, disable_radix_cache=True, **made.flags
    )
    runner = driver.worker
    assert isinstance(runner, ModelRunner) and runner.speculative is not None
    draft, found = runner.speculative.draft.parts.draft, [[] for _ in range(num_layers)]
    forward = draft.forward

    def recorded(batch: ForwardBatch, hidden: torch.Tensor, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        result = forward(batch, hidden, step)
        if batch.mode is ForwardMode.EXTEND:
            found[step].append(result[1])
        return result

    draft.forward = recorded  # type: ignore[method-assign]
    sent = image_request(driver, "r", *case)
    driver.send(sent)
    driver.run()
    ids = torch.tensor(sent.input_ids)
    reference, hidden = reference_of(made, seen_by(made.target, ids.tolist(), case), ids, driver)
    assert len(found[0]) > 1 or len(ids) <= chunk
    for layer, chunks in enumerate(found):
        known = ids[1 + layer :]  # what comes behind the prompt is drawn
        _, hidden = reference.step(known, hidden[: len(known)], layer)
        computed = torch.cat(chunks)[: len(known)].double()
        torch.testing.assert_close(computed, hidden, atol=1e-4, rtol=0)


def serve(driver: Driver, rid: str, case: Case) -> tuple[list[int], SpecCounts | None, int]:
    """The answer to ``case``, how its drafts fared, and how many tokens of its prompt were cached. At this temperature
    many of them are accepted."""
    driver.send(image_request(driver, rid, *case, temperature=2.0, seed=len(case[0]), max_new_tokens=16))
    driver.run()
    last = driver.answers[rid].last
    assert last is not None
    return driver.answers[rid].output_ids, last.spec, last.cached_tokens


def conversations(seed: int) -> list[Case]:
    """Two that begin with the same images, so that what follows an image in the second is found or not, with a page
    that ends at its last token, in front of it, or within it."""
    begin, pictures = [3] * seed + [*ONE, *ONE[1:]], [picture(90, 60, 2), picture(60, 60, 3)]
    return [([*begin, 5, 6, 7], pictures), ([*begin, *ONE, 8], [*pictures, picture(30, 30, 4)])]


@pytest.mark.parametrize(("name", "algorithm", "num_layers"), [DRAFTS[0], DRAFTS[4], DRAFTS[5]])
def test_drafts_fare_the_same_from_all_tiers(made_of: Make, name: str, algorithm: str, num_layers: int) -> None:
    """Computed at once, in chunks, found on the device and on the host: as many proposals are accepted, and the tokens
    are those of decoding without a draft."""
    made = made_of(name, algorithm, num_layers)
    chunk = 36 if name.startswith("Gemma3") else 8
    cases = [case for seed in range(2) for case in conversations(seed)]
    plain = make_driver(made.directory, max_total_tokens=2048)
    cold = make_driver(made.directory, disable_radix_cache=True, chunked_prefill_size=-1, **made.flags)
    warm = make_driver(
        made.directory, enable_hierarchical_cache=True, hicache_ratio=16.0, hicache_write_policy="write_through",
        chunked_prefill_size=chunk, **made.flags,
    )  # fmt: skip
    expected = [serve(cold, f"r{i}", case)[:2] for i, case in enumerate(cases)]
    for i, case in enumerate(cases):
        assert expected[i][0] == serve(plain, f"r{i}", case)[0]
    accepted = [spec for _, spec in expected if spec is not None]
    assert sum(spec.num_accepted for spec in accepted) > 4
    for turn in range(2):
        cached = 0
        for i, case in enumerate(cases):
            *found, num_cached = serve(warm, f"{turn}.{i}", case)
            assert found == [*expected[i]], (turn, i)
            cached += num_cached
        assert cached
        while warm.scheduler.memory.num_outstanding:
            warm.step()
        warm.scheduler.memory.tree.evict(warm.scheduler.memory.tree.num_evictable_pages)
    assert warm.scheduler.memory.cached_tokens["host"] > 0
    warm.scheduler.close()


@pytest.mark.parametrize(("name", "algorithm", "num_layers"), [DRAFTS[0], DRAFTS[4], DRAFTS[5]])
def test_retracted_requests_propose_again(made_of: Make, name: str, algorithm: str, num_layers: int) -> None:
    made = made_of(name, algorithm, num_layers)
    answers = []
    for steps in (0, 1, 3, 7):
        driver = make_driver(made.directory, **(made.flags if steps else {}))
        sent = [image_request(driver, f"r{i}", *case, temperature=2.0, seed=i) for i, case in enumerate(CASES)]
        driver.send(*sent)
        for _ in range(steps):
            driver.step()
        driver.send(PauseGenerationReq(id="p", mode="retract"))
        driver.step()
        driver.send(ContinueGenerationReq(id="c"))
        driver.run()
        answers.append([driver.answers[one.rid].output_ids for one in sent])
    assert all(answer == answers[0] for answer in answers)


def test_a_model_that_is_its_own_draft_is_right_about_images(made_of: Make) -> None:
    """It sees the same embeddings at the same positions, so that all of its proposals are accepted."""
    directory = made_of(*DRAFTS[0]).directory
    flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(directory)}
    driver = make_driver(directory, speculative_num_steps=3, **flags)
    for index, case in enumerate(CASES):
        driver.send(image_request(driver, f"r{index}", *case, max_new_tokens=9))
    driver.run()
    for index in range(len(CASES)):
        last = driver.answers[f"r{index}"].last
        assert last is not None and last.spec is not None
        assert last.spec.num_accepted == last.spec.num_drafts == 6, "in two steps of three"


def test_images_are_not_looked_up(made_of: Make) -> None:
    """Where drafts are looked up in a request's tokens, those of its images are none, and the answers are the same."""
    directory = made_of(*DRAFTS[0]).directory
    driver, plain = (
        make_driver(directory, speculative_algorithm="NGRAM", speculative_adaptive=False),
        make_driver(directory),
    )
    num_checked = 0
    for turn in range(2):  # the second time after hits
        for index, case in enumerate(CASES):
            driver.send(image_request(driver, f"{turn}.{index}", *case, max_new_tokens=20))
            plain.send(image_request(plain, f"{turn}.{index}", *case, max_new_tokens=20))
        while driver.scheduler.reqs or driver.flight is not None or driver.pending:
            driver.step()
            num_checked += check_token_rows(driver)
        plain.run()
    assert num_checked > 2 * len(CASES)
    assert {rid: answer.output_ids for rid, answer in driver.answers.items()} == {
        rid: answer.output_ids for rid, answer in plain.answers.items()
    }
