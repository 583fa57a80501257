"""benchmark/h200/exact.py: one flipped bit is found and reported, and every load is one that the server takes."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import parse_args

SCRIPT = Path(__file__).parents[3] / "benchmark" / "h200" / "exact.py"
ASK = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, "logprob_start_len": 1}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def answer() -> dict[str, Any]:
    return {
        "text": "ab",
        "output_ids": [8, 9],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "input_token_logprobs": [[None, 6, None], [-1.5, 7, None]],
            "input_top_logprobs": [None, [[-0.5, 3, None], [-1.5, 7, None]]],
            "output_token_logprobs": [[-0.25, 8, None], [-0.75, 9, None]],
            "output_top_logprobs": [[[-0.25, 8, None], [-1.75, 1, None]], [[-0.75, 9, None], [-0.75, 4, None]]],
        },
    }


def flipped(value: float, bit: int = 0) -> float:
    """``value`` with another bit of its float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (other,) = struct.unpack("<f", struct.pack("<I", bits ^ 1 << bit))
    return float(other)


@pytest.mark.parametrize(
    ("path", "position", "step", "what"),
    [
        (("input_token_logprobs", 1, 0), 2, -1, "input_token_logprobs"),
        (("input_top_logprobs", 1, 0, 0), 2, -1, "input_top_logprobs"),
        (("output_token_logprobs", 1, 0), 4, 1, "output_token_logprobs"),
        (("output_top_logprobs", 0, 1, 0), 3, 0, "output_top_logprobs"),
    ],
)
def test_one_flipped_bit_is_found(path: tuple[Any, ...], position: int, step: int, what: str) -> None:
    from exact import compare

    got = answer()
    entry: Any = got["meta_info"]
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = flipped(entry[path[-1]])
    bits, first = compare(17, ASK, [answer(), answer()], [answer(), got])
    assert bits == 1 and first is not None
    assert (first.request, first.sample, first.position, first.step, first.what) == (17, 1, position, step, what)
    assert first.expected != first.got and first.got.endswith("1)"), "the bits are shown"
    assert compare(17, ASK, [answer()], [answer()]) == (0, None)


def test_ids_texts_and_lengths_are_compared_too() -> None:
    from exact import compare

    for change, what in (({"output_ids": [8, 11]}, "output_ids"), ({"text": "ac"}, "text")):
        bits, first = compare(0, ASK, [answer()], [answer() | change])
        assert bits and first is not None and first.what == what
    longer = answer()
    longer["output_ids"].append(3)
    assert compare(0, ASK, [answer()], [longer])[1] is not None
    assert compare(0, ASK, [answer()], [answer(), answer()])[1] is not None


def test_of_an_aborted_answer_the_beginning_is_compared() -> None:
    from exact import compare

    got = answer() | {"text": "a", "output_ids": [8]}
    meta = got["meta_info"] | {"finish_reason": {"type": "abort", "message": "..."}}
    got["meta_info"] = meta | {name: meta[name][:1] for name in ("output_token_logprobs", "output_top_logprobs")}
    assert compare(0, ASK, [answer()], [got]) == (0, None)
    got["meta_info"]["output_token_logprobs"] = [[flipped(-0.25, 3), 8, None]]
    bits, first = compare(0, ASK, [answer()], [got])
    assert bits == 1 and first is not None and first.step == 0
    nothing = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert compare(0, ASK, [answer()], [nothing]) == (0, None)
    nothing["meta_info"]["input_token_logprobs"] = [[None, 6, None]]  # in the middle of its prompt
    assert compare(0, ASK, [answer()], [nothing]) == (0, None)


def test_alternatives_that_are_equally_likely_have_an_order() -> None:
    from exact import compare

    got = answer()
    got["meta_info"]["output_top_logprobs"][1] = [[-0.75, 4, None], [-0.75, 9, None]]
    first = compare(0, ASK, [answer()], [got])[1]
    assert first is not None and (first.step, first.what) == (1, "output_top_logprobs")


