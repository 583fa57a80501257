"""The command line, YAML files and keyword arguments: what is read, and how what is wrong is answered."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from app_requests import make_app, paths_for

import flags_page
from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.flags import flags_of
from fenceline.config.refused import ANY, REFUSED, find
from fenceline.config.server_args import ServerArgs, parse_args
from fenceline.entrypoints.access import Access

# The launch commands of the public threads that this project started from, module renamed.
THREAD_COMMANDS = {
    "piecewise-8b": ("--model-path Qwen/Qwen3-8B --enable-piecewise-cuda-graph --tp 4", []),
    "piecewise-7b": ("--model Qwen/Qwen2.5-7B-Instruct --tp 4 --enable-piecewise-cuda-graph --disable-radix-cache", []),
    "piecewise-vl": (
        "--model Qwen/Qwen2.5-VL-7B-Instruct --tp 4 --enable-piecewise-cuda-graph --disable-radix-cache",
        [],
    ),
    "piecewise-moe": (
        "--model-path Qwen/Qwen3-Coder-30B-A3B-Instruct --tp 4 --host 0.0.0.0 --enable-piecewise-cuda-graph",
        [],
    ),
    "hicache-stress": (
        "--model-path MiniMaxAI/MiniMax-M2.5 --tp 8 --ep 8 --mem-fraction-static 0.40 --enable-hierarchical-cache"
        " --hicache-ratio 2.0 --hicache-size 64 --hicache-write-policy write_through --hicache-io-backend kernel"
        " --attention-backend fa3 --decode-attention-backend flashinfer --chunked-prefill-size 8192 --page-size 64"
        " --enable-cache-report --trust-remote-code --port 8000",
        [],
    ),
    "sparse": (
        "--model-path any-model --dense-as-sparse --attention-backend minicpm_flashinfer",
        ["--dense-as-sparse"],
    ),
    "draft-backend": (
        "--model-path any-model --speculative-draft-attention-backend flashinfer --enable-hierarchical-cache",
        ["--speculative-draft-attention-backend flashinfer"],
    ),
}


def refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", [name for name, (_, refused) in THREAD_COMMANDS.items() if refused])
def test_thread_command_is_refused_in_one_line_with_every_flag(name: str) -> None:
    command, refused = THREAD_COMMANDS[name]
    message = refusal(shlex.split(command))
    assert all(flag in message for flag in refused), message
    assert "leave it out" in message


@pytest.mark.parametrize("name", THREAD_COMMANDS)
def test_thread_command_parses_once_the_remedy_is_followed(name: str) -> None:
    words = shlex.split(THREAD_COMMANDS[name][0])
    kept: list[str] = []
    position = 0
    while position < len(words):
        width = 2 if position + 1 < len(words) and not words[position + 1].startswith("--") else 1
        group = words[position : position + width]
        position += width
        if group == ["--speculative-draft-attention-backend", "flashinfer"]:
            continue
        if group == ["--attention-backend", "minicpm_flashinfer"]:
            group = ["--attention-backend", "flashinfer"]
        kept += [] if find(group[0]) else group
    args = parse_args(kept)
    assert args.model_path == words[1]
    assert args.disable_radix_cache == ("--disable-radix-cache" in words)
    assert args.enable_cache_report == ("--enable-cache-report" in words)
    assert args.port == (8000 if "8000" in words else 30000)
    wanted = {"hicache-stress": "fa3", "sparse": "flashinfer"}
    assert args.attention_backend == wanted.get(name)
    assert args.decode_attention_backend == ("flashinfer" if name == "hicache-stress" else None)
    assert args.enable_hierarchical_cache == ("--enable-hierarchical-cache" in words)
    assert args.hicache_size == (64 if name == "hicache-stress" else 0)


FOREIGN = [option.replace("*", "") if option == "-O*" else option.replace("*", "x") for option in REFUSED]
OWN = {option for flag in flags_of(ServerArgs).values() for option in flag.options}


@pytest.mark.parametrize("option", FOREIGN)
def test_every_foreign_flag_is_answered_with_flags_of_ours(
    option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a command line and in a YAML file alike."""
    entry = find(option)
    assert entry is not None
    known = entry[1]
    assert option not in OWN
    assert set(re.findall(r"--[a-z-]+", known.remedy)) <= OWN
    for value in ("",) if known.neutral == ANY or known.hint else known.neutral:
        assert parse_args(["--model", "m", f"{option}={value}" if value else option]).model_path == "m"
    assert bool(caplog.messages) == known.hint
    if known.neutral == ANY or known.hint:
        return
    shown = option if option == "--hf-token" else f"{option} 17"
    answer = f"{shown}: not available, {known.remedy}"
    assert refusal(["--model", "m", f"{option}=17"]) == answer
    if option.startswith("--"):
        file = tmp_path / "server.yaml"
        file.write_text(f"{option[2:].replace('-', '_')}: 17\n")
        assert refusal(["--config", str(file)]) == answer


