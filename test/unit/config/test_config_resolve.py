"""From flags to the resolved configuration: defaults, refusals with their remedies, models and where they come from."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from huggingface_hub import errors
from model_files import CONFIG_JSON, make_model_dir

from fenceline.config import ConfigError, checks
from fenceline.config.chat_templates import CHAT_TEMPLATES
from fenceline.config.engine_config import EngineConfig, PriorityConfig, choose_device, resolve, torch_cuda_version
from fenceline.config.image_rules import image_rules
from fenceline.config.kv_layout import KVLayout
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import model_directory
from fenceline.config.server_args import ServerArgs, parse_args
from fenceline.images.prepare import ImageSettings


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path)


def resolved(model_dir: Path, gpu: bool = False, **values: Any) -> EngineConfig:
    return resolve(ServerArgs(model_path=str(model_dir), **values), cuda_probe=lambda: gpu)


def test_torch_is_not_imported_to_know_its_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = import_module("torch")
    assert torch_cuda_version() == torch.version.cuda
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_cuda_version() is None, "it is not installed"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    version = tmp_path / "torch" / "version.py"
    for text, built_for in [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", None)]:
        version.write_text(f"__version__ = '2.11'\n{text}\nhip: Optional[str] = '6.2'\n")
        assert torch_cuda_version() == built_for


def test_the_flight_recorders_own_folder_is_nobody_elses(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known, so anybody may have put a link there first; a dump must not fail for that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"fenceline-flight-recorder-{os.getuid()}"
    assert resolved(model_dir, flight_recorder_steps=0).flight_recorder_dir == str(usual)
    assert not usual.exists()
    assert resolved(model_dir).flight_recorder_dir == str(usual)
    assert usual.stat().st_mode & 0o077 == 0
    usual.rmdir()
    usual.symlink_to(tmp_path)
    chosen = {resolved(model_dir).flight_recorder_dir for _ in range(2)}
    assert len(chosen) == 2 and str(usual) not in chosen
    assert all(path.startswith(f"{usual}-") and not Path(path).exists() for path in chosen)


def test_a_missing_grammar_library_is_named_before_loading(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install xgrammar, or start with --grammar-backend none"):
        resolved(model_dir)
    assert resolved(model_dir, grammar_backend="none").refuses_grammars is not None


def test_defaults_on_a_cpu(model_dir: Path) -> None:
    config = resolved(model_dir)
    assert (config.device, config.model.dtype) == ("cpu", "float32")
    assert config.model.model_path == config.tokenizer_path == str(model_dir.resolve())
    assert config.served_model_name == str(model_dir)
    assert (config.server_args.host, config.server_args.port) == ("127.0.0.1", 30000)
    assert config.server_args.page_size == 1
    assert (config.chunked_prefill_size, config.max_prefill_tokens) == (128, 16384)
    assert (config.max_running_requests, config.max_total_tokens) == (256, None)
    assert (config.model.context_length, config.model.vocab_size) == (4096, 128)
    assert (config.prefill_attention_backend, config.decode_attention_backend) == ("torch", "torch")
    assert config.public_dict()["sampling_backend"] == "torch"
    assert (config.cuda_graph_bs, config.cuda_coredump_dir) == ((), None)
    args = config.server_args
    assert (args.schedule_policy, args.stream_interval, args.watchdog_timeout) == ("fcfs", 1, 300.0)
    assert config.log_level_http == config.server_args.log_level == "info"


def test_defaults_on_a_gpu(model_dir: Path) -> None:
    config = resolved(model_dir, gpu=True)
    assert (config.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.mem_fraction_static, config.chunked_prefill_size) == (0.85, 8192)
    assert config.max_running_requests == 1024
    assert (config.prefill_attention_backend, config.decode_attention_backend) == ("auto", "auto")
    assert config.cuda_graph_bs == (
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64),
        *(80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    )


@pytest.mark.parametrize(
    ("values", "buckets"),
    [
        ({"cuda_graph_max_bs": 1}, (1,)),
        ({"cuda_graph_max_bs": 3}, (1, 2, 3)),
        ({"cuda_graph_max_bs": 4}, (1, 2, 4)),
        ({"cuda_graph_max_bs": 5}, (1, 2, 4, 5)),
        ({"cuda_graph_max_bs": 8}, (1, 2, 4, 8)),
        ({"cuda_graph_max_bs": 4096, "max_running_requests": 25}, (1, 2, 4, 8, 16, 24, 25)),
        ({"max_running_requests": 2}, (1, 2)),
        ({"max_running_requests": 6, "disable_cuda_graph_padding": True}, (1, 2, 3, 4, 5, 6)),
        ({"cuda_graph_bs": (8, 2, 8)}, (2, 8)),
        ({"cuda_graph_bs": (3,), "disable_cuda_graph_padding": True}, (3,)),
        ({"disable_cuda_graph": True, "cuda_graph_bs": (8, 2), "cuda_graph_max_bs": 9}, ()),
    ],
)
def test_buckets_of_graphs_on_a_gpu(model_dir: Path, values: dict[str, Any], buckets: tuple[int, ...]) -> None:
    assert resolved(model_dir, gpu=True, **values).cuda_graph_bs == buckets


def test_buckets_lie_further_apart_the_larger_they_are(model_dir: Path) -> None:
    buckets = resolved(model_dir, gpu=True, cuda_graph_max_bs=650).cuda_graph_bs
    assert buckets[3:6] == (8, 16, 24)
    assert buckets[buckets.index(240) :] == (240, 256, *range(288, 513, 32), 576, 640, 650)


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"disable_cuda_graph": True}, ()),
        ({"disable_piecewise_cuda_graph": True, "piecewise_cuda_graph_tokens": (4,)}, ()),
        ({"piecewise_cuda_graph_tokens": (8, 2, 8)}, (2, 8)),
        ({"piecewise_cuda_graph_max_tokens": 1}, (1,)),
        ({"piecewise_cuda_graph_max_tokens": 16}, (16,)),
        ({"piecewise_cuda_graph_max_tokens": 17}, (16, 17)),
        ({"piecewise_cuda_graph_max_tokens": 100}, (16, 32, 48, 64, 96, 100)),
        ({"piecewise_cuda_graph_max_tokens": 4000, "chunked_prefill_size": 48}, (16, 32, 48)),
        ({"chunked_prefill_size": 64}, (16, 32, 48, 64)),
        ({"chunked_prefill_size": 8}, (8,)),
    ],
)
def test_sizes_of_prefill_graphs_on_a_gpu(model_dir: Path, values: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert resolved(model_dir, gpu=True, page_size=8, **values).piecewise_cuda_graph_tokens == sizes


def test_sizes_of_prefill_graphs_go_as_far_as_they_pay(model_dir: Path) -> None:
    """The wider a layer, the sooner the GPU is busy for longer than launching takes."""
    sizes = resolved(model_dir, gpu=True).piecewise_cuda_graph_tokens
    assert sizes == (*(16, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 1024, 64)), *range(1024, 2049, 128))

    def largest(hidden_size: int, intermediate_size: int, tp_size: int = 1) -> int:
        width = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "head_dim": 128}
        heads = {"num_attention_heads": hidden_size // 64, "num_key_value_heads": 8}
        overrides = json.dumps(width | heads)
        config = resolved(model_dir, gpu=True, json_model_override_args=overrides, tp_size=tp_size)
        return config.piecewise_cuda_graph_tokens[-1]

    assert [largest(1024, 3072), largest(2560, 9728), largest(65536, 262144)] == [2048, 1792, 16]
    assert [largest(2560, 9728), largest(4096, 12288), largest(4096, 12288, tp_size=2)] == [1792, 832, 2048]
    asked = resolved(model_dir, gpu=True, piecewise_cuda_graph_max_tokens=3500).piecewise_cuda_graph_tokens
    assert asked == (*sizes, 2560, 3072, 3500)


def test_a_prefill_size_that_no_step_reaches_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--piecewise-cuda-graph-tokens 65: no prefill step has more than 64"):
        resolved(model_dir, piecewise_cuda_graph_tokens=(4, 65), chunked_prefill_size=64)
    with pytest.raises(ConfigError, match="--piecewise-cuda-graph-tokens 0 4: a step has at least 1 token"):
        resolved(model_dir, piecewise_cuda_graph_tokens=(0, 4))


def test_a_cpu_captures_what_is_named_and_nothing_else(model_dir: Path) -> None:
    assert resolved(model_dir, cuda_graph_max_bs=8).cuda_graph_bs == ()
    assert resolved(model_dir, piecewise_cuda_graph_max_tokens=8).piecewise_cuda_graph_tokens == ()
    assert resolved(model_dir, piecewise_cuda_graph_tokens=(8, 4)).piecewise_cuda_graph_tokens == (4, 8)
    assert resolved(model_dir, cuda_graph_bs=(1, 2), debug_cuda_graph=True).cuda_graph_bs == (1, 2)


@pytest.mark.parametrize(
    ("values", "prefill_and_decode"),
    [
        ({"attention_backend": "fa3"}, ("fa3", "fa3")),
        ({"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}, ("fa3", "flashinfer")),
        ({"prefill_attention_backend": "flashinfer"}, ("flashinfer", "auto")),
        ({"attention_backend": "torch", "decode_attention_backend": "auto"}, ("torch", "auto")),
    ],
)
def test_attention_backends_on_a_gpu(
    model_dir: Path, values: dict[str, Any], prefill_and_decode: tuple[str, str]
) -> None:
    config = resolved(model_dir, gpu=True, **values)
    assert (config.prefill_attention_backend, config.decode_attention_backend) == prefill_and_decode


@pytest.mark.parametrize(
    ("stored", "wanted", "gpu", "dtype"),
    [
        ("float32", "auto", True, "bfloat16"),
        ("float16", "auto", True, "float16"),
        ("float16", "auto", False, "float32"),
        ("bfloat16", "half", True, "float16"),
        ("bfloat16", "float", True, "float32"),
        ("float32", "bfloat16", False, "bfloat16"),
    ],
)
def test_dtype(model_dir: Path, stored: str, wanted: str, gpu: bool, dtype: str) -> None:
    (model_dir / "config.json").write_text(json.dumps({**CONFIG_JSON, "torch_dtype": stored}))
    config = resolved(model_dir, gpu, dtype=wanted)
    assert config.model.dtype == dtype


def test_given_values_are_kept(model_dir: Path) -> None:
    config = resolved(
        model_dir,
        page_size=16,
        chunked_prefill_size=64,
        max_prefill_tokens=128,
        max_running_requests=7,
        max_total_tokens=1001,
        context_length=512,
        mem_fraction_static=0.5,
        random_seed=0,
        served_model_name="name",
        log_level_http="warning",
        max_queued_requests=3,
    )
    assert config.server_args.page_size == 16
    assert (config.chunked_prefill_size, config.max_prefill_tokens) == (64, 128)
    assert (config.max_running_requests, config.mem_fraction_static) == (7, 0.5)
    assert config.model.context_length == 512
    assert config.max_total_tokens == 992  # whole pages
    assert (config.random_seed, config.served_model_name) == (0, "name")
    assert (config.log_level_http, config.server_args.max_queued_requests) == ("warning", 3)


def test_chunking_off_and_its_bounds(model_dir: Path) -> None:
    assert resolved(model_dir, chunked_prefill_size=-1).chunked_prefill_size is None
    assert resolved(model_dir, chunked_prefill_size=32768).max_prefill_tokens == 32768
    small = resolved(model_dir, max_prefill_tokens=100, page_size=16)
    assert (small.chunked_prefill_size, small.max_prefill_tokens) == (96, 100)


def test_running_requests_follow_memory(model_dir: Path) -> None:
    assert resolved(model_dir, max_total_tokens=160, page_size=16).max_running_requests == 10
    overrides = json.dumps({"max_position_embeddings": 1 << 20})
    long = resolved(model_dir, json_model_override_args=overrides)
    assert long.model.context_length == 1 << 20
    assert long.max_running_requests == 64  # 256 MiB of page table at 4 MiB a row


def test_random_seed_is_drawn_once_per_resolution(model_dir: Path) -> None:
    seeds = {resolved(model_dir).random_seed for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_configuration_is_frozen_and_travels_between_processes(model_dir: Path) -> None:
    config = resolved(model_dir, api_key="secret")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "cuda"  # type: ignore[misc]


def test_api_key_is_never_shown(model_dir: Path) -> None:
    config = resolved(model_dir, api_key="secret")
    assert "secret" not in repr(config)
    assert config.public_dict()["api_key"] is True
    assert "secret" not in json.dumps(config.public_dict())
    assert resolved(model_dir).public_dict()["api_key"] is False


def test_chat_template_by_name_and_from_json(model_dir: Path, tmp_path: Path) -> None:
    assert resolved(model_dir, chat_template="chatml").chat_template == CHAT_TEMPLATES["chatml"]
    for text, message in [
        ('{"chat_template": "{{ messages }}"}', None),
        ("{", "not valid JSON"),
        ("[]", "expected an object with the template as the text of chat_template"),
        ('{"chat_template": 5}', "expected an object"),
    ]:
        file = tmp_path / "chat_template.json"
        file.write_text(text)
        if message is None:
            assert resolved(model_dir, chat_template=str(file)).chat_template == "{{ messages }}"
            continue
        with pytest.raises(ConfigError, match=message):
            resolved(model_dir, chat_template=str(file))
    with pytest.raises(ConfigError, match="or one of the names chatml, gemma-it, llama-2, llama-3-instruct"):
        resolved(model_dir, chat_template="chatlm")


def test_the_api_key_may_come_from_the_environment(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lists the machine's processes reads what stands on a command line."""
    monkeypatch.setenv("FENCELINE_API_KEY", "from outside")
    assert resolved(model_dir).server_args.api_key == "from outside"
    assert resolved(model_dir, api_key="given").server_args.api_key == "given"
    monkeypatch.setenv("FENCELINE_API_KEY", "")  # as a compose file passes on what is not set
    assert resolved(model_dir).server_args.api_key is None
    monkeypatch.setenv("FENCELINE_API_KEY", "ключ")
    with pytest.raises(ConfigError, match="--api-key: use ASCII"):
        resolved(model_dir)
    monkeypatch.setenv("FENCELINE_API_KEY", "")
    monkeypatch.setenv("FENCELINE_ADMIN_API_KEY", "from outside too")
    assert resolved(model_dir).server_args.admin_api_key == "from outside too"
    assert resolved(model_dir).server_args.api_key is None


