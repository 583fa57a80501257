"""Keys of stored pages: equal for equal prefixes of equal models, different for everything else."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.mem_cache.page_hash import KEY_NBYTES, PageFingerprint, page_keys

FINGERPRINT = PageFingerprint("model@1", "page_first", 4096, tp_rank=0, tp_size=2)
OTHERS = {
    "model_id": "model@2", "page_nbytes": 8192, "layout": "layer_first", "tp_rank": 1, "tp_size": 4,
    "draft_id": "eagle",
}  # fmt: skip
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


def test_every_field_changes_every_key() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(PageFingerprint)}
    tokens = np.arange(8)
    seen = {tuple(page_keys(FINGERPRINT.root_key(), tokens, 4))}
    places = {FINGERPRINT.directory_name()}
    for name, value in OTHERS.items():
        other = dataclasses.replace(FINGERPRINT, **{name: value})  # type: ignore[arg-type]
        seen.add(tuple(page_keys(other.root_key(), tokens, 4)))
        places.add(other.directory_name())
    assert len({key for keys in seen for key in keys}) == 2 * (1 + len(OTHERS))
    assert len(places) == 1 + len(OTHERS)


def test_fields_do_not_run_into_each_other() -> None:
    one = dataclasses.replace(FINGERPRINT, model_id='a", "layout": "b', layout="c")
    two = dataclasses.replace(FINGERPRINT, model_id="a", layout='b", "layout": "c')
    assert one.root_key() != two.root_key()
    assert FINGERPRINT.root_key("x") != dataclasses.replace(FINGERPRINT, draft_id="x").root_key()


def test_namespaces_are_apart() -> None:
    roots = {FINGERPRINT.root_key(extra) for extra in ("", "lora", "lora ", "0")}
    assert len(roots) == 4


def test_the_scheme_is_stable() -> None:
    """A change here orphans every directory in the field: then ``_SCHEME`` must change too."""
    link = hashlib.sha256(FINGERPRINT.root_key() + np.array([1, 2, 3, -4], dtype="<i4").tobytes()).digest()
    assert page_keys(FINGERPRINT.root_key(), np.array([1, 2, 3, -4]), 4) == [link]
    assert FINGERPRINT.directory_name() == "3be6839508de610658b9184d93c1e845"


@given(TOKENS, TOKENS, st.integers(1, 5), st.integers(0, 2))
def test_keys_agree_exactly_as_far_as_the_pages(one: list[int], two: list[int], page_size: int, lookahead: int) -> None:
    """And as far as the tokens behind them that their bytes depend on."""
    root = FINGERPRINT.root_key()
    first, second = (page_keys(root, np.array(tokens, dtype=np.int64), page_size, lookahead) for tokens in (one, two))
    assert len(first) == max(len(one) - lookahead, 0) // page_size
    assert all(len(key) == KEY_NBYTES for key in first)
    for i in range(min(len(first), len(second))):
        end = (i + 1) * page_size + lookahead
        assert (first[i] == second[i]) == (one[:end] == two[:end])


@given(TOKENS, st.integers(0, 4), st.sampled_from([np.int32, np.int64]))
def test_a_chain_can_be_continued(tokens: list[int], split: int, dtype: type) -> None:
    root, ids = FINGERPRINT.root_key(), np.array(tokens, dtype=dtype)
    whole = page_keys(root, ids, 4)
    head = whole[:split]
    rest = page_keys(head[-1] if head else root, ids[4 * len(head) :], 4)
    assert head + rest == whole


def test_layout_of_the_array_does_not_matter() -> None:
    wide = np.arange(32, dtype=np.int32)
    assert page_keys(FINGERPRINT.root_key(), wide[::2], 4) == page_keys(
        FINGERPRINT.root_key(), wide[::2].astype(">i8"), 4
    )


def test_a_token_beyond_int32_is_refused() -> None:
    with pytest.raises(AssertionError, match="int32"):
        page_keys(FINGERPRINT.root_key(), np.array([0, 1, 2, 2**32]), 4)