# Lines of the documentation of SGLang and vLLM and of model cards, and what of each has to be named.
PUBLIC_LINES = {
    "--model-path meta-llama/Meta-Llama-3-8B-Instruct --tp 2 --enable-p2p-check": "",
    "--model-path meta-llama/Llama-2-7b-chat-hf --speculative-algo EAGLE --speculative-draft"
    " lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 5 --speculative-eagle-topk 8"
    " --speculative-num-draft-tokens 64 --mem-fraction 0.7 --enable-torch-compile --cuda-graph-max-bs 2":
        "--speculative-draft",
    "--model meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 --speculative-draft-model x/y"
    " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --dtype float16": "",
    "--model-path openai/gpt-oss-120b --tp-size=1 --data-parallel-size=2 --mem-fraction-static 0.85"
    " --chunked-prefill-size 16384 --ep-size=1 --stream-interval 50 --moe-runner-backend triton_kernel": "",
    "--model-path Qwen/Qwen3-235B-A22B --tp-size 8 --dp-size 8 --enable-dp-attention --enable-ep-moe"
    " --enable-torch-compile --max-running-requests 128": "--enable-dp-attention --enable-ep-moe",
    "--model-path deepseek-ai/DeepSeek-V3 --tp 16 --dist-init-addr 10.0.0.1:5000 --nnodes 2 --node-rank 0"
    " --trust-remote-code --enable-mixed-chunk --num-continuous-decode-steps 4 --schedule-conservativeness 0.3": "",
    "--model Qwen/Qwen3-8B --enable-hicache --hicache-ratio 2 --page-size 64 --hicache-storage-backend file"
    " --hicache-storage-prefetch-policy wait_complete --enable-metrics --enable-cache-report": "",
    "--model m --disaggregation-mode prefill --disaggregation-ib-device mlx5_0 --port 30000":
        "--disaggregation-mode --disaggregation-ib-device",
    "--model m --enable-lora --lora-paths a=x/a b=x/b --max-loras-per-batch 2 --lora-backend triton":
        "--enable-lora --lora-paths --max-loras-per-batch --lora-backend",
    "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123": "",
    "Qwen/Qwen3-4B-Thinking-2507 --host 0.0.0.0 --port 8000 --seed 42 -tp 1 --max-model-len 2048"
    " --gpu_memory_utilization 0.8 --speculative-config {\"num_speculative_tokens\":5}":
        "--seed -tp --max-model-len --gpu-memory-utilization --speculative-config",
    "PrimeIntellect/INTELLECT-3 --tensor-parallel-size 2 --enable-auto-tool-choice --tool-call-parser qwen3_coder": "",
    "zai-org/GLM-4.5-Air --tensor-parallel-size 4 --enable-expert-parallel --async-scheduling -O3"
    " --compilation-config.mode 3 --no-enable-prefix-caching --max-num-seqs 256 --disable-log-requests":
        "--enable-expert-parallel --no-enable-prefix-caching --max-num-seqs",
    "Qwen/Qwen3-8B --default-chat-template-kwargs {\"enable_thinking\":false} --chat-template-content-format string"
    " --override-generation-config {\"temperature\":0.2} --limit-mm-per-prompt.image 2 --enforce-eager":
        "--default-chat-template-kwargs --chat-template-content-format --override-generation-config"
        " --limit-mm-per-prompt --enforce-eager",
    "--model m --zzz 1 --kv-transfer-config {} --yyy --attention-backend fa4 --port many":
        "--zzz --kv-transfer-config --yyy --attention-backend --port",
}  # fmt: skip


@pytest.mark.parametrize("line", PUBLIC_LINES)
def test_a_public_line_starts_or_is_told_all_that_must_change(line: str) -> None:
    named = PUBLIC_LINES[line].split()
    if not named:
        assert parse_args(line.split()).model_path in line
        return
    message = refusal(line.split())
    given = {word.split("=")[0].split(".")[0].replace("_", "-") for word in line.split() if word[0] == "-"}
    assert set(named) <= given
    for option in given - OWN | set(named):
        said = re.search(rf"(?:^|flag | ){option}[ ,:;]", message) is not None
        assert said == (option in named), (option, message)


