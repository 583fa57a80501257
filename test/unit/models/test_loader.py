"""load_model: files found, streamed and refused; dummy weights."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from model_parity import save_checkpoint
from safetensors.torch import load_file, save_file

from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import weight_files
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.models import loader
from fenceline.models.decoder import CausalLM
from fenceline.models.loader import load_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """An untied Llama in several safetensors files."""
    save_checkpoint("llama", tmp_path)
    return tmp_path


def context_of(config: ModelConfig) -> LayerContext:
    return torch_context(Shard(), getattr(torch, config.dtype))


def load(directory: Path, load_format: str = "auto", seed: int = 0, **changes: object) -> CausalLM:
    config = dataclasses.replace(ModelConfig.from_dir(str(directory)), **changes)
    return load_model(config, load_format, CPU, context_of(config), seed, progress=False)


def load_with_progress(directory: Path) -> None:
    config = ModelConfig.from_dir(str(directory))
    load_model(config, "auto", CPU, context_of(config), 0, progress=True)


def merged(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, whose files and index are removed."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        tensors.update({name: tensor.clone() for name, tensor in load_file(path).items()})
        path.unlink()
    (directory / "model.safetensors.index.json").unlink()
    return tensors


def same(a: CausalLM, b: CausalLM) -> bool:
    slots = b.weight_slots()
    assert slots.keys() == a.weight_slots().keys()
    return all(torch.equal(slot.dest, slots[name].dest) for name, slot in a.weight_slots().items())


def test_sharded_single_and_unindexed_files_load_alike(checkpoint: Path) -> None:
    assert len(weight_files(checkpoint)) > 1
    sharded = load(checkpoint)
    tensors = merged(checkpoint)
    save_file(tensors, checkpoint / "model.safetensors")
    assert same(sharded, load(checkpoint, "safetensors"))
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    # Mistral's own format lies beside the other in some repositories and must not be read.
    save_file({"norm.weight": torch.zeros(3)}, checkpoint / "consolidated.safetensors")
    assert same(sharded, load(checkpoint))


def test_model_is_ready_for_inference(checkpoint: Path) -> None:
    model = load(checkpoint, dtype="bfloat16")
    tensors = [slot.dest for slot in model.weight_slots().values()]
    assert all(tensor.dtype == torch.bfloat16 and not tensor.requires_grad for tensor in tensors)
    assert model.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert model.rotary.table.dtype == torch.float32
    expected = load(checkpoint).norm.weight.to(torch.bfloat16)
    assert torch.equal(model.norm.weight, expected)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_the_progress(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load_with_progress(checkpoint)
    assert "Loading weights: 100%" in terminal.getvalue()


def test_a_log_gets_lines_instead_of_a_bar(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_with_progress(checkpoint)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
    (line,) = caplog.messages
    assert re.fullmatch(rf"Loaded weights: 0\.00 GiB, from {len(weight_files(checkpoint))} files, in \S+ s", line)


def test_a_log_names_the_file_that_is_read_every_ten_seconds(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of a hundred gigabytes is minutes of silence otherwise."""
    seconds = itertools.count(0, 6)  # of which each look at the clock takes six
    monkeypatch.setattr(loader.time, "perf_counter", lambda: next(seconds))
    files = weight_files(checkpoint)
    with caplog.at_level(logging.INFO):
        assert len(list(loader.read_weights(files, progress=False))) > len(files)
    assert caplog.messages
    named = [int(re.fullmatch(rf"Loading weights: file (\d+) of {len(files)}", line)[1]) for line in caplog.messages]  # type: ignore[index]
    assert named == sorted(set(named)) and 1 < len(named) < len(files)


def test_missing_file_is_named(checkpoint: Path) -> None:
    path = weight_files(checkpoint)[1]
    path.unlink()
    with pytest.raises(ValueError, match=f"missing, first {path.name}; download"):
        load(checkpoint)


