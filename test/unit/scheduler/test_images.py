"""Prompts with images through the scheduler and the real runner: answers are those of transformers, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
import transformers
from ranks import Ranks
from scheduler_driver import Driver, make_driver, prefills
from vision_cases import (
    BEGIN,
    CASES,
    FILM,
    IMAGE,
    ONE,
    VISION_MODELS,
    Case,
    Film,
    Picture,
    answers_around,
    cases_of,
    film,
    image_request,
    picture,
    save_vision_checkpoint,
    sizes_of_14193,
    theirs,
    vision_driver,
)

from fenceline.ipc.io_struct import AbortReq, ContinueGenerationReq, PauseGenerationReq, TokenizedGenerateReq, id_array
from fenceline.memory_order import open_device
from fenceline.memory_order.edges import TOTAL_BUCKETS
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
from fenceline.model_executor.warm_up import warm_up

Saved = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = directory, save_vision_checkpoint(name, directory)
        return made[name]

    return get


@pytest.fixture
def qwen(saved: Callable[[str], Saved]) -> Saved:
    return saved("Qwen2_5_VLForConditionalGeneration")


def check(driver: Driver, reference: transformers.PreTrainedModel, cases: Sequence[Case] = CASES) -> None:
    """Send all ``cases`` together, and compare their answers."""
    sent = [image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)]
    driver.send(*sent)
    driver.run()
    compare(driver, reference, sent, cases)


def compare(
    driver: Driver, reference: transformers.PreTrainedModel, sent: Sequence[TokenizedGenerateReq], cases: Sequence[Case]
) -> None:
    for req, (_, pictures) in zip(sent, cases, strict=True):
        answer = driver.answers[req.rid]
        assert answer.output_ids == theirs(reference, req.input_ids, pictures), req.rid
        assert answer.finish is not None and answer.finish.type == "length"


# One whose images are computed in pieces and one that sees them whole: for what models do not differ in otherwise.
BOTH_KINDS = ("Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration")


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [*((name, 1, 7) for name in VISION_MODELS), *((BOTH_KINDS[0], *flags) for flags in ((4, 32), (16, -1)))],
)
def test_answers_are_those_of_transformers(
    saved: Callable[[str], Saved], name: str, page_size: int, chunk: int
) -> None:
    directory, reference = saved(name)
    if chunk == 7 and name.startswith("Gemma3"):
        chunk = 33  # an image is computed as a whole
    check(vision_driver(directory, page_size=page_size, chunked_prefill_size=chunk), reference, cases_of(name))


def test_an_answer_depends_on_the_image(qwen: Saved) -> None:
    """The comparison would not see it if images had no influence."""
    driver, (ids, _) = vision_driver(qwen[0]), CASES[0]
    driver.send(*[image_request(driver, f"r{seed}", ids, [picture(60, 90, seed)]) for seed in range(6)])
    driver.run()
    assert len({tuple(driver.answers[f"r{seed}"].output_ids) for seed in range(6)}) > 2


@pytest.mark.parametrize("name", VISION_MODELS)
def test_the_prefix_of_the_same_image_is_found(saved: Callable[[str], Saved], name: str) -> None:
    directory, reference = saved(name)
    driver = vision_driver(directory)
    ids, pictures = [3, 4, 5, *ONE, 7, 8, 9], [picture(90, 90, 1)]
    first = image_request(driver, "first", ids, pictures)
    driver.send(first)
    driver.run()
    # The conversation goes on: the first image is in pages, its end in the middle of one, the second is new.
    turn = [*ids, *driver.answers["first"].output_ids, *ONE, 11]
    second = image_request(driver, "second", turn, [*pictures, picture(60, 60, 2)])
    driver.send(second)
    driver.run()
    last = driver.answers["second"].last
    assert last is not None and last.cached_tokens >= (len(first.input_ids) + 7) // 4 * 4
    assert driver.scheduler.memory.images.num_computed == 2, "the first image's embeddings are not computed again"
    compare(driver, reference, [second], [(turn, [*pictures, picture(60, 60, 2)])])


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_a_prefix_may_end_within_an_image(saved: Callable[[str], Saved], name: str) -> None:
    """At least one token of a prompt is computed, here the last of an image, with those of its page."""
    directory, reference = saved(name)
    driver = vision_driver(directory)
    case = [3, 4, 5, BEGIN, IMAGE], [picture(120, 120, 1)]
    for rid in ("first", "second"):
        sent = image_request(driver, rid, *case)
        driver.send(sent)
        driver.run()
        compare(driver, reference, [sent], [case])
    last = driver.answers["second"].last
    assert last is not None and 4 < last.cached_tokens < len(sent.input_ids)


@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_the_prefix_of_the_same_frames_is_found(saved: Callable[[str], Saved], name: str) -> None:
    """A longer video begins as the shorter one does, unless its frames are at other times; frames are no images."""
    directory, reference = saved(name)
    driver, frames = vision_driver(directory, page_size=1), film(90, 90, 6).frames
    found: dict[str, int] = {}
    for rid, one in {
        "first": Film(frames[:4]),
        "longer": Film(frames),
        "slower": Film(frames[:4], fps=1.0),
        "odd": Film(frames[:3]),
    }.items():
        case: Case = ([3, 4, *FILM, 5], [one])
        sent = image_request(driver, rid, *case)
        driver.send(sent)
        driver.run()
        compare(driver, reference, [sent], [case])
        last = driver.answers[rid].last
        assert last is not None
        found[rid] = last.cached_tokens
    size = sent.images[0].num_tokens
    if "2_5" in name:
        assert found == {"first": 0, "longer": 3 + 2 * size, "slower": 3 + size, "odd": 3 + size}
    else:  # whose times are text, which stays the same here
        assert found == {"first": 0, "longer": 2 + 2 * (size + 3), "slower": 2 * (size + 3) + 2, "odd": size + 7}
    num_computed = driver.scheduler.memory.images.num_computed
    image = image_request(driver, "image", [3, 4, *ONE, 5], [frames[0]])
    driver.send(image)
    driver.run()
    assert driver.scheduler.memory.images.num_computed == num_computed + 1


def test_samples_compute_their_image_once(qwen: Saved) -> None:
    """The first sends it for all, and the others find the prompt with it."""
    driver, case = vision_driver(qwen[0], chunked_prefill_size=128), CASES[3]
    steps = prefills(driver)
    sent = [image_request(driver, f"r{i}", *case, body=1) for i in range(3)]
    same = [msgspec.structs.replace(one, input_ids=id_array(), images=[], same_prompt=True) for one in sent[1:]]
    driver.send(sent[0], *same)
    driver.run()
    assert driver.scheduler.memory.images.num_computed == 1
    assert sum(map(sum, steps)) < len(sent[0].input_ids) + 3 * 4
    compare(driver, qwen[1], sent, [case] * 3)


def test_the_same_text_with_another_image_is_another_prefix(qwen: Saved) -> None:
    driver = vision_driver(qwen[0], page_size=1)
    near = picture(90, 90, 1)
    near.putpixel((40, 40), (0, 0, 0))
    ids = [3, 4, 5, *ONE, 7, 8, 9]
    for rid, pictures in (("one", [picture(90, 90, 1)]), ("near", [near])):
        sent = image_request(driver, rid, ids, pictures)
        driver.send(sent)
        driver.run()
        compare(driver, qwen[1], [sent], [(ids, pictures)])
    last = driver.answers["near"].last
    assert last is not None and last.cached_tokens == 4, "the text before the image, and nothing else"


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_retracted_prompts_and_answers_go_on(saved: Callable[[str], Saved], name: str) -> None:
    directory, reference = saved(name)
    cases = cases_of(name)
    for steps in (1, 2, 4, 7, 9):
        driver = vision_driver(directory)
        sent = [image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)]
        driver.send(*sent)
        for _ in range(steps):
            driver.step()
        driver.send(PauseGenerationReq(id="p", mode="retract"))
        driver.step()
        driver.send(ContinueGenerationReq(id="c"))
        driver.run()
        compare(driver, reference, sent, cases)


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_a_small_pool_computes_embeddings_again(saved: Callable[[str], Saved], name: str) -> None:
    """It has room for the largest image alone, so most steps read one image, and rows go from one to the other."""
    directory, reference = saved(name)
    driver = vision_driver(directory, num_embedding_rows=30)
    check(driver, reference, cases_of(name) * 2)
    images = driver.scheduler.memory.images
    assert images.num_computed > 6
    assert images.rows.num_leased <= 30


def test_a_step_computes_few_images(qwen: Saved) -> None:
    """No more embeddings than a step has tokens, or one image."""
    directory, reference = qwen
    driver = vision_driver(directory, chunked_prefill_size=12, max_total_tokens=2048)
    launch, computed = driver.worker.launch, []

    def recording(batch: StepBatch) -> ForwardResult | HeldStep:
        computed.append([len(encode.rows) for encode in batch.encodes])
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    cases = [([*ONE * 3, number], [picture(60, 60, 3 * number + i) for i in range(3)]) for number in range(4)]
    check(driver, reference, [*cases, ([*ONE, 5], [picture(140, 140, 50)])])
    assert max(map(sum, computed)) == 25 and all(sum(sizes) <= 12 or len(sizes) == 1 for sizes in computed)
    assert [4, 4] in computed or [4, 4, 4] in computed


def test_images_of_an_aborted_request_are_not_computed(qwen: Saved) -> None:
    """A step has room for one request's image, and the others go before their turn."""
    directory, reference = qwen
    driver = vision_driver(directory, chunked_prefill_size=12, max_total_tokens=2048)
    cases = [([*ONE * 2, number], [picture(60, 60, 3 * number + i) for i in range(2)]) for number in range(4)]
    sent = [image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)]
    driver.send(*sent)
    driver.step()
    driver.send(AbortReq(rid="r2"), AbortReq(rid="r3"))
    driver.run()
    compare(driver, reference, sent[:2], cases[:2])
    assert driver.scheduler.memory.images.num_computed == 4
    driver.send(image_request(driver, "again", *cases[2]))
    driver.run()
    assert driver.scheduler.memory.images.num_computed == 6


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_images_beside_a_draft(saved: Callable[[str], Saved], name: str, tmp_path: Path) -> None:
    """Positions behind images are those of the answer's tokens when several are verified at once."""
    directory, reference = saved(name)
    text = transformers.Qwen2Config(
        vocab_size=120, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(text).save_pretrained(tmp_path)
    driver = vision_driver(
        directory,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tmp_path),
        speculative_num_steps=3,
    )
    check(driver, reference, cases_of(name))


