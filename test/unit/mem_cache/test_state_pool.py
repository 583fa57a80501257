"""StatePool: where the states of recurrent layers lie, and how many snapshots there is room for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenceline.config.engine_config import resolve
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import ServerArgs
from fenceline.config.state_layout import StateSpec, convolution, recurrence, together
from fenceline.layers.context import Shard, torch_context
from fenceline.mem_cache import state_pool
from fenceline.mem_cache.state_pool import StatePool, carried_nbytes, most_running, num_snapshots
from fenceline.memory_order import open_device
from fenceline.models.decoder import CausalLM
from fenceline.models.families import make_model
from fenceline_proof.tiny_model import tiny_model_path

_SPECS = [
    together(convolution(7, 4, "bfloat16"), recurrence(2, 1, 3, 5)),
    convolution(3, 3, "float16"),
    recurrence(2, 2, 4, 4),
]
_ROWS, _SNAPSHOTS = 4, 3


def _pool(num_snapshots: int = _SNAPSHOTS, most_undone: int = 0) -> StatePool:
    return StatePool(_ROWS, num_snapshots, _SPECS, torch.device("cpu"), most_undone=most_undone)


def _shapes(spec: StateSpec, most_undone: int) -> dict[str, tuple[int, ...]]:
    shapes = {row.name: (_ROWS + _SNAPSHOTS, *row.shape) for row in spec.carried}
    return shapes | {rows.row.name: (_ROWS, rows.length(most_undone), *rows.row.shape) for rows in spec.kept}


@pytest.mark.parametrize("most_undone", [0, 4])
def test_layers_have_the_tensors_that_they_declare(most_undone: int) -> None:
    for spec, tensors in zip(_SPECS, _pool(most_undone=most_undone).layers, strict=True):
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == _shapes(spec, most_undone)


def test_what_is_stored_tells_the_order_of_its_channels() -> None:
    """Else a server would begin with a state in which another, or an earlier version, had ordered them otherwise."""
    config = resolve(ServerArgs(model_path=tiny_model_path("states"), device="cpu", load_format="dummy")).model
    specs = make_model(config, torch_context(Shard(), torch.float32)).state_specs
    apart = together(convolution(44, 4, "float32"), recurrence(4, 2, 6, 5))  # queries, then keys, then values
    pools = [StatePool(1, 1, each, torch.device("cpu")) for each in (specs, [apart, apart])]
    assert pools[0].nbytes == pools[1].nbytes and pools[0].description != pools[1].description


def test_no_two_tensors_share_bytes() -> None:
    tensors = [tensor for of_layer in _pool().layers for tensor in of_layer.values()]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number + 1).all())


def test_a_copy_moves_what_all_layers_carry_of_one_slot() -> None:
    pool = _pool()
    for of_layer in pool.layers:
        for tensor in of_layer.values():
            tensor[2] = 2
    pool.copy([(2, 5)])
    for spec, tensors in zip(_SPECS, pool.layers, strict=True):
        for row in spec.carried:
            filled = [bool((slot == 2).all()) for slot in tensors[row.name]]
            assert filled == [slot in (2, 5) for slot in range(_ROWS + _SNAPSHOTS)]


@pytest.mark.parametrize("num_snapshots", [0, 3])
def test_snapshots_are_leased_under_the_numbers_after_the_rows(num_snapshots: int) -> None:
    pool = _pool(num_snapshots)
    leased = [pool.snapshots.alloc(1) for _ in range(num_snapshots)]
    assert [int(one[0][0]) for one in leased if one is not None] == [*range(4, 4 + num_snapshots)]
    assert pool.snapshots.alloc(1) is None


def test_snapshots_take_what_rows_leave_of_the_states_share() -> None:
    args = ServerArgs(model_path=tiny_model_path(), device="cpu", max_running_requests=8, mamba_full_memory_ratio=0.5)
    config, device = resolve(args), open_device("cpu")
    most = num_snapshots(config, device, _SPECS)
    assert most == 8 * (config.model.context_length // 64)  # what they can use, in so much memory
    huge = [recurrence(16, 16, 128, 128)] * 4
    assert 0 < num_snapshots(config, device, huge) * carried_nbytes(huge) < 2 << 30
    with pytest.raises(ValueError, match=r"--max-running-requests 8: .*give at most \d"):
        most_running(config, device, huge * 64)


def test_by_default_as_many_requests_run_as_have_room_for_states_and_a_snapshot_each() -> None:
    huge, device = [recurrence(16, 16, 128, 128)] * 64, open_device("cpu")
    args = ServerArgs(model_path=tiny_model_path(), device="cpu")
    config = resolve(args)
    most = most_running(config, device, huge)
    assert 0 < most < config.max_running_requests
    assert num_snapshots(replace(config, max_running_requests=most), device, huge) >= most
    assert most_running(replace(config, server_args=replace(args, disable_radix_cache=True)), device, huge) > most
    given = replace(config, server_args=replace(args, max_running_requests=config.max_running_requests))
    with pytest.raises(ValueError, match=rf"--max-running-requests {config.max_running_requests}: .*give at most \d"):
        most_running(given, device, huge)
    assert most_running(given, device, _SPECS) == config.max_running_requests
    assert most_running(config, device, _SPECS) == config.max_running_requests
    with pytest.raises(ValueError, match="--max-running-requests 1: .*give at most 0, or raise the ratio"):
        most_running(config, device, huge * 64)


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_what_is_allocated_beside_states_refuses_no_start(
    disable_radix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page tables, masks and embeddings are allocated after the number of requests has been found."""
    huge, device = [recurrence(16, 16, 128, 128)] * 64, open_device("cpu")
    args = ServerArgs(model_path=tiny_model_path(), device="cpu", disable_radix_cache=disable_radix_cache)
    budgets = iter([4 << 30, (4 << 30) - (64 << 20)])
    monkeypatch.setattr(state_pool, "cache_budget", lambda *_: next(budgets))
    config = resolve(args)
    most = most_running(config, device, huge)
    assert num_snapshots(replace(config, max_running_requests=most), device, huge) >= 0