def test_what_can_change_no_answer_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    parse_args(["m", "--enable-torch-compile", "--num-continuous-decode-steps", "4", "--enable-metrics"])
    assert caplog.messages == [
        "--enable-torch-compile, --num-continuous-decode-steps 4: without effect here, no answer changes by it"
    ]
    ServerArgs.from_kwargs({"enable_torch_compile": False, "torch_compile_max_bs": None})
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ("m", {"model_path": "m"}),
        ("m --port 1", {"model_path": "m", "port": 1}),
        ("--port 1 m", {"model_path": "m", "port": 1}),
        ("--enable-metrics m --port 1", {"model_path": "m", "port": 1, "enable_metrics": True}),
        ("--enable-dynamic-chunking m", {"model_path": "m"}),
        ("--enable-dynamic-chunking -- m", {"model_path": "m"}),
        ("--enable-lora false m", {"model_path": "m"}),
        ("--chunked-prefill-size -1 m", {"model_path": "m", "chunked_prefill_size": -1}),
        ("--max-que 3 m", {"model_path": "m", "max_queued_requests": 3}),
        ("--max-que=3 m", {"model_path": "m", "max_queued_requests": 3}),
        ("--page_size 16 m", {"model_path": "m", "page_size": 16}),
        ("m --no-enable-lora --no-enable-metrics", {"model_path": "m"}),
        ("m --disable-prefill-cuda-graph", {"model_path": "m", "disable_piecewise_cuda_graph": True}),
    ],
)
def test_a_model_alone_and_shortened_flags(argv: str, values: dict[str, object]) -> None:
    assert parse_args(argv.split()) == ServerArgs(**values)  # type: ignore[arg-type]


def test_values_reach_their_fields() -> None:
    args = parse_args(
        shlex.split(
            "--model-path demo --port 0 --mem-fraction-static 0.5 --page-size 16 --log-requests --random-seed=7"
            " --chunked-prefill-size -1 --schedule-policy lpm --stream-interval 4"
        )
    )
    assert args == ServerArgs(
        model_path="demo",
        port=0,
        mem_fraction_static=0.5,
        page_size=16,
        log_requests=True,
        random_seed=7,
        chunked_prefill_size=-1,
        schedule_policy="lpm",
        stream_interval=4,
    )


def test_a_mistyped_flag_is_never_answered_with_a_refused_one() -> None:
    wrong = [
        f"--{option.lstrip('-')}" for foreign in FOREIGN for option in (foreign + "s", foreign.replace("-", "", 3))
    ]
    named = re.findall(r"did you mean (\S+)\?", refusal(["m", *wrong]))
    assert len(named) > 100
    assert set(named) <= OWN | {"--config", "--help"}


