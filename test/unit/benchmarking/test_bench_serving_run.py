"""Whole bench_serving runs against a small in-process server that speaks every backend's wire format."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from aiohttp import web

from fenceline.bench_serving import main, run_benchmark
from fenceline.benchmarking.args import BenchArgs, check

Body = dict[str, Any]


@dataclass
class FakeServer:
    """Tokens are a function of the prompt alone; knobs make it misbehave. One thread, one event loop."""

    tokenizer_path: str
    tokens_per_event: int = 1
    status_of: Callable[[int], int] = lambda number: 200  # by the request's number, from 0
    forget: set[str] = field(default_factory=set)  # prompts answered differently from the second time on
    cut_stream: bool = False
    hold: int = 0  # requests wait until so many are in flight
    has_model_info: bool = True
    api_key: str | None = None
    bodies: list[Body] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    peak: int = 0
    port: int = 0
    _in_flight: int = 0
    _seen: dict[str, int] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        self._held = asyncio.Event()
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            app.router.add_post(path, self.answer)
        for path in ("/flush_cache", "/start_profile", "/stop_profile"):
            app.router.add_post(path, self.control)
        for path in ("/get_model_info", "/v1/models", "/get_server_info"):
            app.router.add_get(path, self.info)
        return app

    async def control(self, request: web.Request) -> web.Response:
        self.controls.append(request.path)
        return web.Response()

    async def info(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.Response(status=401)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "served-name", "root": self.tokenizer_path}]})
        if request.path == "/get_model_info":
            if not self.has_model_info:
                return web.Response(status=404)
            return web.json_response({"model_path": "somewhere", "tokenizer_path": self.tokenizer_path})
        return web.json_response({"api_key": "hush", "internal_states": [{"avg_spec_accept_length": 2.5}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number = len(self.bodies)
        self.bodies.append(body)
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        if self._in_flight >= self.hold:
            self._held.set()
        await self._held.wait()
        try:
            if self.status_of(number) != 200:
                return web.json_response({"error": {"message": "no room"}}, status=self.status_of(number))
            return await self.reply(request, body)
        finally:
            self._in_flight -= 1

    async def reply(self, request: web.Request, body: Body) -> web.StreamResponse:
        if request.path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
            usage = {"prompt_tokens": len(body["input"]), "total_tokens": len(body["input"])}
            return web.json_response({"object": "list", "data": data, "usage": usage})
        prompt = body.get("text") or body.get("input_ids") or body.get("prompt") or body.get("messages")
        params = body.get("sampling_params", body)
        num = params.get("max_new_tokens") or params["max_tokens"]
        ids = [zlib.crc32(f"{prompt}{params.get('seed')}{i}".encode()) % 1000 for i in range(num)]
        again = self._seen.get(str(prompt), 0)
        self._seen[str(prompt)] = again + 1
        if again and ("*" in self.forget or str(prompt) in self.forget):
            ids[num // 2] += 1
        ends = [*range(self.tokens_per_event, num, self.tokens_per_event), num]
        if not body["stream"]:
            return web.json_response(self.event(request.path, ids, 0, num, stream=False))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begin = 0
        for end in ends:
            event = self.event(request.path, ids, begin, end, stream=True)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            begin = end
        if request.path != "/generate" and body.get("stream_options", {}).get("include_usage"):
            usage = {"completion_tokens": num, "prompt_tokens": 21}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if not self.cut_stream:
            await response.write(b"data: [DONE]\n\n")
        return response

    def event(self, path: str, ids: list[int], begin: int, end: int, stream: bool) -> Body:
        if path == "/generate":
            meta = {"completion_tokens": end, "prompt_tokens": 21, "cached_tokens": 4, "finish_reason": None}
            return {"text": "".join(f" w{i}" for i in ids[:end]), "output_ids": ids[:end], "meta_info": meta}
        text = "".join(f" w{i}" for i in ids[begin:end])
        choice: Body = {"text": text, "finish_reason": None}
        if path == "/v1/chat/completions":
            choice = {("delta" if stream else "message"): {"role": "assistant", "content": text}}
        return {"choices": [choice]} | ({} if stream else {"usage": {"completion_tokens": len(ids)}})


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level tokenizer with a chat template, saved as transformers would."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {char: i + 1 for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab={"<s>": 0, **alphabet}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def server(tokenizer_path: str) -> Iterator[FakeServer]:
    """A running FakeServer on a free port; its knobs may be turned until the first request."""
    fake = FakeServer(tokenizer_path)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.port = runner.addresses[0][1]
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.call_soon(started.set)  # not before it runs forever: it may be stopped at once
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(30)
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def bench(server: FakeServer, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a small benchmark against ``server``; keyword arguments are BenchArgs'."""

    def run(**kwargs: Any) -> dict[str, Any]:
        small = {"num_prompts": 5, "random_input_len": 20, "random_output_len": 8, "random_range_ratio": 1.0}
        fixed = {"port": server.port, "disable_tqdm": True, "output_file": str(tmp_path / "out.jsonl")}
        return run_benchmark(BenchArgs(**(small | fixed | kwargs)))

    return run


