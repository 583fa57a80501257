"""One rank of a case as a process, on several GPUs or with several ranks on one: ``python multi_gpu_cases.py CASE RANK
SIZE FOLDER``. It writes its results to FOLDER/RANK.json. If it fails, the error goes to stderr and the status is not
0."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bucket_traces import difference_across_ranks
from peer_memory import NEAR_THE_END, begin_at, launches_of

from fenceline.distributed import ranks_share_gpu
from fenceline.distributed.gloo import GlooBackend
from fenceline.distributed.nccl import NcclBackend
from fenceline.distributed.peer import MAX_BYTES, ONE_SHOT_BYTES, PeerBackend, one_shot_bytes
from fenceline.distributed.staged import StagedBackend
from fenceline.layers.context import Shard
from fenceline.memory_order import Communicator, CommunicatorError, GraphError, PeerLostError, open_device
from fenceline.memory_order.cuda import CudaDevice
from fenceline.memory_order.edges import ONE_STREAM, REGISTERED_GRAPH, TOTAL_BUCKETS

Found = dict[str, object]

_SMALL_SHOT = 64 << 10  # bytes: what the back end's trial takes, and fewer than 1,024 tokens of a small model


class Rank:
    """``severed``: guards that are left out."""

    def __init__(self, rank: int, size: int, folder: Path, severed: frozenset[str] = frozenset()) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        device = open_device("cuda", severed, 0 if ranks_share_gpu() else rank)
        assert isinstance(device, CudaDevice)
        self.device = device
        meeting = (folder / "meeting").as_uri()
        self.nccl: NcclBackend | StagedBackend
        if ranks_share_gpu():
            self.nccl = StagedBackend(GlooBackend(rank, size, meeting))
        else:
            self.nccl = NcclBackend(rank, size, meeting, device.torch_device)
        with device.forward.active():
            self.backend = PeerBackend(self.nccl, device.torch_device)
        assert self.backend._own is not None, "our own all-reduce cannot be used here"
        self.own = self.backend._own
        self.communicator = Communicator("ranks", device, device.forward, self.backend)
        self.generator = torch.Generator(device.torch_device).manual_seed(17 + rank)

    def numbers(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers that differ between ranks."""
        return torch.randn(numel, generator=self.generator, device=self.device.torch_device).to(dtype)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The sum in float32 in the order of ranks, rounded once, by NCCL and torch."""
        parts = x.new_empty((self.size, *x.shape))
        self.nccl.all_gather(x.contiguous(), parts)
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        return total.to(x.dtype)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce(x)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        mine = torch.zeros(1, device=self.device.torch_device)
        self.nccl.all_gather(mine, mine.new_empty((self.size, 1)))
        self.device.synchronize()


def sizes_of(rank: Rank) -> list[int]:
    """Sizes in bytes around every boundary at which another algorithm is used, like batches around a bucket (F11)."""
    found = [16, 48, 1024, 1025 * 16]
    for limit in (
        rank.own.one_shot_bytes,
        MAX_BYTES,
        128 * 16,
        512 * 16,
        128 * 128 * 16,
        64 * 512 * 16,
        128 * 512 * 16,
    ):
        found += [limit - 16, limit, limit + 16]
    return sorted({*found, 6, MAX_BYTES + 2})


def sums(rank: Rank) -> Found:
    """Sums of every size and type, eagerly, twice in a row."""
    num = 0
    with rank.device.forward.active():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for nbytes in sizes_of(rank):
                for _ in range(2):
                    x = rank.numbers(max(nbytes // dtype.itemsize, 1), dtype)
                    wanted = rank.in_order(x)
                    assert torch.equal(rank.sum(x), wanted), f"{dtype}, {nbytes} bytes"
                    num += 1
    return {"sums": num}


def ways(rank: Rank) -> Found:
    """One shot, two shots and fused must have the same bits."""
    with rank.device.forward.active():
        for rows in (1, 2, 7, min(32, rank.own.one_shot_bytes // (2 * 4096))):
            x = rank.numbers(rows * 4096, torch.bfloat16).view(rows, 4096)
            one, two = x.clone(), x.clone()
            rank.own.all_reduce(one, False)
            rank.own.all_reduce(two, True)
            residual, hidden, normed = torch.zeros_like(x), torch.empty_like(x), torch.empty_like(x)
            weight = torch.ones(4096, dtype=x.dtype, device=x.device)
            rank.own.all_reduce_add_norm(x, residual, weight, 1e-6, hidden, normed)
            assert torch.equal(one, two) and torch.equal(one, hidden) and torch.equal(one, rank.in_order(x))
            exact = hidden.float() * (hidden.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            assert torch.allclose(normed.float(), exact, rtol=1e-2, atol=1e-3)
    return {"ways": 3}


def mixed(rank: Rank, pdl: int = 0) -> Found:
    """All kinds of launches, of different sizes in turn, in one graph that is replayed while one rank is late, at first
    while the last 32 bits of the generation begin at 0 again. ``pdl``: see
    ``PeerAllReduce``; with 2 a launch starts while the preceding one waits for its peers."""
    own, device = rank.own, rank.device
    begin_at(own, NEAR_THE_END)
    rank.meet()
    own.pdl = pdl
    # What one shot takes depends on the number of ranks.
    sizes = (8 << 10, 16, 64 << 10, own.one_shot_bytes, 48, 2048 + 16, own.one_shot_bytes // 2 + 16)
    sources = [torch.zeros(n // 2, dtype=torch.bfloat16, device=device.torch_device) for n in sizes]
    sums = [torch.zeros_like(source) for source in sources]
    twice = [torch.zeros_like(source) for source in sources]
    parts = [source.new_zeros((rank.size, len(source))) for source in sources]
    rows, weight = sources[0].view(1, -1), torch.ones_like(sources[0])
    residual, hidden, normed = torch.ones_like(rows), torch.zeros_like(rows), torch.zeros_like(rows)

    def body() -> None:
        for source, one, two, part in zip(sources, sums, twice, parts, strict=True):
            one.copy_(source)
            two.copy_(source)
            own.all_reduce(one, False)
            own.all_reduce(two, True, registered=torch.cuda.is_current_stream_capturing())
            own.all_gather(source, part)
            own.all_reduce_add_norm(rows, residual, weight, 1e-6, hidden, normed)

    with device.forward.active():
        body()
        device.synchronize()
        graph = device.capture("mixed", device.make_graph_pool("case"), body)
        graph.register(*device.communicators)
        graph.allow_replay()
        num_replays = 60
        for turn in range(num_replays):
            for source in sources:
                source.normal_(generator=rank.generator)
            wanted = [rank.in_order(source) for source in sources]
            device.synchronize()
            if turn % rank.size == rank.rank:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            for n, one, two, part, total, source in zip(sizes, sums, twice, parts, wanted, sources, strict=True):
                assert torch.equal(one, total), f"replay {turn}, one shot of {n} bytes"
                assert torch.equal(two, total), f"replay {turn}, two shots of {n} bytes"
                assert torch.equal(part[rank.rank], source), f"replay {turn}, gather of {n} bytes"
                added = part[0].float()
                for other in part[1:]:
                    added += other.float()
                assert torch.equal(added.to(total.dtype), total), f"replay {turn}, gather of {n} bytes"
            assert torch.equal(hidden, wanted[0].view(1, -1) + residual), f"replay {turn}, fused"
        assert not own.lost and launches_of(own) > 1 << 32
    return {"replays": num_replays}


def mixed_pdl(rank: Rank) -> Found:
    """See ``mixed``."""
    return mixed(rank, 2)


def graphs(rank: Rank) -> Found:
    """F10: sums of all sizes are captured, registered and replayed while one rank is late. Each is compared, with eager
    sums in between. The largest goes through NCCL, which ranks that share a GPU do not have."""
    device = rank.device
    sizes = [8 << 10, one_shot_bytes(rank.size) + 16, 1 << 20, 1025 * 2048, MAX_BYTES]
    if not ranks_share_gpu():
        sizes.append(2 * MAX_BYTES)
    pool = device.make_graph_pool("case")
    captured = []
    with device.forward.active():
        for nbytes in sizes:
            source = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device.torch_device)
            given, twice = torch.zeros_like(source), torch.zeros_like(source)

            def body(source: torch.Tensor = source, given: torch.Tensor = given, twice: torch.Tensor = twice) -> None:
                given.copy_(source)
                rank.sum(given)
                twice.copy_(rank.sum(source * 2))

            body()
            device.synchronize()
            graph = device.capture(f"{nbytes} bytes", pool, body)
            try:
                graph.replay()
            except GraphError:
                pass
            else:
                raise AssertionError("replayed before it was registered")
            graph.register(*device.communicators)
            captured.append((graph, source, given, twice))
        for graph, *_ in captured:
            graph.allow_replay()
        num = 0
        for turn in range(60):
            graph, source, given, twice = captured[turn % len(captured)]
            source.normal_(generator=rank.generator)
            wanted, doubled = rank.in_order(source), rank.in_order(source * 2)
            device.synchronize()
            if turn // len(captured) % rank.size == rank.rank:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            assert torch.equal(given, wanted) and torch.equal(twice, doubled), f"replay {turn}"
            num += 2
            if turn % 7 == 0:
                x = rank.numbers(4096, torch.bfloat16)
                wanted = rank.in_order(x)
                assert torch.equal(rank.sum(x), wanted)
    return {"replayed": num}


def unregistered(rank: Rank) -> Found:
    """F10 without its guard: a graph with a sum in two shots is replayed although no addresses were exchanged."""
    device = rank.device
    with device.forward.active():
        x = torch.zeros(1 << 20, dtype=torch.bfloat16, device=device.torch_device)
        rank.sum(x)
        device.synchronize()
        graph = device.capture("sum", device.make_graph_pool("case"), lambda: rank.sum(x))
        graph.register(*device.communicators)
        graph.allow_replay()
        graph.replay()
        device.synchronize()
    return {"unharmed": True}


def buckets(rank: Rank) -> Found:
    """F11: the ranks compute a model together, with prompts and batches around the captured sizes and beyond them. A
    dense model and a mixture of experts give the tokens that they give without graphs."""
    shard = Shard(rank.rank, rank.size, rank.communicator)
    found = [difference_across_ranks(rank.device, shard, experts) for experts in (False, True)]
    assert not any(found), found
    return {"models": len(found)}


def cut_to_fit(rank: Rank) -> Found:
    """F11 without its guard: a batch or prompt beyond the largest size is cut."""
    return {"difference": difference_across_ranks(rank.device, Shard(rank.rank, rank.size, rank.communicator))}


def saved_by_rank_0(rank: Rank, save: Callable[[Path], object]) -> Path:
    """This rank's copy of a checkpoint. transformers saves nothing in other ranks of torch's group."""
    if rank.rank == 0:
        save(rank.folder / "model")
    rank.meet()
    return Path(shutil.copytree(rank.folder / "model", rank.folder / f"model{rank.rank}"))


def pictures(rank: Rank) -> Found:
    """sglang#14193: a model that reads images, in pieces of graphs with our own sums, around a captured size. Tokens
    are those of one rank without graphs. Each rank has the tower as a whole. Pieces of 1,024 tokens take two shots
    (``_SMALL_SHOT``), which need the peers' addresses."""
    from vision_cases import answers_around, save_vision_checkpoint, sizes_of_14193  # imports transformers: seconds

    folder = saved_by_rank_0(rank, partial(save_vision_checkpoint, "Qwen2_5_VLForConditionalGeneration"))
    cases, shard = sizes_of_14193(folder, 1024), Shard(rank.rank, rank.size, rank.communicator)
    expected = answers_around(folder, cases, "cpu")
    found = answers_around(
        folder, cases, rank.device, shard, piecewise_cuda_graph_tokens=(64, 1024), cuda_graph_bs=(1, 2)
    )
    return {"differ": [index for index, (ours, right) in enumerate(zip(found, expected, strict=True)) if ours != right]}


