"""bench_serving's datasets and flags: seeded, of the wanted lengths, offline."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fenceline.benchmarking.args import BenchArgs, build_parser
from fenceline.benchmarking.datasets import build_requests, build_warm_up
from fenceline.benchmarking.endpoints import BACKENDS, Endpoint, is_sampled, server_url
from fenceline.benchmarking.load import Conversation
from fenceline.benchmarking.records import BenchRequest, Call, Message, Reply


class PieceTokenizer:
    """Cuts words into pieces of three letters, the space going with the first; one BOS. Text round-trips."""

    def __init__(self) -> None:
        self.vocab_size = 500
        self.all_special_ids = [0, 1]
        self.chat_template: object = "yes"
        self._pieces: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        words = re.findall(r"\s?\S+|\s+", text)
        pieces = [word[i : i + 3] for word in words for i in range(0, len(word), 3)]
        ids = [self._pieces.setdefault(piece, 1000 + len(self._pieces)) for piece in pieces]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        names = {number: piece for piece, number in self._pieces.items()}
        return "".join(names.get(i, f" #{i}") for i in token_ids)

    def apply_chat_template(self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert not tokenize
        text = "".join(f"<{m['role']}>{m['content']}" for m in conversation)
        return text + ("<assistant>" if add_generation_prompt else "")


def bench(**kwargs: object) -> BenchArgs:
    return BenchArgs.from_namespace(Namespace(**kwargs))


@given(length=st.integers(2, 300), seed=st.integers(0, 5))
def test_random_text_has_exactly_the_wanted_tokens(length: int, seed: int) -> None:
    tokenizer = PieceTokenizer()
    args = bench(num_prompts=2, random_input_len=length, random_output_len=9, random_range_ratio=1.0, seed=seed)
    for request in build_requests(args, tokenizer):
        (turn,) = request.turns
        assert isinstance(turn.content, str)
        assert len(tokenizer.encode(turn.content)) == turn.prompt_len == length
        assert turn.output_len == 9


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix", "multi-turn"])
def test_the_seed_decides_the_requests(name: str) -> None:
    def build(seed: int) -> object:
        args = bench(dataset_name=name, num_prompts=6, random_input_len=30, seed=seed, gsp_system_prompt_len=20)
        return build_requests(args, PieceTokenizer())

    assert build(3) == build(3)
    assert build(3) != build(4)


def image_bench(**kwargs: object) -> BenchArgs:
    sizes: dict[str, object] = {"num_prompts": 3, "random_input_len": 20, "image_count": 2, "image_resolution": "24x40"}
    return bench(backend="sglang-oai-chat", dataset_name="image", **(sizes | kwargs))


def _urls(requests: Sequence[BenchRequest]) -> list[str]:
    return [url for request in requests for url in request.turns[0].images]


def test_each_request_has_images_that_no_other_has() -> None:
    tokenizer, args = PieceTokenizer(), image_bench(image_format="png")
    requests = build_requests(args, tokenizer)
    warm_up = build_warm_up(args, tokenizer, requests)
    urls = _urls([*requests, *warm_up])
    assert [len(request.turns[0].images) for request in requests] == [2, 2, 2] and len(warm_up) == 1
    assert len(set(urls)) == len(urls) == 8 and build_requests(args, tokenizer) == requests
    image = Image.open(io.BytesIO(base64.b64decode(urls[0].removeprefix("data:image/png;base64,"))))
    assert (image.format, image.height, image.width) == ("PNG", 24, 40) and len(image.getcolors(1000) or ()) > 900
    assert build_requests(image_bench(seed=2, image_format="png"), tokenizer) != requests
    blank = _urls(build_requests(image_bench(image_content="blank"), tokenizer))
    assert len(set(blank)) == 1 and blank[0].startswith("data:image/jpeg;base64,")
    [message] = Conversation("messages").ask("what", requests[0].turns[0].images)
    assert isinstance(message, dict)
    assert message["content"][1:] == [
        {"type": "image_url", "image_url": {"url": urls[1]}},
        {"type": "text", "text": "what"},
    ]


def test_requests_share_the_images_of_a_pool_with_the_warm_up() -> None:
    tokenizer, args = PieceTokenizer(), image_bench(num_prompts=4, image_pool=3)
    requests = build_requests(args, tokenizer)
    warm_up = build_warm_up(args, tokenizer, requests)
    assert len(set(_urls(requests))) == 3 and set(_urls(warm_up)) == set(_urls(requests))
    texts = [request.turns[0].content for request in (*requests, *warm_up)]
    assert len(set(map(str, texts))) == len(texts), "only images are known"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"backend": "sglang"}, "take --backend fenceline-oai-chat"),
        ({"image_resolution": "720"}, "HEIGHTxWIDTH as in 720x1280"),
        ({"image_resolution": "0x10"}, "HEIGHTxWIDTH"),
        ({"image_pool": 0}, "--image-pool 0: must be at least 1"),
    ],
)
def test_image_flags_that_cannot_be_used(flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        bench(**({"backend": "sglang-oai-chat", "dataset_name": "image"} | flags))


def test_range_ratio_bounds_the_lengths() -> None:
    args = bench(num_prompts=200, random_input_len=100, random_output_len=40, random_range_ratio=0.5)
    turns = [request.turns[0] for request in build_requests(args, PieceTokenizer())]
    assert min(t.prompt_len for t in turns) in range(50, 60)
    assert max(t.prompt_len for t in turns) in range(91, 101)
    assert {t.output_len for t in turns} <= set(range(20, 41))
    assert len({t.output_len for t in turns}) > 10


def test_random_ids_are_ids_and_never_special() -> None:
    args = bench(dataset_name="random-ids", num_prompts=20, random_input_len=64, random_range_ratio=1.0)
    for request in build_requests(args, PieceTokenizer()):
        ids = request.turns[0].content
        assert isinstance(ids, list) and len(ids) == 64
        assert all(2 <= i < 500 for i in ids)


def test_random_ids_need_no_tokenizer_with_a_vocab_size() -> None:
    args = bench(dataset_name="random-ids", num_prompts=3, random_input_len=50, vocab_size=11)
    assert all(0 <= i < 11 for request in build_requests(args, None) for i in request.turns[0].content)  # type: ignore[operator]
    with pytest.raises(ValueError, match="--vocab-size"):
        build_requests(bench(dataset_name="random-ids", num_prompts=3), None)


@pytest.mark.parametrize("as_ids", [False, True])
def test_shared_prefix_groups(as_ids: bool) -> None:
    args = bench(
        dataset_name="generated-shared-prefix",
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=50,
        gsp_question_len=10,
        gsp_output_len=7,
        tokenize_prompt=as_ids,
    )
    tokenizer = PieceTokenizer()
    turns = [request.turns[0] for request in build_requests(args, tokenizer)]
    assert len(turns) == 12
    heads = [tuple(t.content[:50]) if as_ids else str(t.content).split("\n\n")[0] for t in turns]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({str(t.content) for t in turns}) == 12
    assert heads != sorted(heads, key=heads.index)  # shuffled
    assert {t.output_len for t in turns} == {7}
    if as_ids:
        assert {t.prompt_len for t in turns} == {60}


def sharegpt_file(path: Path, num: int = 8) -> str:
    records: list[object] = [{"conversations": [{"from": "human", "value": "hi"}]}]  # no answer: left out
    for i in range(num):
        questions = [f"question {i} number {k} about things" for k in range(3)]
        talk = [{"from": "system", "value": "be kind"}] if i % 2 else []
        for k, question in enumerate(questions):
            talk += [{"from": "human", "value": question}, {"from": "gpt", "value": f"answer {i} {k} " + "so " * i}]
        records.append({"id": str(i), "conversations": talk})
    path.write_text(json.dumps(records))
    return str(path)


def test_sharegpt_takes_first_exchanges(tmp_path: Path) -> None:
    tokenizer = PieceTokenizer()
    path = sharegpt_file(tmp_path / "s.json")
    turns = [
        request.turns[0] for request in build_requests(bench(dataset_name="sharegpt", dataset_path=path), tokenizer)
    ]
    assert len(turns) == 8
    for turn in turns:
        match = re.fullmatch(r"question (\d) number 0 about things", str(turn.content))
        assert match
        answer = f"answer {match[1]} 0 " + "so " * int(match[1])
        assert turn.output_len == len(tokenizer.encode(answer, add_special_tokens=False))
        assert turn.prompt_len == len(tokenizer.encode(str(turn.content)))


def test_sharegpt_overrides_and_limits(tmp_path: Path) -> None:
    path = sharegpt_file(tmp_path / "s.json")
    args = bench(dataset_name="sharegpt", dataset_path=path, num_prompts=3, sharegpt_output_len=77, prompt_suffix="!")
    turns = [request.turns[0] for request in build_requests(args, PieceTokenizer())]
    assert [t.output_len for t in turns] == [77] * 3
    assert all(str(t.content).endswith("!") for t in turns)
    with pytest.raises(ValueError, match="no usable record"):
        build_requests(bench(dataset_name="sharegpt", dataset_path=path, sharegpt_context_len=5), PieceTokenizer())


def test_multi_turn_from_a_file(tmp_path: Path) -> None:
    path = sharegpt_file(tmp_path / "s.json")
    args = bench(dataset_name="multi-turn", dataset_path=path, multi_turn_num_turns=2)
    requests = build_requests(args, PieceTokenizer())
    assert [len(request.turns) for request in requests] == [2] * 8
    assert all(f"number {k}" in str(r.turns[k].content) for r in requests for k in range(2))


def test_custom_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"prompt": "tell me more", "output_len": 5}\n\n{"input_ids": [4, 5, 6]}\n'
        '{"messages": [{"role": "user", "content": "so it\u2028is?"}, {"role": "assistant", "content": "yes it"}]}\n',
        encoding="utf-8",
    )
    args = bench(dataset_name="custom", dataset_path=str(path))
    turns = {str(r.turns[0].content): r.turns[0] for r in build_requests(args, PieceTokenizer())}
    assert set(turns) == {"tell me more", "[4, 5, 6]", "so it\u2028is?"}
    assert turns["tell me more"].output_len == 5
    assert (turns["[4, 5, 6]"].prompt_len, turns["[4, 5, 6]"].output_len) == (3, 256)


@pytest.mark.parametrize("text", ["not json", "[1, 2]", '{"prompt": ""}'])
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        build_requests(bench(dataset_name="custom", dataset_path=str(path)), PieceTokenizer())


def test_conversation_styles() -> None:
    tokenizer = PieceTokenizer()
    reply = Reply(True, text=" fine", output_ids=[8, 9])
    plain = Conversation("plain")
    assert plain.ask("how") == "how"
    plain.answer(reply)
    assert plain.ask(" and") == "how fine and"
    ids = Conversation("plain")
    ids.ask([1, 2])
    ids.answer(reply)
    assert ids.ask([3]) == [1, 2, 8, 9, 3]
    chat = Conversation("messages")
    first = chat.ask("how")
    chat.answer(reply)
    assert first == [{"role": "user", "content": "how"}]
    assert [m["content"] for m in chat.ask("and")] == ["how", " fine", "and"]  # type: ignore[index]
    templated = Conversation("template", tokenizer)
    templated.ask("how")
    templated.answer(reply)
    assert templated.ask("and") == "<user>how<assistant> fine<user>and<assistant>"


THREAD_LINE = (
    "--backend sglang --port 8000 --dataset-name random --random-input 1024 --random-output 256 --num-prompts 512 "
    "--request-rate 10"
)


def test_the_command_line_of_the_thread_parses() -> None:
    args = BenchArgs.from_namespace(build_parser().parse_args(shlex.split(THREAD_LINE)))
    assert (args.backend, args.port, args.dataset_name) == ("sglang", 8000, "random")
    assert (args.random_input_len, args.random_output_len) == (1024, 256)
    assert (args.num_prompts, args.request_rate) == (512, 10.0)


@pytest.mark.parametrize(
    "line",
    [
        "--backend sglang --num-prompt 10",
        "--backend sglang --dataset-name random --num-prompts 3000 --random-input 1024 --random-output 1024 "
        "--random-range-ratio 0.5",
        "--backend vllm --base-url http://127.0.0.1:8000 --num-prompts 1000 --model m --dataset-name sharegpt "
        "--dataset-path x.json --sharegpt-output-len 256 --sharegpt-context-len 4096",
        "--backend vllm-chat --model m --dataset-name random --num-prompts 500 --apply-chat-template",
        "--backend sglang --host 127.0.0.1 --port 30000 --dataset-name generated-shared-prefix --gsp-num-groups 64 "
        "--gsp-prompts-per-group 16 --gsp-system-prompt-len 2048 --gsp-question-len 128 --gsp-output-len 256 "
        "--num-prompts 1024 --gsp-num-turns 2 --gsp-range-ratio 1.0 --gsp-ordered",
        "--backend sglang --dataset-name random --tokenize-prompt --random-input-len 2048 --random-output-len 256",
        "--backend sglang --profile --flush-cache --warmup-requests 0 --seed 3 --disable-tqdm --disable-stream",
        "--output-file a.jsonl --output-details --return-logprob --disable-ignore-eos --tag t --lora-name a b",
        '--extra-request-body {"top_p":0.9} --header A=1 B=2 --max-concurrency 8 --served-model-name n',
        "--check-determinism --multi-turn-num-turns 3",
    ],
)
def test_usual_command_lines_parse(line: str) -> None:
    BenchArgs.from_namespace(build_parser().parse_args(shlex.split(line.replace('"', '\\"'))))


def test_defaults_of_parser_and_value_agree() -> None:
    assert BenchArgs.from_namespace(build_parser().parse_args([])) == BenchArgs.from_namespace(object())
    assert build_parser().parse_args(["--check-determinism"]).check_determinism == 16
    assert build_parser().parse_args(["--check-determinism", "5"]).check_determinism == 5


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        ({"dataset_name": "sharegpt"}, "--dataset-path"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": float("nan")}, "--request-rate"),
        ({"num_prompts": 0}, "--num-prompts"),
        ({"random_range_ratio": 1.5}, "--random-range-ratio"),
        ({"extra_request_body": "{"}, "--extra-request-body"),
        ({"extra_request_body": '{"n": 2}'}, "n must be 1"),
        ({"header": ["nope"]}, "--header"),
        ({"backend": "vllm-chat", "tokenize_prompt": True}, "--tokenize-prompt"),
        ({"backend": "nobody"}, "--backend"),
        ({"max_concurrency": -1}, "--max-concurrency"),
    ],
)
def test_impossible_arguments_are_refused_with_the_flag(bad: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        bench(**bad)


def test_payloads() -> None:
    native = Endpoint("fenceline", "http://h", "m", extra_body={"temperature": 0.5, "sampling_params": {"top_k": 3}})
    body = native.payload(Call([1, 2], 7, seed=11))
    assert body["input_ids"] == [1, 2] and body["stream"] is True
    assert body["sampling_params"] == {
        "temperature": 0.5,
        "max_new_tokens": 7,
        "ignore_eos": True,
        "seed": 11,
        "top_k": 3,
    }
    assert Endpoint("sglang", "http://h", "m").payload(Call("x", 7, 11))["sampling_params"]["sampling_seed"] == 11
    completions = Endpoint("openai", "http://h", "m", ignore_eos=False).payload(Call("x", 7))
    assert completions["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in completions and completions["max_tokens"] == 7
    chat = Endpoint("vllm-chat", "http://h", "m", stream=False, return_logprob=True)
    assert chat.url == "http://h/v1/chat/completions"
    assert "stream_options" not in chat.payload(Call([{"role": "user", "content": "x"}], 7))
    assert chat.payload(Call([], 7, lora_name="l"))["model"] == "l"


def test_addresses() -> None:
    assert server_url("vllm", None, "h", None) == "http://h:8000"
    assert server_url("fenceline", None, "::1", 5) == "http://[::1]:5"
    assert server_url("openai", "http://h:9/v1/", "x", 1) == "http://h:9"
    assert all(port > 0 for _, port in BACKENDS.values())


def test_is_sampled() -> None:
    assert is_sampled({"temperature": 0.7})
    assert is_sampled({"sampling_params": {"temperature": 1}})
    assert not is_sampled({"temperature": 0.7, "seed": 5})
    assert not is_sampled({})


def test_secrets_stay_out_of_the_printed_arguments() -> None:
    args = bench(api_key="hush", header=["X-Key=hush"])
    assert "hush" not in repr(args)
    assert args.headers == {"X-Key": "hush", "Authorization": "Bearer hush"}


def test_importing_the_command_line_leaves_torch_alone() -> None:
    code = "import sys, fenceline.bench_serving; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