def test_the_pool_is_the_same_each_time_and_has_every_kind() -> None:
    from exact import make_pool

    def ids(rng: random.Random, num: int) -> list[int]:
        return rng.choices(range(1000), k=num)

    pool = make_pool(504, 8000, ids, 1024)
    assert pool == make_pool(504, 8000, ids, 1024)
    lengths = [len(ask["input_ids"]) for ask in pool]
    assert min(lengths) < 4 and 4000 < max(lengths) <= 8000
    params = [ask["sampling_params"] for ask in pool]
    kinds = {name for each in params for name in each} | {name for ask in pool for name in ask}
    wanted = "n stop regex ebnf json_schema logit_bias repetition_penalty frequency_penalty min_p logprob_start_len"
    assert kinds >= set(wanted.split())
    assert sum(each["temperature"] == 0 for each in params) > 100
    assert len({tuple(ask["input_ids"][:16]) for ask in pool if len(ask["input_ids"]) > 15}) < 300, "shared prefixes"


def test_every_configuration_is_one_that_the_server_takes(tmp_path: Path) -> None:
    from exact import configurations

    for name, flags in configurations(1000, 2048, True, str(tmp_path)).items():
        config = resolve(parse_args(["--model-path", "demo", "--device", "cpu", *flags]))
        storage = config.hicache and config.hicache.storage
        assert bool(storage) == (name in ("kernel_files", "direct_files", "mixed", "everything")), name
        assert storage is None or storage.prefetch_threshold < 1000, "longer prefixes are looked for in files"
        speculates = name in ("eagle3_chain", "eagle3_tree", "nextn", "ngram", "everything")
        assert bool(config.speculative) == speculates, name
        assert config.mixes_steps == (name == "mixed"), name


def line(**fields: object) -> dict[str, Any]:
    kept = {"minutes": 10.0, "answers": 1000, "different": 0, "bits": 0, "errors": [], "first": None, "flight": ""}
    counts = {"fallbacks": 0, "repairs": 0, "used_tokens": 0, "memory_mb": [900, 910], "events": {"retractions": 3}}
    return {"config": "plain", "seed": 1} | kept | counts | fields


def test_pieces_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from exact import main

    pieces = [line(), line(config="tree", memory_mb=[800, 1000]), line(memory_mb=[905, 950])]
    file = tmp_path / "pieces.jsonl"
    file.write_text("".join(json.dumps(piece) + "\n" for piece in pieces))
    assert main(["sum", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| plain | 20.0 | 2,000 | 0 | 0 | 0 | 0 | 0 | 900 → 950 |" in shown
    assert "| together | 30.0 | 3,000 |" in shown and "| retractions | 9 |" in shown
    first = {"request": 17, "sample": 1, "position": 4, "step": 1, "what": "output_ids", "expected": "3", "got": "4"}
    pieces.append(line(config="tree", different=2, bits=40, first=first, flight="/tmp/f.json", errors=["HTTP 500"]))
    file.write_text("".join(json.dumps(piece) + "\n" for piece in pieces))
    assert main(["sum", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "request 17 sample 1 position 4 step 1: output_ids 4 instead of 3; flight record /tmp/f.json" in shown
    assert "FAILED tree, seed 1: error: HTTP 500" in shown
    for wrong in ({"fallbacks": 1}, {"repairs": 2}, {"used_tokens": 16}, {"answers": 0}):
        file.write_text(json.dumps(line(**wrong)))
        assert main(["sum", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "wrong", [("run", "--configs", "plain", "graph"), ("run", "--sever", "no_such_edge"), ("severed", "no_such_edge")]
)
def test_a_wrong_name_costs_no_reference(
    wrong: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from exact import main

    with pytest.raises(SystemExit):
        main([wrong[0], "--out", str(tmp_path / "out"), *wrong[1:]])
    assert wrong[-1] in capsys.readouterr().err and not (tmp_path / "out").exists()
