"""From flags to a storage tier: which servers share pages, what is refused at the start."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from page_pools import Shape, make_pools

from fenceline.config.draft_config import DraftConfig, SpeculativeAlgorithm, SpeculativeConfig
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import MemLayout, parse_args
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.page_hash import model_id, page_fingerprint
from fenceline.mem_cache.storage.controller import make_storage
from fenceline.memory_order import open_device

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
# safetensors files without tensors: the length of the header, and the header
EMPTY = (2).to_bytes(8, "little") + b"{}"
LARGER = (4).to_bytes(8, "little") + b"{}  "
FILE = "--device cpu --enable-hierarchical-cache --hicache-storage-backend file"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON))
    for number in (1, 2):
        weights = directory / f"model-0000{number}-of-00002.safetensors"
        weights.write_bytes(EMPTY)
        os.utime(weights, ns=(1, 1))
    return directory


def configured(model_dir: Path, flags: str) -> EngineConfig:
    where = model_dir.parent / "pages"
    words = shlex.split(f"--model-path {model_dir} {flags} --hicache-storage-dir {where}")
    return resolve(parse_args(words), cuda_probe=lambda: False)


def host_pool(layout: MemLayout = "page_first", page_size: int = 4) -> HostPool:
    return make_pools(open_device("cpu"), layout, Shape(num_layers=2, page_size=page_size, heads=(1, 4)))[1]


def test_a_running_tier_from_flags(model_dir: Path) -> None:
    pool = host_pool()
    made = make_storage(pool.device, pool, configured(model_dir, FILE + " --hicache-storage-prefetch-policy timeout"))
    assert made is not None
    made.controller.close()
    fingerprint = page_fingerprint(configured(model_dir, FILE), pool.layout)
    assert made.root_key("") == fingerprint.root_key("")
    written = list((model_dir.parent / "pages").glob("*/fingerprint.json"))
    assert [json.loads(path.read_text())["model_id"] for path in written] == [fingerprint.model_id]
    assert fingerprint.model_id.startswith(str(model_dir))
    assert fingerprint.page_nbytes == pool.page_nbytes and "bfloat16" in fingerprint.layout


def test_no_tier_where_none_is_asked_for(model_dir: Path) -> None:
    pool = host_pool()
    words = shlex.split(f"--model-path {model_dir} --device cpu")
    for more in ([], ["--enable-hierarchical-cache"]):
        config = resolve(parse_args([*words, *more]), cuda_probe=lambda: False)
        assert make_storage(pool.device, pool, config) is None


def test_servers_of_both_host_layouts_share_pages(model_dir: Path) -> None:
    config = configured(model_dir, FILE)
    pools = host_pool("page_first"), host_pool("layer_first"), host_pool(page_size=8)
    fingerprints = [page_fingerprint(config, pool.layout) for pool in pools]
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0] != fingerprints[2]


def test_what_is_another_model(model_dir: Path) -> None:
    """Each change by itself; what does not touch the KV changes nothing."""
    seen = [model_id(configured(model_dir, FILE))]
    assert seen == [model_id(configured(model_dir, FILE + " --port 4000 --max-running-requests 3"))]
    for flags in (
        "--dtype float16",
        "--weight-version 2",
        "--context-length 1024",
        "--load-format dummy",
        "--load-format dummy --random-seed 8",
        "--json-model-override-args '{\"rope_theta\": 500000.0}'",
    ):
        seen.append(model_id(configured(model_dir, f"{FILE} {flags}")))
    weights = model_dir / "model-00001-of-00002.safetensors"
    os.utime(weights, ns=(1, 2))
    seen.append(model_id(configured(model_dir, FILE)))
    weights.write_bytes(LARGER)
    os.utime(weights, ns=(1, 2))
    seen.append(model_id(configured(model_dir, FILE)))
    weights.rename(model_dir / "model-00003-of-00002.safetensors")
    seen.append(model_id(configured(model_dir, FILE)))
    (model_dir / "config.json").write_text(json.dumps(CONFIG_JSON | {"rms_norm_eps": 1e-5}))
    seen.append(model_id(configured(model_dir, FILE)))
    assert len(set(seen)) == len(seen)
    link = model_dir.parent / "link"
    link.symlink_to(model_dir)
    assert model_id(configured(link, FILE)) == seen[-1], "a link to a model is that model"


def test_another_draft_is_another_model(model_dir: Path) -> None:
    """The draft's layers are in the same pages: their bytes depend on the draft too, whatever makes it another one."""
    plain = configured(model_dir, FILE)
    folders = model_dir.parent / "draft", model_dir.parent / "copy"
    for folder in folders:
        shutil.copytree(model_dir, folder)
    model = replace(plain.model, model_path=str(folders[0]))
    eagle = DraftConfig(algorithm=SpeculativeAlgorithm.EAGLE3, model=model, aux_layers=(0, 1, 2))
    drafts = [
        None,
        eagle,
        replace(eagle, algorithm=SpeculativeAlgorithm.EAGLE),
        replace(eagle, aux_layers=(0, 1, 3)),
        replace(eagle, model=replace(model, model_path=str(folders[1]))),
        replace(eagle, model=replace(model, rms_norm_eps=1e-4)),
    ]
    layout = host_pool().layout

    def root_key(draft: DraftConfig | None) -> bytes:
        speculative = None if draft is None else SpeculativeConfig(draft=draft, num_steps=2)
        return page_fingerprint(replace(plain, speculative=speculative), layout).root_key()

    seen = [root_key(draft) for draft in drafts]
    os.utime(folders[0] / "model-00001-of-00002.safetensors", ns=(1, 2))
    seen.append(root_key(eagle))
    assert len(set(seen)) == len(seen)


def test_a_storage_without_room_for_a_page_is_refused(model_dir: Path) -> None:
    pool = host_pool()
    config = configured(model_dir, FILE + " --hicache-storage-size 0.0000001")
    with pytest.raises(ValueError, match=r"--hicache-storage-size of 1e-07 GB holds not even one page .* at least"):
        make_storage(pool.device, pool, config)


def test_a_directory_that_has_become_unusable_is_refused(model_dir: Path) -> None:
    pool = host_pool()
    config = configured(model_dir, FILE)
    where = model_dir.parent / "pages"
    where.rmdir()
    where.write_text("a file")
    with pytest.raises(ValueError, match=f"--hicache-storage-dir: cannot use .*{where}.*name one") as caught:
        make_storage(pool.device, pool, config)
    assert "\n" not in str(caught.value)
