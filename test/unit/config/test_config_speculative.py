"""The configuration of speculation: what unset flags mean, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from draft_checkpoints import add_mtp, save_target

from fenceline.config import ConfigError
from fenceline.config.draft_config import SpeculativeAlgorithm, StepShape, read_draft_config, read_token_map
from fenceline.config.engine_config import EngineConfig, attention_backends, resolve
from fenceline.config.families import RecurrentConfig
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import demo_model_path
from fenceline.config.server_args import ServerArgs, parse_args
from fenceline.mem_cache.page_hash import model_id


def configure(**flags: object) -> EngineConfig:
    """For the demo model on a CPU."""
    return resolve(ServerArgs(model_path="demo", device="cpu", **flags))  # type: ignore[arg-type]


OWN = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "demo"}  # it drafts for itself
DUMMY = {**OWN, "load_format": "dummy"}
WINDOWS = {"json_model_override_args": '{"use_sliding_window": true, "sliding_window": 40, "max_window_layers": 1}'}
NGRAM = {"speculative_algorithm": "NGRAM"}
TREE = {**OWN, "speculative_eagle_topk": 2, "speculative_num_steps": 3}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_simulate_acceptance": 2.0}, "needs --speculative-algorithm"),
        ({**OWN, "speculative_simulate_acceptance": 2.0}, "which only --load-format dummy allows"),
        ({**DUMMY, "speculative_simulate_acceptance": 0.5}, "give at least 1"),
        ({**DUMMY, "speculative_simulate_acceptance": float("nan")}, "give at least 1"),
        (
            {**DUMMY, "speculative_simulate_acceptance": 3.5, "speculative_num_steps": 2},
            r"yields at most --speculative-num-steps \+ 1 = 3 tokens",
        ),
        ({"speculative_eagle_topk": 2}, "needs --speculative-algorithm"),
        ({"speculative_adaptive": True}, "needs --speculative-algorithm"),
        ({"speculative_token_map": "a.pt"}, "needs --speculative-algorithm"),
        ({"speculative_algorithm": "EAGLE3", "speculative_token_map": "a.pt"}, "for .* EAGLE alone"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_token_map": "a.pt", "tp_size": 2},
            "is not possible with --tp-size above 1",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_token_map": "no/such/folder/file.pt"},
            "no such file; give a path, or ORG/NAME/FILE on the hub",
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_draft_model_revision": "main"},
            "--speculative-draft-model-path gives, add it or leave this out",
        ),
        (
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": demo_model_path() + "/eagle3",
                "speculative_draft_model_revision": "main",
            },
            "--speculative-draft-model-revision chooses a version of a hub id, --speculative-draft-model-path",
        ),
        ({**OWN, "speculative_eagle_topk": 0}, "must be at least 1"),
        ({**DUMMY, "speculative_simulate_acceptance": 2.0, "speculative_eagle_topk": 2}, "of chains alone"),
        ({**OWN, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8}, "a chain has"),
        ({**OWN, "speculative_eagle_topk": 40}, "a tree of 80 tokens, 64 at most are possible; lower one"),
        ({**OWN, "speculative_eagle_topk": 2000, "speculative_num_steps": 1}, "the draft knows 1024 tokens"),
        ({**TREE, "speculative_num_draft_tokens": 3}, "trees of 3 steps and topk 2 have 4 to 11"),
        ({**TREE, "speculative_num_draft_tokens": 12}, "trees of 3 steps and topk 2 have 4 to 11"),
        ({**NGRAM, "speculative_draft_model_path": "demo"}, "NGRAM has no draft model: leave"),
        ({**NGRAM, "speculative_draft_attention_backend": "torch"}, "NGRAM has no draft model: leave"),
        ({**NGRAM, "speculative_eagle_topk": 2}, "NGRAM proposes chains, leave it out"),
        ({**NGRAM, "speculative_num_draft_tokens": 17}, "must be 2 to 16 with NGRAM"),
        ({**NGRAM, "speculative_num_draft_tokens": 4, "speculative_num_steps": 5}, "one more than --spec"),
        ({**NGRAM, "speculative_ngram_min_match_window_size": 0}, "must be 1 to 64"),
        ({**NGRAM, "speculative_ngram_max_match_window_size": 65}, "must be 1 to 64"),
        (
            {**NGRAM, "speculative_ngram_min_match_window_size": 4, "speculative_ngram_max_match_window_size": 2},
            "is more than --speculative-ngram-max-match-window-size 2, exchange them",
        ),
        ({**OWN, "speculative_ngram_max_match_window_size": 5}, "are for --speculative-algorithm NGRAM alone"),
        ({"speculative_ngram_min_match_window_size": 2}, "needs --speculative-algorithm"),
        ({**TREE, **WINDOWS}, "trees need windows of 64 tokens or more, this model's have 40; leave it out"),
    ],
)
def test_impossible_values_are_refused_with_the_remedy(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        configure(**flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "not a list or tensor of token ids that torch.save has written"),
        ([[1, 2], [3, 4]], r"has \[2, 2\] torch.int64 in place of a list of token ids"),
        ([0.5, 1.5], "in place of a list of token ids"),
        ([], "in place of a list of token ids"),
        ([5, 1024], "names token 1024, the vocabulary has 1024; use the file that was made for this model"),
        ([5, -1], "names token -1"),
    ],
)
def test_a_token_map_that_does_not_fit_is_refused(tmp_path: Path, content: object, message: str) -> None:
    file = tmp_path / "map.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ConfigError, match=message) as caught:
        read_token_map(str(file), 1024)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("written", [[7, 3, 3, 1023], torch.tensor([1023, 7, 3], dtype=torch.int32)])
def test_a_token_map_has_each_token_once(tmp_path: Path, written: object) -> None:
    torch.save(written, tmp_path / "map.pt")
    assert read_token_map(str(tmp_path / "map.pt"), 1024) == [3, 7, 1023]


def test_a_simulated_acceptance_may_be_as_long_as_the_step() -> None:
    config = configure(**DUMMY, speculative_simulate_acceptance=4.0).speculative
    assert config is not None and config.simulated_accept_length == 4.0 and config.num_steps == 3


def test_a_draft_that_no_folder_of_the_model_holds_must_be_named() -> None:
    with pytest.raises(ConfigError, match="needs a draft model: give --speculative-draft-model-path"):
        configure(speculative_algorithm="EAGLE")


def test_attention_that_cannot_verify_is_refused_or_replaced() -> None:
    """FlashInfer and FA3 plan on the host, from lengths that it learns a step late."""
    model = configure().model

    def decode_backend(**flags: str) -> str:
        return attention_backends(ServerArgs(model_path="demo", **flags), "cuda", model)[1]  # type: ignore[arg-type]

    assert decode_backend() == "auto"
    assert decode_backend(**OWN) == "triton"
    assert decode_backend(**OWN, attention_backend="torch") == "torch"
    prefill = {"prefill_attention_backend": "flashinfer"}
    assert decode_backend(**OWN, **prefill) == "triton"
    for flag in ("attention_backend", "decode_attention_backend"):
        with pytest.raises(ConfigError, match="give --decode-attention-backend triton"):
            decode_backend(**OWN, **{flag: "flashinfer"})
    odd = dataclasses.replace(model, head_dim=24)
    assert attention_backends(ServerArgs(model_path="demo", **OWN), "cuda", odd)[1] == "torch"  # type: ignore[arg-type]


def test_sums_in_a_fixed_order_take_our_own_attention() -> None:
    """What cannot have one is refused on a GPU; a CPU has one way only."""
    model = configure().model

    def backends(device: str = "cuda", **flags: object) -> tuple[str, str]:
        args = ServerArgs(model_path="demo", enable_deterministic_inference=True, **flags)  # type: ignore[arg-type]
        return attention_backends(args, device, model)

    assert backends() == backends(attention_backend="triton") == backends(**OWN) == ("triton", "triton")
    assert backends("cpu") == ("torch", "torch")
    for name in ("flashinfer", "fa3", "torch"):
        with pytest.raises(ConfigError, match=f"--prefill-attention-backend {name}: .* use triton"):
            backends(prefill_attention_backend=name)


def test_the_drafts_attention_runs_where_it_can() -> None:
    config = configure(**OWN, speculative_draft_attention_backend="torch").speculative
    assert config is not None and config.draft_attention_backend == "torch"
    with pytest.raises(ConfigError, match="--speculative-draft-attention-backend triton: needs a CUDA GPU"):
        configure(**OWN, speculative_draft_attention_backend="triton")
    with pytest.raises(ConfigError, match="needs --speculative-algorithm"):
        configure(speculative_draft_attention_backend="torch")


def test_layers_of_one_branch_have_no_inputs_to_draft_from() -> None:
    mixers = RecurrentConfig(layers=frozenset({0}), mlp_layers=frozenset({1}))
    target = dataclasses.replace(ModelConfig.from_dir(demo_model_path()), recurrent=mixers)
    with pytest.raises(ConfigError, match="EAGLE3: not supported for .* use STANDALONE"):
        read_draft_config(SpeculativeAlgorithm.EAGLE3, None, target)


@pytest.mark.parametrize("algorithm", ["EAGLE3"])
def test_the_demo_model_brings_its_drafts(algorithm: str) -> None:
    config = configure(speculative_algorithm=algorithm).speculative
    assert config is not None
    assert Path(config.draft.model.model_path) == Path(demo_model_path()).resolve() / algorithm.lower()


@pytest.mark.parametrize(
    ("flags", "num_draft_tokens", "num_slots"),
    [
        ({}, None, 4),
        ({"speculative_eagle_topk": 2}, 8, 8),
        ({"speculative_eagle_topk": 2, "speculative_num_steps": 9}, 10, 17),
        ({"speculative_eagle_topk": 2, "speculative_num_steps": 1}, 3, 3),
        ({"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 30}, 30, 30),
    ],
)
def test_trees_have_a_size_unless_one_is_given(
    flags: dict[str, object], num_draft_tokens: int | None, num_slots: int
) -> None:
    config = configure(**OWN, **flags)
    assert config.speculative is not None
    assert config.speculative.num_draft_tokens == num_draft_tokens
    assert config.speculative.largest.num_slots == num_slots
    shown = config.public_dict()
    assert shown["speculative_num_draft_tokens"] == (num_draft_tokens or 4)


def test_adaptive_depths_are_none_one_and_all() -> None:
    for num_steps, depths in ((1, (0, 1)), (2, (0, 1, 2)), (5, (0, 1, 5))):
        flags: dict[str, object] = {**OWN, "speculative_num_steps": num_steps}
        fixed, adaptive = configure(**flags), configure(**flags, speculative_adaptive=True)
        assert fixed.speculative is not None and fixed.speculative.depths == (num_steps,)
        assert adaptive.speculative is not None and adaptive.speculative.depths == depths
        assert [config.public_dict()["speculative_adaptive"] for config in (fixed, adaptive)] == [False, True]
    shapes = configure(**TREE, speculative_adaptive=True).speculative.shapes  # type: ignore[union-attr]
    assert shapes == {0: StepShape(), 1: StepShape(1, 3, 3), 3: StepShape(3, 8, 8)}


def test_layers_of_their_own_propose_chains_of_as_many_steps(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    add_mtp(tmp_path, 2)

    def configure_layers(**flags: object) -> EngineConfig:
        own: dict[str, object] = {"speculative_algorithm": "NEXTN", "context_length": 64} | flags
        return resolve(ServerArgs(model_path=str(tmp_path), device="cpu", **own))  # type: ignore[arg-type]

    config = configure_layers().speculative
    assert config is not None and config.num_steps == 2
    with pytest.raises(ConfigError, match="2 layers that predict further tokens, one for each step; give 2 at most"):
        configure_layers(speculative_num_steps=3)
    with pytest.raises(ConfigError, match="layers that each run one step propose chains, leave it out"):
        configure_layers(speculative_eagle_topk=2)
    with pytest.raises(ConfigError, match="prefill step of 3 tokens is too short .* give at least 4 as --chunked"):
        configure_layers(chunked_prefill_size=3, page_size=1)
    with pytest.raises(ConfigError, match="prefill step of 3 tokens is too short"):
        configure_layers(max_prefill_tokens=3, page_size=1)
    configure_layers(chunked_prefill_size=4, page_size=1)


@pytest.mark.parametrize(
    ("words", "window", "num_steps", "adapts"),
    [
        ("", (1, 12), 7, True),
        ("--speculative-num-draft-tokens 16 --no-speculative-adaptive", (1, 12), 15, False),
        ("--prompt-lookup-min 2 --prompt-lookup-max 4 --speculative-num-steps 5", (2, 4), 5, True),
        ("--ngram-prompt-lookup-max 3", (1, 3), 7, True),
        ("--speculative-ngram-min-match-window-size 20", (20, 20), 7, True),
    ],
)
def test_drafts_without_a_model(words: str, window: tuple[int, int], num_steps: int, adapts: bool) -> None:
    given = f"--model-path demo --device cpu --speculative-algorithm NGRAM {words}"
    config = resolve(parse_args(given.split()))
    assert config.speculative is not None and config.draft is None and config.looks_up_drafts
    found = config.speculative
    assert (found.match_window, found.num_steps, found.is_adaptive, found.topk) == (window, num_steps, adapts, 1)
    assert found.depths == ((0, 1, num_steps) if adapts else (num_steps,))
    plain = configure()
    assert config.kv_layout == plain.kv_layout and model_id(config) == model_id(plain), "pages are the model's alone"
    told = config.public_dict()
    assert told["speculative_ngram_min_match_window_size"] == window[0]
    assert told["speculative_ngram_max_match_window_size"] == window[1]
    assert told["speculative_num_draft_tokens"] == num_steps + 1
