"""Slots of a step's nodes, and moves of accepted rows, by torch's operators and by the kernel in Triton's interpreter.

Run as a script this file is the interpreted checks, for the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

from fenceline.config.kv_layout import KVLayout, keys_and_values, latent
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.speculative.kv_rows import KVMover, node_slots

INTERPRETED = ("every_path_of_small_trees", "rows_of_several_pieces", "random_moves")

interpreted = outcomes_of(__file__)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from([1, 3, 16]), st.integers(1, 20), st.data())
def test_slots_are_those_of_the_next_tokens(
    seq_lens: list[int], page_size: int, num_nodes: int, data: st.DataObject
) -> None:
    columns = -(-(max(seq_lens) + num_nodes) // page_size)
    table = torch.tensor(data.draw(st.permutations(range(columns * (len(seq_lens) + 1)))), dtype=torch.int32).view(
        -1, columns
    )
    rows = data.draw(st.permutations(range(len(table))))[: len(seq_lens)]
    slots = node_slots(table, torch.tensor(rows), torch.tensor(seq_lens), num_nodes, page_size)
    expected = [
        int(table[row, p // page_size]) * page_size + p % page_size
        for row, length in zip(rows, seq_lens, strict=True)
        for p in range(length, length + num_nodes)
    ]
    assert slots.tolist() == expected
    with pytest.raises((IndexError, RuntimeError)):
        node_slots(table, torch.tensor(rows), torch.tensor(seq_lens), columns * page_size + 1, page_size)


def pool_of(num_pages: int, page_size: int) -> KVPool:
    """Layers that are not alike, as those of a target and a draft, with a value of its own in each place."""
    layers = (keys_and_values(2, 4, "float32"), keys_and_values(1, 6, "bfloat16"), latent(10, "float16"))
    pool = KVPool(num_pages, KVLayout(page_size, layers), torch.device("cpu"))
    for _, tensor in pool.tensors():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251)
    return pool


def check_move(slots: list[list[int]], paths: list[list[int]], counts: list[int], pool: KVPool, move) -> None:  # type: ignore[no-untyped-def]
    """``move`` does what one row after the other does, from a copy of all rows."""
    tensors = [tensor for _, tensor in pool.tensors()]
    expected = [tensor.clone() for tensor in tensors]
    for before, after in zip([tensor.clone() for tensor in tensors], expected, strict=True):
        for request, path, count in zip(slots, paths, counts, strict=True):
            for step in range(count):
                after[request[step]] = before[request[path[step]]]
    move(tensors, torch.tensor(slots).flatten(), torch.tensor(paths), torch.tensor(counts))
    for (name, tensor), after in zip(pool.tensors(), expected, strict=True):
        assert torch.equal(tensor, after), name


def by_torch(tensors, slots, path, counts) -> None:  # type: ignore[no-untyped-def]
    KVMover(tensors).move(slots, path, counts)


def random_case(random: np.random.Generator, any_order: bool) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Slots, paths, counts of a few requests; beyond its count a path is anything."""
    batch, num_nodes = int(random.integers(1, 4)), int(random.integers(1, 12))
    width = int(random.integers(1, num_nodes + 1))
    slots = random.permutation(batch * num_nodes + 3)[: batch * num_nodes].reshape(batch, num_nodes)
    paths, counts = [], []
    for _ in range(batch):
        count = int(random.integers(1, width + 1))
        path = random.permutation(num_nodes)[:count]
        rest = random.integers(0, num_nodes, width - count)
        paths.append([*(path if any_order else np.sort(path)).tolist(), *rest.tolist()])
        counts.append(count)
    return slots.tolist(), paths, counts


def test_random_moves() -> None:
    random = np.random.default_rng(0)
    for any_order in (False, True):
        for _ in range(100):
            check_move(*random_case(random, any_order), pool_of(40, 1), by_torch)


def test_every_path_of_small_trees() -> None:
    for path in paths_of(6):
        check_move([[4, 5, 6, 7, 8, 9]], [path], [len(path)], pool_of(12, 1), by_torch)


def paths_of(num_nodes: int) -> list[list[int]]:
    """All ascending paths from node 0, among them those in which a target is the source of another row."""
    return [[0, *(n for n in range(1, num_nodes) if bits >> n & 1)] for bits in range(0, 1 << num_nodes, 2)]


def test_impossible_moves_are_refused() -> None:
    pool = pool_of(12, 1)
    tensors = [tensor for _, tensor in pool.tensors()]
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(AssertionError):  # a path longer than there are nodes
        KVMover(tensors).move(torch.arange(3), torch.zeros(1, 4, dtype=torch.int64), one)
    with pytest.raises(AssertionError, match="whole words"):
        KVMover([torch.zeros(4, 3, dtype=torch.float16)])


# --- the interpreted checks, run in the script -------------------------------------------------------------------


def by_kernel(tensors, slots, path, counts) -> None:  # type: ignore[no-untyped-def]
    from fenceline.layers.kernels.triton.kv_rows import launch

    mover = KVMover(tensors)
    launch(slots, path, counts, mover._addresses, mover._num_words, mover._most_words)


def check_every_path_of_small_trees() -> None:
    for path in paths_of(5):
        check_move([[4, 5, 6, 7, 8]], [path], [len(path)], pool_of(12, 1), by_kernel)


def check_rows_of_several_pieces() -> None:
    """Rows of which a program moves a part, the last one incomplete."""
    layout = KVLayout(4, (latent(600, "float32"), keys_and_values(1, 2, "float32")))
    pool = KVPool(20, layout, torch.device("cpu"))
    for _, tensor in pool.tensors():
        tensor.copy_(torch.randn(tensor.shape))
    slots = torch.randperm(80)[:64].view(2, 32).tolist()
    paths = [[0, *range(9, 32)], [0, 1, 3, 7, *[0] * 20]]
    check_move(slots, paths, [24, 4], pool, by_kernel)


def check_random_moves() -> None:
    random = np.random.default_rng(1)
    for any_order in (False, True):
        for _ in range(12):
            check_move(*random_case(random, any_order), pool_of(40, 1), by_kernel)


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: globals()[f"check_{name}"] for name in INTERPRETED})
