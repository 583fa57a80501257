"""benchmark/h200: what can be wrong without a GPU: the tokenizer, the loads, the list of guards that are taken out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fenceline.benchmarking.args import BenchArgs, build_parser, image_size
from fenceline.frontend.tokenizer import load_tokenizer

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


def test_loads_are_what_bench_serving_takes() -> None:
    from run import ALL_LOADS

    for key, load in ALL_LOADS.items():
        for one in (load, load.eighth()):
            args = BenchArgs.from_namespace(build_parser().parse_args(one.flags(100)))
            assert (args.dataset_name == "image") == (load.images != "none") == key.startswith(("image", "seen"))
            assert (args.image_pool is not None) == key.startswith("seen") == (not args.flush_cache)
            assert image_size(args.image_resolution) == (720, 1280) or args.dataset_name == "random-ids"
