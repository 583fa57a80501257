"""Scenarios: the messages that arrive at each step of the scheduler's loop, and the flags; how workloads make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import structs

from fenceline.ipc.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    FlushCacheReq,
    Message,
    TokenizedGenerateReq,
    UpdateWeightsReq,
    id_array,
)
from fenceline.sampling.sampling_params import SamplingParams
from fenceline_proof.tiny_model import VOCAB_SIZE, tiny_model_path, tiny_part, tiny_weights

Flag = int | float | str | bool | tuple[int, ...]
Flags = Mapping[str, Flag]
GRAPH_CONTEXT = 64
# Prefill steps in pieces, of two sizes.
PIECES: Flags = {"piecewise_cuda_graph_tokens": (4, 8), "context_length": GRAPH_CONTEXT}
_SIZES = ("max_total_tokens", "max_running_requests", "chunked_prefill_size")
_OF_THE_MESSAGE = frozenset(TokenizedGenerateReq.__struct_fields__)  # the rest are sampling parameters


@dataclass(frozen=True, slots=True)
class Arrival:
    """``message`` is in the inbox when the loop begins its ``step``-th step."""

    step: int
    message: Message


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The next turn of a conversation: ``pause`` steps after the answer, ``request`` is sent with all tokens so far and
    ``words`` as its prompt."""

    pause: int
    words: tuple[int, ...]
    request: TokenizedGenerateReq


@dataclass(frozen=True, slots=True)
class Reaction:
    """From ``step`` on, when a request is first seen in ``state`` (``events.STATES``), ``message`` arrives; None: the
    request is aborted. In state "" no request is left."""

    step: int
    state: str
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run's input: flags of the engine, arrivals in order of steps, follow-ups by rid, and reactions to states of
    requests."""

    flags: Flags
    arrivals: tuple[Arrival, ...]
    follow_ups: Mapping[str, FollowUp] = field(default_factory=dict)
    reactions: tuple[Reaction, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """A named family of scenarios. ``share``: how many of a round's runs it gets. ``policies``: those of its schedules,
    by seed, if not the usual ones (``runs.policy_of``). ``kinds``: what ``make`` chooses from."""

    name: str
    about: str
    make: Callable[[Random], Scenario]
    share: int = 1
    policies: tuple[str, ...] = ()
    kinds: tuple[Callable[[Random], Scenario], ...] = ()

    def scenario(self, seed: int) -> Scenario:
        """That of ``seed``; seeds take turns through the workload's kinds, if it has some."""
        make = self.kinds[seed % len(self.kinds)] if self.kinds else self.make
        return make(Random(seed))


