"""A model with recurrent layers in the whole engine, on the CPU: tokens are those of a reference, and the same bits
however requests are cut, batched, cached and retracted."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
import xgrammar
from model_parity import save_checkpoint
from safetensors.torch import load_file, save_file
from sala_reference import save_sala
from scheduler_driver import Driver, answers, make_model_driver, request

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    LoadGrammarReq,
    PauseGenerationReq,
    TickReq,
    TokenizedGenerateReq,
    UpdateWeightsReq,
)
from fenceline.model_executor import parts

_TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "schedule_conservativeness": 0.01}
_LENGTHS = (50, 64, 115, 150)  # states are made at multiples of 64 tokens, some of them while the request decodes


_ONE_HEAD = (
    '{"linear_num_key_heads": 1, "lightning_nh": 1, "lightning_nkv": 1, "n_groups": 1}'  # of the recurrent layers
)


_MODELS = ("qwen3-next", "minicpm-sala", "nemotron-h-moe")


_saved: dict[str, tuple[Path, torch.nn.Module]] = {}  # once each, in whatever order tests ask for them


@pytest.fixture(params=_MODELS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    if (name := request.param) not in _saved:
        directory = tmp_path_factory.mktemp("hybrid")
        _saved[name] = directory, save_sala(directory) if name == "minicpm-sala" else save_checkpoint(name, directory)
    return _saved[name]


def _driver(directory: Path, **flags: object) -> Driver:
    return make_model_driver(model_path=str(directory), enable_deterministic_inference=True, **flags)


def _prompt(first: int, num_tokens: int) -> list[int]:
    return [2 + (first * 7 + number * number) % 90 for number in range(num_tokens)]


def _request(rid: str, prompt: list[int], num_new: int, **others: object) -> TokenizedGenerateReq:
    return request(rid, prompt, temperature=0.0, max_new_tokens=num_new, ignore_eos=True, return_logprob=True, **others)


def _reqs(name: str = "") -> list[TokenizedGenerateReq]:
    return [_request(f"{name}{length}", _prompt(length, length), 20) for length in _LENGTHS]


_alone: dict[Path, tuple[list[list[int]], list[list[float]]]] = {}


@pytest.fixture
def alone(checkpoint: tuple[Path, torch.nn.Module]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and logprobs of each request alone, whole, without a cache."""
    if (directory := checkpoint[0]) not in _alone:
        _alone[directory] = _told(_driver(directory, disable_radix_cache=True), _reqs(), one_by_one=True)
    return _alone[directory]


def _told(
    driver: Driver, reqs: list[TokenizedGenerateReq], one_by_one: bool = False
) -> tuple[list[list[int]], list[list[float]]]:
    groups = [[req] for req in reqs] if one_by_one else [reqs]
    tokens = [told for group in groups for told in answers(driver, group)]
    return tokens, [driver.output_logprobs[req.rid] for req in reqs]


@torch.inference_mode()
def test_tokens_are_those_of_the_reference(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]]
) -> None:
    _, reference = checkpoint
    for req, output in zip(_reqs(), alone[0], strict=True):
        tokens = [*req.input_ids, *output]
        logits = reference(torch.tensor([tokens[:-1]])).logits[0, len(req.input_ids) - 1 :]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert bool((best - chosen < 1e-3).all())


def _check_company(directory: Path, alone: tuple[list[list[int]], list[list[float]]], flags: dict[str, object]) -> None:
    driver = _driver(directory, **flags)
    for name in ("first", "again"):
        assert _told(driver, _reqs(name)) == alone
    assert bool(driver.scheduler.stats.num_mixed_steps) == ("enable_mixed_chunk" in flags)
    if "schedule_conservativeness" in flags:
        assert driver.scheduler.stats.num_retractions > 0
    if "enable_hierarchical_cache" in flags:
        assert driver.scheduler.memory.cached_tokens["host"] > 0
    if "piecewise_cuda_graph_tokens" in flags:
        stats = driver.worker.prefill_graphs.stats  # type: ignore[union-attr]
        assert stats.replays == stats.eligible_steps > 3 and all(stats.replays_by_size.values())


