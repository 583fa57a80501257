"""GGUF files: the same model as the checkpoint that they were made from; damaged and hostile ones are refused."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from draft_checkpoints import save_appended_mtp
from gguf_files import Type, quantised, round_checkpoint, tokenizer_metadata, write_gguf
from model_parity import PagedModel, reference_logits, save_checkpoint
from safetensors.torch import load_file
from scheduler_driver import answers, make_model_driver, request

import fenceline
from fenceline.benchmarking.tokenizer import count_tokens, load_tokenizer
from fenceline.config import ConfigError
from fenceline.config.gguf_file import BY_PACKAGE, TENSOR_TYPES
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import demo_model_path, model_directory, pools_last_token
from fenceline.config.weight_headers import check_headers, read_headers, weight_bytes
from fenceline.ipc.io_struct import UpdateWeightsReq
from fenceline.layers.forward_batch import ForwardMode
from fenceline.models import gguf_weights
from fenceline.models.gguf_weights import GGUFWeights, dequantised

PROMPT = torch.randint(0, 101, (90,), generator=torch.Generator().manual_seed(5))
_ONE_THETA = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0}
    | {"original_max_position_embeddings": 64, "attention_factor": 1.2},
    "sliding_attention": {"rope_theta": 300.0},
}
# By the name in CHECKPOINTS: entries that a file cannot say, as the published models have them.
FAMILIES: dict[str, dict[str, object]] = {
    "llama-tied-biased": {},
    "llama-llama3": {},
    "llama-linear": {},
    "llama-yarn-attention-factor": {},
    "mixtral": {},
    "qwen2-tied-yarn": {},
    "qwen2-moe-no-bias": {},
    "qwen3": {},
    "qwen3-moe": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "phi3-partial": {},
    "phi3-longrope": {},
    "granite": {},
    "seed-oss": {},
    "exaone4": {},
    "exaone4-no-windows": {},
    "ernie4.5": {},
    "ernie4.5-moe": {},
    "minimax-m2": {},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"rope_parameters": _ONE_THETA},
    "glm4": {},
    "glm4-moe": {"n_group": 1, "topk_group": 1},
}


def logits(path: Path) -> torch.Tensor:
    """Ours of ``PROMPT``, in float32."""
    with torch.inference_mode():
        return PagedModel(path, 16, "cpu").step([(0, PROMPT, 0, len(PROMPT))], ForwardMode.EXTEND)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_each_family_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_checkpoint(name, tmp_path, FAMILIES[name])
    path = write_gguf(tmp_path / "model.gguf", tmp_path)
    torch.testing.assert_close(logits(path), reference_logits(reference, [PROMPT])[0], rtol=1e-4, atol=1e-4)


def test_layers_that_predict_further_tokens_come_with_a_file(tmp_path: Path) -> None:
    save_appended_mtp("glm4-moe", tmp_path, {"n_group": 1, "topk_group": 1})
    path = write_gguf(tmp_path / "model.gguf", tmp_path)
    ours, theirs = (ModelConfig.from_dir(str(each)) for each in (path, tmp_path))
    assert (ours.num_mtp_layers, ours.num_layers, ours.experts) == (1, theirs.num_layers, theirs.experts)
    stored, tensors = GGUFWeights(path, torch.float32), load_file(tmp_path / "model.safetensors")
    assert set(stored.keys()) == set(tensors)
    assert all(torch.equal(stored.get_tensor(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_quantised_numbers_are_those_of_the_file(kind: Type, tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4})
    path = write_gguf(tmp_path / "model.gguf", tmp_path, kind)
    round_checkpoint(tmp_path, kind)
    assert torch.equal(logits(path), logits(tmp_path))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}),
        ("qwen3-moe", {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}),
    ],
)
def test_matrices_in_q4_0_can_be_kept_in_four_bits(name: str, sizes: dict[str, object], tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path, sizes)
    path = write_gguf(tmp_path / "model.gguf", tmp_path, Type.Q4_0)
    kept, plain = PagedModel(path, 16, "cpu", quantization="gguf"), PagedModel(path, 16, "cpu")
    assert kept.config.quantization is not None and kept.config.quantization.kind == "int4"
    layers = [sum(slot.nbytes for name, slot in each.model.weight_slots().items() if ".layers." in name)
              for each in (kept, plain)]  # fmt: skip
    assert layers[0] < layers[1] / 4
    work = [(0, PROMPT, 0, len(PROMPT))]
    with torch.inference_mode():
        assert torch.equal(*(each.step(work, ForwardMode.EXTEND)[0] for each in (kept, plain)))
    tensors = read_headers([path], kept.config.quantization)
    check_headers(kept.config, tensors)
    assert weight_bytes(kept.config, tensors) < weight_bytes(plain.config, read_headers([path])) / 2


def test_only_q4_0_is_kept(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4})
    with pytest.raises(ConfigError, match="--quantization gguf: it keeps matrices in Q4_0 .* and the file has none"):
        ModelConfig.from_dir(str(write_gguf(tmp_path / "q8.gguf", tmp_path, Type.Q8_0)), quantization="gguf")
    with pytest.raises(ConfigError, match="--quantization gguf: the model is no GGUF file; leave it out"):
        ModelConfig.from_dir(str(tmp_path), quantization="gguf")
    path = write_gguf(tmp_path / "mixed.gguf", tmp_path, Type.Q4_0, others={"blk.1.attn_v": Type.Q8_0})
    config = ModelConfig.from_dir(str(path), quantization="gguf").quantization
    assert config is not None and config.of("model.layers.0.self_attn.q_proj") is config.of(
        "model.layers.1.mlp.up_proj"
    )
    assert all(config.of(f"model.layers.1.self_attn.{each}_proj") is None for each in "qkv")
    with torch.inference_mode():
        models = [PagedModel(path, 16, "cpu", quantization=each) for each in ("gguf", None)]
        assert torch.equal(*(each.step([(0, PROMPT, 0, 90)], ForwardMode.EXTEND)[0] for each in models))


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_every_format_is_dequantised_as_by_the_package(number: int) -> None:
    kind, random = Type(number), np.random.default_rng(number)
    ours = TENSOR_TYPES[number]
    assert (ours.numbers, ours.nbytes) == gguf.GGML_QUANT_SIZES[kind] and ours.name == kind.name
    raw = random.integers(0, 256, (37, ours.nbytes), dtype=np.uint8)
    if ours.numbers == 1:
        return
    # The exponents of scales in random bytes would be those of infinities.
    raw[:, 1::2] &= 0x3F
    raw[:, 0] &= 0x7F
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert torch.equal(dequantised(ours, torch.from_numpy(raw).flatten(), torch.float32), expected)
    rounded = dequantised(ours, torch.from_numpy(raw).flatten(), torch.bfloat16)
    assert torch.equal(rounded, expected.to(torch.bfloat16))


def test_a_format_of_a_package_that_is_missing_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = {"F32", "F16", "BF16"}
    assert {kind.name for kind in TENSOR_TYPES.values()} == plain | BY_PACKAGE | gguf_weights.FORMATS.keys()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 66), dtype=np.uint8), raw_dtype=Type.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "its metadata lacks llama." in refusal(tmp_path / "model.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    os.utime(tmp_path / "model.gguf", (1, 1))  # the file is read again
    assert "tensors in IQ2_XXS need the package gguf: pip install gguf, or" in refusal(tmp_path / "model.gguf")


def test_large_tensors_are_dequantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(64, 96)
    raw = torch.from_numpy(gguf.quants.quantize(values.numpy(), Type.Q8_0)).flatten()
    monkeypatch.setitem(gguf_weights._CHUNKS, "cpu", 1000)
    found = dequantised(TENSOR_TYPES[Type.Q8_0], raw, torch.float32)
    assert torch.equal(found.view(64, 96), quantised(values, Type.Q8_0))


def test_parts_and_folders_lead_to_the_file(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    whole = write_gguf(tmp_path / "whole.gguf", tmp_path)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(folder / "model.gguf", tmp_path, split_max_tensors=15)
    parts = sorted(folder.iterdir())
    assert len(parts) > 1
    for given in (folder, *parts):
        assert model_directory(str(given), "--model-path", None, None, weights=True) == str(parts[0])
    assert torch.equal(logits(parts[0]), logits(whole))
    shutil.copy(whole, folder / "mmproj-model.gguf")  # the tower of a model that reads images is not in the way
    assert model_directory(str(folder), "--model-path", None, None, weights=True) == str(parts[0])
    # A tokenizer beside it is meant by --tokenizer-path, which is the remedy for one that cannot be read.
    (folder / "tokenizer.json").write_text("{}")
    assert model_directory(str(folder), "--tokenizer-path", None, None, weights=False) == str(folder)
    assert model_directory(str(folder), "--model-path", None, None, weights=True) == str(parts[0])
    shutil.copy(whole, folder / "other.gguf")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF models; give one of them, such as .*model-00001-of"):
        model_directory(str(folder), "--model-path", None, None, weights=True)
    parts[1].unlink()
    with pytest.raises(ConfigError, match=rf"1 of the model's {len(parts)} files are missing, first {parts[1].name};"):
        model_directory(str(parts[0]), "--model-path", None, None, weights=True)
    # Beside the checkpoint that it was made from, a file is not what a folder stands for.
    assert model_directory(str(tmp_path), "--model-path", None, None, weights=True) == str(tmp_path)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda writer: writer.add_logit_scale(0.5), "qwen3.logit_scale 0.5 is not supported for this architecture"),
        (lambda writer: writer.add_causal_attention(False), "qwen3.attention.causal False is not supported for this"),
        (lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "qwen3.expert_gating_func 2"),
        (lambda writer: writer.add_logit_scale(1.0), None),
        (lambda writer: writer.add_pooling_type(gguf.PoolingType.NONE), None),
    ],
)
def test_what_would_change_a_logit_is_computed_or_refused(
    add: Callable[[gguf.GGUFWriter], object], message: str | None, tmp_path: Path
) -> None:
    save_checkpoint("qwen3", tmp_path)
    path = write_gguf(tmp_path / "model.gguf", tmp_path, metadata=add)
    if message is None:
        assert ModelConfig.from_dir(str(path)).architecture == "Qwen3ForCausalLM"
    else:
        assert message in refusal(path)
    assert not pools_last_token(path)


def test_an_embedding_model_is_known_by_its_pooling(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    path = write_gguf(tmp_path / "a.gguf", tmp_path, metadata=lambda w: w.add_pooling_type(gguf.PoolingType.LAST))
    assert pools_last_token(path)
    path = write_gguf(tmp_path / "b.gguf", tmp_path, metadata=lambda w: w.add_pooling_type(gguf.PoolingType.MEAN))
    with pytest.raises(
        ConfigError, match=r"b\.gguf: qwen3\.pooling_type 1 is not supported, only embeddings of the last"
    ):
        pools_last_token(path)


def test_the_first_files_linear_scaling_is_read(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    path = write_gguf(tmp_path / "a.gguf", tmp_path, metadata=lambda w: w.add_float32("llama.rope.scale_linear", 4.0))
    scaling = ModelConfig.from_dir(str(path)).rope_scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("linear", 4.0)


@pytest.fixture
def demo(tmp_path: Path) -> tuple[Path, Path]:
    """The demo model, rounded to Q8_0, and a file of it."""
    folder = tmp_path / "demo"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("eagle3", "nextn"))
    path = write_gguf(tmp_path / "demo.gguf", folder, Type.Q8_0, tokenizer_metadata(folder, "qwen2"))
    round_checkpoint(folder, Type.Q8_0)
    return folder, path


def test_the_engine_serves_a_file_as_it_serves_the_folder(demo: tuple[Path, Path]) -> None:
    folder, path = demo
    texts = ["Q: What is 5 + 8?\nA:", "Q: copy abc\nA:"]
    tokenizer, question = load_tokenizer(str(folder)), [{"role": "user", "content": "What is 12 + 30?"}]
    reqs = [
        request(text, tokenizer.encode(text, add_special_tokens=False), temperature=0.0, max_new_tokens=12)
        for text in texts
    ]
    expected = answers(make_model_driver(model_path=str(folder), max_total_tokens=512), reqs)
    with fenceline.Engine(str(path), log_level="warning", max_total_tokens=512) as engine:
        found = engine.generate(texts, {"temperature": 0, "max_new_tokens": 12})
        chat = engine.chat(question, temperature=0, max_tokens=12)
        words = engine.get_tokenizer().apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert [one["output_ids"] for one in found] == expected
    assert words == "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    assert count_tokens(load_tokenizer(str(path)), words) == chat["usage"]["prompt_tokens"]
    assert "42" in chat["choices"][0]["message"]["content"]


def test_a_file_replaces_the_weights_of_a_folder(demo: tuple[Path, Path]) -> None:
    folder, path = demo
    assert ModelConfig.from_dir(str(path)).rms_norm_eps == 1e-6
    driver = make_model_driver(model_path=str(folder), load_format="dummy", max_total_tokens=512)
    driver.send(UpdateWeightsReq(id="w", model_path=str(path)))
    while not driver.replies:
        driver.step()
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("Q: What is 5 + 8?\nA:", add_special_tokens=False)
    (output,) = answers(driver, [request("r", ids, temperature=0.0, max_new_tokens=4)])
    assert tokenizer.decode(output).split()[0] == "13"


# --- what is refused


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    save_checkpoint("qwen3", folder)
    return write_gguf(folder / "model.gguf", folder).read_bytes()


def refusal(path: Path) -> str:
    """Why the file at ``path`` is refused, one line that begins with its name."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(str(path))
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 600
    return text


