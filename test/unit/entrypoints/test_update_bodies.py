"""What the endpoints for new weights do before the scheduler hears of them, and health checks meanwhile."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.update_weights import (
    UpdateFromDiskBody,
    UpdateFromTensorBody,
    update_from_body,
    update_from_disk,
)
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import ControlReply


class Manager:
    """Takes whatever arrives."""

    def __init__(self, **args: object) -> None:
        self.config = SimpleNamespace(
            server_args=SimpleNamespace(**{"nnodes": 1, "tp_size": 1, "download_dir": None, **args})
        )
        self.taken: list[bytes] = []

    async def update_weights(self, *, file: str, **fields: object) -> ControlReply:
        self.taken.append(Path(file).read_bytes())
        return ControlReply("u", True)


def send(manager: Manager, *entries: str) -> None:
    body = UpdateFromTensorBody(serialized_named_tensors=list(entries), load_format="safetensors")
    asyncio.run(update_from_body(cast(TokenizerManager, manager), body))


@pytest.mark.parametrize("path", ["", "~nosuchuser-of-this-test/x", "/" + "x" * 5000])
def test_paths_that_cannot_be_are_refused(path: str) -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(update_from_disk(cast(TokenizerManager, Manager()), UpdateFromDiskBody(model_path=path)))
    assert caught.value.status == 400 and caught.value.param == "model_path"
    assert len(str(caught.value)) < 500


def test_a_large_body_is_decoded_in_pieces_and_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, the event loop's too, stand still while one piece is decoded."""
    sizes = []
    decode = base64.b64decode

    def recorded(text: str, **kwargs: Any) -> bytes:
        sizes.append(len(text))
        return decode(text, **kwargs)

    data = Random(0).randbytes(4 * 2**20 + 1)
    entry = base64.b64encode(data).decode()
    monkeypatch.setattr(base64, "b64decode", recorded)
    manager = Manager(tp_size=2)
    send(manager, entry, "".join(entry))
    assert manager.taken == [data]
    assert max(sizes) <= 2**20


@pytest.mark.parametrize("wrong", ["A" * (2**20 - 4) + "AA==" + "AAAA", "A" * 2**20 + "?", "A" * 2**20 + "é"])
def test_what_is_no_base64_in_a_later_piece_is_refused(wrong: str) -> None:
    manager = Manager()
    with pytest.raises(RequestError, match="is not base64"):
        send(manager, wrong)
    assert not manager.taken


def test_several_hosts_are_refused_before_anything_is_decoded() -> None:
    with pytest.raises(RequestError, match="ranks of one host alone"):
        send(Manager(nnodes=2), "?")


@pytest.mark.parametrize("updating", [True, False])
def test_a_server_whose_weights_are_being_replaced_is_healthy(updating: bool) -> None:
    class Submitted(Exception):
        pass

    async def submit_many(probes: object) -> None:
        raise Submitted

    model = SimpleNamespace(bos_token_id=1, embeds=False)
    config = SimpleNamespace(model=model, server_args=SimpleNamespace(dp_size=1))
    control = SimpleNamespace(updating=updating)
    manager = SimpleNamespace(serving=True, control=control, submit_many=submit_many, last_news=[0.0])
    api = cast(NativeApi, SimpleNamespace(_manager=manager, _config=config))
    if not updating:
        with pytest.raises(Submitted):
            asyncio.run(NativeApi.health_generate(api))
        with pytest.raises(RequestError, match="generated nothing"):
            NativeApi._require_news_since(api, 1.0)
        return
    assert asyncio.run(NativeApi.health_generate(api)).status_code == 200
    NativeApi._require_news_since(api, 1.0)  # of a probe that began before
