"""Triton's kernels of recurrent layers, in Triton's interpreter: against torch's operators, and cut into steps in
several ways. Run as a script this file is the checks themselves, see ``test_triton_layer_kernels.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from recurrence_cases import KINDS, check_steps
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

from fenceline.layers.kernels import recurrence as reference

CHECKS = (
    "steps_of_a_delta_net",
    "steps_with_decays_by_channel",
    "steps_without_a_delta_rule",
    "delta_inputs",
    "mamba_inputs",
    "gated_norm",
)

results = outcomes_of(__file__)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability: int) -> None:
    """To machine code, for the shapes of Qwen3-Next. For sm_90 in all variants, for the others the largest of each."""
    for name, assembly in compiled(capability):
        assert assembly["cubin"], name


def compiled(capability: int) -> Iterator[tuple[str, Any]]:
    """Each kernel's name and what it is compiled to."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fenceline.layers.kernels.triton import recurrence as kernels

    channels = {"CHANNELS": 8192, "TAPS": 4, "RING": 3, "BLOCK_RING": 4, "X_ROW": 12_352, "COLUMNS_SLOT": 24_576}
    channels |= {
        "GROUP": 512,
        "X_GROUP": 768,
        "RING_SLOT": 24_576,
        "KEPT": True,
        "SILU": True,
        "HAS_BIAS": False,
        "bias": None,
        "BLOCK_T": 32,
    }
    heads = {"HEADS": 32, "KEY_HEADS": 16, "K": 128, "RING": 64, "K_SLOT": 64 * 2048}
    heads |= {"DECAY_SLOT": 2048, "DECAYS": 1, "GRID": 64}
    blocks = {"V": 128, "BLOCK_V": 64, "MATRIX_SLOT": 1 << 19, "D_SLOT": 64 * 4096, "KEPT": True, "HAS_BETA": True}
    blocks |= {"CHUNK": kernels._BLOCK_FEATURES, "PRECISION": kernels._PRECISION, "scratch": None}
    blocks |= {"ONE": False, "STAGES": kernels._STAGES}
    inputs = {"KEY_HEADS": 16, "REPEATS": 2, "BLOCK_REPEATS": 2, "K": 128, "BLOCK_K": 128, "VALUES": 256}
    norm = {"HEADS": 32, "SIZE": 128, "BLOCK": 128, "GATE_ROW": 12_352, "ROWS": 8, "SILU": True, "OWN_WEIGHTS": False}
    norm |= {"GROUP": 2, "GATE_GROUP": 768, "SKIP_ROW": 0, "SKIP_DIM": 0, "inputs": None, "factors": None}
    # Of Nemotron Nano 9B v2.
    mamba = {"GROUPS": 8, "STATE": 128, "BLOCK_STATE": 128, "REPEATS": 16, "BLOCK_REPEATS": 16, "DIM": 80}
    mamba |= {"BLOCK_DIM": 128, "DT_ROW": 22_656}
    grouped = {"HEADS": 8, "SIZE": 1280, "BLOCK": 2048, "GATE_ROW": 22_656, "ROWS": 1, "SILU": True}
    grouped |= {"GROUP": 8, "GATE_GROUP": 0, "OWN_WEIGHTS": True, "SKIP_ROW": 12_288, "SKIP_DIM": 80}
    groups = {"HEADS": 128, "KEY_HEADS": 8, "V": 80, "MATRIX_SLOT": 128 * 128 * 80, "K_SLOT": 64 * 1024}
    groups |= {"D_SLOT": 64 * 128 * 80, "DECAY_SLOT": 64 * 128, "HAS_BETA": False, "beta": None}
    inputs |= {"BLOCK_VALUES": 256, "A_ROW": 32, "B_ROW": 32, "BY_CHANNEL": False}
    inputs |= {"GROUP": 4, "INTERLEAVED": True}
    floats = dict.fromkeys(("matrix", "ring_k", "ring_d", "ring_decay", "q", "k", "v", "decays", "beta"), "*fp32")
    floats |= dict.fromkeys(("a_log", "dt_bias", "factors"), "*fp32")
    types = floats | {"query_starts": "*i32", "num_rows": "i32", **dict.fromkeys(("eps", "least", "most"), "fp32")}
    types |= dict.fromkeys(
        ("x", "weight", "columns", "ring", "mixed", "a", "b", "gate", "out", "dt", "inputs"), "*bf16"
    )
    # Of a step that verifies four tokens of each request.
    verified = heads | {name: value for name, value in blocks.items() if name != "scratch"} | {"KEPT": False}
    verified |= {"RING": 72, "K_SLOT": 72 * 2048, "D_SLOT": 72 * 4096, "DECAY_SLOT": 72 * 32}
    channels |= {"BLOCK_C": 128, "GRID": 64}
    cases: list[tuple[Any, int, dict[str, Any], dict[str, str]]] = [
        (kernels._short_convolution_kernel, 4, channels | {"KEPT": False, "RING": 11, "BLOCK_RING": 16}, {}),
        (kernels._short_convolution_kernel, 4, channels, {}),
        (kernels._short_convolution_kernel, 4, channels | {"BLOCK_T": 1}, {}),
        (kernels._delta_inputs_kernel, 1, inputs, {}),
        (kernels._delta_inputs_kernel, 1, inputs | {"BY_CHANNEL": True, "INTERLEAVED": False}, {}),
        (kernels._recurrence_kernel, 4, verified, {"out": "*fp32", "scratch": "*fp32"}),
        (kernels._recurrence_kernel, 4, heads | blocks, {"out": "*fp32"}),
        (kernels._recurrence_kernel, 4, heads | blocks | groups, {"out": "*fp32"}),
        (
            kernels._recurrence_kernel,
            4,
            heads | blocks | {"DECAYS": 128, "CHUNK": kernels._BLOCK_DECAYS},
            {"out": "*fp32"},
        ),
        (kernels._recurrence_kernel, kernels._WARPS, heads | blocks | {"ONE": True}, {"out": "*fp32"}),
        (kernels._recurrence_kernel, kernels._WARPS, heads | blocks | groups | {"ONE": True}, {"out": "*fp32"}),
        (kernels._keep_rows_kernel, 4, heads | {"BLOCK_K": 128, "KEPT": True}, {}),
        (kernels._gated_norm_kernel, 4, norm, {"x": "*fp32"}),
        (kernels._gated_norm_kernel, 4, grouped, {"x": "*fp32"}),
        (kernels._mamba_inputs_kernel, 4, mamba, {"v": "*fp32"}),
    ]
    if capability != 90:
        cases = list({case[0]: case for case in cases}.values())
    for kernel, warps, constants, others in cases:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else (types | others).get(name, "*i64") for name in names}
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if "*" in t}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, values, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        yield kernel.__name__, made.asm