BACKEND_PATHS = ["fenceline", "sglang", "sglang-oai", "vllm", "openai", "sglang-oai-chat", "vllm-chat", "openai-chat"]


@pytest.mark.parametrize("backend", BACKEND_PATHS)
@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_every_backend_counts_every_token(
    bench: Callable[..., dict[str, Any]], server: FakeServer, backend: str, tokens_per_event: int
) -> None:
    server.tokens_per_event = tokens_per_event
    result = bench(backend=backend)
    assert (result["completed"], result["failed"]) == (5, 0)
    assert result["total_output_tokens"] == 5 * 8
    assert result["total_input_tokens"] == 5 * 21
    assert result["output_lens"] == [8] * 5
    # Reads may merge events, so a stream's first arrival may hold more than its first event.
    assert all(len(itl) <= 8 - tokens_per_event for itl in result["itls"])
    assert all(ttft > 0 for ttft in result["ttfts"])
    assert all(len(re.findall(r" w\d+", text)) == 8 for text in result["generated_texts"])
    assert len(server.bodies) == 6  # one warmed up


@pytest.mark.parametrize("backend", ["fenceline", "vllm", "vllm-chat"])
def test_without_streaming_ttft_is_the_latency(bench: Callable[..., dict[str, Any]], backend: str) -> None:
    result = bench(backend=backend, disable_stream=True)
    assert result["total_output_tokens"] == 40
    assert result["mean_ttft_ms"] == pytest.approx(result["mean_e2e_latency_ms"], rel=0.2)
    assert result["max_itl_ms"] == 0


@pytest.mark.parametrize("backend", ["fenceline-embedding", "openai-embeddings"])
def test_embeddings_are_counted_by_their_inputs(
    bench: Callable[..., dict[str, Any]], server: FakeServer, backend: str, tmp_path: Path
) -> None:
    sent = {"dataset_name": "random-ids", "vocab_size": 500, "extra_request_body": '{"dimensions": 2}'}
    result = bench(backend=backend, goodput=("ttft:60000",), plot=str(tmp_path / "run.html"), **sent)
    assert (result["completed"], result["failed"]) == (5, 0), result["errors"]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (5 * 20, 0)
    assert result["request_goodput"] == result["request_throughput"] > 0 < result["mean_e2e_latency_ms"]
    assert re.findall("<figcaption>(.*?)</", (tmp_path / "run.html").read_text())[1] == "Latency by share of requests"
    for body in server.bodies:
        assert body.keys() == {"model", "input", "dimensions"} and len(body["input"]) == 20
    with pytest.raises(ValueError, match="answers with numbers"):
        check(BenchArgs(backend=backend, check_determinism=1))


