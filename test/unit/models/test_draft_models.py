"""Drafts of every algorithm, read from checkpoints as they are published: their logits against a plain reference, step
after step, through paged memory beside the target's, in float32 on the CPU."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from draft_checkpoints import (
    TARGET_LAYERS,
    TARGET_SIZE,
    VOCAB,
    DraftCheckpoint,
    Tensors,
    add_mtp,
    random_eagle,
    random_eagle3,
    save_appended_mtp,
    save_own_mtp,
    save_target,
)
from draft_reference import AppendedReference, OwnReference, Reference, target_states
from model_parity import PagedModel, reference_logits, save_checkpoint
from paged_draft import PagedDraft, Rows
from quantized_checkpoints import FP8_FORMATS, write_published
from ranks import Ranks
from safetensors.torch import load_file, save_file

from fenceline.config.draft_config import SpeculativeAlgorithm, read_draft_config
from fenceline.config.state_layout import GRID
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.forward_batch import AuxHiddenStates, ForwardMode, PieceBuffers
from fenceline.layers.weight import DenseWeight
from fenceline.models.draft import DraftModel, StandaloneDraft
from fenceline.models.draft_families import MTPDraft
from fenceline.models.loader import load_draft_model

EAGLE, EAGLE3 = SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3
NEXTN, STANDALONE = SpeculativeAlgorithm.NEXTN, SpeculativeAlgorithm.STANDALONE
NUM_SEEDS = 6
TARGETS = ("llama", "llama-tied-biased", "qwen2", "qwen3", "qwen3-tied-biased")
# Targets with a layer behind their last one that predicts a further token.
APPENDED = ("glm4-moe", "deepseek-v3", "glm4.7-flash-mixed", "deepseek-v3.2", "glm-5", "glm-5-shared")
OWN = ("qwen3-next", "qwen3.5", "qwen3.5-moe")  # with one in a module of its own; layers that carry a state


@dataclass
class Case:
    """A target and a draft of it, ours and the reference's."""

    ours: PagedDraft
    target: transformers.PreTrainedModel
    reference: Reference | AppendedReference

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """The reference's first hidden states of the tokens ``ids``."""
        return self.reference.first(target_states(self.target, ids, self.ours.aux_layers))


def make_case(tmp_path: Path, algorithm: SpeculativeAlgorithm, seed: int, page_size: int) -> Case:
    rng = Random(zlib.crc32(f"{algorithm} {seed}".encode()))
    torch.manual_seed(seed)
    target_dir, draft_dir = tmp_path / "target", tmp_path / "draft"
    if algorithm is NEXTN and seed >= NUM_SEEDS + len(APPENDED):
        target, made = save_own_mtp(OWN[seed - NUM_SEEDS - len(APPENDED)], target_dir)
        tables = target.model.embed_tokens.weight, target.lm_head.weight
        reference = OwnReference(made, *(table.detach().double() for table in tables))
        return Case(PagedDraft(target_dir, page_size, NEXTN, None), target, reference)
    if algorithm is NEXTN and seed >= NUM_SEEDS:
        target, block, made = save_appended_mtp(APPENDED[seed - NUM_SEEDS], target_dir)
        return Case(PagedDraft(target_dir, page_size, NEXTN, None), target, AppendedReference(target, block, made))
    name = TARGETS[seed % len(TARGETS)]
    if algorithm is NEXTN and seed % 3 == 0:
        name = "mimo"
    target = save_target(name, target_dir)
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    if algorithm is NEXTN:
        made = add_mtp(target_dir, rng.choice([1, 2, 3]))
    elif algorithm is EAGLE:
        made = random_eagle(rng, rng.choice(["Llama", "Qwen2", "Qwen3"]))
    else:
        made = random_eagle3(rng)
    if algorithm is not NEXTN:
        made.save(draft_dir)
        embedding = made.tensors.get("embed_tokens.weight", embedding)
        head = made.tensors.get("lm_head.weight", head)
    ours = PagedDraft(target_dir, page_size, algorithm, None if algorithm is NEXTN else draft_dir)
    return Case(ours, target, Reference(made, embedding.detach().double(), head.detach().double()))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=0)


