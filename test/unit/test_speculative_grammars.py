"""Grammars and speculation in one batch: drafts are not accepted under masks, and no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
import xgrammar
from draft_checkpoints import VOCAB
from scheduler_driver import answers, request
from speculative_driver import EAGLE3, STANDALONE, count_tokens, make_driver, models

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc.io_struct import LoadGrammarReq

__all__ = ["models"]  # a fixture


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE3, "eagle3"), (STANDALONE, "target")])
def test_requests_with_a_grammar_beside_others(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str
) -> None:
    """Those with one get a token a step, the others as many as ever; no token changes."""
    rng = Random(11)
    reqs = [
        msgspec.structs.replace(
            request(
                f"r{i}", [rng.randrange(3, VOCAB) for _ in range(9)], i, temperature=0.8, max_new_tokens=24
            ),
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


def _ten_tokens(eos: Sequence[int]) -> LoadGrammarReq:
    """5 to 20 of ten tokens, in any order."""
    pieces = [b"%c" % (97 + token - 10) if 10 <= token < 20 else b"" for token in range(VOCAB)]
    vocabulary = xgrammar.TokenizerInfo(
        pieces, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=list(eos)
    )
    data = compile_grammar(vocabulary, GrammarSpec("regex", "[a-j]{5,20}"), None)
    return LoadGrammarReq(id="g", grammar=1, data=data, vocabulary=vocabulary.serialize_json().encode())
