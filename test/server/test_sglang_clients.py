"""What SGLang's clients send and look for, over a live server whose scheduler echoes the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import orjson
import pytest
from fake_scheduler import CONTEXT_LENGTH, Seed
from live_server import LiveServer

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.generate_api import AnswerWriter
from fenceline.frontend.metrics import Metrics
from fenceline.frontend.request_types import GenerateChunk, GenerateInput, ServedWeights

ONE = {"max_new_tokens": 1}
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]


def generate(client: httpx.Client, **body: object) -> dict:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture(scope="module")
def strict_server() -> Iterator[LiveServer]:
    flags = (
        "--reasoning-parser qwen3 --strict-fields --strict-model-name --trust-remote-code"
        " --enable-deterministic-inference --chat-template chatml"
    )
    with LiveServer.fake(*flags.split()) as live:
        yield live.wait_ready()


@pytest.fixture
def thinker(strict_server: LiveServer) -> Iterator[httpx.Client]:
    with strict_server.client() as client:
        yield client


# --- namespaces of the cache


def test_a_prefix_is_shared_within_its_namespace_alone(client: httpx.Client) -> None:
    prompt = [411, 412, 413, 414]

    def cached(**keys: object) -> int:
        return generate(client, input_ids=prompt, sampling_params=ONE, **keys)["meta_info"]["cached_tokens"]

    assert [cached(), cached()] == [0, 3]
    for keys in (
        {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "aa"}, {"cache_salt": "a", "extra_key": "a"},
        {"cache_salt": "1:a"}, {"cache_salt": "b", "extra_key": ""}, {"cache_salt": ["c"]},
    ):  # fmt: skip
        assert [cached(**keys), cached(**keys)] == [0, 3], keys
    assert cached(cache_salt="", extra_key=None) == 3
    assert cached(cache_salt=["b"]) == 3


def test_every_prompt_may_have_its_own_namespace(client: httpx.Client) -> None:
    body = {"input_ids": [[421, 422, 423]] * 3, "cache_salt": ["x", "y", None], "sampling_params": ONE}
    for expected in (0, 2):
        found = [answer["meta_info"]["cached_tokens"] for answer in generate(client, **body)]
        assert found == [expected] * 3
    answer = client.post("/generate", json={**body, "cache_salt": ["x", "y"]})
    assert answer.status_code == 400
    assert "cache_salt has 2 entries for 3 prompts" in answer.json()["error"]["message"]
    answer = client.post("/generate", json={**body, "extra_key": "k" * 1025})
    assert "extra_key may have at most 1024 characters" in answer.json()["error"]["message"]


def test_namespaces_on_openai_routes(client: httpx.Client) -> None:
    def completion(**keys: object) -> int:
        body = {"prompt": [431, 432, 433], "max_tokens": 1, **keys}
        return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def chat(**keys: object) -> int:
        body = {"messages": [{"role": "user", "content": "salt and pepper"}], "max_tokens": 1, **keys}
        answer = client.post("/v1/chat/completions", json=body).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for ask in (completion, chat):
        assert ask() == 0
        again = ask()
        assert again > 0
        assert [ask(cache_salt="s"), ask(cache_salt="s"), ask(extra_key="s")] == [0, again, 0]
    # One key means the same on every route.
    assert generate(client, input_ids=[431, 432, 433], cache_salt="s", sampling_params=ONE)["meta_info"][
        "cached_tokens"
    ] == 2  # fmt: skip


# --- values as SGLang's clients write them


def test_max_new_tokens_null_means_up_to_the_context(client: httpx.Client) -> None:
    asked = {"max_new_tokens": None, "ignore_eos": True, "seed": Seed.BURST}
    answer = generate(client, input_ids=[441, 442], sampling_params=asked)
    assert answer["meta_info"]["completion_tokens"] == CONTEXT_LENGTH - 2
    answer = generate(client, input_ids=[441, 442], sampling_params={"ignore_eos": True, "seed": Seed.BURST})
    assert answer["meta_info"]["completion_tokens"] == 128


def test_nulls_among_stop_token_ids_are_skipped(client: httpx.Client) -> None:
    params = {"stop_token_ids": [None, 453, None], "max_new_tokens": 9}
    answer = generate(client, input_ids=[451, 452, 453], sampling_params=params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 453}
    body = {"prompt": [451, 452, 453], "stop_token_ids": [None, 453], "max_tokens": 9}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["matched_stop"] == 453


def test_empty_texts_are_unset(client: httpx.Client) -> None:
    names = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
    empty = {"lora_path": "", "custom_logit_processor": "", "bootstrap_host": "", "image_data": [None]}
    generate(client, input_ids=[1], sampling_params={**ONE, **dict.fromkeys(names, "")}, **empty)
    for path, prompt in (("completions", {"prompt": [1]}), ("chat/completions", {"messages": MESSAGES})):
        body = {**prompt, **empty, **dict.fromkeys(names, ""), "max_tokens": 1}
        assert client.post(f"/v1/{path}", json=body).status_code == 200


def test_num_steps_of_a_profile_may_be_text(client: httpx.Client) -> None:
    for num_steps in ("5", 5, None, ""):
        body = {"num_steps": num_steps, "activities": ["CPU", "GPU"], "with_stack": False}
        assert client.post("/start_profile", json=body).status_code == 200, num_steps
    for num_steps in ("0", "-1", "five", "1e3", "9" * 400, "٣"):
        answer = client.post("/start_profile", json={"num_steps": num_steps})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "num_steps"
    answer = client.post("/start_profile", json={"start_step": 3})
    assert "start_step is not available" in answer.json()["error"]["message"]


# --- errors


def test_an_error_is_there_in_both_shapes(client: httpx.Client) -> None:
    wrong = [
        client.post("/generate", json={"text": "a", "sampling_params": {"top_p": 2}}),
        client.post("/v1/completions", json={"prompt": "a", "top_p": 2}),
        client.post("/v1/chat/completions", json={"messages": []}),
        client.get("/nothing"),
        client.post("/tokenize", json={"prompt": 5}),
    ]
    for answer in wrong:
        body = answer.json()
        nested = body["error"]
        assert body["object"] == "error"
        assert body["code"] == answer.status_code
        assert (body["message"], body["type"], body["param"]) == (
            nested["message"], nested["type"], nested["param"],
        )  # fmt: skip


def test_a_wrong_request_for_a_stream_is_answered_by_a_stream(client: httpx.Client) -> None:
    for wrong, words in (
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1]}, "text or input_ids"),
        ({"require_reasoning": True}, "--reasoning-parser"),
    ):
        answer = client.post("/generate", json={"text": "a", "stream": True, **wrong})
        assert answer.status_code == 200
        (event,) = events_of(answer)
        assert words in event["error"]["message"]
    # What is no request at all is refused as such.
    assert client.post("/generate", json={"text": 5, "stream": True}).status_code == 400


# --- answers


def test_meta_info_says_how_long_it_took(client: httpx.Client) -> None:
    meta = generate(client, input_ids=[461, 462], sampling_params={"max_new_tokens": 8})["meta_info"]
    assert meta["queue_time"] == 0.25
    assert 0 < meta["first_token_latency"] <= meta["e2e_latency"] + 1e-6
    assert meta["decode_throughput"] > 0
    assert meta["reasoning_tokens"] == 0
    *before, last = events_of(
        client.post("/generate", json={"input_ids": [461], "sampling_params": {"max_new_tokens": 4}, "stream": True})
    )
    assert "queue_time" in last["meta_info"]
    assert not any("queue_time" in event["meta_info"] for event in before)


def test_times_are_there_with_metrics_alone(thinker: httpx.Client) -> None:
    assert "queue_time" not in generate(thinker, input_ids=[1], sampling_params=ONE)["meta_info"]


def test_logprobs_of_named_tokens(client: httpx.Client) -> None:
    body = {
        "input_ids": [[471, 472], [473, 474]], "return_logprob": True, "logprob_start_len": 0,
        "token_ids_logprob": [[5, 3], None], "sampling_params": {"max_new_tokens": 2},
    }  # fmt: skip
    first, second = generate(client, **body)
    named = [[-5 / 8, 5, None], [-3 / 8, 3, None]]
    assert first["meta_info"]["output_token_ids_logprobs"] == [named, named]
    assert first["meta_info"]["input_token_ids_logprobs"] == [None, named]
    assert "output_token_ids_logprobs" not in second["meta_info"]
    one = generate(client, **{**body, "input_ids": [1], "token_ids_logprob": [5, 3]})
    assert one["meta_info"]["output_token_ids_logprobs"] == [named, named]
    mixed = client.post("/generate", json={**body, "token_ids_logprob": [5, [3]]})
    assert "mixes" in mixed.json()["error"]["message"]


def test_the_length_of_logprobs_counts_the_whole_answer(client: httpx.Client) -> None:
    body = {"input_ids": [481, 482], "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    meta = generate(client, **body)["meta_info"]
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 4
    for event in events_of(client.post("/generate", json={**body, "stream": True})):
        meta = event["meta_info"]
        assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"])


def test_prompt_token_ids_come_once(client: httpx.Client) -> None:
    params = {"max_new_tokens": 50, "ignore_eos": True}  # so many that they do not all come in one event
    body = {"input_ids": [491, 492], "return_prompt_token_ids": True, "sampling_params": params}
    assert generate(client, **body)["prompt_token_ids"] == [491, 492]
    found = [
        event.get("prompt_token_ids") for event in events_of(client.post("/generate", json={**body, "stream": True}))
    ]
    assert found[0] == [491, 492]
    assert set(found[1:]) == {None}


def test_reasoning_tokens_are_those_up_to_the_thinking_s_end(thinker: httpx.Client) -> None:
    answer = thinker.post("/generate", json={"text": "a", "require_reasoning": True})
    assert answer.status_code == 400  # the demo's tokenizer has no such tag
    assert "has no one token </think>" in answer.json()["error"]["message"]


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_reasoning_tokens_are_counted_however_the_answer_is_cut(cut: int) -> None:
    config = resolve(ServerArgs.from_kwargs({"model_path": "demo", "device": "cpu"}))
    ids = [7, 8, 99, 10, 99]  # 99 ends the thinking, the first time
    writer = AnswerWriter(
        GenerateInput(input_ids=[1]), config, ServedWeights("demo", "default"), None, None, None, thinking_end=99
    )
    counts = []
    for start in range(0, len(ids), cut):
        chunk = GenerateChunk(
            rid="r", text="", output_ids=ids[start : start + cut], prompt_tokens=1, completion_tokens=start + cut,
            cached_tokens=0, e2e_latency=0.0,
        )  # fmt: skip
        counts.append(orjson.loads(b"".join(writer.so_far(chunk)))["meta_info"]["reasoning_tokens"])
    assert counts[0] == min(cut, 3)
    assert counts[-1] == 3


def test_model_info(client: httpx.Client) -> None:
    info = client.get("/model_info").json()
    assert info["architectures"] == [info["architecture"]] == ["Qwen3ForCausalLM"]
    assert (info["model_type"], info["load_format"]) == ("qwen3", "auto")


def test_server_info_has_what_sglangs_tools_read(client: httpx.Client) -> None:
    (state,) = client.get("/get_server_info").json()["internal_states"]
    assert state["last_gen_throughput"] == 123.0
    assert state["effective_max_running_requests_per_dp"] == 64
    assert state["memory_usage"] == {"weight": 0.0, "kvcache": 0.0, "token_capacity": 4096, "graph": 0.0}


# --- the OpenAI routes


def test_any_model_name_is_served_and_repeated(client: httpx.Client) -> None:
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
        for name, shown in (("gpt-9", "gpt-9"), ("llama3:8b", "llama3:8b"), ("default", "demo"), ("", "demo")):
            answer = client.post(f"/v1/{path}", json={**body, "model": name, "max_tokens": 1})
            assert answer.json()["model"] == shown
        answer = client.post(f"/v1/{path}", json={**body, "model": "demo:my-lora"})
        assert answer.status_code == 404
        assert "names an adapter" in answer.json()["error"]["message"]
        assert client.post(f"/v1/{path}", json={**body, "model": "m" * 257}).status_code == 400


def test_strict_model_name(thinker: httpx.Client) -> None:
    answer = thinker.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert thinker.post("/v1/completions", json={"prompt": "a", "model": "demo"}).status_code == 200


def test_tokenize_takes_a_conversation(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"model": "demo", "messages": MESSAGES}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == client.get("/model_info").json()["context_length"]
    chat = client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "return_token_ids": True, "max_tokens": 1}
    ).json()
    assert chat["choices"][0]["prompt_token_ids"] == answer["tokens"]
    bare = client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bare["tokens"] == answer["tokens"][: bare["count"]]
    assert bare["count"] < answer["count"]
    assert client.post("/tokenize", json={"messages": []}).status_code == 400


def test_unknown_fields_of_control_requests(client: httpx.Client, thinker: httpx.Client) -> None:
    for path, body in (("/abort_request", {"rid": "x"}), ("/detokenize", {"tokens": [5]})):
        assert client.post(path, json={**body, "what": 1}).status_code == 200
        answer = thinker.post(path, json={**body, "what": 1})
        assert answer.status_code == 400
        assert "'what' is not known" in answer.json()["error"]["message"]


# --- the server's flags and metrics


def test_flags_that_mean_something_else_elsewhere_are_explained(strict_server: LiveServer) -> None:
    output = strict_server.output
    assert "--trust-remote-code has no effect: Qwen3ForCausalLM is built in" in output


def test_chat_template_by_name(thinker: httpx.Client) -> None:
    tokens = thinker.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    text = thinker.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False}).json()["text"]
    assert text == "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"


def values_of(text: str) -> dict[str, float]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics_are_there_under_sglangs_names_too(client: httpx.Client) -> None:
    generate(client, input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 5})
    values = values_of(client.get("/metrics").text)
    label = '{model_name="demo"}'
    for name in (
        "num_running_reqs", "num_queue_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage",
        "cache_hit_rate", "gen_throughput", "prompt_tokens_total", "generation_tokens_total",
        "cached_tokens_total", "num_requests_total", "num_aborted_requests_total",
        "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_sum", "queue_time_seconds_count",
        "prompt_tokens_histogram_sum", "generation_tokens_histogram_count",
    ):  # fmt: skip
        assert values[f"sglang:{name}{label}"] == values[f"fenceline:{name}{label}"], name
    assert values["sglang:gen_throughput" + label] == 123.0
    assert values["sglang:num_retracted_requests_total" + label] == 3
    assert values["sglang:queue_time_seconds_sum" + label] > 0
    bucket = 'time_to_first_token_seconds_bucket{le="+Inf",model_name="demo"}'
    assert values["sglang:" + bucket] == values["fenceline:" + bucket] > 0
    assert not any(name.startswith("sglang:cuda_graph") for name in values)


def test_metrics_prefix() -> None:
    def prefixes(prefix: str) -> set[str]:
        names = values_of(Metrics("m", prefix=prefix).exposition().decode())
        return {name.split(":")[0] for name in names if not name.startswith("process_")}

    assert prefixes("both") == {"fenceline", "sglang"}
    assert prefixes("fenceline") == {"fenceline"}
    assert prefixes("sglang") == {"sglang"}