def tokens(num: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num,), generator=torch.Generator().manual_seed(seed))


CASES = [(algorithm, seed) for algorithm in (EAGLE, EAGLE3, NEXTN) for seed in range(NUM_SEEDS)]
CASES += [(NEXTN, NUM_SEEDS + index) for index in range(len(APPENDED + OWN))]


@pytest.mark.parametrize(("algorithm", "seed"), CASES, ids=lambda value: getattr(value, "value", value))
def test_chains_equal_the_reference(tmp_path: Path, algorithm: SpeculativeAlgorithm, seed: int) -> None:
    """Prompts in chunks and after a prefix hit, then rounds of a chain of drafted tokens, some of which are accepted
    and computed again from the target's hidden states."""
    page_size = (1, 16)[seed % 2]
    case = make_case(tmp_path, algorithm, seed, page_size)
    ours, draft = case.ours, case.ours.draft
    assert draft is not None
    layers = draft.max_steps or 1  # run for every row, the rest of a chain for the row before
    steps = draft.max_steps or 4
    shared = GRID if ours.states else 32
    texts = [tokens(90, 1), torch.cat((tokens(90, 1)[: shared + 1], tokens(50, 2))), tokens(70, 3)]
    rows = [4, 1, 6]

    def extend(work: list[tuple[int, int, int]]) -> dict[int, torch.Tensor]:
        """Target and draft over the tokens ``[start, end)`` of (request, start, end); returns hidden states by request,
        of the draft's row end - 1, from which its chain continues."""
        spans = [(rows[r], texts[r], start, end) for r, start, end in work]
        hidden = ours.target_step(spans)
        for step in range(layers):
            given = [
                Rows(rows[r], start, texts[r][start + 1 + step : end + 1 + step], h)
                for (r, start, end), h in zip(work, hidden, strict=True)
            ]
            results = ours.draft_step(given, ForwardMode.EXTEND, step)
            for (r, start, end), (logits, after) in zip(work, results, strict=True):
                expected, expected_after = dense(r, end, step)
                close(logits, expected[start:], case.reference.tolerance)
                close(after, expected_after[start:], case.reference.tolerance)
            hidden = [after for _, after in results]
        return {r: after[-1:] for (r, *_), after in zip(work, hidden, strict=True)}

    def dense(r: int, end: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's step over the whole request up to the token ``end - 1``, from scratch."""
        hidden = case.states(texts[r][:end])
        for earlier in range(step):
            _, hidden = case.reference.step(texts[r][earlier + 1 : end + earlier + 1], hidden, earlier)
        return case.reference.step(texts[r][step + 1 : end + step + 1], hidden, step)

    def chain(ends: dict[int, int], last: dict[int, torch.Tensor], seed: int) -> None:
        """Single-layer drafts go on with tokens of their own, here random ones, and their own hidden states."""
        guesses = {r: tokens(steps, seed + r) for r in ends}
        committed = {r: case.states(texts[r][:end]) for r, end in ends.items()}
        for step in range(1, steps):
            given = [Rows(rows[r], ends[r] + step - 1, guesses[r][step : step + 1], last[r]) for r in ends]
            results = ours.draft_step(given, ForwardMode.DECODE, step)
            for r, (logits, after) in zip(ends, results, strict=True):
                ids = torch.cat((texts[r][1 : ends[r] + 1], guesses[r][1 : step + 1]))
                hidden = committed[r]
                if step > 1:
                    hidden = dense_chain[r]
                _, before = case.reference.step(ids[:-1], hidden, 0)
                dense_chain[r] = torch.cat((hidden, before[-1:]))
                expected, expected_after = case.reference.step(ids, dense_chain[r], 0)
                close(logits, expected[-1:], case.reference.tolerance)
                close(after, expected_after[-1:], case.reference.tolerance)
                last[r] = after

    dense_chain: dict[int, torch.Tensor] = {}
    extend([(0, 0, 33), (2, 0, 40)])
    extend([(0, 33, 34)])
    last = extend([(0, 34, 70)])
    # Row i of layer k was computed from token i + 1 + k, so the last rows of a common prefix cannot be shared.
    hit_pages = (shared + 1 - layers) // page_size
    ours.share_prefix(rows[0], rows[1], hit_pages)
    last |= extend([(1, hit_pages * page_size, shared + 13)])
    last |= extend([(2, 40, 50)])
    if layers == 1:
        chain({0: 70, 2: 50}, last, seed=10)
        last = extend([(0, 70, 72), (2, 50, 51)]) | {1: last[1]}
        chain({0: 72, 1: shared + 13, 2: 51}, last, seed=20)
        extend([(0, 72, 76), (2, 51, 52)])
    else:
        extend([(0, 70, 72), (2, 50, 51)])


@pytest.mark.parametrize(("algorithm", "seed"), CASES[:3] + CASES[10:13] + CASES[20:23], ids=str)
def test_logits_of_chosen_rows(tmp_path: Path, algorithm: SpeculativeAlgorithm, seed: int) -> None:
    ours = make_case(tmp_path, algorithm, seed, page_size=16).ours
    assert ours.draft is not None
    ids = tokens(9, 5)
    (hidden,) = ours.target_step([(2, ids, 0, 8)])
    ((logits, _),) = ours.draft_step([Rows(2, 0, ids[1:], hidden)], ForwardMode.EXTEND)
    batch = ours.batch([(2, ids[1:], 0, 8)], ForwardMode.EXTEND, logits_index=[7, 0])
    with torch.inference_mode():
        chosen, after = ours.draft.forward(batch, hidden)
    torch.testing.assert_close(chosen, logits[[7, 0]], atol=1e-5, rtol=0)
    assert len(after) == 8


@pytest.mark.parametrize(("draft_name", "target_name"), [("qwen2", "qwen3"), ("llama-tied-biased", "llama")])
def test_a_whole_model_drafts_beside_its_target(tmp_path: Path, draft_name: str, target_name: str) -> None:
    save_checkpoint(target_name, tmp_path / "target")
    reference = save_checkpoint(draft_name, tmp_path / "draft")
    ours = PagedDraft(tmp_path / "target", 16, STANDALONE, tmp_path / "draft")
    assert ours.draft is not None and ours.draft.hidden_size == 0
    text = tokens(40, 1)
    (expected,) = reference_logits(reference, [text])
    parts = []
    for start, end in ((0, 17), (17, 38), (38, 39), (39, 40)):
        (hidden,) = ours.target_step([(3, text, start, end)])
        mode = ForwardMode.DECODE if end - start == 1 else ForwardMode.EXTEND
        ((logits, _),) = ours.draft_step([Rows(3, start, text[start:end], hidden)], mode)
        parts.append(logits)
    close(torch.cat(parts), expected.double())


def test_a_model_that_only_says_it_is_tied_keeps_its_head(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "target")
    save_checkpoint("llama", tmp_path / "draft", {"tie_word_embeddings": False})
    config = json.loads((tmp_path / "draft" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    draft = PagedDraft(tmp_path / "target", 16, STANDALONE, tmp_path / "draft").draft
    assert isinstance(draft, StandaloneDraft) and draft.lm_head is not draft.model.embed_tokens


@pytest.mark.parametrize(
    ("algorithm", "first_seed"), [(EAGLE, 0), (EAGLE3, 0), (NEXTN, 0), *((NEXTN, seed) for _, seed in CASES[30:])]
)
def test_ranks_together_compute_what_one_does(tmp_path: Path, algorithm: SpeculativeAlgorithm, first_seed: int) -> None:
    folder = next(
        folder
        for seed, folder in ((seed, tmp_path / str(seed)) for seed in range(first_seed, 99))
        if make_case(folder, algorithm, seed, 16).reference.made.size("num_attention_heads") % 2 == 0
    )
    draft_dir = None if algorithm is NEXTN else folder / "draft"
    ids = tokens(20, 4)

    def run(ours: PagedDraft) -> list[torch.Tensor]:
        (hidden,) = ours.target_step([(1, ids, 0, 18)])
        ((first, hidden),) = ours.draft_step([Rows(1, 0, ids[1:19], hidden)], ForwardMode.EXTEND)
        ((second, hidden),) = ours.draft_step([Rows(1, 18, ids[19:], hidden[-1:])], ForwardMode.DECODE)
        whole = ours.draft.lm_head.whole_logits  # of what each rank has
        return [whole(first), whole(second), hidden]

    expected = run(PagedDraft(folder / "target", 16, algorithm, draft_dir))
    ranks = Ranks(2)
    drafts = [PagedDraft(folder / "target", 16, algorithm, draft_dir, shard) for shard in ranks.shards]
    for results in ranks.run(lambda rank: run(drafts[rank])):
        for ours, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


def test_the_target_is_the_same_beside_a_draft(tmp_path: Path) -> None:
    """Draft layers lie behind the target's: neither writes the other's keys and values."""
    case = make_case(tmp_path, EAGLE3, 1, page_size=16)
    text = tokens(30, 7)
    (expected,) = reference_logits(case.target, [text])
    (hidden,) = case.ours.target_step([(0, text, 0, 29)])
    case.ours.draft_step([Rows(0, 0, text[1:], hidden)], ForwardMode.EXTEND)
    (logits,) = case.ours.step([(0, text, 29, 30)], ForwardMode.DECODE)
    torch.testing.assert_close(logits[0], expected[29], atol=1e-4, rtol=0)
    assert case.ours.pool.num_layers == TARGET_LAYERS + 1


def test_auxiliary_hidden_states_of_a_forward_in_pieces(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    ours = PagedModel(tmp_path, 16, "cpu")
    text = tokens(20, 3)
    layers = (3, 0, 2, 2)

    def run(forward: Callable[[torch.Tensor], None]) -> torch.Tensor:
        out = torch.full((20, 4 * TARGET_SIZE), float("nan"))
        forward(out)
        return out

    def whole(out: torch.Tensor) -> None:
        batch = ours.batch([(0, text, 0, 20)], ForwardMode.EXTEND, aux_hidden=AuxHiddenStates(layers, out))
        ours.model.hidden_states(batch)

    def pieces(out: torch.Tensor) -> None:
        fields = ours.model.arena_fields()
        buffers = PieceBuffers({f.name: torch.zeros(20, *f.shape, dtype=f.dtype) for f in fields})
        batch = ours.batch([(0, text, 0, 20)], ForwardMode.EXTEND, aux_hidden=AuxHiddenStates(layers, out))
        batch = dataclasses.replace(batch, buffers=buffers)
        for index in range(ours.model.num_layers + 1):
            ours.model.run_piece(index, batch)
            if index < ours.model.num_layers:
                ours.model.attend(index, batch)

    with torch.inference_mode():
        torch.testing.assert_close(run(pieces), run(whole), atol=1e-5, rtol=0)


def published_ids(made: DraftCheckpoint) -> list[int]:
    return [index + int(offset) for index, offset in enumerate(made.tensors["d2t"])]


def test_ids_of_the_draft_vocabulary(tmp_path: Path) -> None:
    save_target("llama", tmp_path / "target")
    rng = Random(5)
    made = random_eagle3(rng)
    while made.config.get("draft_vocab_size") != 37:
        made = random_eagle3(rng)
    made.save(tmp_path / "draft")
    draft = PagedDraft(tmp_path / "target", 16, EAGLE3, tmp_path / "draft").draft
    assert draft is not None and draft.target_ids is not None
    assert draft.target_ids.tolist() == published_ids(made)
    known = torch.nonzero(made.tensors["t2d"]).flatten().tolist()
    assert draft.target_ids.tolist() == known


def bytes_of(tensors: Tensors) -> int:
    return sum(tensor.numel() * 4 for tensor in tensors.values() if tensor.is_floating_point())


@pytest.mark.parametrize("leaves_plain", [True, False])
def test_a_projection_that_a_quantised_checkpoint_may_leave_plain(tmp_path: Path, leaves_plain: bool) -> None:
    """DeepSeek-V3 is published in FP8 blocks but for eh_proj, which its config.json does not say."""
    _, _, made = save_appended_mtp("deepseek-v3", tmp_path / "plain")
    published, name = FP8_FORMATS["fp8-blocks"], "model.layers.3.eh_proj"
    write_published(tmp_path / "plain", tmp_path / "fp8", published)
    folders = {"fp8": tmp_path / "fp8", "meant": tmp_path / "fp8" / "dequantised"}
    if not leaves_plain:
        parts, meant = published.quantise(made.tensors[f"{name}.weight"])
        stored = {f"{name}.{suffix}": part for suffix, part in parts.items()}
        for folder, changes in ((folders["fp8"], stored), (folders["meant"], {f"{name}.weight": meant})):
            save_file(load_file(folder / "model.safetensors") | changes, folder / "model.safetensors")
    ids = tokens(20, 4)

    def run(folder: Path) -> torch.Tensor:
        ours = PagedDraft(folder, 16, NEXTN, None)
        (hidden,) = ours.target_step([(1, ids, 0, 19)])
        ((logits, _),) = ours.draft_step([Rows(1, 0, ids[1:], hidden)], ForwardMode.EXTEND)
        assert isinstance(ours.draft, MTPDraft)
        is_plain = isinstance(ours.draft.mtp_layers[0].input_proj.weight, DenseWeight)
        assert is_plain == (leaves_plain or folder == folders["meant"])
        return logits

    close(run(folders["fp8"]), run(folders["meant"]).double(), 1e-3)


def test_a_copy_of_the_targets_embedding_costs_no_memory(tmp_path: Path) -> None:
    target = save_target("llama", tmp_path / "target")
    rng = Random(1)
    made = random_eagle(rng, "Llama")
    made.tensors.pop("embed_tokens.weight", None)
    made.tensors.pop("lm_head.weight", None)
    alone = bytes_of(made.tensors)
    made.tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    made.tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    made.save(tmp_path / "draft")
    draft = PagedDraft(tmp_path / "target", 16, EAGLE, tmp_path / "draft").draft
    assert draft is not None and draft.nbytes == alone


@pytest.mark.parametrize(("algorithm", "width"), [(EAGLE, 48), (EAGLE3, 48), (EAGLE3, 40), (NEXTN, 48)])
def test_random_weights_need_no_files(tmp_path: Path, algorithm: SpeculativeAlgorithm, width: int) -> None:
    """--load-format dummy: a draft of the published shape, the same for the same seed."""
    tmp_path, made = next(
        (folder, made)
        for folder, made in (
            (tmp_path / str(seed), make_case(tmp_path / str(seed), algorithm, seed, page_size=16)) for seed in range(99)
        )
        if made.ours.draft is not None and made.ours.draft.hidden_size == width
    )
    for path in (tmp_path / ("target" if algorithm is NEXTN else "draft")).glob("*.safetensors"):
        path.unlink()
    target = made.ours.model
    directory = None if algorithm is NEXTN else str(tmp_path / "draft")
    config = read_draft_config(algorithm, directory, target.config)
    context = torch_context(Shard(), torch.float32)

    def load(seed: int) -> DraftModel:
        return load_draft_model(config, "dummy", torch.device("cpu"), context, seed, False, target)

    first, again, other = load(1).weight_slots(), load(1).weight_slots(), load(2).weight_slots()
    assert all(torch.equal(slot.dest, again[name].dest) for name, slot in first.items())
    assert not all(torch.equal(slot.dest, other[name].dest) for name, slot in first.items())
    ids = load(1).target_ids
    assert ids is None or bool(((ids >= 0) & (ids < VOCAB)).all())


def test_random_weights_take_rows_of_the_targets_head(tmp_path: Path) -> None:
    save_target("llama", tmp_path / "target")
    made = random_eagle(Random(1), "Llama")
    made.save(tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").unlink()
    torch.save([5, 2, 9], tmp_path / "map.pt")
    target = PagedModel(tmp_path / "target", 16, "cpu").model
    config = read_draft_config(EAGLE, str(tmp_path / "draft"), target.config, str(tmp_path / "map.pt"))
    assert config.draft_vocab_size == 3
    context = torch_context(Shard(), torch.float32)
    draft = load_draft_model(config, "dummy", torch.device("cpu"), context, 1, False, target)
    assert torch.equal(draft.lm_head.weight.data, target.lm_head.weight.data[[2, 5, 9]])
