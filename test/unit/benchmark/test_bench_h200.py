"""benchmark/h200: what can be wrong without a GPU: the tokenizer, the table, the list of guards that are taken out."""

from __future__ import annotations

import json
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fenceline.benchmarking.args import BenchArgs, build_parser, image_size
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.frontend.tokenizer import load_tokenizer
from fenceline.layers.attention.flashinfer_library import AttentionShape, InstalledLibrary
from fenceline.layers.context import Shard, torch_context
from fenceline.models.families import make_model

FOLDER = Path(__file__).parents[3] / "benchmark" / "h200"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_tokenizer_is_as_large_as_the_real_one(tmp_path: Path) -> None:
    from shapes import NUM_PLAIN_TOKENS, make_model_dir

    folder = make_model_dir("0.6b", tmp_path)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 151669
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|></think>") == [151643, 151644, 151645, 151668]
    assert len(tokenizer.special_ids) == 14
    text = "Twelve foxes, and 30 dogs."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.decode(list(range(1000, NUM_PLAIN_TOKENS, 1000)))) > 400
    assert tokenizer.decode([151935]) == ""  # the model's padding of the vocabulary


def test_the_tokenizer_belongs_to_a_model_of_fewer_tokens(tmp_path: Path) -> None:
    from shapes import make_model_dir, num_plain_tokens

    tokenizer = load_tokenizer(make_model_dir("llama-8b", tmp_path))
    assert num_plain_tokens("llama-8b") < tokenizer.vocab_size <= 128256
    text = "Twelve foxes, and 30 dogs."
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("shape", "layers", "parameters"), [("0.6b", 28, 0.596e9), ("8b", 36, 8.19e9)])
def test_shapes_are_the_real_ones(tmp_path: Path, shape: str, layers: int, parameters: float) -> None:
    from shapes import make_model_dir

    model = resolve(ServerArgs(model_path=str(make_model_dir(shape, tmp_path)), load_format="dummy")).model
    assert (model.num_layers, model.vocab_size, model.context_length) == (layers, 151936, 40960)
    heads = model.num_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    assert layers * layer + embeddings == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "parameters"), [("glm-4.7-flash", 29.9e9), ("deepseek-v3-cut", 95.7e9), ("glm-5-cut", 82.1e9)]
)
def test_shapes_with_latents_fit_on_one_gpu(tmp_path: Path, shape: str, parameters: float) -> None:
    """With their draft, and at 64 requests of 32,768 tokens with FP8 latents, in 88 % of 139 GiB."""
    from shapes import kv_bytes_per_token, make_model_dir

    flags = ServerArgs(
        model_path=str(make_model_dir(shape, tmp_path)), load_format="dummy", speculative_algorithm="NEXTN"
    )
    model = resolve(flags).model
    context = torch_context(Shard(), torch.bfloat16)
    if model.quantization is not None:
        context = replace(context, format=model.quantization.on_line())
    with torch.device("meta"):
        layers = make_model(replace(model, context_length=1), context)
    assert sum(math.prod(slot.full_shape) for slot in layers.weight_slots().values()) == pytest.approx(parameters, 0.01)
    draft, latents = layers.nbytes / model.num_layers * 1.2, 64 * 32_768 * kv_bytes_per_token(shape) / 2
    assert (layers.nbytes + draft + latents) / 2**30 < 0.88 * 139
    assert kv_bytes_per_token(shape) == model.num_layers * 2 * (576 + (128 if model.indexer else 0))


def test_table_row_compares_with_the_reference() -> None:
    from run import Figures, Row, graph_summary, table_row

    row = Row("8b", "32", "load", Figures(5799.2, 60.0, 5.0), "10/10")
    assert table_row(row) == "| 8b | load | 5,799 | 5,272 | 1.10 | 60.0 | 85 | 5.00 | 5.9 | 1.18 |  |  |  |  | 10/10 |"
    searched = replace(row, figures=Figures(5799.2, 60.0, 5.0, 11.5, 9.0, 40.0, 11.25))
    assert table_row(searched).endswith("| 1.18 | 11.50 | 9.00 | 40.00 | 11.25 | 10/10 |")
    assert table_row(Row("8b", "32", "load", None, error="died")) == "| 8b | load | failed |"
    graphs = {"replays": 7, "eligible_steps": 9, "fallbacks": {"size": 2}, "repairs": {}}
    assert graph_summary({"internal_states": [{"cuda_graphs": graphs}]}) == "7/9 {'size': 2}"
    assert graph_summary({"internal_states": [{"cuda_graphs": None}]}) == ""
    both = {"cuda_graphs": graphs, "piecewise_cuda_graphs": graphs | {"fallbacks": {}}}
    assert graph_summary({"internal_states": [both]}) == "7/9 {'size': 2}, 7/9"
    assert graph_summary(None) == ""


