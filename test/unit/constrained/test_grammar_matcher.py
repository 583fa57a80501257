"""Where a request stands in its grammar, and the masks that follow from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import xgrammar

from fenceline.constrained import matcher as matcher_module
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.matcher import GrammarStore, RequestGrammar, accept_tokens
from fenceline.constrained.spec import MAX_HEADER_TOKENS, GrammarSpec, ThinkTokens
from fenceline.sampling.draw_kernels import masked

# Ids by text: 0 ends an answer, 1 and 2 are tags, 31 and 32 lie on either side of a word's border.
_PIECES = [b"", b"<t>", b"</t>", b"a", b"b", b"ab", *(b"%d" % i for i in range(6, 31)), b"x", b"y", b"z"]
_EOS, _START, _END, _A, _B, _AB = range(6)


def test_a_library_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match="cannot be used .*pip install xgrammar"):
        GrammarStore((_EOS,)).prepare()


@lru_cache
def _vocabulary() -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo(_PIECES, xgrammar.VocabType.RAW, vocab_size=len(_PIECES), stop_token_ids=[_EOS])


def _begin(regex: str, think: ThinkTokens | None = None) -> RequestGrammar:
    return _store(regex).begin(7, think)


def _store(regex: str, decides: bool = True) -> GrammarStore:
    """One whose grammar 7 is ``regex``."""
    store = GrammarStore((_EOS,), decides)
    data = compile_grammar(_vocabulary(), GrammarSpec("regex", regex), None)
    store.load("id", 7, data, _vocabulary().serialize_json().encode(), [])
    assert len(store.loading) == 1
    assert store.loaded() == [("id", None)]
    return store


def _filled(
    store: GrammarStore,
    grammars: Sequence[RequestGrammar | None],
    least_more: int = 0,
    begun: Sequence[RequestGrammar | None] | None = None,
) -> tuple[matcher_module.I32, list[bool]]:
    """The masks of ``grammars``, in memory that had others, and what ``GrammarStore.finish_fill`` returns. ``begun``:
    those that the helper threads may begin with."""
    masks = np.full((len(grammars), -(-len(_PIECES) // 32)), 0x5A5A5A5A, np.int32)
    fill = store.begin_fill([None] * len(grammars) if begun is None else begun, masks)
    return masks, store.finish_fill(fill, grammars, [least_more] * len(grammars))


def _allowed(grammar: RequestGrammar, least_more: int = 0) -> list[int]:
    masks, may_go_on = _filled(GrammarStore((_EOS,)), [grammar], least_more)
    assert may_go_on == [True]
    logits = masked(torch.zeros(1, len(_PIECES)), torch.from_numpy(masks))
    return torch.nonzero(logits[0] == 0).flatten().tolist()


def test_a_grammar_allows_its_continuations_and_its_end() -> None:
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


def test_an_answer_does_not_end_too_early_unless_it_must() -> None:
    grammar = _begin("(ab){1,2}")
    assert grammar.accept(_AB)
    assert _allowed(grammar, least_more=1) == [_A, _AB]
    assert grammar.accept(_AB)
    assert _allowed(grammar, least_more=1) == [_EOS]


def test_a_grammar_begins_after_the_prompt_s_open_thought() -> None:
    grammar = _begin("ab", ThinkTokens(_START, (_END,), is_open=True))
    free = [token for token in range(len(_PIECES)) if token != _EOS]
    assert _allowed(grammar) == free
    assert grammar.accept(33)
    assert _allowed(grammar) == free
    assert grammar.accept(_END)
    assert _allowed(grammar) == [_A, _AB]


def test_a_thought_may_end_with_several_tokens() -> None:
    grammar = _begin("ab", ThinkTokens(-1, (_START, _B, _END), is_open=True))
    free = _allowed(grammar)
    for token in (_B, _END, _START, _START, _END, _START, _B):
        assert grammar.accept(token) and _allowed(grammar) == free
    assert grammar.accept(_END)
    assert _allowed(grammar) == [_A, _AB]


@pytest.mark.parametrize("header", [(_START, _B), (_START, _A)])
@pytest.mark.parametrize("more", [(), (31, 32), (33,) * MAX_HEADER_TOKENS])
def test_a_thought_ends_where_the_answer_s_header_does(header: tuple[int, int], more: tuple[int, ...]) -> None:
    """A header may say more than the channel: ``<|channel|>final <|constrain|>json<|message|>``."""
    think = ThinkTokens(-1, (_START, _B), True, or_end=((_START, _A),), header_end=(_END,))
    grammar = _begin("ab", think)
    free = _allowed(grammar)
    for token in (_END, _START, _AB, _END, *header, *more):  # the first message's header is another one
        assert grammar.accept(token) and _allowed(grammar) == free
    assert grammar.accept(_END)
    assert _allowed(grammar) == [_A, _AB]


def test_what_begins_like_a_header_and_does_not_end_is_thought() -> None:
    grammar = _begin("ab", ThinkTokens(-1, (_START, _B), True, header_end=(_END,)))
    free = _allowed(grammar)
    for token in (_START, _B, *(33,) * (MAX_HEADER_TOKENS + 1), _END, _START, _A, _END):
        assert grammar.accept(token) and _allowed(grammar) == free
    assert not grammar.accept(_EOS)


def test_an_answer_may_begin_with_a_thought_or_with_the_grammar() -> None:
    think = ThinkTokens(_START, (_END,), is_open=False)
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
    assert not _begin("ab", ThinkTokens(-1, (_END,), is_open=True)).accept(_EOS)


def test_a_call_may_stand_in_place_of_the_grammar() -> None:
    """It begins with its token, at the beginning of the answer or after the thought, and is not checked."""
    think = ThinkTokens(_START, (_END,), is_open=False, calls=(9,))
    for thought in ((), (_START, 33, 9, _END)):
        grammar = _begin("ab", think)
        for token in thought:
            assert grammar.accept(token)
        assert _allowed(grammar) == sorted({_A, _AB, 9} | (set() if thought else {_START}))
        assert grammar.accept(9) and grammar.may_think and not grammar.is_matching
        assert len(_allowed(grammar)) == len(_PIECES)
        assert _EOS not in _allowed(grammar, least_more=1)
        for token in (33, _START, _END, 9, _EOS):
            assert grammar.accept(token) and len(_allowed(grammar)) == len(_PIECES)
        other = _begin("ab", think)
        for token in (*thought, _A):
            assert other.accept(token)
        assert _allowed(other) == [_B] and not other.may_think
        assert not other.accept(9)
    assert _allowed(_begin("ab", ThinkTokens(-1, (), False, calls=(9, 31)))) == [_A, _AB, 9, 31]


def test_an_answer_may_end_with_a_call_that_is_read_as_a_thought() -> None:
    think = ThinkTokens(-1, (_START, _B), True, header_end=(_END,), may_end=True)
    grammar = _begin("ab", think)
    assert len(_allowed(grammar)) == len(_PIECES)
    assert _EOS not in _allowed(grammar, least_more=1)
    assert grammar.accept(33) and grammar.accept(_EOS)
    grammar = _begin("ab", think)
    assert all(grammar.accept(token) for token in (_START, _B, _END))
    assert _allowed(grammar) == [_A, _AB]


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


def test_requests_with_one_grammar_have_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come afterwards are not ended by it."""
    store = _store("(ab)*")
    requests = [store.begin(7, None) for _ in range(4)]
    _times(monkeypatch, [0.04] * 4)
    for request in requests[:3]:
        _allowed(request)
    assert all(request.is_too_slow for request in requests)
    later = store.begin(7, None)
    assert not later.is_too_slow and requests[0].is_too_slow


