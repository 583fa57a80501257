"""New weights over HTTP and through the Engine, with SGLang's fields and answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer
from new_checkpoints import changed_tensors, demo_tensors, misfits, write_checkpoint
from safetensors.torch import save

import fenceline

PROMPT = {"text": "Q: What is 12 + 30?\nA:", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
NAME = "model.norm.weight"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("changed") / "model", changed_tensors())


@pytest.fixture(scope="module")
def served() -> Iterator[httpx.Client]:
    with LiveServer.real("--model-path", "demo", "--device", "cpu", "--max-total-tokens", "2048") as server:
        with server.wait_ready().client() as client:
            yield client


def answer(client: httpx.Client) -> tuple[list[int], str]:
    got = client.post("/generate", json=PROMPT).json()
    return got["output_ids"], got["meta_info"]["weight_version"]


def test_a_server_changes_its_weights_and_says_which(served: httpx.Client, changed: str) -> None:
    first, version = answer(served)
    assert version == "default"
    body = {"model_path": changed, "weight_version": "step-7", "abort_all_requests": True}
    # Fields of SGLang's that have no effect.
    body |= {"flush_cache": False, "torch_empty_cache": True, "recapture_cuda_graph": True}
    reply = served.post("/update_weights_from_disk", json=body)
    assert (reply.status_code, reply.json()) == (
        200,
        {"success": True, "message": "weights updated", "num_paused_requests": 0},
    )
    second, version = answer(served)
    assert second != first and version == "step-7"
    info = served.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (changed, "step-7")
    assert served.get("/weight_version").json() == {"weight_version": "step-7"}
    server = served.get("/server_info").json()
    assert (server["model_path"], server["weight_version"]) == (changed, "step-7")
    assert served.post("/update_weights_from_disk", json={"model_path": "demo"}).json()["success"] is True
    assert answer(served) == (first, "step-7"), "without a label the old one stays"


def test_a_checkpoint_that_does_not_fit_changes_nothing(served: httpx.Client, tmp_path: Path) -> None:
    before = answer(served)
    path, said = misfits(tmp_path)["lacks"]
    body = {"model_path": path, "weight_version": "never"}
    reply = served.post("/update_weights_from_disk", json=body)
    assert reply.status_code == 400 and reply.json()["success"] is False
    assert said in reply.json()["message"]
    for wrong in ({"model_path": str(tmp_path / "nowhere")}, {"model_path": "demo", "load_format": "gguf"}):
        refused = served.post("/update_weights_from_disk", json=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in wrong
    assert answer(served) == before


def test_tensors_in_a_body(served: httpx.Client) -> None:
    before, _ = answer(served)
    tensors = {NAME: demo_tensors()[NAME] * -1}
    entry = base64.b64encode(save(tensors)).decode()
    url, body = "/update_weights_from_tensor", {"serialized_named_tensors": [entry], "weight_version": "v2"}
    pickled = served.post(url, json=body)
    assert pickled.status_code == 400 and "can run code" in pickled.json()["error"]["message"]
    assert served.post(url, json=body | {"load_format": "safetensors"}).json()["success"] is True
    assert answer(served)[1] == "v2" and answer(served)[0] != before
    restored = base64.b64encode(save({NAME: demo_tensors()[NAME]})).decode()
    good = {"serialized_named_tensors": [restored], "load_format": "safetensors"}
    assert served.post(url, json=good).json()["success"] is True
    assert answer(served)[0] == before
    for entries in (["?"], [], [entry, restored]):
        refused = served.post(url, json=good | {"serialized_named_tensors": entries})
        assert refused.status_code == 400, entries


@pytest.mark.long
def test_the_engine_does_the_same_from_python(changed: str, tmp_path: Path) -> None:
    params = {"temperature": 0, "max_new_tokens": 8}
    text = str(PROMPT["text"])
    with fenceline.Engine(model_path="demo", device="cpu", max_total_tokens=2048) as engine:
        first = engine.generate(text, params)["output_ids"]
        assert engine.update_weights_from_disk(changed, weight_version="a") == (True, "weights updated", 0)
        answer = engine.generate(text, params)
        assert answer["output_ids"] != first and answer["meta_info"]["weight_version"] == "a"
        tensors = demo_tensors()
        assert engine.update_weights_from_tensor(list(tensors.items())) == (True, "weights updated")
        assert engine.generate(text, params)["output_ids"] == first
        done, said = engine.update_weights_from_tensor([(NAME, tensors[NAME][:-1])])
        assert not done and "has shape [255]" in said
        with pytest.raises(ValueError, match="comes twice"):
            engine.update_weights_from_tensor([(NAME, tensors[NAME])] * 2)