@dataclass(slots=True)
class Script:
    random: Random
    arrivals: list[Arrival] = field(default_factory=list)
    follow_ups: dict[str, FollowUp] = field(default_factory=dict)
    reactions: list[Reaction] = field(default_factory=list)
    num_reqs: int = 0
    num_updates: int = 0

    def prompt(self, shortest: int, longest: int) -> list[int]:
        return [self.random.randrange(1, VOCAB_SIZE) for _ in range(self.random.randint(shortest, longest))]

    def add(self, step: int, prompt: list[int], num_tokens: int, **options: Any) -> str:
        """Add a request and return its rid. Options that are not fields of the message are sampling parameters."""
        message = self._request(prompt, num_tokens, options)
        self.send(step, message)
        return message.rid

    def follow(self, rid: str, pause: int, words: list[int], num_tokens: int, **options: Any) -> str:
        """Add the turn after ``rid``'s of the same conversation and return its rid."""
        message = self._request([], num_tokens, options)
        self.follow_ups[rid] = FollowUp(pause, tuple(words), message)
        return message.rid

    def _request(self, prompt: list[int], num_tokens: int, options: dict[str, Any]) -> TokenizedGenerateReq:
        rid = f"r{self.num_reqs}"
        self.num_reqs += 1
        seed = self.random.getrandbits(32)
        # Each request names other tokens, so that those of another one's are noticed.
        for name in ("token_ids_logprob", "logit_bias"):
            ids = options.get(name)
            if ids:
                shifted = [(token + self.num_reqs) % VOCAB_SIZE for token in ids]
                values = ids.values() if isinstance(ids, dict) else ()
                options[name] = dict(zip(shifted, values, strict=True)) if values else shifted[self.num_reqs % 2 :]
        if num_tokens <= 1 and seed % 4 == 0 and not options.keys() & {"return_logprob", "grammar", "min_new_tokens"}:
            num_tokens, options = 0, options | {"embed": True}  # the prompt's embedding instead of a token
        outer = {name: options.pop(name) for name in list(options) if name in _OF_THE_MESSAGE}
        params = SamplingParams(max_new_tokens=num_tokens, seed=seed, **({"temperature": 0.0} | options))
        outer = {"stream": True} | outer
        return TokenizedGenerateReq(rid=rid, input_ids=id_array(prompt), sampling_params=params, **outer)

    def send(self, step: int, message: Message) -> None:
        self.arrivals.append(Arrival(step, message))

    def empty(self, step: int, wait: bool = False) -> None:
        """All requests are aborted at ``step``, and device and host are emptied."""
        self.send(step, AbortReq(abort_all=True))
        self.send(step, FlushCacheReq(id=f"flush {step}", wait=wait))

    def abort_when(self, state: str, step: int) -> None:
        """Abort the first request that is seen in ``state`` from ``step`` on."""
        self.reactions.append(Reaction(step, state))

    def when_idle(self, step: int, message: Message) -> None:
        """``message`` arrives when no request is left, from ``step`` on."""
        self.reactions.append(Reaction(step, "", message))

    def new_weights(self, step: int, abort_all: bool = False, partly: float = 0.0, keep_pause: bool = False) -> None:
        """The weights are replaced at ``step``, by others or by the first ones; a share of ``partly`` replaces some
        tensors, when a request runs. With ``keep_pause`` generation is paused afterwards for a few steps."""
        self.num_updates += 1
        number = self.random.randrange(3)
        folder, label = tiny_weights(number) if number else tiny_model_path(), str(number)
        message = UpdateWeightsReq(
            id=f"weights {self.num_updates}", model_path=folder, weight_version=label, abort_all_requests=abort_all,
            keep_pause=keep_pause,
        )  # fmt: skip
        if partly and self.random.random() < partly:
            file = tiny_part(max(number, 1))
            message = structs.replace(message, model_path=None, file=file, weight_version=None)
            if not keep_pause:
                self.reactions.append(Reaction(step, "running", message))
                return
        self.send(step, message)
        if keep_pause:
            pause = self.random.randint(1, 4)
            self.send(step + pause, ContinueGenerationReq(id=f"continue {message.id}"))

    def scenario(self, sizes: tuple[int, int, int] | tuple[()] = (), /, **flags: Flag) -> Scenario:
        """The scenario that has been built. ``sizes``: ``max_total_tokens``, ``max_running_requests`` and
        ``chunked_prefill_size``; pages have 4 tokens unless the ``flags`` say otherwise."""
        flags = {"page_size": 4, **dict(zip(_SIZES, sizes, strict=False)), **flags}
        own = Random(str(self.random.getstate()[1][:8]))  # so that the other runs stay as they are
        if own.random() < 0.3:
            flags["enable_mixed_chunk"] = True
        arrivals = tuple(sorted(self.arrivals, key=lambda arrival: arrival.step))
        return Scenario(flags, arrivals, self.follow_ups, tuple(self.reactions))

    def graphs(self, *sizes: int, share: float = 0.5) -> Flags:
        """In a share of the runs, decode in graphs of ``sizes``; a few of them without padding."""
        if self.random.random() >= share:
            return {}
        # With the model's own context length every captured attention would be long.
        flags: dict[str, Flag] = {"cuda_graph_bs": sizes, "context_length": GRAPH_CONTEXT}
        return flags | ({"disable_cuda_graph_padding": True} if self.random.random() < 0.2 else {})

    def in_turn(self) -> Flags:
        """In a few of the runs, each step ends before the next one begins."""
        return {"disable_overlap_schedule": True} if self.random.random() < 0.15 else {}

    def options(self) -> dict[str, object]:
        """Sampling options of a request: mostly greedy, otherwise one of all kinds."""
        return dict(self.random.choice(_OPTIONS))


_OPTIONS: tuple[dict[str, object], ...] = (
    {}, {}, {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 8, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [7, 3]},
    {"min_new_tokens": 2, "logit_bias": {5: 3.0, 9: -4.0}},
)  # fmt: skip
