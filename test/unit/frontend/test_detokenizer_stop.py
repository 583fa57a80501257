"""Stop strings: never let out in part, found wherever they complete first, whatever the cuts."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from fenceline.config.request_limits import MAX_STOP_CHARS
from fenceline.frontend.detokenizer_manager import Detokenizer, StopMatch, StopScanner, _State
from fenceline.ipc.io_struct import BatchTokenOut, DecodeInfo, FinishReason, StrOut, TokenLogprobs, TokenOut, TokenPairs
from fenceline.sampling.sampling_params import SamplingParams

TOKENIZER = byte_level()
LETTERS = st.sampled_from("aab ")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[str, str] | None:
    """The naive reference: (text before, stop) of the stop that completes first, the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return None


@given(st.lists(st.text(LETTERS, max_size=4), max_size=12), STOPS)
def test_scanner_agrees_with_the_naive_reference(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    text = "".join(pieces)
    expected = first_match(text, stops)
    shown = ""
    for piece in pieces:
        found = scanner.feed(piece)
        if isinstance(found, StopMatch):
            assert expected == (shown + found.text, found.stop)
            return
        shown += found
        assert expected is None or len(shown) <= len(expected[0])
        assert not any(shown.endswith(stop[:length]) and text[len(shown):].startswith(stop[length:])
                       for stop in stops for length in range(1, len(stop)))  # fmt: skip
    assert expected is None
    assert shown + scanner.flush() == text


class SearchingScanner:
    """The reference: searches the text held back and the new one for every stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = tuple(stops)
        self._max_len = max(map(len, stops))
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> str | StopMatch:
        buffer = self._held + text
        if armed and text:
            match = self._find(buffer)
            if match is not None:
                self._held = ""
                return match
        split = self._hold_from(buffer)
        self._held = buffer[split:]
        return buffer[:split]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> StopMatch | None:
        best_end, best_start, best = len(buffer) + 1, 0, ""
        num_held = len(self._held)
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_held - len(stop) + 1))
            end = start + len(stop)
            if start >= 0 and (end, start) < (best_end, best_start):
                best_end, best_start, best = end, start, stop
        return StopMatch(best, buffer[:best_start]) if best else None

    def _hold_from(self, buffer: str) -> int:
        first = max(0, len(buffer) - self._max_len + 1)
        hold = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(first, len(buffer) - len(stop) + 1), hold)
            while start >= 0:
                if stop.startswith(buffer[start:]):
                    hold = start
                    break
                start = buffer.find(stop[0], start + 1, hold)
        return hold


@given(
    st.lists(st.tuples(st.text(LETTERS, max_size=4), st.booleans()), max_size=12),
    st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=6),
)
@settings(max_examples=400)
def test_scanner_does_what_searching_does(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    scanner, reference = StopScanner(stops), SearchingScanner(stops)
    for piece, armed in pieces:
        found = scanner.feed(piece, armed)
        assert found == reference.feed(piece, armed)
        if isinstance(found, StopMatch):
            return
    assert scanner.flush() == reference.flush()


HOSTILE = {
    "one letter": (["a" * length + "b" for length in range(1, 64)], "a" * 5000),
    "the longest that is taken": (["a" * (MAX_STOP_CHARS - 1) + "b"], ("a" * 300 + "c") * 3),
    "many periods": (["ab" * length + "c" for length in range(1, 60)], "ab" * 5000 + "a"),
    "each a suffix of the next": (["a" * (64 - index) + "b" * index + "c" for index in range(64)], "aaab" * 200),
    "Fibonacci": (["abaababaabaababaababaabaababaabaab"[start:] + "!" for start in range(30)], "abaab" * 150),
    "no match in sight": (["xyz" * 20] * 64, "abcd" * 200),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_character_costs_a_constant_number_of_calls(case: str) -> None:
    """Calls of any kind, C functions included: to make what the text needs of the automaton, and to go on in it."""
    stops, text = HOSTILE[case]
    scanner = StopScanner(stops)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for char in text:
        scanner.feed(char)
    sys.setprofile(None)
    assert calls < 10 * len(text)


def test_long_stop_strings_cost_nothing_until_the_text_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    make = _State.__init__

    def counted(self: _State, *args: object) -> None:
        nonlocal made
        made += 1
        make(self, *args)

    monkeypatch.setattr(_State, "__init__", counted)
    scanner = StopScanner([f"{index:02}" + "x" * (MAX_STOP_CHARS // 64 - 2) for index in range(64)])
    assert scanner.feed("nothing of that kind, 6") == "nothing of that kind, "
    assert scanner.feed("3x and so on") == "63x and so on"
    assert made < 10


def test_match_passed_over_while_unarmed_does_not_come_back() -> None:
    scanner = StopScanner(["a", "ab c"])
    assert scanner.feed("a", armed=False) == ""  # may yet become "ab c"
    assert scanner.feed("b") == ""
    assert scanner.feed(" x") == "ab x"
    assert scanner.feed("a") == StopMatch("a", "")


def news(ids: list[int], total: int, **fields: object) -> TokenOut:
    values = {"rid": "r", "prompt_tokens": 3, "cached_tokens": 0, **fields}
    return TokenOut(output_ids=ids, completion_tokens=total, **values)


def serve(ids: list[int], cuts: list[int], params: SamplingParams, end: FinishReason) -> tuple[list[StrOut], bool]:
    """All news of one request cut into messages; whether the scheduler was told to release it."""
    detokenizer = Detokenizer(TOKENIZER)
    info = DecodeInfo(prompt_tail_ids=TOKENIZER.encode("stop: ")[-3:], sampling_params=params)
    outs: list[StrOut] = []
    released = False
    position = 0
    for number, length in enumerate([*cuts, len(ids)]):
        piece = ids[position : position + length]
        position += len(piece)
        last = position == len(ids)
        token = news(piece, position, decode=info if number == 0 else None, finish_reason=end if last else None)
        batch, stopped = detokenizer.process(BatchTokenOut(outs=[token]))
        outs += batch.outs
        released = released or bool(stopped)
        if last:
            break
    assert len(detokenizer) == 0
    return outs, released


LENGTH = FinishReason(type="length", length=1)


@given(
    st.lists(st.integers(3, TOKENIZER.vocab_size - 1), min_size=1, max_size=25),
    st.lists(st.integers(1, 5), max_size=6),
    st.lists(st.sampled_from(["the", "e", " fox", "\ufffd", "ab", "qu", "stop", "to"]), max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_answer_does_not_depend_on_the_cuts(
    ids: list[int], cuts: list[int], stops: list[str], min_tokens: int, no_trim: bool
) -> None:
    params = SamplingParams(max_new_tokens=64, stop=tuple(stops), min_new_tokens=min_tokens, no_stop_trim=no_trim)
    outs, _ = serve(ids, cuts, params, LENGTH)
    single, _ = serve(ids, [1] * len(ids), params, LENGTH)
    assert "".join(out.text for out in outs) == "".join(out.text for out in single)
    assert sum((out.token.output_ids for out in outs), []) == sum((out.token.output_ids for out in single), [])
    assert outs[-1].token.finish_reason == single[-1].token.finish_reason
    assert outs[-1].token.completion_tokens == sum(len(out.token.output_ids) for out in outs)
    assert all(out.token.finish_reason is None for out in outs[:-1])
    if not stops:
        assert "".join(out.text for out in outs) == TOKENIZER.decode(ids)


@given(st.lists(st.sampled_from(["fox", "quick b", " ", "x j", "lazy", "over the"]), min_size=1, max_size=3),
       st.lists(st.integers(1, 4), max_size=5))  # fmt: skip
def test_stop_string_never_leaks(stops: list[str], cuts: list[int]) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    ids = TOKENIZER.encode(text)
    expected = first_match(text, stops)
    assert expected is not None
    outs, _ = serve(ids, cuts, SamplingParams(max_new_tokens=64, stop=tuple(stops)), LENGTH)
    assert "".join(out.text for out in outs) == expected[0]
    assert outs[-1].token.finish_reason == FinishReason(type="stop", matched=expected[1])
    kept = sum((out.token.output_ids for out in outs), [])
    assert expected[0] + expected[1] in TOKENIZER.decode(kept)
    assert expected[0] + expected[1] not in TOKENIZER.decode(kept[:-1])


def test_match_before_min_new_tokens_is_text() -> None:
    text = "stop stop stop end"
    ids = TOKENIZER.encode(text)
    second = next(n for n in range(len(ids)) if TOKENIZER.decode(ids[:n]).count("stop") == 2)
    params = SamplingParams(max_new_tokens=64, stop=("stop",), min_new_tokens=second)
    outs, released = serve(ids, [1] * len(ids), params, LENGTH)
    assert "".join(out.text for out in outs) == "stop "
    assert released


def test_stop_string_cuts_ids_counts_and_logprobs_at_its_token() -> None:
    ids = TOKENIZER.encode("the quick brown fox")
    logprobs = TokenLogprobs(token_ids=ids, logprobs=[-1.0] * len(ids), top_logprobs=TokenPairs.of([[]] * len(ids)))
    info = DecodeInfo(prompt_tail_ids=[], sampling_params=SamplingParams(stop=("quick",)))
    batch, stopped = Detokenizer(TOKENIZER).process(
        BatchTokenOut(outs=[news(ids, len(ids), decode=info, output_logprobs=logprobs)])
    )
    token = batch.outs[0].token
    kept = len(token.output_ids)
    assert TOKENIZER.decode(token.output_ids) == "the quick"
    assert token.completion_tokens == kept < len(ids)
    assert token.output_logprobs is not None
    assert len(token.output_logprobs.logprobs) == len(token.output_logprobs.top_logprobs) == kept
    assert [abort.rid for abort in stopped] == ["r"]
    assert stopped[0].silent


def test_tokens_after_a_stop_string_are_dropped() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    info = DecodeInfo(prompt_tail_ids=[], sampling_params=SamplingParams(stop=("fox",)))
    ids = TOKENIZER.encode("fox")
    first, _ = detokenizer.process(BatchTokenOut(outs=[news(ids, len(ids), decode=info)]))
    assert first.outs[0].token.finish_reason is not None
    more = [news(ids, 2 * len(ids)), news([], 9, finish_reason=LENGTH)]
    late, stopped = detokenizer.process(BatchTokenOut(outs=more))
    assert (late.outs, stopped) == ([], [])
    again, _ = detokenizer.process(BatchTokenOut(outs=[news(TOKENIZER.encode("dog"), 1, decode=info)]))
    assert again.outs[0].text == "dog"


def test_abort_of_a_request_that_never_started_is_passed_on() -> None:
    abort = FinishReason(type="abort", message="gone")
    batch, _ = Detokenizer(TOKENIZER).process(BatchTokenOut(outs=[news([], 0, finish_reason=abort)]))
    assert batch.outs == [StrOut(token=news([], 0, finish_reason=abort), text="")]


@pytest.mark.parametrize(("no_trim", "skip", "expected"), [
    (False, True, "the fox"), (False, False, "the fox"), (True, False, "the fox<|im_end|>"), (True, True, "the fox"),
])  # fmt: skip
def test_stop_token_is_hidden_unless_asked_for(no_trim: bool, skip: bool, expected: str) -> None:
    eos = TOKENIZER.backend.token_to_id("<|im_end|>")
    ids = [*TOKENIZER.encode("the fox"), eos]
    params = SamplingParams(no_stop_trim=no_trim, skip_special_tokens=skip)
    outs, released = serve(ids, [2], params, FinishReason(type="stop", matched=eos))
    assert "".join(out.text for out in outs) == expected
    assert outs[-1].token.output_ids[-1] == eos
    assert not released


def test_partial_stop_string_is_let_out_at_the_end() -> None:
    outs, _ = serve(TOKENIZER.encode("the quick"), [1, 1], SamplingParams(stop=("quickly",)), LENGTH)
    assert "".join(out.text for out in outs) == "the quick"
