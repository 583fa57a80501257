"""Embeddings of the real runner: those of transformers, whatever else the steps compute and wherever prefixes are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from embedding_model import (
    MODULES,
    PROMPTS,
    embed,
    embedded,
    embedding_of,
    path,
    publish,
    reference,
    save_reranker,
    state_of,
)
from scheduler_driver import Driver, make_model_driver, request

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import AbortReq, ContinueGenerationReq, PauseGenerationReq

__all__ = ["path", "reference"]  # fixtures

FLAGS: dict[str, dict[str, object]] = {
    "plain": {},
    "chunks": {"chunked_prefill_size": 16},
    "pieces": {"piecewise_cuda_graph_tokens": (16, 32, 128)},
    "hicache": {"enable_hierarchical_cache": True, "max_total_tokens": 128, "hicache_ratio": 4.0},
    "no overlap": {"disable_overlap_schedule": True},
}


@pytest.mark.parametrize("name", FLAGS)
def test_states_are_those_of_transformers(reference: transformers.PreTrainedModel, path: Path, name: str) -> None:
    driver = make_model_driver(model_path=str(path), **FLAGS[name])
    assert driver.config.model.embeds
    expected = [state_of(reference, ids) for ids in PROMPTS]
    for turn in ("new", "cached"):
        found = embed(driver, name=turn)
        for mine, yours in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, yours, atol=1e-4)
    again = [driver.answers[f"cached{i}"].last for i in range(len(PROMPTS))]
    assert again[2] is not None and again[2].cached_tokens >= 48
    if name == "pieces":
        assert driver.worker.prefill_graph_stats is not None and driver.worker.prefill_graph_stats.replays > 2
    if name == "hicache":
        details = [out.cached_tokens_details for out in again if out is not None]
        assert any(one is not None and one.host for one in details)


def test_any_decoder_embeds() -> None:
    driver = make_model_driver(is_embedding=True, chunked_prefill_size=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(driver.config.model.model_path, dtype="float32")
    for mine, ids in zip(embed(driver), PROMPTS, strict=True):
        np.testing.assert_allclose(mine / np.linalg.norm(mine), embedding_of(model, ids, len(mine)), atol=1e-4)


@pytest.fixture(params=[False, True], ids=["", "mixed steps"])
def generating(reference: transformers.PreTrainedModel, tmp_path: Path, request: pytest.FixtureRequest) -> Driver:
    """A scheduler over the same model with its head, with little memory and few rows."""
    save_reranker(reference, tmp_path)
    return make_model_driver(
        num_rows=3, model_path=str(tmp_path), max_total_tokens=160, page_size=1, chunked_prefill_size=24,
        enable_deterministic_inference=True, enable_mixed_chunk=request.param,
    )  # fmt: skip


def test_bits_do_not_depend_on_company(generating: Driver) -> None:
    alone = [embed(generating, [ids], f"alone{i}")[0] for i, ids in enumerate(PROMPTS)]
    generating.scheduler.memory.flush()
    for i, ids in enumerate(PROMPTS):
        generating.send(
            request(f"g{i}", [7 + i] * (9 + i), max_new_tokens=30, ignore_eos=True, temperature=0.8 * (i % 2)),
            request(f"l{i}", ids, max_new_tokens=2, return_logprob=True, logprob_start_len=0),
            request(f"e{i}", ids, embed=True, max_new_tokens=0),
        )
    generating.run()
    for i, state in enumerate(alone):
        assert embedded(generating, f"e{i}").tobytes() == state.tobytes()
        assert len(generating.answers[f"g{i}"].output_ids) == 30
    for i, state in enumerate(alone):
        assert embed(generating, [PROMPTS[i]], f"again{i}")[0].tobytes() == state.tobytes()


def test_a_retracted_prompt_begins_anew(generating: Driver) -> None:
    [alone] = embed(generating, PROMPTS[2:3], "alone")
    generating.scheduler.memory.flush()
    generating.send(request("long", PROMPTS[2], embed=True, max_new_tokens=0))
    generating.step()
    generating.step()
    generating.send(PauseGenerationReq(id="pause", mode="retract"))
    generating.step()
    generating.send(ContinueGenerationReq(id="go on"))
    generating.run()
    last = generating.answers["long"].last
    assert last is not None and last.num_retractions == 1
    assert embedded(generating, "long").tobytes() == alone.tobytes()


def test_an_aborted_request_has_no_embedding(generating: Driver) -> None:
    generating.send(request("long", PROMPTS[2], embed=True, max_new_tokens=0))
    generating.step()
    generating.send(AbortReq(rid="long"))
    generating.run()
    answer = generating.answers["long"]
    assert answer.finish is not None and answer.finish.type == "abort"
    assert answer.last is not None and answer.last.decode is not None and answer.last.decode.embedding is None


def test_what_is_no_embedding_model_is_refused(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    flags = {"model_path": str(tmp_path), "device": "cpu"}
    lasttoken: dict[str, object] = {"pooling_mode_lasttoken": True}
    publish(tmp_path, {"pooling_mode_mean_tokens": True})
    with pytest.raises(ConfigError, match="pools by pooling_mode_mean_tokens: only the last token's state"):
        resolve(ServerArgs(**flags))
    publish(tmp_path, lasttoken, [*MODULES, {"idx": 3, "name": "3", "path": "3_Dense", "type": "models.Dense"}])
    with pytest.raises(ConfigError, match="has a module Dense"):
        resolve(ServerArgs(**flags))
    judges = {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "cross_encoder.modules.logit_score.LogitScore"}
    publish(tmp_path, {}, [MODULES[0], judges])
    assert not resolve(ServerArgs(**flags)).model.embeds, "a reranker generates"
    publish(tmp_path, lasttoken)
    for decodes in ({"speculative_algorithm": "NEXTN"}, {"cuda_graph_bs": (1, 2)}):
        with pytest.raises(ConfigError, match="decodes nothing"):
            resolve(ServerArgs(**flags, **decodes))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(ConfigError, match="is_causal false"):
        resolve(ServerArgs(**flags))
