"""Cached tokens by tier on their way from the request to the message, and HiCache's state on the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fenceline.ipc.io_struct import (
    BatchTokenOut,
    CachedTokensDetails,
    ControlReply,
    FlushCacheReq,
    HiCacheState,
    InternalState,
    Message,
    TokenizedGenerateReq,
    TransferState,
    decode,
    encode,
    id_array,
)
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.publishing import OutputSender
from fenceline.scheduler.req import Req

DETAILS = CachedTokensDetails(device=1, host=2, storage=3)


def make_req(details: CachedTokensDetails | None) -> Req:
    source = TokenizedGenerateReq(rid="r", input_ids=id_array(range(8)), sampling_params=SamplingParams())
    return Req(
        source=source,
        prompt_ids=np.arange(8, dtype=np.int32),
        prompt_keys=np.arange(8, dtype=np.int32),
        images=(),
        stop_ids=frozenset(),
        seed=0,
        max_new_tokens=4,
        emit_interval=1,
        cached_tokens=6,
        cached_details=details,
    )


@pytest.mark.parametrize("details", [None, DETAILS])
def test_details_reach_the_message_after_a_retraction_too(details: CachedTokensDetails | None) -> None:
    sent: list[BatchTokenOut] = []
    sender = OutputSender(sent.append)
    req = make_req(details)
    for one in (req, req.resumed()):
        one.output_ids.append(5)
        sender.token(one)
    sender.flush()
    news = decode(encode(sent[0]))
    assert isinstance(news, BatchTokenOut)
    assert [out.cached_tokens_details for out in news.outs] == [details] * 2
    assert [out.cached_tokens for out in news.outs] == [6, 6]


def internal_state(hicache: HiCacheState | None) -> InternalState:
    return InternalState(
        num_running_reqs=0, num_queue_reqs=0, num_used_tokens=0, num_evictable_tokens=0,
        max_total_num_tokens=1, token_usage=0.0,
        cache_hit_rate=0.0, gen_throughput=0.0, num_retractions=0, num_aborts=0, num_generated_tokens=0,
        num_prompt_tokens=0, num_cached_tokens=0, new_token_ratio=0.5, paused=False, memory_bytes={},
        hicache=hicache,
    )  # fmt: skip


def test_the_state_travels() -> None:
    hicache = HiCacheState(
        cached_tokens={"device": 1, "host": 2, "storage": 3}, num_host_tokens=64, num_used_host_tokens=32,
        pages={"device": 1, "host": 2, "both": 3, "in_transit": 0}, num_locked_nodes=1,
        evicted_tokens={"device": 5}, load=TransferState(num_transfers=1, num_tokens=2, num_bytes=3, seconds=0.5),
        store=TransferState(), storage_read=TransferState(), storage_write=TransferState(),
        prefetches={}, recomputes={"page_table": 1}, num_storage_misses=0, storage_errors={},
    )  # fmt: skip
    for state in (internal_state(hicache), internal_state(None)):
        reply: Message = ControlReply(id="i", success=True, state=state)
        assert decode(encode(reply)) == reply
    assert msgspec.to_builtins(hicache)["load"]["seconds"] == 0.5


def test_a_flush_spares_the_storage_unless_told() -> None:
    assert decode(encode(FlushCacheReq(id="f"))) == FlushCacheReq(id="f", storage=False)
    assert decode(encode(FlushCacheReq(id="f", storage=True))) == FlushCacheReq(id="f", storage=True)
