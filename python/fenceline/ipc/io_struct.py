"""Messages between the processes: TokenizerManager → Scheduler → DetokenizerManager → TokenizerManager.

Every message is a tagged msgspec struct; :func:`encode` and :func:`decode` are the only wire format.
Three inboxes exist (``ipc.mailbox``), each with one reader: ``scheduler`` (requests and control messages, and
the detokenizer's stop-string aborts), ``detokenizer`` (:class:`BatchTokenOut`) and ``tokenizer``
(:class:`BatchStrOut` from the detokenizer, control replies from the scheduler). Under
``--skip-tokenizer-init`` the scheduler sends its :class:`BatchTokenOut` straight to ``tokenizer``.

The ids of a prompt travel as bytes, int32, so that thousands of them are encoded and decoded by copying.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fenceline.constrained.spec import ThinkTokens
from fenceline.images.image_input import ImageInput
from fenceline.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    IdArray = array[int]
else:  # msgspec reads the annotations, and an array takes no parameter before Python 3.12
    IdArray = array


def id_array(ids: Iterable[int] = ()) -> IdArray:
    """Token ids as messages carry them: int32. Raises OverflowError for one that does not fit. Such an array is
    returned as it is. Of a list, 16 bytes an id are used meanwhile."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    if isinstance(ids, list):
        try:
            # In three fifths of the time that array takes for a list.
            return array("i", struct.pack(f"{len(ids)}i", *ids))
        except struct.error:
            pass  # array raises for the same id
    return array("i", ids)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag is the class name."""


# --- TokenizerManager (and DetokenizerManager) -> Scheduler ------------------------------------------


class TokenizedGenerateReq(Message):
    """One request with its prompt as token ids. ``n`` > 1 is already expanded into ``n`` of these.

    ``logprob_start_len``: the first prompt position that is reported, without a logprob as in SGLang; those
    after it have theirs (of token i given tokens < i). -1 means none of the prompt's. ``top_logprobs_num``: how
    many alternatives each position reports; ``token_ids_logprob``: tokens whose logprobs each position reports,
    in this order, empty for none.
    ``extra_key``: the namespace in which its KV is cached, "" for the common one: requests of different
    namespaces never share a page, on any tier. ``priority``: with --enable-priority-scheduling, which waiting
    request goes first. ``body``: the number of the body that it came in together with others; bodies take turns. 0 for
    one that came alone. ``same_prompt``: its prompt is that of the request of this body that was sent before it, and
    ``input_ids`` and ``images`` are empty. ``images`` have
    their places in ``input_ids``. ``same_bias``: the same of its ``logit_bias``, which is then None. ``grammar``: the
    :class:`LoadGrammarReq` that the answer follows, 0 for none, apart from what the model thinks between the tokens
    ``think``. ``embed``: its answer is the prompt's embedding; ``max_new_tokens`` is 0, and nothing is scored.
    """

    rid: str
    input_ids: IdArray
    sampling_params: SamplingParams
    images: list[ImageInput] = []
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    extra_key: str = ""
    priority: int = 0
    body: int = 0
    same_prompt: bool = False
    same_bias: bool = False
    grammar: int = 0
    think: ThinkTokens | None = None
    replica: int | None = None  # of several, the one that must answer it
    embed: bool = False


class LoadGrammarReq(Message):
    """A compiled grammar, which requests name by ``grammar``, a number above 0 that is used once. ``vocabulary``: that
    for which all are compiled, with the first. ``forgotten``: those that no further request names. Answered by
    :class:`ControlReply` when requests may name it."""

    id: str
    grammar: int
    data: bytes
    vocabulary: bytes = b""
    forgotten: list[int] = []


class SlowGrammarsReq(Message):
    """Among several ranks rank 0 says which ``grammars`` have taken too much time: their requests end. Not answered."""

    grammars: list[int]


class AbortReq(Message):
    """Abort one request (or all). ``silent`` True when the detokenizer ends it at a stop string: the
    request is then released silently, its last output is already on its way to the client. With ``message`` and
    ``status_code`` the client is told an error, else that the request was aborted."""

    rid: str = ""
    abort_all: bool = False
    silent: bool = False
    message: str = ""
    status_code: int | None = None


class TickReq(Message):
    """What time it is, for --req-waiting-timeout and --req-running-timeout: seconds of the sender's clock. The only
    clock by which the scheduler decides about requests, so that its decisions remain a function of its inbox."""

    now: float


class FlushCacheReq(Message):
    """Empty the prefix cache on device and host, with ``storage`` the storage tier too; refused unless idle, or with
    ``wait`` done as soon as no request is left. Answered by :class:`ControlReply`."""

    id: str
    storage: bool = False
    wait: bool = False


class CancelFlushReq(Message):
    """A :class:`FlushCacheReq` that still waits is answered now, by its ``id``: it is refused if requests are left. Not
    answered itself."""

    id: str


class UpdateWeightsReq(Message):
    """Replace the model's weights between two steps: by the checkpoint in the directory ``model_path``, or where there
    is none by the tensors in ``file``, a safetensors file. What runs is aborted (``abort_all_requests``), or returns to
    the queue and is computed again with the new weights. ``weight_version``: their label, None keeps the old one.
    ``keep_pause``: nothing is scheduled afterwards, unless the server is shutting down. Answered by
    :class:`ControlReply`, with the number of requests that ran as its payload; one that fails has changed nothing."""

    id: str
    model_path: str | None = None
    file: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False


class PauseGenerationReq(Message):
    """Stop scheduling. ``mode``: ``abort`` ends all requests, ``retract`` returns them to the queue and
    frees their memory, ``in_place`` keeps them where they are. Answered by :class:`ControlReply`."""

    id: str
    mode: str = "abort"


class ContinueGenerationReq(Message):
    """Resume scheduling after a pause. Answered by :class:`ControlReply`."""

    id: str


class ProfileReq(Message):
    """Start or stop the torch profiler in the scheduler process. Answered by :class:`ControlReply`."""

    id: str
    action: str  # "start" | "stop"
    output_dir: str | None = None
    num_steps: int | None = None


class FlightRecorderReq(Message):
    """Ask for the contents of the flight recorder. Answered by :class:`ControlReply`: for a ``file`` its path is the
    reply's ``message``; ``json`` and a ``trace`` of the last steps are its ``payload``."""

    id: str
    form: Literal["file", "json", "trace"] = "file"


