"""The command line, YAML files and keyword arguments: what is read, and how what is wrong is answered."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fenceline.config import ConfigError, docs
from fenceline.config.flags import flags_of
from fenceline.config.refused import ANY, ELSEWHERE, REFUSED
from fenceline.config.server_args import ServerArgs, parse_args
from fenceline.entrypoints.middleware import ADMIN_PATHS, OPEN_PATHS
from fenceline.entrypoints.web_page import PAGE_PATHS

# The launch commands of the public threads that this project started from, module renamed.
THREAD_COMMANDS = {
    "piecewise-8b": (
        "--model-path Qwen/Qwen3-8B --enable-piecewise-cuda-graph --tp 4",
        [],
    ),
    "piecewise-7b": (
        "--model Qwen/Qwen2.5-7B-Instruct --tp 4 --enable-piecewise-cuda-graph --disable-radix-cache",
        [],
    ),
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
def test_thread_command_is_refused_in_one_line_that_names_every_flag(name: str) -> None:
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
        kept += [] if group[0] in REFUSED else group
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


@pytest.mark.parametrize("option", REFUSED)
def test_every_refused_flag_has_an_answer_and_accepts_its_neutral_values(option: str) -> None:
    known = REFUSED[option]
    for value in ("",) if known.neutral == ANY else known.neutral:
        assert parse_args(["--model", "m", option, *value.split()]).model_path == "m"
    if known.neutral != ANY:
        message = refusal(["--model", "m", option, "17"])
        assert message == f"{option} 17: not available, {known.remedy}"


def test_no_flag_is_both_known_and_refused() -> None:
    known = {option for flag in flags_of(ServerArgs).values() for option in flag.options}
    assert not known & set(REFUSED)


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


@pytest.mark.parametrize("option", ELSEWHERE)
def test_flags_of_other_servers_are_answered_with_what_they_are_called_here(
    option: str, tmp_path: Path
) -> None:
    """The answer names flags of ours alone, none that would be refused in turn; a YAML file gets the same one."""
    known = {name for flag in flags_of(ServerArgs).values() for name in flag.options}
    assert option not in known | set(REFUSED)
    assert set(re.findall(r"--[a-z-]+", ELSEWHERE[option])) <= known
    assert (
        refusal(["--model", "m", option, "17"]) == f"{option} is another server's flag: {ELSEWHERE[option]}"
    )
    assert (
        refusal(["--model", "m", f"{option}=17"]) == f"{option} is another server's flag: {ELSEWHERE[option]}"
    )
    name = option[2:].replace("-", "_")
    file = tmp_path / "server.yaml"
    file.write_text(f"{name}: 17\n")
    assert refusal(["--config", str(file)]) == f"{name} is another server's setting: {ELSEWHERE[option]}"


@pytest.mark.parametrize("option", [*REFUSED, *ELSEWHERE])
def test_a_mistyped_flag_is_never_answered_with_one_that_is_refused(option: str) -> None:
    known = {name for flag in flags_of(ServerArgs).values() for name in flag.options} | {"--config", "--help"}
    for wrong in (option + "s", option[:-1], option.replace("-", "", 3)):
        for named in re.findall(
            r"did you mean (\S+)\?", refusal_or_empty(["--model", "m", "--" + wrong.lstrip("-")])
        ):
            assert named in known


def refusal_or_empty(argv: list[str]) -> str:
    """For words that may happen to be a flag."""
    try:
        parse_args(argv)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--prot 1", "unknown flag --prot; did you mean --port?; see --help"),
        ("--page-sise=16", "unknown flag --page-sise; did you mean --page-size?; see --help"),
        ("--zzzz", "unknown flag --zzzz; see --help"),
        ("some-model", "unexpected argument 'some-model': every setting is a --flag; see --help"),
        ("--port x", "--port x: expected a whole number"),
        ("--port 1.5", "--port 1.5: expected a whole number"),
        ("--watchdog-timeout inf", "--watchdog-timeout inf: expected a number"),
        ("--mem-fraction-static nan", "--mem-fraction-static nan: expected a number"),
        ("--page-size 7", "--page-size 7: choose one of 1, 16, 32, 64"),
        ("--schedule-policy best", "--schedule-policy best: choose one of fcfs, lpm, dfs-weight, random"),
        (
            "--attention-backend fa4",
            "--attention-backend fa4: not available, leave it out, or choose triton,",
        ),
        (
            "--decode-attention-backend torch_native",
            "--decode-attention-backend torch_native: not available, use",
        ),
        (
            "--attention-backend fa5",
            "--attention-backend fa5: choose one of auto, torch, triton, flashinfer, fa3",
        ),
        ("--cuda-graph-bs", "--cuda-graph-bs: expected at least one argument"),
        ("--cuda-graph-bs 1 two", "--cuda-graph-bs 1 two: expected whole numbers"),
        (
            "--cuda-graph-bs 1,2,4",
            "--cuda-graph-bs 1,2,4: expected whole numbers with spaces between them",
        ),
        ("--cuda-graph-bs 1 2.5 --port 1", "--cuda-graph-bs 1 2.5: expected whole numbers"),
        ("--load-format gguf", "--load-format gguf: not available, convert the weights to safetensors and"),
        ("--port", "--port: expected one argument"),
        ("--config /nowhere.yaml", "--config /nowhere.yaml: cannot be read"),
        (
            "--pp 2 --pp-size 2",
            "--pp 2, --pp-size 2: not available, this server runs one model on one host: leave it",
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
        ("pp: 4", "--pp 4: not available, this server runs one model on one host"),
        ("enable-lora: true", "--enable-lora: not available, merge the adapter"),
        ("max_model_len: 4096", "max_model_len is another server's setting: use --context-length"),
        ("tensor_paralel_size: 2", "unknown setting tensor_paralel_size"),
        ("- model", "--config FILE: expected one mapping, as in 'page_size: 16'"),
        ("a: [", "--config FILE: not valid YAML at line 1"),
    ],
)
def test_wrong_yaml_files_are_answered_with_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert refusal(["--config", str(file)]).replace(str(file), "FILE").startswith(message)


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
        (
            {"gpu_memory_utilization": 0.9},
            "gpu_memory_utilization is another server's setting: use --mem-frac",
        ),
        ({"page_sise": 4}, "unknown setting page_sise; did you mean page_size?"),
        ({"disable_radix_cache": "perhaps"}, "--disable-radix-cache perhaps: expected true or false"),
        ({"page_size": object()}, "--page-size <object"),
    ]:
        with pytest.raises(ConfigError) as caught:
            ServerArgs.from_kwargs(values)
        assert str(caught.value).startswith(message)


def test_reference_page_is_fresh() -> None:
    page = Path(docs.__file__).parents[3] / "docs" / "server_arguments.md"
    assert page.read_text(encoding="utf-8") == docs.render(), "run: python -m fenceline.config.docs"


@pytest.mark.parametrize("command", [["fenceline.launch_server"], ["fenceline", "serve"]])
def test_wrong_flag_ends_the_process_with_status_2_and_one_line(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command, "--model", "m", "--pp", "4"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "error: --pp 4: not available, this server runs one model on one host" in result.stderr


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
    result = subprocess.run(
        [sys.executable, "-m", "fenceline", *argv], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == status
    assert text in result.stdout + result.stderr


def test_configuration_imports_no_torch() -> None:
    code = (
        "import sys, fenceline, fenceline.config.server_args, fenceline.config.docs, fenceline.config.model_files;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_help_of_the_keys_names_every_endpoint_that_they_treat_apart() -> None:
    flags = flags_of(ServerArgs)
    assert all(path in flags["api_key"].spec.help for path in (OPEN_PATHS - PAGE_PATHS) | {"/,"})
    assert all(path in flags["admin_api_key"].spec.help for path in ADMIN_PATHS)