def test_more_snapshots_than_there_is_memory_for_are_refused() -> None:
    args = ServerArgs(model_path=tiny_model_path(), device="cpu", max_running_requests=8)
    config = replace(resolve(args), server_args=replace(args, max_mamba_cache_size=1 << 40))
    with pytest.raises(ValueError, match=r"--max-mamba-cache-size 1099511627776: .*give at most \d+, or leave it out"):
        num_snapshots(config, open_device("cpu"), _SPECS)


def test_replicas_on_one_host_share_the_memory_of_states() -> None:
    args = ServerArgs(model_path=tiny_model_path(), device="cpu", max_running_requests=8)
    huge, config = [recurrence(16, 16, 128, 128)] * 4, resolve(args)
    alone = num_snapshots(config, open_device("cpu"), huge)
    one_of_two = num_snapshots(replace(config, server_args=replace(args, dp_size=2)), open_device("cpu"), huge)
    assert 0 < one_of_two <= alone // 2


@pytest.mark.parametrize(
    ("name", "num_weights", "snapshot_bytes"),
    [
        ("LFM2-1.2B", 1_170_340_608, 10 * 2 * 2048 * 2),
        ("Kimi-Linear-48B-A3B", 49_122_681_728, 20 * (32 * 128 * 128 * 4 + 3 * 12_288 * 2)),
        ("Qwen3-Next-80B-A3B", 79_674_391_296, 36 * (32 * 128 * 128 * 4 + 3 * 8_192 * 2)),
    ],
)
def test_weights_and_states_of_published_models(
    name: str, num_weights: int, snapshot_bytes: int, tmp_path: Path
) -> None:
    """Nothing is allocated. Of four ranks, each has a quarter of every state."""
    published = json.loads((Path(__file__).parents[2] / "support" / "published_configs.json").read_text())[name]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    config = replace(ModelConfig.from_dir(str(tmp_path)), context_length=1)

    def make(shard: Shard, num_layers: int) -> CausalLM:
        with torch.device("meta"):
            return make_model(replace(config, num_layers=num_layers), torch_context(shard, torch.bfloat16))

    whole = make(Shard(), config.num_layers)
    assert sum(slot.dest.numel() for slot in whole.weight_slots().values()) == num_weights
    assert carried_nbytes(whole.state_specs) == snapshot_bytes
    assert carried_nbytes(make(Shard(1, 4), 1).state_specs) * 4 == carried_nbytes(whole.state_specs[:1])