def test_a_schema_against_no_schema_is_compared_round_by_round() -> None:
    from constrained import Run, schema, table_row

    def run(side: str, round_: int, tok_s: float, ttft_ms: float) -> Run:
        return Run("8b", "64", side, round_, tok_s, ttft_ms, ttft_ms, 5.0, 6.0, 100, "")

    runs = [run("schema", 0, 90, 14), run("free", 0, 100, 10), run("free", 1, 200, 20), run("schema", 1, 196, 22)]
    runs = sorted(runs, key=lambda one: one.round)
    assert table_row(runs) == (
        "| 8b | 64 at a time | 150 | 143 | 0.940 (0.900) | 15.00 | 18.00 | 3.00 | 5.000 | 5.000 | 6.00 | 6.00 |"
    )
    least = '{"id":1,"name":"","kind":"created","tags":[],"parent":null}'
    punctuation = sum(not char.isalnum() for char in least)  # each is a token of its own
    assert schema(256)["minItems"] * punctuation > 256  # type: ignore[operator]


def test_every_guard_that_is_taken_out_is_there() -> None:
    from unguarded import STUBS

    for owner, name, stub in STUBS:
        assert name in vars(owner), f"{owner.__name__}.{name}"
        assert vars(owner)[name] is not stub


def test_configs_name_no_code() -> None:
    for path in FOLDER.glob("models/*/config.json"):
        config = json.loads(path.read_text())
        assert config["architectures"][0] in (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "GptOssForCausalLM",
            "LlamaForCausalLM",
            "MiniCPMSALAForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
        )
        assert "auto_map" not in config


def test_the_shape_with_lightning_attention_is_the_published_one() -> None:
    published = json.loads((FOLDER.parents[1] / "test" / "support" / "published_configs.json").read_text())
    ours = json.loads((FOLDER / "models" / "minicpm-sala" / "config.json").read_text())
    assert ours | {"auto_map": published["MiniCPM-SALA"]["config"]["auto_map"]} == published["MiniCPM-SALA"]["config"]


def test_the_llama_shape_is_the_real_one(tmp_path: Path) -> None:
    from shapes import kv_bytes_per_token, make_model_dir, num_plain_tokens

    model = resolve(ServerArgs(model_path=str(make_model_dir("llama-8b", tmp_path)), load_format="dummy")).model
    assert (model.num_layers, model.num_kv_heads, model.head_dim, model.vocab_size) == (32, 8, 128, 128256)
    assert kv_bytes_per_token("llama-8b") == 128 * 1024
    assert num_plain_tokens("llama-8b") == 128000
    assert num_plain_tokens("0.6b") == 151643


def test_the_shape_that_reads_images_is_the_real_one(tmp_path: Path) -> None:
    """And its loads are those of a text model of the same layers, and images of 1,196 tokens."""
    from run import IMAGE_LOADS, LOADS, loads_of
    from shapes import kv_bytes_per_token, make_model_dir

    folder = make_model_dir("qwen2.5-vl-7b", tmp_path)
    model = resolve(ServerArgs(model_path=str(folder), load_format="dummy")).model
    assert model.vision is not None and model.vision.images.num_tokens(1280, 720) == 1196
    with torch.device("meta"):
        layers = make_model(replace(model, context_length=1), torch_context(Shard(), torch.bfloat16))
    assert sum(math.prod(slot.full_shape) for slot in layers.weight_slots().values()) == pytest.approx(8.29e9, 0.01)
    assert kv_bytes_per_token("qwen2.5-vl-7b") == kv_bytes_per_token("qwen2.5-7b") == 56 * 1024
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}
    ids = load_tokenizer(folder).encode(ChatTemplate(template, {}).render([message]))
    assert ids.count(model.vision.placeholder) == 1
    assert loads_of("qwen2.5-7b") == list(LOADS) and loads_of("qwen2.5-vl-7b") == list(IMAGE_LOADS | LOADS)