# No trees where windows are shorter than they may be.
@pytest.mark.parametrize("name,topk", [(BOTH_KINDS[0], 1), (BOTH_KINDS[0], 2), (BOTH_KINDS[1], 1)])
def test_images_beside_a_draft_that_reads_hidden_states(
    saved: Callable[[str], Saved], name: str, topk: int, tmp_path: Path
) -> None:
    """Chains and trees of EAGLE-3: the same answers as without a draft, all of random weights."""
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = sizes | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": 120}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(tmp_path)}
    draft |= {"speculative_num_steps": 3, "speculative_eagle_topk": topk}
    found, cases = [], cases_of(name)
    for flags in ({}, draft):
        driver = vision_driver(saved(name)[0], load_format="dummy", **flags)
        driver.send(*[image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)])
        driver.run()
        found.append([driver.answers[f"r{i}"].output_ids for i in range(len(cases))])
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) > 2


@pytest.mark.parametrize("name", VISION_MODELS)
def test_ranks_give_the_same_answers(saved: Callable[[str], Saved], name: str) -> None:
    directory, reference = saved(name)
    ranks, cases = Ranks(2), cases_of(name)
    ranks.most_fused_rows = 4

    def run(rank: int) -> Driver:
        driver = vision_driver(directory, ranks.devices[rank], shard=ranks.shards[rank])
        driver.send(*[image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)])
        driver.run()
        return driver

    for driver in ranks.run(run):
        compare(driver, reference, [image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)], cases)