_MIXED = {"chunked_prefill_size": 48, "enable_mixed_chunk": True}
_KERNELS = {"max_total_tokens": 464, "max_mamba_cache_size": 9, "hicache_io_backend": "kernel", **_TIERS}
_GRAPHS = {
    "chunked_prefill_size": 96,
    "piecewise_cuda_graph_tokens": (92, 96),
    "cuda_graph_bs": [2, 8],
    "debug_cuda_graph": True,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpoint", "flags"),
    [
        *(("qwen3-next", flags) for flags in (_MIXED, _KERNELS, _GRAPHS)),
        ("minicpm-sala", _GRAPHS),
        ("nemotron-h-moe", _KERNELS),
    ],
    indirect=["checkpoint"],
)
def test_company_and_cuts_change_no_bit(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]], flags: dict[str, object]
) -> None:
    _check_company(checkpoint[0], alone, flags)


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", _MODELS[:1], indirect=True)
@pytest.mark.parametrize(
    "flags",
    [
        {"max_total_tokens": 464, "schedule_conservativeness": 0.01, "max_mamba_cache_size": 9},
        {"disable_overlap_schedule": True, "page_size": 64},
        {"max_total_tokens": 464, "hicache_write_policy": "write_back", "retract_policy": "offload", **_TIERS},
    ],
)
def test_nor_does_the_rest_of_the_engine(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]], flags: dict[str, object]
) -> None:
    """Which differs from one model to the next in nothing that these flags reach."""
    _check_company(checkpoint[0], alone, flags)


@pytest.mark.parametrize("checkpoint", _MODELS[:1], indirect=True)
def test_a_conversation_goes_on_from_its_answers_state(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]]
) -> None:
    driver = _driver(checkpoint[0])
    first = _reqs("first")[2]
    assert answers(driver, [first]) == [alone[0][2]]
    tokens = [*first.input_ids, *alone[0][2], 5, 6, 7]
    second = _request("second", tokens, 3)
    told = _told(driver, [second])
    last = driver.answers["second"].last
    assert last is not None and last.cached_tokens == 128
    fresh = _driver(checkpoint[0], disable_radix_cache=True)
    assert told == _told(fresh, [second])


_LONG = {"json_model_override_args": '{"max_position_embeddings": 512}'}  # storage is searched for 256 tokens


def _with_files(directory: Path, storage: Path) -> Driver:
    tiers = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
    return _driver(directory, hicache_storage_dir=str(storage), **_TIERS, **tiers, **_LONG)


def _from_files(driver: Driver, reqs: list[TokenizedGenerateReq]) -> tuple[object, int]:
    """What is answered one by one, and how many tokens came from files; the driver ends."""
    told = _told(driver, reqs, one_by_one=True)
    while driver.scheduler.memory.num_outstanding:
        driver.step()
    driver.scheduler.memory.check_memory(every_page=True)
    driver.scheduler.close()
    return told, driver.scheduler.memory.cached_tokens["storage"]