@pytest.mark.parametrize("keep", [0, 5, 100, -10], ids=["empty", "no header", "half header", "last bytes gone"])
def test_truncated_file_is_named(checkpoint: Path, keep: int) -> None:
    path = weight_files(checkpoint)[2]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path.name}: truncated or damaged.*download") as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "part-1.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(checkpoint: Path, name: str, kind: str) -> None:
    """Opening a pipe would wait for ever."""
    (checkpoint / "model.safetensors.index.json").unlink()
    if kind == "device":
        (checkpoint / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(checkpoint / name) if kind == "pipe" else (checkpoint / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}: is no regular file"):
        load(checkpoint)


def test_index_without_a_map(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ValueError, match="no weight_map"):
        load(checkpoint)


def test_pickled_weights_are_refused_with_the_conversion(checkpoint: Path) -> None:
    merged(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"convert.*save_pretrained"):
        load(checkpoint)


def test_no_weights_at_all(checkpoint: Path) -> None:
    merged(checkpoint)
    with pytest.raises(ValueError, match="--load-format dummy"):
        load(checkpoint)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
def test_sizes_that_are_not_those_of_the_files_allocate_nothing(checkpoint: Path, key: str) -> None:
    """Memory of such sizes would be refused, or taken from others."""
    config = json.loads((checkpoint / "config.json").read_text()) | {key: 1 << 23, "head_dim": 8}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json asks for .*8388608|config.json asks for .*67108864"):
        load(checkpoint)


def test_unknown_load_format(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="use auto, safetensors, gguf or dummy"):
        load(checkpoint, "pt")


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Save the checkpoint again as one file, with tensors added, replaced or (None) removed."""
    tensors = {**merged(directory), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"lm_head.weight": None}, "lacks weights: lm_head.weight; check.*tie_word_embeddings"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}, "does not have: .*q_proj.bias.*attention_bias"),
        ({"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}, r"does not have: model\.layers\.3.*num_hidden_layers"),
        ({"model.norm.weight": torch.zeros(47)}, r"model.norm.weight has shape \[47\], config.json asks for \[48\]"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}, "unquantised"),
    ],
)
def test_weights_that_do_not_fit(checkpoint: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_a_fused_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint("phi3", tmp_path)
    rewrite(tmp_path, {"model.layers.1.mlp.gate_up_proj.weight": torch.zeros(139, 48)})
    with pytest.raises(
        ValueError,
        match=r"layers.1.mlp.gate_up_proj.weight has shape \[139, 48\], config.json asks for \[70, 48\] and \[70",
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [("glm4-moe", "num_mtp_layers"), ("deepseek-v3", "num_mtp_layers"), ("glm4.7-flash", "num_nextn_predict_layers")],
)
def test_layers_behind_the_last_predicting_one_are_not_read(name: str, key: str, tmp_path: Path) -> None:
    """As GLM-4.5 stores them; a layer that config.json does not announce is still refused."""
    save_checkpoint(name, tmp_path, {key: 1})
    before = load(tmp_path)
    rewrite(tmp_path, {"model.layers.3.eh_proj.weight": torch.zeros(3)})
    assert same(before, load(tmp_path))
    save_file({"model.layers.4.eh_proj.weight": torch.zeros(3)}, tmp_path / "more.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    with pytest.raises(ValueError, match=r"does not have: model\.layers\.4\.eh_proj"):
        load(tmp_path)


def test_a_weight_in_two_files_is_refused(checkpoint: Path) -> None:
    tensors = merged(checkpoint)
    save_file(tensors, checkpoint / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, checkpoint / "b.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight comes twice"):
        load(checkpoint)


def test_old_rotary_tables_and_tied_heads_are_ignored(tmp_path: Path) -> None:
    save_checkpoint("qwen3-tied-biased", tmp_path)
    before = load(tmp_path)
    (single,) = [merged(tmp_path)]
    single["lm_head.weight"] = single["model.embed_tokens.weight"].clone()
    single["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(single, tmp_path / "model.safetensors")
    assert same(before, load(tmp_path))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_tied_head_of_its_own_is_loaded_on_each_rank(tmp_path: Path, prefix: str) -> None:
    """Names with ``prefix`` are those of Gemma 3 with a vision tower."""
    save_checkpoint("gemma3", tmp_path)
    tied = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if prefix:
        config |= {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": dict(config)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = merged(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors["lm_head.weight"] = embedding.flip(0).contiguous()
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for rank in range(2):
        config = ModelConfig.from_dir(str(tmp_path))
        context = torch_context(Shard(rank, 2), torch.float32)
        model = load_model(config, "auto", CPU, context, 0, progress=False)
        for ours, stored in ((model.lm_head, head), (model.embed_tokens, embedding)):
            rows = stored[rank * 51 : (rank + 1) * 51]
            assert torch.equal(ours.weight.data[: len(rows)], rows)
    if not prefix:
        with pytest.raises(ValueError, match="lm_head.weight is not the embedding"):
            loader.check_weights(tied, loader.NewWeights("update", str(tmp_path)))


def test_dummy_needs_only_config_json_and_follows_the_seed(checkpoint: Path) -> None:
    merged(checkpoint)
    model = load(checkpoint, "dummy", seed=1)
    assert same(model, load(checkpoint, "dummy", seed=1))
    other = load(checkpoint, "dummy", seed=2)
    assert not torch.equal(model.lm_head.weight.data, other.lm_head.weight.data)
    assert torch.equal(model.norm.weight, torch.ones(48))
    assert 0.01 < model.lm_head.weight.data.std() < 0.03


def test_load_weights_takes_any_order(checkpoint: Path) -> None:
    expected = load(checkpoint)
    model = load(checkpoint, "dummy")
    model.load_weights(reversed(merged(checkpoint).items()))
    assert same(model, expected)
