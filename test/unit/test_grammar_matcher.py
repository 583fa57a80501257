"""Where a request stands in its grammar, and the masks that follow from it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
import xgrammar

from fenceline.constrained import matcher as matcher_module
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.matcher import GrammarStore, RequestGrammar, all_tokens
from fenceline.constrained.spec import GrammarSpec, ThinkTokens
from fenceline.sampling.sampler import masked

# Ids by text: 0 ends an answer, 1 and 2 are tags, 31 and 32 lie on either side of a word's border.
_PIECES = [b"", b"<t>", b"</t>", b"a", b"b", b"ab", *(b"%d" % i for i in range(6, 31)), b"x", b"y", b"z"]
_EOS, _START, _END, _A, _B, _AB = range(6)


@lru_cache
def _vocabulary() -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo(
        _PIECES, xgrammar.VocabType.RAW, vocab_size=len(_PIECES), stop_token_ids=[_EOS]
    )


def _begin(regex: str, think: ThinkTokens | None = None) -> RequestGrammar:
    return _store(regex).begin(7, think)


def _store(regex: str) -> GrammarStore:
    """One whose grammar 7 is ``regex``."""
    store = GrammarStore(len(_PIECES), (_EOS,))
    data = compile_grammar(_vocabulary(), GrammarSpec("regex", regex), None)
    store.load("id", 7, data, _vocabulary().serialize_json().encode(), [])
    assert store.num_loading == 1
    assert store.loaded() == [("id", None)]
    return store


def _allowed(grammar: RequestGrammar, least_more: int = 0) -> list[int]:
    words = all_tokens(1, 2)
    assert grammar.fill(words, least_more)
    logits = masked(torch.zeros(1, len(_PIECES)), torch.from_numpy(words))
    return torch.nonzero(logits[0] == 0).flatten().tolist()


def test_a_grammar_allows_what_continues_it_and_its_end_at_the_end() -> None:
    grammar = _begin("(ab)+x?")
    assert _allowed(grammar) == [_A, _AB]
    assert grammar.accept(_AB)
    assert _allowed(grammar) == [_EOS, _A, _AB, 31]
    assert grammar.accept(31)
    assert _allowed(grammar) == [_EOS]
    assert not grammar.ended
    assert grammar.accept(_EOS)
    assert grammar.ended


def test_both_sides_of_a_word_of_the_mask() -> None:
    assert _allowed(_begin("[xyz]")) == [31, 32, 33]


def test_a_token_that_the_mask_does_not_allow_is_refused() -> None:
    assert not _begin("ab").accept(_B)


def test_an_answer_does_not_end_too_early_unless_nothing_else_may_come() -> None:
    grammar = _begin("(ab){1,2}")
    assert grammar.accept(_AB)
    assert _allowed(grammar, least_more=1) == [_A, _AB]
    assert grammar.accept(_AB)
    assert _allowed(grammar, least_more=1) == [_EOS]


def test_a_grammar_begins_after_the_thought_that_the_prompt_has_opened() -> None:
    grammar = _begin("ab", ThinkTokens(_START, _END, is_open=True))
    free = [token for token in range(len(_PIECES)) if token != _EOS]
    assert _allowed(grammar) == free
    assert grammar.accept(33)
    assert _allowed(grammar) == free
    assert grammar.accept(_END)
    assert _allowed(grammar) == [_A, _AB]


def test_an_answer_may_begin_with_a_thought_or_with_the_grammar() -> None:
    think = ThinkTokens(_START, _END, is_open=False)
    grammar = _begin("ab", think)
    assert _allowed(grammar) == [_START, _A, _AB]
    assert grammar.accept(_START)
    assert _EOS not in _allowed(grammar)
    assert grammar.accept(_END)
    assert _allowed(grammar) == [_A, _AB]
    other = _begin("ab", think)
    assert other.accept(_A)
    assert _allowed(other) == [_B]  # it did not think, and does not begin to


def test_the_end_of_the_sequence_within_a_thought_is_no_answer() -> None:
    assert not _begin("ab", ThinkTokens(-1, _END, is_open=True)).accept(_EOS)


def test_a_grammar_whose_tokens_take_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = _begin("(ab)*")
    seconds = iter(np.arange(0, 100, 0.04).tolist())  # each call of the clock is 40 ms after the one before
    monkeypatch.setattr(matcher_module.time, "thread_time", lambda: next(seconds))
    for _ in range(2):
        _allowed(grammar)
        assert not grammar.is_too_slow
    assert grammar.accept(_A)
    assert grammar.is_too_slow


def _times(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """Each use of a grammar takes the next of ``seconds``."""
    clock = iter(np.cumsum([second for taken in seconds for second in (0, taken)]).tolist())
    monkeypatch.setattr(matcher_module.time, "thread_time", lambda: next(clock))


def test_requests_with_one_grammar_have_one_clock_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come afterwards are not ended by it."""
    store = _store("(ab)*")
    requests = [store.begin(7, None) for _ in range(4)]
    _times(monkeypatch, [0.04] * 4)
    for request in requests[:3]:
        _allowed(request)
    assert all(request.is_too_slow for request in requests)
    later = store.begin(7, None)
    assert not later.is_too_slow and requests[0].is_too_slow


def test_a_grammar_with_a_slow_token_now_and_then_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = _begin("(ab)*")
    _times(monkeypatch, ([0.04] + [0.00005] * 50) * 10)
    for _ in range(510):
        _allowed(grammar)
        assert not grammar.is_too_slow


def test_what_the_front_end_has_forgotten_is_gone_and_errors_are_told() -> None:
    store = GrammarStore(len(_PIECES), (_EOS,))
    data = compile_grammar(_vocabulary(), GrammarSpec("regex", "a"), None)
    store.load("one", 1, data, _vocabulary().serialize_json().encode(), [])
    store.load("two", 2, b"{", b"", [1])
    told = store.loaded()
    assert [id for id, _ in told] == ["one", "two"]
    assert told[0][1] is None and told[1][1] is not None
    with pytest.raises(KeyError):
        store.begin(1, None)
