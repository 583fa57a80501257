"""What is refused from the headers of a checkpoint's files, before a process is started: damage, another model's
tensors, and weights that do not fit in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import save_checkpoint
from quantized_checkpoints import FP8_FORMATS, INT4_FORMATS, INT8_FORMATS, write_published
from safetensors.torch import load_file, save_file

from fenceline.config import ConfigError, engine_config
from fenceline.config.engine_config import resolve
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import weight_files
from fenceline.config.server_args import ServerArgs
from fenceline.config.weight_headers import read_headers, weight_bytes
from fenceline.layers.context import Shard, torch_context
from fenceline.models.loader import load_model

Header = dict[str, Any]
FORMATS = FP8_FORMATS | INT8_FORMATS | INT4_FORMATS


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Llama in one file."""
    save_checkpoint("llama", tmp_path)
    tensors = {name: tensor for path in weight_files(tmp_path) for name, tensor in load_file(path).items()}
    for path in (*weight_files(tmp_path), tmp_path / "model.safetensors.index.json"):
        path.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def resolve_here(folder: Path, gpu: bool = False, **flags: object) -> None:
    resolve(ServerArgs.from_kwargs({"model_path": str(folder), **flags}), cuda_probe=lambda: gpu)


def refused(folder: Path, gpu: bool = False, **flags: object) -> str:
    """The one line with which a start is refused, before any process."""
    with pytest.raises(ConfigError) as caught:
        resolve_here(folder, gpu, **flags)
    text = str(caught.value)
    assert "\n" not in text
    return text