# --- the checks, run in the script -------------------------------------------------------------------------------


def check_delta_inputs() -> None:
    from fenceline.layers.kernels.triton import recurrence as triton_recurrence

    heads, key_heads, key_dim, value_dim = 6, 2, 12, 20
    for dtype, num_decays in ((torch.float32, heads), (torch.bfloat16, heads), (torch.float32, heads * key_dim)):
        gates = reference.DeltaGates(torch.randn(heads), torch.randn(num_decays), key_heads, key_dim)
        mixed = torch.randn(5, 2 * key_heads * key_dim + heads * value_dim).to(dtype)
        a, b = (torch.randn(5, num_decays + heads).to(dtype) * 12).split((num_decays, heads), 1)
        expected = reference.delta_inputs(mixed, a, b, gates)
        for ours, theirs in zip(triton_recurrence.delta_inputs(mixed, a, b, gates), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        if num_decays == heads:  # the same, with the parts of each key head beside one another
            parts = [part.unflatten(1, (key_heads, -1)) for part in mixed.split((24, 24, heads * value_dim), 1)]
            both = torch.stack([x.unflatten(1, (key_heads, -1)) for x in (b, a)], 2)
            gates, mixed = replace(gates, interleaved=True), torch.cat(parts, 2).flatten(1)
            for module in (triton_recurrence, reference):
                found = module.delta_inputs(mixed, both[:, :, 1], both[:, :, 0], gates)
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def check_mamba_inputs() -> None:
    from fenceline.layers.kernels.triton import recurrence as triton_recurrence

    heads, groups, state_size, dim = 6, 2, 12, 20
    for dtype, limits in ((torch.float32, (0.0, float("inf"))), (torch.bfloat16, (0.1, 2.0))):
        gates = reference.MambaGates(*(torch.randn(heads) for _ in range(3)), groups, state_size, limits)
        mixed = torch.randn(5, heads * dim + 2 * groups * state_size).to(dtype)
        dt = (torch.randn(5, 4 + heads).to(dtype) * 12)[:, 4:]
        expected = reference.mamba_inputs(mixed, dt, gates)
        for ours, theirs in zip(triton_recurrence.mamba_inputs(mixed, dt, gates), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def check_gated_norm() -> None:
    from fenceline.layers.kernels.triton import recurrence as triton_recurrence

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x, weight = torch.randn(5, 3, 20), torch.randn(20).to(dtype)
        gate = torch.randn(5, 90).to(dtype)[:, 10:70].unflatten(1, (3, 20))
        spread = torch.randn(5, 3, 50).to(dtype)[..., 20:40].unsqueeze(2)  # one head in each of three groups
        for silu in (True, False):
            found = triton_recurrence.gated_norm(x, gate, weight, 1e-5, silu)
            expected = reference.gated_norm(x, gate, weight, 1e-5, silu)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            found = triton_recurrence.gated_norm(x, spread, weight, 1e-5, silu)
            expected = reference.gated_norm(x, spread.contiguous().view(5, 3, 20), weight, 1e-5, silu)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        # As in Mamba2: groups of two heads, with inputs that go past the recurrence.
        skip = torch.randn(5, 90).to(dtype)[:, 20:80].unflatten(1, (6, 10)), torch.randn(6)
        weight = torch.randn(3, 20).to(dtype)
        found = triton_recurrence.gated_norm(x, gate, weight, 1e-5, skip=skip)
        torch.testing.assert_close(
            found, reference.gated_norm(x, gate, weight, 1e-5, skip=skip), atol=tolerance, rtol=tolerance
        )


def main() -> None:
    from fenceline.layers.kernels.triton import recurrence as triton_recurrence

    set_up_interpreter()
    arithmetic = triton_recurrence.short_convolution, triton_recurrence.recurrence
    checks: dict[str, Callable[[], None]] = {
        "steps_of_a_delta_net": lambda: check_steps(KINDS[0], arithmetic),
        "steps_with_decays_by_channel": lambda: check_steps(KINDS[1], arithmetic),
        "steps_without_a_delta_rule": lambda: check_steps(KINDS[2], arithmetic),
        "delta_inputs": check_delta_inputs,
        "mamba_inputs": check_mamba_inputs,
        "gated_norm": check_gated_norm,
    }
    print_outcomes(checks)


if __name__ == "__main__":
    main()
