"""All-reduce and all-gather of 2 to 8 GPUs of one host over memory that they open for each other
(include/fenceline/all_reduce.h)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from fenceline_kernel.errors import KernelUnavailable
from fenceline_kernel.library import KernelLibrary, load

MAX_RANKS = 8
MAX_SLOTS = 1 << 14  # captured launches in which peers write sums straight to the outputs; in any more, sums are copied
_MAX_BLOCKS, _MAX_THREADS, _VECTOR = 128, 512, 16
_ONE_SHOT_THREADS = 128  # of a block, if the blocks suffice: several SMs send a small message faster than one
_HANDLE = 64  # bytes of a cudaIpcMemHandle_t
_UNIT = "all_reduce"
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ONE_SHOT, _TWO_SHOTS, _FUSED, _FUSED_TWO_SHOTS, _FUSED_WORD_SHOTS, _GATHER = range(6)
ROW_WAYS = {"one shot": _FUSED, "in words": _FUSED_WORD_SHOTS, "two shots": _FUSED_TWO_SHOTS}
# Rows take one shot while what two shots in words would save, (ranks - 2) times their bytes, takes less time than to
# wait for a peer once more.
_WORDS_FROM = 256 << 10
_ROW_PARTS = 4  # the most vectors of a row that a thread normalises


class AllReduceRequest(ctypes.Structure):
    """fenceline::AllReduceRequest."""

    _fields_ = (
        ("buffers", ctypes.c_void_p * MAX_RANKS),
        *((name, ctypes.c_void_p) for name in ("x", "outputs", "residual", "weight", "hidden", "normed")),
        ("watch", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("num_vectors", "row_vectors", "words_capacity", "sums_capacity")),
        *((name, ctypes.c_uint32) for name in ("num_blocks", "num_threads")),
        *((name, ctypes.c_int32) for name in ("rank", "size", "dtype", "kind")),
        ("eps", ctypes.c_float),
        ("pdl", ctypes.c_int32),
    )


def _row_bytes(x: torch.Tensor) -> int:
    return x.shape[1] * x.element_size()  # x[0] would make a tensor


class PeerAllReduce:
    """The all-reduce of one rank. Every rank makes the same calls in the same order, on one stream each.

    ``exchange(data)`` returns all ranks' bytes, in the order of ranks. It is called by the constructor,
    :meth:`register` and :meth:`close` only. ``one_shot_bytes`` and ``max_bytes``: the largest messages in one shot and
    in two. ``max_blocks``: of a launch; all blocks that wait for each other must fit their GPUs at once. ``limit_s``:
    how long a launch waits for a peer before it gives up (see :attr:`lost`), 0: until :meth:`give_up`. ``pdl``,
    from sm_90 on: 1: a launch may start while the preceding kernel of its stream ends (programmatic dependent launch);
    it waits for that kernel before it reads or writes anything. 2: in the same way the next kernel may also start while
    a launch waits for its peers; each rank must then have a GPU of its own. Raises ``KernelUnavailable`` on all ranks
    alike where a GPU cannot reach another one's memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        exchange: Callable[[bytes], Sequence[bytes]],
        one_shot_bytes: int = 512 << 10,
        max_bytes: int = 8 << 20,
        library: KernelLibrary | None = None,
        max_blocks: int = _MAX_BLOCKS,
        limit_s: float = 0.0,
        pdl: int = 0,
    ) -> None:
        if not 2 <= size <= MAX_RANKS:
            raise KernelUnavailable(f"{size} ranks: our own all-reduce is for 2 to {MAX_RANKS} GPUs of one host")
        self.rank, self.size, self.device = rank, size, device
        self.one_shot_bytes, self.max_bytes = one_shot_bytes, max_bytes
        self._max_blocks, self._limit_ns = max_blocks, round(limit_s * 1e9)
        self.pdl = pdl if torch.cuda.get_device_capability(device) >= (9, 0) else 0
        self._watch = torch.zeros(0, dtype=torch.int32)
        self._exchange = exchange
        self._opened: dict[bytes, int] = {}  # by handle: the address in this process
        self._unregistered: list[tuple[int, int]] = []  # lines of the table, each with the address of its x
        self._num_slots = 0
        self._own = 0
        problem = self._set_up(library)
        problems = [text.decode() for text in exchange(problem.encode())]
        if any(problems):
            self._give_back()  # not close(): it exchanges bytes, and no rank has opened this memory yet
            number = next(i for i, text in enumerate(problems) if text)
            raise KernelUnavailable(f"our own all-reduce cannot be used on rank {number}: {problems[number]}")
        own = self._handle_of(self._own)[0]
        self._buffers = (ctypes.c_void_p * MAX_RANKS)()
        problem = ""
        for number, handle in enumerate(exchange(own)):
            try:
                self._buffers[number] = self._own if number == rank else self._open(handle)
            except RuntimeError as error:
                problem = str(error)
        problems = [text.decode() for text in exchange(problem.encode())]
        if any(problems):
            self.close()
            number = next(i for i, text in enumerate(problems) if text)
            raise KernelUnavailable(f"rank {number} cannot reach the other GPUs' memory: {problems[number]}")
        self._outputs = torch.zeros((MAX_SLOTS, MAX_RANKS), dtype=torch.int64, device=device)
        self._base = self._request()

    def _set_up(self, library: KernelLibrary | None) -> str:
        """Compile the kernels and allocate this rank's memory. Returns the problem, "" if there is none."""
        try:
            self._library = load(self.device) if library is None else library
            self._launch = self._function("all_reduce", ctypes.c_void_p, ctypes.c_void_p)
            self._locate = self._function("peer_locate", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
            self._open_handle = self._function("peer_open", ctypes.c_char_p, ctypes.c_void_p)
            self._close_handle = self._function("peer_close", ctypes.c_void_p)
            self._free = self._function("peer_free", ctypes.c_void_p)
            allocate = self._function("peer_allocate", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p)
            num_bytes = self._function("peer_bytes", ctypes.c_void_p)
            num_bytes.restype = ctypes.c_uint64
            request = self._request()
            memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(_HANDLE)
            self._call("peer_allocate", allocate, num_bytes(ctypes.byref(request)), ctypes.byref(memory), handle)
            self._own = memory.value or 0
            self._watch = torch.zeros(2, dtype=torch.int32, pin_memory=True)  # fenceline::PeerWatch
        except Exception as error:  # of any kind: the other ranks wait for this rank's answer
            return str(error) or type(error).__name__
        return ""

    def _function(self, name: str, *types: type) -> ctypes._NamedFuncPointer:
        function = self._library.function(_UNIT, f"fenceline_{name}")
        function.argtypes = types
        return function

    def _call(self, name: str, function: Callable[..., bytes | None], *args: object) -> None:
        with torch.cuda.device(self.device):
            error = function(*args)
        if error is not None:
            raise RuntimeError(f"{name}: {error.decode()}")

    def _request(self) -> AllReduceRequest:
        return AllReduceRequest(
            rank=self.rank,
            size=self.size,
            words_capacity=self.one_shot_bytes // _VECTOR,
            sums_capacity=self.max_bytes // _VECTOR,
            watch=self._watch.data_ptr() or None,
            limit_ns=self._limit_ns,
        )

    def _handle_of(self, address: int) -> tuple[bytes, int]:
        """The handle of the allocation in which ``address`` is, and the offset in it in bytes."""
        handle, offset = ctypes.create_string_buffer(_HANDLE), ctypes.c_uint64()
        self._call("peer_locate", self._locate, address, handle, ctypes.byref(offset))
        return handle.raw, offset.value

    def _open(self, handle: bytes) -> int:
        """The address of another process's memory. Each allocation is opened once, and closed by :meth:`close`."""
        if handle not in self._opened:
            memory = ctypes.c_void_p()
            self._call("peer_open", self._open_handle, handle, ctypes.byref(memory))
            self._opened[handle] = memory.value or 0
        return self._opened[handle]

    # --- launches ---------------------------------------------------------------------------------------

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` can be added up here: contiguous, bfloat16, float16 or float32, whole vectors of 16 bytes at an
        address that is a multiple of 16, at most ``max_bytes``."""
        return (
            x.dtype in _TYPES
            and 0 < x.nbytes <= self.max_bytes
            and x.nbytes % _VECTOR == 0
            and x.data_ptr() % _VECTOR == 0
            and x.is_contiguous()
        )

    def all_reduce(
        self,
        x: torch.Tensor,
        two_shots: bool | None = None,
        registered: bool = False,
        num_blocks: int = 0,
        num_threads: int = 0,
    ) -> None:
        """Replace ``x``, for which :meth:`takes` must be true, by the sum of all ranks' ``x``, on the current stream.

        ``two_shots``: None takes one shot up to ``one_shot_bytes``. ``registered``, in a capture: the second shot
        writes straight to the peers' ``x``, whose addresses :meth:`register` exchanges; ``x`` must be at the same
        address at every replay. ``num_blocks`` and ``num_threads``: the same on all ranks; 0 chooses them by the size.
        """
        two_shots = x.nbytes > self.one_shot_bytes if two_shots is None else two_shots
        request = self._filled(x, _TWO_SHOTS if two_shots else _ONE_SHOT)
        share = -(-request.num_vectors // self.size) if two_shots else request.num_vectors
        self._divide(request, share, _MAX_THREADS if two_shots else _ONE_SHOT_THREADS, num_blocks, num_threads)
        if two_shots and registered and self._num_slots < MAX_SLOTS:
            request.outputs = self._slot(x)
        self._run(request)

    def all_reduce_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        way: str = "",
    ) -> None:
        """``hidden`` = sum of ``x`` over ranks, rounded, + ``residual``, rounded; ``normed`` = RMSNorm of it: all
        [rows, row] of one type and contiguous, ``weight`` [row]. :meth:`takes_rows` must be true for ``x`` and
        ``way``. ``hidden`` may be ``residual``. In one launch on the current stream; the norm is computed in
        float32."""
        assert x.dim() == 2 and x.shape == residual.shape == hidden.shape == normed.shape, "rows of one shape"
        kind = self._row_kind(x, way)
        assert kind is not None, f"{tuple(x.shape)} cannot be normalised here"
        request = self._filled(x, kind)
        for name, tensor in (("residual", residual), ("weight", weight), ("hidden", hidden), ("normed", normed)):
            assert tensor.is_contiguous() and tensor.dtype is x.dtype, f"{name} is laid out like x"
            setattr(request, name, tensor.data_ptr())
        vectors = request.row_vectors = _row_bytes(x) // _VECTOR
        request.eps = eps
        together, threads = 1, min(_MAX_THREADS, vectors)
        if kind != _FUSED:
            together = self._rows_together(x)
            threads = together * vectors // self.size
        request.num_threads = -(-threads // 32) * 32
        request.num_blocks = min(self._max_blocks, -(-len(x) // together))
        self._run(request)

    def takes_rows(self, x: torch.Tensor, way: str = "") -> bool:
        """Whether :meth:`all_reduce_add_norm` takes ``x`` [rows, row], for which :meth:`takes` is true: rows of whole
        vectors and at most 32 KB. In two shots a rank's part of a row must also be whole warps' vectors. ``way``: one
        of ``ROW_WAYS``; "" chooses it by the size."""
        return self._row_kind(x, way) is not None

    def _row_kind(self, x: torch.Tensor, way: str) -> int | None:
        if _row_bytes(x) % _VECTOR or _row_bytes(x) > _ROW_PARTS * _MAX_THREADS * _VECTOR:
            return None
        divides = self._rows_together(x) > 0
        fits = {
            _FUSED: x.nbytes <= self.one_shot_bytes,
            _FUSED_WORD_SHOTS: divides and 2 * x.nbytes <= self.size * self.one_shot_bytes,
            _FUSED_TWO_SHOTS: divides,
        }
        kinds = [_FUSED, _FUSED_WORD_SHOTS, _FUSED_TWO_SHOTS] if not way else [ROW_WAYS[way]]
        if (self.size - 2) * x.nbytes > _WORDS_FROM:
            kinds.sort(key=_FUSED_WORD_SHOTS.__ne__)  # first
        return next((kind for kind in kinds if fits[kind]), None)

    def _rows_together(self, x: torch.Tensor) -> int:
        """How many rows a block takes at a time in two shots, a thread for each vector of its rank's part: several if
        there are more rows than blocks, or if threads would be too few for the whole row. 0: it cannot be done."""
        part, uneven = divmod(_row_bytes(x) // _VECTOR, self.size)
        least, most = -(-self.size // _ROW_PARTS), _MAX_THREADS // max(part, 1)
        return 0 if uneven or part % 32 or most < least else max(least, min(-(-len(x) // self._max_blocks), most))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write all ranks' ``x`` to ``out`` [size, *shape of x], contiguous, in the order of ranks, in one launch on
        the current stream. :meth:`takes` must be true for ``x``, which has at most ``one_shot_bytes``."""
        assert out.is_contiguous() and out.nbytes == self.size * x.nbytes, "a place for each rank's"
        assert x.nbytes <= self.one_shot_bytes, "gathered in one shot"
        request = self._filled(x, _GATHER)
        request.hidden = out.data_ptr()
        self._divide(request, request.num_vectors, _ONE_SHOT_THREADS)
        self._run(request)

    def _divide(
        self, request: AllReduceRequest, share: int, threads: int, num_blocks: int = 0, num_threads: int = 0
    ) -> None:
        """Divide ``share`` vectors among blocks of ``threads`` threads, or of more if there would be too many blocks.
        ``num_blocks`` and ``num_threads``: instead of those."""
        threads = min(_MAX_THREADS, max(threads, -(-share // self._max_blocks)), share)
        request.num_threads = num_threads or -(-threads // 32) * 32
        request.num_blocks = num_blocks or min(self._max_blocks, -(-share // request.num_threads))

    def _filled(self, x: torch.Tensor, kind: int) -> AllReduceRequest:
        assert self.takes(x), f"{x.dtype} {tuple(x.shape)} is not for this all-reduce"
        request = AllReduceRequest.from_buffer_copy(self._base)
        request.buffers = self._buffers
        request.x, request.kind, request.dtype = x.data_ptr(), kind, _TYPES[x.dtype]
        request.num_vectors = x.nbytes // _VECTOR
        request.pdl = self.pdl
        return request

    def _run(self, request: AllReduceRequest) -> None:
        call = functools.partial(self._launch, ctypes.byref(request))
        self._library.call("all_reduce", call, self.device, None)

    def limit(self, limit_s: float) -> None:
        """From now on a launch waits for a peer for at most ``limit_s`` seconds; 0: until :meth:`give_up`."""
        self._base.limit_ns = round(limit_s * 1e9)

    # --- ranks that are lost ------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Make all launches stop waiting for peers, the running one and later ones; any thread may call it. Launches in
        flight end within milliseconds, and all results are wrong from now on."""
        self._watch[0] = 1

    @property
    def lost(self) -> bool:
        """Whether a launch has stopped waiting for a peer. Does not ask the device."""
        return bool(self._watch[1])

    # --- graphs -----------------------------------------------------------------------------------------

    def _slot(self, x: torch.Tensor) -> int:
        """The address of the table's line in which the launch that is being captured will find all ranks' ``x``."""
        slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._unregistered.append((slot, x.data_ptr()))  # not x: the graph's pool keeps its memory and may share it
        return self._outputs[slot].data_ptr()

    def register(self) -> None:
        """Exchange the addresses of the ``x`` of captured launches between the ranks, and open that memory. Graphs may
        be replayed only after it. Waits for the device. Raises ``RuntimeError`` with the remedy if ranks have captured
        different graphs or memory cannot be shared."""
        captured, self._unregistered = self._unregistered, []
        entries = []
        for slot, own in captured:
            handle, offset = self._handle_of(own)
            entries.append(slot.to_bytes(4, "little") + offset.to_bytes(8, "little") + handle)
        for number, data in enumerate(self._exchange(b"".join(entries))):
            size = 12 + _HANDLE
            if len(data) != len(entries) * size:
                raise RuntimeError(
                    f"rank {number} has captured {len(data) // size} launches, rank {self.rank} {len(entries)}:"
                    " all ranks must capture the same graphs"
                )
            for (slot, own), start in zip(captured, range(0, len(data), size), strict=True):
                theirs = int.from_bytes(data[start : start + 4], "little")
                assert theirs == slot, "ranks capture in one order"
                offset = int.from_bytes(data[start + 4 : start + 12], "little")
                address = own if number == self.rank else self._open(data[start + 12 : start + size]) + offset
                self._outputs[slot, number] = address
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Close the peers' memory and free this rank's own. The caller has made sure that all ranks have ended their
        launches."""
        if self._own == 0:
            return
        torch.cuda.synchronize(self.device)
        for address in self._opened.values():
            self._call("peer_close", self._close_handle, address)
        self._opened.clear()
        self._exchange(b"")  # so that no memory is freed while another rank has it open
        self._give_back()

    def _give_back(self) -> None:
        if self._own:
            self._call("peer_free", self._free, self._own)
            self._own = 0