def test_two_ranks_around_a_size_of_graphs(tmp_path: Path) -> None:
    """sglang#14193: 1,025 tokens, twice, and images that end at the edge of a captured size. A prompt that is cut to
    fit is seen."""
    save_vision_checkpoint("Qwen2_5_VLForConditionalGeneration", tmp_path)
    cases, ranks = sizes_of_14193(tmp_path, 1024), Ranks(2)
    graphs: dict[str, object] = {"piecewise_cuda_graph_tokens": (64, 1024), "cuda_graph_bs": (1, 2)}
    expected = answers_around(tmp_path, cases, "cpu")
    assert len(set(map(tuple, expected))) > 4
    found = ranks.run(lambda rank: answers_around(tmp_path, cases, ranks.devices[rank], ranks.shards[rank], **graphs))
    assert found == [expected] * 2
    severed = open_device("cpu", severed=frozenset({TOTAL_BUCKETS.name}))
    assert answers_around(tmp_path, cases, severed, **graphs) != expected


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_answers_do_not_depend_on_neighbours(saved: Callable[[str], Saved], name: str) -> None:
    """--enable-deterministic-inference: the same bits of every logprob, alone and among others, also in steps with
    their prompts; these are not mixed if images are seen whole."""
    directory, _ = saved(name)
    found = []
    for num in (1, len(CASES)):
        driver = vision_driver(
            directory, enable_deterministic_inference=True, chunked_prefill_size=64 - 16 * (num == 1),
            enable_mixed_chunk=True,
        )  # fmt: skip
        driver.send(*[image_request(driver, f"r{i}", *CASES[i], return_logprob=True) for i in range(num)])
        driver.run()
        found.append((driver.answers["r0"].output_ids, driver.output_logprobs["r0"]))
    assert found[0] == found[1]
    assert bool(driver.scheduler.stats.num_mixed_steps) == driver.config.mixes_steps == (not name.startswith("Gemma3"))


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_random_weights_answer(saved: Callable[[str], Saved], name: str) -> None:
    driver = vision_driver(saved(name)[0], load_format="dummy")
    driver.send(*[image_request(driver, f"r{i}", *case) for i, case in enumerate(CASES)])
    driver.run()
    assert all(len(answer.output_ids) == 8 for answer in driver.answers.values())


