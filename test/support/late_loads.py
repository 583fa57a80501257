"""Loads from the host that arrive late, layer by layer, under the model runner on a GPU."""

from __future__ import annotations

import torch
from model_tiers import PAGE, PREFIX_PAGES, Tiers, hicache_runner, prompt
from trace_runner import first_difference

from fenceline.memory_order import Points, Stream, open_device

DEVICE_PAGES, HOST_PAGES = [25, 23, 21, 22, 28], range(2, 2 + PREFIX_PAGES)


def late_loads(tiers: Tiers, cycles: int) -> None:
    """Make each layer of a load arrive late."""
    copier = tiers.hicache._copier
    to_device = copier.to_device

    def late(stream: Stream, *args: object) -> None:
        with stream.active():
            torch.cuda._sleep(cycles)
        to_device(stream, *args)  # type: ignore[arg-type]

    copier.to_device = late  # type: ignore[method-assign]


def differences(
    severed: str, num_rounds: int, spin_cycles: int, io_backend: str = "direct", **flags: object
) -> list[str]:
    """Compute prompts whose prefix is loaded, once on an idle device and once with late loads. Returns where the
    answers differ."""
    device = open_device("cuda", frozenset({severed} if severed else ()))
    tiers = Tiers(hicache_runner(device, hicache_io_backend=io_backend, **flags))
    found = []
    for number in range(num_rounds):
        tokens = prompt(number, PREFIX_PAGES * PAGE + 7)
        prefix_len = PREFIX_PAGES * PAGE - 3
        tiers.extend(2, tokens[:prefix_len], list(range(11, 20)))
        tiers.store(range(11, 11 + PREFIX_PAGES), HOST_PAGES)
        device.synchronize()
        answers = []
        for cycles in (0, spin_cycles):
            tiers.extend(3, prompt(1000 + number, 100), DEVICE_PAGES + [29, 31])
            device.synchronize()
            copier, before = tiers.hicache._copier, tiers.hicache._copier.to_device
            late_loads(tiers, cycles)
            ticket = tiers.load(DEVICE_PAGES, HOST_PAGES, Points.none())
            if not cycles:
                device.synchronize()
            answers.append(tiers.extend(4, tokens, [*DEVICE_PAGES, 30], prefix_len, (ticket,)))
            copier.to_device = before  # type: ignore[method-assign]
        found.append(first_difference(answers[:1], answers[1:]))
        tiers.drain()
    return [difference for difference in found if difference]