def test_the_report_and_the_line(
    bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench(tag="first")
    printed = capsys.readouterr().out
    bench(output_details=True)
    assert re.search(r"^=+ Serving Benchmark Result =+$", printed, re.M)
    labels = ["Backend:", "Traffic request rate:", "Max request concurrency:", "Successful requests:"]
    labels += ["Failed requests:", "Benchmark duration (s):", "Total input tokens:", "Total generated tokens:"]
    labels += ["Total generated tokens (retokenized):", "Request throughput (req/s):", "Concurrency:"]
    labels += ["Input token throughput (tok/s):", "Output token throughput (tok/s):", "Accept length:"]
    labels += ["Peak output token throughput (tok/s):", "Peak concurrent requests:", "Total token throughput (tok/s):"]
    names = ("E2E Latency", "TTFT", "TPOT", "ITL", "Longest Gap")
    labels += [f"{s} {n} (ms):" for n in names for s in ("Mean", "Median", "P99")]
    for label in labels:
        assert re.search(rf"^{re.escape(f'{label:<40}')} \S.*$", printed, re.M), label
    for title in ("-End-to-End Latency-", "-Time to First Token-", "-Time per Output Token (excl. 1st token)-"):
        assert title in printed
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    keys = "backend dataset_name request_rate max_concurrency duration completed total_input_tokens concurrency "
    keys += "total_output_tokens request_throughput input_throughput output_throughput total_throughput "
    names = ("e2e_latency", "ttft", "tpot", "itl", "longest_gap")
    keys += " ".join(f"{s}_{n}_ms" for n in names for s in ("mean", "median", "std"))
    assert set(keys.split()) <= set(first)
    assert first["tag"] == "first" and first["accept_length"] == 2.5
    assert "api_key" not in first["server_info"]
    assert "itls" not in first and len(second["itls"]) == len(second["longest_gaps"]) == 5


def test_failures_are_counted_with_their_reasons(
    bench: Callable[..., dict[str, Any]], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status_of = lambda number: 503 if number % 2 else 200
    result = bench()
    printed = capsys.readouterr().out
    assert (result["completed"], result["failed"]) == (2, 3)
    assert result["total_output_tokens"] == 16
    assert re.search(r"^Failed requests: +3 ", printed, re.M)
    assert "3 of 5 requests failed:" in printed and "3 x HTTP 503 Service Unavailable: no room\n" in printed


def test_goodput_is_printed_and_written(
    bench: Callable[..., dict[str, Any]], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status_of = lambda number: 503 if number == 2 else 200
    result = bench(goodput=("ttft:60000", "tpot:60000"))
    assert (result["good_request_count"], result["good_request_fraction"]) == (4, 0.8)
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert result["goodput"] == {"ttft": 60000.0, "tpot": 60000.0}
    assert re.search(r"^Requests within the limits \(%\): +80\.00 ", capsys.readouterr().out, re.M)
    assert bench(goodput=("e2el:0.001",))["request_goodput"] == 0.0
    assert bench()["request_goodput"] is None


WRONG = {
    "--goodput itl:5": "--goodput itl:5: give ttft, tpot, e2el",
    "--goodput ttft:5 tpot": "--goodput tpot: give",
    "--goodput ttft:0": "--goodput ttft:0: give",
    "--goodput ttft:5 ttft:6": "--goodput ttft:5: give",
    "--find-max-goodput": "--find-max-goodput needs the limits",
    "--find-max-goodput 99 --goodput ttft:5": "--find-max-goodput 99.0: a share",
    "--find-max-goodput --goodput ttft:5 --request-rate 2": "--find-max-goodput chooses the rates",
    "--plot run.svg": "--plot run.svg: give a name that ends in .html or .png",
    "--plot /nowhere/run.html": "--plot /nowhere/run.html: cannot be written",
    "--plot ~nobody-here/run.html": "~nobody-here/run.html: there is no such user",
    "--output-file /nowhere/run.jsonl": "--output-file /nowhere/run.jsonl: cannot be written",
    "--compare /nowhere/a /nowhere/b": "--compare /nowhere/a: ",
    "--compare ~nobody-here/a b": "--compare ~nobody-here/a: ",
    "--api-key a\x07b": "--api-key, OPENAI_API_KEY and --header are single lines",
    "--header X=\x07": "--api-key, OPENAI_API_KEY and --header are single lines",
    "--burstiness 0": "--burstiness 0.0: must be positive",
    "--burstiness 2": "--burstiness 2.0: nothing arrives at a rate",
    "--ramp-up-start-rps 1": "--ramp-up-start-rps and --ramp-up-end-rps need",
    "--ramp-up-strategy linear --ramp-up-end-rps 5": "--ramp-up-strategy needs",
    "--ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 5": "--ramp-up-strategy needs",
    "--ramp-up-strategy linear --ramp-up-sta 1 --ramp-up-e 5 --request-rate 2": "--ramp-up-strategy takes the place",
}


@pytest.mark.parametrize("flags", WRONG)
def test_a_wrong_flag_is_one_line_before_any_request(
    server: FakeServer, tmp_path: Path, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(server, tmp_path, *flags.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bench_serving: {WRONG[flags]}") and error.count("\n") == 1
    assert not server.bodies


def test_a_ramp_is_sent_and_written(bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    ramp = {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 200.0, "ramp_up_end_rps": 2000.0}
    result = bench(burstiness=2.0, **ramp)
    assert result["completed"] == 5 and result["burstiness"] == 2.0
    assert {key: result[key] for key in ramp} == ramp
    assert "200 to 2000 (exponential), burstiness 2" in capsys.readouterr().out


def test_find_max_goodput_reports_its_best_run(
    bench: Callable[..., dict[str, Any]], server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.status_of = lambda number: 503 if number == 3 else 200  # one of those that are sent at once
    result = bench(find_max_goodput=0.9, goodput=("e2el:60000",), seed=3, plot=str(tmp_path / "run.html"))
    printed = capsys.readouterr().out
    trials = result["max_goodput_trials"]
    assert trials[0]["request_rate"] == float("inf") and trials[0]["good_request_fraction"] == 0.8
    assert [trial["seed"] for trial in trials] == list(range(3, 3 + len(trials)))
    best = max(trials[1:], key=lambda trial: trial["request_rate"])
    assert (result["request_rate"], result["seed"]) == (best["request_rate"], best["seed"])
    assert result["max_goodput_rate"] == best["request_rate"] and result["good_request_fraction"] == 1.0
    assert re.search(r"^Maximum goodput: \S+ req/s at a rate of ", printed, re.M)
    assert len({body["text"] for body in server.bodies}) == 5 * len(trials)  # prompts of its own for each run
    assert "Requests within the limits" in (tmp_path / "run.html").read_text()


def test_find_max_goodput_says_that_no_rate_is_good(
    bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(find_max_goodput=0.99, goodput=("e2el:0.001",), num_prompts=2)
    assert result["max_goodput_rate"] is None and result["completed"] == 2
    assert "Maximum goodput: none" in capsys.readouterr().out


def test_the_page_is_whole_and_loads_nothing(bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    bench(plot=str(path), tag="<b>&")
    page = path.read_text()
    assert page.count("<svg ") == page.count("</svg>") == 5
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert not re.search(r"https?:|src=|href=|<script|@import|url\(|nan|inf,", page)
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n").replace('<meta charset="utf-8">', ""))
    assert len(root.findall(".//circle")) == 5  # one for each request
    assert "Median Longest Gap (ms):" in "".join(root.itertext())


def test_a_png_needs_matplotlib_before_any_request(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.png"
    if importlib.util.find_spec("matplotlib"):
        assert command(server, tmp_path, "--plot", str(path)) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        server.bodies.clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command(server, tmp_path, "--plot", str(path)) == 1
    assert "pip install matplotlib, or end the name in .html" in capsys.readouterr().err
    assert not server.bodies


def test_two_result_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "vllm.json"
    old = {"request_throughput": 1.0, "seed": 9}
    new = {"request_throughput": 4.0, "mean_e2e_latency_ms": 50.0, "mean_ttft_ms": 8.0, "failed": 0, "seed": 1}
    new["request_rate"] = new["max_goodput_rate"] = float("inf")
    ours.write_text(f"{json.dumps(old)}\n{json.dumps(new)}\n")
    vllm = {"request_throughput": 5.0, "mean_e2el_ms": 25.0, "mean_ttft_ms": 10, "p99_itl_ms": 3.0, "failed": 2}
    theirs.write_text(json.dumps(vllm | {"request_rate": "inf", "burstiness": 1.0, "seed": 1}, indent=1))
    assert main(["--compare", str(ours), str(theirs)]) == 0
    printed = capsys.readouterr().out
    assert f"A: {ours}\nB: {theirs}\nburstiness: None in A, 1.0 in B\n" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert rows == [
        "| | A | B | B/A |",
        "| Failed requests | 0 | 2 |  |",
        "| Requests/s | 4.00 | 5.00 | 1.250 |",
        "| Mean TTFT (ms) | 8.00 | 10 | 1.250 |",
        "| Mean E2E latency (ms) | 50.00 | 25.00 | 0.500 |",
    ]
    assert main(["--compare", str(ours), str(ours)]) == 0
    printed = capsys.readouterr().out
    assert "in A" not in printed and "| Highest rate within the limits | inf | inf |  |" in printed
    theirs.write_text("[1, 2]")
    assert main(["--compare", str(ours), str(theirs)]) == 1
    assert "no result of a run" in capsys.readouterr().err


def command(server: FakeServer, tmp_path: Path, *extra: str) -> int:
    small = ["--num-prompts", "4", "--random-input", "12", "--random-output", "6", "--random-range", "1"]
    return main(
        [*small, "--disable-tqdm", "--port", str(server.port), "--output-file", str(tmp_path / "o.jsonl"), *extra]
    )


def test_exit_status_is_one_when_all_fail(server: FakeServer, tmp_path: Path) -> None:
    assert command(server, tmp_path) == 0
    server.cut_stream = True
    assert command(server, tmp_path, "--warmup-requests", "0") == 1
    assert json.loads((tmp_path / "o.jsonl").read_text().splitlines()[-1])["completed"] == 0
    assert command(server, tmp_path) == 1  # the warm-up says so before the run


def test_no_server_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "127.0.0.1", "--port", "1", "--output-file", str(tmp_path / "o")]) == 1
    assert "no server answers at http://127.0.0.1:1/" in capsys.readouterr().err


def test_api_key(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.api_key = "hush"
    assert command(server, tmp_path) == 1
    assert "--api-key" in capsys.readouterr().err
    assert command(server, tmp_path, "--api-key", "hush") == 0
    assert "hush" not in capsys.readouterr().out


def test_the_model_falls_back_to_v1_models(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    server.has_model_info = False
    assert bench(backend="vllm")["completed"] == 5
    assert {body["model"] for body in server.bodies} == {"served-name"}
    bench(backend="vllm", model=server.tokenizer_path, served_model_name="other")
    assert server.bodies[-1]["model"] == "other"


def test_max_concurrency_caps_what_is_in_flight(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    server.hold = 3
    result = bench(num_prompts=9, max_concurrency=3, warmup_requests=0)
    assert server.peak == 3
    assert result["max_concurrent_requests"] == 3


def test_without_a_cap_all_are_in_flight(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    server.hold = 9
    assert bench(num_prompts=9, warmup_requests=0, request_rate=2000.0)["completed"] == 9
    assert server.peak == 9


def test_the_seed_decides_what_is_sent(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    bench(seed=5)
    first, server.bodies = server.bodies, []
    bench(seed=5)
    assert sorted(map(str, server.bodies)) == sorted(map(str, first))
    bench(seed=6)
    assert str(server.bodies[-1]) not in map(str, first)


def test_control_routes(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    bench(flush_cache=True, profile=True)
    assert server.controls == ["/flush_cache", "/start_profile", "/stop_profile"]


def test_ids_and_templates_are_sent(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    bench(dataset_name="random-ids")
    assert len(server.bodies[-1]["input_ids"]) == 20
    bench(apply_chat_template=True)
    assert re.fullmatch(r"<user>.+<assistant>", server.bodies[-1]["text"])
    bench(dataset_name="random-ids", vocab_size=50, model="anything", backend="vllm")
    assert max(server.bodies[-1]["prompt"]) < 50


@pytest.mark.parametrize("backend", ["fenceline", "vllm", "openai-chat"])
def test_multi_turn_carries_the_answers(
    bench: Callable[..., dict[str, Any]], server: FakeServer, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"dataset_name": "multi-turn", "num_prompts": 3, "multi_turn_num_turns": 3}
    result = bench(backend=backend, warmup_requests=0, max_concurrency=1, **sizes)
    assert result["completed"] == 9
    assert [t["completed"] for t in result["turns"]] == [3, 3, 3]
    assert "Turn 3 mean TTFT (ms):" in capsys.readouterr().out
    prompts = [body.get("text") or body.get("prompt") or body["messages"] for body in server.bodies]
    for talk in (0, 3, 6):
        for turn in (talk + 1, talk + 2):
            if backend == "openai-chat":
                earlier = [*prompts[turn - 1], {"role": "assistant", "content": result["generated_texts"][turn - 1]}]
                assert prompts[turn][:-1] == earlier
            else:
                assert prompts[turn].startswith(prompts[turn - 1] + result["generated_texts"][turn - 1])


def test_a_failed_turn_ends_its_conversation(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    server.status_of = lambda number: 500 if number == 1 else 200
    sizes = {"dataset_name": "multi-turn", "num_prompts": 1, "multi_turn_num_turns": 3}
    result = bench(warmup_requests=0, **sizes)
    assert (result["completed"], result["failed"], len(server.bodies)) == (1, 2, 2)
    assert "turn 2" in result["errors"][2]


@pytest.mark.parametrize("backend", ["fenceline", "vllm"])
def test_check_determinism_passes_and_catches(server: FakeServer, tmp_path: Path, backend: str) -> None:
    extra = ["--warmup-requests", "0", "--check-determinism", "3", "--backend", backend]
    assert command(server, tmp_path, *extra) == 0
    assert len(server.bodies) == 4 + 3
    server.forget = {"*"}
    server._seen.clear()
    assert command(server, tmp_path, *extra) == 3
    found = json.loads((tmp_path / "o.jsonl").read_text().splitlines()[-1])["determinism"]
    assert (found["checked"], found["differ"], found["failed"]) == (3, 3, 0)
    if backend == "fenceline":
        assert (found["first"]["unit"], found["first"]["position"]) == ("token", 3)


def test_one_planted_difference_is_found(
    bench: Callable[..., dict[str, Any]], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(warmup_requests=0)
    prompts = sorted(body["text"] for body in server.bodies)
    server.forget, server._seen = {prompts[2]}, {}
    result = bench(warmup_requests=0, check_determinism=99)
    assert (result["determinism"]["checked"], result["determinism"]["differ"]) == (5, 1)
    assert "5 prompts replayed alone, 1 differ, 0 failed" in capsys.readouterr().out


def test_random_draws_are_replayed_with_their_seed(bench: Callable[..., dict[str, Any]], server: FakeServer) -> None:
    result = bench(extra_request_body='{"temperature": 0.9}', check_determinism=5, warmup_requests=0, seed=40)
    assert result["determinism"]["differ"] == 0
    seeds = [body["sampling_params"]["seed"] for body in server.bodies]
    assert sorted(seeds[:5]) == [40, 41, 42, 43, 44]
    assert sorted(seeds[5:]) == [40, 41, 42, 43, 44]


def test_a_prompt_that_is_no_json_fails_alone(
    bench: Callable[..., dict[str, Any]], server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 99999999999999999999999]}\n')
    result = bench(dataset_name="custom", dataset_path=str(path), warmup_requests=0)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert any("cannot be sent" in error for error in result["errors"])


def test_client_capacity_bench_takes_every_token() -> None:
    script = Path(__file__).parents[3] / "benchmark" / "bench_client_capacity.py"
    small = ["--num-streams", "4", "--output-len", "20", "--rounds", "2", "--backend", "vllm"]
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tokens +160$", done.stdout, re.M)
    assert re.search(r"^tokens/s: [1-9]\d*$", done.stdout, re.M)