def test_choices_are_taken_in_any_case() -> None:
    args = parse_args(["--model-path", "m", "--log-level", "INFO", "--schedule-policy", "LPM", "--log-format", "JSON"])
    assert (args.log_level, args.schedule_policy, args.log_format) == ("info", "lpm", "json")
    assert ServerArgs.from_kwargs({"model_path": "m", "log_level": "Warning"}).log_level == "warning"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--prot 1", "unknown flag --prot; did you mean --port?; see --help"),
        ("--page-sise=16", "unknown flag --page-sise; did you mean --page-size?; see --help"),
        ("--zzzz", "unknown flag --zzzz; see --help"),
        ("a b", "unexpected argument 'b': --model-path is 'a' already"),
        ("--model a b", "unexpected argument 'b': --model-path is 'a' already"),
        ("--log 1", "--log may be --log-level or --log-level-http or --log-format or --log-requests or"),
        (
            "--port x --zzz --pp 2",
            "--pp 2: not available, a model is split by --tp-size and --ep-size alone: leave it"
            " out; unknown flag --zzz; see --help; --port x: expected a whole number",
        ),
        ("--port x", "--port x: expected a whole number"),
        ("--port 1.5", "--port 1.5: expected a whole number"),
        ("--watchdog-timeout inf", "--watchdog-timeout inf: expected a number"),
        ("--mem-fraction-static nan", "--mem-fraction-static nan: expected a number"),
        ("--page-size 7", "--page-size 7: choose one of 1, 16, 32, 64"),
        ("--schedule-policy best", "--schedule-policy best: choose one of fcfs, lpm, dfs-weight, random"),
        ("--attention-backend fa4", "--attention-backend fa4: not available, leave it out, or choose triton,"),
        ("--decode-attention-backend torch_native", "--decode-attention-backend torch_native: not available, use"),
        ("--attention-backend fa5", "--attention-backend fa5: choose one of auto, torch, triton, flashinfer, fa3"),
        ("--cuda-graph-bs", "--cuda-graph-bs: expected at least one argument"),
        ("--cuda-graph-bs 1 two", "--cuda-graph-bs 1 two: expected whole numbers"),
        ("--cuda-graph-bs 1,2,4", "--cuda-graph-bs 1,2,4: expected whole numbers with spaces between them"),
        ("--cuda-graph-bs 1 2.5 --port 1", "--cuda-graph-bs 1 2.5: expected whole numbers"),
        ("--load-format npcache", "--load-format npcache: not available, convert the weights to safetensors and"),
        ("--port", "--port: expected one argument"),
        ("--config /nowhere.yaml", "--config /nowhere.yaml: cannot be read"),
        ("--config ~nobody-here/a.yaml", "--config ~nobody-here/a.yaml: cannot be read (~nobody-here/a.yaml: there is"),
        ("--config /dev/zero", "--config /dev/zero: expected flags, found more than 1048576 characters"),
        (
            "--pp 2 --pp-size 2",
            "--pp 2, --pp-size 2: not available, a model is split by --tp-size and --ep-size alone: leave it",
        ),
    ],
)
def test_wrong_command_lines_are_answered_with_one_line(argv: str, message: str) -> None:
    assert refusal(argv.split()).startswith(message)


def test_a_list_of_numbers_is_read_from_every_source(tmp_path: Path) -> None:
    words = ["--model", "m", "--cuda-graph-bs", "1", "2", "4", "--disable-cuda-graph-padding"]
    assert parse_args(words).cuda_graph_bs == (1, 2, 4)
    assert parse_args(["--model", "m", "--cuda-graph-bs=8"]).cuda_graph_bs == (8,)
    assert parse_args(["--model", "m"]).cuda_graph_bs is None
    file = tmp_path / "server.yaml"
    for text, sizes in (("[1, 2]", (1, 2)), ("4", (4,)), ("1 2 4", (1, 2, 4)), ("null", None)):
        file.write_text(f"cuda-graph-bs: {text}\n")
        assert parse_args(["--config", str(file)]).cuda_graph_bs == sizes
        assert parse_args(["--config", str(file), "--cuda-graph-bs", "3", "5"]).cuda_graph_bs == (3, 5)
    for value in ([1, 2], (1, 2), "1 2"):
        assert ServerArgs.from_kwargs({"cuda_graph_bs": value}).cuda_graph_bs == (1, 2)
    for wrong in ([1, True], [1, None], [[1]], {"a": 1}, True):
        with pytest.raises(ConfigError, match=r"--cuda-graph-bs .*: expected whole numbers"):
            ServerArgs.from_kwargs({"cuda_graph_bs": wrong})


def test_yaml_file_gives_values_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: demo\npage-size: 16\nport: 1234\ndisable_radix_cache: true\ntp_size: 1\nlog-requests: false\n"
        "json_model_override_args:\n  rope_theta: 10000.0\nserved_model_name: 7\nquantization: null\n"
    )
    args = parse_args(["--config", str(file), "--port", "99"])
    assert (args.model_path, args.page_size, args.port) == ("demo", 16, 99)
    assert args.disable_radix_cache
    assert args.json_model_override_args == '{"rope_theta": 10000.0}'
    assert args.served_model_name == "7"
    assert not parse_args(["--config", str(file), "--no-disable-radix-cache"]).disable_radix_cache


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pagesize: 16", "unknown setting pagesize; did you mean page_size?"),
        ("port: many", "--port many: expected a whole number"),
        ("port: true", "--port True: expected a whole number"),
        ("port: [1, 2]", "--port [1, 2]: expected a whole number"),
        ("host: [a]", "--host ['a']: expected a text"),
        ("host: null", "--host None: expected a text"),
        ("pp: 4", "--pp 4: not available, a model is split by"),
        ("enable-lora: true", "--enable-lora: not available, merge the adapter"),
        ("max_model_len: 4096\nport: x", "--max-model-len 4096: not available, use --context-length; --port x: exp"),
        ("tensor_paralel_size: 2", "unknown setting tensor_paralel_size"),
        ("- model", "--config FILE: expected one mapping, as in 'page_size: 16'"),
        ("a: [", "--config FILE: not valid YAML at line 1"),
        ("a: 2001-99-99", "--config FILE: not valid YAML (month must be in"),
        ("a: " + "[" * 20_000, "--config FILE: not valid YAML (maximum recursion depth"),
    ],
)
def test_wrong_yaml_files_are_answered_with_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert refusal(["--config", str(file)]).replace(str(file), "FILE").startswith(message)