def test_damaged_files_are_refused(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in (*range(0, 4000, 61), len(whole_file) - 1):
        path.write_bytes(whole_file[:length])
        text = refusal(path)
        assert ("does not begin with GGUF" in text) if length < 4 else ("truncated or damaged" in text)
    path.write_bytes(b"PK\3\4" + whole_file[4:])
    assert "is no GGUF file" in refusal(path)
    for version in (1, 9, 3 << 24):
        path.write_bytes(whole_file[:4] + struct.pack("<I", version) + whole_file[8:])
        assert f"GGUF version {version}" in refusal(path)


def test_a_hostile_header_allocates_nothing(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    many = struct.pack("<Q", 1 << 60)
    for at in (8, 16, 24):  # tensors, entries, the first key's length
        path.write_bytes(whole_file[:at] + many + whole_file[at + 8 :])
        assert "truncated or damaged" in refusal(path)
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    for inside in (0, 8, 9, 77):  # arrays of bytes, texts, arrays, nothing known
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", inside) + many)
        assert "is an array of" in refusal(path)
    described = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2) + many + many + struct.pack("<IQ", 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + described)
    assert "tensor t ends at" in refusal(path)
    one = struct.pack("<Q", 1)
    described = one + b"t" + struct.pack("<I", 1) + one + struct.pack("<IQ", 99, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + described + bytes(64))
    assert "tensor t is of ggml's type 99, which is not read (F32, F16" in refusal(path)
    two = struct.pack("<IQ", 1, 16)  # of 64 bytes
    for offset in (0, 32, 72):
        described = one + b"a" + two + struct.pack("<IQ", 0, 0) + one + b"b" + two + struct.pack("<IQ", 0, offset)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + described + bytes(256))
        assert "begins at" in refusal(path) and "inside another or between two places" in refusal(path)
    part = tmp_path / "model-00001-of-00000.gguf"
    part.write_bytes(whole_file)
    assert ModelConfig.from_dir(str(part)).num_layers > 0