def test_the_warm_up_changes_no_answer(qwen: Saved) -> None:
    driver = vision_driver(qwen[0], memory_check="order")
    runner = driver.worker
    assert isinstance(runner, ModelRunner)
    warm_up(runner.device, driver.config, runner.launch)
    check(driver, qwen[1])


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_prefixes_come_back_from_the_host(saved: Callable[[str], Saved], name: str) -> None:
    directory, reference = saved(name)
    driver = vision_driver(directory, max_total_tokens=128, enable_hierarchical_cache=True, hicache_ratio=4.0)
    cases = cases_of(name)
    for turn in range(2):
        sent = [image_request(driver, f"{turn}.{i}", *case) for i, case in enumerate(cases)]
        driver.send(*sent)
        driver.run()
        compare(driver, reference, sent, cases)
    assert driver.scheduler.memory.cached_tokens["host"] > 0


def test_answers_do_not_depend_on_caches(qwen: Saved) -> None:
    """Conversations with few images and near-equal ones, in random order: the answers of a server without caches."""
    random = Random(3)
    pool = [picture(60, 60, 1), picture(60, 60, 1), picture(60, 60, 2), picture(30, 80, 3)]
    pool[1].putpixel((3, 3), (0, 0, 0))
    films = [film(60, 60, 4, fps=1.0), film(60, 60, 4, fps=0.5), film(60, 60, 3, fps=1.0), Film((pool[0], pool[1]))]
    asked: list[Case] = []
    for _ in range(12):
        if asked and random.random() < 0.6:
            ids, pictures = random.choice(asked)
        else:
            ids, pictures = [2, 3], []
        new: list[Picture] = [random.choice(pool) for _ in range(random.randint(0, 2))]
        new += random.sample(films, random.randint(0, 1))
        shown = [token for one in new for token in (FILM if isinstance(one, Film) else ONE)]
        ids = [*ids, *shown, *[random.randint(4, 6) for _ in range(3)]]
        asked.append((ids, [*pictures, *new]))
    answers = []
    for flags in ({"page_size": 1}, {"disable_radix_cache": True, "max_running_requests": 1}):
        driver = vision_driver(qwen[0], num_embedding_rows=16 if "page_size" in flags else None, **flags)
        driver.send(*[image_request(driver, f"r{i}", *case) for i, case in enumerate(asked)])
        driver.run()
        answers.append([driver.answers[f"r{i}"].output_ids for i in range(len(asked))])
    assert answers[0] == answers[1]


