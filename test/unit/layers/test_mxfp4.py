"""Experts in MXFP4, as gpt-oss is published, against transformers' reading of the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_parity import PagedModel, check_parity, save_checkpoint
from safetensors.torch import load_file, save_file
from scheduler_driver import make_model_driver
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fenceline.config.engine_config import resolve
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import ServerArgs
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.experts import ExpertsMLP
from fenceline.layers.kernels.four_bit import four_bit_numbers, round_to_mxfp4
from fenceline.models.families import make_model
from fenceline.models.loader import NewWeights, check_weights, load_model

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
HALVES = ("blocks", "scales")
PACKED = ("experts.gate_up_proj", "experts.down_proj")


def packed(num: int, rows: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """All numbers there are, with exponents that differ from group to group."""
    blocks = torch.randint(0, 256, (num, rows, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.nn.Module]]:
    """A checkpoint of gpt-oss with packed experts, and transformers' model of the numbers that it stands for."""
    directory = tmp_path_factory.mktemp("gpt-oss-mxfp4")
    model = save_checkpoint("gpt-oss", directory, SIZES)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    for index, layer in enumerate(model.model.layers):
        for name, param in (
            ("gate_up_proj", layer.mlp.experts.gate_up_proj),
            ("down_proj", layer.mlp.experts.down_proj),
        ):
            inside = f"model.layers.{index}.mlp.experts.{name}"
            num, k, rows = param.shape
            blocks, scales = packed(num, rows, k, generator)
            with torch.no_grad():
                param.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[inside]
            tensors |= {f"{inside}_blocks": blocks, f"{inside}_scales": scales}
    # In whatever order the two come.
    names = sorted(tensors, key=lambda name: (name.endswith("_blocks"), name))
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:])):
        save_file({name: tensors[name] for name in part}, directory / f"part{number}.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    yield directory, model


def test_logits_equal_transformers(published: tuple[Path, torch.nn.Module]) -> None:
    directory, reference = published
    check_parity(directory, reference, 16, "cpu")  # type: ignore[arg-type]


def test_new_weights_take_the_place_of_old_ones(published: tuple[Path, torch.nn.Module]) -> None:
    """They are checked by their headers first; a packed matrix counts once."""
    directory, _ = published
    model = PagedModel(directory, 16, "cpu").model
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    kept = model.layers[0].mlp.down.data.clone()
    model.layers[0].mlp.down.data.zero_()
    model.load_weights(((name, tensor.to("meta")) for name, tensor in tensors.items()), only_check=True)
    assert not model.layers[0].mlp.down.data.any()
    model.load_weights(tensors.items())
    assert torch.equal(model.layers[0].mlp.down.data, kept)
    bits = sum(
        param.numel() * (4 + 8 / 32 if name.endswith(PACKED) else 32) for name, param in published[1].named_parameters()
    )
    assert model.nbytes == bits / 8


def test_half_of_a_packed_matrix_is_refused(published: tuple[Path, torch.nn.Module]) -> None:
    directory, _ = published
    model = PagedModel(directory, 16, "cpu").model
    name = "model.layers.1.mlp.experts.down_proj"
    slots = model.weight_slots()
    both = {f"{name}_{half}": torch.ones(slots[f"{name}_{half}"].full_shape, dtype=torch.uint8) for half in HALVES}
    for half in HALVES:
        other = f"{name}_{HALVES[1 - HALVES.index(half)]}"
        one = [(f"{name}_{half}", both[f"{name}_{half}"].to("meta"))]
        with pytest.raises(ValueError, match=f"that belong together are missing: {other};"):
            model.load_weights(one, partly=True, only_check=True)
    model.load_weights(both.items(), partly=True, only_check=True)
    norm = "model.norm.weight"
    model.load_weights([(norm, slots[norm].dest.clone())], partly=True)


def test_exponents_of_a_type_of_their_own_are_refused(published: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    directory, _ = published
    model = PagedModel(directory, 16, "cpu").model
    name = "model.layers.1.mlp.experts.down_proj"
    slots = model.weight_slots()
    both = {f"{name}_{half}": torch.ones(slots[f"{name}_{half}"].full_shape, dtype=torch.uint8) for half in HALVES}
    both[f"{name}_scales"] = both[f"{name}_scales"].view(torch.float8_e8m0fnu)
    save_file(both, tmp_path / "new.safetensors")
    with pytest.raises(ValueError, match="scales is torch.float8_e8m0fnu, it must hold whole numbers"):
        check_weights(model, NewWeights("1", file=str(tmp_path / "new.safetensors")))


PARTS = ("data", "scales")


def experts_of(directory: Path, shard: Shard, load_format: str = "auto") -> ExpertsMLP:
    """Those of the second layer."""
    context, config = torch_context(shard, torch.float32), ModelConfig.from_dir(str(directory))
    model = load_model(config, load_format, torch.device("cpu"), context, 0, progress=False)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, ExpertsMLP)
    return mlp


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_every_rank_takes_its_part(published: tuple[Path, torch.nn.Module], load_format: str) -> None:
    directory, _ = published
    whole = experts_of(directory, Shard(), load_format)
    for rank in range(2):
        part = experts_of(directory, Shard(rank, 2), load_format)
        own = slice(rank * 96, (rank + 1) * 96)
        for name in PARTS:
            gate_up = getattr(whole.gate_up, name).unflatten(1, (2, 192))[:, :, own].flatten(1, 2)
            assert torch.equal(getattr(part.gate_up, name), gate_up)
            assert torch.equal(getattr(part.down, name), getattr(whole.down, name).chunk(2, 2)[rank])
        bias = whole.gate_up_bias.unflatten(1, (2, 192))[:, :, own].flatten(1, 2)
        assert torch.equal(part.gate_up_bias, bias)
        assert part.adds_down_bias == (rank == 0)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_every_rank_takes_its_experts(published: tuple[Path, torch.nn.Module], load_format: str) -> None:
    """All features of them, or a share of those."""
    directory, _ = published
    whole = experts_of(directory, Shard(), load_format)
    for size, ep_size in ((2, 2), (6, 3)):
        for rank in range(size):
            part = experts_of(directory, Shard(rank, size, ep_size=ep_size), load_format)
            group, place = divmod(rank, size // ep_size)
            experts = slice(*(whole.down.shape[0] // ep_size * at for at in (group, group + 1)))
            for name in PARTS:
                gate_up = getattr(whole.gate_up, name)[experts].unflatten(1, (2, 192))
                own = gate_up.chunk(size // ep_size, 2)[place].flatten(1, 2)
                assert torch.equal(getattr(part.gate_up, name), own)
                down = getattr(whole.down, name)[experts].chunk(size // ep_size, 2)[place]
                assert torch.equal(getattr(part.down, name), down)
            assert torch.equal(part.down_bias, whole.down_bias[experts])
            assert part.adds_down_bias == (place == 0)


def test_ranks_that_would_cut_a_group_are_refused(published: tuple[Path, torch.nn.Module]) -> None:
    """96 features on two ranks are 48 on each; 192 are not refused, nor are whole experts."""
    directory, _ = published
    flags = {"model_path": str(directory), "device": "cpu", "tp_size": 2}
    narrow = {**flags, "json_model_override_args": '{"intermediate_size": 96}'}
    with pytest.raises(ValueError, match="experts in groups of 32., which it does not divide; use 1, or --ep-size"):
        resolve(ServerArgs(**narrow))
    for accepted in (flags, {**narrow, "ep_size": 2}):
        assert resolve(ServerArgs(**accepted)).server_args.tp_size == 2


def test_dummy_weights_are_packed_too(published: tuple[Path, torch.nn.Module]) -> None:
    directory, _ = published
    down = experts_of(directory, Shard(), "dummy").down
    assert down.data.dtype == down.scales.dtype == torch.uint8
    numbers = four_bit_numbers(down.data, down.scales, None, torch.float32)
    assert 0.01 < numbers.std() < 0.03 and abs(numbers.mean()) < 0.001


def test_dummy_weights_are_not_replaced_by_published_ones(published: tuple[Path, torch.nn.Module]) -> None:
    directory, _ = published
    runner = make_model_driver(model_path=str(directory), load_format="dummy").worker
    with pytest.raises(ValueError, match=r"not stored as the checkpoint's \(mxfp4\); start the server"):
        runner.check_weights(NewWeights("1", directory=str(directory)))


def test_numbers_are_rounded_to_the_nearest() -> None:
    """Each is off by half the distance to its neighbour at most, but for the largest, which are 6 and a half."""
    matrix = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 40)[:, None]
    matrix[3, 32:64] = 0.0
    data, exponents = round_to_mxfp4(matrix)
    got = four_bit_numbers(data, exponents, None, torch.float32)
    step = 2.0 ** (exponents.int() - 127).repeat_interleave(32, 1)
    size = matrix.abs() / step
    assert size.max() < 8
    allowed = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, torch.where(size < 6, 1.0, 2.0)))
    error = (got - matrix).abs() / step
    assert (error <= allowed + 1e-6).all() and (error.amax(1) > 0.2).all()
    assert not got[3, 32:64].any()


def test_what_cannot_be_is_refused(published: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    directory, _ = published
    with pytest.raises(ValueError, match="quantised already .mxfp4.; leave it out"):
        resolve(ServerArgs(model_path=str(directory), device="cpu", quantization="fp8"))
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(ValueError, match="40 input features for each rank are no groups of 32"):
        make_model(ModelConfig.from_dir(str(tmp_path)), torch_context(Shard(), torch.float32)).weight_slots()
    slots = make_model(ModelConfig.from_dir(str(directory)), torch_context(Shard(), torch.float32)).weight_slots()
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    with pytest.raises(ValueError, match="it must hold whole numbers"):
        slots[name].load(name, torch.zeros(slots[name].full_shape))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="quantised .mxfp4., which is not supported"):
        ModelConfig.from_dir(str(tmp_path))