@pytest.mark.parametrize(
    "flags",
    [
        {"model_path": "~nobody-here/a"},
        {"chat_template": "~nobody-here/a"},
        {"cuda_coredump_dir": "~nobody-here/a"},
        {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "hicache_storage_dir": "~nobody-here/a"},
    ],
    ids=lambda flags: list(flags)[-1],
)
def test_the_home_of_nobody_is_answered_with_one_line(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="^~nobody-here/a: there is no such user; write the whole path$"):
        resolve(ServerArgs(**{"model_path": "demo", "device": "cpu"} | flags))


def test_empty_yaml_file_is_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("# nothing\n")
    assert parse_args(["--config", str(file), "--model", "m"]) == ServerArgs(model_path="m")


def test_keyword_arguments_are_judged_like_flags() -> None:
    args = ServerArgs.from_kwargs({"model_path": "demo", "tp_size": 1, "enable_lora": False, "page_size": 16})
    assert args == ServerArgs(model_path="demo", page_size=16)
    for values, message in [
        ({"pp_size": 4}, "--pp-size 4: not available"),
        ({"enable_lora": True}, "--enable-lora: not available"),
        ({"gpu_memory_utilization": 0.9}, "--gpu-memory-utilization 0.9: not available, use --mem-frac"),
        ({"a": 1, "page_size": 7}, "unknown setting a; --page-size 7: choose one of"),
        ({"page_sise": 4}, "unknown setting page_sise; did you mean page_size?"),
        ({"disable_radix_cache": "perhaps"}, "--disable-radix-cache perhaps: expected true or false"),
        ({"page_size": object()}, "--page-size <object"),
    ]:
        with pytest.raises(ConfigError) as caught:
            ServerArgs.from_kwargs(values)
        assert str(caught.value).startswith(message)


def test_pages_of_flags_are_fresh(tmp_path: Path) -> None:
    flags_page.main([str(tmp_path)])
    made = list(tmp_path.iterdir())
    assert {path.name for path in made} == {"server_arguments.md", "from_vllm_or_sglang.md"}
    for path in made:
        page = Path(flags_page.__file__).parents[1] / "docs" / "use" / path.name
        assert page.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), "run: python scripts/flags_page.py"


def test_every_flag_with_another_name_here_stands_beside_it() -> None:
    page = flags_page.render_side_by_side()
    assert "| `--max-model-len` `--max-input-length` `--max-input-tokens` `--ctx-size` | `--context-length` |" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    there = [option for row in rows for option in re.findall(r"`([^`]+)`", row[0])]
    assert there == [option for option, refusal in REFUSED.items() if refusal.remedy.startswith("use ")]
    assert {option for row in rows for option in re.findall(r"`(--[^`]+)`", row[1])} <= OWN


@pytest.mark.parametrize("command", [["fenceline.launch_server"], ["fenceline", "serve"]])
def test_wrong_flag_ends_the_process_with_status_2_and_one_line(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command, "--model", "m", "--pp", "4"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "error: --pp 4: not available, a model is split by" in result.stderr


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (["--version"], 0, "fenceline 0."),
        ([], 0, "usage: fenceline COMMAND"),
        (["serv"], 2, "unknown command serv; did you mean serve?"),
        (["serve", "--help"], 0, "--mem-fraction-static"),
    ],
)
def test_console_script(argv: list[str], status: int, text: str) -> None:
    result = subprocess.run([sys.executable, "-m", "fenceline", *argv], capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert text in result.stdout + result.stderr


def test_configuration_imports_no_torch() -> None:
    code = (
        "import sys, fenceline, fenceline.config.server_args, fenceline.config.model_files;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_help_of_the_keys_names_every_endpoint() -> None:
    flags, app = flags_of(ServerArgs), make_app()
    assert all(path in flags["api_key"].spec.help for path in paths_for(app, Access.ANYBODY) | {"/,"})
    assert all(path in flags["admin_api_key"].spec.help for path in paths_for(app, Access.ADMINISTRATORS))