def test_loads_are_what_bench_serving_takes() -> None:
    from run import ALL_LOADS

    for key, load in ALL_LOADS.items():
        for one in (load, load.eighth()):
            args = BenchArgs.from_namespace(build_parser().parse_args(one.flags(100)))
            assert (args.dataset_name == "image") == (load.images != "none") == key.startswith(("image", "seen"))
            assert (args.image_pool is not None) == key.startswith("seen") == (not args.flush_cache)
            assert image_size(args.image_resolution) == (720, 1280) or args.dataset_name == "random-ids"


def test_the_table_of_two_servers_has_medians_and_ratios() -> None:
    from compare import GOODPUT_HEADER, HEADER, table_row
    from run import LOADS, Figures, Row

    def runs(*times: tuple[float, float, float] | None) -> list[Row]:
        figures = [Figures(*three, None, 8.0, 40.0) if three else None for three in times]
        return [Row("8b", "1", "load", f) for f in figures]

    before = runs((100.0, 10.0, 4.0), (120.0, 11.0, 4.2), (90.0, 30.0, 5.0))
    after = runs((110.0, 22.0, 2.1), None, (110.0, 22.0, 2.1))
    row = table_row("8b", "1", {"before": before, "after": after})
    more = "| 8.00 | 8.00 | 1.000 | 40.00 | 40.00 | 1.000 |"
    assert row == f"| 8b | {LOADS['1']} | 100 | 110 | 1.100 | 11.0 | 22.0 | 2.000 | 4.200 | 2.100 | 0.500 {more}"
    assert table_row("8b", "1", {"before": before, "after": runs(None)}).endswith("| failed |")
    assert row.count("|") == HEADER.count("|")
    one = Row("8b", "1", "load", Figures(100.0, 10.0, 4.0, None, 8.0, 40.0, 10.0))
    none = replace(one, figures=Figures(100.0, 10.0, 4.0, None, 8.0, 40.0, 0.0))
    searched = table_row("8b", "1", {"before": [one], "after": [none]})
    assert searched.endswith("| 10.00 | 0.00 | 0.000 |")
    assert searched.count("|") == (HEADER + GOODPUT_HEADER).count("|")
    assert table_row("8b", "1", {"before": [none], "after": [one]}).endswith("| 0.00 | 10.00 |  |")


_COMPILING_SERVER = """
import http.server, os, sys, threading
port, starts = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[sys.argv.index("--starts") + 1]
with open(starts, "a+") as file:
    file.write("x")
    file.seek(0)
    is_first = file.read() == "x"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if is_first:  # once it is healthy
            print("FlashInfer's module batch_prefill is compiled", flush=True)

if is_first:
    print("Compiling FlashInfer's module batch_prefill in the background", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_says_what_the_benchmark_waits_for(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import bench_server

    def build(verbose: bool, need_lock: bool) -> None:
        if fails:
            raise RuntimeError("no compiler")

    spec = SimpleNamespace(name="batch_decode", is_compiled=False, build=build)
    library = SimpleNamespace(gen_batch_decode_module=lambda *args: spec)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention.modules", library)
    monkeypatch.setattr("os.setpriority", lambda *args: None)  # it would be that of the tests on some systems
    with caplog.at_level("INFO"):
        InstalledLibrary().decode_module(AttentionShape(2, 1, 64, 1, torch.bfloat16)).begin_to_compile()
        for thread in threading.enumerate():
            if thread.name == "compile":
                thread.join()
    begun, ended = caplog.messages
    assert bench_server._COMPILING.search(begun) and bench_server._COMPILED.search(ended)
    assert ("does not compile" in ended) == fails


def test_a_server_that_compiles_is_started_again(tmp_path: Path) -> None:
    from bench_server import BenchServer

    starts, log = tmp_path / "starts", tmp_path / "log"
    for _ in range(2):  # a log may go on
        with BenchServer(tmp_path, ["--starts", str(starts)], log, 60.0, ("-c", _COMPILING_SERVER)) as server:
            assert server.alive and starts.read_text() == "xx"
        starts.unlink()


def test_a_server_that_ends_while_it_starts_is_reported(tmp_path: Path) -> None:
    from bench_server import BenchServer, ServerDied

    with (
        pytest.raises(ServerDied, match="ended while starting\n  \\| no model"),
        BenchServer(tmp_path, [], tmp_path / "log", launcher=("-c", "print('no model')")),
    ):
        pass
