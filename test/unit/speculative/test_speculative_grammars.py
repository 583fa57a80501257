"""Grammars and speculation in one batch: drafts are not accepted under masks, and no token changes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence, ValuesView
from pathlib import Path
from random import Random

import msgspec
import pytest
import xgrammar
from draft_checkpoints import VOCAB
from scheduler_driver import answers, request
from speculative_driver import EAGLE3, NGRAM, STANDALONE, count_tokens, make_driver, models, requests

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.matcher import I32, MaskFill, RequestGrammar
from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc.io_struct import AbortReq, LoadGrammarReq
from fenceline.scheduler.req import Req

__all__ = ["models"]  # a fixture


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE3, "eagle3"), (STANDALONE, "target"), (NGRAM, None)])
def test_requests_with_a_grammar_beside_others(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None
) -> None:
    """Those with one get a token a step, the others as many as ever; no token changes."""
    rng = Random(11)
    reqs = [
        msgspec.structs.replace(
            request(f"r{i}", [rng.randrange(3, VOCAB) for _ in range(9)], i, temperature=0.8, max_new_tokens=24),
            grammar=i % 2,
        )
        for i in range(6)
    ]
    driver, plain = make_driver(models, algorithm, draft), make_driver(models)
    loaded = _ten_tokens(driver.config.model.eos_token_ids)
    counted = count_tokens(driver)
    driver.send(loaded)
    plain.send(loaded)
    outputs = answers(driver, reqs)
    assert outputs == answers(plain, reqs)
    assert max(counted) > 1
    for output in outputs[1::2]:
        assert set(output[:-1]) <= set(range(10, 20))


def test_masks_filled_while_tokens_are_published_change_nothing(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a step is launched before the previous one is published. Some requests have no grammar, and
    some end by their length, some by themselves."""
    rng, num_begun = Random(12), Counter[str]()
    reqs = [
        msgspec.structs.replace(
            request(f"r{i}", [rng.randrange(3, VOCAB) for _ in range(9)], i, temperature=0.8, max_new_tokens=6 + i),
            grammar=int(i % 3 > 0),
        )
        for i in range(16)
    ]
    driver, plain = make_driver(models), make_driver(models)
    scheduler = driver.scheduler
    begin_fill = scheduler.grammars.begin_fill

    def counted(grammars: Sequence[RequestGrammar | None], masks: I32, **rest: bool) -> MaskFill:
        num_begun["early"] += sum(grammar is not None for grammar in grammars)
        return begin_fill(grammars, masks, **rest)

    monkeypatch.setattr(scheduler, "may_publish_early", lambda _: False)
    monkeypatch.setattr(scheduler.grammars, "begin_fill", counted)
    scheduler.grammars.use_threads(3)
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        loaded = _ten_tokens(driver.config.model.eos_token_ids)
        driver.send(loaded)
        plain.send(loaded)
        assert answers(driver, reqs) == answers(plain, reqs)
    finally:
        sys.setswitchinterval(before)
    assert num_begun["early"] > 50


def test_nobody_looks_for_grammars_where_there_are_none(models: dict[str, Path]) -> None:
    looks = Counter[str]()

    class Requests(dict[str, Req]):
        def values(self) -> ValuesView[Req]:
            looks["all"] += 1
            return super().values()

    driver = make_driver(models, EAGLE3, "eagle3")
    driver.scheduler.reqs = Requests()
    assert answers(driver, requests(1))
    assert looks["all"] < driver.scheduler.num_launched / 2  # for statistics alone, now and then


def test_a_step_with_grammars_is_published_before_the_next(models: dict[str, Path]) -> None:
    driver = make_driver(models, EAGLE3, "eagle3")
    driver.send(_ten_tokens(driver.config.model.eos_token_ids))
    constrained = msgspec.structs.replace(requests(1, 1)[0], rid="constrained", grammar=1)
    answers(driver, [*requests(2, 3), constrained])  # whoever has left is not counted, see check_memory
    assert not driver.scheduler.speculates_under_masks
    driver.send(msgspec.structs.replace(constrained, rid="again"))
    driver.step()
    assert driver.scheduler.speculates_under_masks
    driver.scheduler.population.retract(driver.scheduler.reqs["again"], "")
    assert driver.scheduler.speculates_under_masks
    driver.send(AbortReq(rid="again"))
    driver.run()
    assert not driver.scheduler.speculates_under_masks


def _ten_tokens(eos: Sequence[int]) -> LoadGrammarReq:
    """5 to 20 of ten tokens, in any order."""
    pieces = [b"%c" % (97 + token - 10) if 10 <= token < 20 else b"" for token in range(VOCAB)]
    vocabulary = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=list(eos))
    data = compile_grammar(vocabulary, GrammarSpec("regex", "[a-j]{5,20}"), None)
    return LoadGrammarReq(id="g", grammar=1, data=data, vocabulary=vocabulary.serialize_json().encode())