def states(rank: Rank) -> Found:
    """A model with recurrent layers, whose states are divided by heads: its logprobs are near those of one CPU."""
    from model_parity import save_checkpoint  # imports transformers: seconds
    from scheduler_driver import answers, make_model_driver, request

    folder = saved_by_rank_0(rank, partial(save_checkpoint, "qwen3-next"))
    params = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True, "return_logprob": True}
    prompts = [[2 + (length * 7 + number * number) % 90 for number in range(length)] for length in (50, 64, 115, 150)]

    def told(turn: str, **flags: object) -> tuple[list[list[int]], list[list[float | None]]]:
        driver = make_model_driver(model_path=str(folder), **flags)  # type: ignore[arg-type]
        reqs = [request(f"{turn}{i}", prompt, **params) for i, prompt in enumerate(prompts)]
        tokens = answers(driver, reqs) + answers(driver, [request("again", prompts[3], **params)])
        return tokens, [driver.output_logprobs[req.rid] for req in reqs]

    expected = told("cpu")
    shard = Shard(rank.rank, rank.size, rank.communicator)
    tokens, scores = told("gpu", device="cuda", rank=(rank.device, shard), cuda_graph_bs=(1, 4))
    worst = 0.0
    for ours, theirs, said, right in zip(scores, expected[1], tokens, expected[0], strict=False):
        same = next((i for i, (a, b) in enumerate(zip(said, right, strict=True)) if a != b), len(said))
        assert same > 0, "the first token"
        worst = max(worst, *(abs((a or 0.0) - (b or 0.0)) for a, b in zip(ours[:same], theirs[:same], strict=True)))
    return {"tokens": tokens, "worst": worst}