def test_of_several_ranks_a_grammar_is_over_when_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a rank's own clock: the others' masks would differ from its own."""
    store = _store("(ab)*", decides=False)
    requests = [store.begin(7, None) for _ in range(64)]
    _times(monkeypatch, [0.04] * 9)
    free, _ = _filled(store, requests)
    assert (free != -1).any(axis=1).all(), "each has its mask"
    assert store.overdue() == [7] and not any(request.is_too_slow for request in requests)
    store.end([7, 8])
    assert store.overdue() == [] and all(request.is_too_slow for request in requests)
    assert not store.begin(7, None).is_too_slow, "who comes afterwards has another chance"


def test_a_grammar_with_a_rare_slow_token_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = _begin("(ab)*")
    _times(monkeypatch, ([0.04] + [0.00005] * 50) * 10)
    for _ in range(510):
        _allowed(grammar)
        assert not grammar.is_too_slow


def test_many_requests_of_several_grammars_are_advanced_at_once() -> None:
    """As each of them would be alone: of those that think, have left or take another token too."""
    store, other = _store("(ab)+x?"), _store("[ab]x")
    think = ThinkTokens(_START, (_END,), is_open=False)
    grammars = [
        *(store.begin(7, None) for _ in range(20)), None, store.begin(7, think),
        *(other.begin(7, None) for _ in range(3)),
    ]  # fmt: skip
    masks, may_go_on = _filled(store, grammars)
    assert all(may_go_on) and (masks[20] == -1).all()
    thinks = masks[21].copy()
    thinks[0] &= ~(1 << _START)
    assert all((masks[place] == thinks).all() for place in range(20))
    assert (masks[22:] == masks[22]).all() and (masks[22] != thinks).any()
    tokens = [_AB] * 19 + [_A, _A, _START, _A, _B, _AB]
    accepted = accept_tokens(grammars, tokens)
    assert accepted == [True] * 20 + [None, None, True, True, False]
    masks, _ = _filled(store, grammars[:20])
    assert (masks[:19] == masks[0]).all() and (masks[19] != masks[0]).any()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_fill_the_masks_that_one_fills(num_threads: int) -> None:
    """Again and again, for few requests and for many, of a grammar that is over too."""
    store, other = _store("(ab)+x?"), _store("[ab]x")
    for one in (store, other):
        one.use_threads(num_threads)
    begun = [
        *(store.begin(7, None) for _ in range(30)), None, *(other.begin(7, None) for _ in range(40)), None,
    ]  # fmt: skip
    accept_tokens(begun[:15], [_AB] * 15)
    alone = np.concatenate([_filled(_store("a"), [grammar])[0] for grammar in begun])
    for num in (*range(1, len(begun), 7), len(begun), len(begun)):
        for one in (store, other):
            masks, may_go_on = _filled(one, begun[:num])
            assert masks.tolist() == alone[:num].tolist() and all(may_go_on)
    store.end([7])
    masks, _ = _filled(store, begun)
    assert (masks[:30] == -1).all() and masks[30:].tolist() == alone[30:].tolist()


def test_a_thread_that_does_not_come_is_not_waited_for() -> None:
    """Its core is busy. When it comes at last, there is nothing left for it to do."""
    store, late = _store("(ab)+x?"), SimpleQueue[Callable[[], None]]()
    store.use_threads(2)
    store._work = late
    grammars = [store.begin(7, None) for _ in range(20)]
    masks, _ = _filled(store, grammars)
    expected = masks.copy()
    assert (masks == masks[0]).all() and (masks != -1).any()
    masks.fill(7)
    late.get()()
    assert (masks == 7).all() and (_filled(store, grammars)[0] == expected).all()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_that_threads_have_begun_are_those_of_the_end(num_threads: int) -> None:
    """Some were begun, others follow, some requests have left meanwhile, and one had no grammar to begin with."""
    store = _store("(ab)+x?")
    if num_threads > 1:
        store.use_threads(num_threads)
    grammars: list[RequestGrammar | None] = [store.begin(7, None) for _ in range(40)]
    accept_tokens(grammars[::2], [_AB] * 20)
    expected, _ = _filled(store, grammars)
    begun = [grammar if place % 3 else None for place, grammar in enumerate(grammars)]
    late: list[RequestGrammar | None] = [None if place % 5 == 1 else g for place, g in enumerate(grammars)]
    masks, may_go_on = _filled(store, late, begun=begun)
    for place, grammar in enumerate(late):
        if grammar is not None:
            assert may_go_on[place] and (masks[place] == expected[place]).all()
        elif begun[place] is None:
            assert (masks[place] == -1).all()


def test_what_a_thread_cannot_fill_is_told_to_the_caller() -> None:
    store = _store("ab")
    store.use_threads(3)
    grammars = [store.begin(7, None) for _ in range(64)]
    for token in (_AB, _EOS):
        assert all(accept_tokens(grammars, [token] * 64))
    with pytest.raises(RuntimeError, match="terminated"):  # the library fills no mask after the end
        _filled(store, grammars)


def test_a_slow_grammar_is_given_up_before_all_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    store, quick = _store("(ab)*"), _store("(ab)*")
    grammars = [store.begin(7, None) for _ in range(64)] + [quick.begin(7, None)]
    _times(monkeypatch, [0.15, 0.001])  # one that were asked again would end the test
    masks, _ = _filled(store, grammars)
    assert all(grammar.is_too_slow for grammar in grammars[:64])
    assert (masks[8:64] == -1).all(), "those that are not asked any more may draw every token"
    assert not grammars[64].is_too_slow and (masks[64] != -1).any()


def test_what_the_front_end_forgot_is_gone() -> None:
    store = GrammarStore((_EOS,))
    data = compile_grammar(_vocabulary(), GrammarSpec("regex", "a"), None)
    store.load("one", 1, data, _vocabulary().serialize_json().encode(), [])
    store.load("two", 2, b"{", b"", [1])
    told = store.loaded()
    assert [id for id, _ in told] == ["one", "two"]
    assert told[0][1] is None and told[1][1] is not None
    with pytest.raises(KeyError):
        store.begin(1, None)
