"""The workload of processes: answers travel from a client through every process and back, and errors do too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fenceline_proof import processes, prove
from fenceline_proof.oracle import Oracle, Query, text_of
from fenceline_proof.processes import PROCESSES, compare_answer, missing_edges
from fenceline_proof.runs import ANSWERS, HAPPENS_BEFORE, Trial, explain, run
from fenceline_proof.tiny_model import PIECES, tiny_model_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_client_gets_the_answer_of_its_request_alone() -> None:
    outcome = run(Trial(PROCESSES, 1))
    assert outcome.clean, outcome.report
    assert outcome.num_tokens > 20 and outcome.num_close <= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_race_in_the_schedulers_process_is_reported_by_its_name() -> None:
    outcome = run(Trial(PROCESSES, 0, frozenset({"staging_reuse"})))
    assert (outcome.checker, outcome.edges) == (HAPPENS_BEFORE, ("staging_reuse",))
    assert "pack of the step's inputs writes it on host" in outcome.report
    assert "the same seed may give other batches" in explain(outcome)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_more_seeds_are_clean() -> None:
    for seed in range(2, 8):
        outcome = run(Trial(PROCESSES, seed))
        assert outcome.clean, outcome.report


def test_an_answer_that_is_not_the_requests_is_a_failure_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = processes.Findings("c4: is 'x'", 9, 0)
    monkeypatch.setattr("fenceline_proof.runs.run_processes", lambda *args: wrong)
    outcome = run(Trial(PROCESSES, 0))
    assert (outcome.checker, outcome.report, outcome.num_tokens) == (ANSWERS, "c4: is 'x'", 9)


QUERY = Query(prompt=(3, 1, 20), seed=5, max_new_tokens=12, temperature=0.9)


def _right(query: Query = QUERY, stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the client of a request gets, without the text that a stop string cuts."""
    answer = Oracle(tiny_model_path()).answer(query)
    ids = [answer.step(index).token for index in range(query.max_new_tokens)]
    text = text_of(PIECES, query.prompt, ids, stop, 0)
    end = {"type": "length", "length": 12} if text.stop is None else {"type": "stop", "matched": text.stop}
    ids = ids[: text.num_tokens]
    meta = {"prompt_tokens": 3, "completion_tokens": len(ids), "finish_reason": end}
    return {"text": text.text, "output_ids": ids, "meta_info": meta}


def _compared(
    answer: dict[str, Any], stop: tuple[str, ...] = (), is_cut: bool = False, may_abort: bool = False
) -> str:
    return compare_answer(Oracle(tiny_model_path()), QUERY, stop, answer, is_cut, may_abort)[0]


def test_text_tokens_reason_and_counts_are_compared() -> None:
    right = _right()
    assert _compared(right) == ""
    assert _compared({}) == "was never answered"
    assert "alone" in _compared({**right, "text": right["text"] + "a"})
    meta = right["meta_info"]
    assert "alone" in _compared({**right, "meta_info": {**meta, "finish_reason": {"type": "abort"}}})
    assert "counts" in _compared({**right, "meta_info": {**meta, "prompt_tokens": 4}})
    other = [*right["output_ids"][:-1], (right["output_ids"][-1] + 1) % 64]
    assert "alone" in _compared({**right, "output_ids": other})
    letter = right["text"][4]
    ended = _right(stop=(letter,))
    assert _compared(ended, (letter,)) == "" and "alone" in _compared(right, (letter,))


def test_an_aborted_answer_is_a_beginning_of_the_right_one() -> None:
    right = _right()
    begun = {
        "text": "",
        "output_ids": right["output_ids"][:2],
        "meta_info": {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": {"type": "abort"}},
    }
    assert _compared(begun, may_abort=True) == ""
    assert "alone" in _compared(begun), "nobody asked for that"
    assert "beginning" in _compared({**begun, "text": "#"}, may_abort=True)
    assert "beginning" in _compared({**begun, "output_ids": [1, 1]}, may_abort=True)
    cut = {**begun, "meta_info": {**begun["meta_info"], "finish_reason": None}}
    assert _compared(cut, is_cut=True) == "" and "alone" in _compared(cut)


def test_a_token_that_rounding_could_have_made_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    right, oracle = _right(), Oracle(tiny_model_path())
    answer = oracle.answer(QUERY)
    other = (right["output_ids"][3] + 1) % 64
    step = replace(answer.step(3), close=frozenset((right["output_ids"][3], other)))
    monkeypatch.setattr(answer, "step", lambda index, old=answer.step: step if index == 3 else old(index))
    right["output_ids"][3] = other
    assert compare_answer(oracle, QUERY, (), right, False, False) == ("", 3, True)


def test_edges_are_read_from_a_report() -> None:
    assert missing_edges("race\n  nothing orders them; missing edge: a_b or c_d") == ("a_b", "c_d")
    assert missing_edges("nothing orders them; no edge fits") == ()


def test_the_workload_goes_without_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prove.main(["--workload", PROCESSES, "--blind"])
    assert "goes without --edge and --blind" in capsys.readouterr().err
