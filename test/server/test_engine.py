"""The offline Engine over the fake scheduler: the same answers as over HTTP, from any thread."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from fake_scheduler import Seed, run_fake_scheduler, run_stillborn_scheduler
from live_server import WAIT_S, wait_for

import fenceline
from fenceline.config import ConfigError
from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.launch import EngineProcesses, launch_processes

FAKE = partial(launch_processes, scheduler_entry=run_fake_scheduler)


def start(**flags: object) -> fenceline.Engine:
    return fenceline.Engine(launch=FAKE, model_path="demo", device="cpu", **flags)


@pytest.fixture(scope="module")
def engine() -> Iterator[fenceline.Engine]:
    with start() as engine:
        yield engine


def test_single_batch_and_samples(engine: fenceline.Engine) -> None:
    answer = engine.generate("The fox", {"max_new_tokens": 64, "stop": "fox"})
    assert answer["text"] == "The "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fox"}
    answers = engine.generate(
        input_ids=[[5, 6], [7, 8]], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 3}]
    )
    assert [answer["output_ids"] for answer in answers] == [[5], [7, 8, 7]]
    assert len(engine.generate(["a", "b"], {"max_new_tokens": 1, "n": 2})) == 4


def test_parameters_may_be_objects(engine: fenceline.Engine) -> None:
    params = fenceline.SamplingParams(temperature=0, max_new_tokens=64, stop="fox")
    assert engine.generate("The fox", params)["text"] == "The "
    few = fenceline.SamplingParams(max_tokens=1, n=2)  # vLLM's name
    assert [len(answer["output_ids"]) for answer in engine.generate(["a", "b"], [few, few])] == [1] * 4
    whole = engine.generate("a", fenceline.SamplingParams(max_new_tokens=None, seed=Seed.BURST))
    assert whole["meta_info"]["completion_tokens"] > 128
    with pytest.raises(TypeError, match="'max_new_token'"):
        fenceline.SamplingParams(max_new_token=1)  # type: ignore[call-arg]


def test_chat(engine: fenceline.Engine) -> None:
    messages = [{"role": "user", "content": "The fox"}]
    answer = engine.chat(messages, fenceline.SamplingParams(max_new_tokens=3, sampling_seed=5), n=2)
    assert answer["object"] == "chat.completion"
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 6
    text = answer["choices"][0]["message"]["content"]
    chunks = list(engine.chat(messages, {"max_new_tokens": 3}, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    several = engine.chat([messages, messages], [{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [answer["usage"]["completion_tokens"] for answer in several] == [1, 2]


def test_leaving_a_chat_aborts(engine: fenceline.Engine) -> None:
    held = {"max_new_tokens": 900, "seed": Seed.HELD}
    chunks = engine.chat([{"role": "user", "content": "The fox"}], held, stream=True)
    next(chunks)
    before = engine.get_server_info()["internal_states"][0]["num_aborts"]
    chunks.close()
    wait_for(lambda: engine.get_server_info()["internal_states"][0]["num_aborts"] == before + 1)


def test_leaving_a_chat_that_is_ahead_of_its_reader(engine: fenceline.Engine) -> None:
    chunks = engine.chat([{"role": "user", "content": "The fox"}], {"max_new_tokens": 99}, stream=True)
    next(chunks)
    wait_for(lambda: engine._manager.num_active == 0)  # all of it has come, and waits for the reader
    leaving = threading.Thread(target=chunks.close, daemon=True)
    leaving.start()
    leaving.join(WAIT_S)
    assert not leaving.is_alive()
    wait_for(lambda: not any("_chat_bytes" in repr(task) for task in asyncio.all_tasks(engine._loop)))


def test_tokenizer(engine: fenceline.Engine) -> None:
    tokenizer = engine.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "The fox"}], tokenize=False)
    assert "The fox" in prompt
    assert engine.tokenizer is tokenizer


def test_llm_answers_as_programs_for_vllm_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenceline.entrypoints.llm.Engine", partial(fenceline.Engine, launch=FAKE))
    llm = fenceline.LLM(model="demo", device="cpu", seed=1)
    try:
        params = fenceline.SamplingParams(max_tokens=2, n=2)
        outputs = llm.generate(["The fox", {"prompt": "A dog"}], params)
        assert [output.prompt for output in outputs] == ["The fox", "A dog"]
        assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [[2, 2], [2, 2]]
        assert [one.index for one in outputs[1].outputs] == [0, 1]
        assert outputs[0].outputs[0].finish_reason == "length"
        by_ids = llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, params)
        assert by_ids[0].outputs[0].text == outputs[0].outputs[0].text
        assert len(llm.generate("The quick brown fox jumps")[0].outputs[0].token_ids) == 16
        messages = [{"role": "user", "content": "The fox"}]
        chats = llm.chat([messages, messages], fenceline.SamplingParams(max_tokens=2))
        assert [len(chat.outputs[0].token_ids) for chat in chats] == [2, 2]
        [chat] = llm.chat(messages, [params])
        assert chat.outputs[0].text == chats[0].outputs[0].text
        assert (
            chat.prompt_token_ids
            == llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )
        for wrong in (5, {}, [5], ["a", {"prompt_token_ids": [5]}], []):
            with pytest.raises(ValueError, match="prompt|text"):
                llm.generate(wrong)  # type: ignore[arg-type]
    finally:
        llm.llm_engine.shutdown()


def test_options_of_generate(engine: fenceline.Engine) -> None:
    meta = engine.generate(
        input_ids=[5, 6], sampling_params={"max_new_tokens": 2}, return_logprob=True, logprob_start_len=0, rid="mine"
    )["meta_info"]
    assert meta["id"] == "mine"
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6]


def test_stream_grows(engine: fenceline.Engine) -> None:
    texts = [event["text"] for event in engine.generate("The quick fox", {"max_new_tokens": 5}, stream=True)]
    assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))
    whole = engine.generate("The quick fox", {"max_new_tokens": 5})["text"]
    assert texts[-1] == whole


def test_leaving_a_stream_aborts(engine: fenceline.Engine) -> None:
    def num_aborts() -> int:
        """Not of those that a stop string ends: the scheduler may still be at one of an earlier test."""
        return engine.get_server_info()["internal_states"][0]["num_aborts"]

    events = engine.generate("The fox", {"max_new_tokens": 900, "seed": Seed.HELD}, stream=True)
    next(events)
    before = num_aborts()
    events.close()
    assert num_aborts() == before + 1


async def test_async_generate_from_another_loop(engine: fenceline.Engine) -> None:
    both = await asyncio.gather(
        *(engine.async_generate(input_ids=[i], sampling_params={"max_new_tokens": 2}) for i in (5, 6))
    )
    assert [answer["output_ids"] for answer in both] == [[5, 5], [6, 6]]
    stream = await engine.async_generate(input_ids=[5], sampling_params={"max_new_tokens": 3}, stream=True)
    assert isinstance(stream, AsyncIterator)
    assert [event async for event in stream][-1]["output_ids"] == [5, 5, 5]


def test_abort_from_another_thread(engine: fenceline.Engine) -> None:
    def num_running() -> int:
        return engine.get_server_info()["internal_states"][0]["num_running_reqs"]

    wait_for(lambda: num_running() == 0)  # the scheduler may still be at a request of an earlier test

    def hang(rid: str) -> str:
        answer = engine.generate(input_ids=[5], sampling_params={"seed": Seed.HANG}, rid=rid)
        reason: str = answer["meta_info"]["finish_reason"]["type"]
        return reason

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(hang, "hang"), pool.submit(hang, "hang-2")
        wait_for(lambda: num_running() == 2)
        assert engine.flush_cache() is False
        engine.abort("hang")
        assert one.result(WAIT_S) == "abort"
        assert num_running() == 1, "hang-2 is another request"
        engine.abort("hang-2")
        assert other.result(WAIT_S) == "abort"
    assert engine.flush_cache() is True


@pytest.mark.parametrize(("options", "words"), [
    ({"prompt": ""}, "empty"), ({}, "text or input_ids"), ({"input_ids": [5000]}, "vocabulary"),
    ({"prompt": "a", "sampling_params": {"top_p": 2}}, "top_p"), ({"prompt": "a", "temperature": 1}, "temperature"),
    ({"prompt": 5}, "text"), ({"prompt": "a", "sampling_params": "b"}, "give a dict or a fenceline.*, not str"),
    ({"prompt": "a", "sampling_params": [object()]}, "give a dict or a fenceline.*, not object"),
    ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, "Out of range float"),
])  # fmt: skip
def test_wrong_requests_raise_value_error(engine: fenceline.Engine, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate(**options)


@pytest.mark.parametrize(("options", "words"), [
    ({"messages": []}, "messages"), ({"messages": {"role": "user", "content": "a"}}, "messages: .* list"),
    ({"messages": [{"role": "x", "content": "a"}]}, "role"),
    ({"messages": [{"role": "user", "content": "a"}], "top_p": 7}, "top_p"),
    ({"messages": [{"role": "user", "content": "a"}], "tool": []}, "'tool' is not known"),
    ({"messages": [{"role": "user", "content": "a"}], "sampling_params": 5}, "give a dict"),
    ({"messages": [[{"role": "user", "content": "a"}]], "sampling_params": [{}, {}]}, "for each conversation"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_chats_raise_value_error(engine: fenceline.Engine, options: dict, words: str, stream: bool) -> None:
    with pytest.raises(ValueError, match=words):
        list(engine.chat(**options, stream=stream))


def test_shutdown_ends_processes_and_further_calls() -> None:
    started: list[EngineProcesses] = []

    def launch(config: EngineConfig) -> EngineProcesses:
        started.append(FAKE(config))
        return started[0]

    engine = fenceline.Engine(launch=launch, model_path="demo", device="cpu")
    engine.shutdown()
    engine.shutdown()
    assert [process.is_alive() for process in started[0].processes] == [False, False]
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_program_that_forgets_main_guard_ends_cleanly(tmp_path: Path, source: str) -> None:
    """The engine's processes import nothing of the program, which may be no file."""
    program = tmp_path / "forgetful.py"
    program.write_text(
        "from functools import partial\n"
        "import fenceline, fake_scheduler\n"
        "from fenceline.entrypoints.launch import launch_processes\n"
        "launch = partial(launch_processes, scheduler_entry=fake_scheduler.run_fake_scheduler)\n"
        "engine = fenceline.Engine('demo', launch=launch, device='cpu')\n"
        "print(engine.generate(input_ids=[5], sampling_params={'max_new_tokens': 2})['output_ids'])\n"
    )
    words = [sys.executable, str(program)] if source == "file" else [sys.executable, "-"]
    done = subprocess.run(words, input=program.read_text(), capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[5, 5]\n", "")


def test_death_of_the_scheduler_reaches_the_caller() -> None:
    with start() as engine:
        with pytest.raises(RuntimeError, match="exit status 77"):
            engine.generate(input_ids=[5], sampling_params={"seed": Seed.DIE})
        with pytest.raises(RuntimeError, match="has stopped"):
            engine.generate(input_ids=[5])


def test_failure_to_start_raises() -> None:
    with pytest.raises(RuntimeError, match="exit status 3"):
        fenceline.Engine(
            launch=partial(launch_processes, scheduler_entry=run_stillborn_scheduler), model_path="demo", device="cpu"
        )
    gc.collect()  # sockets left open would block here, where their context is collected
    with pytest.raises(ConfigError):
        fenceline.Engine(model_path="demo", no_such_flag=1)