class GetInternalStateReq(Message):
    """Ask for :class:`InternalState`; answered by :class:`ControlReply` with ``state`` set. ``num_steps``: with so many
    of the flight recorder's last steps as JSON in ``payload`` (see ``scheduler.control.live_steps``)."""

    id: str
    num_steps: int = 0


class ShutdownReq(Message):
    """Stop the scheduler loop. ``drain`` True lets running requests finish first."""

    drain: bool = True


# --- Scheduler -> DetokenizerManager -----------------------------------------------------------------


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended. ``type``: ``stop`` | ``length`` | ``abort``. ``matched``: the stop token id or
    stop string. ``message`` and ``status_code`` describe an abort that is an error."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


class TokenPairs(msgspec.Struct, array_like=True):
    """For each of consecutive positions its (logprob, token id) pairs, any number of them. Iterating gives a list of
    pairs for each position. They travel as bytes, float32 and int32: half a million pairs would be two million Python
    objects in each of three processes, and encoding and decoding them takes as many turns."""

    counts: list[int] = []  # of the pairs of each position
    logprobs: bytearray = msgspec.field(default_factory=bytearray)
    token_ids: bytearray = msgspec.field(default_factory=bytearray)

    @classmethod
    def of(cls, positions: Iterable[Sequence[tuple[float, int]]]) -> TokenPairs:
        """Those of ``positions``."""
        made = cls()
        for pairs in positions:
            logprobs, token_ids = array("f", [p[0] for p in pairs]), array("i", [p[1] for p in pairs])
            made.append(logprobs.tobytes(), token_ids.tobytes())
        return made

    def append(self, logprobs: bytes, token_ids: bytes, num_positions: int = 1) -> None:
        """More positions with equally many pairs each: the bytes of their float32 logprobs and of as many int32 ids."""
        assert len(logprobs) == len(token_ids), "as many logprobs as ids"
        assert len(token_ids) % (4 * num_positions) == 0, "as many in each position"
        self.counts += [len(token_ids) // 4 // num_positions] * num_positions
        self.logprobs += logprobs
        self.token_ids += token_ids

    def extend(self, other: TokenPairs) -> None:
        """All positions of ``other``."""
        self.counts.extend(other.counts)
        self.logprobs += other.logprobs
        self.token_ids += other.token_ids

    def first(self, num_positions: int) -> TokenPairs:
        """The first positions alone."""
        counts = self.counts[:num_positions]
        end = 4 * sum(counts)
        return TokenPairs(counts, self.logprobs[:end], self.token_ids[:end])

    @property
    def num_pairs(self) -> int:
        """The number of pairs of all positions together."""
        return len(self.token_ids) // 4

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[list[tuple[float, int]]]:
        for logprobs, token_ids in self.columns():
            yield list(zip(logprobs, token_ids, strict=True))

    def columns(self) -> Iterator[tuple[array[float], array[int]]]:
        """For each position its logprobs and their token ids."""
        start = 0
        for count in self.counts:
            end = start + 4 * count
            yield array("f", self.logprobs[start:end]), array("i", self.token_ids[start:end])
            start = end


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Logprobs of consecutive positions: the chosen tokens' and each position's best alternatives. ``logprobs[i]`` is
    None for the first position of a prompt that was asked for. ``top_logprobs`` holds each position's pairs in
    descending order, none where none were asked for. ``token_ids_logprobs`` holds for each position the pairs of the
    tokens in ``token_ids_logprob``, in that order, and none for a position without a logprob; it is empty as a whole
    when the request named no tokens."""

    token_ids: list[int]
    logprobs: list[float | None]
    top_logprobs: TokenPairs
    token_ids_logprobs: TokenPairs = msgspec.field(default_factory=TokenPairs)


class CachedTokensDetails(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request's ``cached_tokens`` by the tier in which they were found; the sum is ``cached_tokens``."""

    device: int
    host: int
    storage: int


class TokenOut(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The new tokens of one request since the last :class:`TokenOut` of the same request. The first one (``decode`` not
    None) carries what decoding needs. ``output_ids`` of a request over all its messages are its whole output, once
    each, in order. ``finish_reason`` not None: the last message. ``cached_tokens_details`` is None without HiCache."""

    rid: str
    output_ids: list[int]
    prompt_tokens: int
    completion_tokens: int  # total so far, including output_ids
    cached_tokens: int
    finish_reason: FinishReason | None = None
    decode: DecodeInfo | None = None
    input_logprobs: TokenLogprobs | None = None
    output_logprobs: TokenLogprobs | None = None
    num_retractions: int = 0
    cached_tokens_details: CachedTokensDetails | None = None
    spec: SpecCounts | None = None  # None without speculation


class SpecCounts(msgspec.Struct, frozen=True, array_like=True):
    """What speculation has done for a request so far."""

    verify_ct: int  # decode steps
    num_accepted: int  # drafts that were accepted
    num_drafts: int  # drafts that were proposed


class DecodeInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is told of a request once, with its first :class:`TokenOut`: what the detokenizer must know, and
    ``queue_time_s``, the seconds from its arrival at the scheduler to the step that began it (None: it never began).
    ``embedding``: float32, not normalised, of a request that embeds; its first message is its last.
    """

    prompt_tail_ids: list[int]  # last prompt tokens: context for incremental decoding
    sampling_params: SamplingParams
    queue_time_s: float | None = None
    embedding: bytes | None = None


class BatchTokenOut(Message):
    """All news of one scheduler step."""

    outs: list[TokenOut]
    replica: int = 0


# --- DetokenizerManager -> TokenizerManager ----------------------------------------------------------


class StrOut(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """:class:`TokenOut` with text: ``text`` is the *new* text since the last message (never part of a
    character, never the beginning of a stop string that may still complete)."""

    token: TokenOut
    text: str


class BatchStrOut(Message):
    """All news of one :class:`BatchTokenOut`, decoded."""

    outs: list[StrOut]
    replica: int = 0  # of several, the one that sends it: told by the link that receives it


# --- Scheduler -> TokenizerManager -------------------------------------------------------------------


class CudaGraphState(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps, or prefill steps small enough for graphs, since start. The aim is that all are replays."""

    eligible_steps: int
    replays: int
    replays_by_size: dict[str, int]
    fallbacks: dict[str, int]  # steps that ran without a graph, by reason
    repairs: dict[str, int]  # steps before which something wrong had to be put right, by reason
    capture_s: float
    capture_bytes: int


class TransferState(msgspec.Struct, frozen=True, kw_only=True):
    """Finished transfers in one direction since start. ``seconds`` is the sum of their times, which may overlap."""

    num_transfers: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class HiCacheState(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers under the prefix cache. Counts are since start, pages and nodes are as of now."""

    cached_tokens: dict[str, int]  # prompt tokens found, by tier: "device", "host", "storage"
    num_host_tokens: int  # size of the host tier
    num_used_host_tokens: int
    # The tree's pages by where their bytes are: "device" only, "host" only, "both"; "in_transit" are being copied, and
    # are counted in one of the others too.
    pages: dict[str, int]
    num_locked_nodes: int  # by requests, transfers or storage workers; 0 when all is quiet
    evicted_tokens: dict[str, int]  # that left a tier, by tier: "device", "host"
    load: TransferState  # host to device
    store: TransferState  # device to host
    storage_read: TransferState  # storage to host
    storage_write: TransferState  # host to storage
    prefetches: dict[str, int]  # reads from the storage, by how they ended
    recomputes: dict[str, int]  # values computed again because pages had moved, by reason
    num_storage_misses: int  # pages that were looked for and not there, or could not be read
    storage_errors: dict[str, int]  # pages that could not be read or written, by reason


class InternalState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a scheduler: fields of /get_server_info and the gauges of /metrics."""

    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int  # held by requests, the tree's unlocked pages excluded
    num_evictable_tokens: int  # of prefixes that are kept for later requests, until others need the memory
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float  # of prompt tokens since start
    gen_throughput: float  # tokens/s over the last log interval, 0 while nothing runs
    num_retractions: int
    num_aborts: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    new_token_ratio: float
    paused: bool
    memory_bytes: dict[str, int]  # "weights", "kv_cache", ...
    num_mixed_steps: int = 0  # since start, in which prompts were computed while others decoded
    last_gen_throughput: float = 0.0  # tokens/s over the last log interval in which something ran
    cuda_graphs: CudaGraphState | None = None  # None without graphs
    piecewise_cuda_graphs: CudaGraphState | None = None  # prefill's; None without
    hicache: HiCacheState | None = None  # None without HiCache
    # Tokens of a request's step since start; None without speculation.
    avg_spec_accept_length: float | None = None
    # Decode steps since start by how many tokens their drafts proposed, one after the other; None without speculation
    spec_steps_by_depth: dict[str, int] | None = None


class ControlReply(Message):
    """Answer to the control message with the same ``id``."""

    id: str
    success: bool
    message: str = ""
    state: InternalState | None = None
    payload: bytes = b""
    replica: int = 0


class Stage(msgspec.Struct, array_like=True):
    """Something that a request went through in the scheduler: ``queue``, ``retraction`` (until it ran again),
    ``load_storage`` and ``load_host`` of ``num_tokens``. Times are ``time.perf_counter()``, which the processes of a
    host share."""

    name: str
    start: float
    end: float = 0.0
    num_tokens: int = 0


class StagesReport(Message):
    """Stages of a request that are over, where requests are traced; sent before the tokens that follow them."""

    rid: str
    stages: list[Stage]


class StatsReport(Message):
    """Sent about once a second while there is something to tell, for /metrics."""

    state: InternalState
    replica: int = 0


class SchedulerReady(Message):
    """The scheduler serves: model loaded, memory sized. Sent once to ``detokenizer``, which passes it on to
    ``tokenizer`` when it serves too: who receives it there knows that both do."""

    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int  # longest admissible prompt in tokens
    context_length: int
    memory_bytes: dict[str, int]
    num_replicas: int = 1  # that share the requests, each with a memory of its own


class FatalError(Message):
    """The sender is about to exit with a non-zero status, for this reason."""

    source: str
    message: str


SchedulerInput = (
    TokenizedGenerateReq
    | LoadGrammarReq
    | SlowGrammarsReq
    | AbortReq
    | TickReq
    | FlushCacheReq
    | CancelFlushReq
    | UpdateWeightsReq
    | PauseGenerationReq
    | ContinueGenerationReq
    | ProfileReq
    | FlightRecorderReq
    | GetInternalStateReq
    | ShutdownReq
)
DetokenizerInput = BatchTokenOut | SchedulerReady | ShutdownReq
TokenizerInput = BatchStrOut | BatchTokenOut | ControlReply | StagesReport | StatsReport | SchedulerReady | FatalError


def _bytes_of(value: object) -> memoryview:
    if not isinstance(value, array):  # what msgspec asks of a hook for a type that it does not know
        raise NotImplementedError(f"messages have no values of type {type(value).__name__}")
    return memoryview(value)


def _ids_of(kind: type, data: object) -> IdArray:
    assert kind is array, f"messages have no values of type {kind.__name__}"
    if not isinstance(data, bytes):
        raise ValueError(f"expected token ids as bytes, got {type(data).__name__}")
    return array("i", data)  # ValueError unless there are four bytes for each


def decoder(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of ``messages``, a type that contains messages of this module. It raises ``msgspec.ValidationError``
    for anything else, also for token ids of which the last is incomplete."""
    return msgspec.msgpack.Decoder(messages, dec_hook=_ids_of)


# Encodes messages, and what contains them.
ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_DECODER = decoder(
    SchedulerInput
    | BatchTokenOut
    | BatchStrOut
    | ControlReply
    | StagesReport
    | StatsReport
    | SchedulerReady
    | FatalError
)
# What each of the three inboxes takes.
SCHEDULER_DECODER = decoder(SchedulerInput)
DETOKENIZER_DECODER = decoder(DetokenizerInput)
TOKENIZER_DECODER = decoder(TokenizerInput)


def encode(message: Message) -> bytes:
    """One message as msgpack."""
    return ENCODER.encode(message)


def encode_apart(message: Message) -> list[bytes]:
    """One message as msgpack, and after it the pixels of its images, which are not copied: 256 MiB of them would take
    the sender a third of a second, and the receiver as long. An Inbox puts the two together again."""
    if not isinstance(message, TokenizedGenerateReq) or not message.images:
        return [encode(message)]
    images = [msgspec.structs.replace(image, pixels=b"") for image in message.images]
    return [encode(msgspec.structs.replace(message, images=images)), *[image.pixels for image in message.images]]


def decode(data: bytes | memoryview) -> Message:
    """The inverse of :func:`encode`. Raises ``msgspec.ValidationError`` on anything else."""
    message: Message = _DECODER.decode(data)
    return message


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoints (``ipc://`` paths in a private folder) of one server."""

    scheduler: str
    detokenizer: str
    tokenizer: str
