"""Steps whose tokens are drawn under masks: in which order the scheduler does their parts, and captured draws."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import numpy as np
import pytest
import xgrammar
from scheduler_driver import Driver, answers, make_model_driver, request

from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc.io_struct import LoadGrammarReq, SlowGrammarsReq, TokenizedGenerateReq
from fenceline.memory_order import MaskTable, open_device
from fenceline.memory_order.device import CpuGraph
from fenceline.model_executor.model_runner import ModelRunner

_SIZES = (1, 2, 4, 8)


def _grammar(driver: Driver, pattern: str) -> LoadGrammarReq:
    """The grammar 1; tokens 10 to 19 are the letters a to j, and no other token has a text."""
    vocab_size, eos = driver.config.model.vocab_size, driver.config.model.eos_token_ids
    pieces = [b"%c" % (97 + token - 10) if 10 <= token < 20 else b"" for token in range(vocab_size)]
    vocabulary = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos))
    data = compile_grammar(vocabulary, GrammarSpec("regex", pattern), None)
    return LoadGrammarReq(id="g", grammar=1, data=data, vocabulary=vocabulary.serialize_json().encode())


def _requests(num: int, free: int = 0, **params: object) -> list[TokenizedGenerateReq]:
    """``num`` requests of which the first ``free`` ones have no grammar."""
    rng = Random(5)
    options: dict[str, object] = {"temperature": 0.8, "max_new_tokens": 12} | params
    return [
        msgspec.structs.replace(
            request(f"r{i}", [rng.randrange(3, 900) for _ in range(9)], i, **options), grammar=int(i >= free)
        )
        for i in range(num)
    ]


def _driver(pattern: str = "[a-j]{40}", graphs: bool = False) -> Driver:
    """As on a GPU, a step is published when the next one has been launched."""
    driver = make_model_driver()
    if graphs:
        # A graph reads as many tokens of each request as it may have.
        model = dataclasses.replace(driver.config.model, context_length=256)
        config = dataclasses.replace(driver.config, cuda_graph_bs=_SIZES, model=model)
        driver = Driver(config, ModelRunner(config, open_device("cpu"), show_progress=False))
    driver.scheduler.may_publish_early = lambda flight: False  # type: ignore[method-assign]
    driver.send(_grammar(driver, pattern))
    return driver


def _watch(driver: Driver) -> list[tuple[str, int]]:
    """Of each sampling and each publishing that follows, the number of tokens that had been published at its end."""
    scheduler, seen = driver.scheduler, list[tuple[str, int]]()

    def watched(owner: object, name: str) -> None:
        method: Callable[..., object] = getattr(owner, name)

        def call(*args: object) -> object:
            result = method(*args)
            seen.append((name, scheduler.stats.num_generated_tokens))
            return result

        setattr(owner, name, call)

    watched(scheduler.masks, "sample_held")
    watched(scheduler, "publish")
    return seen


@pytest.mark.parametrize("free", [0, 3])
def test_a_step_is_sampled_before_the_last_tokens_are_published(free: int) -> None:
    """The next step can be launched only after that. So it is also if only some requests have a grammar."""
    driver = _driver()
    seen = _watch(driver)
    answers(driver, _requests(6, free, ignore_eos=True))
    # A prefill step is published before the decode step that follows it is sampled, and the last one alone.
    names = [name for name, _ in seen]
    decoded = list(zip(names, names[1:], strict=False))
    assert decoded.count(("publish", "publish")) <= 2
    numbers = [num for name, num in seen if name == "sample_held"]
    published = [num for name, num in seen if name == "publish"]
    assert len(numbers) == len(published) == 12
    assert all(later - early == 6 for early, later in zip(numbers[2:], published[1:], strict=False))


def test_a_step_is_sampled_after_a_possible_end_is_published() -> None:
    """Only then it is known whether the request goes on. Answers are those of a loop without overlap."""
    pattern = "[a-j]{2}([a-j]{3})*"
    driver, plain = _driver(pattern), make_model_driver(disable_overlap_schedule=True)
    plain.send(_grammar(plain, pattern))
    seen = _watch(driver)
    reqs = _requests(6, max_new_tokens=30)
    outputs = answers(driver, reqs)
    assert outputs == answers(plain, reqs)
    assert len({len(output) for output in outputs}) > 1, "they end one after the other"
    kinds = Counter(zip([name for name, _ in seen], [name for name, _ in seen][1:], strict=False))
    assert kinds["publish", "sample_held"] and kinds["sample_held", "publish"]


@pytest.mark.parametrize("least", [0, 7])
def test_masks_before_publishing_count_tokens_to_come(least: int) -> None:
    """An answer of at least ``least`` tokens may not end one token earlier or later."""
    reqs = _requests(6, max_new_tokens=30, min_new_tokens=least)
    driver, plain = _driver("[a-j]*"), make_model_driver(disable_overlap_schedule=True)
    plain.send(_grammar(plain, "[a-j]*"))
    outputs = answers(driver, reqs)
    assert outputs == answers(plain, reqs)
    assert min(map(len, outputs)) > least


def test_a_request_that_no_token_can_follow_ends() -> None:
    driver = _driver("[a-j]{5}z")
    answers(driver, _requests(6, ignore_eos=True))
    for answer in driver.answers.values():
        assert len(answer.output_ids) == 5 and answer.finish is not None
        assert answer.finish.message == "no token of the vocabulary can follow in its grammar"
        assert answer.finish.status_code == 400


def test_a_grammar_too_slow_while_masks_are_filled_ends() -> None:
    driver = _driver()
    scheduler, reqs = driver.scheduler, _requests(6, ignore_eos=True)
    finish_fill = scheduler.grammars.finish_fill

    def slow(*args: object) -> object:
        if scheduler.num_launched == 6:
            scheduler.control.carry_out(SlowGrammarsReq(grammars=[1]))
        return finish_fill(*args)  # type: ignore[arg-type]

    scheduler.grammars.finish_fill = slow  # type: ignore[method-assign,assignment]
    answers(driver, reqs)
    for answer in driver.answers.values():
        assert len(answer.output_ids) == 5 and answer.finish is not None
        assert answer.finish.message is not None and "takes too long" in answer.finish.message
    assert scheduler.population.constrained is None, "nothing keeps the states of requests that have left"


# --- captured draws ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "free", "params"),
    [(8, 0, {}), (3, 0, {}), (7, 2, {}), (5, 0, {"temperature": 0.0}), (4, 0, {"top_p": 0.9})],
    ids=["all", "padding", "some free", "greedy", "filtered"],
)
def test_captured_draws_are_those_of_the_sampler(
    num: int, free: int, params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = Counter[str]()

    class Counted(CpuGraph):
        def _replay(self) -> None:
            replays[self.name] += 1
            super()._replay()

    reqs = _requests(num, free, ignore_eos=True, **params)
    expected = answers(_driver(), reqs)
    with monkeypatch.context() as patch:
        patch.setattr("fenceline.memory_order.device.CpuGraph", Counted)
        driver = _driver(graphs=True)
    assert answers(driver, reqs) == expected
    size = next(size for size in _SIZES if size >= num)
    num_draws = 0 if "top_p" in params else 11
    assert replays == Counter({f"decode[{size}]": 11, f"decode[{size}].masked": num_draws})


def test_masks_of_padding_allow_every_token() -> None:
    """All requests have a mask, and after a step with more of them the rows behind have masks of others."""
    device = open_device("cpu")
    table = MaskTable(device, 8, 100)
    for num, num_rows in ((8, 8), (3, 4), (5, 8), (1, 1), (7, 8)):
        masks = table.begin(np.arange(num), num, num_rows)
        masks[:] = 7
        uploaded = table.upload()
        table.drawn(device.forward.record())
        assert uploaded.tolist() == [[7] * 4] * num + [[-1] * 4] * (num_rows - num)
        assert uploaded.data_ptr() == table.table.data_ptr(), "draws have been captured with its address"