@pytest.mark.parametrize("checkpoint", _MODELS[:1], indirect=True)
def test_the_next_server_finds_prefix_and_state_in_files(
    checkpoint: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    """But no pages without their state: of a prompt that parts before it, or where the state's file is damaged."""
    directory, prompt = checkpoint[0], _prompt(3, 420)
    reqs = [_request("whole", prompt, 4), _request("parts", [*prompt[:380], 5, 5], 4)]
    right = _told(_driver(directory, disable_radix_cache=True, **_LONG), reqs, one_by_one=True)
    assert _from_files(_with_files(directory, tmp_path), reqs[:1])[1] == 0
    of_pages = [file for file in tmp_path.rglob("*.page") if file.stat().st_mtime_ns]
    assert _from_files(_with_files(directory, tmp_path), reqs[1:])[1] == 0
    assert _from_files(_with_files(directory, tmp_path), reqs) == (right, 384)
    folders = {file.parents[1] for file in of_pages}
    states = min(folders, key=lambda folder: len([*folder.rglob("*.page")]))
    for file in states.rglob("*.page"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert _from_files(_with_files(directory, tmp_path), reqs) == (right, 0)


@pytest.mark.parametrize("checkpoint", _MODELS[:1], indirect=True)
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            {"tp_size": 2, "load_format": "dummy", "json_model_override_args": _ONE_HEAD},
            "--tp-size 2: .* 1 key heads or channels of recurrent layers .* use 1$",
        ),
        ({"max_mamba_cache_size": 3}, "--max-mamba-cache-size 3: each of 8 running requests has a state; give"),
        ({"mamba_full_memory_ratio": 0.0}, "--mamba-full-memory-ratio 0: must be above 0"),
        ({"page_size": 128}, "--page-size 128: .* has states every 64 tokens, .* use --page-size 16, 32 or 64"),
    ],
)
def test_what_states_do_not_allow_is_refused_with_a_remedy(
    checkpoint: tuple[Path, torch.nn.Module], flags: dict[str, object], reason: str
) -> None:
    sizes = {"max_running_requests": 8, "page_size": 16} | flags
    args = ServerArgs(model_path=str(checkpoint[0]), device="cpu", **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        resolve(args)


@pytest.mark.parametrize(("asked", "captured"), [((2, 8), (2, 3)), ((1, 2), (1, 2)), ((3, 4), (3,))])
def test_graphs_are_captured_for_requests_whose_states_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[int, ...], captured: tuple[int, ...]
) -> None:
    """How many that is, is known when the weights have been loaded: too late to refuse a size."""
    save_checkpoint("lfm2", tmp_path)
    monkeypatch.setattr(parts, "most_running", lambda *_: 3)
    config = make_model_driver(model_path=str(tmp_path), cuda_graph_bs=asked).worker.parts.config
    assert (config.max_running_requests, config.cuda_graph_bs) == (3, captured)


def test_models_without_states_have_no_use_for_their_number() -> None:
    with pytest.raises(ConfigError, match=r"--max-mamba-cache-size 9: .* has no states; leave it out"):
        make_model_driver(max_mamba_cache_size=9)


def _grammar(driver: Driver) -> LoadGrammarReq:
    """The grammar 1: only tokens from 10 to 19 have texts, the letters from a to j."""
    vocab_size, eos = driver.config.model.vocab_size, driver.config.model.eos_token_ids
    pieces = [b"%c" % (87 + token) if 10 <= token < 20 else b"" for token in range(vocab_size)]
    vocabulary = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos))
    data = compile_grammar(vocabulary, GrammarSpec("regex", "[a-j]{60}"), None)
    return LoadGrammarReq(id="g", grammar=1, data=data, vocabulary=vocabulary.serialize_json().encode())


def _with_all_features(name: str) -> list[TokenizedGenerateReq]:
    """A greedy one, samples with penalties, one with a grammar, and one whose prompt is scored."""
    sampled = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "min_new_tokens": 12}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {7: 2.0}}
    told = {"return_logprob": True, "ignore_eos": True, "max_new_tokens": 16}
    prompts = [_prompt(5, length) for length in (60, 63, 110, 70)]
    return [
        request(f"{name} greedy", prompts[0], temperature=0.0, **told),
        request(f"{name} sampled", prompts[1], seed=3, **sampled, **penalties, **told),
        msgspec.structs.replace(request(f"{name} grammar", prompts[2], seed=4, **sampled, **told), grammar=1),
        request(f"{name} scored", prompts[3], logprob_start_len=2, top_logprobs_num=2, temperature=0.0, **told),
    ]


def _all_told(driver: Driver, name: str) -> list[object]:
    """What has been answered to ``_with_all_features``."""
    found: list[object] = []
    for rid in [req.rid for req in _with_all_features(name)]:
        scores = driver.first_logprobs.get(rid)
        prompt = None if scores is None else (scores.token_ids, scores.logprobs, list(scores.top_logprobs))
        found.append((driver.answers[rid].output_ids, driver.output_logprobs[rid], prompt))
    return found