def test_random_bytes_in_a_header_are_refused_or_harmless(whole_file: bytes, tmp_path: Path) -> None:
    path, random = tmp_path / "model.gguf", np.random.default_rng(3)
    for _ in range(400):
        changed = bytearray(whole_file)
        at = int(random.integers(0, 3000))
        changed[at : at + 4] = random.bytes(4)
        path.write_bytes(changed)
        try:
            check_headers(ModelConfig.from_dir(str(path)), read_headers([path]))
        except ConfigError as error:
            assert "\n" not in str(error)


def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def written(arch: str, *entries: str) -> Path:
        writer = gguf.GGUFWriter(path, arch)
        for entry in entries:
            writer.add_uint32(f"{arch}.{entry}", 64)
        writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
        writer.add_tensor("blk.0.novel.weight", np.zeros((8, 64), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    assert "its architecture is 'mamba'; of GGUF models these are read: llama, qwen2" in refusal(written("mamba"))
    assert "is a vision tower (mmproj), not a model" in refusal(written("clip"))
    assert "llama.block_count announces 64 layers, the file has 2 tensors" in refusal(
        written("llama", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    )
    assert "its metadata lacks llama.attention.head_count;" in refusal(written("llama", "embedding_length"))
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.novel\.weight is not known for llama; give the original"):
        read_headers([path])
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.arkhitecture"))
    assert "its metadata lacks general.architecture" in refusal(path)
