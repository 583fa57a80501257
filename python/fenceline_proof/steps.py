"""Drives the real Scheduler and ModelRunner one step at a time, and tells the tags what is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import ServerArgs
from fenceline.images.image_input import ImageInput
from fenceline.ipc.io_struct import AbortReq, BatchTokenOut, Message, TokenizedGenerateReq, UpdateWeightsReq, id_array
from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.host.host_states import Pairs
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Device, Points
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.scheduler import Scheduler
from fenceline_proof.answers import Findings, Setting, Transcript
from fenceline_proof.bad_days import BadDays, events_of, order_calls
from fenceline_proof.events import Watch, around, state_of
from fenceline_proof.flashinfer_library import PLANNED
from fenceline_proof.launched_attention import LAUNCHED, REFERENCE
from fenceline_proof.oracle import Oracle
from fenceline_proof.random_depths import RandomDepths
from fenceline_proof.script import Arrival, Flags, FollowUp, Reaction, Scenario
from fenceline_proof.tiny_model import PLAIN, tiny_draft, tiny_model_path
from fenceline_sim.accounts import I32
from fenceline_sim.device import VgpuDevice
from fenceline_sim.errors import OwnershipError
from fenceline_sim.footprint import Footprints
from fenceline_sim.place import leave_out
from fenceline_sim.speculative_tags import make_tags
from fenceline_sim.tags import Tags

leave_out(Path(__file__).parent, but="collectives.py")
_MAX_STEPS = 2000
_MAX_NAMED = 4  # leases of what is left over
STEP_S = 0.01
_STATE_GRID = 4  # so that short prompts have states


@lru_cache
def _config(flags: tuple[tuple[str, int | float | str | bool], ...]) -> EngineConfig:
    args: dict[str, Any] = dict(flags)
    # On the CPU alone attention has plans of its own, and rounds differently.
    plain = "" if args["device"] == "cpu" else REFERENCE
    backend = args.pop("attention_backend", plain)
    draft = args.pop("draft", None)
    prefill, decode = (str(args.pop(f"{mode}_attention_backend", backend) or plain) for mode in ("prefill", "decode"))
    of_draft = args.pop("speculative_draft_attention_backend", None)
    model, least_tokens = str(args.pop("model", PLAIN)), args.pop("least_tokens", None)
    embedding_rows = args.pop("embedding_rows", None)
    if draft is not None:
        algorithm, folder = tiny_draft(str(draft), model)
        args |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": folder}
    folder = tiny_model_path(model)
    config = resolve(ServerArgs(model_path=folder, random_seed=1, log_level="error", **args))  # type: ignore[arg-type]
    # FlashInfer plans on the host and so cannot verify drafts: our own kernels do, as on a GPU.
    decode = LAUNCHED if draft is not None and decode in PLANNED else decode
    config = replace(
        config, prefill_attention_backend=prefill or config.prefill_attention_backend,
        decode_attention_backend=decode or config.decode_attention_backend,
        num_embedding_rows=int(embedding_rows or config.num_embedding_rows),
        state_grid=max(_STATE_GRID, config.server_args.page_size),
    )  # fmt: skip
    if of_draft is not None and config.speculative is not None:
        config = replace(config, speculative=replace(config.speculative, draft_attention_backend=str(of_draft)))
    if config.hicache is None:
        return config
    # One page is enough, and not too short either, unless the run asks for more.
    storage, threshold = config.hicache.storage, int(least_tokens or config.server_args.page_size)
    if storage is not None:
        storage = replace(storage, prefetch_threshold=threshold)
    return replace(config, hicache=replace(config.hicache, load_back_threshold=threshold, storage=storage))


@lru_cache
def _oracle(model_path: str, rounds_kv: bool) -> Oracle:
    return Oracle(model_path, rounds_kv=rounds_kv)


def make_config(flags: Flags, device: str) -> EngineConfig:
    """The engine's configuration with the tiny model. Beyond the command line it allows smaller pages, the attention
    backends of the proof, loads of prefixes of any length from a lower tier, and ``draft``, one of
    ``tiny_model.DRAFTS``; with ``depth_seed`` its depth is another in each step. ``model`` is one of the tiny models,
    and ``embedding_rows`` are those of its pool for pictures. ``least_tokens``: shorter parts of a prefix are not taken
    from a lower tier. With ``bad_days``, a seed, storage fails at random (``BadDays``)."""
    flags = {"device": device, **flags}
    flags.pop("bad_days", None)
    if flags.pop("depth_seed", None) is not None:
        flags["speculative_adaptive"] = True
    return _config(tuple(sorted(flags.items())))


def setting_of(scheduler: Scheduler) -> Setting:
    config = scheduler.config
    # A step's rows need slots, whether its drafts are accepted or not; a tree's are more than its tokens.
    num_slots = scheduler.memory.num_pages * scheduler.memory.page_size - scheduler.running.largest.num_slots + 1
    longest = min(config.model.context_length, num_slots)
    return Setting(config.random_seed, frozenset(config.model.eos_token_ids), longest)


class Loop:
    """A Scheduler over a ModelRunner, and the arrivals it will see. No threads but storage's."""

    def __init__(self, config: EngineConfig, device: Device, scenario: Scenario) -> None:
        self.step_no = self._num_readings = 0
        self._num_outputs: dict[str, int] = {}
        self._arrivals = list(scenario.arrivals)
        self._follow_ups = scenario.follow_ups
        self._reactions = list(scenario.reactions)
        self._outputs: dict[str, list[int]] = {}  # outputs of requests that are followed by another
        self._flight: InFlight | None = None
        self.watch = Watch(device)
        self.runner = ModelRunner(config, device, show_progress=False)
        self._tags: Tags | None = None
        self._bad_days: BadDays | None = None
        self._num_polls = 0  # for news of the storage
        if isinstance(device, VgpuDevice):
            self._tags = make_tags(device.gpu, self.runner)
            if device.gpu.detector is not None:  # without it only wrong answers are to be found
                Footprints(device, self.runner, self._tags)
        if self.runner.storage is not None:
            controller = self.runner.storage.controller
            order_calls(controller, self._clock)
            around(controller._events, "poll", after=self._polled)
            days = scenario.flags.get("bad_days")
            if days is not None:
                self._bad_days = BadDays(controller, int(str(days)), self._pause)
            if self._tags is not None:
                around(controller._backend, "set", before=self._tags.storing)
                around(controller._backend, "get", after=self._tags.fetched)
            if self._tags is not None and controller._states is not None:
                around(controller._states.backend, "set", before=self._tags.storing_state)
                around(controller._states.backend, "get", after=self._tags.fetched_state)
        self.scheduler = Scheduler(config, self.runner, self, self)
        if self._tags is not None:
            self._tell_tags(self._tags)
        seed = scenario.flags.get("depth_seed")
        if seed is not None:
            self.scheduler.planner.draft_depth = RandomDepths(tuple(self.scheduler.planner.shapes), int(str(seed)))
        around(self.scheduler.control, "update_weights", before=self._counts_outputs, after=self._updated)
        self.watch.watch(self.scheduler)
        self.transcript = Transcript(setting_of(self.scheduler))

    def _tell_tags(self, tags: Tags) -> None:
        """What steps, their sampling, transfers and new weights are submitted for."""
        tags.watch(self.scheduler)
        inside(self.scheduler, "launch", tags.step)
        inside(self.scheduler.masks, "sample_held", lambda pending: tags.rest_of_step())
        around(self.runner, "replace_weights", before=lambda weights, one_more: tags.weights_replaced(weights))
        if self.runner.states is not None:
            inside(self.runner, "copy_state", tags.state_copy)
        if self.runner.hicache is not None:
            for kind in TransferKind:
                inside(self.runner.hicache, kind.value, partial(self._transfer, tags, set()))

    @staticmethod
    def _transfer(
        tags: Tags, ids: set[int], ticket: Ticket, device_pages: I32, host_pages: I32, after: Points, states: Pairs
    ) -> AbstractContextManager[None]:
        num = len(device_pages)
        assert ticket.num_pages == num, f"{ticket!r} is said to have {ticket.num_pages} pages, it has {num}"
        assert ticket.id > 0 and ticket.id not in ids, f"{ticket!r} has a number that another one has, or none"
        ids.add(ticket.id)
        return tags.transfer(ticket.kind, device_pages, host_pages, states)

    def _counts_outputs(self, message: UpdateWeightsReq) -> None:
        self._num_outputs = {rid: len(req.output_ids) for rid, req in self.scheduler.reqs.items()}

    def _updated(self, result: tuple[bool, str, bytes], message: UpdateWeightsReq) -> None:
        if result[0]:
            folder = str(Path(message.file).parent) if message.file else message.model_path
            self.transcript.updated(folder or "", self._num_outputs)

    def _clock(self) -> float:
        """Seconds, computed from the number of steps so that runs are repeatable. Each call returns a later time."""
        self._num_readings += 1
        return self.step_no * STEP_S + self._num_readings * 1e-6

    def _polled(self, event: object) -> None:
        self._num_polls += 1

    def _pause(self, num_polls: int) -> None:
        """Hold one of storage's threads up until the scheduler has looked for news so many times."""
        device, until = self.runner.device, self._num_polls + num_polls
        assert isinstance(device, VgpuDevice), "only there storage has bad days"
        device.gpu.rotation.block_until(lambda: self._num_polls >= until, "the scheduler to look for news")

    def _arrive(self, arrival: Arrival) -> None:
        later = (i for i, other in enumerate(self._arrivals) if other.step > arrival.step)
        self._arrivals.insert(next(later, len(self._arrivals)), arrival)

    # --- inbox and outbox of the scheduler

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """See ``scheduler.scheduler.Inbox``. If the scheduler would block, the run skips to the next arrival; if it
        also waits for transfers, it continues."""
        self.transcript.turn()
        messages = self._react()
        if block and timeout_ms is None and self._arrivals and not messages:
            self.step_no = max(self.step_no, self._arrivals[0].step)
        while self._arrivals and self._arrivals[0].step <= self.step_no:
            messages.append(self._arrivals.pop(0).message)
        for message in messages:
            self.transcript.received(message)
            if isinstance(message, TokenizedGenerateReq) and message.rid in self._follow_ups:
                self._outputs[message.rid] = list(message.input_ids)
        return messages

    def _react(self) -> list[Message]:
        messages, waiting = [], []
        for reaction in self._reactions:
            message = self._due(reaction) if reaction.step <= self.step_no else None
            if message is None:
                waiting.append(reaction)
            else:
                messages.append(message)
        self._reactions = waiting
        return messages

    def _due(self, reaction: Reaction) -> Message | None:
        reqs = self.scheduler.reqs
        if not reaction.state:
            return None if reqs else reaction.message
        found = (rid for rid, req in reqs.items() if state_of(self.scheduler, req) == reaction.state)
        rid = next(found, None)
        return None if rid is None else reaction.message or AbortReq(rid=rid)

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        for out in message.outs:
            self.transcript.sent(out)
            outputs = self._outputs.get(out.rid)
            if outputs is not None:
                outputs += out.output_ids
            if outputs is not None and out.finish_reason is not None and out.finish_reason.type != "abort":
                self._follow(self._follow_ups[out.rid], outputs, self.transcript.exchanges[out.rid].request.images)

    def _follow(self, turn: FollowUp, outputs: list[int], images: Sequence[ImageInput]) -> None:
        new = [msgspec.structs.replace(one, offset=one.offset + len(outputs)) for one in turn.request.images]
        tokens = id_array([*outputs, *turn.words])
        request = msgspec.structs.replace(turn.request, input_ids=tokens, images=[*images, *new])
        self._arrive(Arrival(self.step_no + turn.pause, request))

    def to_tokenizer(self, message: Message) -> None:
        """Nobody asks."""

    # --- the loop

    @property
    def busy(self) -> bool:
        return bool(self._arrivals or self._flight is not None or self.scheduler.reqs)

    def step(self) -> None:
        with self._explained():
            assert self.step_no < _MAX_STEPS, f"not done after {_MAX_STEPS} steps"
            self._flight = self.scheduler.step(self._flight)
        self.step_no += 1
        tree = self.scheduler.memory.tree
        tree.check()
        assert tree.num_pages == len(tree.all_pages()), f"{tree.num_pages} pages are said to be in the tree"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the engine's accounts and assertions name the lines that have leased what is left over."""
        try:
            yield
        except Exception as error:
            by_engine = type(error) in (AssertionError, RuntimeError) and not self.runner.device.severed
            lines = self._tags.left_over() if by_engine and self._tags is not None else []
            if not lines:
                raise
            raise OwnershipError("\n  ".join([f"ownership: {error}", *lines[:_MAX_NAMED]])) from error

    def run(self) -> None:
        """Run until all requests are answered and every transfer has ended. Raises what the engine raises."""
        while self.busy:
            self.step()
        tiers = self.scheduler.memory.tiers
        with self._explained():
            if tiers is not None:
                self._settle(tiers)
            self.scheduler.memory.check_memory(every_page=True)
        if self.runner.storage is not None:
            backend = self.runner.storage.controller._backend
            assert isinstance(backend, FileBackend), "the one that the flags can ask for"
            for event in events_of(backend) | (set() if self._bad_days is None else self._bad_days.events):
                self.watch.note(event)
        if self._tags is not None:
            self.runner.device.synchronize()
            self._tags.audit()

    def compare_answers(self) -> Findings:
        config = self.scheduler.config
        rounds_kv = config.server_args.kv_cache_dtype != "auto"
        return self.transcript.compare(_oracle(config.model.model_path, rounds_kv))

    def _settle(self, tiers: HiCache) -> None:
        """F6: all transfers end, their acks are drained, and then nothing is held."""
        while tiers.num_outstanding:
            self.step()
        tree = tiers.tree
        for count, what in (
            (tree.num_locked_nodes, "nodes are locked"),
            (tree.transit.num_pages, "pages are in transit"),
            (tree.host.num_holds, "holds are open"),
            (tree.host.num_orphan_pages, "host pages have no node"),
        ):
            assert count == 0, f"{count} {what} though nothing is on its way"
        mine, leased = tree.all_host_pages(), tiers.host_pages.owned()
        assert np.array_equal(mine, leased), f"host pages {leased} are leased, the tree has {mine}"
        self.scheduler.close()
        storage = self.runner.storage
        if storage is not None:
            num_left = len(storage.controller._workers) - storage.controller._num_gone
            assert num_left == 0, f"the scheduler has been closed, and {num_left} threads of the storage are left"


def inside(owner: object, name: str, context: Callable[..., AbstractContextManager[None]]) -> None:
    """Call the method ``name`` of ``owner`` inside ``context``, which gets its arguments."""
    method = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        with context(*args):
            return method(*args)

    setattr(owner, name, wrapped)
