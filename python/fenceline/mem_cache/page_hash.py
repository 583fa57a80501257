"""The names of pages in storage: a hash chain over everything their bytes depend on.

``key_i = sha256(key_{i-1} | tokens of page i)`` and ``key_{-1} = sha256(fingerprint | extra_key)``: a key names the
whole prefix that ends with its page, and the model, format and shard that computed it. Where a page's bytes depend on
tokens behind it (``RadixCache``: lookahead), these follow the page's own. Both parts of a link have a fixed length, so
different prefixes cannot run into the same text. Where a page has tokens of images, their digests follow, and the
tokens say how many.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenceline.config.engine_config import EngineConfig
from fenceline.config.kv_layout import KVLayout
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import weight_files
from fenceline.mem_cache.image_keys import ImageKeys

PageKey = bytes
KEY_NBYTES = 32

# Part of every key. Change it if the meaning of keys or of pages' bytes changes; then old pages are not found again.
_SCHEME = b"fenceline page 2\0"
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class PageFingerprint:
    """What two servers must have in common to read each other's pages.

    ``model_id`` must change with the weights (path and revision, better a digest of the files), and with those of the
    draft model, whose layers are in the page too. ``draft_id`` is empty in the server, whose :func:`model_id` covers
    the draft; it remains because it is a part of every key. ``layout`` says what the bytes of a page are
    (``KVLayout.describe``), ``page_nbytes`` how many there are: one page, all layers, of this rank. How the host lays
    pages out in its memory is not part of it: the bytes of a page are the same.
    """

    model_id: str
    layout: str
    page_nbytes: int
    tp_rank: int = 0
    tp_size: int = 1
    draft_id: str = ""

    def __post_init__(self) -> None:
        assert self.page_nbytes >= 1, f"page_nbytes {self.page_nbytes}"
        assert 0 <= self.tp_rank < self.tp_size, f"rank {self.tp_rank} of {self.tp_size}"

    def describe(self) -> str:
        """All fields as one line of JSON, the same for equal fingerprints."""
        return json.dumps(asdict(self), sort_keys=True)

    def directory_name(self) -> str:
        """32 hex digits for the place where pages of this fingerprint lie."""
        return self.root_key().hex()[:32]

    def root_key(self, extra_key: str = "") -> PageKey:
        """The parent of a first page. ``extra_key`` names an isolated namespace, as in the radix tree."""
        # As JSON, so that different fields never make the same text.
        text = json.dumps([self.describe(), extra_key])
        return hashlib.sha256(_SCHEME + text.encode()).digest()


class PageRoots:
    """The parents of first pages (``PageFingerprint.root_key``). They change when the weights are replaced, so that
    pages which other weights have computed are not found again."""

    def __init__(self, fingerprint: PageFingerprint) -> None:
        self._fingerprint = fingerprint

    def __call__(self, extra_key: str) -> PageKey:
        return self._fingerprint.root_key(extra_key)

    def weights_replaced(self, model_id: str) -> None:
        """Use the keys of the new weights' ``model_id`` from now on."""
        self._fingerprint = replace(self._fingerprint, model_id=model_id)


def page_keys(
    parent: PageKey,
    token_ids: NDArray[np.integer[Any]],
    page_size: int,
    lookahead: int = 0,
    images: ImageKeys | None = None,
) -> list[PageKey]:
    """The keys of the whole pages of ``token_ids`` [n] behind which ``lookahead`` tokens are known; any integer dtype
    with values of int32; the tail is ignored. ``parent``: the key of the page before them, or
    ``PageFingerprint.root_key``. ``images`` knows the images for which numbers below zero stand; the keys end
    before a page with one that it has forgotten. About 0.5 us a page."""
    assert len(parent) == KEY_NBYTES, f"a key has {KEY_NBYTES} bytes, this one {len(parent)}"
    assert token_ids.ndim == 1, f"token_ids must be a vector, got {token_ids.ndim} dimensions"
    num_pages = max(len(token_ids) - lookahead, 0) // page_size
    if token_ids.size and token_ids.dtype != np.int32:
        fits = _INT32.min <= int(token_ids.min()) and int(token_ids.max()) <= _INT32.max
        assert fits, "a token id that does not fit int32 would share its key with another"
    keys: list[PageKey] = []
    if images is not None and token_ids.size and int(token_ids.min()) < 0:
        for start in range(0, num_pages * page_size, page_size):
            part = images.page_bytes(token_ids[start : start + page_size + lookahead])
            if part is None:
                break
            keys.append(parent := hashlib.sha256(parent + part).digest())
        return keys
    data = token_ids.astype("<i4").tobytes()
    for start in range(0, 4 * num_pages * page_size, 4 * page_size):
        parent = hashlib.sha256(parent + data[start : start + 4 * (page_size + lookahead)]).digest()
        keys.append(parent)
    return keys


def page_fingerprint(config: EngineConfig, layout: KVLayout, rank: int = 0) -> PageFingerprint:
    """The fingerprint of the pages that ``rank`` of a server with this configuration makes, which have ``layout``."""
    return PageFingerprint(
        model_id=model_id(config),
        layout=layout.describe(),
        page_nbytes=layout.page_nbytes,
        tp_rank=rank,
        tp_size=config.server_args.tp_size,
    )


def model_id(config: EngineConfig) -> str:
    """The model's directory and a digest of whatever else the KV of its tokens depends on: the model's configuration as
    resolved (a longer context may scale its positions), the label of the weights, and of each weight file its name,
    size and time of the last change (those of what a link points to); the seed where weights are random. The files are
    not read, because that would take as long as a start. So a copy of a model elsewhere, or a model whose files were
    touched, finds none of the old pages, and a file that was overwritten with its size and time kept is not noticed."""
    directory = Path(config.model.model_path).resolve()
    args = config.server_args
    model, weights = _model_facts(config.model, config)
    facts = [model, config.model.dtype, args.load_format, args.weight_version, weights]
    if (draft := config.draft) is not None:  # its layers are in the same pages
        facts += [
            draft.algorithm.value,
            draft.lookahead,
            draft.num_rows_behind,
            draft.aux_layers,
            draft.model.model_path,
            *_model_facts(draft.model, config),
        ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{directory} {digest[:32]}"


def _model_facts(model: ModelConfig, config: EngineConfig) -> tuple[object, object]:
    """What the KV of one model depends on: its configuration, and its weights' files or the seed that makes them."""
    described = asdict(model)
    del described["model_path"]
    if config.server_args.load_format == "dummy":
        return described, config.random_seed
    place = Path(model.model_path).resolve()
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else weight_files(place)
    return described, [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