def test_chat_template_is_read(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert resolved(model_dir, chat_template=str(template)).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 70000", "--port 70000: choose 1 to 65535"),
        ("--port -1", "--port -1: choose 1 to 65535"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static 1.5: must lie between 0 and 1"),
        ("--mem-fraction-static 0", "--mem-fraction-static 0.0: must lie between 0 and 1"),
        ("--max-running-requests 0", "--max-running-requests 0: must be at least 1"),
        ("--max-queued-requests 0", "--max-queued-requests 0: must be at least 1"),
        ("--max-total-tokens 0", "--max-total-tokens 0: must be at least 1"),
        ("--max-total-tokens 31 --page-size 32", "--max-total-tokens 31: not even one page of 32; raise it or"),
        ("--max-prefill-tokens 31 --page-size 32", "--max-prefill-tokens 31: not even one page of 32; raise it"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size 0: give a number of tokens, or -1"),
        ("--chunked-prefill-size -2", "--chunked-prefill-size -2: give a number of tokens, or -1"),
        ("--chunked-prefill-size 100 --page-size 64", "multiple of --page-size 64; use 64"),
        ("--chunked-prefill-size 63 --page-size 64", "multiple of --page-size 64; use 64"),
        ("--chunked-prefill-size 512 --max-prefill-tokens 256", "--max-prefill-tokens 256: smaller than"),
        ("--stream-interval 0", "--stream-interval 0: must be at least 1"),
        ("--decode-log-interval 0", "--decode-log-interval 0: must be at least 1"),
        ("--watchdog-timeout 0", "--watchdog-timeout 0: give a number of seconds > 0"),
        ("--schedule-conservativeness 0", "--schedule-conservativeness 0: must be above 0"),
        ("--random-seed -3", "--random-seed -3: must lie between"),
        ("--context-length 0", "--context-length 0: too short for any request"),
        ("--context-length 1", "--context-length 1: too short for any request, which has a token of prompt and one"),
        (
            "--max-running-requests 10000000",
            "--max-running-requests 10000000: no more than 65536 can run at once; lower it, more requests wait in",
        ),
        ("--max-total-tokens 1000000000000", "--max-total-tokens 1000000000000: must be at most 2147483647; lower"),
        ("--max-total-tokens 2147483647", "--max-total-tokens 2147483647: the KV cache takes 512 bytes a token, and"),
        (
            "--max-total-tokens 63 --page-size 32",
            "--max-total-tokens 63: one page of 32 serves no request; give at least 64 or lower --page-size",
        ),
        (
            "--max-running-requests 65536 --context-length 4096",
            "--max-running-requests 65536: with --context-length 4096 their page tables take 1.1 GB, and this machine",
        ),
        ("--chunked-prefill-size 99999999999", "--chunked-prefill-size 99999999999: must be at most 2147483647"),
        ("--max-prefill-tokens 99999999999", "--max-prefill-tokens 99999999999: must be at most 2147483647"),
        ("--max-queued-requests 99999999999", "--max-queued-requests 99999999999: must be at most 2147483647"),
        ("--stream-interval 99999999999", "--stream-interval 99999999999: must be at most 2147483647; lower it"),
        ("--decode-log-interval 99999999999", "--decode-log-interval 99999999999: must be at most 2147483647"),
        ("--cuda-graph-max-bs 99999999999", "--cuda-graph-max-bs 99999999999: must be at most 2147483647"),
        ("--flight-recorder-steps 99999999999", "--flight-recorder-steps 99999999999: must be at most 2147483647"),
        (
            "--enable-hierarchical-cache --hicache-ratio 1e300",
            "--hicache-ratio 1e+300: must be above 0 and at most 1e+06; 2.0 is usual, and --hicache-size gives",
        ),
        ("--context-length 8192", "--context-length 8192 is beyond the model's 4096 tokens; use"),
        ("--attention-backend fa3", "--attention-backend fa3: needs a CUDA GPU and this is cpu; leave it out"),
        ("--decode-attention-backend triton", "--decode-attention-backend triton: needs a CUDA GPU"),
        ("--cuda-graph-max-bs 0", "--cuda-graph-max-bs 0: must be at least 1"),
        ("--cuda-graph-bs 1 0", "--cuda-graph-bs 1 0: a batch has at least 1 request"),
        ("--cuda-graph-bs 8 16 --cuda-graph-max-bs 8", "--cuda-graph-bs 8 16: goes beyond --cuda-graph-max-bs 8"),
        ("--cuda-graph-bs 8 --max-running-requests 4", "--cuda-graph-bs 8: no batch has more than 4 requests"),
        ("--cuda-graph-bs 8 --max-total-tokens 4", "--cuda-graph-bs 8: no batch has more than 4 requests"),
        ("--debug-cuda-graph --disable-cuda-graph", "--disable-cuda-graph leaves none: drop one of them"),
        ("--debug-cuda-graph", "--debug-cuda-graph: no graphs are captured on cpu by default; add"),
        ("--cuda-coredump-dir=", "--cuda-coredump-dir is empty"),
        ("--device cuda", "--device cuda: torch sees no CUDA GPU; use --device cpu"),
        ("--disable-radix-cache --schedule-policy lpm", "use --schedule-policy fcfs"),
        ("--disable-radix-cache --schedule-policy dfs-weight", "use --schedule-policy fcfs"),
        ("--enable-priority-scheduling --schedule-policy lpm", "--enable-priority-scheduling orders by priority"),
        ("--priority-scheduling-preemption-threshold -1", "--priority-scheduling-preemption-threshold -1: must be"),
        ("--default-priority-value 9223372036854775808", "must fit in 64 bits"),
        ("--req-waiting-timeout 0", "--req-waiting-timeout 0.0: give a number of seconds > 0"),
        ("--req-running-timeout -1", "--req-running-timeout -1.0: give a number of seconds > 0"),
        ("--skip-tokenizer-init --reasoning-parser qwen3", "--reasoning-parser needs the tokenizer that"),
        ("--skip-tokenizer-init --tokenizer-path x", "--tokenizer-path needs the tokenizer that"),
        ("--json-model-override-args {", "--json-model-override-args: not valid JSON"),
        ("--json-model-override-args []", "--json-model-override-args: expected an object"),
        ("--chat-template /nowhere", "--chat-template /nowhere: no such file"),
        ("--revision main", "--revision chooses a version of a hub id"),
        ("--api-key=", "--api-key is empty"),
        ("--api-key ключ", "--api-key: use ASCII characters only"),
        ("--host=", "--host is empty"),
        ("--served-model-name=", "--served-model-name is empty"),
        ("--tokenizer-path=", "--tokenizer-path is empty"),
        ("--tokenizer-path /nowhere/at/all", "--tokenizer-path /nowhere/at/all: no such directory"),
    ],
)
def test_impossible_values_are_refused_with_the_remedy(
    model_dir: Path, flags: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenceline.config.engine_config.machine_bytes", lambda: 10**9)
    args = parse_args(["--model-path", str(model_dir), *flags.split()])
    with pytest.raises(ConfigError) as caught:
        resolve(args, cuda_probe=lambda: False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "num_layers", "heads", "dtype"),
    [
        ("", 2, 2, "bfloat16"),
        ("--tp-size 4", 2, 1, "bfloat16"),  # each head is on two ranks
        ("--kv-cache-dtype fp8_e4m3", 2, 2, "float8_e4m3fn"),
        ("--speculative-algorithm STANDALONE --speculative-draft-model-path", 4, 2, "bfloat16"),
    ],
)
def test_a_page_has_the_layers_and_heads_that_a_rank_holds(
    model_dir: Path, flags: str, num_layers: int, heads: int, dtype: str
) -> None:
    args = ["--model-path", str(model_dir), "--page-size", "16", "--dtype", "bfloat16", *flags.split()]
    args += [str(model_dir)] * flags.endswith("-path")
    layout = resolve(parse_args(args), cuda_probe=lambda: False).kv_layout
    assert layout == KVLayout.uniform(16, num_layers, heads, 16, dtype)
    assert layout.page_nbytes == 16 * num_layers * 2 * heads * 16 * (1 if "float8" in dtype else 2)


@pytest.mark.parametrize("spelling", ["--tp-size", "--tp", "--tensor-parallel-size"])
def test_ranks_that_the_model_can_be_split_over(model_dir: Path, spelling: str) -> None:
    """Four heads; of the two key/value heads each is held by two of four ranks."""
    for size in (1, 2, 4):
        args = parse_args(["--model-path", str(model_dir), spelling, str(size), "--device", "cpu"])
        assert resolve(args, cuda_probe=lambda: False).server_args.tp_size == size


@pytest.mark.parametrize(
    ("experts", "shared", "dense", "possible"),
    [(24, 32, [], "1, 2, 4"), (18, 32, [], "1, 2"), (24, 27, [], "1"), (24, 32, [1], "1")],
)
def test_ranks_divide_the_mlps_that_are_there(
    model_dir: Path, experts: int, shared: int, dense: list[int], possible: str
) -> None:
    """Those of the experts and the shared one; that of 95 features only if a layer has it."""
    moe = {
        "architectures": ["Qwen2MoeForCausalLM"], "intermediate_size": 95, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": experts, "shared_expert_intermediate_size": shared, "mlp_only_layers": dense,
    }  # fmt: skip
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | moe))
    args = parse_args(["--model-path", str(model_dir), "--tp-size", "3"])
    with pytest.raises(ConfigError, match=f"which it does not divide; use {possible}$"):
        resolve(args, cuda_probe=lambda: False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp-size 2 --ep-size 2", ""),
        ("--tp 4 --expert-parallel-size 2", ""),
        ("--tp-size 4 --ep-size 4", ""),
        ("--tp-size 4", "features, which it does not divide; use 1, 2$"),
        ("--tp-size 2 --ep-size 4", "--ep-size 4: experts are split over the ranks of --tp-size, which is 2"),
        ("--ep-size 2", "of --tp-size, which is 1"),
        ("--tp-size 3 --ep-size 3", "--ep-size 3: this model has 4 experts, which it does not divide"),
        ("--ep-size 0", "--ep-size 0: must be at least 1"),
    ],
)
def test_experts_are_split_over_ranks_that_they_fit(model_dir: Path, flags: str, message: str) -> None:
    """Experts of 18 features have two parts at most, whole ones any number."""
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 18, "mlp_only_layers": [],
    }  # fmt: skip
    path = model_dir / "config.json"
    dense = path.read_text()
    path.write_text(json.dumps(json.loads(dense) | moe))
    args = ["--model-path", str(model_dir), "--device", "cpu", *flags.split()]
    if not message:
        assert resolve(parse_args(args), cuda_probe=lambda: False).server_args.ep_size > 1
        path.write_text(dense)
        message = "--ep-size .: this model has no experts; leave it out"
    with pytest.raises(ConfigError, match=message):
        resolve(parse_args(args), cuda_probe=lambda: False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp-size 0", "--tp-size 0: must be at least 1"),
        ("--tp-size 3", "--tp-size 3: this model has 4 attention heads, 2 key/value heads and MLPs of 96"
         " features, which it does not divide; use 1, 2, 4"),
        ("--tp-size 8", "which it does not divide; use 1, 2, 4"),
        ("--dp-size 0", "--dp-size 0: must be at least 1"),
        ("--dp 2 --tp 2 --nnodes 2 --dist-init-addr h:1", "--dp-size 2: replicas share one host so far"),
        ("--nnodes 0", "--nnodes 0: must be at least 1"),
        ("--node-rank 1", "--node-rank 1: of 1 nodes (--nnodes) the last is 0"),
        ("--tp-size 2 --dist-init-addr h:1", "--dist-init-addr h:1: is for several hosts; give --nnodes too"),
        ("--tp-size 2 --nnodes 2", "--nnodes 2: give --dist-init-addr HOST:PORT, the same on all nodes"),
        ("--tp-size 2 --nnodes 2 --dist-init-addr 10.0.0.1", "--dist-init-addr 10.0.0.1: give HOST:PORT of node 0"),
        ("--tp-size 2 --nnodes 2 --dist-init-addr 0.0.0.0:1", "--dist-init-addr 0.0.0.0:1: give HOST:PORT of node"),
        ("--nnodes 2 --dist-init-addr h:1", "--nnodes 2: the ranks (--tp-size 1) cannot be spread evenly"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_ranks_is_refused(model_dir: Path, flags: str, message: str) -> None:
    args = parse_args(["--model-path", str(model_dir), *flags.split()])
    with pytest.raises(ConfigError) as caught:
        resolve(args, cuda_probe=lambda: "cuda" in flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_unsupported_models_are_refused(model_dir: Path, change: dict[str, Any], message: str) -> None:
    (model_dir / "config.json").write_text(json.dumps({**CONFIG_JSON, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(model_dir)
    assert str(caught.value).startswith(f"--model-path {model_dir}: ")


def test_an_empty_list_of_batch_sizes_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--cuda-graph-bs is empty: give batch sizes, or --disable-cuda"):
        resolve(ServerArgs.from_kwargs({"model_path": str(model_dir), "cuda_graph_bs": []}))


def test_model_path_is_required() -> None:
    with pytest.raises(ConfigError, match="--model-path is required"):
        resolve(parse_args([]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuda_graph_max_bs": 65536}, "1047 graphs, up to size 65536, .*lower --cuda-graph-max-bs or name fewer"),
        (
            {"cuda_graph_max_bs": 513, "disable_cuda_graph_padding": True},
            "513 graphs, .*lower --cuda-graph-max-bs or drop --disable-cuda-graph-padding",
        ),
        ({"cuda_graph_bs": tuple(range(1, 514))}, "513 graphs, up to size 513, would take minutes"),
        (
            {"piecewise_cuda_graph_max_tokens": 2**31 - 1, "chunked_prefill_size": 2**20},
            "graphs, up to size 1048576, .*lower --piecewise-cuda-graph-max-tokens",
        ),
    ],
)
def test_a_thousand_graphs_are_refused(model_dir: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(model_dir, gpu=True, max_running_requests=65536, **values)
    assert "\n" not in str(caught.value)


def test_the_least_that_serves_a_request_is_taken(model_dir: Path) -> None:
    assert resolved(model_dir, context_length=2).model.context_length == 2
    assert resolved(model_dir, max_total_tokens=64, page_size=32).max_total_tokens == 64


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is an empty directory; download the model into it"):
        resolved(tmp_path)
    (tmp_path / "README.md").write_text("a model, one day")
    with pytest.raises(ConfigError, match=r"no config\.json; --model-path wants"):
        resolved(tmp_path)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("pytorch_model.bin",), "only pickled weights (.bin, .pt), which can run code when read; convert them once"),
        (("consolidated.00.pth",), "only pickled weights (.bin, .pt), which can run code"),
        (("adapter_config.json", "adapter_model.safetensors"), "holds an adapter (LoRA), not a model; merge it into"),
        (("adapter_config.json", "adapter_model.bin"), "holds an adapter (LoRA), not a model; merge it into org/base"),
    ],
)
def test_a_folder_of_something_else_is_recognised_first(
    model_dir: Path, files: tuple[str, ...], message: str, with_config: bool
) -> None:
    (model_dir / "model.safetensors").unlink()
    if not with_config:
        (model_dir / "config.json").unlink()
    for name in files:
        text = '{"base_model_name_or_path": "org/base"}' if name == "adapter_config.json" else "weights"
        (model_dir / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolved(model_dir)
    assert str(caught.value).startswith(f"--model-path {model_dir}: {message}")
    assert "\n" not in str(caught.value)


def test_missing_weights_are_noticed_before_anything_starts(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    with pytest.raises(ConfigError, match=r"model\.safetensors: is a pointer of git-lfs.*; run git lfs pull"):
        resolved(model_dir)
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"no \*\.safetensors files; download the weights, or use --load-format dummy"
    ):
        resolved(model_dir)
    assert resolved(model_dir, load_format="dummy").server_args.load_format == "dummy"
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ConfigError, match=r"1 of 1 weight files are missing, first model-1\.safetensors"):
        resolved(model_dir)


def test_a_file_of_weights_instead_of_its_folder_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is a file; give the directory that holds it"):
        resolved(model_dir / "model.safetensors")


def test_trust_remote_code_helps_no_unknown_architecture(model_dir: Path) -> None:
    assert resolved(model_dir, trust_remote_code=True).server_args.trust_remote_code
    remote = {"architectures": ["NewForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}
    (model_dir / "config.json").write_text(json.dumps(CONFIG_JSON | remote))
    with pytest.raises(
        ConfigError, match="architecture NewForCausalLM is not supported .*; supported are .*LlamaForCausal"
    ):
        resolved(model_dir, trust_remote_code=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/dir", "no such directory"),
        ("./nothing", "no such directory"),
        ("a/b/c", "no such directory"),
        ("ends.with.dot.", "neither a directory here nor a hub id"),
    ],
)
def test_names_that_are_neither_directory_nor_hub_id(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_directory(name, "--model-path", None, None, weights=True)


def test_file_is_not_a_model(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is a file; give the directory that holds it"):
        model_directory(str(model_dir / "config.json"), "--model-path", None, None, weights=True)


def test_offline_hub_id_that_is_not_cached(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        model_directory("some-owner/some-model", "--model-path", None, str(tmp_path), weights=True)
    assert str(caught.value).startswith("--model-path some-owner/some-model: neither a directory here nor in the")


def _http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    import httpx

    request = httpx.Request("GET", "https://huggingface.co/x")
    return kind("first line\nsecond line", response=httpx.Response(404, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http_error(errors.GatedRepoError), "ask for access on its page and set HF_TOKEN"),
        (_http_error(errors.RepositoryNotFoundError), "neither a directory here nor a repository on the hub"),
        (_http_error(errors.RevisionNotFoundError), "the repository has no --revision v2"),
        (_http_error(errors.HfHubHTTPError), "the download failed (first line"),
        (OSError("disk full"), "the download failed (disk full); try again"),
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached"),
    ],
)
def test_hub_failures_become_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError) as caught:
        model_directory("some-owner/some-model", "--model-path", "v2", None, weights=True)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_download_says_so_in_a_log_and_draws_no_bars_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "/there")
    model_directory("owner/model", "--model-path", None, None, weights=True)
    assert capsys.readouterr().err == "Fetching owner/model from the hub, unless it is in the download cache\n"
    assert are_progress_bars_disabled()
    enable_progress_bars()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    model_directory("owner/model", "--model-path", None, None, weights=True)
    assert capsys.readouterr().err == ""
    assert not are_progress_bars_disabled()


def test_download_asks_only_for_what_is_read(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    asked: list[dict[str, Any]] = []

    def fetch(name: str, **kwargs: Any) -> str:
        asked.append({"name": name, **kwargs})
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    args = ServerArgs(
        model_path="owner/model", tokenizer_path="owner/tok", revision="v2", download_dir="/cache", device="cpu"
    )
    config = resolve(args)
    assert config.served_model_name == "owner/model"
    assert [(call["name"], call["revision"], call["cache_dir"]) for call in asked] == [
        ("owner/model", "v2", "/cache"),
        ("owner/tok", None, "/cache"),
    ]
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert "*.safetensors" not in asked[1]["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked[0]["allow_patterns"])
    resolve(dataclasses.replace(args, load_format="dummy", tokenizer_path=None))
    assert "*.safetensors" not in asked[2]["allow_patterns"]


def test_a_gguf_file_of_the_hub_is_fetched_with_its_other_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def fetch(name: str, **kwargs: Any) -> str:
        asked.append((name, kwargs["allow_patterns"], kwargs["ignore_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    (tmp_path / "Q4").mkdir()
    parts = [f"Q4/big-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for name in (*parts, "small.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    for given, first, names in ((parts[1], parts[0], parts), ("small.gguf", "small.gguf", ["small.gguf"])):
        path = model_directory(f"owner/model-GGUF/{given}", "--model-path", None, None, weights=True)
        assert path == str(tmp_path / first) and asked.pop() == ("owner/model-GGUF", names, [])
    with pytest.raises(ConfigError, match="owner/model/no.gguf: no such file here, and the repository has none of"):
        model_directory("owner/model/no.gguf", "--model-path", None, None, weights=True)


def test_device_is_probed_only_when_it_matters() -> None:
    def probe() -> bool:
        raise AssertionError("asked for a GPU")

    assert choose_device("cpu", probe) == "cpu"
    assert choose_device("auto", lambda: True) == choose_device("cuda", lambda: True) == "cuda"
    assert choose_device("auto", lambda: False) == "cpu"


def test_timeouts_come_from_the_flag_or_from_sglangs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeouts(**flags: object) -> tuple[float | None, float | None]:
        config = resolve(ServerArgs(model_path="demo", device="cpu", **flags))  # type: ignore[arg-type]
        return config.server_args.req_waiting_timeout, config.server_args.req_running_timeout

    assert timeouts() == (None, None)
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "1.5")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "-1")
    assert timeouts() == (1.5, None)
    assert timeouts(req_waiting_timeout=3.0, req_running_timeout=4.0) == (3.0, 4.0)
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="SGLANG_REQ_RUNNING_TIMEOUT=soon: give a number of seconds"):
        timeouts()


def test_who_names_a_priority_goes_before_those_that_do_not() -> None:
    for flags, low_first, default, threshold in (
        ({}, False, -(2**63), 10),
        ({"schedule_low_priority_values_first": True}, True, 2**63 - 1, 10),
        ({"default_priority_value": 4, "disable_priority_preemption": True}, False, 4, None),
    ):
        args = ServerArgs(model_path="demo", device="cpu", enable_priority_scheduling=True, **flags)  # type: ignore[arg-type]
        assert resolve(args).priority == PriorityConfig(low_first, default, threshold)
    assert resolve(ServerArgs(model_path="demo", device="cpu", default_priority_value=4)).priority is None


# --- images


@pytest.fixture(scope="module")
def reads_images() -> ModelConfig:
    settings = ImageSettings(
        patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=1 << 20, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    vision = SimpleNamespace(images=settings, placeholder=7, written=None, video=None)
    return cast(ModelConfig, SimpleNamespace(architecture="A", vision=vision))


def test_flags_of_images(reads_images: ModelConfig) -> None:
    rules = image_rules(ServerArgs(model_path="m"), reads_images)
    assert rules is not None and (rules.placeholder, rules.max_images, rules.domains) == (7, 32, frozenset())
    args = parse_args(
        ["m", "--limit-mm-per-prompt", '{"image": 3, "video": 0}', "--allowed-media-domains", "A.example.org", "b."]
        + ["--mm-process-config", '{"image": {"max_pixels": 300000}}']
    )
    rules = image_rules(args, reads_images)
    assert rules is not None and (rules.max_images, rules.domains) == (3, {"a.example.org", "b"})
    assert (rules.settings.min_pixels, rules.settings.max_pixels) == (56 * 56, 300_000)
    counted = image_rules(ServerArgs(limit_mm_data_per_request='{"image": {"count": 5}}'), reads_images)
    assert counted is not None and counted.max_images == 5
    assert (rules.max_videos, rules.max_frames, counted.max_videos, counted.max_frames) == (0, 256, 4, 256)
    limits = '{"video": {"count": 2, "num_frames": 8}}'
    counted = image_rules(ServerArgs(limit_mm_data_per_request=limits), reads_images)
    assert counted is not None and (counted.max_images, counted.max_videos, counted.max_frames) == (32, 2, 8)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"limit_mm_data_per_request": "3"}, "--limit-mm-data-per-request is 3: give a JSON object with image, video"),
        ({"limit_mm_data_per_request": '{"images": 3}'}, "--limit-mm-data-per-request has 'images'"),
        ({"limit_mm_data_per_request": '{"image": -1}'}, "image must be a number of images"),
        ({"limit_mm_data_per_request": "{image: 1}"}, "not valid JSON"),
        ({"limit_mm_data_per_request": '{"video": {"num_frames": "8"}}'}, "video must be a number of videos"),
        ({"allowed_media_domains": ("https://a.org/",)}, "give a host's name alone"),
        ({"allowed_media_domains": ("*",)}, "give a host's name alone"),
        ({"mm_process_config": '{"image": {"pixels": 1}}'}, "--mm-process-config has 'pixels'"),
        ({"mm_process_config": '{"image": {"max_pixels": "many"}}'}, "must be whole numbers"),
        ({"mm_process_config": '{"image": {"max_pixels": 5}}'}, "--mm-process-config: min_pixels"),
    ],
)
def test_wrong_flags_of_images(reads_images: ModelConfig, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        image_rules(ServerArgs(**flags), reads_images)
    if "is 3" in words:
        with pytest.raises(ConfigError, match="--limit-mm-data-per-request: Qwen3ForCausalLM reads text only"):
            resolve(ServerArgs(model_path="demo", device="cpu", **flags))