def _ask_one_by_one(directory: Path) -> list[object]:
    driver = _driver(directory, disable_radix_cache=True)
    driver.send(_grammar(driver))
    for req in _with_all_features("alone"):
        answers(driver, [req])
    return _all_told(driver, "alone")


@pytest.mark.parametrize("checkpoint", _MODELS[:1], indirect=True)
def test_all_that_requests_may_ask_for(checkpoint: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """Sampling, grammars, logprobs, salts, aborts, pauses, priorities, time-outs and new weights: the bits of requests
    alone, whatever states are found, kept and lost meanwhile."""
    flags = {"max_total_tokens": 320, "max_mamba_cache_size": 9, "chunked_prefill_size": 48, "num_rows": 3, **_TIERS}
    limits = {"enable_priority_scheduling": True, "req_running_timeout": 50.0}
    driver = _driver(checkpoint[0], **flags, **limits)
    expected, states = _ask_one_by_one(checkpoint[0]), driver.worker.states.snapshots  # type: ignore[union-attr]
    driver.send(_grammar(driver))

    def steps(number: int) -> None:
        for _ in range(number):
            driver.step()

    def ask(name: str) -> None:
        driver.send(*_with_all_features(name))

    def check(*names: str) -> None:
        driver.run()
        for name in names:
            assert _all_told(driver, name) == expected, name

    def cached(rid: str) -> int:
        last = driver.answers[rid].last
        assert last is not None
        return last.cached_tokens

    ask("first")
    check("first")
    # Another namespace finds nothing, and the common one all.
    salted = _request("salted", _prompt(5, 110), 2, extra_key="salt")
    answers(driver, [salted, _request("common", _prompt(5, 110), 2)])
    assert (cached("salted"), cached("common")) == (0, 64)
    # In any step, one is aborted, all pause, and a better priority takes a row.
    for number, mode in ((5, "in_place"), (9, "retract")):
        name = f"paused {number}"
        ask(name)
        driver.send(_request(f"aborted {number}", _prompt(5, 100), 40))
        steps(number)
        driver.send(AbortReq(rid=f"aborted {number}"), PauseGenerationReq(id=name, mode=mode))
        steps(2)
        urgent = _request(f"urgent {number}", _prompt(5, 60), 16, priority=100)
        driver.send(ContinueGenerationReq(id=f"on {number}"), urgent)
        check(name)
        assert driver.answers[urgent.rid].output_ids == expected[0][0]  # type: ignore[index]
    assert driver.scheduler.stats.num_retractions > 0
    # One runs out of time while it decodes; its prefix is right.
    driver.send(_request("late", _prompt(5, 60), 60))
    steps(3)
    driver.send(TickReq(now=100.0))
    steps(17)
    driver.send(TickReq(now=200.0))
    driver.run()
    late = driver.answers["late"]
    assert late.finish is not None and "--req-running-timeout" in str(late.finish.message)
    assert late.output_ids[:16] == expected[0][0]  # type: ignore[index]
    # New weights, while some run: nothing of the old states is left, on no tier.
    shutil.copy(checkpoint[0] / "config.json", tmp_path)
    tensors = {name: tensor for file in checkpoint[0].glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({name: 0.9 * tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    driver.send(_request("runs", _prompt(5, 70), 40))
    steps(6)
    driver.send(PauseGenerationReq(id="p", mode="in_place"), UpdateWeightsReq(id="w", model_path=str(tmp_path)))
    steps(2)
    assert driver.scheduler.memory.tree.num_states == states.num_leased == 0
    kept = list(driver.answers["runs"].output_ids)
    driver.send(ContinueGenerationReq(id="c"))
    driver.run()
    expected = _ask_one_by_one(tmp_path)
    ask("new")
    check("new")
    plain = _driver(tmp_path, disable_radix_cache=True)
    rest = answers(plain, [_request("rest", _prompt(5, 70) + kept, 40 - len(kept))])[0]
    assert kept and driver.answers["runs"].output_ids == kept + rest
