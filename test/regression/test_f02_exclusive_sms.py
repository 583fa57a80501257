"""F2: persistent attention and backups that run on SMs take turns; where one of the two is another, nobody waits."""

from __future__ import annotations

import dataclasses

import pytest
from model_tiers import HICACHE, PAGE, Tiers, prompt
from trace_runner import random_model_path

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.memory_order import Point, Points, Stream, open_device
from fenceline.memory_order.edges import Edge
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.persistent_attention import PERSISTENT


def tiers_on(kind: str, attention: tuple[str, str], io_backend: str, **flags: object) -> Tiers:
    """``attention``: the backends of prefill and decode."""
    args = ServerArgs(
        model_path=random_model_path(),
        device=kind,
        random_seed=1,
        page_size=PAGE,
        max_running_requests=4,
        max_total_tokens=40 * PAGE,
        context_length=512,
        cuda_graph_bs=(1, 2),
        hicache_io_backend=io_backend,
        **(HICACHE | flags),  # type: ignore[arg-type]
    )
    prefill, decode = attention
    config = dataclasses.replace(resolve(args), prefill_attention_backend=prefill, decode_attention_backend=decode)
    device = open_device(kind)
    if kind == "cpu":
        device.check_order()  # Points pass late, so that waits are not skipped
    return Tiers(ModelRunner(config, device, show_progress=False))


def exclusive_waits(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who waits for SMs: a prefill step, a backup, a decode step and a backup, a load beside each."""
    seen: list[str] = []
    wait = Stream.wait

    def recording(stream: Stream, after: Point | Points, edge: Edge) -> None:
        if edge.name == "sm_exclusive":
            seen.append(stream.name.value)
        wait(stream, after, edge)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "wait", recording)
        tokens = prompt(1, 2 * PAGE + 1)
        first = tiers.launch(1, tokens, [1, 2, 3])
        tiers.load([21, 22], [5, 6], Points.none())
        tiers.store([11], [1])
        second = tiers.runner.launch(tiers.decode_batch(1, len(tokens) + 1, 1))
        tiers.load([23, 24], [5, 6], Points.none())
        tiers.store([12], [2])
        first.wait()
        second.wait()
        third = tiers.launch(2, tokens, [13, 14, 15])
        third.wait()
    tiers.runner.device.synchronize()
    return seen


BOTH = ["store", "forward", "store", "forward"]
# The decode step waits for no backup; the second backup still waits for the prefill.
PREFILL = ["store", "store", "forward"]
DECODE = ["forward", "store"]
CASES = [
    ((PERSISTENT, PERSISTENT), BOTH),
    ((PERSISTENT, "torch"), PREFILL),
    (("torch", PERSISTENT), DECODE),
    (("torch", "torch"), []),
]


@pytest.mark.parametrize(("attention", "waits"), CASES, ids=str)
def test_they_take_turns(attention: tuple[str, str], waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exclusive_waits(tiers_on("cpu", attention, "kernel"), monkeypatch) == waits


@pytest.mark.parametrize("attention", [case[0] for case in CASES], ids=str)
def test_the_copy_engine_waits_for_nobody(attention: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exclusive_waits(tiers_on("cpu", attention, "direct"), monkeypatch) == []


GPU_CASES = [("flashinfer", "triton", PREFILL), ("triton", "triton", []), ("fa3", "fa3", BOTH)]


@pytest.mark.gpu
@pytest.mark.parametrize(("prefill", "decode", "waits"), GPU_CASES, ids=str)
def test_backends_of_a_gpu_declare_what_they_are(
    prefill: str, decode: str, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper, where FlashInfer's prefill runs on its fa3 kernels."""
    try:
        tiers = tiers_on("cuda", (prefill, decode), "kernel", dtype="bfloat16")
    except ValueError as error:
        pytest.skip(str(error))
    assert exclusive_waits(tiers, monkeypatch) == waits
