"""Checks that the nodes of one server on several hosts (--nnodes) have the same settings, and copies some from node
0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from fenceline.config.engine_config import EngineConfig

# Settings that may differ between nodes: paths, and settings that concern one host only.
_OWN = ("host", "port", "node_rank", "random_seed", "api_key", "admin_api_key", "hicache_storage_size")
_OWN_ENDINGS = ("_path", "_dir")


def described(config: EngineConfig) -> bytes:
    """The part of a rank's configuration that is compared with that of the other ranks, as JSON."""
    flags = config.public_dict()
    model, hicache = flags["model"], flags["hicache"]
    assert isinstance(model, dict), "the model's configuration is an object"
    flags["model"] = {name: value for name, value in model.items() if not _is_own(name)}
    if isinstance(hicache, dict):
        hicache.pop("storage")  # it depends on the host's file system; the flags for it are compared
    shared = {name: value for name, value in flags.items() if not _is_own(name) and not name.startswith("log_")}
    return json.dumps([config.server_args.node_rank, config.random_seed, shared]).encode()


def agreed(config: EngineConfig, all_described: Sequence[bytes]) -> EngineConfig:
    """``config`` with the values that node 0 has drawn. ``all_described``: the results of ``described`` of all ranks,
    in their order. Raises ``ValueError``, the same on all ranks, which names the first setting in which a node differs
    from node 0."""
    _, seed, first = json.loads(all_described[0])
    for data in all_described[1:]:
        node, _, other = json.loads(data)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"node {node} and node 0 differ in {name} ({other.get(name)} and {first.get(name)}): start all"
                    " nodes with the same flags, model and version"
                )
    return dataclasses.replace(config, random_seed=seed)


def _is_own(name: str) -> bool:
    return name in _OWN or name.endswith(_OWN_ENDINGS)
