"""/generate over a live server whose scheduler echoes the prompt: what goes in must come out, in SGLang's shape."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import orjson
import pytest
from fake_scheduler import Seed
from live_server import tokens_of

TEXT = "The quick brown fox: 12 + 30 = 42."


def ask(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/generate", json=body)


def events(client: httpx.Client, **body: object) -> list[dict]:
    return list(iter_events(client, **body))


def iter_events(client: httpx.Client, **body: object) -> Iterator[dict]:
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        yield orjson.loads(line[6:])


def test_answer_has_text_ids_and_meta_info(client: httpx.Client) -> None:
    ids = tokens_of(client, TEXT)
    answer = ask(client, text=TEXT, rid="answer-1", sampling_params={"max_new_tokens": len(ids)}).json()
    assert answer["text"] == TEXT
    assert answer["output_ids"] == ids
    meta = answer["meta_info"]
    assert meta["id"] == "answer-1"
    assert meta["finish_reason"] == {"type": "length", "length": len(ids)}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids), len(ids))
    assert meta["weight_version"] == "default"
    assert 0 < meta["e2e_latency"] < 60
    assert "input_token_logprobs" not in meta


def test_input_ids_and_cached_tokens(client: httpx.Client) -> None:
    prompt = [301, 302, 303, 304, 305]
    cached = []
    for _ in range(2):
        answer = ask(client, input_ids=prompt, sampling_params={"max_new_tokens": 7}).json()
        assert answer["output_ids"] == [301, 302, 303, 304, 305, 301, 302]
        cached.append(answer["meta_info"]["cached_tokens"])
    assert cached == [0, 4]


def test_stream_is_cumulative_and_ends_with_done(client: httpx.Client) -> None:
    ids = tokens_of(client, TEXT)
    got = events(client, text=TEXT, sampling_params={"max_new_tokens": len(ids), "seed": Seed.SLOW})
    assert len(got) > 1
    for before, after in zip(got, got[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert got[-1]["text"] == TEXT
    assert got[-1]["output_ids"] == ids
    assert got[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert "index" not in got[-1]


def test_batch_keeps_order_and_takes_params_per_prompt(client: httpx.Client) -> None:
    answers = ask(
        client,
        text=["one two three four", "five six seven"],
        sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        rid=["first", "second"],
    ).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["first", "second"]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 3]
    assert [answer["index"] for answer in answers] == [0, 1]


def test_n_samples_of_each_prompt_side_by_side(client: httpx.Client) -> None:
    answers = ask(client, input_ids=[[5, 6], [7, 8]], sampling_params={"max_new_tokens": 1, "n": 3}).json()
    assert [answer["output_ids"] for answer in answers] == [[5]] * 3 + [[7]] * 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6
    assert len(ask(client, input_ids=[5, 6], sampling_params={"max_new_tokens": 1, "n": 2}).json()) == 2


def test_batch_stream_tells_requests_apart(client: httpx.Client) -> None:
    got = events(client, input_ids=[[5, 6], [7, 8, 9]], sampling_params={"max_new_tokens": 3})
    last = {event["index"]: event for event in got}
    assert last[0]["output_ids"] == [5, 6, 5]
    assert last[1]["output_ids"] == [7, 8, 9]
    assert all(event["meta_info"]["finish_reason"] for event in last.values())


def test_logprobs_of_prompt_and_output(client: httpx.Client) -> None:
    meta = ask(
        client, input_ids=[301, 302, 303], sampling_params={"max_new_tokens": 2},
        return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True,
    ).json()["meta_info"]  # fmt: skip
    texts = [client.post("/detokenize", json={"tokens": [index]}).json()["text"] for index in (301, 302, 303)]
    assert meta["input_token_logprobs"] == [
        [None, 301, texts[0]], [-(302 % 8) / 8, 302, texts[1]], [-(303 % 8) / 8, 303, texts[2]],
    ]  # fmt: skip
    assert [entry[1] for entry in meta["output_token_logprobs"]] == [301, 302]
    assert meta["input_top_logprobs"][0] is None
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [2, 2]
    assert meta["output_top_logprobs"][0][0] == [-0.125, 45, client.post(
        "/detokenize", json={"tokens": [45]}).json()["text"]]  # fmt: skip


def test_logprobs_of_a_stream_grow(client: httpx.Client) -> None:
    got = events(
        client, input_ids=[301, 302, 303], return_logprob=True, logprob_start_len=1,
        sampling_params={"max_new_tokens": 5, "seed": Seed.SLOW},
    )  # fmt: skip
    for event in got:
        assert [entry[1] for entry in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]
        assert [entry[1] for entry in event["meta_info"]["input_token_logprobs"]] == [302, 303]


@pytest.mark.parametrize("seed", [None, Seed.SLOW, Seed.BURST])
def test_stop_string_ends_and_is_trimmed(client: httpx.Client, seed: int | None) -> None:
    ids = tokens_of(client, TEXT)
    params = {"max_new_tokens": len(ids), "stop": ["nothing", "fox: 1"], "seed": seed}
    got = events(client, text=TEXT, sampling_params=params)
    assert got[-1]["text"] == "The quick brown "
    assert got[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fox: 1"}
    assert all("fox" not in event["text"] for event in got)
    assert got[-1]["output_ids"] == ids[: len(got[-1]["output_ids"])]
    assert got[-1]["meta_info"]["completion_tokens"] == len(got[-1]["output_ids"])
    kept = ask(client, text=TEXT, sampling_params={**params, "no_stop_trim": True}).json()
    assert kept["text"] == "The quick brown fox: 1"


def test_rid_may_be_used_again_after_a_stop_string(client: httpx.Client) -> None:
    for _ in range(10):
        answer = ask(client, text=TEXT, rid="again", sampling_params={"max_new_tokens": 50, "stop": "quick"}).json()
        assert answer["text"] == "The "
        assert answer["meta_info"]["id"] == "again"


def test_stop_token_is_not_shown_but_counted(client: httpx.Client) -> None:
    eos = client.get("/server_info").json()["model"]["eos_token_ids"][-1]
    answer = ask(client, input_ids=[301, 302, eos, 303], sampling_params={"max_new_tokens": 10}).json()
    assert answer["output_ids"] == [301, 302, eos]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    expected = client.post("/detokenize", json={"tokens": [301, 302]}).json()["text"]
    shown = ask(client, input_ids=[301, 302, eos, 303],
                sampling_params={"max_new_tokens": 10, "skip_special_tokens": False}).json()  # fmt: skip
    assert answer["text"] == shown["text"] == expected


def test_utf8_characters_stream_whole(client: httpx.Client) -> None:
    text = "naïve 漢字 🙂🙃 Ωμέγα " * 3
    ids = tokens_of(client, text)
    got = events(client, text=text, sampling_params={"max_new_tokens": len(ids), "ignore_eos": True})
    assert got[-1]["text"] == text
    assert all("\ufffd" not in event["text"] for event in got)


def test_max_new_tokens_is_clipped_to_the_context(client: httpx.Client) -> None:
    answer = ask(client, input_ids=[301] * 1000, sampling_params={"max_new_tokens": 10**6}).json()
    assert answer["meta_info"]["completion_tokens"] == 24


def test_error_of_the_scheduler_keeps_its_status(client: httpx.Client) -> None:
    response = ask(client, input_ids=[1], sampling_params={"seed": Seed.REFUSE})
    assert response.status_code == 507
    assert response.json()["error"]["message"] == "no room for this one"
    got = events(client, input_ids=[1], sampling_params={"seed": Seed.REFUSE})
    assert got[-1]["error"]["code"] == 507