def two_streams(rank: Rank) -> Found:
    """F19: the communicator raises if it is used on another stream."""
    device = rank.device
    with device.forward.active():
        rank.sum(torch.ones(8, device=device.torch_device))
    with device.store.active():
        try:
            rank.sum(torch.ones(8, device=device.torch_device))
        except CommunicatorError as error:
            assert "belongs to forward" in str(error)
        else:
            raise AssertionError("it was not refused")
    with device.forward.active():
        assert rank.sum(torch.ones(8, device=device.torch_device)).tolist() == [float(rank.size)] * 8
    return {"refused": True}


def unordered_streams(rank: Rank) -> Found:
    """F19 without its guard: sums on two streams begin together, in a different order on each rank."""
    device = rank.device
    streams = [device.forward, device.store]
    xs = [torch.full((2048,), float(i + 1), device=device.torch_device) for i in range(2)]
    device.synchronize()
    wrong = 0
    for turn in range(200):
        for i in (0, 1) if (turn + rank.rank) % 2 else (1, 0):
            with streams[i].active():
                xs[i].fill_(float(i + 1))
                rank.sum(xs[i])
        device.synchronize()
        wrong += sum(not torch.equal(x, torch.full_like(x, (i + 1.0) * rank.size)) for i, x in enumerate(xs))
    return {"wrong": wrong}


