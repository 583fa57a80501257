"""Experts of four bits: our Triton products, in Triton's interpreter, against torch's operators; their trial at start,
and what takes their place.

Run as a script this file is the checks themselves: see ``triton_interpreter``.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from routed_tokens import compare, routed
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

from fenceline.config.quantization import QuantConfig
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.expert_matrices import ExpertMatrices
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.four_bit import pack_halves, unpack_halves
from fenceline.layers.weight import fill_slots

CHECKS = ("int4", "mxfp4", "as_a_layer_stores_them", "the_trial_at_start", "by_parts")

results = outcomes_of(__file__)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, results: dict[str, str]) -> None:
    if name != "as_a_layer_stores_them" and not version("triton").startswith("3.6."):
        pytest.skip(f"the interpreter of Triton {version('triton')} fails in exp() here, that of 3.6 does not")
    assert results[name] == ""


def test_a_byte_has_numbers_that_lie_sixteen_apart() -> None:
    numbers = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    data = pack_halves(numbers)
    assert data.shape == (3, 48) and torch.equal(unpack_halves(data), numbers)
    assert torch.equal(data[:, :16] & 15, numbers[:, :16]) and torch.equal(data[:, :16] >> 4, numbers[:, 16:32])


# --- the checks, run in the script -------------------------------------------------------------------


def check_int4() -> None:
    compare(routed(3, 2, [0, 1, 2, 3], 4, num_padded=1), 32, 96, four_bits=32)
    compare(routed(34, 1, [0, 2], 3), 32, 64, torch.float16, four_bits=32)
    compare(routed(2, 1, [0, 1, 2, 3], 4), 64, 192, four_bits=64, limit=0.9)
    compare(routed(2, 1, [0, 1], 3), 128, 128, four_bits=128)  # rows of one group


def check_mxfp4() -> None:
    compare(routed(34, 1, [0, 2], 3, num_padded=1), 32, 96, torch.float16, four_bits=32, has_zeros=False)
    compare(routed(2, 2, [0, 1, 2, 3], 4), 32, 64, four_bits=32, has_zeros=False, limit=0.9)


def check_as_a_layer_stores_them() -> None:
    """Against float64's product with what the format means."""
    from fenceline.layers.kernels.triton import grouped_gemm

    for group in (32, 128):
        config = QuantConfig(method="on-line", kind="int4", group_size=group)
        stored = ExpertMatrices(3, 24, 256, torch_context(Shard(), torch.float32), config)
        for expert in range(3):
            slots = stored.slots("up", expert, slice(0, 24), (24, 256), 0, 0)
            fill_slots(slots, [("up.weight", torch.randn(24, 256) * (1 + torch.arange(256) // group))])
        assert stored._stored is not None
        plain = stored._stored.dequantized(torch.float64).view(3, 24, 256)
        x, routing = torch.randn(5, 256), routed(5, 2, [0, 1, 2], 3)
        expected = torch.einsum("tk,tjnk->tjn", x.double(), plain[routing.ids]).flatten(0, 1).float()
        numbers = {"scales": stored.scales, "zeros": stored.zeros}
        for cut in (grouped_gemm.GroupedConfig(16, 16, 32, 4, 1), None):
            ours = grouped_gemm.grouped_product(x, stored.data, routing, config=cut, **numbers)
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(stored.product(x, routing), expected, atol=1e-3, rtol=1e-4)


def check_the_trial_at_start() -> None:
    """It accepts the product, and none that is wrong in one way, or that does not run."""
    from triton.errors import TritonError

    from fenceline.layers import cuda_four_bit
    from fenceline.layers.kernels.triton.grouped_gemm import grouped_product

    cpu = torch.device("cpu")

    def right(x, *operands, config, bias=None, **given):  # type: ignore[no-untyped-def]
        """Few pairs are the interpreter's, which multiplies bfloat16 matrices by their bit patterns. It takes seconds
        for many, which differ in nothing but their number: torch multiplies these."""
        bias = None if bias is None else bias.float()
        if len(x) == 5:
            return grouped_product(x.float(), *operands, config=config, bias=bias, **given)
        return LayerKernels().grouped_product(x.float(), *operands, bias=bias, **given)

    def wrong(change):  # type: ignore[no-untyped-def]
        def product(x, *operands, **given):  # type: ignore[no-untyped-def]
            changed = {**given, **change(given)}
            bias = changed["bias"].float() if changed.get("bias") is not None else None
            rest = {name: value for name, value in changed.items() if name not in ("config", "bias")}
            return LayerKernels().grouped_product(x.float(), *operands, bias=bias, **rest)

        return product

    for has_zeros in (True, False):
        assert cuda_four_bit.four_bits_agree(cpu, right, 32, has_zeros)
    rolled = wrong(lambda given: {"scales": given["scales"].roll(1, 2)})
    assert not cuda_four_bit.four_bits_agree(cpu, rolled, 32, False)
    shifted = wrong(lambda given: {"zeros": given["zeros"].roll(1, 2)})
    assert not cuda_four_bit.four_bits_agree(cpu, shifted, 32, True)
    only_tiles = wrong(lambda given: {} if given["config"] is None else {"limit": 0.0, "bias": None})
    assert not cuda_four_bit.four_bits_agree(cpu, only_tiles, 32, True)
    for failure in (RuntimeError("a launch"), TritonError("a compilation")):

        def fails(*operands: object, failure: Exception = failure, **given: object) -> torch.Tensor:
            raise failure

        assert not cuda_four_bit.four_bits_agree(cpu, fails, 32, True)


def check_by_parts() -> None:
    """Whatever number of experts is made plain at a time."""
    from fenceline.layers import cuda_four_bit
    from fenceline.layers.kernels.triton.grouped_gemm import grouped_product

    bias, torch_kernels = torch.randn(5, 2 * 24), LayerKernels()
    weight = torch.randint(0, 256, (5, 2 * 24, 32), dtype=torch.uint8)
    cases = (
        (torch.randint(119, 125, (5, 48, 2), dtype=torch.uint8), None, 2.0),
        (torch.rand(5, 48, 1) / 30, torch.randint(0, 16, (5, 48, 1), dtype=torch.uint8), 0.0),
    )
    for scales, zeros, limit in cases:
        for num_padded, each in ((0, 1), (2, 2), (9, 7)):
            routing = routed(9, 2, [0, 1, 3, 4], 5, num_padded)
            x, live = torch.randn(9, 64), routing.order[: routing.ends[-1]]
            cuda_four_bit._PART_BYTES = 4 * 48 * 64 * each
            operands = (x, weight, routing, True, bias, limit, scales, zeros)
            got = cuda_four_bit.product_by_parts(grouped_product, *operands)
            torch.testing.assert_close(got[live], torch_kernels.grouped_product(*operands)[live], atol=1e-4, rtol=1e-4)
            assert not got[routing.order[routing.ends[-1] :]].any()


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: globals()[f"check_{name}"] for name in CHECKS})