def test_positions_of_videos_end_with_the_context(qwen: Saved) -> None:
    """There are no angles for positions behind it, which a video of few frames may reach that are far apart."""
    driver, ids = vision_driver(qwen[0], max_total_tokens=2048), [*FILM, 5]
    ends = {"far": (4 * 2 / 1.0, 8), "near": (504.0, 4), "over": (1000.0, 0)}  # positions of the last frames
    for rid, (moment, _) in ends.items():
        driver.send(image_request(driver, rid, ids, [film(60, 60, 4, fps=4 * 2 / moment)]))
    driver.run()
    for rid, (_, num_tokens) in ends.items():
        assert len(driver.answers[rid].output_ids) == num_tokens, rid
    finish = driver.answers["over"].finish
    assert finish is not None and finish.status_code == 400


def test_images_without_a_place_are_refused(qwen: Saved) -> None:
    driver = vision_driver(qwen[0], num_embedding_rows=12)
    good = image_request(driver, "good", *CASES[0])
    (image,) = good.images
    moved = msgspec.structs.replace(image, offset=image.offset + 1)
    wrong = {
        "moved": ([moved], "not where the prompt has its tokens"),
        "outside": ([msgspec.structs.replace(image, offset=100)], "no place in the prompt"),
        "twice": ([image, image], "image 1 has no place"),
        "pixels": ([msgspec.structs.replace(image, pixels=image.pixels[:-1])], "not prepared for this model"),
        "frames": ([msgspec.structs.replace(image, num_frames=1)], "not prepared for this model"),
        "continues": ([msgspec.structs.replace(image, continues=True)], "does not follow the frames before it"),
    }
    for rid, (images, _) in wrong.items():
        driver.send(msgspec.structs.replace(good, rid=rid, images=images))
    driver.send(image_request(driver, "large", [*ONE, 3], [picture(200, 200)]))
    text = make_driver()
    text.send(msgspec.structs.replace(good, rid="text"))
    for each, expected in (
        (driver, {rid: why for rid, (_, why) in wrong.items()} | {"large": "more than the 12 embeddings"}),
        (text, {"text": "reads no images"}),
    ):
        each.run()
        for rid, why in expected.items():
            finish = each.answers[rid].finish
            assert finish is not None and finish.status_code == 400 and why in str(finish.message), rid


def test_what_images_that_are_seen_whole_need(saved: Callable[[str], Saved]) -> None:
    directory, _ = saved("Gemma3ForConditionalGeneration")
    with pytest.raises(ValueError, match="the 16 tokens of an image are computed in one step.*at least 32, or -1"):
        vision_driver(directory, chunked_prefill_size=28)


def test_weights_that_change_take_the_embeddings_along(qwen: Saved) -> None:
    driver = vision_driver(qwen[0])
    driver.send(image_request(driver, "r", *CASES[0]))
    driver.run()
    images = driver.scheduler.memory.images
    assert images.rows.num_leased
    driver.scheduler.memory.forget([])
    assert images.rows.num_leased == 0


def test_rows_of_no_image_are_found_when_the_engine_is_idle(qwen: Saved) -> None:
    driver = vision_driver(qwen[0])
    driver.scheduler.memory.check_memory()
    assert driver.scheduler.memory.images.rows.alloc(3) is not None
    with pytest.raises(RuntimeError, match="3 rows of image embeddings are leased, images have 0"):
        driver.scheduler.memory.check_memory()