def lost(rank: Rank) -> Found:
    """The last rank ends while the others wait for it in a kernel. They are ended by the process that watches them."""
    with rank.device.forward.active():
        x = torch.ones(8, device=rank.device.torch_device)
        rank.sum(x)
        rank.device.synchronize()
        if rank.rank == rank.size - 1:
            (rank.folder / "gone").write_text("")
            os._exit(7)
        rank.sum(x)
        (rank.folder / f"waits{rank.rank}").write_text("")
        rank.device.synchronize()
    return {}


def gives_up(rank: Rank) -> Found:
    """The last rank does not take part in a sum. The others' kernels wait for it until they are told that it has
    failed. Then they end, and their sum is not used as a result."""
    with rank.device.forward.active():
        x = torch.ones(8, device=rank.device.torch_device)
        rank.sum(x)
        rank.device.synchronize()
        rank.communicator.check()
        if rank.rank < rank.size - 1:
            rank.sum(x)
            point = rank.device.forward.record()
            assert not rank.device.forward.ask(point), "a rank was not waited for"
            rank.own.give_up()
            rank.device.synchronize()
            try:
                rank.communicator.check()
            except PeerLostError:
                return {"gave_up": True}
            raise AssertionError("a sum without all ranks counts as one")
    return {"gave_up": True}


CASES: dict[str, tuple[Callable[[Rank], Found], frozenset[str]]] = {
    "sums": (sums, frozenset()),
    "ways": (ways, frozenset()),
    "mixed": (mixed, frozenset()),
    "mixed_pdl": (mixed_pdl, frozenset()),
    "graphs": (graphs, frozenset()),
    "unregistered": (unregistered, frozenset({REGISTERED_GRAPH.name})),
    "buckets": (buckets, frozenset()),
    "cut_to_fit": (cut_to_fit, frozenset({TOTAL_BUCKETS.name})),
    "pictures": (pictures, frozenset()),
    "pictures_cut_to_fit": (pictures, frozenset({TOTAL_BUCKETS.name})),
    "pictures_unregistered": (pictures, frozenset({REGISTERED_GRAPH.name})),
    "states": (states, frozenset()),
    "two_streams": (two_streams, frozenset()),
    "unordered_streams": (unordered_streams, frozenset({ONE_STREAM.name})),
    "gives_up": (gives_up, frozenset()),
    "lost": (lost, frozenset()),
}


def main() -> None:
    name, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    parent = os.getppid()

    def watch() -> None:  # a rank must not outlive its test
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    case, severed = CASES[name]
    if case is pictures:
        ONE_SHOT_BYTES[size] = _SMALL_SHOT
    status = 1
    try:
        with torch.inference_mode():
            me = Rank(rank, size, folder, severed)
            found = case(me)
            me.device.synchronize()
            with me.device.forward.active():
                me.communicator.close()
            found["open"] = len(me.own._opened)  # how many pieces of other ranks' memory are open
        (folder / f"{rank}.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # NCCL's threads may hang in a destructor


if __name__ == "__main__":
    main()
