"""``fenceline.Engine`` with its scheduler in this process, on the virtual GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random

import fenceline
from fenceline.config.engine_config import EngineConfig
from fenceline.frontend.scheduler_link import SchedulerLink
from fenceline.ipc.io_struct import Message
from fenceline.memory_order import Device
from fenceline.scheduler.process import ready_message
from fenceline_proof.steps import Loop
from fenceline_proof.tiny_model import VOCAB_SIZE, tiny_model_path


class InProcess:
    """An EngineBackend and its link: the scheduler's loop runs when the front end waits for messages.

    All of it runs in the engine's own thread, which therefore opens the device.
    """

    def __init__(self, config: EngineConfig, open_device: Callable[[], Device]) -> None:
        self.error: Exception | None = None
        self._config = config
        self._open_device = open_device
        self._device: Device | None = None
        self._loop: Loop | None = None
        self._messages: list[Message] = []
        self._sent = asyncio.Event()

    @property
    def loop(self) -> Loop:
        """The scheduler's loop. Called after the front end has waited for messages."""
        assert self._loop is not None, "the engine is up"
        return self._loop

    def _start(self) -> None:
        self._device = self._open_device()
        self._loop = Loop(self._config, self._device, tell=self._messages.append)
        self._messages.append(ready_message(self._config, self._loop.scheduler))

    @property
    def link(self) -> SchedulerLink:
        """See ``entrypoints.launch.EngineBackend``."""
        return self

    def watch(self, on_death: Callable[[str], None]) -> None:
        """See ``entrypoints.launch.EngineBackend``: there is no process that could die."""

    def stop(self, timeout_s: float) -> None:
        """See ``entrypoints.launch.EngineBackend``."""

    def send(self, message: Message) -> None:
        """See ``frontend.scheduler_link.SchedulerLink``."""
        self.loop.send(message)
        self._sent.set()

    async def receive(self) -> list[Message]:
        """See ``frontend.scheduler_link.SchedulerLink``."""
        try:
            if self._loop is None:
                self._start()
            while not self._messages:
                if not self.loop.busy:
                    self._sent.clear()
                    await self._sent.wait()
                self.loop.step()
                await asyncio.sleep(0)  # gives tasks that want to abort a turn
        except Exception as error:
            self.error = error
            raise
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def close(self) -> None:
        """See ``frontend.scheduler_link.SchedulerLink``. What has not been done yet is done now, and checked."""
        try:
            if self.error is None and self._device is not None:
                self.loop.run()
                self._device.synchronize()
        except Exception as error:
            self.error = error


def run_engine(random: Random, kind: str, open_device: Callable[[], Device]) -> Loop:
    """Serve a few rounds of prompts through the offline API; raises what the engine raised."""
    backends: list[InProcess] = []

    def launch(config: EngineConfig) -> InProcess:
        backends.append(InProcess(config, open_device))
        return backends[-1]

    graphs = {"cuda_graph_bs": (2, 3), "context_length": 64} if random.random() < 0.5 else {}
    tiers = {}
    if random.random() < 0.5:
        policy = random.choice(("write_through", "write_back"))
        tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 1.0, "hicache_write_policy": policy}
    engine = fenceline.Engine(
        launch=launch,
        model_path=tiny_model_path(),
        device=kind,
        skip_tokenizer_init=True,
        random_seed=1,
        max_total_tokens=64,
        max_running_requests=3,
        chunked_prefill_size=8,
        **graphs,
        **tiers,
    )
    with engine:
        for _ in range(2):
            prompts = [
                [random.randrange(1, VOCAB_SIZE) for _ in range(random.randint(1, 14))] for _ in range(4)
            ]
            params = {"max_new_tokens": random.randint(2, 5), "temperature": random.choice((0.0, 0.9))}
            with suppress(RuntimeError):  # the front end's error; its cause is raised below
                engine.generate(input_ids=prompts, sampling_params=params)
            if backends[0].error is not None:
                break
    if backends[0].error is not None:
        raise backends[0].error
    return backends[0].loop
