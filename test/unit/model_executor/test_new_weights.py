"""Weights that are replaced while the engine runs: whose answers follow, what is forgotten, what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo_requests import prompts
from new_checkpoints import NAME, changed_tensors, demo_tensors, misfits, write_checkpoint
from quantized_checkpoints import FP8_FORMATS, INT4_FORMATS, write_published
from ranks import Ranks
from safetensors.torch import load_file, save_file
from scheduler_driver import Driver, answers, make_model_driver, request

from fenceline.ipc.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    Message,
    PauseGenerationReq,
    ShutdownReq,
    TickReq,
    UpdateWeightsReq,
)

TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_write_policy": "write_through"}
FORMATS = FP8_FORMATS | INT4_FORMATS
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("changed") / "model", changed_tensors())


def update(driver: Driver, id: str = "update", **fields: object) -> ControlReply:
    driver.send(UpdateWeightsReq(id=id, **fields))  # type: ignore[arg-type]
    while not (found := [reply for reply in driver.replies if _answers(reply, id)]):
        driver.step()
    assert isinstance(found[0], ControlReply)
    return found[0]


def _answers(reply: Message, id: str) -> bool:
    return isinstance(reply, ControlReply) and reply.id == id


def alone(path: str, prompt: list[int], num_tokens: int, **flags: object) -> list[int]:
    """What a new engine with the checkpoint ``path`` answers."""
    driver = make_model_driver(model_path=path, **flags)
    return answers(driver, [request("alone", prompt, max_new_tokens=num_tokens, **GREEDY)])[0]


@pytest.mark.parametrize("flags", [{}, TIERS])
def test_answers_of_new_weights_have_nothing_old_cached(changed: str, flags: dict[str, object]) -> None:
    driver = make_model_driver(**flags)
    prompt = prompts()[2]
    before = answers(driver, [request("before", prompt, max_new_tokens=12, **GREEDY)])[0]
    assert update(driver, model_path=changed).success
    after = answers(driver, [request("after", prompt, max_new_tokens=12, **GREEDY)])[0]
    assert after == alone(changed, prompt, 12) != before
    last = driver.answers["after"].last
    assert last is not None and last.cached_tokens == 0
    again = answers(driver, [request("again", prompt, max_new_tokens=12, **GREEDY)])[0]
    last = driver.answers["again"].last
    assert again == after and last is not None and last.cached_tokens > 0


@pytest.mark.parametrize("pause", ["", "in_place", "retract"])
def test_requests_that_run_go_on_with_the_new_weights(changed: str, pause: str) -> None:
    driver = make_model_driver(chunked_prefill_size=32, retract_policy="offload", **TIERS)
    rids = [f"r{i}" for i in range(len(prompts()))]
    for rid, prompt in zip(rids, prompts(), strict=True):
        driver.send(request(rid, prompt, max_new_tokens=24, **GREEDY))
    while len(driver.answers) < len(rids) or len(driver.answers["r0"].output_ids) < 8:
        driver.step()
    if pause:
        driver.send(PauseGenerationReq(id="pause", mode=pause))
        driver.step()
    kept = {rid: list(driver.answers[rid].output_ids) for rid in rids}
    reply = update(driver, model_path=changed)
    assert reply.success and reply.payload == (b"0" if pause == "retract" else b"%d" % len(rids))
    assert all(driver.answers[rid].output_ids == kept[rid] for rid in rids), "no token of a mixture"
    driver.scheduler.control.paused = False
    driver.run()
    for rid, prompt in zip(rids, prompts(), strict=True):
        output, num_kept = driver.answers[rid].output_ids, len(kept[rid])
        assert output[num_kept:] == alone(changed, prompt + kept[rid], 24 - num_kept)


def test_the_tail_of_a_retracted_request_goes_with_old_weights(changed: str) -> None:
    """A request that is shorter than a page: all of its KV is on a host page of its own, which no tree holds."""
    driver = make_model_driver(retract_policy="offload", **TIERS)
    prompt = prompts()[0][:5]
    driver.send(request("r", prompt, max_new_tokens=16, **GREEDY))
    while "r" not in driver.answers or len(driver.answers["r"].output_ids) < 4:
        driver.step()
    driver.send(PauseGenerationReq(id="pause", mode="retract"))
    driver.step()
    assert driver.scheduler.reqs["r"].tail is not None
    kept = list(driver.answers["r"].output_ids)
    assert update(driver, model_path=changed).success
    driver.send(ContinueGenerationReq(id="continue"))
    driver.run()
    output = driver.answers["r"].output_ids
    assert output[: len(kept)] == kept
    assert output[len(kept) :] == alone(changed, prompt + kept, 16 - len(kept))


def test_what_runs_can_be_aborted_and_generation_stay_paused(changed: str) -> None:
    driver = make_model_driver()
    driver.send(request("r", prompts()[0] * 9, max_new_tokens=500, **GREEDY))
    while "r" not in driver.answers:
        driver.step()
    reply = update(driver, model_path=changed, abort_all_requests=True, keep_pause=True)
    finish = driver.answers["r"].finish
    assert reply.success and reply.payload == b"0" and finish is not None and finish.type == "abort"
    assert driver.scheduler.control.paused
    driver.step()
    assert driver.scheduler.memory.tree.num_pages == 0, "what the old weights have computed is not kept"


def test_new_weights_begin_no_pause_of_a_server_that_drains(changed: str) -> None:
    driver = make_model_driver()
    driver.send(request("r", prompts()[0], max_new_tokens=20, **GREEDY), ShutdownReq(drain=True))
    reply = update(driver, model_path=changed, keep_pause=True)
    assert reply.success and "no pause: the server is shutting down" in reply.message
    driver.run()
    assert driver.scheduler.stopped and len(driver.answers["r"].output_ids) == 20


def test_a_pause_for_new_weights_counts_for_no_time_outs(changed: str) -> None:
    driver = make_model_driver(num_rows=1, req_waiting_timeout=10.0)

    def left_after(*messages: Message) -> list[str]:
        driver.send(*messages)
        driver.step()
        return sorted(driver.scheduler.reqs)

    prompt = prompts()[0]
    for rid in ("runs", "waits"):
        driver.send(request(rid, prompt, max_new_tokens=40, **GREEDY))
    assert left_after(TickReq(now=1.0)) == ["runs", "waits"]
    assert update(driver, model_path=changed, keep_pause=True).success
    assert left_after(ContinueGenerationReq(id="c"), TickReq(now=99.0)) == ["runs", "waits"]
    assert left_after(TickReq(now=109.0)) == ["runs", "waits"]
    assert left_after(TickReq(now=109.1)) == ["runs"]


def test_what_does_not_fit_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    driver = make_model_driver()
    prompt = prompts()[2]
    before = answers(driver, [request("before", prompt, max_new_tokens=8, **GREEDY)])[0]
    driver.send(request("runs", prompt, max_new_tokens=30, **GREEDY))
    while "runs" not in driver.answers:
        driver.step()
    for name, (path, said) in misfits(tmp_path).items():
        reply = update(driver, id=name, model_path=path, abort_all_requests=True)
        assert not reply.success and reply.message.startswith("weights not updated: ") and said in reply.message
    driver.run()
    runs = driver.answers["runs"]
    assert runs.finish is not None and runs.finish.type == "length" and runs.output_ids[:8] == before
    last = answers(driver, [request("last", prompt, max_new_tokens=8, **GREEDY)])[0]
    out = driver.answers["last"].last
    assert last == before and out is not None and out.cached_tokens > 0


def _write_header(path: Path, **entry: object) -> str:
    """A safetensors file with one tensor, ``NAME``."""
    header = json.dumps({NAME: entry}).encode()
    data_offsets = entry["data_offsets"]
    assert isinstance(data_offsets, list)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_offsets[1]))
    return str(path)


def test_files_at_which_libraries_raise_anything_are_refused(tmp_path: Path) -> None:
    """The server goes on: nothing has been touched."""
    driver = make_model_driver()
    for number, shape in enumerate(([0, 2**62, 8], [0, 2**63])):
        path = _write_header(tmp_path / f"shape{number}", dtype="BF16", shape=shape, data_offsets=[0, 0])
        reply = update(driver, id=f"shape{number}", file=path)
        assert not reply.success and reply.message.startswith("weights not updated: "), reply.message
        assert "\n" not in reply.message
    path = _write_header(tmp_path / "complex", dtype="C64", shape=[1], data_offsets=[0, 8])
    reply = update(driver, id="complex", file=path)
    assert not reply.success and f"{NAME} is C64, which no parameter holds" in reply.message
    folder = write_checkpoint(tmp_path / "config", {})
    config = json.loads(Path(folder, "config.json").read_text())
    nested = config | {"nested": None}
    broken = {
        "deep": (json.dumps(nested).replace("null", "[" * 100_000 + "]" * 100_000), "not valid JSON"),
        "activation": (json.dumps(config | {"hidden_act": ["silu"]}), "hidden_act ['silu'] is not supported"),
        "layers": (json.dumps(config | {"num_hidden_layers": 10**30}), "num_hidden_layers must be at most 10000"),
        "many": (json.dumps(config | {"num_hidden_layers": 10**9}), "num_hidden_layers must be at most 10000"),
    }
    for name, (text, said) in broken.items():
        Path(folder, "config.json").write_text(text)
        reply = update(driver, id=name, model_path=folder)
        assert not reply.success and said in reply.message, reply.message
    assert len(answers(driver, [request("after", prompts()[0], max_new_tokens=4, **GREEDY)])[0]) == 4


def test_new_weights_are_rounded_as_those_before_them(changed: str, tmp_path: Path) -> None:
    driver = make_model_driver(quantization="int4")
    prompt = prompts()[2]
    before = answers(driver, [request("before", prompt, max_new_tokens=12, **GREEDY)])[0]
    name = "model.layers.2.mlp.down_proj.weight"
    save_file({name: changed_tensors()[name].to(torch.float8_e4m3fn)}, tmp_path / "rounded.safetensors")
    refused = update(driver, id="rounded", file=str(tmp_path / "rounded.safetensors"))
    assert not refused.success and "use the model's unquantised weights" in refused.message
    assert update(driver, model_path=changed).success
    after = answers(driver, [request("after", prompt, max_new_tokens=12, **GREEDY)])[0]
    assert after == alone(changed, prompt, 12, quantization="int4") != before
    theirs = demo_tensors()
    save_file({name: theirs[name]}, tmp_path / "some.safetensors")
    assert update(driver, id="some", file=str(tmp_path / "some.safetensors")).success
    mixed = write_checkpoint(tmp_path / "mixed", changed_tensors() | {name: theirs[name]})
    some = answers(driver, [request("some", prompt, max_new_tokens=12, **GREEDY)])[0]
    assert some == alone(mixed, prompt, 12, quantization="int4")


# AWQ's groups of 128 do not divide the 832 features of this matrix.
PLAIN_DOWN: dict[str, tuple[dict[str, object], str]] = {
    "awq": ({"modules_to_not_convert": ["down_proj"]}, r".*down_proj")
}


def _published(folder: Path, tensors: dict[str, torch.Tensor], name: str) -> str:
    """A checkpoint like the demo model's with ``tensors`` in the format ``name``."""
    plain = write_checkpoint(folder / "plain", tensors)
    listed, left_out = PLAIN_DOWN.get(name, ({}, ""))
    published = replace(FORMATS[name], config={**FORMATS[name].config, **listed})
    shutil.copytree(plain, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    write_published(Path(plain), folder / name, published, left_out)
    return str(folder / name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["awq", "gptq", "fp8-blocks"])
def test_quantised_weights_are_replaced_by_ones_of_their_format(name: str, changed: str, tmp_path: Path) -> None:
    old, new = (
        _published(tmp_path / "old", demo_tensors(), name),
        _published(tmp_path / "new", changed_tensors(), name),
    )
    driver = make_model_driver(model_path=old, **TIERS)
    model = driver.worker.model  # type: ignore[attr-defined]
    addresses = {slot_name: slot.dest.data_ptr() for slot_name, slot in model.weight_slots().items()}
    prompt = prompts()[2]
    before = answers(driver, [request("before", prompt, max_new_tokens=12, **GREEDY)])[0]
    refused = update(driver, "plain", model_path=changed)
    assert not refused.success and "another model than the one that is served: its quantization" in refused.message
    assert update(driver, model_path=new).success
    after = answers(driver, [request("after", prompt, max_new_tokens=12, **GREEDY)])[0]
    assert after == alone(new, prompt, 12) != before
    last = driver.answers["after"].last
    assert last is not None and last.cached_tokens == 0
    assert addresses == {slot_name: slot.dest.data_ptr() for slot_name, slot in model.weight_slots().items()}
    # And a matrix alone, of which no tensor may be missing.
    module = "model.layers.2.self_attn.o_proj"
    stored = load_file(Path(old, "model.safetensors"))
    parts = {key: tensor for key, tensor in stored.items() if key.startswith(f"{module}.")}
    for number, key in enumerate(parts):
        if key.endswith(("g_idx", "weight_shape", "input_scale")):
            continue
        save_file({key: parts[key]}, tmp_path / "one.safetensors")
        refused = update(driver, f"one{number}", file=str(tmp_path / "one.safetensors"))
        assert not refused.success and "some weights that belong together are missing" in refused.message
    save_file(parts, tmp_path / "some.safetensors")
    assert update(driver, "some", file=str(tmp_path / "some.safetensors")).success
    save_file(load_file(Path(new, "model.safetensors")) | parts, tmp_path / "mixed.safetensors")
    (tmp_path / "mixed.safetensors").rename(Path(new, "model.safetensors"))
    some = answers(driver, [request("some", prompt, max_new_tokens=12, **GREEDY)])[0]
    assert some == alone(new, prompt, 12)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    old = _published(tmp_path / "old", demo_tensors(), "gptq")
    new = _published(tmp_path / "new", changed_tensors(), "gptq")
    stored = load_file(Path(new, "model.safetensors"))
    name = "model.layers.3.mlp.up_proj.g_idx"
    save_file(stored | {name: stored[name].flip(0)}, tmp_path / "flipped.safetensors")
    (tmp_path / "flipped.safetensors").rename(Path(new, "model.safetensors"))
    driver = make_model_driver(model_path=old)
    prompt = prompts()[2]
    before = answers(driver, [request("before", prompt, max_new_tokens=8, **GREEDY)])[0]
    refused = update(driver, model_path=new)
    assert not refused.success and f"{name}: columns are in the order of activations" in refused.message
    assert answers(driver, [request("after", prompt, max_new_tokens=8, **GREEDY)])[0] == before


def test_quantised_weights_that_cannot_be_replaced_are_refused(tmp_path: Path) -> None:
    path = _published(tmp_path, demo_tensors(), "fp8-static")
    reply = update(make_model_driver(model_path=path, load_format="dummy"), model_path=path)
    assert not reply.success and "dummy weights were rounded as on-line" in reply.message
    config = json.loads(Path(path, "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": scheme,
    }
    Path(path, "config.json").write_text(json.dumps(config))
    stored = load_file(Path(path, "model.safetensors"))
    for layer in range(4):
        for kind in ("k", "v"):
            stored[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor(0.5)
    save_file(stored, tmp_path / "scaled.safetensors")
    (tmp_path / "scaled.safetensors").rename(Path(path, "model.safetensors"))
    reply = update(make_model_driver(model_path=path, kv_cache_dtype="fp8_e4m3"), model_path=path)
    assert not reply.success and "scales of keys and values are constants" in reply.message
    assert update(make_model_driver(model_path=path), model_path=path).success, "they are not used"


def test_a_file_of_some_tensors_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    theirs = changed_tensors()
    name = "model.layers.2.mlp.down_proj.weight"
    expected = write_checkpoint(tmp_path / "mixed", demo_tensors() | {name: theirs[name]})
    save_file({name: theirs[name]}, tmp_path / "some.safetensors")
    save_file({"model.nothing": theirs[name]}, tmp_path / "nothing.safetensors")
    driver = make_model_driver()
    assert update(driver, id="some", file=str(tmp_path / "some.safetensors")).success
    prompt = prompts()[4]
    answer = answers(driver, [request("r", prompt, max_new_tokens=16, **GREEDY)])[0]
    assert answer == alone(expected, prompt, 16)
    refused = update(driver, id="nothing", file=str(tmp_path / "nothing.safetensors"))
    assert not refused.success and "the model does not have: model.nothing" in refused.message


def test_parameters_stay_where_they_are(changed: str) -> None:
    """Graphs have captured their addresses."""
    driver = make_model_driver()
    model = driver.worker.model  # type: ignore[attr-defined]
    before = {name: slot.dest.data_ptr() for name, slot in model.weight_slots().items()}
    assert update(driver, model_path=changed).success
    assert {name: slot.dest.data_ptr() for name, slot in model.weight_slots().items()} == before


def test_a_draft_follows_and_no_token_changes(changed: str) -> None:
    driver = make_model_driver(speculative_algorithm="EAGLE3")
    prompt = prompts()[3]
    answers(driver, [request("before", prompt, max_new_tokens=6, **GREEDY)])
    assert update(driver, model_path=changed).success
    after = answers(driver, [request("after", prompt, max_new_tokens=16, **GREEDY)])[0]
    assert after == alone(changed, prompt, 16)


def test_storage_finds_pages_of_the_same_weights_only(changed: str, tmp_path: Path) -> None:
    storage = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "pages")}
    wait = {"hicache_storage_prefetch_policy": "wait_complete"}
    driver = make_model_driver(**TIERS, **storage, **wait)
    prompt = (prompts()[2] * 20)[:1024]
    found = []
    demo = driver.config.model.model_path
    for number, path in enumerate((changed, demo, changed)):
        answers(driver, [request(f"r{number}", prompt, max_new_tokens=4, **GREEDY)])
        last = driver.answers[f"r{number}"].last
        assert last is not None and last.cached_tokens_details is not None
        found.append(last.cached_tokens_details.storage)
        while driver.scheduler.memory.num_outstanding:
            driver.step()
        assert update(driver, id=f"u{number}", model_path=path).success
    assert found[:2] == [0, 0] and found[2] > 0
    assert driver.scheduler.memory.tiers is not None
    driver.scheduler.close()


def _update_ranks(paths: list[str]) -> list[tuple[bool, str, bool]]:
    """Of each rank's update by its path: whether it is done, what is said, and whether a weight is another."""
    ranks = Ranks(len(paths))

    def on_rank(rank: int) -> tuple[bool, str, bool]:
        driver = make_model_driver(rank=(ranks.devices[rank], ranks.shards[rank]))
        weight = driver.worker.model.layers[0].self_attn.o_proj.weight.data  # type: ignore[attr-defined]
        before = weight.clone()
        reply = update(driver, model_path=paths[rank])
        return reply.success, reply.message, not torch.equal(before, weight)

    return ranks.run(on_rank)


def test_of_several_ranks_all_change_or_none(changed: str, tmp_path: Path) -> None:
    assert _update_ranks([changed, changed]) == [(True, "weights updated", True)] * 2
    missing = str(tmp_path / "missing")
    refused = (
        False,
        f"weights not updated: {missing}: no such model directory; give --model-path a directory or a hub id",
        False,
    )
    assert _update_ranks([changed, missing]) == [refused] * 2
    odd = write_checkpoint(tmp_path / "odd", {})
    _write_header(Path(odd, "model.safetensors"), dtype="BF16", shape=[0, 2**62, 8], data_offsets=[0, 0])
    for done, said, another in _update_ranks([odd, changed]):
        assert not done and not another and "weights not updated: RuntimeError" in said