def rewrite(path: Path, change: Callable[[Header], object]) -> None:
    """The file with another header, which ``change`` makes or modifies in place."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    made = change(header)
    text = (json.dumps(header) if made is None else str(made)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_a_truncated_file_is_refused(checkpoint: Path, keep: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: truncated or damaged (" in refused(checkpoint)


def _place(name: str, first: int, last: int) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        header[name]["data_offsets"] = [first, last]

    return change


def _set(name: str, **values: object) -> Callable[[Header], None]:
    return lambda header: header[name].update(values)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda header: "[]",
        lambda header: "{",
        lambda header: "[" * 100_000,
        lambda header: header.update(extra=7),
        _set(NORM, dtype=None),
        _set(NORM, shape=[-48]),
        _set(NORM, shape=[True]),
        _set(NORM, data_offsets=[0]),
        _set(NORM, shape=[2**62, 2**62]),
        _set(NORM, dtype="F16"),
        _place(NORM, 200, 8),
        _place(NORM, 0, 192),
        _place(NORM, 10**15, 10**15 + 192),
        lambda header: header.pop(NORM) and None,
        lambda header: header.pop("lm_head.weight") and None,
    ],
)
def test_a_header_that_cannot_be_true_is_refused(change: Callable[[Header], object], checkpoint: Path) -> None:
    rewrite(checkpoint / "model.safetensors", change)
    text = refused(checkpoint)
    assert "model.safetensors: truncated or damaged" in text and "download" in text


def test_a_header_longer_than_the_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    for length in (path.stat().st_size - 7, 2**63):
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
        assert "model.safetensors: truncated or damaged" in refused(checkpoint)


def test_a_tensor_in_two_files_is_refused(checkpoint: Path) -> None:
    save_file({NORM: torch.ones(48)}, checkpoint / "more.safetensors")
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    assert f"{NORM} comes twice" in refused(checkpoint)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("lm_head.weight", torch.zeros(100, 48), r"[100, 48], config.json asks for [101, 48]"),
        ("model.layers.1.self_attn.k_proj.weight", torch.zeros(48, 48), r"config.json asks for [16, 48]"),
        (NORM, torch.zeros(48, dtype=torch.int8), f"weight {NORM} is I8, and config.json names no quantisation"),
    ],
)  # fmt: skip
def test_tensors_of_another_model_are_refused(name: str, tensor: torch.Tensor, said: str, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)
    assert said in refused(checkpoint)


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear", "lfm2"])
def test_layers_with_states_have_projections_of_their_own(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    resolve_here(tmp_path)


def test_a_quantised_head_and_columns_out_of_place_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_key_value_heads": 2}
    save_checkpoint("qwen3", tmp_path / "plain", sizes | {"num_attention_heads": 8})
    for name in ("gptq", "gptq-act-order-in-place", "gptq-rows-act-order"):
        write_published(tmp_path / "plain", folder := tmp_path / name, FORMATS[name])
        resolve_here(folder)
    path, key = tmp_path / "gptq" / "model.safetensors", "model.layers.0.mlp.down_proj.g_idx"
    weights = load_file(path)
    save_file(weights | {key: weights[key].flip(0)}, path)
    assert f"{key}: columns are in the order of activations (desc_act)" in refused(tmp_path / "gptq")
    head = weights.pop("lm_head.weight")
    save_file(weights | {"lm_head.qweight": head.int()}, path)
    assert "lm_head.qweight: a quantised head is not supported" in refused(tmp_path / "gptq")


def test_dummy_weights_need_no_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"")
    resolve_here(checkpoint, load_format="dummy")


def test_a_damaged_draft_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    save_checkpoint("llama", draft := tmp_path / "draft")
    flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    resolve_here(checkpoint, **flags)
    path = weight_files(draft)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path.name}: truncated or damaged" in refused(checkpoint, **flags)


@pytest.mark.parametrize("name", ["plain", "bfloat16", "fp8", "int4", *FORMATS, "gpt-oss", "nemotron-h-moe"])
def test_the_bytes_of_weights_are_known_before_they_are_loaded(name: str, tmp_path: Path) -> None:
    """Never more than they take, and not much less: scales that are stored in 16 bits take 32."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    if name in ("gpt-oss", "nemotron-h-moe"):
        save_checkpoint(name, tmp_path)
    else:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        save_checkpoint("qwen3", tmp_path / "plain", sizes | heads)
        write_published(tmp_path / "plain", tmp_path, FORMATS.get(name, FP8_FORMATS["fp8-tensor"]))
    folder = tmp_path / "plain" if name in ("plain", "bfloat16", "fp8", "int4") else tmp_path
    asked, dtype = name if name in ("fp8", "int4") else None, "bfloat16" if name == "bfloat16" else "float32"
    config = ModelConfig.from_dir(str(folder), dtype=dtype, quantization=asked)
    context = torch_context(Shard(), getattr(torch, dtype))
    model = load_model(config, "auto", torch.device("cpu"), context, 0, progress=False)
    known = weight_bytes(config, read_headers(weight_files(folder)))
    assert 0.8 * model.nbytes < known <= model.nbytes


def test_weights_that_do_not_fit_are_refused_with_the_remedies(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_dir(str(checkpoint))
    needed = weight_bytes(config, read_headers(weight_files(checkpoint)))
    free = [needed]
    monkeypatch.setattr(engine_config, "machine_free_bytes", lambda: free[0])
    monkeypatch.setattr(engine_config, "gpu_free_bytes", lambda: free[0])
    resolve_here(checkpoint)
    resolve_here(checkpoint, tp_size=2)
    free[0] = needed - 1
    text = refused(checkpoint)
    assert "its weights need 0.0 GB in float32, and this machine has 0.0 free; use --dtype bfloat16" in text
    assert text.endswith("--dtype bfloat16, --quantization fp8 or int4, or a smaller model")
    resolve_here(checkpoint, dtype="bfloat16")
    resolve_here(checkpoint, quantization="fp8")
    assert "fewer --dp-size" in refused(checkpoint, dp_size=2)
    # On a GPU the default is bfloat16, and each rank has a GPU of its own.
    free[0] = needed // 2 - 1
    text = refused(checkpoint, gpu=True)
    assert "in bfloat16, and a GPU has" in text
    assert text.endswith("use --quantization fp8 or int4, --tp-size 2 or more, or a smaller model")
    resolve_here(checkpoint, gpu=True, tp_size=2)
